"""How much is tried: enough for every change, or, with `make soak`, as much as a night allows."""

import os
from collections.abc import Sequence as Items
from typing import TypeVar

from hypothesis import strategies as st

Item = TypeVar("Item")

SOAK = os.environ.get("OCTAVO_TEST_SOAK") == "1"
CASES = 10_000 if SOAK else 200
"""Examples of each state machine, and random runs."""


def one_of(data: st.DataObject, items: Items[Item]) -> Item:
    """One of what there is, drawn by its place.

    Hypothesis keeps what it draws from: a sequence that has ended would live on there, and so would
    its prefixes, which the prefix cache knows for as long as somebody has them.
    """
    return items[data.draw(st.integers(0, len(items) - 1))]
