"""lm_eval gets the same numbers from our server as from transformers, item by item."""

import json
import os
import re
import subprocess
import sys

import pytest
from entrypoints.serving import REPOSITORY, environment, started_server

import vllm

WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "pack", "my", "box", "with"),
    *("five", "dozen", "liquor", "jugs"),
)
CHOICE_TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATE_TASK = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "fox"
generation_kwargs: {{until: ["q", "zz"], max_gen_toks: 24, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "items.jsonl"
    with data.open("w") as lines:
        for i in range(24):
            question = " ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 4 + i % 5))
            choices = [f" {WORDS[(i + k) % len(WORDS)]} jumps" for k in range(3)]
            item = {"question": question, "choices": choices, "answer": i % 3}
            lines.write(json.dumps(item) + "\n")
    (folder / "choice.yaml").write_text(CHOICE_TASK.format(data=data))
    (folder / "generate.yaml").write_text(GENERATE_TASK.format(data=data))
    return folder


def run_lm_eval(
    tasks,
    output,
    model: str,
    model_args: str,
    *flags: str,
    names="tiny_choice,tiny_generate",
    **more,
) -> dict[str, list[dict]]:
    """Samples by task. more: variables of its environment."""
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", model, "--model_args", model_args),
        *("--tasks", names, "--include_path", str(tasks)),
        *("--output_path", str(output), "--log_samples", "--batch_size", "4", *flags),
    ]
    caches = {"HF_HOME": str(output / "hf"), "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    caches |= more
    result = subprocess.run(
        command, env=environment(**caches), capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr[-3000:]
    samples = {}
    for file in output.rglob("samples_*.jsonl"):
        task = "tiny_choice" if "choice" in file.name else "tiny_generate"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        samples[task] = sorted(rows, key=lambda row: row["doc_id"])
    return samples


@pytest.mark.slow
def test_loglikelihoods_and_generations_equal_those_of_transformers(
    tasks, text_checkpoint, tmp_path
):
    with started_server(text_checkpoint, tmp_path / "log") as server:
        args = (
            f"model=tiny,base_url={server.url}/v1/completions,tokenizer={text_checkpoint},"
            f"tokenizer_backend=huggingface,num_concurrent=2,tokenized_requests=True"
        )
        ours = run_lm_eval(tasks, tmp_path / "ours", "local-completions", args)
    args = f"pretrained={text_checkpoint},dtype=float32"
    theirs = run_lm_eval(tasks, tmp_path / "theirs", "hf", args)
    assert len(ours["tiny_choice"]) == len(theirs["tiny_choice"]) == 24
    for row, other in zip(ours["tiny_choice"], theirs["tiny_choice"]):
        for (logprob, is_greedy), (other_logprob, other_greedy) in zip(
            row["filtered_resps"], other["filtered_resps"]
        ):
            assert float(logprob) == pytest.approx(float(other_logprob), abs=1e-3)
            assert str(is_greedy) == str(other_greedy)
        assert row["acc"] == other["acc"] and row["acc_norm"] == other["acc_norm"]
    texts = [row["filtered_resps"][0] for row in ours["tiny_generate"]]
    assert texts == [row["filtered_resps"][0] for row in theirs["tiny_generate"]]
    assert len(set(texts)) > 3, "texts must vary for their equality to mean anything"


@pytest.mark.slow
def test_the_library_and_the_server_get_the_same_scores(tasks, text_checkpoint, tmp_path):
    # As an installation of this version has it; the one here may be older.
    metadata = tmp_path / "site" / f"vllm-{vllm.__version__}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Name: vllm\nVersion: {vllm.__version__}\n")
    args = f"pretrained={text_checkpoint},dtype=float32,max_model_len=512"
    path = os.pathsep.join([str(metadata.parent), str(REPOSITORY)])
    library = run_lm_eval(tasks, tmp_path / "library", "vllm", args, PYTHONPATH=path)
    with started_server(text_checkpoint, tmp_path / "log", "--max-model-len", "512") as server:
        args = (
            f"model=tiny,base_url={server.url}/v1/completions,tokenizer={text_checkpoint},"
            f"tokenizer_backend=huggingface,num_concurrent=2,tokenized_requests=True,max_length=512"
        )
        served = run_lm_eval(tasks, tmp_path / "served", "local-completions", args)
    for row, other in zip(library["tiny_choice"], served["tiny_choice"], strict=True):
        for (logprob, is_greedy), (other_logprob, other_greedy) in zip(
            row["filtered_resps"], other["filtered_resps"]
        ):
            assert float(logprob) == pytest.approx(float(other_logprob), abs=1e-4)
            assert str(is_greedy) == str(other_greedy)
        assert row["acc"] == other["acc"] and row["acc_norm"] == other["acc_norm"]
    for row, other in zip(library["tiny_generate"], served["tiny_generate"], strict=True):
        assert _without_marks(row["filtered_resps"][0]) == other["filtered_resps"][0]


@pytest.mark.slow
def test_chats_equal_those_of_transformers(tasks, text_checkpoint, tmp_path):
    """Chats have no log-likelihoods of their prompts: generated texts only."""
    with started_server(text_checkpoint, tmp_path / "log") as server:
        args = f"model=tiny,base_url={server.url}/v1/chat/completions,num_concurrent=2"
        name = "local-chat-completions"
        ours = run_lm_eval(
            *(tasks, tmp_path / "ours", name, args, "--apply_chat_template", "--batch_size", "1"),
            names="tiny_generate",
        )
    theirs = run_lm_eval(
        *(tasks, tmp_path / "theirs", "hf", f"pretrained={text_checkpoint},dtype=float32"),
        *("--apply_chat_template", "--batch_size", "1"),
        names="tiny_generate",
    )
    texts, others = (
        [_without_marks(row["filtered_resps"][0]) for row in side["tiny_generate"]]
        for side in (ours, theirs)
    )
    assert texts == others
    assert len(set(texts)) > 3, "texts must vary for their equality to mean anything"


def _without_marks(text: str) -> str:
    """lm_eval asks the library for special tokens, and the server for none."""
    return re.sub(r"<\|\w+\|>", "", text)
