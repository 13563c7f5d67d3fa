"""Measurements of others as files, for the tests of `vllm kernels import`."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TRTLLM = "sglang 0.5.14: sglang_flashinfer_trtllm_moe"
DEEP_GEMM = "trtllm 1.3.0rc20: deepgemm"
LINEAR = "sglang 0.5.14: sglang_torch_linear"


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def gemm_row(us: float = 20.0, source: str = LINEAR, **changes: Any) -> dict[str, Any]:
    row = {"source": source, "dtype": "bfloat16", "m": 8, "n": 4096, "k": 4096, "us": us}
    return {**row, **changes}


def moe_row(us: float, source: str = TRTLLM, **changes: Any) -> dict[str, Any]:
    row = {
        "source": source,
        "dtype": "fp8_block",
        "num_tokens": 8,
        "hidden_size": 4096,
        "inter_size": 1536,
        "topk": 8,
        "num_experts": 128,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
        "distribution": "balanced",
        "us": us,
    }
    return {**row, **changes}


def of_checkout(rows: Iterable[Mapping[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Rows as a checkout of AIConfigurator has them: milliseconds, and the label in parts."""
    found = []
    for row in rows:
        source, _, label = str(row["source"]).partition(": ")
        framework, version = source.split()
        rest = {k: v for k, v in row.items() if k not in ("source", "dtype", "us")}
        found.append(
            {
                "framework": framework.upper(),
                "version": version,
                "device": "NVIDIA B200",
                "op_name": "op",
                "kernel_source": label,
                dtype: row["dtype"],
                **rest,
                "latency": row["us"] / 1000,
            }
        )
    return found
