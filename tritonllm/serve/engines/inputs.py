"""What an API process checks and tokenizes requests with, as the engine told it."""

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.text.input_processor import InputProcessor
from tritonllm.engine.text.tokenizer import load_tokenizer
from tritonllm.engine.transfer.params import TransferParams
from tritonllm.serve.engines.messages import EngineReady, unpack_params


def import_tokenizers() -> None:
    """Two seconds that need not come after the engine's start."""
    import transformers

    _ = transformers.AutoTokenizer  # what imports it


def input_processor(
    ready: EngineReady, *, takes_extra_args: bool = False, transfer: KVTransferConfig | None = None
) -> InputProcessor:
    """An input processor that checks requests as the engine does, so that most errors need no way there.

    Args:
        ready: what the engine has told.
        takes_extra_args: whether the engine has logits processors, which may read ``extra_args``.
        transfer: how the engine shares its cache.
    """
    tokenizer = None
    if ready.tokenizer is not None:
        tokenizer = load_tokenizer(
            ready.tokenizer,
            revision=ready.revision,
            trust_remote_code=ready.trust_remote_code,
            download_dir=ready.download_dir,
        )
    return InputProcessor(
        tokenizer,
        ready.vocab_size,
        ready.max_model_len,
        frozenset(ready.eos_token_ids),
        ready.seed,
        unpack_params(ready.default_params),
        takes_extra_args=takes_extra_args,
        max_logprobs=ready.max_logprobs,
        transfer_params=TransferParams(transfer),
    )
