"""Attention over the arena: prefill chunks and batched decode, causal or windowed, with or without sinks.

On CUDA in half precision everything runs in fused kernels without a mask: a mask would leave the fast path (measured
12.4k instead of 20.0k tok/s at 32k). The flash kernel aligns causality to the last key, so a chunk after a prefix needs
no mask, and it supports windows. Where torch prefers cuDNN (Hopper: twice as fast), most of a large chunk runs
there in two parts, the earlier tokens and the causal square, joined by their log-sum-exp. A sink follows exactly from
the log-sum-exp too: softmax with a sink s is softmax without it, times sigmoid(lse - s).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from disaggregated_inference.engines.torch import fused_kernels

# cuDNN plans (35 ms, measured) for every new shape, so it only gets multiples of this; the rest of a chunk goes to the
# flash kernel, which is as fast for so few tokens.
_CUDNN_TOKENS = 2048
_GATHERED_ROWS = 2048  # of all sequences of a step: see Rows
_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in _FLASH_DTYPES and torch.version.hip is None


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, sinks: Tensor | None) -> Tensor:
    """[n, heads, dim] queries, the last n of the T rows in [T, kv_heads, dim] keys; returns [n, heads, dim]."""
    if has_flash(query.device, query.dtype):
        return _fused_chunk(query, keys, values, scale, window, sinks)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, keys, values))
    if sinks is not None:
        return _with_sinks(q, k, v, scale, window, sinks)
    n, total = q.shape[2], k.shape[2]
    if n == 1:  # heads of one KV head as queries of one head: the same result, cheaper
        grouped = q.reshape(1, k.shape[1], -1, q.shape[3])
        return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(1, *query.shape[1:])
    full = n == total and (not window or total <= window)
    mask = None if full else _causal_mask(n, total, window, q.device)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=full, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return out[0].transpose(0, 1)


class Rows(NamedTuple):
    """The rows of a batch's sequences, for devices without the flash kernel."""

    spans: list[slice]
    gathered: Tensor | None = None  # of all sequences, padded to the longest; only if that is little to copy
    mask: Tensor | None = None

    @classmethod
    def of(cls, spans: list[slice], device: torch.device) -> "Rows":
        """For short sequences, one call for each costs more than the attention itself: gather their rows."""
        lengths = [span.stop - span.start for span in spans]
        if len(spans) == 1 or len(spans) * max(lengths) > _GATHERED_ROWS:
            return cls(spans)
        places, counts = torch.arange(max(lengths))[None], torch.tensor(lengths)[:, None]
        inside = places < counts
        rows = torch.tensor([span.start for span in spans])[:, None] + torch.where(inside, places, 0)
        mask = None if min(lengths) == max(lengths) else inside[:, None, None].to(device)
        return cls(spans, rows.flatten().to(device), mask)

    def of_all(self, layer: Tensor) -> Tensor:
        """[sequences, kv_heads, rows, dim] of a layer's [rows, kv_heads, dim]; of one sequence without a copy."""
        if self.gathered is None:
            span = self.spans[0]
            return layer.narrow(0, span.start, span.stop - span.start).transpose(0, 1).unsqueeze(0)
        return layer.index_select(0, self.gathered).unflatten(0, (len(self.spans), -1)).transpose(1, 2)


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, scale: float, rows: Rows, sinks: Tensor | None) -> Tensor:
    """One [heads, dim] query per sequence over its rows; returns [sequences, 1, heads, dim]."""
    size = query.shape[0]
    if sinks is not None or (rows.gathered is None and size > 1):
        each = zip(query, rows.spans, strict=True)
        return torch.stack([attend(q[None], keys[at], values[at], scale, 0, sinks) for q, at in each])
    k, v = rows.of_all(keys), rows.of_all(values)
    grouped = query.reshape(size, k.shape[1], -1, k.shape[3])  # heads that share KV rows become queries of one head
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=rows.mask, scale=scale)
    return out.reshape(size, 1, -1, k.shape[3])


def _causal_mask(n: int, total: int, window: int, device: torch.device) -> Tensor:
    """[n, total], true where a query may attend; queries are the last n positions."""
    behind = torch.arange(total - n, total, device=device)[:, None] - torch.arange(total, device=device)[None]
    return (behind >= 0) & (behind < window) if window else behind >= 0


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, sinks: Tensor) -> Tensor:
    """The plain formula, for devices without the flash kernel."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(2, 3)) * scale
    if q.shape[2] > 1:
        allowed = _causal_mask(q.shape[2], k.shape[2], window, q.device)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1).float(), dim=-1)[..., :-1].to(v.dtype)
    return (weights @ v)[0].transpose(0, 1)


def _fused_chunk(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, sinks: Tensor | None
) -> Tensor:
    n, past = query.shape[0], keys.shape[0] - query.shape[0]
    head = 0 if window or past % _CUDNN_TOKENS else n - n % _CUDNN_TOKENS
    if head and _prefers_cudnn(query, keys, values):
        out, lse = _cudnn_chunk(query[:head], keys[: past + head], values[: past + head], scale)
        if head < n:
            tail, tail_lse = _flash(query[head:], keys, values, scale, 0)
            out, lse = torch.cat([out, tail]), torch.cat([lse, tail_lse], dim=1)
    else:
        out, lse = _flash(query, keys, values, scale, window)
    return _apply_sinks(out, lse, sinks)


def _flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Output [n, heads, dim] and log-sum-exp [heads, n]. One query forgets the window: its keys must be the window."""
    n, total = query.shape[0], keys.shape[0]
    assert not window or total < n + window
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query[None], keys[None], values[None], None, None, n, total, 0.0, True, False,
        scale=scale, window_size_left=window - 1 if window else -1, window_size_right=0,
    )  # fmt: skip
    return out[0], lse[0]


def _cudnn_chunk(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cuDNN aligns causality to the first key, so the causal square and the earlier keys are two calls, then joined."""
    past = keys.shape[0] - query.shape[0]
    out, lse = _cudnn(query, keys[past:], values[past:], scale, causal=True)
    if not past:
        return out, lse
    before, before_lse = _cudnn(query, keys[:past], values[:past], scale, causal=False)
    both_lse = torch.logaddexp(lse, before_lse)
    if fused_kernels.work(out.device, out.dtype):
        return fused_kernels.join(out, lse, before, before_lse), both_lse
    share = torch.sigmoid(before_lse - lse).transpose(0, 1).unsqueeze(-1)
    return torch.lerp(out.float(), before.float(), share).to(out.dtype), both_lse


def _prefers_cudnn(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """torch's own choice for this device and shape."""
    q, k, v = (t[:_CUDNN_TOKENS].transpose(0, 1).unsqueeze(0) for t in (query, keys, values))
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def _cudnn(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, keys, values))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out[0].transpose(0, 1), lse[0].reshape(query.shape[1], -1)


def flash_ranges(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    max_queries: int,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Each sequence's queries over its rows of the arena, causal to its last row. No shape depends on the lengths, as a
    CUDA graph requires."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, keys, values, query_starts, starts, max_queries, keys.shape[0], 0.0, max_queries > 1, False,
        scale=scale, seqused_k=lengths,
    )  # fmt: skip
    return _apply_sinks(out, lse, sinks)


def _apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """`out` is [n, heads, dim], `lse` [heads, n]."""
    if sinks is None:
        return out
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return (out * share.transpose(0, 1).unsqueeze(-1)).to(out.dtype)
