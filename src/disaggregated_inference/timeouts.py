"""Every time limit that decides when a component gives up, retries or looks again, in one structure.

Components take their part as a constructor argument, with these defaults. Tests pass other values instead of patching
modules. What a user configures per request or per cluster (`timeout_s`, `prefill_timeout_s`, ...) is not here, nor are
windows of measurements. Files that must run without this package (`supervise.py`, `guard.py`, `path_probe.py`,
`device_check.py` of torch, `vllm_connector/`) have times of their own.
"""

import msgspec


class SystemTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node asks its own machine (packages `engines` and `observe`)."""

    program_s: float = 5.0  # for vm_stat, sysctl or ioreg: they answer at once, unless the machine is in trouble


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


class KVTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Tickets and prefix cache (package `kv`)."""

    early_cancel_s: float = 10.0  # a cancellation that overtakes its prefill counts for this long
    last_writes_s: float = 10.0  # for queued blocks to reach the disk when a node stops
    stale_file_s: float = 3600.0  # a temporary file this old was left by a process that ended


class IdentityTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and certificates of a node or client (package `identity`)."""

    reload_s: float = 1.0  # how often changed files are looked for


class HttpTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server of nodes and gateway (package `http`)."""

    handshake_s: float = 5.0  # for a TLS handshake
    read_s: float = 20.0  # for a request's head, and for its body plus one second per 16 KiB
    idle_s: float = 75.0  # of a connection between two requests: longer than clients keep theirs, or they would race
    keepalive_s: float = 5.0  # a stream with nothing to send sends a comment this often
    early_error_s: float = 0.25  # an error of a stream within this time gets its own HTTP status
    last_words_s: float = 5.0  # after the drain, for responses to end with an error


class NodeTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill or decode node (package `node`)."""

    transfer: TransferTimeouts = TransferTimeouts()
    kv: KVTimeouts = KVTimeouts()
    tick_s: float = 0.2  # the node's housekeeping thread: leases, deadlines, idle unload
    check_s: float = 1.0  # how often an idle node checks that its memory adds up
    readings_s: float = 1.0  # how often a node reads its machine: processor, memory, network, GPUs, power
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
    dropped_s: float = 1.0  # for the threads of dropped KV connections to end
    drain_poll_s: float = 0.02  # how often a draining node looks whether its requests have ended
    accept_s: float = 0.5  # where a shutdown does not wake an accept, it ends after this time
    accept_retry_s: float = 0.1  # after an accept that failed, probably for want of file descriptors
    retry_hint_s: int = 5  # the `Retry-After` of a node that has released no memory yet
    max_retry_hint_s: int = 60
    loading_hint_s: int = 5  # the same of a node that loads: small models take seconds, large ones minutes
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


class VllmTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """A node in front of a vLLM (package `vllm_node`)."""

    probe_s: float = 60.0  # to read the version in vLLM's environment: a cold disk is slow
    load_s: float = 3600.0  # for vLLM to load, compile and capture its graphs
    poll_s: float = 0.2  # how often a starting vLLM is looked at
    health_s: float = 2.0  # for one health check, and between two of a ready vLLM
    restart_s: float = 1.0  # until a vLLM that died is started again; doubles with every failure
    max_restart_s: float = 60.0
    settled_s: float = 60.0  # a vLLM that was ready this long starts the back-off anew
    stop_s: float = 15.0  # for vLLM to end after SIGTERM; then its session is killed
    kill_s: float = 10.0  # for a killed session to be gone
    attach_s: float = 600.0  # for a vLLM that the user starts to answer
    dial_s: float = 3.0
    small_request_s: float = 5.0  # for requests that need no computing
    idle_connection_s: float = 2.0  # much shorter than vLLM's 5 s: no request goes into a closing connection
    unattached_s: float = 5.0  # a connector that has not attached by then is asked why, and again after this time
    heartbeat_s: float = 0.25  # how often a stream with nothing to send sends a comment


class VllmBorderTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Between a node and the connector inside vLLM (package `vllm_node`)."""

    send_s: float = 5.0  # for a process of vLLM to take a message
    poll_s: float = 0.5  # how often a starting node looks whether vLLM has ended
    export_s: float = 10.0  # after vLLM's answer, for the rest of the KV to arrive


class BreakerTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The circuit breaker of a node (`orchestrator/breaker.py`)."""

    soft_window_s: float = 30.0  # failures that one request may have caused count together for this long
    first_open_s: float = 0.5  # a breaker that opens lets no request through for this long
    longest_open_s: float = 10.0  # the time doubles with every failed trial, up to this
    trial_s: float = 10.0  # a trial request that has not reported by then is given up
    warm_s: float = 10.0  # a node that came back gets its full share of requests after this time


class ModelTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Models on this machine (package `models`)."""

    progress_s: float = 0.2  # how often the progress of a download is told


class HistoryTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The file of the history (package `orchestrator`)."""

    lock_s: float = 2.0  # for another process that holds it
    close_s: float = 5.0  # for the last records to be written
    read_s: float = 30.0  # for one answer about it
    export_s: float = 600.0  # for all that `disagg history` reads


class OrchestratorTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The orchestrator (package `orchestrator`)."""

    breaker: BreakerTimeouts = BreakerTimeouts()
    first_status_s: float = 3.0  # a request waits this long for the first status of its model's nodes
    idle_connection_s: float = 2.0  # much shorter than a node's: no request goes into a closing connection
    closed_connection_s: float = 0.5  # a kept connection that breaks this soon after a request was closed before it
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
    explore_doubtful_s: float = 5.0  # the same for a node that became slow, or was measured at its start alone
    no_node_s: float = 10.0  # for nodes that are there and take no request at the moment
    retry_hint_s: int = 5  # the `Retry-After` of a full queue before the first request was served
    max_retry_hint_s: int = 60
    node_clock_s: float = 0.1  # a node may notice a deadline this much earlier
    power_sample_s: float = 5.0  # a sample of a node's power says nothing of a moment that is further away
    come_back_s: float = 0.5  # a node that was there a moment ago gets this long, once
    history: HistoryTimeouts = HistoryTimeouts()
    cancel_s: float = 2.0  # for a node to take a cancellation; then the ticket's lease ends it
    close_s: float = 5.0  # for running requests to end when a client is closed


class TopTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """`disagg top` (package `cli`)."""

    dial_s: float = 3.0
    silence_s: float = 15.0  # of the gateway, which sends an event every few seconds
    retry_s: float = 1.0  # until a lost gateway is dialled again
    targets_s: float = 5.0  # how often targets and alarms are asked for


class GatewayTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway (package `gateway`)."""

    event_poll_s: float = 1.0  # how often the event stream looks at the cluster
    event_batch_s: float = 0.5  # events of this time are sent together
    event_quiet_s: float = 5.0  # an unchanged status is sent again this often
    answer_s: float = 2.0  # how long an answer about the history is good for all that ask the same
    answer_hint_s: int = 2  # the `Retry-After` where too many such questions wait
    running_hint_s: int = 1  # the same of a key with too many requests at once: when one of them ends is not known
    ready_hint_s: int = 1  # the same of /ready where no model can be served: nodes are polled that often
    reload_body_s: float = 60.0  # for requests whose body was still on its way
    trace_interval_s: float = 1.0  # how often finished traces are sent
    trace_send_s: float = 5.0  # for one batch of traces, retries included
    trace_flush_s: float = 3.0  # for the last traces when the gateway stops
    release_memory_s: float = 60.0  # how often free memory goes back to the system


class ChaosTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """`disagg chaos` (package `chaos`)."""

    request_s: float = 300.0  # for one request: chaos looks for faults of the cluster, not for a busy machine
    prefill_s: float = 60.0  # of it, for the prefill
    ready_s: float = 120.0  # for all nodes to be used at the start
    settle_s: float = 120.0  # until a node is used again after its fault
    free_s: float = 120.0  # until all memory is free again: leases end before
    idle_s: float = 60.0  # for running requests to end behind a closed gate
    unload_s: float = 10.0  # for a node to unload its model
    leave_s: float = 0.5  # a client of a whole answer leaves within this time
    poll_s: float = 0.2  # how often the number of finished requests is looked at
    dial_s: float = 10.0  # for a line to reach its node: a busy machine accepts late
    min_pause_s: float = 0.2  # between two faults
    max_pause_s: float = 1.2
    min_fault_s: float = 0.3  # a fault lasts at least so long
    max_fault_s: float = 5.0
    show_s: float = 0.5  # how often the line on the terminal changes


class CommandTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Commands that start processes on this machine or ask a node (`local_nodes.py`, `models verify`)."""

    start_s: float = 120.0  # for a server to accept connections
    start_poll_s: float = 0.1
    stop_s: float = 10.0  # for a server to end after SIGTERM; then it is killed
    watch_s: float = 0.2  # how often a command looks whether its servers still run
    parent_s: float = 1.0  # how often a server looks whether the command that started it is gone
    dial_s: float = 1.0
    status_s: float = 10.0  # for a node's answer to a request that needs no computing
    answer_s: float = 300.0  # for the answer of a node that computes


class BenchTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """`disagg bench` (package `bench`)."""

    start_s: float = 120.0  # for every stream to begin
    load_s: float = 1800.0  # for all requests of another load generator
    handshake_s: float = 10.0  # for a TLS handshake of two of its processes


class DeployTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """`disagg cluster`: machines by ssh and their services (package `cluster`)."""

    connect_s: float = 15.0  # for an ssh connection, with its jump hosts
    keepalive_s: float = 15.0  # a silent ssh connection is checked this often
    command_s: float = 120.0  # for a small command
    install_s: float = 3600.0  # to install packages: torch has gigabytes
    model_s: float = 24 * 3600.0  # to fetch a model
    healthy_s: float = 900.0  # for a node to load its model
    poll_s: float = 0.5  # how often a starting node is asked
    report_s: float = 3.0  # how long a machine waits for starting services before it reports
    close_s: float = 5.0  # for an ssh connection to close
    log_order_s: float = 0.5  # log lines wait this long for earlier ones of slower machines
    log_again_s: float = 5.0  # until the log of a machine that is away is tried again
    last_words_s: float = 10.0  # for the error of a service that ended to reach its log
    drain_s: int = 60  # for the requests of a node or gateway that stops; a service manager gives it stop_s
    stop_s: int = 90  # for a service to finish its requests and stop
    gateway_s: float = 200.0  # for an answer through the gateway; a large model may be cold


class ServiceTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that asks its own services (package `cluster/services`)."""

    ask_s: float = 3.0  # for /health, /status and /ready
    poll_s: float = 0.2  # how often starting services are asked
    answer_s: float = 180.0  # for a prompt through the gateway
    ready_s: float = 20.0  # a gateway that has just started does not know its nodes yet
    ready_poll_s: float = 0.5


class DoctorTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """`disagg doctor` (package `doctor`)."""

    program_s: float = 10.0  # for a program of the system, such as nvidia-smi
    engine_s: float = 180.0  # for an engine to start and multiply: the first import of torch on a cold disk is slow
    connect_s: float = 3.0  # to a node's port
    machine_s: float = 300.0  # for the checks on one machine of a cluster
    path_s: float = 60.0  # for the measurement of one path, whose transfer has its own limit of 10 s
