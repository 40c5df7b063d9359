"""Figures of the dashboard over a history of two models, each with nodes of its own, and its states without figures.

The nodes do not run: what is shown comes from the history file.
"""

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import httpx
import pytest

from tests.support.browser import browser, opened_page
from tests.support.cluster import free_port
from tests.support.gateway import served
from tests.support.page_history import record_of, write_history
from tests.support.page_numbers import NONE, all_same, figure, joules, rate, same, seconds, share, with_unit
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

pytestmark = pytest.mark.slow

LARGE, SMALL = "large-model", "small-model"
REQUESTS, SPREAD_S = 240, 14.0  # over almost an hour
# What every request of the small model was like; those of the large one have their own figures.
QUICK: dict[str, Any] = {
    "prompt_tokens": 300,
    "completion_tokens": 100,
    "total_time": 2.5,
    "first_token_time": 0.4,
    "prefill_time": 0.33,
    "decode_time": 2.17,
    "prefill_speed": 909.0,
    "decode_speed": 46.1,
    "output_token_time": 0.0212,
    "exposed_transfer_time": 0.004,
    "prompt_tokens_recomputed": 0,
    "energy_j": 12.5,
}


def nodes_of(model: str) -> dict[str, str]:
    return {"prefill_node": f"prefill-{model}", "decode_node": f"decode-{model}"}


def record_of_two(number: int) -> dict[str, Any]:
    """Every other one is of the small model."""
    model, base = (SMALL, record_of(10 * number + 3) | QUICK) if number % 2 else (LARGE, record_of(number // 2))
    own = {"number": REQUESTS - number, "request_id": f"r{number}", "time": time.time() - SPREAD_S * number - 1}
    return base | own | {"model": model} | nodes_of(model)


def away(*models: str, **policies: Any) -> dict[str, Any]:
    """A cluster whose nodes do not run."""

    def servers(role: str) -> list[dict[str, Any]]:
        usual = {"host": "127.0.0.1", "power_w": 140}
        return [usual | {"name": nodes_of(model)[role], "model": model, "port": free_port()} for model in models]

    return {
        "prefill_servers": servers("prefill_node"),
        "decode_servers": servers("decode_node"),
        "policies": policies,
    }


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("figures") / "history.db"
    write_history(path, map(record_of_two, reversed(range(REQUESTS))))
    with served(away(LARGE, SMALL, history_file=str(path))) as found:
        yield found


@pytest.fixture(scope="module")
def found() -> "Iterator[Browser]":
    with browser() as started:
        yield started


# Title of a chart: what is drawn (the words of its legend, and names of `/cluster/series`), and how it is written.
SPREAD = ("p50", "p95", "p99")
Write = Callable[[float], str]
CHARTS: dict[str, tuple[dict[str, str], Write]] = {
    "Time to first token": ({part: f"ttft_{part}" for part in SPREAD}, seconds),
    "Time per output token": ({part: f"tpot_{part}" for part in SPREAD}, seconds),
    "End to end": ({part: f"e2e_{part}" for part in SPREAD}, seconds),
    "Throughput": ({"prompt": "prompt_tokens_per_s", "completion": "completion_tokens_per_s"}, figure),
    "Requests": ({"requests/s": "requests_per_s"}, figure),
    "Queue": ({part: f"queue_{part}" for part in SPREAD}, seconds),
    "Prefix cache": ({"hit rate": "prefix_hit_rate"}, share),
    "Ways": ({"handed over": "disaggregated", "local": "local", "fallback": "fallback"}, share),
    "Errors": ({"errors": "errors"}, share),
    "Exposed transfer": ({"p95": "exposed_p95"}, seconds),
    "Recomputed prompt tokens": ({"tokens": "recomputed_tokens"}, figure),
    "Energy per request": ({"energy": "energy_j_per_request"}, joules),
}
_LEGEND = """(chart) => [...chart.querySelectorAll(".u-legend .u-series")]
  .map((each) => [each.querySelector(".u-label").innerText, each.querySelector(".u-value").innerText])"""
_COLOURS = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""


def test_charts_show_what_the_gateway_answers(found: "Browser", url: str) -> None:
    """All of them: the legend without a pointer, at the pointer, and the words for readers of the screen."""
    with opened_page(found, f"{url}/dashboard") as watched:
        page, answers = watched.page, list[dict[str, Any]]()

        def once(route: "Route") -> None:
            """The next point comes in a moment: what was answered first stays."""
            if not answers:
                answers.append(route.fetch().json())
            route.fulfill(json=answers[0])

        page.set_viewport_size({"width": 1440, "height": 2000})  # no scrolling, which moves the pointer over others
        page.route("**/cluster/series?range=1h", once)
        page.get_by_role("link", name="Over time").click()
        shown = page.locator("[data-chart]")
        page.locator("[data-chart] .u-legend").nth(len(CHARTS) - 1).wait_for()
        assert [each.get_attribute("data-chart") for each in shown.all()] == list(CHARTS)
        times, series = answers[0]["times"], answers[0]["series"]
        for title, (lines, write) in CHARTS.items():
            chart = page.locator(f"[data-chart='{title}']")
            columns = {word: series[name] for word, name in lines.items()}
            places = [place for place, values in enumerate(zip(*columns.values(), strict=True)) if any_known(values)]
            assert places, title
            last = legend_of(times, columns, write, places[-1])
            chart.locator(".u-value", has_text=last["Time"]).wait_for()
            check_legend(chart, last)
            label = chart.locator("[role=img]").get_attribute("aria-label") or ""
            ends = {word: next(value for value in reversed(all) if value is not None) for word, all in columns.items()}
            assert same(label, f"{title}: last " + ", ".join(f"{word} {write(end)}" for word, end in ends.items()))
            assert chart.locator("canvas").evaluate(_COLOURS) > 3, "lines and numbers are drawn"
            over = chart.locator(".u-over")
            box = over.bounding_box()
            assert box
            over.hover(position={"x": 0.8 * box["width"], "y": 20})
            chart.locator(".u-value").first.filter(has_not_text=last["Time"]).wait_for()
            at = chart.locator(".u-value").first.inner_text()
            place = next(place for place, time in enumerate(times) if clock(time) == at)
            check_legend(chart, legend_of(times, columns, write, place))


def any_known(values: tuple[float | None, ...]) -> bool:
    return any(value is not None for value in values)


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def legend_of(times: list[float], columns: dict[str, list[float | None]], write: Write, place: int) -> dict[str, str]:
    """At one point."""
    values = {word: values[place] for word, values in columns.items()}
    return {"Time": clock(times[place])} | {
        word: NONE if value is None else write(value) for word, value in values.items()
    }


def check_legend(chart: "Locator", expected: dict[str, str]) -> None:
    found = {word.rstrip(":"): value for word, value in chart.evaluate(_LEGEND)}
    assert set(found) == set(expected)
    assert all(same(found[word], expected[word]) for word in expected), (found, expected)


def spoken(page: "Page", title: str) -> str:
    """What a chart says to readers of the screen: its last values."""
    return page.locator(f"[data-chart='{title}'] [role=img]").get_attribute("aria-label") or ""


def test_a_chosen_model_and_node_have_figures_of_their_own(found: "Browser", url: str) -> None:
    names = ("End to end", "Time per output token", "Recomputed prompt tokens", "Energy per request", "Errors")
    quick = ["p50 2.50 s, p95 2.50 s, p99 2.50 s", "p50 21 ms, p95 21 ms, p99 21 ms"]
    quick += ["tokens 0", "energy 12.5 J", "errors 0 %"]
    small, large = nodes_of(SMALL)["decode_node"], nodes_of(LARGE)["prefill_node"]
    with opened_page(found, f"{url}/dashboard") as watched:
        page = watched.page

        def after(act: Callable[[], object], **chosen: str) -> list[str]:
            """What the charts say, once it is what the gateway answered to this choice."""
            query = urlencode({"range": "1h"} | chosen)
            with page.expect_response(f"{url}/cluster/series?{query}") as answered:
                act()
            series = answered.value.json()["series"]
            expected = [last_words(name, series) for name in names]
            assert until(lambda: all_same([spoken(page, name) for name in names], expected)), expected
            return [spoken(page, name).partition(": last ")[2] for name in names]

        def choose(label: str, name: str) -> Callable[[], object]:
            return lambda: page.get_by_label(label, exact=True).select_option(name)

        both = after(page.get_by_role("link", name="Over time").click)
        assert after(choose("Model", SMALL), model=SMALL) == quick
        of_large = after(choose("Model", LARGE), model=LARGE)
        assert all_same(of_large[:1], ["p50 1,234 s, p95 1,234 s, p99 1,234 s"])
        assert of_large[1] != quick[1] != both[1], "those of one model are not those of both"
        after(choose("Model", ""))
        assert after(choose("Node", small), node=small) == quick
        assert after(choose("Node", large), node=large)[:2] == of_large[:2]


def last_words(title: str, series: dict[str, list[float | None]]) -> str:
    lines, write = CHARTS[title]
    lasts = {
        word: next((each for each in reversed(series[name]) if each is not None), None) for word, name in lines.items()
    }
    return f"{title}: last " + ", ".join(
        f"{word} {NONE if last is None else write(last)}" for word, last in lasts.items()
    )


def test_cards_and_warnings_of_two_models(found: "Browser", url: str) -> None:
    with opened_page(found, f"{url}/dashboard") as watched:
        page, cluster = watched.page, httpx.get(f"{url}/cluster", timeout=30).json()
        for model in (LARGE, SMALL):
            card, figures = page.locator(f"article.card[data-model='{model}']"), cluster["summary"]["models"][model]
            times = [seconds(figures[field]) for field in ("prefill_time", "decode_time", "total_time")]
            speeds = [f"{rate(figures[field])} tok/s" for field in ("prefill_speed", "decode_speed")]
            assert all_same(card.locator(".figure strong").all_inner_texts(), times), model
            shown = [text.replace("\u00a0", " ") for text in card.locator(".figure dd span").all_inner_texts()]
            assert all_same(shown, [*speeds, f"first token {seconds(figures['first_token_time'])}"]), shown
            assert f"medians of {figures['answered']} answered requests" in card.inner_text()
            assert cluster["models"][model] in card.inner_text()
        assert page.locator(f"article.card[data-model='{SMALL}'] strong").all_inner_texts() == [
            "0.33 s",
            "2.17 s",
            "2.50 s",
        ]
        assert page.locator("#verdict.bad").inner_text() == cluster["verdict"] == "nothing is up"
        assert page.locator(".nodes .role").all_inner_texts() == [node["role"].title() for node in cluster["nodes"]]
        handed = [each for each in cluster["history"] if each["ok"] and each["method"].startswith("disaggregated")]
        again = sum(each["prompt_tokens_recomputed"] for each in handed)
        fallbacks = sum(each["ok"] and each["method"] == "fallback" for each in cluster["history"])
        answered = sum(each["ok"] for each in cluster["history"])
        assert min(again, fallbacks) > 0
        warnings = page.get_by_role("alert", name="Warnings").inner_text()
        assert f"decode nodes computed {again:,} prompt tokens again, of prompts that were handed over" in warnings
        assert f"{fallbacks} of the last {answered} answers were fallbacks" in warnings


WORDS = {None: "not known", True: "yes", False: "no"}
STATES = {"ok": "ok", "alarm": "alarm", "unknown": "not known"}


def test_every_target_and_alarm_is_that_of_the_gateway(found: "Browser", url: str) -> None:
    with opened_page(found, f"{url}/dashboard") as watched:
        page = watched.page
        with page.expect_response(f"{url}/cluster/targets?range=1h") as answered:
            page.get_by_role("link", name="Targets").click()
        answer = answered.value.json()
        page.locator("[data-target]").last.wait_for()
        targets = [
            [
                each["name"],
                f"{'<' if each['better'] == 'lower' else '>'} {with_unit(each['goal'], each['unit'])}",
                measured_of(each, each["goal"]),
                WORDS[each["met"]],
                each["what"],
            ]
            for each in answer["targets"]
        ]
        alarms = [
            [
                each["name"],
                with_unit(each["limit"], each["unit"]),
                measured_of(each, each["limit"]),
                STATES[each["state"]],
                each["what"] + (f": {each['why']}" if each["why"] else ""),
            ]
            for each in answer["alarms"]
        ]
        check_rows(page.locator("tr[data-target]"), "data-target", targets)
        check_rows(page.locator("tr[data-alarm]"), "data-alarm", alarms)
        assert {row[3] for row in targets} == {"yes", "no", "not known"}, "all kinds of them"
        assert {row[3] for row in alarms} >= {"ok", "alarm"}


def measured_of(row: dict[str, Any], goal: float) -> str:
    return "not available" if row["measured"] is None else with_unit(row["measured"], row["unit"], goal)


def check_rows(rows: "Locator", name: str, expected: list[list[str]]) -> None:
    """The name in the attribute; then every cell, without the sign before its word."""
    assert rows.count() == len(expected)
    for row, (wanted, *cells) in zip(rows.all(), expected, strict=True):
        assert row.get_attribute(name) == wanted
        assert row.locator("th").inner_text().lower().replace(" ", "_") == wanted
        shown = [re.sub(r"^[✓!✕…]\s*", "", text) for text in row.locator("td").all_inner_texts()]
        assert all_same(shown, cells), (shown, cells)


# States without figures


def test_an_empty_cluster_of_which_nothing_is_up(found: "Browser") -> None:
    with served(away(LARGE)) as url, opened_page(found, f"{url}/dashboard") as watched:
        page = watched.page
        page.locator("#verdict.bad", has_text="nothing is up").wait_for()
        page.get_by_text("No request, and no machine is up.").wait_for()
        assert page.locator(f"article.card[data-model='{LARGE}'] strong").all_inner_texts() == [NONE] * 3
        assert page.locator("article.card", has_text="no answered request yet").count() == 2
        assert page.locator(".nodes tr[data-kind=bad]").count() == 2
        page.get_by_role("link", name="Over time").click()
        page.get_by_text("nothing measured in this time").nth(len(CHARTS) - 1).wait_for()
        page.get_by_role("link", name="Requests").click()
        page.get_by_text("No request yet.").wait_for()


EVENTS, STREAMS = "/cluster/events", 64


def test_a_page_without_a_place_for_its_events_says_so_and_tries_again(found: "Browser", url: str) -> None:
    with ExitStack() as taken:
        for _ in range(STREAMS):
            stream = taken.enter_context(
                socket.create_connection((str(urlsplit(url).hostname), urlsplit(url).port or 0))
            )
            stream.sendall(f"GET {EVENTS} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert stream.recv(12) == b"HTTP/1.1 200"
        with opened_page(found, f"{url}/dashboard", wait="", may_fail=(EVENTS,)) as watched:
            page = watched.page
            page.locator("[role=alert]", has_text=f"all {STREAMS} event streams are in use").wait_for()
            assert page.locator(".nodes tbody tr").count() == 4, "what was read stays"
            with page.expect_response(lambda answer: answer.url == url + EVENTS and answer.ok):
                taken.close()
            page.locator("header .connection", has_text="Live").wait_for()
            page.locator("[role=alert]", has_text="Reconnecting").wait_for(state="detached")
