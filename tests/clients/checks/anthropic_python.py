from anthropic import Anthropic
from common import CITY, KEY, MAX_TOKENS, MODEL, QUESTION, URL, City, joined, one_call, report, same

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
# The package has no `temperature` any more; the API has.
ask = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "extra_body": {"temperature": 0}}
TOOL = {"name": "save_city", "description": "Save a city", "input_schema": CITY}


def chat() -> None:
    answer = client.messages.create(**ask, max_tokens=MAX_TOKENS)
    same(answer.content[0].text)
    counted = client.messages.count_tokens(model=MODEL, messages=ask["messages"]).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert [model.id for model in client.models.list()]


def streaming() -> None:
    with client.messages.stream(**ask, max_tokens=MAX_TOKENS) as stream:
        joined(stream.text_stream)


def structured() -> None:
    parsed = client.messages.parse(**ask, max_tokens=60, output_format=City)
    assert isinstance(parsed.parsed_output, City)


def tools() -> None:
    choice = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60}
    answer = client.messages.create(**ask, **choice)
    assert answer.stop_reason == "tool_use"
    call = next(block for block in answer.content if block.type == "tool_use")
    one_call([(call.name, call.input)])
    with client.messages.stream(**ask, **choice) as stream:
        blocks = stream.get_final_message().content
    one_call((block.name, block.input) for block in blocks if block.type == "tool_use")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "saved"}]}
    again = ask | {"messages": [*ask["messages"], {"role": "assistant", "content": answer.content}, result]}
    assert client.messages.create(**again, tools=[TOOL], max_tokens=8).content


report("anthropic", chat=chat, streaming=streaming, structured=structured, tools=tools)
