"""python -m disaggregated_inference.prefill_server_ollama: a prefill node in front of a running Ollama."""

try:
    from disaggregated_inference.cli.server_scripts import run_server
except ModuleNotFoundError as error:
    install = "pip install 'disaggregated-inference' (in a clone of its repository: pip install '.')"
    raise SystemExit(f"error: {error}; this script needs its package: {install}") from None


def main() -> None:
    run_server(
        "Prefill node in front of a running Ollama: warms its prefix cache for later requests. No KV moves.",
        "prefill",
        "ollama",
    )


if __name__ == "__main__":
    main()
