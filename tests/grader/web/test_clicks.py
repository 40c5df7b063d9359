"""Clicks in one instant. The test itself sends the second click, or the end of the session, at the moments at which
Streamlit forgets the first: when its callbacks have not begun, in the middle of one, and while it waits. No luck is in
it. Without our change the same clicks are lost."""

import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from grader.grading import grades
from grader.store import Assignment, Database, history, reveals, undo
from grader.web import WebSettings, configure, decisions, session
from grader.worker import WorkerOptions, batch
from tests.support.grade_books import graded_book

testing = pytest.importorskip("streamlit.testing.v1", reason="Streamlit is not installed")

from streamlit.proto.WidgetStates_pb2 import WidgetStates  # noqa: E402
from streamlit.runtime.scriptrunner import RerunData, ScriptRunnerEvent, script_runner  # noqa: E402
from streamlit.testing.v1 import app_test  # noqa: E402
from streamlit.testing.v1.local_script_runner import LocalScriptRunner  # noqa: E402

from grader.web.clicks import keep_every_click  # noqa: E402

_SCRIPT = "from grader.web.{name}_page import {name}_page\n{name}_page()\n"


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit's test runner makes its script the main module; and what is changed in Streamlit is put back."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("SafeSessionState", "ScriptRequests"):
        monkeypatch.setattr(script_runner, name, getattr(script_runner, name))


@pytest.fixture
def book(tmp_path: Path) -> tuple[Database, Assignment]:
    found = graded_book(tmp_path, 1)
    configure(WebSettings(book=tmp_path, who="teacher"))
    return found


class _Page:
    """`at_start`: called when a run has begun, before the callbacks of its click."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "review") -> None:
        self.at_start: Callable[[Any], None] = lambda runner: None
        self.runner: Any = None
        page = self

        class Runner(LocalScriptRunner):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                page.runner = self
                self.on_event.connect(self._begun, weak=False)

            def _begun(self, sender: Any, event: ScriptRunnerEvent, **_: Any) -> None:
                if event is ScriptRunnerEvent.SCRIPT_STARTED:
                    act, page.at_start = page.at_start, lambda runner: None
                    act(self)

        monkeypatch.setattr(app_test, "LocalScriptRunner", Runner)
        self.test = testing.AppTest.from_string(_SCRIPT.format(name=name), default_timeout=120).run()
        assert not self.test.exception

    def points(self, item: str, points: str) -> WidgetStates:
        """The message of a browser: points and a reason for an item, and the click on `Set points`."""
        form = self.test.text_input(key=f"p-1-{item}").set_value(points).form_id
        self.test.text_input(key=f"w-1-{item}").set_value("by hand")
        button = next(one for one in self.test.button if one.label == "Set points" and one.form_id == form)
        button.click()
        return self._sent(button)

    def click(self, label: str) -> WidgetStates:
        button = next(one for one in self.test.button if one.label == label)
        button.click()
        return self._sent(button)

    def _sent(self, button: Any) -> WidgetStates:
        sent = self.test._tree.get_widget_states()
        button._value = False
        return sent

    def send(self, first: WidgetStates) -> None:
        self.test._run(first)
        assert not self.test.exception


def _given(book: Database) -> list[tuple[str, object]]:
    return [(one.item, one.after) for one in history(book, 1) if one.action == "points"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_click_before_the_callbacks_of_another(
    book: tuple[Database, Assignment], monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    if is_kept:
        keep_every_click()
    page = _Page(monkeypatch)
    first, second = page.points("data", "1"), page.points("mean", "0.5")
    page.at_start = lambda runner: runner.request_rerun(RerunData(widget_states=second))
    page.send(first)
    assert _given(book[0]) == ([("data", "1")] if is_kept else []) + [("mean", "0.5")]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_click_in_the_middle_of_the_callback_of_another(
    book: tuple[Database, Assignment], monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """It reads its fields with `st`: there Streamlit ends it."""
    if is_kept:
        keep_every_click()
    page, really = _Page(monkeypatch), session.field
    first, second = page.points("data", "1"), page.points("mean", "0.5")
    waiting = [second]

    def interrupted(key: str, default: Any = None) -> Any:
        if waiting:
            page.runner.request_rerun(RerunData(widget_states=waiting.pop()))
        return really(key, default)

    monkeypatch.setattr(decisions, "field", interrupted)
    page.send(first)
    assert _given(book[0]) == ([("data", "1")] if is_kept else []) + [("mean", "0.5")]
    if is_kept:
        assert {"data: 1 points.", "mean: 0.5 points."} <= {one.value for one in page.test.success}


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_click_that_waits_when_the_browser_leaves(
    book: tuple[Database, Assignment], monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """A click, and a refresh at once, while the page still runs for what was before."""
    if is_kept:
        keep_every_click()
    page = _Page(monkeypatch)
    first = page.points("data", "1")

    def leave(runner: Any) -> None:
        runner.request_rerun(RerunData(widget_states=first))
        runner.request_stop()

    page.at_start = leave
    page.send(page.test._tree.get_widget_states())
    assert _given(book[0]) == ([("data", "1")] if is_kept else [])


def test_points_and_approval_in_one_instant(book: tuple[Database, Assignment], monkeypatch: pytest.MonkeyPatch) -> None:
    """The points count. The approval was of what the page showed before them: it is refused, and says so."""
    keep_every_click()
    page = _Page(monkeypatch)
    for item in ("names", "style"):
        page.send(page.points(item, "1"))
    first, second = page.points("data", "1"), page.click("Approve")
    page.at_start = lambda runner: runner.request_rerun(RerunData(widget_states=second))
    page.send(first)
    assert _given(book[0])[-1] == ("data", "1")
    assert any("the grade changed after the page showed it" in one.value for one in page.test.code)
    assert not grades(*book)[0].approved
    page.send(page.click("Approve"))
    assert grades(*book)[0].approved


def test_a_double_click_counts_once(book: tuple[Database, Assignment], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of points, of an approval, and of an undo, which takes back the decision that the page showed as the last."""
    keep_every_click()
    page = _Page(monkeypatch)

    def twice(sent: WidgetStates) -> None:
        page.at_start = lambda runner: runner.request_rerun(RerunData(widget_states=sent))
        page.send(sent)

    for item in ("data", "names", "style"):
        twice(page.points(item, "1"))
    assert _given(book[0]) == [("data", "1"), ("names", "1"), ("style", "1")]
    twice(page.click("Approve"))
    assert [one.action for one in history(book[0], 1)] == ["points", "points", "points", "approve"]
    twice(page.click("Undo"))
    assert [one.action for one in history(book[0], 1) if one.undone] == ["approve"]
    undo(book[0], 1, "teacher")
    assert grades(*book)[0].review.points["names"].points == Decimal(1)


def test_files_are_made_once_for_a_double_click(
    book: tuple[Database, Assignment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second click comes when the page runs for the first: what was asked is made, and logged once."""
    keep_every_click()
    page = _Page(monkeypatch, "export")
    for name in ("drafts", "names"):
        page.test.checkbox(key=f"export-{name}").check()
    sent = page.click("Make the files")
    page.at_start = lambda runner: runner.request_rerun(RerunData(widget_states=sent))
    page.send(sent)
    assert [(one.what, one.why) for one in reveals(book[0])] == [([1], "export of sales")]
    assert len(page.test.session_state["export-files"].files) == 4
    page.send(page.click("Make the files"))
    assert len(reveals(book[0])) == 2, "asked for again, it is made again"


def test_two_clicks_on_grade_start_one_worker(
    book: tuple[Database, Assignment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is about to start when the second looks whether one runs."""
    started = list[int]()

    class Slow:
        def poll(self) -> None:
            return None

    def start(database: Database, options: WorkerOptions) -> Any:
        started.append(1)
        return Slow()

    monkeypatch.setattr(batch, "start_worker", start)
    monkeypatch.setattr(batch, "_started", {})
    keep_every_click()
    page = _Page(monkeypatch, "submissions")
    sent = page.click("Grade")
    page.at_start = lambda runner: runner.request_rerun(RerunData(widget_states=sent))
    page.send(sent)
    assert started == [1]
