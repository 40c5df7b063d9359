"""`disagg demo`: two node processes on this machine, one prompt, one answer, and the proof."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from disaggregated_inference.cli.progress import steps
from disaggregated_inference.cluster.local_nodes import LocalNode, StreamedAnswer, hand_over
from disaggregated_inference.engines import file_kind, require_engine
from disaggregated_inference.errors import ContextTooLong, DisaggError
from disaggregated_inference.models import ModelFiles, ModelStore


class Result(msgspec.Struct, kw_only=True):
    """What the demo measured; printed as a table or as JSON. Seconds, unless the name says otherwise."""

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
    same_files: bool  # on both sides; if not, they compute in their own ways, and tokens may differ
    equal_to_decode_engine_alone: bool | None = None

    @property
    def proven(self) -> bool:
        equal = self.equal_to_decode_engine_alone is not False or not self.same_files
        return self.prompt_tokens_recomputed == 0 and equal


def run_demo(
    prompt: str, model_name: str, max_tokens: int, prefill: str, decode: str, chunk: int, check: bool, as_json: bool
) -> bool:
    """Returns whether the hand-off was proven."""
    if not prompt.strip():
        raise DisaggError("the prompt is empty; try: disagg demo 'Why is the sky blue?'")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise DisaggError("the prompt is not valid UTF-8 text")
    for name in (prefill, decode):
        require_engine(name)
    console = Console(stderr=as_json, highlight=False)
    with steps() as progress:
        model = ModelStore().resolve(model_name, progress)
        files = [ModelStore().resolve(model_name, progress, file_kind(name)).path for name in (prefill, decode)]
    tokenizer = model.tokenizer  # loading it is not tokenizing
    tokenizer.encode_chat([{"role": "user", "content": ""}])
    started = time.perf_counter()
    tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    tokenizing = time.perf_counter() - started
    if len(tokens) + max_tokens > model.spec.context_window:
        raise ContextTooLong(len(tokens) + max_tokens, model.spec.context_window, prompt_tokens=len(tokens))
    with _nodes(files, prefill, decode, chunk, console) as (reader, writer):
        canary = _prove(reader, writer, tokens, console)
        console.print(f"\n[bold]{prefill}[/] reads {len(tokens)} tokens, [bold]{decode}[/] writes:\n")
        written, texts = hand_over(reader, writer, tokens, max_tokens)
        for text in texts:
            console.print(text, end="", markup=False, soft_wrap=True)
        console.print("\n")
        result = _result(model, prefill, decode, written, tokenizing, canary)
        if check:
            with _status(console, f"the same prompt on {decode} alone, to compare"):
                alone = writer.ask("/generate", {"tokens": tokens, "max_new_tokens": max_tokens})
                result.equal_to_decode_engine_alone = alone["tokens"] == written.tokens
    if as_json:
        print(json.dumps(msgspec.to_builtins(result), indent=2))
    else:
        _show(result, console)
    return result.proven


@contextmanager
def _nodes(
    files: list[Path], prefill: str, decode: str, chunk: int, console: Console
) -> Iterator[tuple[LocalNode, LocalNode]]:
    """Both nodes as processes of their own."""
    # Exact: other dtypes round differently in each engine. And nothing is remembered: the proof computes everything.
    shared = ("--dtype", "float32", "--prefix-memory", "0")
    reader = LocalNode("prefill", prefill, "--chunk", str(chunk), "--model", str(files[0]), *shared)
    writer = LocalNode("decode", decode, "--model", str(files[1]), *shared)
    try:
        for node in (reader, writer):
            _await(node, console)
        yield reader, writer
    finally:
        reader.stop()
        writer.stop()


def _prove(reader: LocalNode, writer: LocalNode, tokens: list[int], console: Console) -> float:
    """The first contact, which the decode node uses to check the prefill node. Returns its seconds."""
    first, texts = hand_over(reader, writer, tokens[:1], 1)
    with _status(console, "decode node: proving the prefill node with a canary prompt"):
        for _ in texts:
            pass
    seconds: float = first.metrics["canary_time"]
    console.print(
        f"decode node: has computed a canary prompt of {reader.engine} again and found it right ({seconds:.1f} s, once)"
    )
    return seconds


def _await(node: LocalNode, console: Console) -> None:
    started = time.perf_counter()
    with _status(console, f"{node.role} node: loading the model into {node.engine}"):
        port = node.ready()
    seconds = time.perf_counter() - started
    console.print(f"{node.role} node: {node.engine} on port {port}, ready after {seconds:.1f} s")


@contextmanager
def _status(console: Console, text: str) -> Iterator[None]:
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(text)
        yield


def _result(
    model: ModelFiles, prefill: str, decode: str, written: StreamedAnswer, tokenizing: float, canary: float
) -> Result:
    metrics = written.metrics
    return Result(
        model=model.name,
        prefill_engine=prefill,
        decode_engine=decode,
        answer=model.tokenizer.decode(written.tokens),
        tokenize=tokenizing,
        queue=metrics["queue_time"],
        prefill=metrics["prefill_time"],
        canary=canary,
        transfer_hidden=metrics["fetch_time"] - metrics["exposed_transfer_time"],
        transfer_exposed=metrics["exposed_transfer_time"],
        inject=metrics["inject_time"],
        first_token=written.first_token_s,
        decode=metrics["decode_time"],
        prompt_tokens=metrics["prompt_tokens"],
        completion_tokens=len(written.tokens),
        kv_bytes=metrics["kv_bytes"],
        prompt_tokens_recomputed=metrics["prompt_tokens_recomputed"],
        same_files=file_kind(prefill) == file_kind(decode),
    )


def _show(result: Result, console: Console) -> None:
    no = "[bold red]NO[/]" if result.same_files else "no: llama.cpp computes in its own way (see `disagg bench drift`)"
    verdict = {True: "yes", False: no, None: "not checked"}[result.equal_to_decode_engine_alone]
    rate = (result.completion_tokens - 1) / result.decode if result.decode else 0.0
    rows = [
        ("tokenize", f"{result.tokenize * 1e3:7.1f} ms", f"{result.prompt_tokens} tokens"),
        ("queue", f"{result.queue * 1e3:7.1f} ms", ""),
        ("prefill", f"{result.prefill * 1e3:7.1f} ms", f"{result.prompt_tokens / result.prefill:.0f} tok/s"),
        ("transfer, hidden", f"{result.transfer_hidden * 1e3:7.1f} ms", f"{result.kv_bytes / 1e6:.1f} MB of KV in all"),
        ("transfer, exposed", f"{result.transfer_exposed * 1e3:7.1f} ms", "after the logits were there"),
        ("  of both, inject", f"{result.inject * 1e3:7.1f} ms", f"into {result.decode_engine}"),
        ("first token", f"{result.first_token * 1e3:7.1f} ms", "after the request was sent"),
        ("decode", f"{result.decode * 1e3:7.1f} ms", f"{result.completion_tokens} tokens, {rate:.1f} tok/s"),
    ]
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"\nprompt tokens recomputed on the decode node: {result.prompt_tokens_recomputed}")
    console.print(f"tokens equal to {result.decode_engine} alone: {verdict}")
