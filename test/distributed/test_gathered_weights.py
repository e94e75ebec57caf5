"""FSDP2 gathers weights in float8, and the bits stay those of one process."""

import copy
import pickle

import pytest
import torch
from fsdp_program import convert, model_of
from processes import failures
from torch import nn

from float8 import (
    Float8Linear,
    convert_from_float8_training,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES, Float8LinearConfig
from float8.distributed.sharded_weight import ShardedWeight

BF16 = torch.bfloat16
GATHERED = ("tensorwise", "delayed", "unit")
ODD = (7, 5)  # widths, which make uneven shards


def trains(**options):
    return "with_options", "trains_like_one_process", options


def refuses(what, message):
    return "refuses", what, message


ON_TWO = [
    *(trains(recipe=recipe) for recipe in GATHERED),  # others: test_compositions.py
    trains(dtype=BF16, precompute=True),
    trains(dtype=BF16, recipe="delayed"),
    trains(dims=ODD, recipe="delayed"),
    trains(dims=ODD, precompute=True),
    trains(dims=(1, 1), precompute=True),  # more ranks than rows
    trains(recipe="delayed", reshard_after_forward=False),
    trains(offload=True, precompute=True, dims=ODD),
    trains(meta=True, recipe="delayed", dims=ODD),
    trains(frozen=True),
    trains(ours=True, dtype=BF16, dims=ODD),
    trains(ours=True, precompute=True, dims=(1, 1)),
    trains(checkpointed="not", recipe="delayed"),
    trains(checkpointed="reentrant", dtype=BF16),
    trains(compiled="aot_eager", recipe="delayed", dtype=BF16),
    ("one_byte_per_element_travels", BF16),
    ("one_all_reduce_for_all_weights",),
    ("after_step_does_what_a_recipe_needs",),
    ("known_scales_need_no_all_reduce",),
    ("a_compiled_step_forgets_the_amax",),
    ("a_write_forgets_the_amax",),
    ("the_optimizer_records_the_amaxes_of_shards",),
    ("a_stale_scale_is_found",),
    ("a_missing_all_reduce_is_found",),
    ("the_gathered_weight_is_the_operand",),
    *(("losses_do_not_depend_on_the_gather", recipe) for recipe in (*GATHERED, "rowwise")),
    ("accumulates", "tensorwise"),
    ("accumulates", "delayed"),
    ("tied_weights_train", "tensorwise"),
    ("tied_weights_train", "delayed"),
    ("columns_can_be_sharded",),
    ("checkpoints_are_plain", "delayed"),
    ("meta_models_load_checkpoints",),
    ("evaluates",),
    ("clips_and_steps",),
    ("an_unused_weight_gets_zeros",),
    refuses("autocast", "MixedPrecisionPolicy"),
    refuses("back", "get_model_state_dict"),
    refuses("back, gathered", "get_model_state_dict"),
    refuses("sharded", "convert before fully_shard"),
]
ON_FOUR = [
    trains(hsdp=True, same_data=True, recipe="delayed", dims=ODD, dtype=BF16),
    trains(same_data=True, dims=(9, 2), precompute=True),  # some shards are empty
    ("the_amax_is_reduced_over_shards_only",),
    refuses("group", "shards too"),
    refuses("integer", "Error"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "checks"), [(2, ON_TWO), (4, ON_FOUR)])
def test_bits_are_those_of_one_process(world, checks):
    assert failures("fsdp_program", checks, world) == {}


# --- one process: what conversion makes


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_before_sharding_are_those_of_the_plain_recipe(recipe):
    models = [convert(model_of(), recipe, gathers) for gathers in (False, True)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    for _ in range(2):
        x, g = torch.randn(16, 32), torch.randn(16, 32)
        outs = []
        for model, optimizer in zip(models, optimizers, strict=True):
            outs.append(model(x))
            outs[-1].backward(g)
            optimizer.step()
            optimizer.zero_grad()
            sync_float8_amax_and_scale_history(model)
        assert torch.equal(*outs)
    a, b = (model.state_dict() for model in models)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert type(b[name]) is torch.Tensor
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_report_says_which_weights_stay_in_high_precision(recipe):
    model = convert(model_of(), recipe, gathers=True)
    kinds = {type(layer.weight) for layer in model.modules() if isinstance(layer, Float8Linear)}
    reasons = model.float8_conversion.gathered_in_high_precision
    if recipe in GATHERED:
        assert kinds == {ShardedWeight}
        assert reasons == {}
    else:
        assert kinds == {nn.Parameter}
        assert set(reasons) == set(model.float8_conversion.converted)
        assert "gathered in high precision: *.up (2 layers): " in str(model.float8_conversion)


def test_data_gradients_and_attributes_are_shared():
    plain = nn.Linear(32, 48).requires_grad_()
    plain.weight.grad, plain.weight.tag = torch.randn(48, 32), "tagged"
    layer = convert(nn.Sequential(plain), "tensorwise", gathers=True)[0]
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.plain.data_ptr() == plain.weight.data_ptr()
    assert layer.weight.grad is plain.weight.grad
    assert layer.weight.tag == "tagged"
    assert not hasattr(layer.weight, "_float8_replaced_in")


def test_a_model_converts_back():
    model = convert(model_of(), "tensorwise", gathers=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tied = convert(nn.Sequential(*[nn.Linear(16, 16)] * 2), "tensorwise", gathers=True)
    for m in (model, tied):
        convert_from_float8_training(m)
        assert {type(p) for p in m.parameters()} == {nn.Parameter}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_keep_the_type(duplicate):
    model = convert(model_of(), "delayed", gathers=True)
    other = duplicate(model)
    x = torch.randn(16, 32)
    assert isinstance(other[0].up.weight, ShardedWeight)
    assert torch.equal(model(x), other(x))
    with torch.no_grad():
        other[0].up.weight.zero_()
    assert model[0].up.weight.any()


def test_a_plain_checkpoint_loads_with_and_without_assign():
    plain = model_of()
    for assign in (False, True):
        model = convert(model_of(), "tensorwise", gathers=True)
        model.load_state_dict({k: v + 1 for k, v in plain.state_dict().items()}, assign=assign)
        assert isinstance(model[0].up.weight, ShardedWeight)
        assert torch.equal(model[0].up.weight.plain, plain[0].up.weight + 1)


def test_weights_change_dtype_and_come_to_life():
    model = convert(model_of(), "tensorwise", gathers=True)
    weight = model[0].up.weight
    assert model.to(torch.bfloat16)[0].up.weight is weight
    assert weight.plain.dtype == torch.bfloat16
    empty = convert(model_of().to("meta"), "tensorwise", gathers=True).to_empty(device="cpu")
    assert empty[0].up.weight.plain.device.type == "cpu"
    empty.load_state_dict(model_of().state_dict())
    x = torch.randn(16, 32)
    assert torch.equal(empty(x), convert(model_of(), "tensorwise", gathers=True)(x))


def test_a_weight_that_another_module_reads_stays_plain():
    embedding, head = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)
    head.weight = embedding.weight
    model = convert(nn.ModuleDict({"embedding": embedding, "head": head}), "tensorwise", True)
    reason = model.float8_conversion.gathered_in_high_precision["head"]
    assert "tied to a Embedding" in reason
    assert model["head"].weight is embedding.weight


def test_an_optimizer_from_before_is_refused_at_its_first_step():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    convert(model, "tensorwise", gathers=True)
    with pytest.raises(RuntimeError, match=r"0\.up.*then build the optimizer"):
        optimizer.step()
    torch.optim.AdamW(model.parameters()).step()


def test_precomputing_leaves_other_models_alone():
    for model in (model_of(), convert(model_of(), "tensorwise", True), nn.ReLU()):
        precompute_float8_dynamic_scale_for_fsdp(model)


def test_a_layer_in_high_precision_has_nothing_to_gather():
    off = RECIPES["rowwise_with_gw_hp"].cast_config_input_for_grad_weight
    config = Float8LinearConfig(
        off, off, cast_config_weight_for_grad_input=off, cast_config_grad_output=off,
        enable_fsdp_float8_all_gather=True,
    )  # fmt: skip
    model = convert_to_float8_training(nn.Sequential(nn.Linear(8, 8)), config=config)
    assert "high precision" in model.float8_conversion.gathered_in_high_precision["0"]
