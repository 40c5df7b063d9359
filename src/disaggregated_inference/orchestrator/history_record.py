"""One request in the history: its record, and the plain values that files and clients get.

The plain values may hold fields of other versions, and pass through unchanged. What the code reads, it reads typed.
"""

import time
from typing import Any

from disaggregated_inference.api import RequestRecord

PlainRecord = dict[str, Any]  # as JSON has it
_CALLER = "caller"


class HistoryRecord:
    """Each form is made of the other when it is first read: without a file, most rows never are."""

    __slots__ = ("_caller", "_record", "_row")

    def __init__(self, record: PlainRecord | RequestRecord, caller: str = "") -> None:
        self._caller: PlainRecord = {_CALLER: caller} if caller else {}
        self._record: RequestRecord | None = None
        self._row: PlainRecord | None = None
        if isinstance(record, RequestRecord):
            self._record = record
        else:
            self._row = {"time": time.time()} | record | self._caller

    @property
    def row(self) -> PlainRecord:
        """Other threads may ask at the same time: they get the same."""
        if self._row is None:
            assert self._record is not None
            self._row = self._record.row() | self._caller
        return self._row

    @property
    def record(self) -> RequestRecord:
        if self._record is None:
            assert self._row is not None
            self._record = RequestRecord.of_row(self._row)
        return self._record

    @property
    def caller(self) -> str:
        return self._caller.get(_CALLER) or self.record.caller

    def shown(self) -> PlainRecord:
        """A copy for clients: the caller is there to filter by."""
        return {name: value for name, value in self.row.items() if name != _CALLER}
