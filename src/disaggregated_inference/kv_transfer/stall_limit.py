"""How long a fetch waits for connections that fall silent: a limit for all of them together."""

import time
from collections.abc import Callable

from disaggregated_inference.kv_transfer.frames import Connection
from disaggregated_inference.timeouts import TransferTimeouts

_SMALL_S = 0.01  # clocks and timeouts are not more exact


class SilenceLimit:
    """Of one stream. Silence that ends with bytes costs nothing; silence after which a connection is given up counts,
    and each connection may use half of `max_silence_s`. So a line that falls silent again and again costs no more."""

    def __init__(self, timeouts: TransferTimeouts, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeouts, self._clock = timeouts, clock
        self._left_s = timeouts.max_silence_s

    @property
    def reached(self) -> bool:
        """Too little time is left for another connection."""
        return self._left_s < self._timeouts.silence_s / 2

    def watch(self, connection: Connection, probe: Callable[[float], bool] | None) -> None:
        """`probe` tells within the seconds given whether the node behind the connection is alive; None: it did not
        answer a moment ago, so the first silence is the last."""
        opened_at = self._clock()
        allowed_s = min(self._left_s, self._timeouts.max_silence_s / 2)
        usual_s = min(self._timeouts.silence_s, allowed_s)

        def silent_s() -> float:
            return self._clock() - max(opened_at, connection.received_at)

        def keep_waiting() -> bool:
            silent = silent_s()
            if silent < usual_s - _SMALL_S:  # bytes came, and the last wait was for the rest of an earlier silence
                connection.sock.settimeout(usual_s - silent)
                return True
            if probe is None or silent >= allowed_s - _SMALL_S or not probe(self._left_s - silent):
                self._left_s -= silent_s()
                return False
            connection.sock.settimeout(min(usual_s, max(_SMALL_S, allowed_s - silent_s())))
            return True

        connection.sock.settimeout(usual_s)
        connection.keep_waiting = keep_waiting
