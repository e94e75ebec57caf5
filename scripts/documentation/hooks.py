"""What mkdocs does with this repository beyond rendering docs/; mkdocs.yml names this file.

Pages are plain Markdown whose links work in the repository. The site differs in three ways:

- README.md and CHANGELOG.md, which lie outside docs/, become the pages index.md and changelog.md.
- Links to files that are not part of the site, such as result files, lead to the repository.
- A picture of many pixels is a link to itself: on a phone its text would be too small.

A link to a file that does not exist is left as it is, and a public name that is not documented
(`api.py`) is a warning, so that a strict build refuses both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.documentation.api import undocumented

log = get_plugin_logger("api")

PAGES_OF_FILES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
_FENCED = re.compile(r"^ *```.*?^ *```[^\n]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_IMAGE = re.compile(r"(?<!\[)(!\[[^\]]*\]\(([^)\s]+\.png)\))")  # not one that is a link already


def on_pre_build(config: MkDocsConfig, **_: Any) -> None:
    """Warn of public names that are not documented."""
    for problem in undocumented(Path(config.config_file_path).parent):
        log.warning(problem)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are files of the repository's root."""
    root = Path(config.config_file_path).parent
    for name, page in PAGES_OF_FILES.items():
        if (root / name).is_file():
            text = (root / name).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """The page's text with its links as the site needs them, and pictures that open alone."""
    root = Path(config.config_file_path).parent
    text = with_links(markdown, page.file.src_uri, root, config.repo_url or "")
    return _outside_code(text, lambda part: _IMAGE.sub(r"[\1](\2)", part))


def with_links(markdown: str, page: str, root: Path, repository: str) -> str:
    """A page's text in which each link outside of code leads to the site or to the repository.

    Args:
        markdown: the text as it stands in the repository.
        page: the page's path in the site, such as ``migrating/torchao.md``.
        root: the repository's directory.
        repository: the address of the repository.
    """
    sources = {page: name for name, page in PAGES_OF_FILES.items()}
    folder = PurePosixPath(sources.get(page, f"docs/{page}")).parent

    def target(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        return before + _target(link, folder, PurePosixPath(page).parent, root, repository) + after

    return _outside_code(markdown, lambda part: _LINK.sub(target, part))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for code in _FENCED.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])


def _target(
    link: str, folder: PurePosixPath, page_folder: PurePosixPath, root: Path, repository: str
) -> str:
    path, hash_, anchor = link.partition("#")
    if not path or ":" in path or path.startswith("/"):
        return link
    inside = os.path.normpath(folder / path).replace(os.sep, "/")
    if inside in PAGES_OF_FILES:
        inside = f"docs/{PAGES_OF_FILES[inside]}"
    if inside.startswith("docs/"):
        own = os.path.relpath(inside[len("docs/") :], page_folder).replace(os.sep, "/")
        return own + hash_ + anchor
    if not (root / inside).exists():
        return link
    kind = "tree" if (root / inside).is_dir() else "blob"
    return f"{repository}/{kind}/main/{inside}{hash_}{anchor}"
