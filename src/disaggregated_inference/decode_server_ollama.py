"""python -m disaggregated_inference.decode_server_ollama: whole answers from a running Ollama."""

from disaggregated_inference.cli.server_scripts import run_server


def main() -> None:
    run_server("Writes whole answers with a running Ollama. No cache moves.", "decode", "ollama", "qwen3-coder:30b")


if __name__ == "__main__":
    main()
