"""Which names of a node's model mean the model of the cluster file."""

import pytest

from disaggregated_inference.models import is_same_model


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("qwen3-coder:30b", "qwen3-coder:30b"),
        ("Qwen3-Coder-30B", "qwen3-coder:30b"),
        ("disaggregated:qwen3-coder:30b", "qwen3-coder_30b"),
        ("/models/my-model/", "My-Model"),
        ("C:\\models\\my-model", "my model"),
        ("someone/my-model", "my-model"),
        ("/models/My-Model-Q4_K_M.gguf", "my-model"),
        ("My-Model-UD-Q4_K_XL-00001-of-00003.gguf", "my-model"),
        ("mlx-community/My-Model-8bit", "org/My-Model-FP8"),
        ("org/My-Model-GGUF", "my-model:latest"),
        ("/cache/hub/models--org--My-Model/snapshots/0123abcd", "my-model"),
        # The store's own table.
        ("smollm2:135m", "smollm2"),
        ("gpt-oss:120b", "gpt-oss"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder:30b"),
        ("/models/Qwen3-Coder-30B-A3B-Instruct-FP8", "qwen3-coder:30b"),
        ("mlx-community/gpt-oss-120b-MXFP4-Q8", "gpt-oss:120b"),
    ],
)
def test_names_of_one_model(own: str, name: str) -> None:
    assert is_same_model(own, [name])
    assert is_same_model(name, ["another", own])


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("smollm2:135m", "qwen"),
        ("qwen3-coder:30b", "qwen"),  # a part: an alias says that it is meant
        ("qwen3-coder:480b", "qwen3-coder:30b"),
        ("gpt-oss:20b", "gpt-oss:120b"),
        ("gpt-oss:20b", "gpt-oss"),
        ("my-model-v2", "my-model"),
        ("q8", "q4"),
        ("-4bit", "-8bit"),
        ("/", "my-model"),
    ],
)
def test_names_of_two_models(own: str, name: str) -> None:
    assert not is_same_model(own, [name])
    assert not is_same_model(name, [own])
    assert not is_same_model(own, [])
