"""The reference against formulas written a second time, densely or with torch."""

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.ops.paging import PagedStories, Part, random_rope, random_stories

from octavo.ops.api import KVLayout, Norm
from octavo.ops.reference import ReferenceOps, read_sequence, read_token, write_token

BF16 = ml_dtypes.bfloat16
LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=12, block_size=32)


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(BF16)


@pytest.mark.parametrize("offset", [0, 1, 15, 16, 31])
def test_a_token_lies_where_the_layout_says(rng: np.random.Generator, offset: int) -> None:
    heads, dim = LAYOUT.kv_heads, LAYOUT.head_dim
    pool = np.full((4, *LAYOUT.shape), np.nan, BF16)
    key, value = bf16(rng, heads, dim), bf16(rng, heads, dim)
    write_token(pool, LAYOUT, 2, 1, offset, key, value)
    tile, slot = offset // 16, offset % 16
    for head in range(heads):
        for e in range(dim):
            k_index = (e // 2) * 32 + slot * 2 + e % 2
            v_index = (slot // 2) * 2 * dim + 2 * e + slot % 2
            assert pool[2, 1, 0, head, tile, k_index] == key[head, e]
            assert pool[2, 1, 1, head, tile, v_index] == value[head, e]
    assert np.isfinite(pool.astype(np.float32)).sum() == 2 * heads * dim
    read_key, read_value = read_token(pool, LAYOUT, 2, 1, offset)
    assert (read_key == key).all()
    assert (read_value == value).all()


def test_block_bytes_are_the_bytes_of_a_block() -> None:
    assert np.zeros(LAYOUT.shape, BF16).nbytes == LAYOUT.block_bytes


def test_linear_is_norm_matmul_bias_activation_and_add(rng: np.random.Generator) -> None:
    ops = ReferenceOps(np.float64)
    gate, up = bf16(rng, 5, 7), bf16(rng, 5, 7)
    x = rng.standard_normal((3, 7)).astype(np.float32)
    weight, bias = rng.standard_normal(7).astype(np.float32), rng.standard_normal(10)
    out = rng.standard_normal((3, 5)).astype(np.float32)
    before = out.copy()
    norm = Norm(weight=weight, eps=1e-3)
    packed = ops.pack_gated(gate, up)
    ops.linear(x, packed, out, norm=norm, bias=bias.astype(np.float32), add=True, gated="gelu_tanh")
    normed = torch.nn.functional.rms_norm(torch.tensor(x), (7,), torch.tensor(weight), 1e-3)
    matrix = torch.tensor(np.concatenate([gate, up]).astype(np.float32))
    both = normed @ matrix.T + torch.tensor(bias, dtype=torch.float32)
    act = torch.nn.functional.gelu(both[:, :5], approximate="tanh") * both[:, 5:]
    np.testing.assert_allclose(out, before + act.numpy(), rtol=1e-4, atol=1e-4)
    assert (ops.unpack(packed) == np.concatenate([gate, up])).all()
    assert (packed.rows, packed.columns) == (10, 7)


def test_silu_gate_and_stacked_weights(rng: np.random.Generator) -> None:
    ops = ReferenceOps(np.float64)
    gate, up = bf16(rng, 4, 6), bf16(rng, 4, 6)
    x = 30 * rng.standard_normal((5, 6)).astype(np.float32)
    gated, plain = np.empty((5, 4), np.float32), np.empty((5, 8), np.float32)
    ops.linear(x, ops.pack_gated(gate, up), gated, gated="silu")
    ops.linear(x, ops.pack([gate, up]), plain)
    product = torch.tensor(x, dtype=torch.float64) @ torch.tensor(
        np.concatenate([gate, up]).astype(np.float64).T
    )
    np.testing.assert_allclose(plain, product.numpy(), rtol=1e-6)
    expected = torch.nn.functional.silu(product[:, :4]) * product[:, 4:]
    np.testing.assert_allclose(gated, expected.numpy(), rtol=1e-6, atol=1e-30)


def test_embed_and_take_rows_pick_rows(rng: np.random.Generator) -> None:
    ops = ReferenceOps(np.float32)
    table = bf16(rng, 9, 4)
    out = np.empty((3, 4), np.float32)
    ops.embed(ops.pack(table), np.array([8, 0, 8], np.int32), out)
    assert (out == table[[8, 0, 8]].astype(np.float32)).all()
    taken = np.empty((2, 4), np.float32)
    ops.take_rows(out, np.array([2, 1], np.int32), taken)
    assert (taken == out[[2, 1]]).all()


def test_argmax_takes_the_first_highest_and_marks_broken_rows(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((5, 11)).astype(np.float32)
    logits[0, [3, 7]] = 9
    logits[1, 4] = np.nan
    logits[2, 4] = np.inf
    logits[3] = -np.inf
    logits[4, :10] = -np.inf
    out, logprob = np.empty(5, np.int32), np.empty(5, np.float32)
    ReferenceOps(np.float64).argmax(logits, out, logprob)
    assert out.tolist() == [3, -1, -1, -1, 10]
    expected = torch.log_softmax(torch.tensor(logits[0], dtype=torch.float64), 0)[3]
    assert logprob[0] == pytest.approx(float(expected), rel=1e-6)
    assert logprob[4] == 0


@pytest.mark.parametrize("rotary_dim", [12, 8, 0])
def test_rope_turns_pairs_and_writes_kv(rng: np.random.Generator, rotary_dim: int) -> None:
    stories = random_stories(rng, [40, 5], query_heads=4, layout=LAYOUT)
    paged = PagedStories(rng, stories, LAYOUT, layer=2)
    rope = random_rope(rng, 40, rotary_dim) if rotary_dim else None
    qkv, batch, pages = paged.batch([Part(1, 0, 5), Part(0, 30, 40)])
    before = qkv.copy()
    ReferenceOps(np.float64).rope_write_kv(qkv, batch, rope, pages)
    heads, origin = qkv.reshape(15, 8, 12), before.reshape(15, 8, 12)
    for row, position in enumerate(batch.positions):
        for i in range(rotary_dim // 2):
            assert rope is not None
            turn = complex(rope.cos[position, i], rope.sin[position, i])
            j = i + rotary_dim // 2
            for head in range(6):
                turned = complex(origin[row, head, i], origin[row, head, j]) * turn
                assert heads[row, head, i] == pytest.approx(turned.real, abs=1e-5)
                assert heads[row, head, j] == pytest.approx(turned.imag, abs=1e-5)
    assert (heads[:, :, rotary_dim:] == origin[:, :, rotary_dim:]).all()
    assert (heads[:, 6:] == origin[:, 6:]).all()
    keys, values = read_sequence(pages, 0, 5)
    assert (keys == heads[:5, 4:6].astype(BF16)).all()
    assert (values == heads[:5, 6:].astype(BF16)).all()
    later, _ = read_sequence(pages, 1, 40)
    assert (later[30:] == heads[5:, 4:6].astype(BF16)).all()
    assert np.isnan(later[:30].astype(np.float32)).all()


def test_attention_is_dense_causal_attention(rng: np.random.Generator) -> None:
    stories = random_stories(rng, [70, 33], query_heads=6, layout=LAYOUT)
    paged = PagedStories(rng, stories, LAYOUT, layer=0)
    outs = paged.attend(ReferenceOps(), [Part(0, 0, 70), Part(1, 0, 33)], scale=0.3)
    for story, out in zip(stories, outs, strict=True):
        heads = story.qkv.reshape(len(story), 10, 12).transpose(1, 0, 2)
        rounded = heads[6:].astype(BF16).astype(np.float64)
        dense = torch.nn.functional.scaled_dot_product_attention(
            torch.tensor(heads[:6], dtype=torch.float64),
            torch.tensor(rounded[:2]).repeat_interleave(3, 0),
            torch.tensor(rounded[2:]).repeat_interleave(3, 0),
            is_causal=True,
            scale=0.3,
        )
        expected = dense.numpy().transpose(1, 0, 2).reshape(len(story), -1)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_attention_does_not_depend_on_the_cut(rng: np.random.Generator, dtype: type) -> None:
    stories = random_stories(rng, [50, 20], query_heads=2, layout=LAYOUT)
    ops = ReferenceOps(dtype)
    whole = PagedStories(rng, stories, LAYOUT, 1).attend(ops, [Part(0, 0, 50)], scale=0.3)[0]
    paged = PagedStories(rng, stories, LAYOUT, 1)
    first = paged.attend(ops, [Part(1, 0, 20), Part(0, 0, 17)], scale=0.3)[1]
    second = paged.attend(ops, [Part(0, 17, 50)], scale=0.3)[0]
    assert (np.concatenate([first, second]) == whole).all()


def test_a_float32_pool_keeps_every_bit(rng: np.random.Generator) -> None:
    stories = random_stories(rng, [20], query_heads=2, layout=LAYOUT)
    paged = PagedStories(rng, stories, LAYOUT, 1, dtype=np.float32)
    qkv, batch, pages = paged.batch([Part(0, 0, 20)])
    ReferenceOps(np.float64).rope_write_kv(qkv, batch, None, pages)
    keys, _ = read_sequence(pages, 0, 20)
    assert (keys == qkv.reshape(20, 6, 12)[:, 2:4]).all()


def test_copy_blocks_goes_in_order(rng: np.random.Generator) -> None:
    pool = bf16(rng, 4, *LAYOUT.shape)
    before = pool.copy()
    sources, targets = np.array([0, 1], np.int32), np.array([1, 2], np.int32)
    ReferenceOps().copy_blocks(pool, sources, targets)
    assert (pool == before[[0, 0, 0, 3]]).all()
