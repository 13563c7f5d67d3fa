"""A score that sees the loss of UE8M0 scales: sums of three numbers, by a model that has no
precision to spare (tests/evals/sums). 4,000 held-out sums, each side in the engine, paired."""

import json
import re
from functools import cache

import pytest
import torch
from evals.sums import problems, tokenizer, train
from evals.sums.answers import MODEL, right_answers
from safetensors import safe_open
from transformers import AutoTokenizer

from vllm.evals import gsm8k_data
from vllm.evals.paired import Answers, compare_answers

FLOAT32, UE8M0 = "emulate:cutlass@sm_100", "emulate:deep_gemm@sm_100"
SIGNIFICANT = 0.01


@cache
def answered(linear_backend: str, **variables: str) -> tuple[list[bool], list[int]]:
    return right_answers(linear_backend, **variables)


def compared(a: str, b: str) -> Answers:
    return compare_answers(answered(a)[0], answered(b)[0])


def test_the_score_with_float32_scales_leaves_room_on_both_sides():
    right, _ = answered(FLOAT32)
    assert len(right) == problems.NUM_QUESTIONS
    assert 0.6 <= sum(right) / len(right) <= 0.8


@pytest.mark.parametrize(
    ("float32", "ue8m0"),
    [
        (FLOAT32, UE8M0),
        pytest.param("emulation", "emulation-ue8m0", marks=pytest.mark.slow),
    ],
)
def test_the_score_falls_significantly_with_ue8m0_scales(float32, ue8m0):
    found = compared(float32, ue8m0)
    assert found.num_correct_b < found.num_correct_a
    assert found.p < SIGNIFICANT


@pytest.mark.slow
def test_the_automatic_choice_on_sm_100_answers_exactly_as_float32_scales_do():
    assert answered("emulate:sm_100") == answered(FLOAT32)


@pytest.mark.slow
def test_the_score_falls_where_a_variable_lifts_the_model_rule():
    lifted = answered("emulate:sm_100", VLLM_USE_DEEP_GEMM="1")
    assert lifted == answered(UE8M0) != answered(FLOAT32)


def test_no_held_out_sum_is_trained_on_in_any_order():
    held_out = {tuple(sorted(terms)) for terms in problems.held_out().tolist()}
    drawn = problems.draw(20_000, torch.Generator().manual_seed(3))
    assert drawn.shape == (20_000, problems.NUM_TERMS)
    assert drawn.min() == 0 and drawn.max() == problems.LARGEST
    assert not held_out & {tuple(sorted(terms)) for terms in drawn.tolist()}


def test_the_held_out_sums_are_all_different_and_never_change():
    terms = problems.held_out()
    assert len({tuple(row) for row in terms.tolist()}) == problems.NUM_QUESTIONS == len(terms)
    assert terms[:2].tolist() == [[74, 6, 0], [36, 4, 4]]


def test_the_harness_reads_them_as_gsm8k_and_the_tokenizer_its_prompts(tmp_path):
    problems.write(tmp_path)
    items = gsm8k_data.load(tmp_path, "test", is_checked=False)
    encode = AutoTokenizer.from_pretrained(MODEL)
    terms = problems.held_out()[:50]
    for item, row, prompt in zip(items, terms, tokenizer.prompts(terms).tolist()):
        assert item.label == int(row.sum())
        assert encode(gsm8k_data.prompt_of(item.question, []))["input_ids"] == prompt
        assert encode.decode([tokenizer.NUMBER + int(item.label)]) == str(item.label)


def test_training_rounds_as_the_kernels_do():
    """The values of `Fp8Linear` are those of the emulated kernels, for both kinds of scales."""
    from vllm.formats.weight_format import WeightFormat
    from vllm.kernels.interface import LinearTensors
    from vllm.ops.fp8 import block_scaled_mm, quantise_groups, requantised_ue8m0
    from vllm.utils.fp8 import per_block_cast_to_fp8

    torch.manual_seed(0)
    layer = train.Fp8Linear(128, 256, bias=False)
    x = torch.randn(5, 128, requires_grad=True)
    weight = per_block_cast_to_fp8(layer.weight.detach().bfloat16())
    stored = LinearTensors(WeightFormat("fp8", "block", (128, 128)), weight[0], (256,), weight[1])
    for use_ue8m0 in (False, True):
        tensors = requantised_ue8m0(stored) if use_ue8m0 else stored
        q, scales = quantise_groups(x.detach(), 128, use_ue8m0=use_ue8m0)
        wanted = block_scaled_mm(q, tensors.weight, scales, tensors.scales, (128, 128))
        layer.use_ue8m0 = use_ue8m0
        torch.testing.assert_close(layer(x), wanted)
    layer(x).sum().backward()
    assert x.grad.norm() > 0 and layer.weight.grad.norm() > 0


def test_the_checkpoint_is_small_and_its_quantised_sizes_are_whole_blocks():
    config = json.loads((MODEL / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 1_000_000
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        names = sorted(weights.keys())
        quantised = [name for name in names if re.search(r"_proj\.weight$", name)]
        assert len(quantised) == 7 * config["num_hidden_layers"]
        for name in quantised:
            assert weights.get_tensor(name).dtype == torch.float8_e4m3fn
            assert all(size % 128 == 0 for size in weights.get_slice(name).get_shape())
