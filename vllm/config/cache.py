"""The KV cache: how large, in which blocks, in which type."""

from vllm.errors import ConfigError
from vllm.utils.dataclasses import dataclass

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3")


@dataclass(frozen=True)
class CacheConfig:
    """block_size in tokens. num_blocks: of these tokens in all layers, whose memory layers share as
    they need it; None: sized from memory when the model is loaded.
    kv_cache_memory_bytes: of each rank's cache, instead.

    gpu_memory_utilization: share of a GPU's memory to use; without meaning on the CPU, where
    VLLM_CPU_KVCACHE_SPACE says how many GiB. num_state_snapshots: recurrent states that are kept
    for later requests where enable_prefix_caching. disable_hybrid_kv_cache_manager: window layers
    keep all tokens too.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    num_state_snapshots: int = 32
    disable_hybrid_kv_cache_manager: bool = False

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype!r} is unknown: it takes "
                f"{', '.join(KV_CACHE_DTYPES)}"
            )
        if self.block_size <= 0 or self.block_size % 16:
            raise ConfigError(f"--block-size {self.block_size}: it takes multiples of 16")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(f"--num-gpu-blocks-override {self.num_blocks}: at least 2 are needed")
        num_bytes = self.kv_cache_memory_bytes
        if num_bytes is not None and num_bytes < 1:
            raise ConfigError(f"--kv-cache-memory-bytes {num_bytes}: it takes bytes, such as 4G")
        if self.num_state_snapshots < 1:
            raise ConfigError(
                f"--num-state-snapshots {self.num_state_snapshots}: at least 1 is needed; "
                f"--no-enable-prefix-caching keeps none"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization}: it takes 0 to 1"
            )
