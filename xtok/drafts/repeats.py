"""Finds earlier occurrences of the end of a growing text, and what followed them."""

from itertools import islice

_LEVELS = 16
"""For how many repeated ends of the text, longest first, the latest occurrence is kept; for others it may be an older one."""
_STEPS = 64
"""How many repeated ends are searched for followers: a text that repeats itself has as many as it has ids."""


class Repeats:
    """A suffix automaton of ids that are appended one by one (Blumer et al. 1985, Theoretical Computer Science 40).

    Law: `followers` are the ids that followed earlier occurrences of the text's ends, those of the longest ends first, and
    among equally long ones the latest first. The time of an append or a lookup doesn't depend on the text's length.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._last = 0

    def append(self, token: int) -> None:
        self.ids.append(token)
        before, self._last = self._last, self._state(self._length[self._last] + 1, {}, -1)
        state = before
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = self._last
            state = self._link[state]
        self._link[self._last] = self._suffix(state, token) if state >= 0 else 0
        self._refresh(before, token)

    def followers(self, count: int, ahead: int | None = None) -> list[tuple[int, int]]:
        """At most `count` positions with different ids, each with how many ids before it agree with the end of the text.
        `ahead`: one more id, which counts as the text's last.
        """
        found: dict[int, tuple[int, int]] = {}
        state = self._link[self._last]
        for _ in range(_STEPS):
            if state < 0 or len(found) >= count:
                break
            agreeing, following = self._length[state], self._next[state]
            if ahead is not None:
                agreeing, following = agreeing + 1, self._next[following[ahead]] if ahead in following else {}
            for token in islice(reversed(following), count if agreeing else 0):
                found.setdefault(token, (self._end[following[token]] - 1, agreeing))
            state = self._link[state]
        return list(found.values())[:count]

    def continuation(self, position: int, longest: int, ahead: int | None = None) -> list[int]:
        """The `longest` ids from `position` on. Where the text (and the id `ahead`) ends, they start again at `position`: a
        repetition is taken to go on.
        """
        found = self.ids[position : position + longest]
        if ahead is not None and len(found) < longest:
            found.append(ahead)
        period = len(found)
        return found if period == longest else [found[i % period] for i in range(longest)]

    def _state(self, length: int, following: dict[int, int], link: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(len(self.ids))
        return len(self._next) - 1

    def _suffix(self, state: int, token: int) -> int:
        """The state of the longest end that occurred before. It may have to be split off from another state."""
        whole = self._next[state][token]
        if self._length[whole] == self._length[state] + 1:
            return whole
        part = self._state(self._length[state] + 1, dict(self._next[whole]), self._link[whole])
        while state >= 0 and self._next[state].get(token) == whole:
            self._next[state][token] = part
            state = self._link[state]
        self._link[whole] = part
        return part

    def _refresh(self, state: int, token: int) -> None:
        """Make the newest id the latest follower of the ends before it."""
        for _ in range(_LEVELS):
            if state < 0:
                return
            following = self._next[state]
            following[token] = following.pop(token)
            self._end[following[token]] = len(self.ids)
            state = self._link[state]
