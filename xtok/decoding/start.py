"""Starts a request: its sequence gets a slot in the target's cache, a picker, and a function that starts its drafters."""

from collections import abc
from dataclasses import replace
from functools import partial

from xtok.align.text import SequenceText
from xtok.decoding.pick import Picker
from xtok.decoding.prepare import Prepared
from xtok.decoding.sequence import Sequence
from xtok.decoding.setup import FORMAT, PREDICTION, Setup
from xtok.drafts.base import Draft, Request
from xtok.drafts.formats import FormatDraft
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.meter import Meter
from xtok.drafts.policy.policy import Policy
from xtok.drafts.recycling import TokenRecycling
from xtok.drafts.session import Session
from xtok.models.cache_set import CacheSet, Slots
from xtok.models.recurrent import cached_model
from xtok.sampling.processors import warpers


def start(setup: Setup, request: Prepared, caches: CacheSet, most: int | None = None) -> Sequence:
    """The sequence of a request, with its slots in `caches`. `most`: how many positions each may have, without guesses."""
    request = request.with_own_state() if request.shared else request
    vocabulary, known, guesses = setup.target.vocabulary, request.traits, bool(setup.drafts or request.prediction)
    branches, half = not guesses or known.branches_in(request.cache), known.computes_in_half
    tolerance, slots = known.tolerance, Slots(caches, most)
    model, layers = setup.target.model, setup.hidden_layers
    try:
        if request.shares_forwards and known.shares:
            slot = slots.take(model, known, hidden_layers=layers, shapes=request.shapes)
        else:  # the model needs a cache of its own, or the caller gave one
            prompt = request.ids, request.config
            slot = cached_model(model, request.cache, request.inputs, hidden_layers=layers, prompt=prompt)
        varies = half and not (request.shapes is not None and slot.fixed)
        slots.adopts = caches.keeps and (not varies or setup.stable is False)  # what is taken over may differ in its last bits
        adopted = slot.adopt(request.unpadded) if slots.adopts else 0
        judged = request.noise is not None and setup.accept is not None
        meter = Meter(chains_only=not branches, exact=not judged and not varies, shared_forwards=slot.shares)
        own = _own_drafts(request) if guesses and not judged else {}  # guesses of another kind would spoil the distribution
        policy: Policy | None = None
        if guesses:  # if bits depend on shapes, guesses must not depend on a clock: a repeated call is to give the same text
            policy = setup.policy_without_a_clock() if varies and setup.stable is not False else setup.policy
        budget = setup.budget if branches else replace(setup.budget, width=1)
        recorded = request.recorded("output_scores"), request.recorded("output_logits")
        text = SequenceText(vocabulary.view, request.unpadded)
        return Sequence(
            slot=slot,
            slots=slots,
            ids=request.ids,
            text=text,
            picker=Picker(
                request.processors,
                meter,
                request.noise,
                None if request.noise is None else vocabulary.keys.to(request.ids.device),
                setup.accept if judged else None,
                tolerance,
                *recorded,
            ),
            criteria=request.criteria,
            config=request.config,
            budget=budget,
            deepest=slot.limit,
            meter=meter,
            drafting=partial(_session, setup, request, meter, slots, policy, [*own.values()]) if policy else None,
            policy=policy,
            seed=request.seed,
            read=adopted,
            adopted=adopted,
            drafts=(*setup.names, *own),
        )
    except BaseException:
        slots.leave()
        raise


def _own_drafts(request: Prepared) -> dict[str, Draft]:
    """The drafts that only this sequence has, by name."""
    guides = [make for one in request.processors if callable(make := getattr(one, "guide", None))]
    own: dict[str, Draft] = {}
    if guides:
        own[FORMAT] = FormatDraft(partial(guides[0], request.ids[0].tolist()), len(request.unpadded))
    return own if request.prediction is None else {**own, PREDICTION: request.prediction}


def _session(setup: Setup, request: Prepared, meter: Meter, slots: Slots, policy: Policy, own: abc.Sequence[Draft]) -> Session:
    given = Request(
        setup.target.vocabulary,
        meter,
        samples=request.noise is not None,
        independent=request.noise is not None and setup.acceptance == "rejection",
        end=request.end,
        warpers=warpers(request.processors),
        prompt=request.prompt,
        template=request.template,
        model=setup.target.model,
        hidden_layers=setup.hidden_layers,
        slots=slots,
    )
    drafts = list(setup.drafts)
    if not policy.reads_clock:  # what they learnt from other sequences would change guesses, and so shapes
        drafts = [one.without_memory() if isinstance(one, PromptLookup | TokenRecycling) else one for one in drafts]
    return Session([*drafts, *own], given, policy, request.unpadded, request.noise)
