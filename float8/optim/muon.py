"""Muon for matrices and AdamW for the rest, in one optimizer, with float8 states.

A step of Muon (https://kellerjordan.github.io/posts/muon/) has three parts:

1. element by element, the momentum and the direction u, which is written in bfloat16 as
   ``torch.optim.Muon`` rounds it before its iteration;
2. u as a whole matrix becomes nearly orthogonal: `newton_schulz`, in bfloat16; of a stack (E, M, N)
   each matrix by itself, and with ``slice_rows`` each slice of rows;
3. element by element, the parameter moves along it.

Parts 1 and 3 are steps of `float8.kernels.optimizer_step`, as those of all optimizers here, and one
kernel each on CUDA. So gradients in float8, masters, stochastic rounding, and states of shards are
what they are there.

Under FSDP2 a rank has some rows of each matrix, and part 2 needs all of them. As many matrices as
there are ranks go together: one all-to-all brings rank i all rows of matrix i, and a second one
takes its result back. A matrix crosses the network twice, in bfloat16, and one rank computes it.
Stacks whose matrices are whole on their ranks, as under expert parallelism, stay there. Other
placements (columns, or rows over two dimensions of a mesh) are gathered on every rank.

The matrices' part is not traced by torch.compile: GEMMs take its time. AdamW's groups are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import ParamsT

from float8.kernels.moments import StateMatrix
from float8.kernels.update_rules import MuonDirection, MuonMove, UpdateRule
from float8.optim.optimizer import QuantizedOptimizer, Work, local, ranks_of_rows
from float8.optim.optimizers import adamw_rule
from float8.optim.options import describe
from float8.optim.state_dicts import like

# Of Keller Jordan's post and of torch.optim.Muon: they maximise the slope at zero.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_OF_MUON = {"ns_coefficients": COEFFICIENTS, "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None}
_OF_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class Muon(QuantizedOptimizer):
    """``torch.optim.Muon`` with its momentum in float8, and `AdamW` for groups of that kind::

        optimizer = Muon([
            {"params": matrices, "lr": 0.02},
            {"params": others, "kind": "adamw", "lr": 3e-4, "betas": (0.9, 0.95)},
        ])

    The momentum takes 1.03 bytes per element. Embeddings and output heads are matrices, too, but
    are usually left to AdamW, as all that is not a matrix. A NaN or inf in a gradient spoils its
    matrix, as in ``torch.optim.Muon``. A parameter (E, M, N), such as a stack of experts, is E
    matrices of M rows.

    Args:
        params: see `AdamW`. Groups of ``kind`` "muon" (the default) have matrices and stacks of
            them only. Groups of ``kind`` "adamw" have AdamW's hyperparameters, and its defaults.
        lr: learning rate of Muon's groups, a float or a tensor with one element.
        weight_decay: decoupled, of Muon's groups.
        momentum: of the average of gradients, in [0, 1).
        nesterov: look ahead by one momentum.
        given: of `float8.optim.options.Options`; and ``adjust_lr_fn`` ("original", the default,
            multiplies lr by ``sqrt(max(1, rows / columns))``, "match_rms_adamw" by
            ``0.2 * sqrt(max(rows, columns))``), ``ns_steps``, ``ns_coefficients`` and ``eps`` as in
            ``torch.optim.Muon``; and ``slice_rows``: how many rows of a matrix are one matrix to
            Muon, such as the size of a head where one weight makes all heads of q, k and v. It
            divides the rows of all matrices of the group.

    Raises:
        ValueError, TypeError: for values and parameters that are not supported.
    """

    moment_options: ClassVar[dict[str, str]] = {
        "momentum_buffer": "first_moment",
        "exp_avg": "first_moment",
        "exp_avg_sq": "second_moment",
    }
    _step_supports_amp_scaling = False  # GradScaler unscales: a step has more than one kernel

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        **given: Any,
    ) -> None:
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        chosen = {name: given.pop(name, value) for name, value in _OF_MUON.items()}
        if "slice_rows" in given:  # no default: sharded checkpoints of 1.0.0 have no such key
            chosen["slice_rows"] = given.pop("slice_rows")
        super().__init__(params, {**numbers, "nesterov": nesterov, **chosen, "kind": "muon"}, given)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, after checks."""
        is_adamw = param_group.get("kind") == "adamw"
        if is_adamw:
            param_group = {**_OF_ADAMW, **param_group}
        unread = {"use_muon", "beta2"} | (set() if is_adamw else {"betas"})
        if foreign := param_group.keys() & unread:
            raise TypeError(
                f"a group of Muon has {', '.join(foreign)}, which would change nothing: groups "
                'are of kind "muon" or "adamw", and there is no second moment of Muon'
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for index, p in enumerate(group["params"] if group["kind"] == "muon" else ()):
            if p.dim() not in (2, 3):
                raise ValueError(
                    f"{describe(index, p, group)} is no matrix: put it into a group of its own "
                    'with "kind": "adamw"'
                )
            rows = group.get("slice_rows")
            if rows is not None and (type(rows) is not int or rows < 1 or p.shape[-2] % rows):
                raise ValueError(f"{describe(index, p, group)} has no whole slices of {rows} rows")

    def moments_of(self, group: Mapping[str, Any]) -> dict[str, str]:
        """The states of a group of this kind."""
        is_muon = group["kind"] == "muon"
        names = ("momentum_buffer",) if is_muon else ("exp_avg", "exp_avg_sq")
        return {name: self.moment_options[name] for name in names}

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """AdamW's, or that of Muon's momentum."""
        if group["kind"] == "adamw":
            return adamw_rule(group, decoupled=True)
        return MuonDirection(group["momentum"], group["nesterov"], group["maximize"])

    def _step_all(self) -> None:
        super()._step_all()
        self._step_matrices()

    def _steps(self, in_graph: bool) -> Iterator[Work]:
        """The work of AdamW's parameters."""
        for p, group, seed in self._with_gradient():
            if group["kind"] == "adamw":
                yield self._work(p, group, seed, in_graph)

    @torch.compiler.disable
    def _step_matrices(self) -> None:
        given = [x for x in self._with_gradient() if x[1]["kind"] == "muon"]
        for ranks, run in itertools.groupby(given, lambda x: _ranks_of_matrix(x[0])):
            size = 1 if ranks is None else ranks.size()
            while together := list(itertools.islice(run, size)):
                works = [self._work(*x, False) for x in together]
                matrices = [
                    _Matrix(p, self._direction(work), group)
                    for work, (p, group, _) in zip(works, together, strict=True)
                ]
                updates = _here(matrices[0]) if ranks is None else _by_ranks(matrices, ranks)
                for work, matrix, update in zip(works, matrices, updates, strict=True):
                    self._move(work, matrix, update)

    def _direction(self, work: Work) -> Tensor:
        """Advance the momentum; the direction of this rank's rows, in bfloat16."""
        fused, step, _, _ = work
        g = step.g.codes
        direction = torch.empty(g.shape, dtype=torch.bfloat16, device=g.device)
        at_random = [False, *step.at_random[1:]]
        step = step._replace(p=StateMatrix(direction), at_random=at_random)
        self._advance((fused, step, None, None))
        return direction

    def _move(self, work: Work, matrix: _Matrix, update: Tensor) -> None:
        """Move the parameter along the update, this rank's rows."""
        fused, step, weight, original = work
        rule = MuonMove(matrix.group["lr"], matrix.ratio(), matrix.group["weight_decay"])
        g, at_random = StateMatrix(update), step.at_random[:1]
        step = step._replace(rule=rule, g=g, states=(), at_random=at_random)
        self._advance((fused, step, weight, original))


def newton_schulz(
    u_MN: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """U V^T of ``u_MN = U S V^T``, nearly: (M, N) bfloat16, as ``torch.optim.Muon`` computes it.

    Singular values become about 0.7 to 1.2, not exactly 1. Of a stack (E, M, N) each matrix.
    """
    a, b, c = coefficients
    is_tall = u_MN.shape[-2] > u_MN.shape[-1]
    x = u_MN.mT if is_tall else u_MN
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)  # of singular values up to 1
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


class _Matrix(NamedTuple):
    """A parameter, this rank's part of its direction, and its group."""

    p: Tensor
    direction: Tensor
    group: dict[str, Any]

    def orthogonal(self, direction: Tensor) -> Tensor:
        """The update of a direction that has all rows of its matrices."""
        numbers = (self.group[name] for name in ("ns_coefficients", "ns_steps", "eps"))
        rows, columns = self.shape()
        if direction.shape == (rows, columns):
            return newton_schulz(direction, *numbers)
        stack = direction.view(direction.numel() // max(rows * columns, 1), rows, columns)
        return newton_schulz(stack, *numbers).reshape(direction.shape)

    def shape(self) -> tuple[int, int]:
        """The rows and columns of one matrix."""
        return self.group.get("slice_rows") or self.p.shape[-2], self.p.shape[-1]

    def ratio(self) -> float:
        """By which the learning rate of a matrix of this shape is multiplied."""
        rows, columns = self.shape()
        if self.group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / max(columns, 1)))


def _ranks_of_matrix(p: Tensor) -> dist.ProcessGroup | None:
    """The ranks that share the rows of a matrix, if nothing else is sharded."""
    return ranks_of_rows(p) if p.dim() == 2 else None


def _here(matrix: _Matrix) -> list[Tensor]:
    """The update of one parameter; gathered on every rank, where its matrices are sharded."""
    p, direction, _ = matrix
    if not isinstance(p, DTensor) or all(getattr(s, "dim", 0) < p.dim() - 2 for s in p.placements):
        return [matrix.orthogonal(direction)]
    sharded = like(p, direction.view(local(p).shape), p.shape)
    assert isinstance(sharded, DTensor)
    update = matrix.orthogonal(sharded.full_tensor())
    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(update, p.device_mesh, everywhere, run_check=False)
    return [whole.redistribute(placements=p.placements).to_local().reshape(direction.shape)]


def _by_ranks(matrices: list[_Matrix], group: dist.ProcessGroup) -> list[Tensor]:
    """The updates, this rank's rows of each; rank i computes matrix i."""
    ranks, rank = group.size(), group.rank()
    sent = [matrix.direction.numel() for matrix in matrices]
    sent += [0] * (ranks - len(matrices))
    received = [0] * ranks
    if rank < len(matrices):
        rows, columns = matrices[rank].p.shape
        most = -(-rows // ranks)  # as torch.chunk cuts
        received = [max(min(rows - i * most, most), 0) * columns for i in range(ranks)]
    rows_of_all = torch.cat([matrix.direction.flatten() for matrix in matrices])
    whole = rows_of_all.new_empty(sum(received))
    dist.all_to_all_single(whole, rows_of_all, received, sent, group=group)
    if rank < len(matrices):
        mine = matrices[rank]
        whole = mine.orthogonal(whole.view(mine.p.shape)).flatten()
    dist.all_to_all_single(rows_of_all, whole, sent, received, group=group)
    parts = rows_of_all.split(sent)
    return [part.view_as(x.direction) for part, x in zip(parts, matrices, strict=False)]
