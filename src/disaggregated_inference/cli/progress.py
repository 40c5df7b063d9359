"""Progress of long work on standard error: a live line for people, plain lines where nobody watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Report = Callable[[str, float], None]


@contextmanager
def steps() -> Iterator[Report]:
    """Yields `report(step, fraction)` for the making of the embedded model; shows nothing when nothing is reported."""
    what = "smollm2:135m"
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda step, fraction: status.update(f"{what}: {step} {fraction:.0%}")
        return
    seen: set[str] = set()

    def report(step: str, fraction: float) -> None:
        if step not in seen:
            seen.add(step)
            console.print(f"{what}: {step} ...", highlight=False)

    yield report
