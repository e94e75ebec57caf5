"""What a plan says of its readers and of its bits, held against Transformers and the layers."""

from __future__ import annotations

import contextlib
import copy

import pytest

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import torch
from assertions import assert_bitwise
from published_models import convert, model_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import float8
from float8 import Blockwise, Rowwise, ScaleFormat, ScalingType
from float8.checkpoints import (
    CompressedTensors,
    FineGrained,
    load,
    plan_save,
    save_pretrained,
)
from float8.checkpoints.casts import CAST_ANEW, TRAINING_CAST
from float8.checkpoints.names import published
from float8.config import OperandCast
from float8.convert.conversion import own_config
from float8.linear.scaling import bind_and_cast

TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")


def misread(folder, plain, layers):
    """The layers of which Transformers has other values than the files; all, if it fails."""
    ours = load(copy.deepcopy(plain), folder)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=plain.dtype)
        with torch.no_grad():
            theirs(TOKENS)  # some weights are decompressed by the first forward
    except (RuntimeError, ValueError):
        return set(layers)
    wrong, stacks = set(), theirs.state_dict()
    for key, slot in published(ours).items():
        found, expected = (
            slot.of(stacks[slot.parameter]),
            slot.of(ours.state_dict()[slot.parameter]),
        )
        if not torch.equal(found, expected):
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
        cast, index = own_config(module).plan.output.b, slot.index  # of an expert: a stack
        stack = weight[index[0]] if index else weight
        how = OperandCast(ScalingType.DYNAMIC, float8.E4M3, cast.block, cast.scale_format)
        trained = bind_and_cast(stack, how)[0][index[1:]]
        same = torch.equal(stored[f"{layer}.weight"].view(torch.uint8), trained.view(torch.uint8))
        assert same or not said.startswith(TRAINING_CAST), layer
        differ += not same
        assert said.startswith((TRAINING_CAST, CAST_ANEW))
    assert (differ > 0) == any(how.startswith(CAST_ANEW) for how in plan.layers.values())
