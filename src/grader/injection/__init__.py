"""Prompt injection: a detector that flags attempts, and a corpus of attacks for tests."""

from grader.injection.attacks import Attack, load_attacks, with_attack
from grader.injection.detector import attempt_in, find_attempts

__all__ = ["Attack", "attempt_in", "find_attempts", "load_attacks", "with_attack"]
