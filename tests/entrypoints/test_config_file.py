"""Flags from a file: what they become, and files that are none."""

import pytest

from vllm.entrypoints.cli.config_file import with_file
from vllm.entrypoints.cli.main import _subparser, make_parser
from vllm.errors import ConfigError

TEXT = """
model: a/model
port: 8123
max_model_len: 512
enforce-eager: true
enable-prefix-caching: false
api-key: [one, two]
kernel: ["*.down_proj=torch", "lm_head=cpu"]
allowed-origins: ["http://a.example"]
hf-overrides: {num_hidden_layers: 2}
seed: -1
"""


@pytest.fixture
def parse(tmp_path):
    """parse(text, *words): what `vllm serve` makes of these words and a file of that text."""

    def run(text: str, *words: str):
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        parser = make_parser(["serve"])
        given = [word.replace("FILE", str(path)) for word in words]
        expanded = with_file(given, _subparser(parser, "serve"))
        return parser.parse_args(["serve", *expanded])

    return run


def test_flags_of_a_file_are_those_of_the_command_line(parse):
    args = parse(TEXT, "--config", "FILE")
    assert (args.model, args.port, args.max_model_len, args.seed) == ("a/model", 8123, 512, -1)
    assert args.enforce_eager is True and args.enable_prefix_caching is False
    assert args.api_key == ["one", "two"] and args.kernel == ["*.down_proj=torch", "lm_head=cpu"]
    assert args.allowed_origins == ("http://a.example",)
    assert args.hf_overrides == parse("model: m", "--config=FILE", "--hf-overrides",
                                      '{"num_hidden_layers": 2}').hf_overrides  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("other", "--config", "FILE", "--port", "9"),
        ("--port", "9", "--config=FILE", "other"),
        ("--config", "FILE", "--port", "9", "other"),
    ],
)
def test_the_command_line_wins(parse, words):
    args = parse(TEXT, *words)
    assert (args.model, args.port, args.max_model_len) == ("other", 9, 512)


def test_without_a_file_words_stay_as_they_are():
    words = ["other", "--port", "9"]
    assert with_file(words, _subparser(make_parser(["serve"]), "serve")) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "holds no flags"),
        ("port: [", "is no YAML"),
        ("1: 2", "holds no flags"),
        ("", "holds no flags"),
        ("config: other.yaml", "unknown flag config"),
        ("max-num-seqz: 3", "unknown flag max-num-seqz; did you mean --max-num-seqs"),
        ("port:", "port takes a value, not null"),
        ("port: true", "port takes a value, not true"),
        ("enforce-eager: 1", "enforce-eager takes true or false, not 1"),
    ],
)
def test_a_file_of_something_else_is_refused_with_its_name(parse, text, words):
    with pytest.raises(ConfigError, match=rf"flags\.yaml.*{words}"):
        parse(text, "--config", "FILE")


@pytest.mark.parametrize(
    "words", [["--config"], ["--config="], ["--config", "--port"], ["--config=a", "--config=b"]]
)
def test_a_flag_without_one_file_is_refused(words):
    with pytest.raises(ConfigError, match="--config"):
        with_file(words, _subparser(make_parser(["serve"]), "serve"))


def test_a_file_that_is_not_there_is_refused(parse):
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        parse("", "--config", "/nowhere/flags.yaml")


def test_a_flag_may_keep_its_dashes(parse):
    args = parse("--port: 8123\n--enforce-eager: true", "--config", "FILE", "m")
    assert args.port == 8123 and args.enforce_eager is True


def test_a_file_that_is_no_text_is_refused(parse, tmp_path):
    (tmp_path / "binary").write_bytes(b"port: \xff")
    with pytest.raises(ConfigError, match="binary cannot be read"):
        parse("", f"--config={tmp_path / 'binary'}")


def test_a_switch_without_a_negation_may_be_off(parse):
    assert (
        parse("model: m\ntrust-remote-code: false", "--config", "FILE").trust_remote_code is False
    )
