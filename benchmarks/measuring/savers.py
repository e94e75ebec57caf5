"""The runs of `bench_memory`: which parts of a LLaMA's training are in float8, and their setup.

A way is a run as `scripts/training/savings.py` parses it, recipe and savings joined by "+", or one
of the others here. In all of them embedding, norms and head and their gradients are bfloat16, and
so is all that a way does not keep in float8:

    bf16                  the baseline: weights and gradients bfloat16, AdamW's moments float32; no
                          master weights (8 + 2 + 2 bytes per parameter)
    bf16+fp32_master      float32 master weights in addition (16 bytes per parameter)
    bf16+bf16_adamw       torch.optim.AdamW as it comes: moments in the weights' dtype
    torchao ...           its 8-bit optimizers, where torchao is installed
    bitsandbytes ...      its blockwise 8-bit AdamW, where it is installed; on CUDA alone

The moments' updates count as one fused kernel in all runs: no temporary memory. With a level of
MS-AMP activations are float16, which is as large as bfloat16: its weights are float16, and autocast
does not support meta tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.models.llama import LanguageModel, Sizes
from float8 import Float8LinearConfig, convert_to_float8_training
from float8.activations import saved_activations
from float8.ms_amp.ms_amp import ms_amp
from float8.optim import AdamW
from scripts.training import savings

BASELINE = "bf16"
OURS = (
    "bf16+float8_adamw",
    "bf16+float8_adamw_v16",
    "tensorwise",
    "tensorwise+saved_activations",
    "tensorwise+O1",
    "tensorwise+O2",
    "tensorwise+O3",
    "tensorwise+saved_activations+O2",
    "tensorwise+saved_activations+float8_adamw",
)
MASTER, NARROW = "bf16+fp32_master", "bf16+bf16_adamw"
PEERS = {
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
    "torchao AdamWFp8": ("torchao.optim", "AdamWFp8"),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
}
WAYS = (BASELINE, MASTER, NARROW, *PEERS, *OURS)

Parameters = Iterable[Tensor]
float32_adamw = partial(AdamW, first_moment="float32", second_moment="float32")


class NotHere(Exception):
    """A way that does not run on this machine, with the reason."""


@dataclass(frozen=True)
class Held:
    """A model in training, one way.

    Args:
        model: tokens, next tokens -> loss.
        optimizer: of its parameters.
        forward: makes the context of each forward pass.
        updates: makes the context of each step of the optimizer.
    """

    model: nn.Module
    optimizer: Optimizer
    forward: Callable[[], AbstractContextManager[object]] = nullcontext
    updates: Callable[[], AbstractContextManager[object]] = nullcontext


def hold(way: str, sizes: Sizes, device: str) -> Held:
    """Set up a model on a device ("meta" to trace it) one way.

    Raises:
        NotHere: the way's library is not installed, or needs a GPU.
    """
    if way in PEERS:
        optimizer = _peer(way, device)
        model = language_model(sizes, device, torch.bfloat16)
        return Held(model, optimizer(model.parameters()), updates=partial(_quietly, way, device))
    if way == MASTER:
        model = language_model(sizes, device, torch.bfloat16)
        return Held(model, _WithMasters(model.parameters()))
    if way == NARROW:
        model = language_model(sizes, device, torch.bfloat16)
        fused = device != "meta"
        return Held(model, torch.optim.AdamW(model.parameters(), fused=fused, foreach=False))
    return _ours(sizes, device, **savings.parts_of(way))


def _ours(
    sizes: Sizes,
    device: str,
    recipe: str,
    optimizer: str = "adamw",
    saved_activations: bool = False,
    ms_amp: str | None = None,
) -> Held:
    model: nn.Module = language_model(sizes, device, torch.float16 if ms_amp else torch.bfloat16)
    if recipe != BASELINE:
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model, config=config, module_filter_fn=_all_but_the_head)
    second = savings.OPTIMIZERS[optimizer]
    make = float32_adamw if second is None else partial(AdamW, second_moment=second)
    held: Optimizer = make(model.parameters())
    if ms_amp is not None:
        model, held = _in_level(model, held, ms_amp)
    return Held(model, held, partial(_saving, model) if saved_activations else nullcontext)


def _in_level(model: nn.Module, optimizer: Any, level: str) -> tuple[nn.Module, Optimizer]:
    return ms_amp(model, optimizer, level, module_filter_fn=_all_but_the_head)


def _saving(model: nn.Module) -> AbstractContextManager[object]:
    return saved_activations(model)


def _all_but_the_head(_: nn.Module, fqn: str) -> bool:
    return fqn != "head"


def language_model(sizes: Sizes, device: str, dtype: torch.dtype) -> LanguageModel:
    """The model with random weights, never in another dtype on the way."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LanguageModel(sizes)
    finally:
        torch.set_default_dtype(before)


def batch_of(sizes: Sizes, device: str) -> tuple[Tensor, Tensor]:
    """Random tokens and the tokens after them."""
    tokens, targets = torch.randint(
        sizes.vocabulary, (2, sizes.batch, sizes.tokens), device=device
    ).unbind()
    return tokens, targets


class _WithMasters(AdamW):
    """float32 moments, and a float32 copy of every weight."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, first_moment="float32", second_moment="float32")

    def step(self, closure: Any = None) -> Any:
        """As ever; the masters' own arithmetic is left out, their memory is not."""
        for group in self.param_groups:
            for p in group["params"]:
                if "master" not in self.state[p]:
                    self.state[p]["master"] = p.detach().float()
        return super().step(closure)


def _peer(way: str, device: str) -> Callable[[Parameters], Optimizer]:
    module, name = PEERS[way]
    library = module.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        raise NotHere(f"{library} is not installed")
    if library == "bitsandbytes" and not device.startswith("cuda"):
        raise NotHere("its optimizers are CUDA kernels")
    made: Callable[[Parameters], Optimizer] = getattr(importlib.import_module(module), name)
    return made


@contextmanager
def _quietly(way: str, device: str) -> Iterator[None]:
    """torchao compiles its update, which needs no other memory, and meta tensors do not compile."""
    with ExitStack() as stack:
        if way.startswith("torchao") and device == "meta":
            nothing: Any = lambda *_, **__: lambda *_, **__: None  # noqa: E731
            stack.enter_context(mock.patch.object(torch, "compile", nothing))
        yield


def step(held: Held, batch: tuple[Tensor, Tensor]) -> None:
    """One training step, gradients freed after it."""
    with held.forward():
        loss = held.model(*batch)
    loss.backward()
    with held.updates():
        held.optimizer.step()
    held.optimizer.zero_grad()
