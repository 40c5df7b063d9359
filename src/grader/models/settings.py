"""Which models judge and write, where they are reached, and how they are asked."""

import os
from typing import Any

import msgspec

DEFAULT_CODE_MODEL = "disaggregated:qwen3-coder:30b"
DEFAULT_FEEDBACK_MODEL = "disaggregated:gpt-oss:120b"


def code_model() -> str:
    return os.environ.get("CODE_MODEL") or DEFAULT_CODE_MODEL


def feedback_model() -> str:
    return os.environ.get("FEEDBACK_MODEL") or DEFAULT_FEEDBACK_MODEL


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Stored with every grade. Without `config` and `endpoint`: the cluster file that the client finds itself."""

    code_model: str = msgspec.field(default_factory=code_model)
    feedback_model: str = msgspec.field(default_factory=feedback_model)
    config: str = ""  # a cluster file
    endpoint: str = ""  # an OpenAI-compatible URL that ends in /v1; its key is in GRADER_API_KEY
    readings: int = 1  # of the code model; verdicts that differ go to review
    seed: int = 1
    temperature: float = 0.0
    code_tokens: int = 2000  # longest answers
    feedback_tokens: int = 1200
    text_chars: int = 300  # longest text of one field of an answer
    remarks: int = 3  # most strengths, and most improvements, of a feedback
    timeout_s: float = 600.0
    in_parallel: bool = True  # both models at once

    def for_hash(self) -> dict[str, Any]:
        """What changes an answer. Where the models are reached does not."""
        places = ("config", "endpoint", "timeout_s", "in_parallel")
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name not in places}
