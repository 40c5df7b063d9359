"""Progress on standard error: a live line on a terminal, plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

OnStep = Callable[[str, float], None]


@contextmanager
def steps() -> Iterator[OnStep]:
    """Yields `report(step, fraction)` for the download of the embedded model."""
    model = "smollm2:135m"
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda step, fraction: status.update(f"{model}: {step} {fraction:.0%}")
        return
    reported: set[str] = set()

    def report(step: str, fraction: float) -> None:
        if step not in reported:
            reported.add(step)
            console.print(f"{model}: {step} ...", highlight=False)

    yield report
