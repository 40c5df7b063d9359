"""python -m disaggregated_inference.decode_server_mac: a decode node with MLX."""

from disaggregated_inference.cli.server_scripts import run_server


def main() -> None:
    run_server("Decode node: fetches KV from a prefill node and decodes with MLX.", "decode", "mlx")


if __name__ == "__main__":
    main()
