"""Requests are counted in batches: the figures are complete whenever they are read."""

import asyncio

import pytest

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.gateway.metrics import GatewayMetrics
from disaggregated_inference.orchestrator import DisaggregatedInference

NODE = {"host": "127.0.0.1", "port": 1, "model": "m"}


def counted(text: bytes) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


@pytest.mark.parametrize("requests", [1, 63, 64, 150])
def test_figures_are_complete_when_they_are_read(requests: int) -> None:
    async def run() -> None:
        config = {"prefill_servers": [NODE | {"port": 2}], "decode_servers": [NODE]}
        async with DisaggregatedInference(config) as core:
            metrics = GatewayMetrics(lambda: core)
            for _ in range(requests):
                metrics.ended(RequestRecord(model="m", prompt_tokens=3, completion_tokens=2, total_time=0.5))
            for times in (1, 2):  # read twice, counted once; the next ones are added
                found = counted(await metrics.text())
                assert found['disagg_requests_total{model="m",outcome="ok"}'] == requests * times
                assert found['vllm:generation_tokens_total{model_name="m"}'] == 2 * requests * times
                assert found['vllm:e2e_request_latency_seconds_count{model_name="m"}'] == requests * times
                for _ in range(requests):
                    metrics.ended(RequestRecord(model="m", prompt_tokens=3, completion_tokens=2, total_time=0.5))

    asyncio.run(run())


def test_a_record_that_cannot_be_counted_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with DisaggregatedInference({"prefill_servers": [], "decode_servers": [NODE]}) as core:
            metrics = GatewayMetrics(lambda: core)
            broken = RequestRecord(model="m", prefill_speed="no number", request_id="odd")  # type: ignore[arg-type]
            for record in (broken, RequestRecord(model="m")):
                metrics.ended(record)
            found = counted(await metrics.text())
            assert found['vllm:e2e_request_latency_seconds_count{model_name="m"}'] >= 1
        assert "a request was not counted" in caplog.text

    asyncio.run(run())
