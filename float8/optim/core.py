"""The core that every optimizer here shares: which states it keeps, in what, and one step.

An optimizer names its states (`QuantizedOptimizer.moment_options`) and gives its update rule
(`QuantizedOptimizer.rule`); everything else is here. ``state[p]`` holds

- ``step``: float32, on the CPU, or on the parameter's device where the group is ``capturable`` or
  ``fused``;
- one entry per moment: a `Moment`, or a plain float32 tensor where the parameter has fewer than
  ``min_size`` elements or the group says "float32";
- ``master``: a `Moment` of kind float16, for a parameter that is a `Float8Tensor`.

A DTensor's states are those of its local shard: a step touches nothing else, each group of
elements that share a scale then lives on one rank, and no collective is needed. In a state dict
they become DTensors again (``state_dicts.py``).

The options of storage (``first_moment``, ``second_moment``, ``group_size``, ``min_size``,
``stochastic_rounding``, ``state_rounding``) belong to the parameter group, as learning rates do.

How a state is rounded. A second moment with beta2 = 0.999 moves by some 0.1 % in a step, and E4M3
codes are 6 to 12 % apart: rounded to nearest it hardly ever moves. Where all elements of a group
fade alike the scale does it for them; where one fades alone it stays. Measured on 8192 elements
over 3000 steps against float32, half of them with gradients fading by 0.2 % a step: these ended 11
times too large on (geometric) average and up to 100 times, and the parameters' error was 79 %;
rounded up and down at random, 0.89 times on average, at most 8, and the error was 14 %. Gradients
that drop to 3 % half way: 2.3 times and 29 %, against 0.93 times and 15 %. Steady ones: 1.11 times
and 14 %, against 0.96 times (the arithmetic average is 0.997) and 15 %. So a state that forgets
less than `SLOW` in a step is rounded at random, and a faster one to nearest, which is less noisy
(30 dB against 27 for a first moment of beta1 = 0.9); ``state_rounding`` may say otherwise. A second
moment in float16 needs no chance (4 % on average, and an error of 5 %); a float16 master does, or
updates below 2^-11 of a weight would be lost. Random numbers are a hash of parameter, step and
element: the same in every run, on replicas, and for rows of another rank's shard as for those of
one process; nobody's generator is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from float8.arguments import described
from float8.kernels.optimizer_step import Rule
from float8.optim import checks, masters, state_dicts
from float8.optim.moment import Moment, matrix_of
from float8.optim.update import (
    Update,
    Work,
    advance,
    advance_fused,
    advance_together,
    buckets,
    gradient_of,
    may_be_batched,
    takes_kernel,
)
from float8.tensor import Float8Tensor

# Half the largest distance between neighbouring E4M3 codes, as a share of their value. An average
# that changes by less in a step stays where it is when it is rounded to nearest.
SLOW = 2.0**-4


class QuantizedOptimizer(torch.optim.Optimizer):
    """Abstract: an optimizer whose states are kept in few bits. Final: AdamW, Adam, SGD, Lion.

    Args:
        params: tensors, (name, tensor) pairs, or groups (dicts), as in torch.optim.
        defaults: the options of groups that do not set their own.
    """

    # state's name -> the option of the group that says how it is kept
    moment_options: ClassVar[dict[str, str]]

    # of float8/kernels/moments.py: (p, g, *moments, **rule) -> (p, *moments)
    update: Update

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        if isinstance(params, nn.Module) or not isinstance(params, Iterable):
            way_out = "; give model.parameters()" if isinstance(params, nn.Module) else ""
            raise TypeError(
                f"{type(self).__name__}: params must be an iterable of tensors or of groups (dicts)"
                f", got {described(params)}{way_out}"
            )
        super().__init__(params, defaults)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks: whether to leave unscaling and skipping to the step's kernel."""
        return bool(self.defaults["fused"])

    def rule(self, group: dict[str, Any], step: float | Tensor) -> Rule:
        """The numbers that the update takes in this step."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def decay(self, group: dict[str, Any], name: str) -> float:
        """What is left of a moment after a step: beta1, beta2 or the momentum."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError or TypeError for a group's hyperparameters."""
        checks.check_storage(group)
        checks.check_number("lr", group["lr"], 0.0)
        checks.check_number("weight_decay", group["weight_decay"], 0.0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a group that is refused leaves the optimizer as it was."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            for group in self.param_groups[before:]:
                self.check_group(group)
                for index, p in enumerate(group["params"]):
                    what = checks.describe(index, p, group.get("param_names"))
                    checks.check_parameter(p, what)
        except Exception:
            del self.param_groups[before:]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients anew.

        Returns:
            what the closure returns, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        gathered = self._gather() if torch.compiler.is_compiling() else self._works(False)
        for group, works in gathered:
            self._run(group, works)
        return loss

    @torch.compiler.disable
    def _check_gradients(self) -> None:
        """Refuse before anything is changed."""
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    what = checks.describe(index, p, group.get("param_names"))
                    checks.check_gradient(p.grad, what)

    @torch.compiler.disable
    def _gather(self) -> list[tuple[dict[str, Any], list[Work]]]:
        """What is to be done, for torch.compile, which does not see into this.

        Subclasses, shards and dictionaries stay outside of the graph, which takes tensors alone and
        is the same in every step.
        """
        return [(group, list(works)) for group, works in self._works(True)]

    def _works(self, is_compiling: bool) -> Iterator[tuple[dict[str, Any], Iterator[Work]]]:
        """Every group and what is to be done for it; made one by one, as they may hold copies."""
        for number, group in enumerate(self.param_groups):
            yield (
                group,
                (
                    self._work(p, group, (number << 20) + index, is_compiling)
                    for index, p in enumerate(group["params"])
                    if p.grad is not None
                ),
            )

    def _run(self, group: dict[str, Any], works: Iterable[Work]) -> None:
        fused = group["fused"]
        batches: dict[Any, list[Work]] = {}
        for work in works:
            if not fused and isinstance(work.step, float) and may_be_batched(work):
                key = (work.step, work.parameter.dtype, work.parameter.device)
                batches.setdefault(key, []).append(work)
            elif takes_kernel(fused, work):
                advance_fused(work, self.rule(group, work.step), *self._amp())
            else:
                advance(work, self._filled_in(group, work.step))
        for (step, *_), alike in batches.items():
            for bucket in buckets(alike):
                advance_together(bucket, self._filled_in(group, step))

    def _is_stochastic(self, group: dict[str, Any], name: str) -> bool:
        if group["state_rounding"] == "auto":
            in_float8 = group[self.moment_options[name]] == "float8"
            return in_float8 and 1 - self.decay(group, name) < SLOW
        return group["state_rounding"] == "stochastic"

    def _filled_in(self, group: dict[str, Any], step: float | Tensor) -> Update:
        return partial(self.update, **self.rule(group, step)._asdict())

    def _amp(self) -> tuple[Tensor | None, Tensor | None]:
        """What GradScaler leaves on a fused optimizer: ``grad_scale`` and ``found_inf``."""
        return self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")

    def _work(self, p: Tensor, group: dict[str, Any], seed: int, is_compiling: bool) -> Work:
        assert p.grad is not None
        state = self._state_of(p, group)
        state["step"].add_(1)
        if group["fused"] and (found_inf := self._amp()[1]) is not None:
            state["step"].sub_(found_inf.reshape(()))  # a step that writes nothing is none
        in_memory = [local(state[name]) for name in self.moment_options]
        plain, scale = p.data_and_scale if isinstance(p, Float8Tensor) else (local(p), None)
        return Work(
            matrix_of(plain.contiguous()),
            scale,
            state["master"].parts() if isinstance(p, Float8Tensor) else None,
            gradient_of(local(p.grad)),
            [m.parts() if isinstance(m, Moment) else matrix_of(m) for m in in_memory],
            next((m.group for m in in_memory if isinstance(m, Moment)), group["group_size"]),
            seed,
            group["stochastic_rounding"],
            group["state_rounding"] != "nearest",
            [self._is_stochastic(group, name) for name in self.moment_options],
            state["step"] if is_compiling else _number(state["step"]),
            None if plain.is_contiguous() else plain,
            first_element(p),
        )

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if "step" not in state:
            on_device = group["capturable"] or group["fused"]
            device = p.device if on_device else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for name in self.moment_options:
            if name not in state:
                state[name] = self._new_moment(p, group, name)
            elif isinstance(state[name], dict):
                raise ValueError(
                    f"the {name} of a parameter of shape {tuple(p.shape)} is an entry of a state "
                    "dict, which somebody wrote into optimizer.state; load it with this "
                    "optimizer's load_state_dict (ZeroRedundancyOptimizer does not: shard with "
                    "FSDP2 instead)"
                )
        if isinstance(p, Float8Tensor) and "master" not in state:
            state["master"] = masters.new_master(p, group["group_size"])
        return state

    def _new_moment(self, p: Tensor, group: dict[str, Any], name: str) -> Tensor:
        kind = self.kind_of(p, group, name)
        if kind is None:
            if isinstance(p, DTensor):
                return torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            return torch.zeros(p.shape, dtype=torch.float32, device=p.device)
        return Moment.zeros(local(p).shape, kind, group["group_size"], p.device)

    def kind_of(self, p: Tensor, group: dict[str, Any], name: str) -> str | None:
        """How a moment of p is kept: one of `float8.optim.moment.KINDS`, or None for float32."""
        if p.numel() < group["min_size"]:
            return None
        option = self.moment_options[name]
        known = checks.FIRST_MOMENTS if option == "first_moment" else checks.SECOND_MOMENTS
        return known[group[option]]

    @torch.no_grad()
    def start_master(self, p: Tensor, value: Tensor) -> None:
        """Give a float8 parameter's master its value, and the parameter what follows from it.

        Args:
            p: a `Float8Tensor` of this optimizer.
            value: float32, bfloat16 or float16, of p's shape: what p was cast from.

        Raises:
            TypeError: p has no master.
            ValueError: p is none of the optimizer's, or value has another shape.
        """
        if not isinstance(p, Float8Tensor):
            raise TypeError(f"only a Float8Tensor parameter has a master, not a {type(p).__name__}")
        group = next((g for g in self.param_groups if any(p is q for q in g["params"])), None)
        if group is None:
            raise ValueError(
                f"the parameter of shape {tuple(p.shape)} is not in this optimizer; add it with "
                "add_param_group first"
            )
        if value.shape != p.shape:
            raise ValueError(
                f"the master of a parameter of shape {tuple(p.shape)} cannot start from a value of "
                f"shape {tuple(value.shape)}"
            )
        master = masters.new_master(p, group["group_size"], value)
        self.state[p]["master"] = master
        masters.follow(p, master)

    def state_dict(self) -> dict[str, Any]:
        """The states as plain tensors; see ``state_dicts.py`` for the entries."""
        # As the first hook, so that those of others see plain tensors too.
        hook = self.register_state_dict_post_hook(
            lambda _, packed: state_dicts.quantized_state_dict(self, packed), prepend=True
        )
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, here or in torch.optim, of any storage options.

        The hyperparameters are those of the state dict; how states are kept is this optimizer's
        own choice, and what was kept otherwise is quantised anew.

        Raises:
            ValueError: another number of parameters, states of another shape, or amsgrad.
        """
        with state_dicts.Loading(self):
            super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # which torch adds here: no option of ours
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def local(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def first_element(p: Tensor) -> int:
    """The index, in the whole parameter, of this rank's first element.

    Known where one dimension of the mesh shards rows; otherwise 0, and shards draw alike.
    """
    if not isinstance(p, DTensor) or not p.dim():
        return 0
    shards = [i for i, placement in enumerate(p.placements) if not placement.is_replicate()]
    coordinate = p.device_mesh.get_coordinate()
    if len(shards) != 1 or not p.placements[shards[0]].is_shard(0) or coordinate is None:
        return 0
    rows = -(-p.shape[0] // p.device_mesh.size(shards[0]))  # as torch.chunk cuts
    return min(coordinate[shards[0]] * rows, p.shape[0]) * math.prod(p.shape[1:])


def _number(step: Tensor) -> float | Tensor:
    """A Python number, unless reading it would stall a stream."""
    if type(step) is not Tensor or step.device.type != "cpu":
        return step
    return step.item()
