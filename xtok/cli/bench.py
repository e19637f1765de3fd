"""`xtok bench`: its commands, their options, and what they hand to those that measure."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from xtok.cli.console import (
    EVERY,
    OWN_DRAFT,
    OWN_TARGET,
    SHIPPED,
    DeviceOption,
    DraftOption,
    DtypeOption,
    TargetOption,
    as_json,
    lines_of,
    load_pair,
    model_draft,
    on_the_command_line,
    tell,
)
from xtok.errors import InvalidInputError
from xtok.pair import HEADS, TUNED, prompts, quoting, technical
from xtok.results.progress import busy

GUESS_LENGTH = 5
ADDED = 8
"""On how many prompts it is measured what a server adds to an engine."""
LARGE, SMALL = (13e9, 40), (160e6, 12)
"""Parameters and blocks of llm-jp-13B and of open-calm-small."""


class _Commands(TyperGroup):
    """The name of a command may stand anywhere; without one, systems are compared."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name in front."""
        if args and args[0] in ctx.help_option_names:
            return super().parse_args(ctx, args)
        at = self._named(args)
        return super().parse_args(ctx, ["compare", *args] if at is None else [args[at], *args[:at], *args[at + 1 :]])

    def _named(self, args: list[str]) -> int | None:
        """Where the first argument stands that is neither an option nor the value of one."""
        options = [option for command in self.commands.values() for option in command.params]
        values = {name: option.nargs for option in options for name in option.opts if not getattr(option, "is_flag", False)}
        known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        at = 0
        while at < len(args) and args[at].startswith("-"):
            if args[at].partition("=")[0] not in known:  # which is told where it is read
                return None
            at += 1 + values.get(args[at], 0)  # that of --option=value is none of its own
        return at if at < len(args) else None


app = typer.Typer(cls=_Commands, help="Measure on your machine: systems side by side, in turns, on the same work.")

PromptsOption = Annotated[
    Path | None, typer.Option("--prompts", help="A file with one prompt per line.", show_default="20 held-out prompts")
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Only so many prompts, the first ones.", show_default="all")
]
TokensOption = Annotated[int, typer.Option(min=1, help="How many tokens to write per prompt.")]
GuessOption = Annotated[int, typer.Option(min=1, help="How many draft tokens a fixed guess has.")]
BatchOption = Annotated[str, typer.Option(help="How many texts at once, with commas.")]
RatioOption = Annotated[
    float | None, typer.Option(min=1, help="Enlarge the target until its forward costs so many of the draft's.")
]
LargeOption = Annotated[
    bool, typer.Option("--large", help="Enlarge both models to the sizes of llm-jp-13B and open-calm-small: 27 GB.")
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(help="Only that way to ask for texts: greedy, penalty or sampled. May be given again.", show_default="all"),
]
PenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", min=1, help="That of the setting penalty, where greedy texts don't loop.", show_default="1.2"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command("compare")
@on_the_command_line()
def systems(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = None,
    file: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    guess_length: GuessOption = GUESS_LENGTH,
    repeats: Annotated[int, typer.Option(min=1, help="How often to run each prompt.")] = 1,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Also with the draft tuned on the target's text, in minutes. Of a file, every other line is for that.",
        ),
    ] = False,
    setting: SettingOption = None,
    penalty: PenaltyOption = None,
    ratio: RatioOption = None,
    large: LargeOption = False,
    vocabularies: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Enlarge the vocabularies of target and draft to so many ids.", show_default=False),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    useless: Annotated[bool, typer.Option("--useless", help="Also with useless drafts: a random one, and a dear one.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw bars and a breakdown of the time, as PNG or SVG.")] = None,
    json_told: JsonOption = False,
) -> None:
    """The target alone, transformers' universal assisted generation and xtok. (What `xtok bench` does.)"""
    from xtok.bench import compare, report
    from xtok.bench import plot as picture

    ways = _ways(setting, penalty)
    _check_asked(plot, tune=tune, unsaved=large and vocabularies is not None)
    texts, others = _measured_and_learnt(file, limit, tune=tune)
    pair = load_pair(target, draft, device, dtype)
    narrow, pair = pair[1], _widened(pair, vocabularies)
    pair = _enlarged(*pair, ratio, large)
    compared = {"as it is": pair[1]} | (_tuned(pair, narrow, others, vocabularies) if tune else {})
    compared |= compare.useless_drafts(*pair) if useless else {}
    shape = {"max_new_tokens": max_new_tokens, "guess_length": guess_length, "repeats": repeats}
    settings = {
        name: {kind: compare.compare(pair[0], one, texts, way, **shape) for kind, one in compared.items()}
        for name, way in ways.items()
    }
    titles = {name: way.title for name, way in ways.items()}
    if plot is not None:
        picture.draw(
            {titles[name]: drafts for name, drafts in settings.items()},
            _title(target, draft, pair[0][0], ratio, large),
            plot,
        )
    found = {"build_seconds": compare.build_seconds(*pair), "titles": titles, "settings": settings}
    tell(found, report.print_bench, json_told)


@app.command("sampled")
@on_the_command_line()
def sampling(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = None,
    file: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    guess_length: GuessOption = GUESS_LENGTH,
    ratio: RatioOption = None,
    large: LargeOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_told: JsonOption = False,
) -> None:
    """Sampling at four temperatures: are the texts draws from the target's distribution?"""
    from xtok.bench import report, sampled

    texts = _measured(file, limit)
    pair = _enlarged(*load_pair(target, draft, device, dtype), ratio, large)
    rows = sampled.compare_sampled(*pair, texts, max_new_tokens=max_new_tokens, guess_length=guess_length)
    tell(rows, report.print_sampled, json_told)


@app.command("drafters")
@on_the_command_line()
def ways_to_guess(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = None,
    file: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    ratio: RatioOption = None,
    large: LargeOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_told: JsonOption = False,
) -> None:
    """All ways to guess and mixtures of them, on three kinds of prompts."""
    from xtok.bench import drafters, report

    texts = _measured(file, None)
    pair = load_pair(target, draft, device, dtype)
    own = _own_drafts(pair, shipped=target == OWN_TARGET and draft in (None, OWN_DRAFT))
    pair = _enlarged(*pair, ratio, large)
    kinds: dict[str, Any] = {"prose": texts[:limit], "technical": technical()[:limit], "quoting": quoting(texts)[:limit]}
    rows = drafters.compare_drafters(pair[0], own, kinds, max_new_tokens=max_new_tokens)
    tell(rows, report.print_drafters, json_told)


@app.command("contexts")
@on_the_command_line()
def lengths(
    target: TargetOption = OWN_TARGET, draft: DraftOption = None, file: PromptsOption = None, json_told: JsonOption = False
) -> None:
    """What a round costs beside the models, by the length of the context."""
    from xtok.bench import context, report

    texts = _measured(file, None)
    tell(context.compare_contexts(*_tokenizers(target, draft), texts), report.print_contexts, json_told)


@app.command("vocabularies")
@on_the_command_line()
def sizes(target: TargetOption = OWN_TARGET, draft: DraftOption = None, json_told: JsonOption = False) -> None:
    """What is computed over vocabularies beside the models, by their sizes."""
    from xtok.bench import report, vocabulary

    tell(vocabulary.compare_vocabularies(*_tokenizers(target, draft)), report.print_vocabularies, json_told)


@app.command("batches")
@on_the_command_line()
def batches(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = None,
    file: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    batch: BatchOption = "1,2,4,8,16,32",
    repeats: Annotated[int, typer.Option(min=1, help="How often to run each batch.")] = 3,
    setting: SettingOption = None,
    penalty: PenaltyOption = None,
    ratio: RatioOption = None,
    large: LargeOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_told: JsonOption = False,
) -> None:
    """Many texts at once: transformers' padded batch, and xtok's shared forwards without a draft and with one."""
    from xtok.bench import batches, report

    ways, at_once, texts = _ways(setting, penalty), _sizes(batch), _measured(file, limit)
    pair = _enlarged(*load_pair(target, draft, device, dtype), ratio, large)
    rows = _of_lists(batches.compare_batches, pair, texts, ways, at_once, max_new_tokens=max_new_tokens, repeats=repeats)
    tell(rows, report.print_batches, json_told)


@app.command("bits")
@on_the_command_line()
def bits(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = None,
    file: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    batch: BatchOption = "1,8",
    repeats: Annotated[int, typer.Option(min=1, help="How often to write each text, sampled ones with other seeds.")] = 1,
    setting: SettingOption = None,
    penalty: PenaltyOption = None,
    ratio: RatioOption = None,
    large: LargeOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_told: JsonOption = False,
) -> None:
    """What stable=True gives and costs: texts that differ from those of the target alone, with it and without."""
    from xtok.bench import bits, report

    ways, at_once, texts = _ways(setting, penalty), _sizes(batch), _measured(file, limit)
    pair = _enlarged(*load_pair(target, draft, device, dtype), ratio, large)
    rows = _of_lists(bits.compare_bits, pair, texts, ways, at_once, max_new_tokens=max_new_tokens, repeats=repeats)
    tell(rows, report.print_bits, json_told)


@app.command("gpu")
@on_the_command_line()
def on_a_gpu(
    save: Annotated[Path | None, typer.Option(help="Write the figures to a file, too, as JSON.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables in Markdown.")] = False,
) -> None:
    """What a GPU makes of the shipped pair in the shapes of llm-jp-13B and open-calm-small: 27 GB, and as much for caches."""
    import torch

    if not torch.cuda.is_available():
        typer.echo("There is no GPU here that torch can use, so nothing was measured.")
        return
    from xtok.bench import report

    if save is not None and not save.parent.is_dir():
        raise InvalidInputError(f"There is no folder {save.parent} for the figures. Make it, or choose another.")
    found = _large_on("cuda")
    if save is not None:
        save.write_text(as_json(found), encoding="utf-8")
    report.print_gpu(found, markdown)


@app.command("server")
@on_the_command_line()
def servers(
    file: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    clients: Annotated[str, typer.Option(help="How many clients at once, with commas.")] = "1,8,32",
    repeats: Annotated[int, typer.Option(min=1, help="How often all of them ask.")] = 3,
    json_told: JsonOption = False,
) -> None:
    """`xtok serve` beside `transformers serve`, on the shipped pair, its target in the shape of one of 217 M parameters."""
    from tempfile import TemporaryDirectory

    from xtok.bench import report

    counts, texts = _sizes(clients), _measured(file, limit)
    with TemporaryDirectory() as folder:
        found = _served(folder, texts, counts, max_new_tokens=max_new_tokens, repeats=repeats)
    tell(found, report.print_servers, json_told)


def _served(folder: str, texts: list[str], clients: list[int], **shape: int) -> Any:
    """The figures of servers, whose target is written to a folder. Greedy texts have a penalty, so that they don't loop."""
    from xtok.assisted import XTokAssisted
    from xtok.bench import server
    from xtok.bench.widen import SERVED, shaped

    with busy("enlarging the target"):
        target, tokens = shaped(load_pair(OWN_TARGET, None, None, "bfloat16")[0], SERVED)
    target.generation_config.do_sample, target.generation_config.repetition_penalty = False, 1.2
    for part in (target, tokens):
        part.save_pretrained(folder)
    added = server.measure_added(XTokAssisted((target, tokens), OWN_DRAFT), texts[:ADDED], **shape)
    return server.ServerFigures(added, server.compare_servers(folder, OWN_DRAFT, texts, clients, **shape))


def _large_on(device: str) -> Any:
    """The figures of the large pair. Raises `InvalidInputError` where it doesn't fit."""
    import torch

    from xtok.bench import gpu
    from xtok.bench.compare import asked_for
    from xtok.bench.widen import shaped

    try:
        small = load_pair(OWN_TARGET, None, device, "bfloat16")
        with busy("enlarging the models"):
            target, draft = (shaped(one, shape) for one, shape in zip(small, (gpu.LARGE, gpu.SMALL), strict=True))
        return gpu.compare_on_gpu(target, draft, _measured(None, None), asked_for("penalty"), (1, 8, 32), max_new_tokens=64)
    except torch.OutOfMemoryError as error:
        raise InvalidInputError("The models and the caches of 32 texts don't fit the GPU. Use one of 80 GB.") from error


def _of_lists(measure: Any, pair: Any, texts: list[str], ways: dict[str, Any], sizes: list[int], **shape: int) -> list[Any]:
    """The rows of lists of texts, of each way to ask for them."""
    return [row for way in ways.values() for row in measure(*pair, texts, way, sizes, **shape)]


def _sizes(batch: str) -> list[int]:
    """Numbers with commas. Raises `InvalidInputError` for anything else."""
    if not all(one.strip().isdecimal() and int(one) for one in batch.split(",")):
        raise InvalidInputError(f"batch is {batch!r}; give numbers from 1 with commas, as 1,8,32.")
    return [int(one) for one in batch.split(",")]


def _ways(names: list[str] | None, penalty: float | None) -> dict[str, Any]:
    """How texts are asked for, by name. Raises `InvalidInputError` for a name that is none, and for a penalty without use."""
    from xtok.bench.compare import SETTINGS, asked_for

    found = {name: asked_for(name, penalty) for name in names or SETTINGS}
    if penalty is not None and "penalty" not in found:
        raise InvalidInputError("--repetition-penalty has no effect without the setting penalty. Give --setting penalty, too.")
    return {name: found[name] for name in SETTINGS if name in found}


def _check_asked(plot: Path | None, *, tune: bool, unsaved: bool) -> None:
    """Raises `InvalidInputError` for what can't be done, before anything is loaded."""
    if plot is not None:
        from xtok.bench.plot import check_drawable

        check_drawable(plot)
    if tune:
        from xtok.tune import check_tunable

        check_tunable()
    if tune and unsaved:
        raise InvalidInputError("A draft is tuned before its vocabulary is enlarged. Leave --large or --vocabularies out.")


def _tuned(pair: tuple[Any, Any], narrow: Any, others: list[str], vocabularies: tuple[int, int] | None) -> dict[str, Any]:
    """The draft, tuned before its vocabulary is enlarged: a model of an enlarged one can't be saved."""
    from xtok.bench.compare import tuned
    from xtok.bench.stretch import with_vocabulary

    model, tokenizer = tuned(pair[0], pair[1] if vocabularies is None else narrow, others)
    model = model.to(pair[1][0].device, pair[1][0].dtype)
    return {"fine-tuned": (model, tokenizer) if vocabularies is None else with_vocabulary(model, tokenizer, vocabularies[1])}


def _own_drafts(pair: tuple[Any, Any], *, shipped: bool) -> dict[str, Any]:
    """The draft, and of the shipped pair the tuned one, the heads and the target's lower blocks, which have its own ids."""
    from xtok.bench.stretch import shortened
    from xtok.drafts.heads import HeadsDrafter
    from xtok.models.load import load

    if not shipped:
        return {"draft": pair[1]}
    model, tokenizer = load(TUNED, "draft")
    tuned_draft = model.to(pair[1][0].device, pair[1][0].dtype), tokenizer
    lower = shortened(pair[0][0], 1), pair[0][1]
    return {"draft": pair[1], "tuned draft": tuned_draft, "lower blocks": lower, "heads": HeadsDrafter(HEADS)}


def _tokenizers(target: str, draft: str | None) -> tuple[Any, Any]:
    """Those alone: what is measured on random models needs no weights of these."""
    from xtok.models.load import load_without_weights

    return load_without_weights(target, "target").tokenizer, load_without_weights(model_draft(target, draft), "draft").tokenizer


def _widened(pair: tuple[Any, Any], vocabularies: tuple[int, int] | None) -> tuple[Any, Any]:
    """The pair with vocabularies of such sizes."""
    from xtok.bench.stretch import with_vocabulary

    if vocabularies is None:
        return pair
    target, draft = (with_vocabulary(model, tokenizer, n) for (model, tokenizer), n in zip(pair, vocabularies, strict=True))
    return target, draft


def _enlarged(target: Any, draft: Any, ratio: float | None, large: bool) -> tuple[Any, Any]:
    """The pair as dear as a large one, or the target until its forward costs `ratio` forwards of the draft."""
    from xtok.bench.stretch import forward_seconds, sized, stretched_to

    if not large and ratio is None:
        return target, draft
    big, small = target[0], draft[0]
    with busy("enlarging the models"):
        if large:
            big, small = sized(big, *LARGE), sized(small, *SMALL)
        if ratio is not None:
            big = stretched_to(big, ratio * forward_seconds(small))
    return (big, target[1]), (small, draft[1])


def _measured(file: Path | None, limit: int | None) -> list[str]:
    """The prompts to measure on: all lines of a file, of the shipped prompts every sixth."""
    return (prompts()[::EVERY] if file is None else lines_of(file))[:limit]


def _measured_and_learnt(file: Path | None, limit: int | None, *, tune: bool) -> tuple[list[str], list[str]]:
    """The prompts to measure on, and those to tune on: none is both."""
    if file is None or not tune:
        return _measured(file, limit), [text for i, text in enumerate(prompts()) if i % EVERY]
    texts = lines_of(file)
    return texts[::2][:limit], texts[1::2]


def _title(target: str, draft: str | None, model: Any, ratio: float | None, large: bool) -> str:
    """Which models a picture is of."""
    own = target == OWN_TARGET and draft in (None, OWN_DRAFT)
    names = [Path(one).name if Path(one).exists() else one for one in (target, draft or OWN_DRAFT)]
    pair = SHIPPED if own else " with ".join(names)
    size = "both enlarged to 13 B and 160 M parameters" if large else ""
    ratios = f"the target enlarged to {ratio:g} forwards of the draft" if ratio is not None else ""
    return ", ".join(part for part in (pair, str(model.dtype).removeprefix("torch."), str(model.device), size, ratios) if part)
