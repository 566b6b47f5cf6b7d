"""Hypothesis at depth for the core: `pytest tests/core --hypothesis-profile=deep`."""

from hypothesis import settings

settings.register_profile(
    "deep", settings.get_profile("octavo"), max_examples=3000, stateful_step_count=100
)
