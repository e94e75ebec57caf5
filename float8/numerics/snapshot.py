"""`Report`: the casts of a model at one moment, to read, to draw, to keep and to send on.

::

    with inspect(model) as report:
        loss(model(x), y).backward()
    print(report.table(top=20))
    report.save("run.json")

A file is strict JSON and holds a run, one or many snapshots::

    {"format": "float8.numerics", "version": 1, "float8": "...", "torch": "...", "model": "GPT",
     "snapshots": [{"step": 50, "rows": [{"layer": "blocks.0.attn", ...}], "skipped": {}}]}

inf and NaN are the words "inf", "-inf" and "nan". `load_run` reads all snapshots, `Report.load` a
file that has one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from float8.formats import FORMATS
from float8.numerics.rows import Row, decoded, encoded, merged, worst_first
from float8.numerics.table import named, table

if TYPE_CHECKING:
    import torch.distributed as dist

FORMAT, VERSION = "float8.numerics", 1
_SCALARS = (
    "amax", "scale_max", "flushed", "saturated", "sqnr", "kurtosis", "staleness", "nonfinite",
)  # fmt: skip


class Report:
    """What became of the operands of a model's float8 layers.

    `float8.numerics.inspect` returns one that is empty as long as it watches, and complete when
    its ``with`` block ends.

    Args:
        rows: one for each cast.
        model: the name of the model's class.
        step: of the training, if there is one.
        skipped: names of layers of which nothing was seen -> why.

    Attributes:
        model, step, skipped: as given.
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        *,
        model: str = "",
        step: int | None = None,
        skipped: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model
        self.step = step
        self.fill(rows, skipped or {})

    def fill(self, rows: Iterable[Row], skipped: Mapping[str, str]) -> None:
        """What `inspect` does when its block ends: the report has these rows then, and no other."""
        self._rows = list(rows)
        self.skipped = dict(skipped)

    @property
    def casts(self) -> list[Row]:
        """The rows, worst first: those that met inf or NaN, then by their SQNR."""
        return worst_first(self._rows)

    def rows(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, worst first; the keys are the fields of `Row`."""
        return [row.as_dict() for row in self.casts]

    def table(self, top: int | None = None) -> str:
        """The rows as text of at most 100 columns, worst first, and below them what was skipped.

        Args:
            top: how many rows; None is all.
        """
        return table(self.casts, self.skipped, top)

    def plot(self, path: str | os.PathLike[str], top: int = 24) -> None:
        """Draw the histograms in powers of two against the formats' ranges, worst first.

        Args:
            path: of the picture; its suffix is the format, as ``.png`` or ``.svg``.
            top: how many rows.

        Raises:
            ValueError: there is nothing to draw.
            ImportError: matplotlib is not installed.
        """
        from float8.numerics.plot import plot

        at = "" if self.step is None else f", step {self.step}"
        plot(self.casts, path, f"{self.model}{at}", top)

    def static_scales(self, operand: str = "input", method: str = "amax") -> dict[str, float]:
        """Layer -> the scale that maps the largest magnitude to the format's largest value.

        What ``convert_to_float8_inference(model, static_scales=...)`` takes, after inspecting
        batches that are like those to come. `float8.numerics.calibrate` also searches by SQNR.

        Args:
            operand: "input", "weight" or "grad_output".
            method: "amax" is what a report holds enough for.

        Raises:
            ValueError: another method; or a layer whose operand was never seen, was all zero or
                was not finite.
        """
        if method != "amax":
            raise ValueError(
                f'method {method!r}: a report knows amaxes alone; use method="amax", or '
                "float8.numerics.calibrate, which searches scales on the values themselves"
            )
        by_layer: dict[str, list[Row]] = {}
        for row in self._rows:
            if row.operand == operand:
                by_layer.setdefault(row.layer, []).append(row)
        if not by_layer:
            raise ValueError(f"the report has no row for operand {operand!r}")
        return {layer: _static_scale(rows) for layer, rows in by_layer.items()}

    def add_scalars(self, writer: Any, step: int | None = None) -> None:
        """Hand each number to a ``SummaryWriter`` or anything else with ``add_scalar``.

        Tags are ``float8/<layer>/<operand>/<number>``, for an operand's second cast
        ``float8/<layer>/<operand>/<product>/<number>``. Numbers that are not there, or not finite,
        are left out; ``nonfinite`` counts what was not.

        Args:
            writer: has ``add_scalar(tag, value, step)``.
            step: by default the report's own, or 0.
        """
        at = self.step if step is None else step
        seen: set[tuple[str, str]] = set()
        for row in self._rows:
            is_first = (row.layer, row.operand) not in seen
            seen.add((row.layer, row.operand))
            gemm = "" if is_first else f"{row.gemm}/"
            for name in _SCALARS:
                value = getattr(row, name)
                if value is not None and math.isfinite(value):
                    writer.add_scalar(
                        f"float8/{row.layer}/{row.operand}/{gemm}{name}", value, at or 0
                    )

    def merged(self, *others: Report) -> Report:
        """One report of the elements of all: of other ranks, batches or steps of one model.

        Raises:
            ValueError: the reports are of different casts.
        """
        reports = (self, *others)
        rows = merged(row for report in reports for row in report._rows)
        skipped = {fqn: why for report in reports for fqn, why in report.skipped.items()}
        seen = {row.layer for row in rows}
        skipped = {fqn: why for fqn, why in skipped.items() if fqn not in seen}
        return Report(rows, model=self.model, step=self.step, skipped=skipped)

    def gather(self, group: dist.ProcessGroup | None = None) -> Report:
        """The report of all ranks of a group, on each of them; a collective call.

        Counts, SQNR, kurtosis and histograms are exactly those of all ranks' elements together:
        what several ranks hold alike, as replicated weights, counts once for each.

        Args:
            group: by default all ranks.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return self.merged()
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, _as_snapshot(self), group)
        reports = [_from_snapshot(each, self.model) for each in found]
        return reports[0].merged(*reports[1:])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file with this one snapshot."""
        save_run(path, [self])

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """The report of a file that holds one.

        Raises:
            ValueError: it holds none or many (`load_run` reads those), or is of another kind or
                version.
        """
        reports = load_run(path)
        if len(reports) != 1:
            raise ValueError(
                f"{path} holds {len(reports)} snapshots; float8.numerics.load_run reads them all"
            )
        return reports[0]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        at = "" if self.step is None else f", step={self.step}"
        return f"Report({self.model or 'no model'}, {len(self._rows)} rows{at})"


def save_run(path: str | os.PathLike[str], reports: Sequence[Report]) -> None:
    """Write reports as one file; see `write_run`."""
    model = reports[0].model if reports else ""
    write_run(path, model, [as_json(report) for report in reports])


def as_json(report: Report) -> str:
    """A report as a file holds it: for those who write many again and again."""
    return json.dumps(_as_snapshot(report), allow_nan=False)


def write_run(path: str | os.PathLike[str], model: str, snapshots: Sequence[str]) -> None:
    """Write what `as_json` made; a reader finds the old file or the new one, whatever happens.

    Raises:
        OSError: it could not be written; the old file is still there, and nothing beside it.
    """
    head = {
        "format": FORMAT,
        "version": VERSION,
        "float8": _version_of("float8"),
        "torch": torch.__version__,
        "model": model,
    }
    text = f'{json.dumps(head)[:-1]}, "snapshots": [{", ".join(snapshots)}]}}'
    target = Path(path)
    beside = _beside(target)
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    except BaseException:
        _remove(beside)
        raise


def check_writable(path: Path) -> None:
    """Raise OSError, with the reason and the fix, if `write_run` could not write this file now."""
    beside = _beside(path)
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        beside.write_text(" ", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise OSError(
            f"{path} cannot be written ({reason}): name a file in a folder that exists, may be "
            "written to and has space"
        ) from error
    finally:
        _remove(beside)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def _remove(path: Path) -> None:
    with suppress(OSError):  # nothing was made, or nothing here can be removed either
        path.unlink()


def load_run(path: str | os.PathLike[str]) -> list[Report]:
    """The reports of a file, in the order in which they were written.

    Raises:
        ValueError: the file is not JSON, of another kind, or of another version.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{path} is not a report of float8.numerics: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f'{path} is not a report of float8.numerics: it lacks "format": "{FORMAT}"'
        )
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} is a report of version {content.get('version')!r}, written by float8 "
            f"{content.get('float8', '?')}; this float8 reads version {VERSION}"
        )
    try:
        return [_from_snapshot(each, content["model"]) for each in content["snapshots"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: a part of the report is missing or damaged: {error!r}"
        ) from error


def _as_snapshot(report: Report) -> dict[str, Any]:
    rows = [encoded(row.as_dict()) for row in report._rows]
    return {"step": report.step, "rows": rows, "skipped": report.skipped}


def _from_snapshot(found: Mapping[str, Any], model: str) -> Report:
    rows = [decoded(row) for row in found["rows"]]
    return Report(rows, model=model, step=found["step"], skipped=found.get("skipped"))


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def _static_scale(rows: Sequence[Row]) -> float:
    first_use = [row for row in rows if row.gemm == rows[0].gemm]
    row = max(first_use, key=lambda row: (row.nonfinite, row.amax))
    if not (0 < row.amax < math.inf) or row.nonfinite:
        raise ValueError(
            f"{named(row.layer)}: its {row.operand} had amax {row.amax:g} and {row.nonfinite} "
            "elements that are not finite; a static scale needs values like those to come"
        )
    largest = next(fmt.max for fmt in FORMATS.values() if fmt.name == row.format)
    return max(row.amax / largest, torch.finfo(torch.float32).tiny)
