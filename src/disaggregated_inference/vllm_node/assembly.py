"""Puts together what vLLM's workers export of one prompt: a slice is ready when every worker that holds heads of its
layer has written them, and a chunk's slices come before those of the next one."""

from collections import defaultdict
from collections.abc import Sequence

from disaggregated_inference.errors import EngineFailed

Piece = tuple[int, int, int]  # layer, start, stop


class Assembly:
    """`senders` says for each layer how many workers send a part of its heads."""

    def __init__(self, tokens: int, senders: Sequence[int]) -> None:
        self.tokens, self._senders = tokens, senders
        self.committed = 0  # tokens that are complete in every layer
        self._stops: dict[tuple[int, int], int] = defaultdict(int)  # by worker and layer
        self._written: dict[Piece, int] = defaultdict(int)  # how many workers have written it
        self._waiting: dict[int, list[Piece]] = defaultdict(list)  # by start: complete, but of a later chunk
        self._placed: dict[int, int] = defaultdict(int)  # layers of the current chunk that are ready, by its stop

    @property
    def complete(self) -> bool:
        return self.committed == self.tokens

    def add(self, worker: int, layer: int, start: int, stop: int) -> list[Piece]:
        """The slices that are ready now. Raises if the worker left out rows, or sends some twice."""
        if not 0 <= layer < len(self._senders) or not start < stop <= self.tokens:
            raise EngineFailed(f"vLLM's worker {worker} exported rows {start} to {stop} of layer {layer}")
        if self._stops[worker, layer] != start:
            held = self._stops[worker, layer]
            raise EngineFailed(f"vLLM's worker {worker} exported layer {layer} from token {start}, after {held}")
        self._stops[worker, layer] = stop
        piece = (layer, start, stop)
        self._written[piece] += 1
        if self._written[piece] < self._senders[layer]:
            return []
        del self._written[piece]
        self._waiting[start].append(piece)
        return self._take_ready()

    def _take_ready(self) -> list[Piece]:
        """With pipeline parallelism, the first stage may be a chunk ahead of the last."""
        ready: list[Piece] = []
        while pieces := self._waiting.pop(self.committed, []):
            ready += pieces
            stop = pieces[0][2]
            if any(piece[2] != stop for piece in pieces) or any(other != stop for other in self._placed):
                raise EngineFailed("vLLM's workers cut the prompt into different chunks")
            self._placed[stop] += len(pieces)
            if self._placed[stop] < len(self._senders):
                break
            self._placed.clear()
            self.committed = stop
        return ready

    def missing(self) -> str:
        """For the error of a prompt that did not arrive completely."""
        short = sorted(layer for (_, layer), stop in self._stops.items() if stop < self.tokens)
        if not self._stops:
            return "no layer arrived"
        where = f"; layer {short[0]} is not complete" if short else ""
        return f"{self.committed} of {self.tokens} tokens arrived in every layer{where}"
