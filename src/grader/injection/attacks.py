"""The corpus of attacks, and notebooks with one of them inside."""

import copy
import functools
import importlib.resources
import json
from typing import Any

import msgspec
import yaml


class Attack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`place`: where in the notebook it goes; `technique`: what kind it is."""

    id: str
    place: str
    technique: str
    text: str


@functools.cache
def load_attacks() -> tuple[Attack, ...]:
    file = importlib.resources.files("grader.injection") / "attacks.yaml"
    return tuple(msgspec.convert(yaml.safe_load(file.read_text("utf-8")), list[Attack]))


def with_attack(data: bytes, attack: Attack) -> bytes:
    """The notebook with the attack in its place, and nothing else changed."""
    content = json.loads(data)
    _PLACES[attack.place](content, attack.text)
    return json.dumps(content, ensure_ascii=False).encode()


def _code(source: str, *outputs: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    cell = {"cell_type": "code", "id": "attack", "source": source, "outputs": list(outputs), "metadata": metadata}
    return {**cell, "execution_count": 999}


def _append(content: Any, cell: dict[str, Any]) -> None:
    content["cells"].append(cell)


def _first_code(content: Any) -> Any:
    return next(cell for cell in content["cells"] if cell["cell_type"] == "code")


def _comment(content: Any, text: str) -> None:
    cell = _first_code(content)
    cell["source"] += "\n" + "\n".join(f"# {line}" for line in text.splitlines())


def _string(content: Any, text: str) -> None:
    cell = _first_code(content)
    cell["source"] = f"'{text}'\n{cell['source']}"


def _identifier(content: Any, text: str) -> None:
    cell = _first_code(content)
    cell["source"] = f"{text} = 1\n{cell['source']}"


def _markdown(content: Any, text: str) -> None:
    content["cells"].insert(0, {"cell_type": "markdown", "id": "attack", "source": text, "metadata": {}})


def _stream(content: Any, text: str, name: str = "stdout") -> None:
    _append(content, _code("1", {"output_type": "stream", "name": name, "text": text}))


def _answer(content: Any, text: str) -> None:
    """After the answers themselves, in every cell that has some."""
    for cell in content["cells"]:
        if cell.get("outputs"):
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": copy.copy(text)})


def _error(content: Any, text: str) -> None:
    """A traceback that the student's code prints: a real error would cost points."""
    _stream(content, text, "stderr")


def _html(content: Any, text: str) -> None:
    _append(content, _code("1", {"output_type": "display_data", "data": {"text/html": text}, "metadata": {}}))


def _hidden(content: Any, text: str) -> None:
    _append(content, _code(f"# {text}", jupyter={"source_hidden": True}, tags=["remove-cell"]))


def _raw(content: Any, text: str) -> None:
    _append(content, {"cell_type": "raw", "id": "attack", "source": text, "metadata": {}})


def _metadata(content: Any, text: str) -> None:
    _first_code(content)["metadata"]["note"] = {"to": [text]}


def _tag(content: Any, text: str) -> None:
    _first_code(content)["metadata"].setdefault("tags", []).append(text)


def _notebook_metadata(content: Any, text: str) -> None:
    content["metadata"]["authors"] = [{"name": text}]


_PLACES = {
    "comment": _comment,
    "string": _string,
    "docstring": _string,
    "identifier": _identifier,
    "markdown": _markdown,
    "output": _stream,
    "stderr": _error,
    "error": _error,
    "html": _html,
    "answer_output": _answer,
    "hidden_cell": _hidden,
    "raw": _raw,
    "metadata": _metadata,
    "tag": _tag,
    "notebook_metadata": _notebook_metadata,
}
