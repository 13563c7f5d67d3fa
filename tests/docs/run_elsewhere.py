"""Where those commands of the pages run that `checking.py` only parses, or why no test runs them.

ELSEWHERE: a pattern that the whole command matches, and a test file with a text that it has where
it runs the command, or one of the REASONS. The first pattern that matches counts; all must be used.
"""

REASONS = {
    "GPU": "needs a GPU; benchmarks/results and docs/ have what a run printed",
    "network": "downloads a model, data or packages that no test may ask for",
    "machine": "changes the machine or takes minutes: it is run by hand, and by the workflows",
    "containers": "needs Docker or a cluster; its file is linted by `make lint-deploy`",
    "training": "trains a model or evaluates one for an hour",
}

_SERVES = ("tests/entrypoints/serving.py", '"serve", str(model)')

ELSEWHERE: tuple[tuple[str, str | tuple[str, str]], ...] = (
    # Sets up, builds, tests
    (r"make (serve|test|test-all|lint|lint-deploy|build)( .*)?", "machine"),
    (r"make test-chaos .*", ("tests/chaos/conftest.py", "--hostile")),
    (r"make test-build", "machine"),
    (r"make test-gpu .*", ("tests/platforms/test_gpu_runner.py", "--only-failed")),
    (r"make wheel", ("tests/cmake/test_wheel.py", '["make", "wheel"]')),
    (r"make wheel VLLM_TARGET_DEVICE=cuda .*", "machine"),
    (r"pip install --no-build-isolation --no-deps \./example-\w+",
     ("tests/docs/test_contributing.py", "--no-build-isolation")),
    (r"pip install .*", "network"),
    (r"cmake .*", ("tests/cmake/build_tools.py", '"cmake"')),
    (r"pytest -n 2 .*", "machine"),
    (r"(docker|kubectl) .*", "containers"),
    # Evaluates and measures
    (r"pytest tests/evals/gsm8k/test_gsm8k_correctness\.py .*", "network"),
    (r"python tests/evals/gsm8k/gsm8k_eval\.py .*", ("tests/evals/test_gsm8k.py", "gsm8k_eval")),
    (r"python tests/evals/(arith|sums)/train\.py .*", "training"),
    (r"python tests/kernels/passed_on\.py .*", ("tests/kernels/test_passed_on.py", "passed_on")),
    (r"python benchmarks/accuracy/.*", "training"),
    (r"python benchmarks/kernels/choice_simulated\.py .*",
     ("tests/tune/test_bench_choice.py", "choice_simulated")),
    (r"python benchmarks/kernels/bench_choice\.py agreement .*",
     ("tests/tune/test_bench_choice.py", "agreement")),
    (r"python benchmarks/.*", "GPU"),
    (r"python -m vllm\.kernels\.jit\.flashinfer .*", "GPU"),
    # vllm
    (r"vllm bench steps .*", ("tests/entrypoints/test_bench_steps.py", '"--no-run"')),
    (r"vllm kernels tune --from .*", ("tests/entrypoints/test_tune_from.py", '"--from"')),
    (r"vllm kernels tune .* --plan", ("tests/tune/test_tune_cli.py", '"--plan"')),
    (r"vllm kernels tune .*", "GPU"),
    (r"vllm kernels fit.*", ("tests/tune/test_cost_fit.py", '"fit"')),
    (r"vllm kernels import .*--from aiconfigurator --commit.*", "network"),
    (r"vllm kernels import .*", ("tests/tune/test_import.py", '"import"')),
    (r"vllm kernels plot .*", ("tests/select/test_plot.py", '"plot"')),
    (r"vllm kernels precompile .*", ("tests/jit/test_precompile.py", '"precompile"')),
    (r"vllm kernels quarantine.*", ("tests/tune/test_tune_cli.py", '"quarantine"')),
    (r"vllm eval paired .*", ("tests/evals/test_paired_command.py", '"paired"')),
    (r"vllm run-batch .*", ("tests/entrypoints/test_run_batch.py", '"run-batch"')),
    (r"vllm serve --config .*", ("tests/entrypoints/test_config_file.py", '"--config"')),
    (r"vllm serve \./model --api-key-file .*", ("tests/entrypoints/conftest.py", "--api-key-file")),
    (r"vllm serve \./model --dead-after .*",
     ("tests/entrypoints/test_supervision.py", "--dead-after")),
    (r"vllm serve \./model --ssl-.*", ("tests/entrypoints/test_lifecycle.py", "--ssl-certfile")),
    (r"vllm serve \./model .*--max-waiting .*",
     ("tests/entrypoints/test_lifecycle.py", "--max-waiting")),
    (r"vllm serve \./model --otlp-.*",
     ("tests/entrypoints/test_traces.py", '"--otlp-traces-endpoint", collector.url')),
    (r"vllm serve \./model --kernel .*", ("tests/engine/test_own_backend.py", "mine.py")),
    (r"vllm serve \./model-fp8 --linear-backend emulate:.*",
     ("tests/models/test_nvfp4_emulation.py", "emulate:")),
    (r"vllm serve \./(model|model-fp8|example|int8-model)( .*)?", _SERVES),
    (r"vllm serve .*", "network"),
)  # fmt: skip
