"""The only decoding loop: budget → propose → forward → pick → stop → commit."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from xtok.budget import Budget
from xtok.drafts import Context
from xtok.drafts.merged import Drafts
from xtok.largest import best
from xtok.lm import CachedModel
from xtok.noise import ACCEPT, Noise
from xtok.pick import accepts, draw, margin, process, residual, typical
from xtok.processors import known_cuts, stretch
from xtok.tokenbytes import TokenBytes
from xtok.trace import Meter, Round
from xtok.tree import Law, Tree

_LIMITS = (MaxLengthCriteria, MaxTimeCriteria)
_KNOWN = (MaxLengthCriteria, EosTokenCriteria)
"""Answered here by the ids alone: asking them would take a transfer from the device for each id."""


@dataclass(repr=False)
class Run:
    """The state of one generation: one sequence, one target cache, the drafters of one text.

    `all_ids`, the prompt's without padding and the new ones, are what drafters are shown: nothing that is committed is read
    from them. A sampled one has `noise`, the `seed` that it comes from, and the `keys` of the target's ids. `controls` counts
    the new ids that spell nothing: they move no offset, and yet must not share their noise. `rejects`: guesses that come with
    the law that they were drawn from are accepted or rejected by it, instead of by whether the target picks the same.
    `typical`, threshold and alpha: guesses that are typical are accepted, which is lossy. `cuts`: how many of the last
    processors are asked of a draw alone. `margin` is that of the closest pick, in logits, which the processors `stretch`.
    """

    target: CachedModel
    view: TokenBytes
    ids: Tensor
    prompt: list[int]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    drafts: Drafts | None
    budget: Budget
    branches: bool
    deepest: int | None
    meter: Meter
    keys: Tensor | None = None
    seed: int | None = None
    noise: Noise | None = None
    rejects: bool = False
    typical: tuple[float, float] | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    new_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    controls: int = 0
    hidden: Tensor | None = None
    margin: Tensor | None = None
    all_ids: list[int] = field(init=False)
    prompt_length: int = field(init=False)
    data: bytes = field(init=False)
    prompt_size: int = field(init=False)
    cuts: int = field(init=False)
    stretch: float | None = field(init=False)
    limit: int | None = field(init=False)
    ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        limits = [one.max_length for one in self.criteria if type(one) is MaxLengthCriteria]
        ends = [one.eos_token_id.reshape(-1).tolist() for one in self.criteria if type(one) is EosTokenCriteria]
        self.limit, self.ends = min(limits, default=None), frozenset(token for some in ends for token in some)
        self.criteria = StoppingCriteriaList(one for one in self.criteria if type(one) not in _KNOWN)
        drawn = bool(self.config.do_sample)
        judged = drawn and (self.rejects or self.typical is not None)
        self.cuts = known_cuts(self.processors) if drawn and not judged and self.scores is None and self.logits is None else 0
        self.stretch = None if judged else stretch(self.processors)
        self.all_ids = list(self.prompt)
        self.prompt_length = self.ids.shape[1]
        self.data = self.view.to_bytes(self.all_ids)
        self.prompt_size = len(self.data)

    @property
    def offset(self) -> int:
        """How many bytes the new text has."""
        return len(self.data) - self.prompt_size

    @property
    def new_data(self) -> bytes:
        """The bytes of the new text."""
        return self.data[self.prompt_size :]


def step(run: Run) -> list[int]:
    """One round of a generation that isn't finished, the first of which reads the prompt. Returns the ids that it commits.

    Every committed id is the target's own pick from its own logits on the committed prefix. A round's guess decides only how
    many picks its forward yields.
    """
    with run.meter.timing("all"):
        return _round(run) if run.new_ids else _walk(run, Tree(), *_prefill(run))[0]


def _round(run: Run) -> list[int]:
    budget = _budget(run)
    tree = _propose(run, budget)
    block, path = _walk(run, tree, *_forward(run, tree))
    run.target.keep([node + 1 for node in path])
    run.hidden = None if run.target.hidden is None else run.target.hidden[path[-1] + 1]
    if run.drafts is not None and budget.longest:
        run.drafts.observe(budget, tree, block, path)
    return block


def _budget(run: Run) -> Budget:
    """No id is guessed that could not be committed any more, or that lies beyond the target's positions."""
    room = run.config.max_length - run.ids.shape[1] - 1
    if run.deepest is not None:
        room = min(room, run.deepest - run.target.length - 1)
    width = run.budget.width if run.branches else 1
    longest = ceil(max(0, min(run.budget.longest, room)))  # transformers takes 2.5 new tokens for 3, and inf for no limit
    return replace(run.budget, longest=longest, width=width)


def _propose(run: Run, budget: Budget) -> Tree:
    """What the drafts guess."""
    run.meter.begin()
    if run.drafts is None or budget.longest == 0:
        return Tree()
    with run.meter.timing("draft"):
        context = Context(run.all_ids, run.data, run.prompt_size, run.controls, run.noise, run.hidden)
        return run.drafts.propose(context, budget)


def _prefill(run: Run) -> tuple[Tensor, list[int]]:
    with run.meter.timing("target"):
        logits = run.target.prefill(run.ids, run.config)
        return logits, _greedy_picks(run, logits)


def _forward(run: Run, tree: Tree) -> tuple[Tensor, list[int]]:
    """The target's logits behind the last committed id and behind each guessed one, (1 + len(tree), vocabulary); their best."""
    new = torch.tensor([[run.new_ids[-1], *tree.tokens]], device=run.ids.device)
    with run.meter.timing("target"):
        logits = run.target.branch(new, [-1, *(parent + 1 for parent in tree.parents)])
        return logits, _greedy_picks(run, logits)


def _greedy_picks(run: Run, logits: Tensor) -> list[int]:
    """The greedy picks behind all guesses, in one transfer; none where a pick takes more than the logits."""
    plain = run.noise is None and not run.processors and run.scores is None and run.logits is None
    return best(_single(logits)).tolist() if plain else []


def _single(logits: Tensor) -> Tensor:
    """Logits in the precision that transformers picks by: what is narrower has the same order in it."""
    return logits.float() if logits.dtype == torch.float64 else logits


@torch.no_grad()
def _walk(run: Run, tree: Tree, logits: Tensor, greedy: list[int]) -> tuple[list[int], list[int]]:
    """Walk the picks along the guesses, until those or the text ends.

    Returns the ids picked, and the nodes behind which they were picked: -1, for the context, and its descendants.
    """
    offset = run.offset
    block, path = list[int](), list[int]()
    node: int | None = -1
    while node is not None and run.finish_reason is None:
        path.append(node)
        block.append(greedy[node + 1] if greedy else _step(run, tree, node, logits[node + 1 : node + 2]))
        _append(run, block[-1])
        node = tree.child(node, block[-1])
    _catch_up(run)
    if greedy:
        _note_margin(run, margin(_single(logits[[node + 1 for node in path]])))
    accepted = len(block) - (node is None)
    run.meter.rounds.append(Round(offset, tree.guess, len(tree), accepted, len(block)))
    return block, path


def _step(run: Run, tree: Tree, node: int, logits: Tensor) -> int:
    """One pick, in the order and with the tensors of transformers' own loop; but cuts may be asked of the draw alone."""
    logits = logits.to(copy=True, dtype=torch.float32, device=run.ids.device)
    whole = len(run.processors) - run.cuts
    scores = process(run.ids, logits, run.processors[:whole])
    if run.cuts and (token := _drawn(run, scores[0], run.processors[whole:])) is not None:
        return token
    scores = process(run.ids, scores, run.processors[whole:])
    if run.scores is not None:
        run.scores += (scores,)
    if run.logits is not None:
        run.logits += (logits,)
    return _pick(run, tree, node, scores[0])


def _append(run: Run, token: int) -> None:
    """Commit an id, and ask whether to stop."""
    run.new_ids.append(token)
    run.all_ids.append(token)
    piece = run.view.to_bytes([token], before=run.data)
    run.data += piece
    run.controls += not piece
    if run.processors or run.criteria:
        _catch_up(run)
    fired = [one for one in run.criteria if bool(torch.as_tensor(one(run.ids, run.scores)).any())]
    ends = token in run.ends or not all(isinstance(criterion, _LIMITS) for criterion in fired)
    if ends or fired or (run.limit is not None and run.prompt_length + len(run.new_ids) >= run.limit):
        run.finish_reason = "stop" if ends else "length"


def _catch_up(run: Run) -> None:
    """Bring the committed ids to where processors and criteria read them."""
    new = run.new_ids[run.ids.shape[1] - run.prompt_length :]
    if new:
        run.ids = torch.cat([run.ids, torch.tensor([new], device=run.ids.device)], dim=-1)


def _pick(run: Run, tree: Tree, node: int, scores: Tensor) -> int:
    """The best token, or the draw that this place's noise decides. A guess drawn from a known law is accepted or redrawn."""
    if run.noise is None:
        _note_margin(run, margin(scores[None]))
        return int(best(scores[None]))
    if run.typical is not None:
        guess = typical(scores, tree.children(node), *run.typical)
        if guess is not None:
            return guess
    if run.rejects and node + 1 < len(tree.laws):
        guess, law = tree.tokens[node + 1], Law(*(part.to(scores.device) for part in tree.laws[node + 1]))
        if accepts(scores, law, guess, run.noise.uniform(run.offset, run.controls, ACCEPT)):
            return guess
        scores = residual(scores, law)
    token = _drawn(run, scores, [])
    assert token is not None
    return token


def _drawn(run: Run, scores: Tensor, cuts: list[Any]) -> int | None:
    """What the noise of this place draws of what `cuts` leave; None where it is too near to a cut to tell."""
    assert run.noise is not None and run.keys is not None
    with run.meter.timing("noise"):
        drawn = draw(scores, run.keys, run.noise.at(run.offset, run.controls), cuts)
    if drawn is None:
        return None
    _note_margin(run, drawn.margin)
    return drawn.token


def _note_margin(run: Run, least: Tensor) -> None:
    """Remember how close the closest pick was. The figure stays where the scores are: reading it would wait for the device."""
    if run.stretch is not None:
        least = least / run.stretch
        run.margin = least if run.margin is None else torch.minimum(run.margin, least)


def drain(runs: list[Run], on_block: Callable[[int, list[int]], Any] = lambda row, block: None) -> None:
    """Run several generations to their ends, round by round in turn, so that a limit of time treats them alike."""
    while active := [row for row, run in enumerate(runs) if run.finish_reason is None]:
        for row in active:
            on_block(row, step(runs[row]))
