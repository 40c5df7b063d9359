"""Files of students: whose they are, and what is refused."""

import io
import stat
import zipfile
from pathlib import Path

import pytest

from grader.intake import (
    FileRefused,
    IntakeLimits,
    RosterInvalid,
    TakenIn,
    owner_of,
    read_archive,
    read_files,
    read_roster,
    read_uploads,
    take_in,
)
from grader.store import Database, blob, save_assignment, set_comment, submissions


@pytest.mark.parametrize(
    ("path", "key", "name", "lms_id", "late_days"),
    [
        ("doejane_12345_67890_hw1.ipynb", "12345", "doejane", "12345", 0),
        ("doejane_LATE_12345_67890_hw1-2.ipynb", "12345", "doejane", "12345", 1),
        ("Jane Doe_4711_assignsubmission_file_/hw1.ipynb", "4711", "Jane Doe", "4711", 0),
        ("Jane Doe_4711_assignsubmission_file_hw1.ipynb", "4711", "Jane Doe", "4711", 0),
        ("Homework 1_jdoe_attempt_2026-03-01-12-30-05_hw_1.ipynb", "jdoe", "", "", 0),
        ("submitted/bitdiddle/ps1/problem1.ipynb", "bitdiddle", "", "", 0),
        ("anything.ipynb", "anything", "", "", 0),
        ("alice/hw1.ipynb", "alice/hw1", "", "", 0),
    ],
)
def test_names_of_learning_platforms(path: str, key: str, name: str, lms_id: str, late_days: float) -> None:
    owner = owner_of(path, {})
    assert (owner.identity.key, owner.identity.name, owner.identity.lms_id) == (key, name, lms_id)
    assert owner.late_days == late_days


def test_a_roster_knows_better() -> None:
    roster = read_roster("\ufeffkey,name,email,lms_id,late_days\nDoeJane,Jane Doe,jane@example.edu,12345,2.5\n")
    for path in ("doejane_99_1_hw1.ipynb", "Other_12345_assignsubmission_file_/x.ipynb"):
        owner = owner_of(path, roster)
        assert (owner.identity.name, owner.late_days) == ("Jane Doe", 2.5)
    assert owner_of("x.ipynb", read_roster("key,name\n,Nobody\n")).identity.key == "x"
    late = read_roster("key,name\ndoejane,Jane Doe\n")
    assert owner_of("doejane_LATE_99_1_hw1.ipynb", late).late_days == 1, "a roster without late_days takes nothing away"
    with pytest.raises(RosterInvalid, match="column `key`"):
        read_roster("name\nJane\n")
    with pytest.raises(RosterInvalid, match="line 2"):
        read_roster("key,late_days\njane,soon\n")


def _zip(files: dict[str, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer


def test_a_zip_is_read_without_unpacking(tmp_path: Path) -> None:
    files = {
        "../../evil.ipynb": b"1",
        "/etc/evil2.ipynb": b"2",
        "__MACOSX/x.ipynb": b"",
        ".ipynb_checkpoints/y.ipynb": b"",
        "notes.txt": b"",
        "a/b.ipynb": b"3",
    }
    found = list(read_archive(_zip(files), "all.zip", {}))
    assert [one.file_name for one in found if one.stray] == ["notes.txt"]
    assert [(one.file_name, one.content) for one in found if not one.stray] == [
        ("evil.ipynb", b"1"),
        ("evil2.ipynb", b"2"),
        ("b.ipynb", b"3"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_bombs_links_and_rubbish_are_refused() -> None:
    limits = IntakeLimits(file_bytes=1000, archive_bytes=1500, archive_files=3)
    for sizes in ((900, 900), (5000, 5000)):
        files = {f"{number}.ipynb": bytes(size) for number, size in enumerate(sizes)}
        with pytest.raises(FileRefused, match="unpacks to more than"):
            list(read_archive(_zip(files), "bomb.zip", {}, limits))
    with pytest.raises(FileRefused, match="4 files; the limit is 3"):
        list(read_archive(_zip({f"{n}.ipynb": b"" for n in range(4)}), "many.zip", {}, limits))
    with pytest.raises(FileRefused, match="cannot be unpacked"):
        list(read_archive(io.BytesIO(b"PK\x03\x04 nothing"), "broken.zip", {}))
    link = zipfile.ZipInfo("link.ipynb")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert list(read_archive(buffer, "links.zip", {})) == []


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_file_is_one_unreadable_submission(kind: int) -> None:
    bad, good = read_archive(_damaged(kind), "damaged.zip", {})
    assert (bad.file_name, bad.problem) == ("a.ipynb", "it is damaged or encrypted")
    assert (good.content, good.problem) == (b"good", "")


def test_a_file_that_is_too_big_is_one_unreadable_submission(tmp_path: Path) -> None:
    """In a ZIP, in a folder and in a browser. No more than the limit is unpacked, and no name is told."""
    limits = IntakeLimits(file_bytes=1 << 20)
    files = {"doe_1_10_hw.ipynb": bytes(2 << 20), "roe_2_11_hw.ipynb": b"good", "poe_3_12_hw.ipynb": bytes(2 << 20)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    uploads = [(name, io.BytesIO(content)) for name, content in files.items()]
    ways = (
        list(read_archive(_zip(files), "all.zip", {}, limits)),
        list(read_files([tmp_path], {}, limits)),
        list(read_uploads(uploads, {}, limits)),
    )
    for way, found in enumerate(ways):
        assert [one.content for one in found if not one.problem] == [b"good"]
        assert len({one.content for one in found}) == 3, "equal notes would look copied"
        book = Database.create(tmp_path / f"book{way}")
        told = take_in(book, save_assignment(book, "hw1", "{}"), found).told()
        assert told.startswith("3 files, 3 of them new")
        assert told.count("(it has more than 1 MiB)") == 2
        assert "doe" not in told


def test_a_student_without_a_notebook_is_not_lost(tmp_path: Path) -> None:
    book = Database.create(tmp_path)
    files = {"doe_1_10_hw.ipynb": b"1", "doe_1_11_data.csv": b"", "roebob_2_12_hw.pdf": b"%PDF", "read me.txt": b""}
    taken, counting = _counting(book, files)
    assert (taken.files, taken.new, taken.beside, taken.unknown) == (2, 2, 1, ("read me.txt",))
    assert any(b"it is no notebook" in one for one in counting)
    assert "not readable, so a flag and no points: student-" in taken.told()
    assert "roebob" not in taken.told()
    again, counting = _counting(book, files)
    assert (again.new, len(counting)) == (0, 2)
    assert _counting(book, {"roebob_2_14_hw.ipynb": b"late"})[0].new == 1
    assert sorted(_counting(book, {"roebob_2_15_hw.pdf": b"%PDF"})[1]) == [b"1", b"late"], "a notebook stays"


def _damaged(kind: int) -> io.BytesIO:
    """Every byte of the packed content of the first file is another."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        archive.writestr("a.ipynb", bytes(range(256)) * 400)
        archive.writestr("b.ipynb", b"good")
        size = archive.infolist()[0].compress_size
    content = bytearray(buffer.getvalue())
    start = 30 + len("a.ipynb")
    content[start : start + size] = bytes(byte ^ 0xFF for byte in content[start : start + size])
    return io.BytesIO(bytes(content))


def test_folders_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.ipynb").write_bytes(b"b")
    (folder / "sub" / "a.ipynb").write_bytes(b"a")
    (folder / "link.ipynb").symlink_to("/etc/passwd")
    (tmp_path / "not-a-notebook.pdf").write_bytes(b"pdf")
    found = list(read_files([folder, tmp_path / "not-a-notebook.pdf"], {}))
    assert [one.file_name for one in found] == ["b.ipynb", "a.ipynb", "not-a-notebook.pdf"]
    with pytest.raises(FileRefused, match="does not exist"):
        list(read_files([tmp_path / "missing"], {}))


def test_the_newest_file_of_a_student_counts_and_equal_names_do_not_clash(tmp_path: Path) -> None:
    book = Database.create(tmp_path / "book")
    assignment = save_assignment(book, "hw1", "{}")
    files = {"doe_1_20_hw1-1.ipynb": b"new", "doe_1_10_hw1.ipynb": b"old", "a/hw1.ipynb": b"a", "b/hw1.ipynb": b"b"}
    taken = take_in(book, assignment, read_archive(_zip(files), "all.zip", {}))
    assert (taken.files, taken.new, taken.replaced) == (4, 3, 0)
    assert {blob(book, one.blob_sha) for one in submissions(book, assignment.id)} == {b"new", b"a", b"b"}
    again = take_in(book, assignment, read_archive(_zip({"doe_1_30_hw1-2.ipynb": b"newer"}), "more.zip", {}))
    assert (again.new, again.replaced, again.decided) == (1, 1, 0)
    newer = next(one for one in submissions(book, assignment.id) if blob(book, one.blob_sha) == b"newer")
    set_comment(book, newer.id, "", "Good.", "ann")
    last = take_in(book, assignment, read_archive(_zip({"doe_1_40_hw1-3.ipynb": b"newest"}), "more.zip", {}))
    assert last.decided == 1
    assert "decisions of yours" in last.told()
    for folder, content in (("x", b"1"), ("y", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hw1.ipynb").write_bytes(content)
    with pytest.raises(FileRefused, match="a name of its own"):
        take_in(book, assignment, read_files([tmp_path / "x" / "hw1.ipynb", tmp_path / "y" / "hw1.ipynb"], {}))


def _counting(book: Database, files: dict[str, bytes], replace: bool = False) -> tuple[TakenIn, list[bytes]]:
    assignment = save_assignment(book, "hw1", "{}")
    taken = take_in(book, assignment, read_archive(_zip(files), "all.zip", {}), replace)
    return taken, [blob(book, one.blob_sha) for one in submissions(book, assignment.id)]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("doe_1_10_hw1.ipynb", "doe_1_20_hw1-1.ipynb"),
        ("doe_LATE_1_9_hw1.ipynb", "doe_1_10_hw1-1.ipynb"),
        ("hw_jdoe_attempt_2026-03-01-12-30-05_hw.ipynb", "hw_jdoe_attempt_2026-03-02-09-00-00_hw.ipynb"),
    ],
)
@pytest.mark.parametrize("seen_before", [True, False])
def test_an_older_file_never_takes_the_place_of_a_newer_one(
    tmp_path: Path, older: str, newer: str, seen_before: bool
) -> None:
    book = Database.create(tmp_path)
    if seen_before:
        assert _counting(book, {older: b"old"})[1] == [b"old"]
    assert _counting(book, {newer: b"new"})[1] == [b"new"]
    taken, counting = _counting(book, {older: b"old"})
    assert (counting, taken.older, taken.unsure) == ([b"new"], 1, ())
    assert "since a newer one is here: 1" in taken.told()
    assert len(book.rows("SELECT * FROM submissions")) == 2
    assert _counting(book, {older: b"old"}, replace=True)[1] == [b"old"]


def test_the_old_file_handed_in_again_is_the_newest(tmp_path: Path) -> None:
    book = Database.create(tmp_path)
    for name, content in (("doe_1_10_a.ipynb", b"old"), ("doe_1_20_a.ipynb", b"new"), ("doe_1_30_a.ipynb", b"old")):
        assert _counting(book, {name: content})[1] == [content]
    assert _counting(book, {"doe_1_20_a.ipynb": b"new"})[1] == [b"old"]


def test_names_that_do_not_tell_the_newest_are_told(tmp_path: Path) -> None:
    """Moodle: a file that was here before stays where it is; a new one counts, and the command says so."""
    book, name = Database.create(tmp_path), "Jane Doe_4711_assignsubmission_file_/hw1.ipynb"
    assert _counting(book, {name: b"first"})[0].unsure == ()
    taken, counting = _counting(book, {name: b"second"})
    assert counting == [b"second"]
    assert len(taken.unsure) == 1
    assert "do not tell which of several files is the newest" in taken.told()
    taken, counting = _counting(book, {name: b"first"})
    assert (counting, taken.older) == ([b"second"], 1)
    two = {"Al Roe_5_assignsubmission_file_/a.ipynb": b"a", "Al Roe_5_assignsubmission_file_/b.ipynb": b"b"}
    assert len(_counting(book, two)[0].unsure) == 1, "two files in one folder"
    again, counting = _counting(book, two)
    assert (sorted(counting), again.unsure) == ([b"b", b"second"], ())
