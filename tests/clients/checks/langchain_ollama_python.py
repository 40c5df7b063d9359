from common import MAX_TOKENS, MODEL, URL
from langchain_checks import report_model
from langchain_core.messages import AIMessage, HumanMessage
from langchain_ollama import ChatOllama

settings = {"model": MODEL, "base_url": URL, "temperature": 0}
call = {"name": "save_city", "args": {"name": "Rome", "large": True}, "id": "call_1"}
report_model(
    "langchain-ollama",
    ChatOllama(**settings, num_predict=MAX_TOKENS),
    ChatOllama(**settings, num_predict=60),
    ("json_schema",),
    (HumanMessage("Save Rome."), AIMessage("", tool_calls=[call]), HumanMessage("Save Paris.")),
)
