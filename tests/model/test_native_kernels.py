"""Our C++ kernels against torch, over odd sizes; every result must be independent of what else is in the batch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from fullbore.model.kv_cache import KVCache
from fullbore.model.native.build import find_compiler, load_library
from fullbore.model.native.cpu_kernels import CpuKernels
from fullbore.model.native.cpu_layers import ADD, GATE
from fullbore.model.native.kernels import HeadShape, LayerWeights, Linear
from fullbore.scheduler.micro_batch import MicroBatch, Run

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
THREADS = pytest.mark.parametrize("num_threads", [1, 3])


def make_kernels(dtype: torch.dtype = torch.float32, num_threads: int = 1) -> CpuKernels:
    library = load_library()
    assert library is not None
    return CpuKernels(library, dtype, num_threads)


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    make_kernels()


def random_weights(kernels: CpuKernels, rows: int, inputs: int, dtype: torch.dtype, **settings: bool) -> torch.Tensor:
    """Reserves room for them, too."""
    outputs = rows // 2 if settings.get("is_gated") else rows
    kernels.reserve(kernels.packed_bytes(outputs, inputs, dtype, **settings))
    return (torch.randn(rows, inputs) / math.sqrt(inputs)).to(dtype)


def gated(kernels: CpuKernels, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return kernels.linear_into(linear, x, torch.full((len(x), linear.outputs), float("nan")), GATE)


# ---------------------------------------------------------------------------------------------------- linear layers


@DTYPES
@THREADS
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 64), (259, 64), (96, 7), (50, 130), (1000, 33)])
def test_linear_layers_of_any_size(outputs: int, inputs: int, dtype: torch.dtype, num_threads: int) -> None:
    torch.manual_seed(outputs)
    kernels = make_kernels(dtype, num_threads)
    weight = random_weights(kernels, outputs, inputs, dtype)
    bias = torch.randn(outputs)
    packed = kernels.pack(weight, bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 64):
        x = torch.randn(rows, inputs)
        expected = linear(x, weight.float(), bias)
        torch.testing.assert_close(kernels.linear(packed, x), expected, atol=2e-5, rtol=1e-5)
        residual = torch.randn(rows, outputs)
        before = residual.clone()
        kernels.linear_into(packed, x, residual, ADD)
        torch.testing.assert_close(residual, before + expected, atol=2e-5, rtol=1e-5)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [1, 8, 128, 171])
def test_gated_layers(size: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    kernels = make_kernels(dtype)
    weight = random_weights(kernels, 2 * size, 40, dtype, is_gated=True)
    bias = torch.randn(2 * size) if has_bias else None
    packed = kernels.pack(weight, bias, is_gated=True)
    for rows in (1, 5, 9):
        x = 4 * torch.randn(rows, 40)
        gate, up = linear(x, weight.float(), bias).chunk(2, dim=-1)
        torch.testing.assert_close(gated(kernels, packed, x), silu(gate) * up, atol=2e-5, rtol=2e-5)


@DTYPES
def test_a_row_is_the_same_in_every_batch_and_with_any_number_of_threads(dtype: torch.dtype) -> None:
    kernels = make_kernels(dtype)
    weight = random_weights(kernels, 200, 150, dtype)
    packed = kernels.pack(weight, None)
    x = torch.randn(61, 150)
    alone = torch.cat([kernels.linear(packed, row[None]) for row in x])
    for rows in range(1, 62):
        assert torch.equal(kernels.linear(packed, x[:rows]), alone[:rows])
    make_kernels(dtype, num_threads=3)
    assert torch.equal(kernels.linear(packed, x), alone)


@DTYPES
def test_rows_of_packed_weights(dtype: torch.dtype) -> None:
    kernels = make_kernels(dtype)
    weight = random_weights(kernels, 259, 33, dtype)
    packed = kernels.pack(weight, None, in_rows=True)
    token_ids = torch.tensor([0, 258, 7, 7, 130, 15, 16], dtype=torch.int32)
    assert torch.equal(kernels.rows(packed, token_ids), weight[token_ids.long()].float())


def test_numbers_that_are_not_finite_stay_so() -> None:
    kernels = make_kernels()
    weight = random_weights(kernels, 2 * 20, 20, torch.float32, is_gated=True)
    packed: Linear = kernels.pack(weight, None, is_gated=True)
    x = torch.ones(3, 20)
    x[1, 3] = float("nan")
    out = gated(kernels, packed, x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
def test_weights_of_16_bits_give_the_same_bits_as_wide_ones(dtype: torch.dtype, is_gated: bool) -> None:
    kernels = make_kernels()
    assert kernels.weight_dtype({dtype}) == dtype
    weight = random_weights(kernels, 118, 77, dtype, is_gated=is_gated)
    narrow = kernels.pack(weight, None, is_gated=is_gated)
    kernels.reserve(kernels.packed_bytes(narrow.outputs, 77, torch.float32, is_gated=is_gated))
    wide = kernels.pack(weight.float(), None, is_gated=is_gated)
    token_ids = torch.arange(narrow.outputs, dtype=torch.int32)
    assert is_gated or torch.equal(kernels.rows(narrow, token_ids), weight.float())
    for rows in (1, 2, 3, 6, 20):
        x = torch.randn(rows, 77)
        outs = [gated(kernels, each, x) if is_gated else kernels.linear(each, x) for each in (narrow, wide)]
        assert torch.equal(outs[0], outs[1])


def test_in_which_type_weights_are_kept() -> None:
    kernels = make_kernels()
    assert kernels.weight_dtype({torch.float32}) == torch.float32
    assert kernels.weight_dtype({torch.float16, torch.bfloat16}) == torch.float32
    assert kernels.weight_dtype({torch.float64}) == torch.float32
    assert make_kernels(torch.bfloat16).weight_dtype({torch.float16}) == torch.bfloat16


# -------------------------------------------------------------------------------------------------------- attention


class Case:
    """Requests with random keys and values, attended to by random queries. Positions are rotated by random angles."""

    def __init__(self, shape: HeadShape, page_size: int, dtype: torch.dtype, has_norms: bool = False) -> None:
        self.shape, self.dtype = shape, dtype
        self.cache = KVCache(3, 2, 200, shape.kv_heads, page_size, shape.dim, shape.dim, dtype, "cpu")
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(float("nan"))  # what is read without having been written shows
        norms = [1 + 0.2 * torch.randn(shape.dim) if has_norms else None for _ in range(2)]
        nothing = Linear(torch.empty(0), None, 0, 0)  # only attention is tested here
        vector = torch.empty(0)
        self.weights = LayerWeights(vector, nothing, norms[0], norms[1], nothing, vector, nothing, nothing)
        angles = torch.randn(4096, shape.dim // 2)
        self.rotary = SimpleNamespace(cosines=angles.cos(), sines=angles.sin())
        self.free = random.Random(1).sample(range(200), 200)
        self.qkv: list[torch.Tensor] = []  # per request, of all its tokens
        self.block_ids: list[list[int]] = []

    def add(self, length: int) -> int:
        self.qkv.append(torch.randn(length, self.shape.qkv_size))
        self.block_ids.append([self.free.pop() for _ in range(length // self.cache.page_size + 1)])
        return len(self.qkv) - 1

    def run(self, kernels: CpuKernels, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """For parts (request, start, end): [end - start, heads * dim] each."""
        runs = [Run(who, 0, start, [0] * (end - start), self.block_ids[who], None) for who, start, end in parts]
        batch = kernels.prepare(MicroBatch(0, runs, "slot-freed", 0.0), self.cache)
        qkv = torch.cat([self.qkv[who][start:end] for who, start, end in parts])
        out = torch.full((len(qkv), self.shape.heads * self.shape.dim), float("nan"))
        layers = kernels.layers([self.weights, self.weights], self.shape, 1e-5)
        layers.attend(1, qkv, batch, self.rotary, self.cache, out)
        return list(out.split([end - start for _, start, end in parts]))

    def expect(self, who: int, start: int, end: int) -> torch.Tensor:
        """Dense attention in float64, from keys and values rounded as the cache does."""
        shape = self.shape
        heads = self.qkv[who].view(len(self.qkv[who]), -1, shape.dim)
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        query, key = self._turn(query, self.weights.q_norm), self._turn(key, self.weights.k_norm).to(self.dtype)
        group = shape.heads // shape.kv_heads
        key = key.double().repeat_interleave(group, dim=1)
        value = value.to(self.dtype).double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * shape.dim**-0.5
        is_hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).float().flatten(1)[start:end]

    def _turn(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        x = x if norm is None else rms_norm(x, (self.shape.dim,), norm, 1e-5)
        first, second = x.chunk(2, dim=-1)
        cosines, sines = (table[: len(x), None] for table in (self.rotary.cosines, self.rotary.sines))
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


SHAPES = [
    (HeadShape(9, 3, 64), 16, False),
    (HeadShape(4, 2, 24), 16, True),
    (HeadShape(4, 4, 6), 4, False),
    (HeadShape(5, 1, 34), 5, True),
    (HeadShape(64, 1, 128), 32, False),
    (HeadShape(7, 7, 96), 64, False),
]


@DTYPES
@THREADS
@pytest.mark.parametrize(("shape", "page_size", "has_norms"), SHAPES, ids=str)
def test_chunks_and_decodes_in_one_call(
    shape: HeadShape, page_size: int, has_norms: bool, dtype: torch.dtype, num_threads: int
) -> None:
    torch.manual_seed(page_size)
    kernels = make_kernels(dtype, num_threads)
    case = Case(shape, page_size, dtype, has_norms)
    for length in (70, 33, 1, 100, 16):
        case.add(length)
    calls = [
        [(0, 0, 64), (1, 0, 1), (2, 0, 1), (3, 0, 31)],
        [(3, 31, 99), (0, 64, 65), (1, 1, 32), (4, 0, 15)],
        [(4, 15, 16), (0, 65, 70), (3, 99, 100), (1, 32, 33)],
    ]
    for parts in calls:
        for part, out in zip(parts, case.run(kernels, parts), strict=True):
            torch.testing.assert_close(out, case.expect(*part), atol=2e-5, rtol=1e-4)


def test_a_long_context() -> None:
    torch.manual_seed(0)
    kernels, case = make_kernels(), Case(HeadShape(3, 1, 64), 16, torch.float32)
    who = case.add(3001)
    case.run(kernels, [(who, 0, 3000)])
    (out,) = case.run(kernels, [(who, 3000, 3001)])
    torch.testing.assert_close(out, case.expect(who, 3000, 3001), atol=2e-5, rtol=1e-4)


@DTYPES
def test_attention_does_not_depend_on_chunks_or_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernels, case = make_kernels(dtype), Case(HeadShape(6, 2, 32), 8, dtype)
    who, other = case.add(90), case.add(70)
    (whole,) = case.run(kernels, [(who, 0, 90)])
    pieces = [case.run(kernels, [(who, at, at + 1)])[0] for at in range(90)]
    assert torch.equal(torch.cat(pieces), whole)
    pieces = [case.run(kernels, [(other, at, at + 7), (who, at, at + 9)])[1] for at in range(0, 60, 9)]
    assert torch.equal(torch.cat(pieces), whole[:63])


def test_broken_values_spoil_their_own_request_only() -> None:
    torch.manual_seed(0)
    kernels, case = make_kernels(), Case(HeadShape(4, 2, 16), 8, torch.float32)
    broken, healthy = case.add(20), case.add(20)
    case.qkv[broken][5] = float("nan")
    outs = case.run(kernels, [(broken, 0, 20), (healthy, 0, 20)])
    assert outs[0][5:].isnan().all()
    torch.testing.assert_close(outs[1], case.expect(healthy, 0, 20), atol=2e-5, rtol=1e-4)


def test_what_lies_outside_is_refused() -> None:
    kernels, case = make_kernels(), Case(HeadShape(2, 1, 16), 8, torch.float32)
    for block in (-1, 200):
        run = Run(0, 0, 8, [1], [0, block], None)
        with pytest.raises(IndexError, match="KV blocks beyond the 200"):
            kernels.prepare(MicroBatch(0, [run], "slot-freed", 0.0), case.cache)
    packed = kernels.pack(random_weights(kernels, 30, 16, torch.float32), None)
    for token_id in (-1, 30):
        with pytest.raises(IndexError, match="vocabulary of 30"):
            kernels.rows(packed, torch.tensor([0, token_id], dtype=torch.int32))


# ------------------------------------------------------------------------------------------------- small operations


@pytest.mark.parametrize("size", [1, 5, 32, 64, 100, 576])
def test_rms_norm(size: int) -> None:
    kernels = make_kernels(num_threads=3)
    x, weight = torch.randn(40, size), torch.randn(size)
    expected = rms_norm(x, (size,), weight, 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, atol=1e-6, rtol=1e-5)


def test_several_threads_may_call_at_once() -> None:
    """One of them has the helpers, the others compute alone."""
    kernels = make_kernels(num_threads=2)
    weight = random_weights(kernels, 512, 64, torch.float32)
    packed = kernels.pack(weight, None)
    x = torch.randn(8, 64)
    expected = kernels.linear(packed, x)
    with ThreadPoolExecutor(4) as executor:
        outs = executor.map(lambda _: kernels.linear(packed, x), range(200))
        assert all(torch.equal(out, expected) for out in outs)
