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
E4M3 values are 6 to 12 % apart: nearest rounding hardly ever moves it. So a state that forgets less
than `SLOW` in a step is rounded stochastically. A faster one is rounded to nearest, which has less
noise. The option ``state_rounding`` overrides both. A second moment in float16 is precise enough to
round to nearest. A float16 master is not: updates below 2^-11 of a weight would be lost.

Random numbers are a hash of parameter, step and element: the same in every run, on replicas, and
for the rows of a shard as for the same rows in one process. No random number generator is read. A
parameter is known by its name, where the optimizer was given one, or by its place in the optimizer:
optimizers of one unnamed parameter each draw alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, ClassVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from float8.kernels.moments import StateMatrix, matrix_of
from float8.kernels.optimizer_step import OptimizerStep, WeightOfMaster, advance, cast_master
from float8.kernels.update_rules import UpdateRule
from float8.optim.moment import Moment
from float8.optim.options import KINDS, Options, check_dtype, check_group, check_parameter, describe
from float8.optim.state_dicts import new_master, parameters_of, read_states, with_plain_entries
from float8.tensor import Float8Tensor

# Half the largest distance between adjacent E4M3 values, relative to them. Rounding to nearest
# undoes a smaller change of an average.
SLOW = 2.0**-4


class QuantizedOptimizer(torch.optim.Optimizer):
    """Abstract: an optimizer whose states are kept in few bits.

    Final: AdamW, Adam, SGD, Lion, Muon.

    ``params`` are tensors, (name, tensor) pairs, or groups (dicts), as in torch.optim.
    ``hyperparameters`` are those of the update rule, lr and weight_decay among them. ``given`` has
    the options of `float8.optim.options.Options` that the user chose.
    """

    # state's name -> the option of the group that says how it is kept
    moment_options: ClassVar[dict[str, str]]

    def __init__(
        self, params: ParamsT, hyperparameters: Mapping[str, Any], given: Mapping[str, Any]
    ) -> None:
        defaults = asdict(Options())
        for name in KINDS.keys() - self.moment_options.values():
            del defaults[name]
        if unknown := given.keys() - defaults.keys():
            raise TypeError(f"{type(self).__name__} has no options {', '.join(sorted(unknown))}")
        super().__init__(params, {**hyperparameters, **defaults, **given})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the step's kernel unscales and skips by itself; GradScaler reads it."""
        return bool(self.defaults["fused"])

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """The update rule with the group's numbers."""
        raise NotImplementedError

    def moments_of(self, group: Mapping[str, Any]) -> dict[str, str]:
        """`moment_options` of the parameters of this group."""
        return self.moment_options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, after checks."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group(group)
        for index, p in enumerate(group["params"]):
            check_parameter(p, describe(index, p, group))

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
        self._step_all()
        return loss

    def _step_all(self) -> None:
        in_graph = torch.compiler.is_compiling()
        for work in self._traced() if in_graph else self._steps(False):
            self._advance(work)

    def _advance(self, work: Work) -> None:
        fused, step, weight, original = work
        advance(step, fused, weight, *self._amp())
        if original is not None:
            written = step.p.codes if weight is None else weight.data
            original.copy_(written.view(original.shape))

    def _amp(self) -> tuple[Tensor | None, Tensor | None]:
        """``grad_scale`` and ``found_inf``, which GradScaler sets on a fused optimizer."""
        return self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")

    @torch.compiler.disable
    def _check_gradients(self) -> None:
        """Refuse before anything is changed."""
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    check_dtype(p.grad, f"the gradient of {describe(index, p, group)}")

    @torch.compiler.disable
    def _traced(self) -> list[Work]:
        """`_steps` for torch.compile, which does not trace this function.

        Subclasses, shards and dictionaries stay outside of the graph, which takes plain tensors
        alone and is the same in every step.
        """
        return list(self._steps(True))

    def _steps(self, in_graph: bool) -> Iterator[Work]:
        """The work of every parameter; made one by one, as they may hold copies."""
        for p, group, seed in self._with_gradient():
            yield self._work(p, group, seed, in_graph)

    def _with_gradient(self) -> Iterator[tuple[Tensor, dict[str, Any], int]]:
        """Every parameter that has a gradient, its group, and the seed of its random numbers."""
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for index, p in enumerate(group["params"]):
                if p.grad is not None:  # seeds have 28 bits
                    own = crc32(names[index].encode()) >> 4 if names else (number << 20) + index
                    yield p, group, own

    def _work(self, p: Tensor, group: dict[str, Any], seed: int, in_graph: bool) -> Work:
        assert p.grad is not None
        state = self._state_of(p, group)
        state["step"].add_(1)
        if group["fused"] and (found_inf := self._amp()[1]) is not None:
            state["step"].sub_(found_inf.reshape(()))  # a skipped step does not count
        number = state["step"]
        if not in_graph and type(number) is Tensor and number.device.type == "cpu":
            number = number.item()  # that of a tensor elsewhere would synchronise the device
        moments = [local(state[name]) for name in self.moments_of(group)]
        states = [
            m.matrix() if isinstance(m, Moment) else StateMatrix(matrix_of(m)) for m in moments
        ]
        plain, weight = local(p), None
        rounds_target = group["stochastic_rounding"]
        if isinstance(p, Float8Tensor):
            plain = p.float8_data
            weight = WeightOfMaster(matrix_of(plain.contiguous()), p.scale)
            rounds_target = group["state_rounding"] != "nearest"
            target = state["master"].matrix()
        else:
            target = StateMatrix(matrix_of(plain.contiguous()))
        step = OptimizerStep(
            rule=self.rule(group),
            number=number,
            p=target,
            g=_gradient(local(p.grad)),
            states=states,
            group=next((m.group for m in moments if isinstance(m, Moment)), group["group_size"]),
            at_random=[rounds_target, *self.stochastic_states(group)],
            seed=seed,
            first=first_element(p),
        )
        return group["fused"], step, weight, None if plain.is_contiguous() else plain

    def stochastic_states(self, group: dict[str, Any]) -> list[bool]:
        """Whether each of the moments is rounded stochastically, if it is in few bits."""
        if group["state_rounding"] != "auto":
            return [group["state_rounding"] == "stochastic"] * len(self.moments_of(group))
        decays = zip(self.moments_of(group).values(), self.rule(group).decays, strict=True)
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
        if isinstance(p, Float8Tensor) and "master" not in state:
            state["master"] = new_master(p, group["group_size"])
        return state

    def kinds_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, str | None]:
        """State's name -> the `Moment.kind`, or None for float32."""
        is_small = p.numel() < group["min_size"]
        return {
            name: None if is_small else KINDS[option][group[option]]
            for name, option in self.moments_of(group).items()
        }

    @torch.no_grad()
    def start_master(self, p: Any, value: Tensor) -> None:
        """Give a float8 parameter's master its value, and cast the parameter from it.

        ``value`` is what p was cast from: float32, bfloat16 or float16, of p's shape.
        """
        (group,) = (g for g in self.param_groups if any(p is q for q in g["params"]))
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
            rest, read = read_states(given, self.param_groups, self.kinds_of)
            for group in rest["param_groups"]:
                check_group(group)
            states.update(read)
            return rest

        def put(_: Any) -> None:
            for p, state in states.items():
                self.state[p].update(state)

        # The last hook before torch loads, and the first one after it.
        before = self.register_load_state_dict_pre_hook(take)
        after = self.register_load_state_dict_post_hook(put, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()


# Whether the kernel is wanted; the step; of a float8 parameter, the weight that follows from its
# master; what the parameter's matrix is a copy of, if its rows are not contiguous.
Work = tuple[bool | None, OptimizerStep, WeightOfMaster | None, Tensor | None]


def cast_from_master(p: Float8Tensor, master: Moment) -> None:
    """Rewrite a float8 parameter's data and scale from its master, in place."""
    data_RC = matrix_of(p.float8_data.contiguous())
    cast_master(master.matrix(), WeightOfMaster(data_RC, p.scale))
    if not p.float8_data.is_contiguous():  # then data_RC is a copy
        p.float8_data.copy_(data_RC.view(p.shape))


def _gradient(grad: Tensor) -> StateMatrix:
    """A gradient as a matrix. In float8 with one scale it is decoded tile by tile, else at once."""
    if not isinstance(grad, Float8Tensor):
        return StateMatrix(matrix_of(grad))
    if grad.scale.numel() != 1:
        return StateMatrix(matrix_of(grad.dequantize(torch.float32)))
    data_RC = matrix_of(grad.float8_data)
    rows, cols = data_RC.shape
    return StateMatrix(data_RC, grad.scale.reshape(1, 1).expand(rows, 1), None, max(cols, 1))


def _new_moment(p: Tensor, kind: str | None, group_size: int) -> Tensor | Moment:
    if kind is not None:
        return Moment.zeros(local(p).shape, kind, group_size, p.device)
    if isinstance(p, DTensor):
        return torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
    return torch.zeros(p.shape, dtype=torch.float32, device=p.device)


def local(x: Any) -> Any:
    """This rank's shard of a DTensor; a plain tensor, or a moment, as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def first_element(p: Tensor) -> int:
    """The index, in the whole parameter, of this rank's first element.

    Known where one dimension of the mesh shards rows; otherwise 0, and shards draw alike.
    """
    if (group := ranks_of_rows(p)) is None:
        return 0
    rows = -(-p.shape[0] // group.size())  # as torch.chunk cuts
    return min(group.rank() * rows, p.shape[0]) * math.prod(p.shape[1:])


def ranks_of_rows(p: Tensor) -> dist.ProcessGroup | None:
    """The ranks that share p's rows, if nothing else is sharded."""
    if not isinstance(p, DTensor):
        return None
    shards = [i for i, placement in enumerate(p.placements) if not placement.is_replicate()]
    if len(shards) != 1 or not p.placements[shards[0]].is_shard(0):
        return None
    return p.device_mesh.get_group(shards[0])
