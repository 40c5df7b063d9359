"""python -m disaggregated_inference.decode_server_mac: a decode node with MLX."""

try:
    from disaggregated_inference.cli.server_scripts import run_server
except ModuleNotFoundError as error:
    install = "pip install 'disaggregated-inference[mlx]' (in a clone of its repository: pip install '.[mlx]')"
    raise SystemExit(f"error: {error}; this script needs its package: {install}") from None


def main() -> None:
    run_server("Decode node: fetches KV from a prefill node and decodes with MLX.", "decode", "mlx")


if __name__ == "__main__":
    main()
