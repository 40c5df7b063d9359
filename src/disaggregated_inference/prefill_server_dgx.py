"""python -m disaggregated_inference.prefill_server_dgx: a prefill node with torch."""

from disaggregated_inference.cli.server_scripts import run_server


def main() -> None:
    run_server("Prefill node: computes the KV of prompts with torch, on CUDA if available.", "prefill", "torch")


if __name__ == "__main__":
    main()
