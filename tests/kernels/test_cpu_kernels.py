"""The compiled kernels agree with float64, in every build that this processor can run."""

import math
import weakref
from collections.abc import Callable, Iterator

import gguf
import numpy as np
import pytest
import torch
from plait_kernels.attention import attend
from plait_kernels.attention.cpu import HeadSizes
from plait_kernels.attention.paged_cpu import PagedHeads, PagedRows
from plait_kernels.cpu import library
from plait_kernels.linear import BlockWeight, CpuBlockMatrix, PanelMatrix, can_pack
from plait_kernels.linear.blocks import ACTIVATION_LIMITS, KINDS, join, quantise_and_dequantise
from plait_kernels.mla.cpu import AbsorbedRows, DecompressedRows, PagedMla
from plait_kernels.moe import pack_experts
from plait_kernels.moe.cpu import ExpertPanels, can_pack_experts, dense_experts
from plait_kernels.moe.reference import expert_mlps as experts_in_torch
from plait_kernels.sampling import NO_TOKEN, Filters, cpu, reference
from plait_testing.gguf_blocks import random_blocks
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
def test_gemms_are_rounded_once(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    matrix = PanelMatrix(weight, bias)
    for num_rows in (1, 2, 12, 13, 100):
        x = torch.randn(num_rows, inputs).to(dtype)
        exact = x.double() @ weight.double().T + bias.double()
        assert matrix(x).dtype == dtype
        torch.testing.assert_close(matrix(x).double(), exact, rtol=TOLERANCE[dtype], atol=1e-4)
        torch.testing.assert_close(matrix.matmul_float32(x).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_gives_the_same_bits_in_any_batch_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    matrix = PanelMatrix(torch.randn(160, 300).to(dtype), None)
    x = torch.randn(200, 300).to(dtype)
    together = matrix.matmul_float32(x)
    for num_threads in (1, 3):
        library.set_num_threads(num_threads)
        assert torch.equal(matrix.matmul_float32(x), together)
        alone = torch.cat([matrix.matmul_float32(x[row : row + 1]) for row in range(20)])
        assert torch.equal(alone, together[:20])


def test_oversubscribed_threads_change_nothing() -> None:
    """Four threads on fewer cores; ``test_adaptive_threads`` tests how many of them are then used."""
    matrix, x = PanelMatrix(torch.randn(640, 300), None), torch.randn(300, 300)
    together = matrix(x)
    library.set_num_threads(4)
    for _ in range(100):
        assert torch.equal(matrix(x), together)


@pytest.mark.parametrize("kind", library.BLOCK_FORMATS)
def test_the_values_of_gguf_blocks_are_those_of_the_library(kind: str) -> None:
    blocks = random_blocks(kind, 3, 512)
    values = gguf.quants.dequantize(blocks.raw.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(blocks.dequantised().numpy(), values)


@pytest.mark.parametrize("kind", library.BLOCK_FORMATS)
@pytest.mark.parametrize(("outputs", "num_blocks"), [(1, 1), (97, 3)])
@pytest.mark.parametrize("activation_bits", ACTIVATION_LIMITS)
def test_gemms_with_gguf_blocks_are_those_of_their_values_with_quantised_rows(
    kind: str, outputs: int, num_blocks: int, activation_bits: int
) -> None:
    check_gemm([random_blocks(kind, outputs, num_blocks * KINDS[kind].inputs)], activation_bits)


def test_a_gemm_of_several_block_types_is_each_ones_rows() -> None:
    parts = [random_blocks(kind, 64, 512, seed) for seed, kind in enumerate(("Q4_K", "Q6_K", "Q4_K", "Q8_0"))]
    check_gemm([*parts[:3], parts[3].rows(range(33))], 8)
    assert join([parts[0], parts[2], parts[1]]) is not None
    assert join([parts[1].rows(range(40)), parts[0]]) is None, "a type ends within a panel"


def check_gemm(parts: list[BlockWeight], activation_bits: int) -> None:
    values = torch.cat([part.dequantised() for part in parts]).double()
    bias = torch.randn(len(values)).bfloat16()
    matrix = CpuBlockMatrix(parts, bias, torch.bfloat16, activation_bits)
    for num_rows in (1, 13, 100):
        x = torch.randn(num_rows, values.shape[1]).bfloat16()
        x[0, :32] = 0
        exact = quantise_and_dequantise(x, activation_bits).double() @ values.T + bias.double()
        torch.testing.assert_close(matrix.matmul_float32(x).double(), exact, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(matrix(x).double(), exact, rtol=2**-8, atol=1e-4)
        together = matrix.matmul_float32(x)
        assert torch.equal(matrix.matmul_float32(x[-1:]), together[-1:]), "a row's bits depend on its company"


def test_matrices_that_the_kernels_cannot_hold_are_rejected() -> None:
    odd = torch.zeros(4, 3, dtype=torch.bfloat16)
    assert not can_pack(odd)
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="even number of inputs"):
        PanelMatrix(odd, None)


def attend_with(x: Tensor) -> Tensor:
    rows = PagedRows(PagedHeads(2, 1, 32, 1.0, 16), [0], [4], torch.tensor([[0]], dtype=torch.int32))
    return rows.attend(x.view(4, -1, 32), torch.zeros(1, 2, 1, 16, 32))


def store_with(x: Tensor) -> None:
    rows = PagedRows(PagedHeads(4, 2, 32, 1.0, 16), [0], [4], torch.tensor([[0]], dtype=torch.int32))
    heads = x.view(4, -1, 32)
    rows.store(heads, heads, torch.zeros(1, 2, 2, 16, 32))


DOORS: dict[str, Callable[[Tensor], object]] = {
    "matrix": lambda x: PanelMatrix(torch.zeros(8, 64), None)(x),
    "blocks": lambda x: CpuBlockMatrix([random_blocks("Q8_0", 8, 64)], None, torch.float32, 16).matmul_float32(x),
    "experts": lambda x: dense_experts([(torch.zeros(64, 64), torch.zeros(64, 32))])(
        x, torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int64)
    ),
    "attention": attend_with,
    "store": store_with,
}
"""Calls with rows ``[4, 64]`` of float32, which each takes, or with others."""


@pytest.mark.parametrize("door", DOORS)
def test_rows_of_another_dtype_or_width_are_rejected_and_not_misread(door: str) -> None:
    DOORS[door](torch.zeros(4, 64))
    for wrong in (torch.zeros(4, 64).bfloat16(), torch.zeros(4, 32)):
        with pytest.raises(ValueError, match=r"the CPU kernel takes torch\.float32 .* and was given"):
            DOORS[door](wrong)


def test_sampling_rejects_logits_and_parameters_of_another_dtype() -> None:
    with pytest.raises(ValueError, match=r"takes torch\.float32"):
        cpu.sample_greedy(torch.zeros(2, 8).bfloat16())
    ones, uniform = torch.ones(2), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"takes torch\.float64"):
        cpu.sample_random(torch.zeros(2, 8), ones, ones, uniform.float())
    with pytest.raises(ValueError, match=r"takes torch\.int64"):
        cpu.sample_filtered(torch.zeros(2, 8), ones, Filters(ones.int(), ones, ones), uniform)


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
    # What other rows left in the pages must not be seen.
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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_heads", "latent_dim", "cached_dim", "page_size"), [(8, 48, 64, 4), (3, 40, 46, 16)])
def test_absorbed_rows_attend_to_latent_vectors(
    dtype: torch.dtype, num_heads: int, latent_dim: int, cached_dim: int, page_size: int
) -> None:
    starts, lengths = [0, 70, 63, 130, 0], [65, 33, 2, 1, 1]
    shape = PagedMla(num_heads, latent_dim, cached_dim, 0.3, page_size)
    width = -(-140 // page_size)
    table = torch.randperm(len(starts) * width).to(torch.int32).view(len(starts), width)
    pages = torch.randn(table.numel(), page_size, cached_dim).to(dtype)
    queries = torch.randn(sum(lengths), num_heads, cached_dim).to(dtype)
    given = AbsorbedRows(shape, starts, lengths, table).attend(queries, pages)
    expected = []
    for own, start, length, pages_W in zip(queries.split(lengths), starts, lengths, table.long(), strict=True):
        seen = pages[pages_W].flatten(0, 1)[: start + length, None].double()
        expected.append(attend(own.double(), seen, seen, 0.3)[..., :latent_dim])
    assert given.dtype == dtype
    torch.testing.assert_close(given.double(), torch.cat(expected), rtol=0, atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("query_dim", "value_dim"), [(24, 16), (16, 36), (192, 128)])
def test_rows_over_decompressed_keys_and_values_come_with_their_lse(
    dtype: torch.dtype, query_dim: int, value_dim: int
) -> None:
    lengths, others = [65, 1, 200, 7], [70, 0, 130, 1]
    sizes = HeadSizes(3, 3, query_dim, value_dim, 0.2)
    queries = torch.randn(sum(lengths), 3, query_dim).to(dtype)
    for seen, is_causal in ((lengths, True), (others, False)):
        keys = torch.randn(sum(seen), 3, query_dim).to(dtype)
        # Values as a slice of one GEMM's output.
        values = torch.randn(sum(seen), 3, 5 + value_dim).to(dtype)[..., 5:]
        out, lse = DecompressedRows(sizes, lengths, seen, is_causal=is_causal).attend(queries, keys, values)
        for q, k, v, o, own in zip(
            *(x.split(n) for x, n in ((queries, lengths), (keys, seen), (values, seen))),
            out.split(lengths),
            lse.split(lengths),
            strict=True,
        ):
            scores = torch.einsum("the,lhe->thl", q.double(), k.double()) * 0.2
            if is_causal:
                scores.masked_fill_(torch.ones(len(q), len(k), dtype=torch.bool).triu(1)[:, None], -torch.inf)
            right = torch.einsum("thl,lhv->thv", scores.softmax(-1).nan_to_num(), v.double())
            torch.testing.assert_close(o.double(), right, rtol=0, atol=4 * TOLERANCE[dtype])
            torch.testing.assert_close(own.double(), scores.logsumexp(-1) / math.log(2), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("hidden", "width"), [(48, 32), (34, 96)])
def test_experts_are_those_of_the_reference(dtype: torch.dtype, hidden: int, width: int) -> None:
    gate_ups, downs = torch.randn(6, 2 * width, hidden).to(dtype), torch.randn(6, hidden, width).to(dtype)
    held = dense_experts(zip(gate_ups, downs, strict=True))
    for num_tokens in (1, 2, 150):
        x, weights = torch.randn(num_tokens, hidden).to(dtype), torch.rand(num_tokens, 3)
        chosen = torch.rand(num_tokens, 6).topk(3).indices
        chosen[: num_tokens // 2] = torch.tensor(
            [1, 0, 5]
        )  # most tokens go to three experts, and one expert may get none
        right = experts_in_torch(x.double(), gate_ups.double(), downs.double(), weights, chosen)
        given = held(x, weights, chosen)
        assert given.dtype == dtype
        torch.testing.assert_close(given.double(), right, rtol=0, atol=2 * TOLERANCE[dtype] * float(right.abs().max()))
        assert torch.equal(held(x[-1:], weights[-1:], chosen[-1:]), given[-1:]), "a token depends on its company"


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q4_1", "Q8_0")])
def test_experts_in_gguf_blocks_are_those_of_their_values(kinds: tuple[str, str]) -> None:
    hidden, width = 256, 256
    gate_ups = [random_blocks(kinds[0], 2 * width, hidden, seed) for seed in range(6)]
    downs = [random_blocks(kinds[1], hidden, width, seed) for seed in range(6)]
    held = ExpertPanels(
        (CpuBlockMatrix([gate_up], None, torch.float32, 16), CpuBlockMatrix([down], None, torch.float32, 16))
        for gate_up, down in zip(gate_ups, downs, strict=True)
    )
    gate_up_values, down_values = (torch.stack([each.dequantised() for each in of]) for of in (gate_ups, downs))
    for num_tokens in (1, 2, 150):
        x, weights = torch.randn(num_tokens, hidden), torch.rand(num_tokens, 3)
        chosen = torch.rand(num_tokens, 6).topk(3).indices
        chosen[: num_tokens // 2] = torch.tensor([1, 0, 5])
        right = experts_in_torch(x.double(), gate_up_values.double(), down_values.double(), weights, chosen)
        given = held(x, weights, chosen)
        torch.testing.assert_close(given.double(), right, rtol=0, atol=2e-4 * float(right.abs().max()))
        assert torch.equal(held(x[-1:], weights[-1:], chosen[-1:]), given[-1:]), "a token depends on its company"


def test_an_expert_is_read_after_the_one_before_it_is_copied() -> None:
    made: list[weakref.ref[Tensor]] = []

    def one() -> tuple[Tensor, Tensor]:
        pair = torch.randn(64, 48), torch.randn(48, 32)
        made.extend(map(weakref.ref, pair))
        assert sum(tensor() is not None for tensor in made) <= 4, "the first expert's and this one's"
        return pair

    assert isinstance(pack_experts(one() for _ in range(5)), ExpertPanels)
    assert len(made) == 10


def test_experts_that_the_kernels_cannot_hold_are_rejected() -> None:
    assert can_pack_experts(torch.zeros(128, 6), torch.zeros(6, 64))
    assert not can_pack_experts(torch.zeros(96, 6), torch.zeros(6, 48)), "gates end within a panel"
    assert not can_pack_experts(torch.zeros(128, 6).half(), torch.zeros(6, 64).half())


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 31, 40])
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_inf_and_nan_pass_through_gemms_with_gguf_blocks(what: float, place: int, kind: str) -> None:
    x = torch.randn(9, 256).bfloat16()
    x[4, place] = what
    for activation_bits in ACTIVATION_LIMITS:
        given = CpuBlockMatrix([random_blocks(kind, 40, 256)], None, torch.bfloat16, activation_bits).matmul_float32(x)
        assert not given[4].isfinite().any()
        assert given[torch.arange(9) != 4].isfinite().all()


@pytest.mark.parametrize("length", [1, 70])
def test_a_nan_in_a_query_is_a_nan_in_its_output(length: int) -> None:
    rows = PagedRows(PagedHeads(2, 1, 32, 1.0, 128), [0], [length], torch.tensor([[0]], dtype=torch.int32))
    queries = torch.randn(length, 2, 32)
    queries[-1, 1, 3] = torch.nan
    given = rows.attend(queries, torch.randn(1, 2, 1, 128, 32))
    assert given[-1, 1].isnan().all()
    assert given[-1, 0].isfinite().all()
    assert given[:-1].isfinite().all()


def test_queries_may_be_a_slice_of_more_heads() -> None:
    rows = PagedRows(PagedHeads(2, 1, 8, 1.0, 16), [0], [9], torch.tensor([[0]], dtype=torch.int32))
    pages = torch.randn(1, 2, 1, 16, 8)
    wide = torch.randn(9, 5, 8)
    assert torch.equal(rows.attend(wide[:, :2], pages), rows.attend(wide[:, :2].contiguous(), pages))


def filters(num_rows: int) -> tuple[Tensor, Filters]:
    """Temperatures and filters of every kind."""
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
def test_tokens_are_those_that_the_reference_samples(vocab: int) -> None:
    logits = (torch.randn(70, vocab) * 3).to(torch.bfloat16).float()  # with ties, as from bfloat16
    temperature, kept = filters(70)
    uniform = torch.rand(70, dtype=torch.float64)
    assert torch.equal(cpu.sample_greedy(logits), reference.sample_greedy(logits))
    randomly = (logits, temperature, kept.min_p_S, uniform)
    assert torch.equal(cpu.sample_random(*randomly), reference.sample_random(*randomly))
    filtered = (logits, temperature, kept, uniform)
    assert torch.equal(cpu.sample_filtered(*filtered), reference.sample_filtered(*filtered))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("vocab", [5, 300])
def test_a_row_without_a_softmax_gives_no_token_and_changes_no_other(vocab: int, broken: float) -> None:
    logits = torch.randn(7, vocab)
    temperature, kept = filters(7)
    uniform = torch.rand(7, dtype=torch.float64)
    samplers: list[Callable[[Tensor], Tensor]] = [
        cpu.sample_greedy,
        lambda logits_SV: cpu.sample_random(logits_SV, temperature, kept.min_p_S, uniform),
        lambda logits_SV: cpu.sample_filtered(logits_SV, temperature, kept, uniform),
    ]
    whole = [sampler(logits) for sampler in samplers]
    is_lost = torch.zeros(7, dtype=torch.bool)
    places = {0: slice(None), 3: slice(0, 1), 5: slice(vocab - 1, vocab)}
    for row, place in places.items():
        logits[row, place] = broken
        is_lost[row] = broken != -torch.inf or place == slice(None)  # a logit of -inf is a token of weight 0
    assert torch.equal(reference.is_distribution(logits), ~is_lost)
    sound = torch.tensor([1, 2, 4, 6])
    for sampler, before in zip(samplers, whole, strict=True):
        given = sampler(logits)
        assert torch.equal(given == NO_TOKEN, is_lost)
        assert torch.equal(given[sound], before[sound])
