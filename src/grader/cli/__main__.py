"""`python -m grader.cli` is `disagg-grade`."""

from grader.cli.main import main

main()
