"""The compiled CPU kernels (``kernels/csrc``): this processor's build, and its functions.

Structures mirror those of the same names in the C++ headers.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import POINTER, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LEVELS = ("portable", "avx2", "avx512bf16")
"""The instruction sets of the builds, each a subset of the next."""

_FOLDER = Path(__file__).parent
_MEND = (
    "install a compiler of C++20 with all of the processor's instructions (GCC 12 is one: sudo apt install "
    "build-essential), then plait-kernels again"
)

_log = logging.getLogger(__name__)

TYPES = {torch.bfloat16: 0, torch.float32: 1}
"""The dtypes of weights, activations and cache that the kernels take, with their numbers in C."""

BLOCK_FORMATS = {
    name: number for number, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))
}
"""The GGUF block types that the kernels take, with their numbers in C."""


class BlockPanels(ctypes.Structure):
    """Some panels of a matrix in GGUF blocks; ``format`` of ``BLOCK_FORMATS``."""

    _fields_ = (("panels", c_void_p), ("num_panels", c_int64), ("format", c_int64))


class Matrix(ctypes.Structure):
    """A matrix in panels; ``bias`` null if it has none.

    ``weights`` are words if ``activation_bits`` is 0, else an array of ``BlockPanels``.
    """

    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("activation_bits", c_int64),
    )


class Rows(ctypes.Structure):
    """The rows of one step; pointers to host arrays."""

    _fields_ = (
        ("starts", c_void_p),
        ("ends", c_void_p),
        ("first_tokens", c_void_p),
        ("table", c_void_p),
        ("query_tiles", c_void_p),
        ("num_rows", c_int64),
        ("num_query_tiles", c_int64),
        ("table_width", c_int64),
        ("page_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("scale", c_double),
    )


class KvView(ctypes.Structure):
    """Keys, or values, in pages; strides in elements."""

    _fields_ = (
        ("first", c_void_p),
        ("page_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
    )


class Layer(ctypes.Structure):
    """One decoder layer's weights and pages."""

    _fields_ = (
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("pages", c_void_p),
    )


class Decoder(ctypes.Structure):
    """A stack of decoder layers and the final norm."""

    _fields_ = (
        ("layers", c_void_p),
        ("norm", c_void_p),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("eps", c_double),
    )


class Activations(ctypes.Structure):
    """One step's tensors: rotation tables, and embeddings that become hidden states."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("hidden", c_void_p))


class Experts(ctypes.Structure):
    """The matrices of all experts; pointers to arrays of ``Matrix``."""

    _fields_ = (("gate_ups", c_void_p), ("downs", c_void_p), ("num_experts", c_int64))


class Pairs(ctypes.Structure):
    """Which tokens go to which experts."""

    _fields_ = (
        ("order", c_void_p),
        ("ends", c_void_p),
        ("weights", c_void_p),
        ("num_tokens", c_int64),
        ("top_k", c_int64),
    )


class Filters(ctypes.Structure):
    """Each row's sampling parameters; pointers to one value a row."""

    _fields_ = (
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("uniform", c_void_p),
    )


class Adjustments(ctypes.Structure):
    """What each row changes about its logits; see ``plait_kernels.sampling.adjust.Adjustments``."""

    _fields_ = (
        ("counts", c_void_p),
        ("rows", c_void_p),
        ("penalties", c_void_p),
        ("ends", c_void_p),
        ("ids", c_void_p),
        ("bias", c_void_p),
        ("only_listed", c_void_p),
    )


_DONE, _NO_MEMORY = 0, 1
"""Status of a function; any other: the system starts no more threads."""

_SIGNATURES: dict[str, tuple[object, ...]] = {
    "plait_set_threads": (c_int,),
    "plait_pack_dense": (c_void_p, c_int64, c_int64, c_int, c_void_p),
    "plait_pack_blocks": (c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "plait_gemm": (POINTER(Matrix), c_void_p, c_int64, c_int, c_int, c_void_p),
    "plait_rms_norm": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_double, c_int, c_void_p),
    "plait_attention": (
        POINTER(Rows),
        c_void_p,
        c_int64,
        POINTER(KvView),
        POINTER(KvView),
        c_int,
        c_void_p,
        c_void_p,
    ),
    "plait_moe": (POINTER(Experts), POINTER(Pairs), c_void_p, c_int, c_void_p),
    "plait_store_kv": (POINTER(Rows), c_void_p, c_int64, c_void_p, c_int64, c_int, c_void_p),
    "plait_sample_greedy": (c_void_p, c_int64, c_int64, c_void_p),
    "plait_sample_random": (c_void_p, c_int64, c_int64, POINTER(Filters), c_void_p),
    "plait_sample_filtered": (c_void_p, c_int64, c_int64, POINTER(Filters), c_void_p),
    "plait_adjust_logits": (c_void_p, c_int64, c_int64, POINTER(Adjustments), c_void_p),
    "plait_mask_logits": (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
    "plait_decoder_stack": (POINTER(Decoder), POINTER(Rows), POINTER(Activations), c_int),
}


@cache
def level() -> str:
    """The best of these instruction sets that this processor has."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported():
        return "avx512bf16"
    return "avx2" if capability in ("AVX2", "AVX512") else "portable"


def open_library() -> ctypes.CDLL | None:
    """This processor's build of the kernels, or a simpler one; None if the package was built without any."""
    built = choose_build(_FOLDER, level())
    return None if built is None else open_build(built)


@cache
def choose_build(folder: Path, wanted: str) -> str | None:
    """The best instruction set up to ``wanted`` that a folder has a build for; None if it has none.

    Unless that is ``wanted``, the log says what is slower and what to do.
    """
    possible = LEVELS[: LEVELS.index(wanted) + 1]
    built = next((name for name in reversed(possible) if (folder / _file_name(name)).exists()), None)
    if built is None:
        _log.warning("no CPU kernels are compiled: torch computes GEMMs, attention and experts, slower; %s", _MEND)
    elif built != wanted:
        _log.warning("the CPU kernels are not compiled for %s: the build for %s is slower; %s", wanted, built, _MEND)
    return built


def _file_name(name: str) -> str:
    return f"libplait_{name}.so"


@cache
def open_build(name: str) -> ctypes.CDLL:
    """The build for one instruction set, which must exist and run on this processor.

    Raises ``RuntimeError`` if it was compiled from other sources.
    """
    library = ctypes.CDLL(str(_FOLDER / _file_name(name)))
    _log.info("CPU kernels: the build for %s", name)
    for name, arguments in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as missing:
            raise RuntimeError(
                f"{library._name} has no {name}: it was compiled from other sources; install plait-kernels again, or "
                "run python kernels/compile_native.py"
            ) from missing
        function.argtypes, function.restype, function.errcheck = arguments, c_int, _raise_unless_done
    return library


def _raise_unless_done(status: int, function: Callable[..., object], _arguments: tuple[object, ...]) -> None:
    if status == _DONE:
        return
    name = getattr(function, "__name__", "a CPU kernel")
    if status == _NO_MEMORY:
        raise MemoryError(f"{name} found no memory for its scratch buffers")
    raise RuntimeError(f"{name}: the system starts no more threads; lower --threads, or raise the limit (ulimit -u)")


def library() -> ctypes.CDLL:
    """The kernels, for backends that were chosen because they are there. Raises ``RuntimeError`` otherwise.

    Its functions raise ``MemoryError`` if there is no memory for their scratch buffers.
    """
    found = open_library()
    if found is None:
        raise RuntimeError("the compiled CPU kernels are not there: install plait-kernels again")
    return found


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads that the kernels use, the caller's included.

    Raises ``RuntimeError`` if the system starts no more; those that were started are used.
    """
    if (found := open_library()) is not None:
        found.plait_set_threads(num_threads)


def supports_tensors(*tensors: Tensor) -> bool:
    """Whether the kernels are there and take tensors of this device and type."""
    return all(t.device.type == "cpu" and t.dtype in TYPES for t in tensors) and open_library() is not None


def check_tensor(x: Tensor, dtype: torch.dtype, *sizes: int) -> None:
    """Raise ``ValueError`` unless ``x`` is on the CPU, of ``dtype``, and its last dimensions are ``sizes``.

    The kernels get bare pointers: they would misread a tensor of another kind.
    """
    if x.dtype != dtype or x.shape[x.ndim - len(sizes) :] != sizes or not x.is_cpu:
        wanted = ", ".join(("...", *map(str, sizes)))
        raise ValueError(
            f"the CPU kernel takes {dtype} [{wanted}] in the CPU's memory, and was given "
            f"{x.dtype} {list(x.shape)} on {x.device}"
        )
