"""`linear` against the float64 reference, and against itself bit for bit."""

import threading

import numpy as np
import pytest
from tests.ops.arrays import as_multiplied, guarded, margin_is_kept, random_norm, random_weight

from octavo.ops.api import F32, Activation, Norm, Packed
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps

ROWS = (1, 2, 3, 5, 6, 7, 8, 13, 16, 31, 32, 33, 64, 100, 257)
# Around the panel of 16, the depth of 32, and the run of 640 inputs; odd everywhere.
SHAPES = [(1, 1), (16, 32), (17, 31), (48, 33), (130, 700), (320, 1300)]


def normal(rng: np.random.Generator, rows: int, columns: int) -> F32:
    return rng.standard_normal((rows, columns), np.float32)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("gated", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("extras", [False, True], ids=["bare", "bias and add"])
def test_agrees_with_float64(
    rng: np.random.Generator,
    ops: NativeOps,
    outputs: int,
    inputs: int,
    gated: Activation | None,
    extras: bool,
) -> None:
    rows = int(rng.choice([1, 2, 5, 17, 33]))
    x = normal(rng, rows, inputs)
    first, second = (random_weight(rng, outputs, inputs) for _ in range(2))
    bias = normal(rng, 1, outputs if gated is None else 2 * outputs)[0] if extras else None
    before = normal(rng, rows, outputs)
    results = []
    for backend, given in ((ops, x), (ReferenceOps(), as_multiplied(ops.isa, x))):
        weight = backend.pack(first) if gated is None else backend.pack_gated(first, second)
        out, around = guarded(rows, outputs)
        if extras:
            out[...] = before
        backend.linear(given, weight, out, bias=bias, add=extras, gated=gated)
        assert margin_is_kept(around)
        results.append(out)
    np.testing.assert_allclose(*results, rtol=2e-5, atol=2e-5)


def test_stacked_weights_give_joined_outputs(rng: np.random.Generator, ops: NativeOps) -> None:
    parts = [random_weight(rng, rows, 64) for rows in (40, 8, 9)]
    x = normal(rng, 7, 64)
    out, _ = guarded(7, 57)
    ops.linear(x, ops.pack(parts), out)
    start = 0
    for part in parts:
        alone, _ = guarded(7, len(part))
        ops.linear(x, ops.pack(part), alone)
        assert (out[:, start : start + len(part)] == alone).all()
        start += len(part)


@pytest.mark.parametrize("inputs", [96, 1300])
@pytest.mark.parametrize("gated", [None, "silu"])
def test_a_row_has_the_same_bits_in_any_company(
    rng: np.random.Generator, isa: str, inputs: int, gated: Activation | None
) -> None:
    outputs = 72
    norm, bias = random_norm(rng, inputs), normal(rng, 1, outputs * (1 if gated is None else 2))[0]
    x, before = normal(rng, max(ROWS), inputs), normal(rng, max(ROWS), outputs)
    first, second = (random_weight(rng, outputs, inputs) for _ in range(2))

    def run(ops: NativeOps, weight: Packed, start: int, stop: int) -> F32:
        out = before[start:stop].copy()
        ops.linear(x[start:stop], weight, out, norm=norm, bias=bias, add=True, gated=gated)
        return out

    one, two = (NativeOps(threads=threads, isa=isa) for threads in (1, 2))
    weight = one.pack(first) if gated is None else one.pack_gated(first, second)
    alone = np.concatenate([run(one, weight, row, row + 1) for row in range(max(ROWS))])
    assert np.isfinite(alone).all()
    for rows in ROWS:
        for ops in (one, two):
            start = int(rng.integers(0, max(ROWS) - rows + 1))
            assert (run(ops, weight, start, start + rows) == alone[start : start + rows]).all()


def test_the_norm_inside_is_the_norm_outside(rng: np.random.Generator, ops: NativeOps) -> None:
    x, norm = normal(rng, 19, 333), random_norm(rng, 333)
    weight = ops.pack(random_weight(rng, 70, 333))
    inside, _ = guarded(19, 70)
    ops.linear(x, weight, inside, norm=norm)
    normed, _ = guarded(19, 333)
    ops.rms_norm(x, norm, normed)
    outside, _ = guarded(19, 70)
    ops.linear(normed, weight, outside)
    assert (inside == outside).all()


@pytest.mark.parametrize("trouble", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_leaves_its_neighbours(
    rng: np.random.Generator, ops: NativeOps, trouble: float
) -> None:
    x = normal(rng, 9, 100)
    weight = ops.pack(random_weight(rng, 40, 100))
    whole, _ = guarded(9, 40)
    ops.linear(x, weight, whole)
    x[4, rng.integers(100)] = trouble
    out, _ = guarded(9, 40)
    ops.linear(x, weight, out)
    neighbours = np.arange(9) != 4
    assert (out[neighbours] == whole[neighbours]).all()
    assert not np.isfinite(out[4]).any()


@pytest.mark.parametrize("gated", ["silu", "gelu_tanh"])
def test_activations_are_accurate(
    rng: np.random.Generator, ops: NativeOps, gated: Activation
) -> None:
    """With a gate of 1 and an up matrix of 0 with bias 1, `linear` is the activation."""
    values = np.concatenate([rng.uniform(-80, 80, 4000), rng.uniform(-3, 3, 4000), [0.0, 87.9]])
    x = np.asarray(as_multiplied(ops.isa, values.astype(np.float32)[:, None]), np.float32)
    weight = ops.pack_gated(*(np.full((1, 1), value, "bfloat16") for value in (1, 0)))
    out, _ = guarded(len(x), 1)
    ops.linear(x, weight, out, bias=np.array([0, 1], np.float32), gated=gated)
    exact = x.astype(np.float64)
    turned = exact if gated == "silu" else 2 * (2 / np.pi) ** 0.5 * (exact + 0.044715 * exact**3)
    expected = exact / (1 + np.exp(np.minimum(-turned, 700)))
    # e^-u carries the rounding of u = turned(x), up to 87 units in the last place.
    slack = 6e-7 if gated == "silu" else 1.2e-5
    np.testing.assert_allclose(out, expected, rtol=slack, atol=1e-30)


def test_no_rows_are_no_work(ops: NativeOps) -> None:
    weight = ops.pack(np.ones((3, 4), "bfloat16"))
    ops.linear(np.empty((0, 4), np.float32), weight, np.empty((0, 3), np.float32))


def test_threads_may_call_at_once(rng: np.random.Generator, ops: NativeOps) -> None:
    weight = ops.pack(random_weight(rng, 200, 300))
    inputs = [normal(rng, rows, 300) for rows in (1, 4, 9, 40)]
    expected = []
    for x in inputs:
        out, _ = guarded(len(x), 200)
        ops.linear(x, weight, out)
        expected.append(out)
    wrong = []

    def call(index: int) -> None:
        for _ in range(20):
            out, _ = guarded(len(inputs[index]), 200)
            ops.linear(inputs[index], weight, out)
            if (out != expected[index]).any():
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_wrong_arguments_are_named(ops: NativeOps) -> None:
    weight = ops.pack(np.ones((3, 4), "bfloat16"))
    pair = ops.pack_gated(np.ones((3, 4), "bfloat16"), np.ones((3, 4), "bfloat16"))
    x, out = np.ones((2, 4), np.float32), np.ones((2, 3), np.float32)
    norm = Norm(weight=np.ones(5, np.float32), eps=1e-5)
    with pytest.raises(TypeError, match="x must be float32"):
        ops.linear(x.astype(np.float64), weight, out)
    with pytest.raises(TypeError, match="out must be a numpy array, not list"):
        ops.linear(x, weight, [0.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must be C-contiguous"):
        ops.linear(np.ones((4, 2), np.float32).T, weight, out)
    with pytest.raises(ValueError, match="x must have size 4 on axis 1, it has 3"):
        ops.linear(x[:, :3].copy(), weight, out)
    with pytest.raises(ValueError, match="out must have size 2 on axis 0, it has 1"):
        ops.linear(x, weight, out[:1])
    with pytest.raises(ValueError, match="bias must have size 3"):
        ops.linear(x, weight, out, bias=np.ones(4, np.float32))
    with pytest.raises(ValueError, match=r"norm\.weight must have size 4"):
        ops.linear(x, weight, out, norm=norm)
    with pytest.raises(ValueError, match="gated pair"):
        ops.linear(x, pair, out)
    with pytest.raises(ValueError, match="no gated pair"):
        ops.linear(x, weight, out, gated="silu")
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        ops.linear(x, weight, out)


@pytest.mark.parametrize("gated", [None, "silu"])
def test_outputs_may_be_columns_of_a_wider_array(
    rng: np.random.Generator, ops: NativeOps, gated: Activation | None
) -> None:
    """What is beside them is not touched, and they have the bits that they have alone."""
    x, parts = rng.standard_normal((21, 70), np.float32), [random_weight(rng, 45, 70)] * 2
    weight = ops.pack(parts[0]) if gated is None else ops.pack_gated(*parts)
    wide, alone = np.full((21, 80), 77, np.float32), np.zeros((21, 45), np.float32)
    out = wide[:, 20:65]
    out[...] = 0
    ops.linear(x, weight, out, add=True, gated=gated)
    ops.linear(x, weight, alone, add=True, gated=gated)
    assert (out == alone).all()
    assert (wide[:, :20] == 77).all()
    assert (wide[:, 65:] == 77).all()
    for apart in (np.zeros((45, 21), np.float32).T, np.zeros((21, 90), np.float32)[:, ::2]):
        with pytest.raises(ValueError, match="out must have contiguous rows"):
            ops.linear(x, weight, apart, gated=gated)
    with pytest.raises(ValueError, match="out must have contiguous rows"):
        ops.linear(x, weight, alone[::-1], gated=gated)
