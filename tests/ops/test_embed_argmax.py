"""Packing, embedding and argmax: what goes in by index must come out by index."""

import ml_dtypes
import numpy as np
import pytest
from tests.ops.arrays import guarded, margin_is_kept, random_weight

from octavo.errors import ConfigError
from octavo.ops.api import F32, I32
from octavo.ops.native import NativeOps, available_sets
from octavo.ops.reference import ReferenceOps

SHAPES = [(1, 1), (16, 32), (33, 35), (250, 576)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unpack_gives_back_what_was_packed(
    rng: np.random.Generator, ops: NativeOps, rows: int, columns: int
) -> None:
    first, second = (random_weight(rng, rows, columns) for _ in range(2))
    both = np.concatenate([first, second])
    for packed in (ops.pack([first, second]), ops.pack_gated(first, second)):
        assert (packed.rows, packed.columns) == both.shape
        assert packed.nbytes >= both.nbytes
        assert (ops.unpack(packed).view(np.uint16) == both.view(np.uint16)).all()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_embed_takes_rows_of_the_table(
    rng: np.random.Generator, ops: NativeOps, rows: int, columns: int
) -> None:
    table = random_weight(rng, rows, columns)
    tokens = rng.integers(0, rows, 50).astype(np.int32)
    out, around = guarded(50, columns)
    ops.embed(ops.pack(table), tokens, out)
    assert (out == table[tokens].astype(np.float32)).all()
    assert margin_is_kept(around)


def test_wrong_arguments_are_named(ops: NativeOps) -> None:
    table = ops.pack(np.ones((6, 4), ml_dtypes.bfloat16))
    out = np.empty((1, 4), np.float32)
    for token in (-1, 6):
        with pytest.raises(ValueError, match=rf"tokens\[0\] must be in \[0, 6\), it is {token}"):
            ops.embed(table, np.array([token], np.int32), out)
    with pytest.raises(TypeError, match="tokens must be int32"):
        ops.embed(table, np.array([1], np.int64), out)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be bfloat16, not float32"):
        ops.pack(np.ones((6, 4), np.float32))
    with pytest.raises(ValueError, match="as many columns"):
        ops.pack([np.ones((6, width), ml_dtypes.bfloat16) for width in (4, 5)])
    with pytest.raises(ValueError, match="size 6 on axis 0, it has 7"):
        ops.pack_gated(*(np.ones((rows, 4), ml_dtypes.bfloat16) for rows in (6, 7)))


def argmax(ops: NativeOps | ReferenceOps, logits: F32) -> tuple[I32, F32]:
    out, logprob = np.full(len(logits), -9, np.int32), np.full(len(logits), 9, np.float32)
    ops.argmax(logits, out, logprob)
    return out, logprob


@pytest.mark.parametrize("vocabulary", [1, 7, 4096, 4097, 49152])
def test_argmax_agrees_with_float64(
    rng: np.random.Generator, ops: NativeOps, vocabulary: int
) -> None:
    logits = (rng.standard_normal((6, vocabulary)) * 4).astype(np.float32)
    logits[1] = np.round(logits[1])  # many equal: the first wins
    logits[2, rng.random(vocabulary) < 0.9] = -np.inf  # ruled out
    logits[2, rng.integers(vocabulary)] = 3
    logits[3, -1] = 50  # certain, at the very end
    logits[4] -= 1000
    tokens, logprobs = argmax(ops, logits)
    expected_tokens, expected_logprobs = argmax(ReferenceOps(), logits)
    assert (tokens == expected_tokens).all()
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-6, atol=5e-6)


def test_argmax_refuses_rows_that_are_not_finite(rng: np.random.Generator, ops: NativeOps) -> None:
    logits = rng.standard_normal((6, 5000), np.float32)
    alone = [argmax(ops, logits[row : row + 1]) for row in range(6)]
    logits[1, rng.integers(5000)] = np.nan
    logits[2, 0], logits[2, 4999] = np.inf, np.nan
    logits[3, 4999] = np.inf
    logits[4] = -np.inf
    tokens, logprobs = argmax(ops, logits)
    assert (tokens[1:5] == -1).all()
    assert np.isnan(logprobs[1:5]).all()
    for row in (0, 5):
        assert (tokens[row], logprobs[row]) == (alone[row][0][0], alone[row][1][0])


def test_a_set_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'sse9' was not built or this machine lacks it"):
        NativeOps(threads=1, isa="sse9")
    monkeypatch.setenv("OCTAVO_ISA", "mmx")
    with pytest.raises(ConfigError, match="OCTAVO_ISA"):
        NativeOps(threads=1)
    monkeypatch.setenv("OCTAVO_ISA", "portable")
    assert NativeOps(threads=1).name == "native-portable"
    monkeypatch.delenv("OCTAVO_ISA")
    assert NativeOps(threads=1).isa == available_sets()[0]
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        NativeOps(threads=0)
