"""A folder whose matrices are packed integers, under the names that the unquantised model would have."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator

from plait_kernels.linear import BlockWeight, Int4Weight
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.packed.e2m1 import BYTES
from plait_worker.weights.packed.layout import Int4Form, PackedLayout
from plait_worker.weights.quantisation_config import check_not_ignored
from plait_worker.weights.safetensors_folder import SafetensorsFolder

_WEIGHT = ".weight"
_EXPERT = re.compile(r"\.experts\.\d+\.")


class PackedFolder:
    """``TensorSource`` of a folder; matrices are kept in GGUF blocks that hold them exactly, or read dense."""

    def __init__(self, folder: SafetensorsFolder, layout: PackedLayout) -> None:
        """Find the packed matrices; raises ``ModelFilesError`` if the configuration says otherwise."""
        self._folder = folder
        self.layout = layout
        packed = sorted(filter(self._is_packed, folder.names))
        self._modules = {_dense_name(name, layout): name.removesuffix(layout.packed) for name in packed}
        self._check_modules()
        layout.check_values(folder, list(self._modules.values()))
        self._dense, self._no_int4 = self._find_dense(), self._find_no_int4()
        belonging = {module + ending for module in self._modules.values() for ending in (layout.packed, *layout.others)}
        self._names = (folder.names - belonging) | self._modules.keys()

    @property
    def names(self) -> Collection[str]:
        """Those of the unquantised model."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the de-quantised tensor."""
        module = self._modules.get(name)
        return self._folder.shape(name) if module is None else self.layout.shape(self._folder, module)

    def read(self, name: str) -> Tensor:
        """As stored; de-quantised matrices are float32."""
        module = self._modules.get(name)
        return self._folder.read(name) if module is None else self.layout.read(self._folder, module).dequantised()

    def block_weight(self, name: str) -> BlockWeight | None:
        """A packed matrix, repacked; float32 scales are rounded to float16."""
        kind = self.block_kind(name)
        return None if kind is None else self.layout.read(self._folder, self._modules[name]).blocks(kind)

    def block_kind(self, name: str) -> str | None:
        """From the headers, and the scales that are not float16."""
        module = self._modules.get(name)
        return None if module is None else self._block_kind(module)

    def fp8_weight(self, _name: str) -> None:
        """Integers are not FP8."""

    def fp8_bytes(self, _name: str) -> None:
        """Integers are not FP8."""

    def int4_weight(self, name: str) -> Int4Weight | None:
        """A matrix of 4-bit codes, repacked; scales stay exact."""
        if self.int4_bytes(name) is None:
            return None
        return self.layout.read(self._folder, self._modules[name]).int4()

    def int4_bytes(self, name: str) -> int | None:
        """From the header."""
        module = self._modules.get(name)
        return None if module is None or _stack(module) in self._no_int4 else self._int4_bytes(module)

    def int4_names(self) -> tuple[int, int]:
        """How many packed matrices are held as 4-bit codes, and how many are not."""
        num_kept = sum(self.int4_bytes(name) is not None for name in self._modules)
        return num_kept, len(self._modules) - num_kept

    def _int4_bytes(self, module: str) -> int | None:
        form = self.layout.int4_form(self._folder, module)
        return None if form is None else form.num_bytes(self.layout.shape(self._folder, module))

    def _find_no_int4(self) -> frozenset[str]:
        """Experts of a layer that are stacked, of which some are not 4-bit codes, or are scaled otherwise."""
        forms = defaultdict[str, set[Int4Form | None]](set)
        for module in filter(_EXPERT.search, self._modules.values()):
            form = self.layout.int4_form(self._folder, module)
            is_taken = form is not None and not form.is_mixed and self._int4_bytes(module) is not None
            forms[_stack(module)].add(form if is_taken else None)
        stacks_with_whole = {_stack(module) for module in self._whole() if _EXPERT.search(module)}
        return frozenset(
            stack for stack, found in forms.items() if None in found or len(found) > 1 or stack in stacks_with_whole
        )

    def block_kinds(self) -> frozenset[str | None]:
        """The blocks that hold the packed matrices; None among them if some have none."""
        return frozenset(self._block_kind(module) for module in self._modules.values())

    def empty_biases(self) -> frozenset[str]:
        """Biases of packed matrices that are all zero: some tools write them for layers that have none."""
        biases = (f"{module}.bias" for module in self._modules.values())
        return frozenset(name for name in biases if name in self._names and not self._folder.read(name).any())

    def _block_kind(self, module: str) -> str | None:
        return None if _stack(module) in self._dense else self.layout.block_kind(self._folder, module)

    def _find_dense(self) -> frozenset[str]:
        """Matrices, and experts of a layer that are stacked, which no blocks hold all of."""
        packed = self._modules.values()
        without = [module for module in packed if not self._has_blocks(module)]
        return frozenset(_stack(module) for module in (*without, *self._whole()))

    def _is_packed(self, name: str) -> bool:
        """ModelOpt gives packed matrices the names of whole ones; their type tells."""
        is_named = name.endswith(self.layout.packed)
        return is_named and (self.layout.packed != _WEIGHT or self._folder.dtype(name) in BYTES)

    def _whole(self) -> Iterator[str]:
        """The modules whose matrices are not packed."""
        named = (name for name in self._folder.names if name.endswith(_WEIGHT))
        return (name.removesuffix(_WEIGHT) for name in named if not self._is_packed(name))

    def _has_blocks(self, module: str) -> bool:
        has_kind = self.layout.block_kind(self._folder, module) is not None
        return has_kind and self.layout.has_half_scales(self._folder, module)

    def _check_modules(self) -> None:
        if not self._modules:
            raise ModelFilesError(
                f"quantization_config says {self.layout.title}, but no tensor's name ends in {self.layout.packed}: the "
                "files do not belong together; download the model again, or take the entry out of config.json"
            )
        for name, module in self._modules.items():
            if name in self._folder.names and not self._is_packed(name):
                raise ModelFilesError(f"the model files hold {name} twice, packed and not: download them again")
            check_not_ignored(module + self.layout.packed, module, self.layout.ignored)


def _dense_name(packed_name: str, layout: PackedLayout) -> str:
    return packed_name.removesuffix(layout.packed) + _WEIGHT


def _stack(module: str) -> str:
    """The layer's experts, which are held alike; of another matrix itself."""
    return _EXPERT.split(module)[0] if _EXPERT.search(module) else module
