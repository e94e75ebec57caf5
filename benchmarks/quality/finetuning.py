"""Fine-tuning of a pretrained model on another text, of all weights or of adapters.

Pretraining in bf16 reads torch's Python sources. Fine-tuning starts from those weights and reads
the C++ headers that come with torch. Each run reports the held-out loss of both texts: what it
learned of the new one (``loss``), and what it forgot of the old one (``old_loss``). Runs of one
seed share the pretrained weights, the adapters' first weights and the batches.

With ``rank`` the pretrained weights are frozen and PEFT adds adapters to the blocks' linear layers
(LoRA, arXiv 2106.09685):

    y = base(x) + 2 B A x                   A (rank, K) normal, B (N, rank) zero at the start

The base of a float8 recipe is resident in float8 (`float8.convert_to_float8_inference`): its
high-precision weights are gone, and the GEMMs for the output and the input's gradient run in
float8. Adapters run in bf16. Those that were trained on a float8 base are evaluated once more on
the bf16 base (``moved_loss``), where a user may merge them.

Without adapters the weights that bf16 has trained are evaluated in float8 too (``converted``): is a
model whose training has seen the rounding any better at it than one whose training has not?
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.harness import Row
from benchmarks.quality import pretrained
from benchmarks.quality.contenders import BASE, NOISE, Contender, all_but_the_head, contender
from benchmarks.quality.run import Run, evaluate, fit, text_of
from float8 import Float8LinearConfig, convert_to_float8_inference, high_precision
from scripts.training import corpus, gpt

LAYERS = ["qkv", "proj", "gate_up", "down"]  # that get adapters: all but the head
CONVERTED = ("tensorwise", "rowwise", "blockwise", "mxfp8")  # delayed casts as tensorwise does
SCALE = 2  # what B A x is multiplied by


@dataclass(frozen=True, kw_only=True)
class Tuning(Run):
    """A fine-tuning: the fields of a training, and what it starts from.

    Args:
        start: the run that pretrains.
        rank: of adapters; 0 trains all weights.
    """

    start: Run
    rank: int = 0


def new_text() -> corpus.Corpus:
    """What fine-tuning reads: the C++ headers of the installed torch."""
    return corpus.load(Path(torch.__file__).parent / "include")


def tune(run: Tuning, folder: Path, data: Path | None = None, device: str = "cpu") -> Row:
    """Fine-tune and evaluate on both texts.

    Args:
        run: whose pretrained model is in the folder.
        folder: of `pretrained`.
        data: the old text.
        device: to train on.
    """
    old, new = text_of(data), new_text()
    on_old, on_new = ((run.context, text, run.held_out, device) for text in (old, new))
    model = pretrained.load(run.start, folder, old).to(device)
    before: Row = {}
    if run.contender == BASE:
        before["start_loss"] = evaluate(model, *on_new)
        before["start_old_loss"] = evaluate(model, *on_old)
    what = with_adapters(run, model) if run.rank else contender(run.contender, model)
    row = before | fit(what, run, new, device)
    if "error" not in row:
        row["old_loss"] = evaluate(what.model, *on_old)
        if run.contender == BASE and not run.rank:
            row["converted"] = {
                recipe: evaluate(in_float8(deepcopy(model), recipe), *on_new)
                for recipe in CONVERTED
            }
        if run.rank and run.contender not in (BASE, NOISE):
            plain = pretrained.load(run.start, folder, old).to(device)
            moved = on_base(plain, what.model, run.rank)
            row["moved_loss"] = evaluate(moved, *on_new)
    return row


def with_adapters(run: Tuning, model: gpt.GPT) -> Contender:
    """Adapters of a run's rank on a frozen base in its contender's arithmetic."""
    model.requires_grad_(False)
    if run.contender in (BASE, NOISE):
        contender(run.contender, model)  # rounds the weights, or nothing
    else:
        in_float8(model, run.contender)
    torch.manual_seed(run.seed)
    adapted = _adapted(model, run.rank)
    in_bf16 = None if run.contender in (BASE, NOISE) else lambda: high_precision(adapted)
    return Contender(adapted, in_bf16=in_bf16)


def in_float8(model: gpt.GPT, recipe: str) -> torch.nn.Module:
    """The model with the weights of its blocks' linear layers resident in float8."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_inference(model, config=config, module_filter_fn=all_but_the_head)


def on_base(plain: gpt.GPT, trained: torch.nn.Module, rank: int) -> torch.nn.Module:
    """Trained adapters on another base."""
    peft: Any = _peft()
    adapted = _adapted(plain, rank)
    peft.set_peft_model_state_dict(adapted, peft.get_peft_model_state_dict(trained))
    return adapted


def _adapted(model: gpt.GPT, rank: int) -> torch.nn.Module:
    peft: Any = _peft()
    config = peft.LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=LAYERS)
    adapted: torch.nn.Module = peft.inject_adapter_in_model(config, model)
    return adapted


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("adapters need peft: pip install peft") from error
    return peft
