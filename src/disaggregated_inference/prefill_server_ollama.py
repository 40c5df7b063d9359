"""python -m disaggregated_inference.prefill_server_ollama: has a running Ollama read prompts ahead of time."""

from disaggregated_inference.cli.server_scripts import run_server


def main() -> None:
    run_server(
        "Reads prompts with a running Ollama: it holds their beginnings for requests that come later. No cache moves.",
        "prefill",
        "ollama",
        "qwen3-coder:30b",
    )


if __name__ == "__main__":
    main()
