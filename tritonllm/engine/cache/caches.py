"""The memory of a runner's blocks: a cache for each model that its steps run, and the tier behind them.

A block has the same number in all of them, and moves in all of them at once: the copies that a step brings (of blocks
that are written to and shared, of a tree's slots, to and from the tier) are issued here.
"""

from collections.abc import Sequence

import torch

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.group import Group
from tritonllm.engine.cache.block_copies import BlockCopies
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.cache.host_copies import HostCopies, device_bytes
from tritonllm.engine.cache.kv_cache import SCALED, block_bytes, cache_dtype, layers_of_pools, make_cache
from tritonllm.engine.cache.layer_copies import LayerCopies
from tritonllm.engine.cache.layer_marks import Marks
from tritonllm.engine.cache.measured_scales import measured_scales
from tritonllm.engine.data.step import Step
from tritonllm.engine.drafts.draft_model import DraftModel
from tritonllm.layers.metadata import KVCacheView, KVScales
from tritonllm.models.interface import CausalLM
from tritonllm.system.host_memory import slots_for


class Caches:
    """The caches of all models that a runner's steps run. They have no memory until :meth:`allocate`.

    Args:
        model, draft: the model and the draft model that steps run; ``None`` without a draft model.
        config: the configuration of the engine.
        device: the device that the models are on.

    Attributes:
        models: the model, and the draft model if there is one.
        dtype: the dtype of the keys and values in all of them.
        views: a view of the cache for each of the model's layers.
        copies: for each pool of each model, the object that copies blocks within it.
        host: the second tier; ``None`` without one, and before :meth:`add_tier`.
    """

    def __init__(self, model: CausalLM, draft: DraftModel | None, config: EngineConfig, device: torch.device) -> None:
        self.models: list[CausalLM] = [model] if draft is None else [model, draft.model]
        self.dtype = cache_dtype(config.cache, model.dtype)
        self.views: list[KVCacheView] = []
        self.copies: list[BlockCopies] = []
        self.host: HostCopies | None = None
        self._draft, self._config, self._device = draft, config, device
        self._measured: Sequence[KVScales] | None = None
        # Keys of a block in the caches here. A draft model is whole on every rank, and so its block has all tokens.
        self._block_sizes = config.cache.block_size, config.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values, the draft model's included."""
        extra = 0 if self._draft is None else self._draft.extra_bytes
        sizes = zip(self.models, self._block_sizes, strict=False)
        return extra + sum(block_bytes(model.spec, self.dtype, size) for model, size in sizes)

    @property
    def layout(self) -> object:
        """What tells caches apart in which equal keys lie as other bytes, by its ``repr``."""
        return self.dtype, [self._scales_of(model) for model in self.models]

    def _scales_of(self, model: CausalLM) -> Sequence[KVScales] | None:
        """The scales that were measured, or the checkpoint's; only a cache of e4m3 makes use of some."""
        if self.dtype is not SCALED:
            return None
        return self._measured if self._measured is not None and model is self.models[0] else model.kv_scales

    def measure_scales(self, group: Group, most_tokens: int) -> None:
        """Find the scales of the model's keys and values, before :meth:`allocate`; all ranks of the group do."""
        self._measured = measured_scales(self.models[0], group, self._device, most_tokens)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the blocks take all that is left

    @property
    def host_slots(self) -> int:
        """Blocks that the second tier keeps, in the host's memory as a rule."""
        return slots_for(self._config.cache.kv_offloading_size, self.block_bytes)

    @property
    def tier_on_device(self) -> bool:
        transfer = self._config.kv_transfer_config
        return transfer is not None and transfer.on_device

    @property
    def reserved_bytes(self) -> int:
        """How much of the device's memory is kept free beside the blocks, in bytes: for the tier, and for what a
        connector keeps for others."""
        transfer = self._config.kv_transfer_config
        kept = 0 if transfer is None else transfer.kept_device_bytes
        return kept + device_bytes(self.block_bytes, self.host_slots, self.tier_on_device)

    def allocate(self, num_blocks: int, memory: EngineMemory | None = None) -> None:
        """Blocks of the same numbers for each model, from ``memory``; by default torch's."""
        sizes = zip(self.models, self._block_sizes, strict=False)
        made = [
            make_cache(model.spec, self.dtype, num_blocks, size, self._device, memory, self._scales_of(model))
            for model, size in sizes
        ]
        self.views, self.copies = made[0][0], [one for _, copies in made for one in copies]
        if self._draft is not None:
            self._draft.take_cache(made[1][0])

    def forget(self) -> None:
        """The blocks, which were there to measure steps."""
        self.views, self.copies = [], []
        if self._draft is not None:
            self._draft.take_cache([])

    def add_tier(self) -> None:
        """Add the second tier of the cache, if the configuration asks for one."""
        if self.host_slots:
            pools, layers = [copies.pool for copies in self.copies], layers_of_pools(self.models[0].spec)
            self.host = HostCopies(pools, self.host_slots, self.tier_on_device, layers)

    def warm_up(self) -> None:
        """Load the kernels of all copies but those of a tree's slots."""
        for copies in self.copies:
            copies.warm_up()
        if self.host is not None:
            self.host.warm_up()

    def run_copies(self, step: Step) -> None:
        """Launch what must happen before the step writes: its transfers to and from the tier, and its copies."""
        if step.transfers is not None:
            assert self.host is not None  # the scheduler knows of it
            self.host.run(step.transfers)
        if step.copies is not None:
            for copies in self.copies:
                copies.run(step.copies)

    @property
    def marked_layers(self) -> list[int]:
        """Where a step that is captured should say that layers end; none if nobody asks."""
        return self.host.marked_layers if self.host is not None and self.tells_layers else []

    @property
    def tells_layers(self) -> bool:
        """Steps with prompts say when their layers are computed. A draft model would say it of its own, too."""
        return self.host is not None and self._draft is None

    def copies_of_filled(self, step: Step, marks: Marks | None = None) -> LayerCopies | None:
        """An object that copies the blocks that a step fills to the tier while it runs; ``None`` if it fills none.

        Args:
            marks: the marks of a captured step, which say when its layers end; ``None`` for a step that is not
                captured.
        """
        if step.fills is None:
            return None
        assert self.host is not None  # the scheduler knows of it
        return self.host.fill(step.fills, self.tells_layers, None if marks is None else marks.events)
