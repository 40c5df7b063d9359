"""Every view of the dashboard at every width, over a long history: long and hostile names, nodes that are down.

The nodes do not run: what the views show comes from the history file.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.browser import WatchedPage, browser, opened_page
from tests.support.cluster import free_port
from tests.support.gateway import served
from tests.support.page_history import DECODE, EVIL, LONG, PREFILL, record_of, write_history
from tests.support.page_numbers import NONE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

REQUESTS = 2000
VIEWS = ["overview", "cluster", "requests", "time", "targets", "energy", "playground", "clients"]
SIZES = {1440: 900, 1024: 768, 390: 844, 320: 568}


@pytest.fixture(scope="module")
def history_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "history.db"
    callers = (f"key-of-{LONG}" if number % 2 else "" for number in reversed(range(REQUESTS)))
    write_history(path, map(record_of, reversed(range(REQUESTS))), callers)
    return path


@pytest.fixture(scope="module")
def url(history_file: Path) -> Iterator[str]:
    server = {"model": LONG, "host": "127.0.0.1", "power_w": 140, "price_per_hour": 0.1}
    config: dict[str, Any] = {
        "prefill_servers": [server | {"name": PREFILL, "port": free_port()}],
        "decode_servers": [server | {"name": DECODE, "port": free_port()}],
        "policies": {"history_file": str(history_file), "electricity_price_per_kwh": 0.3},
    }
    with served(config) as found:
        yield found


@pytest.fixture(scope="module")
def found() -> "Iterator[Browser]":
    with browser() as started:
        yield started


_NAMELESS = """[...document.querySelectorAll("a, button, input, select, textarea, [role=region], [role=img], dialog")]
  .filter((each) => !(each.innerText?.trim() || each.getAttribute("aria-label") || each.labels?.length
    || document.getElementById(each.getAttribute("aria-labelledby"))?.innerText.trim()))
  .map((each) => each.outerHTML)"""
_SIDEWAYS = """[...document.querySelectorAll(".scroll")].filter((each) => each.scrollWidth > each.clientWidth + 1)
  .map((each) => each.innerText)"""
_OUTSIDE = """[...document.querySelectorAll("main .panel *")]
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".hidden, thead, svg, .uplot"))
  .map((each) => each.outerHTML.slice(0, 200))"""
_CUT_TABS = """[...document.querySelectorAll("nav a")]
  .filter((each) => each.getBoundingClientRect().right > innerWidth || each.getBoundingClientRect().left < 0)
  .map((each) => each.innerText)"""


@pytest.mark.parametrize("view", VIEWS)
def test_views_have_labels_and_fit_every_width(found: "Browser", url: str, view: str) -> None:
    with opened_page(found, f"{url}/dashboard#{view}") as watched:
        page = watched.page
        page.on("dialog", lambda dialog: watched.errors.append("a dialog opened: " + dialog.message))
        assert page.locator(f"nav a[href='#{view}'][aria-current=page]").count() == 1
        page.locator("main .panel").first.wait_for()
        page.locator("main .notice").wait_for(state="detached")
        assert page.locator("main .banner.bad").count() == 0
        assert page.evaluate(_NAMELESS) == []
        assert page.locator("h1").count() == 1
        assert page.locator("img").count() == 0, "text from outside is never HTML"
        for width, height in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(_SIDEWAYS) == [], f"no table is cut at {width} px"
            assert page.evaluate(_OUTSIDE) == [], f"nothing leaves the screen at {width} px"
            assert page.evaluate(_CUT_TABS) == [], f"no tab is cut at {width} px"


def test_a_node_that_is_down_shows_no_figures_of_before(found: "Browser", url: str) -> None:
    with opened_page(found, f"{url}/dashboard#cluster") as watched:
        box = watched.page.locator(".box[data-kind=bad]").first
        box.wait_for()
        assert box.locator(".meter .num").all_inner_texts() == ["not available"] * 2
        assert "Readings not available" in box.inner_text()


def test_a_link_has_the_share_of_its_line_rate(found: "Browser", url: str) -> None:
    cluster = httpx.get(f"{url}/cluster", timeout=30).json()
    for node in cluster["nodes"]:
        node |= {"engine": "torch", "usable": True, "state": "healthy", "why": ""}
    link = {"prefill": PREFILL, "decode": DECODE, "measured": True, "bytes_per_s": 1.1e9, "payload_bytes": 64_000_000}
    cluster["links"] = [link | {"line_rate_bytes_s": 1.25e9, "warning": None}]
    with opened_page(found, "about:blank", wait="") as watched:
        page = watched.page
        page.route("**/cluster", lambda route: route.fulfill(json=cluster))
        page.route("**/cluster/events", lambda route: None)
        page.goto(f"{url}/dashboard#cluster")
        row = page.locator(".links tbody tr")
        row.wait_for()
        assert row.locator("td").all_inner_texts() == ["quiet", NONE, "1.1 GB/s", "1.3 GB/s (88 % reached)", "64 MB"]
        assert page.locator(".tag").inner_text() == "1.1 GB/s of 1.3 GB/s"
        page.set_viewport_size({"width": 390, "height": 844})
        page.get_by_role("link", name="Overview").click()
        page.locator(".link-list", has_text="1.1 GB/s of 1.3 GB/s").wait_for()  # no room for lines
        assert page.locator(".wires").is_hidden()


HOSTILE_ANSWER = "<script>alert(1)</script>" + EVIL
CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"content": HOSTILE_ANSWER}}]},
    {"choices": [], "error": {"message": f"failed: {EVIL}"}},
]


def test_an_answer_of_a_model_is_never_html(found: "Browser", url: str) -> None:
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS)
    with opened_page(found, f"{url}/dashboard#playground") as watched:
        page = watched.page
        page.on("dialog", lambda dialog: watched.errors.append("a dialog opened: " + dialog.message))
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
        page.get_by_role("button", name="Send").click()
        page.locator("[data-run=local][data-state=failed]").wait_for()
        for run in page.locator("[data-run]").all():
            assert run.locator(".answer").inner_text().startswith("<script>alert(1)</script><img src=x")
            assert "failed: <img src=x" in run.locator("[role=alert]").inner_text()
        assert page.locator("img, #app script").count() == 0


def test_requests_of_one_second_stand_by_their_numbers(found: "Browser", url: str) -> None:
    """The time that is shown is that of their arrival, the number that of their end."""
    second = float(int(time.time()) - 60)
    rows = [record_of(10 * number + 3) for number in range(4)]
    for row, (number, at) in zip(rows, [(12, 0.9), (14, 0.5), (13, 0.4), (11, -0.1)], strict=True):
        row |= {"number": number, "time": second + at}
    answer = {"requests": rows, "more": False, "kept": {"requests": 4, "oldest": second, "file": False}}
    with opened_page(found, "about:blank", wait="") as watched:
        page = watched.page
        page.route("**/cluster/history*", lambda route: route.fulfill(json=answer))
        page.goto(f"{url}/dashboard#requests")
        page.locator(".requests tbody tr").first.wait_for()
        assert page.locator(".requests tbody button").all_inner_texts() == ["#14", "#13", "#12", "#11"]


def test_energy_names_its_source_and_what_is_missing(found: "Browser", url: str) -> None:
    with opened_page(found, f"{url}/dashboard#energy") as watched:
        row = watched.page.locator("[aria-labelledby=energy-In-all] tbody tr")
        row.wait_for()
        text = row.inner_text()
        assert "81 % measured, else configured watts" in text, "100,000 of 123,456.7 J"
        assert "at least: a price is missing" in text
        assert "of 1,800 requests" in text, "the energy of one of ten is not known"
        assert "$0.00002" in text, "2,000 requests"
        keys = watched.page.locator("[aria-labelledby=energy-By-API-key] tbody th").all_inner_texts()
        assert sorted(name[:7] for name in keys) == ["key-of-", "no key"]
        alone = watched.page.locator("tr[data-machine] th").all_inner_texts()
        assert len(alone) == 2
        assert all("has not measured its" in each for each in alone)
        assert "set idle_power_w" in watched.page.locator("#no-idle").inner_text()


GPU = {"name": "NVIDIA GB10", "utilisation": 0.95, "power_w": 61.4, "power_limit_w": 140.0, "temperature_c": 64.0}
GPU |= {"clock_mhz": 2418.0, "throttled": ["SW thermal slowdown"], "memory_shared": True}
GPU |= {"memory_used_bytes": None, "memory_total_bytes": None, "missing": {"memory_used_bytes": "not supported"}}
SPARK = {"machine": "DGX Spark", "cpu_share": 0.07, "memory_used_bytes": 80e9, "memory_total_bytes": 128e9}
SPARK |= {"memory_shared": True, "gpus": [GPU], "networks": [], "power_w": 61.4, "power_covers": "GPU", "missing": {}}


def test_readings_of_a_machine_with_meters(found: "Browser", url: str) -> None:
    cluster = httpx.get(f"{url}/cluster", timeout=30).json()
    cluster["nodes"][0] |= {"readings": SPARK}
    with opened_page(found, "about:blank", wait="") as watched:
        page = watched.page
        page.route("**/cluster", lambda route: route.fulfill(json=cluster))
        page.route("**/cluster/events", lambda route: None)  # never answered: the figures stay
        page.goto(f"{url}/dashboard#cluster")
        box = page.locator(".box .readings").first
        box.wait_for()
        shown = box.inner_text().replace("\u00a0", " ")
        parts = [
            "CPU 7 %",
            "GPU 95 %",
            "memory 80 GB of 128 GB, shared with the GPU",
            "power 61 W",
            "temperature 64 °C",
        ]
        assert shown == " · ".join(parts) + " ! throttled: SW thermal slowdown"
        page.locator("summary").click()
        readings = page.locator("details[open]").inner_text()
        assert "NVIDIA GB10 · 95 % in use · 61 W of 140 W · 64 °C · 2,418 MHz" in readings
        assert "memory used bytes not available: not supported" in readings, "never invented"


def test_a_gateway_that_says_nothing_is_given_up(found: "Browser", url: str) -> None:
    with opened_page(found, "about:blank", wait="") as watched:
        page = watched.page
        page.clock.install()
        page.route("**/cluster", lambda route: None)
        page.goto(f"{url}/dashboard")
        page.get_by_text("Asking the gateway").wait_for()
        page.clock.fast_forward(20_000)
        page.get_by_role("heading", name="The gateway cannot be reached").wait_for()
        page.unroute("**/cluster")
        page.locator("header .connection", has_text="Live").wait_for()
        page.route("**/cluster/events", lambda route: None)
        page.reload()
        page.locator("header .connection", has_text="Live").wait_for()
        page.clock.fast_forward(20_000)
        page.locator("[role=alert]", has_text="Reconnecting: the gateway does not answer").wait_for()
        page.unroute("**/cluster/events")
        page.locator("[role=alert]", has_text="Reconnecting").wait_for(state="detached")


def test_a_slow_answer_to_a_new_choice_is_announced(found: "Browser", url: str) -> None:
    with opened_page(found, f"{url}/dashboard#energy") as watched:
        page = watched.page
        page.locator("section[aria-labelledby=energy-In-all]").wait_for()
        page.route("**/cluster/energy?range=7d", lambda route: None)
        page.get_by_label("Time").select_option("7d")
        page.get_by_text("Reading: energy and cost.").wait_for()
        page.get_by_label("Time").select_option("24h")
        page.get_by_text("Reading: energy and cost.").wait_for(state="detached")


# As the page computes it: what is given, what is shown.
FORMATS = [
    ("withUnit(99.93, '%', 99.9)", "99.93 %"),
    ("withUnit(99.89, '%', 99.9)", "99.89 %"),
    ("withUnit(99.996, '%', 99.9)", "99.996 %"),
    ("withUnit(100, '%', 99.9)", "100 %"),
    ("withUnit(99.9, '%', 99.9)", "99.9 %"),
    ("withUnit(14.998, 's', 15)", "14.998 s"),
    ("withUnit(5.2678, 's', 15)", "5.27 s"),
    ("withUnit(0, 'models', 0)", "0 models"),
    ("withUnit(11879.6, '1/kWh', 50)", "11,900 per kWh"),
    ("withUnit(0.0000594, '$', 0.01)", "$0.000059"),
    ("dollars(0.00000001)", "< $0.000001"),
    ("dollars(0)", "$0"),
    ("dollars(null)", "not available"),
    ("seconds(123456.7)", "123,457 s"),
    ("seconds(1e15)", "1.0e+15 s"),
    ("rate(1e18)", "1.0e+18"),
    ("bytes(1.5e18)", "1.5 EB"),
    ("bytes(1e300)", "1.0e+282 EB"),
    ("times(1e12)", "1.0e+12x"),
    ("dollars(1e18)", "$1.00e+18"),
    ("clock(1e15)", "\u2013"),
    ("clock(new Date(2026, 0, 2, 0, 5, 9) / 1000)", "00:05:09"),
    ("joules(812.3)", "812 J"),
    ("joules(999.6)", "1 kJ"),
    ("joules(3600000)", "3.6 MJ"),
    ("joules(null)", "not available"),
]


def test_numbers_are_rounded_but_not_onto_their_goal(found: "Browser", url: str) -> None:
    with opened_page(found, f"{url}/dashboard") as watched:
        calls = ", ".join(f"format.{call}" for call, _ in FORMATS)
        shown = watched.page.evaluate(f"import('{url}/dashboard/static/format.js').then((format) => [{calls}])")
        assert shown == [text for _, text in FORMATS]


def test_a_configuration_is_copied_without_https(found: "Browser", url: str) -> None:
    """Over plain HTTP in a local network, browsers have no clipboard for scripts."""
    with opened_page(found, "about:blank", wait="") as watched:
        page = watched.page
        page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page.goto(f"{url}/dashboard#clients")
        button = page.get_by_label("Copy the configuration of aider")
        button.click()
        page.locator("[data-client=aider] button", has_text="copied").wait_for()
        assert page.evaluate("String(getSelection())") == page.locator("[data-client=aider] pre").inner_text()


def test_a_request_of_the_history_shows_hostile_text_as_text(found: "Browser", url: str) -> None:
    with opened_page(found, f"{url}/dashboard#requests") as watched:
        page = watched.page
        page.get_by_label("Outcome").select_option("failed")
        page.locator("tr[data-request=r0] button").click()
        _shows(watched, EVIL[:20])
        page.locator("tr[data-request=r1]").wait_for(state="detached")
        page.get_by_label("Outcome").select_option("ok")
        page.locator("tr[data-request=r1] button").click()
        _shows(watched, f"{EVIL[:20]}")
        page.locator("tr[data-request=r2] button").click()
        _shows(watched, "failover at 1.50 s: decode-node-of-", "the answer stood still for 0.75 s", "predicted 11.0 s")
        page.get_by_label("Outcome").select_option("refused")
        page.get_by_text("None of the kept requests is of this time and selection.").wait_for()


def _shows(watched: WatchedPage, *texts: str) -> None:
    dialog = watched.page.locator("dialog[open]")
    dialog.locator(".waterfall").wait_for()
    assert all(text in dialog.inner_text() for text in texts)
    assert watched.page.locator("img").count() == 0
    watched.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
