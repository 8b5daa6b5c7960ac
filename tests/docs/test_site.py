"""The site of the documentation: built strictly, with nothing from the network, and with what the pages have."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")])
TAGS = ("h1", "h2", "h3", "p", "ul", "ol", "li", "table", "tr", "pre", "code", "strong", "em", "blockquote", "img")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A broken link, a wrong anchor or a page that is missing in ``nav`` ends the build."""
    directory = tmp_path_factory.mktemp("site")
    build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(directory), strict=True))
    return directory


def page_of(site: Path, source: Path) -> str:
    """The HTML of a page."""
    on_site = {REPOSITORY / "README.md": "overview", REPOSITORY / "docs/README.md": "."}
    return (site / on_site.get(source, source.stem) / "index.html").read_text(encoding="utf-8")


def elements(html: str) -> Counter[str]:
    """How many elements of each kind a text has."""
    return Counter(tag for tag in re.findall(r"<([a-z]+\d?)\b", html) if tag in TAGS)


@pytest.mark.parametrize("source", PAGES, ids=lambda path: path.name)
def test_a_page_has_the_lists_and_tables_that_github_shows(site: Path, source: Path) -> None:
    """Python's Markdown reads some lists and tables in another way; markdown-it follows CommonMark."""
    (shown,) = re.findall(r'<article class="md-content__inner.*?>(.*?)</article>', page_of(site, source), re.DOTALL)
    expected = elements(MarkdownIt("commonmark").enable("table").render(source.read_text(encoding="utf-8")))
    assert elements(shown) == expected


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:link|script|img|iframe)\b[^>]*?(?:href|src)=[\"']?([^\"' >]+)", text)
        assert loaded and not [place for place in loaded if re.match(r"(\w+:)?//", place)], page
        assert "@import" not in text


def test_files_outside_docs_are_linked_by_their_pages(site: Path) -> None:
    overview = page_of(site, REPOSITORY / "README.md")
    for page in ("contributing/", "changelog/", "LICENSE.txt", "llama4/"):
        assert f'href="../{page}"' in overview
    assert 'href="../overview/#first-run-on-a-gpu-node"' in page_of(site, REPOSITORY / "docs/choosing_a_layout.md")
    assert (site / "LICENSE.txt").read_text() == (REPOSITORY / "LICENSE").read_text()
    for source in PAGES:
        assert "../README.md" not in page_of(site, source)


def test_broken_links_and_pages_that_nothing_leads_to_end_the_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    broken = ("no_such_page.md", "data.md#no-such-section", "../README.md#no-such-section", "../no_such_file.py")
    (tmp_path / "docs/slurm.md").write_text(" ".join(f"[one]({link})" for link in broken))
    (tmp_path / "docs/not_in_nav.md").write_text("# Alone\n")
    config = load_config(
        str(REPOSITORY / "mkdocs.yml"), docs_dir=str(tmp_path / "docs"), site_dir=str(tmp_path / "site"), strict=True
    )
    with pytest.raises(Abort):
        build(config)
    warnings = [one.getMessage() for one in caplog.records if one.name.startswith("mkdocs")]
    for name in ("no_such_page.md", "data.md#no-such-section", "overview.md#no-such-section", "no_such_file.py"):
        assert any("slurm.md" in warning and name in warning for warning in warnings), warnings
    assert any("not_in_nav.md" in warning for warning in warnings)
