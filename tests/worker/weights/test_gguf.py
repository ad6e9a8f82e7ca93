"""A GGUF gives exact weights and configuration, and a broken one an error."""

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plait_kernels.moe.cpu import ExpertPanels
from plait_testing.rank_threads import on_every_rank
from plait_worker.errors import ModelFilesError, WorkerError
from plait_worker.layers.mlp import SparseMlp
from plait_worker.model_config import FactorsRope, LinearRope, YarnRope
from plait_worker.models.decoder import MhaDecoder
from plait_worker.models.loader import load_model, open_checkpoint
from plait_worker.parallel import Parallel
from plait_worker.weights.gguf_file import GgufFile
from plait_worker.weights.reader import Weights
from plait_worker.weights.weight_memory import WeightMemory

CPU = torch.device("cpu")
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
Kind = gguf.GGMLQuantizationType


def read_all(path: Path) -> dict[str, torch.Tensor]:
    source = open_checkpoint(path).source
    return {name: source.read(name) for name in source.names}


def load(path: Path) -> None:
    load_model(path, "float32", torch.device("cpu"), Parallel())


def tiny_moe() -> transformers.Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **sizes, norm_topk_prob=True))


def write_expert_fields(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)


def test_a_written_llama_is_read_back(tiny_llama: Any, write_gguf: Callable[..., Any]) -> None:
    tensors = read_all(write_gguf(tiny_llama))
    expected = dict(tiny_llama.named_parameters())
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_tensors_come_back_close(kind: Kind, tiny_llama: Any, write_gguf: Callable[..., Any]) -> None:
    tensors = read_all(write_gguf(tiny_llama, kind=kind))
    expected = tiny_llama.model.layers[1].self_attn.k_proj.weight
    error = (tensors["model.layers.1.self_attn.k_proj.weight"] - expected).abs().max() / expected.abs().max()
    assert error < 0.1


MIXED = {
    "attn_q": Kind.Q4_0,
    "attn_k": Kind.Q8_0,
    "attn_v": Kind.F16,
    "attn_output": Kind.Q5_0,
    "ffn_gate": Kind.Q4_1,
    "ffn_up": Kind.Q4_1,
    "ffn_down": Kind.Q8_0,
    "output": Kind.Q4_0,
}


def mixed(name: str) -> Kind:
    """Of files whose tensors are quantised in several ways, or not at all."""
    return MIXED.get(name.split(".")[-2], Kind.F32)


def of_several_types(name: str) -> Kind:
    """Of files whose queries, keys and values, or gates and ups, have different block types."""
    return {"attn_v": Kind.Q5_1, "ffn_up": Kind.Q5_0}.get(name.split(".")[-2], mixed(name))


KEPT = {
    Kind.Q8_0: {"Q8_0"},
    Kind.Q4_0: {"Q4_0"},
    Kind.Q4_1: {"Q4_1"},
    Kind.Q5_0: {"Q5_0"},
    Kind.Q5_1: {"Q5_1"},
    mixed: {"Q4_0", "Q4_1", "Q5_0", "Q8_0"},
    of_several_types: {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"},
}


@pytest.mark.parametrize("kind", KEPT)
def test_matrices_stay_quantised_unless_a_type_is_named(
    kind: Any, tiny_llama: Any, write_gguf: Callable[..., Any]
) -> None:
    check_kept_matrices(write_gguf(tiny_llama, kind=kind), KEPT[kind], tiny_llama.config.hidden_size)


K_QUANTS = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "ffn_up": Kind.Q5_K, "attn_k": Kind.Q5_0}


def test_k_quants_stay_quantised(write_gguf: Callable[..., Any]) -> None:
    """As files of mixed kinds have them: queries, keys and values differ, and the head is finer."""

    def kind(name: str) -> Kind:
        return Kind.F32 if "norm" in name or "token_embd" in name else K_QUANTS.get(name.split(".")[-2], Kind.Q4_K)

    config = transformers.LlamaConfig(**(LLAMA | {"hidden_size": 256, "intermediate_size": 512}))
    path = write_gguf(transformers.LlamaForCausalLM(config), kind=kind)
    check_kept_matrices(path, {"Q4_K", "Q5_K", "Q6_K", "Q5_0"}, 256)


def check_kept_matrices(path: Path, kinds: set[str], hidden_size: int) -> None:
    """They multiply nearly as the same file's matrices in bfloat16."""
    kept, rounded = (load_model(path, dtype, torch.device("cpu"), Parallel()) for dtype in ("auto", "bfloat16"))
    assert isinstance(kept, MhaDecoder)
    assert isinstance(rounded, MhaDecoder)
    assert rounded.quantised_types == set()
    assert kept.quantised_types == (kinds if kept.dtype == torch.bfloat16 else set())
    for ours, theirs in zip(kept.blocks, rounded.blocks, strict=True):
        for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"):
            one, other = (attrgetter(name)(block).multiply for block in (ours, theirs))
            x = torch.randn(5, one.num_inputs).to(kept.dtype)
            expected = other.matmul_float32(x.bfloat16())
            assert (one.matmul_float32(x) - expected).abs().max() < 0.02 * expected.abs().max()
    hidden = torch.randn(3, hidden_size)
    expected = rounded.logits(hidden.bfloat16())
    assert (kept.logits(hidden.to(kept.dtype)) - expected).abs().max() < 0.02 * expected.abs().max()


def bytes_to_load(path: Path) -> int:
    """What is held in the end, and the largest tensor once more: a matrix is there twice until it is in panels."""
    model = load_model(path, "auto", CPU, Parallel())
    checkpoint = open_checkpoint(path)
    formats = checkpoint.formats if model.quantised_types else ()
    source = Weights(checkpoint.source, model.dtype, CPU, formats=formats)
    return model.weight_bytes + max(source.least_bytes(()).values())


def test_a_tensor_is_dequantised_without_a_second_copy(write_gguf: Callable[..., Any]) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "vocab_size": 4096}))
    source = open_checkpoint(write_gguf(model, kind=Kind.Q8_0)).source
    tracemalloc.start()
    tensor = source.read("model.embed_tokens.weight")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tensor.nbytes == 4096 * 64 * 4
    assert peak < 1.25 * tensor.nbytes


@pytest.mark.parametrize("kind", [Kind.Q4_0, mixed])
def test_memory_must_hold_what_is_kept_and_no_more(kind: Any, tiny_llama: Any, write_gguf: Callable[..., Any]) -> None:
    path = write_gguf(tiny_llama, kind=kind)
    needed = bytes_to_load(path)
    load_model(path, "auto", CPU, Parallel(), free_bytes=needed)
    with pytest.raises(WorkerError, match=r"weights take .* or more and .* too little"):
        load_model(path, "auto", CPU, Parallel(), free_bytes=needed - 1)


def test_too_little_memory_is_told_before_a_tensor_is_read(
    write_gguf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding is dense, whatever block type the file has."""
    path = write_gguf(tiny_moe(), arch="qwen3moe", kind=Kind.Q4_0, extra=write_expert_fields)
    needed = bytes_to_load(path)
    load_model(path, "auto", CPU, Parallel(), free_bytes=needed)
    monkeypatch.setattr(GgufFile, "read", lambda _file, name: pytest.fail(f"{name} was read"))
    with pytest.raises(WorkerError, match="too little"):
        load_model(path, "auto", CPU, Parallel(), free_bytes=int(0.95 * needed))


def test_what_is_to_come_counts_until_it_is_held() -> None:
    totals: list[int] = []
    held = WeightMemory(lambda own, to_come: totals.append(own + to_come))
    held.expect({"a": 10, "b": 20}, num_passing=5)
    held.add("a", 12)
    held.add("a", 5)
    held.add("b", 20)
    assert totals == [35, 37, 42, 42]


@pytest.mark.parametrize("kind", [Kind.Q4_1, mixed])
@pytest.mark.parametrize("intermediate_size", [128, 96], ids=["whole blocks", "half blocks"])
def test_quantised_weights_are_divided_among_ranks(
    kind: Any, intermediate_size: int, write_gguf: Callable[..., Any], tmp_path: Path
) -> None:
    """A rank whose inputs begin within a block reads dense weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "intermediate_size": intermediate_size})
    path = write_gguf(transformers.LlamaForCausalLM(config), kind=kind)
    x = torch.randn(7, 64)

    def outputs(parallel: Parallel) -> list[torch.Tensor]:
        model = load_model(path, "auto", CPU, parallel)
        rows, mlp = x.to(model.dtype), model.blocks[1].mlp  # type: ignore[attr-defined]
        qkv = model.blocks[1].attention.qkv(rows)  # type: ignore[attr-defined]
        return [parallel.all_reduce(mlp(rows)).float(), qkv.float()]

    mlp, qkv = outputs(Parallel())
    shares = on_every_rank(2, tmp_path, outputs)
    for together, _ in shares:
        assert (together - mlp).abs().max() < 0.03 * mlp.abs().max()
    q, k, v = (torch.cat([own.split([32, 16, 16], dim=1)[i] for _, own in shares], dim=1) for i in range(3))
    assert (torch.cat((q, k, v), dim=1) - qkv).abs().max() < 0.02 * qkv.abs().max()


def test_the_configuration_comes_from_the_metadata(tiny_llama: Any, write_gguf: Callable[..., Any]) -> None:
    config = open_checkpoint(write_gguf(tiny_llama)).config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (64, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.max_positions == 256
    assert not config.tie_embeddings


@pytest.mark.parametrize("tied", [False, True])
def test_a_qwen2_keeps_its_rows_and_biases(tied: bool, write_gguf: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    path = write_gguf(model, arch="qwen2")
    tensors, parameters = read_all(path), dict(model.named_parameters())
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensor, parameters[name]) for name, tensor in tensors.items())
    config = open_checkpoint(path).config
    assert (config.architecture, config.head_dim, config.tie_embeddings) == ("Qwen2ForCausalLM", 16, tied)
    load(path)


def test_a_qwen3_moe_keeps_its_rows_and_splits_its_experts(write_gguf: Callable[..., Any]) -> None:
    model = tiny_moe()
    path = write_gguf(model, arch="qwen3moe", extra=write_expert_fields)
    tensors, parameters = read_all(path), dict(model.named_parameters())
    moe = open_checkpoint(path).config.moe
    assert moe is not None
    assert (moe.num_experts, moe.num_experts_per_token, moe.intermediate_size) == (4, 2, 32)
    assert moe.normalise_top_k
    gate, up = parameters["model.layers.0.mlp.experts.gate_up_proj"][3].chunk(2)
    assert torch.equal(tensors["model.layers.0.mlp.experts.3.gate_proj.weight"], gate)
    assert torch.equal(tensors["model.layers.0.mlp.experts.3.up_proj.weight"], up)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensors[name], parameters[name])
    load(path)


def moe_in_blocks(path: Path, dtype: str, parallel: Parallel) -> tuple[Any, bool]:
    """The first layer's experts, and whether they are quantised."""
    model = load_model(path, dtype, CPU, parallel)
    assert isinstance(model, MhaDecoder)
    mlp = model.blocks[0].mlp
    assert isinstance(mlp, SparseMlp)
    experts = mlp.experts
    if not isinstance(experts, ExpertPanels):
        return experts, False
    return experts, any(matrix.struct.activation_bits for matrix in experts._matrices[0])


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="quantised weights want AVX512-BF16")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0])
def test_experts_of_a_gguf_stay_quantised(kind: Kind, write_gguf: Callable[..., Any]) -> None:
    path = write_gguf(tiny_moe(), arch="qwen3moe", kind=kind, extra=write_expert_fields)
    kept, is_quantised = moe_in_blocks(path, "auto", Parallel())
    rounded, is_rounded_quantised = moe_in_blocks(path, "bfloat16", Parallel())
    assert (is_quantised, is_rounded_quantised) == (True, False)
    x, weights = torch.randn(9, 64).bfloat16(), torch.rand(9, 2)
    chosen = torch.rand(9, 4).topk(2).indices
    expected = rounded(x, weights, chosen).float()
    assert (kept(x, weights, chosen).float() - expected).abs().max() < 0.03 * expected.abs().max()


def test_experts_whose_blocks_the_ranks_would_cut_are_dense(write_gguf: Callable[..., Any], tmp_path: Path) -> None:
    path = write_gguf(tiny_moe(), arch="qwen3moe", kind=Kind.Q8_0, extra=write_expert_fields)
    found = on_every_rank(2, tmp_path, lambda parallel: moe_in_blocks(path, "auto", parallel)[1])
    assert found == [False, False]


def test_rope_scalings_are_read(tiny_llama: Any, write_gguf: Callable[..., Any]) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(200)

    def factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))

    assert open_checkpoint(write_gguf(tiny_llama, extra=linear)).config.rope.scaling == LinearRope(4.0)
    stretched = open_checkpoint(write_gguf(tiny_llama, extra=yarn)).config
    assert isinstance(stretched.rope.scaling, YarnRope)
    assert stretched.rope.scaling.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    assert stretched.max_positions == 800
    path = write_gguf(tiny_llama, extra=factors)
    assert open_checkpoint(path).config.rope.scaling == FactorsRope(tuple(float(i) for i in range(1, 9)))
    load(path)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"scaling.factor": 4.0}, LinearRope(4.0)),
        ({"scale_linear": 4.0}, LinearRope(4.0)),
        ({"scale_linear": 4.0, "scaling.factor": 2.0}, LinearRope(2.0)),
        ({"scale_linear": 4.0, "scaling.factor": 0.0}, None),
        ({"scaling.factor": 1.0}, None),
        ({}, None),
    ],
)
def test_a_rope_factor_without_a_type_is_linear_as_in_llama_cpp(
    fields: dict[str, float], scaling: LinearRope | None, tiny_llama: Any, write_gguf: Callable[..., Any]
) -> None:
    def factors(writer: gguf.GGUFWriter) -> None:
        for name, number in fields.items():
            writer.add_float32(f"llama.rope.{name}", number)

    assert open_checkpoint(write_gguf(tiny_llama, extra=factors)).config.rope.scaling == scaling


def test_rope_over_a_part_of_each_head_is_refused(write_gguf: Callable[..., Any]) -> None:
    """Also where the head's width follows from other sizes (a qwen2's here)."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads))
    load(write_gguf(model, arch="qwen2", extra=lambda writer: writer.add_rope_dimension_count(16)))
    with pytest.raises(ModelFilesError, match=r"rope\.dimension_count is 8, not the head dimension of the keys, 16"):
        load(write_gguf(model, arch="qwen2", extra=lambda writer: writer.add_rope_dimension_count(8)))


@pytest.mark.parametrize("num_factors", [1, 5, 16])
def test_rope_factors_of_other_heads_are_refused(
    num_factors: int, tiny_llama: Any, write_gguf: Callable[..., Any]
) -> None:
    def factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(num_factors, dtype=np.float32))

    with pytest.raises(ModelFilesError, match=f"holds {num_factors} factors, but a head_dim of 16 has 8"):
        load(write_gguf(tiny_llama, extra=factors))


def test_a_base_whose_frequencies_do_not_fall_is_refused(tiny_llama: Any, write_gguf: Callable[..., Any]) -> None:
    tiny_llama.config.rope_parameters["rope_theta"] = 1.0
    with pytest.raises(ModelFilesError, match=r"rope\.freq_base is 1\.0, but must be a number above 1 "):
        load(write_gguf(tiny_llama))


def test_a_quantised_norm_comes_back_close(tiny_llama: Any, write_gguf: Callable[..., Any]) -> None:
    norm = torch.nn.init.uniform_(tiny_llama.model.layers[1].input_layernorm.weight, 0.5, 1.5).detach()
    path = write_gguf(tiny_llama, kind=lambda name: Kind.Q8_0 if name == "blk.1.attn_norm.weight" else Kind.F32)
    read = open_checkpoint(path).source.read("model.layers.1.input_layernorm.weight")
    assert (read - norm).abs().max() < 0.01
    load(path)


def test_unknown_things_are_refused_by_name(tiny_llama: Any, write_gguf: Callable[..., Any]) -> None:
    def longrope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    def window(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(64)

    def extra_tensor(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, dtype=np.float32))

    for extra, said in ((longrope, "longrope"), (window, "sliding-window"), (extra_tensor, "blk.0.attn_sinks.weight")):
        with pytest.raises(ModelFilesError, match=said):
            load(write_gguf(tiny_llama, extra=extra))
    with pytest.raises(ModelFilesError, match="architecture falcon is not supported; these are: llama"):
        load(write_gguf(tiny_llama, arch="falcon"))


def test_a_quantisation_without_decoder_is_refused_by_name(tiny_llama: Any, write_gguf: Callable[..., Any]) -> None:
    path = write_gguf(tiny_llama)
    raw = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 16
    assert struct.unpack_from("<I", raw, at)[0] == Kind.F32
    struct.pack_into("<I", raw, at, Kind.I32)
    path.write_bytes(raw)
    with pytest.raises(ModelFilesError, match=r"blk\.0\.ffn_up\.weight has the quantisation I32"):
        load(path)
    struct.pack_into("<I", raw, at, 200)
    path.write_bytes(raw)
    with pytest.raises(ModelFilesError, match="unknown quantisation type 200"):
        load(path)


@pytest.fixture
def tiny_file(tiny_llama: Any, write_gguf: Callable[..., Any]) -> bytes:
    path: Path = write_gguf(tiny_llama, kind=Kind.Q8_0)
    return path.read_bytes()


def header_length(raw: bytes) -> int:
    return raw.index(b"blk.1.ffn_down.weight") + 200


def test_every_truncation_is_an_error_that_says_so(tiny_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    header = range(0, header_length(tiny_file), 7)
    data = range(header_length(tiny_file), len(tiny_file) - 1, len(tiny_file) // 50)
    for length in (*header, *data, len(tiny_file) - 1):
        path.write_bytes(tiny_file[:length])
        with pytest.raises(ModelFilesError, match=r"[Dd]ownload it again"):
            load(path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_flipped_bits_of_a_header_raise_nothing_but_model_files_error(
    data: st.DataObject, tiny_file: bytes, tmp_path: Path
) -> None:
    raw = bytearray(tiny_file)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, header_length(tiny_file)))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(raw)
    with contextlib.suppress(ModelFilesError):
        load(path)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(raw=st.binary(max_size=200))
def test_noise_behind_a_magic_word_is_an_error(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + raw)
    with pytest.raises(ModelFilesError):
        load(path)


@pytest.mark.parametrize(
    ("counts", "said"),
    [((2**40, 1), "tensors"), ((1, 2**40), "metadata fields"), ((0, 1), "bytes of a string")],
)
def test_claimed_counts_are_limited(counts: tuple[int, int], said: str, tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, *counts, 2**62))
    with pytest.raises(ModelFilesError, match=said):
        load(path)


def test_a_big_endian_or_old_file_is_refused(tiny_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    for version in (struct.pack(">I", 3), struct.pack("<I", 1)):
        path.write_bytes(tiny_file[:4] + version + tiny_file[8:])
        with pytest.raises(ModelFilesError, match="version"):
            load(path)
