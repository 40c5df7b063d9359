"""`bench`: a table of `grader.bench`."""

import json
from typing import Any

from rich.console import Console

from grader.bench import BenchRow, BenchSettings, measure
from grader.cli.show import console, table


def run_bench(settings: BenchSettings, as_json: bool) -> None:
    out = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    simulated = settings.simulated
    what = f"simulated {simulated}, two pairs" if simulated else "the embedded model on this machine, one pair"
    limits = f"{settings.notebooks} notebooks per row, answers of at most {settings.answer_tokens} tokens"
    out.print(f"{what}; {limits}; starting the nodes ...")
    rows = measure(settings, lambda name: out.print(f"measuring: {name}"))
    if as_json:
        print(json.dumps({"where": what, "rows": [_as_data(row) for row in rows]}))
        return
    _show(rows, simulated)


def _show(rows: list[BenchRow], simulated: str) -> None:
    made = table("models", "per minute", "ratio", "prefix hits", "KV each", "prompt tokens", "s each")
    for row in rows:
        figures = row.figures
        made.add_row(
            row.name,
            f"{row.per_minute:.2f}",
            f"{row.per_minute / rows[0].per_minute:.2f}x",
            f"{figures.hit_rate or 0:.0%}",
            f"{(figures.kv_bytes_per_notebook or 0) / 1e6:.1f} MB",
            f"{figures.prompt_tokens / figures.answers:.0f}",
            f"{figures.wall_s / figures.notebooks:.1f}",
        )
    out = console()
    out.print(made)
    out.print("per minute: notebooks. prefix hits: prompt tokens from the prefix cache. each: a notebook, both models.")
    if simulated:
        out.print("SIMULATED: published speeds, no inference; its tokenizer has a token for each byte of a prompt")


def _as_data(row: BenchRow) -> dict[str, Any]:
    figures = row.figures
    return {
        "name": row.name,
        "notebooks_per_minute": row.per_minute,
        "seconds": row.seconds,
        "hit_rate": figures.hit_rate,
        "kv_bytes_per_notebook": figures.kv_bytes_per_notebook,
        "prompt_tokens": figures.prompt_tokens,
        "cached_tokens": figures.cached_tokens,
        "completion_tokens": figures.completion_tokens,
        "unusable_answers": figures.unusable_answers,
    }
