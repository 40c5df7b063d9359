"""`disagg generate`, `chat`, `status` and `history`. Each command reads a cluster file."""

from pathlib import Path
from typing import Annotated

import typer

from disaggregated_inference.cli.arguments import AsJson, ClusterTokenFile, Config
from disaggregated_inference.defaults import MAX_REQUEST_S, MAX_TEMPERATURE, MAX_TOKENS, TEMPERATURE

cluster_app = typer.Typer()

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Model of the cluster. Not needed if there is only one."),
]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help=f"Maximum number of completion tokens. Default: {MAX_TOKENS}.")
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        min=0, max=MAX_TEMPERATURE, metavar="T", help=f"Sampling temperature; 0 is greedy. Default: {TEMPERATURE}."
    ),
]
SeedOption = Annotated[
    int | None, typer.Option(metavar="N", help="Sampling seed: the same seed gives the same completion.")
]
StopOption = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; repeatable.")]
System = Annotated[str, typer.Option(metavar="TEXT", help="System message.")]
Timeout = Annotated[
    float | None,
    typer.Option(min=0.001, max=MAX_REQUEST_S, metavar="SECONDS", help="Time limit for the whole request."),
]
Metrics = Annotated[bool, typer.Option("--metrics", help="Print nodes, times and speeds to standard error.")]


@cluster_app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt. `-` or no argument: read standard input.")] = None,
    config: Config = None,
    model: Model = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    system: System = "",
    json_schema: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON schema for structured output.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="Send the prompt unchanged, or as a user message in the chat template.")
    ] = False,
    timeout: Timeout = None,
    token_file: ClusterTokenFile = "",
    stream: Annotated[bool, typer.Option(help="Print the text while it is generated, or all at once.")] = True,
    metrics: Metrics = False,
    as_json: AsJson = False,
) -> None:
    """Send one prompt to the cluster and print the completion to standard output."""
    from disaggregated_inference.cli import generate
    from disaggregated_inference.cli.options import CommandOptions, read_schema

    options = CommandOptions(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop=stop or None,
        timeout=timeout,
        format=read_schema(json_schema) if json_schema else None,
    )
    request = options.as_dict() | generate.prompt_arguments(prompt, system, raw)
    generate.run(config, token_file, request, stream=stream, as_json=as_json, metrics=metrics)


@cluster_app.command()
def chat(
    config: Config = None,
    model: Model = None,
    system: System = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    timeout: Timeout = None,
    token_file: ClusterTokenFile = "",
    metrics: Metrics = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per message.")] = False,
) -> None:
    """Chat with a model. /help lists the commands; Ctrl-C stops a completion, Ctrl-D exits."""
    from disaggregated_inference.cli import chat
    from disaggregated_inference.cli.options import CommandOptions

    options = CommandOptions(
        model=model, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop or None, timeout=timeout
    )
    succeeded = chat.run(config, token_file, options, system, metrics=metrics, as_json=as_json)
    raise typer.Exit(0 if succeeded else 1)


@cluster_app.command()
def status(
    config: Config = None,
    watch: Annotated[
        float | None, typer.Option(min=0.1, metavar="SECONDS", help="Refresh at this interval until Ctrl-C.")
    ] = None,
    token_file: ClusterTokenFile = "",
    as_json: AsJson = False,
) -> None:
    """Show the state of every node. The exit code is 0 if all nodes are up."""
    from disaggregated_inference.cli import status

    raise typer.Exit(0 if status.run(config, token_file, watch, as_json) else 1)


@cluster_app.command()
def history(
    config: Config = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            "-n",
            min=1,
            metavar="N",
            help="Number of requests, newest first. Default: 10; all with --since, --until or --csv.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Show only requests for this model.")
    ] = None,
    node: Annotated[str | None, typer.Option(metavar="NAME", help="Show only requests of this node.")] = None,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only requests since then: 15m, 24h, 7d ago, or 2026-11-17T08:30.")
    ] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Only requests before then.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, oldest first, with times in UTC.")] = False,
    as_json: AsJson = False,
) -> None:
    """List or export finished requests. Needs policies.history_file in the cluster file."""
    from disaggregated_inference.cli import history

    options = history.HistoryOptions(
        config=config,
        count=count,
        model=model,
        node=node,
        since=since,
        until=until,
        as_csv=as_csv,
        as_json=as_json,
    )
    history.run(options)


@cluster_app.command()
def top(
    url: Annotated[str, typer.Option(metavar="URL", help="The gateway.")] = "http://127.0.0.1:8080",
    token_file: Annotated[
        str,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File that contains an API key of the gateway. Default: DISAGG_TOKEN, the file in DISAGG_TOKEN_FILE.",
        ),
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gateway's /cluster as JSON and end.")] = False,
) -> None:
    """Watch the cluster through its gateway: models, nodes, readings, requests, alarms. q or Ctrl-C quits.

    Without a terminal it prints one picture. `-` is what a machine does not tell; /cluster says why."""
    from disaggregated_inference.cli import top

    top.run(url, token_file, once, as_json)
