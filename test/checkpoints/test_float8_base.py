"""A frozen base of experts in float8: the files' bytes, gradients through it, shards, adapters.

The files are made without the library: Transformers names the tensors, `oracle` casts them.
"""

from __future__ import annotations

import copy
import importlib.util
import json

import oracle
import pytest
import torch
from assertions import assert_bitwise, assert_sqnr_at_least
from hand_written import E4M3, FINE, compressed, write
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("transformers")

from published_models import convert, model_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from wire import Wire

import float8
from float8 import Float8ExpertParallel, Float8Linear, Float8LinearConfig, Float8Tensor
from float8.checkpoints import load, save_pretrained
from float8.tensor import Float8Shard

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256}
MOE = ("qwen3_moe", "deepseek_v3", "mixtral")
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
SKIPPED = ("embed", "lm_head", "mlp.gate.", "norm")
# layout -> the block of its scales, the end of their keys, the quantization_config
LAYOUTS = {
    "blocks": ((128, 128), "weight_scale_inv", FINE),
    "channels": ((1, -1), "weight_scale", compressed("channel", ignore=[])),
    "tensors": ((-1, -1), "weight_scale", compressed("tensor", ignore=[])),
    "static": ((-1, -1), "weight_scale", compressed("tensor", static=True, ignore=[])),
}


def make(seed: int, name: str = "qwen3_moe", **sizes: int) -> nn.Module:
    return model_of(name, seed, **SIZES | sizes).bfloat16().requires_grad_(False)


def written(folder, layout: str = "blocks", name: str = "qwen3_moe", **sizes: int):
    """A checkpoint as published ones are: its folder and its tensors."""
    block, end, config = LAYOUTS[layout]
    model = make(1, name, **sizes)
    model.save_pretrained(folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    for key in [k for k, x in tensors.items() if x.dim() == 2 and not any(s in k for s in SKIPPED)]:
        data, scale = oracle.quantize(tensors[key], block, E4M3)
        tensors[key] = data.view(E4M3)
        tensors[key.removesuffix("weight") + end] = scale.reshape(1) if block[0] == -1 else scale
        if layout == "static":
            tensors[key.removesuffix("weight") + "input_scale"] = torch.tensor([0.01])
    write(folder, tensors, config)
    path = folder / "config.json"
    own = json.loads((folder / "plain" / "config.json").read_text())
    path.write_text(json.dumps(own | json.loads(path.read_text())))
    return folder, tensors


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a checkpoint in blocks of 128x128, for all processes."""
    return str(written(tmp_path_factory.mktemp("published"))[0])


def in_float8(model: nn.Module) -> dict[str, Float8Tensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, Float8Tensor)}


# --- bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_have_the_bytes_of_the_files(layout, tmp_path):
    folder, tensors = written(tmp_path, layout)
    block, end, _ = LAYOUTS[layout]
    model = load(make(2), folder, "float8")
    layer = model.model.layers[1].mlp.experts
    assert not any(weight.requires_grad for weight in in_float8(model).values())
    places = {
        "gate_proj": (layer.gate_up_proj, slice(0, 128)),
        "up_proj": (layer.gate_up_proj, slice(128, 256)),
        "down_proj": (layer.down_proj, slice(0, 256)),
    }
    for expert in range(4):
        for name, (stack, rows) in places.items():
            key = f"model.layers.1.mlp.experts.{expert}.{name}."
            data, scale = tensors[key + "weight"], tensors[key + end]
            scale = scale.reshape(1, 1) if block[0] == -1 else scale
            assert_bitwise(stack.float8_data[expert, rows], data, key)
            values = oracle.values(data, scale, block).bfloat16()
            assert_bitwise(stack.dequantize()[expert, rows], values, key)
    stored = sum(w.float8_data.untyped_storage().nbytes() for w in in_float8(model).values())
    assert stored == sum(weight.numel() for weight in in_float8(model).values())
    with float8.high_precision(model):
        assert_bitwise(model(TOKENS).logits, load(make(3), folder)(TOKENS).logits, layout)


@pytest.mark.parametrize("name", MOE)
@pytest.mark.filterwarnings("ignore:Using FP8 quantized models requires a GPU")
def test_dequantised_it_is_the_model_that_transformers_reads(name, tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    folder, _ = written(tmp_path, name=name)
    config = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config
    ).eval()
    ours = load(make(2, name), folder, "float8")
    stacks = [n for n, weight in in_float8(ours).items() if weight.dim() == 3]
    assert len(stacks) == (2 if name == "deepseek_v3" else 4)
    with float8.high_precision(ours):
        values = ours.state_dict()
    assert values.keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert_bitwise(values[key].float(), value.float(), (name, key))


def test_experts_whose_blocks_cross_two_matrices_are_dequantised_and_listed(tmp_path):
    folder, _ = written(tmp_path, moe_intermediate_size=96)
    model = load(make(2, moe_intermediate_size=96), folder, "float8")
    report = model.float8_conversion
    assert "split a block" in report.skipped["model.layers.0.mlp.experts"]
    assert "model.layers.0.self_attn.q_proj" in report.converted
    plain = load(make(3, moe_intermediate_size=96), folder)
    for name, weight in plain.named_parameters():
        if ".experts." in name:
            assert_bitwise(model.get_parameter(name), weight, name)


def test_bytes_are_not_read_by_another_config(published):
    model = float8.convert_to_float8_inference(make(2), config="rowwise")
    with pytest.raises(ValueError, match="by another config than that of the files"):
        load(model, published, "float8")


# --- products

RESIDENT = ("blockwise", "rowwise", "mxfp8", "rowwise_with_gw_hp")


@pytest.mark.parametrize("recipe", RESIDENT)
def test_products_are_those_of_a_linear_layer_per_expert(recipe):
    """Output and grad_input, to the bit; against float64 the error is that of rounded tokens."""
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    ends, (K, N) = [7, 7, 140, 141], (96, 160)
    experts = nn.ModuleList(nn.Linear(K, N, bias=False) for _ in ends)
    for i, expert in enumerate(experts):
        nn.init.normal_(expert.weight, std=10.0 ** (i - 2))
    frozen = float8.convert_to_float8_inference(experts.bfloat16(), config=config)
    weights = [expert.weight for expert in frozen]
    stack = Float8Tensor(
        torch.stack([w.float8_data for w in weights]),
        torch.stack([w.scale for w in weights]),
        (1, *weights[0].block),
        torch.bfloat16,
    )
    x, g = (torch.randn(150, n).bfloat16() for n in (K, N))
    x[141:] = g[141:] = torch.nan  # of no expert
    x.requires_grad_()
    y = float8.grouped_mm(x, stack.mT, torch.tensor(ends, dtype=torch.int32), config)
    y.backward(g)
    for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        own = x.detach()[begin:end].requires_grad_()
        expected = frozen[i](own)
        expected.backward(g[begin:end])
        assert_bitwise(y[begin:end], expected, (recipe, i))
        assert_bitwise(x.grad[begin:end], own.grad, (recipe, i))
        if begin < end:
            exact = g[begin:end].double() @ weights[i].dequantize(torch.float32).double()
            assert_sqnr_at_least(x.grad[begin:end], exact, 27)  # one E4M3 cast has 31.5


def test_a_weight_whose_scales_allow_no_gradient_is_refused():
    w = float8.convert_to_float8_inference(nn.Linear(64, 32), config="rowwise").weight
    stack = Float8Tensor(w.float8_data[None], w.scale[None], (1, 1, -1), w.dtype).requires_grad_()
    x, offs = torch.randn(5, 64), torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match="freeze them"):
        float8.grouped_mm(x, stack.mT, offs, "rowwise")
    with pytest.raises(ValueError, match="dequantize"):
        float8.grouped_mm(x, stack.detach().mT, offs, "blockwise")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # the latter's stacks are (E, K, N)
def test_a_state_dict_is_plain_and_loads_into_every_form(name):
    frozen, other = (
        float8.convert_to_float8_inference(model_of(name, seed).bfloat16(), config="rowwise")
        for seed in (1, 2)
    )
    state = frozen.state_dict()
    assert not any(isinstance(x, Float8Tensor) for x in state.values())
    other.load_state_dict(state)
    assert_bitwise(other(TOKENS).logits, frozen(TOKENS).logits)
    training = convert(model_of(name, 3).bfloat16(), "rowwise")
    with float8.high_precision(frozen):
        plain = frozen.state_dict()
    for values in (plain, {k: state[k] for k in state if "head" not in k} | {
        "lm_head.weight": plain["lm_head.weight"]}):  # fmt: skip
        training.load_state_dict(values)
        with float8.high_precision(training), float8.high_precision(frozen):
            assert_bitwise(training(TOKENS).logits, frozen(TOKENS).logits)
    back = float8.convert_from_float8_training(copy.deepcopy(frozen))
    assert not any(hasattr(p, "float8_data") for p in back.parameters())  # memory
    assert {k: x.dtype for k, x in back.state_dict().items()} == {
        k: x.dtype for k, x in model_of(name).bfloat16().state_dict().items()
    }


# --- adapters


def adapted(base: nn.Module) -> nn.Module:
    import peft

    torch.manual_seed(5)
    targets = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(base, targets)


def losses(model: nn.Module, steps: int = 4) -> list[float]:
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(own, lr=1e-2), []
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        assert all(p.grad is not None for p in own)  # those before the experts too
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_train_as_on_the_dequantised_base(tmp_path):
    """With equal products, to the bit; else the difference is the casts of activations."""
    save_pretrained(convert(make(1), "blockwise"), tmp_path)
    frozen = losses(adapted(load(make(2), tmp_path, "float8")))
    trained = load(convert(make(3), "blockwise"), tmp_path).requires_grad_(False)
    plain = losses(adapted(load(make(4), tmp_path)))
    assert frozen == losses(adapted(trained))
    assert frozen != plain
    assert frozen[-1] < frozen[0]


# --- several processes


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def poisoned(model: nn.Module) -> nn.Module:
    """All that this rank has of the parameters is NaN."""
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter).detach()
        if isinstance(local, (Float8Tensor, Float8Shard)):
            local.float8_data.view(torch.uint8).fill_(0x7F)
            local.scale.fill_(torch.nan)
        else:
            local.fill_(torch.nan)
    return model


def step(model: nn.Module) -> torch.Tensor:
    embedding = model.get_input_embeddings().weight.requires_grad_()
    logits = model(TOKENS).logits
    logits.float().square().mean().backward()
    grad = embedding.grad
    return logits.detach(), grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.mark.ranks(2)
def test_fully_shard_stores_and_gathers_bytes(rank, published):
    whole = load(make(2), published, "float8")
    expected = step(whole)
    model = sharded(load(make(3), published, "float8"))
    with Wire() as wire:
        found = step(model)
    for mine, its in zip(found, expected, strict=True):
        assert_bitwise(mine, its)
    # Layers are gathered in forward and again in backward, all else once; gloo's ranks are two.
    sent = 0
    for name, p in whole.named_parameters():
        nbytes = p.numel() * p.element_size()
        if isinstance(p, Float8Tensor):
            nbytes = p.numel() + (p.scale.numel() * 4 if p.block[0] == 1 else 0)
        sent += nbytes / 2 * (2 if ".layers." in name else 1)
    full = 0.5 * model.get_input_embeddings().weight.numel() * 2  # of its gradient, at the end
    assert wire.bytes("all_gather") == sent + full


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", ["fsdp", "experts"])
def test_nan_parameters_are_all_written_on_every_rank(rank, form, published):
    """sglang#37679 and miles#2488 left experts of some ranks as they were."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    whole = load(make(2), published, "float8")
    with torch.device("meta"):
        model = load(make(3), published, "float8", device="meta")
    if form == "fsdp":
        model = sharded(model)
    else:
        styles = {"model.layers.*.mlp.experts": Float8ExpertParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), styles)
    load(poisoned(load(model, published, "float8")), published, "float8")
    for name, _ in model.named_buffers():
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, whole.get_buffer(name))
    for name, p in model.named_parameters():
        own, expected = getattr(p, "_local_tensor", p), whole.get_parameter(name)
        if len(own) < len(expected):
            expected = expected[len(own) * rank :][: len(own)] if p.dim() == 3 else expected
        if p.dim() == 3:
            assert_bitwise(own.float8_data, expected.float8_data, name)
            assert_bitwise(own.scale, expected.scale, name)
    assert_bitwise(model(TOKENS).logits, whole(TOKENS).logits, form)


@pytest.mark.ranks(2)
def test_a_sharded_state_dict_is_saved_and_loaded(rank, published, tmp_path):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    folder = [str(tmp_path / "dcp")]
    dist.broadcast_object_list(folder)
    model = sharded(load(make(2), published, "float8"))
    expected = load(make(2), published, "float8")(TOKENS).logits
    state = model.state_dict()
    local = [getattr(x, "_local_tensor", x) for x in state.values()]
    assert not any(isinstance(x, (Float8Tensor, Float8Shard)) for x in local)
    dcp.save(state, checkpoint_id=folder[0])
    other = poisoned(sharded(load(make(3), published, "float8")))
    again = other.state_dict()
    dcp.load(again, checkpoint_id=folder[0])
    other.load_state_dict(again)
    assert_bitwise(other(TOKENS).logits, expected)
    third = poisoned(sharded(load(make(4), published, "float8")))
    third.load_state_dict(state)
    assert_bitwise(third(TOKENS).logits, expected)
    unscaled = {key: x for key, x in state.items() if not key.endswith("_scale")}
    with pytest.raises(RuntimeError, match="neither such parts of it nor the whole"):
        third.load_state_dict(unscaled, strict=False)


def layers_in_float8(seed: int, recipe: str) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(128, 384), nn.LayerNorm(384), nn.Linear(384, 128))
    config = Float8LinearConfig.from_recipe_name(recipe)
    layers = layers.bfloat16().requires_grad_(False)
    return float8.convert_to_float8_inference(layers, config=config)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_whole_state_dict_is_gathered_and_loaded(rank, recipe):
    """As bytes, for gloo sends no float8; and as ``set_model_state_dict`` hands it over.

    Three ranks have 43, 43 and 42 rows of the last layer.
    """
    whole = layers_in_float8(1, recipe)
    expected, x = whole.state_dict(), torch.randn(16, 128, dtype=torch.bfloat16)
    torch.distributed.broadcast(x, 0)
    for key, its in sharded_layers(whole).state_dict().items():
        sent = its.view(torch.uint8) if its.itemsize == 1 else its
        found = sent.full_tensor() if isinstance(its, DTensor) else sent
        assert_bitwise(found.view(its.dtype), expected[key], key)

    def part(key: str, like: torch.Tensor) -> torch.Tensor:
        mesh, placements = like.device_mesh, like.placements
        return distribute_tensor(expected[key], mesh, placements, src_data_rank=None)

    in_parts = {
        "all": lambda key: True,
        "parameters": lambda key: not key.endswith("_scale"),  # set_model_state_dict does so
        "others": lambda key: key[0] == "1" or key.endswith("bias"),
    }
    for those in in_parts.values():
        model = sharded_layers(layers_in_float8(2, recipe))
        assert not torch.equal(model(x), layers_in_float8(1, recipe)(x))
        own = model.state_dict()
        cut = {key for key, y in own.items() if isinstance(y, DTensor) and those(key)}
        model.load_state_dict(
            {key: part(key, own[key]) if key in cut else y for key, y in expected.items()}
        )
        assert_bitwise(model(x), layers_in_float8(1, recipe)(x), recipe)
    other = layers_in_float8(1, "rowwise" if recipe == "tensorwise" else "tensorwise").state_dict()
    with pytest.raises(RuntimeError, match="neither such parts of it nor the whole"):
        model[0].load_state_dict({k[2:]: y for k, y in other.items() if k[:3] == "0.w"}, False)
    assert_bitwise(model(x), layers_in_float8(1, recipe)(x), recipe)  # nothing has changed


def sharded_layers(model: nn.Module) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.ranks(2)
def test_weights_that_train_are_not_sharded_as_bytes(rank):
    layer = float8.convert_to_float8_inference(nn.Linear(64, 32))
    layer.weight.requires_grad_()
    assert isinstance(layer, Float8Linear)
    with pytest.raises(ValueError, match="frozen float8 weights"):
        fully_shard(layer)
