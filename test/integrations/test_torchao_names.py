"""Scripts for torchao or float8_experimental get errors with the names of float8."""

from dataclasses import fields

import pytest
import torch

import float8
from float8 import CastConfig, DelayedScalingConfig, Float8Linear, Float8LinearConfig, ScalingType
from float8.config import check_config
from float8.integrations.other_names import MSAMP_NAMES, NANOCHAT_NAMES
from float8.integrations.torchao import FIELDS, NAMES

FIELD_OF = {
    "scaling_granularity": CastConfig,
    "round_scales_to_power_of_2": Float8LinearConfig,
    "force_recompute_fp8_weight_in_bwd": Float8LinearConfig,
    "delayed_scaling_config": Float8LinearConfig,
    "scale_fn_name": DelayedScalingConfig,
    "enable_fsdp_fp8_all_gather": Float8LinearConfig,
}


def test_every_field_is_tried_below():
    assert set(FIELD_OF) == set(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_library_says_what_it_is_called_here(field):
    with pytest.raises(TypeError) as error:
        FIELD_OF[field](**{field: True})
    assert str(error.value) == f"{FIELD_OF[field].__name__} has no field {field!r}; {FIELDS[field]}"


def test_a_misspelt_field_suggests_the_nearest():
    with pytest.raises(TypeError, match="no field 'emulat'; did you mean 'emulate'"):
        Float8LinearConfig(emulat=True)
    with pytest.raises(TypeError, match=r"no field 'frobnicate'$"):
        Float8LinearConfig(frobnicate=True)


@pytest.mark.parametrize("module", [float8, float8.config])
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_says_what_to_write(name, module):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError) as error:
        getattr(module, name)
    with pytest.raises(ImportError) as imported:
        exec(f"from {module.__name__} import {name}")
    for text in (str(error.value), str(imported.value)):
        assert f"'{name}'" in text
        assert text.endswith(NAMES[name])


@pytest.mark.parametrize(
    ("library", "name", "hint"),
    [("MS-AMP", *item) for item in MSAMP_NAMES.items()]
    + [("nanochat", *item) for item in NANOCHAT_NAMES.items()],
)
def test_a_name_of_a_library_without_configs_says_what_to_write(library, name, hint):
    with pytest.raises(ImportError) as error:
        exec(f"from float8 import {name}")
    assert str(error.value).endswith(f"a script for {library} imports it: {hint}")


def test_an_unknown_name_is_an_ordinary_error():
    with pytest.raises(AttributeError, match=r"^module 'float8' has no attribute 'nonsense'$"):
        float8.nonsense  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from float8 import nonsense")


# --- against the real package


def test_every_public_name_of_torchao_is_here_or_is_explained():
    ao = pytest.importorskip("torchao.float8")
    missing = [n for n in ao.__all__ if n not in float8.__all__ and n not in NAMES]
    assert missing == []


def test_every_field_of_torchaos_configs_is_here_or_is_explained():
    pytest.importorskip("torchao.float8")
    from torchao.float8 import config as ao

    pairs = [
        (ao.Float8LinearConfig, Float8LinearConfig),
        (ao.CastConfig, CastConfig),
        (ao.Float8GemmConfig, float8.GemmConfig),
    ]
    for theirs, ours in pairs:
        known = {f.name for f in fields(ours)} | FIELDS.keys()
        assert {f.name for f in fields(theirs)} - known == set()


def test_torchaos_config_in_place_of_ours_names_the_translation():
    ao = pytest.importorskip("torchao.float8")
    config = ao.Float8LinearConfig.from_recipe_name("rowwise")
    words = r"got torchao's Float8LinearConfig; write Float8LinearConfig\.from_torchao\(config\)"
    for use in (
        lambda: Float8Linear(16, 16, config=config),
        lambda: Float8Linear.from_float(torch.nn.Linear(16, 16), config),
        lambda: float8.float8_linear(torch.ones(16, 16), torch.ones(16, 16), config=config),
        lambda: float8.convert_to_float8_training(torch.nn.Linear(16, 16), config=config),
        lambda: check_config(config),
    ):
        with pytest.raises(TypeError, match=words):
            use()


def test_torchaos_parts_of_a_config_are_told_from_ours():
    ao = pytest.importorskip("torchao.float8")
    with pytest.raises(TypeError, match=r"got ScalingType\.DYNAMIC; write scaling_type=Scal"):
        CastConfig(scaling_type=ao.ScalingType.DYNAMIC)
    with pytest.raises(TypeError, match=r"granularity=Rowwise\(\), of float8"):
        CastConfig(granularity=ao.ScalingGranularity.AXISWISE)
    with pytest.raises(TypeError, match=r"it is torchao's: import it from float8, or translate"):
        Float8LinearConfig(gemm_config_output=ao.Float8GemmConfig())
    with pytest.raises(TypeError, match="it is torchao's"):
        Float8LinearConfig(cast_config_input=ao.CastConfig())


def test_torchaos_recipe_enum_says_which_string_to_write():
    ao = pytest.importorskip("torchao.float8")
    with pytest.raises(TypeError, match=r'write from_recipe_name\("rowwise"\)'):
        Float8LinearConfig.from_recipe_name(ao.Float8LinearRecipeName.ROWWISE)
    with pytest.raises(TypeError, match=r'Float8LinearConfig\.from_recipe_name\("rowwise"\)'):
        Float8Linear(16, 16, config=ao.Float8LinearRecipeName.ROWWISE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("rowwise", r'got \'rowwise\'; write Float8LinearConfig\.from_recipe_name\("rowwise"\)'),
        ("rowwize", r"recipes are tensorwise, .*; did you mean 'rowwise'\?"),
        (CastConfig(), r"Float8LinearConfig\(cast_config_input=\.\.\.\)"),
        (Float8LinearConfig, "got the class Float8LinearConfig"),
        (ScalingType.DYNAMIC, r'from_recipe_name\("tensorwise"\)|from_recipe_name\(name\)'),
    ],
)
def test_what_is_no_config_says_how_to_make_one(config, words):
    with pytest.raises(TypeError, match=words):
        Float8Linear(16, 16, config=config)
