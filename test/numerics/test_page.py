"""The page in a real browser: filters, orders, opened rows, colours, a phone and paper."""

from __future__ import annotations

import pytest
from browser import CHROMIUM, Browser
from runs import EVIL, run

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


def test_each_head_stands_above_its_column(show):
    ends = """[...document.querySelectorAll('PLACE > *')]
        .map((one) => [one.className.split(' ')[0], one.getBoundingClientRect().right])"""
    heads, cells = (
        dict(show().value(ends.replace("PLACE", place)))
        for place in ("#head", "details.cast:first-child > summary")
    )
    assert len(heads) == 11 and heads == cells


LAYERS = """[...document.querySelectorAll('details.cast')].filter((row) => row.checkVisibility())
    .map((row) => row.querySelector('.layer').textContent)"""


def typed(browser, name, value):
    browser.value(
        f"(() => {{ const one = byId('{name}'); one.value = '{value}'; one.oninput(); }})()"
    )


def test_rows_are_filtered(show):
    browser = show()
    assert browser.value("byId('count').innerText") == "92 of 92 casts"
    typed(browser, "filter", "BLOCKS.1")
    names = {f"blocks.{i}.ffn" for i in (1, *range(10, 20))}
    assert names <= set(browser.value(LAYERS)) and browser.value("byId('count').innerText") == (
        "33 of 92 casts"
    )
    typed(browser, "filter", "")
    typed(browser, "operand", "weight")
    assert browser.value("byId('count').innerText") == "30 of 92 casts"
    typed(browser, "operand", "")
    browser.value("byId('problems').click()")
    assert browser.value(LAYERS) == [EVIL, "blocks.2.ffn"]


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


def test_a_head_sorts_by_its_numbers(show):
    browser = show()
    numbers = """[...document.querySelectorAll('.cast .sqnr > i')].map((one) => one.textContent)"""
    for sign in (1, -1):  # the second click turns the order
        browser.value("document.querySelector('#head .sqnr').click()")
        found = browser.value(numbers)
        assert found[-1] == "-"
        assert found[:-1] == sorted(found[:-1], key=lambda text: sign * float(text))
