"""FlashInfer's two paged-attention wrappers in plain torch, with the arguments and the checks of version 0.7.

What `plan` got is what `run` uses; with `use_cuda_graph` that is the contents of the caller's buffers, as on a GPU.
"""

from __future__ import annotations

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        _check(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        _check_metadata(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._qo_indptr = qo_indptr
        self._metadata = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._types = (q_data_type, kv_data_type)
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        keys, values = paged_kv_cache
        heads, kv_heads, dim, page_size = self._sizes
        assert q.is_contiguous()
        assert q.shape == (int(self._qo_indptr[-1]), heads, dim)
        assert keys.shape[1:] == values.shape[1:] == (kv_heads, page_size, dim), "HND"
        assert (q.dtype, keys.dtype) == self._types
        indptr, indices, last_page_len = self._metadata
        output = torch.empty_like(q)
        for request, tail in enumerate(last_page_len.tolist()):
            pages = indices[int(indptr[request]) : int(indptr[request + 1])]
            begin, end = int(self._qo_indptr[request]), int(self._qo_indptr[request + 1])
            length = (len(pages) - 1) * page_size + tail
            own_keys, own_values = (
                cache[pages.long()].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length] for cache in (keys, values)
            )
            for row in range(begin, end):
                visible = length - (end - 1 - row)
                query = q[row].view(kv_heads, -1, dim)
                scores = query @ own_keys[:, :visible].transpose(1, 2) * self._scale
                output[row] = (scores.softmax(-1) @ own_values[:, :visible]).reshape(heads, dim)
        return output


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        _check(float_workspace_buffer, kv_layout, backend)
        assert use_tensor_cores, "without them the number of query heads per key head is limited"
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._buffers: tuple[torch.Tensor, ...] | None = None
        if use_cuda_graph:
            self._buffers = tuple(buffer for buffer in buffers if buffer is not None)
            assert len(self._buffers) == 3
            assert len(self._buffers[0]) == len(self._buffers[2]) + 1
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        if self._buffers is not None:
            assert len(last_page_len) == len(self._buffers[2]), "the batch size is fixed"
            assert len(indices) <= len(self._buffers[1])
            for buffer, given in zip(self._buffers, (indptr, indices, last_page_len), strict=True):
                assert buffer.dtype == torch.int32
                buffer[: len(given)].copy_(given)
            indptr, indices, last_page_len = self._buffers
        self._prefill.plan(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            causal=True,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self._prefill.run(q, paged_kv_cache)


def _check(workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
    assert workspace.numel() * workspace.element_size() >= 128 * 2**20
    assert kv_layout == "HND"
    assert backend == "fa2"


def _check_metadata(indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> None:
    for tensor in (indptr, indices, last_page_len):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert indptr[0] == 0
    assert (indptr[1:] > indptr[:-1]).all()
    assert indptr[-1] <= len(indices)
    assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
