"""Weights pushed to an engine: names, bits, and one step at a time.

Two processes: ``live_program.py``.
"""

from __future__ import annotations

from unittest import mock

import oracle
import pytest

pytest.importorskip("transformers")

import torch
from assertions import assert_bitwise
from processes import failures
from published_models import convert, model_of
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import float8
from float8 import Tensorwise, kernels
from float8.checkpoints import CompressedTensors, plan_save, save_pretrained, weight_updates
from float8.checkpoints.casts import TRAINING_CAST
from float8.checkpoints.names import published


def expected_updates(model, in_float8, block, scale_format, scale_name):
    """(key, tensor) from the oracle: one cast of each published matrix alone."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for key, slot in published(model).items():
        x = slot.of(own[slot.parameter].detach())
        if not in_float8(key):
            yield key, x
            continue
        codes, scale = oracle.quantize(x, block, torch.float8_e4m3fn, scale_format)
        yield key, codes.view(torch.float8_e4m3fn)
        yield key.removesuffix("weight") + scale_name, scale


def assert_same_updates(found, expected):
    found, expected = list(found), list(expected)
    assert [key for key, _ in found] == [key for key, _ in expected]
    for (key, x), (_, y) in zip(found, expected, strict=True):
        assert_bitwise(x, y, replay=key)


def is_linear(key):
    """Whether a published weight is of a layer that `convert` takes: routers and heads are not."""
    kept = ("lm_head", "embed", "norm", "gate.weight", "kv_a_layer", "q_a_layer", "e_score")
    return not any(part in key for part in kept)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_names_bits_and_order_are_those_of_the_definition(name):
    """In blocks: gate and up of experts have 32 or 48 rows, and blocks of their own."""
    model = convert(model_of(name), "blockwise")
    expected = expected_updates(model, is_linear, (128, 128), "power_of_two", "weight_scale_inv")
    assert_same_updates(weight_updates(model), expected)


def test_tensorwise_gate_and_up_share_the_scale_of_their_expert():
    """The scale with which the stack trains: one per expert."""
    model = convert(model_of("mixtral"), "tensorwise")
    found = dict(weight_updates(model, CompressedTensors(Tensorwise())))
    stack = model.model.layers[1].mlp.experts.gate_up_proj.detach()
    prefix = "model.layers.1.block_sparse_moe.experts"
    for expert in range(3):
        codes, expected = oracle.quantize(stack[expert], (-1, -1), torch.float8_e4m3fn)
        for part, rows in (("w1", slice(0, 48)), ("w3", slice(48, 96))):
            data = found[f"{prefix}.{expert}.{part}.weight"]
            assert_bitwise(data.view(torch.uint8), codes[rows])
            scale = found[f"{prefix}.{expert}.{part}.weight_scale"]
            assert scale.item() == expected.item()


def test_cached_and_resident_weights_have_the_bits_of_a_cast():
    model = convert(model_of("llama"), "blockwise")
    found = {key: x.clone() for key, x in weight_updates(model)}
    with float8.cached_weights(model):
        cached = dict(weight_updates(model))
    resident = float8.convert_to_float8_inference(
        float8.convert_from_float8_training(model),
        config=float8.Float8LinearConfig.from_recipe_name("blockwise"),
        module_filter_fn=float8.filters.skip_names("lm_head"),
    )
    kept = dict(weight_updates(resident))
    for key, x in found.items():
        assert_bitwise(cached[key], x, replay=key)
        assert_bitwise(kept[key], x, replay=key)


def test_a_write_in_between_is_an_error():
    model = convert(model_of("llama"), "blockwise")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updates = weight_updates(model)
    name, _ = next(updates)
    assert name == "model.embed_tokens.weight"
    model(torch.randint(64, (1, 16))).logits.sum().backward()
    next(updates)  # neither a forward nor a backward writes
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"embed_tokens\.weight was written to since the call"):
        list(updates)
    updates = weight_updates(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"norm\.weight was written to"):
        next(updates)


def test_stacks_of_sharded_models_are_gathered(one_rank):
    """Their published parts; on two processes: below."""
    plain, model = (convert(model_of("mixtral"), "rowwise") for _ in range(2))
    for layer in model.model.layers:
        fully_shard(layer)
    assert_same_updates(weight_updates(fully_shard(model)), weight_updates(plain))


def test_sharded_models_push_the_bits_of_one_process():
    checks = [
        *(("every_rank_gets_whole_tensors", r) for r in ("blockwise", "rowwise", "delayed")),
        ("every_rank_gets_whole_tensors", "tensorwise", True),
        ("gathers_one_parameter_at_a_time",),
        ("a_step_in_between_is_an_error",),
    ]
    assert failures("live_program", checks, 2) == {}


def multiplied_by(model, tokens):
    """Name of a layer -> the weight that its next forward multiplies: data, and scale."""
    names, found, running = {m: n for n, m in model.named_modules()}, {}, []
    multiply = kernels.multiply

    def seen(a, b, *rest):
        found[running[-1]] = b.data.clone(), b.scale.clone()
        return multiply(a, b, *rest)

    handles = [
        handle
        for m in model.modules()
        if isinstance(m, float8.Float8Linear)
        for handle in (
            m.register_forward_pre_hook(lambda m, _: running.append(names[m])),
            m.register_forward_hook(lambda *_: running.pop() and None),
        )
    ]
    with mock.patch.object(kernels, "multiply", seen), torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise", "delayed"])
def test_the_next_forward_multiplies_what_a_file_and_an_engine_have(recipe, tmp_path):
    """Data and scales, bit for bit; but for layers that the plan says are cast anew."""
    model, tokens = convert(model_of("llama"), recipe), torch.randint(64, (2, 16))
    for _ in range(2):
        model(tokens).logits.sum().backward()
        float8.after_step(model)
    plan = plan_save(model)
    save_pretrained(model, tmp_path / "it")
    files, live = load_file(tmp_path / "it/model.safetensors"), dict(weight_updates(model))
    scale = "weight_scale_inv" if recipe == "blockwise" else "weight_scale"
    multiplied = multiplied_by(model, tokens)
    assert multiplied.keys() == plan.layers.keys()
    kept = {name for name, how in plan.layers.items() if how.startswith(TRAINING_CAST)}
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # engines have one scale of them
    anew = {n for n in plan.layers if n.endswith(fused) and plan.layout.block == (-1, -1)}
    assert kept == plan.layers.keys() - anew
    for name in kept:
        data, its = multiplied[name]
        for found in (files, live):
            assert_bitwise(found[f"{name}.weight"], data, (recipe, name))
            assert found[f"{name}.{scale}"].float().flatten().tolist() == its.flatten().tolist()


def test_the_next_forward_multiplies_the_experts_that_an_engine_has():
    model, stacks = convert(model_of("mixtral"), "rowwise"), []
    multiply = kernels.multiply_groups

    def seen(a, b, *rest):
        stacks.append((b.data.clone(), b.scale.clone()))
        return multiply(a, b, *rest)

    with mock.patch.object(kernels, "multiply_groups", seen), torch.no_grad():
        model(torch.randint(64, (2, 16)))
    live = dict(weight_updates(model))
    layers = len(model.model.layers)
    assert len(stacks) == 2 * layers
    for i in range(layers):
        (gate_up, its), (down, of_down) = stacks[2 * i : 2 * i + 2]
        for expert in range(len(gate_up)):
            w1, w3 = zip(gate_up[expert].chunk(2), its[expert].chunk(2), strict=True)
            w2 = down[expert], of_down[expert]
            for name, (data, scale) in {"w1": w1, "w2": w2, "w3": w3}.items():
                key = f"model.layers.{i}.block_sparse_moe.experts.{expert}.{name}.weight"
                assert_bitwise(live[key], data, key)
                assert live[f"{key}_scale"].flatten().tolist() == scale.flatten().tolist()
