"""Features enter by four doors: demand, budget, block manager, policy. The scheduler names none."""

import re
from pathlib import Path

import octavo.core.scheduler

FEATURES = (
    "speculative|speculation|drafter|lora|adapter_slot|grammar|schema|logit|beam|branch|swap|tier"
    "|host|disk|peer|transfer|handoff|sliding|window|multimodal|image|attachment|quantised|cuda"
    "|gpu|moe|expert|embedding|pooling|tool|chat"
)


def test_the_scheduler_names_no_feature() -> None:
    text = Path(octavo.core.scheduler.__file__).read_text(encoding="utf-8").lower()
    assert not re.findall(rf"\b(?:{FEATURES})", text)
