"""Many prompts at once, with the parameters of each: the offline interface."""

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path


def main() -> None:
    llm = LLM(str(model_path()))  # or a folder or hub id of your own
    prompts = ["There was a fox named", "47 + 38 =", "There was a fox named"]
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=60),
        SamplingParams(temperature=0, max_tokens=4),
        SamplingParams(temperature=0.8, seed=2, max_tokens=60),
    ]
    for output in llm.generate(prompts, params):
        print(f"{output.prompt}|{output.outputs[0].text}\n")

    question = [{"role": "user", "content": "Sort these numbers: 42, 7, 19"}]
    (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    print(answer.outputs[0].text)


if __name__ == "__main__":
    main()
