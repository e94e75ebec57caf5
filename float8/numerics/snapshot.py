"""`Report`: the casts of a model at one moment, to read, to draw, to save and to merge.

`COLUMNS` are the numbers that a table of casts has, as text and on the page: each with the field of
`CastStatistics` that it shows, its head, and its format.

::

    with inspect(model) as report:
        loss(model(x), y).backward()
    print(report)                                  # report.table(top=20): the worst 20
    report.save("run.json")

A file is strict JSON and holds a run: one snapshot or many, and its alarms::

    {"format": "float8.numerics", "version": 2, "float8": "...", "torch": "...", "model": "GPT",
     "snapshots": [{"step": 50, "rows": [{"layer": "blocks.0.attn", ...}], "skipped": {}}],
     "alarms": [{"rule": "saturation", "layer": "blocks.0.attn", "first": 20, ...}]}

A picture has one panel for each cast: a bar for each power of two, as high as the share of the
operand's nonzero elements in it, on a logarithmic scale. The range that the format represents under
the scale in use is white. Values in the shaded parts saturate (right) or become zero (left: below
half of the smallest subnormal). Between the left shade and the dashed line, the smallest normal
value, values lose bits. Where blocks have scales of their own, the range is the widest of them.

inf and NaN are the strings "inf", "-inf" and "nan". `load_run` reads all snapshots, `load_alarms`
the alarms, `Report.load` a file that has one snapshot.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from float8.numerics.alarms import Alarm, kinds_of, level_of, problems_of
from float8.numerics.statistics import (
    FORMAT_OF,
    SMOOTH,
    CastLabels,
    CastStatistics,
    Histogram,
    Sums,
    bars_of,
    edges_of,
    merged,
)
from float8.version import __version__

if TYPE_CHECKING:
    import torch.distributed as dist
    from matplotlib.axes import Axes

FORMAT, VERSION = "float8.numerics", 2


class Column(NamedTuple):
    """A column of a table: which value, its name, how a number is printed, its unit and name."""

    key: str
    head: str
    spec: str = ""
    unit: str = ""
    factor: float = 1
    name: str = ""  # on the page

    def shown(self, value: Any) -> str:
        """A value as text; a dash where it is not known."""
        if value is None or not self.spec:
            return value or "-"
        text = format(self.factor * value, self.spec)
        return text.lstrip("+-") if float(text) == 0 else text


LAYER, FORMAT_NAME = Column("layer", "layer"), Column("format", "format")
COLUMNS = (
    Column("amax", "amax", ".2g", name="Amax"),
    Column("scale_max", "scale", ".2g", name="Scale"),
    Column("flushed", "flushed", ".2f", "%", 100, "Flushed %"),
    Column("saturated", "satur.", ".2f", "%", 100, "Saturated %"),
    Column("sqnr", "SQNR", ".1f", "dB", name="SQNR dB"),
    Column("kurtosis", "kurt.", ".3g", name="Kurtosis"),
    Column("staleness", "stale", "+.1f", "2^", name="Stale"),
)


def text_table(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], top: int | None
) -> str:
    """The first ``top`` rows as text."""
    from tabulate import tabulate

    lines = [[c.shown(row[c.key]) for c in columns] for row in rows[:top]]
    heads, units = ([getattr(c, name) for c in columns] for name in ("head", "unit"))
    align = ["right" if c.spec else "left" for c in columns]
    if any(units):
        # Lines of the table: with headers of its own tabulate makes columns two wider.
        text = tabulate([heads, units, *lines], (), "plain", colalign=align, disable_numparse=True)
    else:
        text = tabulate(lines, heads, "simple", colalign=align, disable_numparse=True)
    return f"{text}\nand {len(rows) - len(lines)} more" if len(lines) < len(rows) else text


_SCALARS = (*(column.key for column in COLUMNS), "nonfinite", "gradient_sqnr")


def layer_name(fqn: str) -> str:
    """A layer's name; the root of a model has none."""
    return fqn or "(the module itself)"


def operand_name(cast: CastStatistics) -> str:
    """The operand, with ".T" if it is cast for the GEMM that contracts its other dimension."""
    first = "grad_input" if cast.operand == "grad_output" else "output"
    return cast.operand if cast.gemm == first else f"{cast.operand}.T"


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
        """The casts as text, worst first; then the problems of all, and skipped layers.

        An operand that is cast otherwise for its second GEMM, which contracts its other dimension,
        has a second line marked ``.T``. A common beginning of all layer names is written once.

        Args:
            top: how many casts; None is all.
        """
        casts = self.casts
        prefix = os.path.commonprefix([c.layer for c in casts[:top]])  # noqa: RUF071  cut at a dot
        prefix = prefix[: prefix.rfind(".") + 1]

        def row(cast: CastStatistics) -> dict[str, Any]:
            name = layer_name(cast.layer.removeprefix(prefix))
            return vars(cast) | {"layer": name, "operand": operand_name(cast)}

        columns = LAYER, Column("operand", "operand"), FORMAT_NAME, *COLUMNS
        text = text_table(columns, [row(cast) for cast in casts], top)
        notes = [f"layer names begin with {prefix!r}"] if prefix else []
        notes += [f"{problem.title}: {problem.text}" for problem in problems_of(casts)]
        notes += [f"not seen: {layer_name(fqn)}: {why}" for fqn, why in self.skipped.items()]
        wrapped = (textwrap.fill(n, 100, subsequent_indent="  ") for n in notes)
        return "\n".join([text, *wrapped])

    def plot(self, path: str | os.PathLike[str], top: int = 24) -> None:
        """Draw the histograms in powers of two against the formats' ranges, worst first.

        Args:
            path: of the picture; its suffix is the format, as ``.png`` or ``.svg``.
            top: how many casts.

        Raises:
            ValueError: no operand had a nonzero finite element.
            ModuleNotFoundError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        casts = [cast for cast in self.casts if cast.histogram.counts][:top]
        across, down = min(_ACROSS, len(casts)), math.ceil(len(casts) / _ACROSS)
        figure = Figure(figsize=(3.4 * across + 0.6, 2.3 * down + 1), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False, sharey=True).flat
        for axes in panels[len(casts) :]:
            axes.set_visible(False)
        for cast, axes in zip(casts, panels, strict=False):
            _draw(axes, cast)
        at = "" if self.step is None else f", step {self.step}"
        figure.suptitle(f"{self.model}{at} ({len(casts)} worst of {len(self)} casts)")
        figure.supxlabel(_LEGEND, fontsize=9)
        figure.supylabel("share of nonzero elements", fontsize=9)
        figure.savefig(path, dpi=130)

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
        casts = [cast for cast in self._rows if cast.operand == operand]
        wrong = [c for c in casts if c.granularity.endswith(SMOOTH) or c.nonfinite or not c.amax]
        if wrong or not casts:
            at = f"{layer_name(wrong[0].layer)}, {wrong[0].amax:g}" if wrong else "none was seen"
            raise ValueError(
                f"no static scale suits operand {operand!r} ({at}): it needs finite values like "
                "those to come, and float8.calibrate(model, batches) with smooth_input=True"
            )
        first = {cast.layer: cast.gemm for cast in reversed(casts)}  # other GEMMs, other formats
        scales = dict.fromkeys(first, torch.finfo(torch.float32).tiny)
        for cast in casts:
            if cast.gemm == first[cast.layer]:
                scale = cast.amax / FORMAT_OF[cast.format].max
                scales[cast.layer] = max(scales[cast.layer], scale)
        return scales

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
        (report,) = load_run(path)
        return report

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        at = "" if self.step is None else f", step={self.step}"
        return f"Report({self.model or 'no model'}, {len(self._rows)} rows{at})"


_ACROSS = 4  # panels of a picture
_COLOURS = {"input": "tab:blue", "weight": "tab:green", "grad_output": "tab:orange"}
_LEGEND = (
    "magnitude, in powers of two; shaded: becomes zero (left) or saturates (right)\n"
    "dashed: the smallest normal value"
)


def _draw(axes: Axes, cast: CastStatistics) -> None:
    starts, ends, shares = zip(*bars_of(cast), strict=True)
    widths = [end - start for start, end in zip(starts, ends, strict=True)]
    axes.set(yscale="log", ylim=(1e-7, 1.5))
    axes.bar(starts, shares, width=widths, align="edge", color=_COLOURS[cast.operand], lw=0)
    edges = edges_of(cast)
    left, right = min([starts[0], *edges]) - 2, max([ends[-1], *edges]) + 2
    axes.set_xlim(left, right)
    if edges:
        for span in ((left, edges[0]), (edges[-1], right)):
            axes.axvspan(*span, color="tab:red", alpha=0.13, lw=0, zorder=0)
        normal = edges[2] - math.log2(cast.scale_max / cast.scale_min)
        axes.axvline(normal, color="0.4", ls="--", lw=0.8)
    parts = [f"{c.head} {c.shown(getattr(cast, c.key))} {c.unit}" for c in COLUMNS if c.unit]
    parts += [f"{cast.nonfinite} inf or NaN"] if cast.nonfinite else []
    what = f"{layer_name(cast.layer)[-34:]}: {operand_name(cast)}, {cast.format}"
    axes.set_title(f"{what}\n{', '.join(parts)}", fontsize=7, loc="left")
    axes.tick_params(labelsize=7)


# --- files


def as_json(report: Report) -> str:
    """A snapshot as `write_run` takes it."""
    rows = [strict_json(row.as_dict()) for row in report._rows]
    snapshot = {"step": report.step, "rows": rows, "skipped": report.skipped}
    return json.dumps(snapshot, allow_nan=False)


def write_run(
    path: str | os.PathLike[str],
    model: str,
    snapshots: Sequence[str],
    alarms: Sequence[Alarm] = (),
) -> None:
    """Write snapshots, each as `as_json` returns it, to a file; see `replace_file`."""
    head = {"format": FORMAT, "version": VERSION, "float8": __version__}
    head |= {"torch": torch.__version__, "model": model}
    found = json.dumps([asdict(alarm) for alarm in alarms], allow_nan=False)
    text = f'{json.dumps(head)[:-1]}, "snapshots": [{", ".join(snapshots)}], "alarms": {found}}}'
    replace_file(Path(path), text)


def replace_file(path: Path, text: str) -> None:
    """Write a whole file. A reader finds the old content or the new one, whatever happens.

    Raises:
        OSError: it could not be written. The old file is unchanged, and no other file is left.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        with suppress(OSError):  # it was not created, or was moved
            temporary.unlink()


def try_writing(path: Path) -> None:
    """Raise OSError if a file cannot be written now; its content stays."""
    # A file that does not exist is not made: another rank may look for it now.
    probe = path if path.exists() else path.with_name(f"{path.name}.{os.getpid()}.part")
    with probe.open("ab"):
        pass
    if probe != path:
        probe.unlink()


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
        # The KeyError of another kind or version names it.
        snapshots = {(FORMAT, VERSION): content["snapshots"]}[content["format"], content["version"]]
        reports = [_from_snapshot(each, content["model"]) for each in snapshots]
        return Run(reports, [Alarm(**each) for each in content["alarms"]])
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # or not JSON, not text
        raise ValueError(
            f"{path} is not a report of {FORMAT}, version {VERSION}: {error!r}"
        ) from error


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


def _from_snapshot(found: Mapping[str, Any], model: str) -> Report:
    rows = [cast_from_json(row) for row in found["rows"]]
    return Report(rows, model=model, step=found["step"], skipped=found.get("skipped"))
