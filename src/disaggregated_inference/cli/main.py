"""The `disagg` command. Commands import what they need when they run, so that help is instant."""

import signal
import sys
from typing import Annotated

import typer

from disaggregated_inference import __version__
from disaggregated_inference.bench.commands import bench_app
from disaggregated_inference.cli.commands import talk_app
from disaggregated_inference.cli.config import config_app
from disaggregated_inference.cli.gateway import gateway_app
from disaggregated_inference.cli.models import models_app
from disaggregated_inference.errors import DisaggError

app = typer.Typer(
    name="disagg",
    help="Read the prompt on one machine, write the answer on another: the KV cache moves in between.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # plain help: a third of the time
)
app.add_typer(talk_app)  # no name: its commands stand beside ours
app.add_typer(config_app, name="config")
app.add_typer(gateway_app, name="gateway")
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Model = Annotated[str, typer.Option("--model", "-m", help="A name, an alias or a model folder.")]
Engine = Annotated[
    str,
    typer.Option(
        help="torch, mlx, llamacpp (GGUF files), ollama (a running one, whole answers only) or simulated"
        " (no inference). Default: torch to prefill, else mlx."
    ),
]
Profile = Annotated[
    str,
    typer.Option(
        help="Machine that --engine simulated stands for: dgx-spark, m3-ultra, m2-ultra, h200, instant,"
        " custom:prefill=2000,decode=50 (tokens/s). Default: instant."
    ),
]


def main() -> None:
    """Run the command; an error we raise on purpose, or the system's, becomes one line (with `--json`, also one
    of JSON) and exit code 1. Of a command line that cannot be understood Typer says so, and ends with 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is under way is cleaned up
    try:
        app()
    except (DisaggError, OSError) as error:
        from disaggregated_inference.cli.errors import say

        say(error, sys.argv[1:])
        raise SystemExit(1) from None
    except SystemExit as end:
        if end.code == 2:  # its context is the error that Typer ends with
            from disaggregated_inference.cli.errors import say_usage

            say_usage(end.__context__, sys.argv[1:])
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disagg {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Shared by all commands."""


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask the model.")] = "Why is the sky blue? Answer briefly.",
    model: Model = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    prefill: Annotated[str, typer.Option(help="Engine that reads the prompt.")] = "torch",
    decode: Annotated[str, typer.Option(help="Engine that writes the answer.")] = "mlx",
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens prefilled at a time.")] = 256,
    check: Annotated[bool, typer.Option(help="Compare with the same answer from one engine alone.")] = True,
    as_json: AsJson = False,
) -> None:
    """Hand a KV cache from one engine to another, here, on the embedded model, and prove it with tokens."""
    from disaggregated_inference.cli.demo import run_demo

    proven = run_demo(prompt, model, max_tokens, prefill, decode, chunk, check, as_json)
    raise typer.Exit(0 if proven else 1)


@app.command()
def serve(
    role: Annotated[str, typer.Option(help="prefill (reads prompts), decode (writes answers) or both.")] = "both",
    model: Model = "smollm2",
    engine: Engine = "",
    profile: Profile = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="HTTP; 0: a free one. Default 8000 or 8001.")
    ] = None,
    token: Annotated[str, typer.Option(envvar="DISAGG_TOKEN", help="Bearer token that callers must send.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without a token.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16. Default: what suits the machine.")] = "",
    chunk: Annotated[int, typer.Option(min=0, help="Prompt tokens read at a time; 0: what suits the machine.")] = 0,
    kv_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the KV wire; 0 takes a free one.")] = 0,
    kv_address: Annotated[
        list[str] | None,
        typer.Option(help="HOST or HOST:PORT for KV connections, best link first; repeatable. Default: --host."),
    ] = None,
    lease_s: Annotated[
        float, typer.Option("--lease", min=1, help="Seconds a cache is held for someone who does not come.")
    ] = 60.0,
    kv_streams: Annotated[int, typer.Option(min=1, max=64, help="Connections per transfer.")] = 2,
    kv_codec: Annotated[str, typer.Option(help="raw, or int8 for links slower than the prefill.")] = "raw",
    kv_memory: Annotated[str, typer.Option(help="KV memory in all, such as 8G. Default: from free memory.")] = "",
    prefix_memory: Annotated[
        str, typer.Option(help="Of it, for kept prefixes; 0: keep none. Default: a quarter.")
    ] = "",
    prefix_disk: Annotated[str, typer.Option(help="Folder that keeps prefixes over restarts. Default: none.")] = "",
    prefix_disk_size: Annotated[str, typer.Option(help="How large that folder may grow.")] = "10G",
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for memory.")] = 256,
    idle_unload_s: Annotated[
        float, typer.Option("--idle-unload", min=0, help="Unload the model when idle for so many seconds.")
    ] = 0.0,
    drain_s: Annotated[
        int, typer.Option("--drain", min=0, help="Seconds to finish what is under way when told to stop.")
    ] = 60,
    ollama_host: Annotated[
        str, typer.Option(help="Where --engine ollama finds its Ollama.")
    ] = "http://localhost:11434",
    ollama_context: Annotated[
        int, typer.Option(min=256, help="Most tokens of a context there; the model's own window, if that is less.")
    ] = 32768,
    ollama_slots: Annotated[int, typer.Option(min=1, help="Answers it writes at once: its OLLAMA_NUM_PARALLEL.")] = 4,
    keep_alive: Annotated[
        str, typer.Option(help="How long it keeps an idle model: 30m, -1 for ever. Default: its own setting.")
    ] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error; JSON on standard error.")] = "warning",
) -> None:
    """Run a node: it reads prompts and hands out their KV, or takes KV and writes answers, or both."""
    asked = locals()  # each by the name of its setting
    from disaggregated_inference.node.server import NodeSettings, run_node

    run_node(NodeSettings(**asked | {"kv_address": tuple(kv_address or ())}))
