"""How much is tried: enough for every change, or, with `make soak`, as much as a night allows."""

import os

SOAK = os.environ.get("OCTAVO_TEST_SOAK") == "1"
CASES = 10_000 if SOAK else 200
"""Examples of each state machine, and random runs."""
