"""``python -m tritonllm.teach.dashboard.picture FILE.svg``: the picture of docs/teach.md, while the demonstration model
runs 12 requests."""

import asyncio
import re
import sys
from pathlib import Path

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path
from tritonllm.teach.dashboard.app import Dashboard
from tritonllm.teach.dashboard.source_engine import EngineSource
from tritonllm.telemetry.recorder import Gate

STORY = "There was a fox named Tom who lived in a small house at the edge of the forest, and every day he went to "
PROMPTS = [STORY + more for more in ("the river", "the old mill", "see the owl", "a school", "the sea", "his mother")]
PROMPTS += ["What is 47 + 66?", "Once upon a time there was a king.", "A list of animals: dog, cat,"]
STEPS, SIZE = 100, (118, 25)


def draw() -> str:
    """SVG, with the fonts of whoever looks at it."""
    llm = LLM(str(model_path()), num_blocks=63, max_num_seqs=9, max_num_batched_tokens=96)
    engine = llm.engine
    source = EngineSource(engine, Gate(), "tritonllm's demonstration model")
    for number in range(12):
        n = 3 if number == 7 else 1
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=60 + 20 * number, ignore_eos=True, n=n)
        engine.add_request(f"request-{number + 1}", PROMPTS[number % len(PROMPTS)], params)
    for _ in range(STEPS):
        engine.step()

    async def show() -> str:
        app = Dashboard(source, every=1000.0)
        async with app.run_test(size=SIZE) as pilot:
            await pilot.pause()
            return app.export_screenshot(simplify=True)

    picture = asyncio.run(show())
    source.stop()
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # they would be loaded from elsewhere
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")
