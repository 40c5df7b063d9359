"""Stream a chat through the gateway with the official OpenAI SDK.

    disagg gateway --config cluster.json                      # in another terminal
    pip install openai
    python examples/openai_streaming.py --model qwen "Why is the sky blue?"

Any program that takes a base URL for OpenAI's API works the same way.
"""

import argparse
import time

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream an answer from a gateway.")
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the gateway's address")
    parser.add_argument("--key", default="none", help="an API key, if the gateway has keys")
    parser.add_argument("--model", default="qwen")
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args()

    with OpenAI(base_url=f"{options.url}/v1", api_key=options.key) as client:
        started = time.perf_counter()
        first_token_s = 0.0
        chunks = client.chat.completions.create(
            model=options.model,
            messages=[{"role": "user", "content": options.question}],
            max_tokens=options.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            for choice in chunk.choices:
                first_token_s = first_token_s or time.perf_counter() - started
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage:
                print(f"\n\nfirst token after {first_token_s:.3f} s, {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
