"""Every error that the project raises on purpose. Each message says what to do; each class has an HTTP status."""

from collections.abc import Sequence


class DisaggError(Exception):
    """Base class. `code` is the stable name for programs."""

    status = 500

    def __init_subclass__(cls, status: int | None = None) -> None:
        cls.status = status or cls.status

    @property
    def code(self) -> str:
        name = type(self).__name__
        return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


class ModelError(DisaggError):
    """The model's name or files."""


class ModelNotFound(ModelError, status=404):
    """No model with this name, alias or path."""


class ModelExists(ModelError, status=409):
    """The name is already taken."""


class ModelUnsupported(ModelError, status=422):
    """No engine can run this architecture or file exactly."""


class ModelDamaged(ModelError):
    """Files are missing, incomplete or have a wrong checksum."""


class EngineError(DisaggError):
    """The inference engine."""


class EngineUnavailable(EngineError, status=503):
    """The engine's package is missing or an untested version."""


class EngineMismatch(EngineError):
    """The engine computes something else than the model needs (RoPE)."""


class EngineFailed(EngineError, status=502):
    """The server behind this node (Ollama, vLLM) failed."""


class EngineOutOfMemory(EngineError, status=503):
    """The engine found no memory for the model or its KV."""


class KVError(DisaggError):
    """The KV cache or its transfer."""


class SliceRefused(KVError, status=400):
    """A slice has a wrong shape, dtype, layer or position."""


class TokensRefused(KVError, status=400):
    """Token ids outside the vocabulary, or not one per sequence."""


class SequenceBroken(KVError):
    """An earlier call failed; close the sequence and start again."""


class FingerprintMismatch(KVError, status=409):
    """Two nodes do not have the same model."""


class KVMemoryFull(KVError, status=503):
    """No memory left for the sequence's KV. `retry_after_s`: seconds until memory is likely free, if known."""

    retry_after_s: int

    @property
    def code(self) -> str:
        return "kv_memory_full"


class RequestTooLarge(KVError, status=413):
    """The request needs more KV memory than this node has."""


class WireError(DisaggError, status=502):
    """The connection between two nodes."""


class ProtocolError(WireError):
    """Frames are out of order, too large or malformed."""


class VersionUnsupported(WireError):
    """The peer uses another protocol version."""


class ChecksumMismatch(WireError):
    """A frame arrived damaged."""


class PeerGone(WireError, status=503):
    """The connection broke."""


class PeerFailed(WireError):
    """The peer sent an error. `peer_code` is the code of the peer's error."""

    def __init__(self, peer_code: str, message: str) -> None:
        super().__init__(f"the peer stopped: {message} ({peer_code})")
        self.peer_code = peer_code


class PeerRefused(WireError, status=409):
    """The peer check failed: the peer computes other values."""


class IdentityRefused(WireError, status=403):
    """The certificate is not of this cluster, expired or revoked."""


class TicketRefused(WireError, status=403):
    """The ticket is unknown, used or expired, or its secret is wrong."""


class TicketNotFound(WireError, status=404):
    """The ticket to cancel does not exist."""


class Cancelled(WireError, status=499):
    """The peer cancelled the request."""


class BadRequest(DisaggError, status=400):
    """The request is invalid; `param` names the field, if the error is about one."""

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownOption(BadRequest, TypeError):
    """A request has no such option (also a TypeError)."""


class MessagesRefused(BadRequest):
    """The model's chat template cannot render the messages."""


class BodyTooLarge(BadRequest, status=413):
    """The request body is too large."""


class RequestTooSlow(BadRequest, status=408):
    """The request did not arrive in time."""


class RequestDamaged(DisaggError, status=400):
    """The request body is not what its checksum says."""


class NodeBusy(DisaggError, status=503):
    """The node's queue is full. `retry_after_s`: seconds until the queue likely has a place, if known."""

    retry_after_s: int


class ServerBusy(DisaggError, status=503):
    """Too many connections or unfinished requests."""

    retry_after_s = 1


class NodeDraining(NodeBusy):
    """The node is stopping and takes no new requests."""


class NodeLoading(NodeBusy):
    """The node has been started and loads its model: it takes no requests yet."""


class NodeRestarted(DisaggError, status=409):
    """The node was restarted and no longer has the state."""


class ClusterError(DisaggError, status=503):
    """No node can serve the request now, though nodes may be healthy."""


class NoDecodeNode(ClusterError):
    """No decode node is available. `causes`: the reason of each node, after the fixed sentence."""

    def __init__(self, causes: Sequence[str] = ()) -> None:
        sentence = "Decode server unavailable - request failed"
        super().__init__(": ".join([sentence, "; ".join(causes)] if causes else [sentence]))


class QueueFull(ClusterError):
    """The request queue is full. `retry_after_s`: seconds until the queue likely has a place."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(f"{message}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Unauthorized(DisaggError, status=401):
    """Missing or unknown API key."""


class ForeignSite(DisaggError, status=403):
    """A web page of another site sent this request, from a browser on this machine."""


class NotForThisKey(DisaggError, status=403):
    """The key does not allow this."""


class RateLimited(DisaggError, status=429):
    """The key's limit of requests per minute is reached. `retry_after_s`: seconds until the next request is allowed;
    `caller`: name of the key."""

    def __init__(self, message: str, retry_after_s: int, caller: str = "") -> None:
        super().__init__(f"{message}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s
        self.caller = caller


class ConcurrencyExceeded(RateLimited):
    """The key has as many requests at once as it may have."""


class TokensPerMinuteExceeded(RateLimited):
    """The key has used its tokens of this minute."""


class TokensPerDayExceeded(RateLimited):
    """The key has used its tokens of this day."""


class RequestNotFound(DisaggError, status=404):
    """The history has no request with this id."""


class HistoryUnreadable(DisaggError, status=503):
    """The history file is locked or damaged, or the question takes too long."""


class NotOffered(DisaggError, status=501):
    """The cluster does not support this part of the API."""


class PromptLogprobsUnsupported(NotOffered):
    """No engine that could read this prompt computes prompt logprobs."""


class ConfigError(DisaggError, status=400):
    """The configuration is invalid."""


class MachineError(DisaggError, status=503):
    """A machine of the cluster that is reached by ssh. `reason`: the message without the machine's name."""

    def __init__(self, machine: str, reason: str) -> None:
        super().__init__(f"{machine}: {reason}")
        self.machine, self.reason = machine, reason


class MachineUnreachable(MachineError):
    """No ssh connection, or it broke."""


class HostKeyUnknown(MachineError):
    """The machine's host key is not in the user's known_hosts."""


class HostKeyChanged(MachineError):
    """The machine has another host key than the user's known_hosts."""


class LoginRefused(MachineError):
    """The machine takes none of the user's keys."""


class CommandFailed(MachineError, status=500):
    """A command on a machine failed or did not end."""


class MachineMisconfigured(ConfigError, MachineError):
    """What the cluster file says of a machine cannot be done."""


class DeployRefused(MachineError, status=409):
    """A machine cannot be deployed to as it is: Python, disk, memory, port or lock."""


class DeadlineExceeded(DisaggError, status=504):
    """The request's time limit is over."""


class ContextTooLong(DisaggError, status=400):
    """Prompt and completion exceed the context window."""

    def __init__(
        self,
        needed_tokens: int,
        window_tokens: int,
        how_exact: str = "",
        advice: str = "",
        prompt_tokens: int | None = None,
    ) -> None:
        """`prompt_tokens`: how many of the needed tokens are the prompt's, if known."""
        message = f"{how_exact}{needed_tokens} tokens do not fit the context window of {window_tokens} tokens"
        if prompt_tokens is not None and prompt_tokens < needed_tokens:
            message += f" ({prompt_tokens} for the prompt, {needed_tokens - prompt_tokens} for the completion)"
        prompt_too_long = prompt_tokens is not None and prompt_tokens >= window_tokens
        usual = "shorten the prompt" if prompt_too_long else "shorten the prompt, or lower max_tokens"
        super().__init__(f"{message}: {advice or usual}")
        self.needed_tokens = needed_tokens
        self.how_exact = how_exact
        self.window_tokens = window_tokens
