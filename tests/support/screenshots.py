"""Screenshots of the dashboard over simulated clusters: `make screenshots`, or `python -m tests.support.screenshots`.

All go into a folder to be looked at; `--readme` writes docs/images/dashboard.png alone. The nodes are simulated, with
published speeds; the requests, the transfers and the page are real.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from disaggregated_inference.engines.simulated import parse_profile
from disaggregated_inference.gateway.key_file import new_key
from tests.support.browser import browser
from tests.support.cluster import Process, config_of
from tests.support.gateway import GatewayProcess, gateway_process

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
QWEN, GPT_OSS, TINY = "simulated:qwen3-30b-a3b", "simulated:gpt-oss-120b", "simulated:tiny"
LONG = "an-organisation-with-a-long-name/a-model-with-a-very-long-name-that-does-not-fit-8bit-dwq-2026-11"
VIEWS = ("overview", "cluster", "requests", "time", "targets", "energy", "playground", "clients")
SIZES = {1440: 900, 1024: 768, 390: 844}
LOOKS = tuple(product(SIZES, ("light", "dark")))
WAIT_MS = 60_000

Load = Callable[[str], None]


class Scene(NamedTuple):
    """`nodes`: name, role, model, profile."""

    name: str
    nodes: tuple[tuple[str, str, str, str], ...]
    load: Load
    views: tuple[str, ...] = ("overview", "cluster")
    down: bool = False


def _send(
    url: str, model: str, prompt_tokens: int, tokens: int, count: int, at_once: int = 2, headers: Any = None
) -> None:
    """Prompts that differ; every second one is that before it again."""

    def one(number: int) -> None:
        text = f"{number // 2} " + "why is the sky blue? " * (prompt_tokens // 21)  # one token for each letter
        body = {"model": model, "prompt": text, "max_tokens": tokens, "ignore_eos": True}
        answer = client.post(f"{url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text

    with httpx.Client(timeout=120) as client, ThreadPoolExecutor(at_once) as threads:
        list(threads.map(one, range(count)))


def _busy(url: str) -> None:
    _send(url, QWEN, 1500, 60, 8)
    _send(url, GPT_OSS, 800, 60, 6)


def _many(url: str) -> None:
    _send(url, TINY, 60, 6, 2000, 16)


def _few(url: str) -> None:
    for model in httpx.get(f"{url}/cluster", timeout=30).json()["models"]:
        _send(url, model, 100, 10, 6)


def _none(url: str) -> None:
    """An empty history."""


_FOUR = (
    ("DGX Spark 1", "prefill", QWEN, "dgx-spark"),
    ("DGX Spark 2", "prefill", GPT_OSS, "dgx-spark"),
    ("Mac Studio 1", "decode", GPT_OSS, "m3-ultra"),
    ("Mac Studio 2", "decode", QWEN, "m3-ultra"),
)
_ROLES = ("prefill", "decode")
_SIXTEEN = tuple((f"{role}-{number:02}", role, TINY, "instant") for role in _ROLES for number in range(8))
_PAIR = (("p1", "prefill", TINY, "instant"), ("d1", "decode", TINY, "instant"))
_LONG = tuple((f"{role}-node-of-{LONG}", role, TINY, "instant") for role in _ROLES)

SCENES = (
    Scene("four", _FOUR, _busy, VIEWS),
    Scene("sixteen", _SIXTEEN, _few),
    Scene("history", _PAIR, _many, ("overview", "requests", "time")),
    Scene("long-names", _LONG, _few, ("overview", "cluster", "requests")),
    Scene("empty", _PAIR, _none, VIEWS),
    Scene("down", _FOUR, _none, ("overview", "cluster"), down=True),
)


@contextmanager
def _serving(scene: Scene) -> Iterator[tuple[GatewayProcess, list[Process]]]:
    memory = ("--kv-memory", "1G" if scene.name == "four" else "128M")
    nodes = [
        Process(name, role, "simulated", model, "--profile", profile, *memory)
        for name, role, model, profile in scene.nodes
    ]
    folder = Path(tempfile.mkdtemp())
    try:
        for node in nodes:
            node.ready()
        with gateway_process(folder, _config(scene, nodes)) as gateway:
            yield gateway, nodes
    finally:
        for node in nodes:
            if node.alive:
                node.kill()
            node.log.close()
        shutil.rmtree(folder)


def _config(scene: Scene, nodes: list[Process]) -> dict[str, Any]:
    local = "auto" if scene.name == "four" else "never"
    config = config_of(*nodes, local=local, electricity_price_per_kwh=0.3)
    if scene.name == "long-names":
        for server in [*config["prefill_servers"], *config["decode_servers"]]:
            server["model"] = LONG
        return config | {"models": {LONG: {"aliases": [TINY]}}}
    if scene.name == "four":
        profiles = {name: profile for name, _, _, profile in scene.nodes}
        for server in [*config["prefill_servers"], *config["decode_servers"]]:
            profile = parse_profile(profiles[server["name"]], server["model"].partition(":")[2])
            server |= {"power_w": profile.power_w, "price_per_hour": 0.1}
        pairs = (("DGX Spark 1", "Mac Studio 2"), ("DGX Spark 2", "Mac Studio 1"))
        config["links"] = [{"prefill": prefill, "decode": decode, "gbps": 10} for prefill, decode in pairs]
    return config


def _open(found: "Browser", url: str, width: int, scheme: Any, state: str = "Live") -> "Page":
    page = found.new_page(viewport={"width": width, "height": SIZES[width]}, color_scheme=scheme)
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    page.locator("header .connection", has_text=state).wait_for()
    return page


def _shoot(page: "Page", path: Path, whole: bool = True) -> None:
    """`whole`: with what one has to scroll to."""
    page.locator("main .notice[role=status]").wait_for(state="detached")
    page.wait_for_timeout(500)  # canvas charts, and events that were on their way
    page.screenshot(path=path, full_page=whole)
    print(path)


def _views(found: "Browser", scene: Scene, url: str, folder: Path) -> None:
    for width, scheme in LOOKS:
        for view in scene.views:
            page = _open(found, f"{url}/dashboard#{view}", width, scheme)
            _shoot(page, folder / f"{scene.name}-{view}-{width}-{scheme}.png")
            page.close()


def _actions(found: "Browser", url: str, folder: Path) -> None:
    """The waterfall, and the playground with its two answers."""
    for width, scheme in LOOKS:
        page = _open(found, f"{url}/dashboard", width, scheme)
        page.locator(".requests button").first.click()
        _shoot(page, folder / f"waterfall-{width}-{scheme}.png", whole=False)
        page.close()
        page = _open(found, f"{url}/dashboard#playground", width, scheme)
        page.get_by_role("button", name="Use a long sample").click()
        page.get_by_role("button", name="Send").click()
        page.locator("#play-verdict").wait_for()
        _shoot(page, folder / f"playground-{width}-{scheme}.png")
        page.close()


def _restart(found: "Browser", gateway: GatewayProcess, folder: Path) -> None:
    """Pages that are open when the gateway ends."""
    looks = {look: _open(found, f"{gateway.url}/dashboard", *look) for look in LOOKS}
    gateway.process.kill()
    for (width, scheme), page in looks.items():
        page.locator("[role=alert]", has_text="Reconnecting").wait_for()
        _shoot(page, folder / f"reconnecting-{width}-{scheme}.png")
        page.close()


def _locked(found: "Browser", scene: Scene, nodes: list[Process], folder: Path) -> None:
    """A gateway with keys: without one, with a wrong one, with one that is limited to a model."""
    home = Path(tempfile.mkdtemp())
    key = new_key("ann", home / "keys.json", (TINY,))
    try:
        with gateway_process(home, _config(scene, nodes), "--keys", str(home / "keys.json")) as gateway:
            for width, scheme in LOOKS:
                page = _open(found, f"{gateway.url}/dashboard", width, scheme, state="Key needed")
                states = (("unauthorised", "", ""), ("wrong-key", "sk-wrong", "know"), ("forbidden", key, "limited"))
                for name, given, says in states:
                    if given:
                        page.get_by_label("API key").fill(given)
                        page.keyboard.press("Enter")
                        page.locator("main [role=alert]", has_text=says).wait_for()
                    _shoot(page, folder / f"{name}-{width}-{scheme}.png")
                page.close()
    finally:
        shutil.rmtree(home)


def _readme(found: "Browser", url: str) -> None:
    """While KV moves."""
    page = _open(found, f"{url}/dashboard", 1440, "light")
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(_send, url, QWEN, 6000, 30, 6, 1, {"X-Disagg-Route": "handover"})
        page.locator(".wire.flowing").first.wait_for(state="attached")
        page.screenshot(path=ROOT / "docs" / "images" / "dashboard.png", full_page=True)
        sending.result()
    page.close()


def run(folder: Path, names: list[str], readme: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with browser() as found:
        for scene in SCENES:
            if names and scene.name not in names:
                continue
            with _serving(scene) as (gateway, nodes):
                scene.load(gateway.url)
                if scene.down:
                    for node in nodes:
                        node.kill()
                if readme:
                    return _readme(found, gateway.url)
                _views(found, scene, gateway.url, folder)
                if scene.name == "four":
                    _actions(found, gateway.url, folder)
                    _restart(found, gateway, folder)
                if scene.name == "empty":
                    _locked(found, scene, nodes, folder)
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "screenshots")
    parser.add_argument("--readme", action="store_true", help="only docs/images/dashboard.png")
    parser.add_argument("scenes", nargs="*", help=f"some of {', '.join(scene.name for scene in SCENES)}; default: all")
    given = parser.parse_args()
    run(given.folder, given.scenes, given.readme)
