"""`disagg bench handoff`: two nodes that share an answer, against the decode engine alone, in the same run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from disaggregated_inference.bench.report import Report, Row
from disaggregated_inference.bench.streaming import bench_streaming
from disaggregated_inference.bench.texts import prompt_of
from disaggregated_inference.cli.progress import steps
from disaggregated_inference.cluster.local_nodes import LocalNode, StreamedAnswer, finished, hand_over, write_alone
from disaggregated_inference.engines import require_engine
from disaggregated_inference.models import ModelFiles, ModelStore

_PROMPTS = (128, 512, 2000)
_ANSWER = 32

Progress = Callable[[str], None]


def run(
    shape: str,
    device: str,
    model_name: str,
    prefill: str,
    decode: str,
    chunk: int,
    streams: int,
    repeats: int,
    output: Path,
) -> Report:
    console = Console()

    def progress(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    if shape:
        report = bench_streaming(shape, device, chunk or 8192, streams, repeats, progress)
    else:
        report = bench_pair(model_name, prefill, decode, chunk or 256, streams, repeats, progress)
    path = output / f"handoff{f'-{shape}' if shape else ''}.json"
    report.show(console)
    report.save(path)
    console.print(f"saved {path}", style="dim", highlight=False)
    return report


def bench_pair(
    model_name: str, prefill: str, decode: str, chunk: int, streams: int, repeats: int, progress: Progress
) -> Report:
    for name in (prefill, decode):
        require_engine(name)
    with steps() as fetching:
        model = ModelStore().resolve(model_name, fetching)
    report = Report(f"{prefill} reads, {decode} writes {_ANSWER} tokens, {model.name}, float32, chunks of {chunk}")
    with _nodes(model, prefill, decode, chunk, streams, progress) as (reader, writer, lossy):
        for length in _PROMPTS:
            tokens = prompt_of(model, length)
            progress(f"prompt of {length} tokens")
            _rows(report, reader, writer, tokens, repeats)
        progress("int8 on the wire")
        _drift_rows(report, reader, writer, lossy, prompt_of(model, 512))
    return report


@contextmanager
def _nodes(
    model: ModelFiles, prefill: str, decode: str, chunk: int, streams: int, progress: Progress
) -> Iterator[tuple[LocalNode, LocalNode, LocalNode]]:
    """Float32: then tokens can be compared, and neither engine has a dtype that suits it better."""
    shared = ("--model", str(model.path), "--dtype", "float32", "--prefix-memory", "0")
    fetching = (*shared, "--kv-streams", str(streams))
    nodes = (
        LocalNode("prefill", prefill, "--chunk", str(chunk), *shared),
        LocalNode("decode", decode, *fetching),
        LocalNode("decode", decode, *fetching, "--kv-codec", "int8"),
    )
    progress(f"starting {prefill} and {decode} nodes")
    try:
        for node in nodes:
            node.ready()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def _rows(report: Report, reader: LocalNode, writer: LocalNode, tokens: list[int], repeats: int) -> None:
    """In turn, the best of each; the first round is the warm-up, and the canary's."""
    ours: list[StreamedAnswer] = []
    alone: list[StreamedAnswer] = []
    for turn in range(repeats + 1):
        runs = (
            finished(hand_over(reader, writer, tokens, _ANSWER)),
            finished(write_alone(writer, tokens, _ANSWER)),
        )
        assert runs[0].tokens == runs[1].tokens, "the hand-off changed the answer"
        if turn:
            ours.append(runs[0])
            alone.append(runs[1])
    against, name = f"{writer.engine} alone", f"prompt {len(tokens)}"
    first, bare_first = (min(run.first_token_s for run in runs) for runs in (ours, alone))
    total, bare_total = (min(run.total_s for run in runs) for runs in (ours, alone))
    report.add(Row(f"{name}, first token", first, "s", bare_first, against))
    report.add(Row(f"{name}, whole answer", total, "s", bare_total, against))
    exposed = min(run.metrics["exposed_transfer_time"] for run in ours)
    report.add(Row(f"{name}, exposed transfer", exposed * 1e3, "ms"))
    overhead = min(run.first_token_s - run.metrics["prefill_time"] for run in ours)
    report.add(Row(f"{name}, first token less the prefill itself", overhead * 1e3, "ms"))


def _drift_rows(report: Report, reader: LocalNode, writer: LocalNode, lossy: LocalNode, tokens: list[int]) -> None:
    exact, rounded = (finished(hand_over(reader, node, tokens, _ANSWER)) for node in (writer, lossy))
    pairs = zip(exact.tokens, rounded.tokens, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(exact.tokens), len(rounded.tokens)))
    sizes = (rounded.metrics["kv_bytes"], exact.metrics["kv_bytes"])
    report.add(Row("int8, prompt 512: bytes on the wire", sizes[0] / 1e6, "MB", sizes[1] / 1e6, "raw"))
    report.add(Row("int8, prompt 512: tokens until the first that differs", same, "", len(exact.tokens), "raw"))
