"""Read the prompt on one machine, write the answer on another, with the KV cache moved in between."""

__version__ = "0.1.0"
