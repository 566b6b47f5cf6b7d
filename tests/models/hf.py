"""The other side of the parity tests: transformers in float32, given the very same weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers

from octavo.models.weights.gguf import GGUFFile

F32 = npt.NDArray[np.float32]

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}},
    "llama-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": True},
}
"""Tiny models, one for each thing that a configuration can switch."""

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def random_model(rng: np.random.Generator, kind: str, **sizes: int) -> transformers.PreTrainedModel:
    """A tiny model of one of `KINDS`, every weight drawn from `rng`, matrices exact in bfloat16."""
    settings = SIZES | sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    if kind != "qwen2":  # its heads have no size of their own
        settings["head_dim"] = 16
    config = transformers.AutoConfig.for_model(kind.split("-")[0], **settings | KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_random_weight(rng, name, tuple(parameter.shape))))
    return model


def _random_weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> F32:
    values = rng.standard_normal(shape, np.float32)
    if "norm" in name:
        return 1 + values / 4
    if name.endswith("bias"):
        return values / 2
    scale = 1.0 if "embed" in name else shape[1] ** -0.5
    return torch.from_numpy(values * np.float32(scale)).bfloat16().float().numpy()


def from_gguf(path: Path) -> transformers.PreTrainedModel:
    """The Llama model in a GGUF file, dequantised by the gguf package and rounded to bfloat16."""
    file = GGUFFile.open(path)
    own = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    config = transformers.LlamaConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=own["embedding_length"],
        num_hidden_layers=own["block_count"],
        num_attention_heads=own["attention.head_count"],
        num_key_value_heads=own["attention.head_count_kv"],
        intermediate_size=own["feed_forward_length"],
        max_position_embeddings=own["context_length"],
        rms_norm_eps=own["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": own["rope.freq_base"]},
        tie_word_embeddings="output.weight" not in file.tensors,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    for name, parameter in model.named_parameters():
        parameter.data = _tensor(file, gguf_name(name), config)
    return model.eval()


def _tensor(file: GGUFFile, name: str, config: transformers.LlamaConfig) -> torch.Tensor:
    record = file.tensors[name]
    kind = gguf.GGMLQuantizationType[record.kind]
    raw = file.tensor_bytes(name)
    if record.kind in ("F32", "F16"):
        raw = raw.view(np.float32 if record.kind == "F32" else np.float16)
    else:
        raw = raw.reshape(record.shape[0], -1)
    values = gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(record.shape)
    tensor = torch.from_numpy(values.copy())
    if tensor.dim() == 1:
        return tensor
    if ".attn_q." in name or ".attn_k." in name:
        # Row 2i + h of a head in the file is row i + h · E / 2 of transformers.
        heads = record.shape[0] // config.head_dim
        tensor = torch.cat([torch.cat([part[0::2], part[1::2]]) for part in tensor.chunk(heads)])
    return tensor.bfloat16().float()


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives to a parameter of transformers."""
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }.items():
        name = name.replace(ours, theirs)
    return name


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    blocks: Mapping[str, tuple[str, npt.NDArray[np.uint8]]] | None = None,
) -> None:
    """The model as llama.cpp's converter writes it, in float32, by the gguf package. Tensors that
    `blocks` names are of its type and its bytes instead."""
    config = model.config
    architecture = "qwen2" if config.model_type == "qwen2" else "llama"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {config.model_type}")
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        factors = plain / model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = len(values) // head_dim
            halves = values.reshape(heads, 2, head_dim // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if blocks is not None and gguf_name(name) in blocks:
            type_name, raw = blocks[gguf_name(name)]
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType[type_name])
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def logits(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> F32:
    """The logits of every position, float32 [T, V]."""
    return model(torch.tensor([list(tokens)])).logits[0].float().numpy()
