"""The import path of PoolingParams."""

from vllm.sampling_params import PoolingParams as PoolingParams
