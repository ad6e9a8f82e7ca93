"""CUTLASS's MLA decode through flashinfer's own call checks and a stand-in of the kernel's contract."""

from __future__ import annotations

import pytest
from plait_testing.attention_cases import CPU, MlaCase, mla_shape
from plait_testing.trtllm_gen import Launcher
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.spec import MlaShape
from plait_worker.errors import WorkerError

TOLERANCE = 0.02


# YaRN's temperature goes into the queries, since the kernel's scale is its own.
@pytest.mark.parametrize(
    ("shape", "page_size"), [(mla_shape(128, scale=192**-0.5), 128), (mla_shape(128), 64), (mla_shape(128), 32)]
)
def test_decode_rows_go_to_cutlass_and_all_others_are_decompressed(
    launcher: Launcher, shape: MlaShape, page_size: int
) -> None:
    from plait_worker.attention.mla.cutlass_mla import CutlassMla

    case = MlaCase(shape, [(40, 3), (0, 20)], [(0, 1), (31, 1), (130, 1)], page_size)
    assert case.error(CutlassMla(BackendRequirements(shape, page_size, 64, 256, CPU))) <= TOLERANCE
    assert launcher.calls == {"decompressed causal": 1, "decompressed context": 1, "mla cutlass": 1}


def test_a_decode_row_of_two_tokens_is_refused(launcher: Launcher) -> None:
    from plait_worker.attention.mla.cutlass_mla import CutlassMla

    case = MlaCase(shape := mla_shape(128), [], [(3, 2)])
    with pytest.raises(WorkerError, match="one query token"):
        case.error(CutlassMla(BackendRequirements(shape, 32, 64, 256, CPU)))
