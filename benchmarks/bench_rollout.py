"""Do the token probabilities of an engine agree with those of the trainer?

A small Llama learns bytes for some steps, and is rounded to bfloat16. Each recipe converts a copy
of it, which `save_pretrained` writes. Log-probabilities of the float8 layers, on held-out bytes,
are compared with those of three engines:

    Transformers   reads the file on a CPU: compressed-tensors casts inputs per token or 1x32, and
                   files in blocks of 128x128 are dequantised, their inputs stay in bfloat16
    load           `load(model, folder, "float8")`, whose inputs are cast as the layout says
    bfloat16       the model without float8

Differences are of the tokens that occur; KL is of the engine's distribution from the trainer's.
``token_mult_prob_error`` is the mean of exp(|difference|). For comparison the last row is bfloat16
beside float32.

    python benchmarks/bench_rollout.py -o rollout.json
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row
from benchmarks.models import text
from float8 import CastConfig, Float8LinearConfig, Rowwise, convert_to_float8_training, filters
from float8.checkpoints import load, save_pretrained

EXACT, BASE = "rowwise, float32 input scales", "bfloat16"
RECIPES = ("tensorwise", "rowwise", EXACT, "blockwise", "mxfp8", BASE)
SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
COLUMNS = report.columns(
    "layer engine logp_difference largest kl token_mult_prob_error", layer="recipe", kl="KL"
)


@cache
def model_and_text(steps: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    """A trained model in bfloat16, and held-out bytes with those after them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model, data = LlamaForCausalLM(LlamaConfig(**SIZES)), text.load()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(steps):
        tokens, _ = data.batch(step, seed=0, batch=16, context=128)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.bfloat16().eval(), next(data.held_out_batches(1, batch=16, context=128))


@torch.no_grad()
def difference(trainer: Any, engine: Any, tokens: Tensor, targets: Tensor) -> Row:
    """Of the log-probabilities of targets."""
    a, b = (m(tokens, use_cache=False).logits.float().log_softmax(-1) for m in (trainer, engine))
    by_token = (a - b).gather(-1, targets[..., None]).abs()
    return {
        "logp_difference": by_token.mean().item(),
        "largest": by_token.max().item(),
        "kl": (b.exp() * (b - a)).sum(-1).mean().item(),
        "token_mult_prob_error": by_token.exp().mean().item(),
    }


def measure(recipe: str, options: argparse.Namespace) -> list[Row]:
    """A row for each engine."""
    from transformers import AutoModelForCausalLM

    model, both = model_and_text(options.steps)
    if recipe == BASE:
        whole = copy.deepcopy(model).float()
        return [{"layer": recipe, "engine": "float32", **difference(model, whole, *both)}]
    config = Float8LinearConfig.from_recipe_name(recipe.partition(",")[0])
    if recipe == EXACT:
        config = replace(config, cast_config_input=CastConfig(granularity=Rowwise()))
    trainer = convert_to_float8_training(
        copy.deepcopy(model), config=config, module_filter_fn=filters.skip_names("lm_head")
    )
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(trainer, folder, overwrite=True)
        engines = {
            "Transformers": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
            "load": load(copy.deepcopy(model), folder, "float8"),
            BASE: model,
        }
    return [
        {"layer": recipe, "engine": name, **difference(trainer, engine, *both)}
        for name, engine in engines.items()
    ]


def main(argv: Sequence[str]) -> int:
    parser = harness.plain_parser(__doc__)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--steps", type=harness.positive, default=150, help="of the training")
    parser.set_defaults(device="cpu", stop_after=None)
    options = parser.parse_args(argv)
    measured = partial(measure, options=options)
    return report.run("bench_rollout", argv, options, options.recipes, measured, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
