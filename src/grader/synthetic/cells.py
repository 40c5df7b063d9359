"""Cells and notebooks of nbformat 4, written by hand."""

import json
from typing import Any

_KERNELS = {
    "python": {"name": "python3", "language": "python", "display_name": "Python 3"},
    "r": {"name": "ir", "language": "R", "display_name": "R"},
}


def text(source: str, *tags: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {"tags": list(tags)}, "source": source}


def code(source: str, *outputs: dict[str, Any], tags: tuple[str, ...] = (), count: int | None = -1) -> dict[str, Any]:
    """A code cell; `count=None`: it did not run."""
    return {
        "cell_type": "code",
        "metadata": {"tags": list(tags)},
        "source": source,
        "outputs": list(outputs),
        "execution_count": count,
    }


def printed(words: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": words}


def result(plain: str, **mimes: str) -> dict[str, Any]:
    data = {"text/plain": plain, **{mime.replace("_", "/"): value for mime, value in mimes.items()}}
    return {"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": 1}


def failed(name: str, value: str) -> dict[str, Any]:
    return {"output_type": "error", "ename": name, "evalue": value, "traceback": [f"{name}: {value}"]}


def notebook_bytes(*cells: dict[str, Any], language: str = "python") -> bytes:
    """Cells without a count get the next one."""
    counted, count = [], 0
    for i, cell in enumerate(cells):
        cell = {"id": f"c{i}", **cell}
        if cell.get("execution_count") == -1:
            count += 1
            cell["execution_count"] = count
        counted.append(cell)
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": _KERNELS[language]}, "cells": counted}
    return json.dumps(content).encode()
