"""Nodes: a process with one engine and one model, serving prefill or decode over HTTP and the KV wire."""
