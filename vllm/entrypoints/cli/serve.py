"""`vllm serve`: an OpenAI-compatible server."""

import argparse
import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from vllm import envs
from vllm.engine.arg_utils import EngineArgs, json_object, whole_number
from vllm.entrypoints.cli.greeting import greeting
from vllm.entrypoints.demo import demo_model_path
from vllm.entrypoints.openai.launch import (
    bind,
    bind_path,
    raise_file_limit,
    serve,
    warn_if_open,
)
from vllm.entrypoints.openai.settings import ServerSettings
from vllm.errors import CheckpointError, ConfigError, EngineDeadError
from vllm.kernels import registry
from vllm.logger import get_logger
from vllm.utils.files import is_regular
from vllm.utils.startup import begin_report, current_report, process_start, settle_collections

logger = get_logger(__name__)

_SWITCH = argparse.BooleanOptionalAction
WAITING_PER_PLACE = 16
"""Sequences that may wait for each that can run, by default."""
MAX_API_SERVERS = 64
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        description="Serve MODEL, a folder or a name on the Hugging Face hub, over HTTP. Without "
        "MODEL a small demo model is served. --help=NAME shows one flag or group.",
        usage="vllm serve [MODEL] [--flag value ...]",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="Folder or hub name.")
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="The same as MODEL.")
    add_server_flags(parser.add_argument_group("Frontend"))
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(run=run)


def add_server_flags(group: Any) -> None:
    _add_flags_of_variables(group)
    _add_access_flags(group)
    _add_certificate_flags(group)
    _add_supervision_flags(group)
    _add_limit_flags(group)
    text = group.add_argument
    text("--config", metavar="FILE", help="YAML file of flags (`max-model-len: 4096`) and model; "
         "the command line overrides it.")  # fmt: skip
    text("--host", default="0.0.0.0", help="Address to listen on (default: all).")
    text("--port", type=_number(int, 0, 65535, "a port from 0 to 65535"), default=8000,
         help="Port; 0: any free port (default: 8000).")  # fmt: skip
    text("--uds", type=_text, metavar="PATH", help="Unix socket to listen on, instead of --host "
         "and --port.")  # fmt: skip
    text("--chat-template", help="Jinja file or text, instead of the model's own.")
    text("--trust-request-chat-template", action=_SWITCH, default=False,
         help="Accept chat templates in requests.")  # fmt: skip
    text("--default-chat-template-kwargs", type=json_object, default={}, metavar="JSON",
         help="Arguments of the chat template, as {\"enable_thinking\": false}; "
         "chat_template_kwargs of a request override them.")  # fmt: skip
    text("--response-role", type=_text, default="assistant", help="Role of chat answers.")
    text("--generation-config", type=_text, default="auto", metavar="{auto,vllm,FOLDER}",
         help="auto: sampling defaults from the model's generation_config.json; vllm: none; "
         "FOLDER: from the file there.")  # fmt: skip
    text("--override-generation-config", type=json_object, default={}, metavar="JSON",
         help="Sampling defaults over those of the model, as {\"temperature\": 0.5}.")  # fmt: skip
    text("--enable-force-include-usage", action=_SWITCH, default=False,
         help="End every stream with its usage, as stream_options can ask for.")  # fmt: skip
    text("--tool-call-parser", type=_text, metavar="NAME",
         help="How the model writes tool calls; default: by its chat template.")  # fmt: skip
    text("--tool-parser-plugin", metavar="FILE",
         help="Python file with a parser that --tool-call-parser names.")  # fmt: skip
    text("--enable-auto-tool-choice", action=_SWITCH, default=False,
         help="No effect: tools are taken wherever a parser is known.")  # fmt: skip
    text("--reasoning-parser", type=_text, metavar="NAME",
         help="How the model marks its reasoning; default: none, it is content.")  # fmt: skip
    text("--root-path", type=_path_prefix, default="", help="Path prefix that a proxy strips.")
    text("--ui", action=_SWITCH, default=True, help="Serve the page at /: a chat, and what answers "
         "it.")  # fmt: skip
    text("--disable-fastapi-docs", action=_SWITCH, default=False,
         help="Leave out /docs, /redoc and /openapi.json.")  # fmt: skip
    text("--uvicorn-log-level", choices=_LOG_LEVELS, default="warning",
         help="Log level of the web server.")  # fmt: skip
    text(
        "--log-format",
        choices=("text", "json"),
        help="json: one object a line, with time, "
        "level, logger, message, process and, where there is one, request_id (default: text).",
    )
    text("--disable-log-requests", "--disable-uvicorn-access-log", action=_SWITCH, default=False,
         help="Do not log a line per request.")  # fmt: skip
    text("--otlp-traces-endpoint", type=_text, metavar="URL",
         help="Collector of OpenTelemetry that gets a trace of each request, over HTTP: "
         "http://localhost:4318/v1/traces. Needs vllm[traces] (default: no traces).")  # fmt: skip
    text("--enable-tokenizer-info-endpoint", action="store_true",
         help="Serve /tokenizer_info: the tokenizer's settings and its chat template.")  # fmt: skip
    text("--strict-requests", action="store_true",
         help="Refuse fields of requests that have no effect or are not known; default: ignore "
         "them, with a Warning header.")  # fmt: skip


def _add_access_flags(group: Any) -> None:
    text = group.add_argument
    text("--api-key", nargs="+", action="extend", default=[], type=_text, metavar="KEY",
         help="Keys that requests must carry; also from VLLM_API_KEY, which others on this "
         "machine cannot read.")  # fmt: skip
    text("--api-key-file", metavar="FILE",
         help="File of further keys, one a line; # begins a comment.")  # fmt: skip
    text("--protect-metrics", action="store_true", help="Ask for a key at /metrics too.")
    text("--allowed-origins", type=_texts, default=(), metavar="JSON",
         help='CORS origins as a JSON list, such as ["https://app.example"] (default: none, pages '
         "of other origins may not read answers).")  # fmt: skip
    for name in ("methods", "headers"):
        text(f"--allowed-{name}", type=_texts, default=("*",), metavar="JSON",
             help=f'CORS {name} as a JSON list (default: ["*"]).')  # fmt: skip
    text("--allow-credentials", action=_SWITCH, default=False, help="Allow CORS credentials.")


def _add_limit_flags(group: Any) -> None:
    text = group.add_argument
    text("--max-waiting", type=_max_waiting, metavar="N",
         help="Maximum waiting sequences; more get 429 with Retry-After. 0 or none: no limit "
         f"(default: {WAITING_PER_PLACE} times --max-num-seqs).")  # fmt: skip
    text("--request-timeout", type=_number(float, 0.001, 1e9, "a number of seconds above 0"),
         metavar="SECONDS", help="Longest time of a request, waiting included; later ones end with "
         "504. The header X-Request-Timeout asks for less (default: no limit).")  # fmt: skip
    text("--max-request-bytes", "--max-body-size", metavar="BYTES",
         type=_number(int, 1, 2**40, "a number of bytes of 1 or more"),
         help="Largest request body (default: 64 MiB for chat, messages and responses, 8 MiB for "
         "other paths).")  # fmt: skip
    text("--shutdown-timeout", "--drain-timeout",
         type=_number(float, 0, 1e9, "a number of seconds of 0 or more"),
         default=120.0, metavar="SECONDS",
         help="Time to finish running requests after SIGTERM (default: 120).")  # fmt: skip


def _add_certificate_flags(group: Any) -> None:
    text = group.add_argument
    text("--ssl-keyfile", help="Key of the certificate; with --ssl-certfile, serve HTTPS.")
    text("--ssl-certfile", help="Certificate file.")
    text("--ssl-ca-certs", help="Certificates of authorities that clients' are signed by.")
    text("--ssl-cert-reqs", type=_number(int, 0, 2, "0, 1 or 2"), default=0,
         help="Certificates of clients: 0 none, 1 checked, 2 required (default: 0).")  # fmt: skip
    text("--ssl-ciphers", help="Ciphers of TLS 1.2 and before, as OpenSSL lists them.")


def _add_supervision_flags(group: Any) -> None:
    text = group.add_argument
    text("--api-server-count", "-asc", default=1, metavar="N",
         type=_number(int, 1, MAX_API_SERVERS, f"a count from 1 to {MAX_API_SERVERS}"),
         help="Processes that answer HTTP on the same port, for the same engines "
         "(default: 1).")  # fmt: skip
    text("--dead-after", type=_number(float, 5, 1e9, "a number of seconds of 5 or more"),
         default=60.0, metavar="SECONDS",
         help="An engine with a process that is stopped or stuck for so long is killed and started "
         "again, and so is an API process (default: 60).")  # fmt: skip
    text("--restarts", type=_number(int, 0, 2**31, "a count of 0 or more"), default=3, metavar="N",
         help="How often an engine that ended or was killed is started again within an hour, and "
         "how often API processes are; then the server ends (default: 3).")  # fmt: skip


def _add_flags_of_variables(group: Any) -> None:
    """Flags that set a variable, for this process and those that it starts."""
    text = group.add_argument
    text("--download-dir", metavar="FOLDER", help="Where models of the hub are kept; default: by "
         "HF_HOME and HF_HUB_CACHE.")  # fmt: skip
    text("--hf-token", nargs="?", metavar="TOKEN", help="Token for the hub; better the variable "
         "HF_TOKEN, which others on this machine cannot read.")  # fmt: skip
    text("--all2all-backend", metavar="NAME", help="Sets VLLM_ALL2ALL_BACKEND.")


def _set_variables(args: argparse.Namespace) -> None:
    given = {
        "HF_HUB_CACHE": args.download_dir,
        "HF_TOKEN": args.hf_token,
        "VLLM_ALL2ALL_BACKEND": args.all2all_backend,
    }
    for name, value in given.items():
        if value is not None:
            envs.set_for_children(name, value)
    envs.read("VLLM_ALL2ALL_BACKEND")  # a wrong one is told now


def _tell_automatic(args: argparse.Namespace) -> None:
    """Upstream's attention backend of a library that has no kernels here is told, not refused."""
    given = {
        "--attention-backend": args.attention_backend,
        "VLLM_ATTENTION_BACKEND": envs.VLLM_ATTENTION_BACKEND,
    }
    for source, name in given.items():
        if name is not None and registry.is_automatic("attention", name):
            logger.warning("%s %s: the selector chooses the kernel of attention", source, name)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal: 0, or 1 if the engine died."""
    report = begin_report(process_start())
    if not sys.stderr.isatty():  # a bar in a file is thousands of characters
        envs.set_for_children("TQDM_DISABLE", "1")
    settings = server_settings(args)
    raise_file_limit()
    listener = bind_path(args.uds) if args.uds else bind(args.host, args.port)
    warn_if_open(listener, bool(settings.api_key))
    engine_args = EngineArgs.from_cli_args(args, _model(args))

    def on_ready(model_name: str) -> None:
        url = _url(args, listener)
        report.log(who="Server")
        settle_collections()
        has_page = settings.ui and not args.uds
        text = greeting(url, model_name, report.total, bool(settings.api_key), has_page)
        if envs.VLLM_LOG_FORMAT == "json":
            logger.info("%s", text.partition("\n")[0].removesuffix(" In another terminal:"))
        else:
            print(text, flush=True)

    try:
        with asyncio.Runner() as loop:
            loop.run(serve(engine_args, listener, settings, on_ready))
    except EngineDeadError as error:
        print(f"vllm: error: {error}", file=sys.stderr)
        return 1
    finally:
        if args.uds:
            Path(args.uds).unlink(missing_ok=True)
    return 0


def _url(args: argparse.Namespace, listener: socket.socket) -> str:
    scheme = "https" if args.ssl_certfile else "http"
    if args.uds:
        return f"--unix-socket {args.uds} {scheme}://localhost"
    return f"{scheme}://{_local_name(args.host)}:{listener.getsockname()[1]}"


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """Sets the variables that flags stand for, too. ConfigError for a file or a name that is wrong,
    before anything is loaded."""
    _set_variables(args)
    _tell_automatic(args)
    _check_generation(args.override_generation_config)
    _check_certificate(args)
    given = {field.name: getattr(args, field.name) for field in fields(ServerSettings)}
    if args.generation_config not in ("auto", "vllm"):
        given["generation_config"] = "vllm"
        given["override_generation_config"] = {
            **_generation_of(args.generation_config),
            **args.override_generation_config,
        }
    if args.max_waiting is None:
        given["max_waiting"] = (
            WAITING_PER_PLACE * args.max_num_seqs * max(1, args.data_parallel_size)
        )
    given["api_key"] = _api_keys(args)
    given["chat_template"] = _read_template(args.chat_template) if args.chat_template else None
    settings = ServerSettings(**given)
    _check_parsers(settings)
    if settings.otlp_traces_endpoint is not None:
        from vllm.engine.request_traces import checked_endpoint

        checked_endpoint(settings.otlp_traces_endpoint)
    return settings


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Of flags, the file and the variable, which processes that are started now do not get."""
    keys = [*args.api_key, *(_keys_of(args.api_key_file) if args.api_key_file else ())]
    if envs.VLLM_API_KEY is not None:
        keys.append(envs.VLLM_API_KEY)
        envs.set_for_children("VLLM_API_KEY", None)
    if args.protect_metrics and not keys:
        raise ConfigError("--protect-metrics needs a key: give --api-key-file or VLLM_API_KEY")
    return tuple(dict.fromkeys(keys))


def _keys_of(file: str) -> list[str]:
    """ConfigError for a file that is none, or has no key."""
    if not Path(file).is_file():  # another kind may never end
        raise ConfigError(f"--api-key-file {file}: there is no regular file of that name")
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}") from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {file} has no key: it takes one a line")
    return keys


def _check_parsers(settings: ServerSettings) -> None:
    """ConfigError for a name that no parser has."""
    if settings.tool_call_parser is not None:
        from vllm.tool_parsers.registry import tool_parser

        tool_parser(settings.tool_call_parser, settings.tool_parser_plugin)
    elif settings.tool_parser_plugin is not None:
        raise ConfigError("--tool-parser-plugin needs --tool-call-parser NAME")
    if settings.reasoning_parser is not None:
        from vllm.reasoning.registry import reasoning_format

        reasoning_format(settings.reasoning_parser)


_GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")


def _generation_of(folder: str) -> dict[str, Any]:
    """What generation_config.json of a folder says of sampling; ConfigError."""
    from vllm.utils.hub import read_json_object

    if not Path(folder).is_dir():
        raise ConfigError(f"--generation-config {folder!r}: it takes auto, vllm or a folder")
    found = read_json_object(Path(folder) / "generation_config.json", ConfigError)
    return {name: found[name] for name in _GENERATION if found.get(name) is not None}


def _check_generation(override: dict[str, Any]) -> None:
    """ConfigError for what no sampling default is, or for a value that none has."""
    if unknown := [name for name in override if name not in _GENERATION]:
        fix = "; a request says max_tokens" if "max_new_tokens" in unknown else ""
        raise ConfigError(
            f"--override-generation-config takes {', '.join(_GENERATION)}, not "
            f"{', '.join(unknown)}{fix}"
        )
    from vllm.sampling_params import generation_defaults

    try:
        generation_defaults(override)
    except CheckpointError as error:
        text = str(error).removeprefix("generation_config.json: ")
        raise ConfigError(f"--override-generation-config: {text}") from error


def _read_template(given: str) -> str:
    """The template named by --chat-template: a file, or the Jinja text itself. ConfigError."""
    if is_regular(Path(given)):
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {given}: {error}") from error
    if any(mark in given for mark in ("{{", "{%", "\n")):
        return given
    raise ConfigError(f"--chat-template {given!r} is neither a file nor a Jinja template")


def _check_certificate(args: argparse.Namespace) -> None:
    keyfile, certfile = args.ssl_keyfile, args.ssl_certfile
    if bool(keyfile) != bool(certfile):
        raise ConfigError("--ssl-keyfile and --ssl-certfile go together; give both")
    if certfile is None:
        if args.ssl_ca_certs or args.ssl_cert_reqs or args.ssl_ciphers:
            raise ConfigError(
                "--ssl-ca-certs, --ssl-cert-reqs and --ssl-ciphers need --ssl-certfile"
            )
        return
    import ssl

    def no_phrase() -> str:  # OpenSSL would ask for it at the terminal
        raise ConfigError(f"--ssl-keyfile {keyfile} has a pass phrase; give a key without one")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _tried(
        lambda: context.load_cert_chain(certfile, keyfile, no_phrase),
        f"--ssl-certfile {certfile} with --ssl-keyfile {keyfile}",
        "a PEM certificate and its private key",
    )
    if args.ssl_ca_certs:
        _tried(
            lambda: context.load_verify_locations(args.ssl_ca_certs),
            f"--ssl-ca-certs {args.ssl_ca_certs}",
            "a file of PEM certificates",
        )
    elif args.ssl_cert_reqs:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs, which clients are checked against")
    if args.ssl_ciphers:
        _tried(
            lambda: context.set_ciphers(args.ssl_ciphers),
            f"--ssl-ciphers {args.ssl_ciphers}",
            "ciphers as OpenSSL lists them",
        )


def _tried(step: Callable[[], None], what: str, needed: str) -> None:
    try:
        step()
    except OSError as error:  # of which SSLError is a kind
        raise ConfigError(f"{what}: {error}; give {needed}") from error


def _model(args: argparse.Namespace) -> str:
    named = list(dict.fromkeys(name for name in (args.model, args.model_flag) if name is not None))
    if len(named) > 1:
        raise ConfigError(f"MODEL {named[0]} and --model {named[1]} are two models: give one")
    if named:
        return str(named[0])
    with current_report().phase("demo model"):
        path = demo_model_path()
    args.served_model_name = args.served_model_name or [path.name]
    return str(path)


def _local_name(host: str) -> str:
    """The name under which this machine reaches a server listening on `host`."""
    if host in ("", "0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def _number(kind: type[float], low: float, high: float, accepts: str) -> Callable[[str], float]:
    """The type of a flag that takes a number from low to high."""

    def parse(text: str) -> float:
        with suppress(ValueError, argparse.ArgumentTypeError):
            value = whole_number(text) if kind is int else kind(text)
            if low <= value <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {accepts}")

    return parse


def _max_waiting(text: str) -> int:
    return 0 if text == "none" else int(_number(int, 0, 2**31, "a count, 0 or none")(text))


def _text(text: str) -> str:
    if not text.strip():  # as of a shell variable that is not set
        raise argparse.ArgumentTypeError("it is empty; give a text or leave it out")
    return text


def _path_prefix(text: str) -> str:
    if text and not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a path such as /llm")
    return text


def _texts(text: str) -> tuple[str, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.DecodeError, ValueError):
        message = f'{text!r} is not a JSON list of texts such as ["*"]'
        raise argparse.ArgumentTypeError(message) from None
