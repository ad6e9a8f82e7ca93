"""A kernel that does not compile, or that the driver refuses, is named with what helps, and others compute.

The driver is a library of a few functions that is built here: it is of CUDA 12.4 and takes no machine code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plait_kernels.nvrtc import CudaError, compile_source, no_compiler_reason

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        no_compiler_reason() is not None, reason="no NVRTC; pip install cuda-bindings nvidia-cuda-nvrtc"
    ),
]
DRIVER = """
#include <string.h>
static int load(void **module, const void *image) { return 200; }
static int version(int *found) { *found = 12040; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int since, unsigned long long flags, void *status) {
    *found = !strcmp(name, "cuModuleLoadData") ? load : !strcmp(name, "cuDriverGetVersion") ? version : 0;
    return *found ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **found, int since, unsigned long long flags) {
    return cuGetProcAddress_v2(name, found, since, flags, 0);
}
"""
MULTIPLY = """
import logging, torch
logging.basicConfig(format="%(message)s")
from plait_kernels.linear import cuda_gemm
from plait_kernels.linear.fp8 import quantise_outputs
from plait_kernels.linear.fp8_tiles import cuda_unsupported_reason
from plait_kernels.nvrtc import compile_source, load
weight = quantise_outputs(torch.randn(64, 256))
cuda_gemm.compile_all(
    lambda _tile: load(compile_source(b"", "fp8_row_gemm.cu", (), (9, 0)), "fp8_row_gemm.cu"),
    ["a tile", "another"],
    weight.stored_OI.device,
)
print(cuda_unsupported_reason(weight))
"""


def test_a_kernel_that_the_driver_refuses_leaves_gemms_to_triton_and_one_line_says_what_helps(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    assert compiler is not None, "the driver is built with a C compiler: sudo apt install build-essential"
    (tmp_path / "driver.c").write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-w", str(tmp_path / "driver.c"), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, check=True)
    folders = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("LD_LIBRARY_PATH"))))
    environment = os.environ | {"LD_LIBRARY_PATH": folders}
    done = subprocess.run([sys.executable, "-c", MULTIPLY], env=environment, capture_output=True, text=True, check=True)
    (reason,), (logged,) = done.stdout.splitlines(), done.stderr.splitlines()
    assert logged == f"GEMMs in CUDA C++ are not used, Triton's are: {reason}"
    assert reason.startswith("fp8_row_gemm.cu: the GPU's driver answered CUDA_ERROR_INVALID_IMAGE; it is for CUDA 12.4")
    assert reason.endswith(": install a newer driver, or pip install 'cuda-bindings<13' nvidia-cuda-nvrtc-cu12")


def test_a_gpu_that_nvrtc_does_not_know_is_said_with_the_packages_to_upgrade() -> None:
    with pytest.raises(
        CudaError, match=r"^x\.cu does not compile: NVRTC \d+\.\d+ knows no sm_990; pip install --upgrade"
    ):
        compile_source(b"", "x.cu", (), (99, 0))


def test_a_source_that_does_not_compile_is_named_with_the_first_of_the_compilers_lines() -> None:
    with pytest.raises(CudaError, match=r"^x\.cu does not compile for sm_90a; report this: x\.cu\(1\): error: .*"):
        compile_source(b"nonsense", "x.cu", (), (9, 0))
