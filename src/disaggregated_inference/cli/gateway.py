"""`disagg gateway`. The gateway is imported when the command runs, which keeps --help fast."""

from pathlib import Path
from typing import Annotated

import typer

from disaggregated_inference.cli.arguments import ClusterTokenFile, Config, Drain, LogLevel

gateway_app = typer.Typer()


@gateway_app.callback(invoke_without_command=True)
def gateway(
    context: typer.Context,
    config: Config = None,
    token_file: ClusterTokenFile = "",
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port to listen on; 0: any free port.")
    ] = 8080,
    keys: Annotated[
        str, typer.Option(metavar="FILE", help="File of API keys, made by `disagg gateway key`. Default: no keys.")
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address other than loopback without API keys.")
    ] = False,
    tls_cert: Annotated[str, typer.Option(metavar="FILE", help="TLS certificate file (PEM).")] = "",
    tls_key: Annotated[str, typer.Option(metavar="FILE", help="Private key file of the certificate (PEM).")] = "",
    cors: Annotated[list[str] | None, typer.Option(metavar="ORIGIN", help="Allowed CORS origin; repeatable.")] = None,
    keepalive_s: Annotated[
        float,
        typer.Option(
            "--keepalive", min=0.1, metavar="SECONDS", help="Send a comment to a stream that was silent this long."
        ),
    ] = 5.0,
    read_s: Annotated[
        float,
        typer.Option(
            "--read-timeout",
            min=0.1,
            metavar="SECONDS",
            help="Time limit to receive a request; large bodies get more.",
        ),
    ] = 20.0,
    drain_s: Drain = 60,
    otlp: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Endpoint for traces, such as http://HOST:4318. Default: OTEL_EXPORTER_OTLP_ENDPOINT.",
        ),
    ] = "",
    log_level: LogLevel = "warning",
) -> None:
    """Serve the cluster through the OpenAI, Ollama and Anthropic APIs. SIGHUP reloads config, keys and certificate."""
    if context.invoked_subcommand:
        return
    from disaggregated_inference.cli.serve import announcing
    from disaggregated_inference.gateway import GatewaySettings, run_gateway

    settings = GatewaySettings(**context.params | {"cors": tuple(cors or ())})  # each option is a setting
    with announcing() as announce:
        run_gateway(settings, announce)


@gateway_app.command("key")
def make_key(
    name: Annotated[str, typer.Argument(help="Name of the key's owner.")],
    file: Annotated[
        Path, typer.Option(metavar="FILE", help="Key file; created if missing. It stores only hashes.")
    ] = Path("keys.json"),
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Model that the key may use; repeatable. Default: all.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help='Group of the key, for `policies.prefix_sharing = "group"`. Default: none.'),
    ] = None,
    per_minute: Annotated[
        float | None, typer.Option(min=0.001, metavar="N", help="Requests per minute. Default: no limit.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests at once. Default: no limit.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of prompts and completions per minute. Default: no limit."),
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The same per day, in UTC. Default: none.")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="The key sees the requests of all keys in /cluster, not only its own.")
    ] = False,
) -> None:
    """Create an API key and print it. It cannot be printed again: the file stores only its hash."""
    from disaggregated_inference.gateway import KeyLimits, new_key

    limits: KeyLimits = {
        "group": group,
        "per_minute": per_minute,
        "concurrency": concurrency,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_day": tokens_per_day,
        "operator": operator or None,
    }
    typer.echo(new_key(name, file, tuple(model or ()), **limits))
