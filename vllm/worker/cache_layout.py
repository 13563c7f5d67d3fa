"""Which attention layers of a rank share memory (`vllm.architectures.cache_groups`)."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.architectures.cache_groups import WHOLE, CacheGroup, Kind, best_slots, kind_of
from vllm.model_executor.layers.attention import Attention
from vllm.ops.paged_attention import zeros_on_demand
from vllm.worker.block_table import TableLayout


class CacheLayout:
    """tables: of every group, the same on all ranks but for strides. token_bytes: of a block of the
    pool, for each token of a block of the cache. whole_bytes: of a token in all layers."""

    def __init__(
        self,
        layers: Sequence[Attention],
        groups: Sequence[CacheGroup],
        ranks: int,
        drafting: Sequence[Attention] = (),
        num_scratch: int = 0,
    ):
        """ranks: tensor-parallel ones. drafting: of the layers those that have `num_scratch` blocks
        more, where `groups` are WHOLE."""
        self._num_scratch = dict.fromkeys(drafting, num_scratch)
        self._layers = layers
        self._slots: list[list[tuple[Attention, int]]] = []
        self.tables = tuple(TableLayout(g.parts, g.parts, g.window) for g in groups)
        item_sizes = [layer.kernel.dtype.itemsize for layer in layers]
        sizes = (layer.cache_spec.token_bytes(n, ranks) for layer, n in zip(layers, item_sizes))
        each = dict(zip(layers, sizes))
        self.whole_bytes = sum(each.values())
        self.scratch_bytes = sum(num * each[layer] for layer, num in self._num_scratch.items())
        if groups == WHOLE or not layers:
            self.token_bytes = self.whole_bytes
            return
        group_of = {kind: index for index, one in enumerate(groups) for kind in one.kinds}
        kinds = [kind_of(layer.cache_spec, ranks) for layer in layers]
        counts = Counter(kinds)
        num_slots, size = best_slots(counts, {kind: groups[group_of[kind]].parts for kind in kinds})
        self.token_bytes = num_slots * size * item_sizes[0]
        self._slots = [[] for _ in range(num_slots)]
        self.tables = tuple(
            table._replace(stride=size // each) if counts[kind] else table
            for table, one in zip(self.tables, groups)
            for kind in one.kinds
            for each in (kind[1],)
        )
        placed: Counter[Kind] = Counter()
        for layer, kind in zip(layers, kinds):
            layer.group = group_of[kind]
            place, slot = divmod(placed[kind], num_slots)
            self._slots[slot].append((layer, place * groups[layer.group].parts))
            placed[kind] += 1

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> list[Tensor]:
        """Gives every layer its cache; returns all memory, each part once."""
        if not self._slots:
            for layer in self._layers:
                own = num_blocks + self._num_scratch.get(layer, 0)
                layer.kernel.allocate(own, block_size, device)
            kernels = [layer.kernel for layer in self._layers]
            return [cache for kernel in kernels for cache in (kernel.k_cache, kernel.v_cache)]
        half = num_blocks * block_size * self.token_bytes // len(self._slots) // 2
        memory: list[Tensor] = []
        for slot in self._slots:
            halves = [zeros_on_demand((half,), torch.uint8, device) for _ in range(2)]
            for layer, first in slot:
                layer.kernel.place(halves, first, block_size)
            memory += halves
        return memory
