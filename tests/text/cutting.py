"""Texts cut into pieces in every way, and parts joined again."""

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from octavo.text.parts import Argued, Begun, Part, Said, Thought


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Said | Thought) and type(last) is type(part):
            out[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        elif isinstance(part, Argued) and isinstance(last, Argued) and last.index == part.index:
            out[-1] = Argued(part.index, last.text + part.text)
        else:
            out.append(part)
    return out


def called(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """The calls with their arguments."""
    names = [part.name for part in parts if isinstance(part, Begun)]
    return [
        (name, "".join(p.text for p in parts if isinstance(p, Argued) and p.index == index))
        for index, name in enumerate(names)
    ]


def said(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Said))


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


CUTS = st.lists(st.integers(0, 200), max_size=30)
