"""`help()` and notebooks show every option of `generate`, although it takes them as typed keyword arguments."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from disaggregated_inference.api.requests import GenerateOptions

Function = TypeVar("Function", bound=Callable[..., Any])


def named_options(function: Function) -> Function:
    """Puts the options of `GenerateOptions` in the place of `**options` in the signature."""
    signature = inspect.signature(function)
    named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in get_type_hints(GenerateOptions).items()
    ]
    function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    function.__doc__ = f"{function.__doc__}\n\n{inspect.getdoc(GenerateOptions)}"
    return function
