"""Folders of safetensors files: bits there and back, damaged files, and folders after errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from disk import full_after
from safetensors.torch import load_file, save, save_file
from tensor_files import assert_same, tensors_of_all_dtypes

from float8.checkpoints.files import Spec, in_files, write_shards
from float8.checkpoints.source import Source

INDEX = "model.safetensors.index.json"


def specs_of(tensors, max_shard_bytes=5e9):
    specs = {key: Spec(x.dtype, tuple(x.shape)) for key, x in tensors.items()}
    return in_files(specs, max_shard_bytes)


def write(folder, tensors, max_shard_bytes=5e9, **options):
    write_shards(folder, specs_of(tensors, max_shard_bytes), iter(tensors.items()), **options)


def opened(path) -> Source:
    """The files, whatever their tensors are for."""
    return Source(path, raises=False)


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def some(size: int = 8) -> dict[str, torch.Tensor]:
    return {name: torch.randn(size, size) for name in "abcd"}


def test_all_dtypes_and_shapes_keep_their_bits(tmp_path):
    tensors = tensors_of_all_dtypes()
    write(tmp_path / "new", tensors)
    assert entries(tmp_path) == ["new"] and entries(tmp_path / "new") == ["model.safetensors"]
    found, shards = load_file(tmp_path / "new/model.safetensors"), opened(tmp_path / "new")
    assert found.keys() == shards.specs.keys() == tensors.keys()
    for key, expected in tensors.items():
        spec = Spec(expected.dtype, tuple(expected.shape), "model.safetensors")
        assert shards.specs[key] == spec
        assert_same(found[key], expected, key)
        assert_same(shards.stored(key), expected, key)
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~umask


def test_shared_memory_other_strides_and_lazy_signs_are_written_as_values(tmp_path):
    x, z = torch.randn(6, 10), torch.randn(4, dtype=torch.complex64)
    tensors = {
        "transposed": x.t(),
        "rows": x[:3],
        "expanded": x[1::2, ::3][:1].expand(5, 4),
        "parameter": torch.nn.Parameter(x[2]),
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
    write(
        tmp_path / "new", tensors, max_shard_bytes=600, files={"config.json": {"a": 1}, "x": b"\0"}
    )
    folder = tmp_path / "new"
    names = [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert entries(folder) == sorted(["config.json", "x", INDEX, *names])
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in tensors.values())}
    numbers = {key: names.index(file) + 1 for key, file in index["weight_map"].items()}
    assert numbers == {"a": 1, "b": 1, "c": 2, "d": 2, "large": 3, "z": 4}
    for path in (folder, folder / INDEX):
        for key, expected in tensors.items():
            assert_same(load_file(folder / index["weight_map"][key])[key], expected)
            assert_same(opened(str(path)).stored(key), expected)
    assert set(opened(folder / names[0]).specs) == {"a", "b"}
    (folder / INDEX).unlink()
    assert set(opened(folder).specs) == tensors.keys()
    hub = pytest.importorskip("huggingface_hub.serialization._torch")
    split = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=600)
    assert names[0].replace("4.", "3.") in split.filename_to_tensors  # z lies beside c
    assert split.metadata["total_size"] == index["metadata"]["total_size"]


# --- what cannot be read


def sharded(folder: Path) -> None:
    """A checkpoint of two shards, and its index."""
    names = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
    for name, key in zip(names, "ab", strict=True):
        save_file({key: torch.ones(2)}, folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))


def ambiguous(folder: Path) -> None:
    sharded(folder)
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")


def without_a_shard(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def with_index(text):
    return lambda folder: (folder / INDEX).write_text(text)


def damaged(change):
    data = save({"x": torch.ones(4), "y": torch.ones(3)})
    return lambda folder: (folder / "model.safetensors").write_bytes(change(data))


DAMAGED = r"model\.safetensors: it is damaged or no \.safetensors file"
UNREADABLE = [
    (damaged(lambda data: data[:-3]), DAMAGED),
    (damaged(lambda data: b""), DAMAGED),
    (without_a_shard, r"model-00002-of"),
    (with_index('{"weight_map": '), "index.json: it is no index"),
    (with_index('{"metadata": {}}'), "index.json: it is no index"),
    (with_index("[]"), "index.json: it is no index"),
    (ambiguous, "both have a; give the path of one"),
    (lambda folder: torch.save({}, folder / "pytorch_model.bin"), "pickled files are not read"),
]


@pytest.mark.parametrize(("make", "message"), UNREADABLE)
def test_a_folder_that_cannot_be_read_as_a_whole_is_refused(make, message, tmp_path):
    make(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        opened(tmp_path)
    assert str(tmp_path) in str(error.value)


# --- errors while writing


def then(error: BaseException):
    def stream(tensors):
        yield from list(tensors.items())[:1]
        raise error

    return stream


STREAMS = [
    (lambda t: list(t.items())[:-1], AssertionError("model.safetensors")),
    (then(RuntimeError("mine")), RuntimeError("mine")),
    (then(KeyboardInterrupt("theirs")), KeyboardInterrupt("theirs")),
]


@pytest.mark.parametrize(("stream", "error"), STREAMS)
def test_tensors_that_do_not_come_as_announced_leave_nothing(stream, error, tmp_path):
    with pytest.raises(type(error), match=str(error)):
        write_shards(tmp_path / "new", specs_of(some()), iter(stream(some())))
    assert entries(tmp_path) == []


@pytest.mark.parametrize("full_at", [10, 4450])  # the header of the first file, the last
def test_a_full_disk_leaves_nothing_and_says_so(full_at, tmp_path):
    tensors = some(16) | {"last": torch.randn(1100)}
    with full_after(full_at), pytest.raises(OSError, match="new: nothing of it is left"):
        write(tmp_path / "new", tensors, max_shard_bytes=4500)
    assert entries(tmp_path) == []


# --- existing folders


def test_an_existing_folder_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    def stream():
        raise AssertionError("read")
        yield

    def refused(path, message, **options):
        with pytest.raises(FileExistsError, match=f"{path.resolve()} .*{message}"):
            write_shards(path, specs_of(some()), stream(), **options)

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x").touch()
    refused(folder, "exists and is not empty")
    refused(folder / "x", "exists and is no folder", overwrite=True)
    (tmp_path / "link").symlink_to(folder / "x")
    refused(tmp_path / "link", "exists and is no folder", overwrite=True)
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == folder)
    refused(folder, "it is a mount point", overwrite=True)


def test_overwriting_replaces_the_checkpoint_and_keeps_other_files(tmp_path):
    folder = tmp_path / "it"
    write(folder, some(), max_shard_bytes=300, files={"config.json": b"old"})
    others = ["adapter_model.safetensors", "tokenizer.json"]
    for name in others:
        (folder / name).write_text(name)
    (folder / "logs").mkdir()
    (folder / "logs/log").write_text("log")
    link = tmp_path / "link"
    link.symlink_to(folder)
    write(link, some(), overwrite=True, files={"config.json": b"new"})
    assert link.is_symlink() and entries(tmp_path) == ["it", "link"]
    assert entries(folder) == sorted([*others, "config.json", "logs", "model.safetensors"])
    assert (folder / "config.json").read_text() == "new"
    assert (folder / "logs/log").read_text() == "log"


def test_a_failing_rename_brings_the_old_folder_back(tmp_path, monkeypatch):
    write(tmp_path / "it", some(), files={"config.json": b"old"})
    rename = Path.rename

    def failing(path, target):
        if path.name.endswith(".new"):
            raise OSError("no rename")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no rename"):
        write(tmp_path / "it", some(), overwrite=True, files={"config.json": b"new"})
    assert entries(tmp_path) == ["it"]
    assert (tmp_path / "it/config.json").read_text() == "old"
