"""Matrices as integers: what they hold, how far they are from the floats, and who is kept how."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
from tests.models import hf
from tests.models.test_gguf import finite_blocks

from octavo.config import Quantization
from octavo.errors import ModelFileError
from octavo.models.loader import load_model, open_model
from octavo.models.weights.pack import halve_pairs
from octavo.models.weights.quantise import (
    BF16_FORM,
    INT4,
    INT4_OFFSETS,
    INT8,
    Form,
    form_of,
    quantise,
    widened,
)
from octavo.ops.api import Quantised
from octavo.ops.encodings import ENCODINGS, INTEGERS, dequantize, integers_of
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps


@pytest.mark.parametrize("columns", [32, 70, 256])
@pytest.mark.parametrize("size", [1e-5, 0.02, 3.0, 5e4])
def test_eight_bits_are_half_a_scale_from_the_floats(
    rng: np.random.Generator, columns: int, size: float
) -> None:
    rows = rng.standard_normal((50, columns), np.float32) * np.float32(size)
    rows[7] = 0
    matrix = quantise(rows, 8)
    error = np.abs(matrix.dequantised(np.float64) - rows)
    scales = np.repeat(matrix.scales.astype(np.float64), 32, axis=1)[:, :columns]
    assert (error <= scales * 0.5001).all()
    if size > 0.01:
        assert error.max() <= np.abs(rows).max() / 127 * 0.51


@pytest.mark.parametrize("columns", [32, 70, 256])
def test_four_bits_meet_the_largest_weight(rng: np.random.Generator, columns: int) -> None:
    rows = rng.standard_normal((50, columns), np.float32)
    rows[7] = 0
    matrix = quantise(rows, 4)
    values = matrix.dequantised(np.float64)
    scales = np.repeat(matrix.scales.astype(np.float64), 32, axis=1)[:, :columns]
    assert (np.abs(values - rows) <= np.abs(scales) * 1.001).all()
    assert (np.abs(values - rows) <= np.abs(scales) * 0.501).mean() > 0.98
    for group in range(columns // 32):
        part = np.s_[:, 32 * group : 32 * group + 32]
        largest = np.abs(rows[part]).argmax(axis=1)[:, None]
        found = np.take_along_axis(values[part], largest, axis=1)
        np.testing.assert_allclose(found, np.take_along_axis(rows[part], largest, 1), rtol=1e-3)


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_of_a_file_are_the_floats_of_a_file(kind: str, rng: np.random.Generator) -> None:
    encoding = ENCODINGS[kind]
    raw = finite_blocks(kind, rng.integers(0, 256, (60, encoding.block_bytes), np.uint8))
    expected = dequantize(kind, raw.reshape(-1)).reshape(15, -1)
    matrix = integers_of(kind, raw.reshape(-1), *expected.shape)
    if kind != "Q4_K":
        np.testing.assert_array_equal(matrix.dequantised(), expected)
        return
    # Both factors are rounded to float16; they may cancel, and huge ones overflow.
    usual = np.isfinite(matrix.scales) & np.isfinite(matrix.offsets)
    usual = np.repeat(usual, 32, axis=1)
    slack = np.repeat(15 * np.abs(matrix.scales.astype(np.float32)), 32, axis=1)
    slack += np.repeat(np.abs(matrix.offsets.astype(np.float32)), 32, axis=1)
    with np.errstate(invalid="ignore"):
        error = np.abs(matrix.dequantised() - expected)
    assert usual.mean() > 0.3
    assert (error[usual] <= slack[usual] * 2.0**-11 + 1e-6).all()


def test_four_bits_fit_into_eight(rng: np.random.Generator) -> None:
    matrix = quantise(rng.standard_normal((9, 70), np.float32), 4)
    np.testing.assert_array_equal(widened(matrix).dequantised(), matrix.dequantised())


def test_rotary_pairs_of_integers_become_halves(rng: np.random.Generator) -> None:
    rows = rng.standard_normal((24, 64), np.float32)
    moved = halve_pairs(quantise(rows, 4), 3)
    assert isinstance(moved, Quantised)
    expected = quantise(rows, 4).dequantised().reshape(3, 4, 2, 64).swapaxes(1, 2)
    np.testing.assert_array_equal(moved.dequantised(), expected.reshape(24, 64))


@pytest.mark.parametrize(
    ("kinds", "quantization", "form"),
    [
        (["Q4_0"], "none", BF16_FORM),
        (["BF16"], "stored", BF16_FORM),
        (["Q4_0"], "stored", INT4),
        (["Q4_1", "Q4_1"], "stored", INT4_OFFSETS),
        (["Q4_K", "Q4_1"], "stored", INT4_OFFSETS),
        (["Q8_0", "Q5_0", "Q4_0"], "stored", INT8),
        (["Q4_K", "Q6_K"], "stored", BF16_FORM),
        (["Q8_0", "Q4_1"], "stored", BF16_FORM),
        (["Q4_1"], "int8", INT8),
        (["F16", "F32"], "int8", INT8),
        (["BF16"], "int4", INT4),
        (["Q8_0", "Q4_1"], "int4", INT4),
        (["Q4_K"], "int4", INT4_OFFSETS),
    ],
)
def test_stacked_matrices_take_the_least_form_that_holds_them(
    kinds: list[str], quantization: Quantization, form: Form
) -> None:
    assert form_of(kinds, quantization) == form


def test_tables_keep_eight_bits() -> None:
    assert form_of(["BF16"], "int4", table=True) == INT8
    assert form_of(["Q4_0"], "stored", table=True) == INT4


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    hf.random_model(rng, "llama-tied").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("quantization", ["none", "stored", "int8", "int4"])
def test_memory_is_told_before_weights_are_read(
    folder: Path, rng: np.random.Generator, quantization: Quantization
) -> None:
    """But for the last page of each matrix."""
    file = folder / "model.gguf"
    hf.write_gguf(hf.random_model(rng, "llama"), file)
    for path in (folder, file):
        opened = open_model(path)
        model = load_model(opened, NativeOps(threads=1), 16, quantization=quantization)
        matrices = 2 + 4 * model.spec.layers
        told = opened.weights_bytes(quantization)
        assert told <= model.weight_bytes <= told + 4096 * matrices


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integers_reach_the_kernels(folder: Path, quantization: Quantization) -> None:
    """The weights of a loaded model are those of `quantise`, matrix by matrix."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    model = load_model(folder, ReferenceOps(np.float32), 16, quantization=quantization)
    bits = 8 if quantization == "int8" else 4
    down = tensors["model.layers.1.mlp.down_proj.weight"].astype(np.float32)
    found = model.decoder.weights.layers[1].down.values
    np.testing.assert_array_equal(found, quantise(down, bits).dequantised())
    table = tensors["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(
        model.decoder.weights.embedding.values, quantise(table, 8).dequantised()
    )


def test_weights_beyond_float16_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"].flat[5] = 1e37
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(ModelFileError, match=r"0\.mlp\.up_proj\.weight"):
        load_model(folder, ReferenceOps(), 16, quantization="int8")


def test_what_gguf_writes_is_what_runs(rng: np.random.Generator) -> None:
    """Weights quantised by the gguf package are not quantised again."""
    floats = rng.standard_normal((16, 64), np.float32)
    for kind in ("Q8_0", "Q4_0", "Q4_1"):
        number = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(floats, number)
        matrix = integers_of(kind, raw.reshape(-1), 16, 64)
        np.testing.assert_array_equal(
            matrix.dequantised(), gguf.quants.dequantize(raw, number).reshape(16, 64)
        )
