"""The most likely continuations of a prompt, with their log-probabilities."""

from tritonllm import LLM, BeamSearchParams
from tritonllm.demo import model_path


def main() -> None:
    llm = LLM(str(model_path()))  # or a folder or hub id of your own
    prompts = ["Once upon a time, there was a", "The little dog was"]
    params = BeamSearchParams(beam_width=4, max_tokens=12, early_stopping=True)
    for output in llm.beam_search(prompts, params):
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:7.2f}  {sequence.text}")


if __name__ == "__main__":
    main()
