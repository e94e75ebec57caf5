"""The page is one file that needs nothing else, shows the run, and executes none of it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from fresh import ROOT
from runs import EVIL, HEALTHY, run

from float8.numerics.alarms import watch_of
from float8.numerics.report import DECADES, ROW_COLUMNS, SHARE_LEVELS, content, main, page, shares
from float8.numerics.snapshot import Report
from float8.numerics.statistics import Histogram

ABOUT = {"file": "run.json", "float8": "1", "torch": "2"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Parsed(HTMLParser):
    """Tags with their attributes, and the text of each script and style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.raw, self._open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        kind = dict(attrs).get("type", "")
        self._open = f"{tag} {kind}".strip() if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.raw[self._open] = self.raw.get(self._open, "") + data


@pytest.fixture(scope="module")
def text():
    return page(run(), ABOUT)


@pytest.fixture(scope="module")
def parsed(text):
    return Parsed(text)


# --- the file


def test_nothing_of_the_run_is_markup(text, parsed):
    assert not {"img", "iframe", "link", "object", "base"} & {tag for tag, _ in parsed.tags}
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert not [a for _, attributes in parsed.tags for a in attributes if a.startswith("on")]
    assert EVIL not in text
    data = json.loads(parsed.raw["script application/json"])
    assert EVIL in [cast[0] for cast in data["casts"]]


def test_nothing_is_fetched_and_only_its_own_script_runs(text, parsed):
    assert re.findall(r"\w+://[^\"'\s]*", text) == ["http://www.w3.org/2000/svg"]  # a name
    (policy,) = [a["content"] for tag, a in parsed.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; ")
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(parsed.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_without_javascript_the_worst_casts_are_there(text):
    table = text[text.index("<noscript>") : text.index("</noscript>")]
    layers = re.findall(r"<tr><td>(.*?)</td>", table)
    assert html.unescape(layers[0]) == EVIL
    assert layers[1] == "blocks.2.ffn"
    assert len(layers) == len(run()[0].rows())


def test_a_large_run_stays_small():
    small, large = run(steps=(0,), layers=200), run(steps=(0, 1), layers=200)
    more = len(page(large, ABOUT)) - len(page(small, ABOUT))
    assert more < 110 * len(small[0])  # bytes for each cast and snapshot; its JSON has 650


# --- what it says


def test_the_numbers_are_those_of_the_run_in_four_digits():
    reports = run(steps=(0, 50), layers=3)
    found = content(reports, ABOUT)
    for report, snapshot in zip(reports, found["snapshots"], strict=True):
        assert snapshot["step"] == report.step
        for row, values in zip(report.casts, snapshot["rows"], strict=True):
            said = dict(zip(ROW_COLUMNS, values, strict=True))
            named = (*row.key, row.format, row.scaling, row.granularity)
            assert tuple(found["casts"][said["cast"]]) == named
            for name in ("amax", "sqnr", "flushed", "scale_max", "kurtosis", "nonfinite"):
                value, expected = said[name], getattr(row, name)
                assert (value is None) == (expected is None)
                if value is not None:
                    assert float(value) == pytest.approx(expected, rel=5e-4)


def test_alarms_say_when_they_were_and_lead_to_their_snapshot():
    reports = run(steps=(0, 50, 100, 150))
    watch = watch_of(reports)
    (bad,) = [alarm for alarm in watch.alarms if alarm.layer == "blocks.2.ffn"][:1]
    old = replace(watch.alarms[0], first=-9, started=-8, last=-7, ended=-6)
    found = content(reports, ABOUT, [old, *watch.alarms])
    assert (found["alarm_count"], found["active_alarms"]) == (
        len(watch.alarms) + 1,
        len(watch.alarms),
    )
    assert found["alarms"][-1]["snapshot"] is None, "what has ended comes last"
    (said,) = [a for a in found["alarms"] if (a["rule"], a["layer"]) == (bad.rule, bad.layer)]
    assert (said["first"], said["started"], said["ended"]) == (0, 100, None)
    assert found["snapshots"][said["snapshot"]]["step"] == 100
    assert tuple(found["casts"][said["cast"]]) == tuple(bad.labels)
    assert content(reports, ABOUT)["alarms"] == []


def test_a_histogram_as_a_string_keeps_its_shares():
    counts = (1, 0, 30, 10**4, 10**7, 123_456_789)
    text = shares(Histogram(-5, counts))
    assert text[1] == SHARE_LEVELS[0]
    for character, count in zip(text, counts, strict=True):
        level = SHARE_LEVELS.index(character) / (len(SHARE_LEVELS) - 1)
        if count > 1:  # one in 10^8 is below what it tells apart
            assert 10 ** (DECADES * (level - 1)) == pytest.approx(count / sum(counts), rel=0.12)
        assert (level > 0) == (count > 0)
    assert len(set(SHARE_LEVELS)) == len(SHARE_LEVELS)
    assert not set(SHARE_LEVELS) & set('<>&\\"')


def test_the_summary_is_a_sentence():
    def summary(*rows):
        return content([Report(rows)], ABOUT)["snapshots"][0]["summary"]

    healthy = "All 2 casts keep what their formats can keep: there is nothing to do."
    assert summary(HEALTHY, HEALTHY) == healthy
    found = content(run(), ABOUT)["snapshots"][0]
    assert found["summary"] == "2 of 92 casts want a look."
    assert [problem["level"] for problem in found["problems"]] == [2, 2, 1]


# --- in a browser

# Frames, because a window has a least width. Their pages follow the frames' colour schemes.
HARNESS = """<!doctype html><title>harness</title>
<style>body { margin: 0; display: flex } iframe { border: 0; height: 1500px }</style>
<iframe id="wide" src="page.html#problems=0" style="width:1280px;color-scheme:light"></iframe>
<iframe id="phone" src="page.html#open=0" style="width:380px;color-scheme:dark"></iframe>
<pre id="result" hidden></pre>
<script>
addEventListener("load", () => {
  const facts = {};
  try { look(facts); } catch (error) { facts.error = String(error.stack); }
  document.getElementById("result").textContent = encodeURIComponent(JSON.stringify(facts));
});
function look(facts) {
  const wide = document.getElementById("wide").contentDocument;
  const phone = document.getElementById("phone").contentDocument;
  const layers = (page) => [...page.querySelectorAll("td.layer")].map((td) => td.innerText.trim());
  const fits = (page) => [page.documentElement.scrollWidth, page.documentElement.clientWidth];
  const sorted = () => [...wide.querySelectorAll("th[aria-sort]")]
    .map((th) => [th.dataset.key, th.getAttribute("aria-sort")]);
  const press = (key) => wide.querySelector(`th[data-key="${key}"] button`).click();
  const type = (id, value) => {
    wide.getElementById(id).value = value;
    wide.getElementById(id).dispatchEvent(new Event(id === "step" || id === "filter" ? "input"
      : "change", { bubbles: true }));
  };
  const count = () => wide.getElementById("count").innerText;
  facts.start = { layers: layers(wide), sorted: sorted(), count: count() };
  facts.fits = { wide: fits(wide), phone: fits(phone) };
  facts.images = wide.images.length + phone.images.length;
  facts.title = wide.title;
  facts.heading = wide.querySelector("h1").innerText;
  facts.health = wide.getElementById("health").innerText;
  facts.skipped = wide.getElementById("health").textContent;
  facts.buttons = [...wide.querySelectorAll("th[data-key]")]
    .every((th) => th.querySelector("button"));
  press("layer"); facts.up = { layers: layers(wide), sorted: sorted() };
  press("layer"); facts.down = { layers: layers(wide), sorted: sorted() };
  press("kurtosis"); facts.kurtosis = { layers: layers(wide), sorted: sorted() };
  type("sort", "sqnr asc");
  type("filter", "BLOCKS.1"); facts.filtered = layers(wide);
  type("filter", "");
  type("operand", "weight"); facts.weights = count();
  type("operand", "");
  wide.getElementById("more").click(); facts.more = layers(wide).length;
  wide.getElementById("problems").click(); facts.problems = layers(wide);
  const open = wide.querySelectorAll("td.layer button")[1];
  open.click();
  const detail = wide.querySelector("tr.detail");
  facts.opened = open.getAttribute("aria-expanded");
  facts.bars = Object.fromEntries(["bar", "bar-saturated", "zone-flushed", "zone-normal",
    "zone-saturated"].map((name) => [name, detail.querySelectorAll(`.${name}`).length]));
  facts.advice = detail.innerText;
  facts.coloured = [...wide.querySelectorAll("tr.cast")].slice(0, 2).map((row) =>
    [...row.querySelectorAll("td.level-2")].map((td) => td.dataset.label));
  facts.unknown = wide.querySelector("tr.cast td.sqnr").innerText;
  facts.sqnr = wide.querySelectorAll("tr.cast td.sqnr .value")[1].innerText;
  type("step", 0);
  facts.earlier = wide.querySelectorAll("tr.cast td.sqnr .value")[1].innerText;
  facts.step = wide.getElementById("step-name").innerText;
  wide.querySelectorAll("td.layer button")[1].click();
  facts.closed = wide.querySelectorAll("tr.detail").length;
  wide.getElementById("problems").click();
  facts.phoneOpen = phone.querySelectorAll("tr.detail").length;
  facts.troubled = phone.getElementById("problem-steps").innerText;
  phone.querySelector("#problem-steps button").click();
  facts.gone = phone.querySelector("#health h2").innerText;
  facts.background = [wide, phone].map((page) => getComputedStyle(page.body).backgroundColor);
}
</script>"""


def browse(folder, picture):
    """The harness's DOM, and what was written to the console; one start of Chromium for both."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-extensions", "--disable-breakpad",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
            f"--user-data-dir={folder / 'profile'}", "--allow-file-access-from-files",
            "--window-size=1660,1500", "--dump-dom", f"--screenshot={picture}",
            (folder / "harness.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(text)
    (folder / "harness.html").write_text(HARNESS)
    return folder


@pytest.fixture(scope="module")
def facts(folder):
    from urllib.parse import unquote

    dom, console = browse(folder, folder / "page.png")
    assert console == []
    found = json.loads(unquote(re.search(r'<pre id="result".*?>(.*?)</pre>', dom)[1]))
    assert "error" not in found, found["error"]
    return found


def by_number(layers):
    """The numbers in the names of layers that have one."""
    return [int(match[1]) for layer in layers if (match := re.search(r"blocks\.(\d+)", layer))]


def test_the_worst_comes_first_and_says_so(facts):
    layers = [layer.splitlines()[-1] for layer in facts["start"]["layers"]]
    assert EVIL in layers[0]
    assert layers[1].endswith("blocks.2.ffn")
    assert facts["start"]["sorted"] == [["sqnr", "ascending"]]
    assert facts["start"]["count"] == "92 of 92 casts"
    assert "Something is wrong at step 100" in facts["health"]
    assert facts["unknown"].endswith("bad\n4 inf or NaN")
    assert "elements are not finite" in facts["health"]
    assert "One cast saturates" in facts["health"]
    assert "it was not called" in facts["skipped"]


def test_columns_sort_both_ways(facts):
    up, down = facts["up"], facts["down"]
    assert up["sorted"] == [["layer", "ascending"]]
    assert down["sorted"] == [["layer", "descending"]]
    assert by_number(up["layers"]) == sorted(by_number(up["layers"]))
    assert by_number(down["layers"]) == sorted(by_number(down["layers"]), reverse=True)
    assert facts["kurtosis"]["sorted"] == [["kurtosis", "descending"]]
    kurtosis = by_number(facts["kurtosis"]["layers"])
    assert kurtosis[0] == 2  # 400; the others' grow with their numbers
    assert kurtosis[1:] == sorted(kurtosis[1:], reverse=True)
    assert facts["buttons"], "a header that a keyboard can press is a button"


def test_rows_are_filtered_and_drawn_as_they_are_needed(facts):
    assert set(by_number(facts["filtered"])) == {1, *range(10, 20)}
    assert facts["weights"] == "30 of 92 casts"
    assert len(facts["start"]["layers"]) <= facts["more"] == 92
    assert len(facts["problems"]) == 2
    assert by_number(facts["problems"]) == [2]


def test_a_row_opens_into_its_histogram_and_advice(facts):
    assert facts["opened"] == "true"
    bars = facts["bars"]
    assert bars["bar"] >= 15
    assert bars["zone-flushed"] == bars["zone-normal"] == bars["zone-saturated"] == 1
    for said in ("It saturates.", "It has a stale scale."):
        assert said in facts["advice"]
    assert "It loses precision." not in facts["advice"], "the others say why"
    assert facts["coloured"] == [["SQNR dB"], ["SQNR dB", "Saturated", "Stale"]]
    assert facts["closed"] == 0
    assert facts["phoneOpen"] == 1, "the address asked for it"


def test_steps_can_be_chosen(facts):
    assert (facts["sqnr"], facts["earlier"], facts["step"]) == ("8.0", "9.0", "step 0")
    assert " ".join(facts["troubled"].split()) == "Wants a look: step 0 to step 100 bad"
    assert facts["gone"] == "Something is wrong at step 0"


def test_names_that_are_markup_stay_text(facts):
    assert facts["images"] == 0
    assert facts["title"] == f"GPT{EVIL}: float8 numerics"
    assert facts["heading"] == f"GPT{EVIL}"


def test_no_page_scrolls_sideways(facts):
    for name, (content_width, width) in facts["fits"].items():
        assert content_width <= width, name


def test_it_is_drawn_light_and_dark(folder, facts):
    image = pytest.importorskip("matplotlib.image")
    assert facts["background"] == ["rgb(245, 246, 248)", "rgb(15, 18, 22)"]
    pixels = image.imread(folder / "page.png")[..., :3]
    assert pixels.shape[:2] == (1500, 1660)
    wide, phone = pixels[:, :1280], pixels[:, 1280:]
    assert wide.mean() > 0.85 and (wide.max(-1) < 0.3).mean() > 0.002, "dark text on light"
    assert phone.mean() < 0.25 and (phone.max(-1) > 0.8).mean() > 0.002, "light text on dark"
    for part in (wide, phone):
        assert len({tuple(p) for p in (part[::5, ::5].reshape(-1, 3) * 31).astype(int)}) > 40
        red, _, blue = part[..., 0], part[..., 1], part[..., 2]
        assert ((blue - red) > 0.4).sum() > 300, "bars and lines in the accent colour"


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.json"
    Report([HEALTHY], model="GPT", step=7).save(path)
    return path


def test_the_page_lies_beside_the_run_and_its_path_is_printed(run_file, capsys):
    assert main([str(run_file)]) == 0
    page = run_file.with_suffix(".html")
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    assert "<h1>GPT</h1>" in text
    for said in ("run.json", json.loads(run_file.read_text())["torch"]):
        assert said in text


def test_it_lies_where_it_is_asked_for(run_file, tmp_path):
    assert main([str(run_file), "-o", str(tmp_path / "a page")]) == 0
    assert (tmp_path / "a page").is_file()
    assert not run_file.with_suffix(".html").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        ("{", "is not a report of float8.numerics"),
        (
            '{"format": "float8.numerics", "version": 1, "model": "", "snapshots": []}',
            "there is no snapshot",
        ),
    ],
)
def test_a_file_that_is_no_run_is_one_line_and_status_2(content, complaint, tmp_path, capsys):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert complaint in printed.err
    assert str(path) in printed.err


def test_what_cannot_be_written_is_said(run_file, tmp_path, capsys):
    assert main([str(run_file), "-o", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    assert main([str(run_file), "-o", str(run_file)]) == 2
    assert "would overwrite the run" in capsys.readouterr().err


def test_the_module_runs_without_a_warning(run_file):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "float8.numerics.report", str(run_file)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
