"""`QuantizedOptimizer`: which states an optimizer keeps, in which form, and one step of all of it.

An optimizer names its states (`QuantizedOptimizer.moment_options`) and gives its update rule
(`QuantizedOptimizer.rule`); this file has the rest. ``state[p]`` holds

- ``step``: float32, on the CPU, or on the parameter's device where the group is ``capturable`` or
  ``fused``;
- one entry per moment: a `Moment`, or a plain float32 tensor where the parameter has fewer than
  ``min_size`` elements or the group says "float32";
- ``master``: a `Moment` of kind float16, for a parameter that is a `Float8Tensor`.

A DTensor's states are those of its local shard: a step touches nothing else, each group of
elements that share a scale then lives on one rank, and no collective is needed. In a state dict
they become DTensors again (``state_dicts.py``).

How a state is rounded. With beta2 = 0.999 a second moment changes by about 0.1 % in a step, but
E4M3 values are 6 to 12 % apart: nearest rounding hardly ever moves it. Where all elements of a
group fade alike their scale follows; an element that fades alone stays. Measured on 8192 elements
over 3000 steps, against float32 states:

=================================== ===================== ================ ==================
gradients                           rounding              second moment    parameters' error
=================================== ===================== ================ ==================
half of them fade by 0.2 % a step   nearest               11x (up to 100x) 79 %
half of them fade by 0.2 % a step   stochastic            0.89x (up to 8x) 14 %
they drop to 3 % half way           nearest               2.3x             29 %
they drop to 3 % half way           stochastic            0.93x            15 %
steady                              nearest               1.11x            14 %
steady                              stochastic            0.96x            15 %
=================================== ===================== ================ ==================

(Second moments: the geometric mean of their ratios to float32, in the first two rows of the
elements that fade; the arithmetic mean of the last row is 0.997.) So a state that forgets less than
`SLOW` in a step is rounded stochastically. A faster one is rounded to nearest, which has less noise
(30 dB against 27 for a first moment of beta1 = 0.9). The option ``state_rounding`` overrides both.
A second moment in float16 is precise enough to round to nearest (4 % on average, and an error of
5 %). A float16 master is not: updates below 2^-11 of a weight would be lost.

Random numbers are a hash of parameter, step and element: the same in every run, on replicas, and
for the rows of a shard as for the same rows in one process. No random number generator is read.

What a compiled step costs on a CPU: 0.32 and 0.55 of the eager step's time in two runs, and 0.26
and 0.23 with the second moment in float16; that is 4 to 7 and 1.2 to 1.7 times the time of torch's
foreach AdamW. Logarithms, powers and float8 conversions take it. (One thread of a busy Xeon, torch
2.13, 16.8 million parameters, ``python benchmarks/bench_optim.py --options float8
"float8 + float16" --repeats 5 --warmup 1``.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from float8.arguments import described
from float8.kernels.moments import StateMatrix
from float8.kernels.update_rules import UpdateRule
from float8.optim import options
from float8.optim.moment import Moment, matrix_of
from float8.optim.state_dicts import parameters_of, read_states, with_plain_entries
from float8.optim.step import (
    Work,
    advance,
    advance_fused,
    advance_together,
    buckets,
    cast_from_master,
    gradient_of,
    may_be_batched,
    new_master,
    takes_kernel,
)
from float8.tensor import Float8Tensor

# Half the largest distance between adjacent E4M3 values, relative to them. Rounding to nearest
# undoes a smaller change of an average.
SLOW = 2.0**-4


class QuantizedOptimizer(torch.optim.Optimizer):
    """Abstract: an optimizer whose states are kept in few bits. Final: AdamW, Adam, SGD, Lion.

    ``params`` are tensors, (name, tensor) pairs, or groups (dicts), as in torch.optim. ``given``
    has the options of `float8.optim.options.Options` that the user chose. ``hyperparameters`` are
    those of the update rule, lr and weight_decay among them.
    """

    # state's name -> the option of the group that says how it is kept
    moment_options: ClassVar[dict[str, str]]

    def __init__(self, params: ParamsT, given: Mapping[str, Any], **hyperparameters: Any) -> None:
        name = type(self).__name__
        if isinstance(params, nn.Module) or not isinstance(params, Iterable):
            way_out = "; give model.parameters()" if isinstance(params, nn.Module) else ""
            raise TypeError(
                f"{name}: params must be an iterable of tensors or of groups (dicts)"
                f", got {described(params)}{way_out}"
            )
        known = options.with_defaults(name, self.moment_options, given)
        super().__init__(params, {**hyperparameters, **known})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the step's kernel unscales and skips by itself; GradScaler reads it."""
        return bool(self.defaults["fused"])

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """The update rule with the group's numbers."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError or TypeError for a group's hyperparameters and options."""
        options.check_options(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a group that is refused leaves the optimizer as it was."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            for group in self.param_groups[before:]:
                self.check_group(group)
                for index, p in enumerate(group["params"]):
                    options.check_parameter(p, options.describe(index, p, group))
        except Exception:
            del self.param_groups[before:]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient.

        ``closure`` computes the loss and the gradients anew; what it returns is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        if torch.compiler.is_compiling():
            for group, traced in self._traced_works():
                self._run(group, traced)
            return loss
        for group, of_group in self._works(False):
            self._run(group, of_group)
        return loss

    @torch.compiler.disable
    def _check_gradients(self) -> None:
        """Refuse before anything is changed."""
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    options.check_gradient(p.grad, options.describe(index, p, group))

    @torch.compiler.disable
    def _traced_works(self) -> list[tuple[dict[str, Any], list[Work]]]:
        """`_works` for torch.compile, which does not trace this function.

        Subclasses, shards and dictionaries stay outside of the graph, which takes plain tensors
        alone and is the same in every step.
        """
        return [(group, list(works)) for group, works in self._works(True)]

    def _works(self, is_compiling: bool) -> Iterator[tuple[dict[str, Any], Iterator[Work]]]:
        """Every group and its works; made one by one, as they may hold copies."""
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
        fused, rule = group["fused"], self.rule(group)
        batches: dict[Any, list[Work]] = {}
        for work in works:
            if not fused and isinstance(work.step, float) and may_be_batched(work):
                key = (work.step, work.parameter.dtype, work.parameter.device)
                batches.setdefault(key, []).append(work)
            elif takes_kernel(fused, work, rule):
                advance_fused(work, rule, *self._amp())
            else:
                advance(work, rule)
        for alike in batches.values():
            for bucket in buckets(alike):
                advance_together(bucket, rule)

    def _amp(self) -> tuple[Tensor | None, Tensor | None]:
        """``grad_scale`` and ``found_inf``, which GradScaler sets on a fused optimizer."""
        return self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")

    def _work(self, p: Tensor, group: dict[str, Any], seed: int, is_compiling: bool) -> Work:
        assert p.grad is not None
        state = self._state_of(p, group)
        state["step"].add_(1)
        if group["fused"] and (found_inf := self._amp()[1]) is not None:
            state["step"].sub_(found_inf.reshape(()))  # a skipped step does not count
        in_memory = [local(state[name]) for name in self.moment_options]
        plain, scale, master = local(p), None, None
        rounds_target = group["stochastic_rounding"]
        if isinstance(p, Float8Tensor):
            plain, scale, master = p.float8_data, p.scale, state["master"].matrix()
            rounds_target = group["state_rounding"] != "nearest"
        return Work(
            parameter=matrix_of(plain.contiguous()),
            scale=scale,
            master=master,
            gradient=gradient_of(local(p.grad)),
            states=[
                m.matrix() if isinstance(m, Moment) else StateMatrix(matrix_of(m))
                for m in in_memory
            ],
            group=next((m.group for m in in_memory if isinstance(m, Moment)), group["group_size"]),
            seed=seed,
            at_random=[rounds_target, *self.stochastic_states(group)],
            step=state["step"] if is_compiling else _number(state["step"]),
            original=None if plain.is_contiguous() else plain,
            first=first_element(p),
        )

    def stochastic_states(self, group: dict[str, Any]) -> list[bool]:
        """Whether each of the moments is rounded stochastically, if it is in few bits."""
        if group["state_rounding"] != "auto":
            return [group["state_rounding"] == "stochastic"] * len(self.moment_options)
        decays = zip(self.moment_options.values(), self.rule(group).decays, strict=True)
        return [group[option] == "float8" and 1 - decay < SLOW for option, decay in decays]

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if "step" not in state:
            on_device = group["capturable"] or group["fused"]
            device = p.device if on_device else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for name, kind in self.kinds_of(p, group).items():
            if name not in state:
                state[name] = _new_moment(p, kind, group["group_size"])
            elif isinstance(state[name], dict):
                raise ValueError(
                    f"the {name} of a parameter of shape {tuple(p.shape)} is an entry of a state "
                    "dict, written into optimizer.state; load it with this optimizer's "
                    "load_state_dict (ZeroRedundancyOptimizer does not: shard with FSDP2 instead)"
                )
        if isinstance(p, Float8Tensor) and "master" not in state:
            state["master"] = new_master(p, group["group_size"])
        return state

    def kinds_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, str | None]:
        """State's name -> one of `float8.optim.moment.KINDS`, or None for float32."""
        is_small = p.numel() < group["min_size"]
        return {
            name: None if is_small else options.KINDS[option][group[option]]
            for name, option in self.moment_options.items()
        }

    @torch.no_grad()
    def start_master(self, p: Tensor, value: Tensor) -> None:
        """Give a float8 parameter's master its value, and cast the parameter from it.

        ``value`` is what p was cast from: float32, bfloat16 or float16, of p's shape. Raises
        TypeError if p has no master, and ValueError if p is none of the optimizer's or value has
        another shape.
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
        master = new_master(p, group["group_size"], value)
        self.state[p]["master"] = master
        cast_from_master(p, master)

    def state_dict(self) -> dict[str, Any]:
        """The states as plain tensors; see ``state_dicts.py`` for the entries."""
        # As the first hook, so that those of others see plain tensors too.
        hook = self.register_state_dict_post_hook(
            lambda _, packed: with_plain_entries(parameters_of(self), packed), prepend=True
        )
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class or of torch.optim, with any options of storage.

        The hyperparameters are those of the state dict; how states are kept is this optimizer's own
        choice, and states that were kept otherwise are quantised again. Raises ValueError for
        another number of parameters, states of another shape, or amsgrad.
        """
        states: dict[Tensor, dict[str, Any]] = {}

        def take(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            rest, read = read_states(given, self.param_groups, self.kinds_of, type(self).__name__)
            for group in rest["param_groups"]:
                self.check_group({**self.defaults, **group})
            states.update(read)
            return rest

        # The last hook before torch loads, and the first one after it.
        before = self.register_load_state_dict_pre_hook(take)
        after = self.register_load_state_dict_post_hook(
            lambda _: self.state.update(states), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; not an option of ours
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def _new_moment(p: Tensor, kind: str | None, group_size: int) -> Tensor:
    if kind is not None:
        return Moment.zeros(local(p).shape, kind, group_size, p.device)
    if isinstance(p, DTensor):
        return torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
    return torch.zeros(p.shape, dtype=torch.float32, device=p.device)


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
    """A Python number, unless reading it would synchronise a device."""
    if type(step) is not Tensor or step.device.type != "cpu":
        return step
    return step.item()
