"""The loss of float8 without scales in the demo's GPT, before and after `unit_scale`.

    python scripts/operand_table.py
    python scripts/operand_table.py --batch 128 --context 128     # 16,384 tokens

Nothing is trained: one forward and one backward pass of the model as it is initialised, on a batch
of the demo's text, and for every operand of every linear product its standard deviation and the
fractions of it that a cast with scale 1 flushes to zero or saturates (E4M3; gradients E5M2). The
loss is a mean over all tokens of the batch: the larger the batch, the more of the plain model's
gradients vanish. Unit scaling takes that factor out.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from float8.unit_scaling.analysis.operands import (
    Operand,
    format_operands,
    median_flushed,
    operand_table,
)
from float8.unit_scaling.transforms import unit_scale
from scripts.training import corpus, gpt
from scripts.training.environment import check_writable, environment, write_json
from scripts.training.options import Options, options_from, parser


def model_and_batch(options: Options) -> tuple[gpt.GPT, Tensor, Tensor]:
    """The demo's GPT as it is initialised, and the tokens and targets of its first batch."""
    sizes = gpt.Sizes(options.layers, options.width, options.heads, options.context)
    torch.manual_seed(options.seed)
    model = gpt.GPT(sizes).to(options.device)
    text = corpus.load(options.data)
    text.check(options.context)
    batch = text.batch(0, seed=options.seed, batch=options.batch, context=options.context)
    tokens, targets = (x.to(options.device) for x in batch)
    return model, tokens, targets


def tables(options: Options) -> dict[str, list[Operand]]:
    """Name of the model -> the operands of its products."""
    model, tokens, targets = model_and_batch(options)
    return {
        "as it is": operand_table(model, tokens, targets),
        "unit-scaled": operand_table(unit_scale(model), tokens, targets),
    }


def main(argv: list[str] | None = None) -> int:
    p = parser((__doc__ or "").partition("\n")[0])
    p.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    args = p.parse_args(argv)
    try:
        options = options_from(args)
        if args.out:
            check_writable(args.out, "--out")
        found = tables(options)
    except (ValueError, OSError) as error:
        sys.exit(f"operand_table.py: {error}")
    for name, rows in found.items():
        tokens = options.batch * options.context
        print(f"The GPT {name}, loss over {tokens:,} tokens\n\n{format_operands(rows)}\n")
    if args.out:
        report = {
            name: {"median_flushed": median_flushed(rows), "operands": [asdict(r) for r in rows]}
            for name, rows in found.items()
        }
        about = {**environment(options.seed, options.device), "options": options.record()}
        write_json(args.out, {**about, "models": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
