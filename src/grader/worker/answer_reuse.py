"""A changed rubric asks the models again only about the items that changed. A changed solution, changed instructions
or other outputs ask about all of them."""

from collections.abc import Iterable, Iterator

import msgspec

from grader.grading import GradeRecord
from grader.models import (
    ItemReading,
    LayerRun,
    ModelSettings,
    ModelsResult,
    Work,
    asked_items,
    context_hash,
    question_hash,
    text_sha,
)
from grader.store import Database, StoredAnswer, StoredSubmission, answers, gradings, put_answer


def unchanged_readings(
    database: Database, submission: StoredSubmission, work: Work, key: str, settings: ModelSettings
) -> tuple[dict[str, tuple[ItemReading, ...]], tuple[LayerRun, ...]]:
    """By item, and the runs that gave them."""
    wanted = {item.id: question_hash(item) for item in asked_items(work.rubric)}
    found: dict[str, tuple[ItemReading, ...]] = {}
    runs: dict[str, LayerRun] = {}
    for result in _earlier(database, submission, context_hash(work), key, settings):
        runs |= {run.prompt_sha: run for run in result.runs}
        for item, question in result.questions.items():
            if wanted.get(item) == question and not any(reading.void for reading in result.readings[item]):
                found.setdefault(item, result.readings[item])
    shas = dict.fromkeys(reading.prompt_sha for readings in found.values() for reading in readings)
    return found, tuple(msgspec.structs.replace(runs[sha], reused=True) for sha in shas)


def _earlier(
    database: Database, submission: StoredSubmission, context: str, key: str, settings: ModelSettings
) -> Iterator[ModelsResult]:
    """Gradings of the same file by the same models with the same settings and the same prompt, newest first."""
    for earlier in gradings(database, submission.id):
        record = msgspec.json.decode(earlier.record, type=GradeRecord)
        if earlier.key == key or not earlier.models or record.settings["models"] != settings.for_hash():
            continue
        result = msgspec.json.decode(earlier.models, type=ModelsResult)
        if result.context == context:
            yield result


def copy_answers(database: Database, submission_id: int, key: str, runs: Iterable[LayerRun]) -> None:
    """What a grading took from earlier ones can be viewed with it too."""
    missing = {run.prompt_sha for run in runs if run.reused}
    missing -= {text_sha(one.prompt) for one in answers(database, submission_id, key)}
    for answer in _answered(database, submission_id) if missing else ():
        if (sha := text_sha(answer.prompt)) in missing:
            put_answer(database, submission_id, key, answer)
            missing.remove(sha)


def _answered(database: Database, submission_id: int) -> list[StoredAnswer]:
    keys = [one.key for one in gradings(database, submission_id)]
    return [one for key in keys for one in answers(database, submission_id, key) if not one.error]
