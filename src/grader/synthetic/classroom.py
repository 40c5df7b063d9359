"""A synthetic class: an assignment with its data, template, solution and rubric, and submissions with known points."""

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec

from grader.synthetic.cells import code, notebook_bytes, text
from grader.synthetic.rubric_text import RUBRIC
from grader.synthetic.sales import SalesData, make_sales
from grader.synthetic.variants import VARIANTS, Author

# Fictional people, for tests that no name leaves the store.
_FIRST = ("Ada", "Bruno", "Chidi", "Dalia", "Emre", "Freya", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena")
_LAST = (
    "Quill",
    "Ramble",
    "Sorrel",
    "Thistle",
    "Umber",
    "Vetch",
    "Willow",
    "Yarrow",
    "Zinnia",
    "Aster",
    "Bramble",
    "Clover",
)
_WORDS = ("the region in the north", "the shop near the sea", "the western team", "our smallest town")
_EMPTY = {"load": "", "total": "", "regions": "", "average": ""}


class SyntheticSubmission(msgspec.Struct, frozen=True):
    """`points` by item, without the item that a model or a human judges."""

    student: str
    file_name: str
    variant: str
    data: bytes
    points: dict[str, Decimal]
    flags: frozenset[str]


class SyntheticClass(msgspec.Struct, frozen=True):
    language: str
    rubric: str
    template: bytes
    solution: bytes
    inputs: dict[str, bytes]
    submissions: tuple[SyntheticSubmission, ...]

    def write(self, folder: Path) -> None:
        """rubric.yaml, template.ipynb, solution.ipynb, inputs/ and submissions/."""
        for name in ("inputs", "submissions"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "rubric.yaml").write_text(self.rubric)
        (folder / "template.ipynb").write_bytes(self.template)
        (folder / "solution.ipynb").write_bytes(self.solution)
        for name, data in self.inputs.items():
            (folder / "inputs" / name).write_bytes(data)
        for submission in self.submissions:
            (folder / "submissions" / submission.file_name).write_bytes(submission.data)


def make_class(language: Literal["python", "r"] = "python", seed: int = 0, students: int = 12) -> SyntheticClass:
    """The same seed gives the same bytes. More than 12 students: the variants again, in other words."""
    sales = make_sales(seed)
    author = Author(language, sales)
    return SyntheticClass(
        language=language,
        rubric=RUBRIC.format(language=language),
        template=_template(author),
        solution=author.write(author.answers()),
        inputs={"sales.csv": sales.csv.encode()},
        submissions=tuple(_submissions(language, sales, students)),
    )


def _submissions(language: str, sales: SalesData, students: int) -> Iterator[SyntheticSubmission]:
    for number in range(students):
        round_, place = divmod(number, len(VARIANTS))
        words = _WORDS[round_ % len(_WORDS)] + (f" of row {round_}" if round_ else "")
        variant = VARIANTS[place](Author(language, sales, words))
        first, last = _FIRST[number % 12], _LAST[(number // 12 + number) % 12]
        name = f"{last}{first}_{10_000 + number}_{variant.name}.ipynb".lower()
        yield SyntheticSubmission(f"{first} {last}", name, variant.name, variant.data, variant.points, variant.flags)


def _template(author: Author) -> bytes:
    """What students got: headings, empty cells with their tags, and the questions."""
    cells = []
    for name, cell in author.answers().items():
        if name in _EMPTY:
            cells.append(code("", tags=tuple(cell["metadata"]["tags"]), count=None))
        elif name == "reflection":
            cells.append(text("### Question 1\n\n### Question 2\n"))
        else:
            cells.append(cell)
    return notebook_bytes(*cells, language=author.language)
