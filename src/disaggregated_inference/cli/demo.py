"""`disagg demo`: two node processes on this machine, one prompt, one completion, and a check of its tokens."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
from rich.console import Console
from rich.table import Table

from disaggregated_inference.cli.options import require_text
from disaggregated_inference.engines import file_kind, require_engine
from disaggregated_inference.errors import ContextTooLong
from disaggregated_inference.local_nodes import (
    ClientView,
    LocalNode,
    generate_disaggregated,
    generate_local,
    running,
)
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.progress import steps


class Result(msgspec.Struct, kw_only=True):
    """Measurements of the demo, printed as a table or JSON. Times are in seconds."""

    model: str
    prefill_engine: str
    decode_engine: str
    answer: str
    tokenize: float
    queue: float
    prefill: float
    canary: float
    transfer_hidden: float
    transfer_exposed: float
    inject: float
    first_token: float
    decode: float
    prompt_tokens: int
    completion_tokens: int
    kv_bytes: int
    prompt_tokens_recomputed: int
    same_files: bool  # both engines read the same weight files; if not, tokens may differ
    equal_to_decode_engine_alone: bool | None = None

    @property
    def passed(self) -> bool:
        equal = self.equal_to_decode_engine_alone is not False or not self.same_files
        return self.prompt_tokens_recomputed == 0 and equal


def run_demo(
    prompt: str, model_name: str, max_tokens: int, prefill: str, decode: str, chunk: int, check: bool, as_json: bool
) -> bool:
    """Returns whether the decode node reproduced the tokens of one engine alone."""
    require_text(prompt)
    for name in (prefill, decode):
        require_engine(name)
    console = Console(stderr=as_json, highlight=False)
    with steps() as progress:
        model = ModelStore().resolve(model_name, progress)
        files = [ModelStore().resolve(model_name, progress, file_kind(name)).path for name in (prefill, decode)]
    tokenizer = model.tokenizer  # load it before the clock starts
    tokenizer.encode_chat([{"role": "user", "content": ""}])
    started = time.perf_counter()
    tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    tokenize_s = time.perf_counter() - started
    if len(tokens) + max_tokens > model.spec.context_window:
        raise ContextTooLong(len(tokens) + max_tokens, model.spec.context_window, prompt_tokens=len(tokens))
    # float32, because other dtypes round differently in each engine; no prefix cache, so that all is computed.
    shared = ("--dtype", "float32", "--prefix-memory", "0")
    prefill_node = LocalNode("prefill", prefill, "--chunk", str(chunk), "--model", str(files[0]), *shared)
    decode_node = LocalNode("decode", decode, "--model", str(files[1]), *shared)
    with running([prefill_node, decode_node], partial(_await_ready, console)):
        canary = _check_peer(prefill_node, decode_node, tokens, console)
        console.print(f"\n[bold]{prefill}[/] prefills {len(tokens)} tokens, [bold]{decode}[/] decodes:\n")
        write = partial(console.print, end="", markup=False, soft_wrap=True)
        streamed = generate_disaggregated(prefill_node, decode_node, tokens, max_tokens, write)
        console.print("\n")
        result = _result(model, prefill, decode, streamed, tokenize_s, canary)
        if check:
            with _status(console, f"comparing with {decode} alone"):
                alone = generate_local(decode_node, tokens, max_tokens)
                result.equal_to_decode_engine_alone = alone.token_ids == streamed.token_ids
    if as_json:
        print(json.dumps(msgspec.to_builtins(result), indent=2))
    else:
        _show(result, console)
    return result.passed


def _check_peer(prefill_node: LocalNode, decode_node: LocalNode, tokens: list[int], console: Console) -> float:
    """The first request makes the decode node check the prefill node. Returns the check's seconds."""
    with _status(console, "decode node: checking the prefill node with a canary prompt"):
        first = generate_disaggregated(prefill_node, decode_node, tokens[:1], 1)
    seconds = first.node_metrics.canary_time
    console.print(f"decode node: peer check of {prefill_node.engine} passed ({seconds:.1f} s, only the first time)")
    return seconds


def _await_ready(console: Console, node: LocalNode) -> None:
    started = time.perf_counter()
    with _status(console, f"{node.role} node: loading the model into {node.engine}"):
        node.ready()
    seconds = time.perf_counter() - started
    console.print(f"{node.role} node: {node.engine} on port {node.url.rpartition(':')[2]}, ready after {seconds:.1f} s")


@contextmanager
def _status(console: Console, text: str) -> Iterator[None]:
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(text)
        yield


def _result(
    model: ModelFiles, prefill: str, decode: str, streamed: ClientView, tokenize_s: float, canary: float
) -> Result:
    metrics = streamed.node_metrics
    return Result(
        model=model.name,
        prefill_engine=prefill,
        decode_engine=decode,
        answer=model.tokenizer.decode(streamed.token_ids),
        tokenize=tokenize_s,
        queue=metrics.queue_time,
        prefill=metrics.prefill_time,
        canary=canary,
        transfer_hidden=max(0.0, metrics.fetch_time - metrics.exposed_transfer_time),
        transfer_exposed=metrics.exposed_transfer_time,
        inject=metrics.inject_time,
        first_token=streamed.first_token_s,
        decode=metrics.decode_time,
        prompt_tokens=metrics.prompt_tokens or 0,
        completion_tokens=streamed.tokens,
        kv_bytes=metrics.kv_bytes,
        prompt_tokens_recomputed=metrics.prompt_tokens_recomputed,
        same_files=file_kind(prefill) == file_kind(decode),
    )


def _show(result: Result, console: Console) -> None:
    no = "[bold red]NO[/]" if result.same_files else "no: llama.cpp rounds differently (see `disagg bench drift`)"
    verdict = {True: "yes", False: no, None: "not checked"}[result.equal_to_decode_engine_alone]
    rate = (result.completion_tokens - 1) / result.decode if result.decode else 0.0
    table = Table(box=None, show_header=False, pad_edge=False)

    def add(name: str, seconds: float, note: str = "") -> None:
        table.add_row(name, f"{seconds * 1e3:7.1f} ms", note)

    add("tokenize", result.tokenize, f"{result.prompt_tokens} tokens")
    add("queue", result.queue)
    add("prefill", result.prefill, f"{result.prompt_tokens / result.prefill:.0f} tok/s")
    add("transfer, hidden", result.transfer_hidden, f"{result.kv_bytes / 1e6:.1f} MB of KV in total")
    add("transfer, exposed", result.transfer_exposed, "after the prefill had finished")
    add("  inject, part of both", result.inject, f"into {result.decode_engine}")
    add("first token", result.first_token, "after the request was sent")
    add("decode", result.decode, f"{result.completion_tokens} tokens, {rate:.1f} tok/s")
    console.print(table)
    console.print(f"\nprompt tokens recomputed on the decode node: {result.prompt_tokens_recomputed}")
    console.print(f"tokens equal to {result.decode_engine} alone: {verdict}")
