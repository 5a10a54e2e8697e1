"""The engine of the lessons: the demo model on the CPU, with a record of what each step did."""

from typing import Any

from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams
from tritonllm.demo import model_path
from tritonllm.engine.data.outputs import RequestOutput
from tritonllm.events import Event, Part, StepPlanned
from tritonllm.offline.llm import LLM

# On the CPU and without planning ahead, so that every machine shows the same numbers.
SMALL = {
    "device": "cpu",
    "dtype": "float32",
    "async_scheduling": False,
    "num_blocks": 128,
    "max_num_seqs": 8,
    "max_logprobs": -1,
}

STORY = (
    "Once upon a time, in the Old Pine Forest, where the ground is soft with needles, there lived a patient young "
    "bear named Cricket. He loved to collect smooth stones, most of all with Dot, a small grey rabbit. One night a "
    "wild storm came to the Old Pine Forest. The wind howled, the rain beat on every roof, and nobody slept. In the "
    "morning Cricket looked out and saw that the storm had broken the roof of the big barn. The rain was falling on "
    "the hay. Everyone came together at the blackberry bushes. They made a big circle around the work. They brought "
    "stones from the beaver dam and wood from the brook, and they sang a funny song about a goat. When the sun went "
    "down, the work was done."
)


class Lab:
    """An engine and its record.

    Args:
        options: the arguments of :class:`LLM`; by default a small cache of 128 blocks of 16 tokens.

    Attributes:
        llm: the engine.
        steps: what each step did, in order.
        outputs: the last output of each request, by its name.
    """

    def __init__(self, **options: Any) -> None:
        self.llm = LLM(str(options.pop("model", model_path())), **SMALL | options)
        self.steps: list[StepPlanned] = []
        self.outputs: dict[str, RequestOutput] = {}
        self.llm.engine.subscribe(self._take)

    def _take(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            self.steps.append(event)

    @property
    def model(self) -> Any:
        """The loaded model: of several ranks', the part of this process."""
        return self.llm.engine.model

    @property
    def runner(self) -> Any:
        """What runs the model in this process: its cache is not public."""
        runner = self.llm.engine._runner
        return getattr(runner, "_runner", runner)

    @property
    def bytes_per_token(self) -> int:
        """How many bytes of the cache's tensors in this process there are for each of their slots."""
        cache = self.runner.caches.views
        blocks, size = cache[0].k.shape[:2]
        return sum(layer.k.nbytes + layer.v.nbytes for layer in cache) // (blocks * size)

    def tokens(self, text: str, count: int | None = None) -> list[int]:
        """Token ids of a text, or the first so many."""
        return self.llm.get_tokenizer().encode(text)[:count]

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token, with blanks that can be seen."""
        return [self.llm.get_tokenizer().decode([token]).replace(" ", "_").replace("\n", "\\n") for token in ids]

    def add(self, name: str, prompt: str | list[int], max_tokens: int, **sampling: Any) -> None:
        """Queue a request that generates exactly so many tokens, greedily unless ``sampling`` says otherwise."""
        wishes: dict[str, Any] = {
            "temperature": 0.0,
            "ignore_eos": True,
            "output_kind": RequestOutputKind.CUMULATIVE,
        } | sampling
        given: Any = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        self.llm.engine.add_request(name, given, SamplingParams(max_tokens=max_tokens, **wishes))

    def step(self) -> StepPlanned:
        """Run one step, and return what it did."""
        for output in self.llm.engine.step():
            assert isinstance(output, RequestOutput)
            self.outputs[output.request_id] = output
        return self.steps[-1]

    def run(self) -> list[StepPlanned]:
        """Run until all requests have ended, and return those steps."""
        first = len(self.steps)
        while self.llm.engine.has_unfinished_requests():
            self.step()
        return self.steps[first:]

    def ask(self, name: str, prompt: str | list[int], max_tokens: int, **sampling: Any) -> RequestOutput:
        """Run one request to its end."""
        self.add(name, prompt, max_tokens, **sampling)
        self.run()
        return self.outputs[name]

    def text(self, name: str) -> str:
        return self.outputs[name].outputs[0].text

    @property
    def used_blocks(self) -> int:
        stats = self.llm.engine.stats
        return stats.num_blocks - stats.num_free_blocks


def part_of(step: StepPlanned, name: str) -> Part:
    """A request's part of a step.

    Raises:
        KeyError: it has none.
    """
    for part in step.parts:
        if part.sequence_id == name:
            return part
    raise KeyError(name)
