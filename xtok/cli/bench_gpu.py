"""`xtok bench gpu`: the shipped pair in the shapes of large models, on a GPU."""

from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli.console import EVERY, OWN_TARGET, as_json, load_pair, on_the_command_line
from xtok.errors import InvalidInputError
from xtok.pair import prompts
from xtok.results.progress import busy


@on_the_command_line
def gpu(
    save: Annotated[Path | None, typer.Option(help="Also write the figures to this file, as JSON.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables in Markdown.")] = False,
) -> None:
    """The shipped pair on a GPU, in the shapes of llm-jp-13B and open-calm-small: 27 GB, and as much for KV caches."""
    import torch

    if not torch.cuda.is_available():
        typer.echo("There is no GPU here that torch can use, so nothing was measured.")
        return
    from xtok.bench.rows import print_tables

    if save is not None and not save.parent.is_dir():
        raise InvalidInputError(f"There is no folder {save.parent} for the figures. Make it, or choose another.")
    found = _large_on("cuda")
    if save is not None:
        save.write_text(as_json(found), encoding="utf-8")
    typer.echo(f"{found}\n")
    print_tables({"lists of texts": found.lists, "a level of trees of 5 levels": found.levels}, markdown=markdown)


def _large_on(device: str) -> Any:
    """The figures of the large pair. Raises `InvalidInputError` if it doesn't fit."""
    import torch

    from xtok.bench import gpu, runs, widen

    try:
        small = load_pair(OWN_TARGET, None, device, "bfloat16")
        with busy("enlarging the models"):
            pair = [widen.shaped(one, shape) for one, shape in zip(small, (gpu.LARGE, gpu.SMALL), strict=True)]
        penalty = runs.SETTINGS["penalty"]  # so that texts don't loop
        return gpu.compare_on_gpu(pair[0], pair[1], prompts()[::EVERY], penalty, (1, 8, 32), max_new_tokens=64)
    except torch.OutOfMemoryError as error:
        raise InvalidInputError("The models and the KV caches of 32 texts don't fit the GPU. Use one of 80 GB.") from error
