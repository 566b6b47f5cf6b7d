"""In what form matrices are kept, and that they reach the kernels so."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
from tests.models import hf
from tests.models.paged import PagedSequences
from tests.ops.arrays import expands

from octavo.config import Quantization
from octavo.errors import ModelFileError
from octavo.models.loader import load_model, open_model
from octavo.models.weights.quantise import form_of
from octavo.ops.api import BF16_FORM, F32, INT4, INT4_OFFSETS, INT6, INT6_OFFSETS, INT8, U8, Form
from octavo.ops.encodings import ENCODINGS
from octavo.ops.integers import quantise
from octavo.ops.native import NativeOps, available_sets
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
        (["Q6_K"], "stored", INT6),
        (["Q5_0"], "stored", INT6),
        (["Q5_K"], "stored", INT6_OFFSETS),
        (["Q5_1", "Q5_0", "Q4_K"], "stored", INT6_OFFSETS),
        (["Q6_K", "Q4_0"], "stored", INT6),
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


MIXES = {
    "Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "": "Q4_K"},
    "Q5_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q5_K"},
    "narrow Q5_K_M": {"attn_v": "Q8_0", "output": "Q8_0", "": "Q5_1"},
    "narrow Q4_K_M": {"attn_k": "Q4_1", "ffn_up": "Q5_1", "token_embd": "Q8_0", "": "Q5_0"},
}
"""What llama.cpp's quantiser mixes, the last two where rows are no multiple of 256, and worse."""

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}


def mixed(rng: np.random.Generator, path: Path, mix: str) -> dict[str, F32]:
    """Write a model of random blocks. Gives its matrices, as the gguf package reads them."""
    blocks, matrices = {}, {}
    model = hf.random_model(rng, "llama", **WIDE)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            tensor = hf.gguf_name(name)
            kind = next(kind for part, kind in MIXES[mix].items() if part in tensor)
            raw = small_blocks(rng, kind, *parameter.shape)
            blocks[tensor] = kind, raw
            matrices[tensor] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    hf.write_gguf(model, path, blocks)
    return matrices


def small_blocks(rng: np.random.Generator, kind: str, rows: int, columns: int) -> U8:
    """Random integers, of a size that keeps products near 1; offsets centre them."""
    encoding = ENCODINGS[kind]
    blocks = rows * columns // encoding.block
    raw = rng.integers(0, 256, (blocks, encoding.block_bytes), np.uint8)
    at, largest, middle = SCALES[kind]
    scales = (rng.uniform(0.5, 1.5, blocks) / (largest * columns**0.5)).astype(np.float16)
    raw[:, at : at + 2] = scales[:, None].view(np.uint8)
    if middle:
        offsets = (scales * np.float16(middle)).astype(np.float16)
        raw[:, at + 2 : at + 4] = offsets[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


SCALES = {
    "Q8_0": (0, 70, 0),
    "Q6_K": (208, 18 * 70, 0),
    "Q5_0": (0, 9, 0),
    "Q5_1": (0, 9, -15),
    "Q5_K": (0, 9 * 30, 15),
    "Q4_1": (0, 5, -7),
    "Q4_K": (0, 5 * 30, 7),
}
"""Where a block has its scale; the size of its integers; how much larger what offsets them is."""


@pytest.mark.parametrize("mix", MIXES)
def test_integers_of_a_mixed_file_are_kept(
    mix: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    """No matrix becomes bfloat16, nor what is stacked with it; values are those of the file."""
    path = tmp_path / "mixed.gguf"
    matrices = mixed(rng, path, mix)
    opened = open_model(path)
    weights = load_model(
        opened, ReferenceOps(np.float32), 16, quantization="stored"
    ).decoder.weights
    bits = 8 * opened.weights_bytes("stored") / sum(matrix.size for matrix in matrices.values())
    assert bits < (8.2 if "K_M" in mix else 8.6)
    slack = 5e-3 if mix == "Q4_K_M" else 0  # factors of Q4_K are float16
    for index, layer in enumerate(weights.layers):
        found = {
            "attn_qkv": np.concatenate([part.values for part in layer.qkv]),
            "attn_output": layer.output.values,
            "ffn_gate_up": layer.gate_up.values,
            "ffn_down": layer.down.values,
        }
        part = {name: matrices[f"blk.{index}.{name}.weight"] for name in NAMES}
        part["attn_qkv"] = np.concatenate(
            [halved(part["attn_q"], 16), halved(part["attn_k"], 4), part["attn_v"]]
        )
        part["ffn_gate_up"] = np.concatenate([part["ffn_gate"], part["ffn_up"]])
        for name, values in found.items():
            np.testing.assert_allclose(values, part[name], rtol=0, atol=slack * part[name].std())
    for name, table in (("token_embd", weights.embedding), ("output", weights.head)):
        expected = matrices[f"{name}.weight"]
        np.testing.assert_allclose(table.values, expected, rtol=0, atol=slack * expected.std())


NAMES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def halved(matrix: F32, heads: int) -> F32:
    """Rows of rotary pairs as rows of halves."""
    return np.concatenate([np.concatenate([h[0::2], h[1::2]]) for h in np.split(matrix, heads)])


@pytest.mark.parametrize("mix", MIXES)
def test_matrices_of_several_forms_side_by_side(
    mix: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Logits are near those of float64 with the same weights and activations in eight bits, which
    sets that expand weights do not round so, and a step of one token has the bits of a prefill."""
    path = tmp_path / "mixed.gguf"
    mixed(rng, path, mix)
    tokens = rng.integers(0, hf.SIZES["vocab_size"], 40).tolist()
    found = []
    for ops in (NativeOps(threads=2), ReferenceOps()):
        decoder = load_model(path, ops, 64, quantization="stored").decoder
        logits = PagedSequences(decoder, rng, [40]).feed(0, tokens, chunk=40).copy()
        assert np.array_equal(PagedSequences(decoder, rng, [40]).feed(0, tokens, chunk=1), logits)
        found.append(logits)
    error = found[0] - found[1]
    assert np.isfinite(found[0]).all()
    slack = 0.06 if expands(available_sets()[0]) else 0.02
    assert np.sqrt(np.mean(error**2)) <= slack * found[1].std()
