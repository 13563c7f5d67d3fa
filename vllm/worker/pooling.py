"""Vectors of pooling requests."""

import numpy as np
import torch
from torch import Tensor

from vllm.worker.input_batch import InputBatch


def pooled_vectors(batch: InputBatch, hidden: Tensor, rows: np.ndarray) -> dict[str, list[float]]:
    """Of the requests in these rows, from the hidden states [P, hidden] of their last tokens.
    Blocks: none of them has a next step to prepare meanwhile."""
    requests = [batch.requests[row] for row in rows]
    vectors = hidden.float()
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    normalize = [[r.pooling is not None and r.pooling.normalize] for r in requests]
    is_normalized = torch.tensor(normalize, device=vectors.device)
    vectors = torch.where(is_normalized, vectors / norms, vectors)
    return dict(zip([r.request_id for r in requests], vectors.tolist()))
