"""Every page of the site in a browser, on a desk and on a phone: it fits, loads and can be used."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from fresh import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed"),
]
WIDTHS = (1280, 400)
PAGE = "architecture.html"  # one that all pages are like

# What a page shows, at the width that it has.
FACTS = """(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = element => {
    for (let e = element.parentElement; e && e !== document.body; e = e.parentElement)
      if (getComputedStyle(e).overflowX !== "visible") return true;
    return false;
  };
  const wide = [...document.querySelectorAll("body *")].filter(
    e => e.getBoundingClientRect().right > width + 1 && !scrolls(e)
         && getComputedStyle(e).position !== "fixed");
  const images = [...document.querySelectorAll(".md-content img")];
  return {
    overflow: document.documentElement.scrollWidth - width,
    wide: wide.slice(0, 3).map(e => e.outerHTML.slice(0, 200)),
    missing: images.filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src),
    mute: images.filter(i => !i.alt.trim()).map(i => i.src),
    titles: [...document.querySelectorAll("h1")].map(e => e.textContent),
    text: document.querySelector(".md-content").innerText.length,
  };
})()"""


class _Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection for many files

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The directory of a strict build, which all workers share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with open(f"{folder}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            build(folder)
            (folder / "built").touch()
    return folder


def build(folder: Path) -> None:
    """Build the site strictly into a directory."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served."""
    handler = functools.partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def tab():  # one for each test, so that one that hangs fails one test only
    with Browser() as browser:
        yield browser


def pages_of(site: Path) -> list[str]:
    """The addresses of all pages, relative to the site's."""
    found = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    return sorted(page for page in found if Path(page).stem not in {"404", *PLANTED})


def faults_of(tab: Browser, address: str, page: str) -> list[str]:
    """What is wrong with a page: at any width, and at each."""
    tab.forget()
    tab.resize(WIDTHS[0])
    tab.open(address + page)
    faults = []
    for width in WIDTHS:
        tab.resize(width)
        facts = tab.value(FACTS)
        if facts["overflow"] > 0:
            faults.append(f"at {width}: {facts['overflow']} px too wide: {facts['wide']}")
    faults += [f"an image was not loaded: {src}" for src in facts["missing"]]
    faults += [f"an image has no alt text: {src}" for src in facts["mute"]]
    if len(facts["titles"]) != 1:
        faults.append(f"headings of level 1: {facts['titles']}")
    if facts["text"] < 100:
        faults.append(f"it has {facts['text']} characters")
    own = (address, "data:", "blob:")
    faults += [f"it asks for {url}" for url in tab.requests if not url.startswith(own)]
    return faults + [f"an error: {error}" for error in tab.errors]


def test_every_page_fits_and_loads(tab, site, address):
    pages = pages_of(site)
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    faults = {page: found for page in pages if (found := faults_of(tab, address, page))}
    assert faults == {}


TABLES = """[...document.querySelectorAll(".md-typeset__scrollwrap")].map(
    e => [e.scrollWidth <= e.clientWidth, getComputedStyle(e).maskImage === "none"])"""


def test_on_a_phone_the_recipes_fit_and_a_table_that_goes_on_fades(tab, address):
    tab.resize(390)
    tab.open(address + "recipes.html")
    assert all(fits and whole for fits, whole in tab.value(TABLES))
    tab.open(address + "measurements.html")
    found = tab.value(TABLES)
    assert {fits for fits, _ in found} == {True, False}
    assert all(fits == whole for fits, whole in found)


PLANTED = {
    "wide": ('<div style="width:600px">wide</div>', "at 400: "),
    "image": ('<img src="none.png" alt="none">', "an image was not loaded"),
    "mute": ('<img src="assets/images/favicon.png">', "an image has no alt text"),
    "title": ("<h1>Another</h1>", "headings of level 1"),
    "host": ('<link rel="stylesheet" href="http://localhost:1/x.css">', "it asks for http://loc"),
    "script": ("<script>nothing()</script>", "an error: ReferenceError: nothing"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name, tab, site, address):
    html, fault = PLANTED[name]
    page = (site / PAGE).read_text(encoding="utf-8")
    planted = site / f"{name}.html"
    planted.write_text(page.replace("</h1>", f"</h1>{html}", 1), encoding="utf-8")
    found = faults_of(tab, address, f"{name}.html")
    assert [each for each in found if each.startswith(fault)], found
