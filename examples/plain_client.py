"""One question to a cluster, and what happened to it.

    python examples/plain_client.py --config cluster.json "Why is the sky blue?"

`disagg config example > cluster.json` writes a cluster file to edit. Without --config the client uses DISAGG_CONFIG,
or cluster.json in the current folder.
"""

import argparse

from disaggregated_client import DisaggregatedClient


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a cluster one question.")
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--config", help="the cluster file")
    parser.add_argument("--model", help="a model of the cluster; needed if there are several")
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args()

    with DisaggregatedClient(options.config) as client:
        response, metrics = client.generate(
            messages=[{"role": "user", "content": options.question}],
            model=options.model,
            max_tokens=options.max_tokens,
        )

    print(response)
    print()
    print(f"method            {metrics['method']}")
    print(f"prefill           {metrics['prompt_tokens']} tokens on {metrics['prefill_node']}")
    print(f"decode            {metrics['completion_tokens']} tokens on {metrics['decode_node']}")
    print(f"first token       {metrics['first_token_time']:.3f} s")
    print(f"whole answer      {metrics['total_time']:.3f} s")
    if metrics["warning"]:
        print(f"warning           {metrics['warning']}")


if __name__ == "__main__":
    main()
