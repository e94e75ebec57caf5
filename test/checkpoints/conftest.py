"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
