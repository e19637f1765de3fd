"""`xtok serve`."""

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from xtok.cli.console import GuessOption, Models, StableOption, on_the_command_line, remembering
from xtok.errors import InvalidInputError, install


@on_the_command_line
def serve(
    models: Models,
    draft: GuessOption = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 for any free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="XTOK_API_KEY", help="The key that clients must send.", show_default=False)
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="An origin whose pages may send requests (CORS): https://example.org. May be given again.", show_default=False
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="The most texts to generate at a time.")] = 16,
    queue: Annotated[int, typer.Option(min=0, help="The most further texts that may wait for their turn.")] = 256,
    memory: Annotated[
        float | None, typer.Option(min=0, help="The most GiB for the KV caches of all texts.", show_default="no limit")
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache", help="Reuse the KV cache of earlier prompts and texts that begin alike."
        ),
    ] = True,
    remember: Annotated[
        str | None,
        typer.Option(
            help="Bytes (such as 16M) for remembering earlier prompts and texts, which prompt lookup then searches. A text's "
            "speed then depends on other clients' texts.",
            show_default="nothing",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most new tokens of a text.")] = 4096,
    default_max_tokens: Annotated[
        int, typer.Option(min=1, help="New tokens of a chat whose request doesn't limit them.")
    ] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="The most bytes of a request.")] = 4 * 1024**2,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="The most seconds that a text may take, waiting included; 0 for no limit.")
    ] = 600.0,
    tool_call_parser: Annotated[
        str, typer.Option(help="The format of tool calls: hermes, llama3_json, mistral, auto, or none.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="The format of reasoning: qwen3, deepseek_r1, mistral, auto, or none.")
    ] = "auto",
    log_texts: Annotated[bool, typer.Option("--log-texts", help="Also write prompts and texts to the log.")] = False,
    drain_seconds: Annotated[
        int, typer.Option(min=0, help="How many seconds running requests may continue after SIGTERM.")
    ] = 30,
    stable: StableOption = None,
) -> None:
    """Serve a model over HTTP, by OpenAI's API, until SIGTERM or Ctrl-C."""
    try:
        from xtok.serving.http.command import run
        from xtok.serving.http.formats import Parsers
        from xtok.serving.http.protocol import Limits
        from xtok.serving.http.service import Service
    except ImportError as error:
        raise InvalidInputError(f"Serving needs further packages. Install them with: {install('serve')}") from error
    from xtok.assisted import XTokAssisted
    from xtok.cli.demo import SAMPLES
    from xtok.serving.engine import Engine

    target, named = models.source, models.pair.name if models.pair else ""
    name = "xtok-pair" if named == "aozora" else Path(target).resolve().name if Path(target).exists() else target
    if memory is not None and not isfinite(memory * 1024**3):
        raise InvalidInputError(f"--memory is {memory}; give a finite number of GiB, such as 8, or leave it out for no limit.")
    size = None if memory is None else int(memory * 1024**3)
    shown = [] if models.pair is None else models.pair.prompts[:4] if models.pair.chats else [*SAMPLES][::-1]
    drafts = remembering(models.guesser(draft), remember)
    parsers = Parsers(tool_call_parser, reasoning_parser)
    limits = Limits(max_tokens, default_max_tokens, max_body, max_seconds or None)
    run(
        Service(name, limits, prompts=shown, logs_texts=log_texts, parsers=parsers),
        lambda: XTokAssisted(target, drafts, stable=stable, **models.placed),
        lambda xt: Engine(xt, batch_size=batch_size, queue=queue, memory=size, prefix_cache=prefix_cache),
        host=host,
        port=port,
        key=api_key,
        origins=cors_origin or (),
        drain_seconds=drain_seconds,
    )
