"""What a plan says of its readers and of its bits, held against Transformers and the layers."""

from __future__ import annotations

import contextlib
import copy
import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import torch
from assertions import assert_bitwise, assert_sqnr_at_least
from published_models import MIXTURES, MODELS, convert, mixture_of, model_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import float8
from float8 import Blockwise, Rowwise, ScaleFormat, ScalingType, filters
from float8.checkpoints import (
    CompressedTensors,
    FineGrained,
    load,
    plan_save,
    save_pretrained,
    weight_updates,
)
from float8.checkpoints.casts import CAST_ANEW, TRAINING_CAST
from float8.checkpoints.names import published
from float8.config import OperandCast
from float8.experts.modules import _REGISTERED
from float8.linear.casts import cast_alone
from float8.linear.module import own_config

TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")


def misread(folder, plain, layers, method=""):
    """The layers of which Transformers has other values than the files; all, if it fails."""
    ours = load(copy.deepcopy(plain), folder)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=plain.dtype)
        with torch.no_grad():
            theirs(TOKENS, use_cache=False)  # some weights are decompressed by the first forward
    except (RuntimeError, ValueError):
        return set(layers)
    wrong, own, stacks = set(), ours.state_dict(), theirs.state_dict()
    for key, slot in published(ours, method).items():
        # Llama 4's experts are linear layers of their own.
        found = stacks[key] if key in stacks else slot.of(stacks[slot.parameter])
        if not torch.equal(found, slot.of(own[slot.parameter])):
            wrong.add(key.removesuffix(".weight"))
    return wrong


@pytest.mark.filterwarnings("ignore:Using FP8 quantized models requires a GPU")
@pytest.mark.parametrize(
    ("rows", "odd"), [(96, False), (160, True), (192, True), (256, False), (576, True)]
)
def test_sizes_that_transformers_misreads_are_named_in_a_warning(rows, odd, tmp_path):
    """160 rows with a grid of 2 become blocks of 80; 576 are no multiple of 5: an error."""
    sizes = {"hidden_size": 128, "intermediate_size": rows, "num_hidden_layers": 1}
    plain = model_of("llama", **sizes, tie_word_embeddings=False)
    with torch.no_grad():  # blocks of other scales
        for linear in plain.model.layers[0].mlp.children():
            if isinstance(linear, torch.nn.Linear):
                linear.weight[128:] *= 16
                linear.weight[:, 128:] *= 16
    model = convert(copy.deepcopy(plain), "blockwise")
    # pytest turns other warnings into errors
    expect = pytest.warns if odd else lambda *_, **__: contextlib.nullcontext([])
    with expect(UserWarning, match=r"misreads.*no multiples of 128x128: .*CompressedT") as first:
        plan = plan_save(model, "fine_grained")
    with expect(UserWarning, match=r"misreads.*no multiples of 128x128: .*CompressedT") as second:
        save_pretrained(model, tmp_path / "it", "fine_grained")
    wrong = misread(tmp_path / "it", plain, plan.layers)
    names = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    mlp = {f"model.layers.0.{name}" for name in names}
    assert wrong == ((set(plan.layers) if rows == 576 else mlp) if odd else set())
    for warning in [*first, *second]:
        assert warning.filename == __file__
        told = str(warning.message)
        assert all(f"model.layers.*.{name}" in told for name in names) and "attn" not in told
    float8.checkpoints.weight_updates(model, "fine_grained")  # no file that it would read


SQUARE = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 128}
NARROW = {"intermediate_size": 64}
MX = CompressedTensors(Blockwise(1, 32))
# What Transformers reads (docs/checkpoints.md): all default layouts, and in all sizes:
READ = [
    *((name, SQUARE, r, None) for name in ("mixtral", "llama", "qwen3_moe") for r in RECIPES),
    *(("deepseek_v3", {}, recipe, None) for recipe in RECIPES[:3]),
    *(("llama", NARROW, "tensorwise", layout) for layout in (CompressedTensors(Rowwise()), MX)),
    ("llama", SQUARE, "tensorwise", CompressedTensors(Blockwise(128, 128))),
    ("llama", SQUARE, "tensorwise", FineGrained((1, 32), ScaleFormat.E8M0)),
]


@pytest.mark.filterwarnings("ignore:Using FP8 quantized models requires a GPU")
@pytest.mark.parametrize(("name", "sizes", "recipe", "layout"), READ)
def test_transformers_reads_what_the_documentation_says(name, sizes, recipe, layout, tmp_path):
    """The default layout of all its models, with the bits of training."""
    plain = model_of(name, **sizes, tie_word_embeddings=False)
    is_mx = recipe == "mxfp8" or layout == MX
    plain = plain.bfloat16() if is_mx else plain  # what compressed-tensors makes of MX
    model = convert(copy.deepcopy(plain), recipe)
    plan = save_pretrained(model, tmp_path / "it", layout)
    assert misread(tmp_path / "it", plain, plan.layers) == set()
    if layout is not None:
        return
    if recipe != "tensorwise" and name in ("llama", "mixtral"):  # q, k, v and gate, up share scales
        assert set(plan.layers.values()) == {TRAINING_CAST}
    if recipe in ("blockwise", "mxfp8") and sizes:  # rowwise inputs are cast by float32 scales then
        resident = load(copy.deepcopy(plain), tmp_path / "it", "float8")
        q = "model.layers.0.self_attn.q_proj"
        x = torch.randn(16, 128).to(plain.dtype)
        assert_bitwise(resident.get_submodule(q)(x), model.get_submodule(q)(x))


NO_HEAD = filters.skip_names("lm_head")


def left_out(module, name):
    """Experts, and what belongs to them, in high precision."""
    return isinstance(module, torch.nn.Linear) and not re.search("expert|lm_head", name)


@pytest.mark.filterwarnings("ignore:.*calls no grouped_mm", "ignore:Using FP8 quantized models")
@pytest.mark.parametrize("module_filter_fn", [NO_HEAD, left_out])
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, recipe) for name in ("llama4", "phimoe", "gpt_oss") for recipe in RECIPES),
        *(pytest.param(name, "rowwise", marks=pytest.mark.slow) for name in MIXTURES),
    ],
)
def test_transformers_reads_the_default_of_every_mixture(name, recipe, module_filter_fn, tmp_path):
    """Names of files and modules differ; and experts, in float8 or not, are matrices or stacks."""
    plain = model_of(name) if name in MODELS else mixture_of(name)
    plain = plain.bfloat16() if recipe == "mxfp8" else plain
    model = float8.convert_to_float8_training(
        copy.deepcopy(plain), config=recipe, module_filter_fn=module_filter_fn
    )
    plan = save_pretrained(model, tmp_path / "it")
    assert misread(tmp_path / "it", plain, plan.layers, plan.layout.method) == set()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("in_float8", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_llama_4_computes_the_same_from_matrices(recipe, in_float8, tmp_path, monkeypatch):
    """Its experts are stacks in memory, and matrices in files of compressed-tensors."""
    plain = model_of("llama4")
    model = copy.deepcopy(plain)
    if in_float8:
        kind = type(plain.model.layers[0].feed_forward.experts)
        monkeypatch.setitem(_REGISTERED, kind, kind.forward)
    float8.convert_to_float8_training(model, config=recipe, module_filter_fn=NO_HEAD)
    plan = save_pretrained(model, tmp_path / "it")
    name = "model.layers.0.feed_forward.experts.3.up_proj"
    assert (name in plan.layers, name in plan.skipped) == (in_float8, not in_float8)
    assert (name in plan.quantization_config["ignore"]) != in_float8
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "it", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    ours = load(copy.deepcopy(plain), tmp_path / "it")
    assert_sqnr_at_least(theirs(TOKENS).logits, ours(TOKENS).logits, 90)
    assert_sqnr_at_least(ours(TOKENS).logits, plain(TOKENS).logits, 10)


def test_modules_in_high_precision_are_listed_by_every_name():
    """Transformers goes by names of modules, vLLM by the matrices ``experts.0.gate_proj``."""
    model = float8.convert_to_float8_training(
        model_of("phimoe"), config="rowwise", module_filter_fn=left_out
    )
    ignored = plan_save(model).quantization_config["ignore"]
    layer = "model.layers.0"
    names = {f"{layer}.block_sparse_moe.gate", f"{layer}.mlp.router", "lm_head"}
    assert names < {*ignored} and f"{layer}.self_attn.q_proj" not in ignored
    pattern = next(name for name in ignored if name.startswith(r"re:model\.layers\.0\."))
    assert re.match(pattern[3:], f"{layer}.mlp.experts.0.gate_proj")
    assert not re.match(pattern[3:], f"{layer}.mlp.experts_gate")
    fine = plan_save(model, "fine_grained").quantization_config["modules_to_not_convert"]
    assert {f"{layer}.mlp.experts", f"{layer}.mlp.router"} < {*fine}


@pytest.mark.parametrize("module_filter_fn", [NO_HEAD, left_out])
@pytest.mark.parametrize("name", ["llama4", "mixtral", "phimoe", "gpt_oss", "deepseek_v4"])
def test_on_a_gpu_transformers_makes_float8_of_what_the_file_has_so(name, module_filter_fn):
    """It replaces modules of this name before it loads them, which needs no GPU."""
    model = model_of(name) if name in MODELS else mixture_of(name)
    with torch.device("meta"):
        theirs = type(model)(model.config)
    float8.convert_to_float8_training(model, config="blockwise", module_filter_fn=module_filter_fn)
    plan = plan_save(model)
    options = {key: x for key, x in plan.quantization_config.items() if key != "quant_method"}
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**options), pre_quantized=True)
    quantizer._process_model_before_weight_loading(theirs)
    slots = published(model)
    stored = {slots[f"{layer}.weight"].parameter.rpartition(".")[0] for layer in plan.layers}
    assert {n for n, m in theirs.named_modules() if type(m).__name__.startswith("FP8")} == stored


def test_experts_of_gpt_oss_that_are_saved_in_bfloat16_are_said_to_be():
    plan = plan_save(convert(model_of("gpt_oss").bfloat16(), "tensorwise"))
    why = plan.skipped["model.layers.1.mlp.experts.down_proj"]
    assert why.startswith("it trains in float8 and is saved in bfloat16, because ")
    assert "mxfp4_weights=True" in why
    lines = [line for line in str(plan).splitlines() if "layers.*.mlp.experts.down_proj" in line]
    assert len(lines) == 1  # of both layers


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_what_compressed_tensors_runs_is_refused_with_the_remedy(name, has_run, tmp_path):
    save_pretrained(convert(model_of(name), "rowwise"), tmp_path / "it")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "it")
    if has_run:  # which decompresses it
        theirs(TOKENS)
    for call in [plan_save, weight_updates, lambda m: load(m, tmp_path / "it")]:
        with pytest.raises(ValueError, match=r"run by compressed-tensors: .*dequantize=True"):
            call(theirs)
    dequantised = AutoModelForCausalLM.from_pretrained(
        tmp_path / "it", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert plan_save(convert(dequantised, "rowwise")).layers


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_cast_it_trains_with_is_said_of_its_bits_alone(name, rows, recipe, tmp_path):
    """Of experts, the stack is cast: 64 rows of gate share blocks of 128 with those of up."""
    model = convert(model_of(name, **SQUARE | {"intermediate_size": rows}), recipe)
    plan = save_pretrained(model, tmp_path / "it")
    stored, slots = load_file(tmp_path / "it/model.safetensors"), published(model)
    differ = 0
    for layer, said in plan.layers.items():
        slot = slots[f"{layer}.weight"]
        module = model.get_submodule(slot.parameter.rpartition(".")[0])
        weight = model.get_parameter(slot.parameter).detach()
        cast, index = own_config(module).gemms.output.b, slot.index  # of an expert: a stack
        stack = weight[index[0]] if index else weight
        how = OperandCast(ScalingType.DYNAMIC, float8.E4M3, cast.block, cast.scale_format)
        trained = cast_alone(stack, how)[0][index[1:]]
        same = torch.equal(stored[f"{layer}.weight"].view(torch.uint8), trained.view(torch.uint8))
        assert same or not said.startswith(TRAINING_CAST), layer
        differ += not same
        assert said.startswith((TRAINING_CAST, CAST_ANEW))
    assert (differ > 0) == any(how.startswith(CAST_ANEW) for how in plan.layers.values())
