"""What a prefill node has read, kept for prompts that begin the same way."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from disaggregated_inference.errors import NodeBusy
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill_job import PrefillJob

log = logging.getLogger(__name__)


class PrefixWriter:
    """Copies on a thread of its own, while the engine reads the next prompt; `close` is called on the engine's thread
    for those that ended meanwhile."""

    def __init__(self, kv_memory: KVMemory, close: Callable[[PrefillJob], None]) -> None:
        self._kv_memory, self._close = kv_memory, close
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kv-keep")

    def keep(self, attempt: PrefillJob) -> None:
        insertion = self._kv_memory.prefixes.insert(attempt.tokens) if attempt.ticket and not attempt.ended else None
        if insertion is None:
            return

        def copy() -> None:
            try:
                for piece in attempt.outbox.slices():
                    insertion.put(piece)
            except Exception:
                log.exception("a prompt's cache was not kept")
            insertion.finish()
            with suppress(NodeBusy):
                self._kv_memory.scheduler.post(done)

        def done() -> None:
            attempt.keeping = False
            if attempt.ended:
                self._close(attempt)

        attempt.keeping = True
        try:
            self._threads.submit(copy)
        except RuntimeError:  # closing
            insertion.abandon()
            attempt.keeping = False

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
