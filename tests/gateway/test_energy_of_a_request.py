"""The energy of one request, by hand: from the watts that its machines read, and the seconds that they worked."""

import asyncio

import httpx
import msgspec
import pytest

from disaggregated_inference.api import NodeStatus
from disaggregated_inference.cluster import load_config
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.energy import PowerLog
from disaggregated_inference.timeouts import OrchestratorTimeouts
from tests.support.gateway import simulated_config, simulated_pair

pytestmark = pytest.mark.slow

LATE = OrchestratorTimeouts(power_sample_s=60.0)  # a machine that is busy with other tests reads late
WATTS = {"prefill": 300.0, "decode": 100.0}
PRICE_PER_KWH = 0.5


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine of the tests has one: its reading is put into the statuses that the nodes really send."""
    add = PowerLog.add

    def with_power(log: PowerLog, status: NodeStatus, now: float | None = None) -> None:
        if status.readings:
            readings = msgspec.structs.replace(status.readings, power_w=WATTS[status.role])
            status = msgspec.structs.replace(status, readings=readings)
        add(log, status, now)

    monkeypatch.setattr(PowerLog, "add", with_power)


@pytest.mark.usefixtures("meters")
def test_energy_is_watts_times_seconds() -> None:
    async def ask() -> None:
        async with DisaggregatedInference(load_config(config), timeouts=LATE) as core:
            transport = httpx.ASGITransport(gateway_app(core, Keys()))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
                await core.generate(model="simulated:tiny", prompt="x" * 2000, max_tokens=50, ignore_eos=True)
                (record,) = (await client.get("/cluster")).json()["history"]
                sums = (await client.get("/cluster/energy")).json()
        seconds = {
            name: sum(phase["seconds"] for phase in record["waterfall"] if phase["name"] == name) for name in WATTS
        }
        assert seconds["prefill"] > 0.9, "2,000 tokens at 2,000 tokens/s"
        assert seconds["decode"] > 0.9, "50 tokens at 50 tokens/s"
        joules = {name: WATTS[name] * seconds[name] for name in WATTS}
        assert {share["phase"]: share["joules"] for share in record["energy"]} == pytest.approx(joules)
        total_j = sum(joules.values())
        assert record["energy_j"] == pytest.approx(total_j)
        assert record["energy_source"] == "measured"
        assert record["cost"] == pytest.approx(total_j / 3_600_000 * PRICE_PER_KWH), "joules to kWh"
        assert sums["total"]["energy_j"] == pytest.approx(total_j)
        assert sums["total"]["requests_per_kwh"] == pytest.approx(3_600_000 / total_j)

    with simulated_pair("custom:prefill=2000,decode=50") as nodes:
        config = simulated_config(*nodes, local="never", electricity_price_per_kwh=PRICE_PER_KWH)
        asyncio.run(ask())
