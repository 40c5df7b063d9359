"""Work over connections to one peer, which another thread may stop, and which goes on over another path."""

import threading

from disaggregated_inference.errors import DisaggError, NodeRestarted, PeerFailed
from disaggregated_inference.kv_transfer.frames import Connection


class StoppableWork:
    """Work over connections, one at a time for each stream. Another thread may `stop` it at any time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.connections: dict[int, Connection] = {}  # by stream number

    def stop(self, error: BaseException) -> None:
        """End now with this error, unless the work has failed already. The sender is told."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()
            connections = list(self.connections.values())
        for connection in connections:
            connection.cancel(error)

    def use(self, connection: Connection, stream: int = 0) -> Connection:
        with self.changed:
            if self.error:
                connection.sock.close()
                raise self.error
            self.connections[stream] = connection
        return connection

    def pause(self, seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.error, seconds)
        self.raise_if_stopped()

    def raise_if_stopped(self) -> None:
        if self.error:
            raise self.error


def require_path_error(error: DisaggError) -> None:
    """Raise errors that another path would not cure. A restarted node is one that it may: another path may lead to
    another node."""
    if isinstance(error, PeerFailed) and error.peer_code != NodeRestarted("").code:
        raise error
