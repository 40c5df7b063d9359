"""python -m disaggregated_inference.decode_server_ollama: a decode node in front of a running Ollama."""

try:
    from disaggregated_inference.cli.server_scripts import run_server
except ModuleNotFoundError as error:
    install = "pip install 'disaggregated-inference' (in a clone of its repository: pip install '.')"
    raise SystemExit(f"error: {error}; this script needs its package: {install}") from None


def main() -> None:
    run_server("Decode node in front of a running Ollama, which also prefills. No KV moves.", "decode", "ollama")


if __name__ == "__main__":
    main()
