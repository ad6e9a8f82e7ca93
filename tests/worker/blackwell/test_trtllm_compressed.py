"""DeepSeek-V4's attention through flashinfer's own call checks and a stand-in of the kernel's contract."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from plait_testing.attention_cases import CPU, Tables, difference
from plait_testing.deepseek_v4 import V4Driver, random_ids, random_v4
from plait_testing.trtllm_gen import BrokenContract, Launcher
from plait_worker.attention.backend import BackendRequirements, requirements_for
from plait_worker.attention.compressed.row_lists import RawLayout
from plait_worker.attention.compressed.torch_compressed import TorchCompressed
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.attention.selection import choose_attention, choose_backend
from plait_worker.attention.spec import CompressedShape
from plait_worker.errors import WorkerError
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from torch import Tensor

if TYPE_CHECKING:
    from plait_worker.attention.compressed.trtllm_compressed import TrtllmCompressed

PAGE, MAX_TOKENS, NUM_SLOTS = 256, 1024, 16
DENSE = CompressedShape(8, 512, 128, 0, torch.bfloat16)
HCA = CompressedShape(8, 512, 128, 128, torch.bfloat16)
CSA = CompressedShape(8, 512, 128, 4, torch.bfloat16, index_dim=64, num_index_heads=8, top_k=64)
# Rows shorter than the window, rows that end within it, and longer ones; 2 of 3 tokens choose among more than 64.
PREFILL = [(0, 100), (300, 70), (0, 3), (60, 80), (1000, 5)]
DECODE = [(start, 1) for start in (0, 3, 127, 128, 129, 255, 700)]
# bfloat16 rounds the result to 2**-8.
TOLERANCE = 0.01
RAW_LAYOUT = RawLayout(MAX_TOKENS, 128)


@pytest.fixture
def checked(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """flashinfer checks lengths too, for which it waits for a GPU."""
    monkeypatch.setenv("FLASHINFER_VALIDATE_INPUTS", "1")
    return launcher


def backend(shape: CompressedShape) -> TrtllmCompressed:
    from plait_worker.attention.compressed.trtllm_compressed import TrtllmCompressed

    return TrtllmCompressed(BackendRequirements(shape, PAGE, 64, MAX_TOKENS, CPU))


class Layer:
    """One layer's caches with random contents, and a step's queries."""

    def __init__(self, shape: CompressedShape, tables: Tables) -> None:
        torch.manual_seed(0)
        self.rows, num_tokens, pages = tables.rows, sum(tables.lengths), tables.num_pages + 1
        self.q = self._random(num_tokens, shape.num_heads, 512)
        self.raw = self._random(MAX_TOKENS + NUM_SLOTS * 128, 512)
        self.entries = self._random(pages, *shape.page_shape(PAGE))
        self.index_keys = self._random(pages, *shape.index_page_shape(PAGE))
        self.index_q = self._random(num_tokens, shape.num_index_heads, shape.index_dim)
        self.weights = self._random(num_tokens, shape.num_index_heads)
        self.sinks = torch.randn(shape.num_heads)
        self.ratio = shape.ratio

    @staticmethod
    def _random(*size: int) -> Tensor:
        return torch.randn(*size).to(torch.bfloat16)

    def attend(self, backend: Any) -> Tensor:
        step = backend.prepare(self.rows)
        seen = step.choose(self.index_q, self.weights, self.index_keys) if self.ratio else None
        out: Tensor = step.attend(self.q, self.raw, self.entries, step.window(RAW_LAYOUT), seen, self.sinks)
        return out


def error(shape: CompressedShape, prefill: Any = PREFILL, decode: Any = DECODE, made: Any = None) -> float:
    layer = Layer(shape, Tables(prefill, decode, PAGE))
    right = TorchCompressed(BackendRequirements(shape, PAGE, 64, MAX_TOKENS, CPU))
    return difference(layer.attend(made or backend(shape)), layer.attend(right))


@pytest.mark.parametrize("shape", [DENSE, CSA, HCA], ids=["dense", "CSA", "HCA"])
def test_rows_of_every_sort_see_what_torch_sees(shape: CompressedShape, checked: Launcher) -> None:
    assert error(shape) <= TOLERANCE
    assert checked.calls == {"sparse mla": 1}


@pytest.mark.parametrize("decode", [DECODE, [(500, 3), (126, 3)]])
def test_decode_rows_alone_may_have_several_tokens(decode: list[tuple[int, int]], checked: Launcher) -> None:
    assert error(CSA, [], decode) <= TOLERANCE
    assert error(HCA, [], decode) <= TOLERANCE


def test_chunks_alone_with_all_entries_seen(checked: Launcher) -> None:
    """No more than the indexer chooses: widths are no multiple of 4."""
    assert error(CSA, [(10, 35), (0, 9)], []) <= TOLERANCE
    assert error(HCA, [(0, 1)], []) <= TOLERANCE


@pytest.mark.parametrize("num_heads", [16, 32, 64, 128])
def test_the_kernels_other_numbers_of_heads(num_heads: int, checked: Launcher) -> None:
    shape = CompressedShape(num_heads, 512, 128, 128, torch.bfloat16)
    assert error(shape, [(100, 40)], DECODE[:3]) <= TOLERANCE


def test_steps_of_one_backend_leave_its_counters_at_zero(checked: Launcher) -> None:
    made = backend(CSA)
    for decode in (DECODE[:2], DECODE, DECODE[1:4]):
        assert error(CSA, [], decode, made) <= TOLERANCE
    assert not made.scratch.counters.any()


def test_it_passes_the_self_check_at_start(launcher: Launcher) -> None:
    """Small pages make it short: rows of up to 32 entries, of which 16 are chosen."""
    requirements = BackendRequirements(dataclasses.replace(CSA, top_k=16), 8, 64, 256, CPU)
    assert choose_backend("trtllm_sparse_mla", requirements).name == "trtllm_sparse_mla"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_heads": 4}, "take 8, 16, 32, 64, 128 heads on a rank, not 4; change --tp"),
        ({"head_dim": 256}, "a head_dim of 512 and a window of 128 tokens, not 256 and 128; use torch"),
        ({"window": 64}, "a head_dim of 512 and a window of 128 tokens, not 512 and 64; use torch"),
        ({"dtype": torch.float16}, "set --dtype bfloat16"),
        ({"dtype": torch.float32}, "not float32"),
    ],
)
def test_the_rule_is_named(changes: dict[str, Any], said: str, launcher: Launcher) -> None:
    with pytest.raises(WorkerError, match=said):
        choose_backend(
            "trtllm_sparse_mla", BackendRequirements(dataclasses.replace(HCA, **changes), PAGE, 64, 256, CPU)
        )


def test_lists_that_the_kernel_would_read_wrongly_break_its_contract(
    checked: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw keys behind a gap, as torch's lists have them."""
    from plait_worker.attention.compressed import trtllm_compressed

    right = trtllm_compressed.sparse_rows

    def wrong(window: Any, seen: Any) -> Any:
        rows = right(window, seen)
        return rows._replace(index_TM=torch.cat((rows.index_TM[:, :128].flip(1), rows.index_TM[:, 128:]), dim=1))

    monkeypatch.setattr(trtllm_compressed, "sparse_rows", wrong)
    with pytest.raises(BrokenContract, match="rows that there are"):
        error(HCA)


def test_a_model_of_all_three_kinds_computes_what_it_computes_with_torch(checked: Launcher, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "head_dim": 512,
        "num_attention_heads": 8,
        "index_topk": 64,
        "partial_rotary_factor": 64 / 512,
    }
    random_v4("real ratios", **sizes, index_head_dim=64).save_pretrained(tmp_path)
    model, ids = load_model(tmp_path, "bfloat16", CPU, Parallel()), random_ids(300)
    given = {name: _logprobs(model, name, ids) for name in ("torch", "trtllm_sparse_mla")}
    assert checked.calls["sparse mla"] == 3 * 5
    divergence = (given["torch"].exp() * (given["torch"] - given["trtllm_sparse_mla"])).sum(dim=1)
    assert float(divergence.median()) < 1e-4
    assert float(divergence.max()) < 0.05


def _logprobs(model: Any, name: str, ids: list[int]) -> Tensor:
    """In chunks, with another request's decode rows beside them."""
    driver = V4Driver(model, model.config.compressed.page_multiple, max_tokens=512)
    requirements = requirements_for(model.attention_specs, driver.page_size, 64, driver.max_tokens, CPU)
    driver.attention = choose_attention(name, requirements) if name == "torch" else _unchecked(requirements)
    driver.step({"b": ids[:130]})
    parts = []
    for begin in range(0, len(ids), 75):
        decoded = {"b": ids[driver.lengths["b"]]}
        parts.append(driver.step({"a": ids[begin : begin + 75]}, decoded)["a"])
    return torch.cat(parts).float()


def _unchecked(requirements: Any) -> ModelAttention:
    """Without the self-check at start, whose steps are long with pages of 128 tokens."""
    from plait_worker.attention.compressed.trtllm_compressed import TrtllmCompressed

    return ModelAttention([TrtllmCompressed(each) for each in requirements])
