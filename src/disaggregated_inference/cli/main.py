"""The `disagg` command. Commands import their modules when they run, which keeps --help fast."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from disaggregated_inference import __version__
from disaggregated_inference.cli.arguments import (
    AsJson,
    ClusterTokenFile,
    Drain,
    IdentityFolder,
    LocalModel,
    LogLevel,
    Token,
    TokenFile,
)
from disaggregated_inference.cli.bench import bench_app
from disaggregated_inference.cli.commands import cluster_app
from disaggregated_inference.cli.config import config_app
from disaggregated_inference.cli.gateway import gateway_app
from disaggregated_inference.cli.machine_commands import machines_app
from disaggregated_inference.cli.models import models_app
from disaggregated_inference.cli.serve_arguments import (
    EngineThreadCount,
    IdleUnload,
    Insecure,
    KeepAlive,
    KVAddresses,
    KVCodec,
    KVDTypeName,
    KVPort,
    KVSecurityMode,
    LeaseSeconds,
    NodeEngine,
    NodePort,
    NodeRole,
    OllamaContext,
    OllamaHost,
    OllamaSlots,
    PrefixMemory,
    TrustedLink,
    VllmArguments,
    VllmPython,
    VllmSocket,
    VllmUrl,
)
from disaggregated_inference.defaults import KV_PORT
from disaggregated_inference.errors import DisaggError

app = typer.Typer(
    name="disagg",
    help="Disaggregated inference: prefill on one machine, decode on another, the KV cache moves between them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # plain help takes a third of the time
)
app.add_typer(cluster_app)  # no name: commands of the top level
app.add_typer(config_app, name="config")
app.add_typer(machines_app, name="cluster")
app.add_typer(gateway_app, name="gateway")
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")

ProfileOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Machine that --engine simulated imitates: dgx-spark, m3-ultra, m2-ultra, h200, instant,"
        " custom:prefill=2000,decode=50 (tokens/s). Default: instant.",
    ),
]


def main() -> None:
    """Run the command. Our errors and the system's become one line (with `--json` also one of JSON) and exit code 1.
    Typer reports usage errors itself, with exit code 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # lets finally blocks run
    if parent := os.environ.pop("DISAGG_PARENT_PID", ""):  # set by `disagg up`, the demo and benchmarks
        from disaggregated_inference.local_nodes import stop_with_parent

        stop_with_parent(int(parent))
    try:
        app()
    except (DisaggError, OSError) as error:
        from disaggregated_inference.cli.errors import print_error

        print_error(error, sys.argv[1:])
        raise SystemExit(1) from None
    except SystemExit as end:
        if end.code == 2:  # a usage error; its context is Typer's exception
            from disaggregated_inference.cli.errors import print_usage_error

            print_usage_error(end.__context__, sys.argv[1:])
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disagg {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="The prompt.")] = "Why is the sky blue? Answer briefly.",
    model: LocalModel = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of completion tokens.")] = 64,
    prefill: Annotated[str, typer.Option(metavar="NAME", help="Engine of the prefill node.")] = "torch",
    decode: Annotated[str, typer.Option(metavar="NAME", help="Engine of the decode node.")] = "mlx",
    chunk: Annotated[int, typer.Option(min=1, metavar="N", help="Prompt tokens per chunk.")] = 256,
    check: Annotated[bool, typer.Option(help="Compare the tokens with those of the decode engine alone.")] = True,
    as_json: AsJson = False,
) -> None:
    """Move a KV cache between two engines on this machine and check the tokens. Uses the embedded model."""
    from disaggregated_inference.cli.demo import run_demo

    passed = run_demo(prompt, model, max_tokens, prefill, decode, chunk, check, as_json)
    raise typer.Exit(0 if passed else 1)


@app.command()
def up(
    model: LocalModel = "",
    prefill_engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Engine of the prefill node: torch, mlx, llamacpp or vllm. Default: the first installed.",
        ),
    ] = "",
    decode_engine: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Engine of the decode node: mlx, torch or llamacpp. Default: the first installed."
        ),
    ] = "",
    simulated: Annotated[
        str,
        typer.Option(
            metavar="PREFILL,DECODE",
            help="Show two machines that are not there: no inference, their published speeds. Such as"
            " dgx-spark,m3-ultra (also m2-ultra, h200, instant).",
        ),
    ] = "",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port of the gateway; 0: free ports for all.")
    ] = 8080,
) -> None:
    """Start a whole cluster on this machine: a prefill node, a decode node and the gateway. Ctrl-C stops all.

    Without --model the embedded model is used. The nodes use ports 8000, 8001 and 8100, or free ones where these are
    taken. `disagg config example --local` prints the cluster file, for `disagg status` and `disagg chat`."""
    from disaggregated_inference.cli.up import UpSettings, run

    run(UpSettings(model, prefill_engine, decode_engine, simulated, port))


@app.command()
def chaos(
    config: Annotated[
        str,
        typer.Option(
            "--config",
            "-c",
            metavar="PATH",
            help="Cluster file of running nodes: only the lines to them are disturbed, no process. Default: start two"
            " prefill and two decode nodes on this machine, and disturb them too.",
        ),
    ] = "",
    minutes: Annotated[float, typer.Option(min=0.01, metavar="N", help="How long faults happen.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, metavar="N", help="End after this many requests instead.")] = 0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of faults and requests.")] = 1,
    requests_at_once: Annotated[int, typer.Option(min=1, metavar="N", help="Concurrent clients.")] = 8,
    faults: Annotated[bool, typer.Option(help="--no-faults: only requests, to see whether a process grows.")] = True,
    everything: Annotated[
        bool, typer.Option("--everything", help="Also take away all nodes of a role; failed requests are allowed then.")
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Engine of the nodes, or PREFILL,DECODE such as torch,mlx. Default: simulated."
        ),
    ] = "simulated",
    model: LocalModel = "",
    any_host: Annotated[
        bool, typer.Option("--any-host", help="Allow nodes of --config that are not on this machine.")
    ] = False,
    tls: Annotated[
        bool, typer.Option("--tls", help="Give the started nodes keys of their own: all lines between them are TLS.")
    ] = False,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the run. Default: chaos-SEED.json, if it fails.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Disturb a cluster at random, and check every answer against the undisturbed one. Ctrl-C ends it early.

    Nodes are killed and frozen; lines (HTTP and KV) are cut, slowed, garbled and black-holed; disks are full; the
    gateway reloads; models are unloaded. One node of each role stays up. The exit code is 0 if no answer was wrong, no
    request failed and all memory is free at the end."""
    from disaggregated_inference.chaos import ChaosSettings
    from disaggregated_inference.cli.chaos import run

    prefill, _, decode = engine.partition(",")
    settings = ChaosSettings(
        config=config,
        minutes=minutes,
        requests=requests,
        seed=seed,
        at_once=requests_at_once,
        faults=faults,
        everything=everything,
        engines=(prefill, decode or prefill),
        model=model,
        any_host=any_host,
        tls=tls,
        log=log,
    )
    raise typer.Exit(0 if run(settings, as_json) else 1)


@app.command()
def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Every machine of the cluster file by ssh, and the paths between them.")
    ] = False,
    config: Annotated[
        str | None, typer.Option("--config", "-c", metavar="PATH", help="Cluster file. Default: as for `status`.")
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option("--machine", "-m", metavar="NAME", help="Only this machine of the cluster; repeatable."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1, max=10, metavar="SECONDS", help="Longest transfer for each path, which has at most 1 GB."
        ),
    ] = 3.0,
    token_file: ClusterTokenFile = "",
    listing: Annotated[
        bool, typer.Option("--list", help="Print every check, why it matters and what mends it.")
    ] = False,
    expected: Annotated[
        bool, typer.Option("--expected", hidden=True, help="Read from standard input what should run here.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look for what is wrong with this machine or this cluster: each finding says why it matters and what mends it.

    The exit code is 0 without warnings, 3 with warnings, 4 with errors. Nothing is changed. docs/TROUBLESHOOTING.md has
    every finding."""
    from disaggregated_inference.cli.doctor import DoctorSettings, run

    if listing:
        from disaggregated_inference.doctor import reference

        typer.echo(reference(), nl=False)
        raise typer.Exit
    settings = DoctorSettings(
        cluster=cluster,
        config=config,
        token_file=token_file,
        machines=tuple(machine or ()),
        seconds=seconds,
        expected=expected,
    )
    raise typer.Exit(run(settings, as_json))


@app.command()
def serve(
    context: typer.Context,
    role: NodeRole = "both",
    model: LocalModel = "smollm2",
    engine: NodeEngine = None,
    profile: ProfileOption = "",
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: NodePort = None,
    token: Token = "",
    token_file: TokenFile = "",
    insecure: Insecure = False,
    identity: IdentityFolder = "",
    trusted_link: TrustedLink = "",
    dtype: KVDTypeName = None,
    chunk: Annotated[
        int, typer.Option(min=0, metavar="N", help="Prompt tokens per chunk; 0: chosen for the machine.")
    ] = 0,
    threads: EngineThreadCount = 0,
    kv_port: KVPort = KV_PORT,
    kv_address: KVAddresses = None,
    lease_s: LeaseSeconds = 60.0,
    kv_streams: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Connections per KV transfer.")] = 4,
    kv_security: KVSecurityMode = "",
    kv_codec: KVCodec = "raw",
    kv_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for KV caches, such as 8G. Default: from free memory.")
    ] = "",
    prefix_memory: PrefixMemory = "",
    prefix_disk: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for prefixes that survive restarts. Default: none.")
    ] = "",
    prefix_disk_size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of that folder.")] = "10G",
    queue: Annotated[
        int, typer.Option(min=0, metavar="N", help="Maximum number of requests that wait for memory.")
    ] = 256,
    idle_unload_s: IdleUnload = 0.0,
    drain_s: Drain = 60,
    ollama_host: OllamaHost = "http://localhost:11434",
    ollama_context: OllamaContext = 32768,
    ollama_slots: OllamaSlots = 4,
    keep_alive: KeepAlive = "",
    vllm_python: VllmPython = "",
    vllm_url: VllmUrl = "",
    vllm_args: VllmArguments = "",
    vllm_socket: VllmSocket = "",
    log_level: LogLevel = "warning",
) -> None:
    """Run a node: a prefill node, a decode node, or both in one. Ctrl-C stops it.

    The port answers /health with `loading` while the model loads. In a pipe, standard output gets one line of JSON when
    the node is ready."""
    from disaggregated_inference.cli.serve import announcing
    from disaggregated_inference.cluster import read_token
    from disaggregated_inference.node import NodeSettings
    from disaggregated_inference.node_process import run_node

    given = {name: value for name, value in context.params.items() if value is not None}
    settings = {name: value for name, value in given.items() if name != "token_file"}
    settings |= {"kv_address": tuple(kv_address or ()), "token": read_token(token, token_file)}
    with announcing() as announce:
        run_node(NodeSettings(**settings), announce)  # each option is a setting
