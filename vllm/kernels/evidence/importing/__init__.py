"""From others' measurements to the tables of `evidence/imported/`, for `vllm kernels import`."""
