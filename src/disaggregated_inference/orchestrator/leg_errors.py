"""How one leg of a request fails: whose fault it is, and whether another node may do better."""

from disaggregated_inference.errors import BadRequest, DisaggError

# Errors of a decode node that mean: the prefill leg failed.
_PREFILL_CODES = frozenset(
    {
        "peer_gone",
        "peer_failed",
        "peer_refused",
        "ticket_refused",
        "identity_refused",
        "protocol_error",
        "checksum_mismatch",
        "version_unsupported",
        "fingerprint_mismatch",
    }
)


class LegFailed(Exception):
    """One leg of a request failed, and another node may do better.

    `node_gone`: the node itself, not only this request. `timed_out`: it may only be slow. `connection_broke`: it may be
    the connection alone. `tainted`: what this attempt brought before may be wrong."""

    def __init__(
        self,
        node: str,
        code: str,
        message: str,
        *,
        node_gone: bool = False,
        timed_out: bool = False,
        connection_broke: bool = False,
        tainted: bool = False,
    ) -> None:
        super().__init__(f"{node}: {message}")
        self.node, self.code, self.message, self.tainted = node, code, message, tainted
        self.node_gone, self.timed_out, self.connection_broke = node_gone, timed_out, connection_broke

    def reason_for(self, node: str) -> str:
        """Where `node` is named beside it: without the name, unless another node says so."""
        return self.message if node == self.node else str(self)

    @property
    def of_prefill(self) -> bool:
        return self.code in _PREFILL_CODES


class LegBusy(Exception):
    """The node is healthy and has no room for this request now."""

    def __init__(self, node: str, message: str, retry_after_s: float) -> None:
        super().__init__(f"{node}: {message}")
        self.node, self.retry_after_s = node, retry_after_s


class NodeRefused(DisaggError):
    """A node refuses the request itself: another node would refuse it too."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self._code, self.param = status, code, param

    @property
    def code(self) -> str:
        return self._code


class RequestRefused(NodeRefused, BadRequest):
    """The request is wrong. A caller that catches `BadRequest` need not know whether the client or a node found out."""


def refusal(status: int, code: str, message: str, param: str | None = None) -> NodeRefused:
    """404 and 504 are refusals too, but not because the request is wrong."""
    kind = RequestRefused if status in (400, 413, 422) else NodeRefused
    return kind(status, code, message, param)
