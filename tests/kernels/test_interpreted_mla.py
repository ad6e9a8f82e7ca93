"""Absorbed decode rows see their own pages in Triton's interpreter, whatever their splits.

What float64 gives is right. On a GPU the compiled kernels are tried by tests/kernels/gpu.
"""

import os
import random

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("a GPU is here, which runs the compiled kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, and Triton's own are when it is imported
pytest.importorskip("triton", reason="no Triton; pip install triton")

from plait_kernels.attention import split_kv_triton
from plait_kernels.mla import AbsorbedRows, decode_triton
from plait_kernels.mla import reference as mla_reference
from plait_kernels.mla.decode_triton import Tiling

pytestmark = pytest.mark.usefixtures("loops_over_loaded_bounds")
PAGE = 64
KV_LENGTHS = {
    "page edges": [1, 63, 64, 65, 500],
    "even": [192] * 4,
    "one long": [1, 20, 3000, 5, 64],
    "one row": [1100],
    "many rows": [65, 1, 130, 64, 7, 200, 33, 128, 192, 1],
}
WIDE, NARROW = Tiling(64, 4, 3, 8, 384, 2), Tiling(32, 4, 3, 8, 96, 4)
MOST_SPLITS = {"page edges": (2, 6), "even": (1, 2), "one long": (4, 7), "one row": (4, 7), "many rows": (1, 2)}
"""Of a row, with two processors: in wide tiles and in narrow ones."""


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(decode_triton, "num_sms", lambda _device: 2)
    monkeypatch.setattr(decode_triton, "MANY_ROWS_TILINGS", {})


def cache(lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Scattered pages and their table; what is past a row's end, in its last page and in other pages, is NaN."""
    num_pages = (lengths + PAGE - 1) // PAGE
    pages = torch.randn(int(num_pages.sum()) + 3, PAGE, width)
    table = torch.zeros(len(lengths), int(num_pages.max()) + 1, dtype=torch.int32)
    scattered = torch.randperm(len(pages)).int()
    is_own = torch.arange(table.shape[1]) < num_pages[:, None]
    table[is_own] = scattered[3:]
    table[~is_own] = scattered[0]
    pages[scattered[:3].long()] = torch.nan
    for row, length in enumerate(lengths.tolist()):
        pages[table[row, (length - 1) // PAGE].long(), (length - 1) % PAGE + 1 :] = torch.nan
    return pages, table


def assert_rows_are_right(kv_lengths: list[int], num_heads: int, latent_dim: int = 32, rope_dim: int = 16) -> list[int]:
    """The number of splits of each row."""
    lengths = torch.tensor(kv_lengths, dtype=torch.int32)
    pages, table = cache(lengths, latent_dim + rope_dim)
    schedule = decode_triton.schedule_absorbed(lengths, PAGE, num_heads, latent_dim)
    rows = AbsorbedRows(table, lengths, schedule)
    for _layer in range(2):
        q = torch.randn(len(kv_lengths), num_heads, latent_dim + rope_dim)
        right, given = (torch.full((len(q), num_heads, latent_dim), torch.nan) for _ in range(2))
        exact = right.double()
        mla_reference.decode_absorbed(q.double(), pages.double(), rows, 0.2, exact)
        mla_reference.decode_absorbed(q, pages, rows, 0.2, right)
        schedule.partial_JHD.fill_(torch.nan)
        schedule.lse_JH.fill_(torch.nan)
        decode_triton.decode_absorbed(q, pages, rows, 0.2, given)
        torch.testing.assert_close(right.double(), exact, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(given.double(), exact, atol=2e-5, rtol=2e-5)
    taken = schedule.splits_J4[schedule.splits_J4[:, 0] >= 0, 0]
    return torch.bincount(taken, minlength=len(kv_lengths)).tolist()


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("name", KV_LENGTHS)
def test_rows_of_any_length_and_number_of_splits_are_right(
    name: str, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(decode_triton.TILINGS, 16, WIDE if is_wide else NARROW)
    most_wide, most_narrow = MOST_SPLITS[name]
    assert max(assert_rows_are_right(KV_LENGTHS[name], 16)) == (most_wide if is_wide else most_narrow)


@pytest.mark.parametrize("num_heads", [1, 4, 8, 16, 24, 32, 128])
def test_heads_fill_tiles_or_a_part_of_one(num_heads: int) -> None:
    assert_rows_are_right([1, 63, 300], num_heads)


def test_the_dims_of_deepseek_are_taken() -> None:
    assert_rows_are_right([65, 400], 16, 512, 64)


def test_one_long_row_has_a_split_for_each_processor_and_a_short_one_has_one() -> None:
    splits_per_sm = decode_triton.TILINGS[16].splits_per_sm
    assert assert_rows_are_right([6400, 1], 16) == [2 * splits_per_sm, 1]


def test_no_program_takes_a_second_split_while_rows_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(decode_triton.TILINGS, 16, Tiling(64, 4, 3, 4, 192, 8))
    assert assert_rows_are_right([6400, 1, 1, 1], 16) == [4, 1, 1, 1], "of 8 programs; there is room for 14 splits"
    assert assert_rows_are_right([3200, 3200, 448, 1], 16) == [2, 2, 1, 1], "the short ones have no share in theirs"
    assert assert_rows_are_right([6400, *[1] * 7], 16) == [15, *[1] * 7], "each program has a row already"


@pytest.mark.parametrize("seed", range(60))
def test_splits_of_any_rows_have_slots_and_partial_results_of_their_own(seed: int) -> None:
    chance = random.Random(seed)
    num_rows, num_spare = chance.choice([1, 2, 8, 127, 128, 129, 200]), chance.choice([1, 3, 66, 132])
    num_programs = num_rows + chance.choice([1 - num_rows, 0, 1, num_spare // 2, num_spare])
    longest = chance.choice([1, 700, 163_840])
    shortest = chance.choice([1, longest])
    lengths = torch.tensor(
        [chance.choice([shortest, chance.randint(shortest, longest)]) for _ in range(num_rows)]
    ).int()
    tokens, least = chance.choice([(16, 4), (32, 2), (64, 1), (64, 3)])
    schedule = split_kv_triton.make_schedule(
        lengths,
        unit=tokens,
        heads=(1, 1),
        head_dim=16,
        num_spare=num_spare,
        least_units=least,
        num_partials=2 * num_spare,
        num_programs=num_programs,
    )
    taken = [slot for slot in schedule.splits_J4.tolist() if slot[0] >= 0]
    num_splits = torch.bincount(torch.tensor([row for row, *_ in taken]), minlength=num_rows).tolist()
    assert taken == [
        [row, split, num, length]
        for row, (num, length) in enumerate(zip(num_splits, lengths.tolist(), strict=True))
        for split in range(num)
    ]
    assert all(1 <= num <= -(-length // tokens) for num, length in zip(num_splits, lengths.tolist(), strict=True))
    assert num_rows >= num_programs or len(taken) <= num_programs
    # As _first_partial has it.
    partials = [2 * (at - split - row) + split for at, (row, split, num, _) in enumerate(taken) if num > 1]
    assert len(set(partials)) == len(partials)
    assert max(partials, default=0) < len(schedule.partial_JHD)


def test_more_rows_than_processors_have_a_tiling_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_triton, "MANY_ROWS_TILINGS", {16: NARROW})
    assert assert_rows_are_right([1, 900, 64], 16)[1] > 4
    assert decode_triton._tiling(16, 64, torch.zeros(2))[1].tokens == 64
    assert decode_triton._tiling(16, 64, torch.zeros(3))[1].tokens == 32


@pytest.mark.parametrize("page_size", [16, 32])
def test_a_tile_is_not_larger_than_a_page(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PAGE", page_size)
    assert_rows_are_right([1, page_size, page_size + 1, 150], 16)


@pytest.mark.parametrize("num_programs", [1, 1024])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_partial_results_are_combined_a_few_at_a_time(
    num_rows: int, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_triton, "_COMBINING_PROGRAMS", num_programs)
    monkeypatch.setattr(decode_triton, "_FEW_ROWS_DIMS", 16)
    monkeypatch.setattr(decode_triton, "_COMBINED", 64)
    monkeypatch.setitem(decode_triton.TILINGS, 16, NARROW)
    assert max(assert_rows_are_right([*[1] * (num_rows - 1), 900], 5)) > 4
