"""In what form each weight matrix is kept.

    none     bfloat16
    stored   the integers of the checkpoint, where it holds some; else bfloat16
    int8     8 bits; symmetric integers without multiples that the checkpoint holds are kept
    int4     4 bits, and 8 for the embedding and the head, whose errors nothing evens out

A gated pair takes one form, the least that holds both; queries, keys and values that differ keep
their own. `octavo.ops.stored` says which forms hold what, `octavo.ops.integers` how floats become
integers.
"""

from collections.abc import Iterable

from octavo.config import Quantization
from octavo.ops.api import BF16_FORM, INT4, INT8, Form
from octavo.ops.stored import least_form


def form_of(kinds: Iterable[str], quantization: Quantization, *, table: bool = False) -> Form:
    """The form of matrices stored as `kinds` and packed together; `table`: of the embedding or the
    head."""
    if quantization == "none":
        return BF16_FORM
    if quantization == "stored":
        return least_form(kinds)
    if quantization == "int8" or table:
        return INT8
    stored = least_form(kinds)
    return stored if stored.bits == 4 else INT4
