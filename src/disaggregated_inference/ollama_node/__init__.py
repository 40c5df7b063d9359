"""A node in front of an Ollama that already runs. Import the public names from here."""

from disaggregated_inference.ollama_node.client import OllamaClient
from disaggregated_inference.ollama_node.node import OllamaNode
from disaggregated_inference.ollama_node.routes import ollama_app
from disaggregated_inference.ollama_node.server import run_ollama_node

__all__ = ["OllamaClient", "OllamaNode", "ollama_app", "run_ollama_node"]
