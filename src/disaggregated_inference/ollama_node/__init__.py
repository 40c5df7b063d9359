"""A node in front of a running Ollama. It serves whole answers: Ollama's API neither exports nor imports KV."""
