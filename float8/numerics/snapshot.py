"""`Report`: the casts of a model at one moment, to read, to save and to merge.

`COLUMNS` are the numbers that a table of casts has, as text and on the page: each with the field of
`CastStatistics` that it shows, its head, and its format.

::

    with inspect(model) as report:
        loss(model(x), y).backward()
    print(report)                                  # report.table(top=20): the worst 20
    report.save("run.json")

A file is strict JSON and holds a run: one snapshot or many, and its alarms::

    {"format": "float8.numerics", "version": 4, "float8": "...", "torch": "...", "model": "GPT",
     "snapshots": [{"step": 50, "rows": [{"layer": "blocks.0.attn", ...}], "skipped": {}}],
     "alarms": [{"rule": "saturation", "layer": "blocks.0.attn", "first": 20, ...}]}

inf and NaN are the strings "inf", "-inf" and "nan". `load_run` reads all snapshots, `load_alarms`
the alarms.
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

from float8.convert.folding import folded, named
from float8.numerics.alarms import Alarm, kinds_of, level_of, problems_of
from float8.numerics.statistics import LABELS, CastStatistics, Histogram, merged
from float8.version import __version__

if TYPE_CHECKING:
    import torch.distributed as dist

FORMAT, VERSION = "float8.numerics", 4


class Column(NamedTuple):
    """A column of a table: which value, its head, how a number is printed, its name."""

    key: str
    head: str
    spec: str = ""
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
    Column("flushed", "flushed %", ".2f", 100, "Flushed %"),
    Column("saturated", "satur. %", ".2f", 100, "Saturated %"),
    Column("sqnr", "SQNR dB", ".1f", name="SQNR dB"),
    Column("kurtosis", "kurt.", ".3g", name="Kurtosis"),
    Column("staleness", "stale 2^", "+.1f", name="Stale"),
)


def text_table(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], top: int | None
) -> str:
    """The first ``top`` rows as text."""
    from tabulate import tabulate

    lines = [[c.shown(row[c.key]) for c in columns] for row in rows[:top]]
    align = ["right" if c.spec else "left" for c in columns]
    # A line of the table: with headers of its own tabulate makes columns two wider.
    table = [[c.head for c in columns], *lines]
    text = tabulate(table, (), "plain", colalign=align, disable_numparse=True)
    return f"{text}\nand {len(rows) - len(lines)} more" if len(lines) < len(rows) else text


_SCALARS = (*(column.key for column in COLUMNS), "nonfinite", "gradient_sqnr")


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
        """Worst first: by level, by kind of problem and its size; those without one by SQNR.

        The SQNR alone would put a cast last that keeps one huge element and flushes all others.
        """
        found = [cast for problem in problems_of(self._rows) for cast in problem.casts]
        order = {id(cast): i for i, cast in reversed([*enumerate(found)])}

        def place(cast: CastStatistics) -> tuple[int, float, float]:
            sqnr = math.inf if cast.sqnr is None else cast.sqnr
            return -level_of(cast), order.get(id(cast), math.inf), sqnr

        return sorted(self._rows, key=place)

    def rows(self) -> list[dict[str, Any]]:
        """The casts as dictionaries, worst first.

        The keys are the fields of `CastStatistics`, and ``problems``: a list of what is wrong, such
        as "flush". It is empty for a healthy cast. The SQNR alone does not tell: it
        weighs by power, and a cast that keeps few large elements has a high one.
        """
        return [vars(c) | {"problems": [k.name for k in kinds_of(c)]} for c in self.casts]

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
            name = named(cast.layer.removeprefix(prefix))
            return vars(cast) | {"layer": name, "operand": operand_name(cast)}

        columns = LAYER, Column("operand", "operand"), FORMAT_NAME, *COLUMNS
        text = text_table(columns, [row(cast) for cast in casts], top)
        notes = [f"layer names begin with {prefix!r}"] if prefix else []
        notes += [f"{problem.title}: {problem.text}" for problem in problems_of(casts)]
        notes += [f"not seen: {line}" for line in folded(self.skipped.items())]
        wrapped = (textwrap.fill(n, 100, subsequent_indent="  ") for n in notes)
        return "\n".join([text, *wrapped])

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
        names: dict[tuple[str, str], str] = {}
        for cast in self._rows:
            first = names.setdefault((cast.layer, cast.operand), cast.gemm)
            path = cast.layer, cast.operand, *([cast.gemm] if cast.gemm != first else [])
            for name in _SCALARS:
                value = getattr(cast, name)
                if value is not None and math.isfinite(value):
                    writer.add_scalar("/".join(("float8", *path, name)), value, at or 0)

    def merged(self, *others: Report) -> Report:
        """One report of the elements of all: of other ranks, batches or steps of one model.

        Args:
            others: reports of the same model; casts that differ stay apart.
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

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        at = "" if self.step is None else f", step={self.step}"
        return f"Report({self.model or 'no model'}, {len(self._rows)} rows{at})"


# --- files


def as_json(report: Report) -> str:
    """A snapshot as `write_run` takes it."""
    rows = [strict_json(vars(row)) for row in report._rows]
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


def load_run(path: str | os.PathLike[str]) -> list[Report]:
    """The reports of a file, in the order in which they were written.

    Args:
        path: of a file that `inspect_every` or `Report.save` wrote.

    Raises:
        ValueError: the file is not JSON, of another kind, or of another version.
    """
    return read_run(path)[0]


def load_alarms(path: str | os.PathLike[str]) -> list[Alarm]:
    """The alarms of a run's file, in the order in which they started.

    Args:
        path: of a file that `inspect_every` wrote.

    Raises:
        ValueError: as of `load_run`.
    """
    return read_run(path)[1]


def read_run(path: str | os.PathLike[str]) -> tuple[list[Report], list[Alarm]]:
    """Snapshots and alarms of a file, of which some may have started before; see `load_run`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if (found := (content["format"], content["version"])) != (FORMAT, VERSION):
            raise ValueError(f"it is {found}")
        reports = [
            Report(
                map(_cast_from_json, each["rows"]),
                model=content["model"],
                step=each["step"],
                skipped=each["skipped"],
            )
            for each in content["snapshots"]
        ]
        return reports, [Alarm(**each) for each in content["alarms"]]
    except (KeyError, TypeError, ValueError) as error:  # or not JSON, not text
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


def _cast_from_json(row: Mapping[str, Any]) -> CastStatistics:
    """The inverse of ``strict_json(vars(cast))``; TypeError if a field is not known."""
    given: dict[str, Any] = {
        # A layer may be called "nan".
        name: float(value) if isinstance(value, str) and name not in LABELS else value
        for name, value in row.items()
    }
    lowest, counts = given["histogram"]
    given |= {"histogram": Histogram(lowest, tuple(counts))}
    return CastStatistics(**given | {"sums": tuple(map(float, given["sums"]))})
