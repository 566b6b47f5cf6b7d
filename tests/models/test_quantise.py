"""In what form matrices are kept, and that they reach the kernels so."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tests.models import hf

from octavo.config import Quantization
from octavo.errors import ModelFileError
from octavo.models.loader import load_model, open_model
from octavo.models.weights.quantise import form_of
from octavo.ops.api import BF16_FORM, INT4, INT4_OFFSETS, INT8, Form
from octavo.ops.integers import quantise
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps


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
