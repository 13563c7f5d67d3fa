"""Rules about which file may do what. Prints every violation; exits with 1 if there is one."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# `dir/` stands for every file in it.
# Neither at load nor inside a function: what chooses, describes and schedules computes nothing.
NO_TORCH = (
    "vllm/architectures/",
    "vllm/config/",
    "vllm/core/",
    "vllm/envs.py",
    "vllm/errors.py",
    "vllm/formats/",
    "vllm/kernels/evidence/",
    "vllm/kernels/problems.py",
    "vllm/kernels/registry.py",
    "vllm/kernels/report/",
    "vllm/kernels/select/",
    "vllm/kernels/selection.py",
    "vllm/kernels/step_bytes.py",
    "vllm/logger.py",
    "vllm/machine.py",
    "vllm/outputs.py",
    "vllm/sampling_params.py",
    "vllm/utils/",
)
# At load: `vllm kernels explain` reads them in a fraction of the time that torch takes.
STDLIB_ONLY = (
    "vllm/architectures/",
    "vllm/config/",
    "vllm/envs.py",
    "vllm/errors.py",
    "vllm/formats/",
    "vllm/kernels/",
    "vllm/logger.py",
    "vllm/machine.py",
    "vllm/platforms/installed.py",
    "vllm/platforms/interface.py",
    "vllm/platforms/libraries.py",
    "vllm/utils/",
)
# What `vllm kernels explain` loads: each dataclass of the standard library costs it 0.4 ms.
EXPLAINS = (
    "vllm/architectures/",
    "vllm/config/",
    "vllm/envs.py",
    "vllm/formats/",
    "vllm/kernels/backends/",
    "vllm/kernels/evidence/",
    "vllm/kernels/report/",
    "vllm/kernels/select/",
    "vllm/kernels/selection.py",
    "vllm/machine.py",
)
# Of STDLIB_ONLY, what is about tensors.
TAKES_TORCH = (
    "vllm/kernels/activations.py",
    "vllm/kernels/cache_numerics.py",
    "vllm/kernels/cuda_ops.py",
    "vllm/kernels/delta_numerics.py",
    "vllm/kernels/mamba2_numerics.py",
    "vllm/kernels/flashinfer/",
    "vllm/kernels/interface.py",
    "vllm/kernels/latent_numerics.py",
    "vllm/kernels/numerics.py",
    "vllm/kernels/triton/",
    "vllm/kernels/tuning/",
    "vllm/utils/deep_gemm.py",
    "vllm/utils/flashinfer.py",
    "vllm/utils/fp8.py",
    "vllm/utils/gguf.py",
    "vllm/utils/http_client.py",
    "vllm/utils/torch_utils.py",
)
MAY_USE_CUDA = (
    "vllm/platforms/",
    "vllm/worker/",
    "vllm/executor/",
    "vllm/distributed/",
    "vllm/kernels/tuning/",  # times kernels
)
NAMES_NO_BACKEND = ("vllm/model_executor/layers/", "vllm/model_executor/models/")


def main() -> int:
    problems = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for folder in ("vllm", "tests", "benchmarks")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, text in check(file.relative_to(ROOT).as_posix(), file.read_text())
    ]
    print("\n".join(problems) or "architecture: no violation")
    return bool(problems)


def check(name: str, source: str) -> Iterator[tuple[int, str]]:
    """name: the file's path in the repository."""
    tree = ast.parse(source)
    yield from check_sizes(source, tree)
    if not name.startswith("vllm/"):
        return
    for line, module, is_at_load in imports(tree):
        if module == "torch" and is_listed(name, NO_TORCH):
            yield line, "imports torch"
        elif module == "dataclasses" and is_at_load and _is_in(name, EXPLAINS):
            yield line, "imports dataclasses; vllm.utils.dataclasses takes less time"
        elif (
            is_at_load
            and is_listed(name, STDLIB_ONLY)
            and module not in {*sys.stdlib_module_names, "vllm"}
        ):
            yield line, f"imports {module}, but takes the standard library only"
    for line, text in enumerate(source.splitlines(), 1):
        if name != "vllm/envs.py" and re.search(r"\bos\.(environ|getenv|putenv)\b", text):
            yield line, "reads the environment outside vllm/envs.py"
        if re.search(r"\btorch\.cuda\b", text) and not name.startswith(MAY_USE_CUDA):
            yield (
                line,
                "uses torch.cuda where it may not be used",
            )
        if name.startswith(NAMES_NO_BACKEND) and re.search(
            r"kernels\.backends|\b(?!gemm_)\w+_ops\b", text
        ):
            yield line, "names a backend; the selector chooses it"


def is_listed(name: str, entries: tuple[str, ...]) -> bool:
    return _is_in(name, entries) and not _is_in(name, TAKES_TORCH)


def _is_in(name: str, entries: tuple[str, ...]) -> bool:
    return name.startswith(tuple(e for e in entries if e.endswith("/"))) or name in entries


def check_sizes(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield 1, f"has {num_lines} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines, over {MAX_FUNCTION_LINES}"


def imports(node: ast.AST, is_at_load: bool = True) -> Iterator[tuple[int, str, bool]]:
    """(line, top-level module, whether it is imported when the file is); those for type checking
    do not count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, a.name.partition(".")[0], is_at_load) for a in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.lineno, child.module.partition(".")[0], is_at_load
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(child, is_at_load and not is_function)


if __name__ == "__main__":
    sys.exit(main())
