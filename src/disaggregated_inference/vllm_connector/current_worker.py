"""The worker's half of the connector in this process: vLLM makes the logits processor by itself, without it."""

from typing import Any

worker: Any = None
