"""The benchmarks of the engines run to their end, on tiny models and at sizes that measure nothing."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.bench import drift, engines
from disaggregated_inference.bench.prompts import row_prompts, token_prompt
from disaggregated_inference.bench.report import Report
from disaggregated_inference.engines import Sequence
from disaggregated_inference.errors import BadRequest, EngineUnavailable
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP, LoadTiny, twin_of
from tests.support.handoff import prompt_of

NAMES = (*ENGINE_OPTIONS, *LLAMACPP)


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_beside_its_library(name: str, tiny_engine: LoadTiny) -> None:
    report = Report("")
    engines.measure(tiny_engine(name, "twin_llama"), report, (16,), (1, 2), 1, 2)
    assert all(math.isfinite(row.value) and row.value >= 0 for row in report.rows)
    found = [row.what for row in report.rows]
    assert found[:3] == ["prefill 16, export off", "prefill 16, export on", "prefill 16, export on"]
    assert found[3:7] == ["decode, batch 1", "decode, batch 2", "export of 0 MB", "import of 0 MB"]
    assert [row.goal for row in report.rows[:3]] == [None, 0.97, None]


def test_every_row_of_a_batch_has_its_own_prompt() -> None:
    """Else all rows of a mixture choose the same experts. Both sides of the comparison get the same prompts."""
    rows = row_prompts(50, 32, 512)
    assert len({tuple(row) for row in rows}) == 32
    assert all(len(set(tokens)) > 24 for tokens in zip(*rows, strict=True)), "at every position"
    assert rows == row_prompts(50, 32, 512)
    assert len(set(token_prompt(8192, vocabulary=100_000))) > 7000, "no small circle of tokens"


@pytest.mark.parametrize("name", NAMES)
def test_decode_is_measured_with_these_prompts(
    name: str, tiny_engine: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(name, "twin_llama")
    prompts, read = row_prompts(9, 3, engine.spec.vocabulary), list[list[int]]()
    prefill = engine.prefill

    def watched(sequence: Sequence, tokens: list[int], *more: Any) -> Any:
        read.append(list(tokens))
        return prefill(sequence, tokens, *more)

    monkeypatch.setattr(engine, "prefill", watched)
    assert engines.decode_seconds(engine, prompts, 2) > 0
    assert read == prompts
    assert engines.baseline_of(engine).decode_seconds(prompts, 2) > 0


def test_each_pair_over_nodes(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Of one engine: starting nodes is what takes time here."""
    folder, names = tiny_folder("twin_llama"), NAMES[-1:]
    if LLAMACPP:
        twin_of(folder)
    (report,) = engines.run(list(names), str(folder), "", "", 0, True, tmp_path, only_pairs=True)
    assert (tmp_path / "engines-pairs.json").exists()
    pairs = [f"{reader} → {writer}" for writer in names for reader in names]
    rows = [f"{pair}, {what}" for pair in pairs for what in ("first token", "exposed transfer")]
    assert [row.what for row in report.rows] == rows
    assert all(row.value >= 0 for row in report.rows)


def test_drift_of_each_pair(tiny_engine: LoadTiny) -> None:
    loaded = {name: tiny_engine(name, "twin_llama") for name in NAMES}
    found = drift.bench_drift(loaded, [prompt_of(40), prompt_of(9)], 6)
    assert {(each.prefill, each.decode) for each in found} == {(one, other) for one in NAMES for other in NAMES}
    assert len(found) == len(NAMES) ** 2 * 2
    assert all(0 < each.positions <= 12 and 0 <= each.mean_kl <= each.max_kl < 1 for each in found)
    assert all(each.top1_agreement == 1 and each.max_kl < 1e-9 for each in found if _is_exact(each))
    assert not any(engine.live for engine in loaded.values())


def _is_exact(each: drift.Drift) -> bool:
    return each.codec == "raw" and each.prefill == each.decode


def test_drift_is_told_and_saved(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_folder: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(drift, "TEXTS", ("How far?", "So far."))
    name = NAMES[0]
    found = drift.run([name], str(tiny_folder("twin_llama")), 3, 1, True, tmp_path)
    assert [each.codec for each in found] == ["raw", "int8"]
    saved = json.loads((tmp_path / "drift.json").read_text())["rows"]
    assert [row["mean_kl"] for row in saved] == [each.mean_kl for each in found]
    assert f"{name} → {name}" in capsys.readouterr().out


def test_an_unknown_engine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="abacus"):
        engines.run(["abacus"], "smollm2", "", "", 1, True, tmp_path)
    with pytest.raises(EngineUnavailable, match="abacus"):
        drift.run(["abacus"], "smollm2", 2, 1, True, tmp_path)


def test_pairs_of_a_shape_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="leave out --pairs or --shape"):
        engines.run([], "smollm2", "qwen3-30b-a3b", "cpu", 1, True, tmp_path, only_pairs=True)
