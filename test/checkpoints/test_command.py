"""``python -m float8.checkpoints``: inspect, compare and convert, in-process, on small folders."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import oracle
import pytest
import torch
from assertions import assert_bitwise
from disk import full_after
from hand_written import FINE, fine_grained
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import float8
from float8.checkpoints import FineGrained, load, save_pretrained
from float8.checkpoints.__main__ import main
from float8.checkpoints.casts import CAST_ANEW, RECAST, STORED

E4M3 = torch.float8_e4m3fn
LAYERS = [
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
]
SHAPES = {"q_proj": (192, 160), "k_proj": (64, 160), "v_proj": (64, 160), "down_proj": (160, 304)}


@functools.cache
def tensors_by_kind() -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint in high precision, and of the same one in float8."""
    torch.manual_seed(0)
    plain = {
        "model.embed_tokens.weight": torch.randn(48, 160),
        "model.layers.0.mlp.gate.weight": torch.randn(8, 160),  # a router
        "model.layers.0.self_attn.q_proj.bias": torch.randn(192),
        "model.norm.weight": torch.ones(160),
        "lm_head.weight": torch.randn(48, 160),
    }
    for number, name in enumerate(LAYERS):
        shape = SHAPES[name.rpartition(".")[2]]
        plain[f"{name}.weight"] = torch.randn(shape) * (number + 1) * 0.02
    plain = {key: x.bfloat16() for key, x in plain.items()}
    found = {"plain": plain, "fine": fine_grained(plain, LAYERS)}
    found["modelopt"] = {k: x for k, x in plain.items() if k != "lm_head.weight"}  # it is tied
    for number, name in enumerate(LAYERS):
        key = f"{name}.weight"
        data, scale = oracle.quantize(plain[key], (-1, -1), E4M3, "float32")
        input_scale = torch.tensor(0.01 * (number + 1))
        found["modelopt"] |= {key: data.view(E4M3), f"{key}_scale": scale.reshape(())}
        found["modelopt"][f"{name}.input_scale"] = input_scale
    return found


def tensors_of(kind: str) -> dict[str, Tensor]:
    return {key: x.clone() for key, x in tensors_by_kind()[kind].items()}


SKIPPED = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]
CONFIGS = {
    "plain": None,
    "fine": FINE,
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": SKIPPED},
}


def write(folder: Path, kind: str, tensors: dict[str, Tensor] | None = None) -> str:
    folder.mkdir()
    save_file(tensors or tensors_of(kind), folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "toy", "dtype": "bfloat16"}
    config |= {"quantization_config": CONFIGS[kind]} if CONFIGS[kind] else {}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if kind == "modelopt":
        (folder / "hf_quant_config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def plain(tmp_path) -> str:
    return write(tmp_path / "plain", "plain")


@pytest.fixture
def fine(tmp_path) -> str:
    return write(tmp_path / "fine", "fine")


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = main(words)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def assert_refused(capsys, words: tuple[str, ...], *texts: str) -> None:
    status, out, error = run(capsys, *words)
    assert (status, out) == (2, "")
    for text in texts:
        assert re.search(text, error), error


# --- inspect


def test_inspect_names_layers_bytes_and_scales(fine, plain, capsys):
    status, out, _ = run(capsys, "inspect", fine, "--json", "--data")
    found, tensors = json.loads(out), tensors_of("fine")
    nbytes = sum(x.nbytes for x in tensors.values())
    assert (status, found["problems"]) == (0, [])
    assert (found["files"], found["nbytes"]) == ({"model.safetensors": nbytes}, nbytes)
    assert found["layout"] == repr(FineGrained())
    assert list(found["layers"]) == sorted(LAYERS)
    scales = [tensors[f"model.layers.{i}.mlp.down_proj.weight_scale_inv"] for i in range(2)]
    scales = torch.cat([x.flatten() for x in scales])
    said = f"scales {scales.min():.3g} to {scales.max():.3g}"
    assert {found["layers"][f"model.layers.{i}.mlp.down_proj"] for i in range(2)} == {said}
    status, out, _ = run(capsys, "inspect", fine)
    assert status == 0
    assert "8 layers in float8" in out and "no problems" in out
    assert re.search(rf"layers\.\*\.mlp\.down_proj +2 +160x304 +0\.10 +{said}\n", out), out
    for path in (plain, f"{plain}/model.safetensors"):
        status, out, _ = run(capsys, "inspect", path)
        assert (status, "0 layers in float8" in out) == (0, True)


Q = "model.layers.1.self_attn.q_proj"


def test_inspect_finds_what_files_and_their_config_do_not_contradict(tmp_path, capsys):
    tensors = tensors_of("fine")
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].bfloat16()
    del tensors[f"{Q}.weight_scale_inv"]
    tensors[f"{LAYERS[0]}.weight"].view(torch.uint8)[3, 4] = 0xFF
    status, out, _ = run(capsys, "inspect", write(tmp_path / "bad", "fine", tensors), "--data")
    assert status == 1
    assert "\n2 problems:\n- " in out
    assert f"{LAYERS[0]}.weight has 1 values that are NaN" in out
    assert f"{Q}.weight is torch.bfloat16, others of its kind are in float8" in out


def test_what_cannot_be_opened_ends_with_status_2(fine, tmp_path, capsys):
    assert_refused(capsys, ("inspect", str(tmp_path / "none")), "no such folder or file")
    with pytest.raises(SystemExit) as ended:
        main(["inspect"])
    assert ended.value.code == 2


# --- convert


def converted(capsys, source: str, out: Path, layout: str, *options: str):
    status, printed, _ = run(capsys, "convert", source, str(out), "--layout", layout, *options)
    assert status == 0
    tensors: dict[str, Tensor] = {}
    for file in sorted(out.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors, json.loads((out / "config.json").read_text()), printed


# (source, --layout, how layers are cast): what test_layouts.py does not convert.
ROWS = [
    ("plain", "compressed_tensors:tensorwise", CAST_ANEW),
    ("plain", "float16", None),
    ("fine", "compressed_tensors:rowwise", RECAST),
    ("fine", "bfloat16", None),
    ("modelopt", "modelopt", STORED),
    ("modelopt", "compressed_tensors:tensorwise", STORED),
]


@pytest.mark.parametrize(("kind", "target", "how"), ROWS)
def test_weights_are_kept_cast_or_dequantised_by_the_definition(
    kind, target, how, tmp_path, capsys
):
    before, names = tensors_of(kind), tensors_of("plain").keys() & tensors_of(kind).keys()
    source, out = write(tmp_path / "in", kind), tmp_path / "out"
    options = ("--max-shard-size", "0.1MB")
    found, config, printed = converted(capsys, source, out, target, *options)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert f"{len(LAYERS) if how else 0} layers in float8" in printed
    assert how is None or how in printed
    values = {name: weight_of(before, name, kind) for name in LAYERS}
    for name in LAYERS:
        weight, key = found.pop(f"{name}.weight"), f"{name}.weight_scale"
        if target in ("bfloat16", "float16"):
            assert_bitwise(weight, values[name].to(getattr(torch, target)), name)
        elif kind == "modelopt":
            assert_bitwise(weight, before[f"{name}.weight"])
            assert found.pop(key).item() == before[key].item()
            if target == "modelopt":
                assert_bitwise(found.pop(f"{name}.input_scale"), before[f"{name}.input_scale"])
        else:
            fused = ["q", "k", "v"] if "tensorwise" in target and "attn" in name else []
            parts = [values[f"{name.rpartition('.')[0]}.{x}_proj"] for x in fused]
            block = (1, -1) if "rowwise" in target else (-1, -1)
            scale = oracle.scales(torch.cat(parts or [values[name]]), block, E4M3)
            assert_bitwise(weight, oracle.cast(values[name], scale, block, E4M3), name)
            assert_bitwise(found.pop(key).flatten(), scale.flatten())
    assert found.keys() == names - {f"{name}.weight" for name in LAYERS}
    for key, x in found.items():
        assert_bitwise(x, before[key].to(x.dtype), key)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert run(capsys, "inspect", str(out))[0] == 0
    assert (out / "hf_quant_config.json").exists() == (target == "modelopt")
    if target in ("bfloat16", "float16"):
        assert {x.dtype for x in found.values()} == {getattr(torch, target)}
        assert config == {"model_type": "toy", "dtype": target}
    else:
        assert set(SKIPPED) <= set(config["quantization_config"]["ignore"])


def weight_of(tensors: dict[str, Tensor], name: str, kind: str) -> Tensor:
    """The weight of a layer in high precision; float8 ones in float32, exactly."""
    weight = tensors[f"{name}.weight"]
    if kind == "plain":
        return weight
    if kind == "fine":
        return oracle.values(weight, tensors[f"{name}.weight_scale_inv"], (128, 128)).float()
    return oracle.values(weight, tensors[f"{name}.weight_scale"].reshape(1, 1), (-1, -1)).float()


def test_a_dry_run_writes_nothing_and_bad_arguments_change_nothing(plain, fine, tmp_path, capsys):
    out = tmp_path / "out"
    words = ("convert", plain, str(out), "--layout", "fine_grained")
    status, printed, _ = run(capsys, *words, "--dry-run")
    assert status == 0
    assert "8 layers in float8" in printed
    assert re.search(r"lm_head +1  its name is skipped", printed)
    assert "nothing was written" in printed
    found = json.loads(run(capsys, *words, "--dry-run", "--json", "--skip", "*_proj")[1])
    assert found["layers"]["lm_head"] == CAST_ANEW
    assert found["skipped"][Q] == "its name is skipped"
    assert_refused(
        capsys, (*words, "--skip", "*.wrong"), r"skip: '\*\.wrong' is the name of no weight"
    )
    to_bf16 = ("convert", fine, str(out), "--layout", "bfloat16")
    assert_refused(capsys, (*to_bf16, "--skip", "*"), "a checkpoint in float8 keeps its choice")
    static = ("convert", plain, str(out), "--layout", "modelopt")
    assert_refused(capsys, static, "it has no static input scale", r"float8\.calibrate")
    assert not out.exists()
    before = {file.name: file.read_bytes() for file in Path(plain).iterdir()}
    onto = ("convert", fine, plain, "--layout", "bfloat16")
    assert_refused(capsys, onto, "exists and is not empty; give another name, or --overwrite")
    assert {file.name: file.read_bytes() for file in Path(plain).iterdir()} == before
    assert run(capsys, *onto, "--overwrite")[0] == 0
    for wrong in (("--layout", "unknown"), ("--max-shard-size", "xGB")):
        with pytest.raises(SystemExit):
            main([*words, *wrong])


def test_llama_4_is_refused_where_readers_take_its_experts_otherwise(tmp_path, capsys):
    """As stacks of most files, as matrices of those of compressed-tensors."""
    stack = "model.layers.0.feed_forward.experts.down_proj"
    tensors = tensors_of("plain") | {stack: torch.randn(2, 32, 64)}
    folder, out = write(tmp_path / "llama4", "plain", tensors), str(tmp_path / "out")
    to_rows = ("--layout", "compressed_tensors:rowwise")
    assert run(capsys, "convert", folder, out, *to_rows)[0] == 0  # of a model of another type
    for path in (folder, out):
        config = json.loads((Path(path) / "config.json").read_text())
        config["text_config"] = {"model_type": "llama4_text"}
        (Path(path) / "config.json").write_text(json.dumps(config))
    new, why = str(tmp_path / "new"), "Llama 4.* matrices from compressed-tensors.* save_pretrained"
    assert_refused(capsys, ("convert", folder, new, *to_rows), why)
    assert_refused(capsys, ("convert", out, new, "--layout", "bfloat16"), why)
    words = ("convert", folder, new, "--json", "--layout")
    found = json.loads(run(capsys, *words, "fine_grained")[1])
    assert found["skipped"][stack] == "it is a stack of experts"
    left = found["quantization_config"]["modules_to_not_convert"]
    assert {stack, "model.layers.0.feed_forward.experts"} < {*left}
    ignored = config["quantization_config"]["ignore"]
    assert r"re:model\.layers\.0\.feed_forward\.experts\." in ignored


def test_values_that_are_not_finite_and_a_full_disk_leave_nothing(tmp_path, capsys):
    tensors = tensors_of("plain")
    tensors[f"{Q}.weight"][3, 4] = torch.inf
    bad, out = write(tmp_path / "bad", "plain", tensors), str(tmp_path / "out")
    assert_refused(
        capsys, ("convert", bad, out, "--layout", "fine_grained"), f"{Q}: its weight has NaN"
    )
    large = tensors_of("plain") | {"model.norm.weight": torch.full((160,), 1e30)}
    shutil.rmtree(bad)
    write(tmp_path / "bad", "plain", large)
    words = ("convert", bad, out, "--layout", "float16")
    assert_refused(capsys, words, r"model\.norm\.weight: it has values that float16 does not hold")

    words = ("convert", bad, out, "--layout", "bfloat16")
    with full_after(1000):
        assert_refused(capsys, words, "out: nothing of it is left")
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad"]


# --- compare


def test_compare_sorts_weights_by_sqnr(plain, fine, tmp_path, capsys):
    status, out, _ = run(capsys, "compare", plain, fine, "--json")
    found = json.loads(out)
    assert status == 1
    before, after = tensors_of("plain"), tensors_of("fine")
    sqnrs = {entry["key"]: entry["sqnr"] for entry in found["weights"]}
    assert sqnrs.keys() == before.keys()
    for name in LAYERS:
        scale = after[f"{name}.weight_scale_inv"]
        values = oracle.values(after[f"{name}.weight"], scale, (128, 128))
        exact = before[f"{name}.weight"].double()
        expected = 10 * torch.log10(exact.square().sum() / (exact - values).square().sum())
        assert sqnrs[f"{name}.weight"] == pytest.approx(float(expected), abs=1e-3)
    finite = [sqnr for sqnr in sqnrs.values() if sqnr is not None]
    assert len(finite) == len(LAYERS)
    assert finite == sorted(finite)
    assert run(capsys, "compare", plain, fine, "--at-least", "30")[0] == 0
    assert run(capsys, "compare", plain, fine, "--at-least", "40")[0] == 1
    out = run(capsys, "compare", plain, fine, "--top", "3")[1]
    assert f"... and 5 more, up to {finite[-1]:.1f} dB" in out
    assert "13 weights in both, 5 of them with equal values" in out
    assert "float8 by 128x128" in out
    assert run(capsys, "compare", fine, fine)[0] == 0


def test_equal_values_may_have_other_codes(tmp_path, capsys):
    """In MX a block whose largest value rounds down to 224 gets half of its scale the next time."""
    folders = [tmp_path / "first", tmp_path / "again"]
    model = nn.Sequential(nn.Linear(512, 1024, bias=False)).bfloat16()
    nn.init.normal_(model[0].weight)
    for folder in folders:
        float8.convert_to_float8_training(model, config="mxfp8")
        save_pretrained(model, folder)
        model = load(nn.Sequential(nn.Linear(512, 1024, bias=False)).bfloat16(), folder)
    status, out, _ = run(capsys, "compare", *map(str, folders))
    assert status == 0 and "1 of them with equal values" in out
    first, again = (load_file(f / "model.safetensors")["0.weight"] for f in folders)
    changed = first.view(torch.uint8) != again.view(torch.uint8)
    assert 0.035 < changed.double().mean() < 0.05


def test_compare_names_missing_keys_other_shapes_and_values_that_are_nan(plain, tmp_path, capsys):
    tensors = tensors_of("plain")
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = torch.ones(3)
    tensors["lm_head.weight"] = torch.ones(2, 160)
    tensors[f"{Q}.weight"][0, 0] = torch.nan
    other = write(tmp_path / "other", "plain", tensors)
    status, out, _ = run(capsys, "compare", plain, other)
    assert status == 1
    assert "12 weights in both, 10 of them with equal values" in out
    for row in (
        r"model.norm.weight +bfloat16 \(160,\) +missing",
        r"model.extra.weight +missing +float32 \(3,\)",
        r"lm_head.weight +bfloat16 \(48, 160\) +float32 \(2, 160\)",
        rf"{Q}\.weight +bfloat16 .* bfloat16",
    ):
        assert re.search(rf"-inf +{row}", out), row
    assert re.search(rf"-inf +{Q}\.weight", run(capsys, "compare", other, plain)[1])
    assert run(capsys, "compare", other, other)[0] == 0  # NaN at the same places
    assert run(capsys, "compare", plain, other, "--at-least", "-1000")[0] == 1
