"""Pages of the site that lie outside its folder, and a check that the site needs no other host."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LOADED = re.compile(r"""(?:src=|<link[^>]*href=|url\(|@import\s)["']?(https?:[^"')\s>]+)""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the changelog and the notes for contributors, whose links begin at the repository's root."""
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Raises `PluginError` where a page would load something from another host."""
    for file in Path(config.site_dir).rglob("*"):
        if file.suffix in (".html", ".css") and (loaded := LOADED.search(file.read_text(encoding="utf-8"))):
            raise PluginError(f"{file} loads {loaded[1]}")
