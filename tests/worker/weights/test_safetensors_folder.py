"""A Hugging Face folder of any layout is read whole, or rejected with the reason and what to do."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plait_proto import ExitCode
from plait_worker.attention.model_specs import attention_specs
from plait_worker.attention.spec import MhaShape
from plait_worker.errors import ModelFilesError, WorkerError
from plait_worker.model_config import LinearRope, Llama3Rope, YarnRope
from plait_worker.models.loader import choose_dtype, load_model, open_checkpoint
from plait_worker.models.registry import read_config
from plait_worker.parallel import Parallel
from plait_worker.weights.fields import Fields
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RotaryEmbedding

CPU = torch.device("cpu")


def load(path: Path, dtype: str = "float32") -> Any:
    return load_model(path, dtype, CPU, Parallel())


@pytest.fixture
def saved(tiny_llama: Any, tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    tiny_llama.save_pretrained(path)
    return path


def change(path: Path, name: str = "config.json", **changes: Any) -> Path:
    file = path / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


def rewrite(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    edit(tensors)
    safetensors.torch.save_file(tensors, file)
    return path


def test_shards_give_what_one_file_gives(tiny_llama: Any, saved: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    tiny_llama.save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = SafetensorsFolder(saved), SafetensorsFolder(sharded)
    assert set(one.names) == set(many.names)
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.names)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floating_types_are_converted_to_the_asked_one(stored: torch.dtype, tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama.to(stored).save_pretrained(tmp_path / "stored")
    for asked in ("float32", "bfloat16", "float16"):
        model = load(tmp_path / "stored", asked)
        assert model.dtype == getattr(torch, asked)
        expected = tiny_llama.model.norm.weight.to(getattr(torch, asked))
        assert torch.equal(model.norm.weight_D, expected)


def test_the_dtype_of_auto_follows_the_processor() -> None:
    assert choose_dtype("auto", CPU) in (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="dtype 'int8' must be auto, float32, bfloat16, float16"):
        choose_dtype("int8", CPU)


def test_a_tied_head_that_is_stored_all_the_same_is_no_leftover(saved: Path) -> None:
    load(change(saved, tie_word_embeddings=True))


def test_old_rotary_buffers_are_no_leftovers(saved: Path) -> None:
    load(rewrite(saved, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})))


def test_code_in_the_folder_is_never_run(saved: Path) -> None:
    (saved / "modeling_evil.py").write_text("raise SystemExit")
    load(change(saved, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}))


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 2, "sliding_window": 64}


def config_of(**changes: Any) -> Any:
    return read_config(Fields({**CONFIG, **changes}, "config.json"))


def test_rope_is_read_in_both_spellings() -> None:
    old = config_of(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = config_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert old.rope == new.rope
    assert old.rope.theta == 5e5
    assert old.rope.scaling == LinearRope(2.0)
    assert config_of(rope_theta=1e6, rope_scaling=None).rope.scaling is None
    llama3 = config_of(rope_scaling={**LLAMA3, "original_max_position_embeddings": 64}).rope.scaling
    assert llama3 == Llama3Rope(8.0, 1.0, 4.0, 64)
    yarn = config_of(rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope.scaling
    assert isinstance(yarn, YarnRope)
    assert yarn.original_max_positions == 128


def test_qwen3_has_heads_of_128_unless_it_says_otherwise() -> None:
    assert config_of().head_dim == 128
    assert config_of(head_dim=16).head_dim == 16
    assert config_of(architectures=["LlamaForCausalLM"]).head_dim == 8
    assert config_of(architectures=["Qwen2ForCausalLM"]).head_dim == 8


def test_qwen2_states_a_window_that_it_does_not_use() -> None:
    assert config_of(**QWEN2, use_sliding_window=False).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("stated", [{}, {"sliding_window": None}, {"sliding_window": 64}])
@pytest.mark.parametrize("family", [transformers.Qwen2Config, transformers.Qwen3Config, transformers.Qwen3MoeConfig])
def test_a_qwen_window_is_rejected_exactly_if_transformers_has_one(family: Any, stated: dict[str, Any]) -> None:
    config = family(use_sliding_window=True, max_window_layers=0, **stated)
    changes = {"use_sliding_window": True, **stated}
    if config.sliding_window is None:
        assert config_of(**changes).num_layers == 4
    else:
        with pytest.raises(ModelFilesError, match="sliding-window"):
            config_of(**changes)


M2 = {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"rotary_dim": 8},
        {"partial_rotary_factor": 0.3},  # 4.8 of 16
        {"partial_rotary_factor": 1.0, "rotary_dim": 8},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.27}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rotary_dim": 4},
    ],
)
def test_partial_rope_rotates_as_much_of_a_head_as_transformers(stated: dict[str, Any]) -> None:
    config = transformers.MiniMaxM2Config(head_dim=16, **copy.deepcopy(stated))
    frequencies, _ = MiniMaxM2RotaryEmbedding.compute_default_rope_parameters(config)
    assert config_of(**M2, **stated).rope.rotary_dim == 2 * len(frequencies)


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_dense_layers_follow_from_the_step_and_the_list() -> None:
    assert config_of(**MOE).moe.dense_layers == set()
    assert config_of(**MOE, decoder_sparse_step=2).moe.dense_layers == {0, 2}
    assert config_of(**MOE, mlp_only_layers=[3]).moe.dense_layers == {3}


REFUSED = [
    ({"architectures": ["FalconForCausalLM"]}, "architecture FalconForCausalLM is not supported; these are: Llama"),
    ({"architectures": []}, "names no architecture"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type longrope is not supported; these are"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "lacks 'factor'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor is 0, but must be a number above 0"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', but must be an object"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "more than low_freq_factor"),
    ({"partial_rotary_factor": 0.5}, "part of each head"),
    ({"quantization_config": {"quant_method": "quark"}}, "quantisation quark is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
    ({"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
    ({**QWEN2, "use_sliding_window": True}, "sliding-window attention (use_sliding_window) is not supported"),
    ({"use_sliding_window": True}, "sliding-window"),  # transformers takes 4096 then
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention is not supported"),
    ({"vocab_size": "100"}, "vocab_size is '100', but must be a whole number from 1"),
    ({"vocab_size": True}, "vocab_size is True"),
    ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100000, but must be a whole number from 1 to 1024"),
    ({"hidden_size": None}, "lacks 'hidden_size'"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rope_theta": float("inf")}, "rope_theta is inf"),
    ({"rope_theta": 1.0}, "rope_theta is 1.0"),
    ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key-value heads"),
    ({"head_dim": 15}, "head_dim is 15"),
    ({**MOE, "num_experts_per_tok": 9}, "9 experts a token, but there are 8"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError) as raised:
        config_of(**changes)
    assert said in str(raised.value)
    assert "config.json" in str(raised.value)


def test_a_missing_path_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="does not exist: give a model's folder or a GGUF file"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ModelFilesError, match="is this a model's folder"):
        open_checkpoint(tmp_path)


def test_broken_json_names_the_file(saved: Path) -> None:
    for text, said in (("{", "not valid JSON"), ("[]", "no JSON object"), ("[" * 100_000, "not valid JSON")):
        (saved / "config.json").write_text(text)
        with pytest.raises(ModelFilesError, match=said):
            load(saved)
    (saved / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFilesError, match="not valid JSON"):
        load(saved)


def test_missing_weights_are_named(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"model\.safetensors is missing"):
        load(saved)


def test_a_missing_shard_is_named(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama.save_pretrained(tmp_path, max_shard_size="40KB")
    next(tmp_path.glob("*-00002-*")).unlink()
    with pytest.raises(ModelFilesError, match="-00002-"):
        load(tmp_path)


def test_an_index_cannot_leave_its_folder(saved: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../../secret.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFilesError, match="same folder"):
        load(saved)


def test_a_missing_tensor_is_named(saved: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"lack the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(rewrite(saved, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")))


def test_a_tensor_without_a_place_is_named(saved: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"1 tensors .*model\.layers\.0\.self_attn\.sinks"):
        load(rewrite(saved, lambda t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(4)})))


def test_a_misshapen_tensor_is_named_with_both_shapes(saved: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"model\.norm\.weight has shape \[63\].*asks for \[64\]"):
        load(rewrite(saved, lambda t: t.update({"model.norm.weight": torch.zeros(63)})))


def test_an_integer_tensor_is_refused(saved: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"model\.norm\.weight is I8"):
        load(rewrite(saved, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})))


def test_every_truncation_of_the_weights_is_an_error(saved: Path) -> None:
    file = saved / "model.safetensors"
    raw = file.read_bytes()
    for length in (0, 1, 7, 8, 9, 500, len(raw) // 2, len(raw) - 1):
        file.write_bytes(raw[:length])
        with pytest.raises(ModelFilesError, match=r"broken or truncated"):
            load(saved)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_flipped_bits_raise_nothing_but_model_files_error(data: st.DataObject, tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama.save_pretrained(tmp_path)
    file = tmp_path / data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    raw = bytearray(file.read_bytes())
    raw[data.draw(st.integers(0, min(len(raw), 2000) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    try:
        load(tmp_path)
    except ModelFilesError:
        return


DEEPSEEK = CONFIG | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
}


def deepseek_of(**changes: Any) -> Any:
    return read_config(Fields({**DEEPSEEK, **changes}, "config.json"))


def test_only_the_first_layers_of_deepseek_are_dense() -> None:
    assert deepseek_of(first_k_dense_replace=2).moe.dense_layers == {0, 1}
    assert deepseek_of(first_k_dense_replace=1, moe_layer_freq=2).moe.dense_layers == {0, 1, 3}
    assert deepseek_of(n_routed_experts=None).moe is None


def test_yarn_warms_the_scores_of_latent_attention_only_where_it_says_so() -> None:
    plain = deepseek_of().mla.scale
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    assert plain == 12**-0.5
    assert deepseek_of(rope_scaling=yarn).mla.scale == plain
    assert deepseek_of(rope_scaling=yarn | {"mscale": 0, "mscale_all_dim": 0}).mla.scale == plain
    both = deepseek_of(rope_scaling=yarn | {"mscale": 0.7, "mscale_all_dim": 0.7})
    assert both.mla.scale == pytest.approx(plain * 1.2582**2, rel=1e-4)
    assert both.rope.scaling.attention_factor == 1.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', but must be sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', but must be noaux_tc"),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"topk_group": 5}, "of which 5 are kept"),
        ({"num_experts_per_tok": 5}, "5 experts a token cannot come from 2 groups of 2"),
        ({"n_group": 8, "topk_group": 8}, "groups of 1"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim is 3, but must be even"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "architecture DeepseekV32ForCausalLM is not supported"),
    ],
)
def test_a_deepseek_that_would_be_computed_wrongly_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFilesError, match=reason):
        deepseek_of(**changes)


MINIMAX = CONFIG | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
    # What the published files state beside it, and means nothing else here.
    "attn_type_list": [1, 1, 1, 1],
    "mlp_intermediate_size": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}


def minimax_of(**changes: Any) -> Any:
    return read_config(Fields({**MINIMAX, **changes}, "config.json"))


def test_the_turned_part_of_a_head_is_read_in_each_spelling() -> None:
    assert minimax_of().rope.rotary_dim == 8
    assert minimax_of(rotary_dim=None, partial_rotary_factor=0.25).rope.rotary_dim == 4
    assert minimax_of(rotary_dim=None, rope_parameters={"partial_rotary_factor": 0.5}).rope.rotary_dim == 8
    assert minimax_of(rotary_dim=None).rope.rotary_dim == 16
    assert config_of().rope.rotary_dim is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', but must be sigmoid in this architecture"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head', but must be per_layer"),
        ({"use_qk_norm": False}, "use_qk_norm is False, but must be true"),
        ({"use_routing_bias": False}, "use_routing_bias is False, but must be true"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size is 64, but must be 0"),
        ({"attn_type_list": [1, 0, 0, 1]}, r"attn_type_list is \[1, 0, 0, 1\], but must be 1 in every layer"),
        ({"rotary_dim": 7}, "rope over 7 of 16 elements of a head"),
        ({"rotary_dim": 32}, "rope over 32 of 16 elements of a head"),
        ({"num_experts_per_tok": 9}, "9 experts a token, but there are 8"),
        ({"architectures": ["MiniMaxM1ForCausalLM"]}, "architecture MiniMaxM1ForCausalLM is not supported"),
    ],
)
def test_a_minimax_that_would_be_computed_wrongly_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFilesError, match=reason):
        minimax_of(**changes)


@pytest.mark.parametrize(
    ("stated", "window"), [({}, 4096), ({"sliding_window": 9}, 9), ({"sliding_window": None}, None)]
)
def test_a_mistral_has_the_window_that_its_files_state(stated: dict[str, Any], window: int | None) -> None:
    config = config_of(architectures=["MistralForCausalLM"], **stated)
    assert config.sliding_window == window
    assert {kind.cache for kind in config.layer_kinds} == {"full" if window is None else "sliding_window"}
    specs = attention_specs(config, 0, 1, torch.float32)
    assert {spec.window for spec in specs if isinstance(spec, MhaShape)} == {window}


def test_a_mistral_whose_layers_differ_is_refused() -> None:
    with pytest.raises(ModelFilesError, match="layer_types full_attention is not supported; only sliding_attention is"):
        config_of(architectures=["MistralForCausalLM"], layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize("unread", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_a_tensor_that_is_not_loaded_needs_no_memory(unread: str, saved: Path) -> None:
    """As some files hold them: a head beside the embeddings that it is tied to, and frequencies of rope."""
    change(saved, tie_word_embeddings=True)
    held = load(saved).weight_bytes
    largest = max(tensor.nbytes for tensor in safetensors.torch.load_file(saved / "model.safetensors").values())
    needed = held + largest  # a matrix is there twice until it is in panels
    rewrite(saved, lambda tensors: tensors.update({unread: torch.zeros(needed)}))
    load_model(saved, "float32", CPU, Parallel(), free_bytes=needed)
    with pytest.raises(WorkerError, match="too little"):
        load_model(saved, "float32", CPU, Parallel(), free_bytes=needed - 1)


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_read(saved: Path) -> None:
    with pytest.raises(WorkerError, match=r"0\.00 GiB of memory are free, 0\.00 GiB too little") as failed:
        load_model(saved, "float32", CPU, Parallel(), free_bytes=1000)
    assert failed.value.code == ExitCode.HARDWARE
    load_model(saved, "float32", CPU, Parallel(), free_bytes=1 << 30)
