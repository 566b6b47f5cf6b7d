"""A tiny random model that a whole engine can be built from."""

from pathlib import Path

import numpy as np
import pytest
from tests.models import hf
from tests.text.vocabulary import metadata_of

from octavo.text.tokenizer import Tokenizer

VOCABULARY = hf.SIZES["vocab_size"]
LAYERS = hf.SIZES["num_hidden_layers"]


def save_tiny(rng: np.random.Generator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model in a folder of its own; engines built in this test give it a tokenizer of bytes."""
    path = folder / "tiny"
    hf.random_model(rng, "llama").save_pretrained(path)
    tokenizer = Tokenizer.from_gguf(metadata_of([]))
    monkeypatch.setattr("octavo.engine.build.tokenizer_of", lambda *_: tokenizer)
    return path
