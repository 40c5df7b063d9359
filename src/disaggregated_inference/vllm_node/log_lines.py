"""What vLLM writes: its lines go into this node's log, its steps to the terminal, its last words into errors."""

import logging
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable

from disaggregated_inference.errors import BadRequest, DisaggError, EngineFailed, EngineOutOfMemory

log = logging.getLogger(__name__)

_LINE = re.compile(
    r"^(?:\([^)]*\)\s*)*(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\b:?\s*(?:[\d-]+ [\d:.]+)?\s*(?P<text>.*)"
)
_MAX_LINE = 2000
_MAX_REASON = 600
_KEPT_LINES = 400
_STEPS = (
    (
        re.compile(r"Starting to load model|Loading (safetensors|model) |Loading weights", re.IGNORECASE),
        "loading weights",
    ),
    (re.compile(r"torch\.compile takes|Compiling a graph|Dynamo bytecode", re.IGNORECASE), "compiling"),
    (re.compile(r"Capturing (CUDA|cudagraph)|Graph capturing", re.IGNORECASE), "capturing CUDA graphs"),
    (re.compile(r"GPU KV cache size|init engine|Available KV cache memory", re.IGNORECASE), "reserving KV memory"),
)
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|No available memory for the cache blocks|than the available KV cache memory"
    r"|is less than (desired|requested)|less than requested memory|can't allocate memory|Cannot allocate memory"
    r"|\bMemoryError\b|bad_alloc",
    re.IGNORECASE,
)
_ERROR = re.compile(r"(?:^|\] |\s)(?P<words>(?:[\w.]*(?:Error|Exception)\b|pydantic\S*): .+)")
_REFUSED = re.compile(r"ValidationError: (?P<count>\d+) validation errors? for \w+")  # of pydantic: reasons follow
_REFUSED_END = "For further information visit"  # the last line of each of them
_SECONDARY = ("Engine core initialization failed", "EngineDeadError", "Engine core proc", "cancelled")
_MEMORY_ADVICE = (
    'give --vllm-args less: "--max-model-len N", "--kv-cache-memory-bytes N", "--gpu-memory-utilization SHARE"'
)
_USAGE = re.compile(r"error: (?P<words>.+)")


class VllmLog:
    """Of one run. `step` is the step of the start that runs. What vLLM says when this node ends it is no error, though
    its processes may call it one: `is_ending` tells."""

    def __init__(self, is_ending: Callable[[], bool] = lambda: False) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.step = "starting"
        self._level, self._is_ending = logging.INFO, is_ending

    def add(self, line: str) -> None:
        line = line.rstrip()[:_MAX_LINE]
        if not line:
            return
        self.lines.append(line)
        if found := _LINE.match(line):
            self._level = logging.getLevelNamesMapping()[found["level"]]
        log.log(min(self._level, logging.INFO) if self._is_ending() else self._level, "%s", line)
        self.step = next((step for pattern, step in _STEPS if pattern.search(line)), self.step)


def failure(lines: Iterable[str], code: int) -> DisaggError:
    """Why vLLM ended, in its own words. `code` is negative for a signal."""
    known = list(lines)
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    if memory := next((line for line in reversed(known) if _OUT_OF_MEMORY.search(line)), ""):
        return EngineOutOfMemory(f"vLLM {how}: out of memory: {_text(memory)}; {_MEMORY_ADVICE}")
    if code == -signal.SIGKILL:
        return EngineOutOfMemory(
            f"vLLM was killed by SIGKILL: probably the system had no memory left; {_MEMORY_ADVICE}"
        )
    if code == 2 and (usage := next((found for line in reversed(known) if (found := _USAGE.search(line))), None)):
        return BadRequest(f"--vllm-args: vLLM does not take them: {usage['words']}")
    return EngineFailed(f"vLLM {how}: {_last_error(known)}")


def _last_error(lines: list[str]) -> str:
    """The root cause, not the process that noticed it."""
    if refused := _refused_values(lines):
        return refused
    errors = [found["words"] for line in lines if (found := _ERROR.search(line))]
    causes = [words for words in errors if not any(part in words for part in _SECONDARY)]
    return (causes or errors or [_text(line) for line in lines[-1:]] or ["it wrote nothing"])[-1].strip()


def _refused_values(lines: list[str]) -> str:
    """What vLLM does not take, where its configuration refuses a value; empty: it is something else."""
    heads = [(at, found) for at, line in enumerate(lines) if (found := _REFUSED.search(line))]
    if not heads:
        return ""
    (at, head), reasons = heads[-1], list[str]()
    rest = [_text(line) for line in lines[at + 1 :]]
    for _ in range(int(head["count"])):
        until = next((number for number, line in enumerate(rest) if _REFUSED_END in line), len(rest))
        reasons.append(": ".join(rest[:until]).partition(" [type=")[0])
        rest = rest[until + 1 :]
    return "; ".join(filter(None, reasons))[:_MAX_REASON] or head[0]


def _text(line: str) -> str:
    """Without the name of its process, its level and its place in vLLM."""
    found = _LINE.match(line)
    return re.sub(r"^(?:\([^)]* pid=\d+\)|\[[^\]]*\])\s*", "", found["text"] if found else line).strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
