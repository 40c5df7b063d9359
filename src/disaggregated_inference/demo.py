"""`disagg demo`: one engine reads the prompt, another writes the answer, and the tokens are compared."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.table import Table

from disaggregated_inference.engines import Engine, Sequence, chunks, load_engine, require_engine
from disaggregated_inference.errors import ContextTooLong, DisaggError
from disaggregated_inference.kv import KVSlice, require_same_model
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.progress import steps


class Result(msgspec.Struct):
    """What the demo measured; printed as a table or as JSON."""

    model: str
    prefill_engine: str
    decode_engine: str
    answer: str
    prompt_tokens: int
    completion_tokens: int
    prefill_s: float
    prefill_tokens_per_s: float
    slices: int
    kv_bytes: int
    import_s: float
    first_token_s: float
    decode_s: float
    decode_tokens_per_s: float
    prompt_tokens_recomputed: int
    equal_to_decode_engine_alone: bool | None = None
    equal_to_prefill_engine_alone: bool | None = None

    @property
    def proven(self) -> bool:
        checks = (self.equal_to_decode_engine_alone, self.equal_to_prefill_engine_alone)
        return self.prompt_tokens_recomputed == 0 and False not in checks


def run_demo(
    prompt: str, model_name: str, max_tokens: int, prefill: str, decode: str, chunk: int, check: bool, as_json: bool
) -> bool:
    """Returns whether the hand-off was proven."""
    if not prompt.strip():
        raise DisaggError("the prompt is empty; try: disagg demo 'Why is the sky blue?'")
    if not prompt.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise DisaggError("the prompt is not valid UTF-8 text")
    for name in (prefill, decode):
        require_engine(name)
    console = Console(stderr=as_json, highlight=False)
    with steps() as progress:
        model = ModelStore().resolve(model_name, progress)
    tokens = model.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    if len(tokens) + max_tokens > model.spec.context_window:
        raise ContextTooLong(len(tokens) + max_tokens, model.spec.context_window)
    reader, writer = _load(prefill, model, console), _load(decode, model, console)
    require_same_model(writer.fingerprint, reader.fingerprint)
    console.print(f"\n[bold]{prefill}[/] reads {len(tokens)} tokens, [bold]{decode}[/] writes:\n")
    answer, result = _hand_over(reader, writer, model, tokens, max_tokens, chunk, console)
    if check:
        with _status(console, "the same prompt on one engine alone, to compare"):
            result.equal_to_decode_engine_alone = _alone(writer, tokens, len(answer)) == answer
            result.equal_to_prefill_engine_alone = _alone(reader, tokens, len(answer)) == answer
    if as_json:
        print(json.dumps(msgspec.to_builtins(result), indent=2))
    else:
        _show(result, console)
    return result.proven


@contextmanager
def _status(console: Console, text: str) -> Iterator[None]:
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(text)
        yield


def _load(name: str, model: ModelFiles, console: Console) -> Engine:
    started = time.perf_counter()
    with _status(console, f"loading {model.name} into {name}"):
        engine = load_engine(name, model, dtype="float32")  # exact: other dtypes round differently in each engine
    console.print(f"{name}: {model.name} in {engine.dtype}, loaded in {time.perf_counter() - started:.1f} s")
    return engine


def _hand_over(
    reader: Engine, writer: Engine, model: ModelFiles, tokens: list[int], count: int, chunk: int, console: Console
) -> tuple[list[int], Result]:
    source, target = reader.open(len(tokens)), writer.open(len(tokens) + count)
    moved: list[tuple[int, float]] = []

    def hand(piece: KVSlice) -> None:
        piece.wait()
        started = time.perf_counter()
        writer.place(target, piece)
        moved.append((piece.size_bytes, time.perf_counter() - started))

    recomputed = writer.counters.prompt_tokens
    started = time.perf_counter()
    for part in chunks(tokens, chunk):
        logits = reader.prefill(source, part, hand)
    first = logits.greedy().tolist()[0]
    writer.commit(target, len(tokens))
    first_token = time.perf_counter() - started
    answer = list(_write(writer, target, model, first, count, console))
    decoding = time.perf_counter() - started - first_token
    importing = sum(seconds for _, seconds in moved)
    for engine, sequence in ((reader, source), (writer, target)):
        engine.close(sequence)
    return answer, Result(
        model=model.name,
        prefill_engine=reader.name,
        decode_engine=writer.name,
        answer=model.tokenizer.decode(answer),
        prompt_tokens=len(tokens),
        completion_tokens=len(answer),
        prefill_s=first_token - importing,
        prefill_tokens_per_s=len(tokens) / (first_token - importing),
        slices=len(moved),
        kv_bytes=sum(size for size, _ in moved),
        import_s=importing,
        first_token_s=first_token,
        decode_s=decoding,
        decode_tokens_per_s=(len(answer) - 1) / decoding if len(answer) > 1 else 0.0,
        prompt_tokens_recomputed=writer.counters.prompt_tokens - recomputed,
    )


def _write(
    engine: Engine, sequence: Sequence, model: ModelFiles, token: int, count: int, console: Console
) -> Iterator[int]:
    """Greedy tokens up to the model's end of text, shown as they come."""
    text = model.tokenizer.stream()
    for number in range(1, count + 1):
        yield token
        console.print(text.push(token), end="", markup=False, soft_wrap=True)
        if token in model.spec.eos_tokens or number == count:
            break
        token = engine.step([sequence], [token]).greedy().tolist()[0]
    console.print("\n")


def _alone(engine: Engine, tokens: list[int], count: int) -> list[int]:
    sequence = engine.open(len(tokens) + count)
    answer = engine.prefill(sequence, tokens).greedy().tolist()
    while len(answer) < count:
        answer += engine.step([sequence], answer[-1:]).greedy().tolist()
    engine.close(sequence)
    return answer


def _show(result: Result, console: Console) -> None:
    verdicts = {True: "yes", False: "[bold red]NO[/]", None: "not checked"}
    table = Table(box=None, show_header=False, pad_edge=False)
    pair = (("decode", result.equal_to_decode_engine_alone), ("prefill", result.equal_to_prefill_engine_alone))
    rows = [
        (
            f"prefill on {result.prefill_engine}",
            f"{result.prompt_tokens} tokens in {result.prefill_s:.2f} s, {result.prefill_tokens_per_s:.0f} tok/s",
        ),
        (
            "KV cache handed over",
            f"{result.kv_bytes / 1e6:.1f} MB in {result.slices} slices, {result.import_s * 1e3:.0f} ms to take in",
        ),
        ("first token after", f"{result.first_token_s:.2f} s"),
        (
            f"decode on {result.decode_engine}",
            f"{result.completion_tokens} tokens in {result.decode_s:.2f} s, {result.decode_tokens_per_s:.1f} tok/s",
        ),
        ("prompt tokens recomputed in decode", str(result.prompt_tokens_recomputed)),
        *((f"tokens equal to the {side} engine alone", verdicts[equal]) for side, equal in pair),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
