"""`disagg bench handoff --prefill vllm --shape`: vLLM alone, offline (`vllm.LLM`) and over HTTP, then vLLM behind a
prefill node whose KV cache another process fetches while it is computed. All compute in chunks of the same size, with
the same graphs; the last two get their prompts over the same HTTP API."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from disaggregated_inference.bench.prompts import token_prompt
from disaggregated_inference.bench.report import Report, Row, progress
from disaggregated_inference.bench.streaming import Streamed, receiver, stream_prefill
from disaggregated_inference.bench.vllm_shapes import SHAPES, ShapeFiles, write_plugin, write_shape
from disaggregated_inference.errors import DisaggError, EngineFailed
from disaggregated_inference.vllm_node import (
    LOGITS_PROCESSOR,
    Completions,
    ConnectorServer,
    EngineOptions,
    Staging,
    VllmAddress,
    VllmProcess,
    find_python,
    kv_transfer_config,
    open_vllm_prefill,
    probe,
    run_folder,
    serve_arguments,
    serve_environment,
    spawn_guarded,
)

_GOALS = {1500: 0.93, 8192: 0.97, 32768: 0.97}  # of vLLM alone
_MAX_EXPOSED_MS = 5.0
_WINDOW = 36864
_STAGING_BYTES = 12 << 30
T = TypeVar("T")


def bench_vllm(shape: str, chunk: int, streams: int, repeats: int, alone: bool = True) -> Report:
    """Without `alone`, the baseline is the same vLLM, whose connector has nothing to do: that saves a start."""
    if shape not in SHAPES:
        raise DisaggError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
    lengths = (64, 200, 600) if shape == "tiny" else tuple(_GOALS)
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
        write_plugin(Path(folder) / "plugin")
        model = write_shape(shape, Path(folder) / shape)
        bench = _Bench(model, Path(folder), chunk, repeats)
        offline, bare = (bench.measure_offline(lengths), bench.measure_alone(lengths)) if alone else ({}, {})
        report = Report(f"vLLM {bench.build.version} prefills, {shape}, chunks of {chunk}, {streams} connections")
        for length, (idle, streamed) in bench.measure_streamed(lengths, streams).items():
            _rows(report, length, offline.get(length, []), bare.get(length, []), idle, streamed)
        return report


def _rows(
    report: Report, length: int, offline: list[float], alone: list[float], idle: list[float], streamed: list[Streamed]
) -> None:
    """Without HTTP and JSON, over HTTP, and with KV on its way. `offline` and `alone` are empty where neither ran."""
    against, bare = ("vLLM alone", statistics.median(alone)) if alone else ("idle", statistics.median(idle))
    if offline:
        bare_offline = length / statistics.median(offline)
        report.add(Row(f"prefill {length}, vLLM offline", bare_offline, "tok/s"))
        report.add(Row(f"prefill {length}, vLLM alone", length / bare, "tok/s", bare_offline, "vLLM offline"))
    report.add(Row(f"prefill {length}, connector idle", length / statistics.median(idle), "tok/s"))
    total = statistics.median(run.total_s for run in streamed)
    speed = length / statistics.median(run.total_s - run.exposed_s for run in streamed)
    name = f"prefill {length}, while another process fetches the KV"
    report.add(Row(name, speed, "tok/s", length / bare, against, _GOALS.get(length)))
    if offline:
        report.add(Row("  the same", speed, "tok/s", bare_offline, "vLLM offline", _GOALS.get(length)))
    report.add(Row("  until the last byte has arrived", length / total, "tok/s", length / bare, against))
    exposed = [run.exposed_s * 1e3 for run in streamed]
    report.add(Row("  exposed transfer", statistics.median(exposed), "ms", goal=_MAX_EXPOSED_MS, at_most=True))
    report.add(Row("  exposed transfer, worst", max(exposed), "ms"))
    size = streamed[0].fetched.payload_bytes / 1e6
    goodput = max(run.fetched.goodput_bytes_s for run in streamed)
    report.add(Row(f"  goodput while slices arrive ({size:.0f} MB)", goodput / 1e9, "GB/s"))


def _speed(length: int, times: list[float]) -> str:
    return f"{length / statistics.median(times):,.0f} tok/s"


def _run(command: list[str], environ: dict[str, str]) -> str:
    """To its end. Returns what it wrote."""
    process = spawn_guarded(command, environ)
    assert process.stdin
    assert process.stdout
    try:
        return process.stdout.read()
    finally:
        process.stdin.close()
        process.wait()


class _Bench:
    def __init__(self, model: ShapeFiles, folder: Path, chunk: int, repeats: int) -> None:
        self._model, self._folder, self._chunk, self._repeats = model, folder, chunk, repeats
        self._python = find_python("")
        self.build = probe(self._python)
        self._prompts = 0

    def measure_offline(self, lengths: tuple[int, ...]) -> dict[int, list[float]]:
        progress(f"starting vLLM {self.build.version} offline")
        output = self._folder / "offline.json"
        sizes = ",".join(map(str, lengths)), str(self._repeats), str(self._model.spec.vocabulary)
        program = [str(self._python), "-m", "disaggregated_inference.bench.vllm_offline", str(output), *sizes]
        with run_folder(self.build) as folder:
            said = _run([*program, *serve_arguments(self._options(None), self.build)], self._environment("", folder))
        if not output.exists():
            raise EngineFailed(f"vLLM failed: {said[-2000:]}")
        times = msgspec.json.decode(output.read_bytes(), type=dict[int, list[float]])
        for length in lengths:
            progress(f"  prompts of {length} tokens, offline {_speed(length, times[length])}")
        return times

    def measure_alone(self, lengths: tuple[int, ...]) -> dict[int, list[float]]:
        progress(f"starting vLLM {self.build.version} alone")
        with self._running(None) as server:
            completions = self._completions(server)
            try:
                return {length: self._measured_alone(completions, length) for length in lengths}
            finally:
                completions.close()

    def measure_streamed(self, lengths: tuple[int, ...], streams: int) -> dict[int, tuple[list[float], list[Streamed]]]:
        """Prompts whose KV stays and prompts whose KV is fetched, in turn."""
        progress(f"starting vLLM {self.build.version} with the connector")
        staging = Staging(_STAGING_BYTES)
        border = ConnectorServer(self._folder / "border.sock", self._model.spec, staging)
        with self._running(border.path) as server:
            node = open_vllm_prefill(self._model, border, staging, self._completions(server))
            completions = self._completions(server)
            try:
                with receiver(node.engine.fingerprint, streams) as pipe:
                    measures = partial(self._alone, completions), partial(stream_prefill, node, pipe)
                    return {length: self._in_turn(*measures, length) for length in lengths}
            finally:
                completions.close()
                node.close()
                node.scheduler.stop()

    def _completions(self, server: VllmProcess) -> Completions:
        return Completions(lambda: VllmAddress(server.url, server.key), lambda: self._model.name)

    @staticmethod
    def _alone(completions: Completions, tokens: list[int]) -> float:
        began_at = time.perf_counter()
        completions.start("", tokens).result()
        return time.perf_counter() - began_at

    def _measured_alone(self, completions: Completions, length: int) -> list[float]:
        times = self._repeated(partial(self._alone, completions), length)
        progress(f"  alone {_speed(length, times)}")
        return times

    def _repeated(self, measure: Callable[[list[int]], T], length: int) -> list[T]:
        """Without the first two: vLLM compiles kernels when it first needs them."""
        progress(f"prompts of {length} tokens")
        return [measure(self._prompt(length)) for _ in range(self._repeats + 2)][2:]

    def _in_turn(
        self, first: Callable[[list[int]], float], second: Callable[[list[int]], Streamed], length: int
    ) -> tuple[list[float], list[Streamed]]:
        pairs = self._repeated(lambda tokens: (first(tokens), second(self._prompt(length))), length)
        idle, streamed = [one for one, _ in pairs], [other for _, other in pairs]
        exposed = statistics.median(run.exposed_s for run in streamed) * 1e3
        computed = [run.total_s - run.exposed_s for run in streamed]
        progress(f"  idle {_speed(length, idle)}, streamed {_speed(length, computed)}, exposed {exposed:.1f} ms")
        return idle, streamed

    def _prompt(self, length: int) -> list[int]:
        """Each is new: equal prompts would choose the same experts, and a prefix cache would know them."""
        self._prompts += 1
        return token_prompt(length, self._prompts, self._model.spec.vocabulary)

    @contextmanager
    def _running(self, border: Path | None) -> Iterator[VllmProcess]:
        """With `border`: the connector and the logits processor are loaded, and meet the node there."""
        options = self._options(border)

        def launch(socket: str, key: str, folder: str) -> tuple[list[str], dict[str, str]]:
            arguments = serve_arguments(msgspec.structs.replace(options, socket=socket), self.build)
            command = [str(self._python), "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
            return command, self._environment(key, folder)

        server = VllmProcess(launch, self.build)
        try:
            server.start(progress)
            yield server
        finally:
            server.stop()

    def _options(self, border: Path | None) -> EngineOptions:
        return EngineOptions(
            model=str(self._model.path),
            name=self._model.name,
            socket="",
            dtype="float32" if self.build.is_cpu else "",  # AMX packs keys of bfloat16 in an unknown way
            window=min(_WINDOW, self._model.spec.context_window),
            batched_tokens=self._chunk,
            prefix_caching=False,
            kv_transfer=kv_transfer_config(border, decodes=False) if border else {},
            logits_processors=(LOGITS_PROCESSOR,) if border else (),
            more="--load-format dummy",
        )

    def _environment(self, key: str, packages: str) -> dict[str, str]:
        return serve_environment(os.environ, key, [packages, str(self._folder / "plugin")], self.build)
