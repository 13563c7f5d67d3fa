"""Our kernels in Triton. Importing any makes Triton verify what it finds in its cache, unless
TRITON_CACHE_MANAGER names something else."""

from triton import knobs

from vllm.kernels.triton.cache import VerifiedCache

if knobs.cache.manager_class is None:
    knobs.cache.manager_class = VerifiedCache
