"""Tiny random models: the logits are those of transformers, whatever the batch looks like."""

from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from tests.models import hf
from tests.models.paged import PagedSequences, Part

from octavo.models.decoder import Decoder
from octavo.models.loader import load_model
from octavo.ops.api import F32, Ops
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps

LENGTH = 83

CASES = [
    (kind, form)
    for kind in hf.KINDS
    for form in ("single", "sharded", "gguf")
    if (kind, form) != ("llama-gelu", "gguf")  # GGUF's llama has no key for the activation
]


def make_ops(name: str) -> Ops:
    return ReferenceOps() if name == "reference" else NativeOps(threads=2)


def saved(model: object, folder: Path, form: str) -> Path:
    """The model on disk, as a folder of safetensors or as a GGUF file."""
    if form == "gguf":
        path = folder / "tiny.gguf"
        hf.write_gguf(model, path)
        return path
    model.save_pretrained(folder, max_shard_size="60KB" if form == "sharded" else "1GB")
    return folder


def tiny(rng: np.random.Generator, folder: Path, ops: Ops, kind: str = "llama") -> Decoder:
    path = saved(hf.random_model(rng, kind), folder, "single")
    return load_model(path, ops, 256).decoder


def prefill(decoder: Decoder, rng: np.random.Generator, tokens: list[int], **pool: object) -> F32:
    sequences = PagedSequences(decoder, rng, [len(tokens)], **pool)
    return sequences.feed(0, tokens, chunk=len(tokens))


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, hf.SIZES["vocab_size"], count).tolist()


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_logits_are_those_of_transformers(
    kind: str, form: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    """With float64 ops and a float32 pool nothing is rounded but in transformers itself.

    Its float32 sums leave 3e-6 of the logits' deviation (the largest of 8 models); the bound gives
    ten times that, and a wrong switch makes a thousand times more.
    """
    reference = hf.random_model(rng, kind)
    decoder = load_model(saved(reference, tmp_path, form), ReferenceOps(), 256).decoder
    tokens = random_tokens(rng, LENGTH)
    found = prefill(decoder, rng, tokens, dtype=np.float32)
    expected = hf.logits(reference, tokens)
    np.testing.assert_allclose(found, expected, atol=3e-5 * expected.std(), rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_native_logits_are_near(kind: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Keys and values in bfloat16 leave 0.15 % of the logits' deviation, 1 % at worst (8 models).

    Sets that multiply in bfloat16 round activations too, by 2^-9 seven times a layer.
    """
    reference = hf.random_model(rng, kind)
    decoder = load_model(saved(reference, tmp_path, "single"), NativeOps(threads=2), 256).decoder
    tokens = random_tokens(rng, LENGTH)
    expected = hf.logits(reference, tokens)
    error = prefill(decoder, rng, tokens) - expected
    assert np.sqrt(np.mean(error**2)) <= 0.01 * expected.std()
    assert np.abs(error).max() <= 0.08 * expected.std()


@pytest.mark.parametrize("name", ["reference", "native"])
def test_keys_and_values_of_int8_are_near(
    name: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    """16 numbers with one scale leave 0.4 % of the logits' deviation, 2.5 % at worst (7 models)."""
    reference = hf.random_model(rng, "llama")
    decoder = load_model(saved(reference, tmp_path, "single"), make_ops(name), 256).decoder
    tokens = random_tokens(rng, LENGTH)
    expected = hf.logits(reference, tokens)
    error = prefill(decoder, rng, tokens, dtype=np.uint8) - expected
    assert np.sqrt(np.mean(error**2)) <= 0.01 * expected.std()
    assert np.abs(error).max() <= 0.08 * expected.std()


@pytest.mark.parametrize("name", ["reference", "native"])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [bfloat16, np.uint8])
def test_chunks_and_decode_give_the_bits_of_one_prefill(
    name: str, block_size: int, dtype: type, rng: np.random.Generator, tmp_path: Path
) -> None:
    decoder = tiny(rng, tmp_path, make_ops(name))
    tokens = random_tokens(rng, LENGTH)
    whole = prefill(decoder, rng, tokens, block_size=block_size, dtype=dtype)
    for chunk in (1, 7, 16, 50):
        sequences = PagedSequences(decoder, rng, [LENGTH], block_size=block_size, dtype=dtype)
        assert np.array_equal(sequences.feed(0, tokens, chunk=chunk), whole), chunk


@pytest.mark.parametrize("name", ["reference", "native"])
def test_company_does_not_change_a_bit(name: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Prefill of one, a chunk of another and decode of a third in one batch, in any order."""
    decoder = tiny(rng, tmp_path, make_ops(name), "qwen2")
    texts = [random_tokens(rng, length) for length in (40, 61, 23)]
    alone = [prefill(decoder, rng, tokens) for tokens in texts]
    sequences = PagedSequences(decoder, rng, [len(tokens) for tokens in texts])
    sequences.step([Part(1, 0, texts[1][:30]), Part(2, 0, texts[2][:22])])
    parts = [Part(0, 0, texts[0]), Part(1, 30, texts[1][30:]), Part(2, 22, texts[2][22:])]
    order = rng.permutation(3)
    for index, logits in zip(order, sequences.step([parts[i] for i in order]), strict=True):
        part = parts[index]
        assert np.array_equal(logits, alone[index][part.start :])


def test_scratch_is_what_the_buffers_take(rng: np.random.Generator, tmp_path: Path) -> None:
    path = saved(hf.random_model(rng, "llama"), tmp_path, "single")
    small, large = (load_model(path, ReferenceOps(), n, max_rows=4).decoder for n in (64, 128))
    spec = small.spec
    row = spec.hidden_size + spec.qkv_size + spec.heads * spec.head_dim + spec.ffn_size
    assert large.scratch_bytes - small.scratch_bytes == 64 * 4 * row


def test_a_shorter_context_is_kept(rng: np.random.Generator, tmp_path: Path) -> None:
    path = saved(hf.random_model(rng, "llama"), tmp_path, "single")
    model = load_model(path, ReferenceOps(), 64, max_context=100)
    assert (model.decoder.max_context, model.spec.max_context) == (100, 512)
    assert load_model(path, ReferenceOps(), 64, max_context=10_000).decoder.max_context == 512


def test_tied_embeddings_are_packed_once(rng: np.random.Generator, tmp_path: Path) -> None:
    weights = tiny(rng, tmp_path, ReferenceOps(), "llama-tied").weights
    assert weights.head is weights.embedding
    counted = weights.embedding.nbytes + sum(layer.nbytes for layer in weights.layers)
    assert weights.nbytes == counted + weights.final_norm.weight.nbytes
