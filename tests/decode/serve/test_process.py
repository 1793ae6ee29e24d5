"""Tests of ``onelaunch serve`` as a process, with raw sockets and OpenAI's client: hang-ups, malformed bytes, floods, signals.

The process serves the bundled model. ``model`` is the same model in this process; the texts of both must agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from onelaunch.device.tools import package_installed

PROMPT = "def main("
LONG = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True, "seed": 1}
"""Request whose text takes many seconds."""

START = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HEAD = START + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"

MALFORMED = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no bytes": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: local",
    "a head without end": b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
    "a length that is no number": START + b"Content-Length: many\r\n\r\n",
    "a negative length": START + b"Content-Length: -5\r\n\r\n{}",
    "two lengths": START + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "broken chunks": START + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "an unknown method": b"BREW /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a tunnel": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
    "a path of another machine": b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
}


class Process:
    """Server in a process of its own.

    Args:
        options: Options of the command.
        hidden: Packages that the process does not find.

    Attributes:
        port: Its port.
        process: The process.
        said: First line that it has printed.
    """

    def __init__(self, *options: str, hidden: tuple[str, ...] = ()) -> None:
        start = f"import sys; sys.modules.update(dict.fromkeys({hidden})); from onelaunch.cli.main import app; app()"
        command = ["-c", start, *f"serve tiny --port 0 --device cpu --dtype float32 {' '.join(options)}".split()]
        self.process = subprocess.Popen(
            [sys.executable, *command], stderr=subprocess.PIPE, encoding="utf-8",
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )  # fmt: skip
        self.said = self.process.stderr.readline()
        self.port = int(re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.said)[1])
        end = time.monotonic() + 60
        while self.ask("/health")[0] != 200:
            assert time.monotonic() < end
            time.sleep(0.05)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def send(self, fields) -> socket.socket:
        """Send a request for a completion, and return the connection."""
        connection, body = self.connect(), json.dumps(fields).encode()
        connection.sendall(HEAD % len(body) + body)
        return connection

    def ask(self, path: str, fields=None) -> tuple[int, str]:
        """Return the status and the body of an answer."""
        if fields is not None:
            connection = self.send(fields)
        else:
            connection = self.connect()
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        with connection:
            return answer_of(connection)

    def number(self, name: str) -> float:
        """Return the value of a metric."""
        return float(re.search(rf"^{name}{{.*}} (\S+)$", self.ask("/metrics")[1], re.MULTILINE)[1])

    def right(self, expected: str) -> bool:
        """Return whether a request gets the expected text."""
        fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        status, body = self.ask("/v1/completions", fields)
        return status == 200 and json.loads(body)["choices"][0]["text"] == expected


def answer_of(connection: socket.socket) -> tuple[int, str]:
    """Read an answer with a length, or up to the end of the connection; the status is 0 without an answer."""
    received = b""
    while piece := connection.recv(65_536):
        received += piece
        head, found, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if found and length and len(body) >= int(length[1]):
            break
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body.decode()


def found(package, hidden):
    return package not in hidden and package_installed(package)


@pytest.fixture(scope="module", params=["installed", pytest.param("asyncio", marks=pytest.mark.every)])
def server(request):
    """Return a running server. After SIGTERM it must let the running request end, and end by the signal without an error.

    It takes uvloop if it is installed. The other server runs without it.
    """
    hidden = ("uvloop",) if request.param == "asyncio" else ()
    server = Process("--max-waiting", "4", hidden=hidden)
    assert f" by {'uvloop' if found('uvloop', hidden) else 'asyncio'};" in server.said
    yield server
    with server.send(LONG | {"max_tokens": 100}) as running:
        received = running.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        while piece := running.recv(65_536):
            received += piece
    assert b"data: [DONE]" in received
    assert server.process.wait(30) == -signal.SIGTERM
    first, *rest = server.process.stderr.read().splitlines()
    assert first == "tiny is loaded"
    # uvicorn's own line about a request whose body turned out not to be HTTP.
    assert set(rest) <= {"ERROR:    ASGI callable returned without completing response."}


@pytest.fixture(scope="module")
def expected(model):
    """Return the text of the request of ``Process.right``."""
    return model.generate(PROMPT, max_new_tokens=4, temperature=0).text


def close(connection):
    connection.close()


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection):
    connection.shutdown(socket.SHUT_WR)


def pipeline_and_close(connection):
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    time.sleep(0.02)
    connection.close()


def send_too_much(connection):
    connection.sendall(b"x" * 200_000)


@pytest.mark.parametrize("hang_up", [close, reset, half_close, pipeline_and_close, send_too_much])
@pytest.mark.parametrize("stream", [True, False])
def test_the_device_is_idle_soon_after_a_hang_up(hang_up, stream, server, expected):
    before = server.number("vllm:generation_tokens_total")
    connection = server.send(LONG | {"stream": stream})
    if stream:
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(4096)
    else:
        while server.number("vllm:num_requests_running") == 0:
            time.sleep(0.005)
    hang_up(connection)
    end = time.monotonic() + 5
    while server.number("vllm:num_requests_running"):
        assert time.monotonic() < end, "2000 tokens take longer"
    assert server.number("vllm:generation_tokens_total") - before < 1000
    assert server.right(expected)
    connection.close()


def test_requests_in_one_go_are_answered_in_turn(server, expected):
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    body = json.dumps(fields).encode()
    with server.connect() as connection:
        connection.sendall((HEAD % len(body) + body) * 2)
        time.sleep(0.01)
        connection.sendall(HEAD % len(body) + body)
        received = b""
        while received.count(b"HTTP/1.1 200") < 3 or not received.endswith(b"}}"):
            received += connection.recv(65_536)
    assert received.count(json.dumps(expected).encode()) == 3


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bytes_harm_nobody(name, server, expected):
    with server.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(MALFORMED[name])
        if name not in ("no bytes", "half a head", "not HTTP"):  # these wait for the rest
            with contextlib.suppress(ConnectionError):
                assert answer_of(connection)[0] in (0, 400, 405, 421, 431)
    assert server.right(expected)


def test_a_body_that_is_cut_off_harms_nobody(server, expected):
    connection = server.connect()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    connection.close()
    assert server.right(expected)


def test_ten_megabytes_are_refused_and_the_answer_can_be_read(server, expected):
    status, body = server.ask("", {"model": "tiny", "messages": [{"role": "user", "content": "x" * 1000}] * 10_000})
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
    assert server.right(expected)


def test_a_flood_gets_answers_or_refusals(server, expected):
    """Forty clients at once; every second one hangs up without reading."""
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    connections = [server.send(fields) for _ in range(40)]
    for connection in connections[::2]:
        connection.close()
    found = [answer_of(connection) for connection in connections[1::2]]
    assert {status for status, _ in found} <= {200, 429}
    assert all(json.loads(body)["choices"][0]["text"] == expected for status, body in found if status == 200)
    for connection in connections:
        connection.close()
    assert server.right(expected)


def test_openais_client_may_leave_a_stream(server, model, expected):
    openai = pytest.importorskip("openai", reason="needs OpenAI's client")
    with openai.OpenAI(api_key="x", base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=0) as client:
        fields = {name: value for name, value in LONG.items() if name not in ("stream", "ignore_eos")}
        pieces = []
        with client.completions.create(**fields, stream=True, extra_body={"ignore_eos": True}) as stream:
            for event in stream:
                pieces.append(event.choices[0].text)
                if len(pieces) == 4:
                    break
        text = model.generate(PROMPT, max_new_tokens=8, ignore_end=True, seed=1).text
        assert text.startswith("".join(pieces))
        done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0)
        assert done.choices[0].text == expected
    assert server.number("vllm:num_requests_running") == 0


@pytest.mark.every
def test_a_taken_port_is_an_error_of_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "onelaunch", "serve", "tiny", "--port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=120)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1)


@pytest.mark.every
def test_a_request_that_outlasts_the_grace_is_cut_off():
    server = Process("--grace", "1")
    with server.send(LONG) as running:
        received = running.recv(4096)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        while piece := running.recv(65_536):
            received += piece
    assert server.process.wait(30) == -signal.SIGTERM
    assert time.monotonic() - begin < 5
    assert b"[DONE]" not in received


@pytest.mark.every
@pytest.mark.parametrize("arguments", ["nothing-here", "tiny --variant egaer", "tiny --device cuda:77"])
def test_a_model_that_cannot_be_loaded_ends_the_process(arguments):
    command = [sys.executable, "-m", "onelaunch", "serve", "--port", "0", *arguments.split()]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=120)
    first, *rest = ended.stderr.splitlines()
    assert first.startswith("serving")
    assert (len(rest), rest[0].startswith("error: "), ended.returncode) == (1, True, 2)


@pytest.mark.every
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_may_be_ended_while_it_loads(signal_number):
    command = [sys.executable, "-m", "onelaunch", "serve", "tiny", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8")
    assert process.stderr.readline().startswith("serving")
    process.send_signal(signal_number)
    assert process.wait(30) == (-signal.SIGTERM if signal_number == signal.SIGTERM else 130)
    assert "Traceback" not in process.stderr.read()
