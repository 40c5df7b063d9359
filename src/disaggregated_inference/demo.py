"""`disagg demo`: two node processes on this machine, one prompt, one answer, and the proof."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.table import Table

from disaggregated_inference.engines import require_engine
from disaggregated_inference.errors import ContextTooLong, DisaggError
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.progress import steps


class Result(msgspec.Struct, kw_only=True):
    """What the demo measured; printed as a table or as JSON. Seconds, unless the name says otherwise."""

    model: str
    prefill_engine: str
    decode_engine: str
    answer: str
    tokenize: float
    queue: float
    prefill: float
    transfer_hidden: float
    transfer_exposed: float
    inject: float
    first_token: float
    decode: float
    prompt_tokens: int
    completion_tokens: int
    kv_bytes: int
    prompt_tokens_recomputed: int
    equal_to_decode_engine_alone: bool | None = None

    @property
    def proven(self) -> bool:
        return self.prompt_tokens_recomputed == 0 and self.equal_to_decode_engine_alone is not False


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
    tokenizer = model.tokenizer  # loading it is not tokenizing
    tokenizer.encode_chat([{"role": "user", "content": ""}])
    started = time.perf_counter()
    tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    tokenizing = time.perf_counter() - started
    if len(tokens) + max_tokens > model.spec.context_window:
        raise ContextTooLong(len(tokens) + max_tokens, model.spec.context_window)
    with _nodes(model, prefill, decode, chunk, console) as (reader, writer):
        console.print(f"\n[bold]{prefill}[/] reads {len(tokens)} tokens, [bold]{decode}[/] writes:\n")
        written, metrics, first = _ask(reader, writer, tokens, max_tokens, console)
        result = _result(model, prefill, decode, written, metrics, tokenizing, first)
        if check:
            with _status(console, f"the same prompt on {decode} alone, to compare"):
                alone = _post(writer, "/generate", {"tokens": tokens, "max_new_tokens": max_tokens})
                result.equal_to_decode_engine_alone = json.load(alone)["tokens"] == written
    if as_json:
        print(json.dumps(msgspec.to_builtins(result), indent=2))
    else:
        _show(result, console)
    return result.proven


@contextmanager
def _nodes(model: ModelFiles, prefill: str, decode: str, chunk: int, console: Console) -> Iterator[tuple[str, str]]:
    """Both nodes as processes of their own; yields their addresses."""
    shared = ("--model", str(model.path), "--dtype", "float32")  # exact: other dtypes round differently in each engine
    both = [
        _start("prefill", "--engine", prefill, "--chunk", str(chunk), *shared),
        _start("decode", "--engine", decode, *shared),
    ]
    try:
        yield _ready(both[0], "prefill node", prefill, console), _ready(both[1], "decode node", decode, console)
    finally:
        for process in both:
            process.terminate()
        for process in both:
            process.communicate()


def _start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "disaggregated_inference", "serve", *arguments, "--port", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ready(process: "subprocess.Popen[str]", what: str, engine: str, console: Console) -> str:
    started = time.perf_counter()
    with _status(console, f"{what}: loading the model into {engine}"):
        assert process.stdout
        line = process.stdout.readline()
    if not line:
        _, reason = process.communicate()
        raise DisaggError(f"the {what} did not start:\n{reason[-2000:].strip()}")
    ready = json.loads(line)
    console.print(f"{what}: {engine} on port {ready['port']}, ready after {time.perf_counter() - started:.1f} s")
    return f"http://127.0.0.1:{ready['port']}"


@contextmanager
def _status(console: Console, text: str) -> Iterator[None]:
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(text)
        yield


def _post(node: str, path: str, body: dict[str, Any]) -> IO[bytes]:
    response: IO[bytes] = urllib.request.urlopen(node + path, json.dumps(body).encode(), timeout=300)
    return response


def _ask(
    reader: str, writer: str, tokens: list[int], max_tokens: int, console: Console
) -> tuple[list[int], dict[str, Any], float]:
    """Both legs at once: the fetch begins while the prompt is still being read. Shows the answer as it comes."""
    started = time.perf_counter()
    with _post(reader, "/prefill", {"tokens": tokens, "wait": False}) as response:
        context = json.load(response)["context"]
    asked = {"context": context, "max_new_tokens": max_tokens, "stream": True}
    written: list[int] = []
    first = 0.0
    with _post(writer, "/decode", asked) as response:
        for event in _events(response):
            if "error" in event:
                raise DisaggError(event["error"]["message"])
            if "token" not in event:
                break
            first = first or time.perf_counter() - started
            written.append(event["token"])
            console.print(event["text"], end="", markup=False, soft_wrap=True)
    console.print("\n")
    return written, event["metrics"], first


def _events(response: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def _result(
    model: ModelFiles,
    prefill: str,
    decode: str,
    written: list[int],
    metrics: dict[str, Any],
    tokenizing: float,
    first: float,
) -> Result:
    return Result(
        model=model.name,
        prefill_engine=prefill,
        decode_engine=decode,
        answer=model.tokenizer.decode(written),
        tokenize=tokenizing,
        queue=metrics["queue_time"],
        prefill=metrics["prefill_time"],
        transfer_hidden=metrics["fetch_time"] - metrics["exposed_transfer_time"],
        transfer_exposed=metrics["exposed_transfer_time"],
        inject=metrics["inject_time"],
        first_token=first,
        decode=metrics["decode_time"],
        prompt_tokens=metrics["prompt_tokens"],
        completion_tokens=len(written),
        kv_bytes=metrics["kv_bytes"],
        prompt_tokens_recomputed=metrics["prompt_tokens_recomputed"],
    )


def _show(result: Result, console: Console) -> None:
    verdict = {True: "yes", False: "[bold red]NO[/]", None: "not checked"}[result.equal_to_decode_engine_alone]
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
