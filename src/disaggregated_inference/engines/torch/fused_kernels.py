"""Fused CUDA kernels: without them, transformers spends most of a prefill in elementwise passes.

Each computes what transformers computes, rounding in the same places. They use Triton, which comes with torch's CUDA
builds; if it is missing or cannot compile, that is logged once and transformers' code runs instead.
"""

import logging
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover  every CUDA build on Linux has it
    triton = None

log = logging.getLogger(__name__)

EXPERTS_NAME = "disagg_grouped"
_NORMS = ("LlamaRMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm

if triton:

    @triton.jit
    def _rms_norm_kernel(  # type: ignore[no-untyped-def]
        x, weight, out, rows, width, eps, many: tl.constexpr, block: tl.constexpr
    ):
        row = tl.program_id(0) * many + tl.arange(0, many)[:, None]
        column = tl.arange(0, block)[None]
        inside = (row < rows) & (column < width)
        at = row.to(tl.int64) * width + column
        value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / width + eps)
        factor = tl.load(weight + column, mask=column < width, other=0)
        tl.store(out + at, (value * scale).to(out.dtype.element_ty) * factor, mask=inside)

    @triton.jit
    def _gate_kernel(x, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0)
        tl.store(out + row * width + column, (gate * tl.sigmoid(gate)).to(out.dtype.element_ty) * up, mask=inside)

    @triton.jit
    def _combine_kernel(  # type: ignore[no-untyped-def]
        x, places, weights, out, width, chosen: tl.constexpr, block: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < width
        total = tl.zeros((block,), tl.float32)
        for choice in range(chosen):
            row = tl.load(places + token * chosen + choice)
            weight = tl.load(weights + token * chosen + choice)
            total += (tl.load(x + row * width + column, mask=inside, other=0) * weight).to(tl.float32)
        tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _join_kernel(  # type: ignore[no-untyped-def]
        out, lse, other, other_lse, count, out_token, out_head, other_token, other_head, width: tl.constexpr
    ):
        token, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, width)
        at = out + token * out_token + head * out_head + column
        share = tl.sigmoid(tl.load(other_lse + head * count + token) - tl.load(lse + head * count + token))
        value = tl.load(at).to(tl.float32)
        second = tl.load(other + token * other_token + head * other_head + column).to(tl.float32)
        tl.store(at, (value + share * (second - value)).to(out.dtype.element_ty))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    width = x.shape[-1]
    rows, out = x.numel() // width, torch.empty_like(x)
    block = triton.next_power_of_2(width)
    per_program = max(1, 2048 // block)
    _rms_norm_kernel[(triton.cdiv(rows, per_program),)](x, weight, out, rows, width, eps, per_program, block)
    return out


def gate(x: Tensor) -> Tensor:
    """silu of the left half of each row, times the right half."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _gate_kernel[(rows,)](x, out, width, triton.next_power_of_2(width))
    return out


def combine(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """For each token the weighted sum of its experts' rows: `places` and `weights` are [tokens, chosen]."""
    (tokens, chosen), width = places.shape, x.shape[1]
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    _combine_kernel[(tokens, triton.cdiv(width, 1024))](x, places, weights, out, width, chosen, 1024)
    return out


def join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Join attention over two sets of keys, in the first's memory: [n, heads, dim], log-sum-exps [heads, n]."""
    count, heads, width = out.shape
    lse, other_lse = lse.contiguous(), other_lse.contiguous()
    strides = (out.stride(0), out.stride(1), other.stride(0), other.stride(1))
    _join_kernel[(count, heads)](out, lse, other, other_lse, count, *strides, width)
    return out


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A mixture of gated experts: rows sorted by expert, two grouped products, and back."""
    experts, order = torch.sort(chosen.reshape(-1))
    counts = torch.histc(experts.int(), bins=module.num_experts, min=0, max=module.num_experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    rows = hidden[order // chosen.shape[1]]
    rows = gate(_grouped_mm(rows, module.gate_up_proj.transpose(1, 2), offs=offsets))
    rows = _grouped_mm(rows, module.down_proj.transpose(1, 2), offs=offsets)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return combine(rows, places.view_as(chosen), weights.contiguous())


ExpertsInterface.register(EXPERTS_NAME, _experts)


def _norm(module: Any, hidden: Tensor) -> Tensor:
    return rms_norm(hidden, module.weight, module.variance_epsilon)


def install(model: Any) -> None:
    """Use the kernels in a model, if they work and fit it."""
    if not work(model.device, model.dtype):
        return
    for module in _norms(model):
        module.forward = MethodType(_norm, module)
    if model.config.model_type == "qwen3_moe" and model.config.hidden_act == "silu":
        model.config._experts_implementation = EXPERTS_NAME


def remove(model: Any) -> None:
    """Restore transformers' code."""
    for module in _norms(model):
        if "forward" in vars(module):
            del module.forward
    if model.config._experts_implementation == EXPERTS_NAME:
        model.config._experts_implementation = "grouped_mm"


def _norms(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in _NORMS]


@lru_cache
def work(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel compiles and agrees with its formula: a missing compiler must not fail a request."""
    if triton is None or device.type != "cuda":
        return False
    try:
        x = torch.randn(3, 96, device=device, dtype=dtype)
        left, right = x.chunk(2, dim=-1)
        return bool((gate(x) - F.silu(left) * right).abs().max() < 0.05)
    except Exception as error:
        log.warning("fused kernels do not work here, prefill will be slower: %s", error)
        return False
