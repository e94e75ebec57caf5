"""Models that other trainings start from: one per `Run`, each in a file of a folder.

A file is named by the fields of its run, and holds the weights in float32 and the digest of the
text. A later call with the same folder makes only the models that it lacks. On one machine the same
run gives the same bits, so that the folder may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.quality.contenders import BASE, contender
from benchmarks.quality.run import Run, fit, text_of
from scripts.training import corpus, gpt


def file_of(run: Run, folder: Path) -> Path:
    """The file of a run's model; evaluation is no part of its name."""
    fields = {key: value for key, value in asdict(run).items() if key != "held_out"}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"seed{run.seed}-{digest}.pt"


def make(runs: Iterable[Run], folder: Path, data: Path | None, device: str, jobs: int) -> None:
    """Train the models that the folder lacks, in processes of one thread each."""
    todo = [run for run in dict.fromkeys(runs) if not file_of(run, folder).exists()]
    if not todo:
        return
    print(f"{len(todo)} models to pretrain", flush=True)
    save = partial(_save, folder=folder, data=data, device=device)
    with ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn")) as processes:
        for run, loss in zip(todo, processes.map(save, todo), strict=True):
            print(f"seed {run.seed}: {loss:.4f} after {run.steps} steps", flush=True)


def load(run: Run, folder: Path, text: corpus.Corpus) -> gpt.GPT:
    """The model of a run that `make` has made.

    Raises:
        ValueError: it was trained on another text.
    """
    saved = torch.load(file_of(run, folder), weights_only=True)
    if saved["text"] != text.digest:
        raise ValueError(
            f"{file_of(run, folder)} was trained on text {saved['text']}, and this machine's is "
            f"{text.digest}: give --pretrained another folder"
        )
    model = gpt.GPT(run.sizes)
    model.load_state_dict(saved["model"])
    return model


def _save(run: Run, folder: Path, data: Path | None, device: str) -> float:
    torch.set_num_threads(1)
    text = text_of(data)
    if run.contender != BASE:
        raise ValueError(f"models are pretrained in {BASE}, not in {run.contender}")
    what = contender(run.contender, run.new_model(device))
    row = fit(what, run, text, device)
    if "error" in row:
        raise RuntimeError(f"pretraining of seed {run.seed}: {row['error']}")
    save({"model": what.model.state_dict(), "text": text.digest}, file_of(run, folder))
    return float(row["loss"])


def save(state: object, path: Path) -> None:
    """Atomically: a killed process leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")  # several processes may write the same
    torch.save(state, part)
    part.replace(path)
