"""Every time limit that decides when a component gives up, retries or looks again, in one structure.

Components take their part as a constructor argument, with these defaults. Tests pass other values instead of patching
modules. What a user configures per request or per cluster (`timeout_s`, `prefill_timeout_s`, ...) is not here.
"""

import msgspec


class TransferTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """KV transfer between two nodes (package `kv_transfer`)."""

    dial_s: float = 0.9  # to connect to a KV address, and for every answer on that connection
    redial_s: float = 0.3  # while all paths fail, a fetch dials them again for this long
    silence_s: float = 0.5  # of a sender; then the receiver probes it on another connection
    probe_s: float = 0.4  # for the answer to that probe; slow peers get more, up to max_probe_s
    max_probe_s: float = 0.8
    max_silence_s: float = 1.3  # of one fetch, over all its connections: a request fetches twice, within 3 s
    avoid_path_s: float = 10.0  # a path that failed is tried last for this long
    goodput_s: float = 2.0  # a path's goodput is an average over about this much time of receiving
    renew_s: float = 5.0  # a receiver renews its lease this often, or every third of it, never below min_renew_s
    min_renew_s: float = 0.1
    hello_s: float = 3.0  # for the whole HELLO of a new connection
    handshake_s: float = 3.0  # for the TLS handshake of a connection that another node opened
    log_unadmitted_s: float = 60.0  # connections that end before their HELLO is accepted: one line in the log per this
    heartbeat_s: float = 0.2  # a sender that waits for its engine sends ALIVE this often
    last_words_s: float = 0.2  # for the peer's error after a failed send
    poll_copy_s: float = 0.0002  # how often the sender checks whether a device copy has finished
    close_s: float = 1.0  # for the peer to read the last frame before a connection is closed


class IdentityTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and certificates of a node or client (package `identity`)."""

    reload_s: float = 1.0  # how often changed files are looked for


class HttpTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server of nodes and gateway (package `http`)."""

    handshake_s: float = 5.0  # for a TLS handshake
    read_s: float = 20.0  # for a request's head, and for its body plus one second per 16 KiB
    keepalive_s: float = 5.0  # a stream with nothing to send sends a comment this often
    early_error_s: float = 0.25  # an error of a stream within this time gets its own HTTP status
    last_words_s: float = 5.0  # after the drain, for responses to end with an error


class NodeTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill or decode node (package `node`)."""

    transfer: TransferTimeouts = TransferTimeouts()
    tick_s: float = 0.2  # the node's housekeeping thread: leases, deadlines, idle unload
    check_s: float = 1.0  # how often an idle node checks that its memory adds up
    look_for_nodes_s: float = 1.0  # how often a node looks for others on its machine, to divide the cores
    progress_s: float = 0.1  # at most this often a stream reports how much of the prompt was read
    heartbeat_s: float = 0.25  # how often a stream with nothing to send sends a comment
    stall_s: float = 0.05  # how long running requests may wait for a chunk of another prompt
    chunk_s: float = 0.8  # longest chunk while no request is running: a cancelled request frees its memory by then
    linger_s: float = 0.005  # the scheduler spends this long, or a share of a step, on slices and urgent work
    next_slice_s: float = 0.002  # during a KV transfer, the scheduler waits this long for the next slice
    fetch_silence_s: float = 15.0  # a fetching decode node that renews no lease for this long is gone
    unknown_lease_s: float = 3.0  # lease assumed for a prefill node that did not answer
    slow_transfer_s: float = 1.0  # an exposed transfer longer than this is logged
    peer_check_poll_s: float = 0.2  # a request that waits for a peer check looks this often whether it was cancelled
    peer_check_retry_s: float = 0.05  # a peer check that found no memory tries again after this time


class OllamaTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """A node in front of an Ollama (package `ollama_node`)."""

    dial_s: float = 3.0
    small_request_s: float = 5.0  # for requests that need no computing
    early_error_s: float = 1.0  # an error of a stream within this time gets its own HTTP status; loading takes longer
    heartbeat_s: float = 0.25  # how often a stream with nothing to send sends a comment
    health_s: float = 0.5  # how long one check of Ollama's health is good for
    unload_s: float = 2.0  # until Ollama has really unloaded a model
    identity_s: float = 5.0  # how long a loaded model is taken to be the same one
    reload_s: float = 5.0  # until a failed load is tried again


class OrchestratorTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The orchestrator (package `orchestrator`)."""

    first_status_s: float = 3.0  # a request waits this long for the first status of its model's nodes
    idle_connection_s: float = 2.0  # shorter than a node's keep-alive: no request goes into a closing connection
    dial_s: float = 1.0
    small_body_s: float = 5.0  # for the rest of a small response that has begun
    watch_s: float = 0.4  # how often a request without a response has its node's health probed
    probe_s: float = 0.45  # for that probe; slow nodes get more, up to max_probe_s
    max_probe_s: float = 4.0
    heartbeat_tick_s: float = 0.1
    late_tick_s: float = 0.2  # a tick this late shows that this process itself was held up
    silence_s: float = 0.4  # of a stream; then its node is probed
    max_silence_s: float = 3.0  # of a stream whose node answers probes: the connection is broken
    late_poll_s: float = 0.3
    missing_model_s: float = 60.0  # all nodes of a model may be away this long and still be that model
    poll_missing_s: float = 0.25  # how often a missing node is polled
    identify_s: float = 10.0  # how long it is known what answers at a port that is no node's
    tokenizer_s: float = 15.0  # for fetching a tokenizer from a node
    busy_wait_s: float = 2.0  # longest wait for a busy node before planning again
    poll_s: float = 0.05  # how often a waiting request looks for a usable node
    explore_s: float = 60.0  # a node unused for this long gets a request again
    explore_doubtful_s: float = 5.0  # the same for a node that became slow, or was measured only at its start
    no_node_s: float = 10.0  # for nodes that are there and take no request at the moment
    come_back_s: float = 0.5  # a node that was there a moment ago gets this long, once
    history_lock_s: float = 2.0  # for another process that holds the history file
    cancel_s: float = 2.0  # for a node to take a cancellation; then the ticket's lease ends it
    close_s: float = 5.0  # for running requests to end when a client is closed


class GatewayTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway (package `gateway`)."""

    event_poll_s: float = 1.0  # how often the event stream looks at the cluster
    event_quiet_s: float = 5.0  # an unchanged status is sent again this often
    reload_body_s: float = 60.0  # for requests whose body was still on its way
    trace_interval_s: float = 1.0  # how often finished traces are sent
    trace_send_s: float = 5.0  # for one batch of traces, retries included
    trace_flush_s: float = 3.0  # for the last traces when the gateway stops
