"""Written files, read back by safetensors; and folders after errors."""

from __future__ import annotations

import errno
import json
import os
import re
import weakref
from pathlib import Path

import pytest
import torch
from disk import full_after
from safetensors.torch import load_file
from tensor_files import assert_same, tensors_of_all_dtypes

from float8.checkpoints.shard_writer import shard_names, write_shards
from float8.checkpoints.shards import DTYPES, Shards, Spec


def specs_of(tensors):
    return {key: Spec(x.dtype, tuple(x.shape)) for key, x in tensors.items()}


def write(folder, tensors, **options):
    write_shards(folder, specs_of(tensors), iter(tensors.items()), **options)


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def some(size: int = 8) -> dict[str, torch.Tensor]:
    return {name: torch.randn(size, size) for name in "abcd"}


def test_safetensors_reads_the_same_bits(tmp_path):
    tensors = tensors_of_all_dtypes()
    write(tmp_path / "new", tensors)
    assert entries(tmp_path) == ["new"] and entries(tmp_path / "new") == ["model.safetensors"]
    path = tmp_path / "new/model.safetensors"
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for key, expected in tensors.items():
        assert_same(found[key], expected, key)
        assert_same(Shards(path).read(key), expected, key)
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~umask
    # Tensors start at multiples of their elements: a reader that maps the file copies others.
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    for key, entry in header.items():
        assert entry["data_offsets"][0] % DTYPES[entry["dtype"]].itemsize == 0, key


def test_other_strides_and_lazy_signs_are_written_as_values(tmp_path):
    x = torch.randn(6, 10)
    z = torch.randn(4, dtype=torch.complex64)
    tensors = {
        "transposed": x.t(),
        "sliced": x[1::2, ::3],
        "expanded": x[:1].expand(5, 10),
        "parameter": torch.nn.Parameter(x[2]),
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "float8": x.to(torch.float8_e4m3fn).t(),
    }
    write(tmp_path / "new", tensors)
    found = load_file(tmp_path / "new/model.safetensors")
    for key, value in tensors.items():
        expected = value.detach().clone().contiguous()
        assert_same(found[key], expected.resolve_conj().resolve_neg(), key)


def test_shards_their_names_and_their_index_are_huggingfaces(tmp_path):
    tensors = some() | {"large": torch.randn(32, 32), "z": torch.ones(())}
    write(tmp_path / "new", tensors, max_shard_bytes=600, files={"config.json": "{}", "x": b"\0"})
    folder = tmp_path / "new"
    names = [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    index_name = "model.safetensors.index.json"
    assert entries(folder) == sorted(["config.json", "x", index_name, *names])
    index = json.loads((folder / index_name).read_text())
    total = sum(x.nbytes for x in tensors.values())
    assert index["metadata"] == {"total_size": total}
    numbers = {key: names.index(file) + 1 for key, file in index["weight_map"].items()}
    assert numbers == {"a": 1, "b": 1, "c": 2, "d": 2, "large": 3, "z": 4}
    assert shard_names(1) == ["model.safetensors"]
    shards = Shards(folder)
    for key, expected in tensors.items():
        assert_same(load_file(folder / index["weight_map"][key])[key], expected)
        assert_same(shards.read(key), expected)


def test_the_names_are_those_of_huggingface_hub_and_no_tensors_make_an_empty_file(tmp_path):
    hub = pytest.importorskip("huggingface_hub.serialization._torch")
    split = hub.split_torch_state_dict_into_shards(some(), max_shard_size=600)
    assert list(split.filename_to_tensors) == shard_names(2)
    assert split.metadata["total_size"] == 4 * 8 * 8 * 4
    write(tmp_path / "new", {})
    assert load_file(tmp_path / "new/model.safetensors") == {}


def test_one_tensor_lives_at_a_time(tmp_path):
    alive: list[weakref.ref] = []

    def stream():
        for key in specs:
            assert [ref for ref in alive if ref() is not None] == []
            x = torch.ones(4, 4)
            alive.append(weakref.ref(x))
            yield key, x
            del x

    specs = {name: Spec(torch.float32, (4, 4)) for name in "abc"}
    write_shards(tmp_path / "new", specs, stream(), max_shard_bytes=64)
    assert len(alive) == 3


# --- errors


def then(error: BaseException):
    def stream(tensors):
        yield from list(tensors.items())[:1]
        raise error

    return stream


# (what becomes of the tensors, the error)
STREAMS = [
    (lambda t: list(t.items())[:-1], ValueError("d: it was announced, and the tensors ended")),
    (lambda t: [*t.items(), ("e", t["a"])], ValueError("e: it comes after the last")),
    (lambda t: list(t.items())[::-1], ValueError("a: it was announced here, and d comes")),
    (lambda t: [(k, x.half()) for k, x in t.items()], ValueError("torch.float16 of shape")),
    (lambda t: [(k, x[:1]) for k, x in t.items()], ValueError(r"shape \(1, 8\) comes")),
    (then(RuntimeError("mine")), RuntimeError("mine")),
    (then(KeyboardInterrupt("theirs")), KeyboardInterrupt("theirs")),
    (then(OSError(errno.EIO, "theirs")), OSError("theirs")),
]


@pytest.mark.parametrize(("stream", "error"), STREAMS)
def test_tensors_that_do_not_come_as_announced_leave_nothing(stream, error, tmp_path):
    with pytest.raises(type(error), match=str(error)):
        write_shards(tmp_path / "new", specs_of(some()), iter(stream(some())))
    assert entries(tmp_path) == []


@pytest.mark.parametrize("full_at", [10, 300, 2000, 4450])  # the header, the first, the last
def test_a_full_disk_leaves_nothing_and_says_so(full_at, tmp_path):
    tensors = some(16) | {"last": torch.randn(1100)}
    message = r"while a checkpoint of 8.5e-06 GB was written; nothing of it is left.*/new"
    with full_after(full_at), pytest.raises(OSError, match=message) as error:
        write(tmp_path / "new", tensors, max_shard_bytes=4500)
    assert error.value.errno
    assert entries(tmp_path) == []


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    write(tmp_path / "old", some(), files={"config.json": "old"})
    before = {e.name: e.read_bytes() for e in (tmp_path / "old").iterdir()}
    with full_after(100), pytest.raises(OSError, match="nothing of it is left"):
        write(tmp_path / "old", some(), overwrite=True, files={"config.json": "new"})
    assert {e.name: e.read_bytes() for e in (tmp_path / "old").iterdir()} == before
    assert entries(tmp_path) == ["old"]


# --- existing folders


def test_an_existing_folder_is_refused_before_anything_is_read(tmp_path):
    def stream():
        raise AssertionError("read")
        yield

    for make in (lambda p: p.mkdir() or (p / "x").touch(), lambda p: p.touch()):
        path = tmp_path / f"{len(entries(tmp_path))}"
        make(path)
        with pytest.raises(FileExistsError, match=f"{path} exists and is no"):
            write_shards(path, specs_of(some()), stream())
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "0" / "x")
    with pytest.raises(FileExistsError):
        write_shards(dangling, specs_of(some()), stream(), overwrite=True)


def test_absent_parents_and_empty_folders_are_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty").chmod(0o2770)
    for folder in ("a/b/c", "empty"):
        write(tmp_path / folder, some())
        assert entries(tmp_path / folder) == ["model.safetensors"]
    assert (tmp_path / "empty").stat().st_mode & 0o7777 == 0o2770


def test_overwriting_replaces_the_checkpoint_and_keeps_other_files(tmp_path):
    folder, old = tmp_path / "it", some()
    write(folder, old, max_shard_bytes=300, files={"config.json": "old"})
    (folder / "tokenizer.json").write_text("tokens")
    (folder / "adapter_model.safetensors").write_text("adapters")
    (folder / "logs").mkdir()
    (folder / "logs/log").write_text("log")
    link = tmp_path / "link"
    link.symlink_to(folder)
    write(link, some(), overwrite=True, files={"config.json": "new"})
    assert link.is_symlink() and entries(tmp_path) == ["it", "link"]
    assert entries(folder) == [
        "adapter_model.safetensors",
        "config.json",
        "logs",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "config.json").read_text() == "new"
    assert (folder / "logs/log").read_text() == "log"


def test_a_failing_rename_brings_the_old_folder_back(tmp_path, monkeypatch):
    write(tmp_path / "it", some(), files={"config.json": "old"})
    rename = Path.rename

    def failing(path, target):
        if path.name.endswith(".new"):
            raise OSError("no rename")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no rename"):
        write(tmp_path / "it", some(), overwrite=True, files={"config.json": "new"})
    assert entries(tmp_path) == ["it"]
    assert (tmp_path / "it/config.json").read_text() == "old"


def test_a_folder_that_appears_meanwhile_is_left(tmp_path):
    def stream():
        yield from some().items()
        write(tmp_path / "it", some(), files={"config.json": "theirs"})

    with pytest.raises(FileExistsError, match="it appeared while the checkpoint was written"):
        write_shards(tmp_path / "it", specs_of(some()), stream(), files={"config.json": "ours"})
    assert (tmp_path / "it/config.json").read_text() == "theirs"
    assert entries(tmp_path) == ["it"]


def test_files_and_folders_are_synced_before_the_name_appears(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(re.sub(r"\.new\.\w+\.new", "TEMPORARY", Path(name).name))
        assert (tmp_path / "new").exists() == (name == str(tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write(tmp_path / "new", some(), files={"config.json": ""})
    assert synced == ["model.safetensors", "config.json", "TEMPORARY", tmp_path.name]
