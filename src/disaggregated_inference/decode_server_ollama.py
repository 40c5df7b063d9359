"""python -m disaggregated_inference.decode_server_ollama: a decode node in front of a running Ollama."""

from disaggregated_inference.cli.server_scripts import run_server


def main() -> None:
    run_server("Decode node in front of a running Ollama, which also prefills. No KV moves.", "decode", "ollama")


if __name__ == "__main__":
    main()
