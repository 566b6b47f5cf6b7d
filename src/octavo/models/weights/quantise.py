"""In what form each weight matrix is kept.

    none     bfloat16
    stored   the integers of the checkpoint where it holds some that the kernels run; else bfloat16
    int8     8 bits; integers of 8 bits or fewer that the checkpoint holds are kept as they are
    int4     4 bits, and 8 for the embedding and the head, whose errors nothing evens out

Matrices that are stacked take one form, the least that all of them fit into. How floats become
integers is told in `octavo.ops.integers`.
"""

from collections.abc import Iterable

from octavo.config import Quantization
from octavo.ops.api import BF16_FORM, INT4, INT8, Form
from octavo.ops.encodings import STORED_FORMS


def form_of(kinds: Iterable[str], quantization: Quantization, *, table: bool = False) -> Form:
    """The form of matrices stored as `kinds` and stacked; `table`: of the embedding or the head."""
    stored = {STORED_FORMS.get(kind, BF16_FORM) for kind in kinds}
    if quantization == "none":
        return BF16_FORM
    if quantization == "stored":
        return _common(stored)
    if quantization == "int8" or table:
        return INT8
    return stored.pop() if len(stored) == 1 and max(form.bits for form in stored) == 4 else INT4


def _common(forms: set[Form]) -> Form:
    """The least form that holds all of these exactly."""
    if len(forms) == 1:
        return next(iter(forms))
    return INT8 if forms <= {INT8, INT4} else BF16_FORM
