"""Others' attention kernels on the same inputs: torch's SDPA, and FA3, FlashInfer and vLLM's where they are installed.

A peer takes a problem and its input sets, does outside the timing whatever its library does once for a batch (its plan
of the work, contiguous keys and values for SDPA), and returns one call on set ``i``. Names of arguments follow
FlashAttention-3's ``flash_attn_interface``, vLLM 0.24 and FlashInfer 0.6.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from autotune.problem import Inputs
from bench.attention_cases import PRECISIONS, Attention, dense_cache

Call = Callable[[int], tuple[torch.Tensor]]
Prepare = Callable[[Any, list[Inputs]], Call]
FLASHINFER_WORKSPACE = 256 * 2**20  # bytes


@dataclass(frozen=True)
class Peer:
    """A kernel of ``package``; ``takes`` says which problems it can solve."""

    package: str
    prepare: Prepare
    takes: Callable[[Attention], bool]


def _sdpa_mask(problem: Attention, x: Inputs, backend: SDPBackend) -> torch.Tensor | CausalBias | None:
    """What ``is_causal`` cannot say; flash attention takes no tensor, but knows queries that are the last tokens."""
    longest = max(problem.lengths())
    key = torch.arange(longest, device=x["q"].device)
    if problem.ragged:
        visible = key < x["seq_lens"][:, None, None, None]  # [B, 1, 1, L]
    elif 1 < problem.new < longest:
        if backend == SDPBackend.FLASH_ATTENTION:
            return causal_lower_right(problem.new, longest)
        visible = key <= key[longest - problem.new :, None]  # [N, L]
    else:
        return None
    return torch.zeros(visible.shape, dtype=x["q"].dtype, device=key.device).masked_fill_(~visible, -torch.inf)


def sdpa(backend: SDPBackend) -> Prepare:
    """torch's SDPA on contiguous keys and values, padded to the longest sequence; with query heads that share a
    key/value head if the backend can, else with keys and values repeated for each of them."""

    def prepare(problem: Attention, sets: list[Inputs]) -> Call:
        arguments = []
        for x in sets:
            q = x["q"].unflatten(0, (problem.batch, problem.new)).transpose(1, 2)
            cache = dense_cache(x, x["block_tables"], max(problem.lengths()), q.dtype)
            arguments.append([q, *cache, _sdpa_mask(problem, x, backend)])

        def attend(i: int, gqa: bool) -> torch.Tensor:
            q, k, v, mask = arguments[i]
            causal = 1 < problem.new == problem.length
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)

        gqa = True
        try:
            attend(0, gqa)
        except RuntimeError:
            gqa = False
            group = problem.q_heads // problem.kv_heads
            for argument in arguments:
                argument[1:3] = (t.repeat_interleave(group, dim=1) for t in argument[1:3])
        return lambda i: (attend(i, gqa).transpose(1, 2).flatten(0, 1),)

    return prepare


def _capacity(problem: Attention, x: Inputs) -> int:
    """How many keys a block table has room for."""
    return x["block_tables"].shape[1] * problem.block_size


def _fa3_plan(flash_attention: Any, problem: Attention, x: Inputs) -> Any:
    return flash_attention.get_scheduler_metadata(
        batch_size=problem.batch,
        max_seqlen_q=problem.new,
        max_seqlen_k=_capacity(problem, x),
        num_heads_q=problem.q_heads,
        num_heads_kv=problem.kv_heads,
        headdim=problem.head_size,
        cache_seqlens=x["seq_lens"],
        qkv_dtype=x["q"].dtype,
        cu_seqlens_q=x["cu_seqlens_q"],
        page_size=problem.block_size,
        causal=True,
    )


def fa3(problem: Attention, sets: list[Inputs]) -> Call:
    module = importlib.import_module("flash_attn_interface")
    plans = [_fa3_plan(module, problem, x) for x in sets]

    def call(i: int) -> tuple[torch.Tensor]:
        x = sets[i]
        out = module.flash_attn_with_kvcache(
            *(x["q"], x["k_cache"], x["v_cache"]),
            cache_seqlens=x["seq_lens"],
            page_table=x["block_tables"],
            cu_seqlens_q=x["cu_seqlens_q"],
            max_seqlen_q=problem.new,
            causal=True,
            scheduler_metadata=plans[i],
        )
        return (out,)

    return call


def _vllm_arguments(problem: Attention, x: Inputs) -> dict[str, Any]:
    """What vLLM's two kernels call by the same names."""
    return {
        "q": x["q"],
        "k": x["k_cache"],
        "v": x["v_cache"],
        "cu_seqlens_q": x["cu_seqlens_q"],
        "max_seqlen_q": problem.new,
        "seqused_k": x["seq_lens"],
        "max_seqlen_k": _capacity(problem, x),
        "softmax_scale": problem.head_size**-0.5,
        "causal": True,
        "block_table": x["block_tables"],
    }


def vllm_fa3(problem: Attention, sets: list[Inputs]) -> Call:
    module = importlib.import_module("vllm.vllm_flash_attn")
    plans = [_fa3_plan(module, problem, x) for x in sets]

    def call(i: int) -> tuple[torch.Tensor]:
        out = torch.empty_like(sets[i]["q"])
        arguments = _vllm_arguments(problem, sets[i])
        module.flash_attn_varlen_func(**arguments, out=out, scheduler_metadata=plans[i], fa_version=3)
        return (out,)

    return call


def vllm_triton(problem: Attention, sets: list[Inputs]) -> Call:
    """With the buffers of vLLM's metadata builder: 16 parts a sequence for batches below 128 programs."""
    module = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    device, threshold, parts = sets[0]["q"].device, 128 // problem.kv_heads, 16
    head_size = triton.next_power_of_2(problem.head_size)
    rest = {
        "window_size": (-1, -1),
        "softcap": 0,
        "q_descale": None,
        "k_descale": torch.ones(problem.batch, problem.kv_heads, device=device),
        "v_descale": torch.ones(problem.batch, problem.kv_heads, device=device),
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": parts,
        "softmax_segm_output": torch.empty(threshold, problem.q_heads, parts, head_size, device=device),
        "softmax_segm_max": torch.empty(threshold, problem.q_heads, parts, device=device),
        "softmax_segm_expsum": torch.empty(threshold, problem.q_heads, parts, device=device),
    }

    def call(i: int) -> tuple[torch.Tensor]:
        out = torch.empty_like(sets[i]["q"])
        module.unified_attention(**_vllm_arguments(problem, sets[i]), out=out, **rest)
        return (out,)

    return call


def flashinfer(problem: Attention, sets: list[Inputs]) -> Call:
    module = importlib.import_module("flashinfer")
    device = sets[0]["q"].device
    workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    lengths = torch.tensor(problem.lengths(), dtype=torch.int32)
    counts = (lengths + problem.block_size - 1) // problem.block_size
    begins = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    in_last = lengths - (counts - 1) * problem.block_size

    def plan(x: Inputs) -> Any:
        used = torch.arange(x["block_tables"].shape[1], device=device) < counts.to(device)[:, None]
        pages = (begins, x["block_tables"][used], in_last)
        heads = (problem.q_heads, problem.kv_heads, problem.head_size, problem.block_size)
        dtypes = {"q_data_type": x["q"].dtype, "kv_data_type": x["k_cache"].dtype}
        if problem.decode:
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(*pages, *heads, **dtypes)
        else:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(x["cu_seqlens_q"].cpu(), *pages, *heads, causal=True, **dtypes)
        return wrapper

    wrappers = [plan(x) for x in sets]

    def call(i: int) -> tuple[torch.Tensor]:
        x = sets[i]
        return (wrappers[i].run(x["q"], (x["k_cache"], x["v_cache"]), out=torch.empty_like(x["q"])),)

    return call


def _plain(problem: Attention) -> bool:
    """No float8 cache: torch's attention has none, and FA3's goes with float8 queries, which is another problem."""
    return PRECISIONS[problem.precision].scales is None


def _even(problem: Attention) -> bool:
    return _plain(problem) and not problem.ragged


def _ragged(problem: Attention) -> bool:
    return _plain(problem) and problem.ragged


PEERS = {
    "SDPA cuDNN": Peer("torch", sdpa(SDPBackend.CUDNN_ATTENTION), _plain),
    "SDPA flash": Peer("torch", sdpa(SDPBackend.FLASH_ATTENTION), _even),  # takes no mask
    "SDPA efficient": Peer("torch", sdpa(SDPBackend.EFFICIENT_ATTENTION), _ragged),  # elsewhere never the fastest
    "FA3": Peer("flash_attn_interface", fa3, _plain),
    "vLLM FA3": Peer("vllm", vllm_fa3, _plain),
    "vLLM Triton": Peer("vllm", vllm_triton, _plain),
    "FlashInfer": Peer("flashinfer", flashinfer, _plain),
}


def installed() -> dict[str, str]:
    """The peers whose packages are there, each with the package's version."""
    distributions = importlib.metadata.packages_distributions()
    found = {}
    for name, peer in PEERS.items():
        if importlib.util.find_spec(peer.package) is not None:
            owners = distributions.get(peer.package)
            found[name] = importlib.metadata.version(owners[0]) if owners else "unknown"
    return found
