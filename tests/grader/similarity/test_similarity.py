"""Similarity: evidence only, minus the template; identical files are both flagged."""

from grader.similarity import compare, fingerprints, similarity_flags
from tests.support.notebooks import code, notebook, text

GIVEN = """
import csv
def read(path):
    with open(path) as file:
        return [dict(row) for row in csv.DictReader(file)]
rows = read("sales.csv")
"""
OWN = """
def revenue(rows, region):
    total = 0.0
    for row in rows:
        if row["region"] == region and float(row["units"]) > 0:
            total += float(row["price"]) * float(row["units"])
    return round(total, 2)
regions = sorted({row["region"] for row in rows})
print({region: revenue(rows, region) for region in regions})
"""
RENAMED = OWN.replace("revenue", "umsatz").replace("total", "summe").replace("row", "zeile") + "# my own words\n"
OTHER = """
from collections import defaultdict
sums = defaultdict(float)
while rows:
    entry = rows.pop()
    sums[entry["region"]] += eval(entry["price"]) * int(entry["units"] or 0)
for name in sorted(sums):
    print(name, "%.2f" % sums[name])
"""


def test_renamed_copy_is_found_and_the_template_is_not() -> None:
    template = notebook(code(GIVEN))
    class_ = {
        "a": notebook(text("# A"), code(GIVEN), code(OWN)),
        "b": notebook(code(GIVEN), text("mine"), code(RENAMED)),
        "c": notebook(code(GIVEN), code(OTHER)),
    }
    pairs = compare(class_, template)
    assert [(pair.first, pair.second, pair.identical) for pair in pairs] == [("a", "b", False)]
    assert pairs[0].share > 0.9
    assert pairs[0].first_places[-1].cell == 2
    assert pairs[0].second_places[0].quote
    assert [flag.code for flag in similarity_flags("a", pairs)] == ["similar"]
    assert [flag.code for flag in similarity_flags("b", pairs)] == ["similar"]
    assert similarity_flags("c", pairs) == ()


def test_identical_files_are_both_flagged_even_when_empty() -> None:
    same = notebook(code("x = 1"))
    pairs = compare({"a": same, "b": same, "c": notebook(code("y = 2"))})
    assert [(pair.first, pair.second, pair.identical, pair.share) for pair in pairs] == [("a", "b", True, 1.0)]
    assert all(similarity_flags(name, pairs)[0].code == "identical" for name in "ab")


def test_what_most_of_a_class_writes_is_no_evidence() -> None:
    class_ = {f"s{i}": notebook(code(OWN), code(f"answer_{i} = {i}")) for i in range(8)}
    assert compare(class_) == ()


def test_comments_and_spaces_change_no_fingerprint() -> None:
    spaced = OWN.replace(" + ", "+").replace("\n    ", "\n  # c\n    ")
    assert set(fingerprints(notebook(code(OWN)))) == set(fingerprints(notebook(code(spaced))))
    assert fingerprints(notebook(code(""))) == {}


def test_r_code_has_fingerprints() -> None:
    source = "total <- 0\nfor (i in seq_along(x)) { total <- total + x[i] * w[i] }\nprint(total / sum(w))"
    renamed = source.replace("total", "summe") + " # mine"
    first, second = (set(fingerprints(notebook(code(each), language="r"))) for each in (source, renamed))
    assert first == second != set()
