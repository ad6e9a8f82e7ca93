"""CUDA C++ compiled at run time by NVRTC, which comes with torch: no toolkit is needed.

Source: the manuals of NVRTC and the driver API, used through the ``cuda-bindings`` package.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait_kernels.kernel_cache import KernelCache, key_of

_log = logging.getLogger(__name__)

_HOPPER = 9, 0
"""Has instructions of its own, which an architecture's name allows with an "a" (wgmma)."""
CACHE = KernelCache()
"""Of what ``machine_code`` has compiled; a rank is told its folder."""
_NOTHING = b'extern "C" __global__ void nothing() {}'

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
    return _told(_missing())


@functools.cache
def unusable_reason(device: torch.device) -> str | None:
    """Why no kernel runs on a GPU, and what helps; None if one does. The log says it, once in a process."""
    if (reason := no_compiler_reason()) is not None:
        return reason
    try:
        image = machine_code(_NOTHING, "an empty kernel", (), torch.cuda.get_device_capability(device))
        _load_on(device, image, "an empty kernel")
    except (OSError, RuntimeError) as error:
        return _told(str(error).partition("\n")[0])
    return None


def _told(reason: str | None) -> str | None:
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
        major = int(version("cuda-bindings").partition(".")[0])
        return f"needs NVRTC, the package {_nvrtc_package(major)}, which cuda-bindings cannot load: {first_line}"
    return None


def _nvrtc_package(major: int) -> str:
    """The one for this release of CUDA, and so of ``cuda-bindings``."""
    return "nvidia-cuda-nvrtc" if major > 12 else f"nvidia-cuda-nvrtc-cu{major}"


def compile_kernels(
    source: Path, names: Sequence[str], defines: Sequence[str], device: torch.device
) -> dict[str, Kernel]:
    """The kernels of these names, ``extern "C"`` in the source, which may include the ``.cuh`` files beside it.

    Raises ``CudaError`` if it does not compile, or if the driver refuses it.
    """
    from cuda.bindings import driver

    capability = torch.cuda.get_device_capability(device)
    image = machine_code(source.read_bytes(), source.name, defines, capability, sorted(source.parent.glob("*.cuh")))
    module, most = _load_on(device, image, source.name), max_shared_bytes(device)
    with torch.cuda.device(device):
        functions = {name: check(driver.cuModuleGetFunction(module, name.encode()))[0] for name in names}
        return {name: Kernel(function, most - _static_bytes(function)) for name, function in functions.items()}


def _load_on(device: torch.device, image: bytes, name: str) -> Any:
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current, in any thread
        return load(image, name)


def load(image: bytes, name: str) -> Any:
    """The driver's module of machine code, in the current context. Raises ``CudaError`` with what helps."""
    from cuda.bindings import driver

    status, module = driver.cuModuleLoadData(image)
    if int(status) != 0:
        raise CudaError(f"{name}: the GPU's driver answered {status.name}; {_driver_advice()}")
    return module


def _driver_advice() -> str:
    """A driver takes machine code of its own major version of CUDA and of those before."""
    from cuda.bindings import driver, nvrtc

    ours, theirs = check(nvrtc.nvrtcVersion()), check(driver.cuDriverGetVersion())[0]
    major, minor = theirs // 1000, theirs % 1000 // 10
    versions = "it is for CUDA {}.{}, and NVRTC is of CUDA {}.{}".format(major, minor, *ours)
    if (major, minor) >= ours:
        return f"{versions}: report this"
    fitting = f"'cuda-bindings<{major + 1}' {_nvrtc_package(major)}"
    return f"{versions}: install a newer driver, or pip install {fitting}"


@functools.cache
def max_shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may take on this GPU."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(check(driver.cuDeviceGetAttribute(attribute, device.index or 0))[0])


def machine_code(
    source: bytes, name: str, defines: Sequence[str], capability: tuple[int, int], headers: Sequence[Path] = ()
) -> bytes:
    """What ``compile_source`` gives, from the cache if it has it."""
    options = _options(defines, capability)
    texts = [text for header in headers for text in (header.name.encode(), header.read_bytes())]
    key = key_of([_compiler_release().encode(), source, "\0".join(options).encode(), *texts])
    code = CACHE.get(key)
    if code is None:
        code = compile_source(source, name, defines, capability, headers)
        CACHE.put(key, code)
    return code


@functools.cache
def _compiler_release() -> str:
    """NVRTC says major and minor alone."""
    from cuda.bindings import nvrtc

    major, minor = check(nvrtc.nvrtcVersion())
    try:
        return f"{major}.{minor} {version(_nvrtc_package(major))}"
    except PackageNotFoundError:
        return f"{major}.{minor}"


def _options(defines: Sequence[str], capability: tuple[int, int]) -> list[str]:
    return [f"--gpu-architecture={_architecture(capability)}", "--std=c++17", *(f"-D{define}" for define in defines)]


def _architecture(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability) + ("a" if capability == _HOPPER else "")


def compile_source(
    source: bytes, name: str, defines: Sequence[str], capability: tuple[int, int], headers: Sequence[Path] = ()
) -> bytes:
    """Machine code for a compute capability. Raises ``CudaError`` with the compiler's log."""
    from cuda.bindings import nvrtc

    texts, names = [header.read_bytes() for header in headers], [header.name.encode() for header in headers]
    (program,) = check(nvrtc.nvrtcCreateProgram(source, name.encode(), len(headers), texts, names))
    options = _options(defines, capability)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program))[0])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"{name} {_why(log.decode(errors='replace').strip(), _architecture(capability))}")
    image = bytearray(check(nvrtc.nvrtcGetCUBINSize(program))[0])
    check(nvrtc.nvrtcGetCUBIN(program, image))
    return bytes(image)


def _why(log: str, architecture: str) -> str:
    """It does not compile."""
    from cuda.bindings import nvrtc

    if "--gpu-architecture" not in log:
        return f"does not compile for {architecture}; report this: {log}"
    major, minor = check(nvrtc.nvrtcVersion())
    packages = f"cuda-bindings {_nvrtc_package(major)}"
    return f"does not compile: NVRTC {major}.{minor} knows no {architecture}; pip install --upgrade {packages}"


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
