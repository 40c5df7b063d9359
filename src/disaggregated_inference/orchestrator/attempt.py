"""One attempt of a request, on one route."""

from dataclasses import dataclass, field

from disaggregated_inference.api import ReportedMetrics
from disaggregated_inference.orchestrator.cluster_view import Route


@dataclass(slots=True)
class Attempt:
    """One route that was tried."""

    route: Route
    reason: str
    engine: str  # of the decode node
    began_at: float
    node_model: str = ""  # the decode node's own name of its model
    whole: bool = False  # a prefill node writes the answer too
    text_only: bool = False  # on a node that takes text, which reports nothing about KV
    epochs: dict[str, str] = field(default_factory=dict)  # of the nodes, when the attempt began
    written: dict[int, int] = field(default_factory=dict)  # tokens of each choice, when the attempt began
    kv_tokens: int = 0  # that the decode node reserves memory for
    sent_at: float = 0.0  # on the monotonic clock
    first_token_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0  # when its last event arrived, or its failure was noticed
    failed_node: str = ""
    metrics: ReportedMetrics | None = None  # as the decode node reported them at the end

    @property
    def prefill_name(self) -> str:
        return self.route.prefill or self.route.decode

    @property
    def cached(self) -> dict[str, int]:
        """Prompt tokens from the nodes' prefix caches. A node whose leg failed reported nothing."""
        found = {self.route.decode: self.metrics.cached_tokens if self.metrics else 0}
        if self.route.prefill:
            found[self.route.prefill] = self.metrics.prefill_cached_tokens if self.metrics else 0
        return found
