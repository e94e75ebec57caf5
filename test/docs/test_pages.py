"""Every page of the documentation, README.md included, runs and prints what it says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from fresh import ROOT
from pages import blocks_of, check_command, lacks, run_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("full_start"),
    # Of what TRL and PEFT ask Transformers for.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning"),
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [page for page in PAGES if blocks_of(page.read_text(encoding="utf-8"))]


@pytest.fixture(autouse=True)
def _leave_no_settings():
    """Pages may set what holds for the process."""
    dtype, level = torch.get_default_dtype(), logging.getLogger("float8").level
    yield
    torch.set_default_dtype(dtype)
    logging.getLogger("float8").setLevel(level)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_written(page, tmp_path, monkeypatch):
    if missing := lacks(page.read_text(encoding="utf-8")):
        pytest.skip(f"{missing} is not installed")
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)


# --- the runner


def _page(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pages.ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    run_page(tmp_path / "page.md", tmp_path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "page.md:5: the output differs"),
        (
            '```python title="a.py"\nraise SystemExit(3)\n```\n```bash\npython a.py\n```\n',
            "page.md:5",
        ),
        ("```bash\nbash scripts/nothing.sh\n```\n", "there is no scripts/nothing.sh"),
    ],
)
def test_a_wrong_page_is_caught(text, error, tmp_path, monkeypatch):
    with pytest.raises(AssertionError) as caught:
        _page(tmp_path, text, monkeypatch)
    assert error in str(caught.value)


def test_an_option_that_no_script_has_is_caught():
    check_command(["bash", "scripts/demo.sh", "--steps", "40"], "here")
    with pytest.raises(AssertionError) as caught:
        check_command(["bash", "scripts/demo.sh", "--stepz", "40"], "here")
    assert "--stepz" in str(caught.value)
