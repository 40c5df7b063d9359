"""The command, with a config as in docs/CLIENTS.md, and the library for streams."""

import json
import os
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(FOLDER)

import llm  # noqa: E402  it reads LLM_USER_PATH
from common import (  # noqa: E402
    CITY,
    KEY,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    URL,
    City,
    joined,
    one_call,
    report,
    run_command,
    same,
)

FOLDER.joinpath("extra-openai-models.yaml").write_text(
    f'- {{model_id: cluster, model_name: {MODEL}, api_base: "{URL}/v1", supports_schema: true, supports_tools: true}}\n'
)
GREEDY = ("-o", "temperature", "0", "--key", KEY)
EXAMPLE = """Save Rome.
<tool_call>
{"name": "save_city", "arguments": {"name": "Rome", "large": true}}
</tool_call>"""


def run(*arguments: str) -> str:
    return run_command("llm", "-m", "cluster", *GREEDY, *arguments).removesuffix("\n")


def chat() -> None:
    same(run("-o", "max_tokens", str(MAX_TOKENS), "--no-stream", QUESTION))


def streaming() -> None:
    same(run("-o", "max_tokens", str(MAX_TOKENS), QUESTION))
    joined(llm.get_model("cluster").prompt(QUESTION, key=KEY, temperature=0, max_tokens=MAX_TOKENS, stream=True))


def structured() -> None:
    City.model_validate_json(run("-o", "max_tokens", "60", "--schema", json.dumps(CITY), QUESTION))


def tools() -> None:
    """A call cannot be forced: the system prompt has an example."""
    tool = llm.Tool(name="save_city", description="Save a city", input_schema=CITY)
    for stream in (False, True):
        options = {"tools": [tool], "key": KEY, "temperature": 0, "max_tokens": 60, "stream": stream}
        answer = llm.get_model("cluster").prompt("Save Paris.", system=EXAMPLE, **options)
        one_call((call.name, call.arguments) for call in answer.tool_calls())


report("llm", chat=chat, streaming=streaming, structured=structured, tools=tools)
