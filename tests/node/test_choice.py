"""One choice: its end and its text."""

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.models import ModelFiles
from tests.support.choice_text import written


def test_a_stop_string_completed_by_the_last_held_back_character(smollm2: ModelFiles) -> None:
    """U+FFFD looks like half of another character until the end of the text."""
    tokens = smollm2.tokenizer.encode("so \ufffd")

    def cut(stop: str, least: int = 0) -> tuple[str, str | None]:
        rules = GenerationParams(max_tokens=len(tokens), stop=(stop,), min_tokens=least)
        return written(smollm2, tokens, rules)

    assert cut("\ufffd") == ("so ", "stop")
    assert cut("o \ufffd") == ("s", "stop")
    assert cut("\ufffd.") == ("so \ufffd", "length")
    assert cut("\ufffd", least=len(tokens)) == ("so ", "stop")
    assert cut("\ufffd", least=len(tokens) + 1) == ("so \ufffd", "length"), "before min_tokens it is text"
