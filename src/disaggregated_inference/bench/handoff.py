"""`disagg bench handoff`: two nodes that share an answer, against one engine alone, in the same run."""

from pathlib import Path

from rich.console import Console

from disaggregated_inference.bench.report import Report
from disaggregated_inference.bench.streaming import bench_streaming


def run(shape: str, device: str, chunk: int, streams: int, repeats: int, output: Path) -> Report:
    console = Console()

    def progress(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    report = bench_streaming(shape, device, chunk, streams, repeats, progress)
    report.show(console)
    report.save(output / f"handoff-{shape}.json")
    return report
