"""`inspect_every`: inspect every n-th training step, into a file or `add_scalar`.

::

    monitor = inspect_every(model, n=50, path="run.json", writer=SummaryWriter())
    for batch in data:
        with monitor:                    # forward, backward and optimizer step
            loss(model(batch)).backward()
            optimizer.step()

Steps 0, 4, n, 2n ... are inspected (`float8.numerics.inspection`), the others cost a comparison of
integers. Step 4 is one of the first: where delayed scales do not start dynamic, as in
TransformerEngine's recipe, values that grow from zero may then lie far beyond the range of their
scales. An inspected step makes every cast once more and reads it about ten times in float64. The
cost is a share of ``(ratio - 1) / n`` of a training, where ``ratio`` is the time of an inspected
step over that of a plain one; ``benchmarks/bench_numerics.py`` measures both.

The file holds all snapshots so far and is replaced as a whole, so that it is complete at any time,
also after the training was killed. An existing file is continued: a training that resumes passes
its ``step``. ``python -m float8.numerics.report run.json -o report.html`` makes a page of it.

At each look the rules of `float8.numerics.alarms` are applied to the reports so far. An alarm that
starts is a warning of ``logging.getLogger("float8")``, with layer, operand, numbers and remedy; one
line for all alarms of a rule that start at one look. Another line says when they end. All alarms
are in the file, their number is the scalar ``float8/alarms``, and ``on_alarm`` is called for each
that starts: it may raise, to stop the training.

Where several ranks train together, all of them open the monitor, the report is that of all ranks
(`Report.gather`), and the first rank writes. It also decides on alarms and logs them, and
``on_alarm`` is called on every rank, so that all of them stop.

Under ``torch.compile`` inspected steps run eagerly and the others compiled: the ratio is greater,
so choose a greater n. A step that raises leaves its report in ``monitor.report``, and is not
written.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from float8.arguments import check_function, check_integer, check_module
from float8.distributed.sync import has_other_ranks
from float8.numerics.alarms import Alarm, AlarmWatch, Changes
from float8.numerics.inspection import inspect
from float8.numerics.snapshot import Report, as_json, read_run, write_run

logger = logging.getLogger("float8")
OnAlarm = Callable[[Alarm], object]
EARLY = 4  # a step that is inspected for every n
_NAMED = 3  # places that a line of the log names


@dataclass(eq=False, repr=False)
class inspect_every:
    """A context manager to open around each training step; it inspects nothing by itself.

    Args:
        model: converted; as for `inspect`.
        n: inspect every n-th step, and step 4.
        path: of a file to which snapshots are added.
        writer: has ``add_scalar(tag, value, step)``.
        step: the number of the first step; later that of the running step, or of the next one.
        keep: how many snapshots the file holds at most; the oldest are dropped.
        on_alarm: called with each `Alarm` that starts, on every rank, after file and log are
            written. What it raises ends the training.

    Raises:
        OSError: ``path`` is a folder, or lies in none. If a write fails, as on a full disk, there
            is one warning, the training goes on, and the file keeps its last content.
        ValueError: n or keep is not positive, or the file at ``path`` is not a run. A step raises
            it if the model has no float8 layer.
        TypeError: ``model`` is no module, n or keep no integer, or ``on_alarm`` no function.

    Attributes:
        report: of the last inspected step, or None.
        alarms: that are active after the last inspected step.
        is_open: whether a step has started and not ended.
    """

    model: nn.Module
    n: int = 50
    _: KW_ONLY
    path: str | os.PathLike[str] | None = None
    writer: Any = None
    step: int = 0
    keep: int = 100
    on_alarm: OnAlarm | None = None
    report: Report | None = field(default=None, init=False)
    is_open: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_module(self.model, "inspect_every")
        check_integer(self.n, "inspect_every: n", 1)
        check_integer(self.keep, "inspect_every: keep", 1)
        if self.on_alarm is not None:
            check_function(self.on_alarm, "inspect_every", "on_alarm")
        self._inspection: ExitStack | None = None
        reports: list[Report] = []
        alarms: list[Alarm] = []
        if self.path is not None:
            path = self.path = Path(self.path)
            if _is_first_rank() and not path.parent.is_dir():  # others have no file
                raise FileNotFoundError(f"inspect_every: {path} lies in no folder that exists")
            if path.exists():
                reports, alarms = read_run(path)
        reports = [r for r in reports if r.step is None or r.step < self.step]
        self._written = {report.step: as_json(report) for report in reports}
        self._watch = AlarmWatch(reports, alarms)
        self.alarms = self._watch.active

    def start_step(self) -> None:
        """Begin a step, as ``with`` does; for callbacks. A step that is open is abandoned."""
        self.abandon_step()
        if self.step % self.n == 0 or self.step == EARLY:
            self._inspection = ExitStack()
            self.report = self._inspection.enter_context(inspect(self.model, step=self.step))
        self.is_open = True

    def abandon_step(self) -> None:
        """End a step that failed, if one is open; its report is kept and not written."""
        if self.is_open:
            self.is_open, self.step = False, self.step + 1
            if self._inspection is not None:
                self._inspection.close()
                self._inspection = None

    def end_step(self) -> None:
        """End a step, as ``with`` does, if one is open; for callbacks."""
        step, was_inspected = self.step, self._inspection is not None
        self.abandon_step()
        if not was_inspected or self.report is None:
            return
        self.report = self.report.gather()
        changes: list[Any] = [None]
        if _is_first_rank():
            changes = [self._watch.see(self.report)]
            self._write(self.report, step)
            _log(changes[0], step)
        if has_other_ranks():
            dist.broadcast_object_list(changes, src=0)
        started, _, self.alarms = changes[0]
        for alarm in started:
            if self.on_alarm is not None:
                self.on_alarm(alarm)

    def _write(self, report: Report, step: int) -> None:
        if self.writer is not None:
            report.add_scalars(self.writer, step)
            self.writer.add_scalar("float8/alarms", len(self._watch.active), step)
        if self.path is None:
            return
        self._written[step] = as_json(report)
        for oldest in list(self._written)[: -self.keep]:
            del self._written[oldest]
        try:
            snapshots = list(self._written.values())
            write_run(self.path, report.model, snapshots, self._watch.alarms)
        except OSError as error:
            # One text for all steps, which Python shows once.
            warnings.warn(
                f"inspect_every: {self.path} could not be written ({error.strerror or error}); the "
                "training goes on, and every report tries again",
                stacklevel=2,
            )

    def __enter__(self) -> inspect_every:
        self.start_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.end_step()
        else:
            self.abandon_step()


def _log(changes: Changes, step: int) -> None:
    """One line for all alarms of a rule that start, and one for all that end."""
    ends = "the alarm of step {0.started} has ended at step {1}: {0.rule}: {0.place}"
    for text, alarms in (("alarm at step {1}: {0}", changes.started), (ends, changes.ended)):
        for rule in dict.fromkeys(alarm.rule for alarm in alarms):
            first, *others = (alarm for alarm in alarms if alarm.rule == rule)
            named = "; ".join(alarm.place for alarm in others[:_NAMED])
            left = f"; and {len(others) - _NAMED} more casts" * (len(others) > _NAMED)
            also = f" (also {named}{left})" if others else ""
            logger.warning("%s%s", text.format(first, step), also)


def _is_first_rank() -> bool:
    return not has_other_ranks() or dist.get_rank() == 0
