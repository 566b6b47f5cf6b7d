"""The GGUF reader: what is in the file, and one clear error for whatever is wrong with it."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from octavo.errors import ModelFileError, ModelNotFound
from octavo.models.weights.gguf import KINDS, GGUFFile
from octavo.ops.encodings import CHUNK_ELEMENTS, ENCODINGS, dequantize, dequantize_bf16, rounded

Rewrite = Callable[[bytes], bytes]


def write(path: Path, rng: np.random.Generator, *, architecture: str = "llama") -> Path:
    """A small file with metadata of every type and a tensor of several kinds."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_float32("f32", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße, 世界")
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float64("f64", 0.1)
    writer.add_array("numbers", [3, 1, 2])
    writer.add_array("texts", ["a", "", "çà"])
    writer.add_array("reals", [0.25, 4.0])
    writer.add_tensor("matrix", rng.standard_normal((6, 32), np.float32))
    writer.add_tensor("half", rng.standard_normal((3, 5), np.float32).astype(np.float16))
    for kind in ("Q4_1", "Q8_0", "BF16"):
        number = gguf.GGMLQuantizationType[kind]
        values = rng.standard_normal((4, 64), np.float32)
        writer.add_tensor(kind, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path, rng: np.random.Generator) -> Path:
    return write(tmp_path / "small.gguf", rng)


def open_and_read(path: Path) -> GGUFFile:
    """Open a file and touch all that it holds."""
    file = GGUFFile.open(path)
    for name in file.tensors:
        rounded(file.encoded(name))
    file.fingerprint()
    return file


def test_metadata_of_every_type(small: Path) -> None:
    metadata = GGUFFile.open(small).metadata
    expected = {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -100,
        "u16": 60_000,
        "i16": -30_000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "f32": 0.5,
        "yes": True,
        "text": "grüße, 世界",
        "u64": 2**63,
        "i64": -(2**62),
        "f64": 0.1,
        "numbers": [3, 1, 2],
        "texts": ["a", "", "çà"],
        "reals": [0.25, 4.0],
    }
    assert metadata == expected
    assert {type(metadata[key]) for key in ("u8", "yes", "f32", "text")} == {int, bool, float, str}


def test_tensors_are_those_of_the_gguf_package(small: Path) -> None:
    ours = GGUFFile.open(small)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(small).tensors}
    assert ours.tensors.keys() == theirs.keys()
    for name, tensor in theirs.items():
        record = ours.tensors[name]
        assert record.shape == tuple(tensor.shape.tolist())[::-1]
        assert record.kind == tensor.tensor_type.name
        assert ours.tensor_bytes(name).tobytes() == tensor.data.tobytes()
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.f32(name), values.reshape(record.shape))


def test_the_demo_file(demo_model_path: Path) -> None:
    file = GGUFFile.open(demo_model_path)
    assert file.metadata["llama.block_count"] == 30
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152
    assert len(file.tensors) == 272
    assert file.stored_as == "Q4_1"
    assert sum(record.count for record in file.tensors.values()) == 134_515_008


@pytest.mark.parametrize("kind", KINDS.values())
def test_dequantisation_is_that_of_the_gguf_package(kind: str, rng: np.random.Generator) -> None:
    """Bit for bit, on random bytes, over more than one chunk; and rounded as ml_dtypes rounds."""
    encoding = ENCODINGS[kind]
    blocks = CHUNK_ELEMENTS // encoding.block + 3
    raw = finite_blocks(kind, rng.integers(0, 256, (blocks, encoding.block_bytes), np.uint8))
    number = gguf.GGMLQuantizationType[kind]
    native = {"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)
    expected = gguf.quants.dequantize(raw.view(native), number).astype(np.float32).reshape(-1)
    found = dequantize(kind, raw.reshape(-1))
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    nearest = expected.astype(ml_dtypes.bfloat16)
    bits = dequantize_bf16(kind, raw.reshape(-1)).view(np.uint16)
    np.testing.assert_array_equal(bits, nearest.view(np.uint16))


def finite_blocks(kind: str, raw: np.ndarray) -> np.ndarray:
    """Clear the top exponent bit of every scale, so that no value is infinite or NaN."""
    high_bytes = {
        "F32": [3],
        "F16": [1],
        "BF16": [1],
        "Q4_1": [1, 3],
        "Q5_1": [1, 3],
        "Q4_K": [1, 3],
        "Q5_K": [1, 3],
        "Q6_K": [209],
    }
    raw[:, high_bytes.get(kind, [1])] &= 0xBF
    return raw


def test_rounding_keeps_nan_and_infinity() -> None:
    """A NaN whose payload is all ones must not be carried into a number."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000], np.uint32)
    found = dequantize_bf16("F32", bits.view(np.uint8)).astype(np.float32)
    assert np.isnan(found[:3]).all()
    assert found[3:].tolist() == [np.inf, -np.inf]


def test_a_cut_file_says_so(small: Path, rng: np.random.Generator) -> None:
    content = small.read_bytes()
    cuts = {*range(64), *rng.integers(0, len(content), 300).tolist(), len(content) - 1}
    for cut in cuts:
        small.write_bytes(content[:cut])
        with pytest.raises(ModelFileError, match=r"small\.gguf"):
            open_and_read(small)


def test_a_flipped_byte_is_harmless_or_a_model_file_error(
    small: Path, rng: np.random.Generator
) -> None:
    content = small.read_bytes()
    header = len(content) - sum(r.nbytes for r in GGUFFile.open(small).tensors.values())
    messages = []
    for position in range(header):
        damaged = bytearray(content)
        damaged[position] ^= int(rng.integers(1, 256))
        small.write_bytes(damaged)
        try:
            open_and_read(small)
        except ModelFileError as error:
            messages.append(str(error))
    assert len(messages) > header // 4
    assert all("small.gguf" in message and "\n" not in message for message in messages)


def patched(at: int, layout: str, value: int) -> Rewrite:
    packed = struct.pack(layout, value)
    return lambda content: content[:at] + packed + content[at + len(packed) :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"PK\x03\x04" + content[4:], "not a GGUF file"),
        (lambda content: b"", "empty"),
        (patched(4, "<I", 1), "version 1"),
        (patched(4, ">I", 3), "big-endian"),
        (patched(8, "<Q", 2**60), "tensors announced"),
        (patched(16, "<Q", 2**60), "metadata entries announced"),
        (patched(24, "<Q", 2**63), "truncated"),
        (lambda content: content[:-40], "fetch the file again"),
        (lambda content: content.replace(b"Q4_1", b"Q8_0"), "'Q8_0' is in the table twice"),
        (lambda content: content.replace(b"i16", b"u16"), "'u16' is empty or there twice"),
        (lambda content: content.replace(b"texts", b"\xff\xff\xff\xff\xff"), "not UTF-8"),
    ],
)
def test_what_is_wrong_is_named(small: Path, damage: Rewrite, message: str) -> None:
    small.write_bytes(damage(small.read_bytes()))
    with pytest.raises(ModelFileError, match=message):
        GGUFFile.open(small)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", 10, "has type Q2_K"),
        ("kind", 77, "has type number 77"),
        ("offset", 8, "expected a multiple of 32"),
        ("offset", 2**40, "fetch the file again"),
        ("columns", 2**62, "fetch the file again"),
        ("rows", 0, "positive sizes"),
        ("dimensions", 9, "9 dimensions"),
    ],
)
def test_a_wrong_entry_names_its_tensor(small: Path, field: str, value: int, message: str) -> None:
    """The entry of `matrix`: name, dimensions u32, columns u64, rows u64, kind u32, offset u64."""
    content = small.read_bytes()
    start = content.index(b"matrix") + len("matrix")
    at = {"dimensions": 0, "columns": 4, "rows": 12, "kind": 20, "offset": 24}[field]
    layout = "<I" if field in ("kind", "dimensions") else "<Q"
    small.write_bytes(patched(start + at, layout, value)(content))
    with pytest.raises(ModelFileError, match=f"'matrix'.*{message}"):
        GGUFFile.open(small)


def test_tensors_may_not_overlap(small: Path) -> None:
    content = small.read_bytes()
    at = content.index(b"half") + len("half") + 4 + 16 + 4
    small.write_bytes(patched(at, "<Q", 32)(content))
    with pytest.raises(ModelFileError, match=r"'half'.* overlaps 'matrix'"):
        GGUFFile.open(small)


@pytest.mark.parametrize("opened", [0, 2])
def test_a_split_model_is_one(opened: int, tmp_path: Path, rng: np.random.Generator) -> None:
    values = [rng.standard_normal((4, 32), np.float32) for _ in range(3)]
    paths = [tmp_path / f"big-{n + 1:05}-of-00003.gguf" for n in range(3)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_tensor(f"tensor {number}", values[number])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    file = GGUFFile.open(paths[opened])
    assert file.path == paths[0]
    assert file.metadata["split.no"] == 0
    for number, expected in enumerate(values):
        np.testing.assert_array_equal(file.f32(f"tensor {number}"), expected)
    paths[1].unlink()
    with pytest.raises(ModelNotFound, match="00002-of-00003"):
        GGUFFile.open(paths[0])


def test_a_part_alone_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("tensor", rng.standard_normal((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="split into 2 files, found 1"):
        GGUFFile.open(tmp_path / "part.gguf")


def test_fingerprints_tell_models_apart(tmp_path: Path, rng: np.random.Generator) -> None:
    first = GGUFFile.open(write(tmp_path / "first.gguf", rng)).fingerprint()
    other = GGUFFile.open(write(tmp_path / "other.gguf", rng)).fingerprint()
    copy = tmp_path / "copy.gguf"
    copy.write_bytes((tmp_path / "first.gguf").read_bytes())
    assert first != other
    assert GGUFFile.open(copy).fingerprint() == first


def test_a_folder_or_nothing_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelNotFound):
            GGUFFile.open(path)
