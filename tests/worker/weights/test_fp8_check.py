"""A GPU that multiplies FP8 weights wrong is refused at start."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plait_kernels.linear import Fp8Matrix, Fp8Rows, Fp8Weight, RowNorm, add_rms_norm_quantise
from plait_kernels.linear.fp8 import join, quantise_blocks, quantise_outputs, quantise_rows
from plait_kernels.linear.fp8_reference import silu_mul_quantise
from plait_kernels.linear.fp8_tiles import Fp8WgmmaTile
from plait_kernels.moe import Fp8Experts, stack_fp8
from plait_kernels.moe.fp8_experts import has_few_rows
from plait_worker.errors import WorkerError
from plait_worker.weights.formats import fp8_check, gemm_check
from torch import Tensor

EXPERTS = Fp8Experts.__call__
KINDS = {"a scale an output": quantise_outputs, "blocks of 128 outputs": quantise_blocks}
Kind = Callable[[Tensor], Fp8Weight]


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_check, "_checked", set())


def drawn(kind: Kind, num_outputs: int, num_inputs: int, seed: int) -> Fp8Weight:
    generator = torch.Generator().manual_seed(seed)
    return kind(torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs)


def experts_of(kind: Kind) -> Fp8Experts:
    return stack_fp8((drawn(kind, 512, 128, seed), drawn(kind, 128, 256, 9 + seed)) for seed in range(3))


@pytest.mark.parametrize("kind", KINDS.values())
def test_right_gemms_pass(kind: Kind) -> None:
    fp8_check.check_fp8(drawn(kind, 272, 512, 0))
    fp8_check.check_fp8_experts(experts_of(kind))


def summed_as_on_a_gpu(experts: Fp8Experts, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """In another order; what lies between gate and down is bfloat16 before it is FP8."""
    gate_up, down = experts.gate_up_EJH, experts.down_EHI
    is_grouped, out_TH = gate_up.block_rows > 0, torch.zeros_like(x_TH, dtype=torch.float32)
    rows_TH = quantise_rows(x_TH.float(), is_grouped=is_grouped).dequantised().double()
    for weight, expert in zip(weights_TK[0], experts_TK[0].tolist(), strict=True):
        gate_up_TJ = (rows_TH @ gate_up.one(expert).dequantised().double().T).bfloat16()
        gated_TI = silu_mul_quantise(gate_up_TJ, is_grouped=is_grouped).dequantised()
        out_TH += weight * (gated_TI @ down.one(expert).dequantised().T)
    return out_TH.bfloat16()


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("width", [128, 256])
def test_experts_that_round_to_bfloat16_between_their_gemms_are_right(
    kind: Kind, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fp8Experts, "__call__", summed_as_on_a_gpu)
    monkeypatch.setattr(fp8_check, "_MAX_EXPERTS_ERROR", gemm_check.MAX_ERROR / 3)
    for first in range(0, 6, 2):
        pairs = ((drawn(kind, 2 * width, 512, first + one), drawn(kind, 512, width, 9 + one)) for one in range(2))
        gemm_check._checked.clear()
        fp8_check.check_fp8_experts(stack_fp8(pairs))


def test_weights_that_are_all_zeros_pass() -> None:
    fp8_check.check_fp8(quantise_outputs(torch.zeros(64, 128)))


@pytest.mark.parametrize(("scales", "kind"), KINDS.items())
@pytest.mark.parametrize("first_wrong", [1, 32, 65])
def test_a_gemm_that_is_wrong_from_some_rows_on_is_refused_with_what_to_do(
    scales: str, kind: Kind, first_wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Fp8Matrix.__call__

    def wrong_for_many_rows_of_the_whole(matrix: Fp8Matrix, x_NI: Tensor) -> Tensor:
        out_NO = right(matrix, x_NI)
        return out_NO if len(x_NI) < first_wrong else out_NO.roll(1, dims=1)

    monkeypatch.setattr(Fp8Matrix, "__call__", wrong_for_many_rows_of_the_whole)
    said = (
        rf"a matrix of FP8 weights with {scales} are wrong on this GPU: {first_wrong} rows .*--dtype bfloat16, not --q"
    )
    with pytest.raises(WorkerError, match=said):
        fp8_check.check_fp8(drawn(kind, 272, 512, 0))


def test_a_lost_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, weight = Fp8Matrix.__call__, drawn(quantise_blocks, 272, 512, 0)
    part = Fp8Weight(weight.stored_OI, weight.scale * torch.tensor([1, 1, 1, 1.2]), weight.block_rows)
    monkeypatch.setattr(Fp8Matrix, "__call__", lambda _matrix, x_NI: right(Fp8Matrix(part, None), x_NI))
    with pytest.raises(WorkerError, match="1 rows are off"):
        fp8_check.check_fp8(weight)


@pytest.mark.parametrize("kind", KINDS.values())
def test_experts_are_compared_too(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Experts, "__call__", lambda *given: EXPERTS(*given).roll(1, dims=1))
    with pytest.raises(WorkerError, match=r"GEMMs of experts of FP8 weights .* 1 rows are off"):
        fp8_check.check_fp8_experts(experts_of(kind))


def gates_of(kind: Kind) -> Fp8Matrix:
    """Which applies them as the reference does, to one row and to 8."""
    weight = join([drawn(kind, 160, 512, seed) for seed in (0, 1)])
    assert weight is not None
    matrix = Fp8Matrix(Fp8Weight(weight.stored_OI, weight.scale * 20, weight.block_rows), None)
    matrix._gate_tiles[8] = Fp8WgmmaTile(8, 1, 4, 1, 1)
    return matrix


@pytest.mark.parametrize("kind", KINDS.values())
def test_right_gates_pass(kind: Kind) -> None:
    fp8_check.check_fp8_gates(gates_of(kind))


@pytest.mark.parametrize("wrong", ["gate_up", "rmsnorm_gate_up"])
@pytest.mark.parametrize("first_wrong", [1, 8])
def test_wrong_gates_are_refused_alone_and_behind_a_norm(
    first_wrong: int, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(Fp8Matrix, wrong)

    def turned(matrix: Fp8Matrix, x_NI: Tensor, *norm: RowNorm) -> Tensor | tuple[Tensor, Tensor]:
        given = right(matrix, x_NI, *norm)
        if len(x_NI) < first_wrong:
            return given
        return (given[0].roll(1, dims=1), given[1]) if norm else given.roll(1, dims=1)

    monkeypatch.setattr(Fp8Matrix, wrong, turned)
    with pytest.raises(WorkerError, match=rf"GEMMs of gates of FP8 weights .* {first_wrong} rows are off"):
        fp8_check.check_fp8_gates(gates_of(quantise_outputs))


def test_a_sum_before_gates_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Fp8Matrix.rmsnorm_gate_up

    def without_sum(matrix: Fp8Matrix, x_NI: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        return right(matrix, x_NI, norm)[0], x_NI * torch.nan

    monkeypatch.setattr(Fp8Matrix, "rmsnorm_gate_up", without_sum)
    with pytest.raises(WorkerError, match="1 rows are off by nan"):
        fp8_check.check_fp8_gates(gates_of(quantise_outputs))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_norm_that_quantises_wrong_for_experts_is_refused(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(x_NI: Tensor, norm: RowNorm, *, is_grouped: bool) -> tuple[Tensor | Fp8Rows, ...]:
        given: list[Tensor | Fp8Rows] = [*add_rms_norm_quantise(x_NI, norm, is_grouped=is_grouped)]
        one = given[place]
        given[place] = one.roll(1, dims=1) if isinstance(one, Tensor) else Fp8Rows(one.stored_NI, one.scale * 1.2)
        return tuple(given)

    monkeypatch.setattr(fp8_check, "add_rms_norm_quantise", turned)
    with pytest.raises(WorkerError, match=r"the norm before experts of FP8 weights .* 3 rows are off"):
        fp8_check.check_fp8_experts(experts_of(quantise_blocks))


@pytest.mark.parametrize("num_experts", [1, 8, 64, 85, 86, 128, 257, 512])
def test_experts_are_compared_with_few_rows_each_by_both_tiles_and_with_many(num_experts: int) -> None:
    few, more, many = [2 * rows / num_experts for rows in fp8_check._expert_rows(num_experts)[1:]]
    assert [has_few_rows(mean) for mean in (few, more, many)] == [True, True, False]
    assert few <= 4 < more or num_experts == 1, "few_rows_tiles has another for more than 4"


def test_a_matrix_is_compared_if_its_size_has_a_tile_that_none_before_had(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, ...]] = []

    def counted(weight: Fp8Weight, num_rows: int) -> float:
        compared.append((*weight.shape, num_rows))
        return 0.0

    monkeypatch.setattr(fp8_check, "_matrix_error", counted)
    for shape in (128, 512), (256, 512), (128, 512), (128, 1024), (128, 640):
        fp8_check.check_fp8(drawn(quantise_blocks, *shape, 0))
    assert compared[:8] == [(128, 512, rows) for rows in fp8_check._ROWS]
    assert compared[8:12] == [(128, 1024, rows) for rows in (8, 16, 32, 64)], "in more parts"
    assert compared[12:] == [(128, 640, rows) for rows in fp8_check._ROWS[1:]], "torch's takes no such groups"


def test_a_matrix_of_more_inputs_than_fast_sums_take_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, ...]] = []

    def counted(weight: Fp8Weight, num_rows: int) -> float:
        compared.append((weight.shape[1], num_rows))
        return 0.0

    monkeypatch.setattr(fp8_check, "_matrix_error", counted)
    for num_inputs in (4096, 8192, 16384):
        fp8_check.check_fp8(drawn(quantise_outputs, 16, num_inputs, 0))
    assert (4096, 512) in compared
    assert (8192, 512) in compared
    assert (16384, 512) not in compared


def test_gates_are_compared_again_if_their_own_tile_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, ...]] = []

    def counted(matrix: Fp8Matrix, num_rows: int) -> float:
        compared.append((*matrix.weight_OI.shape, num_rows))
        return 0.0

    monkeypatch.setattr(fp8_check, "_gates_error", counted)
    monkeypatch.setattr(
        fp8_check, "gate_tiles_of", lambda weight: {8: Fp8WgmmaTile(8, 1, 4, 1, weight.shape[0] // 128)}
    )
    for num_outputs in (128, 256, 128):
        matrix = Fp8Matrix(drawn(quantise_outputs, num_outputs, 512, 0), None)
        matrix._gate_tiles[8] = Fp8WgmmaTile(8, 1, 4, 1, 1)
        fp8_check.check_fp8_gates(matrix)
    assert compared == [(128, 512, 1), (128, 512, 8), (256, 512, 8)]
