"""An order of requests of your own: short prompts first, and a long one waits for no more than so many that come later.

Over HTTP: ``PYTHONPATH=examples tritonllm serve --scheduler-cls shortest_first.ShortestPromptFirst``.
"""

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path
from tritonllm.engine.data.request import Request
from tritonllm.engine.schedule.policy import SchedulingPolicy

PATIENCE = 8  # tokens of prompt that a place in the order of arrival counts for


class ShortestPromptFirst(SchedulingPolicy):
    """Short prompts first. One of 800 tokens is overtaken by at most 100 that come after it, so nobody starves; with
    ``len(request.prompt_token_ids)`` alone it could wait for ever."""

    uses_priority = False

    def rank(self, request: Request) -> float:
        return len(request.prompt_token_ids) + PATIENCE * request.arrival


def main() -> None:
    llm = LLM(str(model_path()), scheduler_cls=ShortestPromptFirst, max_num_seqs=1)
    story = "Once upon a time, in the Old Pine Forest, where the ground is soft with needles, there lived a bear. "
    params = SamplingParams(temperature=0, max_tokens=4)
    for name, prompt in (("a story", story * 4), ("a sum", "47 + 38 ="), ("a fox", "There was a fox named")):
        llm.engine.add_request(name, prompt, params)
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            if output.finished:
                print(output.request_id, repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
