"""The one HTTP layer that nodes, Ollama nodes and the gateway share."""
