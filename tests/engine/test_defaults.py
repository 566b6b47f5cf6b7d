"""How a model wants to be sampled: its generation_config.json, where nobody says otherwise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.bench.tiny import save_tiny

from octavo import LLM
from octavo.engine.defaults import model_defaults
from octavo.engine.params import SamplingParams
from octavo.errors import ModelFileError
from octavo.units import MIB

WANTED = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}


def written(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", WANTED)
def test_each_field_of_the_file_is_a_default(tmp_path: Path, name: str) -> None:
    defaults = model_defaults(written(tmp_path, {name: WANTED[name]}))
    assert defaults == SamplingParams(**{name: WANTED[name]})
    assert defaults != SamplingParams()


def test_what_is_absent_null_or_of_another_purpose_changes_nothing(tmp_path: Path) -> None:
    assert model_defaults(tmp_path) == SamplingParams()
    assert model_defaults(tmp_path / "model.gguf") == SamplingParams()
    others = {"temperature": None, "do_sample": True, "eos_token_id": [1, 2], "pad_token_id": 0}
    assert model_defaults(written(tmp_path, others)) == SamplingParams()


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 2), ("top_k", "many")])
def test_a_value_out_of_range_is_named_with_its_file(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(ModelFileError, match=rf"generation_config\.json: .*{name}.*none"):
        model_defaults(written(tmp_path, {name: value}))


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelFileError, match="not JSON"):
        model_defaults(tmp_path)


@pytest.mark.parametrize(("setting", "wanted"), [("auto", 0.0), ("none", 1.0)])
def test_a_model_answers_as_it_wants_unless_it_is_told_otherwise(
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: Any,
    wanted: float,
) -> None:
    folder = written(save_tiny(rng, tmp_path, monkeypatch), {"temperature": 0.0})
    llm = LLM(str(folder), threads=1, kv_cache_memory=MIB, generation_config=setting)
    assert llm.default_params == SamplingParams(temperature=wanted)
    (likeliest,) = llm.generate([1, 2, 3], SamplingParams(temperature=0.0))
    plain = [llm.generate([[1, 2, 3]])[0], llm.session([1, 2, 3]).generate()]
    same = [answer.token_ids == likeliest.token_ids for answer in plain]
    assert same == [wanted == 0.0] * 2
