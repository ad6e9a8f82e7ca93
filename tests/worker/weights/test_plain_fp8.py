"""Whether a run with FP8 weights counts: rounding stays within the bounds measured beside it, faults do not."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.plain_fp8 import PlainFp8, Rounding, Rules, fused_layers, methods, read_rules
from bench.gpu.rescoring import LARGEST_FLOOR, NUM_BEST, Gaps, Scored, TokenScores, rounding_gaps, token_gaps
from plait_kernels.activation.reference import silu_mul
from plait_kernels.linear import Fp8Matrix, Fp8Weight, fp8_gemm, fp8_matrix
from plait_kernels.linear.fp8 import Fp8Rows, quantise_blocks, quantise_outputs, quantise_rows
from plait_kernels.linear.fp8_tiles import Fp8WgmmaTile
from plait_kernels.moe import stack_fp8
from plait_kernels.moe.fp8_experts import Fp8Experts
from plait_testing.stepper import Request, Stepper
from plait_worker.attention.backend import requirements_for
from plait_worker.attention.selection import choose_attention
from plait_worker.cache import KVCache
from plait_worker.layers.rope import Rope
from plait_worker.models import loader
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.rank import Rank
from plait_worker.slots import Slots
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

CPU = torch.device("cpu")
VOCAB, PAGE, NUM_PAGES = 2048, 16, 64
PROMPT, ANSWER, STREAMS = 24, 24, 6
LAYERS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough layers that a last bit goes a long way."""
    folder = tmp_path_factory.mktemp("many-layers")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).eval().bfloat16().save_pretrained(folder)
    return folder


def load(folder: Path, patch: pytest.MonkeyPatch) -> Model[Any]:
    """In FP8 by the references, as if this were a GPU."""
    patch.setattr(loader, "fp8_unsupported_reason", lambda _device, _dtype: None)
    patch.setattr(loader, "choose_dtype", lambda _name, _device: torch.bfloat16)
    return loader.load_model(folder, "auto", CPU, Parallel(), quantises=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model[Any]]:
    """With layers as a CPU has them, one GEMM after the other."""
    with pytest.MonkeyPatch.context() as patch:
        yield load(folder, patch)


@pytest.fixture
def fused_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Model[Any]:
    """With layers as a Hopper GPU has them, whose GEMMs of few rows apply the gates."""
    tiles = dict.fromkeys(range(2, 65), Fp8WgmmaTile(8, 1, 4, 1, 1))
    monkeypatch.setattr(fp8_matrix, "gate_tiles_of", lambda _gate_up: tiles)
    monkeypatch.setattr(fp8_matrix, "compile_gates", lambda *_: None)
    return load(folder, monkeypatch)


def new_stepper(model: Model[Any]) -> Stepper:
    rank = Rank(
        model=model,
        cache=KVCache(model.cache_specs, NUM_PAGES, PAGE, CPU),
        attention=choose_attention("torch", requirements_for(model.attention_specs, PAGE, PAGE, 0, CPU)),
        slots=Slots(8, NUM_PAGES, PAGE, 256, CPU),
        parallel=Parallel(),
    )
    return Stepper(rank.step, PAGE, NUM_PAGES)


def emit(model: Model[Any], *, is_alone: bool) -> list[list[int]]:
    """Prompts with the answers that the engine gives one at a time, or all in the same steps."""
    draw, stepper = random.Random(1), new_stepper(model)
    prompts = [draw.choices(range(VOCAB), k=PROMPT) for _ in range(STREAMS)]
    slots = [stepper.admit(prompt) for prompt in prompts]
    if is_alone:
        return [prompt + stepper.generate(slot, ANSWER, PROMPT) for slot, prompt in zip(slots, prompts, strict=True)]
    stepper.step(prefill=dict.fromkeys(slots, PROMPT))
    for _ in range(ANSWER - 1):
        stepper.step(decode=slots)
    return [prompt + stepper.requests[slot].output for slot, prompt in zip(slots, prompts, strict=True)]


def scores(request: Request, tokens: Sequence[int]) -> TokenScores:
    """As a server tells them."""
    told: list[dict[str, Scored] | None] = [None]
    entry: dict[str, Scored]
    for record, token in zip(request.prompt_records, tokens[1:], strict=True):
        best = zip(map(str, record.best_ids), record.best_logprobs, strict=True)
        entry = {name: Scored(logprob=value) for name, value in best}
        told.append(entry | {str(token): Scored(logprob=record.logprob)})
    return told


@contextmanager
def plain(rules: Rules) -> Iterator[None]:
    """Steps by the plain rules."""
    made, tables = PlainFp8(), Rope.tables

    def begin(rope: Rope, positions_T: Tensor) -> Any:
        made.begin(positions_T, rules)
        return tables(rope, positions_T)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rope, "tables", begin)
        for name, method in methods(made).items():
            patch.setattr(Fp8Matrix, name, method)
        yield


@contextmanager
def fused() -> Iterator[None]:
    """Steps of fused layers, beside torch's attention."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, other in fused_layers():
            patch.setattr(owner, name, other)
        yield


def score(model: Model[Any], streams: Sequence[list[int]], rules: Rules) -> list[TokenScores]:
    told = []
    with plain(rules):
        for tokens in streams:
            stepper = new_stepper(model)
            slot = stepper.admit(tokens, prompt_logprobs=NUM_BEST)
            stepper.step(prefill={slot: len(tokens)})
            told.append(scores(stepper.requests[slot], tokens))
    return told


def rescore(model: Model[Any], streams: Sequence[list[int]], *, is_alone: bool) -> Gaps:
    torch.manual_seed(0)
    defined, otherwise = (score(model, streams, Rules(each, PROMPT, 1 if is_alone else STREAMS)) for each in Rounding)
    pairs = zip(defined, otherwise, strict=True)
    floor = [gap for told, others in pairs for gap in rounding_gaps(told, others, ANSWER)]
    ended = zip(defined, streams, strict=True)
    return Gaps(len(streams), [gap for told, s in ended for gap in token_gaps(told, s[PROMPT:])], floor)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_right_engine_stays_within_what_rounding_does(model: Model[Any], is_alone: bool) -> None:
    gaps = rescore(model, emit(model, is_alone=is_alone), is_alone=is_alone)
    assert gaps.is_right, (gaps.median, gaps.median_bound, max(gaps.values), gaps.worst_bound)
    assert any(gaps.floor), "another rounding has other best tokens"


def test_rows_that_were_computed_alone_are_not_scored_as_rounded_ones(model: Model[Any]) -> None:
    streams = emit(model, is_alone=True)
    right, wrong = (rescore(model, streams, is_alone=is_alone) for is_alone in (True, False))
    assert sum(right.values) < sum(wrong.values)


def test_fused_layers_are_scored_as_fused_ones_and_not_as_others(fused_model: Model[Any]) -> None:
    with fused():
        streams = emit(fused_model, is_alone=False)
        right = rescore(fused_model, streams, is_alone=False)
    wrong = rescore(fused_model, streams, is_alone=False)
    assert right.is_right, (right.median, right.median_bound, max(right.values), right.worst_bound)
    assert sum(right.values) < sum(wrong.values) / 2


def test_every_fused_layer_s_gates_are_scored_by_their_own_rule(
    fused_model: Model[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    took, gated = list[bool](), PlainFp8.gated

    def counted(made: PlainFp8, matrix: Fp8Matrix, x_NI: Tensor, *, in_gemm: bool) -> Tensor:
        took.append(in_gemm)
        return gated(made, matrix, x_NI, in_gemm=in_gemm)

    monkeypatch.setattr(PlainFp8, "gated", counted)
    with fused():
        for streams in (STREAMS, 65):
            score(fused_model, [list(range(PROMPT + ANSWER))], Rules(decode_from=PROMPT, streams=streams))
    assert took == [True] * LAYERS + [False] * LAYERS, "GEMMs of up to 64 rows apply gates"


def test_a_row_of_a_prompt_is_rounded_where_it_is_alone_in_a_step(fused_model: Model[Any]) -> None:
    prompt, told = list(range(PROMPT)), list[Scored]()
    with fused(), plain(Rules()):
        for chunks in ((PROMPT,), (PROMPT - 1, 1)):
            stepper = new_stepper(fused_model)
            slot = stepper.admit([*prompt, 0], prompt_logprobs=1)
            for length in (*chunks, 1):
                stepper.step(prefill={slot: length})
            told.append(Scored(logprob=stepper.requests[slot].prompt_records[-1].logprob))
    assert abs(told[0]["logprob"] - told[1]["logprob"]) < 0.02


def scales_of_other_rows(rows: Fp8Rows) -> Fp8Rows:
    return Fp8Rows(rows.stored_NI, rows.scale.roll(1, dims=0) * 2)


def a_row_of_another_request(rows: Fp8Rows) -> Fp8Rows:
    return Fp8Rows(rows.stored_NI.view(torch.uint8).roll(1, dims=0).view(rows.stored_NI.dtype), rows.scale)


def half_of_the_inputs(rows: Fp8Rows) -> Fp8Rows:
    kept = rows.stored_NI.float()
    kept[:, kept.shape[1] // 2 :] = 0
    return Fp8Rows(kept.to(rows.stored_NI.dtype), rows.scale)


@pytest.mark.parametrize("fault", [scales_of_other_rows, a_row_of_another_request, half_of_the_inputs])
def test_a_fault_of_the_engine_s_matmuls_leaves_the_bounds(
    model: Model[Any], fault: Callable[[Fp8Rows], Fp8Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fp8_matrix, "fp8_gemm", lambda rows, *given: fp8_gemm(fault(rows), *given))
        streams = emit(model, is_alone=False)
    gaps = rescore(model, streams, is_alone=False)
    assert not gaps.is_right, (gaps.median, gaps.median_bound, max(gaps.values), gaps.worst_bound)


def test_streams_say_nothing_where_rounding_alone_takes_any_token() -> None:
    assert Gaps(1, [0.0, 0.3], floor=[0.2, 0.3]).is_right
    assert not Gaps(1, [0.0, 0.3], floor=[LARGEST_FLOOR, LARGEST_FLOOR + 0.1]).is_right


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("quantise", [quantise_outputs, quantise_blocks])
def test_a_plain_matmul_is_the_engine_s_but_for_rounding(
    quantise: Callable[[Tensor], Fp8Weight], is_alone: bool
) -> None:
    torch.manual_seed(0)
    weight, x_NI = quantise(torch.randn(128, 256)), torch.randn(5, 256).bfloat16()
    matrix = Fp8Matrix(weight, bias_O=None)
    rows_NI = x_NI.double() if is_alone else quantise_rows(x_NI, is_grouped=matrix.is_grouped).dequantised().double()
    right_NO = rows_NI @ weight.dequantised().double().T
    for rounding, least_bits in ((Rounding.NEAREST, 8), (Rounding.EITHER, 7)):
        made = PlainFp8()
        made.begin(torch.arange(5), Rules(rounding, 0, 1 if is_alone else 5))
        given_NO = made.of_matrix(matrix, x_NI)
        assert ((given_NO.double() - right_NO).abs() <= right_NO.abs() * 2.0**-least_bits + 1e-5).all()


def test_plain_experts_are_the_reference_s() -> None:
    torch.manual_seed(0)
    experts = stack_fp8(
        (quantise_outputs(torch.randn(320, 64)), quantise_outputs(torch.randn(64, 160))) for _ in range(4)
    )
    x_TH, weights_TK = torch.randn(7, 64).bfloat16(), torch.rand(7, 2)
    chosen_TK = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    right_TH = experts(x_TH, weights_TK, chosen_TK)
    off = dict[bool, float]()
    for is_told in (True, False):
        made = PlainFp8()
        made.begin(torch.arange(7), Rules(decode_from=0, streams=7) if is_told else Rules())
        given_TH = made.of_experts(experts, x_TH, weights_TK, chosen_TK, quantise_rows(x_TH, is_grouped=False))
        off[is_told] = float((given_TH - right_TH).abs().max() / right_TH.abs().max())
    assert off[True] < 2**-7 < off[False] < 2**-4, "the engine has few rows an expert: rounded otherwise"


def test_few_rows_an_expert_are_counted_by_the_graph_that_holds_the_streams() -> None:
    few = {streams: Rules(decode_from=0, streams=streams).has_few_rows(60, 4) for streams in (2, 3, 160, 161, 180)}
    assert few == {2: False, 3: True, 160: True, 161: False, 180: False}, "180 rows are few, but a graph has 192"


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_experts_do_not_round_two_rows_or_one(streams: int) -> None:
    torch.manual_seed(0)
    gate_up, down = quantise_outputs(torch.randn(64, 64)), quantise_outputs(torch.randn(64, 32))
    x_TH, made = torch.randn(streams, 64).bfloat16(), PlainFp8()
    made.begin(torch.arange(streams), Rules(decode_from=0, streams=streams))
    one_T1 = torch.ones(streams, 1)
    given_TH = made.of_experts(stack_fp8([(gate_up, down)]), x_TH, one_T1, torch.zeros_like(one_T1, dtype=torch.int64))
    gate_TI, up_TI = (x_TH.double() @ gate_up.dequantised().double().T).chunk(2, dim=1)
    right_TH = (torch.nn.functional.silu(gate_TI) * up_TI) @ down.dequantised().double().T
    off = float((given_TH - right_TH).abs().max() / right_TH.abs().max())
    assert (off < 2**-6) == (streams <= 2), off


@pytest.mark.parametrize(("streams", "in_gemm"), [(1, True), (5, True), (5, False)])
def test_few_rows_are_not_rounded_before_the_gate_but_after_it(
    streams: int, in_gemm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, x_NI = quantise_outputs(torch.randn(128, 64)), torch.randn(5, 64).bfloat16()
    matrix, made = Fp8Matrix(weight, bias_O=None), PlainFp8()
    monkeypatch.setattr(Fp8Matrix, "gates", lambda _matrix, num_rows: num_rows == made.rules.rows and in_gemm)
    made.begin(torch.arange(5), Rules(decode_from=2, streams=streams))
    given_NO = methods(made)["gate_up"](matrix, x_NI)
    rows_NI = quantise_rows(x_NI, is_grouped=False).dequantised().double()
    if streams == 1:
        rows_NI[2:] = x_NI[2:].double()
    both_NO = rows_NI @ weight.dequantised().double().T
    of_sums_NO, of_rounded_NO = (silu_mul(each_NO) for each_NO in (both_NO, both_NO.bfloat16().double()))
    assert torch.allclose(given_NO[:2].double(), of_rounded_NO[:2], rtol=1e-5)
    right_NO = of_sums_NO[2:].bfloat16().double() if in_gemm else of_rounded_NO[2:]
    assert torch.allclose(given_NO[2:].double(), right_NO, rtol=1e-5)


def test_what_takes_the_place_of_a_method_takes_what_that_takes() -> None:
    plain_experts: Callable[..., Tensor] = PlainFp8().of_experts
    pairs = [(getattr(Fp8Matrix, name), made) for name, made in methods(PlainFp8()).items()]
    for engine, made in [*pairs, (Fp8Experts.__call__, plain_experts)]:
        assert len(inspect.signature(engine).parameters) == len(inspect.signature(made).parameters), engine


def test_rules_are_read_as_they_were_written(tmp_path: Path) -> None:
    rules = Rules(Rounding.EITHER, 128, 64)
    rules.write(tmp_path / "rules.json")
    assert read_rules(tmp_path / "rules.json") == rules
