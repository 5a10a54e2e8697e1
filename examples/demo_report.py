"""Saves what `train_demo_model.py` trained as a Hugging Face folder, loads it back, scores it and writes its card."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from demo_corpus.chat import CHAT_TEMPLATE, END, END_OF_TEXT, SPECIAL_TOKENS
from demo_corpus.evaluation import Question, is_right
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

STORY_PROMPT = "Once upon a time"


def write_folder(folder: Path, model: PreTrainedModel, tokenizer: Tokenizer, max_bytes: int) -> None:
    """Weights in bfloat16, both configs and the tokenizer with its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)  # saved for its owner only, but a package is for everyone
    size = weights.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{weights} has {size} bytes, more than {max_bytes}: choose a smaller shape")
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


class Reader:
    """A saved folder, read back through the auto classes; answers greedily in the dtype of its weights."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()

    def complete(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        """The greedy continuation of each prompt, without special tokens."""
        ids = [self.tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
        by_length = sorted(range(len(prompts)), key=lambda i: len(ids[i]))
        replies = [""] * len(prompts)
        # prompts of one length make a batch that needs no padding
        for length, group in groupby(by_length, key=lambda i: len(ids[i])):
            chosen = list(group)
            batch = torch.tensor([ids[i] for i in chosen], device=self.model.device)
            out = self.model.generate(
                batch, attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=max_new_tokens
            )
            texts = self.tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
            for i, reply in zip(chosen, texts, strict=True):
                replies[i] = reply
        return replies

    def as_chat(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def score_answers(reader: Reader, questions: Sequence[Question]) -> dict[str, float]:
    """The share of right answers for each kind of question."""
    chats = [q["kind"] != "addition completion" for q in questions]
    prompts = [reader.as_chat(q["prompt"]) if c else q["prompt"] for q, c in zip(questions, chats, strict=True)]
    replies = reader.complete(prompts, max_new_tokens=48)
    right: dict[str, list[bool]] = {}
    for question, reply in zip(questions, replies, strict=True):
        marks = right.setdefault(question["kind"], [])
        marks.append(is_right(question, reply))
        if not marks[-1] and marks.count(False) <= 3:
            print(f"  wrong, for example: {question['prompt']!r} -> {reply!r}, expected {question['reply']!r}")
    return {kind: sum(marks) / len(marks) for kind, marks in right.items()}


@torch.no_grad()
def score_text(model: PreTrainedModel, ids: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Cross entropy in nats a token on rows of unseen text, in the first and in the second half of the positions."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    near, far = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(ids).chunk(2, dim=1)
    return {"loss, first half of the positions": float(near.mean()), "loss, second half": float(far.mean())}


@torch.no_grad()
def score_draft(draft: PreTrainedModel, model: PreTrainedModel, ids: torch.Tensor) -> dict[str, float]:
    """How often a draft token would be accepted on unseen text: when greedy, and when sampling at temperature 1."""
    p, q = (network(input_ids=ids, use_cache=False).logits.float().softmax(-1) for network in (model, draft))
    greedy = (p.argmax(-1) == q.argmax(-1)).float().mean()
    return {
        "draft accepted, greedy": float(greedy),
        "draft accepted, sampling": float(torch.minimum(p, q).sum(-1).mean()),
    }


CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---

# {title}

{role}

- {architecture}
- {parameters:,} parameters in bfloat16, {positions} positions
- {vocabulary} byte-level BPE tokens, each digit a token of its own

**It is** a test model: a real checkpoint that is small enough to ship. It adds and subtracts numbers below 100,
multiplies one-digit numbers, sorts short lists, counts, spells, answers simple questions about eight invented towns
and some common facts, and tells short stories, because it was trained on such text. So tests of the engine can check
what its text means.

**It is not** an assistant. It knows no more than its training text, all of which a small program wrote
(`examples/demo_corpus`); elsewhere it repeats what it learned by heart or makes things up.

## Training

`python examples/train_demo_model.py --out OUT`

- {steps:,} steps of {batch:,} tokens {learned}, AdamW, seed {seed}
- {seconds:.0f} s for text, tokenizer and both models on {device}, torch {torch}, transformers {transformers}

The same seed gives the same text and tokenizer everywhere, and the same weights on the same GPU and library versions.

## Scores

Measured by the script on the saved folder, in bfloat16, greedy. Additions have two-digit operands, sorts three to
five numbers; none of the pairs and lists asked for was in the training text, in any order (one in ten is kept out of
it). The facts were. Losses are in nats a token, on rows of {positions} tokens of unseen text.

| what | score |
|---|---|
{scores}

## Sample

Greedy, from "{prompt}":

> {sample}
"""

TITLE = {"model": "The tritonllm demo model", "draft": "The draft model of the tritonllm demo model"}
ROLE = {
    "model": "`tritonllm generate` uses it when no model is named.",
    "draft": "It guesses ahead for the demo model in speculative decoding and has the same tokenizer.",
}
LEARNED = {"model": "of text", "draft": "of the demo model's probabilities for the text"}


def card(name: str, model: PreTrainedModel, run: dict, scores: dict[str, float], sample: str) -> str:
    """The README of a saved folder; `name` is model or draft, `run` describes the training run."""
    config = model.config
    rows = [f"| {what} | {score:{'.3f' if 'loss' in what else '.1%'}} |" for what, score in scores.items()]
    return CARD.format(
        name=name,
        title=TITLE[name],
        role=ROLE[name],
        learned=LEARNED[name],
        architecture=f"Qwen3: {config.num_hidden_layers} layers of width {config.hidden_size}, "
        f"{config.num_attention_heads} query and {config.num_key_value_heads} key/value heads of {config.head_dim}",
        parameters=model.num_parameters(),
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        torch=torch.__version__,
        transformers=transformers.__version__,
        scores="\n".join(rows),
        prompt=STORY_PROMPT,
        sample=(STORY_PROMPT + sample).strip().replace("\n", "\n> "),
        **run,
    )
