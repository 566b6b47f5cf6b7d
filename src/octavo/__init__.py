"""Octavo serves language models from a paged KV cache.

    from octavo import LLM, SamplingParams

    for answer in LLM("demo").generate(["Octavo is"], SamplingParams(max_tokens=16)):
        print(answer.text)

The classes named here load when they are first used; `import octavo` alone stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.errors import (
    ConfigError,
    ContextLengthExceeded,
    DownloadError,
    EngineError,
    EngineStopped,
    InvalidRequest,
    ModelFileError,
    ModelNotFound,
    OctavoError,
    Overloaded,
    RequestError,
    SetupError,
    UnknownModel,
)

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.llm import LLM
    from octavo.engine.params import SamplingParams
    from octavo.engine.session import Session
    from octavo.text.structured import Structured

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "ContextLengthExceeded",
    "DownloadError",
    "EngineConfig",
    "EngineError",
    "EngineStopped",
    "InvalidRequest",
    "LLM",
    "ModelFileError",
    "ModelNotFound",
    "OctavoError",
    "Overloaded",
    "RequestError",
    "SamplingParams",
    "Session",
    "SetupError",
    "Structured",
    "UnknownModel",
    "__version__",
]

_HOME = {
    "LLM": "octavo.engine.llm",
    "SamplingParams": "octavo.engine.params",
    "Session": "octavo.engine.session",
    "EngineConfig": "octavo.config",
    "Structured": "octavo.text.structured",
}


def __getattr__(name: str) -> Any:
    """The class of that name, from the module that holds it."""
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
