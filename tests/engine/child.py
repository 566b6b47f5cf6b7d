"""An engine process without a model: the oracle answers. Some tokens of a prompt are deadly.

DEADLY     the process dies when it is to draw the answer's token number DEADLY_AT
HANGING    there it never comes back
WEARING    the process dies when it is to draw a second token of the answer
"""

import os
import sys
import time

from octavo.core.block_manager import BlockManager
from octavo.core.plan import Runner, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.engine.board import Announcing, Board
from octavo.engine.crank import Crank
from octavo.engine.engine import Engine
from octavo.engine.process import main
from octavo.engine.wire import Setup
from octavo.errors import ConfigError
from octavo.observe.lives import Lives
from octavo.simulate.oracle import OracleRunner

VOCABULARY = 97
DEADLY, HANGING, WEARING, AT = 1001, 1002, 1003, 3
STEP_S = 0.002
"""So that a test meets it in the middle of something."""
REFUSING, SILENT = "refuse", "die"
"""Models that cannot be built."""
SLEEPING = "sleep"
"""One whose second engine is never ready."""


class Dangerous:
    """A runner that dies over some requests, and else answers as the oracle does."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._rows: dict[int, Request] = {}
        self._worn = False

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(STEP_S)
        for bind in plan.binds:
            self._rows[bind.row] = bind.request
        for span in plan.spans:
            prompt = self._rows[span.row].prompt
            if span.samples and span.stop - len(prompt) >= AT:
                if DEADLY in prompt:
                    os._exit(3)
                if HANGING in prompt:
                    time.sleep(3600)
            if span.samples and WEARING in prompt:
                if self._worn:
                    os._exit(3)
                self._worn = True
        return self._runner.execute(plan)


def build(setup: Setup, board: Board) -> Crank:
    if setup.config.model == REFUSING:
        raise ConfigError("no such model: name another", param="model")
    if setup.config.model == SILENT:
        os._exit(7)
    if setup.config.model == SLEEPING and setup.restarts == 1:
        time.sleep(3600)
    blocks = setup.resolved.blocks
    oracle = OracleRunner(blocks=blocks, block_size=4, vocabulary=VOCABULARY)
    scheduler = Scheduler(BlockManager(blocks=blocks, block_size=4), setup.resolved.limits)
    lives = Lives()
    engine = Engine(scheduler, Announcing(Dangerous(oracle), board), observers=[lives])
    return Crank(engine, lives)


if __name__ == "__main__":
    sys.exit(main(build))
