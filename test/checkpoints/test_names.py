"""The table of published names against the files that Transformers' save_pretrained writes."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from assertions import assert_bitwise
from published_models import MODELS, convert, model_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    PermuteForRope,
    Transpose,
)
from transformers.core_model_loading import WeightConverter as Converter

from float8.checkpoints import save_pretrained
from float8.checkpoints.names import published


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What Transformers writes of each plain model."""
    tensors = {}
    for name in MODELS:
        folder = tmp_path_factory.mktemp(name)
        model_of(name).save_pretrained(folder)
        tensors[name] = load_file(folder / "model.safetensors")
    return tensors


def tensors_of(model):
    """Parameters and buffers by their names, shared ones under every name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def assert_same_tensors(model, expected):
    own, slots = tensors_of(model), published(model)
    assert slots.keys() == expected.keys()
    for key, slot in slots.items():
        part = slot.of(own[slot.parameter]).detach()
        assert part.shape == slot.shape
        assert_bitwise(part, expected[key], replay=key)


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_bytes_are_those_of_save_pretrained(name, written):
    assert_same_tensors(model_of(name), written[name])


def test_wrappers_add_nothing_to_keys(written):
    whole = torch.compile(convert(model_of("mixtral")))
    parts = convert(model_of("mixtral"))
    parts.model.layers[1] = torch.compile(parts.model.layers[1])
    parts.model.layers[0].mlp.compile()
    for model in (whole, parts):
        assert_same_tensors(model, written["mixtral"])
    slots = published(parts)
    moved = slots["model.layers.1.self_attn.q_proj.weight"]
    assert moved.parameter == "model.layers.1._orig_mod.self_attn.q_proj.weight"


def test_a_model_inside_another_module_keeps_its_prefix(written):
    outer = torch.nn.ModuleDict({"policy": model_of("mixtral"), "value": torch.nn.Linear(4, 1)})
    expected = {f"policy.{key}": x for key, x in written["mixtral"].items()}
    assert_same_tensors(
        outer, expected | {f"value.{k}": x for k, x in outer.value.state_dict().items()}
    )


def test_models_that_were_loaded_have_the_keys_of_their_files(tmp_path, written):
    """Transformers then knows by which rules it has renamed the keys."""
    model_of("deepseek_v3").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded._weight_conversions
    assert_same_tensors(loaded, written["deepseek_v3"])


@pytest.mark.filterwarnings("ignore:Using FP8 quantized models requires a GPU")
@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3"])
def test_models_that_transformers_dequantised_have_the_plain_keys(name, tmp_path, written):
    """It keeps the rules by which it has loaded them, whose inverse would cast again."""
    save_pretrained(convert(model_of(name), "blockwise"), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    rules = getattr(loaded, "_weight_conversions", None)  # Transformers 5.24 drops them
    assert published(loaded).keys() == written[name].keys()
    assert getattr(loaded, "_weight_conversions", None) is rules


class FirstRows(ConversionOps):
    """A part of a parameter, whose rest no file would have."""

    def convert(self, input_dict, target_patterns, **kwargs):
        return {target_patterns[0]: next(iter(input_dict.values()))[0][:16]}

    @property
    def reverse_op(self):
        return self


def with_conversion(*converters, **sizes):
    model = model_of("llama", **sizes)
    model._weight_conversions = list(converters)
    return model


def test_transposed_and_strided_parts_are_parts(tmp_path):
    model = with_conversion(
        Converter("mlp.up_proj.w", "mlp.up_proj.weight", [Transpose(0, 1)]),
        Converter(
            ["k_half", "k_rest"], "self_attn.k_proj.weight", [Concatenate(0), Transpose(0, 1)]
        ),
    )
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert expected["model.layers.0.mlp.up_proj.w"].shape == (32, 48)
    assert_same_tensors(model, expected)


def test_a_dimension_of_size_1_is_told_from_the_others(tmp_path):
    """Strides of the one are those of its neighbour in memory, but not in the run."""
    columns = Converter("mlp.down_proj.w", "mlp.down_proj.weight", [Transpose(0, 1)])
    model = with_conversion(columns, intermediate_size=1)
    model.save_pretrained(tmp_path)
    assert_same_tensors(model, load_file(tmp_path / "model.safetensors"))


def test_a_parameter_of_which_a_part_would_be_lost_is_refused():
    converter = Converter("wq", "self_attn.q_proj", [FirstRows()])
    with pytest.raises(ValueError, match=r"q_proj\.weight: in the files .* lack a part"):
        published(with_conversion(converter))


@pytest.mark.parametrize(
    ("converter", "key"),
    [
        (Converter("wq", "self_attn.q_proj", [PermuteForRope()]), "wq.weight"),
        (Converter("wq", "self_attn.q_proj", [Interleave()]), "wq.weight"),
        (
            Converter("qkv", [f"self_attn.{x}_proj" for x in "qo"], [Chunk()]),
            "qkv.weight",
        ),
    ],
)
def test_what_is_no_part_of_a_parameter_is_refused_by_name(converter, key):
    with pytest.raises(ValueError, match=r"no part of one|has to be a part") as error:
        published(with_conversion(converter))
    assert key in str(error.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what peft asks Transformers for
def test_adapters_are_refused():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model_of("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        published(adapted)
