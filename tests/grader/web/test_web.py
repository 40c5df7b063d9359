"""The pages of `disagg-grade web`, run by Streamlit's own test runner, and the password before them."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.websockets import WebSocketDisconnect

from grader import web
from grader.grading import Grade, approve_grade, grades, override
from grader.store import Assignment, Database, StudentIdentity, add_submission, history, submissions
from grader.timeouts import PagesTimeouts
from grader.web import PASSWORD_VARIABLE, WebSettings, WebUnavailable, choose_password, configure
from tests.support.grade_books import grade_here, graded_book, make_book, work

testing = pytest.importorskip("streamlit.testing.v1", reason="Streamlit is not installed")

from grader.web.statistics_page import bands, item_shares  # noqa: E402


@pytest.fixture(autouse=True)
def main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit's test runner makes its script the main module, which processes of later tests would start."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DISAGG_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


PAGES = ["assignments", "submissions", "results", "review", "statistics", "cluster", "export"]


def opened(book: Path, page: str) -> Any:
    configure(WebSettings(book=book, who="teacher"))
    script = f"from grader.web.{page}_page import {page}_page\n{page}_page()\n"
    return testing.AppTest.from_string(script, default_timeout=60).run()


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_a_graded_class(tmp_path: Path, page: str) -> None:
    graded_book(tmp_path)
    assert not opened(tmp_path, page).exception


@pytest.mark.parametrize("page", PAGES)
def test_page_of_an_empty_book(tmp_path: Path, page: str) -> None:
    Database.create(tmp_path)
    assert not opened(tmp_path, page).exception


def test_a_mistake_in_the_rubric_has_its_line(tmp_path: Path) -> None:
    Database.create(tmp_path)
    page = opened(tmp_path, "assignments")
    page.text_area[0].set_value("assignment: a\nitems:\n  - id: x\n    points: many\n").run()
    assert "mistake" in page.error[0].value
    assert any("line 4" in one.value for one in page.code)


def test_points_need_a_reason_and_stay_in_the_history(tmp_path: Path) -> None:
    database, assignment = graded_book(tmp_path)
    first = submissions(database, assignment.id)[0]
    page = opened(tmp_path, "review")
    page.text_input(key=f"p-{first.id}-data").set_value("1")
    button = next(one for one in page.button if one.label == "Set points")
    button.click().run()
    assert any("reason" in one.value for one in page.code)
    page.text_input(key=f"w-{first.id}-data").set_value("by hand")
    next(one for one in page.button if one.label == "Set points").click().run()
    assert [(one.item, one.after, one.why) for one in history(database, first.id)] == [("data", "1", "by hand")]


def _rows(page: Any, place: int = 0) -> list[dict[str, Any]]:
    return list(page.dataframe[place].value.to_dict("records"))


def _grade(database: Database, assignment: Assignment, submission: int) -> Grade:
    return next(one for one in grades(database, assignment) if one.submission.id == submission)


def _press(page: Any, label: str) -> Any:
    next(one for one in page.button if one.label == label).click()
    return page.run()


def test_results_are_filtered_by_state_flag_and_name(tmp_path: Path) -> None:
    """Twelve works: every third is wrong, the tenth is no notebook, and two files are the same."""
    database, assignment = graded_book(tmp_path, 11)
    add_submission(database, assignment.id, StudentIdentity(key="copy"), "c.ipynb", work(words="Work 1."))
    grade_here(database, assignment)
    names = {one.id: one.pseudonym for one in submissions(database, assignment.id)}
    for item in ("names", "style"):
        override(database, _grade(database, assignment, 2), item, "2", "teacher", "by hand")
    approve_grade(database, _grade(database, assignment, 2), "teacher")

    page = opened(tmp_path, "results")
    told = {one["student"]: (one["points"], one["percent"], one["open"], one["state"]) for one in _rows(page)}
    assert len(told) == 12
    assert told[names[1]] == (2.0, 20.0, 4.0, "needs review")
    assert told[names[2]] == (10.0, 100.0, 0.0, "approved")
    assert told[names[10]] == (0.0, 0.0, 0.0, "graded")
    assert [(one.label, one.value) for one in page.metric] == [
        ("Graded", "12"), ("Approved", "1"), ("With open items", "10"), ("With flags", "3"),
    ]  # fmt: skip
    page.multiselect[0].set_value(["approved"]).run()
    assert [one["student"] for one in _rows(page)] == [names[2]]
    page.multiselect[0].set_value([]).run()
    page.multiselect[1].set_value(["identical"]).run()
    assert {one["student"] for one in _rows(page)} == {names[2], names[12]}
    assert {one["flags"] for one in _rows(page)} == {"identical"}
    page.text_input[0].set_value(names[12].upper()).run()
    assert [one["student"] for one in _rows(page)] == [names[12]]
    page.text_input[0].set_value("nobody").run()
    assert _rows(page) == []


def test_all_that_is_clear_is_approved_at_once(tmp_path: Path) -> None:
    database, assignment = graded_book(tmp_path, 3)
    for item in ("names", "style"):
        override(database, _grade(database, assignment, 2), item, "2", "teacher", "by hand")
    page = _press(opened(tmp_path, "results"), "Approve all without open items and flags")
    assert [one.value for one in page.success] == ["1 approved; 2 have open items or flags: look at each of them."]
    assert {one.submission.id: one.approved for one in grades(database, assignment)} == {1: False, 2: True, 3: False}


def test_statistics_of_a_class(tmp_path: Path) -> None:
    database, assignment = graded_book(tmp_path, 10)  # 2 points: 3 works; 6 points: 6; none: 1
    page = opened(tmp_path, "statistics")
    assert [(one.label, one.value) for one in page.metric] == [
        ("Students", "10"), ("Mean of 10", "4.2"), ("Median", "6"), ("Deviation", "2.4"), ("Lowest, highest", "0, 6"),
    ]  # fmt: skip
    assert [one.value for one in page.info] == ["9 of 10 have open items: their totals may still grow."]
    assert [one.value for one in page.subheader] == ["Totals", "Mean share of each item's points", "Flags"]
    found = grades(database, assignment)
    assert {one["percent"]: one["students"] for one in bands(found) if one["students"]} == {
        "0-10": 1,
        "20-30": 3,
        "60-70": 6,
    }
    assert item_shares(found) == [
        {"item": "data", "percent": 90.0}, {"item": "mean", "percent": 60.0}, {"item": "names", "percent": 0.0},
        {"item": "style", "percent": 0.0},
    ]  # fmt: skip


def test_review_by_question(tmp_path: Path) -> None:
    database, assignment = graded_book(tmp_path, 4)
    names = {one.id: one.pseudonym for one in submissions(database, assignment.id)}
    page = opened(tmp_path, "review")
    page.segmented_control[0].set_value("by question").run()
    _selectbox(page, "Item").set_value("mean").run()
    assert "The mean is right (4 points)" in [one.value for one in page.text]
    told = {one["student"]: (one["points"], one["status"], one["evidence"]) for one in _rows(page)}
    wrong, right = (0.0, "not earned", "21"), (4.0, "earned", "20")
    assert told == {names[1]: wrong, names[2]: right, names[3]: right, names[4]: wrong}
    page.checkbox[0].check().run()
    assert _rows(page) == []
    _selectbox(page, "Item").set_value("names").run()
    assert len(_rows(page)) == 4
    assert "guideline: One-letter names are not clear." in [one.value for one in page.code]
    _selectbox(page, "Student").set_value(names[3])
    page.text_input[0].set_value("1.5")
    page.text_input[1].set_value("some are clear")
    _press(page, "Set points")
    assert [one.value for one in page.success] == [f"{names[3]}, names: 1.5 points."]
    assert len(_rows(page)) == 3
    assert [(one.item, one.after, one.why) for one in history(database, 3)] == [("names", "1.5", "some are clear")]


def _selectbox(page: Any, label: str) -> Any:
    return next(one for one in page.selectbox if one.label == label)


def test_the_review_page_shows_likeness(tmp_path: Path) -> None:
    database, assignment = make_book(tmp_path)
    for key in ("one", "two"):
        add_submission(database, assignment.id, StudentIdentity(key=key), "a.ipynb", work())
    grade_here(database, assignment)
    assert any("identical: The file equals another" in one.value for one in opened(tmp_path, "review").code)


def test_an_existing_assignment_is_in_the_editor(tmp_path: Path) -> None:
    """As the field's default: it is in every run, also in one that begins again before the browser had the first."""
    _, assignment = graded_book(tmp_path, 1)
    page = opened(tmp_path, "assignments")
    editor = page.text_area[0]
    assert editor.proto.default == editor.value == assignment.rubric.content
    assert editor.proto.default


def test_fields_are_read_when_the_button_acts(tmp_path: Path) -> None:
    """Also those that the page has not run with."""
    graded_book(tmp_path, 2)
    page = opened(tmp_path, "assignments")
    text = page.text_area[0].value
    page.text_area[0].set_value(text.replace("points: 4", "points: 6"))
    _press(page, "Save the assignment")
    assert [one.value for one in page.success] == ["Saved: rubric version 2, 12 points."]
    _press(page, "Save the assignment")
    assert [one.value for one in page.success] == ["Saved: rubric version 2, 12 points."]


def test_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    assert choose_password(None)[1]
    (tmp_path / "short").write_text("abc")
    with pytest.raises(WebUnavailable, match="3 characters; at least 8"):
        choose_password(tmp_path / "short")


def test_nothing_is_served_before_the_password() -> None:
    from starlette.testclient import TestClient

    from grader.web.password import PasswordGate

    inside = Route("/", lambda _: PlainTextResponse("grades"))
    client = TestClient(Starlette(routes=[inside], middleware=[Middleware(PasswordGate, password="open sesame")]))
    assert client.get("/").status_code == 401
    assert "not the password" in client.post("/login", data={"password": "wrong"}).text
    assert client.post("/login", data={"password": "open sesame"}).text == "grades"
    assert client.put("/_stcore/upload_file/session/file", content=b"x").status_code == 404, "inside: no such path here"
    client.get("/logout")
    assert client.put("/_stcore/upload_file/session/file", content=b"x").status_code == 401
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/_stcore/stream"):
        pass
    assert client.get("/").status_code == 401


def test_guesses_of_one_address_are_looked_at_one_by_one() -> None:
    """The right password after wrong ones waits for them; another address does not; too many are refused."""
    import httpx

    from grader.web.password import PasswordGate

    inside = Starlette(routes=[Route("/", lambda _: PlainTextResponse("grades"))])
    gate = PasswordGate(inside, "open sesame", timeouts=PagesTimeouts(wrong_s=0.2))

    def client(address: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(gate, client=(address, 1)), base_url="http://test")

    async def run() -> None:
        async with client("192.0.2.1") as enemy, client("192.0.2.2") as owner:
            guesses = [asyncio.create_task(enemy.post("/login", data={"password": "wrong"})) for _ in range(3)]
            await asyncio.sleep(0)
            right = asyncio.create_task(enemy.post("/login", data={"password": "open sesame"}))
            assert (await owner.post("/login", data={"password": "open sesame"})).status_code == 303
            assert not right.done(), "it waits behind three wrong ones"
            assert [(await guess).status_code for guess in guesses] == [403] * 3
            assert (await right).status_code == 303
            many = await asyncio.gather(*(enemy.post("/login", data={"password": "wrong"}) for _ in range(10)))
            assert sorted({response.status_code for response in many}) == [403, 429]

    asyncio.run(run())


def test_a_form_that_does_not_arrive() -> None:
    """A client without the password keeps no connection open for ever."""
    from grader.web.password import PasswordGate

    gate = PasswordGate(Starlette(), "open sesame", timeouts=PagesTimeouts(form_s=0.05))
    scope: Any = {"type": "http", "method": "POST", "path": "/login", "query_string": b"", "headers": []}
    sent: list[Any] = []

    async def run() -> None:
        parts = iter([{"type": "http.request", "body": b"passw", "more_body": True}])

        async def receive() -> Any:
            for part in parts:
                return part
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await asyncio.wait_for(gate(scope, receive, send), 60)

    asyncio.run(run())
    assert sent[0]["status"] == 408


def test_an_unused_session_ends() -> None:
    from starlette.testclient import TestClient

    from grader.web.password import PasswordGate

    now = [0.0]
    inside = Starlette(routes=[Route("/", lambda _: PlainTextResponse("grades"))])
    client = TestClient(PasswordGate(inside, "open sesame", clock=lambda: now[0]))
    assert client.post("/login", data={"password": "open sesame"}).text == "grades"
    now[0] = 11 * 3600.0
    assert client.get("/").text == "grades"
    now[0] += 13 * 3600.0
    assert client.get("/").status_code == 401


def test_texts_are_never_read_as_markup() -> None:
    """Streamlit reads these calls' texts as markdown or HTML; texts of students and models must not reach them."""
    pages = {path.name: path.read_text() for path in Path(web.__file__ or "").parent.glob("*.py")}
    for name, source in pages.items():
        assert not re.search(r"st\.(markdown|write|write_stream|latex|components)\b|unsafe_allow", source), name
        for shown in re.findall(r"st\.(?:sidebar\.)?html\((.*)\)", source):
            assert shown.startswith(("notebook_html(", "cards_html(", "_STYLE", '"<style>', "'<a href")), (name, shown)
