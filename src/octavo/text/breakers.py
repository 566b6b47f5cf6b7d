"""Texts at which a repetition ends, as the tokens that can spell them."""

from collections.abc import Iterable
from functools import lru_cache

from octavo.text.tokenizer import Tokenizer

MAX_TAIL = 20
"""Tokens of a breaker after its first, at most."""

Sequences = tuple[tuple[int, ...], ...]


class Breakers:
    """Token sequences of texts, for one vocabulary.

    Cost     a pass over the vocabulary for each new text; the last 64 are kept.
    Source   `get_overlapping_token_sequences` of llama.cpp's DRY sampler.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[tuple[int, bytes]] = []
        self._ending: dict[int, list[tuple[int, bytes]]] = {}
        """By the last byte."""
        self._of = lru_cache(maxsize=64)(self._sequences)

    def of(self, texts: Iterable[str]) -> Sequences:
        """The tokens that contain one of the texts, each alone, and the sequences that begin with
        the end of a token and go on in the usual way."""
        return tuple(dict.fromkeys(sequence for text in texts for sequence in self._of(text)))

    def _sequences(self, text: str) -> Sequences:
        self._read_vocabulary()
        spelled = text.encode()
        found = [(token,) for token, piece in self._pieces if spelled in piece]
        whole = {token for (token,) in found}
        overlapping: dict[tuple[int, ...], None] = {}
        for size in range(1, len(spelled)):
            if spelled[size] & 0xC0 == 0x80:
                continue  # in the middle of a character
            rest = spelled[size:].decode()
            tail = self._tokenizer.encode(rest, parse_special=False, add_special=False)[:MAX_TAIL]
            for token, piece in self._ending.get(spelled[size - 1], ()):
                if token not in whole and piece.endswith(spelled[:size]):
                    overlapping[token, *tail] = None
        return (*found, *overlapping)

    def _read_vocabulary(self) -> None:
        if self._pieces:
            return
        for token in range(self._tokenizer.vocab_size):
            if piece := self._tokenizer.token_bytes(token):
                self._pieces.append((token, piece))
                self._ending.setdefault(piece[-1], []).append((token, piece))
