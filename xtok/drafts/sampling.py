"""A draft model that guesses draws: the target's ids, step by step, from a law over them."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from xtok.budget import Budget
from xtok.drafts import Context
from xtok.drafts.reader import DraftModel, Reader
from xtok.noise import GUESS, PICK, Noise, gumbel
from xtok.pick import drawn
from xtok.tokenbytes import TokenBytes
from xtok.trace import Meter
from xtok.tree import Tree, chain

_PENDING = 3
"""The bytes of an unfinished character, at most."""


@dataclass(frozen=True)
class Projection:
    """The draft's ids seen from the target's vocabulary, by bytes: what each begins with, as far as the target can tell.

    `own` and `theirs`, int64 of equal length: id `own[i]` of the draft stands for id `theirs[i]` of the target, which is the
    first id of the longest spelling that the draft's token begins with.
    """

    own: Tensor
    theirs: Tensor


def projection(target: TokenBytes, draft: TokenBytes) -> Projection:
    """What each of the draft's tokens begins with in the target's vocabulary; tokens that spell nothing are left out."""
    spelling = {piece: token for token, piece in reversed(list(enumerate(target.table))) if piece}
    longest = {
        token: next((spelling[piece[:size]] for size in range(len(piece), 0, -1) if piece[:size] in spelling), None)
        for token, piece in enumerate(draft.table)
        if piece
    }
    pairs = [(token, other) for token, other in longest.items() if other is not None]
    own, theirs = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return Projection(own, theirs)


class SamplingDrafter:
    """Guesses what the target is about to draw, one of the target's ids after the other. One per generation.

    The law of each id is the draft's own, shaped by `warpers` and projected onto the target's vocabulary; what several of the
    draft's tokens begin with is summed up on one id. Under the noise of the target's own picks, the guess is what the target
    would draw if that law were its own (Daliri, Musco, Suresh 2024). With `independent` noise the guesses carry their laws, for
    speculative sampling (Leviathan et al. 2023, Chen et al. 2023).
    """

    def __init__(
        self,
        draft: DraftModel,
        reader: Reader,
        projected: Projection,
        target: TokenBytes,
        keys: Tensor,
        target_end: int | None,
        meter: Meter,
        warpers: LogitsProcessorList,
        *,
        independent: bool,
    ) -> None:
        """`keys` are those of the target's ids, (vocabulary,). The draft's ends of text become `target_end`."""
        self._draft = draft
        self._reader = reader
        self._target = target
        self._keys = keys.to(draft.model.device)
        self._meter = meter
        self._warpers = warpers
        self._independent = independent
        self._failure: Exception | None = None
        ends = torch.tensor([] if target_end is None else sorted(draft.ends), dtype=torch.int64)
        own, theirs = torch.cat([projected.own, ends]), torch.cat([projected.theirs, torch.full_like(ends, target_end or 0)])
        held = (own < draft.vocabulary) & (theirs < len(keys))
        self._own, self._theirs = own[held].to(draft.model.device), theirs[held].to(draft.model.device)

    @torch.inference_mode()
    def propose(self, context: Context, budget: Budget) -> Tree:
        """A chain of draws, with its laws where they are independent. What fails in mid-guess is raised in the next round."""
        if self._failure is not None:
            raise self._failure
        count = self._reader.longest(min(budget.draft_tokens, budget.target_tokens))
        ids, pending = self._reader.read(context, count + _PENDING)
        rest = self._spelled(pending) if pending else []
        if context.noise is None or rest is None or not ids or not count or not self._reader.holds(len(ids) + len(rest)):
            return Tree()
        logits = self._reader.logits([*ids, *rest], rows=1)[-1]
        written, tokens, laws = b"", list[int](), list[Tensor]()
        try:
            while (law := self._law(logits)) is not None:
                tokens.append(drawn(law.log()[None], partial(self._gumbel, context, context.noise, written)))
                laws.append(law)
                piece = self._target.to_bytes([tokens[-1]], before=context.data + written)
                own = self._spelled(piece) if piece else None
                if len(tokens) == count or not own or not self._reader.holds(self._reader.length + len(own)):
                    break
                written += piece
                logits = self._reader.next(own)
        except Exception as error:
            # What was drawn must be judged, whatever happens behind it: what is thrown away selects what is kept.
            self._failure = error
        return chain(tokens, written, laws if self._independent else ())

    def _law(self, logits: Tensor) -> Tensor | None:
        """The probabilities of the next id over the target's vocabulary; None where the two share nothing likely."""
        probabilities = self._warpers(self._own[None], logits[None].float())[0].double().softmax(dim=-1)
        law = torch.zeros(len(self._keys), dtype=torch.float64, device=logits.device)
        law.index_add_(0, self._theirs, probabilities[self._own])
        total = law.sum()
        return law / total if total > 0 else None

    def _gumbel(self, context: Context, noise: Noise, written: bytes, ids: Tensor) -> Tensor:
        """The noise of the target's ids behind what is written."""
        with self._meter.timing("noise"):
            offset = len(context.data) - context.prompt_size + len(written)
            purpose = GUESS if self._independent else PICK
            return gumbel(self._keys[ids], noise.at(offset, context.controls, purpose))

    def _spelled(self, piece: bytes) -> list[int] | None:
        """The draft's ids for some bytes: one that spells them, else those of its tokenizer, else one for each byte."""
        if (one := self._one(piece)) is not None:
            return [one]
        try:
            ids = self._draft.encoder.ids_behind(piece.decode())
        except UnicodeDecodeError:
            single = [self._one(bytes([byte])) for byte in piece]
            ids = [token for token in single if token is not None]
            return ids if len(ids) == len(single) else None
        return ids if ids and max(ids) < self._draft.vocabulary else None

    def _one(self, piece: bytes) -> int | None:
        """The draft's first id that spells some bytes and that the model knows."""
        return next((token for token in self._draft.encoder.view.ids_spelling(piece) if token < self._draft.vocabulary), None)
