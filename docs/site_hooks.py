"""What mkdocs does not do by itself: pages of files outside docs/, and anchors as GitHub makes them.

The pages are written to be read on GitHub, too, so their links name files of the repository.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
}
"""Files outside docs/, and their names on the site."""


def on_config(config: MkDocsConfig) -> None:
    """Take GitHub's anchors."""
    config.mdx_configs["toc"]["slugify"] = anchor


def anchor(heading: str, separator: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files outside docs/."""
    for name, on_site in OUTSIDE.items():
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        files.append(File.generated(config, on_site, content=links_of_the_site(text, "", "docs/")))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside docs/ to their pages."""
    return markdown if page.file.generated_by else links_of_the_site(markdown, "../", "")


def links_of_the_site(text: str, to_top: str, to_docs: str) -> str:
    """``text`` with links for the site; ``to_top`` and ``to_docs`` are its ways to the repository and to docs/."""
    outside = re.sub(
        rf"\]\({re.escape(to_top)}({'|'.join(map(re.escape, OUTSIDE))})(?=[)#])",
        lambda link: f"]({OUTSIDE[link[1]]}",
        text,
    )
    return outside.replace(f"]({to_docs}", "](") if to_docs else outside
