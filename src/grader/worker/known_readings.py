"""A changed rubric asks the models again only about the items that changed."""

import msgspec

from grader.grading import GradeRecord
from grader.models import ItemReading, ModelSettings, ModelsResult, asked_items, question_hash
from grader.rubric import Rubric
from grader.store import Database, StoredSubmission, gradings


def unchanged_readings(
    database: Database, submission: StoredSubmission, rubric: Rubric, key: str, settings: ModelSettings
) -> dict[str, tuple[ItemReading, ...]]:
    """Of earlier gradings of the same file by the same models with the same settings, newest first."""
    wanted = {item.id: question_hash(item) for item in asked_items(rubric)}
    found: dict[str, tuple[ItemReading, ...]] = {}
    for earlier in gradings(database, submission.id):
        record = msgspec.json.decode(earlier.record, type=GradeRecord)
        if earlier.key == key or not earlier.models or record.settings["models"] != settings.for_hash():
            continue
        result = msgspec.json.decode(earlier.models, type=ModelsResult)
        for item, question in result.questions.items():
            if wanted.get(item) == question and not any(reading.void for reading in result.readings[item]):
                found.setdefault(item, result.readings[item])
    return found
