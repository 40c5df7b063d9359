"""Which versions of the engines' packages are installed, and whether they were tested. No engine is imported."""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

# At least, and below: as pyproject.toml has them. Engines that read no internals have a range.
RANGES = {"torch": ((2, 6), (99,)), "transformers": ((5, 7), (6,)), "mlx": ((0, 32, 4), (99,))}
PACKAGES = {
    "torch": ("torch", "transformers"),
    "mlx": ("mlx", "mlx-lm"),
    "llamacpp": ("xllamacpp", "llama-cpp-python"),
}


class EnginePackage(NamedTuple):
    """`installed` is empty if it is missing; `tested` says in words which versions were tested."""

    name: str
    installed: str
    tested: str
    is_tested: bool


def engine_packages(engine: str) -> list[EnginePackage]:
    """The packages of an engine. Of alternatives (llama.cpp's), those that are installed, else the first."""
    found = [_package(name) for name in PACKAGES.get(engine, ())]
    if engine != "llamacpp":
        return found
    return [package for package in found if package.installed] or found[:1]


@cache
def _tested() -> dict[str, tuple[str, ...]]:
    """Each engine's own list, of packages whose internals it reads."""
    from disaggregated_inference.engines.llamacpp import library
    from disaggregated_inference.engines.mlx import versions

    return {"mlx-lm": versions.TESTED_VERSIONS, **library.TESTED_VERSIONS}


def _package(name: str) -> EnginePackage:
    try:
        installed = version(name).partition("+")[0]  # +cu124: the same sources, built for CUDA
    except PackageNotFoundError:
        installed = ""
    if tested := _tested().get(name):
        return EnginePackage(name, installed, ", ".join(tested), installed in tested)
    least, below = RANGES[name]
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:3])
    words = f"{_dotted(least)} or newer" + ("" if below == (99,) else f", below {_dotted(below)}")
    return EnginePackage(name, installed, words, least <= numbers < below)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
