"""What `unit_scale` decided about the calls of one forward."""

from __future__ import annotations

from float8.unit_scaling.transforms.history import name_of
from float8.unit_scaling.transforms.transformed import Transformed
from float8.unit_scaling.transforms.unit_scale import UnitScale


def decisions_of(model, *args, **kwargs):
    """The `Decisions` for a forward of a unit-scaled model."""
    (transform,) = (t for t in model.transforms if isinstance(t, UnitScale))
    forward = super(Transformed, model).forward
    mode = transform.mode(model, args, kwargs)
    with mode:
        result = forward(*args, **kwargs)
    mode.finish(result)
    return mode.decisions


def steps_of(model, *args, **kwargs):
    """(name, whether it is unconstrained) of the calls that are replaced."""
    decisions = decisions_of(model, *args, **kwargs)
    return [
        (name_of(call.function), decisions.is_unconstrained(number))
        for number, call in enumerate(decisions.calls)
        if call.function in decisions.replacements
    ]
