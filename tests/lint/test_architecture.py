"""The architecture lint takes what a room may import, and nothing else."""

import pytest
from lint.architecture import check

IN_A_FUNCTION = "def f():\n    import {}\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {}\n"


@pytest.mark.parametrize(
    ("name", "source", "told"),
    [
        ("core/scheduler.py", "import torch\n", "imports torch"),
        ("core/scheduler.py", IN_A_FUNCTION.format("torch.nn"), "imports torch"),
        ("core/scheduler.py", "try:\n    from torch import Tensor\nfinally:\n    pass\n", "torch"),
        ("core/scheduler.py", FOR_TYPES.format("torch"), None),
        ("core/request.py", "import msgspec\n", None),
        ("formats/fp8.py", "import numpy\n", "standard library only"),
        ("formats/fp8.py", IN_A_FUNCTION.format("numpy"), None),
        ("kernels/report/text.py", IN_A_FUNCTION.format("torch"), "imports torch"),
        ("kernels/backends/cpu.py", "import torch\n", "standard library only"),
        ("kernels/backends/cpu.py", IN_A_FUNCTION.format("torch"), None),
        ("kernels/triton/moe.py", "import torch\nimport triton\n", None),
        ("formats/fp8.py", "from dataclasses import dataclass\n", "vllm.utils.dataclasses"),
        ("formats/fp8.py", "from vllm.utils.dataclasses import dataclass\n", None),
        ("engine/request.py", "from dataclasses import dataclass\n", None),
        ("engine/core.py", "x = torch.cuda.Event()\n", "torch.cuda"),
        ("worker/runner.py", "x = torch.cuda.Event()\n", None),
        ("engine/core.py", "x = os.environ['A']\n", "environment"),
        ("model_executor/layers/linear.py", "x = marlin_ops.gemm\n", "names a backend"),
    ],
)
def test_what_a_room_may_not_do_is_told(name, source, told):
    found = [text for _, text in check(f"vllm/{name}", source)]
    assert len(found) == (told is not None)
    assert not told or told in found[0]
