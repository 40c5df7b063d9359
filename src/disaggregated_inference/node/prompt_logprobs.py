"""Prompt logprobs on a decode node: from its engine or a prefill node to the request's stream."""

from collections.abc import Sequence
from functools import partial

import msgspec

from disaggregated_inference.api import PromptLogprob, PromptLogprobs, TopLogprob
from disaggregated_inference.engines import Scoring, chunk_scoring
from disaggregated_inference.kv import LogprobRows
from disaggregated_inference.kv_transfer import Hello
from disaggregated_inference.node.decode_task import DecodeTask


def scored_tokens(task: DecodeTask) -> int | None:
    """Tokens of the prompt whose logprobs are known already; None: no logprobs are wanted."""
    params = task.generation.params
    return None if params.prompt_logprobs is None else params.scored_tokens


def asking_for_logprobs(hello: Hello, task: DecodeTask) -> Hello:
    if (scored := scored_tokens(task)) is None:
        return hello
    wanted = {"prompt_logprobs": task.generation.params.prompt_logprobs, "scored_tokens": scored}
    return msgspec.structs.replace(hello, **wanted)


def scoring_of(task: DecodeTask, at: int, count: int) -> Scoring | None:
    """For a chunk that this node computes."""
    alternatives, scored = task.generation.params.prompt_logprobs, scored_tokens(task)
    if alternatives is None or scored is None:
        return None
    return chunk_scoring(task.prompt or [], at, count, scored, alternatives, partial(put_rows, task))


def put_first(task: DecodeTask) -> None:
    """The first token of a prompt has no logprob."""
    if scored_tokens(task) == 0 and task.prompt:
        first = PromptLogprob(token=task.prompt[0], logprob=None)
        task.generation.put_prompt_logprobs(PromptLogprobs(start=0, tokens=(first,)))


def put_rows(task: DecodeTask, rows: LogprobRows) -> None:
    if (rows := rows.after(scored_tokens(task) or 0)).stop > rows.start:
        task.generation.put_prompt_logprobs(PromptLogprobs(start=rows.start, tokens=_tokens(task.prompt or [], rows)))


def _tokens(prompt: Sequence[int], rows: LogprobRows) -> tuple[PromptLogprob, ...]:
    columns = (prompt[rows.start : rows.stop], rows.logprobs.tolist(), rows.top_tokens, rows.top_logprobs)
    return tuple(
        PromptLogprob(token=token, logprob=logprob, top_logprobs=tuple(map(TopLogprob, top.tolist(), theirs.tolist())))
        for token, logprob, top, theirs in zip(*columns, strict=True)
    )
