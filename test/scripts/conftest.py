"""Shared by tests of the training scripts: a small text, and one thread."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In processes too: tiny products gain nothing from more, and waiting threads cost a lot."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for path in (SCRIPTS / "train_gpt.py", SCRIPTS / "training/curves.py", SCRIPTS / "demo.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder
