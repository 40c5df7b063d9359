"""python -m disaggregated_inference.decode_server_mac: takes KV and writes answers with MLX."""

from disaggregated_inference.cli.server_scripts import run_server


def main() -> None:
    run_server("Takes KV from a prefill node and writes answers with MLX.", "decode", "mlx", "qwen3-coder:30b")


if __name__ == "__main__":
    main()
