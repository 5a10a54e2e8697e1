"""Train tritonllm's demo model and its draft sibling from nothing: text, tokenizer, weights, scores.

    python examples/train_demo_model.py --out OUT [--tar OUT.tar]      minutes on one H200
    python examples/train_demo_model.py --out OUT --quick              a smoke run for a CPU

Writes the Hugging Face folders OUT/model and OUT/draft and the end-to-end questions OUT/demo_eval.json. All text comes
from `demo_corpus`; one seed fixes the text, the tokenizer, the first weights and the order of the rows.

The draft learns the main model's probabilities instead of the text, which is what speculative decoding wants of it:
Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015); Zhou et al., "DistillSpec" (2023).
"""

import argparse
import math
import os
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_corpus import chat, evaluation, tokens
from demo_report import STORY_PROMPT, Reader, card, score_answers, score_draft, score_text, write_folder
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 2048
MAX_LENGTH = 2048  # positions
MAX_BYTES = 6_000_000  # of model.safetensors


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 32


@dataclass(frozen=True)
class Plan:
    steps: int
    rows: int = 64  # a step, of `length` tokens each
    length: int = 1024
    learning_rate: float = 3e-3  # at its highest
    warmup: int = 200  # steps


MODEL = Shape(hidden=192, intermediate=512, layers=6, heads=8, kv_heads=2)  # 2.9 million parameters
DRAFT = Shape(hidden=128, intermediate=256, layers=3, heads=4, kv_heads=2)  # 0.7 million


def build(shape: Shape, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    end_of_text, end_of_turn = tokenizer.token_to_id(chat.END_OF_TEXT), tokenizer.token_to_id(chat.END)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
    )
    model = Qwen3ForCausalLM(config)
    # a chat ends with the turn, a completion with the document
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text)
    return model


class Rows:
    """Random rows of the corpus, which lies on the device; each begins at the first token of a document."""

    def __init__(self, corpus: tokens.Corpus, device: torch.device, seed: int) -> None:
        self.tokens = torch.from_numpy(corpus.tokens).to(device)
        usable = corpus.starts[corpus.starts < len(corpus.tokens) - MAX_LENGTH]
        self.starts = torch.from_numpy(usable).to(device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and, one token on, targets: ``[rows, length]`` int64 each."""
        device = self.tokens.device
        chosen = torch.randint(len(self.starts), (rows, 1), generator=self.generator, device=device)
        ids = self.tokens[self.starts[chosen] + torch.arange(length + 1, device=device)].long()
        return ids[:, :-1], ids[:, 1:]


def learning_rate(plan: Plan, step: int) -> float:
    """Linear warm-up, then half a cosine down to nothing."""
    if step < plan.warmup:
        return plan.learning_rate * (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def train(
    model: Qwen3ForCausalLM, corpus: Rows, plan: Plan, teacher: Qwen3ForCausalLM | None = None, compiled: bool = False
) -> None:
    """Train in place, on the text or, given a teacher, on the teacher's probabilities."""
    device = corpus.tokens.device
    model.to(device).train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.0,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )

    def logits(network: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
        return network(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()

    forward = torch.compile(logits) if compiled else logits
    began, seen = time.perf_counter(), 0
    for step in range(plan.steps):
        # the last tenth on rows twice as long, so that the far positions are trained as well
        long = step >= 0.9 * plan.steps and 2 * plan.length <= MAX_LENGTH
        ids, targets = corpus.draw(plan.rows // 2, 2 * plan.length) if long else corpus.draw(plan.rows, plan.length)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        with torch.autocast(device.type, torch.bfloat16):
            goal = targets.flatten()
            if teacher is not None:
                with torch.no_grad():
                    goal = forward(teacher, ids).softmax(-1)
            loss = F.cross_entropy(forward(model, ids), goal)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += ids.numel()
        if step % max(1, plan.steps // 40) == 0 or step == plan.steps - 1:
            value, took = float(loss.detach()), time.perf_counter() - began  # waits for the device
            left = took / (step + 1) * (plan.steps - step - 1)
            print(
                f"step {step:5d}/{plan.steps}  loss {value:.4f}  {seen / took:10,.0f} tok/s  {left:4.0f} s left",
                flush=True,
            )
    model.eval()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--tar", type=Path, help="also pack everything written into one file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6000, help="of the main model; the draft takes half of them")
    parser.add_argument("--rows", type=int, default=64, help="of 1024 tokens in each step")
    parser.add_argument("--shards", type=int, default=200, help="of the corpus, about 400,000 tokens each")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that write text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile: a slow start, then faster steps")
    parser.add_argument("--quick", action="store_true", help="a few steps on little text, to see that all of it runs")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    # before the first use of the device; cuBLAS is deterministic only with a fixed workspace
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are parallel already
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass adds up in any order; flash attention's need not
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    plan, shards = Plan(args.steps, args.rows), args.shards
    questions, story_tokens, tokenized = evaluation.questions(None, 500), 400, tokens.TOKENIZER_DOCUMENTS
    if args.quick:
        plan, shards = Plan(min(args.steps, 40), rows=4, length=128, warmup=5), 2
        questions, story_tokens, tokenized = questions[:8], 20, 2000

    began = time.perf_counter()
    tokenizer = tokens.train_tokenizer(args.seed, VOCAB_SIZE, tokenized)
    text = tokens.encode(tokenizer, args.seed, range(1, shards + 1), args.workers)
    unseen = Rows(tokens.encode(tokenizer, args.seed, [0], 1), device, args.seed)
    print(f"{len(text.tokens):,} tokens in {len(text.starts):,} documents, {time.perf_counter() - began:.0f} s")
    print("  " + ", ".join(f"{kind} {share:.1%}" for kind, share in text.share.items()))

    corpus = Rows(text, device, args.seed)
    model, draft = build(MODEL, tokenizer), build(DRAFT, tokenizer)
    train(model, corpus, plan, compiled=args.compile)
    train(draft, corpus, replace(plan, steps=plan.steps // 2), teacher=model, compiled=args.compile)
    trained = time.perf_counter() - began
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"

    near_and_far = unseen.draw(2 if args.quick else 64, MAX_LENGTH)
    for name, network, steps in (("model", model, plan.steps), ("draft", draft, plan.steps // 2)):
        folder = args.out / name
        write_folder(folder, network, tokenizer, MAX_BYTES)
        reader = Reader(folder, device)
        scores = score_answers(reader, questions) | score_text(network, *near_and_far)
        if network is draft:
            scores |= score_draft(draft, model, near_and_far[0])
        run = {"seed": args.seed, "steps": steps, "batch": plan.rows * plan.length, "seconds": trained, "device": where}
        sample = reader.complete([STORY_PROMPT], story_tokens)[0]
        (folder / "README.md").write_text(card(name, network, run, scores, sample))
        print(name, *(f"  {what}: {value:.4f}" for what, value in scores.items()), STORY_PROMPT + sample, sep="\n")
    evaluation.write(args.out / "demo_eval.json")
    if args.tar:
        with tarfile.open(args.tar, "w") as tar:
            for entry in ("model", "draft", "demo_eval.json"):
                tar.add(args.out / entry, arcname=entry)
    print(f"{args.out}: done in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
