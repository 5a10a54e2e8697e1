"""A published model answers as it is told to: under schemas, and with beams as transformers finds them."""

import json

import pytest
import torch

from tritonllm import BeamSearchParams, SamplingParams, StructuredOutputsParams

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "is_a_capital_city": {"type": "boolean"},
        "population_in_millions": {"type": "integer", "minimum": 0, "maximum": 40},
    },
    "required": ["city", "country", "is_a_capital_city", "population_in_millions"],
    "additionalProperties": False,
}
QUESTIONS = ["Describe Paris as JSON.", "Describe Rome as JSON.", "Describe Madrid as JSON."]
PROMPTS = ["The capital of France is", "Water boils at"]


def conversation(question):
    return [{"role": "user", "content": question}]


def structured(**wish):
    return SamplingParams(temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(**wish))


@pytest.mark.long
def test_answers_follow_a_schema(llm):
    """Three at once, beside one that answers freely; each alone says the same."""
    params = structured(json=CITY, disable_any_whitespace=True)
    free = SamplingParams(temperature=0, max_tokens=12)
    conversations = [conversation(question) for question in (*QUESTIONS, "Say hello.")]
    outputs = llm.chat(conversations, [params] * 3 + [free], use_tqdm=False)
    for output in outputs[:3]:
        answer = json.loads(output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop" and list(answer) == CITY["required"]
        assert (
            answer["country"] in CITY["properties"]["country"]["enum"] and 0 <= answer["population_in_millions"] <= 40
        )
    assert [json.loads(o.outputs[0].text)["country"] for o in outputs[:2]] == ["France", "Italy"]
    for one, output, wish in zip(conversations, outputs, [params] * 3 + [free], strict=True):
        assert llm.chat(one, wish, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_a_choice_is_the_more_likely_one(llm, reference, tokenizer):
    """By the model's own probability of each answer's first token."""
    question = conversation("Is Rome the capital of Italy? Answer yes or no.")
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=True, return_dict=False)
    with torch.inference_mode():
        last = reference(torch.tensor([ids], device=reference.device)).logits[0, -1]
    choices = ["Yes", "No"]
    likely = max(choices, key=lambda text: float(last[tokenizer.encode(text)[0]]))
    assert llm.chat(question, structured(choice=choices), use_tqdm=False)[0].outputs[0].text == likely


@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_those_of_transformers(llm, reference, tokenizer, width):
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(width, 12))
    for text, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([tokenizer(text).input_ids], device=reference.device)
        with torch.inference_mode():
            found = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=12,
                pad_token_id=2,
                return_dict_in_generate=True,
                output_scores=True,
            )
        for sequence, theirs, score in zip(
            output.sequences, found.sequences.tolist(), found.sequences_scores, strict=True
        ):
            assert sequence.tokens == theirs[: len(sequence.tokens)]
            assert all(token == 2 for token in theirs[len(sequence.tokens) :])  # padding
            new = len(sequence.tokens) - ids.shape[1]
            assert sequence.cum_logprob / new == pytest.approx(float(score), rel=1e-4)
