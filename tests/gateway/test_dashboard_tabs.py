"""The tabs beside the overview, in a real browser: playground, clients, requests, time, targets; and the keyboard."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.dashboard_site import EVIL, MODEL, Site, ask, opened, running_site
from tests.support.page_numbers import same, seconds

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_site(tmp_path_factory.mktemp("dashboard")) as found:
        yield found


def test_an_operator_may_force_a_way(site: Site) -> None:
    ids = {way: ask(site.url, f"by {way} " * 30, **{"X-Disagg-Route": way}) for way in ("local", "handover", "auto")}
    records = {record["request_id"]: record for record in site.cluster()["history"]}
    assert [records[ids[way]]["method"] for way in ("local", "handover")] == ["local", "disaggregated_simulated"]
    body = {"model": MODEL, "prompt": "x"}
    refused = httpx.post(f"{site.url}/v1/completions", json=body, headers={"X-Disagg-Route": "sideways"}, timeout=30)
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "x-disagg-route: 'sideways' is no route; give auto, local, handover",
    )


def test_the_playground_shows_both_ways(site: Site) -> None:
    with opened(site, "/dashboard#playground") as watched:
        page = watched.page
        page.get_by_label("Prompt").fill(f"{EVIL} why is the sky blue? " * 20)
        page.get_by_label("Longest answer").fill("12")
        page.get_by_role("button", name="Send").click()
        page.locator("#play-verdict").wait_for()
        assert "the same, character for character" in page.locator("#play-verdict").inner_text()
        answers = [page.locator(f"[data-run={kind}] .answer").inner_text() for kind in ("handover", "local")]
        assert answers[0] == answers[1]
        assert answers[0].count("[") == 12
        newest = site.cluster()["history"][:2]
        assert [record["method"] for record in newest] == ["local", "disaggregated_simulated"]
        assert newest[1]["plan"] in page.locator("[data-run=handover]").inner_text()
        assert "the request asks for it" in newest[1]["plan"]
        longest = max(record["total_time"] for record in newest)
        scales = [page.locator(f"[data-run={kind}] .scale").inner_text() for kind in ("handover", "local")]
        assert all(same(text, f"0 to {seconds(longest)}") for text in scales), "one for both"
        for kind, record in zip(("local", "handover"), newest, strict=True):
            bar = page.locator(f"[data-run={kind}] tr[data-phase=decode] rect")
            share = float(bar.get_attribute("width") or 0) / 100
            written = sum(each["seconds"] for each in record["waterfall"] if each["name"] == "decode")
            assert share == pytest.approx(written / longest, rel=0.02)
        assert page.locator("img").count() == 0


def test_a_stopped_comparison_says_so(site: Site) -> None:
    with opened(site, "/dashboard#playground") as watched:
        page = watched.page
        page.get_by_label("Longest answer").fill("4000")
        page.get_by_role("button", name="Send").click()
        running = page.locator("[data-run=handover][data-state=running]")
        running.locator(".answer", has_text="[").wait_for()  # text comes before the end
        assert running.locator(".waterfall").count() == 0, "the end has not come"
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Send").wait_for()
        assert [page.locator(f"[data-run={kind}][data-state=stopped]").count() for kind in ("handover", "local")] == [
            1,
            1,
        ]


def test_configurations_name_this_gateway(site: Site) -> None:
    with opened(site, "/dashboard#clients") as watched:
        names = ("curl", "OpenAI SDK", "Open WebUI", "Continue", "aider", "Claude Code")
        texts = {name: watched.page.locator(f"[data-client='{name}'] pre").inner_text() for name in names}
        assert all(site.url in text for text in texts.values())
        assert f'model="{MODEL}"' in texts["OpenAI SDK"]
        namespace: dict[str, Any] = {"print": lambda text: namespace.update(answer=text)}
        exec(texts["OpenAI SDK"].replace("messages=question", "messages=question, max_tokens=3"), namespace)
        assert namespace["answer"].count("[") == 3


def test_the_history_is_filtered_and_drawn(site: Site) -> None:
    id = ask(site.url, "one of the history")
    with opened(site, "/dashboard#requests") as watched:
        page = watched.page
        page.locator(f"tr[data-request='{id}']").wait_for()
        page.get_by_label("Outcome").select_option("failed")
        page.locator(f"tr[data-request='{id}']").wait_for(state="detached")
        page.get_by_label("Outcome").select_option("ok")
        page.locator(f"tr[data-request='{id}'] button").click()
        page.locator("dialog[open] tr[data-phase=decode]").wait_for()  # asked for: a row has no waterfall
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Over time").click()
        page.locator("[data-chart='Time to first token'] canvas").wait_for()
        label = page.locator("[data-chart='Time to first token'] [role=img]").get_attribute("aria-label")
        assert label
        assert "last p50" in label
        page.get_by_label("Node", exact=True).select_option(site.nodes[0].name)
        page.get_by_label("Time", exact=True).select_option("7d")
        page.get_by_text("one point for 2 h").wait_for()


def test_disaggregation_that_silently_does_not_happen_raises_an_alarm(site: Site) -> None:
    node = site.nodes[0]
    with opened(site) as watched:
        page = watched.page
        node.kill()
        try:
            page.locator(f".nodes tr[data-node='{node.name}'][data-kind='bad']").wait_for()
            for number in range(12):
                ask(site.url, f"read by the decode node {number}")
        finally:
            node.start()
            node.ready()
        page.locator("[role=alert]", has_text="were fallbacks").wait_for()
        page.get_by_role("link", name="Targets").click()
        page.locator("[data-alarm=fallback_share][data-state=alarm]").wait_for()
        page.locator(f".nodes tr[data-node='{node.name}']").wait_for(state="detached")
        shown = page.locator("[data-target=end_to_end]").inner_text()
        targets = httpx.get(f"{site.url}/cluster/targets?range=1h", timeout=30).json()["targets"]
        goal = next(target for target in targets if target["name"] == "end_to_end")
        assert "< 15 s" in shown
        assert ("yes" in shown) == goal["met"]


def test_the_page_is_used_by_keyboard_alone(site: Site) -> None:
    with opened(site) as watched:
        page = watched.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.get_by_role("link", name="Cluster").focus()
        page.keyboard.press("Enter")
        page.locator(".links").first.wait_for()
        page.locator("summary").focus()
        page.keyboard.press("Enter")
        readings = page.locator("details[open]").inner_text()
        assert all(text in readings for text in ("CPU ", "memory ", "network ", " not available: ")), readings
        theme = page.get_by_role("button", name="Theme")
        theme.focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
