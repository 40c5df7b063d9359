"""python -m disaggregated_inference.prefill_server_ollama: a prefill node in front of a running Ollama."""

from disaggregated_inference.cli.server_scripts import run_server


def main() -> None:
    run_server(
        "Prefill node in front of a running Ollama: warms its prefix cache for later requests. No KV moves.",
        "prefill",
        "ollama",
    )


if __name__ == "__main__":
    main()
