"""How the files hold FP8 weights, in the dialects that they come in."""

from __future__ import annotations

from dataclasses import dataclass

from plait_proto.quantisation import NOTHING_IGNORED, Fp8Config, IgnoredModules

from plait_worker.weights.formats.fp8_blocks import Fp8Blocks


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How the scales of FP8 weights are stored."""

    ending: str
    """What follows a weight's name in that of its scales."""
    blocks: Fp8Blocks | None
    """None if a scale is for a whole matrix or for each output."""
    ignored: IgnoredModules = NOTHING_IGNORED
    """Modules that the configuration says are not quantised."""

    def scale_name(self, weight_name: str) -> str:
        """The tensor with a weight's scales."""
        return weight_name + self.ending


def fp8_scheme(stated: Fp8Config, ignored: IgnoredModules) -> Fp8Scheme:
    """Files of the method fp8 call the scales of blocks inverse."""
    if stated.block is None:
        return Fp8Scheme("_scale", None, ignored)
    return Fp8Scheme("_scale_inv" if stated.method == "fp8" else "_scale", Fp8Blocks(*stated.block), ignored)
