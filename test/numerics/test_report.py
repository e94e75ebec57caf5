"""The page is one file that needs nothing else, shows the run, and executes none of it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from runs import EVIL, HEALTHY, run

from float8.numerics.alarms import AlarmWatch
from float8.numerics.report import edges_of, histogram, lines, main, page
from float8.numerics.snapshot import COLUMNS, Report
from float8.numerics.statistics import Histogram

ABOUT = {"file": "run.json", "float8": "1", "torch": "2"}


class Parsed(HTMLParser):
    """Tags with their attributes, all text, and the text of the script and the style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.raw, self.text, self._open = [], {}, "", None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.raw[self._open] = data
        else:
            self.text += data

    def ids(self, start):
        return [a["id"] for _, a in self.tags if re.fullmatch(f"{start}\\d+", a.get("id", ""))]


def said(*args, **kwargs):
    """The text of a page."""
    return " ".join(Parsed(page(*args, **kwargs)).text.split())


# --- the file


def test_nothing_of_the_run_is_markup():
    reports = run()
    rows = [replace(HEALTHY, layer=EVIL, operand=EVIL, gemm=EVIL, scaling=EVIL, granularity=EVIL)]
    reports += [Report([*rows, *reports[0]._rows], model=EVIL, step=EVIL, skipped={EVIL: EVIL})]
    alarms = [replace(alarm, rule=EVIL, message=EVIL, first=EVIL, last=EVIL, started=EVIL)
              for alarm in AlarmWatch(run()).alarms]  # fmt: skip
    text = page(reports, dict.fromkeys(ABOUT, EVIL), alarms)
    parsed = Parsed(text)
    assert not {"img", "iframe", "link", "object", "base"} & {tag for tag, _ in parsed.tags}
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert not [a for _, attributes in parsed.tags for a in attributes if a.startswith("on")]
    assert EVIL not in text
    assert EVIL in parsed.text


def test_nothing_is_fetched_and_only_its_own_script_runs():
    text = page(run(), ABOUT)
    parsed = Parsed(text)
    assert re.findall(r"\w+://[^\"'\s]*", text) == []
    (policy,) = [a["content"] for tag, a in parsed.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; ")
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(parsed.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


# --- what it says


def test_every_cast_has_a_row_with_its_numbers_and_pictures_the_worst_first():
    reports = run(steps=(0, 50), layers=3)
    rows = page(reports, ABOUT).split("<details id=")[1:]
    assert len(rows) == len(reports[-1])
    for i, (row, cast) in enumerate(zip(rows, reports[-1].casts, strict=True)):
        assert row.startswith(f'"c{i}"')
        text = Parsed("<p id=" + row).text
        assert (cast.layer, cast.operand) == (text[: len(cast.layer)], cast.operand)
        for column in COLUMNS:
            assert column.shown(getattr(cast, column.key)) in text
        facts = (
            f"<dt>elements</dt><dd>{cast.elements:,} in 1 call</dd>",
            "<dt>zeros</dt><dd>0</dd>",
        )
        assert all(fact in row for fact in facts) and cast.format.upper() in text
        assert (f'id="h{i}"' in row) and (f'id="t{i}"' in row) == (
            cast.sqnr not in (None, math.inf)
        )
    assert EVIL in Parsed(rows[0]).text
    assert 'class="sqnr l2"' in rows[1] and 'class="saturated l2"' in rows[1]
    assert "saturation. " in Parsed(rows[1]).text
    assert "It wants a look at step 0, step 50." in Parsed(rows[1]).text
    assert not re.search(r'class="\w+ l[12]"><small class="name"', rows[5]), "a healthy cast"
    unknown = page([Report([replace(HEALTHY, sqnr=None, saturated=0.5)])], ABOUT)
    assert 'class="saturated l2"' in unknown and 'class="sqnr l2"' not in unknown
    assert "from 0.001" in said([Report([replace(HEALTHY, scale_min=1e-3)])], ABOUT)


def test_the_verdict_comes_first_and_links_to_the_casts():
    text, parsed = said(run(), ABOUT), Parsed(page(run(), ABOUT))
    verdict = "Something is wrong at step 100 2 of 92 casts want a look."
    assert re.sub(r"\s", "", verdict) in re.sub(r"\s", "", text)
    assert text.index("Something is wrong") < text.index("SQNR over the run")
    for words in ("saturation", "elements are not finite", "it was not called"):
        assert words in text
    links = [a["href"] for tag, a in parsed.tags if tag == "a"]
    assert links == ["#c0", "#c1", "#c1"]
    assert set(links) <= {f"#{name}" for name in parsed.ids("c")}


# --- pictures


def boxes(picture, kind):
    """(left, right, height) of each box, in octaves and hundredths."""
    found = [d for name, d in picture.paths.items() if re.fullmatch(kind, name)]
    numbers = [re.findall(r"M(\d+) 100V(-?\d+)H(\d+)V100z", d) for d in found]
    return [(int(a) / 10, int(b) / 10, 100 - int(y)) for each in numbers for a, y, b in each]


def test_a_histogram_has_a_bar_for_each_power_of_two_over_the_range_of_the_format():
    counts = (1, 0, 30, 10**4, 10**7, 123_456_789)
    cast = replace(
        HEALTHY, histogram=Histogram(-5, counts), amax=1.5, scale_min=0.25, scale_max=0.5
    )
    assert edges_of(cast) == pytest.approx(
        [math.log2(v) for v in (2**-10 / 4, 2**-10 / 2, 2**-6 / 2, 448 / 4, 448 / 2)]
    )
    picture = histogram(cast)
    first = -13  # an octave below the range
    names = "flushed", "flushed-some", "subnormal", "normal", "saturated-some", "saturated"
    zones = [boxes(picture, f"zone {name}")[0][:2] for name in names]
    ends = [first, -12, -11, -7, math.log2(112), math.log2(224), 10]
    expected = [(a - first, b - first) for a, b in pairwise(ends)]
    assert zones == [pytest.approx(pair, abs=0.06) for pair in expected]
    bars = sorted(boxes(picture, r"bar \w+"))
    assert [round(left + first) for left, _, _ in bars] == [-5, -3, -2, -1, 0]
    for (_, _, height), count in zip(bars, filter(None, counts), strict=True):
        share = 100 * (1 + math.log10(count / sum(counts)) / 8)
        assert height == pytest.approx(max(share, 2), abs=0.6)
    assert bars[-1][1] + first == pytest.approx(math.log2(1.5), abs=0.06), "it ends at the amax"
    assert {"2⁰", "2⁻⁸"} < {text for _, text in picture.marks}


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((30.0, 30.0, 30.01), (30, 31)),  # noise stays small
        ((29.2, None, 32.9), (29, 30, 31, 32, 33)),
        ((-3.0, math.inf, 44.0), (-20, 0, 20, 40, 60)),
        ((None, 5.0, 300.0), (0, 100, 200, 300)),
    ],
)
def test_a_line_has_an_axis_of_whole_db_on_which_its_points_lie(values, ticks):
    picture = lines({"own": values}, [f"step {i}" for i in range(3)])
    assert [text for _, text in picture.levels] == [f"{tick} dB" for tick in ticks]
    (top, bottom) = picture.levels[-1][0], picture.levels[0][0]
    known = [v for v in values if v is not None and math.isfinite(v)]
    points = re.findall(r"[ML](\d+) (\d+)", picture.paths["line own"])
    for (_, y), value in zip(points, known, strict=True):
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        assert float(y) == pytest.approx(bottom + share * (top - bottom), abs=1)
    assert picture.marks == [(0.0, "step 0"), (50.0, "step 1"), (100.0, "step 2")]
    assert f">{ticks[-1]} dB</text>" in page(
        [Report([replace(HEALTHY, sqnr=v)], step=i) for i, v in enumerate(values)], ABOUT
    )


def test_alarms_come_by_the_table_of_rules_and_those_that_ended_last():
    (one, *_) = AlarmWatch(run()).alarms
    order = [("saturation", 9, None), ("flush", 5, None), ("stale scale", 9, None),
             ("stale scale", 7, None), ("inf or NaN", 9, 9)]  # fmt: skip
    alarms = [replace(one, rule=r, layer=f"{r}{s}", started=s, ended=e) for r, s, e in order]
    alarms.sort(key=lambda alarm: alarm.started)  # as in a file
    text = said([Report([HEALTHY])], ABOUT, alarms)
    places = [text.index(f"{rule}: {rule}{started}") for rule, started, _ in order]
    assert places == sorted(places)


# --- the command


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.json"
    Report([HEALTHY], model="GPT", step=7).save(path)
    return path


def test_the_page_lies_beside_the_run_or_where_it_is_asked_for(run_file, tmp_path, capsys):
    assert main([str(run_file), "-o", str(tmp_path / "a page"), "--step", "7"]) == 0
    assert (tmp_path / "a page").is_file()
    capsys.readouterr()
    result = run_file.with_suffix(".html")
    assert not result.exists()
    assert main([str(run_file)]) == 0
    assert capsys.readouterr().out == f"{result}\n"
    text = result.read_text()
    for words in ("<h1>GPT</h1>", "run.json", json.loads(run_file.read_text())["torch"]):
        assert words in text


def test_what_cannot_be_read_or_written_is_one_line_and_status_2(run_file, tmp_path, capsys):
    other = tmp_path / "other.json"
    empty = (
        '{"format": "float8.numerics", "version": 4, "model": "", "snapshots": [], "alarms": []}'
    )
    for content, arguments, complaint in (
        (None, [other], "No such file"),
        ("{", [other], "is not a report of float8.numerics"),
        (empty, [other], "no snapshot"),
        (empty, [run_file, "-o", tmp_path], "Is a directory"),
        (empty, [run_file, "-o", run_file], "would overwrite the run"),
        (empty, [run_file, "--step", "8"], "no snapshot of step 8"),
    ):
        if content is not None:
            other.write_text(content)
        assert main(list(map(str, arguments))) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert complaint in printed.err and str(tmp_path) in printed.err
