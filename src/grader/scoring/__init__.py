"""From verdicts to a score."""

from grader.scoring.compute import Lateness, letter_of, percent_of, score
from grader.scoring.score import Component, ComponentKind, Score

__all__ = ["Component", "ComponentKind", "Lateness", "Score", "letter_of", "percent_of", "score"]
