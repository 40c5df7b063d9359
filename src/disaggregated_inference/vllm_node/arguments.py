"""The arguments and the environment of `vllm serve` as a prefill engine should have them. The user's own come last.

A step is padded up to the next captured graph size. Beyond the last one the CPU's launches set the time of a prompt
(measured on an H200: 33k tokens/s at 1,500 tokens with vLLM's own sizes, 50k with 1,504 among them), and where they are
far apart the padding does (2,100 tokens: 57 ms with 3,072 as the next size, 44 ms with 2,112).
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.vllm_node.versions import VllmBuild

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, *range(48, 257, 16), *range(288, 2049, 32), *range(2112, 4097, 64))
_BATCHED_TOKENS = 8192  # of one step: what was measured
SEQUENCES = 64
_CPU_KV_BYTES = 4 << 30  # vLLM's own default on a CPU is most of the machine's memory

# What this node sets: another value would break it.
_OWNED = {
    "--model": "give --model to disagg serve",
    "--served-model-name": "this node names the model",
    "--host": "vLLM listens at a Unix socket, for this node alone",
    "--port": "vLLM listens at a Unix socket, for this node alone",
    "--uds": "this node chooses the socket",
    "--ssl-keyfile": "this node talks to vLLM over a Unix socket",
    "--ssl-certfile": "this node talks to vLLM over a Unix socket",
    "--no-enable-prompt-tokens-details": "this node needs them",
    "--api-key": "this node makes one, and keys do not belong on a command line",
    "--kv-transfer-config": "it loads this project's connector",
    "--logits-processors": "it loads this project's logits processor",
    "--enable-prompt-tokens-details": "this node needs them, and sets it",
    "--generation-config": "defaults of the model's file would change answers",
    "--data-parallel-size": "run one node for each copy of the model",
    "--kv-cache-dtype": "KV moves in the model's own dtype",
    "--skip-tokenizer-init": "whole answers need the tokenizer",
}


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `disagg serve` says of the engine. 0 or empty: vLLM's choice, or a default for a prefill node."""

    model: str  # a folder
    name: str
    socket: str  # where its HTTP API listens: in a folder of this user alone
    role: str = "prefill"
    dtype: str = ""
    window: int = 0
    batched_tokens: int = 0  # of one step
    prefix_caching: bool = True
    seed: int = 0
    kv_transfer: dict[str, Any] = {}  # of `--kv-transfer-config`; empty: no connector
    logits_processors: tuple[str, ...] = ()
    more: str = ""  # the user's --vllm-args


def serve_arguments(options: EngineOptions, build: VllmBuild) -> list[str]:
    """After `vllm serve`."""
    user = user_arguments(options.more)
    given = {_flag(word) for word in user if word.startswith("-")}
    ours = [words for words in _defaults(options, build) if not _is_given(words[0], given)]
    return [options.model, *_owned(options), *(word for words in ours for word in words), *user]


def user_arguments(text: str) -> list[str]:
    """Split as a shell does. Arguments that this node owns are refused by name."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadRequest(f"--vllm-args: {error}: quote it as in a shell") from error
    for word in words:
        flag = _flag(word)
        if flag.startswith("--") and (owned := next((name for name in _OWNED if name.startswith(flag)), "")):
            raise BadRequest(f"--vllm-args: leave out {flag}: {_OWNED[owned]}")
    if words and not words[0].startswith("-"):
        raise BadRequest(
            f"--vllm-args: {words[0]!r} is no option: they begin with --, such as --tensor-parallel-size 2"
        )
    return words


def _flag(word: str) -> str:
    """`--max_model_len=9` is `--max-model-len`, `--kv-transfer-config.kv_role` belongs to `--kv-transfer-config`."""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def _is_given(flag: str, given: set[str]) -> bool:
    opposite = flag.replace("--", "--no-", 1) if not flag.startswith("--no-") else flag.replace("--no-", "--", 1)
    shorts = {"--compilation-config": "-cc"}
    graphs = {"--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--enforce-eager"}
    known = {flag, opposite, shorts.get(flag, flag)} | (graphs if flag == "--compilation-config" else set())
    return bool(known & given)


def _owned(options: EngineOptions) -> list[str]:
    found = ["--served-model-name", options.name, "--uds", options.socket]
    found += ["--generation-config", "vllm", "--enable-prompt-tokens-details"]
    if options.kv_transfer:
        found += ["--kv-transfer-config", json.dumps(options.kv_transfer)]
    if options.logits_processors:
        found += ["--logits-processors", *options.logits_processors]
    return found


def _defaults(options: EngineOptions, build: VllmBuild) -> list[list[str]]:
    """Each may be replaced by the user's."""
    batched = options.batched_tokens or _BATCHED_TOKENS
    found = [
        ["--seed", str(options.seed)],
        ["--max-num-batched-tokens", str(batched)],
        ["--max-num-seqs", str(min(SEQUENCES, batched))],
        ["--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"],
        ["--disable-uvicorn-access-log"],
    ]
    found += [["--dtype", options.dtype]] if options.dtype else []
    found += [["--max-model-len", str(options.window)]] if options.window else []
    found += [["--kv-cache-memory-bytes", str(_CPU_KV_BYTES)]] if build.is_cpu else []
    return [*found, _graphs(options.role, batched, build)]


def _graphs(role: str, batched: int, build: VllmBuild) -> list[str]:
    """The CPU has no graphs, and compiling would only delay its start. A node that writes answers keeps vLLM's full
    graphs: with piecewise ones alone it decodes at about half its speed."""
    if build.is_cpu:
        return ["--enforce-eager"]
    config: dict[str, Any] = {"cudagraph_capture_sizes": [size for size in GRAPH_SIZES if size <= batched]}
    if role == "prefill":
        config["cudagraph_mode"] = "PIECEWISE"
    return ["--compilation-config", json.dumps(config)]


def serve_environment(
    environ: Mapping[str, str], key: str, paths: Sequence[str], build: VllmBuild, threads: int = 0
) -> dict[str, str]:
    """Of the process. Tokens of this cluster stay here; vLLM's own key is in no command line. On the CPU the first
    request with logprobs would wait half a minute for a compiler."""
    kept = {name: value for name, value in environ.items() if name not in _NOT_FOR_VLLM}
    path = [*paths, *filter(None, environ.get("PYTHONPATH", "").split(":"))]
    more = {"VLLM_API_KEY": key, "PYTHONPATH": ":".join(path), "PYTHONUNBUFFERED": "1"}
    more |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    more |= {"VLLM_HOST_IP": environ.get("VLLM_HOST_IP", "127.0.0.1")}
    if build.is_cpu:
        more["TORCHDYNAMO_DISABLE"] = environ.get("TORCHDYNAMO_DISABLE", "1")
    if threads:
        more |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return kept | more


_NOT_FOR_VLLM = (
    "DISAGG_TOKEN",
    "DISAGG_TOKEN_FILE",
    "DISAGG_IDENTITY",
    "DISAGG_PARENT_PID",
    "PYTHONHOME",
    "VIRTUAL_ENV",
)
