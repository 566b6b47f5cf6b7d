"""The demo model's own tokenizer."""

from pathlib import Path
from typing import Any

import pytest

from octavo.models.weights.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_metadata(demo_model_path: Path) -> dict[str, Any]:
    return dict(GGUFFile.open(demo_model_path).metadata)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(demo_metadata)
