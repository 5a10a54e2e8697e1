"""``python scripts/draw_teach_trace.py``: the picture of docs/teach.md, by the commands that it describes."""

import tempfile
from pathlib import Path

from tritonllm import LLM, SamplingParams
from tritonllm.cli import main
from tritonllm.demo import model_path
from tritonllm.telemetry.trace import Trace

PICTURE = Path(__file__).parents[1] / "docs" / "img" / "teach-trace.svg"
PROMPTS = [
    "There was a fox named",
    "Tom and Mia went to the park to play with a ball. " * 3,
    "Why is the sky blue?",
    "Once upon a time there lived a king. " * 5,
]


def draw() -> int:
    llm = LLM(str(model_path()), num_blocks=13, max_num_seqs=8, max_num_batched_tokens=48)
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=3), use_tqdm=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json.gz"
        with Trace(llm, file):
            for number in range(16):
                params = SamplingParams(temperature=0, max_tokens=36 + 7 * (number % 5), ignore_eos=True)
                llm.engine.add_request(str(number), PROMPTS[number % 4], params)
                for _ in range(4):
                    llm.engine.step()
            while llm.engine.has_unfinished_requests():
                llm.engine.step()
        main(["trace", str(file)])
        return main(["trace", str(file), "--plot", str(PICTURE)])


if __name__ == "__main__":
    raise SystemExit(draw())
