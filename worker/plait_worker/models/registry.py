"""The model families, and which of them a model's files belong to."""

from __future__ import annotations

from collections.abc import Iterable

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import ModelConfig
from plait_worker.models import deepseek, deepseek_v4, llama, minimax_m2, mistral, qwen2, qwen3, qwen3_moe
from plait_worker.models.family import FamilySpec
from plait_worker.weights import gguf_config, json_config
from plait_worker.weights.fields import Fields
from plait_worker.weights.gguf_config import GgufMetadata

FAMILIES = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    deepseek.V2,
    deepseek.V3,
    deepseek_v4.FAMILY,
    minimax_m2.FAMILY,
    mistral.FAMILY,
)
"""In the order that error messages list them."""
_BY_ARCHITECTURE = {name: spec for spec in FAMILIES for name in spec.family.architectures}


def spec_of(config: ModelConfig) -> FamilySpec:
    """The family of a configuration."""
    return _BY_ARCHITECTURE[config.architecture]


def read_config(fields: Fields) -> ModelConfig:
    """The model that a ``config.json`` describes; raises ``ModelFilesError`` if it is not supported."""
    architecture = json_config.read_architecture(fields)
    if architecture.startswith("DeepseekV41") or fields.text("model_type", "") == "deepseek_v41":
        raise ModelFilesError(
            f"{fields.where}: DeepSeek-V4.1 is another architecture than DeepSeek-V4 and is not supported; serve V4"
        )
    if architecture not in _BY_ARCHITECTURE:
        raise _unsupported(fields.where, architecture, _BY_ARCHITECTURE)
    return json_config.read_config(fields, architecture, _BY_ARCHITECTURE[architecture].config)


def read_gguf_config(metadata: GgufMetadata) -> tuple[ModelConfig, gguf_config.GgufSpec]:
    """The model that a GGUF describes, and how to read it; raises ``ModelFilesError`` if it is not supported."""
    known = {spec.family.gguf: (spec, spec.gguf) for spec in FAMILIES if spec.gguf is not None}
    if metadata.architecture not in known:
        raise _unsupported(metadata.where, metadata.architecture, filter(None, known))
    spec, gguf = known[metadata.architecture]
    return gguf_config.read_config(metadata, spec.architecture, gguf), gguf


def _unsupported(where: str, architecture: str, supported: Iterable[str]) -> ModelFilesError:
    return ModelFilesError(f"{where}: architecture {architecture} is not supported; these are: {', '.join(supported)}")
