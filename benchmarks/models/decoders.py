"""One small decoder in three parametrisations, to compare how their learning rates transfer.

The architecture is one: byte embedding, pre-norm layers of rotary causal attention and SwiGLU of
four times the width, a norm, a readout; heads have `HEAD` features at every width. Three ways to
scale and to train it:

    standard   `scripts/training/gpt.py`: weights from N(0, 0.02), residual branches added
               without factors, logits / sqrt(d), AdamW with one learning rate for all
    u-mup      `uu.TransformerDecoder` and `uu.optim.AdamW` (arXiv 2407.17465, tables 2 and 3)
    mus        the same with norms at the ends of branches and square-root softmax attention, as
               muS has them (arXiv 2502.05967); learning rates and residual weights stay u-muP's

In theory Adam's best learning rate falls like 1 / width in the first (arXiv 2203.03466, section 3)
and stays where it is in the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import float8.unit_scaling as uu
from benchmarks.models.training import Loss
from float8 import Float8LinearConfig, convert_to_float8_training
from float8.unit_scaling import functional as U
from scripts.training import gpt

HEAD = 32  # features of a head
FORMATS = ("float32", "float8")
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Parametrisation:
    """A model's loss and optimizer, where to look for its learning rate, and its recipe."""

    model: Callable[[int, int, int], nn.Module]  # width, layers, context
    loss: Callable[[nn.Module], Loss]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    octaves: range  # powers of two
    recipe: str  # of float8
    layers: Callable[[nn.Module], Iterable[nn.Module]]  # the residual layers, in order

    def in_format(self, model: nn.Module, fmt: str) -> nn.Module:
        """The model; in ``float8``, the linear layers of its residual layers in `recipe`."""
        if fmt == "float32":
            return model
        config = Float8LinearConfig.from_recipe_name(self.recipe)
        return convert_to_float8_training(model, config=config, module_filter_fn=_all_but_the_head)


def _all_but_the_head(_: nn.Module, fqn: str) -> bool:
    return fqn not in ("head", "projection")


def check_widths(parser: argparse.ArgumentParser, option: str, widths: Iterable[int]) -> None:
    """Refuse widths that heads of `HEAD` features do not divide."""
    if wrong := [width for width in widths if width % HEAD]:
        parser.error(f"{option} must be a multiple of {HEAD}, the size of a head: {wrong}")


class Sizes(gpt.Sizes):
    """The sizes of `gpt.py` with the feed-forward width of `uu.MLP`: both have equal shapes."""

    @property
    def hidden(self) -> int:
        return 4 * self.width


def standard_model(width: int, layers: int, context: int) -> nn.Module:
    return gpt.GPT(Sizes(layers, width, width // HEAD, context))


def unit_model(
    width: int, layers: int, context: int, norm: str = "pre", attention: str = "softmax"
) -> nn.Module:
    return uu.TransformerDecoder(
        width,
        gpt.VOCABULARY,
        layers,
        width // HEAD,
        rotary_base=10_000.0,  # as scripts/training/gpt.py
        norm=norm,  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
    )


def unit_loss(model: nn.Module) -> Loss:
    def loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return U.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())

    return loss


def standard_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr, BETAS, weight_decay=0.0)


def unit_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return uu.optim.AdamW(model.parameters(), lr, BETAS)


def standard_layers(model: nn.Module) -> Iterable[nn.Module]:
    return model.get_submodule("blocks").children()


def unit_layers(model: nn.Module) -> Iterable[nn.Module]:
    return model.get_submodule("layers").children()


UNIT_OCTAVES = range(-3, 3)
PARAMETRISATIONS = {
    "standard": Parametrisation(
        standard_model,
        lambda model: model,
        standard_optimizer,
        range(-11, -5),
        "tensorwise",
        standard_layers,
    ),
    "u-mup": Parametrisation(
        unit_model, unit_loss, unit_optimizer, UNIT_OCTAVES, "unit", unit_layers
    ),
    "mus": Parametrisation(
        partial(unit_model, norm="res-post", attention="sqrt_softmax"),
        unit_loss,
        unit_optimizer,
        UNIT_OCTAVES,
        "unit",
        unit_layers,
    ),
}
