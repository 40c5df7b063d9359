"""What `disagg chaos` was asked to do."""

from pathlib import Path

import msgspec

from disaggregated_inference.timeouts import ChaosTimeouts


class ChaosSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command. `requests` 0: as many as fit into the minutes."""

    config: str = ""  # empty: a cluster of its own
    minutes: float = 1.0
    seed: int = 1
    at_once: int = 8
    requests: int = 0
    faults: bool = True
    everything: bool = False
    any_host: bool = False
    tls: bool = False  # of a cluster of its own
    engines: tuple[str, str] = ("simulated", "simulated")  # prefill, decode
    model: str = ""
    log: Path | None = None
    timeouts: ChaosTimeouts = ChaosTimeouts()
