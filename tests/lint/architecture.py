"""Rules about which file may do what. Prints every violation; exits with 1 if there is one."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# `dir/` stands for every file in it; TAKES_TORCH are the exceptions.
STDLIB_ONLY = (
    "vllm/envs.py",
    "vllm/errors.py",
    "vllm/kernels/",
    "vllm/model_executor/layers/quantization/__init__.py",
    "vllm/model_executor/layers/quantization/awq.py",
    "vllm/model_executor/layers/quantization/compressed_tensors.py",
    "vllm/model_executor/layers/quantization/fp8_config.py",
    "vllm/model_executor/layers/quantization/modelopt.py",
    "vllm/platforms/interface.py",
    "vllm/platforms/libraries.py",
    "vllm/utils/deep_gemm.py",
)
TAKES_TORCH = ("vllm/kernels/activations.py", "vllm/kernels/interface.py", "vllm/kernels/triton/")
TORCH_FREE = (
    *STDLIB_ONLY,
    "vllm/core/block_pool.py",
    "vllm/core/prefix_cache.py",
    "vllm/core/request.py",
    "vllm/core/scheduler.py",
)
MAY_USE_CUDA = ("vllm/platforms/", "vllm/worker/", "vllm/executor/", "vllm/distributed/")
NAMES_NO_BACKEND = ("vllm/model_executor/layers/", "vllm/model_executor/models/")


def main() -> int:
    problems = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for folder in ("vllm", "tests", "benchmarks")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, text in check(file)
    ]
    print("\n".join(problems) or "architecture: no violation")
    return bool(problems)


def check(file: Path) -> Iterator[tuple[int, str]]:
    name = file.relative_to(ROOT).as_posix()
    source = file.read_text()
    tree = ast.parse(source)
    yield from check_sizes(source, tree)
    if not name.startswith("vllm/"):
        return
    imported = list(imports_at_load(tree))
    if is_listed(name, TORCH_FREE):
        yield from ((line, "imports torch") for line, module in imported if module == "torch")
    if is_listed(name, STDLIB_ONLY):
        for line, module in imported:
            if module not in sys.stdlib_module_names and module != "vllm":
                yield line, f"imports {module}, but takes the standard library only"
    for line, text in enumerate(source.splitlines(), 1):
        if name != "vllm/envs.py" and re.search(r"\bos\.(environ|getenv|putenv)\b", text):
            yield line, "reads the environment outside vllm/envs.py"
        if re.search(r"\btorch\.cuda\b", text) and not name.startswith(MAY_USE_CUDA):
            yield line, "uses torch.cuda outside platforms, worker, executor, distributed"
        if name.startswith(NAMES_NO_BACKEND) and re.search(r"kernels\.backends|\b\w+_ops\b", text):
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


def imports_at_load(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Top-level modules imported when the file is; those for type checking do not count."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module.partition(".")[0]


if __name__ == "__main__":
    sys.exit(main())
