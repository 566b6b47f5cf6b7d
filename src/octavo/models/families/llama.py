"""The Llama family: pre-norm decoders with rotary attention and a gated feed-forward network.

`from_config` reads the config.json of transformers (versions 4 and 5), `from_gguf` the metadata of
a GGUF file. Mistral without a sliding window and Qwen2, which only adds biases to queries, keys and
values, are the same network; `qwen2.py` says what differs.
"""

from typing import Any

from octavo.errors import ModelFileError
from octavo.models.families.fields import Fields
from octavo.models.families.names import LayerNames, WeightNames
from octavo.models.spec import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeSpec,
    full_attention,
)
from octavo.models.weights.files import Checkpoint
from octavo.models.weights.gguf import GGUFFile
from octavo.ops.api import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

HARMLESS_CONFIG = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "chunk_size_feed_forward",
        "cls_token_id",
        "dtype",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "mask_token_id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)
"""Keys of config.json that say nothing about what the network computes from a token."""


def from_config(
    fields: Fields, generation: Fields, checkpoint: Checkpoint, *, qkv_bias: bool | None = None
) -> tuple[ModelSpec, WeightNames]:
    """The network that a config.json describes.

    `generation` is generation_config.json, whose end tokens win. `qkv_bias` is what the family
    fixes; None leaves it to `attention_bias`, which then holds for the output projection too.
    """
    architecture = fields.text("model_type")
    attention_bias = fields.flag("attention_bias", False) if qkv_bias is None else False
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    layers, vocab = fields.size("num_hidden_layers"), fields.size("vocab_size")
    context = fields.size("max_position_embeddings")
    head_dim = _head_dim(fields, "head_dim", hidden, heads)
    _refuse_window(fields, context)
    fields.require("pretraining_tp", 1)
    fields.require("partial_rotary_factor", 1, 1.0)
    fields.require("rope_interleaved", False)
    fields.require("layer_types", ["full_attention"] * layers)
    fields.require("is_decoder", True, False)
    spec = ModelSpec(
        name=checkpoint.path.name,
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(fields, "num_key_value_heads", heads),
        head_dim=head_dim,
        ffn_size=fields.size("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, "hidden_act"),
        rope=_config_rope(fields, head_dim, context),
        max_context=context,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
        output_bias=attention_bias,
        ffn_bias=fields.flag("mlp_bias", False),
        groups=full_attention(layers),
        bos_id=fields.token("bos_token_id", vocab),
        eos_ids=_config_eos(fields, generation, vocab),
        stored_as=checkpoint.stored_as,
        fingerprint=checkpoint.fingerprint(),
    )
    fields.refuse_rest(HARMLESS_CONFIG)
    return spec, _config_names(spec)


def from_gguf(
    file: GGUFFile, *, architecture: str = "llama", interleaved_rotary: bool = True
) -> tuple[ModelSpec, WeightNames]:
    """The network that a GGUF file describes. Biases are the model's if their tensors are there."""
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    fields = Fields(file.path, own, prefix)
    tokenizer = Fields(file.path, file.metadata)
    heads, hidden = fields.size("attention.head_count"), fields.size("embedding_length")
    layers, context = fields.size("block_count"), fields.size("context_length")
    head_dim = _head_dim(fields, "attention.key_length", hidden, heads)
    fields.require("attention.value_length", head_dim)
    fields.require("rope.dimension_count", head_dim)
    vocab = _gguf_vocab(file, fields)
    present = file.tensors.keys()
    spec = ModelSpec(
        name=str(file.metadata.get("general.name") or file.path.stem),
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=fields.size("feed_forward_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        activation="silu",
        rope=_gguf_rope(file, fields, head_dim),
        max_context=context,
        tied_embeddings="output.weight" not in present,
        qkv_bias="blk.0.attn_q.bias" in present,
        output_bias="blk.0.attn_output.bias" in present,
        ffn_bias="blk.0.ffn_gate.bias" in present,
        groups=full_attention(layers),
        bos_id=tokenizer.token("tokenizer.ggml.bos_token_id", vocab),
        eos_ids=_gguf_eos(tokenizer, vocab),
        stored_as=file.stored_as,
        fingerprint=file.fingerprint(),
    )
    fields.refuse_rest(("rope.scaling.finetuned",))
    return spec, _gguf_names(spec, interleaved_rotary)


def _head_dim(fields: Fields, key: str, hidden: int, heads: int) -> int:
    if not fields.has(key) and hidden % heads:
        raise fields.wrong(key, None, f"a head size, as {hidden} is no multiple of {heads} heads")
    head_dim = fields.size(key, hidden // heads)
    if head_dim % 2:
        raise fields.wrong(key, head_dim, "an even head size")
    return head_dim


def _kv_heads(fields: Fields, key: str, heads: int) -> int:
    kv_heads = fields.size(key, heads)
    if heads % kv_heads:
        raise fields.wrong(key, kv_heads, f"a divisor of the {heads} heads")
    return kv_heads


def _activation(fields: Fields, key: str) -> Activation:
    name = fields.text(key, "silu")
    if name not in ACTIVATIONS:
        raise fields.wrong(key, name, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _refuse_window(fields: Fields, context: int) -> None:
    """A window that is off, or as long as the context, changes nothing."""
    window, used = fields.raw("sliding_window"), fields.flag("use_sliding_window", True)
    if window is not None and used and not (type(window) is int and window >= context):
        raise fields.wrong("sliding_window", window, "none: Octavo attends to every position")


def _config_rope(fields: Fields, head_dim: int, context: int) -> RopeSpec:
    """Rotary settings in the keys of transformers 5 (`rope_parameters`) or 4 (`rope_scaling`)."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    entries = fields.raw(key) or {}
    if not isinstance(entries, dict):
        raise fields.wrong(key, entries, "an object")
    inner = Fields(fields.path, entries, f"{key}.")
    theta = inner.number("rope_theta", fields.number("rope_theta", 10_000.0))
    inner.require("partial_rotary_factor", 1, 1.0)
    rope = RopeSpec(theta=theta, dims=head_dim, scaling=_config_scaling(inner, context))
    inner.refuse_rest()
    return rope


def _config_scaling(inner: Fields, context: int) -> Llama3Scaling | LinearScaling | None:
    old_key = inner.text("type", "default")
    kind = inner.text("rope_type", old_key)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=inner.number("factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=inner.number("factor"),
                low_frequency=inner.number("low_freq_factor"),
                high_frequency=inner.number("high_freq_factor"),
                original_context=inner.size("original_max_position_embeddings", context),
            )
            if scaling.high_frequency <= scaling.low_frequency:
                raise inner.wrong("high_freq_factor", scaling.high_frequency, "a larger factor")
            return scaling
    raise inner.wrong("rope_type", kind, "one of default, linear, llama3")


def _config_eos(fields: Fields, generation: Fields, vocab: int) -> tuple[int, ...]:
    own = _token_list(fields, "eos_token_id", vocab)
    return _token_list(generation, "eos_token_id", vocab) or own


def _token_list(fields: Fields, key: str, vocab: int) -> tuple[int, ...]:
    value: Any = fields.raw(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(item) is int and 0 <= item < vocab for item in ids):
        raise fields.wrong(key, value, f"token ids below {vocab}")
    return tuple(dict.fromkeys(ids))


def _gguf_vocab(file: GGUFFile, fields: Fields) -> int:
    """The number of rows of the embedding; tokens above the tokenizer's own are padding."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelFileError(f"{file.path}: tensor 'token_embd.weight' is missing")
    fields.require("vocab_size", table.shape[0])
    return table.shape[0]


def _gguf_rope(file: GGUFFile, fields: Fields, head_dim: int) -> RopeSpec:
    theta = fields.number("rope.freq_base", 10_000.0)
    fields.require("rope.scaling.attn_factor", 1, 1.0)
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    fields.raw("rope.scaling.original_context_length")  # matters to yarn and longrope only
    if kind not in ("none", "linear"):
        raise fields.wrong("rope.scaling.type", kind, "none or linear")
    factors = _rope_factors(file, head_dim)
    linear = kind == "linear" or fields.has("rope.scale_linear")
    if linear and factor != 1.0:
        if factors is not None:
            raise fields.wrong("rope.scaling.type", kind, "none beside a rope_freqs tensor")
        return RopeSpec(theta=theta, dims=head_dim, scaling=LinearScaling(factor=factor))
    return RopeSpec(theta=theta, dims=head_dim, scaling=factors)


def _rope_factors(file: GGUFFile, head_dim: int) -> FactorScaling | None:
    """Llama 3.1 and later carry their scaling as a tensor of divisors."""
    name = "rope_freqs.weight"
    if name not in file.tensors:
        return None
    factors = file.f32(name)
    if factors.shape != (head_dim // 2,) or not (0 < factors.min() <= factors.max() < 1e6):
        raise ModelFileError(
            f"{file.path}: tensor {name!r}: expected {head_dim // 2} positive numbers, found shape "
            f"{list(factors.shape)}"
        )
    return FactorScaling(factors=tuple(factors.tolist()))


def _gguf_eos(tokenizer: Fields, vocab: int) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (tokenizer.token(f"tokenizer.ggml.{key}", vocab) for key in keys)
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _config_names(spec: ModelSpec) -> WeightNames:
    tied = spec.tied_embeddings
    return WeightNames(
        embedding="model.embed_tokens.weight",
        layers=tuple(_config_layer(spec, f"model.layers.{n}") for n in range(spec.layers)),
        final_norm="model.norm.weight",
        head=None if tied else "lm_head.weight",
        derived=frozenset(
            f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(spec.layers)
        ),
        copies=(("lm_head.weight", "model.embed_tokens.weight"),) if tied else (),
    )


def _config_layer(spec: ModelSpec, at: str) -> LayerNames:
    def bias(name: str, there: bool) -> str | None:
        return f"{at}.{name}.bias" if there else None

    return LayerNames(
        attention_norm=f"{at}.input_layernorm.weight",
        query=f"{at}.self_attn.q_proj.weight",
        key=f"{at}.self_attn.k_proj.weight",
        value=f"{at}.self_attn.v_proj.weight",
        output=f"{at}.self_attn.o_proj.weight",
        ffn_norm=f"{at}.post_attention_layernorm.weight",
        gate=f"{at}.mlp.gate_proj.weight",
        up=f"{at}.mlp.up_proj.weight",
        down=f"{at}.mlp.down_proj.weight",
        query_bias=bias("self_attn.q_proj", spec.qkv_bias),
        key_bias=bias("self_attn.k_proj", spec.qkv_bias),
        value_bias=bias("self_attn.v_proj", spec.qkv_bias),
        output_bias=bias("self_attn.o_proj", spec.output_bias),
        gate_bias=bias("mlp.gate_proj", spec.ffn_bias),
        up_bias=bias("mlp.up_proj", spec.ffn_bias),
        down_bias=bias("mlp.down_proj", spec.ffn_bias),
    )


def _gguf_names(spec: ModelSpec, interleaved_rotary: bool) -> WeightNames:
    return WeightNames(
        embedding="token_embd.weight",
        layers=tuple(_gguf_layer(spec, f"blk.{n}") for n in range(spec.layers)),
        final_norm="output_norm.weight",
        head=None if spec.tied_embeddings else "output.weight",
        interleaved_rotary=interleaved_rotary,
        derived=frozenset({"rope_freqs.weight"}),
    )


def _gguf_layer(spec: ModelSpec, at: str) -> LayerNames:
    def bias(name: str, there: bool) -> str | None:
        return f"{at}.{name}.bias" if there else None

    return LayerNames(
        attention_norm=f"{at}.attn_norm.weight",
        query=f"{at}.attn_q.weight",
        key=f"{at}.attn_k.weight",
        value=f"{at}.attn_v.weight",
        output=f"{at}.attn_output.weight",
        ffn_norm=f"{at}.ffn_norm.weight",
        gate=f"{at}.ffn_gate.weight",
        up=f"{at}.ffn_up.weight",
        down=f"{at}.ffn_down.weight",
        query_bias=bias("attn_q", spec.qkv_bias),
        key_bias=bias("attn_k", spec.qkv_bias),
        value_bias=bias("attn_v", spec.qkv_bias),
        output_bias=bias("attn_output", spec.output_bias),
        gate_bias=bias("ffn_gate", spec.ffn_bias),
        up_bias=bias("ffn_up", spec.ffn_bias),
        down_bias=bias("ffn_down", spec.ffn_bias),
    )
