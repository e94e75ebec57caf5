"""The amax of a weight is remembered until the weight is written to."""

import torch

from float8.distributed.known_amax import KnownAmax


def test_it_holds_until_it_is_forgotten():
    known = KnownAmax(is_zero=True)
    assert known.current is None
    assert known.is_zero
    known.remember(torch.ones(1, 1), torch.zeros(3))
    assert known.current.item() == 1
    known.forget()
    assert known.current is None
    assert not known.is_zero


def test_it_holds_until_the_version_changes():
    known, source = KnownAmax(), torch.zeros(3)
    known.remember(torch.ones(1, 1), source)
    source.detach().add_(1)  # an alias counts with it
    assert known.current is None


def test_inference_tensors_have_no_version():
    known = KnownAmax()
    with torch.inference_mode():
        known.remember(torch.ones(1, 1), torch.zeros(3))
        assert known.current.item() == 1


def test_the_amax_of_a_shard_ends_where_the_whole_is_known_anew():
    known, source = KnownAmax(), torch.zeros(3)
    known.remember_shard(torch.ones(1, 1), source, source._version)
    assert known.shard_of(source).item() == 1
    source.add_(1)  # seen by the version alone
    assert known.shard_of(source) is None
    known.remember(torch.full((1, 1), 2.0), source, source._version)  # by the next gather
    assert known.of(source).item() == 2
    assert known.shard_of(source) is None
