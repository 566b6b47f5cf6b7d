"""Echo: the prompt before its answer, as completions show it if asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`offsets` are where the texts of the `tokens` begin in `text`, in characters."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]


def echo_of(
    prompt: str | Sequence[int],
    tokens: tuple[int, ...],
    tokenizer: Tokenizer,
    *,
    skip_special: bool,
) -> Echo:
    """A text comes back as it was sent, ids as their text. What the model wants before a text is no
    part of it."""
    spelled = isinstance(prompt, str)
    text = (
        prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special=skip_special)
    )
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special and not spelled)
    offsets, at = [], 0
    for index, token in enumerate(tokens):
        offsets.append(at)
        begins = tokenizer.token_bytes(token).decode(errors="replace")
        if spelled and index == 0 and token in tokenizer.special_ids:
            at += len(begins) if text.startswith(begins) else 0
        else:
            at += len(detokenizer.push(token))
    return Echo(text, tokens, tuple(offsets))
