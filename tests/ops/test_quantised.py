"""Weights of a few bits: exact integers, float64, and the same bits in any company."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tests.ops.arrays import expands, guarded, margin_is_kept, random_norm

from octavo.ops.api import BF16, F32, GROUP, Activation, Packed, Quantised
from octavo.ops.native import NativeOps, available_sets
from octavo.ops.reference import ReferenceOps, quantised_row
from octavo.ops.stored import pack_nibbles, pack_sixes

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 31, 33, 64, 100, 130)
# Around the panel of 16 and the group of 32; the last has runs of inputs.
SHAPES = [(1, 1), (16, 32), (17, 31), (48, 33), (130, 700), (72, 2600)]
RANGES = {
    "int8": (-128, 127),
    "int6": (-32, 31),
    "int6 with offsets": (-32, 31),
    "int4": (-8, 7),
    "int4 with offsets": (0, 15),
}
KINDS = list(RANGES)
BITS: dict[str, Literal[8, 6, 4]] = {kind: int(kind[3]) for kind in KINDS}  # type: ignore[misc]
LARGEST = {8: 70, 6: 20 * 70, 4: 5}


def random_quantised(rng: np.random.Generator, kind: str, rows: int, columns: int) -> Quantised:
    """Integers of the whole range, scaled so that products are near 1."""
    bits = BITS[kind]
    groups = -(-columns // GROUP)
    values = rng.integers(0, 256, (rows, groups * GROUP * bits // 8), np.uint8)
    scales = rng.uniform(0.5, 2, (rows, groups)) / (LARGEST[bits] * columns**0.5)
    multiples = rng.integers(-128, 128, (rows, 2 * groups)).astype(np.int8) if bits == 6 else None
    offsets = None
    if kind.endswith("offsets"):
        offsets = (-scales * rng.uniform(4, 11, scales.shape)).astype(np.float16)
    return Quantised(bits, columns, values, scales.astype(np.float16), offsets, multiples)


def whole(kind: str, integers: npt.NDArray[np.int8]) -> Quantised:
    """Integers as they are: a scale of 1, and offsets of 1 where there are any."""
    rows, columns = integers.shape
    bits = BITS[kind]
    ones = np.ones((rows, columns // GROUP), np.float16)
    offsets = ones if kind.endswith("offsets") else None
    grouped = integers.reshape(rows, -1, GROUP)
    if bits == 8:
        values = integers.view(np.uint8)
    elif bits == 6:
        values = pack_sixes((grouped + 32).astype(np.uint8))
    else:
        values = pack_nibbles((grouped + (8 if offsets is None else 0)).astype(np.uint8))
    multiples = np.ones((rows, columns // GROUP * 2), np.int8) if bits == 6 else None
    return Quantised(bits, columns, values.reshape(rows, -1), ones, offsets, multiples)


def normal(rng: np.random.Generator, rows: int, columns: int) -> F32:
    return rng.standard_normal((rows, columns), np.float32)


def pack(
    ops: NativeOps | ReferenceOps, parts: Sequence[Quantised] | Sequence[BF16], *, gated: bool
) -> Packed:
    return ops.pack_gated(parts[0], parts[1]) if gated else ops.pack(parts[0])


def expanded(parts: Sequence[Quantised]) -> list[BF16]:
    """What sets that expand weights multiply."""
    return [part.dequantised().astype(ml_dtypes.bfloat16) for part in parts]


def as_multiplied(
    isa: str, x: F32, parts: Sequence[Quantised]
) -> tuple[npt.NDArray[Any], Sequence[Quantised] | Sequence[BF16]]:
    """Activations and weights, as the reference is to take them for what `isa` does."""
    return (x.astype(ml_dtypes.bfloat16), expanded(parts)) if expands(isa) else (x, parts)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_exact(rng: np.random.Generator, ops: NativeOps, kind: str) -> None:
    """Inputs that are integers and reach 127 have a scale of 1: nothing is rounded. The ends of
    the range meet in every way: a unit that saturates or wraps would show."""
    low, high = RANGES[kind]
    integers = rng.integers(low, high + 1, (52, 4 * GROUP)).astype(np.int8)
    integers[:16] = rng.choice([low, high], (16, 4 * GROUP))
    integers[16], integers[17] = low, high
    x = rng.integers(-127, 128, (40, 4 * GROUP)).astype(np.float32)
    x[:20] = rng.choice([-127, 127], (20, 4 * GROUP))
    x[20], x[21] = -127, 127
    x[:, ::GROUP] = rng.choice([-127, 127], (40, 4))
    offset = 1 if kind.endswith("offsets") else 0
    out, _ = guarded(40, 52)
    ops.linear(x, ops.pack(whole(kind, integers)), out)
    assert (out == x.astype(np.int64) @ (integers.astype(np.int64) + offset).T).all()


def test_multiples_are_exact(rng: np.random.Generator, ops: NativeOps) -> None:
    """A group's sum has room at the ends of all three ranges: 32 · 128 · 32 · 127 < 2^24. All of
    these weights are exact in bfloat16 too."""
    integers = rng.choice(np.array([-32, 31], np.int8), (52, GROUP))
    multiples = rng.choice(np.array([-128, 64], np.int8), (52, 2))
    x = rng.choice(np.array([-127, 127], np.float32), (40, GROUP))
    integers[0], multiples[0], x[0] = -32, -128, 127
    weight = replace(whole("int6", integers), multiples=multiples)
    out, _ = guarded(40, 52)
    ops.linear(x, ops.pack(weight), out)
    wide = integers.astype(np.int64) * np.repeat(multiples.astype(np.int64), GROUP // 2, axis=1)
    assert (out == x.astype(np.int64) @ wide.T).all()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("gated", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_float64(
    rng: np.random.Generator,
    ops: NativeOps,
    outputs: int,
    inputs: int,
    gated: Activation | None,
    kind: str,
) -> None:
    rows = int(rng.choice([1, 2, 5, 17, 33]))
    x, before = normal(rng, rows, inputs), normal(rng, rows, outputs)
    parts = [random_quantised(rng, kind, outputs, inputs) for _ in range(2)]
    bias = normal(rng, 1, outputs if gated is None else 2 * outputs)[0]
    results = []
    given = (ops, x, parts), (ReferenceOps(), *as_multiplied(ops.isa, x, parts))
    for backend, rows_given, weights in given:
        out, around = guarded(rows, outputs)
        out[...] = before
        weight = pack(backend, weights, gated=gated is not None)
        backend.linear(rows_given, weight, out, bias=bias, add=True, gated=gated)
        assert margin_is_kept(around)
        results.append(out)
    np.testing.assert_allclose(*results, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("inputs", [96, 1300])
@pytest.mark.parametrize("gated", [None, "silu"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(
    rng: np.random.Generator, isa: str, inputs: int, gated: Activation | None, kind: str
) -> None:
    outputs = 72
    norm, bias = random_norm(rng, inputs), normal(rng, 1, outputs * (1 if gated is None else 2))[0]
    x, before = normal(rng, max(ROWS), inputs), normal(rng, max(ROWS), outputs)
    parts = [random_quantised(rng, kind, outputs, inputs) for _ in range(2)]
    one, two = (NativeOps(threads=threads, isa=isa) for threads in (1, 2))
    weight = pack(one, parts, gated=gated is not None)

    def run(ops: NativeOps, start: int, stop: int) -> F32:
        out = before[start:stop].copy()
        ops.linear(x[start:stop], weight, out, norm=norm, bias=bias, add=True, gated=gated)
        return out

    alone = np.concatenate([run(one, row, row + 1) for row in range(max(ROWS))])
    assert np.isfinite(alone).all()
    for rows in ROWS:
        for ops in (one, two):
            start = int(rng.integers(0, max(ROWS) - rows + 1))
            assert (run(ops, start, start + rows) == alone[start : start + rows]).all()


@pytest.mark.parametrize("gated", [None, "silu"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_rows_is_as_near_as_bfloat16(
    rng: np.random.Generator, expanding: str, gated: Activation | None, kind: str
) -> None:
    """Each product is off by the rounding of two factors, 2^-9 each, and each of two sums a product
    by 2^-24 of what there is to sum at most."""
    inputs, outputs = int(rng.choice([31, 333, 415])), 45
    parts = [random_quantised(rng, kind, outputs, inputs) for _ in range(2 if gated else 1)]
    exact = np.concatenate([part.dequantised(np.float64) for part in parts])
    x = normal(rng, 70, inputs)
    sums, slack = x.astype(np.float64) @ exact.T, np.abs(x) @ np.abs(exact).T
    slack *= 2.0**-8 + 2.0**-18 + inputs * 2.0**-23
    if gated:
        (gate, up), (gate_slack, up_slack) = np.split(sums, 2, axis=1), np.split(slack, 2, axis=1)
        sums = gate / (1 + np.exp(-gate)) * up
        # silu is 1.1 steep at most and no larger than its input.
        slack = 1.1 * gate_slack * (np.abs(up) + up_slack) + np.abs(gate) * up_slack + 1e-6
    ops = NativeOps(threads=1, isa=expanding)
    weight = pack(ops, parts, gated=gated is not None)
    for rows in range(1, len(x) + 1):
        out, around = guarded(rows, outputs)
        ops.linear(x[:rows], weight, out, gated=gated)
        assert (np.abs(out - sums[:rows]) <= slack[:rows]).all()
        assert margin_is_kept(around)


@pytest.mark.parametrize(("outputs", "inputs"), [(17, 31), (70, 333), (130, 1300)])
@pytest.mark.parametrize("gated", [None, "gelu_tanh"])
@pytest.mark.parametrize("kind", KINDS)
def test_expanded_weights_give_the_bits_of_bfloat16_ones(
    rng: np.random.Generator,
    expanding: str,
    outputs: int,
    inputs: int,
    gated: Activation | None,
    kind: str,
) -> None:
    """Every weight is the bfloat16 nearest to it, wherever inputs are cut."""
    parts = [random_quantised(rng, kind, outputs, inputs) for _ in range(2)]
    for part in parts:  # both ends of the range, and groups that are zero
        part.values[0], part.values[-1], part.scales[outputs // 2] = 0, 255, 0
    ops, bias = NativeOps(threads=2, isa=expanding), normal(rng, 1, 2 * outputs)[0]
    bias = bias if gated else bias[:outputs]
    for rows in (1, 16, 17, 33, 70):
        x = normal(rng, rows, inputs)
        (out, _), (expected, _) = guarded(rows, outputs), guarded(rows, outputs)
        for weights, target in ((parts, out), (expanded(parts), expected)):
            weight = pack(ops, weights, gated=gated is not None)
            ops.linear(x, weight, target, bias=bias, gated=gated)
        assert (out == expected).all()


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_rows_that_share_expanded_weights_keep_their_bits(
    rng: np.random.Generator, expanding: str, threads: int
) -> None:
    """Threads and rows say how many blocks there are, and so how often weights are expanded."""
    x, ops = normal(rng, 900, 384), NativeOps(threads=threads, isa=expanding)
    weight = ops.pack(random_quantised(rng, "int8", 88, 384))
    out, _ = guarded(900, 88)
    ops.linear(x, weight, out)
    for row in (0, 255, 256, 671, 672, 899, int(rng.integers(900))):
        alone, _ = guarded(1, 88)
        ops.linear(x[row : row + 1], weight, alone)
        assert (out[row] == alone[0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_sets_with_fused_multiply_add_agree(rng: np.random.Generator, kind: str) -> None:
    weight, x = random_quantised(rng, kind, 70, 333), normal(rng, 9, 333)
    results = []
    for isa in available_sets():
        if isa != "portable" and not expands(isa):
            ops, (out, _) = NativeOps(threads=1, isa=isa), guarded(9, 70)
            ops.linear(x, ops.pack(weight), out)
            results.append(out)
    assert all((out == results[0]).all() for out in results)


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_inside_is_the_norm_outside(
    rng: np.random.Generator, ops: NativeOps, kind: str
) -> None:
    x, norm = normal(rng, 19, 333), random_norm(rng, 333)
    weight = ops.pack(random_quantised(rng, kind, 70, 333))
    (inside, _), (normed, _), (outside, _) = guarded(19, 70), guarded(19, 333), guarded(19, 70)
    ops.linear(x, weight, inside, norm=norm)
    ops.rms_norm(x, norm, normed)
    ops.linear(normed, weight, outside)
    assert (inside == outside).all()


@pytest.mark.parametrize("trouble", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_leaves_its_neighbours(
    rng: np.random.Generator, ops: NativeOps, trouble: float, kind: str
) -> None:
    x = normal(rng, 9, 100)
    weight = ops.pack(random_quantised(rng, kind, 40, 100))
    (clean, _), (out, _) = guarded(9, 40), guarded(9, 40)
    ops.linear(x, weight, clean)
    x[4, rng.integers(100)] = trouble
    ops.linear(x, weight, out)
    neighbours = np.arange(9) != 4
    assert (out[neighbours] == clean[neighbours]).all()
    assert not np.isfinite(out[4]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_size(rng: np.random.Generator, ops: NativeOps, kind: str) -> None:
    """Groups of zeros and of the smallest numbers give zero, the largest do not overflow."""
    x = np.zeros((6, 96), np.float32)
    x[1], x[2], x[3] = 1e-40, 2.0**-103, rng.choice([-1, 1], 96)
    x[4], x[5] = x[3] * np.float32(2.0**-83), x[3] * np.float32(2.0**100)
    weight = ops.pack(random_quantised(rng, kind, 33, 96))
    out, _ = guarded(6, 33)
    ops.linear(x, weight, out)
    assert (out[:2] == 0).all()
    # As integers, inputs below 2^-100 are zeros.
    assert np.isfinite(out[2]).all() if expands(ops.isa) else (out[2] == 0).all()
    np.testing.assert_allclose(out[4] * 2.0**83, out[3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out[5] * 2.0**-100, out[3], rtol=1e-4, atol=1e-5)


def test_rounding_is_at_most_half_a_step(rng: np.random.Generator) -> None:
    row = normal(rng, 1, 100)[0] * rng.uniform(0.01, 100, 100).astype(np.float32)
    rounded = quantised_row(row)
    for start in range(0, 100, GROUP):
        group = np.s_[start : start + GROUP]
        step = np.abs(row[group]).max() / 127
        assert np.abs(rounded[group] - row[group]).max() <= step * 0.5001


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_embed_takes_rows_of_the_table(
    rng: np.random.Generator, ops: NativeOps, rows: int, columns: int, kind: str
) -> None:
    table = random_quantised(rng, kind, rows, columns)
    tokens = rng.integers(0, rows, 50).astype(np.int32)
    out, around = guarded(50, columns)
    ops.embed(ops.pack(table), tokens, out)
    np.testing.assert_allclose(out, table.dequantised()[tokens], rtol=1e-6, atol=1e-8)
    assert margin_is_kept(around)


@pytest.mark.parametrize(("kind", "bits"), list(zip(KINDS, (8.5, 7, 7.5, 4.5, 5), strict=True)))
def test_memory_is_that_of_the_integers_and_their_factors(
    rng: np.random.Generator, ops: NativeOps, kind: str, bits: float
) -> None:
    packed = ops.pack(random_quantised(rng, kind, 320, 2048))
    assert packed.nbytes == pytest.approx(320 * 2048 * bits / 8, rel=0.01)


def test_wrong_arguments_are_named(rng: np.random.Generator, ops: NativeOps) -> None:
    eight, six, four = (random_quantised(rng, kind, 6, 64) for kind in ("int8", "int6", "int4"))
    for mixed in (
        [eight, four],
        [eight, random_quantised(rng, "int8", 6, 32)],
        [eight, np.ones((6, 64), "bfloat16")],
    ):
        with pytest.raises(ValueError, match="one encoding and as many columns"):
            ops.pack(mixed)
    with pytest.raises(ValueError, match="size 6 on axis 0, it has 7"):
        ops.pack_gated(eight, random_quantised(rng, "int8", 7, 64))
    with pytest.raises(ValueError, match="values must have size 32 on axis 1, it has 64"):
        ops.pack(Quantised(4, 64, eight.values, eight.scales))
    with pytest.raises(ValueError, match="scales must have size 2 on axis 1, it has 1"):
        ops.pack(Quantised(8, 64, eight.values, eight.scales[:, :1].copy()))
    with pytest.raises(ValueError, match="multiples must have size 4 on axis 1, it has 2"):
        ops.pack(replace(six, multiples=six.multiples[:, :2].copy()))
    with pytest.raises(TypeError, match="multiples must be a numpy array, not NoneType"):
        ops.pack(replace(six, multiples=None))
    with pytest.raises(ValueError, match="weight must be bfloat16"):
        ops.unpack(ops.pack(eight))
