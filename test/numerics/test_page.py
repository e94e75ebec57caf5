"""The page in a real browser: filters, orders, opened rows, colours, a phone and paper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from runs import EVIL, run

from float8.numerics import report
from float8.numerics.alarms import AlarmWatch
from float8.numerics.report import page

ABOUT = {"file": "run.json", "float8": "1", "torch": "2"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with Browser() as browser:
        yield browser
        assert browser.errors == []


@pytest.fixture
def show(browser, tmp_path):
    """Shows a view of the page in a window."""
    path = tmp_path / "page.html"
    reports = run()
    path.write_text(page(reports, ABOUT, AlarmWatch(reports).alarms), encoding="utf-8")

    def show(view="", width=1280, dark=False):
        browser.resize(width, 900)
        browser.prefer(color_scheme="dark" if dark else "light")
        browser.open("about:blank")  # another fragment alone would load nothing
        browser.forget()
        browser.open(path.as_uri() + view)
        assert [address.split("#")[0] for address in browser.requests] == [path.as_uri()]
        return browser

    return show


LAYERS = """[...document.querySelectorAll('details.cast')].filter((row) => row.checkVisibility())
    .map((row) => row.querySelector('.layer').textContent)"""


def numbers(layers):
    """The numbers in the names of layers that have one."""
    return [int(match[1]) for layer in layers if (match := re.search(r"blocks\.(\d+)", layer))]


def typed(browser, name, value):
    browser.value(
        f"(() => {{ const one = byId('{name}'); one.value = '{value}'; one.oninput(); }})()"
    )


def test_rows_are_filtered(show):
    browser = show()
    assert browser.value("byId('count').innerText") == "92 of 92 casts"
    typed(browser, "filter", "BLOCKS.1")
    assert set(numbers(browser.value(LAYERS))) == {1, *range(10, 20)}
    typed(browser, "filter", "")
    typed(browser, "operand", "weight")
    assert browser.value("byId('count').innerText") == "30 of 92 casts"
    typed(browser, "operand", "")
    browser.value("byId('problems').click()")
    assert browser.value(LAYERS) == [EVIL, "blocks.2.ffn"]


@pytest.mark.parametrize("name", ["layer", "kurtosis", "sqnr"])
def test_columns_sort_both_ways(name, show):
    browser = show()
    orders = []
    for _ in range(2):
        browser.value(f"document.querySelector('#head .{name}').click()")
        order = browser.value(f"document.querySelector('#head .{name}').dataset.order")
        orders.append((order, browser.value(LAYERS)))
    found = dict(orders)
    up, down = (numbers(found[arrow]) for arrow in "▴▾")
    if name == "layer":
        assert up == sorted(up)
        assert down == up[::-1]
    elif name == "kurtosis":
        assert orders[0][0] == "▾" and down[0] == 2 and found["▾"][-1] == EVIL
        assert down[1:] == sorted(down[1:], reverse=True)
    else:
        assert found["▴"][0] == EVIL and up[0] == 2, "the worst first"


def test_links_open_the_row_and_the_keyboard_opens_the_next(show):
    browser = show("#c1")
    opened = "document.querySelectorAll('.cast[open]').length"
    assert browser.value("byId('c1').open") and browser.value(opened) == 1
    browser.press("Tab", times=2)
    browser.press("Enter")
    assert browser.value(opened) == 2
    typed(browser, "filter", "exact")
    browser.value("document.querySelector('#health a').click()")
    browser.until("byId('c0').open && byId('c0').checkVisibility()")
    title = browser.value("document.querySelector('#head .kurtosis').title")
    assert title.startswith("KurtosisHow heavy the tails are")


def test_names_that_are_markup_stay_text(show):
    browser = show()
    assert browser.value("document.images.length") == 0
    assert browser.value("document.title") == f"GPT{EVIL}: float8 numerics"


@pytest.mark.parametrize("width", [1280, 500, 380])
@pytest.mark.parametrize("dark", [False, True])
def test_no_part_is_wider_than_the_window_in_light_and_dark(show, width, dark):
    browser = show("#c1", width, dark)
    browser.value("for (const one of document.querySelectorAll('details')) one.open = true")
    widths = "[document.documentElement.scrollWidth, innerWidth, byId('casts').scrollWidth]"
    page_width, window, table = browser.value(widths)
    assert page_width <= window and table <= window
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 18, 22)" if dark else "rgb(245, 246, 248)")
    sizes = browser.value("""[...document.querySelectorAll('.cast[open] svg.large')].slice(0, 2)
        .map((svg) => svg.getBoundingClientRect().height)""")
    assert sizes == [164, 164]


# --- colours


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(scheme):
    pairs = re.findall(
        r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)",
        Path(report.__file__).with_name("page.css").read_text(),
    )
    colours = {name: pair[scheme] for name, *pair in pairs}
    text = ("ink", "muted", "accent", "good", "warn", "bad", "flushed", "subnormal", "saturated")
    for name in text:
        for ground in ("bg", "card"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for name in ("good", "warn", "bad"):
        assert contrast(colours[name], colours[f"{name}-bg"]) >= 4.5, name
