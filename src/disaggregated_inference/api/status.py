"""What a node says of itself: `/health`, `/status` and `/model`."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from disaggregated_inference.api.numbers import Amount, Number, Size
from disaggregated_inference.api.readings import Readings
from disaggregated_inference.api.requests import KVSecurity
from disaggregated_inference.api.sampling import TokenId
from disaggregated_inference.kv import Fingerprint

Role = Literal["prefill", "decode", "both"]


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """How fast work of `size` to just under twice `size` goes. Size is prompt tokens for prefill; for decode it is the
    batch size, and `tokens_per_s` is that of the whole batch."""

    size: Number
    tokens_per_s: Amount
    samples: Number = 1
    measured_size: Number = 0  # of the work that had this speed; 0: not told


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    prefill: tuple[Rate, ...] = ()
    decode: tuple[Rate, ...] = ()
    local_prefill: tuple[Rate, ...] = ()  # prompts that a decode node prefills itself


class SlotStatus(msgspec.Struct, frozen=True):
    used: Number = 0
    most: Number = 1


class QueueDepth(msgspec.Struct, frozen=True):
    waiting: Number = 0  # for memory or a slot
    retry_after_s: Number = 1


class KVMemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`limit_bytes` is what one answer may have, `reserved_bytes` what is promised of it. A node of both roles has two
    budgets, and a request takes from one of them: `total_*`, the peaks and `held_bytes` are of both."""

    limit_bytes: Number = 0
    reserved_bytes: Number = 0
    total_limit_bytes: Number = 0
    total_reserved_bytes: Number = 0
    peak_reserved_bytes: Number = 0
    held_bytes: Number = 0
    peak_held_bytes: Number = 0


class PathStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A network path to a prefill node. Goodput is that of recent slices while they arrived, without waiting time."""

    host: str
    port: Annotated[int, Meta(ge=0, le=65535)]
    goodput_bytes_s: Amount | None = None
    payload_bytes: Number = 0
    connections: Number = 0
    failures: Number = 0
    last_error: str | None = None  # for people
    last_error_code: str | None = None  # for programs; see `failure_code` in kv_transfer/paths.py
    idle_s: Amount | None = None  # since KV last came this way; None: never


class PeerStatus(msgspec.Struct, frozen=True):
    """What the canary prompt showed about a prefill node."""

    epoch: str
    refused: str | None = None
    distance: float | None = None
    identity: str = ""  # the peer's name, where the connection proves it


class TicketEndings(msgspec.Struct, frozen=True):
    fetched: Number = 0
    cancelled: Number = 0
    expired: Number = 0


class AnyHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`/health` of any program: it tells a node or a gateway from others."""

    status: str | None = None
    role: str | None = None  # a node's, or "gateway"


class StartLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of JSON that a server prints while it starts, and that the program which started it reads. `role` and
    `model` are of "start" and "ready"; what stands below `step` is of "ready", and each server has some of it."""

    event: Literal["start", "step", "ready", "stopping"]
    role: Role | None = None
    model: str = ""
    engine: str = ""  # of "start"
    profile: str | None = None  # of "start"
    step: str = ""  # of "step"
    part: float | None = None  # of it that is done; lines with it are for people alone
    port: int = 0
    host: str = ""
    scheme: Literal["", "http", "https"] = ""
    url: str = ""
    dashboard: str = ""
    backend: str = ""  # the engine
    kv_port: int = 0
    kv_addresses: tuple[str, ...] = ()
    kv_limit_bytes: int | None = None
    ollama: str = ""  # its address
    seconds: float | None = None


class LoadedModel(msgspec.Struct, frozen=True):
    """A model in Ollama's memory, of its `/api/ps`."""

    name: str = ""
    model: str = ""
    size: int = 0
    size_vram: int = 0
    digest: str = ""
    expires_at: str = ""
    context_length: int = 0  # 0: an old version


class OllamaStatus(msgspec.Struct, frozen=True, kw_only=True):
    url: str = ""
    version: str = ""
    running: LoadedModel | None = None


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`/health`. A node of another version may say more, or less."""

    status: Literal["healthy", "loading", "draining", "unhealthy"] = "unhealthy"
    model: str = ""
    loaded: bool = True
    backend: str = ""  # the engine
    role: Role = "both"
    epoch: str = ""  # of this run: a restarted node has another
    stalled_s: Amount = 0.0  # how long the engine has been at one call
    reason: str | UnsetType = UNSET  # why it is unhealthy
    ollama: OllamaStatus | UnsetType = UNSET  # of a node in front of one


class NodeStatus(NodeHealth, frozen=True, kw_only=True):
    """`/status`: what a router needs to decide."""

    dtype: str = ""
    threads: Number = 0  # of the CPU, for computing; 0: the engine computes on another device
    context_window: Number = 0
    kv_token_bytes: Number = 0
    waiting: Number = 0  # open requests, running ones included
    waiting_tokens: Number = 0  # of their prompts, still to be prefilled
    running: Number = 0  # answers in the decode batch
    working: Number = 0  # requests that the engine computes for: prompts that are read, answers that are written
    exports: bool = True  # KV
    imports: bool = True
    whole_answers: bool = False  # a prefill node whose engine also writes answers, without KV from other nodes
    prompt_logprobs: bool = False  # the engine can compute them
    queue: QueueDepth = QueueDepth()
    slots: SlotStatus = SlotStatus()
    kv: KVMemoryStatus = KVMemoryStatus()
    prefixes: dict[str, Number] = {}  # the prefix cache's counters
    integrity_faults: Number = 0
    prompt_tokens_computed: Number = 0
    tokens_written: Number = 0
    canary_tokens: Number = 0
    steps: Number = 0
    tickets: Number = 0
    endings: TicketEndings = TicketEndings()
    kv_addresses: tuple[str, ...] = ()
    identity: str = ""  # the node's name in its certificate
    kv_security: KVSecurity | UnsetType = UNSET  # of the KV connections to it
    trusted_link: str = ""  # the words with which its user declares the network between the nodes trusted
    paths: tuple[PathStatus, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    rates: Rates = Rates()
    readings: Readings | None = None  # None: none yet, or a node of an earlier version
    tokenizer: Literal["none"] | UnsetType = UNSET  # of a node that takes text


class ModelIdentity(msgspec.Struct, frozen=True):
    """Identity of a model without a fingerprint: enough to tell two models apart."""

    architecture: str = ""
    parameters: Number = 0


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model's weights as this node loads them. Empty and 0: unknown."""

    format: str = ""  # safetensors, gguf or simulated
    quantization: str = ""
    parameters: Number = 0
    size_bytes: Number = 0


class TokenizerContent(msgspec.Struct, frozen=True, kw_only=True):
    """`/model/tokenizer`: from it another process makes the same tokenizer."""

    tokenizer: str  # the content of a tokenizer.json
    chat_template: str
    special: dict[str, str]  # token by name, such as bos_token, for the chat template


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`/model`. A node without a fingerprint hands out neither KV nor tokenizer, and takes text."""

    model: str = ""
    context_window: Size
    vocabulary: Size | None = None
    eos_tokens: tuple[TokenId, ...] = ()
    fingerprint: Fingerprint | None = None
    text_identity: str = ""  # of its tokenizer: how tokens become text
    identity: ModelIdentity = ModelIdentity()
    exports: bool | UnsetType = UNSET
    imports: bool | UnsetType = UNSET
    tokenizer: Literal["none"] | UnsetType = UNSET  # of a node that takes text
    stored: StoredModel = StoredModel()
    capabilities: tuple[str, ...] | None = None  # by Ollama's names; None: unknown, or the tokenizer shows them

    def differences(self, other: "ModelInfo") -> list[str]:
        """One line per disagreement; none: both nodes may answer for one model."""
        if self.fingerprint and other.fingerprint:
            return self.fingerprint.differences(other.fingerprint)
        if self.fingerprint or other.fingerprint:
            takes = {True: "tokens", False: "text only"}
            return [f"it takes {takes[bool(other.fingerprint)]}, not {takes[bool(self.fingerprint)]}"]
        mine, theirs = self.identity, other.identity
        return [] if mine == theirs else [f"{theirs.architecture} of {theirs.parameters} parameters there"]
