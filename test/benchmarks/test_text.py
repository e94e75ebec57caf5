"""The text is split by whole files, the same way everywhere, and a step names its batch."""

from pathlib import Path

import pytest
import torch

from benchmarks.models import text

NAMES = [f"{folder}/{i:02}.txt" for folder in ("a", "b") for i in range(15)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"this is {name}\n" * 40)
    return tmp_path


def test_the_split_is_of_whole_files_without_overlap_in_any_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = text.load(folder)
    train, held_out = (
        bytes(x.tolist()).split(text.SEPARATOR) for x in (split.train, split.held_out)
    )
    assert len(held_out) == 3  # a tenth of 30
    assert sorted(train + held_out) == [(folder / name).read_bytes() for name in NAMES]
    walk = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, glob: reversed(list(walk(self, glob))))
    assert text.load(folder).digest == split.digest
    (folder / NAMES[0]).write_text("changed")
    assert text.load(folder).digest != split.digest


def test_copies_empty_and_binary_files_are_left_out(folder: Path) -> None:
    before = text.load(folder)
    for i in range(50):  # one of them would surely be held out, were copies kept
        (folder / f"copy{i}.txt").write_bytes((folder / NAMES[0]).read_bytes())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    assert text.load(folder).digest == before.digest


def test_batches_are_named_by_seed_and_step_and_targets_are_successors(folder: Path) -> None:
    split = text.load(folder)
    batches = [
        split.batch(step, seed=seed, batch=4, context=16)
        for step, seed in ((3, 0), (3, 0), (4, 0), (3, 1))
    ]
    first, again, *others = [x.tolist() for x, _ in batches]
    assert first == again and first not in others
    x_BT, y_BT = batches[0]
    assert x_BT.shape == y_BT.shape == (4, 16)
    assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
    train, windows = bytes(split.train.tolist()), zip(x_BT.tolist(), y_BT.tolist(), strict=True)
    assert all(bytes([*x, y[-1]]) in train for x, y in windows)


def test_validation_covers_the_held_out_text_and_nothing_else(folder: Path) -> None:
    split = text.load(folder)
    batches = list(split.held_out_batches(3, batch=4, context=16))
    val = bytes(split.held_out.tolist())
    windows = [bytes(x) for x_BT, _ in batches for x in x_BT.tolist()]
    assert len(windows) == 12 and windows[0] == val[:16]
    assert bytes(batches[-1][1][-1].tolist()) == val[-16:]
    assert all(window in val for window in windows)
