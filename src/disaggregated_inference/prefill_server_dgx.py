"""python -m disaggregated_inference.prefill_server_dgx: a prefill node with torch."""

try:
    from disaggregated_inference.cli.server_scripts import run_server
except ModuleNotFoundError as error:
    install = "pip install 'disaggregated-inference[torch]' (in a clone of its repository: pip install '.[torch]')"
    raise SystemExit(f"error: {error}; this script needs its package: {install}") from None


def main() -> None:
    run_server("Prefill node: computes the KV of prompts with torch, on CUDA if available.", "prefill", "torch")


if __name__ == "__main__":
    main()
