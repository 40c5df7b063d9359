"""Blocking work beside the event loop, on a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

Result = TypeVar("Result")

_AT_ONCE = 32  # threads of one event loop; a crowd of clients waits for its turn, and cannot make thousands
_turns: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = WeakKeyDictionary()


async def in_thread(work: Callable[[], Result]) -> Result:
    """As `asyncio.to_thread`, but it also works after the main thread has ended, when the default pool refuses."""
    loop = asyncio.get_running_loop()
    turns = _turns.setdefault(loop, asyncio.Semaphore(_AT_ONCE))
    await turns.acquire()
    done: asyncio.Future[Result] = loop.create_future()

    def tell(result: Result | None, error: BaseException | None) -> None:
        turns.release()  # not before: a caller that was cancelled leaves its work running
        if not done.done():
            done.set_exception(error) if error else done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:
            return  # the loop was closed: no caller waits

    threading.Thread(target=run, name="disagg-work", daemon=True).start()
    return await done
