"""The docs hold together: links and file names resolve, lines are wrapped, the glossary stays short."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "disaggregated_inference"
FOLDERS = ("", "docs", "examples", "scripts", "deploy")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
COLUMNS = 100
GLOSSARY_LINES = 30

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"(?:src|srcset)=\"([^\"]+)\"")
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
# A path has a slash and ends in a folder's slash or in one of these. Anything else in backticks is not taken for one.
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/(?:[\w.-]+\.(?:py|md|json|toml|svg|txt|ipynb))?")
_TEST = re.compile(r"(tests/[\w/]+\.py)::(?:\w+::)*(\w+)")
_OF_OTHERS = ("benches/", "hosted_vllm/", "text-completion-openai/", "ollama_chat/")  # names of other projects
_VAGUE = re.compile(r"(?<![a-z])(?:whoever|nobody)(?![a-z])", re.IGNORECASE)
_PROSE = re.compile(r'''""".*?"""|#[^\n]*|(?:def|class) \w+''', re.DOTALL)


def _lines(page: Path) -> Iterator[tuple[int, str]]:
    """Lines of prose with their numbers: no code blocks."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def _prose(page: Path) -> str:
    return "\n".join(line for _, line in _lines(page))


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = [line.lstrip("#").strip() for _, line in _lines(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_resolve(page: Path) -> None:
    prose = _prose(page)
    for link in [*_LINK.findall(prose), *_IMAGE.findall(prose)]:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{_name(page)} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), f"{_name(page)} links to {link}, which has {sorted(_anchors(target))}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_file_names_exist(page: Path) -> None:
    """Paths start at the root, at the package or beside the page."""
    if page.name == "CHANGELOG.md":  # names what is gone
        return
    for code in _CODE_SPAN.findall(_prose(page)):
        for word in code.split():
            if _PATH.fullmatch(word) and not word.startswith(_OF_OTHERS):
                places = (ROOT / word, PACKAGE / word, PACKAGE.parent / word, page.parent / word)
                places += tuple(PACKAGE.glob(f"*/{word}"))  # `openai/` beside `gateway/`
                assert any(place.exists() for place in places), f"{_name(page)} names {word}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_lines_are_wrapped(page: Path) -> None:
    """Except tables, code, headings, and a link that is too long for a line of its own."""
    for number, line in _lines(page):
        exempt = line.lstrip().startswith(("|", "#", "<")) or not _LINK.sub("", line).strip(" -.,;")
        assert exempt or len(line) <= COLUMNS, f"{_name(page)}:{number} has {len(line)} columns"


def test_the_glossary_is_short() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    glossary = text.split("\n## Glossary\n")[1].split("\n## ")[0].strip().splitlines()
    assert 0 < len(glossary) <= GLOSSARY_LINES


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_named_tests_exist(page: Path) -> None:
    for file, name in _TEST.findall(page.read_text()):
        path = ROOT / file
        assert path.is_file(), f"{_name(page)} names {file}"
        found = re.search(rf"^ *(?:async def|def|class) {name}\b|^{name} = ", path.read_text(), re.MULTILINE)
        assert found, f"{_name(page)} names {file}::{name}"


def test_every_known_failure_has_a_row_and_a_test() -> None:
    rows = [line for line in (ROOT / "docs" / "RELIABILITY.md").read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 25))
    assert all(_TEST.search(row) for row in rows)


def test_every_package_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    for folder in PACKAGE.iterdir():
        if (folder / "__init__.py").exists():
            assert f"`{folder.name}/`" in text, folder.name


def test_every_dependency_has_a_reason() -> None:
    page = (ROOT / "docs" / "DEPENDENCIES.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {re.split(r"[\[<>=; ]", name)[0] for name in sum(extras.values(), project["dependencies"])}
    assert not {name for name in wanted | set(extras) if f"`{name}`" not in page}


def test_sentences_have_components_as_subjects() -> None:
    for path in [*PAGES, *PACKAGE.rglob("*.py"), *(PACKAGE.parent / "grader").rglob("*.py")]:
        assert not _VAGUE.findall(path.read_text()), _name(path)


def test_nor_have_the_sentences_of_tests_vague_ones() -> None:
    """Docstrings, comments and names; a test may send such a word as data."""
    files = [path for folder in ("tests", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")]
    for path in (path for path in files if "node_modules" not in path.parts):
        for sentence in _PROSE.findall(path.read_text()):
            assert not _VAGUE.search(sentence), f"{_name(path)}: {sentence}"
