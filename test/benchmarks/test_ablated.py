"""A layer with single casts has the bits of the real one; a probe finds what a cast does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from benchmarks.quality import ablated, probe
from benchmarks.quality.ablated import ABLATIONS, CASTS, GEMMS, PARTS, AblatedLinear, casts_in
from benchmarks.quality.contenders import contender
from float8 import E4M3, E5M2, Float8Linear, Float8Tensor
from scripts.training import gpt

SHAPES = [((3, 5, 48), 96), ((33, 16), 40), ((2, 8, 64), 32)]


def trained_once(layer: nn.Linear, shape, autocast: bool = True):
    """Output and both gradients, of the same random input and grad_output in each call."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).requires_grad_()
    layer.weight.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = layer(x)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return out.detach(), x.grad, layer.weight.grad


def layers(shape, out_features: int) -> tuple[nn.Linear, AblatedLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(shape[-1], out_features, bias=False)
    model = nn.ModuleDict({"0": nn.Linear(shape[-1], out_features, bias=False)})
    model["0"].weight.data.copy_(plain.weight.data)
    (ours,) = ablated.ablate(model)
    return plain, ours


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("shape", "out_features"), SHAPES)
@pytest.mark.parametrize("gemms", [(), *[(g,) for g in GEMMS], GEMMS[:2], GEMMS])
def test_gemms_of_casts_have_the_bits_of_the_real_layer(shape, out_features, gemms):
    plain, ours = layers(shape, out_features)
    ours.casts = frozenset().union(*(ablated.casts_of(gemm) for gemm in gemms))
    real = Float8Linear.from_float(plain, ablated.config_of(ours.casts)) if gemms else plain
    for name, mine, theirs in zip(
        ("output", "grad_input", "grad_weight"),
        trained_once(ours, shape),
        trained_once(real, shape),
        strict=True,
    ):
        assert torch.equal(mine, theirs), (name, gemms, shape)


@pytest.mark.parametrize("cast", CASTS)
def test_a_single_cast_changes_its_gemm_alone_and_as_the_dequantised_operand_does(cast):
    shape, out_features = SHAPES[2]
    plain, ours = layers(shape, out_features)
    ours.casts = frozenset([cast])
    found = trained_once(ours, shape, autocast=False)
    operand, gemm = cast.split(" for ")

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).flatten(0, -2)
    g = torch.randn((*shape[:-1], out_features), generator=generator).flatten(0, -2)
    operands = {"input": x, "weight": plain.weight.detach(), "grad_output": g}
    rounded = dict(operands)
    fmt = E5M2 if operand == "grad_output" else E4M3
    rounded[operand] = Float8Tensor.from_high_precision(operands[operand], fmt).dequantize()

    def products(of):
        x, w, g = (each.double() for each in of.values())
        return {"output": x @ w.T, "grad_input": g @ w, "grad_weight": g.T @ x}

    exact, expected = products(operands), products(operands)
    expected[gemm] = products(rounded)[gemm]
    for name, mine in zip(expected, found, strict=True):
        torch.testing.assert_close(mine.double().view_as(expected[name]), expected[name],
                                   rtol=1e-4, atol=1e-4)  # fmt: skip
    assert (expected[gemm] - exact[gemm]).abs().max() > 1e-2  # the cast is seen


def test_parts_are_casts_operands_and_gemms():
    assert [len(ablated.casts_of(part)) for part in PARTS] == [2] * 6 + [1] * 6
    assert ablated.casts_of("weight") == {"weight for output", "weight for grad_input"}
    assert ablated.casts_of("grad_input") == {"grad_output for grad_input", "weight for grad_input"}
    for part in PARTS:
        only, rest = casts_in(f"only {part}"), casts_in(f"all but {part}")
        assert not only & rest and only | rest == set(CASTS)
    assert len(set(ABLATIONS)) == 24
    with pytest.raises(ValueError, match="unknown part 'outputs'; parts are output, grad_input"):
        ablated.casts_of("outputs")


@pytest.mark.parametrize("name", ["only output", "all but output", "only weight", "all but weight"])
def test_a_contender_casts_in_all_layers_but_the_head(name):
    model = contender(name, gpt.GPT(gpt.Sizes(1, 32, 1, 8))).model
    kind = Float8Linear if name.endswith("output") else AblatedLinear
    linears = {fqn: m for fqn, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert type(linears.pop("head")) is nn.Linear
    assert linears and all(type(layer) is kind for layer in linears.values())
    if kind is AblatedLinear:
        assert all(layer.casts == casts_in(name) for layer in linears.values())
    else:
        is_cast = linears.popitem()[1].config.plan.output.a is not None
        assert is_cast == name.startswith("only")


def test_the_measures_of_a_probe_are_their_formulas():
    g0, g = ([torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0])],
             [torch.tensor([3.0, 4.5]), torch.tensor([0.0, 0.0])])  # fmt: skip
    found = probe.compared(list(zip(g0, [2.0, 2.0], strict=True)), zip(g, [2.0, 2.2], strict=True))
    assert found["error"] == pytest.approx(math.sqrt((0.25 / 25 + 1 / 1) / 2))
    assert found["mean_error"] == pytest.approx(0.5 / math.hypot(3, 5))
    assert found["loss_change"] == pytest.approx(5.0)


def test_a_probe_measures_each_set_of_casts_on_the_same_weights(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"a line of file {name}\n" * 50)
    sizes = {"layers": 1, "width": 32, "heads": 1, "context": 16, "batch": 4, "held_out": 64}
    run = probe.Probe(contender="bf16", seed=0, steps=4, learning_rate=1e-2, batches=2, **sizes)
    row = probe.probe(run, tmp_path)
    casts = row["casts"]
    assert set(casts) == {*ABLATIONS, "tensorwise", "float32"}
    assert row == probe.probe(run, tmp_path)
    for name in ("only grad_input", "only grad_output", "only input for grad_weight"):
        assert casts[name]["loss_change"] == 0 < casts[name]["error"] < 0.5
    assert casts["only output"]["loss_change"] == casts["tensorwise"]["loss_change"] != 0
    for name in ABLATIONS:
        assert 0 < casts[name]["error"] < 1.5 * casts["tensorwise"]["error"]
    assert casts["float32"]["error"] < casts["tensorwise"]["error"]
