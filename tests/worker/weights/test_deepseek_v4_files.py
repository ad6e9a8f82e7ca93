"""DeepSeek-V4's folders, as published and as transformers saves them, load alike; broken ones are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_proto.divided_model import check_divisible
from plait_testing.deepseek_v4 import CSA, DENSE, HCA, TINY, V4Driver, random_ids, random_v4
from plait_worker.errors import ModelFilesError
from plait_worker.model_config import ModelConfig, YarnRope
from plait_worker.models.loader import dummy_model, load_model
from plait_worker.models.registry import read_config
from plait_worker.parallel import Parallel
from plait_worker.weights.deepseek_v4_files import DeepseekV4Files, published_name
from plait_worker.weights.dummy import DummyWeights
from plait_worker.weights.fields import Fields
from safetensors.torch import load_file, save_file
from torch import Tensor

CPU = torch.device("cpu")
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "num_hash_layers": 3,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "num_nextn_predict_layers": 1,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def config_of(changes: Mapping[str, Any] | None = None) -> ModelConfig:
    return read_config(Fields({**FLASH, **(changes or {})}, "config.json"))


def test_the_published_configuration_is_read() -> None:
    config = config_of()
    assert config.compressed is not None
    assert config.moe is not None
    assert config.compressed.ratios == (0, 0, 4, 128, 4)
    assert config.compressed.page_multiple == 128
    assert config.num_kv_heads == 1
    assert config.moe.hash_layers == {0, 1, 2}
    assert config.rope.scaling is None
    assert config.rope.theta == 10000
    entry_rope = config.compressed.entry_rope
    assert entry_rope.theta == 160000
    assert isinstance(entry_rope.scaling, YarnRope)
    assert (entry_rope.scaling.factor, entry_rope.scaling.attention_factor) == (16, 1.0)


def test_both_forms_of_the_configuration_say_the_same(tmp_path: Path) -> None:
    import transformers

    published = {**FLASH, "rope_scaling": {**FLASH["rope_scaling"], "rope_type": "yarn"}}
    written = transformers.DeepseekV4Config(
        **{key: value for key, value in published.items() if key != "architectures"}
    )
    written.architectures = FLASH["architectures"]
    written.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert "layer_types" in values
    assert "compress_ratios" not in values
    assert read_config(Fields(values, "config.json")) == config_of()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compress_ratios": [0, 0, 4, 64, 4]}, "holds 64, but a layer's ratio is one of 0, 4, 128"),
        ({"compress_ratios": [0, 4]}, "lists 2 layers of 5"),
        ({"layer_types": [CSA] * 4}, "layer_types"),
        ({"layer_types": [DENSE, DENSE, CSA, CSA, HCA]}, "compress_ratios .* those of layer_types, or left out"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"compress_rates": {CSA: 4, HCA: 4}}, "compress_rates"),
        ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types"),
        ({"o_groups": 7}, "a divisor of num_attention_heads, 64"),
        ({"scoring_func": "sigmoid"}, "sqrtsoftplus in this architecture"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 63}, "even"),
        (
            {"rope_scaling": {**FLASH["rope_scaling"], "attention_factor": 1.3}},
            "attention_factor is 1.3, .* no factor",
        ),
        ({"rope_scaling": {**FLASH["rope_scaling"], "mscale": 0.7}}, "mscale is 0.7, .* has no factor"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"model_type": "deepseek_v41"}, "DeepSeek-V4.1 is another architecture"),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "DeepSeek-V4.1 is another architecture"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said):
        config_of(changes)


def test_ranks_must_divide_the_output_groups() -> None:
    with pytest.raises(ValueError, match=r"does not divide the model's output groups \(o_groups\), 8; .*: 1, 2, 4, 8$"):
        check_divisible(config_of().divided, 16)


def test_random_weights_name_experts_of_all_kinds(saved: Path) -> None:
    model = dummy_model(saved, "float32", CPU, Parallel(), free_bytes=1 << 30)
    assert model.config.compressed is not None
    table = DummyWeights(torch.float32, CPU).take_indices("gate.tid2eid", (61, 2), 6, "expert")
    assert sorted(table.unique().tolist()) == [0, 1, 2, 3, 4, 5]


def save_folder(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    random_v4("mixed").save_pretrained(path)
    return path


def as_published(saved: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Its tensors and configuration in the published form."""
    tensors = load_file(saved / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    rates = {"sliding_attention": 0, **config["compress_rates"]}
    config["compress_ratios"] = [*(rates[kind] for kind in config.pop("layer_types")), 0]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    scaling = config.pop("rope_parameters")["compress"]
    config["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    del config["num_key_value_heads"]
    return {published_name(name): tensor for name, tensor in tensors.items()}, config


def logprobs(path: Path) -> Tensor:
    driver = V4Driver(load_model(path, "float32", CPU, Parallel()))
    return driver.step({"a": random_ids(60)})["a"]


def test_published_names_and_saved_ones_are_one_model(saved: Path, tmp_path: Path) -> None:
    tensors, config = as_published(saved)
    assert "layers.1.attn.kv_norm.weight" in tensors
    assert "hc_head_fn" in tensors
    assert not any(name.startswith("model.") for name in tensors)
    published = save_folder(tmp_path / "published", tensors, config)
    assert torch.equal(logprobs(published), logprobs(saved))


def test_draft_layers_are_passed_over(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors, config = as_published(saved)
    more = {"mtp.0.enorm.weight": torch.ones(48), "dspark.proj.weight": torch.ones(4, 4)}
    with caplog.at_level(logging.INFO):
        load_model(save_folder(tmp_path / "p", {**tensors, **more}, config), "float32", CPU, Parallel())
    assert [record.message for record in caplog.records if "passed over" in record.message] == [
        "weights: 1 tensors of DSpark's draft module are passed over; nothing runs it yet",
        "weights: 1 tensors of MTP layers are passed over; nothing runs them yet",
    ]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("layers.0.ffn.gate.tid2eid", torch.full((61, 2), 6), "names expert 6, but there are 6"),
        ("layers.0.ffn.gate.tid2eid", torch.full((61, 2), -1), "names expert -1"),
        ("layers.0.ffn.gate.tid2eid", torch.zeros(60, 2, dtype=torch.int64), r"has shape \[60, 2\]"),
        ("layers.0.attn.attn_sink", torch.zeros(3), r"has shape \[3\]"),
        ("layers.9.attn.wkv.weight", torch.zeros(3), "hold 1 tensors that this architecture does not use"),
    ],
)
def test_a_wrong_tensor_is_refused(name: str, value: Tensor, said: str, saved: Path, tmp_path: Path) -> None:
    tensors, config = as_published(saved)
    path = save_folder(tmp_path / "wrong", {**tensors, name: value}, config)
    with pytest.raises(ModelFilesError, match=said):
        load_model(path, "float32", CPU, Parallel())


def test_fp8_rows_in_the_cache_are_refused(saved: Path) -> None:
    from plait_worker.weights.cache_scales import Fp8Cache

    with pytest.raises(ValueError, match="no kernel for FP8 rows"):
        load_model(saved, "float32", CPU, Parallel(), fp8=Fp8Cache(1.0, 1.0))


E8M0 = torch.float8_e8m0fnu
BLOCKED = "layers.0.attn.wq_a.weight"
PACKED = "layers.0.ffn.experts.0.w1.weight"


def quantised(path: Path, tensors: Mapping[str, Tensor]) -> DeepseekV4Files:
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "expert_dtype": "fp4"}
    return DeepseekV4Files(save_folder(path, tensors, {**FLASH, "quantization_config": quantisation}))


@pytest.mark.parametrize("scale_type", [torch.float32, E8M0])
def test_fp8_blocks_have_a_scale_of_their_own(scale_type: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, exponents = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.randint(-6, 6, (2, 3))
    scale = (2.0**exponents).to(scale_type)
    files = quantised(tmp_path, {BLOCKED: weight, BLOCKED.replace("weight", "scale"): scale})
    assert list(files.names) == [BLOCKED]
    expected = weight.float() * scale.float().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(files.read(BLOCKED), expected)


def test_the_low_half_of_a_packed_byte_comes_first(tmp_path: Path) -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-value for value in values]
    torch.manual_seed(0)
    codes, exponents = torch.randint(0, 16, (300, 64)), torch.randint(-6, 6, (300, 2))
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    scale = (2.0**exponents).to(E8M0)
    files = quantised(tmp_path, {PACKED: packed, PACKED.replace("weight", "scale"): scale})
    assert files.shape(PACKED) == (300, 64)
    expected = torch.tensor(values)[codes] * (2.0**exponents).repeat_interleave(32, dim=1)
    assert torch.equal(files.read(PACKED), expected)


@pytest.mark.parametrize(
    ("exponents", "scale_type", "kind"),
    [
        ((-6, 6), E8M0, "Q5_0"),
        ((-6, 6), torch.float32, None),
        ((-30, 6), E8M0, None),
        ((-6, 20), E8M0, None),
    ],
)
def test_experts_are_kept_in_blocks_that_hold_every_value(
    exponents: tuple[int, int], scale_type: torch.dtype, kind: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (300, 32), dtype=torch.uint8).view(torch.int8)
    scale = (2.0 ** torch.randint(*exponents, (300, 2))).to(scale_type)
    files = quantised(tmp_path, {PACKED: packed, PACKED.replace("weight", "scale"): scale})
    kept = files.block_weight(PACKED)
    assert files.block_kind(PACKED) == kind
    assert (kept is None) == (kind is None)
    assert kept is None or torch.equal(kept.dequantised(), files.read(PACKED))


@pytest.mark.parametrize(
    ("name", "weight", "scale"),
    [
        (BLOCKED, torch.zeros(200, 300).to(torch.float8_e4m3fn), torch.ones(2, 2)),
        (PACKED, torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 3).to(E8M0)),
        (PACKED, torch.zeros(4, 24, dtype=torch.int8), torch.ones(4, 1).to(E8M0)),
    ],
)
def test_scales_that_do_not_fit_the_weight_are_refused(
    name: str, weight: Tensor, scale: Tensor, tmp_path: Path
) -> None:
    files = quantised(tmp_path, {name: weight, name.replace("weight", "scale"): scale})
    with pytest.raises(ModelFilesError, match="cannot be de-quantised"):
        files.read(name)


def test_a_quantised_weight_without_scales_is_refused(tmp_path: Path) -> None:
    files = quantised(tmp_path, {PACKED: torch.zeros(4, 32, dtype=torch.int8)})
    with pytest.raises(ModelFilesError, match=r"^the model files lack the tensor \S+scale: download them again$"):
        files.read(PACKED)


def test_a_model_of_quantised_weights_is_that_of_their_values(tmp_path: Path) -> None:
    given, plain = quantised_and_plain(tmp_path)
    assert torch.equal(logprobs(given), logprobs(plain))


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="quantised weights want AVX512-BF16")
def test_experts_in_blocks_are_near_those_of_their_values(tmp_path: Path) -> None:
    given, plain = quantised_and_plain(tmp_path)
    model = load_model(given, "auto", CPU, Parallel())
    assert model.quantised_types == {"Q5_0"}
    exact_TV, ids = logprobs(plain), random_ids(60)
    error_TV = (V4Driver(model).step({"a": ids})["a"].float() - exact_TV).abs()
    assert error_TV.mean() < 0.1 * exact_TV.std()


def quantised_and_plain(tmp_path: Path) -> tuple[Path, Path]:
    """FP8 in attention, MXFP4 in experts, float32 and bfloat16 elsewhere; and the same values in float32."""
    path = tmp_path / "saved"
    sizes = {**TINY, "hidden_size": 64, "o_lora_rank": 16}
    random_v4("mixed", **{key: sizes[key] for key in ("hidden_size", "o_lora_rank")}).save_pretrained(path)
    tensors, config = as_published(path)
    plain, packed = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        for stored_name, stored, value in _quantise(name, tensor):
            packed[stored_name] = stored
            if value is not None:
                plain[stored_name] = value
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "expert_dtype": "fp4"}
    given = save_folder(tmp_path / "quantised", packed, {**config, "quantization_config": quantisation})
    return given, save_folder(tmp_path / "plain", plain, config)


def _quantise(name: str, tensor: Tensor) -> list[tuple[str, Tensor, Tensor | None]]:
    """Names, what is stored, and the values of weights."""
    scale_name = name.replace("weight", "scale")
    if ".experts." in name:
        codes = torch.randint(0, 16, tensor.shape)
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
        stored = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
        scale = torch.full((tensor.shape[0], tensor.shape[1] // 32), 2.0**-5)
        return [(name, stored, values[codes] * 2.0**-5), (scale_name, scale.to(E8M0), None)]
    if name.endswith(
        ("attn.wq_a.weight", "attn.wq_b.weight", "attn.wkv.weight", "attn.wo_a.weight", "attn.wo_b.weight")
    ):
        stored = (tensor * 64).to(torch.float8_e4m3fn)
        return [(name, stored, stored.float() / 64), (scale_name, torch.full((1, 1), 1 / 64), None)]
    return [(name, tensor, tensor)]
