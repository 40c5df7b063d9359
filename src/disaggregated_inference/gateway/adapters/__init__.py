"""One file per public API."""
