"""What requests say of where their blocks are (``kv_transfer_params``, docs/kv-transfer.md), as it comes in. No torch.

A name that is misspelt would be a miss that nobody sees, so unknown ones are refused. Routers for vLLM send more than
means something here; those names are known, and ignored. A connector of your own may read any.

What is asked for in vain is said once: a server that cannot load from the engine that a request names computes the
prompt, and nobody would see why that is slow.
"""

import logging
from collections.abc import Mapping
from typing import Any

from tritonllm.config.kv_transfer import CONNECTORS, KVTransferConfig
from tritonllm.engine.transfer.connector import Params
from tritonllm.system.log_text import printable

logger = logging.getLogger(__name__)
KNOWN = {
    "do_remote_prefill": "true or false",
    "do_remote_decode": "true or false",
    "pending": "true or false",
    "remote_host": "a host's name or address",
    "remote_port": "an integer from 1 to 65535",
}
IGNORED = (  # what vLLM's connectors and their routers say besides
    *("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_num_tokens", "transfer_id"),
    *("remote_bootstrap_addr", "remote_handshake_port", "remote_notify_port"),
    *("tp_size", "remote_tp_size", "remote_pp_size", "remote_dp_size", "remote_dp_rank", "remote_dcp_size"),
    "remote_pcp_size",
)
FROM_PEERS = "kv_connector Peer, Nixl or CudaIpc (as the other engine has)"


class TransferParams:
    """Checks the ``kv_transfer_params`` of one engine's requests.

    Args:
        config: the engine's configuration of transfers; ``None`` if it has none.
        tells: whether to warn of what this engine cannot do; of the processes that check a request, one should.
    """

    def __init__(self, config: KVTransferConfig | None, tells: bool = False) -> None:
        self._vain = vain(config) if tells else None
        self._any_name = config is not None and config.kv_connector not in CONNECTORS

    def check(self, params: object) -> None:
        """Check the ``kv_transfer_params`` of a request.

        Raises:
            ValueError: they are no dictionary, or, unless a connector of your own reads them, a name is unknown, a
                value is of another kind, or the place of blocks is incomplete.
        """
        if params is None:
            return
        if not isinstance(params, Mapping):
            raise ValueError(f"kv_transfer_params must be a dict, got {params!r}")
        if not self._any_name:
            check_names(params)
        if params.get("do_remote_prefill") is True and self._vain is not None:
            where = printable(str(params.get("remote_host"))), params.get("remote_port")
            logger.warning("kv_transfer_params name the engine at %.100s:%s, but %s", *where, self._vain)
            self._vain = None


def check_names(params: Params) -> None:
    """Check the names and values of ``kv_transfer_params``, for the connectors of this package.

    Raises:
        ValueError: as of :meth:`TransferParams.check`.
    """
    for name, value in params.items():
        if name not in KNOWN and name not in IGNORED:
            raise ValueError(
                f"kv_transfer_params: {name!r:.100} is unknown; there are {', '.join(KNOWN)}, and of vLLM's, which are "
                f"ignored, {', '.join(IGNORED)}"
            )
        if value is not None and name in KNOWN and not _fits(name, value):
            raise ValueError(f"kv_transfer_params: {name} must be {KNOWN[name]}, got {value!r:.100}")
    lacks = [name for name in ("remote_host", "remote_port") if params.get(name) is None]
    if params.get("do_remote_prefill") and lacks:
        raise ValueError(
            "kv_transfer_params: do_remote_prefill=true needs remote_host and remote_port, where the blocks are. "
            f"Missing: {', '.join(lacks)}; take what the prefill server's answer has"
        )


def _fits(name: str, value: object) -> bool:
    if name == "remote_host":
        return isinstance(value, str) and bool(value.strip())
    if name == "remote_port":
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 16
    return isinstance(value, bool)


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
    """The ``kv_transfer_params`` of a request, from the ``extra_args`` of its parameters, as in vLLM; empty without."""
    extra: Mapping[str, Any] = getattr(params, "extra_args", None) or {}
    return extra.get("kv_transfer_params") or {}
