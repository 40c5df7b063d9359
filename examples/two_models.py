"""Two models work on one file at the same time: one explains the code, the other gives feedback to its author.

    python examples/two_models.py --config cluster.json solution.py

The requests run in parallel on different machines. The speedup compares the time of both together with the sum of
their times.
"""

import argparse
from pathlib import Path

from disaggregated_client import DisaggregatedClient

CODE_MODEL = "disaggregated:qwen3-coder:30b"
FEEDBACK_MODEL = "disaggregated:gpt-oss:120b"


def main() -> None:
    parser = argparse.ArgumentParser(description="Let two models comment on one file in parallel.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--config", help="the cluster file")
    parser.add_argument("--code-model", default=CODE_MODEL)
    parser.add_argument("--feedback-model", default=FEEDBACK_MODEL)
    parser.add_argument("--max-tokens", type=int, default=600)
    options = parser.parse_args()

    source = options.file.read_text()
    tasks = {
        options.code_model: "Explain step by step what this program does.",
        options.feedback_model: "Give the author of this program short, friendly feedback.",
    }
    requests = [
        {
            "model": model,
            "messages": [{"role": "system", "content": task}, {"role": "user", "content": source}],
            "max_tokens": options.max_tokens,
        }
        for model, task in tasks.items()
    ]
    with DisaggregatedClient(options.config) as client:
        both = client.generate_many(requests)

    for model, result in zip(tasks, both["results"], strict=True):
        print(f"== {model}")
        print(result["response"] or result["error"]["message"])
        print()
    print(f"both in {both['wall_time']:.2f} s, one after the other {both['sequential_time']:.2f} s")
    print(f"speedup {both['speedup']:.2f}")


if __name__ == "__main__":
    main()
