from collections.abc import Callable
from typing import Any

from octavo.ops.api import BF16, F32, F64, I32, U8, U16

def available_sets() -> list[str]: ...

class Packed:
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...

class Backend:
    def __init__(self, threads: int, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def pack(
        self,
        matrices: list[tuple[int, U8]],
        columns: int,
        encoding: int,
        gated: bool,
        done: Callable[[int], None] | None,
    ) -> tuple[Packed, int]: ...
    def pack_quantised(
        self,
        matrices: list[tuple[U8, U16, U16 | None, U8 | None]],
        columns: int,
        encoding: int,
        gated: bool,
    ) -> Packed: ...
    def unpack(self, packed: Any, out: BF16) -> None: ...
    def embed(self, table: Any, tokens: I32, out: F32) -> None: ...
    def linear(
        self,
        x: F32,
        weight: Any,
        out: F32,
        norm_weight: F32 | None,
        eps: float,
        bias: F32 | None,
        add: bool,
        gate: int,
    ) -> None: ...
    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None: ...
    def argmax(self, logits: F32, out: I32, logprob: F32) -> None: ...
    def likeliest(self, logits: F32, rows: I32, ids: I32, values: F32) -> None: ...
    def add_bias(
        self, logits: F32, entries: tuple[I32, I32, I32], bias: F32, before: F32
    ) -> None: ...
    def penalise(
        self,
        logits: F32,
        entries: tuple[I32, I32, I32],
        penalties: tuple[I32, F32, F32, F32],
        before: F32,
    ) -> None: ...
    def mask(self, logits: F32, rows: I32, allowed: I32) -> None: ...
    def draw(
        self,
        logits: F32,
        rows: I32,
        how: tuple[F32, I32, F64, F32, F64, F32, F64, F64],
        out: I32,
    ) -> None: ...
    def rope_write_kv(
        self,
        qkv: F32,
        rows: tuple[I32, I32, I32],
        cos: F32 | None,
        sin: F32 | None,
        pool: BF16,
        layer: int,
        table: I32,
    ) -> None: ...
    def paged_attention(
        self,
        qkv: F32,
        rows: tuple[I32, I32, I32],
        pool: BF16,
        layer: int,
        table: I32,
        out: F32,
        scale: float,
        window: int,
    ) -> None: ...
    def copy_blocks(self, pool: BF16, sources: I32, targets: I32) -> None: ...
    def take_rows(self, x: F32, rows: I32, out: F32) -> None: ...
    def multiply(self, operands: U8, rounds: int, encoding: int, out: F32) -> float: ...
    def read(self, operands: U8, out: F32) -> None: ...
