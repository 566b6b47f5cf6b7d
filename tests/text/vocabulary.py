"""Tokenizers over chosen byte strings, for tests that need no model."""

from collections.abc import Sequence
from typing import Any

from octavo.text.tokenizer import Tokenizer, _byte_alphabet

CHARACTER_OF = {byte: character for character, byte in _byte_alphabet().items()}
SPECIAL = ("<|end|>", "<|start|>", "<|other|>")


def metadata_of(
    pieces: Sequence[bytes], *, merges: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """GGUF metadata of a vocabulary: three special tokens, 256 single bytes, then `pieces`."""
    plain = [bytes([byte]) for byte in range(256)] + list(pieces)
    tokens = [*SPECIAL, *("".join(CHARACTER_OF[byte] for byte in piece) for piece in plain)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * len(plain),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def tokenizer_of(pieces: Sequence[bytes]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer in which each piece is one token, and the ids of the pieces in order."""
    distinct = [piece for piece in dict.fromkeys(pieces) if len(piece) > 1]
    ids = {bytes([byte]): len(SPECIAL) + byte for byte in range(256)}
    ids |= {piece: len(SPECIAL) + 256 + n for n, piece in enumerate(distinct)}
    return Tokenizer.from_gguf(metadata_of(distinct)), [ids[piece] for piece in pieces]
