"""A checkpoint that is broken, hostile or not ours is refused with the reason."""

import contextlib
import json
import os
import shutil
import socket
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm import LLM, SamplingParams
from vllm.errors import CheckpointError, ConfigError
from vllm.model_executor.quantize import quantize_checkpoint


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A private copy of a good checkpoint."""
    target = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), target)
    return target


@pytest.fixture
def fp8_folder(checkpoint, tmp_path):
    target = tmp_path / "fp8"
    quantize_checkpoint(checkpoint("llama"), target, "fp8-block")
    return target


def load(folder, **options):
    return LLM(folder, skip_tokenizer_init=True, max_num_seqs=2, **options)


def refused(folder, says: str, error=CheckpointError, **options) -> str:
    with pytest.raises(error, match=says) as caught:
        load(folder, **options)
    return str(caught.value)


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_the_copies_these_tests_break_are_good(folder, fp8_folder):
    load(folder)
    load(fp8_folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    assert "model.safetensors" in refused(folder, "truncated or corrupt")


@pytest.mark.parametrize("header", [b"\xff" * 8, b"\x10" + b"\0" * 7 + b"not json at all!"])
def test_a_corrupt_header_is_refused(folder, header):
    path = folder / "model.safetensors"
    path.write_bytes(header + path.read_bytes()[len(header) :])
    refused(folder, "truncated or corrupt")


def test_missing_shards_are_listed(folder):
    names = list(load_file(folder / "model.safetensors"))
    index = {"weight_map": {n: f"model-0000{i % 2 + 1}.safetensors" for i, n in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    assert "model-00002.safetensors" in refused(folder, "lacks 1 of 2 weight files")


def test_an_index_that_points_outside_is_refused(folder):
    index = {"weight_map": {"a": "../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "outside its folder")


@pytest.mark.parametrize(
    "name", ["..", "x" * 5000 + ".safetensors", "a\0.safetensors", "", "b.bin"]
)
def test_an_index_that_names_no_file_of_weights_is_refused(folder, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    refused(folder, r"no \*\.safetensors file")


def put_folder(path):
    path.mkdir()


def put_socket(path):
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
        server.bind(path.name)  # a short name: that of a socket has at most 108 bytes


def put_device(path):
    path.symlink_to("/dev/zero")


KINDS = {"a FIFO": os.mkfifo, "a folder": put_folder, "a socket": put_socket,
         "a device": put_device}  # fmt: skip
FILES = ("model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
         "generation_config.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt",
         "special_tokens_map.json", "configuration_own.py")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("ends_soon")
def test_what_is_no_regular_file_is_refused_and_not_waited_for(folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    begin = time.monotonic()
    refused(folder, f"{name} is {kind}, no regular file")
    assert time.monotonic() - begin < 1


def test_a_link_to_nothing_is_told_as_such(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("blobs/gone")
    refused(folder, r"model\.safetensors is a link to a file that is not there")


@pytest.mark.parametrize("text", ["", "[1", '{"weight_map": 3}', "[]"])
def test_an_unreadable_index_is_refused(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "not a readable index")


def test_pickled_weights_are_refused_and_never_opened(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert "pytorch_model.bin" in refused(folder, "pickled weights")


def test_a_folder_without_weights_says_so(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, r"no \*\.safetensors")


def test_a_missing_tensor_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, r"lacks model\.layers\.1\.mlp\.up_proj\.weight")


def test_a_tensor_no_layer_takes_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.update(surprise=torch.zeros(1)))
    refused(folder, "surprise")


def test_a_wrong_shape_is_named_with_both(folder):
    def edit(tensors):
        tensors["model.norm.weight"] = torch.ones(47)

    edit_tensors(folder, edit)
    refused(folder, r"model\.norm\.weight has shape \[47\].*implies \[48\]")


def test_fp8_weights_without_a_quantization_config_are_refused(fp8_folder):
    edit_config(fp8_folder, quantization_config=None)
    refused(fp8_folder, "unknown to this model: .*weight_scale_inv|type F8_E4M3")


def test_a_quantization_config_without_fp8_weights_is_refused(folder):
    edit_config(
        folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    refused(folder, "weight_scale_inv")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_scales_are_refused(fp8_folder, value):
    def edit(tensors):
        tensors["model.layers.0.mlp.down_proj.weight_scale_inv"][0, 0] = value

    edit_tensors(fp8_folder, edit)
    refused(fp8_folder, r"layers\.0\.mlp\.down_proj\.weight_scale_inv: scales must be finite")


def test_nan_among_fp8_weights_is_refused(fp8_folder):
    def edit(tensors):
        tensors["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)[3, 5] = 0x7F

    edit_tensors(fp8_folder, edit)
    assert "NaN" in refused(fp8_folder, r"layers\.0\.mlp\.down_proj")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; it takes fp8, "),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; .* --format int8"),
        ({}, "quant_method None"),
        ({"quant_method": ["fp8"]}, "quant_method .*fp8.* is not supported"),
        ({"quant_method": "fp8", "modules_to_not_convert": 5}, "modules_to_not_convert = 5"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "two positive sizes"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "format 'e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "magic"}, "activation_scheme 'magic'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive sizes"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two positive sizes"),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "activation_scheme": "static",
            },
            "takes activation_scheme dynamic",
        ),
    ],
)
def test_a_quantisation_we_do_not_know_is_refused(folder, config, says):
    edit_config(folder, quantization_config=config)
    refused(folder, says)


def test_asking_for_another_quantisation_than_the_checkpoints_is_refused(fp8_folder):
    assert "fp8" in refused(fp8_folder, "unknown", ConfigError, quantization="hqq")
    assert "fp8" in refused(fp8_folder, "contradicts", ConfigError, quantization="awq")


def test_an_unknown_architecture_lists_the_known_ones(folder):
    edit_config(folder, architectures=["BertForMaskedLM"])
    assert "LlamaForCausalLM" in refused(folder, "BertForMaskedLM is not supported")


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "opt", "mamba2", "of_no_transformers"])
def test_a_model_of_another_kind_is_refused_by_its_architecture(folder, model_type):
    config = {"model_type": model_type, "architectures": ["SomeModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "architecture SomeModel is not supported; supported: LlamaForCausalLM")


def test_a_model_type_that_does_not_fit_its_architecture_is_told(folder):
    config = {"model_type": "gpt2", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "'gpt2' has no num_key_value_heads")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 10**9),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("vocab_size", -5),
        ("num_attention_heads", 0),
        ("intermediate_size", 10**12),
        ("max_position_embeddings", 10**15),
        ("head_dim", 10**6),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 1e30),
        ("rope_parameters", {"rope_theta": "x"}),
        ("rope_parameters", {"rope_theta": float("inf")}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": float("nan")}),
    ],
)
def test_absurd_sizes_are_refused_at_once(folder, field, value):
    edit_config(folder, **{field: value})
    refused(folder, "config.json")


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "quantization_config", 5),
        ("config.json", "architectures", "LlamaForCausalLM"),
        ("generation_config.json", "eos_token_id", [2, "x"]),
        ("generation_config.json", "eos_token_id", "</s>"),
    ],
)
def test_a_field_of_another_kind_is_named(folder, file, field, value):
    path = folder / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | {field: value}))
    assert field in refused(folder, file)


def test_sampling_defaults_that_no_request_may_have_are_refused_by_the_files_name(folder):
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature"):
        load(folder).get_default_sampling_params()


def test_an_end_token_outside_of_the_vocabulary_ends_nothing(folder):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [10**7, -1]}))
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=2)
    (output,) = load(folder).generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_sizes_that_no_memory_holds_are_refused(folder):
    edit_config(folder, vocab_size=1 << 22, hidden_size=1 << 17, num_attention_heads=1 << 6)
    refused(folder, "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"vocab_size": 5}', '{"model_type": "nothing"}'])
def test_a_broken_config_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder, "config.json")


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    refused(tmp_path, "no config.json")


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-model", "./x", "a/b/c"])
def test_a_name_that_is_neither_folder_nor_hub_name_is_refused(name):
    refused(name, "neither a folder here nor a hub name")


def test_code_that_comes_with_a_model_does_not_run_unless_trusted(folder):
    (folder / "configuration_evil.py").write_text(
        "from transformers import LlamaConfig\nclass EvilConfig(LlamaConfig):\n"
        "    model_type = 'evil'\n    ran = True\n"
    )
    edit_config(folder, model_type="evil", auto_map={"AutoConfig": "configuration_evil.EvilConfig"})
    refused(folder, "trust_remote_code")
    llm = load(folder, trust_remote_code=True)
    assert llm.llm_engine.config.model_config.hf_config.ran


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "int8"}, "--dtype 'int8'"),
        ({"dtype": "bfloat61"}, "did you mean bfloat16"),
        ({"max_model_len": 0}, "--max-model-len 0"),
        ({"max_model_len": 10**6}, "--max-model-len 1000000"),
        ({"max_num_batched_tokens": 1}, "--max-num-batched-tokens 1"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens 0"),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype"),
        ({"block_size": 7}, "--block-size 7"),
        ({"num_gpu_blocks_override": 1}, "num-gpu-blocks-override 1"),
        ({"max_model_len": 512, "num_gpu_blocks_override": 4}, "holds 64 tokens"),
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size 4"),
        ({"linear_backend": "cpuu"}, "did you mean cpu"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"hf_overrides": {"a.b": 1}}, "nested"),
        ({"load_format": "pickle"}, "--load-format"),
        ({"block_size": 1 << 40}, "--block-size .* no room"),
        ({"num_gpu_blocks_override": 1 << 40}, "--num-gpu-blocks-override .* GiB of memory are"),
        ({"seed": 1 << 64}, "--seed"),
        ({"revision": "main"}, "--revision main .* is a folder"),
    ],
)
def test_a_wrong_option_is_refused_with_what_it_takes(folder, options, says):
    refused(folder, says, ConfigError, **options)


@pytest.mark.parametrize("overrides", [{"hidden_size": -1}, {"hidden_size": "x"},
                                       {"model_type": 1}, {"architectures": 1}])  # fmt: skip
def test_an_override_that_no_config_may_have_is_not_blamed_on_the_file(folder, overrides):
    told = refused(folder, "^--hf-overrides: ", ConfigError, hf_overrides=overrides)
    assert "config.json" not in told


def test_an_override_of_a_field_that_does_not_exist_is_refused(folder):
    overrides = {"hidden_sise": 3, "partial_rotary_factor": 1.0}
    told = refused(folder, "--hf-overrides hidden_sise", ConfigError, hf_overrides=overrides)
    assert "did you mean hidden_size" in told


def test_a_tokenizer_that_is_nowhere_is_refused_without_asking_the_hub(folder):
    with pytest.raises(CheckpointError, match=r"--tokenizer nope: .*neither a folder"):
        LLM(folder, tokenizer="nope")


def test_an_unknown_backend_in_the_environment_is_refused(folder, monkeypatch):
    monkeypatch.setenv("VLLM_LINEAR_BACKEND", "nonsense")
    refused(folder, "VLLM_LINEAR_BACKEND.*'nonsense'", ConfigError)


def test_a_head_size_the_native_attention_lacks_is_served_by_the_reference(folder):
    edit_config(folder, head_dim=20)

    def edit(tensors):
        for name in list(tensors):
            rows = {"q_proj": 120, "k_proj": 40, "v_proj": 40}.get(name.split(".")[-2])
            if rows:
                tensors[name] = torch.zeros(rows, 48)
            elif "o_proj" in name:
                tensors[name] = torch.zeros(48, 120)

    edit_tensors(folder, edit)
    llm = load(folder)
    decisions = [d for _, d in llm.llm_engine.core.selection.records]
    assert {d.chosen for d in decisions if d.problem.family == "attention"} == {"torch"}


def test_dummy_weights_need_no_checkpoint(folder):
    (folder / "model.safetensors").unlink()
    llm = load(folder, load_format="dummy")
    output = llm.generate({"prompt_token_ids": [3, 4]}, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) > 0


def test_hf_overrides_reach_the_model(folder):
    llm = load(
        folder, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    )
    assert llm.llm_engine.config.model_config.hf_config.rope_parameters["rope_theta"] == 5e5


def test_a_context_that_was_not_asked_for_yields_to_the_cache(folder):
    llm = load(folder, num_gpu_blocks_override=4)
    assert llm.llm_engine.config.model_config.max_model_len == 64
