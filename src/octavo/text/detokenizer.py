"""Token ids to text one at a time, so that joined pieces are the text of them all."""

import codecs

from octavo.text.tokenizer import Tokenizer


class Detokenizer:
    """Text as soon as its bytes are certain; special tokens are none, but for those `shown`.

    Keeps  joined results of `push` and `flush` = `tokenizer.decode` of the same ids; a character
           spread over tokens comes out whole, with the token that completes it; U+FFFD comes out
           only where the bytes cannot become a character any more.
    Cost   O(bytes of the token).
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool, shown: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still unfinished."""
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)
