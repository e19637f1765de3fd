"""Pages of the site that lie outside its folder, and a check that the site needs no other host."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md")
LOADED = re.compile(r"""(?:src=|<link[^>]*href=|url\(|@import\s)["']?(https?:[^"')\s>]+)""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the changelog and the notes for contributors, whose links begin at the repository's root."""
    for name in OUTSIDE:
        files.append(File.generated(config, name.lower(), content=_from_docs((ROOT / name).read_text(encoding="utf-8"))))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Raises `PluginError` where a page would load something from another host."""
    for file in Path(config.site_dir).rglob("*"):
        if file.suffix in (".html", ".css") and (loaded := LOADED.search(file.read_text(encoding="utf-8"))):
            raise PluginError(f"{file} loads {loaded[1]}")


def _from_docs(text: str) -> str:
    """The text, with links as they are for a page of the site."""
    for name in OUTSIDE:
        text = text.replace(f"]({name}", f"]({name.lower()}")
    return text.replace("](docs/", "](")
