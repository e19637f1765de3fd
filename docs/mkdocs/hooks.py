"""Pages of the site that lie outside its folder, and a check that the site needs no other host."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the repository's root, and what they are called on the site."""
LOADED = re.compile(r"""(?:src=|<link[^>]*href=|url\(|@import\s)["']?(https?:[^"')\s>]+)""")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files lie in the repository's root: the start page, the changelog and the notes for contributors."""
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=_from_docs((ROOT / name).read_text(encoding="utf-8"))))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Raises `PluginError` where a page would load something from another host."""
    for file in Path(config.site_dir).rglob("*"):
        if file.suffix in (".html", ".css") and (loaded := LOADED.search(file.read_text(encoding="utf-8"))):
            raise PluginError(f"{file} loads {loaded[1]}")


def _from_docs(text: str) -> str:
    """The text, with links as they are for a page of the site; a link to what isn't on it becomes plain text."""

    def link(found: re.Match[str]) -> str:
        words, address = found.groups()
        path, hash_sign, anchor = address.partition("#")
        if path.startswith(("https:", "docs/")) or not path:
            return f"[{words}]({address})"
        return f"[{words}]({OUTSIDE[path]}{hash_sign}{anchor})" if path in OUTSIDE else words

    return LINK.sub(link, text).replace("](docs/", "](")
