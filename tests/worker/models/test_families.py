"""Every family computes what transformers computes, however a request is cut into rows and steps."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import recall_tasks as tasks
from plait_kernels.moe.cpu import ExpertPanels
from plait_worker.errors import ModelFilesError, WorkerError
from plait_worker.models.loader import dummy_model, unused_tensors
from plait_worker.parallel import Parallel
from plait_worker.weights.reader import Weights
from plait_worker.weights.safetensors_folder import SafetensorsFolder

CPU = torch.device("cpu")
assert_close = partial(torch.testing.assert_close, atol=2e-4, rtol=0)
"""Of a log-probability: rounding gives about 1e-5, any numeric fault 0.1 and more."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# Wide enough that the compiled kernel takes all layers at once.
ONE_CALL = {"intermediate_size": 96}
# Wide enough that the compiled kernel takes the experts.
COMPILED_EXPERTS = {"moe_intermediate_size": 32}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with a head per kv head": ("llama", {"num_key_value_heads": 6}),
    "llama in one call": ("llama", ONE_CALL),
    "llama in one call with biases": ("llama", {**ONE_CALL, "attention_bias": True, "mlp_bias": True}),
    "qwen3 in one call": ("qwen3", ONE_CALL),
    "llama with an odd eps": ("llama", {"rms_norm_eps": 0.01}),
    "llama with linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama with llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen2 with tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 in one call": ("qwen2", ONE_CALL),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3 with tied embeddings": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 with yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3 with untruncated yarn": ("qwen3", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0}}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe normalised": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe with one dense layer": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe sparse every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe with all experts": ("qwen3_moe", {"num_experts_per_tok": 6}),
    "qwen3_moe with biases": ("qwen3_moe", {"attention_bias": True}),
    "qwen3_moe with compiled experts": ("qwen3_moe", COMPILED_EXPERTS),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2 with few turned numbers": ("minimax_m2", {"rotary_dim": 2}),
    "minimax_m2 with all numbers turned": ("minimax_m2", {"rotary_dim": 16}),
    "minimax_m2 with yarn": ("minimax_m2", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
    "minimax_m2 with all experts": ("minimax_m2", {"num_experts_per_tok": 8}),
    "minimax_m2 with an odd eps": ("minimax_m2", {"rms_norm_eps": 0.01}),
    "mistral": ("mistral", {}),
    "mistral with a window of one token": ("mistral", {"sliding_window": 1}),
    "mistral with a window as long as a block of queries": ("mistral", {"sliding_window": 128}),
    "mistral with a window that nothing outgrows": ("mistral", {"sliding_window": 512}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral without a window in one call": ("mistral", {**ONE_CALL, "sliding_window": None}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 without q lora": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v2 with groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "deepseek_v2 asked to normalise": ("deepseek_v2", {"norm_topk_prob": True}),
    "deepseek_v2 with biases": ("deepseek_v2", {"attention_bias": True, "mlp_bias": True}),
    "deepseek_v2 with yarn": ("deepseek_v2", {"rope_parameters": MSCALE}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 without q lora": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3 with halves": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v3 with yarn": ("deepseek_v3", {"rope_parameters": MSCALE}),
    "deepseek_v3 with yarn without mscale": ("deepseek_v3", {"rope_parameters": YARN}),
    "deepseek_v3 not normalised": ("deepseek_v3", {"norm_topk_prob": False}),
    "deepseek_v3 with biases": ("deepseek_v3", {"attention_bias": True}),
    "deepseek_v3 with one group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "deepseek_v3 with values wider than keys": ("deepseek_v3", {"v_head_dim": 40}),
    "deepseek_v3 with compiled experts": ("deepseek_v3", COMPILED_EXPERTS),
    "deepseek_v3 dense": ("deepseek_v3", {"first_k_dense_replace": 3, "rms_norm_eps": 0.01}),
}


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_equal_transformers(
    variant: str, save_tiny: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    family, changes = VARIANTS[variant]
    saved = save_tiny(family, **changes)
    ids = random_ids(150, 1)
    expected = saved.logprobs(ids)
    assert expected.std() > 0.2, "a nearly uniform model would hide mistakes"
    driver = drive(saved.path)
    whole = driver.step({"a": ids[:140]})["a"]
    assert_close(whole, expected[:140])
    for position in range(140, 150):
        decoded = driver.step({}, {"a": ids[position]})["a"]
        assert_close(decoded[0], expected[position])


@pytest.mark.parametrize(
    ("family", "intermediate_size", "in_one_call"),
    [("llama", 96, True), ("qwen2", 96, True), ("qwen3", 96, True), ("llama", 80, False), ("qwen3_moe", 96, False)],
)
def test_dense_layers_run_in_one_call_if_the_kernel_takes_them(
    family: str,
    intermediate_size: int,
    in_one_call: bool,
    save_tiny: Callable[..., Any],
    load: Callable[..., Any],
) -> None:
    saved = save_tiny(family, intermediate_size=intermediate_size)
    assert (load(saved.path).stack is not None) == in_one_call


@pytest.mark.parametrize(
    ("family", "width", "is_compiled"),
    [("qwen3_moe", 32, True), ("deepseek_v3", 32, True), ("qwen3_moe", 24, False), ("deepseek_v3", 24, False)],
)
def test_experts_are_compiled_if_the_kernel_takes_their_width(
    family: str, width: int, is_compiled: bool, save_tiny: Callable[..., Any], load: Callable[..., Any]
) -> None:
    model = load(save_tiny(family, moe_intermediate_size=width).path)
    assert isinstance(model.blocks[-1].mlp.experts, ExpertPanels) == is_compiled


SAVED: dict[str, dict[str, Any]] = {
    "llama": ONE_CALL,
    "qwen2": ONE_CALL,
    "qwen3": ONE_CALL,
    "qwen3_moe": COMPILED_EXPERTS,
    "mistral": ONE_CALL,
    "minimax_m2": ONE_CALL,
    "deepseek_v2": {},
    "deepseek_v3": COMPILED_EXPERTS,
}


@pytest.fixture(params=SAVED)
def saved(request: pytest.FixtureRequest, save_tiny: Callable[..., Any]) -> Any:
    return save_tiny(request.param, **SAVED[request.param])


chunk_lengths = st.lists(st.sampled_from([1, 2, 3, 7, 16, 17, 40, 64]), min_size=1, max_size=8)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    plans=st.lists(chunk_lengths, min_size=1, max_size=4),
    num_decoded=st.integers(0, 3),
    page_size=st.sampled_from([1, 4, 16, 64]),
    mla_context_chunk_size=st.sampled_from([1, 5, 16, 64, 4096]),
)
def test_any_chunks_of_any_requests_in_mixed_steps_change_nothing(
    saved: Any,
    drive: Callable[..., Any],
    plans: list[list[int]],
    num_decoded: int,
    page_size: int,
    mla_context_chunk_size: int,
) -> None:
    driver = drive(saved.path, page_size=page_size, num_pages=2048, mla_context_chunk_size=mla_context_chunk_size)
    prompts = {str(i): random_ids(sum(lengths), i) for i, lengths in enumerate(plans)}
    outputs = {name: random_ids(num_decoded, 100 + int(name)) for name in prompts}
    got: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    chunks = {str(i): list(lengths) for i, lengths in enumerate(plans)}
    while any(chunks.values()) or any(outputs.values()):
        prefill, decode = {}, {}
        for name in prompts:
            done = driver.lengths.get(name, 0)
            if chunks[name]:
                prefill[name] = prompts[name][done : done + chunks[name].pop(0)]
            elif outputs[name]:
                decode[name] = outputs[name].pop(0)
        for name, logprobs in driver.step(prefill, decode).items():
            got[name].append(logprobs)
    for name, prompt in prompts.items():
        expected = saved.logprobs(prompt + random_ids(num_decoded, 100 + int(name)))
        assert_close(torch.cat(got[name]), expected)


def test_a_window_hides_what_lies_before_it(save_tiny: Callable[..., Any], drive: Callable[..., Any]) -> None:
    """13 positions in each of 3 layers reach back 36: what lies further back changes no answer."""
    driver = drive(save_tiny("mistral").path)
    ids = random_ids(80, 3)
    far, near = ids.copy(), ids.copy()
    far[79 - 37], near[79 - 36] = (far[79 - 37] + 1) % 61, (near[79 - 36] + 1) % 61
    prompts = {"as it is": ids, "far": far, "near": near}
    last, last_far, last_near = (driver.step({name: prompt})[name][-1] for name, prompt in prompts.items())
    assert torch.equal(last, last_far)
    assert not torch.equal(last, last_near)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_request_reads_no_page_of_its_neighbour(
    family: str, save_tiny: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    saved = save_tiny(family)
    alone, shared = drive(saved.path, page_size=4), drive(saved.path, page_size=4)
    ids = random_ids(30, 5)
    for layer in shared.cache.layers:
        layer[:-1] = 1e4  # what earlier requests left behind
    for chunk in (ids[:21], ids[21:]):
        assert_close(shared.step({"a": chunk})["a"], alone.step({"a": chunk})["a"])
    assert_close(shared.step({}, {"a": 7})["a"], alone.step({}, {"a": 7})["a"])


@pytest.mark.parametrize(("family", "worst"), [("llama", 0.02), ("deepseek_v2", 0.1)])
def test_bfloat16_stays_close_to_float32(
    family: str, worst: float, save_tiny: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    # Rounding may send a token to another expert, which costs more than rounding alone.
    saved = save_tiny(family)
    ids = random_ids(100, 3)
    expected = saved.logprobs(ids)
    driver = drive(saved.path, dtype="bfloat16")
    chunks = [
        driver.step({"a": ids[:60]})["a"],
        driver.step({"a": ids[60:99]})["a"],
        driver.step({}, {"a": ids[99]})["a"],
    ]
    got = torch.cat(chunks)
    kl = (expected.exp() * (expected - got)).sum(-1)
    assert got.dtype == torch.float32
    assert kl.median() < 0.01
    assert kl.max() < worst


@pytest.mark.parametrize("family", ["minimax_m2", "deepseek_v3"])
def test_fp8_blocks_equal_transformers_on_their_dequantised_weights(
    family: str, save_tiny: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    path = save_tiny(family).path
    stored = safetensors.torch.load_file(path / "model.safetensors")
    matrices = [name for name, tensor in stored.items() if ".layers." in name and tensor.ndim == 2]
    quantised, meant = dict(stored), dict(stored)
    for name in matrices:
        scale = torch.rand(-(-stored[name].shape[0] // 16), -(-stored[name].shape[1] // 32)) + 0.5
        spread = torch.kron(scale, torch.ones(16, 32))[: stored[name].shape[0], : stored[name].shape[1]]
        quantised[name] = (stored[name] / spread).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv"], meant[name] = scale, quantised[name].float() * spread
    safetensors.torch.save_file(meant, path / "model.safetensors", {"format": "pt"})
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    safetensors.torch.save_file(quantised, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    (path / "config.json").write_text(json.dumps(config))
    ids = random_ids(40, 2)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert_close(drive(path).step({"a": ids})["a"], expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "minimax_m2", "deepseek_v3"])
def test_a_model_gets_random_weights_from_its_configuration_alone(
    family: str, save_tiny: Callable[..., Any], load: Callable[..., Any], drive_drawn: Callable[..., Any]
) -> None:
    path = save_tiny(family).path
    weight_bytes = load(path).weight_bytes
    (path / "model.safetensors").unlink()
    drawn = drive_drawn(path)
    assert drawn.model.weight_bytes == weight_bytes
    logprobs = drawn.step({"a": random_ids(20, 1)})["a"]
    assert logprobs.isfinite().all()
    assert logprobs.std() > 1e-3


@pytest.mark.parametrize(
    ("family", "largest"),
    [
        ("llama", (80, 48)),
        ("qwen2", (80, 48)),
        ("qwen3", (96, 48)),
        ("qwen3_moe", (96, 48)),
        ("minimax_m2", (96, 48)),
        ("deepseek_v2", (6 * (16 + 12), 32)),
        ("deepseek_v3", (6 * (16 + 12), 32)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_need_memory_for_the_model_and_its_largest_matrix_twice(
    family: str, largest: tuple[int, int], dtype: torch.dtype, save_tiny: Callable[..., Any]
) -> None:
    draw = partial(dummy_model, save_tiny(family).path, str(dtype).removeprefix("torch."), CPU, Parallel())
    model = draw()
    twice = model.config.num_layers * math.prod(largest) * dtype.itemsize if "deepseek" in family else 0
    needed = model.weight_bytes - twice + math.prod(largest) * dtype.itemsize
    assert draw(free_bytes=max(needed, model.weight_bytes)).weight_bytes == model.weight_bytes
    with pytest.raises(WorkerError, match="too little"):
        draw(free_bytes=needed - 1)


@pytest.mark.parametrize(
    ("family", "changes", "held_twice"),
    [
        ("llama", {}, ()),
        ("llama", {"tie_word_embeddings": True}, ("embed_tokens.weight",)),
        ("deepseek_v3", {}, ("kv_b_proj.weight",)),
    ],
)
def test_weight_bytes_count_each_form_of_a_weight(
    family: str,
    changes: dict[str, Any],
    held_twice: tuple[str, ...],
    save_tiny: Callable[..., Any],
    load: Callable[..., Any],
) -> None:
    """Tied embeddings are dense and packed; kv_b_proj is held for absorption and packed."""
    saved = save_tiny(family, **changes)
    stored = safetensors.torch.load_file(saved.path / "model.safetensors")
    num_held = sum(tensor.numel() * (2 if name.endswith(held_twice) else 1) for name, tensor in stored.items())
    assert load(saved.path).weight_bytes == 4 * num_held


def test_the_longest_context_of_yarn_is_the_scaled_one(save_tiny: Callable[..., Any], load: Callable[..., Any]) -> None:
    rope = {**YARN, "original_max_position_embeddings": 300}
    saved = save_tiny("qwen3", max_position_embeddings=300, rope_parameters=rope)
    assert load(saved.path).config.max_positions == 1200


def test_recall_mla_does_not_load_its_mtp_layer(check_models: Path, load: Callable[..., Any]) -> None:
    model = load(check_models / "recall-mla")
    stored = safetensors.torch.load_file(check_models / "recall-mla" / "model.safetensors")
    of_mtp = {name for name in stored if name.startswith("model.layers.4.")}
    assert "model.layers.4.eh_proj.weight" in of_mtp
    held_twice = {name for name in stored if name.endswith("kv_b_proj.weight")}
    num_held = sum(t.numel() * (1 + (name in held_twice)) for name, t in stored.items() if name not in of_mtp)
    assert model.weight_bytes == 4 * num_held


def with_mtp_layer(path: Path, name: str) -> dict[str, torch.Tensor]:
    """Add tensors of a fourth layer, and ``name``, to the model's files; what was added."""
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    last = {key: value for key, value in tensors.items() if key.startswith("model.layers.2.")}
    of_mtp = {key.replace("layers.2.", "layers.3."): value.clone() for key, value in last.items()}
    of_mtp |= {name: torch.ones(64, 128)}
    safetensors.torch.save_file(tensors | of_mtp, path / "model.safetensors", {"format": "pt"})
    state_mtp_layer(path)
    return of_mtp


def state_mtp_layer(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def test_mtp_layers_are_neither_loaded_nor_counted_and_answers_are_the_same(
    save_tiny: Callable[..., Any], load: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    saved = save_tiny("deepseek_v3")
    plain, (before,) = load(saved.path), drive(saved.path).step({"a": list(range(20))}).values()
    of_mtp = with_mtp_layer(saved.path, "model.layers.3.eh_proj.weight")
    model, (after,) = load(saved.path), drive(saved.path).step({"a": list(range(20))}).values()
    assert model.config.num_mtp_layers == 1
    assert model.weight_bytes == plain.weight_bytes
    assert torch.equal(before, after)
    source = Weights(SafetensorsFolder(saved.path), torch.float32, torch.device("cpu"))
    unused = unused_tensors(source.source.names, model.config)
    assert unused == of_mtp.keys()
    assert unused.isdisjoint(source.least_bytes(unused))


def test_a_tensor_beside_the_mtp_layers_is_still_unknown(
    save_tiny: Callable[..., Any], load: Callable[..., Any]
) -> None:
    saved = save_tiny("deepseek_v3")
    with_mtp_layer(saved.path, "model.layers.4.eh_proj.weight")
    with pytest.raises(ModelFilesError, match=r"hold 1 tensors .* \(model.layers.4.eh_proj.weight\)"):
        load(saved.path)


def test_an_mtp_layer_that_the_files_lack_is_not_missed(
    save_tiny: Callable[..., Any], load: Callable[..., Any]
) -> None:
    saved = save_tiny("deepseek_v3")
    config = json.loads((saved.path / "config.json").read_text())
    (saved.path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert load(saved.path).config.num_mtp_layers == 1


@pytest.mark.parametrize("name", ["recall-gqa", "recall-mla"])
def test_a_check_model_answers_from_its_context(name: str, check_models: Path, drive: Callable[..., Any]) -> None:
    marks = {"system": tasks.SYSTEM, "user": tasks.USER}
    driver = drive(check_models / name, num_pages=1024)
    problems = {str(i): problem for i, problem in enumerate(tasks.problems(3, 6, 700))}
    prompts = {}
    for key, problem in problems.items():
        said = [[marks[message["role"]], *message["content"].encode()] for message in problem["messages"]]
        prompts[key] = [tasks.BOS, *(token for message in said for token in message), tasks.ASSISTANT]
    answers = {name: b"" for name in problems}
    last = {name: int(logprobs[-1].argmax()) for name, logprobs in driver.step(prompts).items()}
    while last := {name: token for name, token in last.items() if token != tasks.EOS}:
        for name, token in last.items():
            answers[name] += bytes([token])
        last = {name: int(logprobs[-1].argmax()) for name, logprobs in driver.step({}, last).items()}
    assert {name: answer.decode() for name, answer in answers.items()} == {
        name: problem["answer"] for name, problem in problems.items()
    }
