"""What mkdocs does not know of this repository's pages: a hook of mkdocs.yml.

Pages link to each other and to files outside of docs/ by relative paths, as GitHub wants it. On the site, what lies
outside of docs/ is not there, so such a link leads to the repository (``Homepage`` of pyproject.toml). README.md is the
site's first page.
"""

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# A fenced block or a span of code, which is left alone, or the target of a link or a picture.
LINK = re.compile(r"^```.*?^```|`[^`\n]*`|(?<=\]\()(?P<target>[^)\s]+)(?=\))", re.MULTILINE | re.DOTALL)


def repository() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]


def rewritten(text: str, folder: str, base: str) -> str:
    """A page's text with its links as the site needs them.

    Args:
        folder: of the page, relative to the repository.
        base: of the page on the site, relative to docs/.
    """

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or target.startswith(("#", "http:", "https:", "mailto:")):
            return found[0]
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if path.startswith("docs/"):
            return posixpath.relpath(path.removeprefix("docs/"), base or ".") + mark + anchor
        if path == "README.md":
            return posixpath.relpath("index.md", base or ".") + mark + anchor
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{repository()}/{kind}/main/{path}{mark}{anchor}"

    return LINK.sub(link, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the first page."""
    from mkdocs.structure.files import File  # here, so that machines without mkdocs can collect the tests

    text = rewritten((ROOT / "README.md").read_text(encoding="utf-8"), "", "")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md":
        return markdown
    folder = posixpath.dirname(page.file.src_uri)
    return rewritten(markdown, posixpath.join("docs", folder), folder)
