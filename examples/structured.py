"""Answers that a program can read: a schema, a regular expression, a choice. Needs the extra ``structured``."""

import json

from tritonllm import LLM, SamplingParams, StructuredOutputsParams
from tritonllm.demo import model_path

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["dog", "cat", "bird"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}


def main() -> None:
    llm = LLM(str(model_path()))  # or a folder or hub id of your own
    wishes = [
        StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
        StructuredOutputsParams(regex=r"[A-Z][a-z]{2,8} (ran|sat|slept)\."),
        StructuredOutputsParams(choice=["happy", "sad"]),
    ]
    params = [SamplingParams(temperature=0.8, seed=1, max_tokens=100, structured_outputs=wish) for wish in wishes]
    prompts = ["There was a girl", "The little dog was tired.", "In the end, they were"]
    person, sentence, mood = (output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False))
    print(json.loads(person)["name"], person, sentence, mood, sep="\n")


if __name__ == "__main__":
    main()
