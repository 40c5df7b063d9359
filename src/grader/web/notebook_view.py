"""A student's notebook as HTML in which every character of the student is escaped, and lines of evidence are marked."""

from collections.abc import Iterable
from html import escape

from grader.notebook import Cell, Notebook
from grader.verdicts import Evidence

_LONGEST_OUTPUT_CHARS = 4000
_STYLE = """<style>
.nb{font:13px/1.45 ui-monospace,Menlo,Consolas,monospace}
.nb .head{color:#777;font-size:11px;margin:10px 0 2px}
.nb pre{margin:0;padding:6px 8px;white-space:pre-wrap;overflow-wrap:anywhere;background:#f5f6f8;color:#222;
border:1px solid #e3e5e8;border-radius:4px}
.nb pre.text{background:#fff;font-family:inherit}.nb pre.output{background:#fff;border-left:3px solid #bbb;color:#444}
.nb pre.error{border-left-color:#c33}.nb mark{background:#ffe58a;color:inherit}
.nb .cited pre.source{border-color:#e0b400}
</style>"""


def notebook_html(notebook: Notebook, evidence: Iterable[Evidence]) -> str:
    places = list(evidence)
    cells = "".join(_cell(cell, [one for one in places if one.cell == cell.index]) for cell in notebook.cells)
    return f'{_STYLE}<div class="nb">{cells or "This file has no cells."}</div>'


def _cell(cell: Cell, places: list[Evidence]) -> str:
    source = _marked(cell.source, [one for one in places if one.part == "source"])
    outputs = "".join(_output(cell, number, places) for number in range(len(cell.outputs)))
    cited = ' class="cited"' if places else ""
    hidden = ", hidden" if cell.hidden else ""
    kind = "source" if cell.kind == "code" else "source text"
    head = f'<div class="head">cell {cell.index + 1}, {cell.kind}{hidden}</div>'
    return f'<div{cited}>{head}<pre class="{kind}">{source}</pre>{outputs}</div>'


def _output(cell: Cell, number: int, places: list[Evidence]) -> str:
    output = cell.outputs[number]
    text = output.text or (f"{output.error_name}: {output.error_value}" if output.kind == "error" else "")
    pictures = "".join(f"[{kind}]\n" for kind in output.images)
    shown = (text[:_LONGEST_OUTPUT_CHARS] + "\n[cut]" if len(text) > _LONGEST_OUTPUT_CHARS else text) or pictures
    marked = _marked(shown, [one for one in places if one.part == "output"])
    return f'<pre class="output{" error" if output.kind == "error" else ""}">{marked}</pre>'


def _marked(text: str, places: list[Evidence]) -> str:
    """Lines that a verdict rests on, by number or by quote."""
    numbers = {one.line for one in places if one.line}
    quotes = [line.strip() for one in places if not one.line for line in one.quote.splitlines() if line.strip()]
    return "\n".join(
        f"<mark>{escape(line)}</mark>" if number in numbers or any(quote in line for quote in quotes) else escape(line)
        for number, line in enumerate(text.splitlines(), 1)
    )
