"""How vLLM's pages hold keys and values, by version and device, and how rows are taken out of them.

A *slot* is a token's place in a layer's pages: block number times block length, plus the place in the block. Blocks
come in any order. A layout that is not known here is refused by name when vLLM starts: it must never be guessed.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class PagesUnsupported(RuntimeError):
    """These pages have a layout, or a dtype, that the connector does not know."""


class Pages(Protocol):
    """One page layout. `index` prepares the slots of several prompts once for all layers of a group; `gather` returns
    their keys and values, `[2, tokens, heads, head_dim]` and contiguous, one tensor per prompt."""

    name: str
    block: int  # tokens of a page

    def index(self, slots: Sequence[np.ndarray]) -> Any: ...

    def gather(self, pages: torch.Tensor, index: Any) -> list[torch.Tensor]: ...


class RowPages:
    """`[blocks, 2, block, heads, dim]`, contiguous (vLLM 0.25 on CUDA, NHD): a token's keys are one row of the flat
    pages, its values another. One kernel per layer takes the rows of all prompts."""

    name = "block, keys and values, token, head"

    def __init__(self, block: int, device: torch.device) -> None:
        self.block, self._device = block, device

    def index(self, slots: Sequence[np.ndarray]) -> Any:
        keys = [each + each // self.block * self.block for each in slots]
        rows = np.concatenate([part for each in keys for part in (each, each + self.block)])
        return _to_device(rows, self._device), [2 * len(each) for each in slots]

    def gather(self, pages: torch.Tensor, index: Any) -> list[torch.Tensor]:
        rows, sizes = index
        heads, dim = pages.shape[3:]
        taken = torch.index_select(pages.view(-1, heads, dim), 0, rows)
        return [part.view(2, -1, heads, dim) for part in taken.split(sizes)]


class SplitPages:
    """`[blocks, 2, block, heads, dim]` with any strides (vLLM 0.25 on CUDA, HND)."""

    name = "block, keys and values, any strides"

    def __init__(self, block: int, device: torch.device) -> None:
        self.block, self._device = block, device

    def index(self, slots: Sequence[np.ndarray]) -> Any:
        return [
            (_to_device(each // self.block, self._device), _to_device(each % self.block, self._device))
            for each in slots
        ]

    def gather(self, pages: torch.Tensor, index: Any) -> list[torch.Tensor]:
        tokens_first = self.tokens_first(pages)
        return [tokens_first[blocks, places].transpose(0, 1).contiguous() for blocks, places in index]

    def tokens_first(self, pages: torch.Tensor) -> torch.Tensor:
        """As `[blocks, block, 2, heads, dim]`."""
        return pages.permute(0, 2, 1, 3, 4)


class FusedPages(SplitPages):
    """`[blocks, heads, block, 2 * dim]` with any strides: a head's keys, then its values (vLLM 0.32 on CUDA)."""

    name = "block, head, token, keys beside values"

    def tokens_first(self, pages: torch.Tensor) -> torch.Tensor:
        return pages.unflatten(3, (2, -1)).permute(0, 2, 3, 1, 4)


class CpuPages:
    """`[blocks, heads, block, 2 * dim]` where the first half of a head's page holds the keys as `[dim, block]`, the
    second its values as `[block, dim]` (vLLM's CPU backend without AMX)."""

    name = "block, head, keys by dimension, values by token"

    def __init__(self, block: int) -> None:
        self.block = block

    def index(self, slots: Sequence[np.ndarray]) -> Any:
        return [(torch.from_numpy(each // self.block), torch.from_numpy(each % self.block)) for each in slots]

    def gather(self, pages: torch.Tensor, index: Any) -> list[torch.Tensor]:
        blocks, heads, block, twice = pages.shape
        halves = pages.view(blocks, heads, 2, block * twice // 2)
        keys = halves[:, :, 0].unflatten(2, (twice // 2, block))
        values = halves[:, :, 1].unflatten(2, (block, twice // 2))
        return [torch.stack((keys[at, :, :, place], values[at, :, place])) for at, place in index]


def find_pages(pages: torch.Tensor, heads: int, dim: int, block: int, isa: str | None = None) -> Pages:
    """The layout of a layer's pages, for `heads` KV heads of `dim` and blocks of `block` tokens. `isa` is what vLLM's
    CPU attention computes with: it also decides how keys are packed."""
    if pages.dtype not in DTYPES:
        raise PagesUnsupported(f"KV pages of {pages.dtype}: start vLLM with --kv-cache-dtype auto")
    shape = tuple(pages.shape[1:])
    if pages.device.type == "cpu" and len(shape) == 3 and shape[0] == heads and shape[2] == 2 * dim:
        found = CpuPages(shape[1])
        if isa is None or not _cpu_pages_are_right(found, pages, isa):
            raise PagesUnsupported(f"vLLM's CPU attention ({isa}) packs its keys in a way that is not known here")
        return found
    if len(shape) == 4 and shape[0] == 2 and shape[2:] == (heads, dim) and block % shape[1] == 0:
        return (RowPages if pages.is_contiguous() else SplitPages)(shape[1], pages.device)
    if len(shape) == 3 and shape[0] == heads and shape[2] == 2 * dim and block % shape[1] == 0:
        return FusedPages(shape[1], pages.device)
    raise PagesUnsupported(
        f"KV pages of shape {tuple(pages.shape)}, strides {pages.stride()}, on {pages.device}, for {heads} heads of"
        f" {dim} and blocks of {block}: this page layout is not known"
    )


def _cpu_pages_are_right(found: CpuPages, pages: torch.Tensor, isa: str) -> bool:
    """Let vLLM's own kernel write known rows into empty pages, and read them back."""
    from vllm import _custom_ops as ops

    _, heads, block, twice = pages.shape
    dim = twice // 2
    fresh = torch.zeros((3, heads, block, twice), dtype=pages.dtype)
    keys, values = (torch.randn(2 * block, heads, dim).to(pages.dtype) for _ in range(2))
    slots = torch.cat((torch.arange(2 * block, 3 * block), torch.arange(block)))
    key_pages, value_pages = fresh.view(3, heads, 2 * block, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_pages, value_pages, slots, isa)
    taken = found.gather(fresh, found.index([slots.numpy()]))[0]
    return bool(torch.equal(taken[0], keys) and torch.equal(taken[1], values))


def _to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Without waiting for the device."""
    found = torch.from_numpy(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)
