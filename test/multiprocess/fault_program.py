"""A training of two processes, of which one is killed or stopped; see `test_interruptions.py`."""

from __future__ import annotations

import datetime
import os
import time

import one_process as one
from parallel_forms import FORMS
from processes import join_group


def dies_in_mid_step(rank, port, form, how, seconds, errors):
    """Train until rank 1 kills or stops itself, in the backward of its second step.

    Args:
        rank: of two.
        port: of the store of both processes.
        form: see `parallel_forms`.
        how: a signal. A killed process ends its connections; a stopped one keeps them.
        seconds: the timeout of collectives.
        errors: a queue for (rank, the error's text, the seconds until it was raised).
    """
    join_group(port, rank, 2, timeout=datetime.timedelta(seconds=seconds))
    model = one.make("delayed")
    layer, mine = model[2], FORMS[form]["wrap"](model)
    optimizer = one.adamw(mine)
    one.rank_step(mine, [one.batch(0, rank)])
    one.update(mine, optimizer)
    if rank == 1:
        layer.register_full_backward_hook(lambda *_: os.kill(os.getpid(), how))
    begin = time.monotonic()
    try:
        one.rank_step(mine, [one.batch(1, rank)])
        one.update(mine, optimizer)
    except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
        errors.put((rank, str(error), time.monotonic() - begin))
