"""The dashboard's files: headers, licences, colours."""

import asyncio
import gzip
import hashlib
import re
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from disaggregated_inference.cluster import load_config
from disaggregated_inference.gateway import dashboard
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.key_file import keys_of
from disaggregated_inference.orchestrator import DisaggregatedInference

AWAY: Any = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": "away"}]}
ROOT = Path(__file__).parents[2]
STATIC = Path(dashboard.__file__).parent / "static"
OWN = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html") and "vendor" not in path.parts]
VENDORED = {
    "preact.mjs": "225d7a773766e6fb2cfcc45274fe41d2059f5782f3f2c4569aa5132a2d3a2902",
    "htm.mjs": "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def fetched(path: str, keys: Keys | None = None) -> httpx.Response:
    async def fetch() -> httpx.Response:
        async with DisaggregatedInference(load_config(AWAY)) as core:
            transport = httpx.ASGITransport(gateway_app(core, keys or Keys()))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                return await client.get(path)

    return asyncio.run(fetch())


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/static/app.js", "/dashboard/static/style.css"])
def test_files_need_no_key_and_have_a_strict_policy(path: str) -> None:
    keys = Keys(keys_of([{"name": "ann", "key_hash": hashlib.sha256(b"ann's").hexdigest()}], "keys"))
    answer = fetched(path, keys)
    assert answer.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert fetched("/cluster", keys).status_code == 401


def test_a_slash_at_the_end_leads_to_the_page() -> None:
    answer = fetched("/dashboard/")
    assert (answer.status_code, answer.headers["location"]) == (308, "../dashboard")


def test_unknown_files_are_errors_of_the_gateway() -> None:
    for path in ("/dashboard/static/missing.js", "/dashboard/static/../../app.py", "/dashboard/elsewhere"):
        answer = fetched(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_route")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for path in OWN:
        text = path.read_text()
        assert not re.findall(r"(?:src|href)=\"(?:https?:)?//|@import|url\(", text), path.name
        assert "innerHTML" not in text, path.name
    assert not re.search(r"<script>|style=|onclick=", (STATIC / "index.html").read_text())


def test_libraries_are_the_published_ones_with_their_licences() -> None:
    about = (STATIC / "vendor" / "README.md").read_text()
    for name, digest in VENDORED.items():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest, name
        assert f"`{name}`" in about
    assert sum(len(gzip.compress((STATIC / "vendor" / name).read_bytes())) for name in VENDORED) < 30_000, "30 kB"
    for name in ("preact", "htm", "uplot"):
        assert (STATIC / "vendor" / f"{name}-LICENSE.txt").read_text().strip()


def test_every_file_is_in_the_wheel() -> None:
    """What hatchling would pack, by pyproject.toml and .gitignore."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    packed = {each.distribution_path for each in builder.WheelBuilder(str(ROOT)).recurse_included_files()}
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert len(files) > len(OWN) > 20
    assert {path.relative_to(ROOT / "src").as_posix() for path in files} <= packed


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


PALETTE = dict(re.findall(r"--(\w+): light-dark\((#\w{6}, #\w{6})\)", (STATIC / "style.css").read_text()))
TEXT = ("ink", "muted", "prefill", "decode", "transfer", "ok", "warn", "bad")


@pytest.mark.parametrize(("name", "ground", "theme"), [*product(TEXT, ("ground", "surface"), (0, 1))])
def test_text_has_contrast(name: str, ground: str, theme: int) -> None:
    """WCAG AA: 4.5 for text."""
    pair = [PALETTE[each].split(", ")[theme] for each in (name, ground)]
    assert _contrast(*pair) >= 4.5, pair


@pytest.mark.parametrize(("ground", "theme"), [*product(("ground", "surface"), (0, 1))])
def test_bars_and_borders_of_inputs_have_contrast(ground: str, theme: int) -> None:
    """WCAG AA: 3 for parts of the interface."""
    pair = [PALETTE[each].split(", ")[theme] for each in ("other", ground)]
    assert _contrast(*pair) >= 3, pair
