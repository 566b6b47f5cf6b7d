"""The draft model: found, opened, and checked against the model for which it guesses."""

from dataclasses import dataclass
from pathlib import Path

from octavo.engine.loading import tokenizer_of
from octavo.errors import ConfigError, SetupError
from octavo.models.loader import OpenModel, open_model
from octavo.models.reference import resolve_reference


@dataclass(frozen=True, slots=True)
class Found:
    """A model that is there and opened; no weight is read yet."""

    path: Path
    opened: OpenModel


def find_draft(reference: str, model: Found, *, progress: bool = True) -> Found:
    """The draft model of this name.

    Raises   ConfigError: it cannot be opened or cannot guess for `model`, and why not.
    """
    try:
        path = resolve_reference(reference, progress=progress)
        draft = Found(path, open_model(path))
    except SetupError as error:
        raise ConfigError(f"draft_model {reference}: {error}") from error
    reason = _unfit(draft, model)
    if reason:
        raise ConfigError(f"draft_model {reference}: {reason}; take another, or none")
    return draft


def _unfit(draft: Found, model: Found) -> str:
    """Why it cannot guess for the model; empty if it can.

    Its KV lies in the blocks of the model's first layer group, which must keep every position.
    """
    own, other = draft.opened.spec, model.opened.spec
    if own.vocab_size != other.vocab_size:
        return f"it has {own.vocab_size} tokens, the model {other.vocab_size}"
    if other.groups[0].window is not None or [group.window for group in own.groups] != [None]:
        return "layers that see a window are not supported with a draft model"
    size = own.vocab_size
    own_pieces = tokenizer_of(draft.path, draft.opened).pieces(size)
    pieces = tokenizer_of(model.path, model.opened).pieces(size)
    differing = [token for token in range(size) if own_pieces[token] != pieces[token]]
    if differing:
        token = differing[0]
        return (
            f"{len(differing)} of its {size} tokens mean something else: token {token} is"
            f" {own_pieces[token]!r}, the model's {pieces[token]!r}"
        )
    return ""
