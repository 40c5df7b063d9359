"""Made-up weights for `vllm serve --load-format dummy`. It runs inside vLLM, as a plugin, and imports nothing of ours.

vLLM's own made-up weights are nearly zero, and its packed ones are zero: both compute faster than a real model's.
"""

from typing import Any


def install() -> None:
    """vLLM calls it in each of its processes, before it loads a model."""
    from vllm.model_executor.model_loader import dummy_loader

    dummy_loader.initialize_dummy_weights = _fill


def _fill(model: Any, *_: Any, **__: Any) -> None:
    import torch

    done: set[int] = set()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.data_ptr() not in done and weight.device.type != "meta":
                done.add(weight.data_ptr())
                _fill_one(torch, name, weight)


def _fill_one(torch: Any, name: str, weight: Any) -> None:
    if weight.dtype == torch.uint8:  # MXFP4: packed values, and their scales as exponents
        weight.random_(118, 123) if "scale" in name else weight.random_(0, 256)
    elif torch.is_floating_point(weight):
        weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.02)
