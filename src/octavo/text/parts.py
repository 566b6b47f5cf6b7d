"""Parts: what an answer says, thinks and calls, in the order in which it does."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning before an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A call of the function `name` begins, the `index`-th of its answer, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """The next piece of the arguments of a call, which joined are a JSON object."""

    index: int
    text: str


Part = Said | Thought | Begun | Argued
