"""The query of a path that reads the history: which time, which requests."""

import re
import time
from collections.abc import Mapping

import msgspec

from disaggregated_inference.errors import BadRequest, NotForThisKey
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.orchestrator import (
    DURATION_SHAPE,
    MOMENT_SHAPE,
    HistoryFilter,
    duration_s,
    moment,
)

_LONGEST_S = 400 * 86400.0
_OUTCOMES = ("ok", "failed", "refused", "cancelled")
_NAMES = ("range", "since", "until", "model", "node", "caller", "outcome")


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`moving`: the time ends now, so that the next query of the same text means another time."""

    wanted: HistoryFilter
    moving: bool


def read_query(context: RequestContext, default_range: str, also: tuple[str, ...] = ()) -> HistoryQuery:
    """Of a request's URL. `also`: the names that the path has besides. Requests, and figures of them, are the caller's
    own, unless it is an operator: in small steps, figures of all would show the requests of others."""
    given = context.request.query_params
    known = (*_NAMES, *also)
    if strange := [name for name in given if name not in known]:
        raise BadRequest(f"{strange[0]} is no parameter of this path: use {', '.join(known)}", param=strange[0])
    now = time.time()
    since, until = _times(given, default_range, now)
    wanted = HistoryFilter(
        since=since,
        until=until,
        model=context.model(given["model"]) if given.get("model") else None,
        node=_node(context, given.get("node")),
        caller=_caller(context, given.get("caller")),
        outcome=_outcome(given.get("outcome")),
    )
    return HistoryQuery(wanted=wanted, moving="until" not in given)


def read_count(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = given.get(name) or str(default)
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not 1 <= int(text) <= most:
        raise BadRequest(f"{name} must be a number from 1 to {most}", param=name)
    return int(text)


def read_duration(given: Mapping[str, str], name: str) -> float | None:
    """Seconds; None: not given."""
    return _duration_s(given[name], name) if given.get(name) else None


def _times(given: Mapping[str, str], default_range: str, now: float) -> tuple[float, float]:
    until = _moment(given["until"], "until", now) if given.get("until") else now
    if given.get("range") and given.get("since"):
        raise BadRequest("give range or since, not both", param="range")
    if given.get("since"):
        since = _moment(given["since"], "since", now)
    else:
        since = until - _duration_s(given.get("range") or default_range, "range")
    if not 0 <= since < until:
        raise BadRequest("since must be before until", param="since")
    if until - since > _LONGEST_S:
        raise BadRequest(f"the time is longer than {_LONGEST_S / 86400:.0f} days: ask for less", param="since")
    return since, until


def _moment(text: str, name: str, now: float) -> float:
    found = moment(text, now)
    if found is None:
        raise BadRequest(f"{name} must be {MOMENT_SHAPE}", param=name)
    return min(found, now)


def _duration_s(text: str, name: str) -> float:
    seconds = duration_s(text)
    if seconds is None or not 1 <= seconds <= _LONGEST_S:
        raise BadRequest(f"{name} must be {DURATION_SHAPE}, from 1s to {_LONGEST_S / 86400:.0f}d", param=name)
    return seconds


def _node(context: RequestContext, name: str | None) -> str | None:
    names = [server.name for server in context.core.config.servers]
    if name and name not in names:
        raise BadRequest(f"no node has this name; there are {', '.join(names)}", param="node")
    return name or None


def _caller(context: RequestContext, name: str | None) -> str | None:
    own = context.caller.only_own
    if own is not None and name and name != own:
        raise NotForThisKey(f"the key {own!r} sees its own requests; those of others need an operator's key")
    return own if own is not None else name or None


def _outcome(text: str | None) -> str | None:
    if text and text not in _OUTCOMES:
        raise BadRequest(f"outcome must be one of {', '.join(_OUTCOMES)}", param="outcome")
    return text or None
