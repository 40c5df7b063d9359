"""What a request had of the machines, and what it would have taken with the cluster to itself."""

from typing import Any

import pytest

from disaggregated_inference.api import Phase, Rate, Rates, RequestRecord
from disaggregated_inference.cluster import Server
from disaggregated_inference.orchestrator.energy import PhaseShare
from disaggregated_inference.orchestrator.machine_time import no_rates, with_machine_times

RATES = {
    "p": Rates(prefill=(Rate(size=1024, tokens_per_s=1000),)),
    "d": Rates(decode=(Rate(size=1, tokens_per_s=25), Rate(size=4, tokens_per_s=80))),
}


def record(**more: Any) -> RequestRecord:
    """1000 tokens read, 201 written, in 12 s; 1 s of waiting."""
    usual: dict[str, Any] = {"prefill_node": "p", "decode_node": "d", "prompt_tokens": 1000, "completion_tokens": 201}
    usual |= {"prefill_time": 1.0, "prefill_speed": 1000.0, "decode_time": 10.0, "total_time": 12.0}
    usual |= {"first_token_time": 2.0, "batch_size": 1.0, "waterfall": (Phase("queue", 0.0, 1.0),)}
    return RequestRecord(**(usual | more))


def rates(name: str) -> Rates:
    return RATES[name]


def test_a_request_by_itself_had_all_of_the_machines() -> None:
    found = with_machine_times(record(), [], rates)
    assert (found.prefill_machine_time, found.decode_machine_time) == (1.0, 10.0)
    assert found.sequential_time == pytest.approx(12 - 1), "without waiting"


def test_a_batch_divides_the_machine_and_slows_its_answers_a_little() -> None:
    """Four answers at 20 tokens a second each; one alone is written at 25."""
    found = with_machine_times(record(batch_size=4.0), [], rates)
    assert found.decode_machine_time == pytest.approx(2.5)
    assert found.sequential_time == pytest.approx(1 + 1 + 200 / 25 - 1 + 0), "11 s, less the 2 s that others cost"
    unknown = with_machine_times(record(batch_size=4.0), [], no_rates)
    assert unknown.sequential_time == pytest.approx(1 + 1 + 2.5 - 1), "its share: never too much"


def test_prompts_that_are_read_in_turn() -> None:
    found = with_machine_times(record(prefill_time=4.0, prefill_speed=250.0, total_time=15.0), [], rates)
    assert found.prefill_machine_time == pytest.approx(1.0), "by the node's own rate"
    assert found.sequential_time == pytest.approx(15 - 1 - 3)


def test_waiting_for_other_transfers_is_not_its_own_time() -> None:
    moved: dict[str, Any] = {"exposed_transfer_time": 3.0, "transfer_time": 0.75, "hidden_transfer_time": 0.25}
    found = with_machine_times(record(total_time=15.0, inject_time=0.5, **moved), [], rates)
    assert found.sequential_time == pytest.approx(15 - 1 - 2), "one second of the three was its own"


def test_choices_of_one_request_are_its_own_batch() -> None:
    found = with_machine_times(record(n=4, completion_tokens=804, batch_size=4.0), [], rates)
    assert found.decode_machine_time == pytest.approx(10.0)
    assert found.sequential_time == pytest.approx(11.0)


def test_a_node_that_tells_nothing_has_the_shares_of_the_meter() -> None:
    server = Server(host="d", port=1, model="m", name="d", role="both")
    shares = [
        PhaseShare(server=server, phase=phase, seconds=seconds, joules=None, source="configured")
        for phase, seconds in (("prefill", 0.5), ("decode", 5.0))
    ]
    found = with_machine_times(record(batch_size=None), shares, no_rates)
    assert (found.prefill_machine_time, found.decode_machine_time) == (0.5, 5.0)
    assert found.sequential_time == pytest.approx(12 - 1 - 0.5 - 5)


def test_a_request_without_an_answer_has_none() -> None:
    assert with_machine_times(record(first_token_time=0.0), [], rates).sequential_time is None
