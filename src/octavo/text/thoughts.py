"""The reasoning before an answer, in text that arrives piece by piece."""

from typing import NamedTuple

from octavo.text.stops import longest_beginning


class Marks(NamedTuple):
    """What stands around the reasoning. Where it is `assumed`, an answer begins with it, unless the
    prompt says otherwise."""

    opening: str
    closing: str
    assumed: bool = False


STYLES = {
    "deepseek_r1": Marks("<think>", "</think>", assumed=True),
    "qwen3": Marks("<think>", "</think>"),
    "smollm3": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
}
"""By their names in vLLM, where it has them."""


def style_named_in(template: str) -> str | None:
    """The style of a chat template that knows reasoning; None if it knows none."""
    return next((name for name in ("qwen3", "mistral") if STYLES[name].closing in template), None)


def opened_by(prompt: str, marks: Marks) -> bool | None:
    """Whether a prompt ends within the reasoning, or after its end; None if it says nothing."""
    text = prompt.rstrip()
    if text.endswith(marks.opening):
        return True
    return False if text.endswith(marks.closing) else None


class ThoughtParser:
    """Takes an answer apart into its reasoning and the rest.

    Reasoning begins with its opening mark at the very start, or is `open` from the beginning; it
    ends with its closing mark. White space around it is dropped.
    Keeps  joined pieces do not depend on how the text was cut; only what may still be a mark, and
           white space before one, is held back.
    """

    def __init__(self, marks: Marks, *, open: bool) -> None:
        self._marks = marks
        self._state = "within" if open else "before"
        self._rest = ""
        self._silent = True
        """Of the reasoning nothing has come yet."""

    @property
    def unsure(self) -> bool:
        """Whether there is reasoning is not known yet."""
        return self._state == "before"

    @property
    def thinking(self) -> bool:
        return self._state == "within"

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the rest of the answer that this text sets free."""
        self._rest += text
        if self._state == "before":
            self._begin()
        thought = self._think() if self._state == "within" else ""
        if self._state == "after":
            self._rest = self._rest.lstrip()
            if self._rest:
                self._state = "done"
        said = ""
        if self._state == "done":
            said, self._rest = self._rest, ""
        return thought, said

    def flush(self) -> tuple[str, str]:
        """What was held back, when nothing more comes."""
        text, self._rest = self._rest, ""
        if self._state == "within":
            return text.rstrip(), ""
        return "", text

    def _begin(self) -> None:
        stripped, opening = self._rest.lstrip(), self._marks.opening
        if stripped.startswith(opening):
            self._rest, self._state = stripped[len(opening) :], "within"
        elif not opening.startswith(stripped):
            self._state = "within" if self._marks.assumed else "done"

    def _think(self) -> str:
        if self._silent:
            self._rest = self._rest.lstrip()
        before, found, after = self._rest.partition(self._marks.closing)
        if found:
            self._rest, self._state = after, "after"
            return before.rstrip()
        keep = longest_beginning(self._rest, (self._marks.closing,))
        free = self._rest[: len(self._rest) - keep].rstrip()
        self._rest = self._rest[len(free) :]
        self._silent = self._silent and not free
        return free
