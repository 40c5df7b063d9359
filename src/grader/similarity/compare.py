"""Which submissions resemble each other, without what the template gave. Evidence for a human; never points."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations

import msgspec

from grader.notebook import Notebook
from grader.similarity.winnowing import Place, fingerprints
from grader.verdicts import Evidence, Flag

SUSPICIOUS = 0.6
_FEWEST = 8  # fingerprints: very short work is alike by nature
_PLACES = 10
_COMMON = 0.5  # code in more than half of a class is the course's, not a neighbour's
_CLASS = 6  # the smallest class for that rule


class Resemblance(msgspec.Struct, frozen=True, kw_only=True):
    """`share`: the part of the smaller submission's own code that both have. `identical`: the files are equal."""

    first: str
    second: str
    share: float
    identical: bool
    matches: int
    first_places: tuple[Evidence, ...] = ()
    second_places: tuple[Evidence, ...] = ()


def compare(
    notebooks: Mapping[str, Notebook], template: Notebook | None = None, at_least: float = SUSPICIOUS
) -> tuple[Resemblance, ...]:
    """Pairs, the most alike first. Identical files are always among them."""
    own = _own_code(notebooks, template)
    pairs = [_pair(a, b, notebooks, own) for a, b in combinations(sorted(notebooks), 2)]
    found = [pair for pair in pairs if pair.identical or pair.share >= at_least]
    return tuple(sorted(found, key=lambda pair: (-pair.share, pair.first, pair.second)))


def _own_code(notebooks: Mapping[str, Notebook], template: Notebook | None) -> dict[str, dict[int, Place]]:
    given = set(fingerprints(template)) if template else set[int]()
    prints = {name: fingerprints(notebook) for name, notebook in notebooks.items()}
    counts = defaultdict[int, int](int)
    for each in prints.values():
        for value in each:
            counts[value] += 1
    most = _COMMON * len(prints) if len(prints) >= _CLASS else len(prints)
    return {
        name: {value: place for value, place in each.items() if value not in given and counts[value] <= most}
        for name, each in prints.items()
    }


def _pair(a: str, b: str, notebooks: Mapping[str, Notebook], own: Mapping[str, dict[int, Place]]) -> Resemblance:
    both = own[a].keys() & own[b].keys()
    smaller = min(len(own[a]), len(own[b]))
    identical = notebooks[a].sha256 == notebooks[b].sha256
    return Resemblance(
        first=a,
        second=b,
        share=1.0 if identical else len(both) / smaller if smaller >= _FEWEST else 0.0,
        identical=identical,
        matches=len(both),
        first_places=_places(notebooks[a], {own[a][value] for value in both}),
        second_places=_places(notebooks[b], {own[b][value] for value in both}),
    )


def _places(notebook: Notebook, places: set[Place]) -> tuple[Evidence, ...]:
    cells = {cell.index: cell.source.splitlines() for cell in notebook.code_cells}
    chosen = sorted(places)[:_PLACES]
    return tuple(
        Evidence(cell=cell, line=line, quote=cells[cell][line - 1].strip() if line <= len(cells[cell]) else "")
        for cell, line in chosen
    )


def similarity_flags(name: str, pairs: tuple[Resemblance, ...]) -> tuple[Flag, ...]:
    """Flags of one submission. They name no other student: the report does."""
    flags = []
    for pair in pairs:
        if name in (pair.first, pair.second):
            evidence = pair.first_places if name == pair.first else pair.second_places
            code = "identical" if pair.identical else "similar"
            what = (
                "The file equals another submission's."
                if pair.identical
                else f"{pair.share:.0%} of the code is in another submission."
            )
            flags.append(Flag(code=code, message=what, evidence=evidence))
    return tuple(flags)
