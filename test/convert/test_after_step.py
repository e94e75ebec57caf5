"""`after_step` in one process; on two: `test_gathered_weights.py`."""

import copy

import one_process as one
import pytest

import float8


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "unit"])
def test_a_delayed_model_is_synced_and_others_are_left_alone(recipe, caplog):
    model = one.make(recipe)
    one.rank_step(model, [one.batch(0, 0)])
    expected = copy.deepcopy(model)
    float8.after_step(model)
    if recipe == "delayed":
        float8.sync_float8_amax_and_scale_history(expected)
        assert model[0].cast_input.history_ready
    one.assert_same_model(model, expected, recipe)
    assert not caplog.records
