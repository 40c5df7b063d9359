"""`disagg models`: what is on this machine, what a model is, and whether two copies are one model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

models_app = typer.Typer(help="Models on this machine (without a command: list them).")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Name = Annotated[str, typer.Argument(help="A name, an alias, a folder or a .gguf file.")]
Place = Annotated[
    str, typer.Argument(help="A name, a folder, a .gguf, a node's URL (or host:port), or what inspect --json printed.")
]


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the models this machine has, and the names it knows."""
    if not context.invoked_subcommand:
        list_models(as_json)


@models_app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """The same as no command: what this machine has, and the names it knows."""
    from disaggregated_inference.models import ModelStore

    rows = ModelStore().list()
    if as_json:
        found = [{"name": row.name, "path": str(row.path) if row.path else None, "note": row.note} for row in rows]
        typer.echo(json.dumps(found, indent=2))
        return
    _print_table(
        ("model", "on this machine", "note"),
        [(row.name, str(row.path) if row.path else "-", row.note) for row in rows],
    )


@models_app.command("inspect")
def inspect_model(
    name: Name,
    context: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Memory for so many. Default: the whole window.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a model is: its cache, its memory at a context, its fingerprint, and which engines can load it."""
    from disaggregated_inference.cli.progress import steps
    from disaggregated_inference.models import ModelStore
    from disaggregated_inference.models.description import about

    store = ModelStore()
    with steps() as progress:
        model = store.resolve(name, progress)
        told = about(model, context) | {"engines": store.engines(name)}
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        _print_table(None, _lines(told))


@models_app.command("import")
def import_model(
    path: Annotated[Path, typer.Argument(help="A folder with config.json and *.safetensors, or a .gguf file.")],
    name: Annotated[str, typer.Option(help="The name to use from now on. Default: the folder's or the file's.")] = "",
    copy: Annotated[bool, typer.Option("--copy", help="Copy it into the store; otherwise it stays there.")] = False,
) -> None:
    """Give a model folder or GGUF file a name. Damaged and unsupported models are refused here."""
    from disaggregated_inference.models import ModelStore
    from disaggregated_inference.models.registered_names import bare_name

    chosen = bare_name(name) or (path.stem if path.suffix == ".gguf" else path.expanduser().absolute().name)
    store = ModelStore()
    before = store.names.get(chosen, {})
    added = store.add(chosen, path, copy)
    was = before.get(added.kind, str(added.path))
    instead = f" (before: {was})" if was != str(added.path) else ""
    engines = " or ".join(added.engines)
    how = f"serve it with --engine {engines}" if engines else "no engine on this machine can load it"
    typer.echo(f"{added.name} is {added.path}{instead} ({added.spec.architecture}); {how}")


@models_app.command("remove")
def remove_model(name: Annotated[str, typer.Argument(help="As it was given to import.")]) -> None:
    """Forget an imported name. What `import --copy` copied is deleted; nothing else is."""
    from disaggregated_inference.models import ModelStore

    deleted = ModelStore().remove(name)
    typer.echo(f"{name} is forgotten" + "".join(f"; deleted {folder}" for folder in deleted))


@models_app.command("verify")
def verify_models(
    mine: Place,
    theirs: Place,
    token: Annotated[str, typer.Option(envvar="DISAGG_TOKEN", help="That a node among them wants.")] = "",
    full: Annotated[bool, typer.Option("--full", help="Compare every byte of the weights; both must be here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Whether two copies, here or on two machines, are one model between which a cache may move.

    Norms are compared, and a sample of every tensor; of weights stored differently, values, but for rounding: rows of
    most tensors where both files are here, else the few that a node tells. Of what cannot be read as numbers (MLX's own
    quantization, FP8, IQ4_NL) only norms are compared. The answer says what was.
    The exit code is 0 if they are. For a machine that runs no node: `disagg models inspect NAME --json > there.json`.
    """
    from disaggregated_inference.cli.progress import steps
    from disaggregated_inference.models import ModelStore
    from disaggregated_inference.models.description import told_of, verdict

    with steps() as progress:
        here, there = told_of((mine, theirs), ModelStore(), token, progress)
        words, differences = verdict(here, there, full)
    if as_json:
        told = {"same": not differences, "verdict": words, "differences": differences}
        typer.echo(json.dumps(told, indent=2))
    else:
        typer.echo(words + (":" if differences else "") + "".join(f"\n  {line}" for line in differences))
    raise typer.Exit(1 if differences else 0)


def _lines(told: dict[str, Any]) -> list[tuple[str, ...]]:
    print_of = told["fingerprint"]
    beyond = ", more than its window" if told["context"] > told["context_window"] else ""
    at = f"{told['context']:,} tokens{beyond}"
    return [
        ("model", told["name"]),
        ("path", told["path"]),
        ("kind", f"{told['kind']}, {told['architecture']}, {told['layers']} layers"),
        ("engines", ", ".join(told["engines"]) or "none on this machine"),
        ("context window", f"{told['context_window']:,} tokens"),
        ("weights", _size(told["weights_bytes"])),
        ("KV cache", f"{told['kv_bytes_per_token']:,} bytes a token; {_size(told['kv_bytes'])} at {at} (16 bit)"),
        ("memory", f"{_size(told['memory_bytes'])} at {at}, before what the engine needs for itself"),
        ("tokenizer", f"{print_of['tokenizer']}, {told['vocabulary']:,} tokens"),
        ("chat template", print_of["chat_template"]),
        ("norms", print_of["weights"]["norms"]),
        ("weights' sample", f"{print_of['weights']['sample']} ({print_of['weights']['format']})"),
    ]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:,.2f} MB"


def _print_table(columns: tuple[str, ...] | None, rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", show_header=columns is not None)
    for column in columns or rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False)
