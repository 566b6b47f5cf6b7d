"""A draft model of an engine: which is taken, which is refused and why, and what it costs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.bench.tiny import save_tiny
from tests.models import hf
from tests.text.vocabulary import metadata_of

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.core.acceptance import Acceptance
from octavo.engine.build import Built, build, prepare
from octavo.engine.drafts import Found, find_draft
from octavo.engine.supervisor import EngineProcess
from octavo.errors import ConfigError
from octavo.models.loader import open_model
from octavo.models.spec import layer_groups
from octavo.resolve import DEFAULT_DRAFTS
from octavo.serve.main import engine_client
from octavo.text.tokenizer import Tokenizer
from octavo.units import MIB


@pytest.fixture
def tiny(rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return save_tiny(rng, tmp_path, monkeypatch)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bytes]]:
    """The pieces of the tokenizer of each model, by its name; single bytes unless set."""
    set_for: dict[str, list[bytes]] = {}

    def tokenizer_of(path: Path, _: object) -> Tokenizer:
        return Tokenizer.from_gguf(metadata_of(set_for.get(path.name, [])))

    monkeypatch.setattr("octavo.engine.drafts.tokenizer_of", tokenizer_of)
    return set_for


@pytest.fixture
def small(rng: np.random.Generator, tmp_path: Path, pieces: dict[str, list[bytes]]) -> Path:
    return saved(rng, tmp_path / "small", num_hidden_layers=1)


def saved(rng: np.random.Generator, path: Path, **sizes: int) -> Path:
    hf.random_model(rng, "llama", **sizes).save_pretrained(path)
    return path


def built(model: Path, **settings: Any) -> Built:
    return build(EngineConfig(model=str(model), threads=1, kv_cache_memory=MIB, **settings))


def found(path: Path) -> Found:
    return Found(path, open_model(path))


def test_a_block_has_the_kv_of_both(tiny: Path, small: Path) -> None:
    """Of three layers and of one, each with two heads of 16."""
    alone, both = built(tiny), built(tiny, draft_model=str(small))
    assert alone.resolved.block_bytes == 16 * 3 * 2 * 2 * 32
    assert both.resolved.block_bytes == 16 * 4 * 2 * 2 * 32
    assert both.resolved.weights_bytes > alone.resolved.weights_bytes
    assert both.resolved.headroom_bytes > alone.resolved.headroom_bytes
    assert alone.resolved.limits.drafts == both.resolved.limits.drafts == DEFAULT_DRAFTS


@pytest.mark.parametrize("size", [90, 101])
def test_other_vocabularies_are_refused(
    rng: np.random.Generator, tiny: Path, tmp_path: Path, size: int
) -> None:
    other = saved(rng, tmp_path / "other", vocab_size=size)
    with pytest.raises(ConfigError, match=f"{other}: it has {size} tokens, the model 97; take"):
        built(tiny, draft_model=str(other))


def test_tokens_that_mean_something_else_are_refused(
    tiny: Path, small: Path, pieces: dict[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces_of = Tokenizer.pieces
    monkeypatch.setattr(
        Tokenizer,
        "pieces",
        lambda self, count: [
            piece if number != 70 or self.vocab_size == 259 else b"?"
            for number, piece in enumerate(pieces_of(self, count))
        ],
    )
    find_draft(str(small), found(tiny))
    pieces["small"] = [b"more"]
    with pytest.raises(ConfigError, match="1 of its 97 tokens mean something else: token 70 is"):
        find_draft(str(small), found(tiny))


def test_windows_are_refused(tiny: Path, small: Path) -> None:
    """The first group of the model must keep every position, and the draft model has no other."""
    model, slides = found(tiny), layer_groups([20, 20, 20])
    spec = replace(model.opened.spec, groups=slides)
    sliding = replace(model, opened=replace(model.opened, spec=spec))
    with pytest.raises(ConfigError, match="see a window"):
        find_draft(str(small), sliding)
    find_draft(str(small), model)


def test_one_that_would_never_guess_is_refused(tiny: Path, small: Path) -> None:
    with pytest.raises(ConfigError, match="max_draft_tokens is 0: it would never guess"):
        built(tiny, draft_model=str(small), max_draft_tokens=0)


def test_one_that_is_not_there_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft_model .*nowhere.*: no such file"):
        built(tiny, draft_model=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("with_draft", [True, False])
def test_the_engine_process_is_told_of_it(tiny: Path, small: Path, with_draft: bool) -> None:
    name = str(small) if with_draft else None
    config = EngineConfig(model=str(tiny), draft_model=name, kv_cache_memory=MIB)
    link = engine_client(config, prepare(config))._link
    assert isinstance(link, EngineProcess)
    link._context.destroy()  # it is never started
    assert link._setup.draft_path == name


def test_answers_come_with_what_was_guessed(
    demo_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model as its own draft model: nearly every guess is right, and the receipt, the
    status and the answers say so."""
    monkeypatch.setattr(Acceptance, "worth", lambda self, price, debt: 3)
    settings: dict[str, Any] = {"kv_cache_memory": "64MiB", "log_level": "error"}
    params = [
        SamplingParams(temperature=0, max_tokens=40, logprobs=2),
        SamplingParams(temperature=0.9, seed=5, max_tokens=40, n=2),
    ]
    prompts = ["The harbour master kept a ledger of", "Once upon a time"]
    plain = LLM(str(demo_model_path), max_draft_tokens=0, **settings)
    drafted = LLM(str(demo_model_path), draft_model=str(demo_model_path), **settings)
    expected = plain.generate(prompts, params, progress=False)
    answers = drafted.generate(prompts, params, progress=False)
    for one, other in zip(answers, expected, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    receipts = [one.receipt for one in answers]
    accepted = sum(one.accepted_tokens for one in receipts)
    guessed = sum(one.drafted_tokens for one in receipts)
    assert all(one.receipt.drafted_tokens == 0 for one in expected)
    assert 0.5 * guessed < accepted <= guessed
