"""The dashboard in a real browser, in front of a cluster of simulated nodes: what is live, and what goes wrong."""

import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from disaggregated_inference.cli.top_table import size
from disaggregated_inference.cluster import Policies
from disaggregated_inference.gateway.key_file import KeyLimits, new_key
from disaggregated_inference.timeouts import GatewayTimeouts
from tests.support.browser import SOON_MS, WatchedPage, opened_page
from tests.support.cluster import Process
from tests.support.command import disagg
from tests.support.dashboard_site import EVIL, LINE_RATE_GBPS, MODEL, Site, ask, opened, running_site
from tests.support.gateway import GatewayProcess, gateway_process, served, simulated_config
from tests.support.page_numbers import NONE, rate, same, seconds, size_per_second
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_site(tmp_path_factory.mktemp("dashboard")) as found:
        yield found


def test_numbers_on_screen_are_those_of_the_cluster(site: Site) -> None:
    for number in range(3):
        ask(site.url, f"prompt {number} " * (10 + 30 * number))
    with opened(site) as watched:
        page, cluster = watched.page, site.cluster()
        model, combined = cluster["summary"]["models"][MODEL], cluster["summary"]["combined"]
        card = page.locator("article.card", has_text=MODEL)
        figures = card.locator(".figure strong").all_inner_texts()
        fields = ("prefill_time", "decode_time", "total_time")
        assert all(map(same, figures, [seconds(model[field]) for field in fields])), figures
        speeds = card.locator(".figure dd span").all_inner_texts()[:2]
        expected = [f"{rate(model[field])} tok/s" for field in ("prefill_speed", "decode_speed")]
        assert all(map(same, speeds, expected)), speeds
        assert f"served {cluster['served']['ok']} · failed 0" in page.locator(".combined .foot").inner_text()
        assert same(page.locator("#combined-throughput").inner_text(), rate(combined["tokens_per_s"]))
        assert same(page.locator("#combined-total").inner_text(), seconds(combined["busy_time"]))
        assert page.locator("#combined-speedup").inner_text() == "1.00x", "one after another: nothing overlaps"
        rows = page.locator(".nodes tbody tr").all_inner_texts()
        for shown, node in zip(rows, cluster["nodes"], strict=True):
            assert all(text in shown for text in (node["name"], node["state"], node["model"], node["url"][7:]))
            assert node["role"].title() in shown
        for record in cluster["history"][:10]:
            row = page.locator(f"tr[data-request='{record['request_id']}']")
            assert row.locator("button").inner_text() == f"#{record['number']}"
            cells = row.locator("td").all_inner_texts()
            assert cells[0] == MODEL
            assert same(cells[1], seconds(record["total_time"]))
            assert same(cells[3], f"{rate(record['prefill_speed'])} → {rate(record['decode_speed'])} tok/s")
        terminal = disagg("top", "--once", "--url", site.url).stdout
        assert f"med of {model['answered']}" in terminal, "the same definition on both screens"
        assert f"{model['total_time']:.2f}s med" in terminal
        assert f"{combined['busy_time']:.2f}s  last {combined['answered']}" in terminal


def test_a_request_appears_and_shows_its_waterfall(site: Site) -> None:
    with opened(site) as watched:
        page = watched.page
        id = ask(site.url, "a request made during the test " * 20)
        row = page.locator(f"tr[data-request='{id}']")
        row.wait_for()
        record = next(each for each in site.cluster()["history"] if each["request_id"] == id)
        row.locator("button").focus()
        page.keyboard.press("Enter")
        dialog = page.locator("dialog[open]")
        dialog.wait_for()
        text = dialog.inner_text()
        assert record["plan"] in text
        assert f"{record['prompt_tokens']:,} tokens, {record['cached_tokens']:,} cached" in text
        assert sum(phase["seconds"] for phase in record["waterfall"]) == pytest.approx(record["total_time"])
        after_s = record["output_token_time"] * (record["completion_tokens"] - 1)
        assert record["first_token_time"] + after_s == pytest.approx(record["total_time"]), "the exposed transfer, too"
        assert record["hidden_transfer_time"] <= record["transfer_time"] <= record["fetch_time"]
        phases = {phase["name"] for phase in record["waterfall"]} - {"overhead"}
        assert phases <= {each.get_attribute("data-phase") for each in dialog.locator("tr[data-phase]").all()}
        page.keyboard.press("Escape")
        dialog.wait_for(state="detached")
        assert page.evaluate("document.activeElement.closest('tr')?.dataset.request") == id


TINY_S = 0.002  # of overhead: such pieces are not drawn


def test_a_waterfall_has_hidden_and_exposed_transfer(site: Site) -> None:
    """Every row, its time and the place of its bar are those of the gateway's record."""
    id, record, transfer = _partly_hidden(site)
    with opened(site) as watched:
        page = watched.page
        page.locator(f"tr[data-request='{id}'] button").click()
        dialog = page.locator("dialog[open]")
        phases = [p for p in record["waterfall"] if p["name"] != "overhead" or p["seconds"] >= TINY_S]
        rows = {row.get_attribute("data-phase"): row for row in dialog.locator("tr[data-phase]").all()}
        expected = {phase["name"]: phase["seconds"] for phase in phases if phase["name"] != "overhead"}
        assert expected["exposed transfer"] == pytest.approx(transfer["exposed_s"])
        expected |= {"transfer, hidden": transfer["hidden_s"], "inject": transfer["inject_s"]}
        assert set(rows) - {"overhead", "inject"} == set(expected) - {"inject"}
        for name, time_s in expected.items():
            if name in rows:
                assert same(rows[name].locator(".num").last.inner_text(), seconds(time_s)), name
        read = next(phase for phase in phases if phase["name"] == "prefill")
        end = _bar(rows["transfer, hidden"])[1]
        assert end == pytest.approx((read["start_s"] + read["seconds"]) / record["total_time"], abs=0.01)
        begin, end = _bar(rows["exposed transfer"])
        assert end - begin == pytest.approx(max(0.003, transfer["exposed_s"] / record["total_time"]), abs=0.005)
        fact = f"{seconds(transfer['hidden_s'])} / {seconds(transfer['exposed_s'])}"
        shown = dialog.locator(".facts div", has_text="Transfer hidden / exposed").locator("dd").inner_text()
        assert same(shown, fact)


def _partly_hidden(site: Site) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A request, its record and its transfer. On a machine that is busy with other tests nothing may be hidden once."""
    for number in range(TRIES):
        id = ask(site.url, f"{number} is handed over " * 500, **{"X-Disagg-Route": "handover"})
        found = httpx.get(f"{site.url}/cluster/requests/{id}", timeout=30).json()
        if min(found["transfer"]["hidden_s"], found["transfer"]["exposed_s"]) > 0:
            break
    return id, found["request"], found["transfer"]


def _bar(row: "Locator") -> tuple[float, float]:
    """Where it begins and ends, as shares of the request's time."""
    begin, width = (float(row.locator("rect").get_attribute(name) or 0) / 100 for name in ("x", "width"))
    return begin, begin + width


def test_a_link_has_its_measured_rate_beside_its_line_rate(site: Site) -> None:
    ask(site.url, "measures the link " * 500, **{"X-Disagg-Route": "handover"})
    with opened(site, "/dashboard#cluster") as watched:
        page = watched.page
        page.locator(".links tbody td[data-word=measured]", has_text="/s").wait_for()

        def is_shown() -> bool:
            """The newest figures, and nothing moves any more."""
            (link,) = site.cluster()["links"]
            line_rate = LINE_RATE_GBPS * 1e9 / 8
            assert link["line_rate_bytes_s"] == line_rate
            expected = ["quiet", NONE, size_per_second(link["bytes_per_s"])]
            expected += [f"{size_per_second(line_rate)}, of the simulated machines", size(link["payload_bytes"])]
            return all(map(same, page.locator(".links tbody td").all_inner_texts(), expected))

        assert until(is_shown, SOON_MS / 1000)
        measured = page.locator(".links td[data-word=measured]").inner_text()
        page.get_by_role("link", name="Overview").click()
        listed = page.get_by_role("list", name="Links").get_by_role("listitem").inner_text()
        assert listed.split() == [site.nodes[0].name, "\u2192", site.nodes[1].name, "measured", *measured.split()]


def test_a_request_in_its_slot_does_not_wait(site: Site) -> None:
    body = {"model": MODEL, "prompt": "a long answer", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with opened(site, "/dashboard#cluster") as watched:
        box = watched.page.locator(f".box[data-node='{site.nodes[1].name}'] .meter", has_text="Slots")
        box.filter(has_text="0 of 256, 0 waiting").wait_for()
        memory = watched.page.locator(f".box[data-node='{site.nodes[1].name}'] .meter", has_text="KV memory")
        quiet = memory.inner_text()
        with httpx.stream("POST", f"{site.url}/v1/completions", json=body, timeout=60):
            box.filter(has_text="1 of 256, 0 waiting").wait_for()
            kv = next(node["kv"] for node in site.cluster()["nodes"] if node["name"] == site.nodes[1].name)
            assert kv["total_reserved_bytes"] > 0
            held = f"{size(kv['total_reserved_bytes'])} of {size(kv['total_limit_bytes'])}"
            assert until(lambda: same(memory.locator(".num").inner_text(), held)), (memory.inner_text(), held)
            width = float(memory.locator("rect.fill").get_attribute("width") or 0)
            assert width == pytest.approx(100 * kv["total_reserved_bytes"] / kv["total_limit_bytes"], rel=0.02)
        box.filter(has_text="0 of 256, 0 waiting").wait_for()
        assert until(lambda: memory.inner_text() == quiet), "its memory is free again"


def _hand_over(url: str, seen: Event) -> None:
    """One prompt after the other: the page draws every 2 s at most, and may miss one."""
    number = 0
    while not seen.is_set():
        ask(url, f"{number} is a prompt to hand over " * 300, **{"X-Disagg-Route": "handover"})
        number += 1


def test_kv_is_seen_to_flow(site: Site) -> None:
    seen = Event()
    with opened(site) as watched, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(_hand_over, site.url, seen)
        try:
            text = watched.page.locator(".tag.flowing").inner_text()
        finally:
            seen.set()
        asked.result()
        assert re.fullmatch(r"KV [\d.]+ [kM]?B/s", text), text
        watched.page.locator(".wire.flowing").wait_for(state="detached")


RED_S, TRIES = 5.0, 3  # a machine that is busy with other tests may be late once


def test_what_makes_a_node_red_takes_less_than_five_seconds() -> None:
    """By its own clocks, whatever this machine does meanwhile: a poll of the node, a look at the cluster, a batch of
    events. The page draws a node's new state at once."""
    gateway, policies = GatewayTimeouts(), Policies()
    slowest_s = policies.poll_s + policies.health_timeout_s + gateway.event_poll_s + gateway.event_batch_s
    assert slowest_s <= RED_S - 1.0


def test_a_killed_node_turns_red_and_green_again(site: Site) -> None:
    node = site.nodes[1]
    with opened(site) as watched:
        red_s = [_red_and_green_again(watched, node)]
        while min(red_s) > RED_S and len(red_s) < TRIES:
            red_s.append(_red_and_green_again(watched, node))
        print(f"red after {', '.join(f'{each:.1f} s' for each in red_s)}")
        assert min(red_s) <= RED_S


def _red_and_green_again(watched: WatchedPage, node: Process) -> float:
    """Returns how long it took to turn red."""
    page = watched.page
    row = page.locator(f".nodes tr[data-node='{node.name}']")
    page.locator(f".nodes tr[data-node='{node.name}'][data-kind='ok']").wait_for()
    node.kill()
    killed_at = time.monotonic()
    try:
        page.locator(f".nodes tr[data-node='{node.name}'][data-kind='bad']").wait_for()
        red_s = time.monotonic() - killed_at
        assert "unreachable" in row.inner_text()
        assert "✕" in row.inner_text()  # not by colour alone
        assert "decode down" in page.locator("#verdict").inner_text()
        picture = page.locator(f".box[data-node='{node.name}']")
        assert picture.get_attribute("data-kind") == "bad"
    finally:
        node.start()
        node.ready()
    page.locator(f".nodes tr[data-node='{node.name}'][data-kind='ok']").wait_for()
    return red_s


def test_the_page_reconnects_after_a_silence_and_a_restart_of_the_gateway(site: Site) -> None:
    port, failing = site.url.rpartition(":")[2], ("/cluster", "/cluster/events")
    with opened_page(site.browser, "about:blank", wait="", may_fail=failing) as watched:
        page = watched.page
        page.clock.install()
        page.goto(f"{site.url}/dashboard")
        page.locator("header .connection", has_text="Live").wait_for()
        site.gateway.send_signal(signal.SIGSTOP)
        page.clock.fast_forward(20_000)
        page.locator("[role=alert]", has_text="Reconnecting: the gateway does not answer").wait_for()
        site.gateway.send_signal(signal.SIGCONT)
        page.locator("header .connection", has_text="Live").wait_for()
        config = json.loads(site.gateway.config.read_text())
        site.gateway.end()
        page.locator("[role=alert]", has_text="Reconnecting").wait_for()
        assert page.locator(".nodes tbody tr").count() == 2  # the last known figures stay
        assert page.locator("#verdict.idle").inner_text() == "last known: all up"
        site.gateway = GatewayProcess(site.gateway.config.parent, config, "--port", port).ready()
        page.locator("header .connection", has_text="Live").wait_for()
        assert page.locator("[role=alert]", has_text="Reconnecting").count() == 0
        last = site.cluster()["history"][0]["number"]
        id = ask(site.url, "after the restart")
        page.locator(f"tr[data-request='{id}'] button", has_text=f"#{last + 1}").wait_for()


def test_text_from_outside_is_never_html(site: Site) -> None:
    config = simulated_config(*site.nodes)
    for servers in ("prefill_servers", "decode_servers"):
        for number, server in enumerate(config[servers]):
            server |= {"name": f"{EVIL}{servers}{number}", "model": EVIL}
    config |= {"models": {EVIL: {}}}
    with served(config) as url, opened(site, url=url) as watched:
        page = watched.page
        page.on("dialog", lambda dialog: watched.errors.append("a dialog opened: " + dialog.message))
        answer = httpx.post(f"{url}/v1/completions", json={"model": EVIL, "prompt": EVIL, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        page.locator("tr[data-request] button").first.click()
        assert EVIL in page.locator("dialog[open] h2").inner_text()
        assert EVIL in page.locator(".nodes").inner_text()
        assert page.locator("img").count() == 0


def test_a_gateway_with_keys_asks_for_one(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = new_key("root", file, **KeyLimits(operator=True))
    limited, plain = new_key("ann", file, (MODEL,)), new_key("bob", file)
    with (
        gateway_process(tmp_path, simulated_config(*site.nodes), "--keys", str(file)) as gateway,
        opened(site, url=gateway.url, wait="", may_fail=("/cluster",)) as watched,
    ):
        page = watched.page
        page.get_by_label("API key").fill("sk-wrong")
        page.keyboard.press("Enter")
        page.locator("[role=alert]", has_text="does not know this key").wait_for()
        assert page.get_by_role("button", name="Log out").count() == 0, "there is no login"
        assert page.evaluate("sessionStorage.length") == 0, "a wrong key is not kept"
        page.get_by_label("API key").fill(limited)
        page.keyboard.press("Enter")
        page.locator("[role=alert]", has_text="limited to simulated:tiny").wait_for()
        page.get_by_role("button", name="Use another key").click()
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        page.locator("header .connection", has_text="Live").wait_for()
        assert "No request yet. The playground sends a prompt" in page.locator(".empty").first.inner_text()
        headers = {"Authorization": f"Bearer {limited}", "X-Disagg-Route": "local"}
        refused = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x"}, headers=headers, timeout=30)
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            403,
            "x-disagg-route is for operators: leave it out, or send a key with `operator`",
        )
        assert key not in page.content()
        assert key not in page.url
        assert page.context.cookies() == []
        page.reload()
        page.locator("header .connection", has_text="Live").wait_for()
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("API key").fill(plain)
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Playground", exact=True).click()
        page.get_by_text("needs an operator's key").wait_for()
        assert "its own requests" in page.locator("#own").inner_text()
        assert page.get_by_label("Compare").count() == 0, "it would be refused"
        page.get_by_role("button", name="Send").click()
        page.locator("[data-run=auto][data-state=done]").wait_for()


def test_a_gateway_that_does_not_answer_is_shown_as_such(site: Site) -> None:
    with opened(site, wait="", may_fail=("/cluster",)) as watched:
        page = watched.page
        page.route("**/cluster", lambda route: route.abort())
        page.reload()
        page.get_by_role("heading", name="The gateway cannot be reached").wait_for()
        page.unroute("**/cluster")
        page.locator("header .connection", has_text="Live").wait_for()
