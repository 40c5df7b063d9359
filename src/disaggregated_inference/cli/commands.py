"""`disagg generate`, `chat`, `status`, `history`: all of them against a cluster file."""

from pathlib import Path
from typing import Annotated

import typer

talk_app = typer.Typer()

Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        envvar="DISAGG_CONFIG",
        metavar="PATH",
        help="The cluster file. Default: ./cluster.json, ./cluster.toml.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="A model of the cluster. May be left out if there is one."),
]
MaxTokens = Annotated[int | None, typer.Option(min=1, metavar="N", help="Longest answer. Default: 2000.")]
Temperature = Annotated[float | None, typer.Option(min=0, metavar="T", help="0: no chance involved. Default: 0.2.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")]
System = Annotated[str, typer.Option(metavar="TEXT", help="What the model is told before all else.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, metavar="SECONDS", help="For the whole answer.")]
Metrics = Annotated[bool, typer.Option("--metrics", help="Then say on standard error who did what, how fast.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@talk_app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt. `-`, or nothing: standard input.")] = None,
    config: Config = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    stop: Stop = None,
    system: System = "",
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON schema that the answer will follow.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="The prompt as it is, or as a message in the model's chat template.")
    ] = False,
    timeout: Timeout = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it is written, or all at once.")] = True,
    metrics: Metrics = False,
    as_json: AsJson = False,
) -> None:
    """Ask the cluster one thing; the answer goes to standard output."""
    from disaggregated_inference.cli import generate as once
    from disaggregated_inference.cli.options import AnswerOptions, format_in

    shape = format_in(json_schema) if json_schema else None
    rules = AnswerOptions(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop=stop or None,
        timeout=timeout,
        format=shape,
    )
    asked = once.asked(prompt, system, raw)
    once.run(config, rules.options | asked, stream=stream, as_json=as_json, metrics=metrics)


@talk_app.command()
def chat(
    config: Config = None,
    model: Model = None,
    system: System = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Timeout = None,
    metrics: Metrics = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per turn.")] = False,
) -> None:
    """Talk to a model. /help says what else can be typed; Ctrl-C stops an answer, Ctrl-D leaves."""
    from disaggregated_inference.cli import chat
    from disaggregated_inference.cli.options import AnswerOptions

    rules = AnswerOptions(
        model=model, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop or None, timeout=timeout
    )
    all_went_well = chat.run(config, rules, system, metrics=metrics, as_json=as_json)
    raise typer.Exit(0 if all_went_well else 1)


@talk_app.command()
def status(
    config: Config = None,
    watch: Annotated[
        float | None, typer.Option(min=0.1, metavar="SECONDS", help="Ask again and again, until Ctrl-C.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask every node how it is. The exit code is 0 if all are up."""
    from disaggregated_inference.cli import status as board

    raise typer.Exit(0 if board.run(config, watch, as_json) else 1)


@talk_app.command()
def history(
    config: Config = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, metavar="N", help="How many, the newest first.")] = 10,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="NAME", help="Only of this model.")] = None,
    as_json: AsJson = False,
) -> None:
    """The last requests, where policies.history_file keeps them."""
    from disaggregated_inference.cli import history as past

    past.run(config, count, model, as_json)
