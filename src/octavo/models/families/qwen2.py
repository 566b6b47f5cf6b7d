"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and rotary halves in GGUF."""

from octavo.models.families import llama
from octavo.models.families.fields import Fields
from octavo.models.families.names import WeightNames
from octavo.models.spec import ModelSpec
from octavo.models.weights.files import Checkpoint
from octavo.models.weights.gguf import GGUFFile


def from_config(
    fields: Fields, generation: Fields, checkpoint: Checkpoint
) -> tuple[ModelSpec, WeightNames]:
    fields.require("attention_bias")
    return llama.from_config(fields, generation, checkpoint, qkv_bias=True)


def from_gguf(file: GGUFFile) -> tuple[ModelSpec, WeightNames]:
    return llama.from_gguf(file, architecture="qwen2", interleaved_rotary=False)
