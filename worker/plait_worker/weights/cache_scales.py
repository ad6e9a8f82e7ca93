"""The scales of an FP8 cache, a pair for each layer: those of the command line, else those of the files, else 1.

compressed-tensors calls them ``self_attn.k_scale`` and ``self_attn.v_scale``, ModelOpt ``self_attn.k_proj.k_scale`` and
``self_attn.v_proj.v_scale``. Older files have ``k_proj.output_scale``, or ``kv_scale`` for both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait_kernels.kv_cache import PageScales
from plait_proto.quantisation import StatedCache

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import ModelConfig
from plait_worker.weights.packed.layout import StoredTensors

_log = logging.getLogger(__name__)

_ENDINGS = ("k_scale", "v_scale", "kv_scale", "q_scale")
_OF_OUTPUTS = re.compile(r"\.self_attn\.[qkv]_proj\.output_scale$")
_OF_QUERIES = re.compile(r"\.(q_scale|q_proj\.output_scale)$")
"""Queries are rounded with scales of their own, if at all."""
_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d{1,4})\.self_attn\."
    r"((attn\.)?(?P<of>k|v|kv)_scale|(?P<proj>[kv])_proj\.((?P=proj)_scale|output_scale))"
)
_NO_LAYERS = ("mtp.",)
_TYPES = ("F32", "BF16", "F16")
_LOW, _HIGH = 1e-6, 1e6
"""As for ``--k-scale``: dividing by less or more leaves float32."""
Scales = Mapping[str, Sequence[float]]
"""Of the layers, by kind: k or v."""


@dataclass(frozen=True, slots=True)
class Fp8Cache:
    """An FP8 cache as the command line asks for it."""

    k: float | None = None
    """``--k-scale``; None if it is left out."""
    v: float | None = None
    """``--v-scale``."""


@dataclass(frozen=True, slots=True)
class StoredScales:
    """What a folder has of the cache's scales."""

    tensors: StoredTensors
    names: Sequence[str]
    stated: StatedCache | None
    """What its configuration says of the cache."""


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of the cache, or of the queries beside it."""
    return name.rpartition(".")[2] in _ENDINGS or _OF_OUTPUTS.search(name) is not None


def page_scales(asked: Fp8Cache, stored: StoredScales | None, config: ModelConfig) -> list[PageScales]:
    """Of each layer; the log says whose they are. Without ``stored``, the files can have none.

    Raises ``ModelFilesError`` for stored ones that cannot be used, unless the command line gives others.
    """
    flags = {"k": asked.k, "v": asked.v}
    needed = ("k",) if config.mla else ("k", "v")
    unset = [kind for kind in needed if flags[kind] is None]
    read = _read(stored, unset, config) if stored is not None and unset else {}
    _log.info("KV cache: FP8; %s", "; ".join(_in_words(kind, flags[kind], read, stored) for kind in needed))
    of_kind = {kind: read.get(kind, [_or_one(flags[kind])] * config.num_layers) for kind in flags}
    return [PageScales(k, v) for k, v in zip(of_kind["k"], of_kind["v"], strict=True)]


def say_what_is_unused(stored: StoredScales, config: ModelConfig) -> None:
    """Log that the files ask for an FP8 cache, where the cache has the model's own type."""
    stated, is_fp8 = stored.stated, stored.stated is None or not stored.stated.unsupported
    if not is_fp8 or config.mla or (stated is None and not stored.names):
        return
    what = f"config.json states {stated.entry}" if stated else "the files hold scales of an FP8 one"
    _log.info("KV cache: in the model's own type; %s: --kv-cache-dtype fp8 takes it", what)


def _or_one(flag: float | None) -> float:
    return 1.0 if flag is None else flag


def _in_words(kind: str, flag: float | None, read: Scales, stored: StoredScales | None) -> str:
    if flag is not None:
        replaced = ", in place of the files'" if stored is not None and stored.names else ""
        return f"{kind} scale {flag:g} of --{kind}-scale{replaced}"
    if kind in read:
        return f"{kind} scales of the files, {min(read[kind]):g} to {max(read[kind]):g}"
    return f"{kind} scale 1"


def _read(stored: StoredScales, kinds: Sequence[str], config: ModelConfig) -> Scales:
    """For every layer, or none if the files have none."""
    advice = f"give {' and '.join(f'--{kind}-scale' for kind in kinds)}, or leave out --kv-cache-dtype fp8"
    _check_stated(stored, advice)
    names = [name for name in stored.names if not _OF_QUERIES.search(name) and not name.startswith(_NO_LAYERS)]
    if not names:
        return {}
    if config.mla:
        raise ModelFilesError(
            f"tensor {names[0]} is a scale of keys or values, but MLA (DeepSeek) caches one latent, which is both, "
            f"with one scale: {advice}"
        )
    found = _by_layer(stored.tensors, names, config, advice)
    return {kind: [_of_layer(found, layer, kind, advice) for layer in range(config.num_layers)] for kind in kinds}


def _check_stated(stored: StoredScales, advice: str) -> None:
    stated = stored.stated
    if stated is None:
        return
    if stated.unsupported:
        raise ModelFilesError(
            f"config.json states {stated.entry}, which is not supported ({stated.unsupported}); FP8 with a scale of "
            f"keys and one of values for each layer is: {advice}"
        )
    if stated.has_scales and not stored.names:
        raise ModelFilesError(
            f"config.json states {stated.entry}, but the files hold no k_scale or v_scale: download them again, or "
            f"{advice}"
        )


def _by_layer(
    tensors: StoredTensors, names: Iterable[str], config: ModelConfig, advice: str
) -> dict[tuple[int, str], float]:
    """Scales by layer and kind. Those of layers that are not run (MTP) are left out."""
    found: dict[tuple[int, str], float] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelFilesError(f"tensor {name} is a scale of the cache with a name that is not known: {advice}")
        if (layer := int(match["layer"])) >= config.num_layers:
            continue
        scale = _scale(tensors, name, config, advice)
        for kind in match["of"] or match["proj"]:
            if found.setdefault((layer, kind), scale) != scale:
                raise ModelFilesError(f"layer {layer} has two scales for {kind}, one of them {name}: {advice}")
    return found


def _of_layer(found: Mapping[tuple[int, str], float], layer: int, kind: str, advice: str) -> float:
    scale = found.get((layer, kind))
    if scale is None:
        raise ModelFilesError(
            f"the files hold scales of the cache, but no {kind}_scale of layer {layer}: download them again, or "
            f"{advice}"
        )
    return scale


def _scale(tensors: StoredTensors, name: str, config: ModelConfig, advice: str) -> float:
    stored = tensors.read_as_stored(name, _TYPES)
    if stored.numel() != 1:
        of_heads = ", one a head" if stored.numel() == config.num_kv_heads else ""
        raise ModelFilesError(
            f"tensor {name} has shape {list(stored.shape)}{of_heads}, but kernels take one scale a layer: {advice}"
        )
    scale = float(stored)
    if not _LOW <= scale <= _HIGH:
        raise ModelFilesError(f"tensor {name} is {scale:g}, but must be a number from {_LOW:g} to {_HIGH:g}: {advice}")
    return scale
