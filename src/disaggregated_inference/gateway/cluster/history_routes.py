"""Paths that read the history: requests, one request, figures over time, targets and alarms, energy."""

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.api import RequestRecord, TargetsPage
from disaggregated_inference.errors import HistoryUnreadable, RequestNotFound
from disaggregated_inference.gateway.alarms import alarms
from disaggregated_inference.gateway.cluster.history_query import (
    HistoryQuery,
    read_count,
    read_duration,
    read_query,
)
from disaggregated_inference.gateway.cluster.visibility import seen_request
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.gateway.slo import targets_of
from disaggregated_inference.orchestrator import (
    History,
    HistoryFilter,
    HistoryReader,
    PlainRecord,
    comparisons,
    energy_by_node,
    energy_sums,
    series,
)

_MAX_REQUESTS = 1000
_JSON = "application/json"


def routes() -> list[Route]:
    return [
        Route("/cluster/history", _requests),
        Route("/cluster/requests/{id}", _request),
        Route("/cluster/series", _series),
        Route("/cluster/targets", _targets),
        Route("/cluster/energy", _energy),
    ]


async def _requests(request: Request) -> Response:
    context = _context(request)
    query = read_query(context, "30d", also=("limit", "full"))
    limit = read_count(request.query_params, "limit", 100, _MAX_REQUESTS)
    is_full = request.query_params.get("full") in ("1", "true")
    own = context.caller.only_own

    def read(reader: HistoryReader) -> Any:
        found = reader.records(query.wanted, limit + 1)
        rows = [seen_request(row, own) for row in found[:limit]]
        rows = rows if is_full else [{k: v for k, v in row.items() if k != "waterfall"} for row in rows]
        kept = reader.kept(HistoryFilter(caller=own))
        return _of_time(query.wanted) | {"requests": rows, "more": len(found) > limit, "kept": kept}

    return _answer(await request.app.state.answers.single(lambda: _read(context.core.history, read), own))


async def _request(request: Request) -> Response:
    context, id = _context(request), request.path_params["id"]
    own = context.caller.only_own
    row = await request.app.state.answers.single(lambda: _found(context.core.history, id, own), own)
    if row is None:
        raise RequestNotFound(f"the history has no request {id[:100]!r}; it may be too old, or still running")
    row = seen_request(row, own)
    rates = {(link.prefill, link.decode): link.gbps * 1e9 / 8 for link in context.core.config.links if link.gbps}
    record = RequestRecord.of_row(row)
    line_rate_bytes_s = rates.get((str(record.prefill_node), str(record.decode_node)))
    return _answer(msgspec.json.encode({"request": row} | _waterfall(record, line_rate_bytes_s)))


def _found(history: History, id: str, caller: str | None) -> PlainRecord | None:
    """In memory first: the file gets a record a moment later."""
    if row := history.find(id, caller):
        return row
    with _opened(history) as reader:
        return reader.record(id, caller)


def _waterfall(record: RequestRecord, line_rate_bytes_s: float | None) -> dict[str, Any]:
    return {
        "predicted": {
            "first_token_s": record.predicted_first_token_time,
            "total_s": record.predicted_total_time,
        },
        "real": {"first_token_s": record.first_token_time or None, "total_s": record.total_time},
        "transfer": _transfer(record, line_rate_bytes_s),
    }


def _transfer(record: RequestRecord, line_rate_bytes_s: float | None) -> dict[str, Any] | None:
    """None: no KV moved."""
    if not record.kv_paths:
        return None
    seconds, size = record.transfer_time, record.kv_bytes
    return {
        "bytes": size,
        "seconds": seconds,  # in which KV arrived, without waiting for the prefill
        "hidden_s": record.hidden_transfer_time,
        "exposed_s": record.exposed_transfer_time or 0.0,
        "fetch_s": record.fetch_time,
        "inject_s": record.inject_time,
        "bytes_per_s": size / seconds if size and seconds else None,
        "line_rate_bytes_s": line_rate_bytes_s,
        "codec": record.kv_codec,
        "paths": record.kv_paths,
    }


async def _series(request: Request) -> Response:
    context = _context(request)
    query = read_query(context, "1h", also=("step",))
    step_s, config = read_duration(request.query_params, "step"), context.core.config
    choices = {"models": list(config.names), "nodes": [server.name for server in config.servers]}

    def read(reader: HistoryReader) -> Any:
        found = msgspec.to_builtins(series(reader, query.wanted, step_s))
        return _of_time(query.wanted) | choices | found

    return await _aggregated(context, query, ("series", step_s), read)


async def _targets(request: Request) -> Response:
    context = _context(request)
    query, status = read_query(context, "1h"), await context.core.cluster_status()

    def read(reader: HistoryReader) -> Any:
        page = TargetsPage(
            targets=targets_of(reader, query.wanted, status), alarms=alarms(reader, query.wanted, status.models)
        )
        return _of_time(query.wanted) | msgspec.structs.asdict(page)

    return await _aggregated(context, query, ("targets",), read)


async def _energy(request: Request) -> Response:
    context = _context(request)
    query = read_query(context, "24h")
    config = context.core.config
    facts = {name: node.facts() for name, node in (await context.core.start()).nodes.items()}

    def read(reader: HistoryReader) -> Any:
        sums = energy_sums(reader, query.wanted)
        return _of_time(query.wanted) | {
            "price_per_kwh": config.policies.electricity_price_per_kwh,
            "total": sums.total,
            "models": sums.models,
            "callers": sums.callers,
            "days": sums.days,
            "nodes": energy_by_node(reader, query.wanted),
            "alone": comparisons(reader, query.wanted, facts, config.policies.electricity_price_per_kwh),
        }

    return await _aggregated(context, query, ("energy",), read)


def _context(request: Request) -> RequestContext:
    context = RequestContext(request)
    context.caller.require_all()
    return context


async def _aggregated(
    context: RequestContext, query: HistoryQuery, question: tuple[Any, ...], read: Callable[[HistoryReader], Any]
) -> Response:
    """A time that ends now is the same question for a while: its length counts."""
    wanted, history = query.wanted, context.core.history
    key = msgspec.structs.replace(wanted, since=wanted.until - wanted.since, until=0.0) if query.moving else wanted
    answers = context.request.app.state.answers
    asked = (*question, id(history), query.moving, key)
    return _answer(await answers.answer(asked, lambda: _read(history, read), context.caller.only_own))


def _of_time(wanted: HistoryFilter) -> dict[str, Any]:
    return {"from": wanted.since, "to": wanted.until, "model": wanted.model, "node": wanted.node}


def _read(history: History, read: Callable[[HistoryReader], Any]) -> bytes:
    """On a thread; what is read is encoded there, too."""
    with _opened(history) as reader:
        try:
            return msgspec.json.encode(read(reader))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise HistoryUnreadable(f"the history cannot be read: {error}; ask for a shorter time, or later") from error


def _opened(history: History) -> HistoryReader:
    try:
        return history.reader()
    except sqlite3.Error as error:
        raise HistoryUnreadable(f"the history file cannot be opened: {error}; see policies.history_file") from error


def _answer(content: bytes) -> Response:
    return Response(content, media_type=_JSON)
