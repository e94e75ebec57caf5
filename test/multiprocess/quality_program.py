"""Runs for `test_study.py`, which started processes import by name."""

import math
import os
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    contender: str
    seed: int
    steps: int = 7


def train(run: Run) -> dict:
    if run.contender == "raises":
        raise RuntimeError("no such layer")
    if run.contender == "dies":
        os._exit(3)
    if run.contender == "sleeps":
        time.sleep(100)
    if run.contender == "nan":
        return {"loss": math.nan}
    return {"loss": 2.0 + run.seed, "process": os.getpid(), "threads": torch.get_num_threads()}
