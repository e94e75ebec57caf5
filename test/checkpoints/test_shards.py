"""Reading safetensors files, held against files that safetensors wrote, whole and damaged."""

from __future__ import annotations

import gc
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
    header = json.dumps(
        {
            "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "float": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    data = b"\x07" + struct.pack("<2f", 1.5, -2.5)
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
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
    gc.collect()
    assert part.tolist() == [0, 0] and shards.read("x")[0] == 1
    del part
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert path.read_bytes() == before


# --- damaged


def damaged(folder: Path, change) -> Path:
    path = folder / "model.safetensors"
    data = save({"x": torch.ones(4), "y": torch.ones(3, dtype=torch.int8)})
    length = struct.unpack("<Q", data[:8])[0]
    path.write_bytes(change(data, json.loads(data[8 : 8 + length]), data[8 + length :]))
    return path


def rebuilt(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def edited(**changes):
    def change(_, header, data):
        header["x"] |= changes
        return rebuilt(header, data)

    return change


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
    path = damaged(tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        Shards(tmp_path)
    assert str(error.value).startswith(str(path))


def test_a_missing_shard_is_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of its 2 files .*: model-00002-of-00002"):
        Shards(tmp_path)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"a": 2, "b": 2, "c": 1}, "says that a is in .*00002-of.*, and .*00001-of.* has it"),
        ({"a": 1, "b": 2, "c": 1, "d": 1}, "says that d is in .*, and no file has it"),
        ({"a": 1, "b": 2}, r"00001-of-00002.safetensors: it has c, which .* does not list"),
    ],
)
def test_an_index_that_disagrees_is_refused(numbers, message, tmp_path):
    sharded(tmp_path)
    write_index(tmp_path, numbers)
    with pytest.raises(ValueError, match=message):
        Shards(tmp_path)


def test_a_key_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"a.safetensors and b.safetensors both have x"):
        Shards(tmp_path)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "x.bin"])
def test_an_index_leads_to_no_other_folder_and_to_no_pickle(file, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(ValueError, match=r"not the name of a .safetensors file beside it"):
        Shards(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_refused(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="it is no index of shards"):
        Shards(tmp_path)


def test_pickles_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"it has no .safetensors file$"):
        Shards(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save({}, path)
    for each in (tmp_path, path):
        with pytest.raises(ValueError, match=r"pytorch_model.bin would be unpickled"):
            Shards(each)


def test_an_ambiguous_folder_is_refused(tmp_path):
    sharded(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"both model.safetensors and .*; give the path of one"):
        Shards(tmp_path)
    assert set(Shards(tmp_path / "model.safetensors")) == {"x"}


def test_unknown_keys_and_paths_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such folder or file"):
        Shards(tmp_path / "nowhere")
    sharded(tmp_path)
    with pytest.raises(KeyError, match="has no tensor d"):
        Shards(tmp_path).read("d")
