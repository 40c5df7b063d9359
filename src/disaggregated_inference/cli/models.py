"""`disagg models`: list, inspect, import, remove and compare models."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from disaggregated_inference.cli.arguments import AsJson, Token, TokenFile

models_app = typer.Typer(help="Manage the models on this machine. Without a command: list them.")

Name = Annotated[str, typer.Argument(help="Model name, alias, folder or .gguf file.")]
PlaceArgument = Annotated[
    str,
    typer.Argument(
        help="Model name, folder, .gguf file, URL or host:port of a node, or output file of inspect --json."
    ),
]


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the models on this machine and the known names."""
    if not context.invoked_subcommand:
        list_models(as_json)


@models_app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models on this machine and the known names."""
    from disaggregated_inference.models import ModelStore

    rows = ModelStore().list()
    if as_json:
        listed = [{"name": row.name, "path": str(row.path) if row.path else None, "note": row.note} for row in rows]
        typer.echo(json.dumps(listed, indent=2))
        return
    _print_table(
        ("model", "on this machine", "note"),
        [(row.name, str(row.path) if row.path else "-", row.note) for row in rows],
    )


@models_app.command("inspect")
def inspect_model(
    name: Name,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Context length for the memory figures. Default: the model's window."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a model's KV cache, memory, fingerprint and engines."""
    from disaggregated_inference.models import ModelStore, describe_model
    from disaggregated_inference.progress import steps

    store = ModelStore()
    with steps() as progress:
        model = store.resolve(name, progress)
        description = describe_model(model, context) | {"engines": store.engines(name)}
    if as_json:
        typer.echo(json.dumps(description, indent=2))
    else:
        _print_table(None, _rows(description))


@models_app.command("import")
def import_model(
    path: Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors, or a .gguf file.")],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name for the model. Default: the folder's or file's name.")
    ] = "",
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the files into the store instead of using them in place.")
    ] = False,
) -> None:
    """Register a model folder or GGUF file under a name. Damaged and unsupported models are rejected."""
    from disaggregated_inference.models import ModelStore, bare_name

    chosen = bare_name(name) or (path.stem if path.suffix == ".gguf" else path.expanduser().absolute().name)
    store = ModelStore()
    earlier = store.names.get(chosen, {})
    added = store.add(chosen, path, copy)
    replaced = earlier.get(added.kind, str(added.path))
    instead = f" (before: {replaced})" if replaced != str(added.path) else ""
    engines = " or ".join(added.engines)
    advice = f"serve it with --engine {engines}" if engines else "no engine on this machine can load it"
    typer.echo(f"{added.name} is {added.path}{instead} ({added.spec.architecture}); {advice}")


@models_app.command("remove")
def remove_model(name: Annotated[str, typer.Argument(help="Name given to import.")]) -> None:
    """Remove an imported name. Only files that `import --copy` copied are deleted."""
    from disaggregated_inference.models import ModelStore

    deleted = ModelStore().remove(name)
    typer.echo(f"{name} removed" + "".join(f"; deleted {folder}" for folder in deleted))


@models_app.command("verify")
def verify_models(
    first: PlaceArgument,
    second: PlaceArgument,
    token: Token = "",
    token_file: TokenFile = "",
    full: Annotated[
        bool, typer.Option("--full", help="Compare all weight bytes; both models must be on this machine.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether two copies are the same model, so that a KV cache may move between them.

    Compares the norms and a sample of every tensor. If the weights are stored in different formats, compares values
    within rounding: rows of most tensors if both files are on this machine, else the few values that a node reports.
    Formats that cannot be dequantized (MLX quantization, FP8) have only their norms compared. The output says which.
    The exit code is 0 if they match. For a machine without a node: `disagg models inspect NAME --json > other.json`.
    """
    from disaggregated_inference.cluster import read_token
    from disaggregated_inference.identity import open_identity
    from disaggregated_inference.models import ModelStore, compare_models, describe_models
    from disaggregated_inference.progress import steps

    token, identity = read_token(token, token_file), open_identity()
    with steps() as progress:
        tls = identity.client_context if identity else None
        here, there = describe_models((first, second), ModelStore(), token, progress, tls)
        text, differences = compare_models(here, there, full)
    if as_json:
        result = {"same": not differences, "verdict": text, "differences": differences}
        typer.echo(json.dumps(result, indent=2))
    else:
        typer.echo(text + (":" if differences else "") + "".join(f"\n  {line}" for line in differences))
    raise typer.Exit(1 if differences else 0)


def _rows(model: dict[str, Any]) -> list[tuple[str, ...]]:
    fingerprint = model["fingerprint"]
    beyond = ", more than the context window" if model["context"] > model["context_window"] else ""
    at = f"{model['context']:,} tokens{beyond}"
    return [
        ("model", model["name"]),
        ("path", model["path"]),
        ("kind", f"{model['kind']}, {model['architecture']}, {model['layers']} layers"),
        ("engines", ", ".join(model["engines"]) or "none on this machine"),
        ("context window", f"{model['context_window']:,} tokens"),
        ("weights", _size(model["weights_bytes"])),
        ("KV cache", f"{model['kv_bytes_per_token']:,} bytes per token; {_size(model['kv_bytes'])} at {at} (16 bit)"),
        ("memory", f"{_size(model['memory_bytes'])} at {at}, without the engine's own buffers"),
        ("tokenizer", f"{fingerprint['tokenizer']}, {model['vocabulary']:,} tokens"),
        ("chat template", fingerprint["chat_template"]),
        ("norms", fingerprint["weights"]["norms"]),
        ("weights' sample", f"{fingerprint['weights']['sample']} ({fingerprint['weights']['format']})"),
    ]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:,.2f} MB"


def _print_table(columns: tuple[str, ...] | None, rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    from disaggregated_inference.cli.screen import stdout_console

    table = Table(box=None, header_style="bold", show_header=columns is not None)
    for column in columns or rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    stdout_console().print(table)
