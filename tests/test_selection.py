"""What `make test` runs and what of the rest each fifth does."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.selection import FIFTHS, covering

TESTS = """
import pytest
from hypothesis import given, strategies as st

@pytest.fixture(params=["x", "y"])
def fixture(request):
    return request.param

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_product(a, b, fixture): pass

@pytest.mark.parametrize(("a", "b"), [(a, b) for a in range(3) for b in range(3)])
def test_table(a, b): pass

@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_partly_long(a): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.long
@pytest.mark.smoke
def test_smoke(): pass

@given(st.integers())
def test_property(n): pass
"""


def test_every_folder_is_looked_into(pytestconfig):
    """pytest leaves out folders of some names, "dist" among them, without a word."""
    tests = Path(__file__).parent
    folders = {part for file in tests.rglob("test_*.py") for part in file.relative_to(tests).parts[:-1]}
    left_out = pytestconfig.getini("norecursedirs")
    assert "dist" in folders and not [(f, rule) for f in folders for rule in left_out if fnmatch(f, rule)]


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """The cases that options choose among TESTS."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_some.py").write_text(TESTS)
    program = f"""
import contextlib, io, sys
import pytest
sys.path.insert(0, "tests")
import conftest
for options in {[[], ["--quick"], *(["--fifth", str(number)] for number in range(FIFTHS))]!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *options, {str(folder)!r}], plugins=[conftest])
    print(" ".join(line.split("::")[1] for line in out.getvalue().splitlines() if "::" in line))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    everything, quick, *fifths = (line.split() for line in ran.stdout.split("\n")[: 2 + FIFTHS])
    return everything, quick, fifths


def of(cases, name):
    return [case for case in cases if case.split("[")[0] == name]


def test_quick(collected):
    everything, quick, _ = collected
    assert len(of(everything, "test_product")) == 18
    assert len(of(quick, "test_product")) == 3
    assert len(of(quick, "test_table")) == 9
    assert of(quick, "test_partly_long") == ["test_partly_long[1]", "test_partly_long[2]"]
    assert not of(quick, "test_long")
    assert of(quick, "test_smoke") and of(quick, "test_property")


def test_each_test_that_quick_leaves_out_is_in_one_fifth(collected):
    everything, quick, fifths = collected
    rest = sorted(case for fifth in fifths for case in fifth)
    assert rest == sorted({*everything} - {*quick} | {"test_property", "test_smoke"})  # which may have more examples


def test_every_number_of_examples_is_one_of_a_normal_run():
    """Else `make test` would have all of them."""
    files = Path(__file__).parent.glob("**/test_*.py")
    assert not [file for file in files if re.search(r"max_examples=\d", file.read_text(encoding="utf-8"))]


@given(st.lists(st.integers(1, 5), max_size=3))
def test_each_row_is_covered(sizes):
    cases = [dict(enumerate(rows)) for rows in product(*map(range, sizes))]
    taken = [case for case, take in zip(cases, covering(cases), strict=True) if take]
    assert {row for case in taken for row in case.items()} == {row for case in cases for row in case.items()}
    assert len(taken) <= max(1, sum(sizes))
