"""Makes a `Setup` of the arguments of `XTokAssisted`: loads the models, and checks everything."""

from dataclasses import replace
from numbers import Real
from pathlib import PurePath
from typing import Any, get_args

from transformers import PreTrainedModel

from xtok.decoding.prepare import as_generate
from xtok.decoding.setup import FORMAT, PREDICTION, Acceptance, Setup, named, warn_unstable
from xtok.drafts.acceptance import rejection, typical
from xtok.drafts.base import Draft
from xtok.drafts.given import ModelDraft, as_drafts, as_list, is_drafting, without_a_model
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.policy.settings import Budget, check_budget
from xtok.drafts.recycling import TokenRecycling
from xtok.errors import InvalidInputError, LossyWarning, UnsupportedArgumentError, UnsupportedModelError, XTokError, warn
from xtok.models.capabilities import traits
from xtok.models.graphs import captures, takes_graphs
from xtok.models.load import DraftModel, Placement, Target, check_places, check_source, draft_model, placements, target_model
from xtok.models.runner import forget, renewed
from xtok.models.stable import StableShapes


def assemble(
    target: Any,
    draft: Any,
    *,
    budget: Budget | None,
    acceptance: Acceptance,
    posterior_threshold: float,
    posterior_alpha: float,
    stable: bool | None,
    compile: bool | None,  # noqa: A002
    **placed: Any,
) -> Setup:
    """The setup of an instance. Arguments and errors are those of `XTokAssisted`; `placed`: those of `placements`."""
    _check_settings(budget, acceptance, compile=compile, stable=stable)
    for name, value in {"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha}.items():
        if not (isinstance(value, Real) and 0 < float(value) <= 1):
            raise InvalidInputError(f"{name} is {value!r}; it must be above 0, and at most 1.")
    if acceptance == "typical":
        warn("acceptance='typical' is lossy: sampled texts are not the target's own.", LossyWarning)
    budget = budget or Budget(depth=5 if acceptance == "rejection" else Budget.depth)
    if acceptance == "rejection":  # a guess must not be cut by what was drawn
        budget = replace(budget, width=1, schedule="constant")
    given = as_list(draft, beside=[] if budget.width == 1 else without_a_model())
    places = placements(**placed)
    _check_sources(target, given, places)
    loaded = target_model(target, places[0])
    models = {i: draft_model(one, places[1], loaded.traits.device) for i, one in enumerate(given) if not is_drafting(one)}
    _check_drafts(loaded, given, list(models.values()), acceptance=acceptance)
    accepts = {"match": None, "rejection": rejection, "typical": typical(posterior_threshold, posterior_alpha)}
    setup = Setup(
        target=loaded,
        drafts=tuple(as_drafts(given, models, loaded.vocabulary)),
        names=named([name_of(models[i].model if i in models else one) for i, one in enumerate(given)], FORMAT, PREDICTION),
        budget=budget,
        acceptance=acceptance,
        accept=accepts[acceptance],
        stable=stable,
        compile=compile,
    )
    return fitted(setup)


def fitted(setup: Setup) -> Setup:
    """The setup, with fixed shapes and graphs if its models now allow them. It knows no timings yet. Raises an `XTokError` if
    the caller requires what they don't allow.
    """
    target, acceptance, stable, shapes = setup.target, setup.acceptance, setup.stable, None
    target = replace(target, traits=traits(target.model))
    if stable or (stable is None and acceptance == "match" and target.traits.computes_in_half):
        try:
            shapes = _shapes(target, acceptance)
        except XTokError as error:
            warn_unstable(target, error, stable=stable)
    captured, runners = _captured(target, setup.drafts, setup.compile), {model: renewed(model) for model in setup.models}
    return replace(setup, target=target, shapes=shapes, captures=captured, runners=runners)


def refitted(setup: Setup) -> Setup:
    """The setup after a model was changed: what was found out about its models, and made of their weights, is dropped."""
    for model in setup.models:
        forget(model)
    return fitted(setup)


def _check_settings(budget: Any, acceptance: Any, **switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool | None):
            raise InvalidInputError(f"{name} is {value!r}; it must be True, False or None.")
    if acceptance not in get_args(Acceptance):
        raise InvalidInputError(f"acceptance is {acceptance!r}; use one of {', '.join(map(repr, get_args(Acceptance)))}.")
    check_budget(budget)


def _check_sources(target: Any, drafts: list[Any], places: tuple[Placement, Placement]) -> None:
    """Raises `InvalidInputError` for models that can't be loaded, and for settings that a loaded one doesn't have."""
    check_places(target, "target", places[0])
    check_source(target, "target")
    for one in drafts:
        if not is_drafting(one):
            check_places(one, "draft", places[1])
            check_source(one, "draft")  # before weights are loaded, which may take minutes


def _check_drafts(target: Target, given: list[Any], models: list[DraftModel], *, acceptance: str) -> None:
    """Raises `InvalidInputError` or `UnsupportedArgumentError` for drafts that can't do what is requested."""
    if any(one.model is target.model for one in models):
        raise InvalidInputError(
            "The draft is the target itself, so guessing would take as long as generating. Give a smaller model."
        )
    drawing = len(models) + sum(isinstance(one, HeadsDrafter) and one.is_sequential for one in given)
    if acceptance == "rejection" and given and (len(given), drawing) != (1, 1):
        raise UnsupportedArgumentError(
            "acceptance='rejection' needs the distribution that guesses are drawn from, so it takes one draft model, or "
            "sequential heads, alone. Give just that, or use acceptance='match'."
        )
    for one in given:
        if isinstance(one, HeadsDrafter):
            one.check(target.model, target.vocabulary.view)


def _shapes(target: Target, acceptance: Acceptance) -> StableShapes:
    """The fixed shapes of the target's forward passes. Raises an `XTokError` if it can't have any."""
    if acceptance != "match":
        raise UnsupportedArgumentError(f"With acceptance={acceptance!r}, ids depend on the draft. Use acceptance='match'.")
    name = type(target.model).__name__
    if not target.traits.shares:
        raise UnsupportedModelError(
            f"{name} can't share forward passes, which fixed shapes need: what it computes depends on the sequence's "
            "length (dynamic rotary frequencies, ALiBi), or it has another kind of cache."
        )
    usual = {"max_new_tokens": 1, "num_beams": 1, "do_sample": False, "num_return_sequences": 1}
    if not as_generate(target, [0], usual)[0].is_plain:
        raise UnsupportedModelError(f"{name} needs inputs besides ids, for which forward passes can't have fixed shapes.")
    return StableShapes(target.model)


def _captured(target: Target, drafts: tuple[Draft, ...], wanted: bool | None) -> bool:
    """Whether to capture forward passes. Raises `UnsupportedModelError` if `wanted` is True and the target's can't be."""
    if wanted and not (target.traits.shares and takes_graphs(target.model)):
        raise UnsupportedModelError(
            f"Forward passes of {target.traits.name}, on {target.traits.device}, can't be captured as CUDA graphs: it "
            "must be on one GPU, without hooks, and of a kind whose forward passes can be shared. Leave compile out."
        )
    return captures(wanted, [target.model, *(draft.model for draft in drafts if isinstance(draft, ModelDraft))])


def name_of(draft: Any) -> str:
    """The name of a draft, or of a model: its folder or class."""
    if isinstance(draft, PreTrainedModel):
        return PurePath(draft.config._name_or_path or "").name or type(draft).__name__
    known = {PromptLookup: "prompt lookup", TokenRecycling: "token recycling", HeadsDrafter: "heads"}
    return known.get(type(draft), type(draft).__name__)
