"""`float8_gradients` refuses what it could not serve."""

import pytest
from torch import nn

from float8.distributed.gradients import float8_gradients


def test_a_model_that_nobody_made_parallel_is_refused():
    with pytest.raises(TypeError, match=r"Linear reduces no gradients.*fully_shard"):
        float8_gradients(nn.Linear(4, 4))
