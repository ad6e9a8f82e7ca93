"""The header of a GGUF file (version 2 or 3, little-endian): metadata, and the offset of each tensor.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The header is hostile input: every count and length is checked before anything is read or allocated.
Arrays are skipped (a tokenizer's are long, and a worker needs none of them); the keys stay known.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from mmap import mmap

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from plait_worker.errors import ModelFilesError

VERSIONS = (2, 3)
MAX_FIELDS = 4096
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 4 << 20
"""Of a value, such as a chat template."""
MAX_ARRAY_ITEMS = 1 << 24
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""The format of each numeric type, by GGUF's number."""
STRING, ARRAY = 8, 9

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch counts; the file has it the other way round."""
    kind: GGMLQuantizationType
    begin: int
    """Byte of the file."""
    num_bytes: int

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.begin + self.num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says before its tensors' data."""

    fields: dict[str, Scalar]
    """Metadata, without arrays."""
    arrays: frozenset[str]
    """Keys of the arrays that were skipped."""
    tensors: dict[str, GgufTensor]


def read_header(data: mmap | bytes, where: str) -> GgufHeader:
    """Read and check a header; ``where`` names the file in messages.

    Raises ``ModelFilesError`` if the file is truncated, malformed, big-endian, over a limit, or holds a
    tensor twice, out of bounds or overlapping another.
    """
    return _Reader(data, where).header()


class _Reader:
    """A position in the header; every read checks that the bytes are there."""

    def __init__(self, data: mmap | bytes, where: str) -> None:
        self.data = data
        self.where = where
        self.position = 0

    def header(self) -> GgufHeader:
        num_tensors, num_fields = self._read_counts()
        fields: dict[str, Scalar] = {}
        arrays: set[str] = set()
        for _ in range(num_fields):
            self._read_field(fields, arrays)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        base = _align(self.position, self._alignment(fields))
        return GgufHeader(fields, frozenset(arrays), self._locate_tensors(infos, base))

    def _read_counts(self) -> tuple[int, int]:
        """Numbers of tensors and of metadata fields."""
        if self._read_bytes(4) != b"GGUF":
            raise self._broken_file_error("it does not begin with the letters GGUF")
        version = self._read_number("<I")
        if version not in VERSIONS:
            raise self._broken_file_error(
                f"its version is {version}; versions {VERSIONS[0]} and {VERSIONS[1]} can be read"
            )
        num_tensors, num_fields = self._read_number("<Q"), self._read_number("<Q")
        self._check_limit("tensors", num_tensors, MAX_TENSORS)
        self._check_limit("metadata fields", num_fields, MAX_FIELDS)
        return num_tensors, num_fields

    def _read_field(self, fields: dict[str, Scalar], arrays: set[str]) -> None:
        key, kind = self._read_string(MAX_NAME_BYTES), self._read_number("<I")
        if key in fields or key in arrays:
            raise self._broken_file_error(f"the field {key} stands there twice")
        if kind == ARRAY:
            self._skip_array()
            arrays.add(key)
        elif kind == STRING:
            fields[key] = self._read_string(MAX_STRING_BYTES)
        else:
            fields[key] = self._read_scalar(kind)

    def _read_scalar(self, kind: int) -> Scalar:
        if kind not in SCALARS:
            raise self._broken_file_error(f"a field has the unknown type {kind}")
        value: Scalar = struct.unpack(SCALARS[kind], self._read_bytes(struct.calcsize(SCALARS[kind])))[0]
        return value

    def _skip_array(self) -> None:
        kind, num_items = self._read_number("<I"), self._read_number("<Q")
        self._check_limit("items of an array", num_items, MAX_ARRAY_ITEMS)
        if kind == STRING:
            self._skip_strings(num_items)
        elif kind in SCALARS:
            self._skip(num_items * struct.calcsize(SCALARS[kind]))
        else:
            raise self._broken_file_error(f"an array has items of the unsupported type {kind}")

    def _skip_strings(self, num_items: int) -> None:
        """The only long loop of a header: a hundred thousand strings for a usual vocabulary."""
        unpack, data, position, size = struct.Struct("<Q").unpack_from, self.data, self.position, len(self.data)
        for _ in range(num_items):
            if position + 8 > size:
                break
            position += 8 + unpack(data, position)[0]
        self._skip(position - self.position)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset."""
        name, num_dimensions = self._read_string(MAX_NAME_BYTES), self._read_number("<I")
        self._check_limit(f"dimensions of the tensor {name}", num_dimensions, MAX_DIMENSIONS)
        dimensions = [self._read_number("<Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(dimensions)), self._read_number("<I"), self._read_number("<Q")

    def _locate_tensors(self, infos: list[tuple[str, tuple[int, ...], int, int]], base: int) -> dict[str, GgufTensor]:
        """The tensors by name, each within the file and none over another."""
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise self._broken_file_error(f"the tensor {name} stands there twice")
            tensors[name] = self._locate_tensor(name, shape, kind, base + offset)
        for one, other in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.begin)):
            if other.begin < one.end:
                raise self._broken_file_error(f"the tensors {one.name} and {other.name} overlap")
        return tensors

    def _locate_tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        if kind not in set(GGMLQuantizationType):
            raise ModelFilesError(f"{self.where}: tensor {name} has the unknown quantisation type {kind}")
        quantisation = GGMLQuantizationType(kind)
        block_size, block_bytes = GGML_QUANT_SIZES[quantisation]
        if not shape or 0 in shape or shape[-1] % block_size:
            raise self._broken_file_error(
                f"the tensor {name} has shape {list(shape)}, which {quantisation.name} cannot store"
            )
        num_bytes = prod(shape) // block_size * block_bytes
        if begin + num_bytes > len(self.data):
            raise self._broken_file_error(
                f"the tensor {name} would end at byte {begin + num_bytes} of {len(self.data)}"
            )
        return GgufTensor(name, shape, quantisation, begin, num_bytes)

    def _alignment(self, fields: dict[str, Scalar]) -> int:
        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._broken_file_error(
                f"general.alignment is {alignment!r}, not a power of two up to {MAX_ALIGNMENT}"
            )
        return alignment

    def _read_string(self, limit: int) -> str:
        num_bytes = self._read_number("<Q")
        self._check_limit("bytes of a string", num_bytes, limit)
        try:
            return self._read_bytes(num_bytes).decode()
        except UnicodeDecodeError as error:
            raise self._broken_file_error(f"a string is not UTF-8 ({error.reason})") from error

    def _read_number(self, form: str) -> int:
        value: int = struct.unpack(form, self._read_bytes(struct.calcsize(form)))[0]
        return value

    def _read_bytes(self, num_bytes: int) -> bytes:
        begin = self.position
        self._skip(num_bytes)
        return self.data[begin : self.position]

    def _skip(self, num_bytes: int) -> None:
        if self.position + num_bytes > len(self.data):
            raise self._broken_file_error("its header ends in the middle")
        self.position += num_bytes

    def _check_limit(self, what: str, number: int, limit: int) -> None:
        if number > limit:
            raise self._broken_file_error(f"it claims {number} {what}; at most {limit} are read")

    def _broken_file_error(self, reason: str) -> ModelFilesError:
        return ModelFilesError(f"{self.where} is broken, truncated or no GGUF file: {reason}. Download it again")


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
