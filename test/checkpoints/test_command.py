"""``python -m float8.checkpoints``: inspect, compare and convert, in-process, on small folders."""

from __future__ import annotations

import errno
import json
import re
import shutil
import weakref
from pathlib import Path

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from float8.checkpoints import shard_writer
from float8.checkpoints.__main__ import TARGETS, main, parse_bytes
from float8.checkpoints.rewriting import plan_rewriting
from float8.checkpoints.source import Source

E4M3 = torch.float8_e4m3fn
LAYERS = [
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
]
SHAPES = {"q_proj": (192, 160), "k_proj": (64, 160), "v_proj": (64, 160), "down_proj": (160, 304)}
FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def plain_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(48, 160),
        "model.layers.0.mlp.gate.weight": torch.randn(8, 160),  # a router
        "model.layers.0.self_attn.q_proj.bias": torch.randn(192),
        "model.norm.weight": torch.ones(160),
        "lm_head.weight": torch.randn(48, 160),
    }
    for number, name in enumerate(LAYERS):
        shape = SHAPES[name.rpartition(".")[2]]
        tensors[f"{name}.weight"] = torch.randn(shape) * (number + 1) * 0.02
    return {key: x.bfloat16() for key, x in tensors.items()}


def write(folder: Path, tensors: dict[str, Tensor], quantization: dict | None = None) -> str:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "toy", "dtype": "bfloat16"}
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


@pytest.fixture
def plain(tmp_path) -> str:
    return write(tmp_path / "plain", plain_tensors())


def fine_tensors() -> dict[str, Tensor]:
    tensors = plain_tensors()
    for name in LAYERS:
        data, scale = oracle.quantize(tensors[f"{name}.weight"], (128, 128), E4M3, "float32")
        tensors[f"{name}.weight"] = data.view(E4M3)
        tensors[f"{name}.weight_scale_inv"] = scale.float()
    return tensors


@pytest.fixture
def fine(tmp_path) -> str:
    return write(tmp_path / "fine", fine_tensors(), FINE)


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


def test_inspect_counts_kinds_bytes_and_scales(fine, capsys):
    status, out, _ = run(capsys, "inspect", fine, "--json", "--data")
    found, tensors = json.loads(out), fine_tensors()
    assert (status, found["problems"], found["files"]) == (0, [], 1)
    assert found["nbytes"] == sum(x.nbytes for x in tensors.values())
    assert found["layout"] == "fine_grained, 128x128 float32 scales, dynamic inputs"
    kinds = {kind["name"]: kind for kind in found["float8"]}
    assert kinds.keys() == {re.sub(r"\.\d\.", ".*.", name) for name in LAYERS}
    kind = kinds["model.layers.*.mlp.down_proj"]
    own = [tensors[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(2)]
    scales = [tensors[f"model.layers.{i}.mlp.down_proj.weight_scale_inv"] for i in range(2)]
    assert (kind["count"], kind["shapes"], kind["dtype"]) == (2, [[160, 304]], "float8_e4m3fn")
    assert kind["nbytes"] == sum(x.nbytes for x in own + scales)
    assert kind["smallest_scale"] == min(float(x.min()) for x in scales)
    assert kind["largest_scale"] == max(float(x.max()) for x in scales)
    codes = torch.stack(own).view(torch.uint8) & 0x7F
    assert kind["saturated"] == pytest.approx(float((codes == 0x7E).double().mean()))
    assert kind["zero"] == pytest.approx(float((codes == 0).double().mean()))
    rest = {kind["name"]: kind["count"] for kind in found["high_precision"]}
    assert rest["lm_head.weight"] == 1
    assert sum(rest.values()) == 5
    status, out, _ = run(capsys, "inspect", fine)
    assert status == 0
    assert "8 layers in float8, stored as fine_grained" in out
    assert "no problems" in out


def test_inspect_of_a_plain_checkpoint_and_of_one_file(plain, capsys):
    status, out, _ = run(capsys, "inspect", plain)
    assert (status, "no layer in float8" in out) == (0, True)
    assert run(capsys, "inspect", f"{plain}/model.safetensors")[0] == 0


Q = "model.layers.1.self_attn.q_proj"


def _scale(value: float):
    def plant(tensors, config):
        tensors[f"{Q}.weight_scale_inv"][1, 0] = value

    return plant


def _other_shape(tensors, config):
    tensors[f"{Q}.weight_scale_inv"] = torch.ones(192, 1)


def _other_block(tensors, config):
    config["weight_block_size"] = [64, 64]


def _vector(tensors, config):
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].flatten()


def _no_scale(tensors, config):
    del tensors[f"{Q}.weight_scale_inv"]


def _orphan(tensors, config):
    tensors["model.norm.weight_scale_inv"] = torch.ones(1, 1)


def _listed(tensors, config):
    config["modules_to_not_convert"] = [Q]


def _unlisted(tensors, config):
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].bfloat16()
    del tensors[f"{Q}.weight_scale_inv"]


def _no_config(tensors, config):
    config.clear()


def _nan(tensors, config):
    tensors[f"{Q}.weight"].view(torch.uint8)[3, 4] = 0xFF


PROBLEMS = {
    "NaN scale": (_scale(float("nan")), rf"{Q}\.weight_scale_inv holds nan at \[1, 0\]"),
    "negative scale": (_scale(-1.0), rf"{Q}\.weight_scale_inv holds -1\.0"),
    "zero scale": (_scale(0.0), rf"{Q}\.weight_scale_inv holds 0\.0"),
    "shape of a scale": (_other_shape, r"shape \(192, 1\), expected \(2, 2\)"),
    "another block size": (_other_block, r"has shape \(2, 2\), expected \(3, 3\)"),
    "no matrix": (_vector, r"shape \(30720,\), expected a matrix"),
    "no scale": (_no_scale, rf"{Q}\.weight_scale_inv is missing"),
    "a scale of nothing": (_orphan, r"model\.norm\.weight_scale_inv is the scale of float8 data"),
    "listed as high precision": (_listed, rf"{Q}\.weight is in float8, and config\.json lists"),
    "high precision, not listed": (_unlisted, rf"{Q}\.weight is torch\.bfloat16, 1 others of its"),
    "no config": (_no_config, r"no quantization_config in config\.json says how"),
    "NaN data": (_nan, rf"{Q}\.weight has 1 values that are NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_inspect_finds_a_planted_problem(name, tmp_path, capsys):
    plant, text = PROBLEMS[name]
    tensors, config = fine_tensors(), dict(FINE)
    plant(tensors, config)
    folder = write(tmp_path / "bad", tensors, config)
    status, out, _ = run(capsys, "inspect", folder, "--data")
    assert status == 1
    assert re.search(text, out), out
    assert re.search(r"\n\d+ problems:\n- ", out)
    if name not in ("high precision, not listed", "NaN data"):
        for words in (("convert", folder, str(tmp_path / "out"), "--layout", "bfloat16"),
                      ("compare", folder, folder)):  # fmt: skip
            assert_refused(capsys, words, "contradicts itself", text)
        assert not (tmp_path / "out").exists()


def test_what_cannot_be_opened_ends_with_status_2(fine, tmp_path, capsys):
    assert_refused(capsys, ("inspect", str(tmp_path / "none")), "no such folder or file")
    file = Path(fine, "model.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert_refused(capsys, ("inspect", fine), "it is truncated")
    file.write_bytes(whole)
    Path(fine, "config.json").write_text("{")
    assert_refused(capsys, ("inspect", fine), r"config\.json: it is not readable")
    file.unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    Path(fine, "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(capsys, ("compare", fine, fine), "1 of its 1 files are missing")
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


# layout -> block, format of scales, the end of the key of a scale
WAYS = {
    "fine_grained": ((128, 128), "float32", "weight_scale_inv"),
    "fine_grained:power_of_two": ((128, 128), "power_of_two", "weight_scale_inv"),
    "fine_grained:e8m0": ((128, 128), "e8m0", "weight_scale_inv"),
    "compressed_tensors:rowwise": ((1, -1), "float32", "weight_scale"),
    "compressed_tensors:tensorwise": ((-1, -1), "float32", "weight_scale"),
}


@pytest.mark.parametrize("layout", WAYS)
def test_a_plain_checkpoint_is_cast_once_by_the_definition(layout, plain, tmp_path, capsys):
    block, scale_format, suffix = WAYS[layout]
    options = ("--max-shard-size", "0.1MB")
    tensors, config, _ = converted(capsys, plain, tmp_path / "out", layout, *options)
    before = plain_tensors()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert {key for key in tensors if not key.endswith(suffix)} == before.keys()
    for name in LAYERS:
        weight = before[f"{name}.weight"]
        scale = oracle.scales(weight, block, E4M3, scale_format)
        if layout == "compressed_tensors:tensorwise" and "self_attn" in name:  # fused by engines
            parent = name.rpartition(".")[0]
            amax = max(float(before[f"{parent}.{p}_proj.weight"].abs().max()) for p in "qkv")
            scale = oracle.scales(torch.full((1, 1), amax), block, E4M3, scale_format)
        codes = oracle.cast(weight, scale, block, E4M3)
        assert torch.equal(tensors[f"{name}.weight"].view(torch.uint8), codes), name
        assert tensors[f"{name}.weight"].dtype == E4M3
        found = tensors[f"{name}.{suffix}"]
        assert torch.equal(found.float().flatten(), oracle.scale_values(scale).float().flatten())
    for key in before.keys() - {f"{name}.weight" for name in LAYERS}:
        assert torch.equal(tensors[key], before[key]), key
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert config["model_type"] == "toy"
    assert run(capsys, "inspect", str(tmp_path / "out"))[0] == 0
    skipped = config["quantization_config"].get("modules_to_not_convert") or config[
        "quantization_config"
    ].get("ignore")
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"} <= set(skipped)


def test_float8_data_that_the_layout_stores_are_kept(plain, tmp_path, capsys):
    first, _, _ = converted(capsys, plain, tmp_path / "a", "fine_grained:e8m0")
    second, _, printed = converted(
        capsys, str(tmp_path / "a"), tmp_path / "b", "fine_grained:power_of_two"
    )
    assert "8 tensors: float8 data kept" in printed
    assert "rounded twice" not in printed
    for key, value in first.items():
        if key.endswith("weight_scale_inv"):
            assert torch.equal(second[key], value.float())
        else:
            assert torch.equal(second[key].view(torch.uint8), value.view(torch.uint8))
    assert run(capsys, "compare", str(tmp_path / "a"), str(tmp_path / "b"))[0] == 0


def test_another_granularity_goes_through_dequantised_values_and_says_so(fine, tmp_path, capsys):
    tensors, _, printed = converted(capsys, fine, tmp_path / "a", "compressed_tensors:rowwise")
    assert "8 weights are dequantised and cast again, so their values are rounded twice" in printed
    before = fine_tensors()
    for name in LAYERS:
        values = oracle.values(
            before[f"{name}.weight"], before[f"{name}.weight_scale_inv"], (128, 128)
        )
        codes, scale = oracle.quantize(values.float(), (1, -1), E4M3, "float32")
        assert torch.equal(tensors[f"{name}.weight"].view(torch.uint8), codes)
        assert torch.equal(tensors[f"{name}.weight_scale"], scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float8_checkpoint_becomes_a_plain_one(dtype, fine, tmp_path, capsys):
    name = str(dtype).removeprefix("torch.")
    tensors, config, printed = converted(capsys, fine, tmp_path / "a", name)
    before = fine_tensors()
    changed = [k for k, t in before.items() if t.dtype.itemsize > 1 and t.dtype != dtype]
    others = len(tensors) - len(LAYERS)
    told = re.findall(r"(\d+) tensors: (.*)", printed)
    assert sum(int(n) for n, _ in told) == len(tensors)
    changed = [k for k in changed if k in tensors]
    assert dict((how, int(n)) for n, how in told).get("converted to this dtype", 0) == len(changed)
    assert dict((how, int(n)) for n, how in told).get("copied", 0) == others - len(changed)
    assert config == {"model_type": "toy", "dtype": name}
    assert all(value.dtype == dtype for value in tensors.values())
    assert tensors.keys() == plain_tensors().keys()
    for layer in LAYERS:
        weight, scale = before[f"{layer}.weight"], before[f"{layer}.weight_scale_inv"]
        values = oracle.values(weight, scale, (128, 128)).to(dtype)
        assert torch.equal(tensors[f"{layer}.weight"], values)


def test_scales_of_inputs_are_passed_on(tmp_path, capsys):
    tensors = plain_tensors()
    for number, name in enumerate(LAYERS):
        data, scale = oracle.quantize(tensors[f"{name}.weight"], (-1, -1), E4M3, "float32")
        tensors[f"{name}.weight"] = data.view(E4M3)
        tensors[f"{name}.weight_scale"] = scale.reshape(())
        tensors[f"{name}.input_scale"] = torch.tensor(0.01 * (number + 1))
    skipped = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": skipped}
    del tensors["lm_head.weight"]  # tied to the embedding
    source = write(tmp_path / "modelopt", tensors, config)
    Path(source, "hf_quant_config.json").write_text("{}")  # of the old layout
    found, config, printed = converted(capsys, source, tmp_path / "a", "compressed_tensors:static")
    assert not (tmp_path / "a" / "hf_quant_config.json").exists()
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert "8 tensors: float8 data kept" in printed
    assert all(torch.equal(found[f"{n}.input_scale"], tensors[f"{n}.input_scale"].reshape(1))
               for n in LAYERS)  # fmt: skip
    _, config, _ = converted(capsys, str(tmp_path / "a"), tmp_path / "c", "modelopt")
    listed = json.loads(Path(tmp_path, "c", "hf_quant_config.json").read_text())["quantization"]
    assert listed["exclude_modules"] == config["quantization_config"]["ignore"]  # for TensorRT-LLM
    found, _, printed = converted(capsys, source, tmp_path / "b", "compressed_tensors:tensorwise")
    assert "the static scales of inputs are left out" in printed
    assert not any(key.endswith("input_scale") for key in found)


def test_a_dry_run_writes_nothing_and_bad_arguments_change_nothing(plain, fine, tmp_path, capsys):
    out = tmp_path / "out"
    words = ("convert", plain, str(out), "--layout", "fine_grained")
    status, printed, _ = run(capsys, *words, "--dry-run")
    assert status == 0
    assert "8 tensors: cast from high precision" in printed
    assert "left in high precision: " in printed
    assert "nothing was written" in printed
    found = json.loads(run(capsys, *words, "--dry-run", "--json", "--skip", "*_proj")[1])
    assert found["weights"]["lm_head.weight"] == "cast from high precision"
    assert found["weights"][f"{Q}.weight"] == "copied"
    assert_refused(capsys, (*words, "--skip", "*.wrong"), r"no weight has a name that '\*\.wrong'")
    to_bf16 = ("convert", fine, str(out), "--layout", "bfloat16")
    assert_refused(capsys, (*to_bf16, "--skip", "*"), "skip is for a checkpoint in high precision")
    static = ("convert", plain, str(out), "--layout", "modelopt")
    assert_refused(capsys, static, "has no scales of inputs", r"float8\.calibrate")
    assert_refused(
        capsys,
        ("convert", fine, fine, "--layout", "bfloat16", "--overwrite"),
        "folder that is read",
    )
    assert not out.exists()
    before = {file.name: file.read_bytes() for file in Path(plain).iterdir()}
    onto = ("convert", fine, plain, "--layout", "bfloat16")
    assert_refused(capsys, onto, "exists and is not empty; give another name, or --overwrite to")
    assert {file.name: file.read_bytes() for file in Path(plain).iterdir()} == before
    assert run(capsys, *onto, "--overwrite")[0] == 0
    for size in ("5", "0GB", "xGB", "-1MB", "infGB"):
        with pytest.raises(Exception, match="a size is such as 5GB"):
            parse_bytes(size)
    with pytest.raises(SystemExit):
        main([*words, "--layout", "unknown"])


def test_values_that_are_not_finite_and_a_full_disk_leave_nothing(tmp_path, capsys, monkeypatch):
    tensors = plain_tensors()
    tensors[f"{Q}.weight"][3, 4] = torch.inf
    bad, out = write(tmp_path / "bad", tensors), str(tmp_path / "out")
    assert_refused(capsys, ("convert", bad, out, "--layout", "fine_grained"), rf"{Q}\.weight")
    large = plain_tensors() | {"model.norm.weight": torch.full((160,), 1e30)}
    shutil.rmtree(bad)
    write(tmp_path / "bad", large)
    words = ("convert", bad, out, "--layout", "float16")
    assert_refused(capsys, words, r"model\.norm\.weight: it has values that float16 does not hold")

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_writer, "_write", full)
    words = ("convert", bad, out, "--layout", "bfloat16")
    assert_refused(capsys, words, "No space left on device while a checkpoint")
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad"]


def test_tensors_are_made_one_at_a_time(plain):
    alive: list[weakref.ref] = []
    for _, tensor in plan_rewriting(Source(plain), TARGETS["fine_grained"])._tensors(None):
        assert sum(ref() is not None for ref in alive) <= 2  # a weight and its scale
        alive.append(weakref.ref(tensor.untyped_storage()))
        del tensor
    assert len(alive) == 5 + 2 * len(LAYERS)


# --- compare


def test_compare_sorts_weights_by_sqnr(plain, fine, tmp_path, capsys):
    status, out, _ = run(capsys, "compare", plain, fine, "--json")
    found = json.loads(out)
    assert status == 1
    before, after = plain_tensors(), fine_tensors()
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
    assert "... and 5 more, up to 3" in out
    assert "13 weights in both, 5 of them with equal values" in out
    assert "float8 by 128x128" in out
    assert run(capsys, "compare", fine, fine)[0] == 0


def test_compare_names_missing_keys_other_shapes_and_values_that_are_nan(plain, tmp_path, capsys):
    tensors = plain_tensors()
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = torch.ones(3)
    tensors["lm_head.weight"] = torch.ones(2, 160)
    tensors[f"{Q}.weight"][0, 0] = torch.nan
    other = write(tmp_path / "other", tensors)
    status, out, _ = run(capsys, "compare", plain, other)
    assert status == 1
    assert "only in A: model.norm.weight" in out
    assert "only in B: model.extra.weight" in out
    assert "lm_head.weight: (48, 160) in A, (2, 160) in B" in out
    assert re.search(rf"-inf +{Q}\.weight", out)
    assert re.search(rf"-inf +{Q}\.weight", run(capsys, "compare", other, plain)[1])
    assert run(capsys, "compare", other, other)[0] == 0  # NaN at the same places
    assert run(capsys, "compare", plain, other, "--at-least", "-1000")[0] == 1
    another = {key: torch.ones(2, 3) for key in plain_tensors()}
    _, out, _ = run(capsys, "compare", plain, write(tmp_path / "shapes", another), "--top", "2")
    assert out.count("(2, 3) in B") == 2
    assert f"... and {len(another) - 2} more of other shapes" in out
