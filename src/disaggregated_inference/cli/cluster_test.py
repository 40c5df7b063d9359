"""`disagg cluster test`: the running cluster, asked as a client would."""

import asyncio
import json
import time
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import msgspec
import typer

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.cli.screen import mute_logs, one_line
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cluster import ClusterConfig, Server, load_config
from disaggregated_inference.cluster.deploy import ask_gateway, figure_of
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.orchestrator import FALLBACK_WARNING, ModelVerdict

_PROMPT = "List the planets of the solar system, and say one thing about each of them. "
_REPEATS, _REPEAT_TOKENS = 12, 160  # twice what one has, if each character is a token
_MAX_TOKENS = 16
_NOWHERE = 9  # the port `discard`: a prefill node that is not there


class Check(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    passed: bool
    figure: str = ""  # what was measured
    why: str = ""  # it failed
    seconds: float = 0.0

    def line(self) -> str:
        return one_line(f"{'ok  ' if self.passed else 'FAIL'}  {self.name}: {self.figure or self.why}")


def run(config: str | None, token_file: str, as_json: bool) -> bool:
    mute_logs()
    loaded, checks = load_config(config, token_file=token_file), []
    for check in run_checks(loaded):
        checks.append(check)
        if not as_json:
            typer.echo(check.line())
    passed = all(check.passed for check in checks)
    if as_json:
        typer.echo(json.dumps({"passed": passed, "checks": msgspec.to_builtins(checks)}, indent=2))
    else:
        typer.echo(f"{sum(check.passed for check in checks)} of {len(checks)} passed")
    return passed


def run_checks(config: ClusterConfig) -> Iterator[Check]:
    yield _checked("health", lambda: _health(config))
    yield from prove_pairs(config)
    yield from prove_gateway(config)
    yield _checked("all models at once", lambda: _together(config))
    for name in config.names:
        if any("prefill" in server.roles for server in config.servers_of(name)):
            yield _checked(f"fallback of {name}", partial(_fallback, config, name))


def prove_pairs(config: ClusterConfig, left_out: Container[str] = ()) -> Iterator[Check]:
    """A prompt through each prefill and decode node of a model. What reports no KV export has no pair. `left_out`:
    names of servers."""
    for name in config.names:
        servers = [server for server in config.servers_of(name) if server.name not in left_out]
        for prefill in (server for server in servers if server.role == "prefill"):
            for decode in (server for server in servers if "decode" in server.roles):
                title = f"{prefill.name} -> {decode.name}, {name}"
                yield _checked(title, partial(_pair, config, name, prefill, decode))


def prove_gateway(config: ClusterConfig, left_out: Container[str] = ()) -> Iterator[Check]:
    """A prompt for each model through the gateway, where one is deployed. `left_out`: names of servers."""
    models = [name for name in config.names if any(_decodes(each, left_out) for each in config.servers_of(name))]
    if not config.gateway.machine or not models:
        return
    began_at = time.monotonic()
    try:
        answers = asyncio.run(ask_gateway(config, models))
    except DisaggError as error:
        yield Check(name="gateway", passed=False, why=str(error), seconds=time.monotonic() - began_at)
        return
    for answer in answers:
        yield _checked(f"gateway, {answer.model}", partial(figure_of, answer), answer.seconds)


def _decodes(server: Server, left_out: Container[str]) -> bool:
    return "decode" in server.roles and server.name not in left_out


def _checked(name: str, work: Callable[[], str], spent_s: float = 0.0) -> Check:
    began_at = time.monotonic() - spent_s
    try:
        figure = work()
    except Exception as error:  # of one check, whatever it is: the others go on
        why = str(error) if isinstance(error, DisaggError) else f"unexpected error: {type(error).__name__}: {error}"
        return Check(name=name, passed=False, why=why, seconds=time.monotonic() - began_at)
    return Check(name=name, passed=True, figure=figure, seconds=time.monotonic() - began_at)


def _health(config: ClusterConfig) -> str:
    with DisaggregatedClient(config) as client:
        client.health()
        status = client.cluster_status()
    down = [f"{node.name}: {node.state}" for node in status.nodes if not node.usable]
    if down or any(verdict != ModelVerdict.ALL_UP for verdict in status.models.values()):
        raise DisaggError(f"{status.verdict} ({'; '.join(down)})")
    return f"{len(status.nodes)} nodes, {status.verdict}"


def _only(config: ClusterConfig, prefill: Server, decode: Server, **policies: Any) -> ClusterConfig:
    """The same cluster with these two nodes alone."""
    decodes = (decode,) if decode.role == "decode" else ()
    both = (decode,) if decode.role == "both" and decode in config.prefill_servers else ()
    return msgspec.structs.replace(
        config,
        prefill_servers=(prefill, *both),
        decode_servers=decodes or ((decode,) if not both else ()),
        links=(),
        policies=msgspec.structs.replace(config.policies, history_file="", **policies),
    )


def _generate(client: DisaggregatedClient, model: str) -> RequestRecord:
    return client.complete(**_request(client.config, model)).record


def _request(config: ClusterConfig, model: str) -> dict[str, Any]:
    """Each prompt is new: a cached one would move no KV. It fits a small context window."""
    window = config.options_of(model).context_window or _REPEATS * _REPEAT_TOKENS
    prompt = f"{time.time_ns()}. {_PROMPT * max(1, min(_REPEATS, window // _REPEAT_TOKENS))}"
    return {"model": model, "prompt": prompt, "max_tokens": _MAX_TOKENS, "temperature": 0.0}


def _pair(config: ClusterConfig, model: str, prefill: Server, decode: Server) -> str:
    with DisaggregatedClient(_only(config, prefill, decode, local="never", fallback=False)) as client:
        record = _generate(client, model)
    if not record.handed_over:
        raise DisaggError(f"no KV was handed over: the method was {record.method}; {record.plan}")
    exposed_ms = (record.exposed_transfer_time or 0.0) * 1e3
    return (
        f"{record.prompt_tokens} tokens read in {record.prefill_time:.3f} s, transfer exposed"
        f" {exposed_ms:.1f} ms, {record.completion_tokens} tokens written at {record.decode_speed:.0f} tok/s"
    )


def _together(config: ClusterConfig) -> str:
    """The speedup is the sum of the requests' own times over the time of all."""
    with DisaggregatedClient(config) as client:
        alone_s = 0.0
        for name in config.names:
            alone_s += _generate(client, name).total_time
        requests = [_request(config, name) for name in config.names]
        began_at = time.monotonic()
        answers = client.complete_many(requests)
        wall_s = time.monotonic() - began_at
    if answers.errors:
        raise DisaggError("; ".join(f"{error.message} ({error.code})" for error in answers.errors))
    return (
        f"{len(requests)} models in {wall_s:.2f} s, one after the other {alone_s:.2f} s: speedup {alone_s / wall_s:.2f}"
    )


def _fallback(config: ClusterConfig, model: str) -> str:
    """The same decode node, with a prefill node at a port where nothing listens."""
    servers = config.servers_of(model)
    decode = next(server for server in servers if "decode" in server.roles)
    prefill = next(server for server in servers if "prefill" in server.roles)
    gone = msgspec.structs.replace(prefill, host=decode.host, port=_NOWHERE, name="nowhere", role="prefill")
    decode = msgspec.structs.replace(decode, role="decode")
    with DisaggregatedClient(_only(config, gone, decode, local="never")) as client:
        record = _generate(client, model)
    if record.kind != "fallback":
        raise DisaggError(f"no fallback: the method was {record.method}; {record.plan}")
    return f"{decode.name} served alone in {record.total_time:.2f} s: {FALLBACK_WARNING}"
