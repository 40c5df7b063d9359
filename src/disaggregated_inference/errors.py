"""Every error the project raises on purpose. Each says what to do, and knows its HTTP status.

DisaggError
├── ModelError
│   ├── ModelNotFound          404  no such name, alias or path
│   ├── ModelExists            409  a name that is taken
│   ├── ModelUnsupported       422  an architecture or file the engines cannot run exactly
│   └── ModelDamaged           500  files missing, cut short or not what the checksum says
├── EngineError
│   ├── EngineUnavailable      503  its package is missing, or a version nobody has proven
│   ├── EngineMismatch         500  the engine does not compute what the model says (RoPE)
│   └── EngineFailed           502  the server that computes for this node failed, or broke off
├── KVError
│   ├── SliceRefused           400  a slice of the wrong shape, dtype, layer or place
│   ├── TokensRefused          400  token ids outside the vocabulary, or not one per sequence
│   ├── SequenceBroken         500  an earlier call failed half-way; close it and start again
│   ├── FingerprintMismatch    409  two sides do not hold the same model
│   ├── KVMemoryFull           503  no room for the sequence's KV
│   └── RequestTooLarge        413  more KV than this node could ever hold
├── WireError
│   ├── ProtocolError          502  frames out of order, too large, or not ours
│   ├── VersionUnsupported     502  the other side speaks another version
│   ├── ChecksumMismatch       502  a frame arrived damaged
│   ├── PeerGone               503  the connection ended in the middle
│   ├── PeerFailed             502  the other side told us why it stopped
│   ├── PeerRefused            409  the canary shows that the other side computes something else
│   ├── TicketRefused          403  unknown, spent or expired ticket, or a wrong secret
│   ├── TicketNotFound         404  a ticket to cancel that is not there
│   └── Cancelled              499  the other side no longer wants it
├── BadRequest                 400  a request that cannot be understood, or asks for what is not there
│   ├── UnknownOption          400  an option that requests do not have (also a TypeError)
│   ├── MessagesRefused        400  chat messages that the model's template cannot render
│   ├── BodyTooLarge           413  a request body beyond the limit
│   └── RequestTooSlow         408  a request that did not come in time
├── NodeBusy                   503  the queue is full
│   └── NodeDraining           503  the node is stopping and takes no new work
├── NodeRestarted              409  the node is not the one that was meant: it was started again since
├── ClusterError               503  nobody in the cluster can serve this now
│   ├── NoDecodeNode           503  no node is left that could write the answer
│   └── QueueFull              503  more requests wait for a node than should; come back later
├── Unauthorized               401  no key, or one that nobody has
├── NotForThisKey              403  what shows more of the cluster than the key is for
├── RateLimited                429  more requests a minute than the key is for
├── NotOffered                 501  what an API has and a cluster cannot do
├── ConfigError                400  a configuration that cannot be understood, or contradicts itself
├── DeadlineExceeded           504  the request's time was over before it was done
└── ContextTooLong             400  prompt plus answer exceed the context window
"""


class DisaggError(Exception):
    """Base of the tree; `code` is the stable machine-readable name."""

    status = 500

    @property
    def code(self) -> str:
        name = type(self).__name__
        return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


class ModelError(DisaggError):
    """Something about the model's name or files."""


class ModelNotFound(ModelError):
    status = 404


class ModelExists(ModelError):
    status = 409


class ModelUnsupported(ModelError):
    status = 422


class ModelDamaged(ModelError):
    pass


class EngineError(DisaggError):
    """Something about the inference engine."""


class EngineUnavailable(EngineError):
    status = 503


class EngineMismatch(EngineError):
    pass


class EngineFailed(EngineError):
    status = 502


class KVError(DisaggError):
    """Something about the KV cache or its hand-off."""


class SliceRefused(KVError):
    status = 400


class TokensRefused(KVError):
    status = 400


class SequenceBroken(KVError):
    pass


class FingerprintMismatch(KVError):
    status = 409


class KVMemoryFull(KVError):
    """`retry_after_s`, where it is known, is when there is likely room."""

    status = 503
    retry_after_s: int

    @property
    def code(self) -> str:
        return "kv_memory_full"


class RequestTooLarge(KVError):
    status = 413


class WireError(DisaggError):
    """Something about the connection between two nodes."""

    status = 502


class ProtocolError(WireError):
    pass


class VersionUnsupported(WireError):
    pass


class ChecksumMismatch(WireError):
    pass


class PeerGone(WireError):
    status = 503


class PeerFailed(WireError):
    """`peer_code` is the error's code on the other side."""

    def __init__(self, peer_code: str, message: str) -> None:
        super().__init__(f"the other side stopped: {message} ({peer_code})")
        self.peer_code = peer_code


class PeerRefused(WireError):
    status = 409


class TicketRefused(WireError):
    status = 403


class TicketNotFound(WireError):
    status = 404


class Cancelled(WireError):
    status = 499


class BadRequest(DisaggError):
    """`param` names the field of the request that is wrong."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownOption(BadRequest, TypeError):
    pass


class MessagesRefused(BadRequest):
    pass


class BodyTooLarge(BadRequest):
    status = 413


class RequestTooSlow(BadRequest):
    status = 408


class NodeBusy(DisaggError):
    """`retry_after_s`, where it is known, is when there is likely a place."""

    status = 503
    retry_after_s: int


class NodeDraining(NodeBusy):
    pass


class NodeRestarted(DisaggError):
    status = 409


class ClusterError(DisaggError):
    """Something about the nodes as a whole: each may be well, but none can take this request."""

    status = 503


class NoDecodeNode(ClusterError):
    def __init__(self, message: str = "Decode server unavailable - request failed") -> None:
        super().__init__(message)


class QueueFull(ClusterError):
    """`retry_after_s` is when a place is likely free."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(f"{message}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Unauthorized(DisaggError):
    status = 401


class NotForThisKey(DisaggError):
    status = 403


class RateLimited(DisaggError):
    """`retry_after_s` is when the next request may come; `caller` whose key it is."""

    status = 429

    def __init__(self, message: str, retry_after_s: int, caller: str = "") -> None:
        super().__init__(f"{message}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s
        self.caller = caller


class NotOffered(DisaggError):
    status = 501


class ConfigError(DisaggError):
    status = 400


class DeadlineExceeded(DisaggError):
    status = 504


class ContextTooLong(DisaggError):
    status = 400

    def __init__(
        self,
        needed_tokens: int,
        window_tokens: int,
        how_exact: str = "",
        advice: str = "",
        prompt_tokens: int | None = None,
    ) -> None:
        """`prompt_tokens`: of those needed, where it is known; the others are for the answer."""
        words = f"{how_exact}{needed_tokens} tokens do not fit the context window of {window_tokens} tokens"
        if prompt_tokens is not None and prompt_tokens < needed_tokens:
            words += f" ({prompt_tokens} of the prompt, {needed_tokens - prompt_tokens} for the answer)"
        too_long_alone = prompt_tokens is not None and prompt_tokens >= window_tokens
        usual = "shorten the prompt" if too_long_alone else "shorten the prompt, or lower max_tokens"
        super().__init__(f"{words}: {advice or usual}")
        self.needed_tokens = needed_tokens
        self.how_exact = how_exact
        self.window_tokens = window_tokens
