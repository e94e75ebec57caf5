"""A call taken apart and put together again is the call."""

from __future__ import annotations

import torch

from float8.unit_scaling.transforms.inputs import filled, kind_of, skeleton_of
from float8.unit_scaling.transforms.recording import tensors_in

X, Y, Z = torch.randn(3, 2)


def rebuilt(arguments):
    return filled(skeleton_of(arguments), iter([t for _, t in tensors_in(arguments)]))


def test_nested_arguments_come_back_with_their_tensors_in_place():
    arguments = ((X, [Y, 3, None], "a"), {"mask": Z, "flags": {"causal": True}, "empty": ()})
    again = rebuilt(arguments)
    assert again[0][0] is X and again[0][1][0] is Y and again[1]["mask"] is Z
    assert again[0][1][1:] == [3, None] and again[0][2] == "a"
    assert again[1]["flags"] == {"causal": True} and again[1]["empty"] == ()


def test_lists_and_tuples_stay_what_they_are():
    assert rebuilt(([1, (2, [])],)) == ([1, (2, [])],)


def test_skeletons_tell_kinds_of_calls_apart_but_not_sizes():
    assert skeleton_of((X, 1)) == skeleton_of((torch.zeros(5, 5), 1))
    assert skeleton_of((X, 1)) != skeleton_of((X, 2))
    assert skeleton_of((X, None)) != skeleton_of((X, Y))
    assert skeleton_of([X]) != skeleton_of((X,))


def test_an_object_of_the_users_is_handed_through():
    thing = object()
    assert rebuilt(((thing,), {}))[0][0] is thing


def test_a_kind_tells_constants_apart_by_value_and_objects_by_type_alone():
    def kind(arguments):
        return kind_of(skeleton_of(arguments))

    assert kind((X, {"a": [1, "b", torch.float32]})) == kind((Y, {"a": [1, "b", torch.float32]}))
    assert len({kind((X, c)) for c in (1, 2, 1.0, True, None, "1", torch.half, Y)}) == 8
    assert kind((object(),)) == kind((object(),)) != kind((Exception(),))
