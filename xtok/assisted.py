"""`XTokAssisted`: the front door."""

import warnings
from collections import abc
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import cached_property
from math import ceil
from numbers import Real
from pathlib import PurePath
from threading import local
from typing import Any, Literal, NamedTuple, TypeVar, get_args, overload
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from xtok.align.text import Text
from xtok.decoding import prepare as hf
from xtok.decoding.pick import Acceptance, Picker
from xtok.decoding.rounds import step
from xtok.decoding.sequence import Round, Sequence
from xtok.drafts.adapt import Adapter
from xtok.drafts.base import Draft, Drafter, Request
from xtok.drafts.given import as_draft, as_list, guesses, without_a_model
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.meter import Meter
from xtok.drafts.model import ModelDraft
from xtok.drafts.policy.ledger import WITHOUT_A_MODEL, Account, Ledger
from xtok.drafts.policy.settings import Budget, check_budget
from xtok.drafts.recycling import TokenRecycling
from xtok.drafts.session import Session
from xtok.errors import (
    InvalidInputError,
    LossyWarning,
    UnstableWarning,
    UnsupportedArgumentError,
    UnsupportedModelError,
    XTokError,
    shown,
)
from xtok.models.cache import CACHE, device_of, positions, weights
from xtok.models.forwards import Slot
from xtok.models.graphs import captures, takes_graphs
from xtok.models.layers import doubled
from xtok.models.load import DEFAULT, Source, check_places, draft_model, target_model
from xtok.models.modes import Modes, current, own_modes, within
from xtok.models.placement import Device, DeviceMap, Dtype, OneOrEach, Placement, placements
from xtok.models.probe import computes_in_half, fits_trees, takes_slots, takes_trees, tolerance
from xtok.models.prompts import Chat, KnownPrompt, Prompt, is_several
from xtok.models.recurrent import cached_model
from xtok.models.roles import DraftModel
from xtok.models.seats import Caches, Pool, Seat
from xtok.models.slots import rounded
from xtok.models.stable import StableShapes
from xtok.results.generation import Generation
from xtok.results.progress import bar
from xtok.results.stats import stats
from xtok.results.trace import Committed, Token, WrittenRound, told, written
from xtok.sampling.noise import Noise
from xtok.sampling.processors import warpers

T = TypeVar("T")
BATCH = 8
"""How many texts of a list are written at a time."""
_UNSTABLE = (
    "{} computes in {}, so the last bits of its logits depend on what else is in a forward pass, and its forward passes can't "
    "have fixed shapes. The reason: {} The same call gives the same text, unless a draft learns between calls; but where the "
    "two best logits are nearly equal (stats.near_ties), it may differ from the text without a draft, in a batch, or from "
    "model.generate. Load the target in float32 if the text has to be the same in all of these cases. stable=False silences "
    "this warning, but then the same call may give another text, too."
)
Written = tuple[int, Sequence]
"""A text that has ended, and its number."""
Accepts = Literal["match", "rejection", "typical"]
_PREDICTION = "prediction"
"""What guesses from a text that the caller foresees is called by this."""


class Begun(NamedTuple):
    """A text that was asked for. `most`: how many positions it may get, prompt included. `predicted`: whether there is a
    prediction. `begin`: makes it where there is a seat for it.
    """

    most: float
    predicted: bool
    begin: Callable[[Seat], Sequence]


class XTokAssisted:
    """A target model that generates with the help of any draft, and gives exactly what it alone would give.

    Law: in float32 and float64 greedy ids equal those of `target.generate(...)` with the same arguments; sampled ids are draws
    from the target's own distribution, and equal those of `XTokAssisted(target)`, which has no draft and is the reference
    sampler, for the same seed. In half precision with fixed shapes (`stable`) both equal those of `XTokAssisted(target)`, and
    greedy ids are very likely those of `target.generate(...)` up to the first of `stats.near_ties`. A draft decides only how
    fast they come.

    One instance may serve several threads. The models and tokenizers handed in are never changed. `names`: what its drafts are
    called where the source of a token is given.
    """

    @own_modes
    def __init__(
        self,
        target: Source,
        draft: Source | Draft | Drafter | list[Any] | None = None,
        *,
        budget: Budget | None = None,
        acceptance: Accepts = "match",
        posterior_threshold: float = 0.09,
        posterior_alpha: float = 0.3,
        adapt: bool = False,
        stable: bool | None = None,
        compile: bool | None = None,  # noqa: A002
        device: OneOrEach[Device] = None,
        dtype: OneOrEach[Dtype] = None,
        device_map: OneOrEach[DeviceMap] = None,
    ) -> None:
        """`draft`: a model, which guesses together with `PromptLookup()` and `TokenRecycling()`; one of those; anything with
        `propose(context, budget)`; or a list of such, whose guesses are merged. A list is taken as it is. Drafts with the
        target's own token ids skip the text.

        `budget`: how much is guessed in each round. Without one, as much as pays, by what forwards cost and guesses gain
        lately; `Budget(depth=5, width=1, schedule="constant")` guesses chains of five of the draft's tokens, say.

        `acceptance`, of sampled texts. "match": a guess is accepted where it is what the target draws; draft and target look at
        the same noise. "rejection": speculative sampling (Leviathan et al. 2023, Chen et al. 2023) by the draft's distribution,
        projected onto the target's ids by bytes, in chains of the budget's depth; what comes out are draws from the target's
        own distribution, too, but they depend on the draft and that depth, so `stats.exact` is False.

        "typical", **lossy**: any guess is accepted that isn't too unlikely, above min(`posterior_threshold`,
        `posterior_alpha` * exp(-entropy)) (Medusa, Cai et al. 2024). Sampled texts are then no draws from the target's
        distribution, and `stats.exact` is False.

        `adapt`: a copy of the draft learns from each greedy text when it is done, in 3% of the time that those take, and
        guesses the greedy ones to come. `adapter.save(file)` and `adapter.load(file)` keep what it learnt. No text changes.

        `stable`: forward passes of the target are batch-invariant: they have fixed shapes, by which an id has the same logits
        in every bit, whatever is forwarded with it. So the ids are the same in any precision, with or without a draft, alone or
        beside other texts. (A pick after a branch of a tree, where the last bits may differ, is accepted at once
        only if its lead is at least 8 times the largest rounding difference seen in trials; else the next forward pass
        decides.) None, the default: in half precision if the target can be held so, else not. True: in any precision; a target
        that can't is refused. False: not.

        xtok finds such shapes by a few extra forward passes when one is first needed. For a single sequence that takes at most
        a tenth of the time spent generating. What was found is kept in a cache folder (`XTOK_CACHE`, else xtok in the user's).
        Mixtures of experts, models whose forward passes can't be shared, and numbers of threads that are no power of two can't
        be held so, nor can acceptance other than "match", where ids depend on the draft anyway. For such targets in half
        precision, an `UnstableWarning` says what isn't promised: the same call still gives the same text, for what is guessed
        then follows from ids and counts and not from a clock, but near-ties (`stats.near_ties`) may fall otherwise than without
        a draft or beside other texts.

        `compile`: forwards are captured as CUDA graphs by their shapes, and replayed, so that a small model's take what its
        kernels take and not what launching them does. None: not, until that was measured on a GPU. True: for each model that is
        on one GPU and runs nothing but kernels (no hooks, no offloading); a target that can't is refused. Caches stay allocated
        between calls then, since graphs know their places. A graph is used where it gave the bits of the forward that it was
        captured from; `stats.target_replays` counts.

        `device`, `dtype` and `device_map`, of models given as hub ids or paths: one for both, or a pair, the target's and the
        drafts', such as `device=("cuda:0", "cpu")`. Without them, models are in the precision that their configurations say
        (`dtype="auto"`), the target on the best device there is (an accelerator, else the CPU), and drafts beside it.
        `device_map="auto"` spreads a model over several devices, by accelerate.

        Raises `UnsupportedModelError`, `UnsupportedTokenizerError` or `InvalidInputError` (all of `xtok.errors`).
        """
        self._made = dict[str, Any](
            target=target,
            draft=list(draft) if isinstance(draft, list) else draft,
            budget=budget,
            acceptance=acceptance,
            posterior_threshold=posterior_threshold,
            posterior_alpha=posterior_alpha,
            adapt=adapt,
            stable=stable,
            compile=compile,
            device=device,
            dtype=dtype,
            device_map=device_map,
        )
        _check_switches(adapt=adapt)
        thresholds = {"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha}
        _check_settings(budget, acceptance, compile, stable, **thresholds)
        typical = (posterior_threshold, posterior_alpha) if acceptance == "typical" else None
        if typical:
            warnings.warn("acceptance='typical' is lossy: sampled texts are not the target's own.", LossyWarning, stacklevel=3)
        self._acceptance = Acceptance(acceptance == "rejection", typical)
        self._budget = budget or Budget()
        self._judged = replace(budget or Budget(depth=5), width=1, schedule="constant")
        alone = self._acceptance.rejects or self._budget.width == 1
        given = self._given = as_list(draft, beside=[] if alone else without_a_model())
        places = placements(device, dtype, device_map)
        self._check_places(target, given, places)
        self.target = target_model(target, places[0])
        self.model, self.tokenizer = self.target.model, self.target.vocabulary.tokenizer
        beside = device_of(self.model)
        models = {i: draft_model(one, places[1], beside) for i, one in enumerate(given) if not guesses(one)}
        self._check_drafts(given, list(models.values()), adapt=adapt)
        matches = self._acceptance == Acceptance()  # by others, ids depend on the draft in any precision
        wanted = stable or (stable is None and matches and computes_in_half(self.model))
        self._shapes = self._shapes_of(self.model) if wanted else None
        self.adapter = Adapter(next(iter(models.values())), self.target.vocabulary.view) if adapt else None
        self._drafts = [self._draft(one, models.get(i)) for i, one in enumerate(given)]
        self.names = _names([models[i].model if i in models else one for i, one in enumerate(given)])
        self._shows_hidden = _any_heads(given)
        self.captures = self._can_capture(compile)
        self._pool = Pool(captures=self.captures)
        self._ledger = self._new_ledger()
        self._whole: XTokAssisted | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, be it by a pickle, is made as this one was: ids and paths are loaded again, and nothing is learnt yet."""
        return (_made_again, (type(self), self._made)) if self._whole is None else (_part_of, (self._whole, self.names))

    def __repr__(self) -> str:
        settings = {
            "budget": self._budget,
            "acceptance": self._acceptance,
            "adapt": self.adapter is not None,
            "stable": self._made["stable"],
            "compile": self._made["compile"],
        }
        usual = {"budget": Budget(), "acceptance": Acceptance(), "adapt": False, "stable": None, "compile": None}
        told = "".join(f", {name}={value!r}" for name, value in settings.items() if value != usual[name])
        return f"XTokAssisted({_name(self.model)}, drafts={list(self.names)}{told})"

    def with_drafts(self, names: abc.Collection[str]) -> "XTokAssisted":
        """The same with some of its drafts alone, by their `names`: with none of them, the target alone. Models are shared, and
        what pays is learnt anew.

        Raises `InvalidInputError` for a draft that there isn't.
        """
        given = list(names) if isinstance(names, abc.Iterable) and not isinstance(names, str | bytes) else [None]
        if not all(name in self.names for name in given):
            raise InvalidInputError(f"names is {shown(names)}; the drafts are {list(self.names)}. Give a list of some of them.")
        kept = [i for i, name in enumerate(self.names) if name in given]
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made._given, made._drafts = [self._given[i] for i in kept], [self._drafts[i] for i in kept]
        made.names, made._shows_hidden = tuple(self.names[i] for i in kept), _any_heads(made._given)
        made.adapter = self.adapter if any(isinstance(one, ModelDraft) for one in made._drafts) else None
        made._pool, made._ledger = Pool(captures=made.captures), made._new_ledger()
        made._whole = self
        return made

    def _new_ledger(self) -> Ledger:
        return Ledger([Account() for _ in self._drafts], self._padded)

    def _ledger_without_a_clock(self) -> Ledger:
        """A ledger for one text: what it decides follows from ids and counts, so that the same call gives the same text."""
        size = weights(self.model)
        models = [weights(one.model) / size if isinstance(one, ModelDraft) else WITHOUT_A_MODEL for one in self._drafts]
        return replace(self._new_ledger(), nominal=models)

    def _shapes_of(self, target: PreTrainedModel) -> StableShapes | None:
        """Shapes that give the same bits. Without any, None and a warning unless they were asked for; else raises
        `UnsupportedModelError`, `UnsupportedArgumentError` or `InvalidInputError`.
        """
        try:
            return self._found_shapes(target)
        except XTokError as error:
            self._unstable(error, stacklevel=5)
            return None

    def _unstable(self, error: XTokError, *, stacklevel: int) -> None:
        """Warn that forward passes can't have fixed shapes. Raises the reason if they were asked for."""
        if self._made["stable"]:
            raise type(error)(f"{error} Or leave out stable=True, and ids may depend on the batch and the draft.") from error
        message = _UNSTABLE.format(type(self.model).__name__, self.model.dtype, error)
        warnings.warn(message, UnstableWarning, stacklevel=stacklevel)

    def _shapes_now(self) -> StableShapes | None:
        """The shapes for a call. None, with a warning, if bits can't be fixed any more: with other numbers of threads, say."""
        if self._shapes is not None:
            try:
                self._shapes.check()
            except XTokError as error:
                self._unstable(error, stacklevel=6)
                return None
        return self._shapes

    def _found_shapes(self, target: PreTrainedModel) -> StableShapes:
        if self._acceptance != Acceptance():
            given = self._made["acceptance"]
            raise UnsupportedArgumentError(f"With acceptance={given!r} ids depend on the draft; use acceptance='match'.")
        if not takes_slots(target):
            raise UnsupportedModelError(
                f"{type(target).__name__} can't share forward passes, as fixed shapes need: what it computes follows its "
                "sequence's length (dynamic rotary frequencies, ALiBi), or its cache is of another kind."
            )
        usual = {"max_new_tokens": 1, "num_beams": 1, "do_sample": False, "num_return_sequences": 1}
        if not hf.prepare(self.target, [0], usual)[0].is_plain:
            raise UnsupportedModelError(f"{type(target).__name__} is given more than ids.")
        return StableShapes(target)

    @property
    def _padded(self) -> Callable[[int, int], int]:
        """By how many texts share a forward of the target and how many rows of it each needs, how many each has."""
        if self._shapes is not None:
            return self._shapes.padded
        return lambda texts, rows: doubled(rows) if self.captures else rows

    def _can_capture(self, wanted: bool | None) -> bool:
        """Whether there are forwards to capture. Raises `UnsupportedModelError` where they are wanted and can't be."""
        if wanted and not (takes_slots(self.model) and takes_graphs(self.model)):
            raise UnsupportedModelError(
                f"Forwards of {type(self.model).__name__}, on {device_of(self.model)}, can't be captured as CUDA graphs: it "
                "must be on one GPU, without hooks, and of a kind whose forwards can be shared. Leave compile out."
            )
        return captures(wanted, self.models())

    @staticmethod
    def _check_places(target: Any, drafts: list[Any], places: tuple[Placement, Placement]) -> None:
        """Raises `InvalidInputError` where a setting is of a model that xtok doesn't load."""
        check_places(target, "target", places[0])
        models = [one for one in drafts if not guesses(one)]
        for one in models:
            check_places(one, "draft", places[1])
        if not models and places[1] not in (DEFAULT, places[0]):
            raise InvalidInputError(f"{places[1]} is for the draft, and there is none to load. Give the target's alone.")

    def _check_drafts(self, given: list[Any], models: list[DraftModel], *, adapt: bool) -> None:
        """Raises `InvalidInputError` or `UnsupportedArgumentError` where drafts, models among them, can't do what is asked."""
        if any(one.model is self.model for one in models):
            raise InvalidInputError(
                "The draft is the target itself, which can't guess sooner than it knows. Give a smaller model."
            )
        if self._acceptance.rejects and given and (len(given), len(models)) != (1, 1):
            raise UnsupportedArgumentError(
                "acceptance='rejection' needs the distribution that guesses are drawn from, so it takes one draft model alone. "
                "Give one, or use acceptance='match'."
            )
        if adapt and len(models) != 1:
            raise InvalidInputError(f"adapt=True needs one draft model that can learn, and there are {len(models)}.")

    def _draft(self, given: Any, model: DraftModel | None) -> Draft:
        """What starts drafters, checked against the target."""
        if model is not None:
            return ModelDraft(model, self.target.vocabulary, self.adapter)
        if isinstance(given, HeadsDrafter):
            given.check(self.model, self.target.vocabulary.view)
        return as_draft(given)

    @overload
    def generate(self, prompt: str | Chat | abc.Sequence[int] | Tensor, **arguments: Any) -> Generation: ...
    @overload
    def generate(self, prompt: abc.Sequence[Prompt], **arguments: Any) -> list[Generation]: ...
    @overload
    def generate(self, prompt: abc.Mapping[str, Any], **arguments: Any) -> Generation: ...
    @own_modes
    def generate(self, prompt: Any, **arguments: Any) -> Generation | list[Generation]:
        """Answer a prompt: a text; a chat (a list of messages); token ids (a list of whole numbers, a tensor of shape (n,) or
        (1, n)); or a tokenizer's encoding of one text. A list of such prompts is answered by a list: a list of whole numbers
        is one prompt, a list of lists of them is several.

        `tools`, `enable_thinking`, and whatever `chat_template_kwargs` holds, are handed to the templates of chats. Of an
        encoding, ids and attention mask are read.

        `arguments` are those of transformers' `generate`, among them `streamer`, `stop_strings`, `logits_processor` and
        `stopping_criteria`. `split_special_tokens=True` reads control tokens written out in a text as plain text.
        `seed`, where `do_sample=True` (with greedy texts it is refused): the ids depend on target, prompt, settings and seed
        alone, not on the draft or on what else is in the list. The same prompt again, in a list or by `num_return_sequences`,
        gives further, independent texts.

        `prediction`: a text that the answer is likely to hold, such as a document that is to be edited: it is guessed from, as
        by OpenAI's Predicted Outputs, and changes no id.

        `batch_size`: how many texts of a list are written at a time, by forwards that they share; as one ends, the next begins,
        and ids don't depend on it. `progress`: a bar on stderr; None for one where that is a terminal.

        Raises `InvalidInputError` for a prompt and `UnsupportedArgumentError` for an argument that can't be honoured.
        """
        many = is_several(prompt)
        prompts = list(prompt) if many else [prompt]
        streamer, seed = arguments.pop("streamer", None), arguments.pop("seed", None)
        batch_size, progress = arguments.pop("batch_size", BATCH), arguments.pop("progress", None)
        hf.check_seed(seed)
        check_batch(batch_size, progress)
        hf.check_streamer(streamer, several=many)
        several = len(prompts) > 1
        if several:
            hf.check_several(arguments)
        prepared = [one for each in prompts for one in hf.prepare(self.target, each, dict(arguments), several=several)]
        hf.check_streamer(streamer, several=len(prepared) > 1)
        shown = False if progress is None and len(prepared) == 1 else progress
        with self._pool.lent(min(batch_size, len(prepared)), current()) as caches:
            texts = self._begin(prepared, seed, caches)
            if streamer is not None:
                streamer.put(prepared[0].ids.cpu())
            written = hf.written(self.target, texts, min(batch_size, len(prepared)), streamer)
            results = {number: self.result(text) for number, text in bar(written, "texts", len(prepared), shown=shown)}
        _LAST.given[self] = [results[number] for number in range(len(prepared))]
        return self.last if many or len(prepared) > 1 else results[0]

    def stream(self, prompt: Prompt, **arguments: Any) -> Generator[str, None, Generation]:
        """Yield the new text in pieces as they are committed, never half a character. Joined, they are `generate(...).text`.

        The generator returns (`StopIteration.value`) what `generate` returns.
        """

        def pieces(_: Round, tokens: list[Token]) -> Iterator[str]:
            if piece := "".join(token.text for token in tokens):
                yield piece

        return self._streamed(prompt, arguments, pieces)

    def stream_tokens(self, prompt: Prompt, **arguments: Any) -> Generator[Token, None, Generation]:
        """Yield the new tokens as they are committed, each with who guessed it: `generate(...).tokens`, returned likewise."""
        return self._streamed(prompt, arguments, lambda _, tokens: iter(tokens))

    def stream_rounds(self, prompt: Prompt | KnownPrompt, **arguments: Any) -> Generator[WrittenRound, None, Generation]:
        """Yield each round as it is committed, with all that was guessed: `generate(...).written`, returned likewise."""
        view, names = self.target.vocabulary.view, (*self.names, _PREDICTION)

        def rounds(one: Round, tokens: list[Token]) -> Iterator[WrittenRound]:
            yield written(one, tokens, names, lambda token: view[token] or b"")

        return self._streamed(prompt, arguments, rounds)

    def _streamed(
        self, prompt: Prompt | KnownPrompt, arguments: dict[str, Any], show: Callable[[Round, list[Token]], Iterator[T]]
    ) -> Generator[T, None, Generation]:
        """What is to be shown of each round of a text. Checked at once, written as it is asked for, under the modes of now."""
        asked, modes = self.asked(prompt, arguments), current()

        def generator() -> Generator[T, None, Generation]:
            with self._pool.lent(1, modes) as caches:
                with within(modes):
                    text = asked.begin(Seat(caches))
                for one, tokens in told(self._committed(text, modes), text.drafts):
                    yield from show(one, tokens)
                with within(modes):
                    return self._ended(text)

        return generator()

    def _committed(self, text: Sequence, modes: Modes) -> Iterator[Committed]:
        """The rounds of a text, while it is written. Between them the caller's own modes apply."""
        while text.finish_reason is None:
            with within(modes):
                block = step(self.target, [text])[0]
            if block:
                is_last = text.finish_reason is not None
                yield Committed(text.rounds[-1], block, text.text.pieces[-len(block) :], is_last)

    def _ended(self, text: Sequence) -> Generation:
        """What a text that was streamed is handed out as."""
        hf.stop_recording(text)
        result = self.result(text)
        _LAST.given[self] = [result]
        return result

    @own_modes
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """The Hugging Face way in: `model.generate(**inputs, custom_generate=xt)`.

        `stop_strings` is named here so that transformers hands it over: it drops `tokenizer`, without which it would refuse
        them, and it does refuse those of a generation config. Each row of a batch is a generation of its own: processors are
        copied per row, and asked with a batch of one. `seed` is as in `generate`; transformers hands it over.
        """
        hf.check_seed(seed)
        if model is not self.model:
            raise InvalidInputError("custom_generate was called by another model than the target. Call target.generate.")
        hf.check_arguments({name: hf.callers(name) for name in ("assistant_model", "synced_gpus")})
        criteria = hf.with_stop_strings(self.target.vocabulary, stopping_criteria, stop_strings)
        hf.check_rows(criteria, rows=len(input_ids))
        wanted = len(input_ids) == 1 and generation_config.return_dict_in_generate and self._shapes is None
        keeps_cache = bool(wanted or (hf.callers("kwargs") or {}).get(CACHE) is not None)
        prepared = hf.rows(
            self.model, input_ids, logits_processor, criteria, generation_config, model_kwargs, keeps_cache=keeps_cache
        )
        with self._pool.lent(len(prepared), current()) as caches:
            begun = self._begin(prepared, seed, caches)
            written = dict(hf.written(self.target, begun, len(prepared), hf.callers("streamer")))
        texts = [written[number] for number in range(len(prepared))]
        _LAST.given[self] = [self.result(text) for text in texts]
        return hf.as_transformers(texts, generation_config)

    @property
    def rejects(self) -> bool:
        """Whether ids depend on the distribution that guesses are drawn from."""
        return self._acceptance.rejects

    @property
    def last(self) -> list[Generation]:
        """What this thread's last call gave, a `Generation` for each of its texts: of `generate`, of `stream`, or of
        transformers' `generate` with `custom_generate`, which has no other way to hand out stats. Empty before the first.
        """
        return list(_LAST.given.get(self, []))

    def models(self) -> list[PreTrainedModel]:
        """The target, and the draft models."""
        adapted = [] if self.adapter is None else [self.adapter.draft.model]
        return [self.model, *adapted, *(draft.model for draft in self._drafts if isinstance(draft, ModelDraft))]

    def guesses(self, positions: float = 1, *, predicted: bool = False) -> int:
        """How many places of a model's cache a text of so many positions may need beside those: for guesses, or for padding.

        `predicted`: whether it is guessed from a prediction.
        """
        budget = self._budget
        most = max(64, budget.nodes, 4 * budget.depth * budget.width) if self._drafts or predicted else 1
        if self._shapes is None and not self.captures:
            return most
        seen = rounded(ceil(positions) + (most if self.captures else 0))  # of stable forwards none looks at more for a guess
        return max(most, 1 + seen - ceil(positions))

    @own_modes
    def asked(self, prompt: Prompt | KnownPrompt, arguments: dict[str, Any]) -> Begun:
        """One text, checked, and what begins it.

        Errors are those of `generate`.
        """
        seed = arguments.pop("seed", None)
        hf.check_seed(seed)
        if is_several(prompt):
            raise InvalidInputError("A list of texts was given where one text is written. Call generate for lists.")
        prepared = hf.prepare(self.target, prompt, arguments)
        if len(prepared) > 1:
            raise UnsupportedArgumentError(f"num_return_sequences={len(prepared)} gives several texts. Call generate for them.")
        self._check_text(prepared[0])
        seed, (noise,) = hf.noises(prepared, seed)
        one, shapes = prepared[0], self._shapes_now()
        return Begun(one.config.max_length, one.prediction is not None, lambda seat: self._text(one, noise, seed, seat, shapes))

    def _check_text(self, prepared: hf.Prepared) -> None:
        """Raises `UnsupportedArgumentError` for a text whose forwards can't have fixed shapes, where they are to, and for one
        that is predicted where guesses are judged by the distribution that they are drawn from.
        """
        if prepared.prediction and self.rejects:
            raise UnsupportedArgumentError(
                "acceptance='rejection' needs the distribution that guesses are drawn from, and a prediction has none. Leave "
                "it out, or use acceptance='match'."
            )
        if self._made["stable"] and not self._is_fixed(prepared):
            raise UnsupportedArgumentError(
                f"stable=True can't go on in a cache of the caller's, or read anything but ids. Leave {CACHE} and "
                "further inputs of the model out, or stable=True."
            )

    def _begin(self, prepared: list[hf.Prepared], seed: int | None, caches: Caches) -> Iterator[Sequence]:
        """The texts of a call, one after another. What those share, such as the seed, is decided here."""
        for one in prepared:
            self._check_text(one)
        seed, noises = hf.noises(prepared, seed)
        begun, shapes = zip(prepared, noises, strict=True), self._shapes_now()
        return (self._text(one.with_own_state(), noise, seed, Seat(caches), shapes) for one, noise in begun)

    def _text(
        self, prepared: hf.Prepared, noise: Noise | None, seed: int | None, seat: Seat, shapes: StableShapes | None
    ) -> Sequence:
        vocabulary = self.target.vocabulary
        start = Text(vocabulary.view, prepared.unpadded)
        guesses = bool(self._drafts or prepared.prediction)
        branches = not guesses or (self._branches and fits_trees(self.model, prepared.cache))
        slot = self._slot(prepared, seat, shapes)
        judges = prepared.samples and self._acceptance != Acceptance()
        half = computes_in_half(self.model)
        varies = half and not (shapes is not None and slot.fixed)
        is_exact = not judges and not varies
        meter = Meter(chains_only=not branches, exact=is_exact, shared_forwards=slot.shares)
        picker = Picker(
            prepared.processors,
            meter,
            noise,
            None if noise is None else vocabulary.keys.to(prepared.ids.device),
            self._acceptance,
            tolerance(self.model, half=half),
            prepared.records("output_scores"),
            prepared.records("output_logits"),
        )
        return Sequence(
            slot=slot,
            seat=seat,
            ids=prepared.ids,
            text=start,
            picker=picker,
            criteria=prepared.criteria,
            config=prepared.config,
            session=self._session(prepared, start, noise, meter, seat, varies=varies),
            budget=self._budget_of(prepared, branches=branches),
            deepest=positions(self.model, slot),
            meter=meter,
            seed=seed if prepared.samples else None,
            drafts=(*self.names, _PREDICTION) if prepared.prediction else self.names,
        )

    def _slot(self, prepared: hf.Prepared, seat: Seat, shapes: StableShapes | None) -> Slot:
        """One whose forwards are shared; with a cache of its own for what can't be held so, and where that is the caller's."""
        if prepared.is_plain and not prepared.keeps_cache and takes_slots(self.model):
            return seat.slot(self.model, shows_hidden=self._shows_hidden, shapes=shapes)
        prompt = prepared.ids, prepared.config
        return cached_model(self.model, prepared.cache, prepared.inputs, shows_hidden=self._shows_hidden, prompt=prompt)

    def _is_fixed(self, prepared: hf.Prepared) -> bool:
        """Whether the forward passes of a text have fixed shapes."""
        return self._shapes is not None and prepared.is_plain and not prepared.keeps_cache

    def _session(
        self, prepared: hf.Prepared, text: Text, noise: Noise | None, meter: Meter, seat: Seat, *, varies: bool
    ) -> Session | None:
        """The drafting of one text, which shares what all of this instance learn of costs and gains; unless that, by the shapes
        of forward passes, might change the text of a call that is repeated (it `varies`: bits depend on shapes).
        """
        if not (self._drafts or prepared.prediction):
            return None
        request = Request(
            self.target.vocabulary,
            meter,
            samples=prepared.samples,
            independent=self._acceptance.rejects,
            end=prepared.end,
            warpers=warpers(prepared.processors),
            prompt=prepared.prompt,
            template=prepared.template,
            model=self.model,
            seat=seat,
        )
        drafts, ledger = self._drafts, self._ledger
        if varies and self._made["stable"] is not False:
            drafts = [TokenRecycling() if isinstance(one, TokenRecycling) else one for one in drafts]
            ledger = self._ledger_without_a_clock()
        if prepared.prediction is None:
            return Session(drafts, request, ledger, text.ids, noise)
        return Session([*drafts, prepared.prediction], request, ledger.with_account(), text.ids, noise)

    def _budget_of(self, prepared: hf.Prepared, *, branches: bool) -> Budget:
        """Draws judged by their distribution are chains of one length: what is left out of a guess must not depend on it."""
        if self._acceptance.rejects and prepared.samples:
            return self._judged
        return self._budget if branches else replace(self._budget, width=1)

    @cached_property
    def _branches(self) -> bool:
        """Whether the target can check a tree, found out where there is something that guesses one."""
        return takes_trees(self.model)

    def _learn(self, text: Sequence) -> None:
        """Let an adapting draft learn from a text that is done. Raises the error that it ended in."""
        if text.error is not None:
            raise text.error
        if self.adapter is not None and text.picker.noise is None:
            size = text.text.prompt_size
            start, new = (part.decode(errors="ignore") for part in (text.text.data[:size], text.text.data[size:]))
            self.adapter.learn(start, new, text.meter.seconds["all"])

    def result(self, text: Sequence) -> Generation:
        """What a text that has ended is handed out as. Raises the error that it ended in."""
        self._learn(text)
        return Generation(
            text=text.text.new_data.decode(errors="replace"),
            token_ids=text.new_ids,
            finish_reason=text.finish_reason or "stop",
            stats=stats(text),
            rounds=tuple(text.rounds),
            seed=text.seed,
            scores=text.picker.scores,
            logits=text.picker.logits,
            drafts=text.drafts,
            pieces=tuple(text.text.pieces),
            spelled=self._spelled(text),
        )

    def _spelled(self, text: Sequence) -> dict[int, bytes]:
        """The bytes of all ids that were guessed."""
        view = self.target.vocabulary.view
        return {token: view[token] or b"" for one in text.rounds for token in one.tree.tokens}


def _made_again(kind: type[XTokAssisted], arguments: dict[str, Any]) -> XTokAssisted:
    return kind(**arguments)


def _any_heads(drafts: list[Any]) -> bool:
    """Whether some look at the target's hidden states."""
    return any(isinstance(one, HeadsDrafter) for one in drafts)


def _part_of(whole: XTokAssisted, names: tuple[str, ...]) -> XTokAssisted:
    return whole.with_drafts(names)


class _Last(local):
    """What the last call of each instance gave, in each thread."""

    def __init__(self) -> None:
        self.given = WeakKeyDictionary[XTokAssisted, list[Generation]]()


_LAST = _Last()


def _names(drafts: list[Any]) -> tuple[str, ...]:
    """What drafts are called where it is told who guessed what, no two alike."""
    found: list[str] = []
    for draft in drafts:
        name = _name(draft)
        found.append(name if name not in (*found, _PREDICTION) else f"{name} ({len(found) + 1})")
    return tuple(found)


def _name(draft: Any) -> str:
    if isinstance(draft, PreTrainedModel):
        return PurePath(draft.config._name_or_path or "").name or type(draft).__name__
    known = {PromptLookup: "prompt lookup", TokenRecycling: "token recycling", HeadsDrafter: "heads"}
    return known.get(type(draft), type(draft).__name__)


def check_batch(batch_size: Any, progress: Any) -> None:
    """Raises `InvalidInputError` for what are none."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InvalidInputError(f"batch_size is {batch_size!r}; it must be a whole number, 1 or more.")
    if not isinstance(progress, bool | None):
        raise InvalidInputError(f"progress is {progress!r}; it must be True, False or None.")


def _check_switches(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InvalidInputError(f"{name} is {value!r}; it must be True or False.")


def _check_settings(budget: Any, acceptance: Any, captured: Any, stable: Any, **posterior: Any) -> None:
    for name, value in {"compile": captured, "stable": stable}.items():
        if not isinstance(value, bool | None):
            raise InvalidInputError(f"{name} is {value!r}; it must be True, False or None.")
    if acceptance not in get_args(Accepts):
        raise InvalidInputError(f"acceptance is {acceptance!r}; use one of {', '.join(map(repr, get_args(Accepts)))}.")
    for name, value in posterior.items():
        if not (isinstance(value, Real) and 0 < float(value) <= 1):
            raise InvalidInputError(f"{name} is {value!r}; it must be above 0, and 1 at most.")
    check_budget(budget)
