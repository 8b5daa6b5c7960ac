"""What mkdocs does not do by itself: pages of files outside docs/, among them the README as the site's home, and
anchors as GitHub makes them.

The pages are written to be read on GitHub, too, so their links name files of the repository.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
}
"""Files outside docs/, and their names on the site."""
INDEX, INDEX_ON_SITE = "README.md", "pages.md"
"""The index of docs/, which GitHub shows with the folder; mkdocs would make it the home."""


def on_config(config: MkDocsConfig) -> None:
    """Take GitHub's anchors."""
    config.mdx_configs["toc"]["slugify"] = anchor


def anchor(heading: str, separator: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files outside docs/, and move the index of docs/."""
    for name, on_site in OUTSIDE.items():
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        files.append(File.generated(config, on_site, content=links_of_the_site(text, "", "docs/")))
    index = files.src_uris.get(INDEX)
    assert index is not None
    files.remove(index)
    text = links_of_the_site(index.content_string, "../", "")
    files.append(File.generated(config, INDEX_ON_SITE, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside docs/ to their pages."""
    if page.file.generated_by:
        return markdown
    to_site = "../" * page.file.src_uri.count("/")
    return links_of_the_site(markdown, f"{to_site}../", "", to_site)


def links_of_the_site(text: str, to_top: str, to_docs: str, to_site: str = "") -> str:
    """``text`` with links for the site; ``to_top`` and ``to_docs`` are its ways to the repository and to docs/, and
    ``to_site`` is the way of its page to the site's top."""
    outside = re.sub(
        rf"\]\({re.escape(to_top)}({'|'.join(map(re.escape, OUTSIDE))})(?=[)#])",
        lambda link: f"]({to_site}{OUTSIDE[link[1]]}",
        text,
    )
    inside = outside.replace(f"]({to_docs}", "](") if to_docs else outside
    return inside.replace(f"]({to_site}{INDEX}", f"]({to_site}{INDEX_ON_SITE}")
