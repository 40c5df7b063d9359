"""By OpenAI's chat and responses, and by Anthropic's messages."""

from collections.abc import Callable

from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, City, joined, report, same
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles.anthropic import AnthropicModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
MODELS: dict[str, Model] = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    # pydantic-ai knows which Claude has structured output; of others it must be told.
    "messages": AnthropicModel(
        MODEL,
        provider=AnthropicProvider(base_url=URL, api_key=KEY),
        profile=AnthropicModelProfile(supports_json_schema_output=True),
    ),
}
SHORT = {"temperature": 0, "max_tokens": MAX_TOKENS}
LONG = {"temperature": 0, "max_tokens": 60}


def each(check: Callable[[Model], None]) -> str:
    for name, model in MODELS.items():
        try:
            check(model)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return ", ".join(MODELS)


def chat_by(model: Model) -> None:
    same(Agent(model, model_settings=SHORT).run_sync(QUESTION).output)


def streaming_by(model: Model) -> None:
    stream = Agent(model, model_settings=SHORT).run_stream_sync(QUESTION)
    joined(stream.stream_text(delta=True, debounce_by=None))


def structured_by(model: Model) -> None:
    agent = Agent(model, output_type=NativeOutput(City), model_settings=LONG, retries=0)
    assert isinstance(agent.run_sync(QUESTION).output, City)


def tools_by(model: Model) -> None:
    """The answer is a call of a tool, which is forced."""
    agent = Agent(model, output_type=ToolOutput(City, name="save_city"), model_settings=LONG, retries=0)
    assert isinstance(agent.run_sync(QUESTION).output, City)
    assert isinstance(agent.run_stream_sync(QUESTION).get_output(), City)


report(
    "pydantic-ai-slim",
    chat=lambda: each(chat_by),
    streaming=lambda: each(streaming_by) and None,
    structured=lambda: each(structured_by) and None,
    tools=lambda: each(tools_by) and None,
)
