"""What ``quantization_config`` of a ``config.json`` says, whatever the method."""

from __future__ import annotations

from plait_worker.weights.fields import Fields
from plait_worker.weights.fp8_config import Fp8Scheme, read_compressed_fp8, read_fp8, read_modelopt
from plait_worker.weights.packed import mxfp4, nvfp4
from plait_worker.weights.packed.awq import read_awq
from plait_worker.weights.packed.compressed import is_pack_quantized, read_pack_quantized
from plait_worker.weights.packed.gptq import read_gptq
from plait_worker.weights.packed.layout import PackedLayout, not_supported


def read_quantisation(fields: Fields) -> Fp8Scheme | PackedLayout | None:
    """How the file says that weights are stored; None if they are not quantised.

    Raises ``ModelFilesError`` for any quantisation that is not read, by name.
    """
    if not fields.has("quantization_config"):
        return None
    stated = fields.nested("quantization_config")
    match stated.text("quant_method", "of no name"):
        case "fp8":
            return read_fp8(stated)
        case "modelopt":
            return _read_modelopt(stated)
        case "compressed-tensors":
            return _read_compressed(stated)
        case "awq":
            return read_awq(stated)
        case "gptq":
            return read_gptq(stated)
        case method:
            raise not_supported(stated, method)


def _read_modelopt(stated: Fields) -> Fp8Scheme | PackedLayout:
    is_nvfp4 = stated.text("quant_algo", "") == nvfp4.ALGORITHM
    return nvfp4.read_modelopt_nvfp4(stated) if is_nvfp4 else read_modelopt(stated)


def _read_compressed(stated: Fields) -> Fp8Scheme | PackedLayout:
    match stated.text("format", ""):
        case mxfp4.FORMAT:
            return mxfp4.read_mxfp4(stated)
        case nvfp4.FORMAT:
            return nvfp4.read_compressed_nvfp4(stated)
    return read_pack_quantized(stated) if is_pack_quantized(stated) else read_compressed_fp8(stated)
