"""The safetensors reader: one file or shards, and one clear error for whatever is wrong."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from octavo.errors import ModelFileError, ModelNotFound
from octavo.models.weights.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsCheckpoint
from octavo.ops.encodings import rounded

Tensors = dict[str, np.ndarray]


def random_tensors(rng: np.random.Generator) -> Tensors:
    values = rng.standard_normal((3, 7), np.float32)
    return {
        "brain": values.astype(ml_dtypes.bfloat16),
        "half": rng.standard_normal(5, np.float32).astype(np.float16),
        "single": rng.standard_normal((2, 3, 4), np.float32),
    }


def write(folder: Path, tensors: Tensors) -> Path:
    safetensors.numpy.save_file(tensors, folder / SINGLE_NAME)
    return folder / SINGLE_NAME


def write_header(folder: Path, header: Any, data: bytes = bytes(range(64))) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE_NAME).write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_all(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint.open(folder)
    for name in checkpoint.tensors:
        rounded(checkpoint.encoded(name))
    checkpoint.fingerprint()


def test_values_are_what_was_saved(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = random_tensors(rng)
    write(tmp_path, tensors)
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    assert checkpoint.shapes == {name: values.shape for name, values in tensors.items()}
    assert checkpoint.stored_as == "F32"
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.f32(name), values.astype(np.float32))
        np.testing.assert_array_equal(
            rounded(checkpoint.encoded(name)).reshape(values.shape).view(np.uint16),
            values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16),
        )


@pytest.mark.parametrize(
    ("dtype", "bits"), [("F32", np.uint32(0x7F800001)), ("F16", np.uint16(0x7C01))]
)
def test_a_signalling_nan_is_read_as_a_nan(tmp_path: Path, dtype: str, bits: np.generic) -> None:
    """Whoever checks the weights names it; reading them says nothing."""
    data = bits.tobytes()
    entry = {"dtype": dtype, "shape": [1], "data_offsets": [0, len(data)]}
    write_header(tmp_path, {"x": entry}, data)
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    assert np.isnan(checkpoint.f32("x")).all()
    assert np.isnan(rounded(checkpoint.encoded("x")).astype(np.float32)).all()


def test_shards_are_one_model(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = random_tensors(rng)
    weight_map = {}
    for number, (name, values) in enumerate(tensors.items()):
        weight_map[name] = f"model-{number}.safetensors"
        safetensors.numpy.save_file({name: values}, tmp_path / weight_map[name])
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.f32(name), values.astype(np.float32))

    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="model-1"):
        SafetensorsCheckpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {"brain": "../elsewhere.safetensors"}}, "beside the index"),
        ({"weight_map": {"brain": 7}}, "beside the index"),
        ({"weight_map": {"absent": SINGLE_NAME}}, "'absent': expected in .*, found nowhere"),
    ],
)
def test_a_wrong_index_is_refused(
    index: Any, message: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    write(tmp_path, random_tensors(rng))
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=message):
        SafetensorsCheckpoint.open(tmp_path)


def test_a_cut_file_says_so(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write(tmp_path, random_tensors(rng))
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        with pytest.raises(ModelFileError, match=SINGLE_NAME):
            read_all(tmp_path)


def test_a_flipped_byte_is_harmless_or_a_model_file_error(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write(tmp_path, random_tensors(rng))
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    messages = []
    for position in range(header):
        damaged = bytearray(content)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            read_all(tmp_path)
        except ModelFileError as error:
            messages.append(str(error))
    assert len(messages) > header // 4
    assert all("\n" not in message for message in messages)


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([], "not an object"),
        ({}, "no tensors"),
        ({"x": 1}, "'x': expected dtype, shape"),
        (entry(dtype="I8"), "'x' has type I8"),
        (entry(shape=[2, -2]), "'x' has shape"),
        (entry(shape=[2, True]), "expected 8 bytes"),
        (entry(data_offsets=[0, 12]), "'x': expected 16 bytes .* offsets 0 to 12"),
        (entry(data_offsets=[-16, 0]), "offsets -16 to 0"),
        (entry(data_offsets=[60, 76]), "'x': expected 16 bytes at byte .* truncated"),
        ({**entry(), "y": entry()["x"]}, "'y' overlaps"),
    ],
)
def test_what_is_wrong_is_named(header: Any, message: str, tmp_path: Path) -> None:
    write_header(tmp_path, header)
    with pytest.raises(ModelFileError, match=message):
        SafetensorsCheckpoint.open(tmp_path)


def test_unaligned_tensors_are_read(tmp_path: Path, rng: np.random.Generator) -> None:
    values = rng.standard_normal(4, np.float32)
    header = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [1, 17]}}
    text = json.dumps(header).encode()
    write_header(tmp_path, text, b"\xff" + values.tobytes())
    np.testing.assert_array_equal(SafetensorsCheckpoint.open(tmp_path).f32("x"), values)


def test_fingerprints_tell_models_apart(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = random_tensors(rng)
    write(tmp_path, tensors)
    first = SafetensorsCheckpoint.open(tmp_path).fingerprint()
    assert SafetensorsCheckpoint.open(tmp_path).fingerprint() == first
    tensors["single"] = tensors["single"] + 1
    write(tmp_path, tensors)
    assert SafetensorsCheckpoint.open(tmp_path).fingerprint() != first


def resident_bytes(path: Path) -> int:
    """How much of a mapped file counts as memory of this process."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_what_is_forgotten_takes_no_memory(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = {"x": rng.standard_normal((1024, 1024), np.float32)}
    path = write(tmp_path, tensors)
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    checkpoint.f32("x")
    assert resident_bytes(path) >= tensors["x"].nbytes
    checkpoint.forget("x")
    assert resident_bytes(path) < 200_000
    np.testing.assert_array_equal(checkpoint.f32("x"), tensors["x"])
