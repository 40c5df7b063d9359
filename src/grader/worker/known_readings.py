"""A changed rubric asks the models again only about the items that changed. A changed solution, changed instructions
or other outputs ask about all of them."""

import msgspec

from grader.grading import GradeRecord
from grader.models import ItemReading, ModelSettings, ModelsResult, Work, asked_items, context_hash, question_hash
from grader.store import Database, StoredSubmission, gradings


def unchanged_readings(
    database: Database, submission: StoredSubmission, work: Work, key: str, settings: ModelSettings
) -> dict[str, tuple[ItemReading, ...]]:
    """Of earlier gradings of the same file by the same models with the same settings, newest first."""
    wanted = {item.id: question_hash(item) for item in asked_items(work.rubric)}
    context = context_hash(work)
    found: dict[str, tuple[ItemReading, ...]] = {}
    for earlier in gradings(database, submission.id):
        record = msgspec.json.decode(earlier.record, type=GradeRecord)
        if earlier.key == key or not earlier.models or record.settings["models"] != settings.for_hash():
            continue
        result = msgspec.json.decode(earlier.models, type=ModelsResult)
        if result.context != context:
            continue
        for item, question in result.questions.items():
            if wanted.get(item) == question and not any(reading.void for reading in result.readings[item]):
                found.setdefault(item, result.readings[item])
    return found
