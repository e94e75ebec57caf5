"""Static scales from data: what is collected, where it goes, and what it costs a classifier.

The classifier is a small BERT: bidirectional attention over tokens and places, post-norm blocks, a
pooler over the first token. Its task is made here. A sequence has a topic, and each token a value
under each topic; the label is whether the values sum to more than 0. Sums lie as near to 0 as they
please, so that a trained model errs in 3 % of sequences, and errors of its arithmetic would show.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from torch import Tensor, nn

from float8.config import CastConfig, Float8LinearConfig, ScalingType
from float8.convert.convert import convert_to_float8_training
from float8.convert.filters import skip_names
from float8.convert.inference import convert_to_float8_inference
from float8.linear.layer import Float8Linear
from float8.numerics.calibration import Calibration, calibrate

VOCABULARY, LENGTH = 32, 12


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2)
        x = self.attention_norm(x + self.proj(mixed.reshape(batch, length, width)))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Classifier(nn.Module):
    def __init__(self, width: int = 48, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids) + self.places.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(count, LENGTH) tokens: [CLS], a topic, words; and the labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (count, LENGTH), generator=generator)
    topic = torch.randint(2, (count,), generator=generator)
    ids[:, 0], ids[:, 1] = 0, 1 + topic
    values = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(99))
    values[:, :4] = 0
    return ids, (values[topic.unsqueeze(1), ids].sum(1) > 0).long()


def trained(steps: int = 250, batch: int = 128) -> Classifier:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    ids, labels = sequences(steps * batch, seed=1)
    for x, y in zip(ids.split(batch), labels.split(batch), strict=True):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
    ids, labels = held_out
    right = torch.cat([model(part).argmax(1) for part in ids.split(1024)]) == labels
    return float(right.double().mean())


@pytest.mark.slow
def test_a_classifier_quantised_after_training_keeps_its_accuracy():
    model, held_out = trained(), sequences(4096, seed=2)
    assert len(held_out[1]) * 0.005 > 20  # so many sequences is the bound
    plain = accuracy(model, held_out)
    assert 0.9 < plain < 0.99  # it has learned, and has cases that it is unsure of
    found = calibrate(model, sequences(512, seed=3)[0].split(128))

    def quantised(scales: dict[str, float]) -> float:
        copied = convert_to_float8_inference(copy.deepcopy(model), static_scales=scales)
        assert sum(isinstance(module, Float8Linear) for module in copied.modules()) == 10
        return accuracy(copied, held_out)

    for method in ("sqnr", "amax"):
        assert abs(quantised(found.static_scales(method)) - plain) <= 0.005, method
    wrong = {layer: scale / 2**6 for layer, scale in found.static_scales().items()}
    assert quantised(wrong) < plain - 0.05  # the planted fault: all but the smallest saturate


# --- what is collected, and where it goes


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8)
    )


def batches(count: int = 3) -> list[Tensor]:
    return list(torch.randn(count, 20, 16, generator=torch.Generator().manual_seed(5)).unbind())


RECIPES = [None, "tensorwise", "delayed", "unit", "rowwise"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_converted_model_gives_the_scales_of_the_plain_one(recipe):
    model = mlp()
    if recipe is not None:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    plain = mlp().eval()
    hidden = torch.cat([plain[:4](x) for x in batches()])
    scales = calibrate(model, batches()).static_scales("amax")
    # As the largest of the dynamic scales, of all batches together.
    expected = {"0": torch.cat(batches()), "4": hidden}
    for layer, x in expected.items():
        assert scales[layer] == pytest.approx(float(x.detach().abs().max()) / 448, rel=1e-6)
    assert scales.keys() == expected.keys()


def test_the_result_goes_into_the_conversion_with_the_same_filter():
    model, keep = mlp(), skip_names("4")
    found = calibrate(model, batches(), module_filter_fn=keep)
    scales = found.static_scales()
    convert_to_float8_inference(model, static_scales=scales, module_filter_fn=keep)
    assert list(scales) == ["0"] == model.float8_conversion.converted
    cast = model[0].config.cast_config_input
    assert cast.scaling_type is ScalingType.STATIC
    assert cast.static_scale == scales["0"]


def test_a_layer_whose_weight_is_tied_to_an_embedding_is_left_out_as_in_the_conversion():
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False))
    model[2].weight = model[0].weight
    scales = calibrate(model, [torch.randint(32, (4, 5))]).static_scales()
    assert list(scales) == ["1"]
    convert_to_float8_inference(model, static_scales=scales)


def test_the_model_itself_may_be_a_layer_and_a_shared_layer_sees_both_inputs():
    layer = nn.Linear(16, 16)
    x = torch.randn(4, 16)
    assert calibrate(layer, [x]).static_scales("amax") == {
        "": pytest.approx(float(x.abs().max()) / 448, rel=1e-6)
    }
    shared = nn.ModuleDict({"a": layer, "b": layer, "c": nn.ReLU()})
    shared.forward = lambda x: shared["b"](1000 * shared["a"](x))
    (scale,) = calibrate(shared, [x]).static_scales("amax").values()
    assert scale == pytest.approx(float((1000 * layer(x)).detach().abs().max()) / 448, rel=1e-5)


def test_autocast_rounds_before_it_is_counted():
    x = torch.full((4, 16), 1 + 2.0**-9)
    with torch.autocast("cpu", torch.bfloat16):
        found = calibrate(nn.Linear(16, 16), [x])
    assert found.inputs[""].amax == 1.0


def test_nothing_of_the_model_changes():
    model = convert_to_float8_training(mlp(), config=Float8LinearConfig.from_recipe_name("delayed"))
    model[1].eval()
    model(batches()[0]).sum().backward()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    grads = [p.grad for p in model.parameters()]
    random_state = torch.get_rng_state()
    calibrate(model, batches())
    with pytest.raises(RuntimeError):
        calibrate(model, [torch.ones(3, 5)])
    for name, value in model.state_dict().items():
        assert_bitwise(value, before[name], name)
    assert [m.training for m in model.modules()] == modes
    assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(m._forward_pre_hooks for m in model.modules())


class MergesInEval(nn.Linear):
    """As adapters do: eval() adds them to the weight, train() takes them out again."""

    def train(self, mode: bool = True) -> MergesInEval:
        if mode != self.training:
            self.weight.data += -0.1 if mode else 0.1
        return super().train(mode)


def test_a_train_method_of_its_own_is_not_called():
    model = nn.Sequential(nn.Linear(16, 16), MergesInEval(16, 16))
    before = model[1].weight.detach().clone()
    calibrate(model, batches())
    assert_bitwise(model[1].weight.detach(), before)
    assert model[1].training


def test_rows_say_what_each_scale_loses():
    found = calibrate(mlp(), batches(), steps_per_octave=4)
    rows = {row["layer"]: row for row in found.rows()}
    for layer, row in rows.items():
        assert row["scale"] == found.static_scales()[layer]
        assert row["sqnr"] >= row["amax_sqnr"] > 30
        assert row["saturated"] < 0.05
    assert rows["0"]["elements"] == 3 * 20 * 16
    text = str(found)
    assert text.startswith('static scales by "sqnr" of 2 layers')
    assert found.table(top=1).endswith("and 1 more")


def test_the_format_is_the_one_that_the_input_is_cast_to():
    wide, narrow = (CastConfig(target_dtype=d) for d in (torch.float8_e5m2, torch.float8_e4m3fn))
    wide = Float8LinearConfig(cast_config_input=wide, cast_config_grad_output=narrow)
    x = torch.randn(8, 16)
    (scale,) = calibrate(nn.Linear(16, 16), [x], config=wide).static_scales("amax").values()
    assert scale == pytest.approx(float(x.abs().max()) / 57344, rel=1e-6)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.zero = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.zero(0 * x.nan_to_num(0, 0, 0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_layers_without_a_scale_are_all_named(value):
    x = torch.randn(4, 16)
    x[0, 0] = value
    with pytest.raises(ValueError, match="module_filter_fn") as error:
        calibrate(Experts(), [x]).static_scales()
    text = str(error.value)
    assert "used: 1 elements of its input were not finite" in text
    assert "idle: no batch reached it" in text
    assert "zero: its input was all zero" in text


OFF = CastConfig(scaling_type=ScalingType.DISABLED)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"method": "mse"}, "method must be one of sqnr, amax, percentile"),
        ({"percentile": 0}, r"percentile must be in \(0, 100\]"),
        ({"percentile": 100.5}, r"percentile must be in \(0, 100\], got 100.5"),
        ({"steps_per_octave": 0}, "steps_per_octave must be an integer"),
        ({"batches": iter(())}, "batches was empty"),
        ({"module_filter_fn": lambda m, fqn: False}, "no linear layer to calibrate"),
        (
            {"config": Float8LinearConfig(OFF, OFF, OFF)},
            "its config casts no input",
        ),
    ],
)
def test_bad_input_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        calibrate(mlp(), **{"batches": batches(), **kwargs})


def test_the_hundredth_percentile_is_the_amax():
    model = mlp()
    found = calibrate(model, batches(), method="percentile", percentile=100)
    assert found.static_scales() == found.static_scales("amax")
    smallest = calibrate(model, batches(), method="percentile", percentile=1e-9)
    for layer, scale in smallest.static_scales().items():
        assert scale < found.static_scales()[layer]


def test_why_no_layer_is_left_is_said():
    model = nn.TransformerEncoderLayer(16, 2, 32)
    with pytest.raises(ValueError, match=r"linear1: in eval mode .*set_fastpath_enabled\(False\)"):
        calibrate(model, batches())


@pytest.mark.parametrize("batch", [torch.randn(4, 16), {"x": torch.randn(4, 16)}])
def test_one_batch_in_place_of_many_is_refused(batch):
    with pytest.raises(TypeError, match="iterable of batches, got one"):
        calibrate(mlp(), batch)


def test_an_unknown_method_is_refused_later_too():
    found = calibrate(mlp(), batches())
    assert isinstance(found, Calibration)
    with pytest.raises(ValueError, match="got 'best'"):
        found.static_scales("best")
