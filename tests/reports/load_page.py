"""Read a page without a browser, and load it in headless Chromium where that is installed."""

import json
import shutil
import subprocess
import tempfile
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

NASTY = '"><script>document.title="hacked"</script>&'
"""A name that would become an element if it were not escaped."""
WIDTHS = (480, 1280)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_BROWSER = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
_VOID = {"meta", "link", "br", "hr", "img", "input"}

needs_browser = pytest.mark.skipif(_BROWSER is None, reason="no Chromium is installed")


class Page(HTMLParser):
    """The tags of a page, its attributes and its text; an element that is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, (tag, self._open)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += f" {data}"


def copied(text: str) -> list[str]:
    """What the buttons of a page copy."""
    found = [part.split("</pre>")[0] for part in text.split('<div class="copyable"><pre>')[1:]]
    return [unescape(part.replace("<span>", "").replace("</span>", "")) for part in found]


def assert_loads_nothing(text: str) -> None:
    """The page has one script, and names no other file and no place in the network."""
    page = Page(text)
    assert page.tags.count("script") == page.tags.count("style") == 1
    assert not {"src", "srcset", "action", "onclick", "onload"} & page.attributes.keys()
    assert all(address.startswith(("explorer.html#", "simulated.html")) for address in page.attributes.get("href", ()))
    for forbidden in ("http:", "https:", "url(", "@import", "@font-face", "fetch(", "XMLHttp", "import("):
        assert forbidden not in text
    assert "default-src 'none'" in page.attributes["content"][0]
    drawn = " ".join(
        value for name in ("d", "x", "y", "cx", "cy", "width", "r") for value in page.attributes.get(name, ())
    )
    assert not any(word in drawn for word in ("nan", "inf", "None"))


_PROBE = f"<script>{Path(__file__).with_name('probe.js').read_text()}</script>"


def _found(text: str, width: int, *more_flags: str) -> dict[str, Any]:
    """What the scripts of a page leave in the browser."""
    assert _BROWSER is not None
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "page.html"
        path.write_text(text, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom", *more_flags]
        command = [_BROWSER, *flags, f"--user-data-dir={directory}/profile", path.as_uri()]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    found: dict[str, Any] = json.loads(Page(output).attributes["data-found"][0])
    return found


def run_in(text: str, width: int, script: str) -> Any:
    """What ``script``, the body of an async function, returns on a page at a width."""
    probe = f"""<script>(async () => {{
      let errors = 0;
      addEventListener("error", () => errors++);
      addEventListener("unhandledrejection", () => errors++);
      addEventListener("securitypolicyviolation", () => errors++);
      const found = await (async () => {{ {script} }})().catch((error) => String(error.stack));
      document.body.textContent = "";
      document.body.dataset.found = JSON.stringify({{errors, found}});
    }})();</script>"""
    found = _found(text.replace("</body>", probe + "</body>"), width, "--virtual-time-budget=20000")
    assert found["errors"] == 0, found
    return found["found"]


def load(text: str, width: int, more: str = "") -> dict[str, Any]:
    """Load a page at a width, sort its tables, hover over a chart, change its colours; what was found, and under
    ``more`` what the script ``more`` returned. The general checks are made here."""
    found = _found(text.replace("</body>", _PROBE.replace("MORE", more) + "</body>"), width)
    assert found["errors"] == 0
    assert found["overflow"] <= 0 and found["clipped"] == 0, found
    assert found["sorted"]
    assert found["tip"]
    assert found["colours"][0] != found["colours"][1]
    return found


def cut_off(text: str) -> int:
    """Pixels by which the widest table of a page exceeds its place on a usual screen."""
    places = '[...document.querySelectorAll(".scroll")].map((one) => one.scrollWidth - one.clientWidth)'
    return int(load(text, 1400, f"return Math.max(...{places});")["more"])
