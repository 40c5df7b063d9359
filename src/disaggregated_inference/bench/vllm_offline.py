"""`python -m disaggregated_inference.bench.vllm_offline OUTPUT LENGTHS REPEATS VOCABULARY ARGUMENTS...`, run by vLLM's
own Python: how long prompts take in a `vllm.LLM`, its engine in a process of its own, without HTTP. ARGUMENTS are those
of `vllm serve`; what only a server has is ignored."""

import json
import sys
import time
from pathlib import Path

from disaggregated_inference.bench.prompts import token_prompt

UNMEASURED = 2  # prompts of each length at first: vLLM compiles kernels when it first needs them


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    output, lengths, repeats, vocabulary, model, *arguments = sys.argv[1:]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed, _ = parser.parse_known_args(["--model", model, *arguments])
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parsed))
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)

    def measure(length: int, number: int) -> float:
        prompt = TokensPrompt(prompt_token_ids=token_prompt(length, number, int(vocabulary)))
        began_at = time.perf_counter()
        llm.generate(prompt, params, use_tqdm=False)
        return time.perf_counter() - began_at

    seconds = {
        length: [measure(length, 1000 * length + number) for number in range(int(repeats) + UNMEASURED)][UNMEASURED:]
        for length in map(int, lengths.split(","))
    }
    Path(output).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
