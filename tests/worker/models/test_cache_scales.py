"""An FP8 cache with scales for each layer: the files' own, against transformers in float64 with a rounding cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from plait_kernels.kv_cache import UNSCALED, PageScales
from plait_testing.fp8_models import write_fp8
from plait_testing.scaled_caches import RoundedCache, Style, add_scales
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.mha.triton_mha import TritonMha
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.attention.spec import distinct
from plait_worker.errors import ModelFilesError
from plait_worker.models import loader
from plait_worker.parallel import Parallel
from plait_worker.weights.cache_scales import Fp8Cache
from torch import Tensor
from transformers import PreTrainedModel

CPU = torch.device("cpu")
IDS = torch.randint(2, 61, (70,), generator=torch.Generator().manual_seed(3)).tolist()
SCALES = [PageScales(0.25, 0.375), PageScales(0.015625, 0.0078125), PageScales(1.5, 0.03125)]
"""Of the layers; the first's are coarse, so that those of another layer would show."""
STYLES: tuple[Style, ...] = ("compressed-tensors", "modelopt")
CLOSE = 2e-4
"""Of a log-probability, as without an FP8 cache: what is rounded to float8 is the same."""


def rounded_logprobs(reference: PreTrainedModel, scales: list[PageScales]) -> Tensor:
    """float64, over pages that are rounded number by number."""
    reference.set_experts_implementation("eager")  # torch's grouped GEMM takes no float64
    with torch.no_grad():
        logits: Tensor = reference.double()(torch.tensor([IDS]), past_key_values=RoundedCache(scales)).logits[0]
    return logits.log_softmax(-1)


def run(driver: Any) -> Tensor:
    """Two chunks of a prompt, then decode steps."""
    chunks = [driver.step({"prompt": IDS[:30]}), driver.step({"prompt": IDS[30:65]})]
    chunks += [driver.step({}, {"prompt": token}) for token in IDS[65:]]
    return torch.cat([chunk["prompt"] for chunk in chunks]).double()


def off_by(given: Tensor, right: Tensor) -> float:
    return float((given - right).abs().max())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "minimax_m2"])
def test_each_layer_is_read_and_written_with_its_own_scales(
    family: str, style: Style, save_tiny: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    saved = save_tiny(family)
    add_scales(saved.path, SCALES, style)
    driver = drive(saved.path, fp8=Fp8Cache())
    assert [spec.scales for spec in driver.model.attention_specs] == SCALES
    given, right = run(driver), rounded_logprobs(saved.reference, SCALES)
    assert off_by(given, right) < CLOSE
    assert off_by(rounded_logprobs(saved.reference, SCALES[::-1]), right) > 20 * CLOSE, "scales do not matter here"


def test_layers_of_other_scales_share_a_backend_and_a_step(
    save_tiny: Callable[..., Any], drive: Callable[..., Any]
) -> None:
    """One step is planned for all layers, and one kind of page allocated."""
    saved = save_tiny("llama")
    add_scales(saved.path, SCALES, "modelopt")
    driver = drive(saved.path, fp8=Fp8Cache())
    assert len(driver.attention.backends) == 1
    assert len(distinct(driver.model.attention_specs)) == len(set(driver.model.cache_specs)) == 1


@pytest.mark.parametrize("fused", [True, False])
def test_kernels_of_a_gpu_get_the_scales_of_their_layer(
    fused: bool,
    save_tiny: Callable[..., Any],
    drive: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The references of our kernels, with matrices as a GPU holds them, against the torch backend block by block."""
    path = tmp_path / "fp8"
    write_fp8(save_tiny("qwen3").path, path, "channel")
    monkeypatch.setattr(loader, "fp8_unsupported_reason", lambda _device, _dtype: None)
    monkeypatch.setattr(loader, "choose_dtype", lambda _name, _device: torch.float32)
    monkeypatch.setattr("plait_worker.attention.mha.triton_mha.has_fmha_v2", lambda _shape: False)
    add_scales(path, SCALES, "compressed-tensors")
    ours, plain = drive(path, dtype="auto", fp8=Fp8Cache()), drive(path, dtype="auto", fp8=Fp8Cache())
    # Made with the first layer's scales, as at start.
    backend = TritonMha(BackendRequirements(ours.model.attention_specs[0], 16, 0, 256, CPU))
    ours.attention = ModelAttention([backend])
    plain.model.fused = None
    if fused:
        assert ours.model.fused is not None
        ours.model.blocks = []  # which the fused ones do not need
    else:
        ours.model.fused = None
    right = run(plain)
    assert off_by(run(ours), right) < CLOSE / 10
    uniform = drive(path, dtype="auto", fp8=Fp8Cache(*SCALES[0]))
    assert off_by(run(uniform), right) > 100 * CLOSE, "scales do not matter here"


def edited(folder: Path, edit: Callable[[dict[str, Tensor]], object], **stated: object) -> Path:
    """The folder with other tensors, and other words on its cache."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    edit(tensors)
    safetensors.torch.save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= stated
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def nothing(_tensors: dict[str, Tensor]) -> None:
    """No edit."""


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"model.layers.{name}": tensor})


def drop(*endings: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(endings)]


@pytest.fixture
def scaled(save_tiny: Callable[..., Any]) -> Path:
    saved = save_tiny("llama")
    add_scales(saved.path, SCALES, "compressed-tensors")
    path: Path = saved.path
    return path


def scales_of(folder: Path, fp8: Fp8Cache) -> list[PageScales]:
    model = loader.load_model(folder, "float32", CPU, Parallel(), fp8=fp8)
    return [spec.scales for spec in model.attention_specs]


def test_flags_win_over_the_files_and_the_log_says_so(scaled: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert scales_of(scaled, Fp8Cache()) == SCALES
    assert scales_of(scaled, Fp8Cache(k=0.5)) == [PageScales(0.5, scales.v) for scales in SCALES]
    assert scales_of(scaled, Fp8Cache(0.5, 1.0)) == [PageScales(0.5, 1.0)] * 3
    assert [record.message for record in caplog.records if "KV cache" in record.message] == [
        "KV cache: FP8; k scales of the files, 0.015625 to 1.5; v scales of the files, 0.0078125 to 0.375",
        "KV cache: FP8; k scale 0.5 of --k-scale, in place of the files'; v scales of the files, 0.0078125 to 0.375",
        "KV cache: FP8; k scale 0.5 of --k-scale, in place of the files'; v scale 1 of --v-scale, in place of the "
        "files'",
    ]


def test_without_an_fp8_cache_the_files_scales_are_named_and_change_nothing(
    save_tiny: Callable[..., Any], drive: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    saved = save_tiny("llama")
    right = run(drive(saved.path))
    add_scales(saved.path, SCALES, "compressed-tensors")
    caplog.set_level(logging.INFO)
    assert torch.equal(run(drive(saved.path)), right)
    said = "config.json states kv_cache_scheme of 8-bit float: --kv-cache-dtype fp8 takes it"
    assert f"KV cache: in the model's own type; {said}" in caplog.text


def test_a_model_without_scales_has_those_of_the_flags_or_one(save_tiny: Callable[..., Any]) -> None:
    path = save_tiny("llama").path
    assert scales_of(path, Fp8Cache()) == [UNSCALED] * 3
    assert scales_of(path, Fp8Cache(v=0.25)) == [PageScales(1.0, 0.25)] * 3


SPELLINGS = {
    "vLLM's own": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "outputs of projections": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_older_names_mean_the_same(spelling: str, scaled: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            for kind, name in zip("kv", SPELLINGS[spelling], strict=True):
                stored = tensors.pop(f"model.layers.{layer}.self_attn.{kind}_scale")
                tensors[f"model.layers.{layer}.{name}"] = stored.reshape(1, 1)
            tensors[f"model.layers.{layer}.self_attn.q_proj.output_scale"] = torch.ones(1)

    assert scales_of(edited(scaled, rename), Fp8Cache()) == SCALES


def test_one_scale_for_both_and_layers_that_are_not_run(scaled: Path) -> None:
    def merge(tensors: dict[str, Tensor]) -> None:
        drop("_scale")(tensors)
        for layer in range(4):
            tensors[f"model.layers.{layer}.self_attn.kv_scale"] = torch.tensor(0.5, dtype=torch.bfloat16)

    assert scales_of(edited(scaled, merge), Fp8Cache()) == [PageScales(0.5, 0.5)] * 3


REFUSALS: dict[str, tuple[Callable[[dict[str, Tensor]], object], dict[str, object], str]] = {
    "a vector": (put("1.self_attn.k_scale", torch.ones(3)), {}, "1.self_attn.k_scale has shape [3], but kernels take"),
    "heads": (put("1.self_attn.v_scale", torch.ones(2, 1, 1)), {}, "has shape [2, 1, 1], one a head, but kernels take"),
    "nothing": (put("0.self_attn.k_scale", torch.ones(0)), {}, "has shape [0]"),
    "NaN": (put("2.self_attn.k_scale", torch.tensor(torch.nan)), {}, "2.self_attn.k_scale is nan, but must be"),
    "infinite": (put("2.self_attn.v_scale", torch.tensor(torch.inf)), {}, "2.self_attn.v_scale is inf, but must be"),
    "zero": (
        put("0.self_attn.v_scale", torch.zeros(())),
        {},
        "v_scale is 0, but must be a number from 1e-06",
    ),
    "negative": (put("0.self_attn.k_scale", torch.tensor([-1.0])), {}, "0.self_attn.k_scale is -1, but must be"),
    "too small": (put("0.self_attn.k_scale", torch.tensor([1e-30])), {}, "0.self_attn.k_scale is 1e-30, but must be"),
    "integers": (put("0.self_attn.k_scale", torch.ones(1).int()), {}, "0.self_attn.k_scale is I32, which is not supp"),
    "keys alone": (drop(".v_scale"), {}, "no v_scale of layer 0"),
    "values alone": (drop(".k_scale"), {}, "no k_scale of layer 0"),
    "some layers": (drop("2.self_attn.k_scale", "2.self_attn.v_scale"), {}, "no k_scale of layer 2"),
    "two": (put("0.self_attn.k_proj.k_scale", torch.ones(1)), {}, "layer 0 has two scales for k"),
    "a strange name": (
        put("0.attention.k_scale", torch.ones(1)),
        {},
        "0.attention.k_scale is a scale of the cache",
    ),
    "scales that are missing": (drop("_scale"), {}, "but the files hold no k_scale or v_scale"),
    "int8": (
        nothing,
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        "which is not supported (another type than FP8",
    ),
    "no type": (
        nothing,
        {"kv_cache_scheme": {"num_bits": 8}},
        "which is not supported (another type than FP8",
    ),
    "dynamic": (
        nothing,
        {"kv_cache_scheme": {"type": "float", "dynamic": True}},
        "not supported (dynamic scales",
    ),
    "zero points": (
        nothing,
        {"kv_cache_scheme": {"type": "float", "symmetric": False}},
        "not supported (zero points",
    ),
    "a scheme of heads": (
        nothing,
        {"kv_cache_scheme": {"type": "float", "strategy": "attn_head"}},
        "strategy attn_head, which is not supported (more scales than one a layer",
    ),
    "NVFP4": (
        nothing,
        {"quant_method": "modelopt", "kv_cache_scheme": None, "kv_cache_quant_algo": "NVFP4"},
        "kv_cache_quant_algo NVFP4, which is not supported (another type than FP8",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_scales_that_cannot_be_used_are_refused_by_name_unless_flags_give_others(case: str, scaled: Path) -> None:
    edit, stated, said = REFUSALS[case]
    folder = edited(scaled, edit, **stated)
    with pytest.raises(ModelFilesError) as error:
        scales_of(folder, Fp8Cache())
    assert said in str(error.value)
    if case != "integers":
        assert "give --k-scale and --v-scale, or leave out --kv-cache-dtype fp8" in str(error.value)
    assert scales_of(folder, Fp8Cache(0.5, 0.25)) == [PageScales(0.5, 0.25)] * 3
    loader.load_model(folder, "float32", CPU, Parallel())


def test_modelopt_may_leave_scales_out_and_means_one(save_tiny: Callable[..., Any]) -> None:
    saved = save_tiny("llama")
    add_scales(saved.path, SCALES, "modelopt")
    assert scales_of(edited(saved.path, drop("_scale")), Fp8Cache()) == [UNSCALED] * 3


def test_latents_have_one_scale_which_only_the_command_line_gives(
    save_tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    saved = save_tiny("deepseek_v2")
    add_scales(saved.path, SCALES, "modelopt")
    with pytest.raises(ModelFilesError, match=r"MLA .DeepSeek. caches one latent.*: give --k-scale, or leave out"):
        scales_of(saved.path, Fp8Cache())
    caplog.set_level(logging.INFO)
    assert scales_of(saved.path, Fp8Cache(k=0.5)) == [PageScales(0.5, 0.5)] * 3
    assert "KV cache: FP8; k scale 0.5 of --k-scale, in place of the files'" in caplog.text
