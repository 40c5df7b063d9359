"""Models are saved once and engines loaded once per run: the suite asks for them by name."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import hypothesis
import pytest

from disaggregated_inference.engines import Engine, load_engine
from disaggregated_inference.engines.mlx.blas import load_blas
from disaggregated_inference.kv_transfer import paths
from disaggregated_inference.models import ModelFiles, ModelStore, embedded
from disaggregated_inference.models.store import default_home
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.scheduler import Scheduler

# Some virtual machines announce AMX and then trap on it; torch's bfloat16 on the CPU would take the process down.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

# Two processes whose OpenMP threads spin for each other on two cores are sixty times slower than one; tiny models need
# one thread anyway. For the nodes that tests start, too. OpenMP reads it when torch is imported, which is below.
os.environ["OMP_NUM_THREADS"] = "1"

# On a CUDA machine without MLX: DISAGG_TEST_ENGINES=torch DISAGG_TEST_DEVICE=cuda pytest
_DEVICE = os.environ.get("DISAGG_TEST_DEVICE", "cpu")
_OPTIONS: dict[str, dict[str, Any]] = {
    "torch": {"device": _DEVICE, "dtype": "float32", "threads": 1, "kv_bytes": 1 << 30},
    "mlx": {"dtype": "float32"},
}
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    name: _OPTIONS[name] for name in os.environ.get("DISAGG_TEST_ENGINES", "torch,mlx").split(",")
}
# llama.cpp's attention is in half precision whatever it is told, so it has tiny models of its own, as GGUF files: see
# tests/twins.py.
LLAMACPP_OPTIONS: dict[str, Any] = {"threads": 1, "kv_bytes": 16 << 20}
LLAMACPP = ("llamacpp",) if find_spec("xllamacpp") or find_spec("llama_cpp") else ()

if "mlx" in ENGINE_OPTIONS:  # before any test imports MLX: it would stay with its own BLAS, sixty times slower
    load_blas()

# Started in the background, a shell has us ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LoadTiny = Callable[[str, str], Engine]
Pair = tuple[PrefillNode, DecodeNode]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it was ever so: what passes by is not asked for a second time."""
    deadline = time.monotonic() + seconds
    while not (so := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return so


def written(file: IO[str]) -> str:
    """What a child process has written there. Not by seeking: the place where it writes on is the same for both."""
    return os.pread(file.fileno(), 1 << 26, 0).decode()


# A busy machine is no failure; too slow to make examples on it is none either.
# The same examples every time, unless someone goes to look for others (`make fuzz`).
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


@lru_cache
def twin_of(folder: Path) -> Path:
    """The same weights as a GGUF, beside the folder's own files."""
    from tests.support.gguf_twins import write_twin

    return write_twin(folder, folder / "model.gguf")


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Measured drift is reported, not only bounded."""
    passed = terminalreporter.stats.get("passed", [])
    for text in (value for test in passed for name, value in test.user_properties if name == "report"):
        terminalreporter.write_line(text)


@pytest.fixture
def nodes(tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    """A prefill node and a decode node in this process, each with its engine on its own thread, over real sockets.
    Threads of one process wait for each other: nobody is gone who takes a second or two to say that he is there."""
    for name in ("_ANSWER_S", "_MOST_ANSWER_S", "PATIENCE_S"):
        monkeypatch.setattr(paths, name, 3.0)
    made: list[Pair] = []

    def make(
        reader: str = "torch",
        writer: str = list(ENGINE_OPTIONS)[-1],
        architecture: str = "llama",
        writer_options: dict[str, Any] | None = None,
        streams: int = 2,
        codecs: tuple[str, ...] = ("raw",),
        prefix_bytes: int = 0,
        **options: Any,
    ) -> Pair:
        model = ModelFiles(architecture, tiny_folder(architecture))
        both = (reader, ENGINE_OPTIONS[reader]), (writer, ENGINE_OPTIONS[writer] | (writer_options or {}))
        threads = [Scheduler(partial(load_engine, name, model, **settings)) for name, settings in both]
        rooms = [KVMemory(thread, prefix_bytes=prefix_bytes) for thread in threads]
        prefill = PrefillNode(rooms[0], **({"chunk_tokens": 77} | options))
        decode = DecodeNode(rooms[1], model.tokenizer, chunk_tokens=50, streams=streams, codecs=codecs)
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
