"""What `disagg top` follows, from a real gateway: targets and alarms, which the gateway may be unable to tell."""

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from disaggregated_inference.cli.top_feed import TopFeed, TopState
from disaggregated_inference.cli.top_screen import render
from disaggregated_inference.timeouts import TopTimeouts
from tests.support.cluster import free_port
from tests.support.gateway import served
from tests.support.waiting import until_async


def notes(state: TopState) -> str:
    """The lines below the title."""
    with open(os.devnull, "w") as nowhere:
        console = Console(width=100, height=24, file=nowhere, record=True, highlight=False, markup=False)
        console.print(render(state, 100, 24))
        return "\n".join(console.export_text().splitlines()[1:4])


def rename(file: Path, before: str, after: str) -> None:
    with closing(sqlite3.connect(file, timeout=20)) as database:
        database.execute(f"ALTER TABLE {before} RENAME TO {after}")


def test_targets_that_cannot_be_had_are_told_and_asked_for_again(tmp_path: Path) -> None:
    """All else goes on: the events do not need the history."""
    file = tmp_path / "h.db"
    away: Any = {"decode_servers": [{"host": "127.0.0.1", "port": free_port(), "model": "away"}]}

    async def follow(url: str) -> None:
        drawn: list[str] = []
        state = TopState(url)
        feed = TopFeed(state, "", lambda: drawn.append(state.targets_trouble), TopTimeouts(targets_s=0.02))

        async def told(trouble: str) -> bool:
            return drawn[-1:] == [trouble]

        following = asyncio.create_task(feed.follow())
        try:
            assert await until_async(lambda: told("HTTP 503"))
            assert "targets and alarms are not known: HTTP 503" in notes(state), "from the start"
            rename(file, "elsewhere", "requests")
            assert await until_async(lambda: told("")), "it asks again"
            assert len(state.targets) == 9
            assert "targets and alarms" not in notes(state)
            rename(file, "requests", "elsewhere")
            assert await until_async(lambda: told("HTTP 503"))
            assert "targets and alarms are those of before: HTTP 503" in notes(state)
            assert (state.trouble, len(state.targets)) == ("", 9), "the rest is live"
            rename(file, "elsewhere", "requests")
            assert await until_async(lambda: told(""))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    with served(away | {"policies": {"history_file": str(file)}}) as url:
        rename(file, "requests", "elsewhere")
        asyncio.run(follow(url))
