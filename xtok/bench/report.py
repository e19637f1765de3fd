"""What the benchmarks found, as tables."""

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from xtok.bench.batches import BatchRow
from xtok.bench.bits import BitsRow
from xtok.bench.compare import Row
from xtok.bench.context import ContextRow
from xtok.bench.drafters import DrafterRow
from xtok.bench.gpu import GpuFigures, LevelRow, ListRow
from xtok.bench.sampled import SampledRow
from xtok.bench.server import ServerFigures
from xtok.bench.vocabulary import VocabularyRow


def print_drafters(rows: list[DrafterRow]) -> None:
    """Ways to guess, a table for each kind of prompts."""
    for kind in dict.fromkeys(row.kind for row in rows):
        table = _table(("", "same ids", "tokens per\nforward", "draft\nforwards", "speed"), title=kind)
        for row in (row for row in rows if row.kind == kind):
            figures = f"{row.tokens_per_forward:.2f}", str(row.draft_forwards), f"{row.speed:.2f}"
            table.add_row(row.system, "" if row.identical is None else f"{row.identical}/{row.prompts}", *figures)
        Console(highlight=False, width=100).print(table)
    typer.echo("speed: median over prompts of the seconds of the target alone ÷ those of the system.")


def print_bench(report: dict[str, Any]) -> None:
    """Systems, a table for each way to ask and each draft, and where the time goes."""
    typer.echo(f"Making an instance of the loaded models takes {report['build_seconds']:.2f} s.")
    for setting, drafts in report["settings"].items():
        for kind, rows in drafts.items():
            _print_rows(f"{report['titles'][setting]}, the draft {kind}", rows)
    typer.echo("same ids: as the target alone, run the same way: xtok without a draft, or transformers' own generate.")
    typer.echo("near-ties: picks at which transformers' own generate may pick another id, for its forwards have other shapes.")
    typer.echo("chain, tree: of the draft alone, without prompt lookup, as much guessed in every round.")
    typer.echo("UAG: transformers' universal assisted generation.")
    typer.echo("speed: median over prompts of the seconds per token of the target alone ÷ those of the system.")
    typer.echo("lost: the target's tokens inside what the draft guessed right, yet not accepted.")
    typer.echo("ceiling: the share of both models' forwards; at 100% all else would be free.")


def _print_rows(title: str, rows: list[Row]) -> None:
    figures = "tokens per\nforward", "target\nforwards", "draft\nforwards", "speed", "lost per\nround"
    table = _table(("", "same\nids", "as trans-\nformers", "near-\nties", *figures), title=title)
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


def print_contexts(rows: list[ContextRow]) -> None:
    """What a round costs beside the models, by the length of the context."""
    table = Table(title="milliseconds per round beside the models' forwards")
    for name in ("context", "", "align", "guess", "pick"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(f"{row.context:,}", row.budget, *(f"{part:.2f}" for part in (row.align, row.guess, row.pick)))
    Console(highlight=False, width=100).print(table)


def print_vocabularies(rows: list[VocabularyRow]) -> None:
    """What takes how long, by the sizes of vocabularies."""
    sizes = list(dict.fromkeys((row.target, row.draft) for row in rows))
    times = {(row.what, row.target, row.draft): f"{row.milliseconds:,.2f}" for row in rows}
    table = Table(title="milliseconds beside the models' forwards, by the ids of target and draft")
    for name in ("", *(f"{target:,} × {draft:,}" for target, draft in sizes)):
        table.add_column(name, justify="right" if name else "left")
    for what in dict.fromkeys(row.what for row in rows):
        table.add_row(what, *(times[(what, *size)] for size in sizes))
    Console(highlight=False, width=100).print(table)


def _table(names: tuple[str, ...], title: str | None = None) -> Table:
    """An empty table. The column without a name is text, the others are figures."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    return table


def print_batches(rows: list[BatchRow]) -> None:
    """Many texts at once, a table for each way to ask."""
    for setting in dict.fromkeys(row.setting for row in rows):
        table = _table(
            (
                "texts",
                "",
                "tokens/s",
                "speed",
                "tokens per\nforward",
                "same ids",
                "as trans-\nformers",
                "target",
                "draft",
                "rest",
            ),
            title=f"{setting}: tokens per second of all texts",
        )
        for row in (row for row in rows if row.setting == setting):
            same = ["" if share is None else f"{share:.0%}" for share in (row.identical, row.as_transformers)]
            speed = f"{row.tokens_per_second:,.0f}", f"{row.speed:.2f}", f"{row.tokens_per_forward:.2f}"
            shares = [f"{row.split[part]:.0%}" if row.split else "" for part in ("target", "draft", "rest")]
            table.add_row(str(row.texts), row.system, *speed, *same, *shares)
        Console(highlight=False, width=110).print(table)
    typer.echo("speed: how many times as fast as transformers' batches of as many texts.")
    typer.echo("same ids: texts that are those of xtok without a draft. as transformers: those of transformers' batches.")
    typer.echo("target, draft, rest: shares of the time: of the target's forwards, of the draft's, and of all else.")


def print_servers(found: ServerFigures) -> None:
    """A table."""
    table = _table(("clients", "", "requests/s", "speed", "first text", "as trans-\nformers"))
    for row in found.rows:
        figures = f"{row.requests_per_second:.2f}", f"{row.speed:.2f}", f"{row.first_text:.2f} s", f"{row.identical:.0%}"
        table.add_row(str(row.clients), row.system, *figures)
    Console().print(table)
    typer.echo("speed: how many times as fast as transformers serve. as transformers: texts that are its own.")
    typer.echo(f"The server adds {found.added:.1%} to a text of its engine.")


def print_bits(rows: list[BitsRow]) -> None:
    """What stable forwards give and cost, a table for each way to ask."""
    for setting in dict.fromkeys(row.setting for row in rows):
        table = _table(
            ("at once", "", "stable", "texts that\ndiffer", "of", "picks", "tokens/s", "tokens per\nforward", "speed"),
            title=f"{setting}: with stable=True and without",
        )
        for row in (row for row in rows if row.setting == setting):
            counts = str(row.differ), str(row.written), f"{row.picks:,}"
            speed = f"{row.tokens_per_second:,.0f}", f"{row.tokens_per_forward:.2f}", f"{row.speed:.2f}"
            table.add_row(str(row.texts), row.system, "yes" if row.stable else "no", *counts, *speed)
        Console(highlight=False, width=110).print(table)
    typer.echo("at once: texts. differ: from those without a draft, one at a time, with stable=True.")
    typer.echo("speed: how many times as fast as the same system without stable=True.")


def print_gpu(found: GpuFigures, markdown: bool) -> None:
    """What a GPU makes of a large pair, as tables of a terminal or of Markdown."""
    typer.echo(_measured_on(found) + "\n" * markdown)
    for title, names, rows in _gpu_tables(found):
        if markdown:
            lines = [[name.replace("\n", " ") for name in names], ["---"] * len(names), *rows]
            typer.echo("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
            continue
        table = _table(names, title=title)
        for row in rows:
            table.add_row(*row)
        Console(highlight=False, width=140).print(table)
    typer.echo("graphs: the share of the target's forwards that were replayed as CUDA graphs.")
    typer.echo("of bandwidth: of the tokens/s that reading the weights once for each allows. Goal: 0.8.")
    typer.echo("of ceiling: the share of both models' forwards, in which all else would be free. Goal: 0.9.")
    typer.echo("differ: texts with other ids than transformers' own, one at a time. speed: beside the target alone.")


def _measured_on(found: GpuFigures) -> str:
    target, draft = (f"{found.parameters[role] / 1e9:.2f} B" for role in ("target", "draft"))
    moved, read = f"{found.bandwidth / 1e9:,.0f} GB/s", f"{found.read / 1e9:.1f} GB"
    return (
        f"{found.device}, {found.dtype}, torch {found.torch}, transformers {found.transformers}; {found.setting}. "
        f"Forwards read {target} parameters of the target and {draft} of the draft. Memory moves {moved}, and a token takes "
        f"{read} of the target's weights, so there are at most {found.limit:.1f} tokens/s of a text without a draft."
    )


def _gpu_tables(found: GpuFigures) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """The title, the names of columns and the rows of each table."""
    parts = "target", "draft", "guess", "align", "pick"
    speeds = "tokens/s", "speed", "tokens per\nforward", "differ", "of\nbandwidth"
    lists = ("texts", "", "graphs", *speeds, *parts, "of\nceiling")
    levels = "", "graphs", "a forward of\nthe draft, ms", "with all of\nguessing, ms"
    return [
        ("lists of texts", lists, [_list_cells(row, parts) for row in found.lists]),
        ("a level of the draft", levels, [_level_cells(row) for row in found.levels]),
    ]


def _list_cells(row: ListRow, parts: tuple[str, ...]) -> tuple[str, ...]:
    bandwidth, ceiling = ("" if share is None else f"{share:.2f}" for share in (row.of_bandwidth, row.of_ceiling))
    speeds = f"{row.tokens_per_second:,.1f}", f"{row.speed:.2f}", f"{row.tokens_per_forward:.2f}"
    shares = [f"{row.split[part]:.1%}" if row.split else "" for part in parts]
    differ = f"{row.differ} of {row.written}"
    graphs = f"{row.replayed:.0%}" if row.graphs else "no"
    return str(row.texts), row.system, graphs, *speeds, differ, bandwidth, *shares, ceiling


def _level_cells(row: LevelRow) -> tuple[str, ...]:
    return "trees of 5 levels", "yes" if row.graphs else "no", f"{row.forward:.2f}", f"{row.level:.2f}"


def print_sampled(rows: list[SampledRow]) -> None:
    """Systems that sample, at several temperatures."""
    table = _table(("T", "", "tokens per\nforward", "surprise", "excess", "first id,\np", "noise"))
    for row in rows:
        figures = (row.failure or "failed",) if row.tokens_per_forward is None else _sampled_cells(row)
        table.add_row(str(row.temperature), row.system, *figures)
    Console(highlight=False, width=100).print(table)
    typer.echo("surprise: mean negative log-likelihood of the ids under the target's own distribution, in nats.")
    typer.echo(
        "excess: its distance from that distribution's entropy in standard deviations; beyond 4, they are draws from another."
    )
    typer.echo(
        "p: p-value of the first ids against their exact probabilities; near 0, they are draws from another distribution."
    )


def _sampled_cells(row: SampledRow) -> tuple[str, ...]:
    share = "" if row.noise_share is None else f"{row.noise_share:.1%}"
    return f"{row.tokens_per_forward:.2f}", f"{row.surprise:.2f}", f"{row.excess:+.1f}", f"{row.p_value:.3g}", share


def _bench_cells(row: Row) -> tuple[str, ...]:
    return (
        row.system,
        "" if row.identical is None else f"{row.identical}/{row.prompts}",
        "" if row.as_transformers is None else f"{row.as_transformers}/{row.prompts}",
        "" if row.near_ties is None else str(row.near_ties),
        f"{row.tokens_per_forward:.2f}",
        str(row.target_forwards),
        str(row.draft_forwards),
        f"{row.speed:.2f}",
        "" if row.lost_per_round is None else f"{row.lost_per_round:.3f}",
    )
