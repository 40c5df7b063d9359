"""`init`, `check-rubric` and `import`."""

import json
from pathlib import Path

from grader.cli.show import console, table
from grader.errors import GraderError
from grader.notebook import read_notebook
from grader.points import plain
from grader.rubric import EXAMPLE, Rubric, dump_rubric, import_file, layer_of, load_rubric
from grader.store import Database, save_assignment
from grader.texts import read_text


def init_book(
    folder: Path, rubric: Path | None, solution: Path | None, template: Path | None, data: list[Path], name: str
) -> None:
    given = load_rubric(read_text(rubric), str(rubric)) if rubric else None
    files = {path: path.read_bytes() for path in (solution, template, *data) if path}
    for path in (solution, template):
        if path:
            _require_notebook(path, files[path])
    database = Database.create(folder)
    out = console()
    if given is None:
        _write_example(folder)
        return
    made = save_assignment(
        database,
        name or given.assignment,
        dump_rubric(given),
        solution=files.get(solution) if solution else None,
        template=files.get(template) if template else None,
        inputs={path.name: files[path] for path in data} if data else None,
    )
    out.print(f"{made.name}: rubric version {made.rubric.number}, {plain(given.maximum)} points")
    out.print(f"next: disagg-grade grade --book {folder} SUBMISSIONS.zip")


def _write_example(folder: Path) -> None:
    out, path = console(), folder / "rubric.yaml"
    if not path.exists():
        path.write_text(EXAMPLE, encoding="utf-8")
        out.print(f"{path}: an example; change it to your assignment")
    out.print(f"next: disagg-grade init {folder} --rubric {path} --solution SOLUTION.ipynb")


def _require_notebook(path: Path, content: bytes) -> None:
    found = read_notebook(content, path.name)
    if not found.readable:
        reason = found.flags[0].message if found.flags else "it is no notebook"
        raise GraderError(f"{path}: {reason}")


def show_rubric(path: Path, as_json: bool) -> None:
    rubric = load_rubric(read_text(path), str(path))
    if as_json:
        items = [{"id": item.id, "points": plain(item.points), "layer": layer_of(item.check)} for item in rubric.items]
        print(json.dumps({"assignment": rubric.assignment, "maximum": plain(rubric.maximum), "items": items}))
        return
    out = console()
    out.print(_rubric_table(rubric))
    out.print(f"{rubric.assignment}: {len(rubric.items)} items, {plain(rubric.maximum)} points. No mistakes found.")
    shared = sum((item.points * item.ai_share for item in rubric.items), rubric.maximum * 0)
    out.print(f"models may decide {plain(shared)} points; a human decides what they cannot.")


_DECIDED_BY = {"structure": "program (structure)", "outputs": "program (outputs)", "code": "code model", "human": "you"}


def _rubric_table(rubric: Rubric) -> object:
    made = table("item", "points", "decided by", "title")
    for item in rubric.items:
        decided = _DECIDED_BY[layer_of(item.check)]
        if layer_of(item.check) == "code" and not item.ai_share:
            decided = "you, advised by the code model"
        made.add_row(item.id, plain(-item.points if item.deduction else item.points), decided, item.title)
    return made


def run_import(source: Path, output: Path, force: bool) -> None:
    if output.exists() and not force:
        raise GraderError(f"{output} exists: choose another --output, or --force")
    imported = import_file(source.name, source.read_bytes())
    output.write_text(dump_rubric(imported.rubric), encoding="utf-8")
    out = console()
    for note in imported.notes:
        out.print(f"note: {note}")
    out.print(f"{output}: {len(imported.rubric.items)} items, {plain(imported.rubric.maximum)} points")
    out.print(f"next: disagg-grade check-rubric {output}")
