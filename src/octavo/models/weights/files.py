"""What the readers of all checkpoint formats share: mapped files, and their fingerprint."""

import hashlib
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from octavo.errors import ModelFileError, ModelNotFound
from octavo.ops.api import F32, Encoded

SAMPLE_BYTES = 64


class Checkpoint(Protocol):
    """Named tensors in one or more files. Shapes are in numpy's order: rows, columns."""

    @property
    def path(self) -> Path: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    @property
    def stored_as(self) -> str:
        """The encoding that most elements are stored in."""

    def kind(self, name: str) -> str:
        """The encoding of one tensor."""

    def encoded(self, name: str) -> Encoded:
        """The tensor as it is stored, without a copy; the last axis is that of columns."""

    def forget(self, name: str) -> None:
        """The tensor's bytes go out of this process's memory until they are read again."""

    def f32(self, name: str) -> F32:
        """The tensor in float32, every stored value exactly."""

    def fingerprint(self) -> str:
        """A digest of the headers, the sizes and a sample of each tensor's bytes."""


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes, mapped for reading. Raises ModelNotFound, or ModelFileError if empty."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelFileError(f"{path}: the file is empty; fetch the model again") from None
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}") from error


def forget_bytes(mapped: mmap.mmap, offset: int, nbytes: int) -> None:
    """Give up the pages of a mapped file that hold these bytes. The system's cache keeps them."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)


def sample_bytes(
    header: bytes, parts: Sequence[mmap.mmap], spots: Iterable[tuple[mmap.mmap, int, int]]
) -> str:
    """A digest that tells checkpoints apart without reading all their bytes.

    It covers the header (metadata, names, shapes, encodings, offsets), the size of each file, and
    the first, middle and last 64 bytes of each tensor: fine-tuning moves every tensor, so two
    models that differ at all differ here. It is no proof against someone who forges weights.

    Cost     three pages a tensor: milliseconds.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(len(header).to_bytes(8, "little") + header)
    digest.update(b"".join(len(part).to_bytes(8, "little") for part in parts))
    for mapped, offset, nbytes in spots:
        last = max(0, nbytes - SAMPLE_BYTES)
        for start in (0, last // 2, last):
            digest.update(mapped[offset + start : offset + min(nbytes, start + SAMPLE_BYTES)])
    return digest.hexdigest()
