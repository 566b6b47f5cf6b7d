"""Defaults: how a model wants to be sampled, where a request does not say."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest, ModelFileError
from octavo.models.loader import GENERATION_NAME
from octavo.models.weights.safetensors import read_json

logger = logging.getLogger(__name__)

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Those of generation_config.json that are defaults, as vLLM takes them; `do_sample` is none."""


def model_defaults(path: Path) -> SamplingParams:
    """What stands in the generation_config.json of a model's folder, over our own defaults.

    Raises   ModelFileError: the file is damaged, or a value in it out of range.
    """
    file = path / GENERATION_NAME
    if not file.is_file():
        return SamplingParams()
    given = {name: value for name, value in _known(read_json(file)).items() if value is not None}
    try:
        defaults = SamplingParams(**given)
    except InvalidRequest as error:
        raise ModelFileError(
            f"{file}: {error}; correct it, or start with --generation-config none"
        ) from error
    if given:
        logger.info("defaults of the model: %s", ", ".join(f"{k} {v}" for k, v in given.items()))
    return defaults


def _known(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: content[name] for name in FIELDS if name in content}
