"""Records the kept journals: `python -m tests.replay.record`, after a change of decisions on
purpose. The same runs each time, so that a diff of the files shows what the change does."""

from pathlib import Path
from random import Random

from tests.core.serving import Setup
from tests.observe.recording import core_setup, random_run, watched

from octavo.observe.journal import Journal

SETUPS = {
    "crowded": Setup(blocks=12, block_size=2, sequences=4, tokens=9, depth=2, waiting=1),
    "swapped": Setup(
        blocks=9,
        block_size=2,
        sequences=3,
        depth=3,
        host_blocks=12,
        preemption="swap",
        watermark_blocks=0,
    ),
    "groups": Setup(blocks=12, block_size=4, windows=(None, 7), sequences=3, tokens=16),
}


def record(name: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    journal = Journal(path, core_setup(SETUPS[name]), octavo="kept", started_at=0.0)
    random_run(Random(name), watched(SETUPS[name], journal))
    journal.close()
    path.chmod(0o644)


if __name__ == "__main__":
    for name in SETUPS:
        record(name, Path(__file__).parent / f"{name}.journal")
