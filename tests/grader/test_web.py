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
from grader.store import Database, history, submissions
from grader.timeouts import PagesTimeouts
from grader.web import PASSWORD_VARIABLE, WebSettings, WebUnavailable, choose_password, configure
from tests.support.grade_books import graded_book

testing = pytest.importorskip("streamlit.testing.v1", reason="Streamlit is not installed")


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
