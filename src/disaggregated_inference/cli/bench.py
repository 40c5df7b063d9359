"""`disagg bench`: every figure has a baseline from the same run."""

from pathlib import Path
from typing import Annotated

import typer

from disaggregated_inference.cli.arguments import LocalModel

bench_app = typer.Typer(help="Run a benchmark. Each prints a table and saves it as JSON.", no_args_is_help=True)

_FOLDER = Path("bench-results")

Engines = Annotated[list[str] | None, typer.Option(help="torch, mlx or llamacpp; repeatable. Default: all three.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads of torch and llama.cpp; 0: their default.")]
Output = Annotated[Path, typer.Option(help="Folder for the JSON files.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs; the best one counts.")]
TokensOption = Annotated[int, typer.Option(min=2, help="Tokens per completion.")]
Streams = Annotated[list[int] | None, typer.Option(min=1, help="Concurrent streams; repeatable. Default: 1, 32, 256.")]


@bench_app.command("engines")
def bench_engines(
    engine: Engines = None,
    model: LocalModel = "smollm2",
    shape: Annotated[str, typer.Option(help="Use random weights of this shape instead of a model (torch).")] = "",
    device: Annotated[str, typer.Option(help="torch device, such as cpu or cuda. Default: the best one.")] = "",
    threads: Threads = 0,
    quick: Annotated[bool, typer.Option(help="Fewer rounds.")] = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="Only the pairs.")] = False,
    output: Output = _FOLDER,
) -> None:
    """Engines compared with their bare libraries: load, prefill, decode, KV export and import; then all pairs."""
    from disaggregated_inference.bench.engines import run

    run(engine or [], model, shape, device, threads, quick, output, pairs)


@bench_app.command("drift")
def bench_drift(
    engine: Engines = None,
    model: LocalModel = "smollm2",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per completion, compared one by one.")] = 64,
    threads: Threads = 0,
    quick: Annotated[bool, typer.Option(help="Two prompts, 16 tokens at most.")] = False,
    output: Output = _FOLDER,
) -> None:
    """How much a KV cache from another engine changes the next token, for every pair of engines."""
    from disaggregated_inference.bench.drift import run

    run(engine or [], model, tokens, threads, quick, output)


@bench_app.command("wire")
def bench_wire(
    megabytes: Annotated[int, typer.Option(min=1, help="Megabytes per round.")] = 800,
    repeats: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 5,
    output: Output = _FOLDER,
) -> None:
    """Throughput of KV transfers on loopback, compared with bare Python sockets, also with TLS; and what TLS adds to a
    hand-over."""
    from disaggregated_inference.bench.wire import run

    run(megabytes, repeats, output)


@bench_app.command("handoff")
def bench_handoff(
    model: LocalModel = "smollm2",
    prefill: Annotated[str, typer.Option("--prefill", "--engine", help="Engine of the prefill node.")] = "torch",
    decode: Annotated[str, typer.Option(help="Engine of the decode node, and of the baseline.")] = "mlx",
    shape: Annotated[
        str, typer.Option(help="Measure only a prefill node with random weights of this shape (torch or vllm).")
    ] = "",
    device: Annotated[str, typer.Option(help="torch device for --shape.")] = "cuda",
    chunk: Annotated[int, typer.Option(min=0, help="Prompt tokens per chunk; 0: 256, with --shape 8192.")] = 0,
    streams: Annotated[int, typer.Option(min=1, max=64, help="Connections per KV transfer.")] = 4,
    repeats: Repeats = 3,
    alone: Annotated[
        bool, typer.Option(help="With --prefill vllm: also measure vLLM without the connector, offline and over HTTP.")
    ] = True,
    output: Output = _FOLDER,
) -> None:
    """Two nodes compared with one engine alone; with --shape: what streaming costs a prefill node."""
    from disaggregated_inference.bench.handoff import run

    run(shape, device, model, prefill, decode, chunk, streams, repeats, alone, output)


@bench_app.command("decode")
def bench_decode(
    model: LocalModel = "smollm2",
    engine: Annotated[str, typer.Option(help="Engine of the decode node.")] = "mlx",
    prefill: Annotated[str, typer.Option(help="Engine of the prefill node.")] = "torch",
    tokens: Annotated[int, typer.Option(min=8, help="Tokens per completion.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per batch size; the median ratio counts.")] = 9,
    output: Output = _FOLDER,
) -> None:
    """A decode node's batch compared with its library; and running streams while a long prompt arrives."""
    from disaggregated_inference.bench.decode import run

    run(engine, prefill, model, tokens, rounds, output)


@bench_app.command("serve")
def bench_serve(
    model: LocalModel = "smollm2",
    clients: Annotated[int, typer.Option(min=1, help="Concurrent clients.")] = 16,
    each: Annotated[int, typer.Option(min=1, help="Requests per client.")] = 3,
    tokens: TokensOption = 64,
    output: Output = _FOLDER,
) -> None:
    """Throughput and latency of a node compared with mlx_lm.server, with the same clients."""
    from disaggregated_inference.bench.serve import run

    run(model, clients, each, tokens, output)


@bench_app.command("orchestrator")
def bench_orchestrator(
    streams: Streams = None,
    tokens: TokensOption = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests per number of streams; at least two rounds.")] = 96,
    predictions: Annotated[int, typer.Option(min=1, help="Requests with a predicted first token, in two series.")] = 60,
    output: Output = _FOLDER,
) -> None:
    """Cost of the orchestrator over simulated nodes, compared with bare HTTP; and its prediction of the first token."""
    from disaggregated_inference.bench.orchestrator import run

    run(streams or (), tokens, requests, predictions, output)


@bench_app.command("cluster")
def bench_cluster(
    profile: Annotated[
        str, typer.Option(help="real: small engines on this machine. published: SIMULATED with published figures.")
    ] = "real",
    prompt: Annotated[
        list[int] | None, typer.Option(min=2, help="Prompt tokens; repeatable. Default: three lengths.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Completion tokens; 0: 32 for real, 128 for published.")] = 0,
    repeats: Repeats = 1,
    output: Output = _FOLDER,
) -> None:
    """Two machines together compared with each alone; two models at once compared with one after the other."""
    from disaggregated_inference.bench.cluster import run

    run(profile, prompt or (), tokens, repeats, output)


@bench_app.command("gateway")
def bench_gateway(
    streams: Streams = None,
    tokens: TokensOption = 256,
    requests: Annotated[int, typer.Option(min=1, help="Requests per number of streams; at least two per stream.")] = 96,
    litellm: Annotated[str, typer.Option(help="Environment with litellm[proxy], to measure it as well.")] = "",
    dashboards: Annotated[
        int, typer.Option(min=0, max=64, help="Only this: the cost of so many open dashboards beside 200 streams.")
    ] = 0,
    output: Output = _FOLDER,
) -> None:
    """Cost of the gateway over simulated nodes, compared with a bare starlette relay and LiteLLM's proxy."""
    from disaggregated_inference.bench import dashboards as watched
    from disaggregated_inference.bench.gateway import run

    if dashboards:
        watched.run(dashboards, max(streams or (200,)), output)
    else:
        run(streams or (), tokens, requests, litellm, output)


@bench_app.command("load")
def bench_load(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 256,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Completion tokens.")] = 64,
    python: Annotated[str, typer.Option(help="Environment with GuideLLM. Default: one is created.")] = "",
    output: Output = _FOLDER,
) -> None:
    """The load generator GuideLLM against a gateway over simulated nodes, compared with the gateway's /metrics."""
    from disaggregated_inference.bench.load import run

    run(streams, requests, prompt, tokens, python, output)
