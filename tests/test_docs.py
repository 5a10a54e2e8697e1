"""The documentation names files that exist, links that lead somewhere, and numbers that were measured."""

import re
from pathlib import Path

import pytest

from bench import report

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERY = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "notebook").glob("*.md"))]
BASES = (ROOT, ROOT / "tritonllm", ROOT / "tritonllm" / "kernels")  # what paths of some pages are below
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|toml|json|svg|yml|sh))")  # a folder ends with a slash
# Names of files that a checkpoint has or that a command writes, and folders of the user.
ELSEWHERE = re.compile(
    r"(generation_|hf_quant_|1_Pooling/)?config\.json|modules\.json|\./.*|bench/results/(engine|attention)\.json|engine(-h200)?\.json|.*\*.*"
)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def paths_in(page: Path) -> list[str]:
    """What stands in backticks, outside blocks of code, and looks like a file or a folder."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    found = {name for name in re.findall(r"`([^`\n]+)`", prose) if FILE.fullmatch(name)}
    return sorted(name for name in found if not ELSEWHERE.fullmatch(name))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page):
    missing = [name for name in paths_in(page) if not any((base / name).exists() for base in BASES)]
    assert not missing


def test_paths_were_found():
    assert "engine/schedule/scheduler.py" in paths_in(ROOT / "docs" / "design.md")
    assert "tests/test_layers.py" in paths_in(ROOT / "CONTRIBUTING.md")


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    dead = []
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text_of(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_names_are_defined_there(page):
    """``[`Class.method`](../file.py)``: the file defines the class, and the class the method (or a field)."""
    missing = []
    for name, path in re.findall(r"\[`([A-Za-z_][\w.]*)`\]\(([^)#]+\.py)\)", text_of(page)):
        if not name.endswith(".py") and "/" not in name:
            outer, _, inner = name.partition(".")
            body = re.search(rf"^(?:class|def) {outer}\b.*?(?=^\S|\Z)", text_of(page.parent / path), re.M | re.S)
            if body is None or (inner and not re.search(rf"^    (?:def {inner}\(|{inner}:)", body[0], re.M)):
                missing.append((name, path))
    assert not missing


def test_the_readme_claims_what_the_results_say():
    """To update it: run ``python -m bench.report`` and copy the first sentence of docs/results.md."""
    claim, *_ = report.claims(report.read(report.RESULTS))
    assert claim in re.sub(r"\s+", " ", text_of(ROOT / "README.md"))


def test_the_readme_has_no_other_measurement():
    claim, *_ = report.claims(report.read(report.RESULTS))
    rest = re.sub(r"\s+", " ", text_of(ROOT / "README.md")).replace(claim, "")
    assert not re.findall(r"\d[\d.,]*\s*(?:us|µs|ms|s|tok/s|GB/s|TFLOP/s|x|%|times)\b", rest)


@pytest.mark.parametrize("page", ["README.md", "docs/design.md", "docs/kernels.md", "docs/benchmarks.md"])
def test_workloads_and_groups_are_explained(page):
    """A page that uses W1 or K1 defines it, or links to where it is defined."""
    text = text_of(ROOT / page)
    if re.search(r"\bW[1-6]\b", text):
        assert "benchmarks.md" in text or "| W1 |" in text
    if re.search(r"\bK[1-7]\b", text):
        assert "K1 is decode attention" in text or "kernels.md" in text
