"""Make the images of the x-ray in docs/: ``python scripts/draw_teach_xray.py [FOLDER]``, by default docs/img.

The demo model on the CPU, so the times are those of the machine that runs this.
"""

import io
import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path
from tritonllm.teach.xray.viewer import OPTIONS, XRay
from tritonllm.teach.xray.wishes import Wishes

PROMPT = "There was a fox named Snow. She lived in a den"
WIDTH = 130


def main(folder: Path) -> None:
    os.chdir(folder)  # what is printed names the files without it
    llm = LLM(str(model_path()), device="cpu", num_blocks=256, max_num_seqs=8, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=10)
    files = {"attention": (2, 1, Path("teach-attention.png")), "lens": (-3, Path("teach-logit-lens.png"))}
    for wishes in (Wishes(), Wishes(steps=(14,), **files)):  # first what is done once, unseen
        console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, highlight=False)
        XRay(wishes, console).run(llm, lambda: llm.generate([PROMPT], params, use_tqdm=False))
    svg = console.export_svg(title="tritonllm generate --xray", theme=MONOKAI, unique_id="xray")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts from elsewhere are not loaded
    svg = svg.replace("font-family: Fira Code, monospace", "font-family: monospace").replace(
        "font-family: arial", "font-family: sans-serif"
    )
    (Path("teach-xray.svg")).write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "img")
