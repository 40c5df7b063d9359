"""The simulated engine: a machine's timing from a profile, tokens from a hash, and KV of real bytes.

For capacity planning and load tests. Everything around the engine is real: memory is allocated, rows are transferred
and checked on arrival, and a faulty hand-off gives other tokens or is refused.
"""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items

import numpy as np

from disaggregated_inference.engines.base import Emit, Engine, Logits, Tokens, token_list
from disaggregated_inference.engines.memory import available_bytes
from disaggregated_inference.engines.scoring import Scoring
from disaggregated_inference.engines.sequence import Sequence
from disaggregated_inference.engines.simulated.arena import SimulatedArena, SimulatedRows
from disaggregated_inference.engines.simulated.device import Device, wait_until
from disaggregated_inference.engines.simulated.lm_head import SimulatedHead, SimulatedLogits, SimulatedTokens
from disaggregated_inference.engines.simulated.profiles import INSTANT, Profile, parse_profile
from disaggregated_inference.engines.simulated.row_tags import MAX_LAYERS, MAX_TOKENS, TAG, HashChain, RowTags, words
from disaggregated_inference.errors import ModelUnsupported, SliceRefused
from disaggregated_inference.kv import Array, Fingerprint, KVDType, KVSlice, as_dtype
from disaggregated_inference.models import FIRST_WORD, ModelFiles, ModelSpec

log = logging.getLogger(__name__)

_KV_BYTES = 4 << 30  # address space, not memory: pages are touched as sequences fill them


class SimulatedEngine(Engine):
    """See `engines.base.Engine` for the contract."""

    name = "simulated"
    prompt_logprobs = True
    preallocates_kv = True
    warm_lengths = ()  # there is nothing to warm up

    def __init__(
        self, spec: ModelSpec, fingerprint: Fingerprint, dtype: KVDType, profile: Profile, kv_bytes: int | None = None
    ) -> None:
        super().__init__(spec, fingerprint, dtype)
        self.model = profile  # in the place of a model
        self.kv_limit_bytes = kv_bytes or min(_KV_BYTES, available_bytes() // 2)
        self.chunk_tokens = profile.chunk_tokens
        self.arena = SimulatedArena(spec.layout, dtype, self.kv_limit_bytes)
        self._chain, self._tags = HashChain(fingerprint.weights.norms, spec.vocabulary), RowTags(dtype)
        self._head, self._device = SimulatedHead(spec, profile.answer_tokens), Device()
        full = [layer for layer, plan in enumerate(spec.layout.layers) if not plan.window]
        self._reference = full[0] if full else 0  # the layer that others are compared with

    def measure_kv(self) -> int:
        return self.arena.used_bytes() + sum(sequence.state.ring_bytes for sequence in tuple(self.live))

    def release_model(self) -> None:
        del self.arena

    def allocate(self, capacity: int) -> SimulatedRows:
        return self.arena.take(capacity, self._chain.start)

    def release(self, sequence: Sequence) -> None:
        self.arena.give_back(sequence.state)

    def run_prefill(self, sequence: Sequence, tokens: Items[int], emit: Emit | None, scoring: Scoring | None) -> Logits:
        start, stop = sequence.length, sequence.length + len(tokens)
        self.counters.prompt_tokens += len(tokens)
        seconds = self.model.prefill_s(start, stop)
        begin = self._device.launch(seconds)
        self._write_steps(sequence)
        hashes = self._chain.extend(sequence.state.hash, tokens)
        block = self._tags.block(hashes, start)
        for layer in range(len(sequence.placed)):
            self._write(sequence.state, layer, block, start)
            wait_until(begin + seconds * (layer + 1) / len(sequence.placed))
            if emit:
                emit(self._slice(sequence.state, layer, start, stop))
        for piece in scoring.pieces(self.spec.vocabulary) if scoring else ():
            assert scoring
            scoring.take_logits(start + 1 + piece.start, self._head.scores(hashes[piece]), piece)
        sequence.state.hash = int(hashes[-1])
        return SimulatedLogits(self._head, hashes[-1:], begin + seconds)

    def run_step(self, sequences: Items[Sequence], tokens: Items[int] | Tokens) -> Logits:
        """Rows are written later, when they are needed: writing one row in every layer of every sequence would take
        longer than the rest of the step."""
        self.counters.step_tokens += len(sequences)
        seconds = self.model.batch_step_s(len(sequences), sum(sequence.length for sequence in sequences))
        begin = self._device.launch(seconds)
        fed = tokens.array if isinstance(tokens, SimulatedTokens) else np.array(token_list(tokens), np.int64)
        hashes = self._chain.step([sequence.state.hash for sequence in sequences], fed)
        for sequence, value in zip(sequences, hashes.tolist(), strict=True):
            sequence.state.hash = value
            sequence.state.unwritten.append(value)
        return SimulatedLogits(self._head, hashes, begin + seconds)

    def _write_steps(self, sequence: Sequence) -> None:
        held: SimulatedRows = sequence.state
        if held.unwritten:
            start = sequence.length - len(held.unwritten)
            block = self._tags.block(np.array(held.unwritten, np.uint64), start)
            for layer in range(len(sequence.placed)):
                self._write(held, layer, block, start)
            held.unwritten.clear()

    def _write(self, held: SimulatedRows, layer: int, block: Array, start: int) -> None:
        """Write the tags of new rows; for a sliding layer only those that its window keeps."""
        stop = start + len(block)
        first = self.spec.layout.layers[layer].first_row(start, stop)
        area, where = self.arena.area(held, layer), self.arena.where(layer, first, stop)
        for kind in (0, 1):
            area[kind, where, :TAG] = self._tags.label(block, layer, kind)[first - start :]

    def _slice(self, held: SimulatedRows, layer: int, start: int, stop: int) -> KVSlice:
        """A view of a full layer's rows; a ring's rows are copied, the next chunk overwrites them."""
        layout = self.spec.layout
        first = layout.layers[layer].first_row(start, stop)
        area, where = self.arena.area(held, layer), self.arena.where(layer, first, stop)
        keys, values = (area[kind, where].reshape(-1, layout.kv_heads, layout.head_dim) for kind in (0, 1))
        return KVSlice(layer, first, self.dtype, keys, values)

    def write_slice(self, sequence: Sequence, piece: KVSlice) -> None:
        self._write_steps(sequence)
        area = self.arena.arriving(sequence.state, piece.layer)
        where = self.arena.where(piece.layer, piece.start, piece.stop)
        for kind, rows in enumerate((piece.keys, piece.values)):
            area[kind, where] = as_dtype(rows, piece.dtype, self.dtype).reshape(piece.tokens, -1)

    def commit_rows(self, sequence: Sequence, length: int) -> None:
        held: SimulatedRows = sequence.state
        if length > sequence.length:
            held.hash = self._read(held, sequence.length, length)
        held.rings |= held.arriving
        held.arriving.clear()

    def _read(self, held: SimulatedRows, start: int, stop: int) -> int:
        """The hash of the last row, after checking position and hash of every row in all layers. No real engine could
        check this; it is the reason to trust measurements with this engine."""
        rows = self._tag_rows(held, self._reference, 0, start, stop)
        expected = self._tags.expected_tags(rows, stop - len(rows))
        for layer in range(len(self.spec.layout.layers)):
            for kind in (0, 1):
                found = words(self._tag_rows(held, layer, kind, start, stop))
                wanted = words(self._tags.label(expected, layer, kind))[len(expected) - len(found) :]
                if not np.array_equal(found, wanted):
                    first = stop - len(found) + int(np.argmax((found != wanted).any(axis=1)))
                    name = ("K", "V")[kind]
                    raise SliceRefused(f"layer {layer}: the {name} of token {first} is not what belongs there")
        read = self._tags.read_hash(rows[-1])
        if read is None:
            raise SliceRefused(f"layer {self._reference}: the K of token {stop - 1} was not written by this engine")
        return read

    def _tag_rows(self, held: SimulatedRows, layer: int, kind: int, start: int, stop: int) -> Array:
        first = self.spec.layout.layers[layer].first_row(start, stop)
        marks: Array = self.arena.area(held, layer)[kind, self.arena.where(layer, first, stop), :TAG]
        return marks

    def discard_rows(self, sequence: Sequence) -> None:
        sequence.state.arriving.clear()

    def read_slices(self, sequence: Sequence, start: int) -> Iterator[KVSlice]:
        self._write_steps(sequence)
        for layer in range(len(sequence.placed)):
            yield self._slice(sequence.state, layer, start, sequence.length)


def load(
    model: ModelFiles, *, dtype: KVDType | None = None, profile: str = "", kv_bytes: int | None = None
) -> SimulatedEngine:
    """By default in bfloat16, and with no time passing."""
    spec, chosen = model.spec, parse_profile(profile or INSTANT.name, model.simulated)
    layout = spec.layout
    if len(layout.layers) > MAX_LAYERS or layout.head_dim < TAG or spec.context_window > MAX_TOKENS:
        raise ModelUnsupported("the rows of this model are too small for the simulated engine's tags")
    if spec.vocabulary <= FIRST_WORD:
        raise ModelUnsupported(f"a vocabulary of {spec.vocabulary} is too small for the simulated engine")
    log.warning("SIMULATED: no model is computed here; times are those of %s: %s", chosen.name, chosen.note)
    return SimulatedEngine(spec, model.fingerprint, dtype or "bfloat16", chosen, kv_bytes)
