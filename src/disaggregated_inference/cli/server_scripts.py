"""The server scripts of the set-up guides: `disagg serve` with a fixed role and engine."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from disaggregated_inference.defaults import PORTS
from disaggregated_inference.errors import DisaggError

if TYPE_CHECKING:
    from disaggregated_inference.api import Role

MODEL = "qwen3-coder:30b"
OLLAMA = "http://localhost:11434"
_NO_TOKEN = (
    "warning: listening on {} without a token: anyone who can reach this address can use this server;"
    " set DISAGG_TOKEN or --token-file\n"
)
_NO_IDENTITY = (
    "warning: listening on {} without an identity: everyone on this network can read and alter what this server"
    " sends; see `disagg cluster keys --help`\n"
)
_UNDECLARED = "not declared: a server script without an identity"


def run_server(description: str, role: "Role", engine: str) -> None:
    """`disagg serve` has more options than these scripts."""
    arguments = _parser(description, role, engine).parse_args()
    try:
        _run(arguments, role, engine)
    except (DisaggError, OSError) as error:
        from disaggregated_inference.cli.errors import message_of

        sys.stderr.write(f"error: {message_of(error)}\n")
        raise SystemExit(1) from None


def _run(arguments: argparse.Namespace, role: "Role", engine: str) -> None:
    from disaggregated_inference.cli.serve import announcing
    from disaggregated_inference.cluster import read_token
    from disaggregated_inference.http import is_loopback
    from disaggregated_inference.node import NodeSettings
    from disaggregated_inference.node_process import run_node

    token = read_token(arguments.token, arguments.token_file)
    identity = arguments.identity or os.environ.get("DISAGG_IDENTITY", "")
    exposed = not identity and not is_loopback(arguments.host)
    if exposed and not token:
        sys.stderr.write(_NO_TOKEN.format(arguments.host))
    if exposed:
        sys.stderr.write(_NO_IDENTITY.format(arguments.host))
    ollama = {"ollama_host": arguments.ollama_host} if engine == "ollama" else {}
    settings = NodeSettings(
        role=role,
        engine=engine,
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        token=token,
        insecure=True,  # the guides' commands have no token and must work; hence the warning above
        identity=identity,
        trusted_link=_UNDECLARED if exposed else "",
        **ollama,
    )
    with announcing() as announce:
        run_node(settings, announce)


def _parser(description: str, role: "Role", engine: str) -> argparse.ArgumentParser:
    epilog = f"The same as `disagg serve --role {role} --engine {engine}`, which has more options."
    parser = argparse.ArgumentParser(description=description, epilog=epilog)
    parser.add_argument("--model", default=MODEL, help="default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=PORTS[role], help="default: %(default)s; 0: any free port")
    parser.add_argument("--token", default="", help=argparse.SUPPRESS)  # refused, with the reason
    parser.add_argument("--token-file", default="", metavar="FILE", help="file that contains the token")
    parser.add_argument("--identity", default="", metavar="DIR", help="folder with this machine's certificate")
    if engine == "ollama":
        parser.add_argument("--ollama-host", default=OLLAMA, help="URL of Ollama (default: %(default)s)")
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use a number from 0 to 65535")
    return port
