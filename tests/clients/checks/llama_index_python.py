from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, City, joined, one_call, report, same
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

settings = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
settings |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
short = OpenAILike(**settings, max_tokens=MAX_TOKENS)
long = OpenAILike(**settings, max_tokens=60, should_use_structured_outputs=True)
HELLO = [ChatMessage(role="user", content=QUESTION)]


def save_city(name: str, large: bool) -> str:
    return f"saved {name}"


TOOL = FunctionTool.from_defaults(save_city, description="Save a city", fn_schema=City)


def chat() -> str:
    same(short.chat(HELLO).message.content)
    same(short.complete(QUESTION).text)
    return "llama-index-llms-openai-like"


def streaming() -> None:
    joined(part.delta for part in short.stream_chat(HELLO))


def structured() -> None:
    assert isinstance(long.as_structured_llm(City).chat(HELLO).raw, City)


def tools() -> None:
    answer = long.chat_with_tools([TOOL], QUESTION, tool_required=True)
    one_call((call.tool_name, call.tool_kwargs) for call in long.get_tool_calls_from_response(answer))
    last = list(long.stream_chat_with_tools([TOOL], QUESTION, tool_required=True))[-1]
    one_call((call.tool_name, call.tool_kwargs) for call in long.get_tool_calls_from_response(last))


report("llama-index-llms-openai-like", chat=chat, streaming=streaming, structured=structured, tools=tools)
