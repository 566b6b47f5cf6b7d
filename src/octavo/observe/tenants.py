"""What each tenant was served. A client chooses the names, so only so many are kept apart."""

from collections import Counter
from dataclasses import dataclass, field

MOST_TENANTS = 32
LONGEST_NAME = 64
UNNAMED, OTHERS = "default", "other"


def label_of(text: str) -> str:
    """The text as a label may be: what is no text in UTF-8 would spoil a whole scrape.

    >>> label_of("a\\udc80")
    'a?'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass(slots=True)
class Spans:
    """How many there were, and how long they took together."""

    count: int = 0
    total_s: float = 0.0

    def add(self, span_s: float) -> None:
        self.count += 1
        self.total_s += span_s


@dataclass(slots=True)
class Served:
    """What one tenant got. `answers` by how they ended; `verdicts` as in `observe.slo`."""

    answers: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    queue: Spans = field(default_factory=Spans)
    first_token: Spans = field(default_factory=Spans)


class Tenants:
    """The first tenants by name, the others as one.

    Keeps    no more than `most` names and "other", whatever clients call themselves.
    """

    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self.served: dict[str, Served] = {}

    def of(self, tenant: str) -> Served:
        return self.served.setdefault(self._label(label_of(tenant or UNNAMED)), Served())

    def _label(self, name: str) -> str:
        named = len(self.served) - (OTHERS in self.served)
        if name in self.served or (named < self._most and len(name) <= LONGEST_NAME):
            return name
        return OTHERS
