"""An engine in 300 lines, made of the kernels of this package: docs/nano.md walks through it.

``python examples/nano.py [MODEL] [PROMPT ...]``. MODEL is a folder with a checkpoint of the Llama or Qwen kind; by
default it is the demo model. The same lines run on the CPU in float32 and on a GPU in bfloat16, there with CUDA graphs.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tritonllm import kernels
from tritonllm.demo import model_path

BLOCK = 16  # tokens of a cache block
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
Batch = dict[str, torch.Tensor]  # a step as the device reads it: Engine.batch makes it


class Model:
    """A Llama, Mistral, Qwen2 or Qwen3: its weights, and one pass over them."""

    def __init__(self, folder: Path, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        config = json.loads((folder / "config.json").read_text())
        windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
        if config["architectures"][0] not in FAMILIES or config["hidden_act"] != "silu" or windowed:
            raise ValueError(f"{folder} must be one of {', '.join(FAMILIES)}, with silu and without sliding_window")
        heads, self.eps = config["num_attention_heads"], config["rms_norm_eps"]
        self.kv_heads = config.get("num_key_value_heads") or heads
        self.head_size = config.get("head_dim") or config["hidden_size"] // heads
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        self.angles = kernels.build_cos_sin_cache(self.head_size, max_len, theta, rope, device=device)
        self.counters = torch.zeros(2**16, dtype=torch.int32, device=device)  # of the parts of a product
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= {name: t.to(dtype) for name, t in load_file(file, device=str(device)).items()}
        if config.get("tie_word_embeddings"):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        self.take_weights(tensors, config["num_hidden_layers"])

    def take_weights(self, tensors: dict[str, torch.Tensor], layers: int) -> None:
        """Each tensor of the checkpoint once: one that is missing, or left over, is an error."""

        def take(name: str) -> torch.Tensor:
            if name not in tensors:
                raise ValueError(f"the checkpoint has no tensor {name}")
            return tensors.pop(name)

        def product(*names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            """Projections of one input are one weight, so that the input is read once."""
            biases = [tensors.pop(f"{name}.bias") for name in names if f"{name}.bias" in tensors]
            return torch.cat([take(f"{name}.weight") for name in names]), torch.cat(biases) if biases else None

        self.embedding, self.head = take("model.embed_tokens.weight"), product("lm_head")
        self.layers = [
            SimpleNamespace(
                norm=take(f"{at}.input_layernorm.weight"),
                qkv=product(*(f"{at}.self_attn.{name}_proj" for name in "qkv")),
                head_norms={f"{name}_weight": tensors.pop(f"{at}.self_attn.{name}_norm.weight", None) for name in "qk"},
                out=product(f"{at}.self_attn.o_proj"),
                mlp_norm=take(f"{at}.post_attention_layernorm.weight"),
                gate_up=product(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
                down=product(f"{at}.mlp.down_proj"),
            )
            for at in (f"model.layers.{i}" for i in range(layers))
        ]
        self.norm = take("model.norm.weight")
        if tensors:
            raise ValueError(f"nothing here reads these tensors of the checkpoint: {', '.join(sorted(tensors)[:4])}")

    def logits(self, batch: Batch, cache: torch.Tensor, workspace: torch.Tensor, longest: int) -> torch.Tensor:
        """``[B, vocab]`` float32 of each sequence's last token. ``longest``: tokens of a sequence; 1: decodes alone."""
        fixed = {"constant_weight": True, "workspace": self.counters}
        x = torch.nn.functional.embedding(batch["ids"], self.embedding)
        residual = torch.zeros_like(x)
        for layer, (k_cache, v_cache) in zip(self.layers, cache, strict=True):
            x, residual = kernels.fused_add_rms_norm(x, residual, layer.norm, self.eps)
            qkv = kernels.linear(x, *layer.qkv, **fixed)
            where = k_cache, v_cache, batch["slots"], batch["positions"], self.angles
            q = kernels.qk_norm_rope_store(qkv, *where, **layer.head_norms, eps=self.eps, constant_weight=True)
            pages = k_cache, v_cache, batch["tables"]
            if longest == 1:
                hints = {"order": batch["order"], "settled": True, "workspace": workspace}
                x = kernels.paged_decode_attention(q, *pages, batch["lens"], **hints)
            else:
                x = kernels.varlen_prefill_attention(q, *pages, batch["ends"], batch["lens"], max_seqlen_q=longest)
            x = kernels.linear(x.flatten(1), *layer.out, **fixed)
            x, residual = kernels.fused_add_rms_norm(x, residual, layer.mlp_norm, self.eps)
            x = kernels.linear(x, *layer.gate_up, activation="silu", gated=True, **fixed)
            x = kernels.linear(x, *layer.down, **fixed)
        x, _ = kernels.fused_add_rms_norm(x, residual, self.norm, self.eps)
        x = x if longest == 1 else x[batch["ends"][1:].long() - 1]
        return kernels.linear(x, *self.head, out=x.new_empty(len(x), len(self.head[0]), dtype=torch.float32), **fixed)


@dataclass(eq=False)
class Request:
    tokens: list[int]  # the prompt, behind which the output grows as the host reads it
    max_tokens: int = 64
    temperature: float = 0.0  # 0: the likeliest token
    seed: int = 0
    stops: frozenset[int] = frozenset()  # tokens that end the output, as its last
    prompt: int = 0  # length of the prompt
    length: int = 0  # of prompt and output, with a token that a step is drawing
    computed: int = 0  # of these, those whose keys are in the cache, or will be after the step that runs
    row: int = 0  # of the step that draws the last token
    blocks: list[int] = field(default_factory=list)
    done: bool = False  # a token of stops was read


Plan = list[tuple[Request, int]]  # who runs in a step, and how many tokens of each
PADDING = Request([0], computed=-1)  # a decode at position -1, of no keys


class Scheduler:
    """Who runs next, and where keys and values live: bookkeeping on integers, without a tensor.

    A step computes the next chunk of a prompt, or the token drawn last, of each request, the oldest first. If blocks
    run out, the newest request gives up its own, and computes its prompt and output again later.
    """

    def __init__(self, num_blocks: int, max_seqs: int, budget: int, max_len: int) -> None:
        self.free, self.waiting, self.running, self.preemptions = list(range(num_blocks)), [], [], 0
        self.max_seqs, self.budget, self.most = max_seqs, budget, min(max_len, num_blocks * BLOCK)

    def add(self, request: Request) -> None:
        request.prompt = request.length = len(request.tokens)
        if not 0 < request.prompt < request.prompt + request.max_tokens <= self.most:
            sizes = f"{request.prompt} + {request.max_tokens}"
            raise ValueError(f"prompt and max_tokens must be at least 1, and {self.most} together, got {sizes}")
        self.waiting.append(request)

    def schedule(self) -> Plan:
        plan, budget, place, before = [], self.budget, 0, self.preemptions
        while place < len(self.running):  # which may get shorter, at its end
            request = self.running[place]
            count = min(request.length - request.computed, budget)
            if self.reserve(request, request.computed + count):
                plan += [(request, count)] if count else []
                place, budget = place + 1, budget - count
            else:
                self.preempt()
        while self.waiting and budget and len(self.running) < self.max_seqs and before == self.preemptions:
            if not self.reserve(self.waiting[0], self.waiting[0].length):
                break
            self.running.append(self.waiting.pop(0))
            plan.append((self.running[-1], min(self.running[-1].length, budget)))
            budget -= plan[-1][1]
        return plan

    def reserve(self, request: Request, tokens: int) -> bool:
        missing = max(0, -(-tokens // BLOCK) - len(request.blocks))
        if missing <= len(self.free):
            request.blocks += [self.free.pop() for _ in range(missing)]
        return tokens <= len(request.blocks) * BLOCK

    def preempt(self) -> None:
        newest = self.running[-1]
        self.leave(newest)
        self.waiting.insert(0, newest)
        newest.computed, self.preemptions = 0, self.preemptions + 1

    def leave(self, request: Request) -> None:
        """The next step may use its blocks at once: the device runs it after this one."""
        self.running, self.waiting = ([r for r in queue if r is not request] for queue in (self.running, self.waiting))
        self.free += request.blocks
        request.blocks = []

    def launched(self, plan: Plan) -> list[Request | None]:
        """A step has begun: whose token each row draws. ``None``: the row is a chunk that does not end a prompt."""
        draws: list[Request | None] = [None] * len(plan)
        for row, (request, count) in enumerate(plan):
            request.computed += count
            if request.computed == request.length:
                request.length, request.row, draws[row] = request.length + 1, row, request
                if request.length == request.prompt + request.max_tokens:  # the last is drawn, never computed
                    self.leave(request)
        return draws


class Engine:
    """Plans and launches a step while the one before it runs, and reads tokens one step late."""

    def __init__(self, folder, dtype=None, device=None, num_blocks=None, max_seqs=256, budget=16384, max_len=2048):
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.gpu, self.width = self.device.type == "cuda", -(-max_len // BLOCK)
        dtype = dtype or (torch.bfloat16 if self.gpu else torch.float32)
        self.model = Model(Path(folder), max_len, dtype, self.device)
        shape = len(self.model.layers), 2, BLOCK, self.model.kv_heads, self.model.head_size
        memory = 0.8 * torch.cuda.mem_get_info(self.device)[0] if self.gpu else 2**28
        num_blocks = num_blocks or int(memory / (np.prod(shape) * dtype.itemsize))
        self.cache = torch.zeros(*shape[:2], num_blocks, *shape[2:], dtype=dtype, device=self.device)
        self.scheduler = Scheduler(num_blocks, max_seqs, budget, max_len)
        self.workspace = torch.zeros(kernels.WORKSPACE_SIZE, dtype=torch.int32, device=self.device)
        self.drawn = torch.zeros(max_seqs, dtype=torch.int64, device=self.device)  # by the step before
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        for size in (max_seqs, *(2**n for n in reversed(range(20)) if 2**n < max_seqs)) if self.gpu else ():
            self.capture(size)

    def capture(self, size: int) -> None:
        """A step of so many decodes as one graph: its kernels read lengths and blocks from tensors that stay."""
        batch = {name: t.to(self.device) for name, t in self.batch([(PADDING, 1)] * size).items()}
        self.compute(batch, 1)  # compiles and loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=next((g.pool() for g, _ in self.graphs.values()), None)):
            self.compute(batch, 1)
        self.graphs[size] = graph, batch

    @torch.inference_mode()
    def compute(self, batch: Batch, longest: int) -> None:
        """One step on the device, from tokens to the next tokens in ``drawn``."""
        ids = torch.where(batch["ids"] < 0, self.drawn[(-1 - batch["ids"]).clamp(min=0)], batch["ids"])
        logits = self.model.logits(batch | {"ids": ids}, self.cache, self.workspace, longest)
        draw = batch["temperatures"], None, None, None, batch["seeds"], batch["steps"]  # no top_k, top_p and min_p
        kernels.sample(logits, *draw, out=self.drawn[: len(logits)])

    def batch(self, plan: Plan) -> Batch:
        """T tokens of B sequences, in memory of the host that a GPU copies from."""
        requests, counts = [request for request, _ in plan], np.array([count for _, count in plan])
        lens, ends = np.array([request.computed for request in requests]) + counts, np.cumsum(counts)
        rows = np.repeat(np.arange(len(plan)), counts)
        positions = np.arange(len(rows)) - (ends - lens)[rows]
        ids, tables = [], np.zeros((len(plan), self.width), dtype=np.int64)
        for row, (request, count) in enumerate(plan):
            tables[row, : len(request.blocks)] = request.blocks
            ids += request.tokens[request.computed : request.computed + count] or [-1 - request.row]
        slots = tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK

        def tensor(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            made = torch.tensor(values, dtype=dtype)
            return made.pin_memory() if self.gpu else made

        return {
            "ids": tensor(ids),  # [T]; -1 - row: what the step before has drawn there, which is not read yet
            "positions": tensor(np.maximum(positions, 0)),  # [T]
            "slots": tensor(np.where(positions < 0, -1, slots)),  # [T], places in the cache; -1 in padding: none
            "ends": tensor(np.append(0, ends), torch.int32),  # [B + 1], where each sequence's tokens end
            "lens": tensor(lens, torch.int32),  # [B], keys of each sequence, those of this step among them
            "order": tensor(np.argsort(-lens), torch.int32),  # [B], the longest sequence first
            "seeds": tensor([request.seed for request in requests]),  # [B]
            "steps": tensor(lens - [request.prompt for request in requests]),  # [B], numbers in the outputs
            "temperatures": tensor([request.temperature for request in requests], torch.float32),  # [B]
            "tables": tensor(tables, torch.int32),  # [B, blocks]
        }

    def launch(self, plan: Plan) -> tuple[list[Request | None], torch.Tensor, Any]:
        """Start a step and the copy of its tokens to the host; nothing here waits for the device."""
        longest = max(count for _, count in plan)
        size = min((n for n in self.graphs if n >= len(plan)), default=0) if longest == 1 else 0
        batch = self.batch(plan + [(PADDING, 1)] * (size - len(plan)))
        if size:
            graph, room = self.graphs[size]
            for name, tensor in batch.items():
                room[name].copy_(tensor, non_blocking=True)
            graph.replay()
        else:
            self.compute({name: t.to(self.device, non_blocking=True) for name, t in batch.items()}, longest)
        drawn = self.drawn[: len(plan)].to("cpu", non_blocking=True, copy=True)
        return self.scheduler.launched(plan), drawn, torch.cuda.current_stream().record_event() if self.gpu else None

    def read(self, draws: list[Request | None], drawn: torch.Tensor, event: Any) -> None:
        """The one wait for the device. What a request drew behind its end, before this was read, is dropped."""
        if event:
            event.synchronize()
        for request, token in zip(draws, drawn.tolist(), strict=True):
            if request and not request.done:
                request.tokens.append(token)
                request.done = token in request.stops
                if request.done:
                    self.scheduler.leave(request)

    def generate(self, requests: list[Request]) -> list[list[int]]:
        """Answer all, as many at once as fit; returns the tokens of each output."""
        for request in requests:
            self.scheduler.add(request)
        running = None
        while self.scheduler.waiting or self.scheduler.running or running:
            plan = self.scheduler.schedule()
            launched = self.launch(plan) if plan else None
            if running:  # the device goes on with what was launched
                self.read(*running)
            running = launched
        return [request.tokens[request.prompt :] for request in requests]


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else model_path()
    texts = sys.argv[2:] or ["There was a fox named", "47 + 38 =", "Once upon a time"]
    tokenizer, engine = AutoTokenizer.from_pretrained(folder), Engine(folder)
    requests = [Request(tokenizer.encode(text), stops=frozenset({tokenizer.eos_token_id})) for text in texts]
    for text, output in zip(texts, engine.generate(requests), strict=True):
        print(text + tokenizer.decode(output, skip_special_tokens=True), end="\n\n")
