"""Reads safetensors checkpoints, in one file or in shards, where their bytes lie.

    header bytes u64 | JSON {name: {dtype, shape, data_offsets}} | data

A sharded model has `model.safetensors.index.json`, whose `weight_map` says which file holds which
tensor. As with GGUF nothing is trusted: lengths, offsets, shapes and types are compared with the
bytes that are there, so a damaged checkpoint is a `ModelFileError` and nothing else.

Source  safetensors format (github.com/huggingface/safetensors, README: Format).
"""

import hashlib
import json
import mmap
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.errors import ModelFileError, ModelNotFound
from octavo.models.weights.files import forget_bytes, map_file, sample_bytes
from octavo.ops.api import F32, Encoded

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `nbytes` bytes at `offset` of file number `part`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    part: int


@dataclass(frozen=True, slots=True)
class SafetensorsCheckpoint:
    """The tensors of a model folder, open for reading."""

    path: Path
    tensors: dict[str, StoredTensor]
    _parts: tuple[mmap.mmap, ...] = field(repr=False)
    _header_digest: bytes = field(repr=False)

    @classmethod
    def open(cls, folder: Path) -> "SafetensorsCheckpoint":
        """Open `model.safetensors`, or all files that the index names.

        Raises   ModelNotFound; ModelFileError when a file is truncated, foreign, or not what the
                 index says.
        """
        index = folder / INDEX_NAME
        expected = _read_index(index) if index.exists() else None
        names = sorted(set(expected.values())) if expected is not None else [SINGLE_NAME]
        tensors: dict[str, StoredTensor] = {}
        parts: list[mmap.mmap] = []
        digest = hashlib.blake2b()
        for number, name in enumerate(names):
            mapped = map_file(folder / name)
            header, data_start = _read_header(folder / name, mapped)
            digest.update(mapped[:data_start])
            for tensor in _read_table(folder / name, header, data_start, len(mapped), number):
                if tensor.name in tensors:
                    raise ModelFileError(f"{folder / name}: tensor {tensor.name!r} is in two files")
                tensors[tensor.name] = tensor
            parts.append(mapped)
        if expected is not None:
            _check_index(index, expected, tensors, names)
        return cls(folder, tensors, tuple(parts), digest.digest())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def stored_as(self) -> str:
        """The type that most elements are stored in."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + prod(tensor.shape)
        return max(counts, key=counts.__getitem__)

    def encoded(self, name: str) -> Encoded:
        """The tensor as it is stored, without a copy; the last axis is that of columns."""
        tensor = self.tensors[name]
        stored = self._bytes(tensor).reshape(prod(tensor.shape[:-1]), -1)
        return Encoded(tensor.dtype, tensor.shape[-1], stored)

    def forget(self, name: str) -> None:
        """The tensor's bytes go out of this process's memory until they are read again."""
        tensor = self.tensors[name]
        forget_bytes(self._parts[tensor.part], tensor.offset, tensor.nbytes)

    def kind(self, name: str) -> str:
        return self.tensors[name].dtype

    def f32(self, name: str) -> F32:
        """The tensor in float32, every stored value exactly."""
        with np.errstate(invalid="ignore"):  # a signalling NaN in a damaged file: checked later
            return self._stored(name).astype(np.float32)

    def fingerprint(self) -> str:
        """A digest of the headers, the sizes and a sample of each tensor's bytes."""
        spots = ((self._parts[t.part], t.offset, t.nbytes) for t in self.tensors.values())
        return sample_bytes(self._header_digest, self._parts, spots)

    def _stored(self, name: str) -> npt.NDArray[Any]:
        tensor = self.tensors[name]
        raw = self._bytes(tensor)
        if tensor.offset % DTYPES[tensor.dtype].itemsize:
            raw = raw.copy()  # the format aligns tensors only by habit
        return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def _bytes(self, tensor: StoredTensor) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._parts[tensor.part], np.uint8, tensor.nbytes, tensor.offset)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small file. Raises ModelNotFound or ModelFileError."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path}: no weight_map; fetch the model again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name:
            raise ModelFileError(
                f"{path}: tensor {tensor!r} is in {name!r}, expected a file beside the index"
            )
    return weight_map


def _check_index(
    path: Path, expected: dict[str, str], tensors: dict[str, StoredTensor], names: list[str]
) -> None:
    for name, file_name in expected.items():
        tensor = tensors.get(name)
        if tensor is None or names[tensor.part] != file_name:
            found = "nowhere" if tensor is None else f"in {names[tensor.part]}"
            raise ModelFileError(f"{path}: tensor {name!r}: expected in {file_name}, found {found}")


def _read_header(path: Path, mapped: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The JSON header, and where the data start."""
    size = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or size > min(MAX_HEADER_BYTES, len(mapped) - 8):
        raise ModelFileError(
            f"{path}: not a safetensors file, or truncated: a header of {size} bytes announced in "
            f"a file of {len(mapped)}"
        )
    try:
        header = json.loads(mapped[8 : 8 + size])
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path}: not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: not a safetensors file: its header is not an object")
    return header, 8 + size


def _read_table(
    path: Path, header: dict[str, Any], data_start: int, size: int, part: int
) -> list[StoredTensor]:
    tensors = [
        _read_entry(path, name, entry, data_start, size, part)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    if not tensors:
        raise ModelFileError(f"{path}: holds no tensors; fetch the model again")
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < position:
            raise ModelFileError(f"{path}: tensor {tensor.name!r} overlaps the one before it")
        position = tensor.offset + tensor.nbytes
    return tensors


def _read_entry(
    path: Path, name: str, entry: Any, data_start: int, size: int, part: int
) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise ModelFileError(
                f"{path}: tensor {name!r}: expected dtype, shape and data_offsets, found {entry!r}"
            )
    if dtype not in DTYPES:
        raise ModelFileError(
            f"{path}: tensor {name!r} has type {dtype}, expected one of {', '.join(DTYPES)}"
        )
    if not all(isinstance(extent, int) and extent >= 1 for extent in shape):
        raise ModelFileError(
            f"{path}: tensor {name!r} has shape {shape}, expected sizes of 1 or more"
        )
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if not 0 <= start <= stop or stop - start != nbytes:
        raise ModelFileError(
            f"{path}: tensor {name!r}: expected {nbytes} bytes for {shape} of {dtype}, found "
            f"offsets {start} to {stop}"
        )
    if data_start + stop > size:
        raise ModelFileError(
            f"{path}: tensor {name!r}: expected {nbytes} bytes at byte {data_start + start}, the "
            f"file ends at byte {size}; it is truncated, fetch it again"
        )
    return StoredTensor(name, tuple(shape), dtype, data_start + start, nbytes, part)
