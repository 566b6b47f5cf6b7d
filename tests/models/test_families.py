"""Configurations as data: what is read, and what is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy

from octavo.errors import ModelFileError
from octavo.models.loader import read_spec
from octavo.models.spec import (
    FactorScaling,
    LayerGroup,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeSpec,
)
from octavo.ops.api import KVLayout

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500_000.0,
    "rope_scaling": LLAMA3,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128_000,
    "eos_token_id": [128_001, 128_008, 128_009],
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
}
"""The config.json of Llama-3.2-1B-Instruct."""

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "max_position_embeddings": 32_768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1_000_000.0,
    "sliding_window": 32_768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
"""The config.json of Qwen2.5-0.5B-Instruct."""

GGUF_KEYS = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e5,
}


def spec_of(folder: Path, config: Mapping[str, Any], **generation: Any) -> ModelSpec:
    """The spec of a folder with this config.json and one tensor."""
    (folder / "config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    safetensors.numpy.save_file({"x": np.ones(3, np.float16)}, folder / "model.safetensors")
    return read_spec(folder)


def gguf_spec(
    folder: Path,
    keys: Mapping[str, Any],
    architecture: str = "llama",
    tensors: Mapping[str, np.ndarray] | None = None,
) -> ModelSpec:
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    for key, value in keys.items():
        key = key if key.startswith(("tokenizer", "general")) else f"{architecture}.{key}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.ones((50, 64), np.float32))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_spec(folder)


def test_llama(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA)
    assert spec == ModelSpec(
        name=tmp_path.name,
        architecture="llama",
        vocab_size=128_256,
        hidden_size=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        ffn_size=8192,
        norm_eps=1e-5,
        activation="silu",
        rope=RopeSpec(
            theta=500_000.0,
            dims=64,
            scaling=Llama3Scaling(
                factor=32.0, low_frequency=1.0, high_frequency=4.0, original_context=8192
            ),
        ),
        max_context=131_072,
        tied_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        ffn_bias=False,
        groups=(LayerGroup(window=None, layers=tuple(range(16))),),
        bos_id=128_000,
        eos_ids=(128_001, 128_008, 128_009),
        stored_as="F16",
        fingerprint=spec.fingerprint,
    )
    assert spec.kv_layout(32) == KVLayout(layers=16, kv_heads=8, head_dim=64, block_size=32)
    assert spec.qkv_size == 3072
    assert spec.attention_scale == 0.125


def test_the_keys_of_transformers_5_mean_the_same(tmp_path: Path) -> None:
    old = spec_of(tmp_path, LLAMA)
    config = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    new = spec_of(tmp_path, config | {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0}})
    assert new == old
    plain = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert spec_of(tmp_path, plain).rope == RopeSpec(theta=7.0, dims=64)


def test_the_older_key_of_rope_scaling(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert spec.rope.scaling == LinearScaling(factor=2.0)


@pytest.mark.parametrize("key", ["unk_token_id", "sep_token_id", "tokenizer_class", "pad_token_id"])
def test_keys_that_say_nothing_of_the_network_are_let_be(tmp_path: Path, key: str) -> None:
    assert spec_of(tmp_path, LLAMA | {key: 1}) == spec_of(tmp_path, LLAMA)


def test_qwen2(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, QWEN)
    assert (spec.head_dim, spec.kv_heads, spec.max_context) == (64, 2, 32_768)
    assert (spec.qkv_bias, spec.output_bias, spec.ffn_bias) == (True, False, False)
    assert spec.eos_ids == (151_645,)


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    assert spec_of(tmp_path, QWEN, eos_token_id=[5, 9, 5]).eos_ids == (5, 9)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    left_out = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "hidden_act")
    left_out += ("tie_word_embeddings", "eos_token_id", "bos_token_id", "rms_norm_eps")
    spec = spec_of(tmp_path, {key: LLAMA[key] for key in LLAMA if key not in left_out})
    assert (spec.kv_heads, spec.head_dim, spec.norm_eps) == (32, 64, 1e-6)
    assert spec.rope == RopeSpec(theta=10_000.0, dims=64)
    assert (spec.tied_embeddings, spec.bos_id, spec.eos_ids) == (False, None, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', expected one of llama"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: expected one of"),
        ({"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "rope_scaling.attention_factor"),
        (
            {"rope_scaling": LLAMA3 | {"factor": None}},
            "factor: expected a positive number",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "expected a larger factor",
        ),
        ({"rope_scaling": "none"}, "rope_scaling: expected an object"),
        ({"sliding_window": 4096}, "sliding_window: expected none"),
        ({"layer_types": ["sliding_attention"] * 16}, "layer_types"),
        ({"hidden_act": "relu2"}, "hidden_act: expected one of silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0 is not known"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"pretraining_tp": 2}, "pretraining_tp: expected 1"),
        ({"vocab_size": 0}, "vocab_size: expected a whole number of 1 or more, found 0"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": None}, "hidden_size: .* found nothing"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a positive number"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of the 32 heads"),
        ({"head_dim": 63}, "head_dim: expected an even"),
        ({"head_dim": None, "hidden_size": 2050}, "head_dim"),
        ({"eos_token_id": [1, 999_999]}, "eos_token_id: expected token ids below 128256"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"attention_bias": "no"}, "attention_bias: expected true or false"),
    ],
)
def test_what_llama_does_not_do_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        spec_of(tmp_path, LLAMA | change)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


def test_qwen2_with_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="sliding_window"):
        spec_of(tmp_path, QWEN | {"use_sliding_window": True, "sliding_window": 4096})


def test_gguf(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    keys = GGUF_KEYS | tokens | {"tokenizer.ggml.eot_token_id": 7, "general.name": "Tiny"}
    spec = gguf_spec(tmp_path, keys)
    assert (spec.name, spec.vocab_size, spec.head_dim, spec.layers) == ("Tiny", 50, 16, 2)
    assert spec.rope == RopeSpec(theta=1e5, dims=16)
    assert spec.norm_eps == pytest.approx(1e-5)
    assert (spec.tied_embeddings, spec.qkv_bias) == (True, False)
    assert (spec.bos_id, spec.eos_ids) == (1, (2, 7))


def test_gguf_rope_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    spec = gguf_spec(tmp_path, GGUF_KEYS, tensors={"rope_freqs.weight": factors})
    assert spec.rope.scaling == FactorScaling(factors=tuple(factors.tolist()))
    plain = RopeSpec(theta=1e5, dims=16).frequencies()
    np.testing.assert_allclose(spec.rope.frequencies(), plain / factors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count = 8 is not known"),
        ({"attention.sliding_window": 64}, "llama.attention.sliding_window"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv: expected a whole number"),
        ({"attention.value_length": 32}, "value_length: expected 16"),
        ({"rope.dimension_count": 8}, "rope.dimension_count: expected 16"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "expected none or linear"),
        ({"vocab_size": 49}, "vocab_size: expected 50"),
        ({"tokenizer.ggml.eos_token_id": 50}, "a token id below 50"),
    ],
)
def test_what_gguf_llama_does_not_do_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        gguf_spec(tmp_path, GGUF_KEYS | change)


def test_an_unknown_gguf_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="general.architecture is 'falcon', expected one of"):
        gguf_spec(tmp_path, {}, "falcon")


def test_wrong_rope_factors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="rope_freqs.*expected 8 positive numbers"):
        gguf_spec(tmp_path, GGUF_KEYS, tensors={"rope_freqs.weight": np.ones(9, np.float32)})


def test_llama3_scaling_leaves_short_waves_and_stretches_long_ones() -> None:
    scaling = Llama3Scaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_context=64)
    scaled = RopeSpec(theta=500.0, dims=16, scaling=scaling).frequencies()
    plain = RopeSpec(theta=500.0, dims=16).frequencies()
    turns = 64 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns >= 4], plain[turns >= 4])
    np.testing.assert_allclose(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_rotary_tables_are_exact_at_far_positions(rng: np.random.Generator) -> None:
    rope = RopeSpec(theta=1e4, dims=64)
    tables = rope.tables(9_000)
    position, pair = int(rng.integers(8_000, 9_000)), int(rng.integers(0, 32))
    angle = position * 1e4 ** (-2 * pair / 64)
    assert tables.cos.shape == (9_000, 32)
    assert tables.cos[position, pair] == pytest.approx(np.cos(angle), abs=1e-7)
    assert tables.sin[position, pair] == pytest.approx(np.sin(angle), abs=1e-7)


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(theta=0.0, dims=16),
        RopeSpec(theta=1e4, dims=16, scaling=LinearScaling(factor=1e-320)),
        RopeSpec(theta=1e4, dims=4, scaling=FactorScaling(factors=(0.0, 1.0))),
        RopeSpec(
            theta=1e4,
            dims=16,
            scaling=Llama3Scaling(
                factor=1e-320, low_frequency=1.0, high_frequency=4.0, original_context=64
            ),
        ),
    ],
)
def test_rotary_settings_without_finite_angles_are_refused(rope: RopeSpec) -> None:
    with pytest.raises(ModelFileError, match="rotary angles are not finite"):
        rope.tables(9_000)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 1_235_814_400),  # as the card of Llama-3.2-1B-Instruct says
        (QWEN, None),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_the_parameters_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], parameters: int | None, biased: bool
) -> None:
    import torch
    import transformers

    if config is LLAMA and biased:
        config, parameters = config | {"attention_bias": True, "mlp_bias": True}, None
    with torch.device("meta"):
        known = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForCausalLM.from_config(known)
    expected = sum(weight.numel() for weight in model.parameters())
    assert spec_of(tmp_path, config).parameters == expected
    assert parameters in (None, expected)
