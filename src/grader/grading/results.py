"""What the stages store, as JSON in the grade book."""

import hashlib
import json
from typing import Any

import msgspec

from disaggregated_inference import __version__
from grader.models import ModelSettings
from grader.store import Assignment, RubricVersion
from grader.verdicts import Flag, Verdict


class GradeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch is graded."""

    models: ModelSettings | None = None  # None: layers 1 and 2 alone
    rerun: bool = False


class ChecksResult(msgspec.Struct, frozen=True, kw_only=True):
    """Layers 1 and 2. `notes`: about the re-run."""

    verdicts: tuple[Verdict, ...]
    flags: tuple[Flag, ...]
    readable: bool = True
    notes: tuple[str, ...] = ()


class GradeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to make the same grade again. Prompts have hashes of their own, with each answer."""

    rubric_hash: str
    rubric_number: int
    notebook_sha: str
    solution_sha: str | None
    template_sha: str | None
    inputs: dict[str, str]
    settings: dict[str, Any]
    grader_version: str = __version__


def record_of(
    assignment: Assignment, version: RubricVersion, notebook_sha: str, settings: GradeSettings
) -> GradeRecord:
    return GradeRecord(
        rubric_hash=version.hash,
        rubric_number=version.number,
        notebook_sha=notebook_sha,
        solution_sha=assignment.solution_sha,
        template_sha=assignment.template_sha,
        inputs=assignment.inputs,
        settings={"models": settings.models.for_hash() if settings.models else None, "rerun": settings.rerun},
    )


def grading_key(assignment: Assignment, settings: GradeSettings) -> str:
    """The same for all submissions of a batch. Another rubric, solution, data file or model is another key."""
    fields = msgspec.to_builtins(record_of(assignment, assignment.rubric, "", settings))
    fields.pop("rubric_number")
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
