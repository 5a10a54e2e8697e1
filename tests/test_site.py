"""docs/ as a site: it builds without a warning, and every link on it leads somewhere."""

import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.waiting import PATIENCE

from scripts.site_links import repository, rewritten

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a build. A proxy that is not there makes every attempt to fetch something fail."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environ = os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr + done.stdout
    return folder


class Links(HTMLParser):
    """What a page links to and loads, and what can be linked to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.ids |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and "src" in given:
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") != "canonical" and "href" in given:
            self.loaded.append(given["href"])


def built(page: Path) -> Path:
    """Where a page of docs/ lies in the build."""
    path = page.relative_to(ROOT / "docs").with_suffix("")
    return path.parent / "index.html" if path.name == "README" else path / "index.html"


def test_every_page_is_there(site):
    assert (site / "index.html").exists() and len(PAGES) > 20
    assert [page.name for page in PAGES if not (site / built(page)).exists()] == []


def test_links_lead_somewhere(site):
    """Those within the site to a page and an anchor, those to the repository to a file."""
    dead, files = [], 0
    ids = cache(lambda page: Links(page).ids)  # each page was parsed for every link to it: 28 s
    for page in [site / "index.html", *(site / built(page) for page in PAGES)]:
        for link in Links(page).links:
            if link.startswith(f"{repository()}/"):
                _, _, path = link.removeprefix(f"{repository()}/").split("/", 2)
                files += 1
                if not (ROOT / urlsplit(unquote(path)).path).exists():
                    dead.append((page.parent.name, link))
            elif not urlsplit(link).scheme:
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                target = target / "index.html" if target.is_dir() else target
                if not target.exists() or (anchor and unquote(anchor) not in ids(target)):
                    dead.append((page.parent.name, link))
    assert dead == [] and files > 20


def test_diagrams_are_for_mermaid(site):
    page = (site / "architecture" / "index.html").read_text(encoding="utf-8")
    assert page.count('<pre class="mermaid">') == 4


def test_a_reader_fetches_nothing_from_elsewhere(site):
    elsewhere = [
        (page.name, url) for page in site.glob("**/*.html") for url in Links(page).loaded if urlsplit(url).netloc
    ]
    assert elsewhere == []
    assert not re.search(r"data-md-component=\"source\"", (site / "index.html").read_text())  # asks GitHub for stars


def test_the_repository_is_that_of_the_package():
    assert f"Repository: {repository()}\n" in (ROOT / "mkdocs.yml").read_text()
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert "/mkdocs.yml" in included["include"] and "/docs" in included["include"]


@pytest.mark.parametrize(
    ("text", "folder", "expected"),
    [
        ("[a](../tritonllm/env.py)", "docs", "[a](BASE/blob/main/tritonllm/env.py)"),
        ("[a](../bench/results)", "docs", "[a](BASE/tree/main/bench/results)"),
        ("[`a`](../tritonllm/env.py#L3) `b`", "docs", "[`a`](BASE/blob/main/tritonllm/env.py#L3) `b`"),
        ("[a](../results.md#x)", "docs/notebook", "[a](../results.md#x)"),
        ("[a](../../README.md)", "docs/notebook", "[a](../index.md)"),
        ("[a](docs/start.md) ![b](docs/img/x.svg)", "", "[a](start.md) ![b](img/x.svg)"),
        ("[a](#here) [b](https://x.org/a.md)", "docs", "[a](#here) [b](https://x.org/a.md)"),
        ("`[a](../README.md)`\n\n```\n[a](../README.md)\n```", "docs", None),
    ],
)
def test_links_are_rewritten(text, folder, expected):
    base = folder.removeprefix("docs").strip("/")
    assert rewritten(text, folder, base) == (text if expected is None else expected.replace("BASE", repository()))
