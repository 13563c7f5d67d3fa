"""The parsers of tool calls by name: the built-in ones, those of packages with the entry point
`vllm.tool_parsers`, and those of --tool-parser-plugin."""

from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from vllm.errors import ConfigError, did_you_mean
from vllm.tool_parsers.parser import Parser
from vllm.utils.entry_points import extensions
from vllm.utils.files import is_regular, kind_of

ENTRY_POINTS = "vllm.tool_parsers"
# In the order in which the marks of their templates are looked for: the most particular first.
_BUILT_IN = (
    "minimax_m2:MiniMaxM2", "glm45:Glm45", "qwen3_coder:Qwen3Coder", "qwen3_coder:Qwen3Xml",
    "kimi_k2:KimiK2", "deepseek_v3:DeepSeekV3", "deepseek_v3:DeepSeekV31", "harmony:Harmony",
    "mistral:Mistral", "phi4_mini_json:Phi4MiniJson", "granite:Granite",
    "pythonic:Llama4Pythonic", "pythonic:Pythonic", "hermes:Hermes", "llama3_json:Llama3Json",
    "json_array:JsonArray",
)  # fmt: skip


def known() -> dict[str, type[Parser]]:
    """By name. ConfigError names a package whose entry point is no parser."""
    found: dict[str, type[Parser]] = {}
    for place in _BUILT_IN:
        module, _, name = place.partition(":")
        parser = getattr(import_module(f"vllm.tool_parsers.{module}"), name)
        found[parser.name] = parser
    for name, parser in extensions(ENTRY_POINTS).items():
        found[name] = _checked(parser, f"entry point {name!r} of {ENTRY_POINTS}")
    return found


def tool_parser(name: str, plugin: str | None = None) -> type[Parser]:
    """The parser `name`; plugin: a Python file that may have it. ConfigError for none."""
    parsers = known() | ({} if plugin is None else _of_file(plugin))
    if name not in parsers:
        raise ConfigError(
            f"--tool-call-parser {name!r} is unknown: it takes {', '.join(parsers)}"
            f"{did_you_mean(name, parsers)}; another one needs --tool-parser-plugin FILE"
        )
    return parsers[name]


def parser_of_template(template: str) -> type[Parser] | None:
    """The first parser whose marks a chat template has; None for none."""
    for parser in known().values():
        if parser.template_marks and all(mark in template for mark in parser.template_marks):
            return parser
    return None


def _of_file(path: str) -> dict[str, type[Parser]]:
    """Every parser that the Python file defines. ConfigError for a file that fails or has none."""
    if Path(path).exists() and not is_regular(Path(path)):
        raise ConfigError(f"--tool-parser-plugin {path}: it is {kind_of(Path(path))}, not a file")
    spec = spec_from_file_location("vllm_tool_parser_plugin", path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("it is no Python file")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a foreign file raises
        raise ConfigError(
            f"--tool-parser-plugin {path}: {type(error).__name__}: {error}"
        ) from error
    found = {
        value.name: value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Parser) and value.name
        and value.__module__ == module.__name__
    }  # fmt: skip
    if not found:
        raise ConfigError(
            f"--tool-parser-plugin {path} defines no subclass of vllm.tool_parsers.parser.Parser "
            f"with a name"
        )
    return found


def _checked(parser: object, where: str) -> type[Parser]:
    if isinstance(parser, type) and issubclass(parser, Parser):
        return parser
    raise ConfigError(f"{where} gives {parser!r}: it takes a subclass of Parser")
