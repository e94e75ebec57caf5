"""Checkpoints that contradict themselves: every reader names the tensor, and changes nothing.

Readers are `load` in each mode, and the commands inspect, compare and convert.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from assertions import assert_bitwise
from hand_written import FINE, Block, tensors_of, write
from safetensors.torch import load_file

from float8 import Float8Linear
from float8.checkpoints import load
from float8.checkpoints.__main__ import main
from float8.checkpoints.source import Source

SCALE = "up.weight_scale_inv"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return write(tmp_path_factory.mktemp("fine"), tensors_of(Block(seed=1)))


def put(key: str, change) -> object:
    """A mistake: one tensor is another, or None: missing."""

    def plant(tensors, config):
        tensors[key] = change(tensors.get(key)) if change is not None else tensors.pop(key)
        if change is None:
            del tensors[key]

    return plant


def field(**values: object) -> object:
    return lambda tensors, config: config.update(values)


MISSING = r"is the scale of float8 data, and up\.weight is missing"
# (the mistake, what each reader says)
PROBLEMS = {
    "no scale": (put(SCALE, None), r"up\.weight_scale_inv is missing"),
    "no data": (put("up.weight", torch.Tensor.bfloat16), r"and up\.weight is torch\.bfloat"),
    "no weight": (put("up.weight", None), MISSING),
    "a scale of nothing": (put("gate.weight_scale_inv", lambda _: torch.ones(1, 1)), "and gate"),
    "a bias": (put("up.bias", lambda b: b.to(torch.float8_e4m3fn)), "bias is in float8, and only"),
    "another block": (field(weight_block_size=[64, 128]), r"\(3, 2\), expected \(5, 2\)"),
    "nan": (put(SCALE, lambda s: s * torch.nan), r"up\.weight_scale_inv holds nan at \[0, 0\]"),
    "skipped": (
        field(modules_to_not_convert=["x", "up"]),
        r"is in float8, and config.* lists 'up'",
    ),
    "a pattern": (field(modules_to_not_convert=["re:u."]), r"is in float8, and config.* 're:u\.'"),
    "no config": (
        lambda tensors, config: config.clear(),
        r"up\.weight is .*no quantization_config",
    ),
}
MODES = ("high_precision", "float8")


@pytest.mark.parametrize("mistake", PROBLEMS)
def test_a_mistake_is_told_by_every_reader_and_nothing_has_changed(
    mistake, stored, tmp_path, capsys
):
    plant, says = PROBLEMS[mistake]
    tensors, config = load_file(stored / "model.safetensors"), dict(FINE)
    plant(tensors, config)
    folder = write(tmp_path / "bad", tensors, config or None)
    model = Block(seed=2)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    for weights in MODES:
        with pytest.raises(ValueError, match=rf"(?s)itself:\s+model\.safetensors: .*{says}"):
            load(model, folder, weights)
    assert list(before) == list(model.state_dict())
    for key, x in model.state_dict().items():
        assert_bitwise(x, before[key], key)
    assert not any(isinstance(m, Float8Linear) for m in model.modules())
    assert main(["inspect", str(folder)]) == 1
    assert len(Source(folder, raises=False).problems) <= 2
    assert Source(folder, raises=False).problems[-1] in capsys.readouterr().out
    out = str(tmp_path / "out")
    for words in (
        ["convert", str(folder), out, "--layout", "bfloat16"],
        ["compare"] + [str(folder)] * 2,
    ):
        assert main(words) == 2
        assert "contradicts itself" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "it is not readable"),
        ([], "it is not readable"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization": None}, "it is not readable"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_by_the_name_of_its_field(
    stored, config, says, tmp_path
):
    folder = shutil.copytree(stored, tmp_path / "it")
    if isinstance(config, dict) and "quantization_config" not in config:
        config = {"quantization_config": FINE | config}
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json: .*{says}"):
        Source(folder)
    assert main(["inspect", str(folder)]) == 2
