"""Finds out what a path holds, and loads it: a GGUF file, or a folder as transformers writes it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.config import Quantization
from octavo.errors import ModelFileError, ModelNotFound
from octavo.models.decoder import Decoder
from octavo.models.families import llama, qwen2
from octavo.models.families.fields import Fields
from octavo.models.families.names import WeightNames
from octavo.models.spec import ModelSpec
from octavo.models.weights.files import Checkpoint
from octavo.models.weights.gguf import GGUFFile, split_paths
from octavo.models.weights.pack import pack_weights, weights_bytes
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


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model whose headers are read and checked, and whose weights are not read yet."""

    spec: ModelSpec
    names: WeightNames
    checkpoint: Checkpoint

    def weights_bytes(self, quantization: Quantization) -> int:
        """What the weights take in memory."""
        return weights_bytes(self.spec, self.names, self.checkpoint, quantization)


def open_model(path: Path | str) -> OpenModel:
    """Open the model at `path`: a GGUF file, or a folder that holds one model.

    Raises   ModelNotFound; ModelFileError when it is damaged or of a kind that Octavo does not run.
    """
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"{path} does not exist")
    gguf_path = gguf_in(path)
    if gguf_path is not None:
        return _open_gguf(gguf_path)
    if not (path / CONFIG_NAME).exists():
        raise ModelNotFound(f"{path} holds neither {CONFIG_NAME} nor a GGUF file")
    return _open_folder(path)


def read_spec(path: Path | str) -> ModelSpec:
    """What the model at `path` is, without reading its weights. Raises as `open_model`."""
    return open_model(path).spec


def load_model(
    source: OpenModel | Path | str,
    ops: Ops,
    max_tokens: int,
    *,
    quantization: Quantization = "none",
    max_rows: int | None = None,
    max_context: int | None = None,
) -> Model:
    """Load a model for steps of up to `max_tokens` tokens and `max_rows` logit rows.

    `source` is a path, or what `open_model` gave for it, which saves reading the headers again.
    `quantization` says in what form weights are kept (`weights.quantise`). `max_context` shortens
    the context that the model allows.

    Cost     every tensor is read once and dropped once packed, so that memory peaks little above
             the packed weights.
    Raises   as `open_model`; ModelFileError names a tensor that is missing, left over, of another
             shape than the configuration says, or not finite.
    """
    opened = source if isinstance(source, OpenModel) else open_model(source)
    spec = opened.spec
    weights = pack_weights(spec, opened.names, opened.checkpoint, ops, quantization)
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


def _open_gguf(path: Path) -> OpenModel:
    file = GGUFFile.open(path)
    architecture = file.metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise ModelFileError(
            f"{path}: general.architecture is {architecture!r}, expected one of "
            f"{', '.join(GGUF_FAMILIES)}"
        )
    spec, names = family(file)
    return OpenModel(spec, names, file)


def _open_folder(path: Path) -> OpenModel:
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
    return OpenModel(spec, names, checkpoint)
