"""What vLLM writes becomes log lines, steps and typed errors. The lines are real ones, of 0.32.0 and 0.25.1."""

import logging
import signal

import pytest

from disaggregated_inference.errors import BadRequest, EngineFailed, EngineOutOfMemory
from disaggregated_inference.vllm_node.log_lines import VllmLog, failure

DIED = [
    "(Worker pid=24059) ERROR 11-18 00:58:11 [multiproc_executor.py:1063] RuntimeError: Unsupported CPU attention"
    " configuration: head_dim=16 isa=2 kv_cache_idx=0",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]
NO_BLOCKS = (
    "(EngineCore pid=7) ERROR 11-18 01:02:03 [core.py:998] ValueError: No available memory for the cache blocks."
    " Try increasing `gpu_memory_utilization` when initializing the engine."
)
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.8 GiB"


def test_the_root_cause_is_the_error_and_not_who_noticed_it() -> None:
    error = failure(DIED, 1)
    assert isinstance(error, EngineFailed)
    assert str(error).startswith("vLLM ended with exit code 1: RuntimeError: Unsupported CPU attention configuration")


def test_an_engine_that_was_killed_is_named() -> None:
    """Its own process wrote nothing, and the last line of all is none of its."""
    noticed = "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    error = failure([noticed, "  warnings.warn('resource_tracker: There appear to be %d '"], 0)
    assert "EngineDeadError: EngineCore encountered an issue" in str(error)


@pytest.mark.parametrize("line", [NO_BLOCKS, CUDA, "DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"])
def test_out_of_memory_is_told_with_what_to_change(line: str) -> None:
    error = failure([*DIED, line, "INFO: something after it"], 1)
    assert isinstance(error, EngineOutOfMemory)
    assert error.code == "engine_out_of_memory"
    assert "out of memory" in str(error)
    assert "--max-model-len" in str(error)


def test_a_vllm_that_the_system_killed_was_too_large() -> None:
    assert isinstance(failure([], -signal.SIGKILL), EngineOutOfMemory)
    assert "was killed by SIGSEGV: it wrote nothing" in str(failure([], -signal.SIGSEGV))


def test_arguments_that_vllm_does_not_know_are_a_bad_request() -> None:
    error = failure(["usage: vllm serve [options]", "vllm: error: unrecognized arguments: --no-such-thing"], 2)
    assert isinstance(error, BadRequest)
    assert str(error) == "--vllm-args: vLLM does not take them: unrecognized arguments: --no-such-thing"


VISIT = "    For further information visit https://errors.pydantic.dev/2.14/v/greater_than_equal"
REFUSED = "pydantic_core._pydantic_core.ValidationError: {} for {}"
TWO_REFUSED = REFUSED.format("2 validation errors", "SchedulerConfig")
RANGE = "Input should be greater than or equal to 1"
TOO_LONG = "User-specified max_model_len (99999999) is greater than the derived max_model_len"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            [REFUSED.format("1 validation error", "ModelConfig"), f"  Value error, {TOO_LONG} [type=value_error, inp"],
            TOO_LONG,
        ),
        (
            [
                TWO_REFUSED,
                "max_num_batched_tokens",
                f"  {RANGE} [type=g",
                VISIT,
                "max_num_seqs",
                f"  {RANGE} [type=g",
                VISIT,
            ],
            f"max_num_batched_tokens: {RANGE}; max_num_seqs: {RANGE}",
        ),
    ],
)
def test_a_value_that_vllm_refuses_is_named(lines: list[str], said: str) -> None:
    """Of 0.32.0. The line with the error's name does not say which."""
    written = [f"(APIServer pid=7) {line}" for line in ["Traceback (most recent call last):", *lines]]
    assert str(failure(written, 1)).removeprefix("vLLM ended with exit code 1: ").removeprefix("Value error, ") == said


def test_lines_keep_their_level_and_tracebacks_that_of_their_first_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    written = VllmLog()
    for line in ("(EngineCore pid=7) WARNING 11-18 00:00:00 [a.py:1] careful", "  more of it", "INFO:     ready", ""):
        written.add(line)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]


def test_the_steps_of_a_start_are_known() -> None:
    written, seen = VllmLog(), []
    for line in (
        "(Worker pid=9) INFO 11-18 00:43:30 [gpu_model_runner.py:1] Starting to load model /m...",
        "(Worker pid=9) INFO 11-18 00:43:31 [monitor.py:1] torch.compile takes 9.1 s in total",
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  10%",
    ):
        written.add(line)
        seen.append(written.step)
    assert seen == ["loading weights", "compiling", "capturing CUDA graphs"]


def test_old_lines_and_long_ones_are_cut() -> None:
    written = VllmLog()
    for _ in range(1000):
        written.add("x" * 10_000)
    assert len(written.lines) == 400
    assert len(written.lines[0]) == 2000
