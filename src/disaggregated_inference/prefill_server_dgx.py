"""python -m disaggregated_inference.prefill_server_dgx: reads prompts with torch and hands out their KV."""

from disaggregated_inference.cli.server_scripts import run_server


def main() -> None:
    run_server(
        "Reads prompts with torch, on CUDA where it is there, and hands out their KV.",
        "prefill",
        "torch",
        "qwen3-coder:30b",
    )


if __name__ == "__main__":
    main()
