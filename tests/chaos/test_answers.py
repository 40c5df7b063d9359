"""What counts as a wrong answer, what a run remembers, and which requests it sends."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disaggregated_inference.chaos.answers import ChaosAnswer, ChaosChoice, difference, partial_difference
from disaggregated_inference.chaos.footprint import Footprint, footprint_of
from disaggregated_inference.chaos.gate import Gate
from disaggregated_inference.chaos.nodes import given_nodes, model_of
from disaggregated_inference.chaos.outcomes import FailingCase, RequestOutcomes
from disaggregated_inference.chaos.report import ChaosReport, GrowthSample
from disaggregated_inference.chaos.settings import ChaosSettings
from disaggregated_inference.chaos.workload import catalogue
from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import BadRequest

RIGHT = ChaosAnswer(
    choices=[ChaosChoice(text="[0300][0301]", tokens=[300, 301], logprobs=[-0.5, -0.25], finish_reason="length")],
    prompt_tokens=9,
    completion_tokens=2,
)


def altered(**changes: Any) -> ChaosAnswer:
    """The right answer with another field, of its choice or of itself."""
    of_choice = {name: value for name, value in changes.items() if hasattr(RIGHT.choices[0], name)}
    of_answer = {name: value for name, value in changes.items() if name not in of_choice}
    choice = msgspec.structs.replace(RIGHT.choices[0], **of_choice)
    return msgspec.structs.replace(RIGHT, choices=[choice], **of_answer)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text": "[0300][0302]"}, "text"),
        ({"tokens": [300]}, "tokens"),
        ({"finish_reason": None}, "finish_reason"),
        ({"logprobs": [-0.5, -0.3]}, "logprobs"),
        ({"logprobs": [-0.5]}, "logprobs"),
        ({"prompt_tokens": 8}, "prompt_tokens"),
        ({"completion_tokens": 3}, "completion_tokens"),
    ],
)
def test_every_difference_is_wrong(changes: dict[str, Any], says: str) -> None:
    assert says in difference(RIGHT, altered(**changes))


def test_the_right_answer_is_right_from_any_node() -> None:
    assert difference(RIGHT, altered(logprobs=[-0.501, -0.25], failovers=[{"node": "d1", "code": "unreachable"}])) == ""
    assert "choices" in difference(RIGHT, ChaosAnswer())


def test_a_client_that_left_must_have_seen_the_beginning() -> None:
    assert partial_difference(RIGHT, ChaosAnswer()) == ""
    assert partial_difference(RIGHT, altered(text="[0300]", tokens=[300], finish_reason=None)) == ""
    assert partial_difference(RIGHT, altered(text="[0301]", tokens=[301]))
    assert partial_difference(RIGHT, altered(text="[0300][0301][0302]", tokens=[300, 301, 302]))


def test_the_catalogue_has_every_kind_and_is_the_same_for_a_seed() -> None:
    requests = catalogue(5, "simulated:tiny")
    assert requests == catalogue(5, "simulated:tiny") != catalogue(6, "simulated:tiny")
    assert {(request.way, request.stream) for request in requests} == {
        (way, stream) for way in ("library", "completions", "chat") for stream in (False, True)
    }
    fields = {name for request in requests for name in request.options}
    assert {"n", "seed", "logprobs", "response_format", "stop", "frequency_penalty"} <= fields
    assert max(len(request.prompt) for request in requests) > 1000 > 100 > min(len(each.prompt) for each in requests)


def test_a_closed_gate_lets_running_requests_end() -> None:
    async def run() -> None:
        gate, order = Gate(), list[str]()

        async def request(name: str) -> None:
            async with gate.passed():
                await asyncio.sleep(0.01)
                order.append(name)

        first = asyncio.create_task(request("first"))
        await asyncio.sleep(0)
        async with gate.closed() as is_idle:
            second = asyncio.create_task(request("second"))
            await asyncio.sleep(0.05)
            assert is_idle
            assert order == ["first"]
        await asyncio.gather(first, second)
        assert order == ["first", "second"]

    asyncio.run(run())


def report_of(outcomes: RequestOutcomes, samples: list[GrowthSample] | None = None, **changes: Any) -> ChaosReport:
    settings = ChaosSettings(everything=changes.pop("everything", False))
    found = {"seconds": 1.0, "faults": [], "left": [], "begin": {}, "end": {}, "starts": {}, "logs": {}}
    return ChaosReport.make(settings, outcomes, samples=samples or [], **found | changes)


def outcomes_of(right: int = 1, failed: int = 0, wrong: int = 0) -> RequestOutcomes:
    outcomes = RequestOutcomes()
    case = FailingCase(request_id="chaos-1-7", request="0 greedy, library", at_s=1.0, seconds=2.0, what="other tokens")
    for _ in range(right):
        outcomes.was_right([])
    for _ in range(failed):
        outcomes.has_failed("no_decode_node", case)
    for _ in range(wrong):
        outcomes.was_wrong(case)
    return outcomes


def test_what_passes() -> None:
    assert report_of(outcomes_of()).passed
    assert not report_of(outcomes_of(right=0)).passed
    assert not report_of(outcomes_of(failed=1)).passed
    assert report_of(outcomes_of(failed=1), everything=True).passed
    assert not report_of(outcomes_of(wrong=1), everything=True).passed
    assert not report_of(outcomes_of(), left=["d1: 512 bytes of KV memory"]).passed


def test_a_failing_case_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    report_of(outcomes_of(wrong=1), logs={"d1": "last words"}).save(path)
    saved = json.loads(path.read_text())
    assert saved["cases"][0]["request_id"] == "chaos-1-7"
    assert (saved["seed"], saved["passed"], saved["logs"]["d1"]) == (1, False, "last words")


def sample(requests: int, megabytes: int, threads: int, descriptors: int, blocks: int = 500_000) -> GrowthSample:
    found = Footprint(
        resident_bytes=megabytes << 20, threads=threads, descriptors=descriptors, python_blocks=blocks, malloc_bytes=9
    )
    return GrowthSample(requests=requests, processes={"d1": found})


def test_growth_is_what_grows_after_the_warm_up() -> None:
    steady = [sample(1_000, 50, 5, 5), sample(6_000, 100, 9, 30), sample(10_000, 101, 10, 31)]
    outcomes = outcomes_of(right=10)
    assert report_of(outcomes, steady).passed
    figures = ((160, 10, 31), (101, 30, 31), (101, 10, 60), (101, 10, 31, 600_000))
    for leaking in (sample(10_000, *each) for each in figures):
        assert len(report_of(outcomes, [*steady[:2], leaking]).grown) == 1
        assert not report_of(outcomes, [*steady[:2], leaking]).passed
        assert report_of(outcomes, [*steady, leaking]).passed, "garbage that waits for its collection"
        assert not report_of(outcomes, [*steady, *[leaking] * 3]).passed


def test_a_node_that_serves_late_is_not_grown() -> None:
    """The first requests of a node fill its caches, also when all before went to another one."""
    idle = msgspec.structs.replace(sample(6_000, 50, 5, 5).processes["d1"], requests=0)
    late = [GrowthSample(requests=6_000, processes={"d1": idle}), *(sample(at, 100, 9, 30) for at in (9_000, 10_000))]
    assert report_of(outcomes_of(right=10), late).passed
    metrics = 'disagg_python_blocks 5.0\ndisagg_requests_total{outcome="stop",role="decode"} 3.0\n'
    assert footprint_of(1, metrics).requests == 3
    assert footprint_of(1, "# TYPE disagg_requests_total counter\n").requests == 0
    assert footprint_of(1, "disagg_gateway_python_blocks 7.0\n").requests is None


def test_only_nodes_of_this_machine_are_disturbed() -> None:
    servers = {
        "prefill_servers": [{"host": "10.1.2.3", "model": "m"}],
        "decode_servers": [{"host": "::1", "model": "m"}],
    }
    config = load_config(servers, environ={})
    with pytest.raises(BadRequest, match=r"10\.1\.2\.3.*--any-host"):
        given_nodes(config, ChaosSettings())
    assert [node.role for node in given_nodes(config, ChaosSettings(any_host=True))] == ["prefill", "decode"]


def test_simulated_and_real_engines_are_not_mixed() -> None:
    assert model_of(ChaosSettings(engines=("torch", "mlx"))) == "smollm2"
    with pytest.raises(BadRequest, match="simulated"):
        model_of(ChaosSettings(engines=("simulated", "mlx")))
