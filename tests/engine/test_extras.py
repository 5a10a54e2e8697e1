"""How errors and texts say to install the package: from a checkout, for its name on the index is another project's."""

import re
import subprocess
import tomllib
from pathlib import Path

from tritonllm.system.extras import install

ROOT = Path(__file__).parents[2]
FROM_INDEX = re.compile(r"pip install (?:-\S+ )*['\"]?tritonllm\b|\btritonllm\\?\[[a-z]")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def texts():
    """Every text file of the repository that git keeps, but for this one and recorded results."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kept = (".py", ".md", ".yml", ".yaml", ".toml", ".sh", ".service", ".txt", "file", "Makefile", ".html")
    for name in listed.splitlines():
        path = ROOT / name
        if name.endswith(kept) and path != Path(__file__) and path.is_file():
            yield name, path.read_text(encoding="utf-8")


def test_no_text_installs_the_package_from_the_index():
    assert [(name, found[0]) for name, text in texts() for found in FROM_INDEX.finditer(text)] == []


def test_what_would_be_found():
    assert FROM_INDEX.search("pip install 'tritonllm[serve]'") and FROM_INDEX.search("pip install -U tritonllm")
    assert FROM_INDEX.search("needs tritonllm[teach]") and FROM_INDEX.search(r"pip install 'tritonllm\[serve\]'")
    assert not FROM_INDEX.search(install("serve"))


def test_the_command_names_the_checkout():
    assert install("serve") == "pip install '.[serve]' in a checkout of tritonllm's repository"
    assert install("serve", "ray", options="-U").startswith("pip install -U '.[serve,ray]' in a checkout")


def test_every_extra_that_is_named_is_one_of_the_package():
    named = {
        extra.strip()
        for _, text in texts()
        for found in re.findall(r"install\(((?:['\"]\w+['\"],? ?)+)[,)]|'\.\[([\w,]+)\]'", text)
        for extra in re.split(r"[,\s]+", "".join(found).replace("'", "").replace('"', ""))
        if extra
    }
    assert {"serve", "route", "ray", "teach"} <= named
    assert named <= set(EXTRAS)
