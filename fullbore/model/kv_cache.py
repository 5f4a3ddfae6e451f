"""Keys and values of all requests in one stage's layers, in fixed-size blocks that the driver hands out."""

from __future__ import annotations

import math
import mmap

import torch


class KVCache:
    """Per layer, head-major: keys [num_blocks, num_heads, page_size, k_head_dim], values alike with v_head_dim.

    Layers go by their global index, as everywhere: layers `first_layer` … `first_layer + num_layers - 1` are here.
    A token's slot is block * page_size + offset. Rows below address the memory that has all heads of a slot or block:
    slot rows in units of one head's vector, block rows in units of one head's page.
    """

    def __init__(
        self,
        first_layer: int,
        num_layers: int,
        num_blocks: int,
        num_heads: int,
        page_size: int,
        k_head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.first_layer = first_layer
        self.num_blocks = num_blocks
        self.num_heads = num_heads
        self.page_size = page_size

        def blocks(head_dim: int) -> list[torch.Tensor]:
            shape = (num_blocks, num_heads, page_size, head_dim)
            return [_zeros(shape, dtype, device) for _ in range(num_layers)]

        self.keys = blocks(k_head_dim)
        self.values = blocks(v_head_dim)
        self._gathered_keys = torch.empty(0, dtype=dtype, device=device)
        self._gathered_values = torch.empty(0, dtype=dtype, device=device)

    @staticmethod
    def block_bytes(
        num_layers: int, num_heads: int, page_size: int, k_head_dim: int, v_head_dim: int, dtype: torch.dtype
    ) -> int:
        """Memory of one block over all layers of the stage."""
        return num_layers * num_heads * page_size * (k_head_dim + v_head_dim) * dtype.itemsize

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows for `write`: slots [tokens] -> [tokens * num_heads], all heads of a token together."""
        heads = torch.arange(self.num_heads, device=slots.device)
        blocks, offsets = slots // self.page_size, slots % self.page_size
        return ((blocks[:, None] * self.num_heads + heads) * self.page_size + offsets[:, None]).flatten()

    def block_rows(self, block_table: torch.Tensor) -> torch.Tensor:
        """Rows for `gather`: block table [runs, blocks] -> [runs * num_heads * blocks]."""
        heads = torch.arange(self.num_heads, device=block_table.device)
        return (block_table[:, None, :] * self.num_heads + heads[None, :, None]).flatten()

    def clear(self, layer: int, block_rows: torch.Tensor) -> None:
        """Zeroes blocks, so that what their last owner left (NaN, if its activations overflowed) reaches nobody."""
        index = layer - self.first_layer
        for cache in (self.keys[index], self.values[index]):
            cache.view(-1, self.page_size * cache.shape[-1]).index_fill_(0, block_rows, 0)

    def write(self, layer: int, slot_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [tokens, num_heads, head_dim] of one layer at their slots."""
        index = layer - self.first_layer
        for cache, new in ((self.keys[index], keys), (self.values[index], values)):
            head_dim = cache.shape[-1]
            cache.view(-1, head_dim).index_copy_(0, slot_rows, new.reshape(-1, head_dim))

    def gather(self, layer: int, block_rows: torch.Tensor, num_runs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies the blocks of some runs side by side: keys and values [num_runs, num_heads, length, head_dim].

        The memory is reused by the next call.
        """
        index = layer - self.first_layer
        self._gathered_keys, keys = self._gather(self.keys[index], self._gathered_keys, block_rows, num_runs)
        self._gathered_values, values = self._gather(self.values[index], self._gathered_values, block_rows, num_runs)
        return keys, values

    def _gather(
        self, cache: torch.Tensor, buffer: torch.Tensor, block_rows: torch.Tensor, num_runs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head_dim = cache.shape[-1]
        page_elements = self.page_size * head_dim
        num_rows = len(block_rows)
        rows = cache.view(-1, page_elements)
        if not cache.is_cpu:  # torch keeps what is freed there; and a CUDA graph must not use what is replaced later
            return buffer, torch.index_select(rows, 0, block_rows).view(num_runs, self.num_heads, -1, head_dim)
        if buffer.numel() < num_rows * page_elements:  # fresh memory for each call would cost more than the copy
            buffer = cache.new_empty(num_rows * page_elements)
        gathered = buffer[: num_rows * page_elements].view(num_rows, page_elements)
        torch.index_select(rows, 0, block_rows, out=gathered)
        return buffer, gathered.view(num_runs, self.num_heads, -1, head_dim)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros, since attention multiplies what lies behind the end of a request by 0, and 0 * NaN is NaN.

    On CPU they are fresh pages of the system, which take memory only once a block is used.
    """
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
