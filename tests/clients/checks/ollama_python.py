from common import CITY, MAX_TOKENS, MODEL, QUESTION, URL, City, joined, one_call, report, same
from ollama import Client

client = Client(host=URL)
HELLO = [{"role": "user", "content": QUESTION}]
SHORT = {"temperature": 0, "num_predict": MAX_TOKENS}
LONG = {"temperature": 0, "num_predict": 60}
TOOL = {"type": "function", "function": {"name": "save_city", "description": "Save a city", "parameters": CITY}}
# Ollama's API cannot force a call: the model follows an example.
EXAMPLE = [
    {"role": "user", "content": "Save Rome."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "save_city", "arguments": {"name": "Rome", "large": True}}}],
    },
    {"role": "user", "content": "Save Paris."},
]


def chat() -> str:
    same(client.chat(MODEL, HELLO, options=SHORT).message.content)
    same(client.generate(MODEL, QUESTION, options=SHORT).response)
    assert client.list().models
    assert "tools" in client.show(MODEL).capabilities
    client.pull(MODEL)
    return "chat, generate, list, show, pull"


def streaming() -> None:
    joined(part.message.content for part in client.chat(MODEL, HELLO, stream=True, options=SHORT))
    joined(part.response for part in client.generate(MODEL, QUESTION, stream=True, options=SHORT))


def structured() -> None:
    answer = client.chat(MODEL, HELLO, format=City.model_json_schema(), options=LONG)
    City.model_validate_json(answer.message.content)


def tools() -> None:
    calls = client.chat(MODEL, EXAMPLE, tools=[TOOL], options=LONG).message.tool_calls
    one_call((call.function.name, call.function.arguments) for call in calls)
    parts = client.chat(MODEL, EXAMPLE, tools=[TOOL], options=LONG, stream=True)
    streamed = [call for part in parts for call in part.message.tool_calls or []]
    one_call((call.function.name, call.function.arguments) for call in streamed)


report("ollama", chat=chat, streaming=streaming, structured=structured, tools=tools)
