"""Reader: one answer, from its text to what it thinks, says and calls."""

from octavo.text.assembler import Delta, Ended
from octavo.text.parts import Part, Said, Thought
from octavo.text.thoughts import ThoughtParser
from octavo.text.tools.parser import CallParser


class Reader:
    """Takes the pieces of one answer in their order.

    Keeps  joined parts do not depend on how the text was cut into pieces.
    """

    def __init__(
        self, thoughts: ThoughtParser | None = None, calls: CallParser | None = None
    ) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self._unsure_tokens = 0
        """Those that may still be of the mark before it."""
        self.reasoning_tokens = 0
        """Those of the reasoning, with the marks around it."""

    @property
    def reasons(self) -> bool:
        """Whether there may be reasoning."""
        return self._thoughts is not None

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return 0 if self._calls is None else self._calls.calls

    def take(self, item: Delta | Ended) -> tuple[Part, ...]:
        """What this item adds."""
        if isinstance(item, Ended):
            return self._flush()
        if self._thoughts is None:
            return self._read(item.text)
        before = self._thoughts.thinking
        thought, said = self._thoughts.push(item.text)
        self._unsure_tokens += len(item.token_ids)
        if before or thought or self._thoughts.thinking:
            self.reasoning_tokens += self._unsure_tokens
        if not self._thoughts.unsure:
            self._unsure_tokens = 0
        return (*_thought(thought), *self._read(said))

    def _flush(self) -> tuple[Part, ...]:
        thought, said = ("", "") if self._thoughts is None else self._thoughts.flush()
        rest = () if self._calls is None else self._calls.flush()
        return (*_thought(thought), *self._read(said), *rest)

    def _read(self, text: str) -> tuple[Part, ...]:
        if self._calls is None or not text:
            return (Said(text),) if text else ()
        return self._calls.push(text)


def _thought(text: str) -> tuple[Part, ...]:
    return (Thought(text),) if text else ()
