"""Tensor maps, by which Hopper's copy engine (TMA) reads a box of a matrix.

Source: the driver API's manual, "Tensor Map Object Management". The driver is called without ``cuda-bindings``, whose
objects do not lie at a multiple of 64 bytes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from plait_kernels.nvrtc import CudaError

_ALIGNMENT = 64
_BOX_BYTES = 128
_UINT8, _BFLOAT16 = 0, 9
"""CU_TENSOR_MAP_DATA_TYPE_UINT8 and CU_TENSOR_MAP_DATA_TYPE_BFLOAT16."""
_TYPES = {torch.bfloat16: _BFLOAT16, torch.float8_e4m3fn: _UINT8}
_SWIZZLE_128B, _PROMOTE_256B = 3, 3
"""CU_TENSOR_MAP_SWIZZLE_128B and CU_TENSOR_MAP_L2_PROMOTION_L2_256B."""


class TensorMap(ctypes.Structure):
    """What a kernel takes, as a ``__grid_constant__`` of 128 bytes."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def row_map(x_NI: Tensor, box_rows: int) -> TensorMap:
    """Of rows of bfloat16 or FP8 that lie one after the other: a box has 128 bytes, and zeros where there is nothing.

    The box is swizzled by 128 bytes, as wgmma reads it.
    """
    if x_NI.dtype not in _TYPES or not x_NI.is_contiguous():
        raise ValueError(f"rows are {x_NI.dtype} with strides {x_NI.stride()}")
    return _made(x_NI.data_ptr(), *x_NI.shape, box_rows, x_NI.dtype)


@functools.lru_cache(maxsize=4096)
def _made(address: int, num_rows: int, num_inputs: int, box_rows: int, dtype: torch.dtype) -> TensorMap:
    """Kept: a layer's rows are often where they were."""
    made = _aligned()
    status = _encode()(
        ctypes.byref(made),
        _TYPES[dtype],
        2,
        address,
        (ctypes.c_uint64 * 2)(num_inputs, num_rows),
        (ctypes.c_uint64 * 1)(num_inputs * dtype.itemsize),
        (ctypes.c_uint32 * 2)(_BOX_BYTES // dtype.itemsize, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        *(0, _SWIZZLE_128B, _PROMOTE_256B, 0),
    )
    if status:
        raise CudaError(f"cuTensorMapEncodeTiled answered {status} for {num_rows} rows of {num_inputs} at {address:#x}")
    return made


def _aligned() -> TensorMap:
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _ALIGNMENT)
    return TensorMap.from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)


@functools.cache
def _encode() -> Callable[..., int]:
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    encode.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ]
    encode.restype = ctypes.c_int
    return encode
