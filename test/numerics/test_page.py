"""The page with a keyboard, a mouse and a finger, and on paper: real input to a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from browser import CHROMIUM, Browser
from fresh import ROOT
from runs import run

from float8.numerics.alarms import watch_of
from float8.numerics.explanations import EXPLANATIONS
from float8.numerics.problems import (
    EXPECTED_SQNR,
    FLUSHED,
    MANY_OUTLIERS,
    MISSING_SQNR,
    STALE_ABOVE,
    STALE_BELOW,
)
from float8.numerics.report import _resource, page

ABOUT = {"file": "run.json", "float8": "1", "torch": "2"}
SORTED = (
    "Array.from(document.querySelectorAll('th[aria-sort]'), (th) => [th.dataset.key, th.ariaSort])"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(page(run(), ABOUT), encoding="utf-8")
    reports = run(steps=(0, 50, 100, 150))
    alarms = watch_of(reports).alarms
    alarmed = page(reports, ABOUT, [replace(alarms[0], ended=120), *alarms[1:]])
    (folder / "alarms.html").write_text(alarmed, encoding="utf-8")
    (folder / "large.html").write_text(page(run(steps=(0,), layers=300), ABOUT), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser(folder):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with Browser() as browser:
        yield browser
        assert browser.errors == []
        assert {address.split("#")[0] for address in browser.requests} <= {
            "about:blank", *(path.as_uri() for path in folder.iterdir())
        }  # fmt: skip


@pytest.fixture
def show(browser, folder):
    """Shows a view of the page in a window."""

    def show(view="", width=1280, dark=False, name="page.html"):
        browser.resize(width, 900)
        browser.prefer(color_scheme="dark" if dark else "light")
        browser.open("about:blank")  # another fragment alone would load nothing
        browser.open((folder / name).as_uri() + view)
        return browser

    return show


@pytest.fixture
def wide(show):
    wide = show()
    wide.point(1, 1)
    return wide


@pytest.fixture
def phone(show):
    return show("#open=0", width=400, dark=True)


def focused(browser, of="innerText"):
    return (browser.value(f"document.activeElement.{of}") or "").replace("▸\n", "").strip()


def tip(browser):
    return browser.value("byId('tip').hidden ? '' : byId('tip').innerText")


def focus(browser, selector):
    browser.value(f"document.querySelector({selector!r}).focus()")


def middle_of(browser, selector):
    return browser.value(
        f"(() => {{ const node = document.querySelector({selector!r});"
        "node.scrollIntoView({ block: 'center' }); const r = node.getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )


def wait_for_tip(browser):
    browser.value("new Promise((go) => setTimeout(go, 600))")
    return tip(browser)


# --- alarms


def test_alarms_are_said_and_shown(show):
    wide = show()
    assert wide.value("byId('alarms').hidden") is True
    wide = show(name="alarms.html")
    text = wide.value("byId('alarms').innerText")
    assert "alarms, " in text and "wrong from step 0 to step 150, not ended" in text
    assert "ended at step 120" in text
    place = wide.value(
        "(() => { const all = [...document.querySelectorAll('#alarms .problem')];"
        "const mine = all.find((one) => one.innerText.includes('saturation: blocks.2.ffn'));"
        "mine.querySelector('button').click();"
        "return [byId('step-name').textContent, document.activeElement.innerText.trim(),"
        " byId('operand').value]; })()"
    )
    assert place == ["step 100", "▸\nblocks.2.ffn", "grad_output"]


# --- explanations


def test_every_column_is_explained_where_it_stands(wide):
    heads = wide.value(
        "[...byId('head').children].map((th) => { const term = th.querySelector('[data-explain]');"
        "return [term.innerText.replace(/[▴▾]/, '').trim(),"
        " byId(term.getAttribute('aria-describedby')).textContent]; })"
    )
    assert len(heads) == 11
    by_name = {one.name: one for one in EXPLANATIONS.values()}
    for name, text in heads:
        one = by_name[name]
        for part in (one.meaning, f"Good {one.good}", f"Bad {one.bad}"):
            assert part in text
    assert set(by_name) - {name for name, _ in heads} == {"Inf or NaN", "Gradient SQNR"}, (
        "which have a tile, and a place in the opened rows"
    )
    assert wide.value("document.querySelectorAll('#tiles [data-explain]').length") == 5


def test_the_explanations_say_the_thresholds():
    assert "About 32 for E4M3 and 26 for E5M2" in EXPLANATIONS["sqnr"].good
    assert "Below 26 (E5M2: 20) wants a look, below 17 (11) is bad" in EXPLANATIONS["sqnr"].bad
    assert "Above 0.1 % wants a look, above 1 % is bad" in EXPLANATIONS["saturated"].bad
    good = EXPLANATIONS["staleness"].good
    assert good.startswith("Below +0.5; of a delayed scale also above -6.")
    assert set(EXPECTED_SQNR.values()) == {32.0, 26.0}


def test_the_documentation_has_the_columns_and_thresholds_of_the_page():
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    table = text[text.index("| column |") : text.index("A low SQNR of one cast")]
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()[2:] if line}
    shown = {one.name.lower().removesuffix(" db") for one in EXPLANATIONS.values()}
    described = {"layer", "operand", "powers of two", "over the run"}  # no number to judge
    assert {name.lower() for name in rows} == shown - described
    less, least = MISSING_SQNR
    assert f"below {32 - less:g} ({26 - less:g})" in rows["SQNR"]
    assert f"below {32 - least:g} ({26 - least:g})" in rows["SQNR"]
    assert f"below {100 * FLUSHED[0]:g} %" in rows["flushed"]
    assert f"below {MANY_OUTLIERS:g}" in rows["kurtosis"]
    range_of_stale = f"below +{STALE_ABOVE:g}; of a delayed scale also above {STALE_BELOW:g}"
    assert range_of_stale in rows["stale"]


def test_all_explanations_are_there_without_javascript():
    text = page(run(), ABOUT)
    fallback = text[text.index("<noscript>") : text.index("</noscript>")]
    for one in EXPLANATIONS.values():
        assert f"<dt>{one.name}</dt>" in fallback


def test_a_pointer_shows_an_explanation_and_leaving_hides_it(wide):
    wide.point(*middle_of(wide, "th[data-key=kurtosis] button"))
    assert wait_for_tip(wide).startswith("Kurtosis\nHow heavy the tails are")
    wide.point(*middle_of(wide, "#tip"))
    assert wait_for_tip(wide).startswith("Kurtosis"), "its text can be selected"
    wide.point(1, 1)
    assert wait_for_tip(wide) == ""


def test_a_tap_shows_an_explanation_on_a_phone(phone):
    assert not phone.value("byId('head').checkVisibility()")
    phone.tap(*middle_of(phone, "td.staleness button.cell-label"))
    assert tip(phone).startswith("Stale\nHow many octaves")
    inside = "(() => { const r = byId('tip').getBoundingClientRect();"
    inside += "return r.left >= 0 && r.right <= innerWidth; })()"
    assert phone.value(inside)
    phone.tap(*middle_of(phone, "#about"))
    assert tip(phone) == ""


def test_the_focus_shows_an_explanation_and_escape_hides_it(wide):
    focus(wide, "#problems")
    wide.press("Tab")
    assert focused(wide) == "Layer"
    wide.press("Tab", times=2)
    assert tip(wide).startswith("SQNR dB\nSignal to quantisation noise")
    wide.press("Escape")
    assert tip(wide) == ""
    assert "SQNR dB" in focused(wide), "the focus stays"
    wide.press("Tab")
    assert tip(wide).startswith("Powers of two")


# --- keys


def test_tab_reaches_every_control_in_the_order_of_the_page_and_the_focus_is_seen(wide):
    order = []
    for _ in range(34):
        wide.press("Tab")
        order.append(focused(wide, "id") or focused(wide).split("\n")[0])
        width = "parseFloat(getComputedStyle(document.activeElement).outlineWidth)"
        assert wide.value(width) >= 2, order[-1]
    head = [
        EXPLANATIONS[key].name for key in EXPLANATIONS if key not in ("nonfinite", "gradient_sqnr")
    ]
    for part in (["earlier", "step"], ["filter", "operand", "sort", "problems", "Layer"]):
        assert part == order[order.index(part[0]) :][: len(part)]
    start = order.index("Layer")
    assert sorted(re.sub("[▴▾]", "", name) for name in order[start : start + 11]) == sorted(head)
    assert order[start + 12] == "blocks.2.ffn", "and then the rows"


def test_enter_and_space_sort_by_a_header(wide):
    focus(wide, "th[data-key=kurtosis] button")
    wide.press("Enter")
    assert wide.value(SORTED) == [["kurtosis", "descending"]]
    assert "by Kurtosis, descending" in wide.value("byId('caption').textContent")
    wide.press(" ")
    assert wide.value(SORTED) == [["kurtosis", "ascending"]]
    assert "Kurtosis" in focused(wide), "the focus stays"


def test_arrows_go_through_headers_and_rows(wide):
    focus(wide, "th[data-key=layer] button")
    wide.press("ArrowRight", times=2)
    assert "SQNR" in focused(wide)
    wide.press("End")
    assert focused(wide) == "Stale"
    wide.press("ArrowDown", times=2)
    assert focused(wide) == "blocks.2.ffn"
    wide.press("ArrowUp", times=2)
    assert focused(wide) == "Layer", "above the first row"
    wide.press("ArrowDown")
    wide.press("End")
    drawn = wide.value("document.querySelectorAll('tr.cast').length")
    wide.press("ArrowDown")
    assert drawn == 92 or wide.value("document.querySelectorAll('tr.cast').length") > drawn


def test_a_row_opens_and_closes(wide):
    focus(wide, "td.layer button")
    wide.press("ArrowDown")
    details = "document.querySelectorAll('tr.detail').length"
    for opens, closes in (("Enter", "Enter"), (" ", " "), ("ArrowRight", "ArrowLeft")):
        wide.press(opens)
        assert wide.value(details) == 1, opens
        assert wide.value("document.activeElement.ariaExpanded") == "true"
        wide.press(closes)
        assert wide.value(details) == 0, closes
    wide.press("Enter")
    wide.press("Tab")
    assert focused(wide) == "Inf or NaN"
    assert tip(wide).startswith("Inf or NaN")
    wide.press("Escape")
    assert wide.value(details) == 1, "of two open things, the last one closes"
    wide.press("Escape")
    assert wide.value(details) == 0
    assert focused(wide) == "blocks.2.ffn"


def test_the_filter_takes_keys_and_escape_empties_it(wide):
    focus(wide, "#filter")
    for key in "ks.2.":
        wide.press(key)
    assert wide.value("byId('count').innerText") == "3 of 92 casts"
    wide.press("ArrowDown")
    assert focused(wide) == "blocks.2.ffn"
    focus(wide, "#filter")
    wide.press("Escape")
    assert wide.value("byId('count').innerText") == "92 of 92 casts"


def test_the_focus_is_never_lost(wide):
    focus(wide, ".problem:nth-child(2) button.link")
    wide.press("Enter")  # "Show it"
    assert focused(wide).endswith("blocks.2.ffn")
    assert wide.value("document.activeElement.ariaExpanded") == "true"
    focus(wide, "#earlier")
    wide.press("Enter", times=2)
    assert wide.value("byId('step-name').textContent") == "step 0"
    assert focused(wide, "id") == "step", "the button is disabled at the first snapshot"
    wide.press("ArrowRight")
    assert wide.value("byId('step-name').textContent") == "step 50"
    focus(wide, "#problem-steps button")
    wide.press("Enter")
    assert focused(wide) == "step 0 to step 100"


def test_a_click_opens_a_row_and_its_legend_by_keys(wide):
    wide.value("document.querySelector('tr.cast td.amax').click()")
    assert wide.value("document.querySelectorAll('tr.detail').length") == 1
    focus(wide, "#legend summary")
    wide.press("Enter")
    assert wide.value("byId('explain-staleness').checkVisibility()")
    wide.press("Escape")
    assert not wide.value("byId('legend').open")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_no_part_is_wider_than_the_window(show, width, dark):
    browser = show("#open=0", width, dark)
    browser.value("for (const one of document.querySelectorAll('details')) one.open = true")
    widths = "[document.documentElement.scrollWidth, innerWidth, byId('scroll').scrollWidth]"
    page_width, window, table = browser.value(widths)
    assert page_width <= window
    assert table <= window, "the last columns are seen without scrolling"


# --- colours


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "paper"])
def test_text_has_the_contrast_of_wcag_aa(scheme):
    blocks = re.findall(r":root \{(.*?)\}", _resource("page.css"), re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", blocks[scheme]))
    text = ("ink", "muted", "accent", "good", "warn", "bad", "flushed", "subnormal", "saturated")
    for name in text:
        for ground in ("bg", "card"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for name in ("good", "warn", "bad"):
        assert contrast(colours[name], colours[f"{name}-bg"]) >= 4.5, name
    assert (scheme == 2) == (contrast(colours["ink"], colours["bg"]) == 21.0)


# --- paper

FACTS = """(() => {
  const seen = (selector) => [...document.querySelectorAll(selector)]
    .filter((node) => node.checkVisibility()).length;
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  return {
    closed: seen("main details:not([open])"), rows: seen("tr.cast"), opened: seen("tr.detail"),
    controls: seen("input, select, #more, .stepper, .toolbar, #tip, .problem button"),
    problems: seen(".problem h3"), skipped: seen(".problem p b"), explained: seen("#legend dt"),
    ink: style("body").color, paper: style("body").backgroundColor,
    head: style("thead").display, cut: style("tr.cast").breakInside,
    advice: document.querySelector("#body").innerText, caption: byId("caption").innerText,
    legend: byId("legend").open, order: [...byId("app").children].map((one) => one.id),
    width: [document.documentElement.scrollWidth, innerWidth],
  };
})()"""


def test_paper_shows_all_findings_opened_and_no_controls(show):
    browser = show(width=964, dark=True)  # Letter, less the margins
    before = browser.value(FACTS)
    browser.send("Emulation.setEmulatedMedia", media="print")
    browser.value("dispatchEvent(new Event('beforeprint'))")
    facts = browser.value(FACTS)
    assert facts["closed"] == facts["controls"] == 0
    assert (facts["problems"], facts["skipped"], facts["explained"]) == (3, 1, 13)
    assert facts["rows"] == 92, "also those that no scrolling has drawn yet"
    assert facts["opened"] == 2, "the worst cast of each problem"
    for said in ("It met inf or NaN.", "It saturates.", "It has a stale scale."):
        assert said in facts["advice"]
    assert (facts["ink"], facts["paper"]) == ("rgb(0, 0, 0)", "rgb(255, 255, 255)")
    assert (facts["head"], facts["cut"]) == ("table-header-group", "avoid")
    assert facts["caption"] == "92 of 92 casts at step 100, by SQNR dB, ascending"
    assert facts["order"][-1] == "legend"
    assert facts["width"][0] <= facts["width"][1], "no column is cut off"
    browser.send("Emulation.setEmulatedMedia", media="")
    browser.value("dispatchEvent(new Event('afterprint'))")
    after = browser.value(FACTS)
    for name in ("closed", "opened", "legend", "order"):
        assert after[name] == before[name], name


def test_a_printed_page_is_made_so(show, tmp_path):
    browser = show(width=400, dark=True)
    browser.value("globalThis.prints = 0; addEventListener('beforeprint', () => { prints += 1; })")
    browser.pdf(tmp_path / "page.pdf")
    assert browser.value("prints") == 1, "print.js was asked"
    assert browser.value("printing") is False
    if shutil.which("pdftotext") is None:
        pytest.skip("pdftotext is not installed; the text of the PDF is not read")
    text = subprocess.run(
        ["pdftotext", "-layout", str(tmp_path / "page.pdf"), "-"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    pages = text.split("\f")
    for i, one in enumerate(pages):
        if re.search(r"blocks\.\d+\.ffn .*0\.0$", one, re.MULTILINE):
            for name in ("Layer", "SQNR dB", "Kurtosis", "Stale"):
                assert name in one, f"page {i + 1} repeats the headers"
    for said in ("Something is wrong at step 100", "It has a stale scale.", "it was not called"):
        assert said in text


def test_a_large_run_prints_its_findings_and_not_thousands_of_rows(show):
    browser = show("#sort=amax&desc=1", name="large.html")
    browser.value("dispatchEvent(new Event('beforeprint'))")
    rows = "document.querySelectorAll('tr.cast').length"
    assert browser.value(rows) == 202
    assert browser.value("document.querySelectorAll('tr.cast .badge').length") == 2
    assert "without 700 casts that want no look" in browser.value("byId('caption').innerText")
