"""Saves the KV of computed prompts in the prefix cache of a prefill node."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from disaggregated_inference.errors import NodeBusy
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill_job import PrefillJob

log = logging.getLogger(__name__)


class PrefixWriter:
    """Copies on its own thread while the engine computes the next prompt. `close` is called on the scheduler's thread
    for jobs that ended meanwhile."""

    def __init__(self, kv_memory: KVMemory, close: Callable[[PrefillJob], None]) -> None:
        self._kv_memory, self._close = kv_memory, close
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="prefix-writer")

    def save(self, job: PrefillJob) -> None:
        insertion = self._kv_memory.prefixes.insert(job.tokens, job.salt) if job.ticket and not job.ended else None
        if insertion is None:
            return

        def copy() -> None:
            try:
                for piece in job.outbox.slices():
                    insertion.put(piece)
            except Exception:
                log.exception("cannot save the KV of a prompt in the prefix cache")
            insertion.finish()
            with suppress(NodeBusy):
                self._kv_memory.scheduler.post(finish)

        def finish() -> None:
            job.saving = False
            if job.ended:
                self._close(job)

        job.saving = True
        try:
            self.threads.submit(copy)
        except RuntimeError:  # the node is closing
            insertion.abandon()
            job.saving = False

    def stop(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
