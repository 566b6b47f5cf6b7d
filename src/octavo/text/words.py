"""Words that an answer must not have, as the tokens that spell them."""

from collections.abc import Iterable

from octavo.text.tokenizer import Tokenizer


def spellings(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of each word, at the beginning of a text and after a space.

    Source  `bad_words` of vLLM's SamplingParams, which leaves out the second where it is longer.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = _encode(tokenizer, word.lstrip())
        spaced = _encode(tokenizer, " " + word.lstrip())
        found[bare] = None
        if spaced[-len(bare) :] != bare:  # else the space is a token of its own
            found[spaced] = None
    return tuple(spelling for spelling in found if spelling)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, parse_special=True, add_special=False))
