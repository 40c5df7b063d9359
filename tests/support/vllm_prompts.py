"""The prompts of the vLLM tests.

llama.cpp computes attention in half precision, whatever its cache is in, and vLLM's KV is in float32: where two tokens
are nearly as likely, or two experts, its answer may be another one without a fault of the KV. So it gets chosen
prompts, without such ties, as tests/vllm/handoff/test_contract.py checks. A wrong cache changes their answers all the
same. torch and MLX compute in float32 and get any prompts.
"""

from tests.support.handoff import prompt_of
from tests.support.vllm_nodes import CHUNK

# Around vLLM's block on the CPU, around its chunk, around and past the window of 128.
LENGTHS = (1, 2, 31, 32, 33, CHUNK, CHUNK + 1, 127, 128, 129, 300, 1000)

_SEEDS = {
    "llama": (2, 3, 4, 3, 5, 19, 1, 26, 17, 10, 4, 7),
    "qwen3_moe": (7, 5, 0, 8, 1, 25, 16, 9, 5, 21, 6, 14),
    "gpt_oss": (0, 4, 3, 5, 3, 4, 26, 9, 8, 2, 1, 10),
}


def chosen_prompt(architecture: str, length: int) -> list[int]:
    """For llama.cpp, on the models of tests/vllm."""
    return prompt_of(length, seed=_SEEDS[architecture][LENGTHS.index(length)])
