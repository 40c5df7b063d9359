"""The command, on three questions of our own (datasets of the hub cannot be had everywhere)."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import MODEL, URL, report, run_command
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS = Path(__file__).parent / "tasks"
CHOICE, GENERATION = "capitals_choice", "capitals_generation"
Results = tuple[dict[str, Any], list[dict[str, Any]]]


def evaluate(model: str, path: str, *tasks: str, options: tuple[str, ...] = ()) -> dict[str, Results]:
    """The results of each task, and what was computed for each question."""
    with tempfile.TemporaryDirectory() as folder:
        settings = f"model={MODEL},base_url={URL}{path},tokenizer={FOLDER},max_retries=1"
        options += ("--model_args", f"{settings},tokenizer_backend=huggingface", "--include_path", str(TASKS))
        options += ("--model", model, "--tasks", ",".join(tasks), "--output_path", folder, "--log_samples")
        run_command("lm_eval", "run", *options)
        results = json.loads(next(Path(folder).rglob("results_*.json")).read_text())["results"]
        return {task: (results[task], _samples(folder, task)) for task in tasks}


def _samples(folder: str, task: str) -> list[dict[str, Any]]:
    path = next(Path(folder).rglob(f"samples_{task}_*.jsonl"))
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat() -> str:
    """The generation task by chat, then both tasks by completions."""
    by_chat = evaluate("local-chat-completions", "/v1/chat/completions", GENERATION, options=("--apply_chat_template",))
    by_completions = evaluate("local-completions", "/v1/completions", CHOICE, GENERATION)
    for found in (by_chat, by_completions):
        texts = [sample["resps"][0][0] for sample in found[GENERATION][1]]
        assert len(texts) == 3, texts
        assert all(text.strip() for text in texts), texts
    results, samples = by_completions[CHOICE]
    for sample in samples:
        _check_choices(sample)
    scored = f"multiple choice by completions (acc {results['acc,none']:.2f}, log probabilities as by transformers)"
    return f"generation by chat and completions; {scored}"


def _check_choices(sample: dict[str, Any]) -> None:
    """The log probability of every choice, from `echo` with `logprobs`."""
    wanted = [reference(*arguments.values()) for arguments in sample["arguments"].values()]
    scores = [float(response[0][0]) for response in sample["resps"]]
    assert len(scores) == 3, scores
    assert all(abs(score - right) < 0.01 for score, right in zip(scores, wanted, strict=True)), (scores, wanted)


def reference(context: str, continuation: str) -> float:
    """The log probability of the continuation by transformers on the same files."""
    before, whole = (TOKENIZER(text).input_ids for text in (context, context + continuation))
    with torch.no_grad():
        logprobs = REFERENCE(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(logprobs[place - 1, whole[place]]) for place in range(len(before), len(whole)))


FOLDER = os.environ["MODEL_FOLDER"]
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
REFERENCE = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
report("lm_eval", chat=chat)
