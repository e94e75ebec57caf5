"""The pages for users of other libraries have all names that those have, or that errors know."""

from dataclasses import fields

import pytest
from fresh import ROOT

from float8.integrations import transformer_engine

FOLDER = ROOT / "docs" / "migrating"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}


@pytest.mark.parametrize(
    ("names", "pages"),
    [
        (list(transformer_engine.ARGUMENTS["DelayedScaling"])[:6], ["transformer_engine"]),
        (transformer_engine.ARGUMENTS, ["transformer_engine"]),
    ],
)
def test_every_name_that_errors_translate_is_on_a_page(names, pages):
    text = "".join(PAGES[page] for page in pages)
    assert [name for name in names if name not in text] == []


def test_every_public_name_and_field_of_torchao_is_on_its_page():
    theirs = pytest.importorskip("torchao.float8")
    names = [f.name for f in fields(theirs.Float8LinearConfig)] + theirs.__all__
    assert [name for name in names if name not in PAGES["torchao"]] == []
