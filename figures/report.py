"""Draws figures/report.png: what Chromium shows of the report of some runs, from top to bottom.

    python figures/report.py runs/default runs/mamba16

It needs playwright, which the extra `test` installs, and Chromium.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from circuitscope.viz.report import report

_FLAGS = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]


def main() -> None:
    """Makes the report and takes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("report.png"))
    parser.add_argument("--width", type=int, default=1300, help="of the window, in pixels")
    given = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium here; install it, or name it in $CHROMIUM")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = report(given.runs).save(Path(folder) / "report.html")
        browser = driver.chromium.launch(executable_path=chromium, args=_FLAGS)
        view = browser.new_page(viewport={"width": given.width, "height": 900}, reduced_motion="reduce")
        view.goto(page.as_uri())
        view.wait_for_selector("html[data-ready]")
        view.wait_for_function("!document.querySelector('[aria-busy=true]')")
        view.screenshot(path=given.out, full_page=True)
        browser.close()
    print(given.out)


if __name__ == "__main__":
    main()
