"""What one process serves: a model in one engine, and its roles."""

from dataclasses import dataclass
from typing import Any

import msgspec

from disaggregated_inference.kv_transfer.paths import spoken
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill import PrefillNode


@dataclass(frozen=True, slots=True)
class Node:
    model: ModelFiles
    kv_memory: KVMemory
    prefill: PrefillNode | None = None
    decode: DecodeNode | None = None

    @property
    def role(self) -> str:
        return "both" if self.prefill and self.decode else "prefill" if self.prefill else "decode"

    @property
    def epoch(self) -> str:
        """Of this run of the node: a restarted one has another."""
        node = self.prefill or self.decode
        assert node
        return node.epoch

    @property
    def healthy(self) -> bool:
        return all(node.healthy for node in (self.prefill, self.decode) if node)

    def health(self) -> dict[str, Any]:
        """Live truth, without asking the engine's thread: it may be busy."""
        kv_memory = self.kv_memory
        state = "draining" if kv_memory.draining else "loading" if kv_memory.scheduler.loading else "healthy"
        return {
            "status": state if self.healthy else "unhealthy",
            "model": self.model.name,
            "loaded": kv_memory.engine.loaded,
            "backend": kv_memory.engine.name,
            "role": self.role,
            "epoch": self.epoch,
            "stalled_s": round(kv_memory.scheduler.stalled_s, 3),
        }

    def about_model(self) -> dict[str, Any]:
        """Who the model is, as far as another node or a client's text is concerned."""
        spec = self.kv_memory.engine.spec
        return {
            "model": self.model.name,
            "context_window": spec.context_window,
            "vocabulary": spec.vocabulary,
            "eos_tokens": spec.eos_tokens,
            "fingerprint": msgspec.to_builtins(self.kv_memory.engine.fingerprint),
        }

    def retry_after_s(self, error: BaseException | None = None) -> int:
        """When to come back: who was refused, or someone new who needs little."""
        known: int | None = getattr(error, "retry_after_s", None)
        return known or max(admission.retry_after_s() for admission in self.kv_memory.admissions)

    @property
    def _canary_tokens(self) -> int:
        """Read for proofs, on either side of them: nobody's prompt."""
        read = self.prefill.canary_tokens if self.prefill else 0
        return read + (self.decode.proofs.tokens_computed if self.decode else 0)

    def status(self) -> dict[str, Any]:
        """What a router needs to decide."""
        engine, kv_memory = self.kv_memory.engine, self.kv_memory
        about = self.health() | {
            "dtype": engine.dtype,
            "context_window": engine.spec.context_window,
            "kv_token_bytes": engine.spec.kv_token_bytes(engine.dtype),
            "waiting": sum(node.open_requests for node in (self.prefill, self.decode) if node),
            "waiting_tokens": sum(node.unread_tokens for node in (self.prefill, self.decode) if node),
            "exports": self.prefill is not None,
            "imports": self.decode is not None,
            "queue": {
                "waiting": sum(admission.waiting for admission in kv_memory.admissions),
                "retry_after_s": self.retry_after_s(),
            },
            "slots": {"used": kv_memory.held_slots, "most": engine.max_batch},
            "kv": _memory_status(kv_memory),
            "prefixes": msgspec.to_builtins(kv_memory.prefixes.seen()),
            "integrity_faults": kv_memory.faults,
            "prompt_tokens_computed": engine.counters.prompt_tokens - self._canary_tokens,
            "tokens_written": self.decode.tokens_written if self.decode else 0,
        }
        rates: dict[str, Any] = {}
        if self.prefill:
            about |= _prefill_status(self.prefill)
            rates["prefill"] = self.prefill.reading.seen()
        if self.decode:
            about |= _decode_status(self.decode)
            rates |= {"decode": self.decode.batch.rates.seen(), "local_prefill": self.decode.intake.reading.seen()}
        return about | {"rates": msgspec.to_builtins(rates)}


def _memory_status(kv_memory: KVMemory) -> dict[str, int]:
    """What one answer may have, and of that what is promised. A node of both roles has two purses, and nobody may take
    from both: `total_`, the peaks and what was measured are of both."""
    return {
        "limit_bytes": kv_memory.admission.limit_bytes,
        "reserved_bytes": kv_memory.admission.held_bytes,
        "total_limit_bytes": sum(admission.limit_bytes for admission in kv_memory.admissions),
        "total_reserved_bytes": kv_memory.promised_bytes,
        "peak_reserved_bytes": sum(admission.peak_bytes for admission in kv_memory.admissions),
        "held_bytes": kv_memory.held_bytes,
        "peak_held_bytes": kv_memory.peak_held_bytes,
    }


def _prefill_status(node: PrefillNode) -> dict[str, Any]:
    return {
        "tickets": len(node.book),
        "endings": msgspec.to_builtins(node.book.endings),
        "kv_addresses": [spoken(address) for address in node.kv_addresses],
    }


def _decode_status(node: DecodeNode) -> dict[str, Any]:
    seen = {"paths": node.paths.seen(), "peers": node.proofs.seen(), "canary_tokens": node.proofs.tokens_computed}
    builtins: dict[str, Any] = msgspec.to_builtins(seen)
    return builtins | {"running": len(node.batch.members), "steps": node.batch.steps}
