"""The simulated engine: a machine's times from a profile, tokens from a hash, and a cache of real bytes.

For capacity planning and load tests. Everything around the engine is as it is with any other: memory is allocated, rows
travel and are checked when they arrive, and a hand-over that goes wrong gives other tokens, or is refused.
"""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items

import numpy as np

from disaggregated_inference.engines.base import Emit, Engine, Logits, Sequence, Tokens, token_list
from disaggregated_inference.engines.memory import available_bytes
from disaggregated_inference.engines.simulated.arena import SimulatedArena, SimulatedRows
from disaggregated_inference.engines.simulated.device import Device, wait_until
from disaggregated_inference.engines.simulated.marks import MARK, MOST_LAYERS, MOST_TOKENS, Chain, Marks, words
from disaggregated_inference.engines.simulated.profiles import INSTANT, Profile, parse_profile
from disaggregated_inference.engines.simulated.voice import SimulatedLogits, SimulatedTokens, Voice
from disaggregated_inference.errors import ModelUnsupported, SliceRefused
from disaggregated_inference.kv import Fingerprint, KVDType, KVSlice, as_dtype
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.models import ModelFiles, ModelSpec
from disaggregated_inference.models.simulated import FIRST_WORD

log = logging.getLogger(__name__)

_KV_BYTES = 4 << 30  # address space, not memory: pages are touched as sequences fill them


class SimulatedEngine(Engine):
    """See `engines.base.Engine` for the contract."""

    name = "simulated"
    own_memory = True
    warm_lengths = ()  # there is nothing to warm up

    def __init__(
        self, spec: ModelSpec, fingerprint: Fingerprint, dtype: KVDType, profile: Profile, kv_bytes: int | None = None
    ) -> None:
        super().__init__(spec, fingerprint, dtype)
        self.model = profile  # all there is of one
        self.kv_limit_bytes = kv_bytes or min(_KV_BYTES, available_bytes() // 2)
        self.chunk_tokens = profile.chunk_tokens
        self._arena = SimulatedArena(spec.layout, dtype, self.kv_limit_bytes)
        self._chain, self._marks = Chain(fingerprint.weights.norms, spec.vocabulary), Marks(dtype)
        self._voice, self._device = Voice(spec, profile.answer_tokens), Device()
        full = [layer for layer, plan in enumerate(spec.layout.layers) if not plan.window]
        self._reference = full[0] if full else 0  # the layer that others are compared with

    def _kv_held(self) -> int:
        return self._arena.used_bytes() + sum(sequence.state.ring_bytes for sequence in tuple(self.live))

    def _open(self, capacity: int) -> SimulatedRows:
        return self._arena.take(capacity, self._chain.start)

    def _close(self, sequence: Sequence) -> None:
        self._arena.give_back(sequence.state)

    def _prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None) -> Logits:
        start, stop = sequence.length, sequence.length + len(tokens)
        self.counters.prompt_tokens += len(tokens)
        seconds = self.model.prefill_s(start, stop)
        begin = self._device.launch(seconds)
        self._write_steps(sequence)
        hashes = self._chain.extend(sequence.state.hash, tokens)
        block = self._marks.block(hashes, start)
        for layer in range(len(sequence.placed)):
            self._write(sequence.state, layer, block, start)
            wait_until(begin + seconds * (layer + 1) / len(sequence.placed))
            if emit:
                emit(self._slice(sequence.state, layer, start, stop))
        sequence.state.hash = int(hashes[-1])
        return SimulatedLogits(self._voice, hashes[-1:], begin + seconds)

    def _step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits:
        """Rows are written when somebody needs them: one at a time, in every layer of every sequence, that would take
        longer than the rest of the step."""
        self.counters.step_tokens += len(sequences)
        seconds = self.model.batch_step_s(len(sequences), sum(sequence.length for sequence in sequences))
        begin = self._device.launch(seconds)
        fed = tokens.array if isinstance(tokens, SimulatedTokens) else np.array(token_list(tokens), np.int64)
        hashes = self._chain.step([sequence.state.hash for sequence in sequences], fed)
        for sequence, value in zip(sequences, hashes.tolist(), strict=True):
            sequence.state.hash = value
            sequence.state.unwritten.append(value)
        return SimulatedLogits(self._voice, hashes, begin + seconds)

    def _write_steps(self, sequence: Sequence) -> None:
        held: SimulatedRows = sequence.state
        if held.unwritten:
            start = sequence.length - len(held.unwritten)
            block = self._marks.block(np.array(held.unwritten, np.uint64), start)
            for layer in range(len(sequence.placed)):
                self._write(held, layer, block, start)
            held.unwritten.clear()

    def _write(self, held: SimulatedRows, layer: int, block: Array, start: int) -> None:
        """Marks of new rows; of a sliding layer those that stay."""
        stop = start + len(block)
        first = self.spec.layout.layers[layer].first_row(start, stop)
        area, where = self._arena.area(held, layer), self._arena.where(layer, first, stop)
        for kind in (0, 1):
            area[kind, where, :MARK] = self._marks.label(block, layer, kind)[first - start :]

    def _slice(self, held: SimulatedRows, layer: int, start: int, stop: int) -> KVSlice:
        """A view of a full layer's rows; a ring's rows are copied, the next chunk overwrites them."""
        layout = self.spec.layout
        first = layout.layers[layer].first_row(start, stop)
        area, where = self._arena.area(held, layer), self._arena.where(layer, first, stop)
        keys, values = (area[kind, where].reshape(-1, layout.kv_heads, layout.head_dim) for kind in (0, 1))
        return KVSlice(layer, first, self.dtype, keys, values)

    def _place(self, sequence: Sequence, piece: KVSlice) -> None:
        self._write_steps(sequence)
        area = self._arena.arriving(sequence.state, piece.layer)
        where = self._arena.where(piece.layer, piece.start, piece.stop)
        for kind, rows in enumerate((piece.keys, piece.values)):
            area[kind, where] = as_dtype(rows, piece.dtype, self.dtype).reshape(piece.tokens, -1)

    def _commit(self, sequence: Sequence, length: int) -> None:
        held: SimulatedRows = sequence.state
        if length > sequence.length:
            held.hash = self._read(held, sequence.length, length)
        held.rings |= held.arriving
        held.arriving.clear()

    def _read(self, held: SimulatedRows, start: int, stop: int) -> int:
        """The hash of the last row, once every row was found to be where it belongs and to be the same in all layers:
        what no real engine could check, and the reason to trust what is measured with this one."""
        rows = self._marked(held, self._reference, 0, start, stop)
        expected = self._marks.as_read(rows, stop - len(rows))
        for layer in range(len(self.spec.layout.layers)):
            for kind in (0, 1):
                found = words(self._marked(held, layer, kind, start, stop))
                wanted = words(self._marks.label(expected, layer, kind))[len(expected) - len(found) :]
                if not np.array_equal(found, wanted):
                    wrong = stop - len(found) + int(np.argmax((found != wanted).any(axis=1)))
                    name = ("K", "V")[kind]
                    raise SliceRefused(f"layer {layer}: the {name} of token {wrong} is not what belongs there")
        read = self._marks.hash_of(rows[-1])
        if read is None:
            raise SliceRefused(f"layer {self._reference}: the K of token {stop - 1} was not written by this engine")
        return read

    def _marked(self, held: SimulatedRows, layer: int, kind: int, start: int, stop: int) -> Array:
        first = self.spec.layout.layers[layer].first_row(start, stop)
        marks: Array = self._arena.area(held, layer)[kind, self._arena.where(layer, first, stop), :MARK]
        return marks

    def _rollback(self, sequence: Sequence) -> None:
        sequence.state.arriving.clear()

    def _export(self, sequence: Sequence, start: int) -> Iterator[KVSlice]:
        self._write_steps(sequence)
        for layer in range(len(sequence.placed)):
            yield self._slice(sequence.state, layer, start, sequence.length)


def load(
    model: ModelFiles, *, dtype: KVDType | None = None, profile: str = "", kv_bytes: int | None = None
) -> SimulatedEngine:
    """By default in bfloat16, and without any time passing."""
    spec, chosen = model.spec, parse_profile(profile or INSTANT.name, model.simulated)
    layout = spec.layout
    if len(layout.layers) > MOST_LAYERS or layout.head_dim < MARK or spec.context_window > MOST_TOKENS:
        raise ModelUnsupported("no room in this model's rows for the simulated engine's marks")
    if spec.vocabulary <= FIRST_WORD:
        raise ModelUnsupported(f"a vocabulary of {spec.vocabulary} has no words for the simulated engine")
    log.warning("SIMULATED: no model is computed here; times are those of %s: %s", chosen.name, chosen.note)
    return SimulatedEngine(spec, model.fingerprint, dtype or "bfloat16", chosen, kv_bytes)
