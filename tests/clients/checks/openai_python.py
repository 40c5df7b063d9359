from common import CITY, KEY, MAX_TOKENS, MODEL, QUESTION, URL, City, joined, one_call, report, same
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
ask = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
respond = {"model": MODEL, "input": QUESTION, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "save_city", "description": "Save a city", "parameters": CITY}}
FLAT_TOOL = {"type": "function", "name": "save_city", "description": "Save a city", "parameters": CITY}


def chat() -> str:
    answer = client.chat.completions.create(**ask, max_tokens=MAX_TOKENS)
    same(answer.choices[0].message.content)
    assert answer.usage.completion_tokens == MAX_TOKENS
    same(client.responses.create(**respond, max_output_tokens=MAX_TOKENS).output_text)
    raw = client.completions.create(model=MODEL, prompt="def fibonacci(n):", max_tokens=8, logprobs=1, temperature=0)
    assert len(raw.choices[0].logprobs.tokens) == 8
    assert MODEL in {model.id for model in client.models.list()} | {client.models.retrieve(MODEL).id}
    return "chat, responses, completions"


def streaming() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**ask, max_tokens=MAX_TOKENS, **options))
    assert chunks[-1].usage.completion_tokens == MAX_TOKENS
    joined(choice.delta.content for chunk in chunks for choice in chunk.choices)
    with client.responses.stream(**respond, max_output_tokens=MAX_TOKENS) as stream:
        joined(event.delta for event in stream if event.type == "response.output_text.delta")


def structured() -> None:
    parsed = client.chat.completions.parse(**ask, response_format=City, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, City)
    assert isinstance(client.responses.parse(**respond, text_format=City).output_parsed, City)


def tools() -> None:
    answer = client.chat.completions.create(**ask, tools=[TOOL], tool_choice="required")
    call = answer.choices[0].message.tool_calls[0]
    one_call([(call.function.name, call.function.arguments)])
    result = {"role": "tool", "tool_call_id": call.id, "content": "saved"}
    again = ask | {"messages": [*ask["messages"], answer.choices[0].message, result]}
    assert client.chat.completions.create(**again, tools=[TOOL], tool_choice="none", max_tokens=8).choices[0].message
    with client.chat.completions.stream(**ask, tools=[TOOL], tool_choice="required") as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0].function
    one_call([(streamed.name, streamed.arguments)])
    forced = client.responses.create(**respond, tools=[FLAT_TOOL], tool_choice="required").output
    one_call((item.name, item.arguments) for item in forced if item.type == "function_call")


report("openai", chat=chat, streaming=streaming, structured=structured, tools=tools)
