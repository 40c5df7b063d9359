"""The sync client: one event loop on a thread of its own, shared by any number of threads."""

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, overload

from disaggregated_inference.api import (
    ClusterStatus,
    Completion,
    Delta,
    GenerateOptions,
    MergedCompletions,
    RequestOptions,
    named_options,
)
from disaggregated_inference.cluster import ClusterConfig
from disaggregated_inference.errors import ClusterError
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.timeouts import OrchestratorTimeouts

Result = TypeVar("Result")

_CLOSED = "the client was closed before this was done"


class DisaggregatedClient:
    """`DisaggregatedClient()` finds the cluster file, `DisaggregatedClient(path)` reads that one.

        with DisaggregatedClient() as client:
            response, metrics = client.generate(model="qwen", prompt="def fibonacci(n):")

    Threads may share a client. It ends with `close`, with its `with` block, or with the interpreter.
    """

    def __init__(
        self,
        config_path: "str | Path | dict[str, Any] | ClusterConfig | None" = None,
        timeouts: OrchestratorTimeouts = OrchestratorTimeouts(),
    ) -> None:
        self._core = DisaggregatedInference(
            config_path, timeouts
        )  # a bad config is an error before a thread is started
        self._loop_thread = _LoopThread(self._core, timeouts.close_s)
        self._end = weakref.finalize(self, self._loop_thread.shut_down)  # dropped, or at exit
        self._call(self._core.start())

    @property
    def config(self) -> ClusterConfig:
        return self._core.config

    def __enter__(self) -> "DisaggregatedClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends running requests, then the loop and its thread. A second call is harmless."""
        self._end()

    @overload
    def generate(
        self, prompt: str | None = None, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> tuple[str, dict[str, Any]]: ...

    @overload
    def generate(
        self, prompt: str | None = None, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Iterator[str]: ...

    @named_options
    def generate(
        self, prompt: str | None = None, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> tuple[str, dict[str, Any]] | Iterator[str]:
        """`(response, metrics)`; with `stream=True` an iterator of texts."""
        if stream:
            return (delta.text for delta in self.stream(prompt, **options) if delta.text)
        answer = self._call(self._core.generate(prompt, **options))
        return answer["response"], {name: value for name, value in answer.items() if name != "response"}

    @named_options
    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer, typed: `.text`, `.choices`, and `.record` with every metric."""
        return self._call(self._core.complete(prompt, **options))

    @named_options
    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generator[Delta, None, None]:
        """Deltas of text as they are generated; the last one has the metrics. Leaving the loop cancels the rest."""
        items: queue.SimpleQueue[Delta | BaseException | None] = queue.SimpleQueue()
        pumping = self._loop_thread.post(self._pump(items, prompt, options))
        pumping.add_done_callback(lambda _: items.put(ClusterError(_CLOSED)))  # if nothing else came
        try:
            while (item := items.get()) is not None:
                if isinstance(item, BaseException):
                    self._loop_thread.end_with_the_interpreter()
                    raise item
                yield item
        finally:
            pumping.cancel()

    async def _pump(self, items: "queue.SimpleQueue[Any]", prompt: str | None, options: GenerateOptions) -> None:
        try:
            async for delta in self._core.stream(prompt, **options):
                items.put(delta)
            items.put(None)
        except Exception as error:
            items.put(error)

    def generate_many(self, requests: Sequence[RequestOptions | Mapping[str, Any]]) -> dict[str, Any]:
        """Several models or prompts at once: `results` in order, and `speedup`."""
        return self._call(self._core.generate_many(requests))

    def complete_many(self, requests: Sequence[RequestOptions | Mapping[str, Any]]) -> MergedCompletions:
        """The same, typed."""
        return self._call(self._core.complete_many(requests))

    def health(self) -> dict[str, Any]:
        return self._call(self._core.health())

    def status(self) -> dict[str, Any]:
        return self._call(self._core.status())

    def cluster_status(self) -> ClusterStatus:
        """`status()`, typed."""
        return self._call(self._core.cluster_status())

    def history(self, count: int = 10, model: str | None = None) -> list[dict[str, Any]]:
        return self._core.history.recent(count, self.config.resolve_model(model) if model else None)

    def _call(self, work: "Coroutine[Any, Any, Result]") -> Result:
        future = self._loop_thread.post(work)
        try:
            return future.result()
        except BaseException as error:  # also if the caller is interrupted
            future.cancel()
            self._loop_thread.end_with_the_interpreter()
            if isinstance(error, CancelledError):
                raise ClusterError(_CLOSED) from None
            raise


class _LoopThread:
    """An event loop on a thread of its own. Posted work always ends, whatever happens to the loop."""

    def __init__(self, core: DisaggregatedInference, close_s: float) -> None:
        self._core, self._loop, self._close_s = core, asyncio.new_event_loop(), close_s
        self._lock, self._closed, self._process = threading.Lock(), False, os.getpid()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="disagg-client", daemon=True)
        self._thread.start()

    def post(self, work: "Coroutine[Any, Any, Result]") -> "Future[Result]":
        with self._lock:  # work that is posted before the end is ended by it
            if not (refusal := self._refusal()):
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        self.end_with_the_interpreter()
        raise ClusterError(refusal)

    def _refusal(self) -> str:
        if self._process != os.getpid():
            return "this client was made before a fork; make one in each process"
        if self._closed:
            return "this client was closed; make a new one"
        if threading.current_thread() is self._thread:
            return "the sync client was called on its own event loop; use DisaggregatedInference there"
        return ""

    def shut_down(self) -> None:
        """Also if the last reference was dropped on the loop's own thread, which cannot wait for itself, and in a child
        process, which has the loop but not its thread."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._ended(), self._loop)
        if self._thread is not threading.current_thread():
            with suppress(TimeoutError, CancelledError):
                ending.result(self._close_s)
            self._thread.join(self._close_s)

    async def _ended(self) -> None:
        try:
            await self._core.aclose()
        finally:
            self._loop.stop()

    def end_with_the_interpreter(self) -> None:
        """A daemon thread's call that ends with the interpreter prints no traceback."""
        if self._closed and threading.current_thread().daemon and not threading.main_thread().is_alive():
            threading.Event().wait()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
