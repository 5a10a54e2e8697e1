"""Makes the picture in docs/teach.md: ``python -m tritonllm.teach.narrate.picture FILE.svg``."""

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.demo import model_path
from tritonllm.offline.llm import LLM
from tritonllm.teach.narrate.show import Show, make_console
from tritonllm.teach.narrate.story import Detail
from tritonllm.teach.narrate.viewer import Narrator, ReadingPace, story_of
from tritonllm.teach.narrate.words import LANGUAGES

WIDTH = 96  # columns
PROMPT = "There was a fox named"


def main(argv: Sequence[str]) -> int:
    """Narrate a short run of the demonstration model into a picture."""
    (target,) = argv
    console = make_console(io.StringIO(), record=True, width=WIDTH)
    narrator, llm = Narrator(speed=0), LLM(str(model_path()), num_blocks=64, device="cpu")
    story = story_of(llm.engine, narrator.recorder, detail=Detail(steps=1))
    show = Show(LANGUAGES["en"], console, ReadingPace(0))

    def sink(event: object) -> None:
        for act in story.tell(event):  # type: ignore[arg-type]
            show.act(act)

    llm.engine.subscribe(sink)
    params = SamplingParams(temperature=0.8, top_k=4, top_p=0.9, seed=3, max_tokens=6)
    llm.generate([PROMPT], narrator.adapt(params), use_tqdm=False)
    show.act(story.end())
    svg = console.export_svg(title="tritonllm generate --narrate", unique_id="narrate")
    elsewhere = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)  # fonts would be fetched
    Path(target).write_text(elsewhere.sub("", svg), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
