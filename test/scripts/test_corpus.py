"""The text is split by whole files, the same way everywhere, and a step names its batch."""

from pathlib import Path

import pytest
import torch

from scripts.training import corpus

NAMES = [f"{folder}/{i:02}.txt" for folder in ("a", "b") for i in range(15)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"this is {name}\n" * 40)
    return tmp_path


def text_of(tokens: torch.Tensor) -> list[bytes]:
    return bytes(tokens.tolist()).split(corpus.END_OF_FILE)


def test_the_split_is_of_whole_files_without_overlap(folder: Path) -> None:
    split = corpus.load(folder)
    assert len(split.val_files) == 3  # a tenth of 30
    assert sorted(split.train_files + split.val_files) == NAMES
    for names, tokens in ((split.train_files, split.train), (split.val_files, split.val)):
        assert text_of(tokens) == [(folder / name).read_bytes() for name in names]


def test_the_split_does_not_depend_on_the_order_of_the_file_system(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = corpus.load(folder)
    walk = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, glob: reversed(list(walk(self, glob))))
    again = corpus.load(folder)
    assert again.train_files == split.train_files
    assert again.digest == split.digest


def test_another_text_has_another_digest(folder: Path) -> None:
    before = corpus.load(folder).digest
    (folder / NAMES[0]).write_text("changed")
    assert corpus.load(folder).digest != before


def test_copies_empty_and_binary_files_are_left_out(folder: Path) -> None:
    before = corpus.load(folder)
    for i in range(50):  # one of them would surely be held out, were copies kept
        (folder / f"copy{i}.txt").write_bytes((folder / NAMES[0]).read_bytes())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    after = corpus.load(folder)
    assert len(after.train_files + after.val_files) == len(before.train_files + before.val_files)


def test_the_standard_library_is_read_without_its_tests() -> None:
    library = corpus.load()
    names = library.train_files + library.val_files
    assert "json/decoder.py" in names
    assert not [n for n in names if {"site-packages", "test", "tests"} & set(n.split("/"))]
    assert len(library.train) > 3_000_000  # a few million bytes at least, in any Python
    assert 0.04 < len(library.val) / len(library.train) < 0.25


def test_torch_s_sources_are_many_small_files() -> None:
    text = corpus.torch_sources()
    names = text.train_files + text.val_files
    assert "nn/modules/linear.py" in names and all(name.endswith(".py") for name in names)
    held_out = [len(file) for file in text_of(text.val)]
    assert len(held_out) == len(text.val_files) > 150
    assert max(held_out) <= corpus.LARGEST and max(held_out) < 0.05 * sum(held_out)
    assert len(text.train) > 20_000_000
    root = Path(torch.__file__).parent
    for i in (0, len(text.val_files) // 2, -1):
        assert text_of(text.val)[i] == (root / text.val_files[i]).read_bytes()
    assert text.digest == corpus.torch_sources().digest


def test_a_batch_is_named_by_seed_and_step(folder: Path) -> None:
    split = corpus.load(folder)

    def tokens(step: int, seed: int) -> list[list[int]]:
        return split.batch(step, seed=seed, batch=4, context=16)[0].tolist()

    assert tokens(3, 0) == tokens(3, 0)
    assert tokens(3, 0) != tokens(4, 0)
    assert tokens(3, 0) != tokens(3, 1)


def test_targets_are_the_successors_of_the_tokens(folder: Path) -> None:
    split = corpus.load(folder)
    x_BT, y_BT = split.batch(0, seed=0, batch=4, context=16)
    assert x_BT.shape == y_BT.shape == (4, 16)
    assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
    train = bytes(split.train.tolist())
    assert all(
        bytes([*x, y[-1]]) in train for x, y in zip(x_BT.tolist(), y_BT.tolist(), strict=True)
    )


def test_validation_covers_the_held_out_text_and_nothing_else(folder: Path) -> None:
    split = corpus.load(folder)
    batches = list(split.val_batches(3, batch=4, context=16))
    assert [x.shape for x, _ in batches] == [(4, 16)] * 3
    val = bytes(split.val.tolist())
    windows = [bytes(x) for x_BT, _ in batches for x in x_BT.tolist()]
    assert windows[0] == val[:16]
    assert bytes(batches[-1][1][-1].tolist()) == val[-16:]
    assert all(window in val for window in windows)


def test_a_text_too_short_for_one_window_is_refused(folder: Path) -> None:
    split = corpus.load(folder)
    split.check(len(split.val) - 1)
    with pytest.raises(ValueError, match=r"validation files hold .* smaller --context"):
        split.check(len(split.val))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a folder: point --data at"):
        corpus.load(tmp_path / "nowhere")


def test_a_folder_with_nothing_to_hold_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("text")
    with pytest.raises(ValueError, match=r"holds 1 text file.*at least two"):
        corpus.load(tmp_path)
