"""A prefill node and a decode node in this process (fixture `nodes`)."""

from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.timeouts import NodeTimeouts, TransferTimeouts

Pair = tuple[PrefillNode, DecodeNode]


class ProvenAnywhere(Trust):
    """A peer check counts for all addresses of a node. So a proxy's fault strikes the transfer, not the peer check of a
    new address."""

    def peer_key(self, context: PrefillContext) -> tuple[object, str]:
        return "", context.epoch


PROVEN_ANYWHERE = Trust(), ProvenAnywhere()

# Threads of one process wait for each other: an answer may take a second or two.
ONE_PROCESS = NodeTimeouts(transfer=TransferTimeouts(probe_s=3.0, max_probe_s=3.0, max_silence_s=8.0, dial_s=3.0))


def left(pair: Pair) -> dict[str, int]:
    """Count what requests still hold in both nodes. Empty when all requests have ended and everything was freed."""
    prefill, decode = pair
    found = {"tickets": len(prefill.tickets), "jobs": len(prefill.jobs), "requests": decode.open_requests}
    for name, kv_memory in (("prefill", prefill.kv_memory), ("decode", decode.kv_memory)):
        found[f"{name} held"] = kv_memory.scheduler.call(lambda kv_memory=kv_memory: kv_memory.engine.kv_held_bytes)  # type: ignore[misc]
        found[f"{name} promised"] = kv_memory.admission.held_bytes + kv_memory.admission.held_slots
        found[f"{name} sequences"] = kv_memory.sequences
    return {name: count for name, count in found.items() if count}


def nothing_left(pair: Pair) -> bool:
    return not left(pair)
