"""Reading safetensors files, held against files that safetensors wrote, whole and damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from tensor_files import assert_same, tensors_of_all_dtypes

from float8.checkpoints.shards import Shards, Spec


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of two shards with an index."""
    tensors = {"a": torch.randn(4, 4), "b": torch.randn(3), "c": torch.arange(5)}
    save_file({"a": tensors["a"], "c": tensors["c"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": tensors["b"]}, folder / "model-00002-of-00002.safetensors")
    write_index(folder, {"a": 1, "b": 2, "c": 1})
    return tensors


def write_index(folder: Path, numbers: dict[str, int]) -> None:
    named = {key: f"model-{n:05}-of-00002.safetensors" for key, n in numbers.items()}
    text = json.dumps({"metadata": {}, "weight_map": named})
    (folder / "model.safetensors.index.json").write_text(text)


def test_all_dtypes_and_shapes_have_the_bits_that_safetensors_wrote(tmp_path):
    tensors = tensors_of_all_dtypes()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    shards = Shards(tmp_path)
    assert shards.metadata == {"format": "pt"}
    assert set(shards) == set(shards.keys()) == set(tensors) and len(shards) == len(tensors)
    for key, expected in tensors.items():
        spec = Spec(expected.dtype, tuple(expected.shape), "model.safetensors")
        assert shards.keys()[key] == spec and key in shards
        assert_same(shards.read(key), expected, key)


def test_a_folder_of_shards_and_each_of_its_files(tmp_path):
    tensors = sharded(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        shards = Shards(str(path))
        assert shards.keys()["b"].file == "model-00002-of-00002.safetensors"
        for key, expected in tensors.items():
            assert_same(shards.read(key), expected)
    assert set(Shards(tmp_path / "model-00001-of-00002.safetensors")) == {"a", "c"}
    (tmp_path / "model.safetensors.index.json").unlink()
    assert set(Shards(tmp_path)) == {"a", "b", "c"}


def test_tensors_at_odd_offsets_are_read(tmp_path):
    # Not every writer sorts by size.
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "float": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    data = b"\x07" + struct.pack("<2f", 1.5, -2.5)
    (tmp_path / "x.safetensors").write_bytes(rebuilt(header, data))
    shards = Shards(tmp_path)
    assert shards.read("byte").tolist() == [7]
    assert shards.read("float").tolist() == [1.5, -2.5]
    assert shards.read("float").data_ptr() % 4 == 0


def test_writing_to_a_tensor_changes_no_file_and_freeing_it_unmaps_it(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(1000)}, path)
    before = path.read_bytes()
    shards = Shards(path)
    x = shards.read("x")
    assert str(path) in Path("/proc/self/maps").read_text()
    x.zero_()
    part = x[3:5]
    del x
    assert part.tolist() == [0, 0] and shards.read("x")[0] == 1
    del part
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert path.read_bytes() == before


# --- damaged


def rebuilt(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def edited(**changes):
    return lambda _, header, data: rebuilt(header | {"x": header["x"] | changes}, data)


TWICE = b'{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"x":{}}'
DAMAGES = {
    "cut data": (lambda data, *_: data[:-3], "end at byte .*: it is truncated"),
    "cut header": (lambda data, *_: data[:20], "truncated or no .safetensors file"),
    "nothing": (lambda *_: b"", "the file has 0"),
    "more data": (lambda data, *_: data + b"0", "bytes follow that belong to no tensor"),
    "a pickle": (lambda *_: b"PK\x03\x04" + b"x" * 100, "truncated or no .safetensors file"),
    "no JSON": (lambda _, __, data: rebuilt(b"{x", data), "header is not readable"),
    "a list": (lambda _, __, data: rebuilt([], data), "header is not readable"),
    "no offsets": (lambda _, __, d: rebuilt({"x": {}}, d), "header is not readable"),
    "a key twice": (lambda *_: rebuilt(TWICE, b"0"), "x is there twice"),
    "a dtype": (edited(dtype="F7"), "dtype F7 is none of BOOL, "),
    "a size": (edited(shape=[5]), r"F32 of shape \(5,\) has 20 bytes, not 16"),
    "a negative size": (edited(shape=[-4]), "are not sizes"),
    "an overlap": (edited(data_offsets=[1, 17]), "overlap or leave a gap"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(damage, tmp_path):
    change, message = DAMAGES[damage]
    path, data = tmp_path / "model.safetensors", save({"x": torch.ones(4), "y": torch.ones(3)})
    length = struct.unpack("<Q", data[:8])[0]
    path.write_bytes(change(data, json.loads(data[8 : 8 + length]), data[8 + length :]))
    with pytest.raises(ValueError, match=message) as error:
        Shards(tmp_path)
    assert str(error.value).startswith(str(path))


# --- folders that do not fit

INDEX = "model.safetensors.index.json"


def indexed(text: object):
    return lambda folder: (folder / INDEX).write_text(
        text if isinstance(text, str) else json.dumps(text)
    )


def numbered(**numbers: int):
    return lambda folder: (sharded(folder), write_index(folder, numbers))


def ambiguous(folder: Path) -> None:
    sharded(folder)
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")


def twice(folder: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, folder / f"{name}.safetensors")


def without_a_shard(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


NO_NAME = r"not the name of a .safetensors file beside it"
FOLDERS = [
    (without_a_shard, r"1 of its 2 files .*: model-00002-of-00002"),
    (numbered(a=2, b=2, c=1), "says that a is in .*00002-of.*, and .*00001-of.* has it"),
    (numbered(a=1, b=2, c=1, d=1), "says that d is in .*, and no file has it"),
    (numbered(a=1, b=2), r"00001-of-00002.safetensors: it has c, which .* does not list"),
    (twice, r"a.safetensors and b.safetensors both have x"),
    (indexed({"weight_map": {"x": "../x.safetensors"}}), NO_NAME),
    (indexed({"weight_map": {"x": "/etc/x.safetensors"}}), NO_NAME),
    (indexed({"weight_map": {"x": "x.bin"}}), NO_NAME),
    *((indexed(text), "it is no index of shards") for text in ("", [], {}, {"weight_map": 3})),
    (lambda folder: indexed("{}")(folder) and (folder / f"b.{INDEX}").touch(), "several indices"),
    (lambda folder: None, r"it has no .safetensors file$"),
    (lambda folder: torch.save({}, folder / "pytorch_model.bin"), "model.bin would be unpickled"),
    (ambiguous, r"both model.safetensors and .*; give the path of one"),
]


@pytest.mark.parametrize(("make", "message"), FOLDERS)
def test_a_folder_that_cannot_be_read_as_a_whole_is_refused(make, message, tmp_path):
    make(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Shards(tmp_path)


def test_unknown_keys_and_paths_are_named(tmp_path):
    for name, message in (("nowhere", "there is no such folder or file"), ("a/b", "snapshot_down")):
        with pytest.raises(FileNotFoundError, match=message):
            Shards(name)
    ambiguous(tmp_path)
    with pytest.raises(KeyError, match="has no tensor d"):
        Shards(tmp_path / "model.safetensors").read("d")
    torch.save({}, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"x.bin would be unpickled"):
        Shards(tmp_path / "x.bin")
