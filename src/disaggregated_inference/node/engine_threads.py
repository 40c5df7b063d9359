"""Keeps the engine's CPU threads at this node's share of the cores."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from disaggregated_inference.cores import CoreShare, configured_threads, wait_without_spinning
from disaggregated_inference.engines import Engine
from disaggregated_inference.errors import NodeBusy
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.timeouts import NodeTimeouts


class EngineThreads:
    """Made before the engine's libraries are loaded: they read the environment then. `wanted` is `--threads`."""

    def __init__(
        self, wanted: int = 0, share: CoreShare | None = None, timeouts: NodeTimeouts = NodeTimeouts()
    ) -> None:
        self._share = share or CoreShare(wanted or configured_threads())
        self._timeouts = timeouts
        self._pending: Future[None] | None = None
        self._looked_at = 0.0
        self._measured = 0  # threads of the engine when it was measured
        self.on_change: Callable[[int, int], None] = lambda before, now: None  # on the engine's thread, when it is idle
        self._share.join()
        wait_without_spinning()
        if wanted or not configured_threads():  # for libraries that take no other number later
            os.environ["OMP_NUM_THREADS"] = str(self._share.threads)

    def apply(self, engine: Engine) -> None:
        """On the engine's thread. An engine without CPU threads leaves the cores to other nodes."""
        if engine.loaded:
            engine.set_threads(self._share.threads)
            self._measured = self._measured or engine.threads
            if not engine.threads:
                self._share.leave()

    def follow(self, scheduler: Scheduler) -> None:
        """Called often: when a node on this machine starts or ends, the engine gets another number of threads."""
        now = time.monotonic()
        waits = self._pending and not self._pending.done()
        if waits or not scheduler.engine.threads or now - self._looked_at < self._timeouts.look_for_nodes_s:
            return
        self._looked_at = now
        with suppress(NodeBusy):  # the node is stopping
            if self._share.threads != scheduler.engine.threads:
                self._pending = scheduler.post(lambda: self.apply(scheduler.engine))
            elif scheduler.engine.threads != self._measured and not scheduler.unfinished and not scheduler.working:
                self._pending = scheduler.post(lambda: self._tell(scheduler.engine))

    def _tell(self, engine: Engine) -> None:
        """What was measured with another number of threads is no longer true."""
        if engine.loaded:
            before, self._measured = self._measured, engine.threads
            self.on_change(before, engine.threads)
