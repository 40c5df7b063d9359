"""The arguments of vLLM: what this node sets, what the user may change, and what is refused by name."""

import json

import pytest

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.vllm_node.arguments import (
    EngineOptions,
    serve_arguments,
    serve_environment,
    user_arguments,
)
from disaggregated_inference.vllm_node.versions import VllmBuild

CUDA, CPU = VllmBuild(version="0.32.0"), VllmBuild(version="0.32.0", is_cpu=True)


def made(build: VllmBuild = CUDA, **options: object) -> list[str]:
    return serve_arguments(EngineOptions(model="/m", name="m", socket="/s", **options), build)  # type: ignore[arg-type]


def value(arguments: list[str], flag: str) -> str:
    assert arguments.count(flag) == 1, arguments
    return arguments[arguments.index(flag) + 1]


def test_a_prefill_engine_has_a_ladder_of_piecewise_graphs() -> None:
    graphs = json.loads(value(made(), "--compilation-config"))
    assert graphs["cudagraph_mode"] == "PIECEWISE"
    sizes = graphs["cudagraph_capture_sizes"]
    assert max(sizes) == 4096
    padded = [min(size for size in sizes if size >= prompt) / prompt for prompt in range(64, 4097)]
    assert max(padded) < 1.24
    assert max(padded[1024 - 64 :]) < 1.04
    assert max(json.loads(value(made(batched_tokens=600), "--compilation-config"))["cudagraph_capture_sizes"]) == 576


def test_a_vllm_that_writes_answers_keeps_full_graphs() -> None:
    assert "cudagraph_mode" not in json.loads(value(made(role="both"), "--compilation-config"))


def test_the_cpu_has_no_graphs_and_does_not_take_all_memory() -> None:
    arguments = made(CPU)
    assert "--enforce-eager" in arguments
    assert "--compilation-config" not in arguments
    assert int(value(arguments, "--kv-cache-memory-bytes")) == 4 << 30
    assert "--kv-cache-memory-bytes" not in made(CUDA), "vLLM measures what a GPU has left"


def test_the_connector_and_the_logits_processor_are_given() -> None:
    arguments = made(kv_transfer={"kv_connector": "C"}, logits_processors=("a:B",), dtype="float32", window=100)
    assert json.loads(value(arguments, "--kv-transfer-config")) == {"kv_connector": "C"}
    assert value(arguments, "--logits-processors") == "a:B"
    assert (value(arguments, "--dtype"), value(arguments, "--max-model-len")) == ("float32", "100")
    assert value(arguments, "--uds") == "/s"
    assert not {"--host", "--port"} & set(arguments)
    assert arguments[0] == "/m"


def test_the_users_arguments_are_last_and_replace_defaults() -> None:
    arguments = made(more="--max_num_batched_tokens=4096 --tensor-parallel-size 2 --no-enable-prefix-caching")
    assert arguments[-4:] == [
        "--max_num_batched_tokens=4096",
        "--tensor-parallel-size",
        "2",
        "--no-enable-prefix-caching",
    ]
    assert "--max-num-batched-tokens" not in arguments
    assert "--enable-prefix-caching" not in arguments
    assert "--compilation-config" not in made(more="--enforce-eager"), "graphs and no graphs contradict each other"
    assert "--compilation-config" not in made(more="-cc.cudagraph_mode=FULL")


def test_few_tokens_per_step_have_few_sequences() -> None:
    assert value(made(batched_tokens=48), "--max-num-seqs") == "48", "vLLM refuses more sequences than tokens"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--port 8000", "--port"),
        ("--api-key=secret", "--api-key"),
        ("--kv_transfer_config {}", "--kv-transfer-config"),
        ("--kv-transfer-config.kv_role kv_both", "--kv-transfer-config"),
        ("--logits-proc x:Y", "--logits-proc"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype"),
        ("--data-parallel-size 2", "--data-parallel-size"),
        ("-tp 2 --model other", "--model"),
    ],
)
def test_arguments_that_the_node_owns_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(BadRequest, match=f"leave out {named}: "):
        user_arguments(text)


@pytest.mark.parametrize(("text", "why"), [("--a 'b", "quote it as in a shell"), ("serve x", "'serve' is no option")])
def test_arguments_that_are_none_are_refused(text: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        user_arguments(text)


def test_no_secret_is_on_the_command_line_and_no_token_reaches_vllm() -> None:
    environ = {"DISAGG_TOKEN": "ours", "DISAGG_IDENTITY": "/i", "HOME": "/h", "PYTHONPATH": "/theirs"}
    found = serve_environment(environ, "a-key", ["/folder"], CUDA, threads=3)
    assert found["VLLM_API_KEY"] == "a-key"
    assert "DISAGG_TOKEN" not in found
    assert "DISAGG_IDENTITY" not in found
    assert found["PYTHONPATH"] == "/folder:/theirs"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["HOME"] == "/h"
    assert not [word for word in made() if "a-key" in word]
