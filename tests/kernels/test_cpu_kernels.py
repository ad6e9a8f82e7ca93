"""The compiled kernels compute what float64 says, in every build that this processor can run."""

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from plait_kernels.attention import attend
from plait_kernels.attention.paged import PagedHeads, PagedRows
from plait_kernels.cpu import library
from plait_kernels.linear import BlockMatrix, Blocks, PanelMatrix, can_hold
from plait_kernels.linear.blocks import ROW_BITS, rounded_rows
from plait_kernels.sampling import Filters, native, reference
from torch import Tensor

TYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 1e-5}


@pytest.fixture(autouse=True, params=library.LEVELS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels of one instruction set, on two threads."""
    if library.LEVELS.index(request.param) > library.LEVELS.index(library.level()):
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(library, "level", lambda: request.param)
    assert library.open_library() is not None, "make install builds the kernels"
    library.set_num_threads(2)
    torch.manual_seed(0)
    yield request.param
    library.set_num_threads(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 48), (32, 6), (97, 530)])
def test_products_are_rounded_once(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    matrix = PanelMatrix(weight, bias)
    for num_rows in (1, 2, 12, 13, 100):
        x = torch.randn(num_rows, inputs).to(dtype)
        exact = x.double() @ weight.double().T + bias.double()
        assert matrix(x).dtype == dtype
        torch.testing.assert_close(matrix(x).double(), exact, rtol=TOLERANCE[dtype], atol=1e-4)
        torch.testing.assert_close(matrix.float32(x).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_gives_the_same_bits_in_any_batch_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    matrix = PanelMatrix(torch.randn(160, 300).to(dtype), None)
    x = torch.randn(200, 300).to(dtype)
    together = matrix.float32(x)
    for num_threads in (1, 3):
        library.set_num_threads(num_threads)
        assert torch.equal(matrix.float32(x), together)
        alone = torch.cat([matrix.float32(x[row : row + 1]) for row in range(20)])
        assert torch.equal(alone, together[:20])


def quantised(kind: str, outputs: int, inputs: int) -> Blocks:
    weight = torch.randn(outputs, inputs).numpy()
    return Blocks(kind, torch.from_numpy(gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])))


@pytest.mark.parametrize("kind", library.STORAGES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (97, 544)])
@pytest.mark.parametrize("row_bits", ROW_BITS)
def test_products_with_blocks_are_those_of_their_numbers_with_rounded_rows(
    kind: str, outputs: int, inputs: int, row_bits: int
) -> None:
    blocks, bias = quantised(kind, outputs, inputs), torch.randn(outputs).bfloat16()
    whole = gguf.quants.dequantize(blocks.raw.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(blocks.dequantised().numpy(), whole)
    matrix = BlockMatrix(blocks, bias, torch.bfloat16, row_bits)
    for num_rows in (1, 13, 100):
        x = torch.randn(num_rows, inputs).bfloat16()
        x[0, :32] = 0
        exact = rounded_rows(x, row_bits).double() @ blocks.dequantised().double().T + bias.double()
        torch.testing.assert_close(matrix.float32(x).double(), exact, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(matrix(x).double(), exact, rtol=2**-8, atol=1e-4)
        together = matrix.float32(x)
        assert torch.equal(matrix.float32(x[-1:]), together[-1:]), "a row's bits depend on its company"


def test_matrices_that_the_kernels_cannot_hold_are_refused() -> None:
    odd = torch.zeros(4, 3, dtype=torch.bfloat16)
    assert not can_hold(odd)
    assert not can_hold(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="even number of inputs"):
        PanelMatrix(odd, None)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size"),
    [(6, 2, 16, 4), (9, 3, 64, 64), (5, 1, 40, 16), (2, 2, 2, 1)],
)
def test_rows_attend_to_their_own_pages(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int
) -> None:
    starts, lengths = [0, 70, 3, 130, 0], [65, 33, 100, 1, 1]
    heads = PagedHeads(num_heads, num_kv_heads, head_dim, 0.3, page_size)
    context = [torch.randn(s + n, 2, num_kv_heads, head_dim).to(dtype) for s, n in zip(starts, lengths, strict=True)]
    width = -(-max(len(kv) for kv in context) // page_size)
    table = torch.randperm(len(starts) * width).to(torch.int32).view(len(starts), width)
    # What was left in the pages by others must not come through.
    pages = torch.full((table.numel(), 2, num_kv_heads, page_size, head_dim), torch.nan, dtype=dtype)
    for before, counts in (([0] * len(starts), starts), (starts, lengths)):
        rows = PagedRows(heads, before, counts, table)
        new = torch.cat([kv[s : s + n] for kv, s, n in zip(context, before, counts, strict=True)])
        rows.store(new[:, 0], new[:, 1], pages)
    queries = torch.randn(sum(lengths), num_heads, head_dim).to(dtype)
    expected = [
        attend(q.double(), kv[:, 0].double(), kv[:, 1].double(), 0.3)
        for q, kv in zip(queries.split(lengths), context, strict=True)
    ]
    given = rows.attend(queries, pages)
    assert given.dtype == dtype
    torch.testing.assert_close(given.double(), torch.cat(expected), rtol=0, atol=4 * TOLERANCE[dtype])


def test_queries_may_lie_among_other_heads() -> None:
    rows = PagedRows(PagedHeads(2, 1, 8, 1.0, 16), [0], [9], torch.tensor([[0]], dtype=torch.int32))
    pages = torch.randn(1, 2, 1, 16, 8)
    wide = torch.randn(9, 5, 8)
    assert torch.equal(rows.attend(wide[:, :2], pages), rows.attend(wide[:, :2].contiguous(), pages))


def filters(num_rows: int) -> tuple[Tensor, Filters]:
    """Temperatures and filters of every kind, in turn."""
    choices = [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (40, 0.9, 0.0),
        (0, 0.95, 0.0),
        (0, 1e-6, 0.0),
        (0, 0.8, 0.1),
        (9999, 0.5, 0.9),
    ]
    chosen = [choices[row % len(choices)] for row in range(num_rows)]
    top_k, top_p, min_p = zip(*chosen, strict=True)
    return torch.linspace(0.2, 2, num_rows), Filters(torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))


@pytest.mark.parametrize("vocab", [1, 300, 4097])
def test_tokens_are_those_that_the_reference_picks(vocab: int) -> None:
    logits = (torch.randn(70, vocab) * 3).to(torch.bfloat16).float()  # ties, as bfloat16 makes them
    temperature, kept = filters(70)
    uniform = torch.rand(70, dtype=torch.float64)
    assert torch.equal(native.pick_greedy(logits), reference.pick_greedy(logits))
    randomly = (logits, temperature, kept.min_p_S, uniform)
    assert torch.equal(native.pick_random(*randomly), reference.pick_random(*randomly))
    filtered = (logits, temperature, kept, uniform)
    assert torch.equal(native.pick_filtered(*filtered), reference.pick_filtered(*filtered))
