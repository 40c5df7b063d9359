"""What a choice makes of given tokens, without an engine."""

from disaggregated_inference.api import DecodeMetrics, GenerationParams, TokenEvent
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.structured_output import GrammarCompiler


def written(model: ModelFiles, tokens: list[int], rules: GenerationParams) -> tuple[str, str | None]:
    """What a choice shows of these tokens, and why it ended."""
    answer = Generation(rules, DecodeMetrics(1))
    grammar = (
        GrammarCompiler(model.tokenizer, model.spec.vocabulary, model.spec.eos_tokens).start(rules.format)
        if rules.format
        else None
    )
    choice = Choice(answer, 0, [1], model.tokenizer, model.spec.eos_tokens, grammar)
    for token in tokens:
        choice.add_greedy(token)
        if choice.error:
            raise choice.error
        if choice.finished:
            break
    answer.put(None)
    pieces: list[TokenEvent] = list(answer.events())
    return "".join(piece.text for piece in pieces), choice.finish_reason
