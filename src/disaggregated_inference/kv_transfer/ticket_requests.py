"""Requests about a ticket whose KV is not fetched now: the prompt's tokens, a longer lease, its end."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle

import msgspec

from disaggregated_inference.errors import ChecksumMismatch, DisaggError, PeerFailed, PeerGone
from disaggregated_inference.kv_transfer.frames import Kind
from disaggregated_inference.kv_transfer.messages import Hello
from disaggregated_inference.kv_transfer.paths import NetworkPath
from disaggregated_inference.kv_transfer.receiver import fetch_tokens, handshake, renew, send_hello
from disaggregated_inference.kv_transfer.stoppable import StoppableWork, require_path_error


def fetch_prompt(
    hello: Hello,
    count: int,
    vocabulary: int,
    paths: Sequence[NetworkPath],
    on_cancel: Callable[[Callable[[DisaggError], None]], None] = lambda stop: None,
) -> list[int]:
    """The prompt's token ids, over the first path that works. Fails when every path has failed for `redial_s`.
    `on_cancel` receives a function that ends the fetch with an error, from another thread."""
    attempts, started = StoppableWork(), time.monotonic()
    on_cancel(attempts.stop)
    for path in cycle(paths):
        attempts.raise_if_stopped()
        try:
            return fetch_tokens(attempts.use(path.dial()), hello, count, vocabulary)
        except (PeerGone, ChecksumMismatch, PeerFailed) as error:
            attempts.raise_if_stopped()  # cancelled, so the path is not to blame
            require_path_error(error)
            path.record_failure(error)
            redial_s, last = path.timeouts.redial_s, path is paths[-1]
            if last and time.monotonic() - started > redial_s:
                raise
            attempts.pause(redial_s / 5 if last else 0)
    raise AssertionError("a fetch has at least one path")


def renew_lease(hello: Hello, paths: Sequence[NetworkPath]) -> float:
    """Renew the lease of KV that will be fetched later, over the first path that works. Returns the lease in seconds;
    raises why the ticket has none any more, or that the prefill node does not answer."""
    for path in paths:
        try:
            return renew(path.dial(), hello)
        except (PeerGone, PeerFailed) as error:
            require_path_error(error)
            path.record_failure(error)
    raise PeerGone("the prefill node does not answer")


def cancel_ticket(hello: Hello, paths: Sequence[NetworkPath]) -> None:
    """Tell the sender that this KV will not be fetched. Uses the first path on which the sender answers."""
    for path in paths:
        with suppress(DisaggError):
            connection = path.dial()
            try:
                tokens_only = msgspec.structs.replace(hello, tokens_only=True)
                if hello.keyed is True:  # the key of CANCEL comes with WELCOME
                    handshake(connection, tokens_only)
                else:
                    send_hello(connection, tokens_only)
                connection.send_message(Kind.CANCEL)
                connection.receive_header()
            finally:
                connection.close()
            return
