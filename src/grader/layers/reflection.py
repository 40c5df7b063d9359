"""Reflections: words that the student wrote in markdown, per question. The template's text is not the student's, and
a line that speaks to the grader is no answer."""

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

from grader.injection import attempt_in
from grader.layers.cells import cells_at, described
from grader.layers.submission import CheckResult, Submission
from grader.notebook import Notebook, Passage, names_section, passages, words_of
from grader.rubric import Where, Words
from grader.verdicts import Evidence, Flag

_QUOTE_CHARS = 160


def reflection(check: Words, submission: Submission) -> CheckResult:
    answers = _answers(check, submission.notebook, _template_lines(submission.template))
    wanted = check.questions or ("",)
    counts = {question: len(words_of("\n".join(answers[question][0]))) for question in wanted}
    have = sum(count >= check.min_words for count in counts.values())
    told = ", ".join(f"{question or 'text'}: {count}" for question, count in counts.items())
    return CheckResult(
        share=Fraction(have, len(wanted)),
        reason=f"{have} of {len(wanted)} answers{described(check.where)} have {check.min_words} words (words: {told}).",
        evidence=tuple(answers[question][1] for question in wanted if answers[question][1].cell is not None),
        flags=tuple(flag for question in wanted for flag in _repeated(answers[question])),
    )


_Answer = tuple[list[str], Evidence]


def _answers(check: Words, notebook: Notebook, given: frozenset[str]) -> defaultdict[str, _Answer]:
    answers: defaultdict[str, _Answer] = defaultdict(lambda: ([], Evidence()))
    question = "" if not check.questions else None
    for passage in _passages(notebook, check.where):
        if check.questions:
            question = _by_heading(passage, check.questions) or question
        for number, line in enumerate(passage.text.splitlines()):
            asked = _in_line(line, check.questions)
            question = asked or question
            text = _after_question(line, asked) if asked else line
            if question is None or not words_of(text) or _normal(line) in given or attempt_in(line):
                continue
            lines, evidence = answers[question]
            if evidence.cell is None:
                evidence = Evidence(cell=passage.cell, line=passage.line + number, quote=text.strip()[:_QUOTE_CHARS])
            answers[question] = ([*lines, text], evidence)
    return answers


def _passages(notebook: Notebook, where: Where) -> Iterator[Passage]:
    cells = {cell.index for cell in cells_at(notebook, Where(tag=where.tag, grade_id=where.grade_id))}
    for passage in passages((cell.index, cell.source) for cell in notebook.markdown_cells):
        inside = not where.section or any(names_section(title, where.section) for title in passage.section)
        if passage.cell in cells and inside:
            yield passage


def _by_heading(passage: Passage, questions: tuple[str, ...]) -> str | None:
    for title in reversed(passage.section):
        for question in questions:
            if names_section(title, question):
                return question
    return None


def _in_line(line: str, questions: tuple[str, ...]) -> str | None:
    """A question that the line begins with, as in `**Question 1:** …`."""
    words = [word.casefold() for word in words_of(line)]
    for question in questions:
        asked = [word.casefold() for word in words_of(question)]
        if asked and words[: len(asked)] == asked:
            return question
    return None


def _after_question(line: str, question: str) -> str:
    return " ".join(words_of(line)[len(words_of(question)) :])


def _template_lines(template: Notebook | None) -> frozenset[str]:
    cells = template.markdown_cells if template else ()
    return frozenset(_normal(line) for cell in cells for line in cell.source.splitlines() if _normal(line))


def _normal(line: str) -> str:
    return " ".join(word.casefold() for word in words_of(line))


def _repeated(answer: _Answer) -> Iterator[Flag]:
    """Padding: many words, few different ones."""
    words = [word.casefold() for word in words_of("\n".join(answer[0]))]
    if len(words) >= 30 and len(set(words)) * 5 < len(words):
        message = f"The answer has {len(words)} words, but only {len(set(words))} different ones."
        yield Flag(code="repeated_words", message=message, evidence=(answer[1],))
