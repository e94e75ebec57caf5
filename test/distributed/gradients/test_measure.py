"""The stated errors are those that the command measures."""

import torch

from float8.distributed.gradients import float8_gradients, measure
from float8.distributed.gradients.attach import float8_gradients as documented
from float8.formats import E4M3, E5M2


def test_the_docstring_states_what_is_measured():
    for ranks in (2, 8):
        row = measure.measure(ranks)
        other = measure.measure(ranks, fmt=E5M2)
        measured = (row.all_reduce, row.reduce_scatter, other.all_reduce, row.bfloat16)
        lines = [line.split() for line in (documented.__doc__ or "").splitlines()]
        stated = next(line for line in lines if line[:1] == [str(ranks)])[1:]
        for cell, value in zip(stated, measured, strict=True):
            assert abs(float(cell) - value) < 0.3, (ranks, stated, measured)
    assert float8_gradients is documented


def test_the_error_does_not_grow_with_the_number_of_ranks():
    few, many = measure.measure(2), measure.measure(64)
    assert many.all_reduce > few.all_reduce - 0.5
    assert many.bfloat16 < few.bfloat16 - 10


def test_pre_scaling_saves_a_mean_that_is_small_beside_its_parts():
    # Every element comes from one rank of 64, so the mean is 6 binades below the parts; magnitudes
    # spread over 16 binades, and E4M3 has 18.
    n = 4096
    values = torch.randn(n) * torch.exp2(-16 * torch.rand(n))
    owner = torch.randint(64, (n,))
    parts = [torch.where(owner == rank, values, 0.0) for rank in range(64)]
    plain, lifted = (measure.simulated(parts, E4M3, mu)[0] for mu in (1.0, 8.0))
    assert 2 * ((lifted == 0) & (values != 0)).sum() < ((plain == 0) & (values != 0)).sum()
