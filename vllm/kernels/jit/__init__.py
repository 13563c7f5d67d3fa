"""Kernels that libraries compile at run time: their caches, compilation before the first request,
and a monitor of what is compiled after it."""
