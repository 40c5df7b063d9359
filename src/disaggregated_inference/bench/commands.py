"""`disagg bench`: every figure beside a baseline of the same run."""

from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(help="Benchmarks: one table, one JSON, ratios from one run.", no_args_is_help=True)

Model = Annotated[str, typer.Option("--model", "-m", help="A name, an alias or a model folder.")]
Engines = Annotated[list[str] | None, typer.Option(help="torch, mlx or llamacpp; may be repeated. Default: all three.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads of torch and llama.cpp; 0 leaves it to them.")]


@bench_app.command("engines")
def bench_engines(
    engine: Engines = None,
    model: Model = "smollm2",
    shape: Annotated[str, typer.Option(help="Random weights of this shape instead of a model (torch).")] = "",
    device: Annotated[str, typer.Option(help="torch device, such as cpu or cuda.")] = "",
    threads: Threads = 0,
    quick: Annotated[bool, typer.Option(help="Fewer rounds.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the JSON files.")] = Path("bench-results"),
) -> None:
    """Our engines against their bare libraries: prefill, decode, export, import, loading; then every pair of them."""
    from disaggregated_inference.bench.engines import run

    run(engine or [], model, shape, device, threads, quick, output)


@bench_app.command("drift")
def bench_drift(
    engine: Engines = None,
    model: Model = "smollm2",
    tokens: Annotated[int, typer.Option(min=2, help="Of each answer, compared one by one.")] = 64,
    threads: Threads = 0,
    quick: Annotated[bool, typer.Option(help="Two prompts, 16 tokens at most.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-results"),
) -> None:
    """Every pair of engines against the decode engine alone: how far a cache from elsewhere moves the next token."""
    from disaggregated_inference.bench.drift import run

    run(engine or [], model, tokens, threads, quick, output)


@bench_app.command("wire")
def bench_wire(
    megabytes: Annotated[int, typer.Option(min=1, help="How much to send, each round.")] = 800,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-results"),
) -> None:
    """Goodput of the KV wire on loopback against bare Python sockets."""
    from disaggregated_inference.bench.wire import run

    run(megabytes, repeats, output)


@bench_app.command("handoff")
def bench_handoff(
    model: Model = "smollm2",
    prefill: Annotated[str, typer.Option(help="Engine that reads the prompts.")] = "torch",
    decode: Annotated[str, typer.Option(help="Engine that writes, and writes alone to compare.")] = "mlx",
    shape: Annotated[str, typer.Option(help="A prefill node alone, random weights of this shape (torch).")] = "",
    device: Annotated[str, typer.Option(help="torch device for --shape.")] = "cuda",
    chunk: Annotated[int, typer.Option(min=0, help="Prompt tokens at a time; 0: 256, with --shape 8192.")] = 0,
    streams: Annotated[int, typer.Option(min=1, max=64, help="KV connections.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, the best of which counts.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-results"),
) -> None:
    """Two nodes against one engine alone; with --shape, what streaming costs a prefill node."""
    from disaggregated_inference.bench.handoff import run

    run(shape, device, model, prefill, decode, chunk, streams, repeats, output)


@bench_app.command("decode")
def bench_decode(
    model: Model = "smollm2",
    engine: Annotated[str, typer.Option(help="Engine that writes.")] = "mlx",
    prefill: Annotated[str, typer.Option(help="Engine that reads what is handed over.")] = "torch",
    tokens: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Of each batch; the median of their ratios counts.")] = 9,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-results"),
) -> None:
    """A decode node's batch against its library's own generators; and what a long prompt does to running streams."""
    from disaggregated_inference.bench.decode import run

    run(engine, prefill, model, tokens, rounds, output)


@bench_app.command("serve")
def bench_serve(
    model: Model = "smollm2",
    clients: Annotated[int, typer.Option(min=1, help="At the same time.")] = 16,
    each: Annotated[int, typer.Option(min=1, help="Requests per client.")] = 3,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 64,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-results"),
) -> None:
    """A node against mlx_lm.server: throughput and latency of the same clients, one server after the other."""
    from disaggregated_inference.bench.serve import run

    run(model, clients, each, tokens, output)


@bench_app.command("orchestrator")
def bench_orchestrator(
    streams: Annotated[list[int] | None, typer.Option(min=1, help="At once; repeatable. Default: 1, 32, 256.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="For each number of streams; two rounds at least.")] = 96,
    predictions: Annotated[int, typer.Option(min=1, help="Requests whose first token is predicted, twice.")] = 60,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-results"),
) -> None:
    """What the orchestrator adds to bare HTTP, over simulated nodes; and how well it predicts the first token."""
    from disaggregated_inference.bench.orchestrator import run

    run(streams or (), tokens, requests, predictions, output)


@bench_app.command("cluster")
def bench_cluster(
    profile: Annotated[
        str, typer.Option(help="real: small engines of this machine. published: SIMULATED, by published figures.")
    ] = "real",
    prompt: Annotated[list[int] | None, typer.Option(min=2, help="Tokens in; may be repeated. Default: three.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens out; 0: 32 of real, 128 of published machines.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, the best of which counts.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-results"),
) -> None:
    """Two machines that share an answer against each of them alone; two models at once against one after the other."""
    from disaggregated_inference.bench.cluster import run

    run(profile, prompt or (), tokens, repeats, output)


@bench_app.command("gateway")
def bench_gateway(
    streams: Annotated[list[int] | None, typer.Option(min=1, help="At once; repeatable. Default: 1, 32, 256.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 256,
    requests: Annotated[int, typer.Option(min=1, help="For each number of streams; two per stream at least.")] = 96,
    litellm: Annotated[str, typer.Option(help="An environment with litellm[proxy], to measure it as well.")] = "",
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-results"),
) -> None:
    """What the gateway adds to every token, over simulated nodes, beside a bare starlette relay and LiteLLM's proxy."""
    from disaggregated_inference.bench.gateway import run

    run(streams or (), tokens, requests, litellm, output)


@bench_app.command("load")
def bench_load(
    streams: Annotated[int, typer.Option(min=1, help="At once.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="In all.")] = 256,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens in.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens out.")] = 64,
    python: Annotated[str, typer.Option(help="An environment with GuideLLM. Default: one is made.")] = "",
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-results"),
) -> None:
    """GuideLLM, a load generator of others, against a gateway over simulated nodes, beside the gateway's /metrics."""
    from disaggregated_inference.bench.load import run

    run(streams, requests, prompt, tokens, python, output)
