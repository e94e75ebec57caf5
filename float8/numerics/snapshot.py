"""`Report`: the casts of a model at one moment, to read, to draw, to save and to merge.

::

    with inspect(model) as report:
        loss(model(x), y).backward()
    print(report)                                  # report.table(top=20): the worst 20
    report.save("run.json")

A file is strict JSON and holds a run: one snapshot or many, and its alarms::

    {"format": "float8.numerics", "version": 2, "float8": "...", "torch": "...", "model": "GPT",
     "snapshots": [{"step": 50, "rows": [{"layer": "blocks.0.attn", ...}], "skipped": {}}],
     "alarms": [{"rule": "saturation", "layer": "blocks.0.attn", "first": 20, ...}]}

inf and NaN are the strings "inf", "-inf" and "nan". `load_run` reads all snapshots, `load_alarms`
the alarms, `Report.load` a file that has one snapshot.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from float8.numerics.alarms import Alarm
from float8.numerics.display import layer_name, plot_casts, table_of_casts
from float8.numerics.problems import kinds_of, level_of
from float8.numerics.statistics import (
    FORMAT_OF,
    SMOOTH,
    CastLabels,
    CastStatistics,
    Histogram,
    Sums,
    merged,
)
from float8.version import __version__

if TYPE_CHECKING:
    import torch.distributed as dist

FORMAT, VERSION = "float8.numerics", 2
_SCALARS = (
    "amax", "scale_max", "flushed", "saturated", "sqnr", "kurtosis", "staleness", "nonfinite",
    "gradient_sqnr",
)  # fmt: skip


class Report:
    """The casts of a model's float8 layers.

    `float8.numerics.inspect` yields an empty report, which is filled when the ``with`` block ends.

    Args:
        rows: the statistics of each cast.
        model: the name of the model's class.
        step: of the training, if there is one.
        skipped: layers without statistics: name -> reason.
    """

    def __init__(
        self,
        rows: Iterable[CastStatistics] = (),
        *,
        model: str = "",
        step: int | None = None,
        skipped: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model
        self.step = step
        self.fill(rows, skipped or {})

    def fill(self, rows: Iterable[CastStatistics], skipped: Mapping[str, str]) -> None:
        """Replace the content, as `inspect` does at the end of its block."""
        self._rows = list(rows)
        self.skipped = dict(skipped)

    @property
    def casts(self) -> list[CastStatistics]:
        """Worst first: casts of inf or NaN, then those with a problem, then by SQNR.

        The SQNR alone would put a cast last that keeps one huge element and flushes all others.
        """

        def place(cast: CastStatistics) -> tuple[bool, int, float]:
            known = math.inf if cast.sqnr is None else cast.sqnr
            sqnr = -math.inf if cast.nonfinite else known
            return sqnr > -math.inf, -level_of(cast), sqnr

        return sorted(self._rows, key=place)

    def rows(self) -> list[dict[str, Any]]:
        """The casts as dictionaries, worst first.

        The keys are the fields of `CastStatistics`, its ``range``, and ``problems``: a list of what
        is wrong, such as "flushes to zero". It is empty for a healthy cast. The SQNR alone does not
        tell: it weighs by power, and a cast that keeps few large elements has a high one.
        """
        return [c.as_dict() | {"problems": [k.one for k in kinds_of(c)]} for c in self.casts]

    def table(self, top: int | None = None) -> str:
        """The casts as text of at most 100 columns, worst first; then problems and skipped layers.

        Args:
            top: how many casts; None is all.
        """
        return table_of_casts(self.casts, self.skipped, top)

    def plot(self, path: str | os.PathLike[str], top: int = 24) -> None:
        """Draw the histograms in powers of two against the formats' ranges, worst first.

        Args:
            path: of the picture; its suffix is the format, as ``.png`` or ``.svg``.
            top: how many casts.

        Raises:
            ValueError: there is nothing to draw.
            ModuleNotFoundError: matplotlib is not installed.
        """
        at = "" if self.step is None else f", step {self.step}"
        plot_casts(self.casts, path, f"{self.model}{at}", top)

    def static_scales(self, operand: str = "input") -> dict[str, float]:
        """Layer -> the scale that maps the largest magnitude to the format's largest value.

        For ``convert_to_float8_inference(model, static_scales=...)``, after inspecting batches that
        are like those to come. `float8.numerics.calibrate` also searches scales by SQNR.

        Args:
            operand: "input", "weight" or "grad_output".

        Raises:
            ValueError: the report has no such operand, or one that was all zero or not finite, or
                one that ``smooth_input=True`` multiplied by factors.
        """
        by_layer: dict[str, list[CastStatistics]] = {}
        for cast in self._rows:
            if cast.operand == operand:
                by_layer.setdefault(cast.layer, []).append(cast)
        if not by_layer:
            raise ValueError(f"the report has no row for operand {operand!r}")
        return {layer: _static_scale(casts) for layer, casts in by_layer.items()}

    def add_scalars(self, writer: Any, step: int | None = None) -> None:
        """Give each number to a ``SummaryWriter`` or anything else with ``add_scalar``.

        Tags are ``float8/<layer>/<operand>/<number>``, and for the second cast of an operand
        ``float8/<layer>/<operand>/<gemm>/<number>``. Numbers that are None or not finite are left
        out; ``nonfinite`` counts the elements that were not finite.

        Args:
            writer: has ``add_scalar(tag, value, step)``.
            step: by default the report's own, or 0.
        """
        at = self.step if step is None else step
        seen: set[tuple[str, str]] = set()
        for cast in self._rows:
            is_first = (cast.layer, cast.operand) not in seen
            seen.add((cast.layer, cast.operand))
            prefix = f"float8/{cast.layer}/{cast.operand}/" + ("" if is_first else f"{cast.gemm}/")
            for name in _SCALARS:
                value = getattr(cast, name)
                if value is not None and math.isfinite(value):
                    writer.add_scalar(prefix + name, value, at or 0)

    def merged(self, *others: Report) -> Report:
        """One report of the elements of all: of other ranks, batches or steps of one model.

        Args:
            others: reports of the same casts.

        Raises:
            ValueError: the reports are of different casts.
        """
        reports = (self, *others)
        rows = merged(row for report in reports for row in report._rows)
        layers = {row.layer for row in rows}
        skipped = {k: v for report in reports for k, v in report.skipped.items() if k not in layers}
        return Report(rows, model=self.model, step=self.step, skipped=skipped)

    def gather(self, group: dist.ProcessGroup | None = None) -> Report:
        """The report of all ranks of a group, on each of them; a collective call.

        Counts, SQNR, kurtosis and histograms are exactly those of all ranks' elements together. A
        tensor that several ranks hold, as a replicated weight, counts once for each.

        Args:
            group: by default all ranks.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return self.merged()
        reports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, self, group)
        return reports[0].merged(*reports[1:])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file with this one snapshot, as JSON.

        ``python -m float8.numerics.report`` makes a page of it.

        Args:
            path: of the file, which is replaced if it exists.
        """
        write_run(path, self.model, [as_json(self)])

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """The report of a file that holds one.

        Args:
            path: of a file that `save` wrote.

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

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        at = "" if self.step is None else f", step={self.step}"
        return f"Report({self.model or 'no model'}, {len(self._rows)} rows{at})"


def _static_scale(casts: Sequence[CastStatistics]) -> float:
    first_use = [cast for cast in casts if cast.gemm == casts[0].gemm]
    cast = max(first_use, key=lambda cast: (cast.nonfinite, cast.amax))
    if any(c.granularity.endswith(SMOOTH) for c in casts) or cast.nonfinite or not cast.amax > 0:
        raise ValueError(
            f"{layer_name(cast.layer)}: no static scale suits its {cast.operand} (amax "
            f"{cast.amax:g}, {cast.nonfinite} elements that are not finite, {cast.granularity}); "
            "it needs values like those to come, and float8.calibrate(model, batches) if "
            "smooth_input=True multiplies them"
        )
    return max(cast.amax / FORMAT_OF[cast.format].max, torch.finfo(torch.float32).tiny)


# --- files


def as_json(report: Report) -> str:
    """A snapshot as `write_run` takes it."""
    return json.dumps(_as_snapshot(report), allow_nan=False)


def write_run(
    path: str | os.PathLike[str],
    model: str,
    snapshots: Sequence[str],
    alarms: Sequence[Alarm] = (),
) -> None:
    """Write snapshots, each as `as_json` returns it, to a file; see `replace_file`."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "float8": __version__,
        "torch": torch.__version__,
        "model": model,
    }
    found = json.dumps([asdict(alarm) for alarm in alarms], allow_nan=False)
    text = f'{json.dumps(head)[:-1]}, "snapshots": [{", ".join(snapshots)}], "alarms": {found}}}'
    replace_file(Path(path), text)


def replace_file(path: Path, text: str) -> None:
    """Write a whole file. A reader finds the old content or the new one, whatever happens.

    Raises:
        OSError: it could not be written. The old file is unchanged, and no other file is left.
    """
    with _temporary(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def try_writing(path: Path) -> None:
    """Raise OSError if `replace_file` could not write a file now."""
    with _temporary(path) as temporary:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        temporary.write_text(" ", encoding="utf-8")


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield temporary
    finally:
        with suppress(OSError):  # it was not created, or nothing in this folder can be removed
            temporary.unlink()


def load_run(path: str | os.PathLike[str]) -> list[Report]:
    """The reports of a file, in the order in which they were written.

    Args:
        path: of a file that `inspect_every` or `Report.save` wrote.

    Raises:
        ValueError: the file is not JSON, of another kind, or of another version.
    """
    return read_run(path).reports


def load_alarms(path: str | os.PathLike[str]) -> list[Alarm]:
    """The alarms of a run's file, in the order in which they started.

    Args:
        path: of a file that `inspect_every` wrote.

    Raises:
        ValueError: as of `load_run`.
    """
    return read_run(path).alarms


class Run(NamedTuple):
    """What a file holds: snapshots, and alarms, of which some may have started before them."""

    reports: list[Report]
    alarms: list[Alarm]


def read_run(path: str | os.PathLike[str]) -> Run:
    """All that a file holds; see `load_run`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if (kind := (content["format"], content["version"])) != (FORMAT, VERSION):
            raise ValueError(f"it has format and version {kind}, and not {(FORMAT, VERSION)}")
        reports = [_from_snapshot(each, content["model"]) for each in content["snapshots"]]
        return Run(reports, [Alarm(**each) for each in content["alarms"]])
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # or not JSON, not text
        raise ValueError(f"{path} is not a report of float8.numerics: {error!r}") from error


def strict_json(value: Any) -> Any:
    """A value for strict JSON, which has no inf and no NaN: these become strings."""
    if isinstance(value, Mapping):
        return {name: strict_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def cast_from_json(found: Mapping[str, Any]) -> CastStatistics:
    """The inverse of ``strict_json(cast.as_dict())``.

    Raises:
        TypeError: a field is missing or unknown.
    """
    given = {name: _number(name, value) for name, value in found.items() if name != "range"}
    histogram, sums = given.pop("histogram"), given.pop("sums")
    sums = None if sums is None else Sums(**{n: _number(n, v) for n, v in sums.items()})
    histogram = Histogram(histogram["lowest"], tuple(histogram["counts"]))
    return CastStatistics(**given, histogram=histogram, sums=sums)


def _number(name: str, value: Any) -> Any:
    is_label = name in CastLabels._fields  # a layer may be called "nan"
    return float(value) if isinstance(value, str) and not is_label else value


def _as_snapshot(report: Report) -> dict[str, Any]:
    rows = [strict_json(row.as_dict()) for row in report._rows]
    return {"step": report.step, "rows": rows, "skipped": report.skipped}


def _from_snapshot(found: Mapping[str, Any], model: str) -> Report:
    rows = [cast_from_json(row) for row in found["rows"]]
    return Report(rows, model=model, step=found["step"], skipped=found.get("skipped"))
