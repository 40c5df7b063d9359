"""The `disagg-grade` command. Commands import their modules when they run, which keeps --help fast."""

import json
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Annotated

import typer

from disaggregated_inference import __version__
from disaggregated_inference.errors import DisaggError
from grader.cli.options import (
    HERE,
    AsJson,
    Book,
    CodeModel,
    Config,
    EndpointUrl,
    FeedbackModel,
    Name,
    Who,
    model_settings,
)
from grader.errors import GraderError

app = typer.Typer(
    name="disagg-grade",
    help="Grade notebooks: points with a reason and evidence for each, feedback, and your last word.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Errors become one line (with `--json` also one of JSON) and exit code 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except (GraderError, DisaggError, OSError, sqlite3.Error) as error:
        said = _said(error)
        if "--json" in sys.argv:
            print(json.dumps({"error": {"code": type(error).__name__, "message": said}}))
        sys.stderr.write(f"error: {said}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; what is done stays, and the same command continues\n")
        raise SystemExit(130) from None


def _said(error: Exception) -> str:
    if isinstance(error, sqlite3.Error):
        return f"the grade book cannot be used: {error}"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disagg-grade {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def init(
    book: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the grade book; made if missing.")] = HERE,
    rubric: Annotated[Path | None, typer.Option(help="The assignment's rubric, YAML or JSON.")] = None,
    solution: Annotated[Path | None, typer.Option(help="Your solution, a notebook with its outputs.")] = None,
    template: Annotated[Path | None, typer.Option(help="What students started from.")] = None,
    data: Annotated[list[Path] | None, typer.Option(help="A file that notebooks read; repeatable.")] = None,
    name: Annotated[str, typer.Option(help="Name of the assignment. Default: as in the rubric.")] = "",
) -> None:
    """Make a grade book, and add an assignment to it.

    Without --rubric an example rubric.yaml is written into the folder, to start from. With --rubric the assignment is
    added, or changed if it is there: a changed rubric is a new version."""
    from grader.cli.assignments import init_book

    init_book(book, rubric, solution, template, data or [], name)


@app.command("check-rubric")
def check_rubric(
    rubric: Annotated[Path, typer.Argument(help="The rubric, YAML or JSON.")], as_json: AsJson = False
) -> None:
    """Check a rubric: every mistake with its line, or the items and their points."""
    from grader.cli.assignments import show_rubric

    show_rubric(rubric, as_json)


@app.command("import")
def import_command(
    source: Annotated[
        Path, typer.Argument(help="A rubric of another shape (JSON, YAML), or a notebook of nbgrader or otter.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the rubric goes.")] = Path("rubric.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Make a rubric of one that you have: points tables, levels, nbgrader or otter assignments."""
    from grader.cli.assignments import run_import

    run_import(source, output, force)


@app.command()
def grade(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Notebooks, folders or ZIPs. None: go on with the batch.")
    ] = None,
    book: Book = HERE,
    name: Name = "",
    models: Annotated[bool, typer.Option(help="--no-models: layers 1 and 2 alone, in seconds.")] = True,
    config: Config = "",
    endpoint: EndpointUrl = "",
    code_model: CodeModel = "",
    feedback_model: FeedbackModel = "",
    readings: Annotated[
        int,
        typer.Option(min=1, max=9, help="How often the code model reads each work; answers that differ go to review."),
    ] = 1,
    rerun: Annotated[bool, typer.Option("--rerun", help="Run the notebooks again in the sandbox.")] = False,
    roster: Annotated[
        Path | None, typer.Option(help="CSV of Canvas or Moodle, or: key, name, email, lms_id, late_days.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="These files count, also where a newer one of the student is there.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Notebooks at once for the models.")] = 4,
    patience_s: Annotated[
        float,
        typer.Option("--patience", min=0, help="Seconds to wait for models that are away; then run it again later."),
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Grade notebooks. What is graded already is not graded again; after a stop the same command continues."""
    from grader.cli.grade import grade_files

    settings = model_settings(config, endpoint, code_model, feedback_model, readings) if models else None
    grade_files(book, name, files or [], settings, rerun, roster, jobs, patience_s, as_json, replace)


@app.command()
def status(
    book: Book = HERE,
    name: Name = "",
    flagged: Annotated[bool, typer.Option("--flagged", help="Only submissions with flags or open items.")] = False,
    alike: Annotated[bool, typer.Option("--alike", help="Also pairs whose code is alike: evidence only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the batch, and a line for every submission: points, what is open, flags, state."""
    from grader.cli.show import show_status

    show_status(book, name, flagged, alike, as_json)


@app.command()
def review(
    student: Annotated[str, typer.Argument(metavar="PSEUDONYM", help="One submission. None: all, by --item.")] = "",
    book: Book = HERE,
    name: Name = "",
    item: Annotated[str, typer.Option(help="An item of the rubric. Without a pseudonym: all answers to it.")] = "",
    points: Annotated[str, typer.Option(help="Your points for --item; `machine` takes yours back.")] = "",
    why: Annotated[str, typer.Option(help="The reason; needed with --points and --reveal.")] = "",
    comment: Annotated[str | None, typer.Option(help="For the student, on --item or on the whole.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Put the comment into the comment bank.")] = False,
    approve: Annotated[bool, typer.Option("--approve", help="Approve the grade.")] = False,
    approve_all: Annotated[
        bool, typer.Option("--approve-all", help="Approve all without open items and flags.")
    ] = False,
    reopen: Annotated[bool, typer.Option("--reopen", help="Take the approval away.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take the last decision back.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Show every change.")] = False,
    prompts: Annotated[bool, typer.Option("--prompts", help="Show the raw prompts and answers.")] = False,
    reveal: Annotated[bool, typer.Option("--reveal", help="Show the student's name. It is logged.")] = False,
    who: Who = "",
) -> None:
    """Look at a submission: verdicts, evidence, feedback; decide, approve, undo."""
    from grader.cli.review import ReviewRequest, run_review

    run_review(
        ReviewRequest(
            book=book, name=name, student=student, item=item, points=points, why=why, comment=comment, keep=keep,
            approve=approve, approve_all=approve_all, reopen=reopen, undo=undo, history=history, prompts=prompts,
            reveal=reveal, who=who,
        )
    )  # fmt: skip


@app.command()
def export(
    book: Book = HERE,
    name: Name = "",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go.")] = Path(
        "export"
    ),
    names: Annotated[
        bool, typer.Option("--names", help="With names, and tables for Canvas and Moodle. It is logged.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also grades that are not approved.")] = False,
    reports: Annotated[bool, typer.Option(help="A report for each student too.")] = True,
    pdf: Annotated[bool, typer.Option("--pdf", help="Reports also as PDF (needs Chromium or Chrome).")] = False,
    zip_all: Annotated[bool, typer.Option("--zip", help="All of it in one ZIP beside the folder.")] = False,
    gradebook: Annotated[
        Path | None,
        typer.Option(help="A gradebook of Canvas or a grading worksheet of Moodle (CSV): a filled copy is written."),
    ] = None,
    column: Annotated[str, typer.Option(help="The assignment's name in Canvas. Default: as in the grade book.")] = "",
    who: Who = "",
) -> None:
    """Write approved grades: CSV with a column per item, tables for learning platforms, reports."""
    from grader.cli.export import run_export

    run_export(book, name, output, names, everything, reports, pdf, zip_all, who, gradebook, column)


@app.command()
def report(
    student: Annotated[str, typer.Argument(metavar="PSEUDONYM", help="One submission. None: the whole class.")] = "",
    book: Book = HERE,
    name: Name = "",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go.")] = Path(
        "reports"
    ),
    pdf: Annotated[bool, typer.Option("--pdf", help="Also as PDF (needs Chromium or Chrome).")] = False,
) -> None:
    """Write a student's report as HTML, or everyone's. Those that are not approved are marked as drafts."""
    from grader.cli.export import run_report

    run_report(book, name, student, output, pdf)


@app.command()
def agreement(
    book: Book = HERE,
    name: Name = "",
    by_hand: Annotated[
        Path | None,
        typer.Option(help="CSV of a human's points: pseudonym, a column per item. Default: points set by review."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the machine's points with yours, per item and per quality of the work. Grade 5 to 10 by hand first."""
    from grader.cli.agreement import show_agreement

    show_agreement(book, name, by_hand, as_json)


@app.command()
def regrade(
    book: Book = HERE,
    name: Name = "",
    rubric: Annotated[
        Path | None, typer.Option(help="The new rubric. Default: the newest version of the book.")
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show what changed for each student.")] = False,
    no_models: Annotated[bool, typer.Option("--no-models", help="Layers 1 and 2 alone.")] = False,
    config: Config = "",
    endpoint: EndpointUrl = "",
    code_model: CodeModel = "",
    feedback_model: FeedbackModel = "",
    as_json: AsJson = False,
) -> None:
    """Grade again with a changed rubric: only what it touches. Your own points stay.

    Models and settings are those of the last batch, unless you give others."""
    from grader.cli.regrade import run_regrade

    others = any((config, endpoint, code_model, feedback_model))
    given = model_settings(config, endpoint, code_model, feedback_model) if others else None
    run_regrade(book, name, rubric, diff, False if no_models else given, as_json)


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Where the demo's grade book goes.")] = Path("grade-demo"),
    models: Annotated[bool, typer.Option(help="--no-models: without the embedded model, in seconds.")] = True,
    language: Annotated[str, typer.Option(help="python or r.")] = "python",
    students: Annotated[int, typer.Option(min=1, max=200, help="How many submissions.")] = 12,
) -> None:
    """Make a synthetic class, start the embedded model on this machine, grade the class, write the reports.

    The embedded model is far too small to judge: the demo shows the machinery, and points of layers 1 and 2."""
    from grader.cli.demo import run_demo

    run_demo(folder, models, language, students)


@app.command()
def web(
    book: Book = HERE,
    config: Config = "",
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than this machine need more care.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8501,
    password_file: Annotated[
        Path | None,
        typer.Option(help="File with the password. Default: GRADER_WEB_PASSWORD, or a new one that is printed once."),
    ] = None,
    who: Who = "",
) -> None:
    """Open the grade book in a browser: rubrics, uploads, grading, review, statistics, export."""
    from grader.cli.options import me
    from grader.web import WebSettings, run_web

    path = str(Path(config).resolve()) if config else ""
    run_web(WebSettings(book=book.resolve(), who=me(who), config=path), host, port, password_file)


@app.command()
def bench(
    notebooks: Annotated[int, typer.Option(min=1, max=200, help="Notebooks per measurement.")] = 6,
    simulated: Annotated[
        str,
        typer.Option(
            metavar="PREFILL,DECODE",
            help="Two pairs of simulated machines, such as dgx-spark,m3-ultra, instead of the embedded model.",
        ),
    ] = "",
    at_once: Annotated[int, typer.Option(min=1, max=64, help="Notebooks at once in the last row.")] = 4,
    answer_tokens: Annotated[int, typer.Option(min=16, max=4000, help="Longest answers, in tokens.")] = 400,
    as_json: AsJson = False,
) -> None:
    """Measure notebooks per minute: both models at once against one after the other; prefix cache; bytes moved."""
    from grader.bench import BenchSettings
    from grader.cli.bench import run_bench

    settings = BenchSettings(notebooks=notebooks, simulated=simulated, at_once=at_once, answer_tokens=answer_tokens)
    run_bench(settings, as_json)
