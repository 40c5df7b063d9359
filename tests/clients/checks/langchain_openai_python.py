from common import KEY, MAX_TOKENS, MODEL, URL
from langchain_checks import report_model
from langchain_openai import ChatOpenAI

settings = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
report_model(
    "langchain-openai",
    ChatOpenAI(**settings, max_tokens=MAX_TOKENS, stream_usage=True),
    ChatOpenAI(**settings, max_tokens=60),
    ("json_schema", "function_calling"),
    tool_choice="required",
)
