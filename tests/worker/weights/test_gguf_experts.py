"""Experts of a GGUF in K-quants stay quantised, and their memory is known before one is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from plait_kernels.moe import Experts
from plait_testing.rank_threads import on_every_rank
from plait_worker.errors import WorkerError
from plait_worker.layers.mlp import SparseMlp
from plait_worker.models.decoder import MhaDecoder
from plait_worker.models.loader import load_model, open_checkpoint, read_model
from plait_worker.parallel import Parallel
from plait_worker.weights.cut_blocks import dense_names
from plait_worker.weights.gguf_file import GgufFile
from plait_worker.weights.reader import Weights

CPU = torch.device("cpu")
Kind = gguf.GGMLQuantizationType
NUM_EXPERTS = 4
WITH_BLOCKS = pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="quantised weights want AVX512-BF16")


def mixed(name: str) -> Kind:
    """As Q4_K_M has them, and finer gates and ups of experts."""
    if "norm" in name or name.split(".")[-2] in ("token_embd", "ffn_gate_inp"):
        return Kind.F32
    return {"ffn_down_exps": Kind.Q6_K, "ffn_gate_up_exps": Kind.Q5_K, "attn_v": Kind.Q6_K}.get(
        name.split(".")[-2], Kind.Q4_K
    )


def q8(name: str) -> Kind:
    return Kind.F32 if "norm" in name or name.split(".")[-2] in ("token_embd", "ffn_gate_inp") else Kind.Q8_0


@pytest.fixture
def save_moe(write_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """A Qwen3-MoE of one layer."""

    def save(kind: Callable[[str], Kind], hidden_size: int, width: int) -> Path:
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=hidden_size,
            num_hidden_layers=1,
            num_attention_heads=4,
            head_dim=64,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            moe_intermediate_size=width,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
        model = transformers.Qwen3MoeForCausalLM(config)
        return write_gguf(model, arch="qwen3moe", kind=kind, extra=partial(write_fields, width=width))

    return save


def write_fields(writer: gguf.GGUFWriter, width: int) -> None:
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(width)


def load(path: Path, dtype: str = "auto", parallel: Parallel | None = None, **more: Any) -> MhaDecoder:
    model = load_model(path, dtype, CPU, parallel or Parallel(), **more)
    assert isinstance(model, MhaDecoder)
    return model


def experts_of(model: MhaDecoder) -> Experts:
    mlp = model.blocks[0].mlp
    assert isinstance(mlp, SparseMlp)
    return mlp.experts


@WITH_BLOCKS
def test_experts_in_k_quants_stay_quantised(save_moe: Callable[..., Path]) -> None:
    path = save_moe(mixed, 256, 512)
    kept, upcast = load(path), load(path, "bfloat16")
    assert kept.quantised_types == {"Q4_K", "Q5_K", "Q6_K"}
    x, weights = torch.randn(9, 256).bfloat16(), torch.rand(9, 2)
    chosen = torch.rand(9, NUM_EXPERTS).topk(2).indices
    ours, theirs = (experts_of(model)(x, weights, chosen).float() for model in (kept, upcast))
    assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()


@WITH_BLOCKS
@pytest.mark.parametrize(
    ("kind", "hidden_size", "width"), [(mixed, 256, 512), (q8, 64, 64), (q8, 64, 32)], ids=["K", "Q8_0", "cut"]
)
@pytest.mark.parametrize("world", [1, 2])
def test_the_sum_before_a_load_is_what_the_ranks_hold(
    kind: Callable[[str], Kind],
    hidden_size: int,
    width: int,
    world: int,
    save_moe: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Experts of 32 inputs are cut within their block by two ranks, which hold them dense."""
    path = save_moe(kind, hidden_size, width)
    checkpoint = open_checkpoint(path)
    weights = Weights(checkpoint.source, torch.bfloat16, CPU, formats=checkpoint.formats)
    held = on_every_rank(world, tmp_path, lambda parallel: taken(path, parallel))
    expected = weights.least_bytes((), dense_names(checkpoint.source, world))
    experts = [name for name in expected if ".experts." in name]
    assert len(experts) == 3 * NUM_EXPERTS
    for name in experts:
        assert sum(rank[name] for rank in held) == expected[name], name


@WITH_BLOCKS
def test_the_log_counts_the_matrices_that_ranks_would_cut(
    save_moe: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_moe(q8, 64, 32)
    with caplog.at_level("INFO"):
        on_every_rank(2, tmp_path, lambda parallel: load_model(path, "auto", CPU, parallel))
    num_cut = len(dense_names(open_checkpoint(path).source, 2))
    assert num_cut >= 3 * NUM_EXPERTS
    assert f"weights: {num_cut} matrices upcast to bfloat16: 2 ranks would cut" in caplog.text


def taken(path: Path, parallel: Parallel) -> dict[str, int]:
    """Bytes of each tensor on this rank."""
    checkpoint = open_checkpoint(path)
    weights = Weights(checkpoint.source, torch.bfloat16, CPU, formats=checkpoint.formats)
    with torch.inference_mode():
        read_model(checkpoint.config, weights, parallel, None)
    return weights.held.taken


@WITH_BLOCKS
def test_experts_that_ranks_cut_are_counted_dense_before_one_is_read(
    save_moe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_moe(q8, 64, 32)
    needed = sum(on_every_rank(2, tmp_path, lambda parallel: load(path, parallel=parallel).weight_bytes))
    for method in ("read", "block_weight"):
        monkeypatch.setattr(GgufFile, method, lambda _file, name: pytest.fail(f"{name} was read"))

    def refused(parallel: Parallel) -> bool:
        with pytest.raises(WorkerError, match="too little"):
            load(path, parallel=parallel, free_bytes=int(0.95 * needed))
        return True

    (tmp_path / "again").mkdir()
    assert on_every_rank(2, tmp_path / "again", refused) == [True, True]
