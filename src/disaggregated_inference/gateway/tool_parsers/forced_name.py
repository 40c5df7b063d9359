"""The one function that must be called, by its name."""

from disaggregated_inference.errors import BadRequest

_WORDS = ("auto", "none", "required")  # what a turn's tool_choice says where it names nobody


def forced_name(name: str) -> str:
    """A function may have any of these names, and be called; it cannot be told apart where it is to be forced."""
    if name in _WORDS:
        raise BadRequest(f"tool_choice: a function called {name} cannot be forced, the word has a meaning: rename it")
    return name
