"""Layers that see the last positions only: how they are grouped, and what they compute."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.models import hf
from tests.models.paged import PagedSequences

from octavo.models.decoder import Decoder
from octavo.models.loader import load_model
from octavo.models.spec import layer_groups
from octavo.ops.api import F32, Ops
from octavo.ops.native import NativeOps, available_sets
from octavo.ops.reference import ReferenceOps

LENGTH = 83


def gemma3(layers: int) -> list[int | None]:
    """Five layers that see 512 positions, then one that sees all."""
    return [None if layer % 6 == 5 else 512 for layer in range(layers)]


@pytest.mark.parametrize(
    ("layers", "size", "groups"), [(18, 3, 6), (26, 4, 7), (34, 5, 7), (48, 8, 6), (62, 10, 7)]
)
def test_the_groups_of_gemma_3(layers: int, size: int, groups: int) -> None:
    """Its five sizes: the layers that see all form one group, the others as many as it takes."""
    found = layer_groups(gemma3(layers))
    assert len(found) == groups
    assert [group.window for group in found] == [None] + [512] * (groups - 1)
    assert found[0].layers == tuple(range(5, layers, 6))
    assert len(found[0].layers) == size
    assert all(len(group.layers) == size for group in found[:-1])
    assert 8 * (size - len(found[-1].layers)) <= size * groups
    members = [layer for group in found for layer in group.layers]
    assert sorted(members) == list(range(layers))


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None] * 3, [(None, (0, 1, 2))]),
        ([7] * 3, [(7, (0, 1, 2))]),
        ([7, None] * 2, [(None, (1, 3)), (7, (0, 2))]),
        ([8, 24, 8, 24], [(24, (1, 3)), (8, (0, 2))]),
        ([None, None, None, 5], [(None, (0,)), (None, (1,)), (None, (2,)), (5, (3,))]),
    ],
)
def test_layers_of_one_kind_stand_together(windows: list[int | None], expected: object) -> None:
    assert [(group.window, group.layers) for group in layer_groups(windows)] == expected


def with_windows(decoder: Decoder, windows: list[int | None]) -> Decoder:
    """The same weights, with layers that see so much."""
    spec = replace(decoder.spec, groups=layer_groups(windows))
    return Decoder(
        spec, decoder.weights, decoder.ops, max_tokens=256, max_rows=256, max_context=512
    )


def tiny(rng: np.random.Generator, folder: Path, ops: Ops, windows: list[int | None]) -> Decoder:
    hf.random_model(rng, "llama").save_pretrained(folder)
    return with_windows(load_model(folder, ops, 256).decoder, windows)


def fed(decoder: Decoder, rng: np.random.Generator, tokens: list[int], chunk: int) -> F32:
    """The logits of every position; before each step what nobody needs any more is lost."""
    sequences = PagedSequences(decoder, rng, [len(tokens)])
    outs = []
    for start in range(0, len(tokens), chunk):
        sequences.give_back(0, start)
        part = tokens[start : start + chunk]
        outs.append(sequences.feed(0, part, chunk=chunk, start=start))
    return np.concatenate(outs)


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, hf.SIZES["vocab_size"], count).tolist()


def sliding(kind: str, rng: np.random.Generator) -> transformers.PreTrainedModel:
    """A random model of transformers some or all of whose layers see 9 positions."""
    model = hf.random_model(rng, kind)
    config = model.config
    config.sliding_window = 9
    if kind == "qwen2":
        config.use_sliding_window = True
        config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
        for layer, layer_type in zip(model.model.layers, config.layer_types, strict=True):
            layer.attention_type = layer_type
            layer.self_attn.layer_type = layer_type
            layer.self_attn.sliding_window = 9 if "sliding" in layer_type else None
    fresh = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    fresh.load_state_dict(model.state_dict())
    return fresh.eval().float()


@pytest.mark.parametrize(("kind", "windows"), [("mistral", [9] * 3), ("qwen2", [9, None, 9])])
def test_logits_are_those_of_transformers(
    kind: str, windows: list[int | None], rng: np.random.Generator, tmp_path: Path
) -> None:
    """Its window counts the position itself too. The bound is that of layers that see all."""
    reference = sliding(kind, rng)
    full = hf.random_model(rng, kind)
    with torch.no_grad():
        full.load_state_dict(reference.state_dict())
    full.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, ReferenceOps(), 256).decoder
    tokens = random_tokens(rng, LENGTH)
    expected = hf.logits(reference, tokens)
    sequences = PagedSequences(with_windows(decoder, windows), rng, [LENGTH], dtype=np.float32)
    found = sequences.feed(0, tokens, chunk=LENGTH)
    np.testing.assert_allclose(found, expected, atol=3e-5 * expected.std(), rtol=0)
    blind = PagedSequences(decoder, rng, [LENGTH], dtype=np.float32).feed(0, tokens, chunk=LENGTH)
    assert np.abs(blind - expected).max() > 0.1 * expected.std()


WINDOWS: list[list[int | None]] = [[20, None, 20], [7, 40, 7], [33, 33, 33]]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("isa", available_sets())
def test_same_bits_in_chunks_of_any_size(
    isa: str, windows: list[int | None], rng: np.random.Generator, tmp_path: Path
) -> None:
    decoder = tiny(rng, tmp_path, NativeOps(threads=2, isa=isa), windows)
    tokens = random_tokens(rng, 150)
    whole = fed(decoder, rng, tokens, 256)
    for chunk in (1, 16, 64):
        assert (fed(decoder, rng, tokens, chunk) == whole).all()


@pytest.mark.parametrize("windows", WINDOWS)
def test_native_logits_are_near_the_reference(
    windows: list[int | None], rng: np.random.Generator, tmp_path: Path
) -> None:
    native = tiny(rng, tmp_path, NativeOps(threads=2), windows)
    truth = with_windows(load_model(tmp_path, ReferenceOps(), 256).decoder, windows)
    tokens = random_tokens(rng, LENGTH)
    found, expected = fed(native, rng, tokens, 16), fed(truth, rng, tokens, 32)
    assert np.abs(found - expected).std() < 0.02 * expected.std()
