"""A request that ended, as OpenTelemetry's JSON has it: one trace, its spans under the services that they are of.

Nodes send nothing: their times are in the record that the orchestrator makes of every request, so one sender has it all
and one clock. What was asked and answered is not in it.
"""

import re
import secrets
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec

from disaggregated_inference import __version__
from disaggregated_inference.cluster.config import Server

Record = Mapping[str, Any]
Span = dict[str, Any]

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_PROVIDER = "disaggregated_inference"
_INTERNAL, _SERVER = 1, 2  # kinds of span
_FAILED = 2  # of a status
_OURS = ("request_id", "method", "plan", "attempts", "warning", "kv_bytes", "kv_codec", "exposed_transfer_time")


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's trace begins: here, or with the caller's span."""

    trace: str
    parent: str = ""
    sampled: bool = True
    path: str = ""
    address: str = ""
    port: int = 0


def came(traceparent: str, path: str, server: tuple[str, int | None] | None) -> Came:
    """`traceparent` is W3C's header; one that cannot be read is none."""
    place: dict[str, Any] = {"path": path, "address": server[0] if server else "", "port": (server or ("", 0))[1] or 0}
    found = _PARENT.fullmatch(traceparent.strip())
    version, trace, parent, flags, more = found.groups() if found else ("ff", "", "", "00", None)
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(parent, 16):
        return Came(trace=secrets.token_hex(16), **place)
    return Came(trace=trace, parent=parent, sampled=bool(int(flags, 16) & 1), **place)


def spans_of(record: Record, begun: Came, servers: Mapping[str, Server], gateway: str) -> dict[str, list[Span]]:
    """By service: the gateway's, with the whole request in front, and each node's by its own name."""
    start_ns, whole_ns = round(record["time"] * 1e9), round(record["total_time"] * 1e9)
    root = secrets.token_hex(8)

    def at(seconds: float) -> str:
        """No part begins before the whole, or ends after it: nodes measure by themselves, and round."""
        return str(start_ns + min(max(0, round(seconds * 1e9)), whole_ns))

    def span(name: str, start_s: float, seconds: float, kind: int, told: Record) -> Span:
        time = {"startTimeUnixNano": at(start_s), "endTimeUnixNano": at(start_s + seconds)}
        return {"traceId": begun.trace, "name": name, "kind": kind, "attributes": attributes(told)} | time

    found: dict[str, list[Span]] = defaultdict(list)
    name = f"{record['operation']} {record['model']}"
    first = span(name, 0, record["total_time"], _SERVER, _about(record, begun))
    found[gateway].append(first | {"spanId": root, "parentSpanId": begun.parent} | _outcome(record, at))
    for phase in record.get("waterfall") or ():
        server = servers.get(phase["node"])
        told = {"server.address": server.host, "server.port": server.port} if server else {}
        kind = _SERVER if phase["node"] else _INTERNAL
        made = span(phase["name"], phase["start_s"], phase["seconds"], kind, told)
        status = {"status": {"code": _FAILED}} if phase["name"] == "failed" else {}
        found[phase["node"] or gateway].append(made | {"spanId": secrets.token_hex(8), "parentSpanId": root} | status)
    return found


def _about(record: Record, begun: Came) -> dict[str, Any]:
    """By the GenAI conventions; then by our names what they have none for."""
    finish = record.get("finish_reason")
    about: dict[str, Any] = {
        "gen_ai.operation.name": record["operation"],
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": record["model"],
        "gen_ai.response.model": record["model"],
        "gen_ai.response.finish_reasons": [finish] if finish else None,
        "gen_ai.usage.input_tokens": record["prompt_tokens"],
        "gen_ai.usage.output_tokens": record["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": record["cached_tokens"],
        "error.type": record["error"]["code"] if record.get("error") else None,
        "server.address": begun.address or None,
        "server.port": begun.port or None,
        "url.path": begun.path or None,
    }
    return about | {f"disagg.{name}": record.get(name) for name in _OURS}


def _outcome(record: Record, at: Any) -> dict[str, Any]:
    """What happened on the way, and how it ended. Who leaves has not failed."""
    events = [
        _event("failover", at(failover["at_s"]), {f"disagg.{name}": value for name, value in failover.items()})
        for failover in record.get("failovers") or ()
    ]
    if record.get("first_token_time"):
        events.append(_event("first token", at(record["first_token_time"]), {}))
    if record["outcome"] not in ("failed", "refused"):
        return {"events": events}
    return {"events": events, "status": {"code": _FAILED, "message": record["error"]["message"]}}


def _event(name: str, time: str, told: Record) -> dict[str, Any]:
    return {"timeUnixNano": time, "name": name, "attributes": attributes(told)}


def attributes(told: Record) -> list[dict[str, Any]]:
    """Those that have a value."""
    return [{"key": name, "value": _value(value)} for name, value in told.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}  # 64 bits: text, as protobuf's JSON has them
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(each) for each in value]}}
        case _:
            return {"stringValue": str(value)}


def exported(traces: list[dict[str, list[Span]]]) -> bytes:
    """The body of a request to a collector: per service all of its spans."""
    services: dict[str, list[Span]] = defaultdict(list)
    for trace in traces:
        for service, spans in trace.items():
            services[service] += spans
    return msgspec.json.encode({"resourceSpans": [_resource(*each) for each in services.items()]})


def _resource(service: str, spans: list[Span]) -> dict[str, Any]:
    named = {"service.name": service, "service.namespace": _PROVIDER, "service.version": __version__}
    scope = {"name": _PROVIDER, "version": __version__}
    return {"resource": {"attributes": attributes(named)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
