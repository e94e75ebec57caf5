"""What does fast accumulation of gradients cost, in errors and in the loss of a training?

The sum of a tensor core is emulated (`quality/sums.py`). Two kinds of runs:

**Products.** grad_weight, of 32 x 32 elements, by the number of terms (tokens): errors in per cent
of the norm. ``cast`` is that of the operands in float8 (E5M2 and E4M3, a scale per tensor);
``precise`` and ``fast`` are those of the sum, against float64. ``slope`` says how much smaller than
the exact sums the fast ones are. ``few bits`` is the error of `FEW` bits in a sum of 1/32 of the
terms, the stand-in for the fast sum. Operands are random (gradients by Student's t with 3 degrees
of freedom), or those of one batch in bf16 after a training of some steps, the median of all layers.

**Trainings** of `bench_quality`'s model, with half of its width. ``tensorwise`` sums gradients in
float32, and ``tensorwise, n bits`` both gradients of all layers by an accumulator of n bits. With
1,024 tokens and 64 to 384 features, 8 bits stand for 13 bits with 32,768 tokens and 2,048 to 12,288
features, and 6 bits for four times as many. Intervals are Student's: there is no control, since the
errors of these contenders have no common variance.

    python benchmarks/bench_sums.py --jobs 2 -o sums.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks import bench_quality
from benchmarks.measuring.harness import Row
from benchmarks.models import text as texts
from benchmarks.quality import sums, training
from benchmarks.quality.contenders import BASE, all_but_the_head, contender
from benchmarks.quality.intervals import grouped
from benchmarks.quality.study import Study
from benchmarks.quality.training import GPTRun, Run, straight_to_zero, usual_rate
from float8.granularity import WHOLE
from float8.kernels.definition import cast_dynamic

FEW = sums.BITS - 5
SUMS, OURS = ", {} bits", "tensorwise"
CONTENDERS = (BASE, OURS, *(OURS + SUMS.format(bits) for bits in (sums.BITS, FEW, FEW - 2)))
OF_MODEL, SAMPLED, STUDENT = "gradients", 32, 3.0
MEANS = {"random, zero mean": (0.0, 0.0), "random, means of 0.4 and 0.5": (0.4, 0.5)}
POSITIVE = "random, positive"
COLUMNS = {
    "operands": ("operands", ""), "terms": ("terms", ",.0f"),
    **{key: (key.replace("_", " ") + " %", ".2f") for key in ("cast", "precise", "fast")},
    "few_bits": ("few bits %", ".2f"), "slope": ("slope %", "+.2f"), **bench_quality.COLUMNS,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Products(GPTRun):
    """Sums of products of some operands.

    Args:
        operands: what they are.
        steps: of a training before, of the model's.
        terms: of the longest sum.
    """

    operands: str
    terms: int
    steps: int = 0


def train(run: Run | Products, data: Path | None = None, device: str = "cpu") -> Row:
    """The errors of sums, or a training."""
    if isinstance(run, Products):
        return {"errors": list(errors(run, data))}
    name, _, bits = run.contender.partition(", ")
    run = replace(run, contender=name)
    with sums.fast_gradients(int(bits.split()[0])) if bits else nullcontext():
        return training.train(run, data, device)


def errors(run: Products, data: Path | None) -> Iterator[Row]:
    """A row for each layer and number of terms."""
    operands = of_model(run, data) if run.operands == OF_MODEL else [random(run)]
    for number, (g_MN, x_MK) in enumerate(operands):
        g8, g_scale = cast_dynamic(g_MN, (WHOLE, WHOLE), torch.float8_e5m2)
        x8, x_scale = cast_dynamic(x_MK, (WHOLE, WHOLE), torch.float8_e4m3fn)
        g, g8, x, x8 = (z.t()[:: max(1, z.shape[1] // SAMPLED)] for z in (g_MN, g8, x_MK, x8))
        for terms in sorted({min(terms, run.terms) for terms in (512, 4096, 16384, 28672, 131072)}):
            first = slice(0, terms)
            high = g[:, first].double() @ x[:, first].double().t()
            exact = g8[:, first].double() @ x8[:, first].double().t()
            fast = sums.product(g8[:, first], x8[:, first]).double()
            precise = sums.product(g8[:, first], x8[:, first], every=sums.PROMOTED)
            short = slice(0, max(1, terms // 2 ** (sums.BITS - FEW)))
            yield {
                "layer": number,
                "terms": terms,
                "cast": error(exact * (g_scale * x_scale).double(), high),
                "precise": error(precise, exact),
                "fast": error(fast, exact),
                "slope": 100 * (float((fast * exact).sum() / exact.square().sum()) - 1),
                "few_bits": error(
                    sums.product(g8[:, short], x8[:, short], FEW),
                    g8[:, short].double() @ x8[:, short].double().t(),
                ),
            }


def error(value: Tensor, exact: Tensor) -> float:
    """In per cent of the norm."""
    return 100 * float((value - exact).norm() / exact.norm())


def random(run: Products) -> tuple[Tensor, Tensor]:
    """grad_output and input: (terms, features)."""
    torch.manual_seed(run.seed)
    g = torch.distributions.StudentT(STUDENT).sample((run.terms, SAMPLED))
    x = torch.randn(run.terms, SAMPLED)
    if run.operands == POSITIVE:
        return g.abs(), x.abs()
    return g + MEANS[run.operands][0], x + MEANS[run.operands][1]


def of_model(run: Products, data: Path | None) -> Iterator[tuple[Tensor, Tensor]]:
    """grad_output and input of the layers, (tokens, features), in one batch after the training."""
    text, model = texts.load(data), run.new_model()
    what, rate = contender(BASE, model), usual_rate(BASE, run.width)
    batches = run.batches(text, range(run.steps))
    for _ in training.steps_of_contender(what, rate, straight_to_zero(run.steps), batches):
        pass
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        output.register_hook(lambda g: kept.append((g.detach(), inputs[0].detach())))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and all_but_the_head(module, name):
            module.register_forward_hook(keep)
    large = replace(run, batch=max(1, run.terms // run.context))
    (batch,) = large.batches(text, range(run.steps, run.steps + 1))
    training.in_autocast(model)(*batch).backward()
    while kept:
        g, x = kept.pop()
        yield g.flatten(0, -2).float(), x.flatten(0, -2).float()


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per operands and number of terms: the median of the layers."""
    found: list[Row] = []
    for row in rows:
        run = row["run"]
        said = f"{OF_MODEL} after {run['steps']} steps" if run["steps"] else run["operands"]
        for terms, own in grouped(row["errors"], lambda one: int(one["terms"])).items():
            keys = ("cast", "precise", "fast", "few_bits", "slope")
            medians = {key: statistics.median(one[key] for one in own) for key in keys}
            found.append({"operands": said, "terms": terms, **medians})
    return found


def summary(rows: Sequence[Row]) -> tuple[list[Row], Sequence[Row]]:
    """Lines of products, then those of trainings and their targets."""
    trained, targets = bench_quality.summary([row for row in rows if "errors" not in row])
    return [*lines([row for row in rows if "errors" in row]), *trained], targets


def runs_of(options: argparse.Namespace) -> list[Run | Products]:
    """The products, of one seed; then every contender for every seed."""
    sizes = STUDY.sizes(options)
    model = {key: sizes[key] for key in ("layers", "width", "context", "batch")}
    heads, seed = max(1, options.width // 64), options.seeds[0]
    shared = {"seed": seed, "heads": heads, "terms": sizes.pop("terms"), **model}
    steps = sorted({min(options.steps, 20), min(options.steps, 100), options.steps})
    products = [Products(operands=name, **shared) for name in (*MEANS, POSITIVE)]
    products += [Products(operands=OF_MODEL, steps=some, **shared) for some in steps]
    rate = usual_rate(BASE, options.width)
    return products + [
        Run(contender=name, seed=seed, heads=heads, learning_rate=rate, **sizes)
        for seed in options.seeds
        for name in options.contenders
    ]


NUMBERS = {
    **bench_quality.NUMBERS, "steps": (400, "of a run"), "width": (64, "of the model"),
    "terms": (2**17, "of a sum"),
}  # fmt: skip
STUDY = Study(
    "bench_sums", __doc__, COLUMNS, runs_of, train, summary, NUMBERS,
    {**bench_quality.QUICK, "terms": 64}, 5, {"contenders": CONTENDERS},
)  # fmt: skip
main = STUDY.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
