"""Train an EAGLE head for a model on a CPU, in two minutes for the demo model, and measure its drafts.

    python examples/train_eagle_head.py --out HEAD [--steps 650]
    tritonllm generate MODEL --speculative-config '{"method": "eagle", "model": "HEAD", "num_speculative_tokens": 3}'

The head learns the model's next hidden states and probabilities on text as the model was trained on ("EAGLE": Li et
al., 2024). For a model of your own, put its text in the place of `demo_corpus`.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_corpus import chat, documents
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path
from tritonllm.models.eagle_files import write_eagle_head

ROWS, LENGTH, RATE = 4, 128, 4e-3
PROMPTS = ["There was a fox named", "Once upon a time", "One night a terrible storm", "What is 12 + 30?"]


class Head(nn.Module):
    """`fc` and one layer of Llama's kind, without the norms at its ends."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=1,
            num_attention_heads=hidden // 32,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=vocab,
            max_position_embeddings=2048,
        )
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        model = LlamaModel(self.config)
        model.layers[0].input_layernorm = model.norm = nn.Identity()
        model.embed_tokens = None  # the large model's
        self.model = model

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """States [B, T, hidden] from tokens' embeddings and the large model's states of the places before."""
        return self.model(inputs_embeds=self.fc(torch.cat([embedded, states], -1))).last_hidden_state

    def save(self, folder: Path) -> None:
        config = {**self.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        layers = {name: t for name, t in self.model.state_dict().items() if name.startswith("layers.")}
        write_eagle_head(folder, config, {**layers, "fc.weight": self.fc.weight.detach()})


def text_of(tokenizer: Tokenizer, count: int) -> torch.Tensor:
    """So many documents, one after the other, each with its end."""
    end = tokenizer.token_to_id(chat.END_OF_TEXT)
    encoded = tokenizer.encode_batch([text for _, text in documents(seed=0, shard=1, count=count)])
    return torch.tensor([token for encoding in encoded for token in (*encoding.ids, end)])


def train(target: nn.Module, head: Head, text: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.95))
    generator, began = torch.Generator().manual_seed(0), time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 20) * (1 - step / steps)
        begin = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=generator)
        ids = text[begin + torch.arange(LENGTH)]
        with torch.no_grad():
            states = target.model(ids).last_hidden_state
            goal = target.lm_head(states).softmax(-1)
            embedded = target.model.embed_tokens(ids)
        before = F.pad(states, (0, 0, 1, 0))[:, :-1]
        found = head(embedded, before)
        wrong = F.cross_entropy(target.lm_head(found).flatten(0, 1), goal.flatten(0, 1))
        loss = wrong + F.smooth_l1_loss(found, states)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            took = time.perf_counter() - began
            print(f"step {step:5d}  cross-entropy {float(wrong.detach()):.3f}  {took:4.0f} s", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=650, help="of training (%(default)s)")
    parser.add_argument("--documents", type=int, default=1500, help="to train on (%(default)s)")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    text = text_of(tokenizer, args.documents)
    print(f"{len(text):,} tokens of text", flush=True)
    head = Head(target.config.hidden_size, target.config.vocab_size)
    train(target, head, text, args.steps)
    head.save(args.out)
    config = {"method": "eagle", "model": str(args.out), "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(str(model_path()), dtype="float32", max_num_seqs=8, num_blocks=512, speculative_config=config)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
    stats = llm.engine.stats
    places = ", ".join(f"{count / max(1, stats.num_drafts):.0%}" for count in stats.num_accepted_tokens_per_pos)
    print(f"drafts that are right, greedy, at each place: {places}")


if __name__ == "__main__":
    main()
