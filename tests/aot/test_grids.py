"""More than 65,535 sequences, tokens or rows: they lie along the first axis of each grid, for the others end there."""

from typing import Any

import pytest
import torch
from support.grids import grids_of_launches, too_large

from tritonllm import kernels as k
from tritonllm.kernels.runtime import tuning

MANY = 70_000
BF16 = torch.bfloat16


def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return new(*shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return new(*shape, dtype=torch.int64)


def floats(*shape: int) -> torch.Tensor:
    return new(*shape, dtype=torch.float32)


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    return new(MANY, 16, 8, 128), new(MANY, 16, 8, 128)


def decode(config: dict[str, Any] | None = None, **options: Any) -> None:
    tables = (ints(MANY, 4), ints(MANY))
    if config is None:
        k.paged_decode_attention(new(MANY, 32, 128), *caches(), *tables, **options)
        return
    with tuning.override("paged_decode_attention", config):
        k.paged_decode_attention(new(MANY, 32, 128), *caches(), *tables, **options)


def fused() -> None:
    with tuning.override("paged_decode_attention", FEW):
        k.fused_decode_attention(new(MANY, 48 * 128), *caches(), longs(MANY), ints(MANY, 4), ints(MANY))


def decode_in_parts(config: dict[str, Any]) -> None:
    """As many parts as there may be, of few sequences."""
    with tuning.override("paged_decode_attention", config):
        q, tables = new(2, 32, 128), ints(2, MANY)
        k.paged_decode_attention(q, *caches(), tables, ints(2))


def prefill(sequences: int = MANY, tokens: int = MANY) -> None:
    begins = (ints(sequences, 4), ints(sequences + 1), ints(sequences))
    k.varlen_prefill_attention(new(tokens, 32, 128), *caches(), *begins, max_seqlen_q=128)


def verify() -> None:
    begins = (ints(MANY, 4), ints(MANY + 1), ints(MANY))
    k.paged_verify_attention(new(2 * MANY, 32, 128), *caches(), *begins, max_seqlen_q=2)


def copy_blocks() -> None:
    k.copy_blocks(*caches(), longs(MANY, 2))
    wide = new(4, 256, 1024, 512), new(4, 256, 1024, 512)  # many elements a block: they have parts of a pair
    with tuning.override("copy_blocks", {"BLOCK": 1024, "num_warps": 4}):
        k.copy_blocks(*wide, longs(2, 2))


def pack_blocks() -> None:
    with tuning.override("pack_blocks", {"BLOCK": 64, "num_warps": 4}):
        k.pack_blocks(new(64, 32, 1024), longs(MANY // 64), new(MANY // 64, 64, 1024))


def experts(tokens: int = MANY) -> None:
    choice = (floats(tokens, 2), ints(tokens, 2))
    k.fused_moe(new(tokens, 256), new(8, 512, 256), new(8, 256, 256), *choice)


def sample() -> None:
    numbers = (floats(MANY), ints(MANY), floats(MANY), floats(MANY), longs(MANY), longs(MANY))
    k.sample(floats(MANY, 1000), *numbers)


def rejection() -> None:
    numbers = (floats(MANY), ints(MANY), floats(MANY), longs(MANY), longs(MANY))
    k.rejection_sample(longs(MANY, 2), None, floats(MANY, 3, 1000), *numbers)


BALANCED = {"kernel": "balanced", "BLOCK_M": 16, "BLOCK_N": 64, "PROGRAMS": 264, "num_warps": 4, "num_stages": 3}
SPLIT = {"kernel": "split", "SPLIT_TO": 1056, "BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
FEW = {"kernel": "few", "BLOCK_M": 4, "BLOCK_N": 32, "PROGRAMS": 1056, "MIN_TILES": 1, "MERGE": 4}
FEW |= {"num_warps": 1, "num_stages": 1}
CALLS = {
    "decode": decode,
    "decode balanced": lambda: decode(BALANCED),
    "decode split": lambda: decode(SPLIT),
    "decode few": lambda: decode(FEW),
    "decode split in parts": lambda: decode_in_parts(SPLIT),
    "decode few in parts": lambda: decode_in_parts(FEW),
    "fused": fused,
    "verify": verify,
    "prefill": prefill,
    "prefill of one": lambda: prefill(1, 32 * MANY),
    "store": lambda: k.store_kv(new(MANY, 8, 128), new(MANY, 8, 128), *caches(), longs(MANY)),
    "copy": copy_blocks,
    "pack": pack_blocks,
    "projection": lambda: k.qk_norm_rope_store(
        new(MANY, 48 * 128), *caches(), longs(MANY), longs(MANY), floats(4096, 128)
    ),
    "merge": lambda: k.merge_attention_states(
        new(MANY, 32, 128), floats(MANY, 32), new(MANY, 32, 128), floats(MANY, 32)
    ),
    "norm": lambda: k.rms_norm(new(MANY, 256), new(256)),
    "add and norm": lambda: k.fused_add_rms_norm(new(MANY, 256), new(MANY, 256), new(256)),
    "layer norm": lambda: k.layer_norm(new(MANY, 256), new(256), new(256)),
    "gate": lambda: k.silu_and_mul(new(MANY, 512)),
    "gate of wide rows": lambda: k.silu_and_mul(new(2, 2**26)),
    "activation": lambda: k.apply_activation(new(MANY, 256), "relu"),
    "activation with parameters": lambda: k.xielu(new(MANY, 256), new(4)),
    "gate of attention": lambda: k.output_gate(new(MANY, 256), new(MANY, 256)),
    "rope": lambda: k.apply_rope(new(MANY, 8, 128), new(MANY, 2, 128), longs(MANY), floats(4096, 128)),
    "cap": lambda: k.cap_logits(floats(MANY, 1000), softcap=30.0),
    "router": lambda: k.moe_logits(new(MANY, 256), new(8, 256), new(256)),
    "choice of experts": lambda: k.moe_route(floats(MANY, 8), 2),
    "experts": experts,
    "experts of one token": lambda: experts(1),
    "sample": sample,
    "logprobs": lambda: k.token_logprobs(floats(MANY, 1000), longs(MANY), 5),
    "rejection": rejection,
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("call", CALLS)
def test_grids_fit(call, arch):
    with grids_of_launches(arch) as grids:
        CALLS[call]()
    assert grids
    assert not too_large(grids)
