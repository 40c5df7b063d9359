"""One answer, as its client saw it, and how it differs from the undisturbed one."""

from typing import Any

import msgspec

_TOLERANCE = 0.02  # of logprobs: engines round, and a moved request computes in another batch


class ChaosChoice(msgspec.Struct, kw_only=True):
    text: str = ""
    tokens: list[int] = []  # none through OpenAI's APIs
    logprobs: list[float] = []
    finish_reason: str | None = None


class ChaosAnswer(msgspec.Struct, kw_only=True):
    choices: list[ChaosChoice] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failovers: list[dict[str, Any]] = []

    def choice(self, index: int) -> ChaosChoice:
        """Made if it is not there yet."""
        while len(self.choices) <= index:
            self.choices.append(ChaosChoice())
        return self.choices[index]


def difference(expected: ChaosAnswer, got: ChaosAnswer) -> str:
    """Empty if the answer is right."""
    if len(expected.choices) != len(got.choices):
        return f"{len(got.choices)} choices instead of {len(expected.choices)}"
    for number, (right, mine) in enumerate(zip(expected.choices, got.choices, strict=True)):
        for name in ("text", "tokens", "finish_reason"):
            if (wanted := getattr(right, name)) != (found := getattr(mine, name)):
                return f"choice {number}: {name} is {found!r} instead of {wanted!r}"
        if not _are_close(right.logprobs, mine.logprobs):
            return f"choice {number}: logprobs are {mine.logprobs} instead of {right.logprobs}"
    for name in ("prompt_tokens", "completion_tokens"):
        if (wanted := getattr(expected, name)) != (found := getattr(got, name)):
            return f"{name} is {found} instead of {wanted}"
    return ""


def partial_difference(expected: ChaosAnswer, got: ChaosAnswer) -> str:
    """Of an answer that its client left: everything that came must be the beginning of the right one."""
    for number, mine in enumerate(got.choices):
        right = expected.choices[number] if number < len(expected.choices) else ChaosChoice()
        if not right.text.startswith(mine.text) or right.tokens[: len(mine.tokens)] != mine.tokens:
            return f"choice {number} begins with {mine.text!r} instead of {right.text!r}"
    return ""


def _are_close(right: list[float], mine: list[float]) -> bool:
    pairs = zip(right, mine, strict=False)
    return len(right) == len(mine) and all(abs(wanted - found) <= _TOLERANCE for wanted, found in pairs)
