"""`python -m disaggregated_inference` is `disagg`."""

from disaggregated_inference.cli.main import main

main()
