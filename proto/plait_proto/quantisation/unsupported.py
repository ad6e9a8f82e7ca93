"""The error for a quantisation that is not read."""

from __future__ import annotations

from plait_proto.fields import MAX_SHOWN, Fields


def not_supported(stated: Fields, what: str) -> Exception:
    """It names the scheme, and those that are read. ``what`` may hold text of the file, whatever that is."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in what[:MAX_SHOWN])
    return stated.error(
        f"{stated.where}: quantisation {shown} is not supported; these are: AWQ (version gemm, 4 bits), GPTQ (4 or 8 "
        "bits), compressed-tensors pack-quantized (integers of 4 or 8 bits), mxfp4-pack-quantized and "
        "nvfp4-pack-quantized, FP8 (fp8, compressed-tensors of 8-bit floats, modelopt FP8), modelopt NVFP4, and "
        "GGUF's: use such files, or the unquantised model"
    )
