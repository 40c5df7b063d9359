"""A small load: two requests at once, six in all, by the command."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from common import MODEL, URL, report, run_command


def load(request_format: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmarks.json"
        arguments = ["--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={request_format}"]
        arguments += ["--tokenizer", f"kind=hf_auto,model={os.environ['MODEL_FOLDER']}"]
        arguments += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
        arguments += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
        arguments += ["--output", f"kind=json,path={path}", "--disable-console-interactive"]
        run_command("guidellm", "run", *arguments, cwd=folder)
        metrics: dict[str, Any] = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["total"]) == (6, 6), totals
    return metrics


def streaming() -> str:
    metrics = load("/v1/chat/completions")
    tokens = metrics["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (8, 8), tokens
    return "load: 6 requests, 2 at once, none failed"


report("guidellm", streaming=streaming)
