"""The servers by the names they have in the set-up documents: `disagg serve` with a role and an engine filled in."""

import argparse
import os
import sys
from collections.abc import Sequence

from disaggregated_inference.errors import DisaggError

OLLAMA = "http://localhost:11434"
_OPEN = (
    "warning: listening on {} without a token: anyone who can reach this address may use this server;"
    " --token or DISAGG_TOKEN closes it\n"
)


def run_server(words: str, role: str, engine: str, model: str, arguments: Sequence[str] | None = None) -> None:
    """`words` is for --help. Everything else about a node is said to `disagg serve`."""
    asked = _parser(words, role, engine, model).parse_args(arguments)
    from disaggregated_inference.node.server import NodeSettings, is_loopback, run_node

    if not asked.token and not is_loopback(asked.host):
        sys.stderr.write(_OPEN.format(asked.host))
    given = {"ollama_host": asked.ollama_host} if engine == "ollama" else {}
    settings = NodeSettings(
        role=role,
        engine=engine,
        model=asked.model,
        host=asked.host,
        port=asked.port,
        token=asked.token,
        insecure=True,  # the documents' commands have no token, and are to work: said aloud above instead
        **given,
    )
    try:
        run_node(settings)
    except (DisaggError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None


def _parser(words: str, role: str, engine: str, model: str) -> argparse.ArgumentParser:
    port = 8000 if role == "prefill" else 8001
    more = f"The same as `disagg serve --role {role} --engine {engine}`, which has more options."
    parser = argparse.ArgumentParser(description=words, epilog=more)
    parser.add_argument("--model", default=model, help="default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=port, help="default: %(default)s; 0: a free one")
    token = os.environ.get("DISAGG_TOKEN", "")
    parser.add_argument("--token", default=token, help="bearer token that callers must send (or DISAGG_TOKEN)")
    if engine == "ollama":
        parser.add_argument("--ollama-host", default=OLLAMA, help="where Ollama is (default: %(default)s)")
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 0 to 65535")
    return port
