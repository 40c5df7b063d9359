"""No click is lost.

The browser tells the server once of each click. Streamlit forgets a click when the next message comes before its
callbacks have begun or while one of them uses `st`, and those that wait when the browser leaves. Here callbacks run to
their end before anything else is looked at, and clicks that wait are carried out. So buttons act in callbacks alone,
and the session asks for `runner.fastReruns: false`: then messages wait in one queue, which keeps every click.
"""

from typing import Any

from streamlit.runtime.scriptrunner import script_runner
from streamlit.runtime.scriptrunner_utils.script_requests import (
    RerunData,
    ScriptRequest,
    ScriptRequests,
    ScriptRequestType,
)
from streamlit.runtime.state import SafeSessionState


class _CallbacksFirst(SafeSessionState):
    """The state of a session. While callbacks run, no other request interrupts."""

    def on_script_will_rerun(self, *args: Any, **kwargs: Any) -> None:
        interrupt = self._yield_callback
        object.__setattr__(self, "_yield_callback", _nothing)
        try:
            super().on_script_will_rerun(*args, **kwargs)
        finally:
            object.__setattr__(self, "_yield_callback", interrupt)


def _nothing() -> None:
    pass


class _LastClickToo(ScriptRequests):
    """The requests of a session. An end that is asked for comes after the request that waits."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = False

    def request_rerun(self, new_data: RerunData) -> bool:
        self._ends = False
        return super().request_rerun(new_data)

    def request_stop(self) -> None:
        with self._lock:
            self._ends = self._state is ScriptRequestType.RERUN
        if not self._ends:
            super().request_stop()

    def on_scriptrunner_yield(self) -> ScriptRequest | None:
        return self._last(super().on_scriptrunner_yield())

    def on_scriptrunner_ready(self) -> ScriptRequest:
        request = self._last(super().on_scriptrunner_ready())
        assert request is not None
        return request

    def _last(self, request: ScriptRequest | None) -> ScriptRequest | None:
        if self._ends and request is not None:
            self._ends = False
            super().request_stop()  # this one is carried out
        return request


def keep_every_click() -> None:
    """Before the first session."""
    for ours in (_CallbacksFirst, _LastClickToo):
        theirs = ours.__base__
        assert theirs
        assert issubclass(getattr(script_runner, theirs.__name__), theirs)
        setattr(script_runner, theirs.__name__, ours)
