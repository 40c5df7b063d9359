"""The `disagg-grade` command."""
