from common import KEY, MAX_TOKENS, MODEL, URL
from langchain_anthropic import ChatAnthropic
from langchain_checks import report_model

settings = {"model": MODEL, "base_url": URL, "api_key": KEY, "temperature": 0, "max_retries": 0}
report_model(
    "langchain-anthropic",
    ChatAnthropic(**settings, max_tokens=MAX_TOKENS),
    ChatAnthropic(**settings, max_tokens=60),
    ("json_schema", "function_calling"),
    tool_choice="any",
)
