"""The torch backend is the reference of all others, so it is compared with float64."""

import plait_worker.attention.mha.torch_mha as backend
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plait_kernels.attention import attend
from plait_kernels.kv_cache import FP8, UNSCALED, PageScales, as_bytes, to_cache_dtype
from plait_worker.attention import torch_batches
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.spec import MhaShape
from plait_worker.rows import Rows

HEADS, KV_HEADS, DIM = 6, 2, 16
SHAPE = MhaShape(HEADS, KV_HEADS, DIM, 0.3, torch.float32)


class World:
    """Rows over a pool of pages, with the contexts that were written before."""

    def __init__(self, starts: list[int], lengths: list[int], num_prefill: int, page_size: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.starts, self.lengths, self.page_size = starts, lengths, page_size
        self.context = [torch.randn(s + n, 2, KV_HEADS, DIM) for s, n in zip(starts, lengths, strict=True)]
        widths = [-(-len(kv) // page_size) for kv in self.context]
        num_pages, width = sum(widths) + 3, -(-max(widths) // 4) * 4
        ids = torch.randperm(num_pages).tolist()
        self.tables = [[ids.pop() for _ in range(n)] for n in widths]
        # What others left there may be anything, NaN too.
        self.pages = torch.randn(num_pages + 1, 2, KV_HEADS, page_size, DIM) * 100
        self.pages[torch.rand(self.pages.shape) < 0.1] = torch.nan
        self.rows = Rows(
            num_prefill=num_prefill,
            slots=list(range(len(starts))),
            starts=starts,
            lengths=lengths,
            token_ids_T=torch.zeros(sum(lengths), dtype=torch.int64),
            positions_T=torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]),
            page_table_RW=torch.tensor(
                [table + [num_pages] * (width - len(table)) for table in self.tables], dtype=torch.int32
            ),
            sample_index_S=torch.zeros(0, dtype=torch.int64),
        )
        self.q = torch.randn(sum(lengths), HEADS, DIM)

    def run(self, dtype: torch.dtype, fp8: PageScales | None = None, window: int | None = None) -> torch.Tensor:
        shape = MhaShape(HEADS, KV_HEADS, DIM, 0.3, dtype, fp8 is not None, window)
        scales = fp8 or UNSCALED
        pages = to_cache_dtype(self.pages, shape.cached_dtype, 1.0).to(shape.cached_dtype)
        for kv, table, start in zip(self.context, self.tables, self.starts, strict=True):
            for position in range(start):
                page, offset = table[position // self.page_size], position % self.page_size
                for part, scale in enumerate(scales):
                    kept = to_cache_dtype(kv[position, part].to(dtype), pages.dtype, scale)
                    as_bytes(pages)[page, part, :, offset] = as_bytes(kept)
        new = torch.cat([kv[start:] for kv, start in zip(self.context, self.starts, strict=True)]).to(dtype)
        requirements = BackendRequirements(shape, self.page_size, 0, 0, torch.device("cpu"))
        step = backend.TorchMha(requirements).prepare(self.rows)
        out = step.forward(self.q.to(dtype), new[:, 0], new[:, 1], pages, scales)
        self.written = pages
        return out

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        queries = self.q.to(dtype).double().split(self.lengths)
        kvs = [kv.to(dtype).double() for kv in self.context]
        return torch.cat([attend(q, kv[:, 0], kv[:, 1], 0.3) for q, kv in zip(queries, kvs, strict=True)])

    def expected_in_window(self, window: int) -> torch.Tensor:
        """Each token by itself, over the positions that it sees alone."""
        outs = []
        for q, kv, start in zip(self.q.double().split(self.lengths), self.context, self.starts, strict=True):
            for token in range(len(q)):
                seen = kv[max(0, start + token + 1 - window) : start + token + 1].double()
                outs.append(attend(q[token : token + 1], seen[:, 0], seen[:, 1], 0.3))
        return torch.cat(outs)


row = st.tuples(st.sampled_from([0, 1, 5, 16, 63, 64, 130, 300]), st.sampled_from([1, 2, 16, 127, 128, 129, 200]))


@settings(max_examples=60, deadline=None)
@given(
    prefill=st.lists(row, max_size=3),
    decode=st.lists(st.integers(0, 400), max_size=6),
    page_size=st.sampled_from([1, 4, 16, 64]),
    seed=st.integers(0, 1000),
)
def test_every_row_attends_to_its_own_past_and_itself(
    prefill: list[tuple[int, int]], decode: list[int], page_size: int, seed: int
) -> None:
    if not prefill and not decode:
        return
    starts = [start for start, _ in prefill] + decode
    lengths = [length for _, length in prefill] + [1] * len(decode)
    world = World(starts, lengths, len(prefill), page_size, seed)
    torch.testing.assert_close(world.run(torch.float32).double(), world.expected(torch.float32), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("starts", "lengths", "num_prefill"), [([700], [300], 1), ([1000, 90, 3], [1, 1, 1], 0)])
def test_bfloat16_sums_in_float32(starts: list[int], lengths: list[int], num_prefill: int) -> None:
    world = World(starts, lengths, num_prefill, 16)
    error = (world.run(torch.bfloat16).double() - world.expected(torch.bfloat16)).abs()
    rounding = world.expected(torch.bfloat16).abs().max() * 2**-8
    assert error.max() < 1.5 * rounding, "more than rounding of the weights and of the result"


def test_new_keys_and_values_are_written_where_the_table_says() -> None:
    world = World([5, 9], [7, 1], 1, 4)
    world.run(torch.float32)
    for kv, table in zip(world.context, world.tables, strict=True):
        stored = torch.stack([world.written[table[p // 4], :, :, p % 4] for p in range(len(kv))])
        assert torch.equal(stored, kv)


def test_pages_of_nobody_are_left_alone() -> None:
    world = World([5, 9], [7, 1], 1, 4)
    world.run(torch.float32)
    used = {page for table in world.tables for page in table}
    others = [page for page in range(len(world.pages)) if page not in used]
    assert torch.equal(world.written[others].nan_to_num(7), world.pages[others].nan_to_num(7))


def test_decode_batches_that_must_be_cut_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([100, 3, 90, 101, 120, 2, 99], [1] * 7, 0, 4)
    whole = world.run(torch.float32)
    monkeypatch.setattr(torch_batches, "MAX_GATHERED", 2 * 2 * 128 * KV_HEADS * DIM)
    torch.testing.assert_close(world.run(torch.float32), whole)


@pytest.mark.parametrize("fp8", [PageScales(1.0, 1.0), PageScales(0.37, 2.3)])
def test_float8_pages_keep_keys_and_values_over_their_scales(fp8: PageScales) -> None:
    world = World([0, 70, 33, 130, 15], [40, 17, 1, 1, 1], num_prefill=2, page_size=16)
    given = world.run(torch.float32, fp8)
    for kv in world.context:
        for part, scale in enumerate(fp8):
            kv[:, part] = to_cache_dtype(kv[:, part], FP8, scale).float() * scale
    torch.testing.assert_close(given.double(), world.expected(torch.float32), atol=1e-5, rtol=1e-5)
    new_token = world.context[2][33]
    page = world.written[world.tables[2][2]].float()
    for part, scale in enumerate(fp8):
        torch.testing.assert_close(page[part, :, 1] * scale, new_token[part])


def test_what_float8_cannot_hold_becomes_its_largest_number() -> None:
    kept = to_cache_dtype(torch.tensor([1e4, -1e4, 3.0]), FP8, 2.0).float()
    assert kept.tolist() == [448.0, -448.0, 1.5]


@settings(max_examples=40, deadline=None)
@given(
    prefill=st.lists(row, max_size=2),
    decode=st.lists(st.integers(0, 400), max_size=4),
    page_size=st.sampled_from([1, 16, 64]),
    window=st.sampled_from([1, 2, 15, 16, 17, 128, 129, 300, 10_000]),
)
def test_a_token_sees_its_window_and_nothing_before_it(
    prefill: list[tuple[int, int]], decode: list[int], page_size: int, window: int
) -> None:
    if not prefill and not decode:
        return
    starts = [start for start, _ in prefill] + decode
    lengths = [length for _, length in prefill] + [1] * len(decode)
    world = World(starts, lengths, len(prefill), page_size)
    given = world.run(torch.float32, window=window).double()
    torch.testing.assert_close(given, world.expected_in_window(window), atol=2e-5, rtol=0)
