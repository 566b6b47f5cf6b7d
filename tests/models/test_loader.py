"""Loading: every tensor has its place, and whatever does not fit is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.models import hf

from octavo.errors import ModelFileError, ModelNotFound, OctavoError
from octavo.models.loader import load_model, open_model, read_spec
from octavo.models.weights import pack
from octavo.models.weights.files import Checkpoint
from octavo.models.weights.pack import halve_pairs
from octavo.ops.api import Encoded
from octavo.ops.reference import ReferenceOps

Tensors = dict[str, np.ndarray]


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    hf.random_model(rng, "llama-tied").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


def load_error(path: Path) -> str:
    with pytest.raises(OctavoError) as caught:
        load_model(path, ReferenceOps(), 16)
    assert isinstance(caught.value, ModelFileError | ModelNotFound)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "'model.layers.1.mlp.up_proj.weight' is missing" in load_error(folder)


def test_a_tensor_too_many_is_named(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert "'model.layers.0.self_attn.q_norm.weight' [16] has no place" in load_error(folder)


def test_a_layer_too_many_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    assert "model.layers.2." in load_error(folder)


@pytest.mark.parametrize("name", ["mlp.down_proj", "self_attn.k_proj", "input_layernorm"])
def test_a_wrong_shape_is_named(name: str, folder: Path) -> None:
    full = f"model.layers.2.{name}.weight"
    found: list[int] = []

    def widen(tensors: Tensors) -> None:
        tensors[full] = np.concatenate([tensors[full], tensors[full][:1]])
        found.extend(tensors[full].shape)

    rewrite(folder, widen)
    expected = [found[0] - 1, *found[1:]]
    assert f"{full!r}: expected shape {expected}, found {found}" in load_error(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1.self_attn.o_proj"])
def test_weights_that_are_not_finite_are_refused(
    name: str, value: float, folder: Path, rng: np.random.Generator
) -> None:
    """3.4e38 is finite, but not once rounded to bfloat16."""

    def spoil(tensors: Tensors) -> None:
        matrix = tensors[f"{name}.weight"]
        matrix.flat[rng.integers(matrix.size)] = value

    rewrite(folder, spoil)
    assert f"'{name}.weight' holds NaN or infinite values" in load_error(folder)


def test_a_norm_that_is_not_finite_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].__setitem__(3, np.nan))
    assert "'model.norm.weight' holds NaN" in load_error(folder)


def test_a_tied_head_may_be_stored_twice_if_it_is_the_same(folder: Path) -> None:
    def repeat(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    rewrite(folder, repeat)
    weights = load_model(folder, ReferenceOps(), 16).decoder.weights
    assert weights.head is weights.embedding

    rewrite(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((5, 5), 9.0))
    assert "'lm_head.weight' [97, 48] has no place" in load_error(folder)


def test_rotary_buffers_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    buffers = {
        f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for n in range(3)
    }
    rewrite(folder, lambda tensors: tensors.update(buffers))
    assert load_model(folder, ReferenceOps(), 16).spec.layers == 3


def test_read_spec_is_the_spec_of_the_model(folder: Path) -> None:
    assert read_spec(folder) == load_model(folder, ReferenceOps(), 16).spec


def test_an_open_model_loads_without_its_path(folder: Path) -> None:
    opened = open_model(folder)
    (folder / "config.json").unlink()
    assert load_model(opened, ReferenceOps(), 16).spec == opened.spec


class Forgetting:
    """A checkpoint that writes down what it was told to forget."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.forgotten: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def forget(self, name: str) -> None:
        self.forgotten.append(name)
        self._checkpoint.forget(name)


def test_matrices_are_given_up_and_tables_slab_by_slab(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "SLAB_BYTES", 1000)
    opened = open_model(folder)
    checkpoint = Forgetting(opened.checkpoint)
    weights = load_model(replace(opened, checkpoint=checkpoint), ReferenceOps(), 16).decoder.weights
    matrices = {name for name, shape in opened.checkpoint.shapes.items() if len(shape) == 2}
    assert set(checkpoint.forgotten) == matrices
    table = opened.names.embedding
    slabs = opened.checkpoint.encoded(table).stored.nbytes // 2000
    assert checkpoint.forgotten.count(table) >= min(slabs, 4) > 1
    expected = load_model(folder, ReferenceOps(), 16).decoder.weights.embedding
    np.testing.assert_array_equal(weights.embedding.values, expected.values)


def test_weight_bytes_are_those_of_the_packed_matrices(folder: Path) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    matrices = sum(values.size for values in tensors.values() if values.ndim == 2)
    norms = sum(values.size for values in tensors.values() if values.ndim == 1)
    model = load_model(folder, ReferenceOps(np.float64), 16)
    assert model.weight_bytes == 8 * matrices + 4 * norms


def test_a_folder_with_one_gguf_is_that_model(tmp_path: Path, rng: np.random.Generator) -> None:
    reference = hf.random_model(rng, "llama")
    hf.write_gguf(reference, tmp_path / "first.gguf")
    assert read_spec(tmp_path) == read_spec(tmp_path / "first.gguf")
    hf.write_gguf(reference, tmp_path / "second.gguf")
    assert "holds several models: first.gguf, second.gguf" in load_error(tmp_path)


def test_a_path_without_a_model_is_not_found(tmp_path: Path) -> None:
    assert "does not exist" in load_error(tmp_path / "absent")
    assert "neither config.json nor a GGUF file" in load_error(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"null"])
def test_a_broken_config_is_named(content: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    assert "config.json" in load_error(folder)


def test_rotary_pairs_become_halves(rng: np.random.Generator) -> None:
    """Row 2i + h of a head moves to row i + h · E / 2."""
    heads, size = 3, 8
    stored = rng.standard_normal((heads * size, 5), np.float32)
    moved = halve_pairs(Encoded("F32", 5, stored.view(np.uint8)), heads)
    assert isinstance(moved, Encoded)
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                row = moved.stored.view(np.float32)[head * size + pair + half * size // 2]
                np.testing.assert_array_equal(row, stored[head * size + 2 * pair + half])
