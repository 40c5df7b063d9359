"""When a choice is over, and what its text is then."""

from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.generation import GenerationParams
from disaggregated_inference.node.sampling import SamplingParams
from tests.node.test_routes import written


def test_a_stop_string_that_the_last_held_character_completes(smollm2: ModelFiles) -> None:
    """The character for no character looks like half of another one until nothing more can come."""
    tokens = smollm2.tokenizer.encode("so \ufffd")

    def cut(stop: str, least: int = 0) -> tuple[str, str | None]:
        rules = GenerationParams(max_tokens=len(tokens), sampling=SamplingParams(stop=(stop,), min_tokens=least))
        return written(smollm2, tokens, rules)

    assert cut("\ufffd") == ("so ", "stop")
    assert cut("o \ufffd") == ("s", "stop")
    assert cut("\ufffd.") == ("so \ufffd", "length")
    assert cut("\ufffd", least=len(tokens)) == ("so ", "stop")
    assert cut("\ufffd", least=len(tokens) + 1) == ("so \ufffd", "length"), "before min_tokens it is text"
