"""What requests say of where their blocks are (``kv_transfer_params``, docs/kv-transfer.md), as it comes in. No torch.

What is asked for in vain is said once: a server that cannot load from the engine that a request names computes the
prompt, and nobody would see why that is slow.
"""

import logging
from collections.abc import Mapping
from typing import Any

from tritonllm.engine.kv_connector import Params
from tritonllm.kv_transfer_config import KVTransferConfig

logger = logging.getLogger(__name__)
FROM_PEERS = "kv_connector Peer, Nixl or CudaIpc (as the other engine has)"


class TransferParams:
    """Those of one engine's requests.

    Args:
        config: of the engine.
        tells: warn of what this engine cannot do; of the processes that check a request, one should.
    """

    def __init__(self, config: KVTransferConfig | None, tells: bool = False) -> None:
        self._vain = vain(config) if tells else None

    def check(self, params: object) -> None:
        """Raises:
        ValueError: they are no dictionary.
        """
        if params is not None and not isinstance(params, Mapping):
            raise ValueError(f"kv_transfer_params must be a dict, got {params!r}")
        if params is not None and params.get("do_remote_prefill") is True and self._vain is not None:
            where = params.get("remote_host"), params.get("remote_port")
            logger.warning("kv_transfer_params name the engine at %.100s:%s, but %s", *where, self._vain)
            self._vain = None


def vain(config: KVTransferConfig | None) -> str | None:
    """Why an engine loads nothing from one that a request names, and the fix; ``None`` if it does."""
    if config is None:
        return (
            "this engine has no kv_transfer_config, and computes prompts itself: give it one with "
            f"{FROM_PEERS}, kv_role kv_consumer, and that host in peers"
        )
    if not config.loads:
        return (
            f"this engine has kv_role={config.kv_role!r}, which loads nothing, and computes prompts itself: give it "
            "kv_role kv_consumer or kv_both, and that host in peers"
        )
    if not config.asks_named:
        return (
            f"kv_connector={config.kv_connector!r} does not ask other engines, and what it does not have is computed: "
            f"give this engine {FROM_PEERS}, and that host in peers"
        )
    return None


def transfer_params(params: object) -> Params:
    """Those of a request: ``extra_args["kv_transfer_params"]`` of its parameters, as in vLLM."""
    extra: Mapping[str, Any] = getattr(params, "extra_args", None) or {}
    return extra.get("kv_transfer_params") or {}
