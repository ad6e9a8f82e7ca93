"""Loads a model from its files, or with random weights from its configuration alone."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plait_kernels.cpu.library import supports_tensors
from plait_kernels.kv_cache import PageScales
from plait_kernels.linear import fp8_unsupported_reason, int4_unsupported_reason
from plait_proto.divided_model import check_layout

from plait_worker.attention.model_specs import attention_specs
from plait_worker.capacity import check_fits
from plait_worker.errors import ModelFilesError
from plait_worker.model_config import ModelConfig
from plait_worker.models.model import Model
from plait_worker.models.registry import read_config, read_gguf_config, spec_of
from plait_worker.parallel import Parallel
from plait_worker.weights.cache_scales import Fp8Cache, StoredScales, page_scales, say_what_is_unused
from plait_worker.weights.cut_blocks import dense_names
from plait_worker.weights.dummy import DummyWeights
from plait_worker.weights.formats.blocks import BLOCKS
from plait_worker.weights.formats.fp8 import FP8_ON_LOAD, FP8_STORED
from plait_worker.weights.formats.int4 import INT4
from plait_worker.weights.fp8_config import Fp8Scheme
from plait_worker.weights.gguf_file import GgufFile, UnpermutedGguf
from plait_worker.weights.packed.awq import Awq
from plait_worker.weights.packed.folder import PackedFolder
from plait_worker.weights.packed.gptq import Gptq
from plait_worker.weights.packed.layout import Int4Form, PackedLayout
from plait_worker.weights.packed.mxfp4 import PackedMxfp4
from plait_worker.weights.packed.nvfp4 import PackedNvfp4
from plait_worker.weights.prefetch import prefetch
from plait_worker.weights.progress import LoadingProgress
from plait_worker.weights.quantisation_config import read_quantisation
from plait_worker.weights.reader import WeightFormat, Weights
from plait_worker.weights.rope_order import in_neox_rope_order
from plait_worker.weights.safetensors_folder import SafetensorsFolder, read_folder_config
from plait_worker.weights.source import TensorSource
from plait_worker.weights.weight_memory import WeightMemory

_log = logging.getLogger(__name__)

_DERIVED = "rotary_emb.inv_freq"
"""Ending of tensors in old files that the configuration implies."""
_HEADS = "lm_head.weight", "head.weight"
_PACKED = ".qweight", ".weight_packed"
_DSPARK = "dspark"
"""In the names of a draft module that newer DeepSeek-V4 files hold."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_COUNTED_BYTES = 1 << 45
"""Counting of random weights stops here: no model is larger, whatever its configuration asks for."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Opened model files."""

    config: ModelConfig
    source: TensorSource
    formats: Sequence[WeightFormat[Any]]
    """Of its matrices, besides dense."""
    cache_scales: StoredScales | None = None
    """Those of a folder."""


def open_checkpoint(path: Path) -> Checkpoint:
    """The model files at a path: a folder, or one GGUF file.

    Raises ``ModelFilesError`` if they are missing, broken or not supported.
    """
    if path.is_dir():
        config = open_config(path)
        return _open_folder(config, spec_of(config).open_folder(path))
    if not path.exists():
        raise ModelFilesError(f"{path} does not exist: give a model's folder or a GGUF file")
    file = GgufFile(path)
    config, spec = read_gguf_config(file.metadata)
    return Checkpoint(config, UnpermutedGguf(file, config) if spec.is_permuted else file, [BLOCKS])


def _open_folder(config: ModelConfig, folder: TensorSource) -> Checkpoint:
    if not isinstance(folder, SafetensorsFolder):
        return Checkpoint(config, folder, [BLOCKS])
    if folder.packed is not None:
        return Checkpoint(config, PackedFolder(folder, folder.packed), [BLOCKS], folder.cache_scales)
    packed = sorted(name for name in folder.names if name.endswith(_PACKED))
    if packed:
        raise ModelFilesError(
            f"tensor {packed[0]} holds packed integers, but config.json has no quantization_config that says which: "
            "download config.json again"
        )
    return Checkpoint(config, folder, [] if folder.fp8 is None else [FP8_STORED], folder.cache_scales)


def open_config(path: Path) -> ModelConfig:
    """The configuration in a folder, whether or not it holds weights; raises ``ModelFilesError``."""
    return read_config(read_folder_config(path))


def load_model(
    path: Path,
    dtype: str,
    device: torch.device,
    parallel: Parallel,
    free_bytes: int | None = None,
    fp8: Fp8Cache | None = None,
    max_model_len: int | None = None,
    *,
    quantises: bool = False,
) -> Model[Any]:
    """The model in a Hugging Face folder or a GGUF file; ``dtype`` is auto, float32, bfloat16 or float16.

    With auto, a GGUF's matrices stay quantised on a CPU with bfloat16 GEMMs, if the kernels take their block types.
    FP8 matrices stay so on a GPU with FP8 GEMMs, and ``quantises`` makes others FP8 while they are read. Any other
    ``dtype`` rounds all weights in the files to it. ``free_bytes`` is the rank's GPU's, or for all ranks on a CPU; None
    is no limit. ``fp8`` asks for a float8_e4m3fn cache. A sliding window of ``max_model_len`` tokens or more is none.

    Raises ``ModelFilesError`` if the files are missing, broken or not supported, ``ValueError`` if the ranks cannot
    divide the model, and ``WorkerError`` of code HARDWARE if memory is too small.
    """
    checkpoint = open_checkpoint(path)
    config, files = checkpoint.config.without_unused_window(max_model_len), checkpoint.source
    _check_layout(config, parallel)
    chosen = choose_dtype(dtype, device)
    source = in_neox_rope_order(files, config)
    formats = _formats(checkpoint, dtype, chosen, device, quantises=quantises)
    weights = Weights(source, chosen, device, formats=formats, held=_make_weight_memory(parallel, device, free_bytes))
    unused = unused_tensors(files.names, config)
    elsewhere = other_ranks_experts(files.names, config, parallel)
    dense = _dense_names(files, formats, parallel)
    _say_what_is_cut(dense, chosen, parallel)
    least_bytes = weights.least_bytes(unused | elsewhere, dense)
    weights.held.expect(least_bytes, _transient_bytes(least_bytes, device))
    scales = _page_scales(fp8, checkpoint)
    with torch.inference_mode(), _prefetch(files, frozenset(files.names) - unused - elsewhere, device, parallel):
        model = read_model(config, weights, parallel, scales)
    weights.check_leftovers(unused | elsewhere | _empty_biases(files))
    _say_what_is_left_out(unused, config, len(files.names))
    return model


def _page_scales(fp8: Fp8Cache | None, checkpoint: Checkpoint) -> list[PageScales] | None:
    """Of each layer; None for a cache in the model's own type."""
    if fp8 is not None:
        return page_scales(fp8, checkpoint.cache_scales, checkpoint.config)
    if checkpoint.cache_scales is not None:
        say_what_is_unused(checkpoint.cache_scales, checkpoint.config)
    return None


def _dense_names(files: TensorSource, formats: Sequence[WeightFormat[Any]], parallel: Parallel) -> frozenset[str]:
    if BLOCKS not in formats:
        return frozenset()
    return dense_names(files, parallel.world, whole_experts=parallel.experts is not None)


def _say_what_is_cut(dense: Collection[str], chosen: torch.dtype, parallel: Parallel) -> None:
    if dense:
        several = f"{parallel.world} ranks would cut blocks of theirs or of their layer"
        why = several if parallel.world > 1 else "not all experts of their layer can stay in blocks"
        _log.info("weights: %d matrices upcast to %s: %s", len(dense), str(chosen).removeprefix("torch."), why)


def _say_what_is_left_out(unused: Collection[str], config: ModelConfig, num_tensors: int) -> None:
    num_dspark = sum(_DSPARK in name for name in unused)
    if num_dspark:
        _log.info("weights: %d tensors of DSpark's draft module are passed over; nothing runs it yet", num_dspark)
    num_mtp = sum(name.startswith(_mtp_prefixes(config)) for name in unused)
    if num_mtp:
        _log.info("weights: %d tensors of MTP layers are passed over; nothing runs them yet", num_mtp)
    if unused:
        _log.info("weights: %d of %d tensors are not needed and not loaded", len(unused), num_tensors)


def _empty_biases(files: TensorSource) -> frozenset[str]:
    return files.empty_biases() if isinstance(files, PackedFolder) else frozenset()


def _prefetch(
    files: TensorSource, names: Collection[str], device: torch.device, parallel: Parallel
) -> AbstractContextManager[None]:
    """Only for a GPU: on a CPU copying the tensors takes the time. Each rank reads its part for all."""
    if not isinstance(files, SafetensorsFolder) or device.type == "cpu":
        return nullcontext()
    return prefetch(files, names, parallel.rank, parallel.world)


def dummy_model(
    path: Path,
    dtype: str,
    device: torch.device,
    parallel: Parallel,
    free_bytes: int | None = None,
    fp8: Fp8Cache | None = None,
    max_model_len: int | None = None,
    *,
    quantises: bool = False,
) -> Model[Any]:
    """A model with random weights, of the shape in a folder's ``config.json``.

    Raises as ``load_model`` does; if memory is too small, before any weight is made.
    """
    _log.warning("weights: random, as --load-format dummy asks: no answer means anything")
    config = open_config(path).without_unused_window(max_model_len)
    _check_layout(config, parallel)
    chosen, formats = choose_dtype(dtype, device), list[WeightFormat[Any]]()
    layout = read_quantisation(read_folder_config(path))
    int4 = _random_int4(layout, dtype, chosen, device)
    if quantises:
        _check_fp8(device, chosen)
        formats = [FP8_ON_LOAD]
    elif int4 is not None:
        formats = [INT4]
    elif isinstance(layout, PackedNvfp4) and dtype == "auto":
        formats = _upcast_to_fp8(layout.title, chosen, device)
    weights = DummyWeights(chosen, device, _make_weight_memory(parallel, device, free_bytes), formats, int4)
    with torch.inference_mode():
        if free_bytes is not None:
            least_bytes = _random_bytes(config, weights, parallel, free_bytes)
            sharing = _num_sharing(parallel, device)
            check_fits(
                sum(least_bytes.values()) * sharing + _transient_bytes(least_bytes, device) * sharing, free_bytes
            )
        scales = None if fp8 is None else page_scales(fp8, None, config)
        return read_model(config, weights, parallel, scales)


def _formats(
    checkpoint: Checkpoint, dtype: str, chosen: torch.dtype, device: torch.device, *, quantises: bool
) -> Sequence[WeightFormat[Any]]:
    """Those in which this device holds the files' matrices."""
    if quantises:
        return _fp8_formats(checkpoint, chosen, device)
    if isinstance(checkpoint.source, PackedFolder):
        return _packed_formats(checkpoint, checkpoint.source, dtype, chosen, device)
    if dtype != "auto":
        if checkpoint.formats:
            _log.info("weights: quantised, upcast to %s: --dtype says so", str(chosen).removeprefix("torch."))
        return []
    if FP8_STORED not in checkpoint.formats:
        return checkpoint.formats if _has_quantised_gemm(chosen, device) else []
    if (reason := fp8_unsupported_reason(device, chosen)) is None:
        return checkpoint.formats
    _log.info("FP8 weights are upcast to %s: %s", str(chosen).removeprefix("torch."), reason)
    return []


def _fp8_formats(checkpoint: Checkpoint, chosen: torch.dtype, device: torch.device) -> Sequence[WeightFormat[Any]]:
    """Those of ``--quantization fp8``."""
    makes = not checkpoint.formats or _is_nvfp4(checkpoint.source)
    if not makes and FP8_STORED not in checkpoint.formats:
        raise ValueError("--quantization fp8 takes a folder of 16-bit or FP8 weights: leave it out, or give such files")
    _check_fp8(device, chosen)
    return [FP8_ON_LOAD] if makes else checkpoint.formats


def _packed_formats(
    checkpoint: Checkpoint, files: PackedFolder, dtype: str, chosen: torch.dtype, device: torch.device
) -> Sequence[WeightFormat[Any]]:
    """Blocks where they are multiplied, for the matrices that have some; the log says what becomes of the others."""
    kinds, title = files.block_kinds(), files.layout.title
    name = str(chosen).removeprefix("torch.")
    if dtype == "auto" and device.type == "cuda":
        return _upcast_to_fp8(title, chosen, device) if _is_nvfp4(files) else _int4_formats(files, chosen, device)
    if dtype != "auto" or not _has_quantised_gemm(chosen, device):
        where = "--dtype says so" if dtype != "auto" else f"{device.type} has no GEMM for them with {name}"
        _log.info("weights: %s, upcast to %s: %s", title, name, where)
        return []
    kept = " and ".join(sorted(kind for kind in kinds if kind is not None))
    if kept:
        _log.info("weights: %s, kept in blocks of %s%s", title, kept, "; some upcast" if None in kinds else "")
    else:
        _log.info("weights: %s, upcast to %s: no blocks hold them", title, name)
    return checkpoint.formats


def _int4_formats(files: PackedFolder, chosen: torch.dtype, device: torch.device) -> Sequence[WeightFormat[Any]]:
    """4-bit codes, where they are multiplied and there are some; the log says what becomes of the others."""
    title, name = files.layout.title, str(chosen).removeprefix("torch.")
    if (reason := int4_unsupported_reason(device, chosen)) is not None:
        _log.info("weights: %s, upcast to %s: %s", title, name, reason)
        return []
    num_kept, num_upcast = files.int4_names()
    if num_kept == 0:
        _log.info("weights: %s, upcast to %s: the kernels take 4 bits in groups of 32, 64, 128 or all", title, name)
        return []
    more = f"; {num_upcast} of {num_kept + num_upcast} matrices upcast to {name}" if num_upcast else ""
    _log.info("weights: %s, kept in 4 bits%s", title, more)
    return [INT4]


def _is_nvfp4(files: TensorSource) -> bool:
    return isinstance(files, PackedFolder) and isinstance(files.layout, PackedNvfp4)


def _upcast_to_fp8(title: str, chosen: torch.dtype, device: torch.device) -> list[WeightFormat[Any]]:
    """No kernel here takes NVFP4's groups of 16; FP8 takes twice its memory, half of bfloat16's."""
    if (reason := fp8_unsupported_reason(device, chosen)) is not None:
        _log.info("weights: %s, upcast to %s: %s", title, str(chosen).removeprefix("torch."), reason)
        return []
    _log.info("weights: %s, upcast to FP8 with a scale an output: no kernel here multiplies NVFP4", title)
    return [FP8_ON_LOAD]


def _check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    if (reason := fp8_unsupported_reason(device, dtype)) is not None:
        raise ValueError(f"--quantization fp8 cannot hold weights in FP8 here: {reason}; leave it out")


def _random_int4(
    layout: Fp8Scheme | PackedLayout | None, dtype: str, chosen: torch.dtype, device: torch.device
) -> Int4Form | None:
    """How random weights are held in 4 bits, as the configuration says of the files' matrices; None if dense."""
    if dtype != "auto" or int4_unsupported_reason(device, chosen) is not None:
        return None
    return layout.int4_form_of_all if isinstance(layout, Awq | Gptq | PackedMxfp4) else None


def _random_bytes(config: ModelConfig, like: DummyWeights, parallel: Parallel, free_bytes: int) -> dict[str, int]:
    """Bytes of each of this rank's random tensors, packed copies not counted; nothing is allocated."""

    def stop_early(own: int, _to_come: int) -> None:
        if own * parallel.world > _COUNTED_BYTES:
            check_fits(own, free_bytes)

    sizes = DummyWeights(like.dtype, torch.device("meta"), WeightMemory(stop_early), like.formats, like.int4)
    read_model(config, sizes, parallel, None)
    return dict(sizes.held.taken)


def _transient_bytes(least_bytes: Mapping[str, int], device: torch.device) -> int:
    """Peak bytes of reading beyond what stays: on a CPU a matrix exists twice until it is packed."""
    return max(least_bytes.values(), default=0) if device.type == "cpu" else 0


def _num_sharing(parallel: Parallel, device: torch.device) -> int:
    """Ranks whose weights lie in the same memory: each GPU has its own."""
    return parallel.everyone.world if device.type == "cpu" else 1


def _make_weight_memory(parallel: Parallel, device: torch.device, free_bytes: int | None) -> WeightMemory:
    """A rank's account, which fails if its memory is too small for the ranks that share it; rank 0 shows progress.

    Progress goes to standard output, which is the terminal if there is one; standard error is read line by line.
    """
    progress = LoadingProgress(sys.stdout).show if parallel.rank == 0 else None
    if free_bytes is None:
        return WeightMemory(progress=progress)
    sharing = _num_sharing(parallel, device)

    def check(own: int, to_come: int) -> None:
        check_fits(own * sharing + to_come * sharing // parallel.world, free_bytes)

    return WeightMemory(check, progress)


def read_model(
    config: ModelConfig, weights: Weights, parallel: Parallel, fp8: Sequence[PageScales] | None
) -> Model[Any]:
    """The model over these weights, with scales for each layer; propagates errors from the weight source."""
    specs = attention_specs(config, parallel.rank, parallel.world, weights.dtype, fp8)
    return spec_of(config).read_model(config, weights, parallel, specs)


def _has_quantised_gemm(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether GEMMs with quantised weights exist here and are faster than dense ones."""
    return dtype == torch.bfloat16 and supports_tensors(torch.empty(0, dtype=dtype, device=device))


def unused_tensors(names: Collection[str], config: ModelConfig) -> frozenset[str]:
    """Tensors that are not loaded: MTP layers, which nothing runs yet; tied heads; what the configuration implies."""
    prefixes = _mtp_prefixes(config)
    endings = (_DERIVED, *_HEADS) if config.tie_embeddings else (_DERIVED,)
    return frozenset(
        name
        for name in names
        if name.startswith(prefixes) or name.endswith(endings) or (config.compressed is not None and _DSPARK in name)
    )


def _mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    if config.compressed is not None:
        return ("mtp.",)
    mtp_layers = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return tuple(f"model.layers.{layer}." for layer in mtp_layers)


def other_ranks_experts(names: Collection[str], config: ModelConfig, parallel: Parallel) -> frozenset[str]:
    """Tensors of the experts that other ranks of the group hold."""
    if parallel.experts is None or config.moe is None:
        return frozenset()
    held = parallel.experts.own_experts(config.moe.num_experts)
    numbered = ((name, _EXPERT.search(name)) for name in names)
    return frozenset(name for name, found in numbered if found is not None and int(found[1]) not in held)


def _check_layout(config: ModelConfig, parallel: Parallel) -> None:
    """Raise ``ValueError`` if the ranks cannot divide the model."""
    num_ranks = parallel.world if parallel.experts is None else parallel.experts.ranks.world
    dp = num_ranks // parallel.world
    check_layout(config.divided, parallel.world, dp, dp_attention=parallel.experts is not None)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of a setting; auto is bfloat16 if the device multiplies it natively, else float32.

    Raises ``ValueError`` for another name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} must be auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cpu":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32
