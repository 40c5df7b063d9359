"""Which models are asked when none is named."""

import pytest

from grader.models import ModelSettings


def test_the_environment_names_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CODE_MODEL", "FEEDBACK_MODEL"):
        monkeypatch.delenv(name, raising=False)
    usual = ModelSettings()
    assert usual.code_model == "disaggregated:qwen3-coder:30b"
    assert usual.feedback_model == "disaggregated:gpt-oss:120b"
    monkeypatch.setenv("CODE_MODEL", "own-code")
    monkeypatch.setenv("FEEDBACK_MODEL", "own-words")
    own = ModelSettings()
    assert (own.code_model, own.feedback_model) == ("own-code", "own-words")
