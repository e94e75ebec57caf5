"""How the benchmarks measure time.

A machine's speed drifts during a measurement: clocks, temperature, other processes. If all of A is
timed and then all of B, the drift counts for one of them. So candidates take turns,
A B C A B C ..., and

    ratio(B) = median over rounds of  time(B, round) / time(A, round)

compares samples of one round: a slowdown of a whole round cancels, and one disturbed round does not
move the median. A sample is the mean of as many calls as fill
`TARGET_S`, so that the clock's resolution and a single launch's latency do not count.

On CUDA the calls lie between two events on the stream, which time the device and not the queueing;
on a CPU `perf_counter` does. `report.py` writes the results, raw samples included.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

C = TypeVar("C", bound=Callable[[], object])
Row = dict[str, Any]
Timer = Callable[[Callable[[], object], int], float]

TARGET_S = 0.02
LATE = "not measured, for lack of time"


def host_timer(now: Callable[[], float] = time.perf_counter) -> Timer:
    """Times by the host's clock: seconds that `calls` calls took together."""

    def seconds(fn: Callable[[], object], calls: int) -> float:
        start = now()
        for _ in range(calls):
            fn()
        return now() - start

    return seconds


def cuda_seconds(fn: Callable[[], object], calls: int) -> float:
    """Seconds of device time that `calls` calls took together."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def timer_for(device: str) -> Timer:
    return cuda_seconds if torch.device(device).type == "cuda" else host_timer()


START = time.monotonic()


def is_late(options: argparse.Namespace) -> bool:
    """Whether ``--stop-after`` seconds have passed since the program began."""
    return options.stop_after is not None and time.monotonic() - START > options.stop_after


def runnable(
    makers: Mapping[str, Callable[[], C]], late: Callable[[], bool] = lambda: False
) -> tuple[dict[str, C], dict[str, Row]]:
    """Make and try every candidate: those that run, and for the others why they do not.

    One candidate's failure is a row of the table, not the end of the run. The first is the
    baseline: its failure is raised. Making one compiles it, up to a minute: none is begun once it
    is late.
    """
    able: dict[str, C] = {}
    errors: dict[str, Row] = {}
    for name, make in makers.items():
        if able and late():
            errors[name] = {"error": LATE, "refused": True}
            continue
        try:
            candidate = make()
            candidate()
        except Exception as error:  # whatever a kernel, a compiler or a peer's library raises
            if not able:
                raise
            errors[name] = why(error)
        else:
            able[name] = candidate
    return able, errors


def why(error: Exception) -> Row:
    """The columns of a row that was not timed.

    float8 raises ValueError where a device cannot run a config: a refusal, not a failure.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return {"error": text, "refused": isinstance(error, ValueError)}


def interleave(
    candidates: Mapping[str, Callable[[], object]], timer: Timer, *, repeats: int, warmup: int
) -> dict[str, list[float]]:
    """Seconds per call of each candidate in each of `repeats` rounds of A B C.

    Warm-up rounds (at least one) are not kept; the last one sets the number of calls of a sample.
    """
    for _ in range(warmup):
        once = {name: timer(fn, 1) for name, fn in candidates.items()}
    calls = {name: max(1, math.ceil(TARGET_S / max(t, 1e-6))) for name, t in once.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, fn in candidates.items():
            samples[name].append(timer(fn, calls[name]) / calls[name])
    return samples


@dataclass(frozen=True)
class Rounds:
    """The results of candidates timed in turns: those that ran, the others' errors, the samples."""

    runs: Mapping[str, Callable[[], object]]
    errors: Mapping[str, Row]
    samples: Mapping[str, list[float]]

    def row(self, name: str, baseline: str) -> Row:
        """The time columns of a row, or the reason why there is none."""
        if name in self.errors:
            return self.errors[name]
        return timing(self.samples[name], self.samples[baseline])


def take_turns(
    makers: Mapping[str, Callable[[], Callable[[], object]]], options: argparse.Namespace
) -> Rounds:
    """Make all candidates, and time those that run in the same rounds; see `runnable`."""
    runs, errors = runnable(makers, lambda: is_late(options))
    timer = timer_for(options.device)
    samples = interleave(runs, timer, repeats=options.repeats, warmup=options.warmup)
    return Rounds(runs, errors, samples)


COPY, COPIED = "copy", 2**29  # bytes that are read and written


def copier(device: str) -> Callable[[], object]:
    """A copy of a buffer that is larger than caches."""
    source = torch.ones(COPIED // 2, dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def paired_ratio(samples: Sequence[float], baseline: Sequence[float]) -> float:
    """Median of the ratios of samples taken in the same round."""
    return median(s / b for s, b in zip(samples, baseline, strict=True))


def timing(samples: Sequence[float], baseline: Sequence[float]) -> Row:
    """The time columns of a row: median, spread, ratio, and the raw samples."""
    return {
        "ms": median(samples) * 1e3,
        "min_ms": min(samples) * 1e3,
        "max_ms": max(samples) * 1e3,
        "ratio": paired_ratio(samples, baseline),
        "samples_s": list(samples),
    }


def sqnr_db(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Signal to quantisation noise in dB."""
    signal, noise = reference.float(), reference.float() - other.float()
    ratio = signal.square().mean() / noise.square().mean().clamp_min(1e-30)
    return 10 * math.log10(max(ratio.item(), 1e-30))


def positive(text: str) -> int:
    """A count, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, not {text!r}")
    return int(text)


def device(name: str) -> str:
    """The name of an available device, for argparse."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an assertion where CUDA was not compiled in
        raise argparse.ArgumentTypeError(f"torch has no device {name!r} here: take cpu") from error
    return name


def plain_parser(description: str | None) -> argparse.ArgumentParser:
    """`--device` and `-o`."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options.add_argument("--device", type=device, default=default, help=f"default here: {default}")
    options.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON there")
    return options


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that all timed benchmarks share."""
    options = plain_parser(description)
    options.add_argument("--repeats", type=positive, default=20, help="rounds that are kept")
    options.add_argument("--warmup", type=positive, default=3, help="rounds that are not")
    options.add_argument("--seed", type=int, default=0, help="of the random operands")
    options.add_argument(
        "--stop-after", type=positive, metavar="SECONDS", help="begin nothing new after that"
    )
    options.set_defaults(**defaults)
    return options


def on_cpu(options: argparse.Namespace) -> bool:
    return torch.device(options.device).type == "cpu"
