"""With which tensor-parallel sizes vLLM reads blocks, held against a model of its loader.

The model follows vLLM 0.33: ``linear.py`` and ``parameter.py`` of dense layers,
``fused_moe/oracle/fp8.py`` of experts, ``quantization/utils/fp8_utils.py`` of the checks. It loads
the number of each block in the place of its scale, and compares the numbers that each row or
column of each rank gets with those that it has in the file.
"""

from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("transformers")

import torch
from published_models import convert, model_of
from torch import nn

import float8
from float8 import Blockwise, Rowwise
from float8.checkpoints import (
    CompressedTensors,
    FineGrained,
    ModelOpt,
    load,
    plan_save,
    save_pretrained,
)
from float8.checkpoints.__main__ import main
from float8.checkpoints.files import Spec
from float8.checkpoints.plan import tensor_parallel_sizes

SIZES, N = (1, 2, 4, 8, 16), 128
BLOCK_LAYOUTS = (FineGrained(), CompressedTensors(Blockwise(N, N)))


def blocks(extent, block=N):
    """The block of each row or column."""
    return [i // block for i in range(extent)]


def narrowed(values, start, count):
    """``torch.narrow`` of a list."""
    if start + count > len(values):
        raise RuntimeError("narrow exceeds the dimension")
    return values[start : start + count]


def divided(a, b):
    if a % b:
        raise RuntimeError(f"{a} is no multiple of {b}")
    return a // b


def load_fused(extents, ranks_of, tp):
    """Parts (rows) that vLLM fuses, each over so many ranks; its scales are put together."""
    shards = [divided(n, ways) for n, ways in zip(extents, ranks_of, strict=True)]
    for rank in range(tp):
        scales = [None] * math.ceil(sum(shards) / N)
        for i, (n, shard, ways) in enumerate(zip(extents, shards, ranks_of, strict=True)):
            offset, count = math.ceil(sum(shards[:i]) / N), math.ceil(shard / N)
            own = rank // (tp // ways)  # ranks that share a head
            found = narrowed([(i, b) for b in range(math.ceil(n / N))], own * count, count)
            narrowed(scales, offset, count)
            scales[offset : offset + count] = found
        row = 0
        for i, (n, shard, ways) in enumerate(zip(extents, shards, ranks_of, strict=True)):
            start = rank // (tp // ways) * shard
            for b in narrowed(blocks(n), start, shard):
                assert scales[row // N] == (i, b), "wrong scale"
                row += 1


def load_sharded(extent, tp):
    """One weight that is cut along a dimension, whose check is never left out."""
    shard = divided(extent, tp)
    if tp > 1 and shard % N:
        raise ValueError("is not divisible by weight quantization block")
    load_fused([extent], [tp], tp)


def check_strictly(shards, tp):
    """``validate_fp8_block_shape`` of fused parts."""
    if any(shard % N for shard in (shards if tp > 1 else shards[:-1])):
        raise ValueError("output_partition_size is not divisible")


def load_experts(width, hidden, tp, is_fine):
    """Blocks are split where kernels can read smaller ones."""
    shard, block = divided(width, tp), N
    if shard % N:
        block = math.gcd(N, shard, hidden)
        if block < 32 or not is_fine:
            raise ValueError("The output_size of gate's and up's weight is not divisible")
    for rank in range(tp):
        finer = [b for b in range(math.ceil(width / N)) for _ in range(N // block)]
        count = shard // block
        scales = narrowed(finer, rank * count, count)
        for i, b in enumerate(blocks(width)[rank * shard : (rank + 1) * shard]):
            assert scales[i // block] == b, "wrong scale"


def loads(shape, layout, tp):
    heads, kv, head, hidden, width, is_mixture = shape
    is_fine = layout.name == "fine_grained"
    kv_ranks = min(tp, kv)
    try:
        divided(heads, tp)
        divided(max(tp, kv), min(tp, kv))
        fused = [[(heads * head, tp), *[(kv * head, kv_ranks)] * 2]]
        fused += [] if is_mixture else [[(width, tp)] * 2]
        for parts in fused:
            if not is_fine:
                check_strictly([n // ways for n, ways in parts], tp)
            load_fused(*map(list, zip(*parts, strict=True)), tp)
        load_sharded(heads * head, tp)
        if is_mixture:
            load_experts(width, hidden, tp, is_fine)
        else:
            load_sharded(width, tp)
    except (RuntimeError, ValueError, AssertionError):
        return False
    return True


def layers_of(heads, kv, head, hidden, width, is_mixture):
    """The layers of a block, as Llama or a mixture has them."""
    q, k, mlp = heads * head, kv * head, "mlp.experts.3" if is_mixture else "mlp"
    attention = {"q_proj": (q, hidden), "k_proj": (k, hidden), "v_proj": (k, hidden)}
    shapes = {f"self_attn.{n}": x for n, x in {**attention, "o_proj": (hidden, q)}.items()}
    shapes |= {f"{mlp}.gate_proj": (width, hidden), f"{mlp}.up_proj": (width, hidden)}
    shapes[f"{mlp}.down_proj"] = (hidden, width)
    return {f"model.layers.0.{name}": shape for name, shape in shapes.items()}


@pytest.mark.parametrize("layout", BLOCK_LAYOUTS, ids=lambda layout: layout.name)
def test_sizes_are_those_with_which_each_rank_gets_the_scales_of_its_blocks(layout):
    draw, found = random.Random(0), set()
    for _ in range(300):
        heads, kv = draw.choice([(2, 1), (4, 2), (6, 2), (8, 1), (16, 4), (16, 16), (3, 3)])
        head, hidden = draw.choice([32, 64, 96, 128, 256]), draw.choice([128, 192, 256, 272])
        width = draw.choice([64, 128, 160, 256, 320, 640, 768, 1024, 1100, 4096])
        shape = (heads, kv, head, hidden, width, draw.random() < 0.5)
        shapes = layers_of(*shape)
        specs = {f"{name}.weight": Spec(torch.float8_e4m3fn, x) for name, x in shapes.items()}
        config = {"num_attention_heads": heads, "num_key_value_heads": kv}
        expected = tuple(tp for tp in SIZES if loads(shape, layout, tp))
        for own in (config, {"text_config": config}):
            assert tensor_parallel_sizes(layout, shapes, specs, own) == expected, shape
        assert tensor_parallel_sizes(layout, shapes, specs, {}) is None
        found.add(expected)
    assert {(), (1,), (1, 2), (1, 2, 4, 8, 16)} <= found


def test_what_vllm_shards_in_an_unknown_way_gets_no_statement():
    config = {"num_attention_heads": 4}
    specs = {"a.qkv.weight": Spec(torch.float8_e4m3fn, (512, 512))}
    assert tensor_parallel_sizes(FineGrained(), ["a.qkv"], specs, config) is None
    specs = {"a.o_proj.weight": specs["a.qkv.weight"]}
    for layout in (None, CompressedTensors(Rowwise()), ModelOpt(), FineGrained((1, 32))):
        assert tensor_parallel_sizes(layout, ["a.o_proj"], specs, config) is None
    assert tensor_parallel_sizes(FineGrained(), ["a.o_proj"], specs, config) == (1, 2, 4)


def test_latent_attention_is_sharded_after_its_first_projections():
    """``q_a_proj`` is whole on each rank, and fused with ``kv_a_proj_with_mqa``, which ends it."""
    config = {"num_attention_heads": 16, "num_key_value_heads": 16}
    shapes = {"q_a_proj": (256, 512), "kv_a_proj_with_mqa": (576, 512), "q_b_proj": (1024, 256)}
    specs = {f"a.{n}.weight": Spec(torch.float8_e4m3fn, x) for n, x in shapes.items()}
    names = [f"a.{n}" for n in shapes]
    assert tensor_parallel_sizes(FineGrained(), names, specs, config) == (1, 2, 4, 8)
    specs["a.q_a_proj.weight"] = Spec(torch.float8_e4m3fn, (192, 512))
    assert tensor_parallel_sizes(FineGrained(), names, specs, config) == ()


@pytest.mark.filterwarnings("ignore:Transformers 5.23 without a GPU misreads")
def test_plans_and_commands_say_the_sizes(tmp_path, capsys):
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": False}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    model = convert(model_of("llama", **sizes, **heads, intermediate_size=256), "blockwise")
    line = "loads in vLLM 0.33 with tensor-parallel sizes"
    plan = save_pretrained(model, tmp_path / "it")
    assert plan.tensor_parallel_sizes == plan_save(model).tensor_parallel_sizes == (1, 2)
    assert f"{line} 1, 2 of (1, 2, 4, 8, 16)\n" in str(plan) + "\n"
    assert main(["inspect", str(tmp_path / "it")]) == 0
    assert f"{line} 1, 2 of" in capsys.readouterr().out
    options = ["--layout", "compressed_tensors:rowwise"]
    assert main(["convert", str(tmp_path / "it"), str(tmp_path / "rows"), *options]) == 0
    assert line not in capsys.readouterr().out
    odd = convert(model_of("llama", **sizes, **heads, intermediate_size=192), "blockwise")
    assert f"{line} none of (1, 2, 4, 8, 16);\nlayout CompressedTensors(Rowwise())" in str(
        plan_save(odd)
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize(
    ("share", "kept", "kept_in_bfloat16"),
    [
        (0.001, (0.03, 0.05), (0.5, 0.6)),
        (0.01, (0.34, 0.43), (0.99, 1.01)),
        (0.1, (0.98, 1.02), (0.98, 1.02)),
    ],
)
def test_how_much_of_an_update_is_left_after_it_was_merged(
    recipe, share, kept, kept_in_bfloat16, tmp_path
):
    """``share`` is the norm of the update, of rank 16, as a part of the weights' norm."""
    torch.manual_seed(0)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    plain = nn.Sequential(nn.Linear(512, 512, bias=False)).bfloat16()
    nn.init.normal_(plain[0].weight, std=0.02)
    save_pretrained(float8.convert_to_float8_training(plain, config=config), tmp_path / "a")
    base = load(nn.Sequential(nn.Linear(512, 512, bias=False)).bfloat16(), tmp_path / "a", "float8")
    merged = float8.convert_from_float8_training(base)
    weight = merged[0].weight.detach().double()
    update = torch.randn(512, 16).double() @ torch.randn(16, 512).double()
    update *= share * weight.norm() / update.norm()
    with torch.no_grad():
        merged[0].weight.add_(update)  # in bfloat16, as PEFT does

    def left(found):
        return float(((found.detach().double() - weight) * update).sum() / update.square().sum())

    low, high = kept_in_bfloat16
    assert low < left(merged[0].weight) < high
    merged = float8.convert_to_float8_training(merged, config=config)
    save_pretrained(merged, tmp_path / "b")
    served = load(nn.Sequential(nn.Linear(512, 512, bias=False)), tmp_path / "b")
    low, high = kept
    assert low < left(served[0].weight) < high
