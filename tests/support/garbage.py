"""What only the garbage collector would free."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ROOMS = ("disaggregated_inference", "uvicorn", "starlette", "h11")
_FILES = ("/disaggregated_inference/", "/aiohttp/", "/aiohappyeyeballs/", "/asyncio/")


@contextmanager
def garbage() -> Iterator[list[str]]:
    """The names, in the end, of objects of requests and of frames that hold them."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += sorted({name for each in gc.garbage if (name := _name(each))})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _name(each: object) -> str:
    if isinstance(each, FrameType):
        path = each.f_code.co_filename
        return f"{path}:{each.f_code.co_name}" if any(part in path for part in _FILES) else ""
    kind = type(each)
    return f"{kind.__module__}.{kind.__qualname__}" if str(kind.__module__).startswith(_ROOMS) else ""
