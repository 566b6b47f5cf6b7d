"""Finds out what a path holds, and loads it: a GGUF file, or a folder as transformers writes it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelFileError, ModelNotFound
from octavo.models.decoder import Decoder
from octavo.models.families import llama, qwen2
from octavo.models.families.fields import Fields
from octavo.models.families.names import WeightNames
from octavo.models.spec import ModelSpec
from octavo.models.weights.files import Checkpoint
from octavo.models.weights.gguf import GGUFFile, split_paths
from octavo.models.weights.pack import pack_weights
from octavo.models.weights.safetensors import SafetensorsCheckpoint, read_json
from octavo.ops.api import Ops

CONFIG_NAME, GENERATION_NAME = "config.json", "generation_config.json"

CONFIG_FAMILIES: dict[str, Callable[..., tuple[ModelSpec, WeightNames]]] = {
    "llama": llama.from_config,
    "mistral": llama.from_config,
    "qwen2": qwen2.from_config,
}
"""By `model_type` of config.json."""

GGUF_FAMILIES: dict[str, Callable[[GGUFFile], tuple[ModelSpec, WeightNames]]] = {
    "llama": llama.from_gguf,
    "qwen2": qwen2.from_gguf,
}
"""By `general.architecture` of GGUF metadata."""

DEFAULT_MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: what it is, and the decoder that runs it."""

    spec: ModelSpec
    decoder: Decoder

    @property
    def weight_bytes(self) -> int:
        return self.decoder.weights.nbytes


def read_spec(path: Path | str) -> ModelSpec:
    """What the model at `path` is, without reading its weights.

    Raises   ModelNotFound; ModelFileError when it is damaged or of a kind that Octavo does not run.
    """
    return _open(Path(path))[0]


def load_model(
    path: Path | str,
    ops: Ops,
    max_tokens: int,
    *,
    max_rows: int | None = None,
    max_context: int | None = None,
    threads: int = 2,
) -> Model:
    """Load the model at `path` for steps of up to `max_tokens` tokens and `max_rows` logit rows.

    `max_context` shortens the context that the model allows. `threads` read and pack layers.

    Cost     every tensor is read once and dropped once packed, so that memory peaks little above
             the packed weights.
    Raises   as `read_spec`; ModelFileError names a tensor that is missing, left over, of another
             shape than the configuration says, or not finite.
    """
    spec, names, checkpoint = _open(Path(path))
    weights = pack_weights(spec, names, checkpoint, ops, threads=threads)
    decoder = Decoder(
        spec,
        weights,
        ops,
        max_tokens=max_tokens,
        max_rows=min(max_tokens, max_rows or DEFAULT_MAX_ROWS),
        max_context=min(spec.max_context, max_context or spec.max_context),
    )
    return Model(spec, decoder)


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that `path` is or holds, the first part of a split one; None if it holds none.

    Raises   ModelFileError when a folder holds several models.
    """
    if not path.is_dir():
        return split_paths(path)[0]
    if (path / CONFIG_NAME).exists():
        return None
    models = sorted({split_paths(file)[0] for file in path.glob("*.gguf")})
    if len(models) > 1:
        found = ", ".join(model.name for model in models)
        raise ModelFileError(f"{path}: holds several models: {found}; name one of these files")
    return models[0] if models else None


def _open(path: Path) -> tuple[ModelSpec, WeightNames, Checkpoint]:
    if not path.exists():
        raise ModelNotFound(f"{path} does not exist")
    gguf_path = gguf_in(path)
    if gguf_path is not None:
        return _open_gguf(gguf_path)
    if not (path / CONFIG_NAME).exists():
        raise ModelNotFound(f"{path} holds neither {CONFIG_NAME} nor a GGUF file")
    return _open_folder(path)


def _open_gguf(path: Path) -> tuple[ModelSpec, WeightNames, Checkpoint]:
    file = GGUFFile.open(path)
    architecture = file.metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise ModelFileError(
            f"{path}: general.architecture is {architecture!r}, expected one of "
            f"{', '.join(GGUF_FAMILIES)}"
        )
    return *family(file), file


def _open_folder(path: Path) -> tuple[ModelSpec, WeightNames, Checkpoint]:
    config = read_json(path / CONFIG_NAME)
    kind = config.get("model_type")
    family = CONFIG_FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ModelFileError(
            f"{path / CONFIG_NAME}: model_type is {kind!r}, expected one of "
            f"{', '.join(CONFIG_FAMILIES)}"
        )
    generation_path = path / GENERATION_NAME
    generation = read_json(generation_path) if generation_path.exists() else {}
    checkpoint = SafetensorsCheckpoint.open(path)
    spec, names = family(
        Fields(path / CONFIG_NAME, config), Fields(generation_path, generation), checkpoint
    )
    return spec, names, checkpoint
