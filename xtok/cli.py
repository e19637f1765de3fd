"""The command line: `xtok generate`, `xtok inspect`, `xtok demo`, `xtok tune-draft`, `xtok train-heads` and `xtok bench`."""

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.utils import logging

from xtok.assisted import Generation, XTokAssisted
from xtok.bench import SETTINGS, Row, build_seconds, check_settings, compare, tuned, useless_drafts
from xtok.bench_context import ContextRow, compare_contexts
from xtok.bench_drafters import DrafterRow, compare_drafters
from xtok.bench_plot import check_drawable, draw
from xtok.bench_sampled import SampledRow, compare_sampled
from xtok.bench_vocabulary import VocabularyRow, compare_vocabularies
from xtok.budget import Budget
from xtok.drafts.heads import HeadsDrafter
from xtok.errors import InvalidInputError, XTokError
from xtok.fit import Fit, Side, fit
from xtok.pair import DRAFT, HEADS, TARGET, TUNED, prompts, quoting, technical
from xtok.sources import load, load_without_weights
from xtok.stretch import forward_seconds, shortened, sized, stretched_to, with_vocabulary
from xtok.trace import Stats
from xtok.tune import check_tunable, train_heads, tune_draft
from xtok.version import __version__

Found = TypeVar("Found")

GUESS_LENGTH = 5
LARGE, SMALL = (13e9, 40), (160e6, 12)
"""Parameters and blocks of llm-jp-13B and of open-calm-small."""
DEMO_PROMPTS = 4
DEMO_TOKENS = 64
DEMO_DRAFTS = {"With an unrelated draft": DRAFT, "With that draft, tuned on what the target writes": TUNED}
EVERY = 6
"""Of the shipped prompts, every sixth is for measuring; the others are to tune on."""

app = typer.Typer(
    help="Any large language model generates with the help of any small one, and gives exactly what it alone would.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SHIPPED = "the pair that ships"
TargetOption = Annotated[str, typer.Option(help="Hub id or path of the model whose output you want.", show_default=SHIPPED)]
DraftOption = Annotated[str, typer.Option(help="Hub id or path of the model that guesses.", show_default=SHIPPED)]


def main() -> None:
    """The entry point of `xtok` and of `python -m xtok`."""
    app(prog_name="xtok")


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"xtok {__version__}")
        raise typer.Exit


@app.callback()
def _prepare(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Tell the version.")
    ] = False,
) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """What the user can mend is told in one line; anything else is a fault of xtok and keeps its traceback."""
    try:
        yield
    except (XTokError, OSError) as error:
        typer.echo(f"xtok: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error


@app.command()
@_errors_in_one_line()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.", show_default=False)],
    target: TargetOption = str(TARGET),
    draft: Annotated[
        str, typer.Option(help='Hub id or path of the model that guesses, or "none".', show_default=SHIPPED)
    ] = str(DRAFT),
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens of the target to write at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this total.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed samples the same text.")] = None,
) -> None:
    """Continue a text as the target alone would. The text goes to stdout, a summary to stderr."""
    helper = None if draft == "none" else draft
    xt = XTokAssisted(target, helper)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "seed": seed} if temperature else {}
    generation = _printed(xt.stream(prompt, max_new_tokens=max_new_tokens, **{"do_sample": False, **sampling}))
    typer.echo(_summary(generation.stats), err=True)
    if generation.seed is not None:
        typer.echo(f"seed {generation.seed}", err=True)


def _printed(pieces: Generator[str, None, Generation]) -> Generation:
    """Print a text piece by piece, and give what it was."""
    generations: list[Generation] = []

    def keep() -> Iterator[str]:
        generations.append((yield from pieces))

    for piece in keep():
        print(piece, end="", flush=True)
    print()
    return generations[0]


def _summary(stats: Stats) -> str:
    parts = [
        f"{stats.new_tokens} tokens",
        f"{stats.target_forwards} forwards of the target",
        f"{stats.tokens_per_forward:.2f} tokens per forward",
    ]
    if stats.proposed:
        parts.append(f"{stats.acceptance_rate:.0%} of the guesses accepted")
    return ", ".join([*parts, f"{stats.seconds:.2f} s"])


@app.command()
@_errors_in_one_line()
def inspect(
    target: TargetOption = str(TARGET),
    draft: DraftOption = str(DRAFT),
    text: Annotated[Path | None, typer.Option(help="A sample text in UTF-8.", show_default="held-out prompts")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say how well two models fit, before any generation. Reads their tokenizers and configurations, not their weights."""
    target_tokenizer, target_window = load_without_weights(target, "target")
    draft_tokenizer, draft_window = load_without_weights(draft, "draft")
    found = fit(target_tokenizer, draft_tokenizer, _sample(text), target_window=target_window, draft_window=draft_window)
    if as_json:
        typer.echo(json.dumps(asdict(found), ensure_ascii=False, indent=2))
    else:
        _print_fit(found)


def _sample(path: Path | None) -> list[str]:
    if path is None:
        return prompts()
    try:
        return path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} isn't text in UTF-8: {error}.") from error


def _print_fit(found: Fit) -> None:
    table = Table("", "target", "draft")
    for name, of_target, of_draft in zip(_ROWS, _cells(found.target, found), _cells(found.draft, found), strict=True):
        table.add_row(name, of_target, of_draft)
    Console(highlight=False).print(table)
    length = GUESS_LENGTH * found.target_tokens_per_draft_token
    typer.echo(f"The sample has {found.texts} texts with {found.characters} characters.")
    typer.echo(f"Both vocabularies have {found.shared} byte strings in common.")
    typer.echo(f"A guess of {GUESS_LENGTH} draft tokens is about {length:.1f} target tokens long.")
    if found.same:
        typer.echo("The tokenizers are the same: guesses are ids and skip the text.")
    typer.echo("What will be lost (the output stays the target's own):" if found.losses else "Nothing will be lost.")
    for loss in found.losses:
        typer.echo(f"- {loss}")


_ROWS = (
    "family",
    "normalizer",
    "vocabulary",
    "different byte strings",
    "… that the other has",
    "single bytes",
    "tokens per character",
    "… ending inside one",
    "unspellable characters",
    "rewritten characters",
    "altered texts",
    "context window",
)


def _cells(side: Side, found: Fit) -> tuple[str, ...]:
    return (
        side.family,
        side.normalizer,
        str(side.vocabulary),
        str(side.spellings),
        f"{side.shared:.1%}",
        f"{side.single_bytes} of 256",
        f"{side.tokens_per_character:.2f}",
        f"{side.mid_character:.1%}",
        str(len(side.unspellable)),
        str(len(side.rewritten)),
        f"{side.altered_texts} of {found.texts}",
        "unknown" if side.window is None else f"{side.window} ≈ {side.reach:.0f} characters",
    )


@app.command()
@_errors_in_one_line()
def demo() -> None:
    """Run the pair that ships on a few held-out prompts, beside the target alone, and compare every token.

    First with a draft that is unrelated to the target, then with the same draft tuned on the target's texts.
    """
    target = load(TARGET, "target")
    halves = {
        kind: XTokAssisted(target, draft, budget=Budget(5, width=4, schedule="constant")) for kind, draft in DEMO_DRAFTS.items()
    }
    torch.set_num_threads(1)  # models this small gain nothing from more, and lose a lot on a busy machine
    texts = prompts()[::EVERY][:DEMO_PROMPTS]
    results = []
    for kind, xt in halves.items():
        typer.echo(typer.style(f"{kind}\n", bold=True, underline=True))
        _compared(xt, texts[0])  # the first run of a model pays for its start
        half = [_compared(xt, text) for text in texts]
        for text, result in zip(texts, half, strict=True):
            _print_compared(text, result)
        _print_totals(half)
        results += half
    typer.echo(
        "What xtok saves is forwards of the target, so they are the figure to look at: with a large target they are nearly all "
        "of the time, whereas this tiny one costs little more than its draft and may well be faster alone."
    )
    if not all(result.identical for result in results):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Compared:
    """One prompt run by xtok and by the target alone. Times are seconds of the whole call."""

    generation: Generation
    identical: bool
    seconds: float
    seconds_alone: float


def _compared(xt: XTokAssisted, prompt: str) -> _Compared:
    start = perf_counter()
    alone = _alone(xt.model, xt.tokenizer, prompt)
    between = perf_counter()
    generation = xt.generate(prompt, max_new_tokens=DEMO_TOKENS, do_sample=False)
    return _Compared(generation, generation.token_ids == alone, perf_counter() - between, between - start)


def _alone(model: PreTrainedModel, tokenizer: Any, prompt: str) -> list[int]:
    """The new ids that transformers' own greedy search gives, without xtok."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=DEMO_TOKENS, do_sample=False)
    new: list[int] = output[0, ids.shape[1] :].tolist()
    return new


def _print_compared(prompt: str, result: _Compared) -> None:
    stats = result.generation.stats
    typer.echo(typer.style(prompt, bold=True) + result.generation.text)
    typer.echo(f"  identical to the target alone: {'yes' if result.identical else 'NO'}")
    typer.echo(f"  tokens per forward of the target: {stats.tokens_per_forward:.2f} (the target alone: 1)")
    typer.echo(f"  seconds: {result.seconds:.2f} (the target alone: {result.seconds_alone:.2f})\n")


def _print_totals(results: list[_Compared]) -> None:
    stats = [result.generation.stats for result in results]
    tokens, forwards = sum(one.new_tokens for one in stats), sum(one.target_forwards for one in stats)
    same = sum(result.identical for result in results)
    seconds, alone = sum(result.seconds for result in results), sum(result.seconds_alone for result in results)
    typer.echo(
        f"{same} of {len(results)} identical; {tokens} tokens in {forwards} forwards of the target "
        f"({tokens / forwards:.2f} per forward); {seconds:.2f} s with the draft, {alone:.2f} s alone.\n"
    )


@app.command("tune-draft")
@_errors_in_one_line()
def tune(
    prompts_from: Annotated[Path, typer.Option("--prompts", help="A file with a prompt per line, or a folder of such files.")],
    out: Annotated[Path, typer.Option(help="The folder for the tuned draft.")],
    target: TargetOption = str(TARGET),
    draft: DraftOption = str(DRAFT),
    starts: Annotated[int, typer.Option(min=1, help="Behind how many beginnings of each prompt the target writes.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens it writes at a time.")] = 64,
    sampled: Annotated[float, typer.Option(min=0, max=1, help="The share of texts to sample; 0: all are greedy.")] = 0.5,
    temperature: Annotated[float | None, typer.Option(help="Of the sampled ones.", show_default="the target's")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="At most; it stops where nothing is gained.")] = 6,
    learning_rate: Annotated[float | None, typer.Option(help="Of the training.", show_default="by the draft's size")] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Train small matrices, or all.", show_default="LoRA above 500 M")
    ] = None,
) -> None:
    """Fine-tune a draft on what the target writes behind your prompts. Stopped, it goes on where it was when run again."""
    texts = [line.rstrip("\n") for file in _files(prompts_from) for line in _sample(file)]
    pair = load(target, "target"), load(draft, "draft")
    shape: dict[str, Any] = {"starts": starts, "max_new_tokens": max_new_tokens, "sampled": sampled, "temperature": temperature}
    done = tune_draft(*pair, texts, out, epochs=epochs, learning_rate=learning_rate, lora=lora, **shape)
    typer.echo(
        f"{out}: tokens per forward of the target, on prompts kept apart: {done.after:.2f} with it, {done.before:.2f} with the "
        f"draft as it was ({done.texts} texts learnt)."
    )
    for way, (before, after) in done.ways.items():
        typer.echo(f"  {way}: {after:.2f}, before {before:.2f}")


@app.command("train-heads")
@_errors_in_one_line()
def heads(
    data: Annotated[Path, typer.Option(help="A file with the beginning of a text per line, or a folder of such files.")],
    out: Annotated[Path, typer.Option(help="The file for the heads.")],
    target: TargetOption = str(TARGET),
    count: Annotated[int, typer.Option("--heads", min=1, help="How many tokens they guess behind the next one.")] = 4,
    starts: Annotated[int, typer.Option(min=1, help="Behind how many beginnings of each text the target writes.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens it writes at a time.")] = 64,
    sampled: Annotated[float, typer.Option(min=0, max=1, help="The share of texts to sample; 0: all are greedy.")] = 0.0,
    temperature: Annotated[float | None, typer.Option(help="Of the sampled ones.", show_default="the target's")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="At most; it stops where nothing is gained.")] = 8,
) -> None:
    """Train heads on the frozen target, on what it writes. Stopped, it goes on where it was when run again."""
    texts = [line.rstrip("\n") for file in _files(data) for line in _sample(file)]
    shape: dict[str, Any] = {"starts": starts, "max_new_tokens": max_new_tokens, "sampled": sampled, "temperature": temperature}
    done = train_heads(target, texts, out, heads=count, epochs=epochs, **shape)
    table = Table(title="how often a head's guesses were right, on texts kept apart")
    for name in ("head", "1st", "2nd", "3rd", "4th", "5th"):
        table.add_column(name, justify="right")
    for i, ranks in enumerate(done.accuracy, start=1):
        table.add_row(str(i), *(f"{share:.3f}" for share in ranks))
    Console(highlight=False, width=100).print(table)
    typer.echo(f"{out}: {done.after:.2f} tokens per forward of the target on texts kept apart ({done.texts} texts learnt).")


def _files(path: Path) -> list[Path]:
    """The file, or the text files of a folder, in order."""
    return sorted(path.rglob("*.txt")) if path.is_dir() else [path]


@app.command()
@_errors_in_one_line()
def bench(
    target: TargetOption = str(TARGET),
    draft: DraftOption = str(DRAFT),
    file: Annotated[
        Path | None, typer.Option("--prompts", help="A file with one prompt per line.", show_default="20 held-out prompts")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write per prompt.")] = 64,
    guess_length: Annotated[int, typer.Option(min=1, help="How many draft tokens a fixed guess has.")] = GUESS_LENGTH,
    repeats: Annotated[int, typer.Option(min=1, help="How often to run each prompt.")] = 1,
    tune: Annotated[bool, typer.Option("--tune", help="Also with the draft tuned on the target's text, in minutes.")] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Only that way to ask for texts: greedy, penalty or sampled. May be given again.", show_default="all"
        ),
    ] = None,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Only sampling, at four temperatures: are the texts draws from the law?")
    ] = False,
    ratio: Annotated[
        float | None, typer.Option(min=1, help="Enlarge the target until its forward costs so many of the draft's.")
    ] = None,
    large: Annotated[
        bool,
        typer.Option("--large", help="Enlarge both models to the sizes of llm-jp-13B and open-calm-small: 27 GB."),
    ] = False,
    vocabularies: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Enlarge the vocabularies of target and draft to so many ids.", show_default=False),
    ] = None,
    dtype: Annotated[str, typer.Option(help="The precision of both models: float32, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="Where both models are: cpu, cuda, …")] = "cpu",
    useless: Annotated[bool, typer.Option("--useless", help="Also with useless drafts: a random one, and a dear one.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw bars and a breakdown of the time, as PNG or SVG.")] = None,
    contexts: Annotated[
        bool, typer.Option("--contexts", help="Only what a round costs beside the models, by the length of the context.")
    ] = False,
    by_vocabulary: Annotated[
        bool, typer.Option("--rows", help="Only what is computed over vocabularies beside the models, by their sizes.")
    ] = False,
    drafters: Annotated[
        bool, typer.Option("--drafters", help="All ways to guess and mixtures of them, on three kinds of prompts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run the target alone, transformers' universal assisted generation and xtok side by side."""
    _check_asked(setting or [], plot, tune=tune, unsaved=large and vocabularies is not None)
    pair = _placed(load(target, "target"), load(draft, "draft"), dtype, device)
    texts, others = _bench_prompts(file)
    if contexts:
        return _tell(compare_contexts(pair[0][1], pair[1][1], texts), _print_contexts, as_json)
    if by_vocabulary:
        return _tell(compare_vocabularies(pair[0][1], pair[1][1]), _print_vocabularies, as_json)
    narrow, pair = pair[1], _widened(pair, vocabularies)
    own = {"draft": pair[1]} if vocabularies else _own_drafts(pair, (target, draft))
    pair = _enlarged(*pair, ratio, large)
    if drafters:
        kinds: dict[str, Any] = {"prose": texts, "technical": technical(), "quoting": quoting(texts)}
        return _tell(compare_drafters(pair[0], own, kinds, max_new_tokens=max_new_tokens), _print_drafters, as_json)
    if sampled:
        rows = compare_sampled(*pair, texts, max_new_tokens=max_new_tokens, guess_length=guess_length)
        return _tell(rows, _print_sampled, as_json)
    compared = {"as it is": pair[1]} | (_tuned(pair, narrow, others, vocabularies) if tune else {})
    compared |= useless_drafts(*pair) if useless else {}
    shape = {"max_new_tokens": max_new_tokens, "guess_length": guess_length, "repeats": repeats}
    settings = {
        name: {kind: compare(pair[0], one, texts, name, **shape) for kind, one in compared.items()}
        for name in SETTINGS
        if name in (setting or SETTINGS)
    }
    if plot is not None:
        draw(next(iter(settings.values())), plot)
    return _tell({"build_seconds": build_seconds(*pair), "settings": settings}, _print_bench, as_json)


def _check_asked(settings: list[str], plot: Path | None, *, tune: bool, unsaved: bool) -> None:
    """Raises `InvalidInputError` for what can't be done, before anything is loaded."""
    check_settings(settings)
    if plot is not None:
        check_drawable(plot)
    if tune:
        check_tunable()
    if tune and unsaved:
        raise InvalidInputError("A draft is tuned before its vocabulary is enlarged. Leave --large or --vocabularies out.")


def _tuned(pair: tuple[Any, Any], narrow: Any, others: list[str], vocabularies: tuple[int, int] | None) -> dict[str, Any]:
    """The draft, tuned before its vocabulary is enlarged: a model of an enlarged one can't be saved."""
    model, tokenizer = tuned(pair[0], pair[1] if vocabularies is None else narrow, others)
    model = model.to(pair[1][0].device, pair[1][0].dtype)
    return {"fine-tuned": (model, tokenizer) if vocabularies is None else with_vocabulary(model, tokenizer, vocabularies[1])}


def _tell(found: Found, show: Callable[[Found], None], as_json: bool) -> None:
    """Print what was found, as JSON or as tables."""
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2, default=asdict))
    else:
        show(found)


def _own_drafts(pair: tuple[Any, Any], given: tuple[str, str]) -> dict[str, Any]:
    """The draft, and of the shipped pair the tuned one, the heads and the target's lower blocks, which have its own ids."""
    if given != (str(TARGET), str(DRAFT)):
        return {"draft": pair[1]}
    model, tokenizer = load(TUNED, "draft")
    tuned_draft = model.to(pair[1][0].device, pair[1][0].dtype), tokenizer
    lower = shortened(pair[0][0], 1), pair[0][1]
    return {"draft": pair[1], "tuned draft": tuned_draft, "lower blocks": lower, "heads": HeadsDrafter(HEADS)}


def _placed(target: Any, draft: Any, dtype: str, device: str) -> tuple[Any, Any]:
    """The pair in a precision and on a device."""
    if dtype not in ("float32", "bfloat16", "float64"):
        raise InvalidInputError(f"dtype is {dtype!r}; use float32, bfloat16 or float64.")
    try:
        big, small = (model.to(device, getattr(torch, dtype)) for model, _ in (target, draft))
    except (RuntimeError, AssertionError) as error:  # torch's own ways to say so
        raise InvalidInputError(f"device is {device!r}, which can't be used: {error}") from error
    return (big, target[1]), (small, draft[1])


def _widened(pair: tuple[Any, Any], vocabularies: tuple[int, int] | None) -> tuple[Any, Any]:
    """The pair with vocabularies of such sizes."""
    if vocabularies is None:
        return pair
    target, draft = (with_vocabulary(model, tokenizer, n) for (model, tokenizer), n in zip(pair, vocabularies, strict=True))
    return target, draft


def _enlarged(target: Any, draft: Any, ratio: float | None, large: bool) -> tuple[Any, Any]:
    """The pair as dear as a large one, or the target until its forward costs `ratio` forwards of the draft."""
    big, small = target[0], draft[0]
    if large:
        big, small = sized(big, *LARGE), sized(small, *SMALL)
    if ratio is not None:
        big = stretched_to(big, ratio * forward_seconds(small))
    return (big, target[1]), (small, draft[1])


def _bench_prompts(file: Path | None) -> tuple[list[str], list[str]]:
    """The prompts to measure on, and others to tune on: of the shipped ones every sixth, of a file every other one."""
    if file is None:
        return prompts()[::EVERY], [text for i, text in enumerate(prompts()) if i % EVERY]
    texts = [line for line in _sample(file) if line.strip()]
    return [text.rstrip("\n") for text in texts[::2]], [text.rstrip("\n") for text in texts[1::2]]


def _print_drafters(rows: list[DrafterRow]) -> None:
    for kind in dict.fromkeys(row.kind for row in rows):
        table = Table(title=kind)
        for name in ("", "same ids", "tokens per\nforward", "draft\nforwards", "speed"):
            table.add_column(name, justify="right" if name else "left", no_wrap=not name)
        for row in (row for row in rows if row.kind == kind):
            figures = f"{row.tokens_per_forward:.2f}", str(row.draft_forwards), f"{row.speed:.2f}"
            table.add_row(row.system, "" if row.identical is None else f"{row.identical}/{row.prompts}", *figures)
        Console(highlight=False, width=100).print(table)
    typer.echo("speed: median over prompts of the seconds of the target alone ÷ those of the system.")


def _print_bench(report: dict[str, Any]) -> None:
    typer.echo(f"Making an instance of the loaded models takes {report['build_seconds']:.2f} s.")
    for setting, drafts in report["settings"].items():
        for kind, rows in drafts.items():
            _print_rows(f"{SETTINGS[setting].title}, the draft {kind}", rows)
    typer.echo("same ids: as the target alone; of sampled texts, as xtok without a draft for the same seeds.")
    typer.echo("chain, tree: of the draft alone, without prompt lookup, as much guessed in every round.")
    typer.echo("UAG: transformers' universal assisted generation.")
    typer.echo("speed: median over prompts of the seconds per token of the target alone ÷ those of the system.")
    typer.echo("lost: the target's tokens inside what the draft guessed right, yet not accepted.")
    typer.echo("ceiling: the share of both models' forwards; at 100% all else would be free.")


def _print_rows(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for name in ("", "same ids", "tokens per\nforward", "target\nforwards", "draft\nforwards", "speed", "lost per\nround"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for row in rows:
        table.add_row(*_bench_cells(row))
    Console(highlight=False, width=100).print(table)
    _print_split([row for row in rows if row.split is not None])


def _print_split(rows: list[Row]) -> None:
    table = Table(title="where the time goes")
    parts = list(rows[0].split or {}) if rows else []
    for name in ("", *parts, "ceiling"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for row in rows:
        table.add_row(row.system, *(f"{share:.1%}" for share in (row.split or {}).values()), f"{row.ceiling or 0:.1%}")
    Console(highlight=False, width=100).print(table)


def _print_contexts(rows: list[ContextRow]) -> None:
    table = Table(title="milliseconds per round beside the models' forwards")
    for name in ("context", "", "align", "guess", "pick"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(f"{row.context:,}", row.budget, *(f"{part:.2f}" for part in (row.align, row.guess, row.pick)))
    Console(highlight=False, width=100).print(table)


def _print_vocabularies(rows: list[VocabularyRow]) -> None:
    sizes = list(dict.fromkeys((row.target, row.draft) for row in rows))
    times = {(row.what, row.target, row.draft): f"{row.milliseconds:,.2f}" for row in rows}
    table = Table(title="milliseconds beside the models' forwards, by the ids of target and draft")
    for name in ("", *(f"{target:,} × {draft:,}" for target, draft in sizes)):
        table.add_column(name, justify="right" if name else "left")
    for what in dict.fromkeys(row.what for row in rows):
        table.add_row(what, *(times[(what, *size)] for size in sizes))
    Console(highlight=False, width=100).print(table)


def _print_sampled(rows: list[SampledRow]) -> None:
    table = Table()
    for name in ("T", "", "tokens per\nforward", "surprise", "excess", "law of the\nfirst id", "noise"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for row in rows:
        figures = (row.failure or "failed",) if row.tokens_per_forward is None else _sampled_cells(row)
        table.add_row(str(row.temperature), row.system, *figures)
    Console(highlight=False, width=100).print(table)
    typer.echo("surprise: mean negative log-likelihood of the ids under the target's own law, in nats.")
    typer.echo(
        "excess: its distance from that law's entropy in standard deviations; beyond 4, they are draws from another law."
    )
    typer.echo("law: p-value of the first ids against their exact probabilities; near 0, they are draws from another law.")


def _sampled_cells(row: SampledRow) -> tuple[str, ...]:
    share = "" if row.noise_share is None else f"{row.noise_share:.1%}"
    return f"{row.tokens_per_forward:.2f}", f"{row.surprise:.2f}", f"{row.excess:+.1f}", f"{row.law:.3g}", share


def _bench_cells(row: Row) -> tuple[str, ...]:
    return (
        row.system,
        "" if row.identical is None else f"{row.identical}/{row.prompts}",
        f"{row.tokens_per_forward:.2f}",
        str(row.target_forwards),
        str(row.draft_forwards),
        f"{row.speed:.2f}",
        "" if row.lost_per_round is None else f"{row.lost_per_round:.3f}",
    )
