"""Train an EAGLE head for a model on a CPU, in some minutes for the demo model, and measure its drafts.

    python examples/train_eagle_head.py --out HEAD [--method eagle3] [--steps 650]
    tritonllm generate MODEL --speculative-config '{"method": "eagle", "model": "HEAD", "num_speculative_tokens": 3}'

A head of EAGLE learns the model's next hidden states and probabilities on text as the model was trained on (Li et al.,
2024). One of EAGLE-3 (Li et al., 2025) learns probabilities alone, and does while it learns what it does later: it goes
on from its own states for as many tokens as it drafts. For a model of your own, put its text in the place of
`demo_corpus`.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_corpus import chat, documents
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path
from tritonllm.models.eagle_files import write_eagle_head

ROWS, LENGTH, RATE, DRAFTS = 4, 128, 4e-3, 3
PROMPTS = ["There was a fox named", "Once upon a time", "One night a terrible storm", "What is 12 + 30?"]


def layer_config(hidden: int, vocab: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=hidden // 32,
        num_key_value_heads=kv_heads,
        head_dim=32,
        vocab_size=vocab,
        max_position_embeddings=2048,
    )


class Head(nn.Module):
    """EAGLE: `fc` and one layer of Llama's kind, without the norms at its ends."""

    def __init__(self, target: Any, text: torch.Tensor) -> None:
        super().__init__()
        hidden = target.config.hidden_size
        self.config = layer_config(hidden, target.config.vocab_size, kv_heads=2)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        model = LlamaModel(self.config)
        model.layers[0].input_layernorm = model.norm = nn.Identity()
        model.embed_tokens = None  # the large model's
        self.model = model

    def forward(self, target: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A loss, and the part of it that is the cross-entropy of the next token."""
        with torch.no_grad():
            states = target.model(ids).last_hidden_state
            goal = target.lm_head(states).softmax(-1)
            embedded = target.model.embed_tokens(ids)
        before = F.pad(states, (0, 0, 1, 0))[:, :-1]  # of the place before each token
        found = self.model(inputs_embeds=self.fc(torch.cat([embedded, before], -1))).last_hidden_state
        wrong = F.cross_entropy(target.lm_head(found).flatten(0, 1), goal.flatten(0, 1))
        return wrong + F.smooth_l1_loss(found, states), wrong

    def save(self, folder: Path) -> None:
        config = {**self.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        layers = {name: t for name, t in self.model.state_dict().items() if name.startswith("layers.")}
        write_eagle_head(folder, config, {**layers, "fc.weight": self.fc.weight.detach()})


class Layer(nn.Module):
    """The layer of an EAGLE-3 head: attention sees a token's embedding beside the feature of the place before."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = nn.ModuleDict({f"{n}_proj": nn.Linear(2 * hidden, hidden, bias=False) for n in "qkv"})
        self.self_attn["o_proj"] = nn.Linear(hidden, hidden, bias=False)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(hidden, eps), LlamaRMSNorm(hidden, eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, turn: Any, past: list[Any]) -> torch.Tensor:
        """States [B, T, hidden]. Each row sees what `past` has first up to its own place, and of what was added to that
        later, with this call's, its own row: a draft sees the text, and the drafts before it."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], -1)
        q, k, v = (self.self_attn[f"{n}_proj"](x).unflatten(-1, (-1, 32)).transpose(1, 2) for n in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *turn)
        past.append((k, v))
        (keys, values), *later = past
        scores = (q @ keys.mT).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -torch.inf)
        scores = torch.cat([scores, *((q * other).sum(-1, keepdim=True) for other, _ in later)], -1)
        of_text, *of_drafts = (scores * 32**-0.5).softmax(-1).split([q.shape[2], *[1] * len(later)], -1)
        seen = of_text @ values + sum(w * other for w, (_, other) in zip(of_drafts, later, strict=True))
        x = features + self.self_attn["o_proj"](seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """EAGLE-3: `fc` of three states of the model, a layer, and an output projection over the more frequent tokens."""

    def __init__(self, target: Any, text: torch.Tensor) -> None:
        super().__init__()
        hidden, vocab, layers = target.config.hidden_size, target.config.vocab_size, target.config.num_hidden_layers
        self.config = layer_config(hidden, vocab, kv_heads=hidden // 32)
        self.reads = 2, layers // 2, layers - 3
        self.tokens = torch.bincount(text, minlength=vocab).topk(vocab // 2).indices.sort().values
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = Layer(self.config)
        self.norm = LlamaRMSNorm(hidden, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(self.tokens), bias=False)
        self.lm_head.weight.data.copy_(target.lm_head.weight[self.tokens])
        self.turn = LlamaRotaryEmbedding(self.config)

    def forward(self, target: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A loss over as many drafts as are made later, and the cross-entropy of the first."""
        count = ids.shape[1] - DRAFTS
        with torch.no_grad():
            seen = target.model(ids, output_hidden_states=True)
            goal = target.lm_head(seen.last_hidden_state)[..., self.tokens].softmax(-1)
            embedded = target.model.embed_tokens(ids)
            states = torch.cat([seen.hidden_states[place] for place in self.reads], -1)
        features = F.pad(self.fc(states), (0, 0, 1, 0))[:, :count]
        past: list[Any] = []
        losses = []
        for draft in range(DRAFTS):
            place = slice(draft, draft + count)
            turn = self.turn(embedded, torch.arange(draft, draft + count)[None])
            features = self.midlayer(embedded[:, place], features, turn, past)
            logits = self.lm_head(self.norm(features))
            losses.append(F.cross_entropy(logits.flatten(0, 1), goal[:, place].flatten(0, 1)))
        return sum(loss * 0.8**draft for draft, loss in enumerate(losses)), losses[0]

    def save(self, folder: Path) -> None:
        drafted = {"draft_vocab_size": len(self.tokens), "architectures": ["LlamaForCausalLMEagle3"]}
        offsets = {"d2t": self.tokens - torch.arange(len(self.tokens))}
        write_eagle_head(folder, {**self.config.to_dict(), **drafted}, {**self.state_dict(), **offsets})


HEADS = {"eagle": Head, "eagle3": Eagle3Head}


def text_of(tokenizer: Tokenizer, count: int) -> torch.Tensor:
    """So many documents, one after the other, each with its end."""
    end = tokenizer.token_to_id(chat.END_OF_TEXT)
    encoded = tokenizer.encode_batch([text for _, text in documents(seed=0, shard=1, count=count)])
    return torch.tensor([token for encoding in encoded for token in (*encoding.ids, end)])


def train(target: Any, head: nn.Module, text: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.95))
    generator, began = torch.Generator().manual_seed(0), time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 20) * (1 - step / steps)
        begin = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=generator)
        loss, wrong = head(target, text[begin + torch.arange(LENGTH)])
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
    parser.add_argument("--method", choices=list(HEADS), default="eagle", help="kind of head (%(default)s)")
    parser.add_argument("--steps", type=int, default=650, help="of training (%(default)s)")
    parser.add_argument("--documents", type=int, default=1500, help="to train on (%(default)s)")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    text = text_of(tokenizer, args.documents)
    print(f"{len(text):,} tokens of text", flush=True)
    head = HEADS[args.method](target, text)
    train(target, head, text, args.steps)
    head.save(args.out)
    config = {"method": args.method, "model": str(args.out), "num_speculative_tokens": DRAFTS, "adaptive": False}
    llm = LLM(str(model_path()), dtype="float32", max_num_seqs=8, num_blocks=512, speculative_config=config)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
    stats = llm.engine.stats
    places = ", ".join(f"{count / max(1, stats.num_drafts):.0%}" for count in stats.num_accepted_tokens_per_pos)
    print(f"drafts that are right, greedy, at each place: {places}")


if __name__ == "__main__":
    main()
