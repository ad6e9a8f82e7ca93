"""CUDA C++ compiled at run time by NVRTC, which comes with torch: no toolkit is needed.

Source: the manuals of NVRTC and the driver API, used through the ``cuda-bindings`` package.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_HOPPER = 9, 0
"""Has instructions of its own, which an architecture's name allows with an "a" (wgmma)."""


Argument = Tensor | ctypes.Structure | int | float


class CudaError(RuntimeError):
    """An error of the compiler or the driver."""


class Kernel:
    """One kernel, ready to be launched on its device."""

    def __init__(self, function: Any, max_shared_bytes: int) -> None:
        """``function`` is the driver's handle."""
        from cuda.bindings import driver

        self._function = function
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, max_shared_bytes))

    def __call__(self, shape: tuple[int, int, int], *arguments: Argument, pdl: bool = False, cluster: int = 1) -> None:
        """Launch ``(blocks, threads, bytes of dynamic shared memory)`` on the current stream.

        A tensor is passed as its pointer, a number as 64 bits, a structure as it is. With ``pdl`` the kernel may start
        before the one before it has ended, and waits for that by itself. So many neighbouring blocks are a ``cluster``.
        """
        from cuda.bindings import driver

        values = tuple(value.data_ptr() if isinstance(value, Tensor) else value for value in arguments)
        given = values, tuple(map(_kind, arguments))
        blocks, threads, shared_bytes = shape
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if pdl or cluster > 1:
            check(driver.cuLaunchKernelEx(_config(shape, stream, pdl, cluster), self._function, given, 0))
        else:
            check(driver.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, given, 0))


def _kind(argument: Argument) -> type[ctypes._SimpleCData[Any]] | None:
    if isinstance(argument, ctypes.Structure):
        return None
    if isinstance(argument, Tensor):
        return ctypes.c_void_p
    return ctypes.c_double if isinstance(argument, float) else ctypes.c_longlong


def _config(shape: tuple[int, int, int], stream: Any, pdl: bool, cluster: int) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.blockDimX, config.sharedMemBytes = shape
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.hStream = stream
    config.attrs = [_pdl_attribute()] * pdl + [_cluster_attribute(cluster)] * (cluster > 1)
    config.numAttrs = len(config.attrs)
    return config


def _pdl_attribute() -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _cluster_attribute(size: int) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = size, 1, 1
    return attribute


@functools.cache
def no_compiler_reason() -> str | None:
    """What to install before a kernel can be compiled; None if one can. The log says it, once in a process."""
    reason = _missing()
    if reason is not None:
        _log.warning("kernels in CUDA C++ are not used, slower ones are: %s", reason)
    return reason


def _missing() -> str | None:
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "needs the package cuda-bindings"
    try:
        compile_source(b"", "nothing.cu", (), _HOPPER)  # loads all of NVRTC's libraries
    except (ImportError, OSError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        return f"needs NVRTC, the package {_nvrtc_package()}, which cuda-bindings cannot load: {first_line}"
    return None


def _nvrtc_package() -> str:
    """The one for this release of ``cuda-bindings``."""
    major = int(version("cuda-bindings").partition(".")[0])
    return "nvidia-cuda-nvrtc" if major > 12 else f"nvidia-cuda-nvrtc-cu{major}"


def compile_kernels(
    source: Path, names: Sequence[str], defines: Sequence[str], device: torch.device
) -> dict[str, Kernel]:
    """The kernels of these names, ``extern "C"`` in the source, which may include the ``.cuh`` files beside it.

    Raises ``CudaError`` if it does not compile.
    """
    from cuda.bindings import driver

    capability = torch.cuda.get_device_capability(device)
    image = compile_source(source.read_bytes(), source.name, defines, capability, sorted(source.parent.glob("*.cuh")))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current, in any thread
        most = max_shared_bytes(device)
        (module,) = check(driver.cuModuleLoadData(image))
        functions = {name: check(driver.cuModuleGetFunction(module, name.encode()))[0] for name in names}
        return {name: Kernel(function, most - _static_bytes(function)) for name, function in functions.items()}


@functools.cache
def max_shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may take on this GPU."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(check(driver.cuDeviceGetAttribute(attribute, device.index or 0))[0])


def compile_source(
    source: bytes, name: str, defines: Sequence[str], capability: tuple[int, int], headers: Sequence[Path] = ()
) -> bytes:
    """Machine code for a compute capability. Raises ``CudaError`` with the compiler's log."""
    from cuda.bindings import nvrtc

    texts, names = [header.read_bytes() for header in headers], [header.name.encode() for header in headers]
    (program,) = check(nvrtc.nvrtcCreateProgram(source, name.encode(), len(headers), texts, names))
    architecture = "sm_{}{}".format(*capability) + ("a" if capability == _HOPPER else "")
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{define}" for define in defines)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program))[0])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"{name} does not compile: {log.decode(errors='replace')}")
    image = bytearray(check(nvrtc.nvrtcGetCUBINSize(program))[0])
    check(nvrtc.nvrtcGetCUBIN(program, image))
    return bytes(image)


def _static_bytes(function: Any) -> int:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    return int(check(driver.cuFuncGetAttribute(attribute, function))[0])


def check(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """A call's results without its status. Raises ``CudaError`` unless that is success."""
    status, *values = answer
    if int(status) != 0:
        raise CudaError(f"the CUDA driver answered {status.name}")
    return tuple(values)
