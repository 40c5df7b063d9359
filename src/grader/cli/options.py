"""Options that several commands have, and what they stand for."""

import getpass
import os
from pathlib import Path
from typing import Annotated

import typer

from grader.models import ModelSettings
from grader.store import Assignment, Database, GradeBookError, assignment, assignment_names

Book = Annotated[
    Path,
    typer.Option("--book", "-b", envvar="GRADER_BOOK", metavar="FOLDER", help="Folder of the grade book."),
]
Name = Annotated[
    str, typer.Option("--assignment", "-a", metavar="NAME", help="The assignment. Default: the only one of the book.")
]
Who = Annotated[str, typer.Option(help="Your name in the history of changes. Default: your login.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Config = Annotated[
    str,
    typer.Option("--config", "-c", metavar="PATH", help="Cluster file. Default: DISAGG_CONFIG, or ./cluster.json."),
]
EndpointUrl = Annotated[
    str,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="An OpenAI-compatible endpoint that ends in /v1, instead of a cluster. Its key is in GRADER_API_KEY.",
    ),
]
CodeModel = Annotated[str, typer.Option(help="Judges code. Default: CODE_MODEL, or disaggregated:qwen3-coder:30b.")]
FeedbackModel = Annotated[
    str, typer.Option(help="Writes feedback. Default: FEEDBACK_MODEL, or disaggregated:gpt-oss:120b.")
]
HERE = Path()


def open_book(folder: Path, name: str = "") -> tuple[Database, Assignment]:
    database = Database.open(folder)
    return database, pick(database, name)


def pick(database: Database, name: str) -> Assignment:
    names = assignment_names(database)
    if not name and len(names) != 1:
        known = f"it has {', '.join(names)}: choose with --assignment" if names else "disagg-grade init adds one"
        raise GradeBookError(f"the grade book has {len(names)} assignments; {known}")
    return assignment(database, name or names[0])


def me(who: str) -> str:
    if who:
        return who
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a system without a name for this user
        return str(os.getuid())


def model_settings(config: str, endpoint: str, code: str, feedback: str, readings: int = 1) -> ModelSettings:
    """Empty: the default."""
    path = str(Path(config).resolve()) if config else ""
    given = {"code_model": code, "feedback_model": feedback, "config": path, "endpoint": endpoint}
    return ModelSettings(readings=readings, **{name: value for name, value in given.items() if value})  # type: ignore[arg-type]
