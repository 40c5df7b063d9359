"""Similarity between submissions: evidence for a human, never points."""

from grader.similarity.compare import SUSPICIOUS, Resemblance, compare, similarity_flags
from grader.similarity.winnowing import fingerprints

__all__ = ["SUSPICIOUS", "Resemblance", "compare", "fingerprints", "similarity_flags"]
