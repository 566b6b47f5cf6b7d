"""Measuring changes nothing: the same results, and every call is told with its cost."""

from pathlib import Path

import numpy as np
import pytest
from tests.models import hf
from tests.models.paged import PagedSequences

from octavo.models.loader import load_model
from octavo.ops.api import Entries, Penalties
from octavo.ops.measured import Measured, MeasuredOps
from octavo.ops.native import NativeOps


@pytest.mark.parametrize(
    ("quantization", "form"), [("none", "bf16"), ("int8", "int8"), ("int4", "int4")]
)
def test_a_model_gives_the_same_bits_and_tells_each_call(
    quantization: str, form: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    hf.random_model(rng, "llama").save_pretrained(tmp_path)
    plain, told = NativeOps(threads=2), []
    ops = MeasuredOps(NativeOps(threads=2), told.append)
    assert ops.name == plain.name
    models = [load_model(tmp_path, one, 64, quantization=quantization) for one in (plain, ops)]
    tokens = rng.integers(0, hf.SIZES["vocab_size"], 21).tolist()
    state = rng.bit_generator.state
    logits = []
    for model in models:
        rng.bit_generator.state = state
        logits.append(PagedSequences(model.decoder, rng, [21]).feed(0, tokens, chunk=21).copy())
    assert np.array_equal(*logits)

    layer = ["linear", "rope_write_kv", "paged_attention", "linear", "linear", "linear"]
    assert [call.op for call in told] == ["embed", *layer * 3, "take_rows", "linear"]
    ends = [time for call in told for time in (call.began_s, call.ended_s)]
    assert ends == sorted(ends)
    weights = models[1].decoder.weights
    matrices = [call for call in told if call.op == "linear"]
    used = [matrix for layer in weights.layers for matrix in layer.matrices]
    assert [call.weight for call in matrices] == [*used, weights.head]
    assert {call.form for call in matrices[:-1]} == {form}
    for call, weight in zip(matrices[:-1], used, strict=True):
        assert call.cost.operations == 2 * 21 * weight.rows * weight.columns
        assert call.cost.size_bytes > weight.nbytes


def test_ops_of_the_sampler_and_of_the_pool_are_told(rng: np.random.Generator) -> None:
    told: list[Measured] = []
    ops = MeasuredOps(NativeOps(threads=1), told.append)
    logits = rng.standard_normal((2, 30), np.float32)
    best, logprob = np.empty(2, np.int32), np.empty(2, np.float32)
    ops.argmax(logits, best, logprob)
    assert best.tolist() == logits.argmax(axis=1).tolist()
    rows, one = np.array([1], np.int32), np.ones(1, np.float32)
    ids, values = np.empty((1, 3), np.int32), np.empty((1, 3), np.float32)
    ops.likeliest(logits, rows, ids, values)
    assert ids[0].tolist() == np.argsort(-logits[1])[:3].tolist()
    entries = Entries(rows, np.array([0, 1], np.int32), best[1:])
    ops.add_bias(logits, entries, one, one.copy())
    assert logits[1, best[1]] == values[0, 0] + 1
    ops.penalise(logits, entries, Penalties(rows, 2 * one, one, one), one.copy())
    assert logits[1, best[1]] == (values[0, 0] + 1) / 2 - 2
    ops.mask(logits, rows, np.zeros((1, 1), np.int32))
    assert not np.isfinite(logits[1]).any()
    assert [(call.op, call.cost.size_bytes, call.weight) for call in told] == [
        ("argmax", 240, None),
        ("likeliest", 144, None),
        ("add_bias", 20, None),
        ("penalise", 20, None),
        ("mask", 124, None),
    ]
