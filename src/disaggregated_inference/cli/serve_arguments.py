"""Arguments of `disagg serve` that need more than a line."""

from typing import Annotated, Literal

import typer

from disaggregated_inference.defaults import DECODE_PORT, PREFILL_PORT

NodeRole = Annotated[Literal["prefill", "decode", "both"], typer.Option("--role", help="What the node does.")]
NodeEngine = Annotated[
    Literal["torch", "mlx", "llamacpp", "vllm", "ollama", "simulated"] | None,
    typer.Option(
        "--engine",
        help="llamacpp: GGUF files; vllm: its own process, prefill and whole answers; ollama: a running Ollama, moves"
        " no KV; simulated: no inference. Default: torch for --role prefill, else mlx.",
    ),
]
KVDTypeName = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option("--dtype", help="Of computing and of KV. Default: chosen for the machine."),
]
KVCodec = Annotated[
    Literal["raw", "int8"], typer.Option("--kv-codec", help="int8 (lossy): for links slower than the prefill.")
]
NodePort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        metavar="PORT",
        help=f"HTTP port; 0: any free port. Default: {PREFILL_PORT} for prefill, else {DECODE_PORT}.",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow an address other than loopback without identity and token.")
]
TrustedLink = Annotated[
    str,
    typer.Option(
        metavar="WORDS",
        help='Say in words why nothing else is on the network between the nodes, such as "the cable between spark-1'
        ' and mac-1". Allows an address other than loopback without --identity.',
    ),
]
EngineThreadCount = Annotated[
    int,
    typer.Option(
        min=0,
        max=1024,
        metavar="N",
        help="CPU threads of the engine; 0: OMP_NUM_THREADS, else nodes on one machine divide its cores.",
    ),
]
KVPort = Annotated[
    int,
    typer.Option(
        min=0, max=65535, metavar="PORT", help="Port for KV transfers; 0: any free port. Decode nodes have none."
    ),
]
KVAddresses = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS", help="HOST or HOST:PORT for KV transfers, fastest link first; repeatable. Default: --host."
    ),
]
LeaseSeconds = Annotated[
    float, typer.Option("--lease", min=1, metavar="SECONDS", help="Lease of an unfetched KV cache.")
]
KVSecurityMode = Annotated[
    str,
    typer.Option(
        metavar="MODES",
        help="Of KV transfers: tls, authenticated (cannot be altered, can be read) or plain. Several, such as"
        " tls,authenticated: `links` in the cluster file choose. Weaker ones are refused. Default: tls with"
        " --identity, else plain.",
    ),
]
PrefixMemory = Annotated[
    str,
    typer.Option(
        metavar="SIZE", help="Part of --kv-memory for the prefix cache; 0: no prefix cache. Default: a quarter."
    ),
]
IdleUnload = Annotated[
    float,
    typer.Option("--idle-unload", min=0, metavar="SECONDS", help="Unload an idle model after this long; 0: never."),
]
VllmPython = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="Python of the environment that has vLLM, for --engine vllm. Default: DISAGG_VLLM_PYTHON, or the one"
        " beside the command vllm.",
    ),
]
VllmUrl = Annotated[
    str, typer.Option(metavar="URL", help="Attach to a vLLM that already runs, with this project's connector.")
]
VllmArguments = Annotated[
    str,
    typer.Option(metavar="WORDS", help='More arguments of vLLM, in quotes, such as "--tensor-parallel-size 2".'),
]
VllmSocket = Annotated[
    str, typer.Option(metavar="PATH", help="Where the connector inside vLLM meets this node. Default: in DISAGG_HOME.")
]
KeepAlive = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="How long Ollama keeps an idle model: 30m, or -1 for ever. Default: Ollama's setting."
    ),
]
OllamaHost = Annotated[str, typer.Option(metavar="URL", help="URL of Ollama, for --engine ollama.")]
OllamaContext = Annotated[int, typer.Option(min=256, metavar="TOKENS", help="Maximum context length in Ollama.")]
OllamaSlots = Annotated[
    int, typer.Option(min=1, metavar="N", help="Concurrent requests in Ollama (OLLAMA_NUM_PARALLEL).")
]
