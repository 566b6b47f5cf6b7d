"""Followers: sequences that wait because a running one computes the beginning of their prompt.

    leader     ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒──────────     computed up to here, the rest to come
    follower   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒×          alike up to ×: it waits until the leader is there

It owns nothing meanwhile and holds up nobody: those behind it go on. It waits for one who runs and
goes before it, so nobody waits in a circle; and no longer than the leader takes for what they have
in common, or until the leader ends or is preempted. See docs/decisions/0003.
"""

from collections import defaultdict
from collections.abc import Iterator

from octavo.core.sequence import Sequence


class Followers:
    """Cost     O(1) to follow; O(followers of one) at each step of a leader's prefill."""

    def __init__(self) -> None:
        self._of: defaultdict[Sequence, list[tuple[int, Sequence]]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[tuple[Sequence, int, Sequence]]:
        """(leader, upto, follower) of each; a follower that has ended may still be among them."""
        for leader, waits in self._of.items():
            for upto, follower in waits:
                yield leader, upto, follower

    def follow(self, leader: Sequence, upto: int, follower: Sequence) -> None:
        """Wait until `leader` has computed all positions below `upto`."""
        self._of[leader].append((upto, follower))

    def passed(self, leader: Sequence) -> list[Sequence]:
        """Whom it has computed enough for: they wait for it no longer."""
        if leader not in self._of:
            return []
        done = [one for upto, one in self._of[leader] if upto <= leader.computed]
        rest = [wait for wait in self._of[leader] if wait[0] > leader.computed]
        if rest:
            self._of[leader] = rest
        else:
            del self._of[leader]
        return done

    def deserted(self, leader: Sequence) -> list[Sequence]:
        """Who waited for it, when it ends, loses its blocks, or publishes nothing any more."""
        return [one for _, one in self._of.pop(leader, [])]
