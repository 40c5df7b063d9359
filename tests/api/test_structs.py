"""The structs that cross between processes: the JSON they become, and the values they refuse."""

from typing import Any, Literal

import msgspec
import pytest

from disaggregated_inference.api import (
    FALLBACK_WARNING,
    ChoiceTokenEvent,
    DecodeMetrics,
    DecodeRequest,
    DoneEvent,
    ErrorDetail,
    Failover,
    GenerateRequest,
    NodeStatus,
    PrefillRequest,
    PrefillResponse,
    RequestRecord,
    SamplingParams,
    StreamEvent,
    TextMetrics,
    TokenEvent,
    Usage,
    convert,
)
from disaggregated_inference.errors import BadRequest

SAMPLING = SamplingParams.__struct_fields__


def _json(struct: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(struct))


def test_requests_to_nodes_leave_out_defaults() -> None:
    assert _json(PrefillRequest(tokens=[1, 2])) == {"tokens": [1, 2]}
    assert _json(DecodeRequest(context="c", max_tokens=5, seed=0)) == {"context": "c", "max_tokens": 5, "seed": 0}


def test_a_response_has_only_what_is_known() -> None:
    response = PrefillResponse(context="c", ticket="t", prompt_tokens=2)
    assert _json(response) == {"context": "c", "ticket": "t", "prompt_tokens": 2}


def test_a_token_event_always_has_token_and_text() -> None:
    assert _json(TokenEvent(token=0, text="")) == {"token": 0, "text": ""}
    assert _json(ChoiceTokenEvent(token=0, text="", choice=0)) == {"token": 0, "text": "", "index": 0}


@pytest.mark.parametrize("event", [TokenEvent(token=7, text="a"), ChoiceTokenEvent(token=7, text="a", choice=2)])
def test_the_orchestrator_reads_what_a_node_writes(event: TokenEvent) -> None:
    read = msgspec.json.decode(msgspec.json.encode(event), type=StreamEvent)
    assert (read.token, read.text, read.choice, read.done, read.error) == (7, "a", event.choice, False, None)


@pytest.mark.parametrize("metrics", [DecodeMetrics(kv_bytes=9), TextMetrics(load_time=2.0, prefill_speed=3.0)])
def test_the_orchestrator_reads_the_end_of_a_stream(metrics: DecodeMetrics | TextMetrics) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    event = DoneEvent(done=True, usage=usage, node_metrics=metrics)
    assert set(_json(event)) == {"done", "usage", "metrics"}
    read = msgspec.json.decode(msgspec.json.encode(event), type=StreamEvent)
    assert read.done
    assert read.node_metrics
    assert msgspec.structs.asdict(metrics).items() <= msgspec.structs.asdict(read.node_metrics).items()


def test_a_status_of_another_version_is_read() -> None:
    status = msgspec.json.decode(b'{"status": "healthy", "waiting": 3, "new_field": {}}', type=NodeStatus)
    assert (status.status, status.waiting, status.running, status.kv.limit_bytes) == ("healthy", 3, 0, 0)


def test_every_kind_of_request_has_the_same_sampling_params() -> None:
    for request in (DecodeRequest, GenerateRequest):
        assert set(SAMPLING) <= set(request.__struct_fields__)


@pytest.mark.parametrize("kind", [SamplingParams, DecodeRequest, GenerateRequest])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 101),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -1),
        ("seed", 1 << 64),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("logit_bias", {5: 101}),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("n", 17),
        ("logprobs", 21),
        ("min_tokens", -1),
    ],
)
def test_ranges_are_the_same_for_every_kind_of_request(kind: type[SamplingParams], field: str, value: Any) -> None:
    prompt = {"prompt": "x"} if kind is GenerateRequest else {}
    with pytest.raises(BadRequest, match=field):
        convert(prompt | {field: value}, kind)
    assert convert(prompt, kind)


class _Colours(msgspec.Struct):
    by_name: dict[str, list[Literal["red", "green"] | None]]


def test_an_error_deep_inside_names_the_allowed_values() -> None:
    with pytest.raises(BadRequest, match=r"^by_name\[\.\.\.\]\[1\]: 'blue' is none of green, red$"):
        convert({"by_name": {"sky": [None, "blue"]}}, _Colours)


def test_a_continued_answer_has_one_choice() -> None:
    with pytest.raises(BadRequest, match="n = 1"):
        convert({"written": [5], "n": 2}, DecodeRequest)


def test_a_row_of_another_version_is_read_as_far_as_it_fits() -> None:
    odd: dict[Any, Any] = {
        "time": 5,
        "ok": "yes",
        "total_time": 10**400,
        "failovers": [{"node": 1}],
        "later": [1],
        ("key",): 1,
    }
    record = RequestRecord.of_row(odd | {"decode_speed": 4.0, "n": 2, "model": "m"})
    assert (record.time, record.ok, record.total_time, record.failovers, record.model) == (5.0, True, 0.0, (), "m")
    assert record.output_token_time == 0.5, "an earlier version had the speed alone"
    assert RequestRecord.of_row({"decode_speed": 4.0, "n": 10**400}).output_token_time is None
    failover = Failover(node="d1", code="unreachable", message="it does not answer", stall_s=0.5)
    whole = RequestRecord(model="m", failovers=(failover,), error=ErrorDetail("x", "y"), cost=0.1, decode_speed=3.0)
    assert RequestRecord.of_row(whole.row()) == whole


@pytest.mark.parametrize(
    ("method", "warning", "kind"),
    [
        ("disaggregated_mlx", None, "disaggregated"),
        ("local", None, "local"),
        ("local", FALLBACK_WARNING, "fallback"),
        ("fallback", FALLBACK_WARNING, "fallback"),
        ("whole_vllm", None, "whole"),
        ("another", None, None),
        (None, None, None),
    ],
)
def test_the_kind_of_an_older_row(method: str | None, warning: str | None, kind: str | None) -> None:
    assert RequestRecord.of_row({"model": "m", "method": method, "warning": warning}).kind == kind
