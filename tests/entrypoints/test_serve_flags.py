"""Flags of `vllm serve`: values as people write them, and what they change in answers."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.engine.arg_utils import EngineArgs, whole_number
from vllm.entrypoints.cli.config_file import with_file
from vllm.entrypoints.cli.main import _subparser, main, make_parser
from vllm.entrypoints.cli.serve import server_settings
from vllm.entrypoints.compatibility.flags import translated
from vllm.entrypoints.openai.launch import bind_path
from vllm.errors import ConfigError

from .serving import COMMAND, RunningServer, environment, started_server, wait_until


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1.5G", 3 << 29), ("25.6k", 25_600),
     ("-1", -1), ("1_000", 1000), ("2m", 2_000_000), ("1T", 1 << 40)],
)  # fmt: skip
def test_a_whole_number_may_have_a_unit(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "k", "1.0001k", "32kb", "0x10", "--"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="32k or"):
        whole_number(text)


def served(*words: str) -> EngineArgs:
    own, _ = translated(words)
    return EngineArgs.from_cli_args(make_parser(["serve"]).parse_args(["serve", "m", *own]), "m")


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_an_automatic_length_is_the_default(text: str) -> None:
    assert served("--max-model-len", text).max_model_len is None
    assert EngineArgs(model="m", max_model_len=-1).max_model_len is None


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", "float16"), ("bf16", "bfloat16"), ("float", "float32")]
)
def test_short_names_of_dtypes_are_taken(name: str, dtype: str) -> None:
    assert served("--dtype", name).dtype == EngineArgs(model="m", dtype=name).dtype == dtype


def test_a_switch_can_be_off_and_the_last_word_counts() -> None:
    assert served("--enforce-eager", "--no-enforce-eager").enforce_eager is False
    assert served("-ep", "-q", "fp8", "--no-trust-remote-code").enable_expert_parallel is True


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a", "--model", "b"], "MODEL a and --model b are two models"),
        (["--override-generation-config", '{"max_new_tokens": 5}'], "a request says max_tokens"),
        (["--override-generation-config.temperature", "-1"], "temperature must be from 0"),
        (["--generation-config", "/nowhere"], "it takes auto, vllm or a folder"),
        (["--all2all-backend", "mori"], "VLLM_ALL2ALL_BACKEND='mori' is not valid"),
        (["--ssl-cert-reqs", "2"], "need --ssl-certfile"),
        (["--headless", "--api-server-count", "4"], "--headless is not supported"),
        (["--help=max-num-sequences"], "did you mean --max-num-seqs"),
    ],
)
def test_what_cannot_be_served_is_told(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "naive")  # to be restored
    assert main(["serve", "--port", "0", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "shown", "not_shown"),
    [
        ("max-num-seqs", "(default: 256)", "--port"),
        ("max_num_seqs", "(default: 256)", "--port"),
        ("CacheConfig", "--block-size", "--port"),
        ("frontend", "--port", "--block-size"),
        ("ssl", "--ssl-keyfile", "--port"),
        ("swap-space", "--swap-space has no effect here", "usage"),
        ("enable-lora", "--enable-lora is not supported", "usage"),
        ("all", "usage: vllm serve", "no effect here: "),
    ],
)
def test_help_of_one_flag_or_group(
    name: str, shown: str, not_shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"--help={name}"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and shown in text and not_shown not in text


def test_sampling_defaults_come_from_a_folder_too(tmp_path: Path) -> None:
    file = {"temperature": 0.5, "top_k": 7, "eos_token_id": 1, "top_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    words = ["--generation-config", str(tmp_path), "--override-generation-config.top_k", "9"]
    own, _ = translated(words)
    settings = server_settings(make_parser(["serve"]).parse_args(["serve", *own]))
    assert settings.override_generation_config == {"temperature": 0.5, "top_k": 9}
    assert settings.generation_config == "vllm"


def test_a_file_of_flags_may_have_upstreams(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: m\nswap-space: 4\nenable_lora: false\ncompilation-config: {mode: 3}\n"
        "hf_overrides.rope_theta: 2\ncudagraph-capture-sizes: [1, 2]\ndisable-log-stats: true\n"
    )
    parser = _subparser(make_parser(["serve"]), "serve")
    own, notices = translated(with_file(["--config", str(file), "--model", "x"], parser))
    args = parser.parse_args(own)
    assert (args.model, args.model_flag, args.hf_overrides) == (None, "x", {"rope_theta": 2})
    assert len(notices) == 5


def test_a_flag_of_serve_given_to_another_command_gets_no_other_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "latency", "--swap-space", "4"])
    assert "unknown flag --swap-space: it is one of vllm serve" in capsys.readouterr().err


def test_the_module_of_upstreams_server_is_vllm_serve() -> None:
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--prot", "1"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    assert done.returncode == 2
    assert "vllm serve: error: unknown flag --prot; did you mean --port?" in done.stderr


def test_a_socket_that_a_server_left_is_taken_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "vllm.sock")
    bind_path(path).close()
    with bind_path(path), pytest.raises(ConfigError, match="another server listens there"):
        bind_path(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot listen on --uds"):
        bind_path(str(tmp_path / "file"))


@pytest.mark.slow
def test_a_server_answers_on_a_unix_socket_and_takes_it_away(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "vllm.sock"
    words = [*COMMAND, "serve", str(tiny_model), "--uds", str(path), "--served-model-name", "tiny"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment())
    try:
        wait_until(lambda: "Serving tiny" in (tmp_path / "log").read_text(), 150)
        words = ["curl", "-s", "--unix-socket", str(path), "http://localhost/v1/models"]
        assert json.loads(subprocess.check_output(words))["data"][0]["id"] == "tiny"
    finally:
        process.terminate()
    assert process.wait(60) == 0 and not path.exists()


TEMPLATE = "{{ opening }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def flagged(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("flagged") / "log"
    flags = ["--chat-template", TEMPLATE, "--default-chat-template-kwargs", '{"opening": "lon"}',
             "--override-generation-config.temperature", "0", "--enable-force-include-usage",
             "--disable-fastapi-docs", "--swap-space", "4"]  # fmt: skip
    with started_server(tiny_model, log, *flags, VLLM_USE_V1="1") as running:
        yield running


@pytest.mark.slow
def test_flags_change_answers_as_upstreams_do(flagged: RunningServer) -> None:
    def opening(**fields: object) -> str:
        messages = [{"role": "user", "content": "ban"}]
        answer = flagged.post("/tokenize", {"messages": messages, **fields})
        return str(flagged.post("/detokenize", {"tokens": answer.json["tokens"]}).json["prompt"])

    assert opening() == "lonban"
    assert opening(chat_template_kwargs={"opening": "fick"}) == "fickban"
    events = flagged.events("/v1/completions", prompt="ban", max_tokens=3)
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert flagged.get("/docs").status == 404 and flagged.get("/openapi.json").status == 404
    texts = [flagged.post("/v1/completions", {"prompt": "ban"}).json["choices"][0]["text"]
             for _ in range(3)]  # fmt: skip
    assert len(set(texts)) == 1
    log = flagged.log.read_text()
    assert "--swap-space has no effect here" in log and "VLLM_USE_V1 has no effect here" in log
    assert json.dumps(log).count("--swap-space has no effect") == 1
