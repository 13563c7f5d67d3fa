"""Who may use a server, and what a server tells of its secrets."""

import http.client
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm import envs
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai import launch
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.http import Gate

from .serving import RunningServer, run_cli, started_server

KEYS = ("one", "two", "three", "from-file", "another-from-file", "variable-key")
SECRETS = (*KEYS[3:], "hub-token")


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens_the_server(keyed: RunningServer, key: str) -> None:
    assert keyed.get("/v1/models", Authorization=f"Bearer {key}").status == 200
    assert keyed.get("/v1/models", **{"x-api-key": key}).status == 200


@pytest.mark.parametrize(
    "key", ["", "onE", "on", "one ", "ones", "# of the team", "of", "one two", "é", "a" * 10_000]
)
def test_no_other_key_does(keyed: RunningServer, key: str) -> None:
    answer = keyed.get("/v1/models", Authorization=f"Bearer x{key}")
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/metrics", "/kernels", "/v1/models", "/load", "/server_info"])
def test_protected_metrics_need_a_key_as_other_paths_do(keyed: RunningServer, path: str) -> None:
    assert keyed.get(path).status == 401
    assert keyed.get(path, Authorization="Bearer one").status == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_probes_need_no_key(keyed: RunningServer, path: str) -> None:
    assert keyed.get(path).status == 200


def scope_of(path: str, key: str = "") -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    return {"type": "http", "path": path, "headers": headers}


def test_protected_metrics_are_there_while_the_model_loads() -> None:
    gate = Gate((b"one",), protects_metrics=True)
    gate.check(scope_of("/metrics", "one"))
    for scope, status in ((scope_of("/metrics"), 401), (scope_of("/v1/models", "one"), 503)):
        with pytest.raises(ApiError) as caught:
            gate.check(scope)
        assert caught.value.status == status


def test_every_key_is_compared_in_full_and_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return given == known

    monkeypatch.setattr("vllm.entrypoints.openai.http.hmac.compare_digest", compare)
    Gate((b"one", b"two", b"three"), refusal=None).check(scope_of("/v1/models", "one"))
    assert compared == [b"one", b"two", b"three"]


def test_no_secret_is_told(keyed: RunningServer) -> None:
    """By answers, the log, or the processes that the server starts."""
    told = [keyed.log.read_bytes()]
    for path in ("/server_info", "/server_info?config_format=json", "/metrics", "/kernels",
                 "/v1/models", "/nowhere"):  # fmt: skip
        told.append(keyed.get(path, Authorization="Bearer one").body)
    told.append(keyed.get("/v1/models", Authorization="Bearer x").body)
    for pid in keyed.engine_pids():
        told.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"PYTHONPATH=" in environment
        told.append(environment.replace(b"HF_TOKEN=hub-token", b""))  # the engine loads the model
    told.append(Path(f"/proc/{keyed.process.pid}/cmdline").read_bytes())
    assert keyed.engine_pids()
    for secret in SECRETS:
        assert all(secret.encode() not in text for text in told), secret


def test_a_report_of_the_machine_hides_secrets() -> None:
    done = run_cli("collect-env", VLLM_API_KEY="hunter2", HF_TOKEN="hunter3")
    assert "hunter" not in done.stdout + done.stderr


def test_variables_for_other_machines_have_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "error")
    assert envs.texts()["VLLM_LOGGING_LEVEL"] == "error"
    assert "VLLM_API_KEY" not in envs.texts()


def test_processes_started_without_secrets_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.SECRETS:
        monkeypatch.setenv(name, "hunter2")
    with envs.without_secrets():
        assert "hunter2" not in subprocess.run(["env"], capture_output=True, text=True).stdout
    assert envs.VLLM_API_KEY == envs.foreign("HF_TOKEN") == "hunter2"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no regular file of that name"),
        ("# only a comment\n\n", "has no key: it takes one a line"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_a_file_without_keys_is_told(
    tmp_path: Path, content: str | bytes | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["serve", "--port", "0", "--api-key-file", str(file)]) == 2
    assert says in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


@pytest.mark.usefixtures("ends_soon")
def test_a_pipe_in_place_of_a_file_of_keys_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mkfifo", tmp_path / "keys"], check=True)
    assert main(["serve", "--port", "0", "--api-key-file", str(tmp_path / "keys")]) == 2
    assert "no regular file" in capsys.readouterr().err


def test_protected_metrics_need_a_key_to_protect_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert main(["serve", "--port", "0", "--protect-metrics"]) == 2
    assert "--protect-metrics needs a key" in capsys.readouterr().err


class Warnings:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warning(self, text: str, *arguments: object) -> None:
        self.texts.append(text % arguments)


@pytest.mark.parametrize(
    ("host", "has_key", "warns"),
    [
        ("0.0.0.0", False, True),
        ("", False, True),
        ("0.0.0.0", True, False),
        ("127.0.0.1", False, False),
        ("localhost", False, False),
        ("127.5.5.5", False, False),
    ],
)
def test_a_server_that_others_reach_without_a_key_warns(
    monkeypatch: pytest.MonkeyPatch, host: str, has_key: bool, warns: bool
) -> None:
    told = Warnings()
    monkeypatch.setattr(launch, "logger", told)
    with launch.bind(host, 0) as listener:
        launch.warn_if_open(listener, has_key)
    assert len(told.texts) == warns
    assert all("--api-key-file" in text for text in told.texts)


def test_a_unix_socket_needs_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = Warnings()
    monkeypatch.setattr(launch, "logger", told)
    with launch.bind_path(str(tmp_path / "socket")) as listener:
        launch.warn_if_open(listener, has_key=False)
    assert told.texts == []


def test_pages_of_other_origins_get_no_permission_unless_asked_for(server: RunningServer) -> None:
    origin = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    answers = [
        server.get("/health", **origin),
        server.request("OPTIONS", "/v1/chat/completions", headers=origin),
    ]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert [answer.status for answer in answers] == [200, 405]


def test_browsers_of_an_origin_that_was_asked_for_may_ask(keyed: RunningServer) -> None:
    """A preflight carries no key."""
    preflight = keyed.request(
        "OPTIONS",
        "/v1/chat/completions",
        headers={"Origin": "http://a.example", "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "content-type"},
    )  # fmt: skip
    assert preflight.status == 200
    assert "access-control-allow-origin" in preflight.headers
    refused = keyed.post("/v1/completions", {}, Origin="http://a.example", **{"x-api-key": "one"})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, "*")


def certificate(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=IP:127.0.0.1", *(options or ("-nodes",))],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl here")


@pytest.fixture(scope="module")
def secured(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, Path]]:
    """A server over TLS that asks clients for a certificate, and the folder of certificates."""
    folder = tmp_path_factory.mktemp("certificates")
    (cert, key), (client, _) = certificate(folder, "server"), certificate(folder, "client")
    certificate(folder, "stranger")
    flags = ("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", client,
             "--ssl-cert-reqs", "2")  # fmt: skip
    with started_server(tiny_model, folder / "log", *map(str, flags)) as server:
        yield server, folder


def answer_over_tls(server: RunningServer, folder: Path, trusted: str, own: str | None) -> int:
    context = ssl.create_default_context(cafile=str(folder / f"{trusted}.pem"))
    if own is not None:
        context.load_cert_chain(folder / f"{own}.pem", folder / f"{own}.key")
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=context)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status
    finally:
        connection.close()


@needs_openssl
def test_a_server_answers_over_tls_those_whose_certificate_is_known(
    secured: tuple[RunningServer, Path],
) -> None:
    server, folder = secured
    assert answer_over_tls(server, folder, "server", "client") == 200
    for own in (None, "stranger"):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            answer_over_tls(server, folder, "server", own)
    with pytest.raises(ssl.SSLCertVerificationError):
        answer_over_tls(server, folder, "stranger", "client")
    with socket.create_connection(("127.0.0.1", server.port), 10) as plain:
        plain.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not plain.recv(4096).startswith(b"HTTP/1.1 200")


@needs_openssl
def test_a_wrong_certificate_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "two")
    locked, locked_key = certificate(tmp_path, "locked", "-passout", "pass:secret")
    for words, says in (
        ((cert, other), "give a PEM certificate and its private key"),
        ((key, cert), "give a PEM certificate and its private key"),
        ((cert, tmp_path / "absent"), "give a PEM certificate and its private key"),
        ((locked, locked_key), "has a pass phrase; give a key without one"),
        ((cert, key, "--ssl-ca-certs", key), "give a file of PEM certificates"),
        ((cert, key, "--ssl-cert-reqs", "2"), "--ssl-cert-reqs needs --ssl-ca-certs"),
    ):
        flags = ["--ssl-certfile", words[0], "--ssl-keyfile", *words[1:]]
        assert main(["serve", "--port", "0", *map(str, flags)]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
