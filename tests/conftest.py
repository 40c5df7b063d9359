"""Fixtures of all tests. Models are saved once and engines loaded once per run: tests ask for them by name."""

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from disaggregated_inference.engines import Engine, load_engine
from disaggregated_inference.engines.mlx.blas import load_blas
from disaggregated_inference.models import ModelFiles, ModelStore, default_home, embedded
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.timeouts import NodeTimeouts
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP_OPTIONS, LoadTiny, twin_of
from tests.support.node_pair import ONE_PROCESS, Pair

# Some virtual machines announce AMX and trap on it: torch's bfloat16 on the CPU would kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

# OpenMP threads of two processes that spin for each other on two cores are sixty times slower than one thread. Node
# processes inherit this. OpenMP reads it when torch is imported, which is below.
os.environ["OMP_NUM_THREADS"] = "1"


if "mlx" in ENGINE_OPTIONS:  # before any test imports MLX: it would stay with its own BLAS, sixty times slower
    load_blas()

# A shell makes background processes ignore Ctrl-C, and the processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# No time limits: the machine may be busy. The same examples every time, except in `make fuzz`.
hypothesis.settings.register_profile(
    "busy",
    deadline=None,
    derandomize="DISAGG_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("busy")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the tiny model of an architecture."""
    from tests.support.tiny_models import save_tiny

    root = tmp_path_factory.mktemp("tiny")
    return lru_cache(lambda architecture: save_tiny(architecture, root / architecture))


@pytest.fixture(scope="session")
def tiny_engine(tiny_folder: Callable[[str], Path]) -> LoadTiny:
    """The tiny model of an architecture in an engine, float32; for llama.cpp its twin, with a float16 cache."""

    @lru_cache
    def load(name: str, architecture: str) -> Engine:
        if name == "llamacpp":
            path = twin_of(tiny_folder("twin_" + architecture.removeprefix("twin_")))
            return load_engine(name, ModelFiles(f"tiny-{architecture}", path), **LLAMACPP_OPTIONS)
        model = ModelFiles(f"tiny-{architecture}", tiny_folder(architecture))
        return load_engine(name, model, **ENGINE_OPTIONS[name])

    return load


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    return ModelStore().resolve("smollm2")


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: ModelFiles) -> Path:
    return embedded.ensure_gguf(default_home() / "models")


@pytest.fixture(scope="session")
def smollm2_engine(smollm2: ModelFiles) -> Callable[[str], Engine]:
    return lru_cache(lambda name: load_engine(name, smollm2, **ENGINE_OPTIONS[name]))


# Files of more than 15 seconds, the longest first, so that all processes end together (`--dist loadfile`).
_LONGEST = (
    "cluster/test_four_machines.py",
    "chaos/test_chaos.py",
    "examples/test_readme.py",
    "grader/web/test_web_browser.py",
    "contract/test_contract.py",
    "gateway/test_openai.py",
    "doctor/test_cluster.py",
    "cluster/test_deploy.py",
    "orchestrator/test_orchestrator.py",
    "gateway/test_guarantees.py",
    "node/test_serving.py",
    "orchestrator/test_clusters.py",
    "node/test_batching.py",
    "cli/test_cluster_commands.py",
    "bench/test_cluster.py",
    "gateway/test_ollama.py",
    "cli/test_command.py",
    "gateway/test_dashboard.py",
    "node/test_engine_threads.py",
    "kv_transfer/test_faults.py",
    "gateway/test_anthropic.py",
    "gateway/test_server.py",
    "orchestrator/test_lying_nodes.py",
    "orchestrator/test_mixed_cluster.py",
    "orchestrator/test_outages.py",
    "node/test_secured_cluster.py",
    "node/test_serve_command.py",
    "gateway/test_responses.py",
    "contract/test_processes.py",
    "engines/test_memory.py",
    "node/test_chaos.py",
    "node/test_counters.py",
    "models/test_models.py",
    "contract/test_llamacpp_nodes.py",
    "grader/web/test_web_feedback.py",
    "grader/sandbox/test_sandbox.py",
    "grader/notebook/test_nbgrader_notebooks.py",
    "grader/synthetic/test_synthetic_class.py",
)
# Fixtures that load the embedded model into engines or nodes: what needs them is slow.
_SLOW_FIXTURES = {"real", "real_pair", "smollm2_engine"}


@pytest.fixture(autouse=True)
def logs_for_caplog() -> None:
    """A command that ran in this process sends the package's log to standard error, where `caplog` sees nothing, and a
    benchmark silences parts of it."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("disaggregated_inference.")]
    for logger in map(logging.getLogger, ["disaggregated_inference", *names]):
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(_LONGEST)}
    assert all(path.exists() for path in ranks), "a renamed file"
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    for item in items:
        if _SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What is imported by now stays: a full collection of garbage need not walk through torch and all clients."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Measured drift is reported, not only bounded."""
    passed = terminalreporter.stats.get("passed", [])
    for text in (value for test in passed for name, value in test.user_properties if name == "report"):
        terminalreporter.write_line(text)


@pytest.fixture
def nodes(tiny_folder: Callable[[str], Path]) -> Iterator[Callable[..., Pair]]:
    """A prefill node and a decode node in this process, each with its engine on its own thread, over real sockets."""
    made: list[Pair] = []

    def make(
        reader: str = "torch",
        writer: str = list(ENGINE_OPTIONS)[-1],
        architecture: str = "llama",
        writer_options: dict[str, Any] | None = None,
        streams: int = 2,
        codecs: tuple[str, ...] = ("raw",),
        prefix_bytes: int = 0,
        timeouts: NodeTimeouts = ONE_PROCESS,
        trusts: tuple[Trust, Trust] = (Trust(), Trust()),
        **options: Any,
    ) -> Pair:
        model = ModelFiles(architecture, tiny_folder(architecture))
        both = (reader, ENGINE_OPTIONS[reader]), (writer, ENGINE_OPTIONS[writer] | (writer_options or {}))
        threads = [Scheduler(partial(load_engine, name, model, **settings)) for name, settings in both]
        rooms = [KVMemory(thread, prefix_bytes=prefix_bytes) for thread in threads]
        prefill = PrefillNode(rooms[0], timeouts=timeouts, trust=trusts[0], **({"chunk_tokens": 77} | options))
        decode = DecodeNode(rooms[1], model.tokenizer, 50, streams, codecs, timeouts, trusts[1])
        made.append((prefill, decode))
        return made[-1]

    yield make
    for prefill, decode in made:
        prefill.close()
        decode.close()
        for kv_memory in (prefill.kv_memory, decode.kv_memory):
            kv_memory.scheduler.stop()
            kv_memory.close_all()
            assert kv_memory.faults == 0
