"""`disagg gateway`. What it needs is imported when it runs, so that help is instant."""

from pathlib import Path
from typing import Annotated

import typer

gateway_app = typer.Typer(help="One endpoint for programs that speak to OpenAI, Ollama or Anthropic.")


@gateway_app.callback(invoke_without_command=True)
def gateway(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option(help="Cluster file. Default: what DISAGG_CONFIG or this folder has.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8080,
    keys: Annotated[str, typer.Option(help="File with API keys; see `disagg gateway key`.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without keys.")] = False,
    tls_cert: Annotated[str, typer.Option(help="Certificate (PEM).")] = "",
    tls_key: Annotated[str, typer.Option(help="Its private key (PEM).")] = "",
    cors: Annotated[list[str] | None, typer.Option(help="Origin that browsers may call from; repeatable.")] = None,
    keepalive: Annotated[
        float, typer.Option(min=0.1, help="Seconds of silence after which a stream gets a sign of life.")
    ] = 5.0,
    read_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which a request must arrive; large bodies get more.")
    ] = 20.0,
    drain: Annotated[int, typer.Option(min=0, help="Seconds to finish what is under way when told to stop.")] = 60,
    otlp: Annotated[
        str, typer.Option(help="Where traces go: http://HOST:4318. Default: what OTEL_EXPORTER_OTLP_ENDPOINT says.")
    ] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error; JSON on standard error.")] = "warning",
) -> None:
    """Serve the cluster by OpenAI's, Ollama's and Anthropic's APIs. SIGHUP reads config, keys and certificate again."""
    if context.invoked_subcommand:
        return
    from disaggregated_inference.gateway.server import GatewaySettings, run_gateway

    run_gateway(
        GatewaySettings(
            config=config,
            host=host,
            port=port,
            keys=keys,
            insecure=insecure,
            tls_cert=tls_cert,
            tls_key=tls_key,
            cors=tuple(cors or ()),
            keepalive_s=keepalive,
            read_s=read_timeout,
            drain_s=drain,
            otlp=otlp,
            log_level=log_level,
        )
    )


@gateway_app.command("key")
def make_key(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    file: Annotated[Path, typer.Option(help="Where its hash is kept; made if it is not there.")] = Path("keys.json"),
    model: Annotated[list[str] | None, typer.Option(help="A model it may use; repeatable. Default: all.")] = None,
    per_minute: Annotated[float | None, typer.Option(min=0.001, help="Requests a minute. Default: no limit.")] = None,
) -> None:
    """Make an API key. It is shown once; the file has its hash."""
    from disaggregated_inference.gateway.key_file import new_key

    typer.echo(new_key(name, file, tuple(model or ()), per_minute))
