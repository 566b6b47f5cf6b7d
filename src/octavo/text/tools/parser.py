"""The calls in an answer that arrives piece by piece.

saying ──marker──▶ reading ──a whole value of calls──▶ following ──anything else──▶ saying
   ▲                  └───────no call: it is text──────────┐ ▲ │
   └───────────────────────────────────────────────────────┘ └─┘ joint or end of a call
saying ──marker, under a grammar──▶ heading ⇄ arguing            one call after another
"""

import re
from collections.abc import Callable

from octavo.text.parts import Argued, Begun, Part, Said
from octavo.text.stops import longest_beginning
from octavo.text.tools.forms import Form
from octavo.text.tools.json_calls import Called
from octavo.text.tools.spans import json_span

_HEAD = re.compile(r'"name": "([^"\\]*)", "(?:arguments|parameters)": ')


class CallParser:
    """Takes the text of an answer apart into what it says and what it calls.

    What is no call after all is text. A call is given when it is complete; those of an answer that
    a grammar has `kept` to its form are given as they come, since they cannot be anything else.
    Without a marker only a call of one of the functions in `names` is one. Of more than `most`
    calls the rest is left out.
    Keeps  joined parts do not depend on how the text was cut; white space around calls is dropped;
           held back is what may still be a marker or a call.
    """

    def __init__(
        self, form: Form, names: frozenset[str], *, kept: bool = False, most: int | None = None
    ) -> None:
        self._form = form
        self._names = names
        self._kept = kept
        self._most = most
        self._state: Callable[[], bool] = self._saying
        self._rest = ""
        self._marker = ""
        """What began the value that is being read."""
        self._fresh = True
        """Nothing was said or called yet."""
        self._span = form.span()
        self._arguments = json_span("{")
        self._out: list[Part] = []
        self.calls = 0
        """How many have begun."""

    def push(self, text: str) -> tuple[Part, ...]:
        """What this text sets free."""
        self._rest += text
        while self._state():
            pass
        return self._taken()

    def flush(self) -> tuple[Part, ...]:
        """What was held back, when nothing more comes."""
        silent = self._state in (self._heading, self._arguing) and self.calls
        if self._state != self._following or self._rest.strip():
            self._say("" if silent else self._marker + self._rest)
        self._rest = self._marker = ""
        return self._taken()

    def _taken(self) -> tuple[Part, ...]:
        parts, self._out = tuple(self._out), []
        return parts

    # --- states: each says whether there is more to do with the text that is there

    def _saying(self) -> bool:
        found = min(
            ((at, mark) for mark in self._form.begins if (at := self._rest.find(mark)) >= 0),
            default=None,
        )
        if self._fresh and self._form.bare and self._begins_bare():
            self._read("")
            return True
        if found is not None:
            at, mark = found
            before, self._rest = self._rest[:at], self._rest[at + len(mark) :]
            self._say(before if not self._fresh or before.strip() else "")
            self._read(mark)
            return True
        keep = longest_beginning(self._rest, self._form.begins)
        free = self._rest[: len(self._rest) - keep]
        if not self._fresh or free.strip():
            self._say(free)
            self._rest = self._rest[len(free) :]
        return False

    def _begins_bare(self) -> bool:
        return self._rest.lstrip()[:1] in ("{", "[")

    def _read(self, marker: str) -> None:
        self._marker, self._span = marker, self._form.span()
        self._state = self._heading if self._kept else self._reading

    def _reading(self) -> bool:
        end = self._span.scan(self._rest)
        if end is None:
            return False
        calls = None if end == "broken" else self._known(self._rest[:end])
        if calls is None:
            self._say(self._marker)
            self._fresh, self._state = False, self._saying
        else:
            assert isinstance(end, int)
            self._rest, self._fresh, self._state = self._rest[end:], False, self._following
            for call in calls:
                self._call(call)
        self._marker = ""
        return True

    def _known(self, text: str) -> tuple[Called, ...] | None:
        calls = self._form.calls_in(text)
        if calls is None or self._marker not in ("", self._form.joint):
            return calls
        return calls if all(call.name in self._names for call in calls) else None

    def _following(self) -> bool:
        """After a call: white space, its end, or the next one."""
        self._rest = self._rest.lstrip()
        if not self._rest:
            return False
        end, joint = self._form.end, self._form.joint
        if end and self._rest.startswith(end):
            self._rest = self._rest[len(end) :]
            return True
        if joint and self._rest.startswith(joint):
            return self._joined()
        if end and end.startswith(self._rest):
            return False
        self._state = self._saying
        return True

    def _joined(self) -> bool:
        following = self._rest[len(self._form.joint) :].lstrip()
        if not following:
            return False
        self._rest = self._rest[len(self._form.joint) :]
        self._read(self._form.joint)
        return True

    def _heading(self) -> bool:
        """Under a grammar: up to the arguments of the next call, or the end of the calls."""
        head, end = _HEAD.search(self._rest), self._form.end
        ended = self._rest.find(end) if end else -1
        if ended >= 0 and (head is None or ended < head.start()):
            self._rest, self._marker = self._rest[ended + len(end) :], ""
            self._fresh, self._state = False, self._following
            return True
        if head is None:
            return False
        self._rest = self._rest[head.end() :]
        self._marker = ""
        self._arguments, self._state = json_span("{"), self._arguing
        if self._room:
            self._out.append(Begun(self.calls, head[1]))
        self.calls += 1
        return True

    def _arguing(self) -> bool:
        end = self._arguments.scan(self._rest)
        ready = self._arguments.at
        self._argue(self._rest[:ready])
        self._rest = self._rest[ready:]
        self._arguments.at = 0
        if end is not None:
            self._state = self._heading
        return end is not None

    # --- what comes out

    @property
    def _room(self) -> bool:
        return self._most is None or self.calls < self._most

    def _say(self, text: str) -> None:
        if text:
            self._fresh = False
            self._out.append(Said(text))

    def _call(self, call: Called) -> None:
        if self._room:
            self._out += [Begun(self.calls, call.name), Argued(self.calls, call.arguments)]
        self.calls += 1

    def _argue(self, text: str) -> None:
        if text and (self._most is None or self.calls <= self._most):
            self._out.append(Argued(self.calls - 1, text))
