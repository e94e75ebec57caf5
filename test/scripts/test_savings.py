"""The name of a run says what it keeps in float8; combinations that do not work are refused."""

import pytest
import torch

from scripts.training import savings


@pytest.mark.parametrize(
    "run",
    [
        "bf16",
        "bf16+float8_adamw",
        "bf16+float8_adamw_v16",
        "tensorwise+saved_activations",
        "tensorwise+saved_activations+float8_adamw",
        "tensorwise+saved_activations+O3",
    ],
)
def test_a_name_is_read_as_it_is_written(run: str) -> None:
    defaults = {"optimizer": "adamw", "saved_activations": False, "ms_amp": None}
    options = {**defaults, **savings.parts_of(run)}
    assert savings.name_of(**options) == run
    savings.check(options["recipe"], options["optimizer"], options["ms_amp"], processes=1)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("bf16+float9", "bf16.float9: nothing is called 'float9'; .* adamw, float8_adamw, .* O3"),
        ("bf16+O1+O2", "bf16.O1.O2: O2 is a second ms-amp; name one"),
        ("bf16+adamw+float8_adamw", "float8_adamw is a second optimizer"),
    ],
)
def test_a_name_that_says_nothing_is_refused(run: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        savings.parts_of(run)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("unit", "float8_adamw", None, 1), "recipe unit has u-muP's AdamW"),
        (("unit_bf16", "adamw", "O1", 1), "recipe unit_bf16 has u-muP's AdamW"),
        (("tensorwise", "float8_adamw", "O2", 1), "leave out --optimizer"),
        (("bf16", "adamw", "O2", 1), "take --recipe tensorwise"),
        (("tensorwise", "adamw", "O2", 2), "leave out --nproc"),
    ],
)
def test_what_does_not_go_together_is_refused(given: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        savings.check(*given)


def test_optimizers_keep_what_their_names_say() -> None:
    from float8.optim import AdamW, Moment

    weight = torch.nn.Parameter(torch.randn(64, 128))
    weight.grad = torch.randn_like(weight)
    dtypes = {}
    for name in savings.OPTIMIZERS:
        optimizer = savings.adamw(name, [{"params": [weight]}], 1e-3, (0.9, 0.95))
        assert isinstance(optimizer, AdamW) is (name != "adamw")
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
        optimizer.step()
        state = optimizer.state[weight]
        moments = state["exp_avg"], state["exp_avg_sq"]
        dtypes[name] = [m.codes.dtype if isinstance(m, Moment) else m.dtype for m in moments]
    assert dtypes == {
        "adamw": [torch.float32] * 2,
        "float8_adamw": [torch.float8_e4m3fn] * 2,
        "float8_adamw_v16": [torch.float8_e4m3fn, torch.float16],
    }
