"""The dispatch table: backends are asked in order, a refusal has a reason, and the reference takes what is left."""

import importlib
from pathlib import Path

import plait_kernels
import pytest
import torch
from plait_kernels.backends import TABLE, Backend, Call, Op, above, of_dtype, on_device, up_to
from plait_kernels.norm.reference import rms_norm

FOLDER = Path(plait_kernels.__file__).parent
FAMILIES = ("activation", "attention", "kv_cache", "linear", "mla", "moe", "norm", "rope", "sampling")
for family in FAMILIES:
    importlib.import_module(f"plait_kernels.{family}")
OPS = [op for ops in TABLE.values() for op in ops.values()]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def names(op: str, *calls: Call) -> list[str]:
    """The backends that take these calls of ``FAMILY.OP``."""
    family, _, name = op.rpartition(".")
    return [TABLE[f"plait_kernels.{family}"][name].backend(call).module for call in calls]


def test_every_family_declares_its_ops() -> None:
    assert sorted(TABLE) == [f"plait_kernels.{family}" for family in FAMILIES]


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.family}.{op.name}")
def test_each_backend_is_a_file_and_the_last_takes_every_call(op: Op) -> None:
    for backend in op.backends:
        source = FOLDER / op.family.rpartition(".")[2] / f"{backend.module}.py"
        assert f"def {op.name}(" in source.read_text()
    for call in (Call(CPU, torch.float64, 7), Call(torch.device("meta"), torch.float16, 96)):
        assert op.backend(call) is op.backends[-1]
        assert [backend for backend, _ in op.refusals(call)] == list(op.backends[:-1])
        assert all(reason for _, reason in op.refusals(call))


def test_experts_go_by_the_number_of_tokens() -> None:
    bfloat16 = [Call(GPU, torch.bfloat16, num) for num in (1, 2, 3, 2048, 2049)]
    listed = "grouped_gemm_triton"
    assert names("moe.expert_mlps", *bfloat16) == ["indexed_gemv_triton"] * 2 + [listed] * 2 + ["grouped_gemm_torch"]
    assert names("moe.expert_mlps", Call(GPU, torch.float16, 5000), Call(GPU, torch.float32, 5)) == [
        listed,
        "reference",
    ]


def test_sampling_goes_by_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait_kernels.sampling.cuda._has_room", lambda _device: True)
    monkeypatch.setattr("plait_kernels.sampling.cuda.unusable_reason", lambda _device: None)
    calls = (Call(CPU, torch.float32, 1), Call(CPU, torch.float16, 1), Call(GPU, torch.bfloat16, 1))
    assert names("sampling.sample_random", *calls) == ["cpu", "checked_reference", "cuda"]
    assert names("sampling.sample_greedy", *calls) == ["cpu", "checked_reference", "triton"]
    apart, wide = Call(GPU, torch.float16, 2), Call(GPU, torch.float32, 1)
    assert names("sampling.sample_filtered", apart, wide) == ["checked_reference"] * 2


def test_a_refusal_says_what_is_taken_and_what_was_given() -> None:
    backend = Backend("x", (on_device("cuda"), of_dtype(torch.bfloat16), up_to(8, "rows"), above(2, "rows")))
    refused = {
        Call(CPU, torch.bfloat16, 4): "is for cuda, not cpu",
        Call(GPU, torch.float32, 4): "takes torch.bfloat16, not torch.float32",
        Call(GPU, torch.bfloat16, 9): "takes up to 8 rows, not 9",
        Call(GPU, torch.bfloat16, 2): "takes more than 2 rows, not 2",
        Call(GPU, torch.bfloat16, 4): None,
    }
    for call, reason in refused.items():
        assert backend.unsupported_reason(call) == reason


def test_a_decision_is_made_once_for_calls_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Call] = []
    monkeypatch.setitem(TABLE, "plait_kernels.norm", dict(TABLE["plait_kernels.norm"]))

    def never(call: Call) -> str:
        asked.append(call)
        return "is never chosen"

    op = Op("plait_kernels.norm", "rms_norm", Backend("missing", (never,)), Backend("reference"))
    for _ in range(3):
        assert op(torch.zeros(2), 5) is rms_norm
    assert asked == [Call(CPU, torch.float32, 5)]
    op(torch.zeros(2, dtype=torch.float64), 5)
    assert len(asked) == 2


def test_absorbed_rows_go_by_device_and_dtype() -> None:
    calls = [Call(GPU, torch.bfloat16, 0), Call(GPU, torch.float32, 0), Call(CPU, torch.bfloat16, 0)]
    for op in ("mla.decode_absorbed", "mla.schedule_absorbed"):
        assert names(op, *calls) == ["decode_triton", "reference", "reference"]
