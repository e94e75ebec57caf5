"""The build changes links and pictures of plain Markdown pages, and nothing in code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fresh import ROOT

pytest.importorskip("mkdocs")  # of the extra `docs`

from scripts.documentation.hooks import on_page_markdown

HOST = "https://example.org/float8"


def _of(text: str, page: str = "recipes.md") -> str:
    config = SimpleNamespace(config_file_path=str(ROOT / "mkdocs.yml"), repo_url=HOST)
    page_of_site = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    return on_page_markdown(text, page=page_of_site, config=config)


@pytest.mark.parametrize(
    ("page", "text", "becomes"),
    [
        ("recipes.md", "[a](speed.md#x)", "[a](speed.md#x)"),
        ("migrating/torchao.md", "[a](../recipes.md)", "[a](../recipes.md)"),
        ("recipes.md", "[a](../setup.py)", f"[a]({HOST}/blob/main/setup.py)"),
        ("api/config.md", "[a](../../benchmarks)", f"[a]({HOST}/tree/main/benchmarks)"),
        ("recipes.md", "[a](../README.md)", "[a](index.md)"),
        ("migrating/torchao.md", "[a](../../CHANGELOG.md#b)", "[a](../changelog.md#b)"),
        ("index.md", "[a](docs/recipes.md)", "[a](recipes.md)"),
        ("index.md", "[a](setup.py)", f"[a]({HOST}/blob/main/setup.py)"),
        ("recipes.md", "[a](../none.py)", "[a](../none.py)"),
        ("recipes.md", "[a](https://pytorch.org) [b](#c)", "[a](https://pytorch.org) [b](#c)"),
    ],
)
def test_links_lead_to_the_site_or_to_the_repository(page, text, becomes):
    assert _of(text, page) == becomes


def test_a_picture_opens_alone():
    assert _of("![a b](figures/x.png)") == "[![a b](figures/x.png)](figures/x.png)"
    for text in ("![a](figures/x.svg)", "[![a](figures/x.png)](speed.md)"):
        assert _of(text) == text


def test_code_is_left_alone():
    code = "```markdown\n[a](../setup.py) ![b](figures/x.png)\n```"
    assert _of(code) == code
