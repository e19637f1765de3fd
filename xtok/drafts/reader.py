"""Reads the target's text with a draft model."""

from collections.abc import Sequence

from torch import Tensor

from xtok.align.continuation import Reencoder
from xtok.drafts.base import Context
from xtok.drafts.meter import Meter
from xtok.models.forwards import Answer, ForwardRequest, Slot, Steps
from xtok.models.load import DraftModel


class Reader:
    """Reads one sequence's text in the draft's own ids, and gives the draft's logits after them. If the text is longer than the
    draft's context window, it reads the latest part. The time per round doesn't grow with the text.
    """

    def __init__(self, draft: DraftModel, meter: Meter, slot: Slot, prompt: Sequence[int] | None = None) -> None:
        """`slot`: the cache slot in the draft. `prompt`: the draft's own ids for a chat."""
        self._draft = draft
        self._meter = meter
        self._own_prompt = prompt is not None
        self._text = Reencoder(draft.vocabulary.encoder)
        self._seen: bytes | None = None
        self._begin = 0
        self._slot = slot
        self._window = self._slot.limit
        self._ids = list(draft.lead if prompt is None else prompt)
        self._lead = len(self._ids)
        self._start = self._held = 0  # the cache holds `_held` of the ids from `_start` on
        self._ids_of: dict[bytes, list[int] | None] = {}

    @property
    def size(self) -> int:
        """How many ids of the text are in the window."""
        return len(self._ids) - self._start

    @property
    def last(self) -> int:
        return self._ids[-1]

    @property
    def branched(self) -> int:
        """How many nodes of a tree the cache slot holds after the text."""
        return self._slot.branched

    def longest(self, guess: int) -> int:
        """How many tokens a guess may have: `guess`, or fewer to leave half of the window for the text."""
        return guess if self._window is None else min(guess, self._window // 2)

    def holds(self, tokens: int) -> bool:
        return self._window is None or tokens <= self._window

    def read(self, context: Context, guess: int) -> bytes:
        """Encode what is new in the context, leaving room in the window for `guess` ids. Returns the bytes of an unfinished
        character at its end.
        """
        with self._meter.timing("align"):
            same, pending = self._follow(context)
            self._held = min(self._held, max(0, same - self._start))
            self._move_start(guess)
            return pending

    def reads(self, token: int, piece: bytes) -> Sequence[int]:
        """The draft's ids for the target's id `token`, whose bytes are `piece`; empty if it can't write them."""
        return self.ids_of(piece) or () if piece else ()

    def ids_of(self, piece: bytes) -> list[int] | None:
        """The draft's ids for some bytes: one with just these bytes, else what the tokenizer gives, else one per byte; None if
        it can't write them.
        """
        if piece not in self._ids_of:
            self._ids_of[piece] = self._find_ids(piece)
        return self._ids_of[piece]

    def _find_ids(self, piece: bytes) -> list[int] | None:
        if (one := self._one(piece)) is not None:
            return [one]
        try:
            ids = self._draft.vocabulary.encoder.ids_after(piece.decode())
        except UnicodeDecodeError:
            single = [self._one(bytes([byte])) for byte in piece]
            ids = [token for token in single if token is not None]
            return ids if len(ids) == len(single) else None
        return ids if ids and max(ids) < self._draft.vocabulary.size else None

    def _one(self, piece: bytes) -> int | None:
        """The draft's first id with exactly these bytes that the model has logits for."""
        own = self._draft.vocabulary
        return next((token for token in own.view.ids_of_bytes(piece) if token < own.size), None)

    def _follow(self, context: Context) -> tuple[int, bytes]:
        """Encode what is new in the context. Returns how many of the first ids are unchanged, and the bytes of an unfinished
        character at its end.
        """
        if self._seen is None:
            self._begin = context.prompt_size if self._own_prompt else 0
            self._seen = context.data[: self._begin]
        same, kept = len(self._ids), len(self._seen)
        while not context.data.startswith(self._seen[:kept]):  # the last id shown then wasn't confirmed
            kept -= 1
        if kept < len(self._seen):
            same = self._lead + self._text.truncate(max(0, kept - self._begin))
        same = min(same, self._lead + self._text.append(context.data[max(kept, self._begin) :]))
        self._seen = context.data
        self._ids[same:] = self._text.ids[same - self._lead :]
        return same, self._text.pending

    def _move_start(self, guess: int) -> None:
        """Choose the first id to read, so that text and guess fit into the window. It moves in steps of half a window."""
        if self._window is None:
            return
        room = max(1, self._window - guess)
        if self.size > room or self.size <= 0:
            self._start = max(0, len(self._ids) - max(1, room // 2))
            self._held = 0

    def logits(self, rows: int, rest: Sequence[int] = ()) -> Steps[Tensor]:
        """The draft's logits after each of the last `rows` ids of the text followed by `rest`, (rows, vocabulary)."""
        if not self._slot.forwards and not self._slot.length:
            self._held = self._slot.adopt(self._ids[self._start :])
        held = min(self._held, self.size + len(rest) - rows)
        if not self._slot.roll_back(held):
            self._slot.start_anew()
            held = 0
        new = [*self._ids[self._start + held :], *rest]
        while self._slot.chunk is not None and len(new) - rows > self._slot.chunk:
            yield from self._forward(ForwardRequest(self._slot, new[: self._slot.chunk], 1))
            del new[: self._slot.chunk]
        logits = yield from self._forward(ForwardRequest(self._slot, new, rows))
        self._held = self.size
        return logits

    def branch(self, tokens: list[int], parents: list[int]) -> Steps[Tensor]:
        """The draft's logits after each of `tokens`, new nodes of a tree, (tokens, vocabulary). `parents`: as in a request."""
        return self._forward(ForwardRequest(self._slot, tokens, len(tokens), parents))

    def take_back(self) -> None:
        self._slot.roll_back(self._slot.length - 1)
        self._held -= 1

    def _forward(self, ask: ForwardRequest) -> Steps[Tensor]:
        with self._meter.away():
            answer: Answer = yield ask
        self._meter.drafts(answer.cost)
        return answer.logits


class IdReader(Reader):
    """A `Reader` for a draft whose ids are the target's: it reads the target's ids and needs no text."""

    def __init__(self, draft: DraftModel, meter: Meter, slot: Slot) -> None:
        super().__init__(draft, meter, slot, prompt=())
        self._shown = list[int]()

    def reads(self, token: int, piece: bytes) -> Sequence[int]:
        """The id itself; empty if the draft lacks it, or takes it for the end of a text."""
        return (token,) if token < self._draft.vocabulary.size and token not in self._draft.vocabulary.ends else ()

    def _follow(self, context: Context) -> tuple[int, bytes]:
        shown, size = self._shown, self._draft.vocabulary.size
        is_wrong = bool(shown) and list(context.ids[len(shown) - 1 : len(shown)]) != shown[-1:]  # it wasn't confirmed
        if is_wrong and shown.pop() < size:
            self._ids.pop()
        same, new = len(self._ids), context.ids[len(shown) :]
        shown += new
        self._ids += [token for token in new if token < size]
        return same, b""
