"""Where a step's time goes: by op and layer, and what Python spends around the ops.

    plan ── batch ── embed, layers … head ── sampling ── commit ── text
                     └ between: Python that calls one op after another

The engine is built with ops that take the time of each call (`ops.measured`), and told to an
observer; nothing in kernels, core or decoder knows of it. What counting costs takes no part.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.bench.offline import ceilings_for, drive, ticket_of
from octavo.config import EngineConfig
from octavo.core.calls import Answer, Call, Commit, Plan
from octavo.core.events import Event, Refused, Token
from octavo.engine.build import build
from octavo.engine.door import Ticket
from octavo.models.weights.pack import Weights
from octavo.ops.ceilings import Ceilings
from octavo.ops.costs import Cost, Products
from octavo.ops.measured import Measured, MeasuredOps
from octavo.simulate.workload import WorkItem

PLANNING, BATCH, BETWEEN, SAMPLING, COMMIT, TEXT, REST = PYTHON = (
    "planning",
    "batch",
    "between ops",
    "sampling",
    "commit",
    "text",
    "rest",
)
"""What is no op: making the plan; its arrays; the decoder's own Python; drawing tokens but for the
kernels of it; the plan's commit and its observers; token ids to text; all else of the loop."""

PARTS = ("qkv", "output", "gate, up", "down")
ATTENTION = {"rope_write_kv": "rotary, KV", "paged_attention": "attention"}


NOTHING = Cost(0, 0)


class Place(NamedTuple):
    """Which part of the network; `layer` is None outside the layers."""

    part: str
    layer: int | None = None


@dataclass(slots=True)
class Total:
    """What all calls at one place took together."""

    calls: int = 0
    seconds: float = 0.0
    size_bytes: int = 0
    operations: int = 0
    form: Products = "bf16"

    def add(self, seconds: float, cost: Cost = NOTHING, form: Products = "bf16") -> None:
        self.calls += 1
        self.seconds += seconds
        self.size_bytes += cost.size_bytes
        self.operations += cost.operations
        self.form = form


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """One place, or one part of all layers. `limit_share` is the least time over that it took: the
    larger of its bytes at the speed of reading and its operations at that of multiplying; None for
    Python."""

    part: str
    layer: int | None
    calls: int
    seconds: float
    share: float
    size_bytes: int
    operations: int
    gb_s: float
    gops: float
    limit_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One run. `rows` by part, the longest first; `layers` the same by layer. `wall_s` is without
    what measuring took."""

    rows: tuple[ProfileRow, ...]
    layers: tuple[ProfileRow, ...]
    wall_s: float
    steps: int
    tokens: int
    ceilings: Ceilings


@dataclass(slots=True)
class Recorder:
    """Adds up what it is told: an observer of the engine, and the listener of its ops.

    Keeps    times lie in order and none counts twice: `_at_s` is the end of what was counted last.
    """

    totals: dict[Place, Total] = field(default_factory=lambda: defaultdict(Total))
    measuring_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    _places: dict[int, Place] = field(default_factory=dict)
    _layer: int | None = None
    _gap: str = BATCH
    """What time between two ops belongs to."""
    _at_s: float = 0.0

    def know(self, weights: Weights) -> None:
        """From now on calls are known by their weights."""
        self._places = {
            id(matrix): Place(part, index)
            for index, layer in enumerate(weights.layers)
            for part, matrices in zip(
                PARTS,
                (layer.qkv, (layer.output,), (layer.gate_up,), (layer.down,)),
                strict=True,
            )
            for matrix in matrices
        }

    def told(self, call: Measured) -> None:
        place = self._place(call)
        if place.part == "embed":
            self.totals[Place(BATCH)].add(call.began_s - self._at_s)
            self._gap = BETWEEN
        else:
            self.totals[Place(self._gap)].add(call.began_s - self._at_s)
        self.totals[place].add(call.ended_s - call.began_s, call.cost, call.form)
        if place.part == "head":
            self._gap = SAMPLING
        self._at_s = time.monotonic()
        self.measuring_s += self._at_s - call.ended_s

    def observe(self, call: Call, answer: Answer) -> None:
        now = time.monotonic()
        if isinstance(call, Plan):
            self.totals[Place(PLANNING)].add(now - call.now)
            self._gap, self.steps = BATCH, self.steps + 1
        elif isinstance(call, Commit):
            self.totals[Place(self._gap)].add(call.now - self._at_s)
            self.totals[Place(COMMIT)].add(now - call.now)
            assert isinstance(answer, tuple)
            self.tokens += sum(isinstance(event, Token) for event in answer)
        self._at_s = time.monotonic()

    def _place(self, call: Measured) -> Place:
        if call.op == "embed":
            self._layer = None
            return Place("embed")
        if call.op == "linear":
            place = self._places.get(id(call.weight), Place("head"))
            self._layer = place.layer
            return place
        if call.op in ATTENTION:
            return Place(ATTENTION[call.op], self._layer)
        return Place(call.op)


def profile(items: Sequence[WorkItem], config: EngineConfig) -> Profile:
    """Run the requests, as they arrive, on a fresh engine.

    Raises   as `bench.offline.measure`.
    """
    recorder = Recorder()
    built = build(config, observers=[recorder], wrap=lambda ops: MeasuredOps(ops, recorder.told))
    recorder.know(built.weights)
    work = [(item, ticket_of(built, item)) for item in items]
    ceilings = ceilings_for(built)
    tickets = {ticket.request.id: ticket for _, ticket in work}
    busy_s = 0.0

    def stepped(events: Sequence[Event], seconds: float) -> None:
        nonlocal busy_s
        text_s = _take(events, tickets)
        recorder.totals[Place(TEXT)].add(text_s)
        busy_s += seconds + text_s

    drive(built.engine, work, stepped)
    return summary(recorder, busy_s - recorder.measuring_s, ceilings)


def _take(events: Sequence[Event], tickets: Mapping[str, Ticket]) -> float:
    """Turn tokens into text; the seconds that took."""
    started = time.monotonic()
    for event in events:
        if not isinstance(event, Refused):
            tickets[event.request_id].assembler_of(event).take(event)
    return time.monotonic() - started


def summary(recorder: Recorder, wall_s: float, ceilings: Ceilings) -> Profile:
    """What was recorded in `wall_s` seconds, and the rest that nobody told of."""
    totals = dict(recorder.totals)
    known_s = sum(total.seconds for total in totals.values())
    totals[Place(REST)] = Total(calls=recorder.steps, seconds=max(0.0, wall_s - known_s))
    parts: dict[str, dict[Place, Total]] = defaultdict(dict)
    for place, total in totals.items():
        parts[place.part][place] = total
    rows = [_row(Place(part), list(of.values()), wall_s, ceilings) for part, of in parts.items()]
    layers = [
        _row(place, [total], wall_s, ceilings)
        for place, total in totals.items()
        if place.layer is not None
    ]
    return Profile(
        rows=tuple(sorted(rows, key=lambda row: -row.seconds)),
        layers=tuple(layers),
        wall_s=wall_s,
        steps=recorder.steps,
        tokens=recorder.tokens,
        ceilings=ceilings,
    )


def _row(place: Place, totals: Sequence[Total], wall_s: float, ceilings: Ceilings) -> ProfileRow:
    seconds = sum(total.seconds for total in totals)
    size_bytes = sum(total.size_bytes for total in totals)
    operations = sum(total.operations for total in totals)
    floor_s = sum(
        ceilings.floor_s(Cost(total.size_bytes, total.operations), total.form) for total in totals
    )
    over = max(seconds, 1e-9)
    return ProfileRow(
        part=place.part,
        layer=place.layer,
        calls=sum(total.calls for total in totals),
        seconds=seconds,
        share=seconds / max(wall_s, 1e-9),
        size_bytes=size_bytes,
        operations=operations,
        gb_s=size_bytes / over / 1e9,
        gops=operations / over / 1e9,
        limit_share=None if place.part in PYTHON else floor_s / over,
    )
