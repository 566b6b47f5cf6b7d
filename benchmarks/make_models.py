"""Writes benchmark checkpoints: the shapes of known models, random weights, SmolLM2's tokenizer.

    python benchmarks/make_models.py qwen2.5-0.5b FOLDER
    python benchmarks/make_models.py llama-3.2-1b FOLDER

A folder holds config.json, model.safetensors in bfloat16, tokenizer.json and tokenizer_config.json,
so that Octavo and its peers load the same bytes. Speed depends on shapes, not on values; what such
a model says means nothing. Ids above SmolLM2's 49,152 stand for no text.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from octavo.models.reference import resolve_reference
from octavo.models.weights.gguf import GGUFFile
from octavo.units import human_bytes

Shapes = dict[str, tuple[int, ...]]

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    "llama-3.2-1b": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}

STANDARD_DEVIATION = 0.02
CHUNK_ELEMENTS = 4 * 1024 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(CONFIGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder, config = arguments.folder, CONFIGS[arguments.shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(folder, GGUFFile.open(resolve_reference("demo")).metadata)
    size_bytes = write_weights(
        folder / "model.safetensors", tensor_shapes(config), np.random.default_rng(arguments.seed)
    )
    print(f"{folder}: {arguments.shape}, {human_bytes(size_bytes)} of weights")


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """The names and shapes of a checkpoint of this configuration."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for letter, width in widths.items():
            shapes[f"{at}.self_attn.{letter}_proj.weight"] = (width, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{at}.self_attn.{letter}_proj.bias"] = (width,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        shapes[f"{at}.mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[f"{at}.mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, ffn)
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,)}


def write_weights(path: Path, shapes: Shapes, rng: np.random.Generator) -> int:
    """Write random bfloat16 tensors one after the other, and give their size in bytes.

    A checkpoint is larger than the memory one wants to spend on making it, so it is streamed.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            write_tensor(file, rng, int(np.prod(shape)), norm="norm" in name)
    return offset


def write_tensor(file: BinaryIO, rng: np.random.Generator, count: int, *, norm: bool) -> None:
    for size in chunk_sizes(count):
        values = rng.standard_normal(size, np.float32) * np.float32(STANDARD_DEVIATION)
        file.write((values + np.float32(norm)).astype(ml_dtypes.bfloat16).tobytes())


def chunk_sizes(count: int) -> Iterator[int]:
    while count > 0:
        yield min(count, CHUNK_ELEMENTS)
        count -= CHUNK_ELEMENTS


def write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    """The tokenizer inside SmolLM2's GGUF file in the form that Hugging Face libraries read."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": text, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for token, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == 3
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level | {"use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
