"""Stop strings: the text ends before the first of them, wherever token borders are."""

from collections.abc import Sequence


class StopStrings:
    """Text goes in token by token and comes out when no stop string can begin in it any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, counts: bool = True) -> str:
        """Add text; returns the text that can go out, none after a stop string. A stop string that ends in text which
        does not count is ignored; it may begin there."""
        if self.found is not None:
            return ""
        before, self._held = len(self._held), self._held + text
        at, self.found = self._first(before) if counts else (0, None)
        if self.found is not None:
            return self._release(at)
        return self._release(len(self._held) - self._possible_start())

    def flush(self) -> str:
        """At the end: the text that was held back."""
        return "" if self.found is not None else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _first(self, before: int) -> tuple[int, str | None]:
        """The earliest stop string that ends after `before` characters; of two with one start, the longer."""
        found = [(self._held.find(stop, max(0, before + 1 - len(stop))), -len(stop), stop) for stop in self._stops]
        places = [place for place in found if place[0] >= 0]
        return (min(places)[0], min(places)[2]) if places else (0, None)

    def _possible_start(self) -> int:
        """Length of the longest end of the text that could become a stop string."""
        sizes = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(self._held)), 0, -1)
            if self._held.endswith(stop[:size])
        )
        return max(sizes, default=0)
