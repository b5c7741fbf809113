"""Takes docs/page*.png and docs/report.png with Chromium, from the run folders that `semidfl demo` leaves:

python docs/screens.py RUNS docs
"""

import io
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from semidfl.report.html import write_report

PAGES = {  # name: width, height, theme, scrolled to
    "page": (1400, 1330, "light", ""),
    "page-dark": (1400, 1330, "dark", "Generated images"),
    "page-phone": (390, 1330, "light", ""),
}


def shrunk(png: bytes, target: Path) -> None:
    """With 256 colours, chosen so that none is lost: a dot of a few pixels carries meaning."""
    with Image.open(io.BytesIO(png)) as picture:
        colours = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        colours.save(target, optimize=True)


def take(browser: Browser, url: str, width: int, height: int, theme: str, card: str) -> bytes:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
    page.goto(url)
    page.wait_for_selector("h1, canvas")
    page.wait_for_timeout(3000)  # until the theme is known and all is drawn
    if card:
        page.locator(f"section[aria-label='{card}']").evaluate("e => scrollTo(0, e.offsetTop - 80)")
        page.wait_for_timeout(500)
    return page.screenshot()


def main(runs: Path, docs: Path) -> None:
    chromium = shutil.which("chromium")
    command = [
        sys.executable,
        "-m",
        "semidfl",
        "watch",
        str(runs / "demo-semidfl"),
        str(runs / "demo-dfl-lb"),
        "--port=0",
    ]
    with sync_playwright() as playwright, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        time.sleep(3)
        for name, view in PAGES.items():
            shrunk(take(browser, f"{found[0]}?run=demo-semidfl", *view), docs / f"{name}.png")
        report = write_report([runs / "demo-semidfl"], runs / "demo-semidfl" / "report.html").resolve()
        shrunk(take(browser, report.as_uri(), 1100, 1330, "light", ""), docs / "report.png")
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
