"""Measure ``onelaunch serve`` as a client sees it beside the library in the same setting, and send it requests of all kinds.

    python tools/measure_serving.py --model Qwen3-0.6B --json
    python tools/measure_serving.py --model Qwen3-0.6B --requests 1000

For each model of ``model_shapes.py`` the script writes a folder with random weights and the bundled tokenizer. Embeddings of
tokens that this tokenizer does not have are zero, so that greedy text consists of tokens that it has. It loads the folder by the
library, then starts the server as a process of its own. Both generate the same tokens behind the same prompt, :data:`RUNS` times:
seconds to the first piece of text, and tokens per second between the first piece and the end. The client is a raw socket that
reads events; what it counts are the tokens of ``usage``. It keeps its connection from one request to the next, as OpenAI's client
does, so ``served`` includes no connecting. ``served_by_new_connections`` does: each request has a connection of its own. The
prompt is token ids for the library as for the server, so neither tokenizes. ``first_ms`` includes the client's own work, the
encoding of the request and the decoding of the event; ``first_bytes_ms`` is the time between, from the request's bytes to those
of the first event with text. ``server`` names the parser and the event loop. Texts must agree.

With ``--requests`` it then sends so many requests from several threads: short completions, of which many are abandoned at a
random moment, wait without being read, or are malformed, and now and then a flood. Each complete text is compared with the
library's. At the end the server must be idle and answer, and the script prints how many answers of each kind came, and the
server's resident memory, open files and threads before and after. It exits with 1 where a text is wrong or the server is busy.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from typing_extensions import Self

from onelaunch.decode import Model, random_weights
from onelaunch.decode.model.hub import BUNDLED
from tools.measure_first_call import provenance
from tools.model_folders import write
from tools.model_shapes import SHAPES

PROMPT_TOKENS, NEW_TOKENS, RUNS = 128, 512, 7
"""Tokens of the prompt and behind it, and number of generations, of which the median is taken; one more comes before."""

THREADS = 8
"""Clients at a time while requests of all kinds are sent."""

SHORT = 8
"""Tokens of each of these completions."""

PROMPTS = tuple(f"def function_{number}(value):\n    return " for number in range(6))

MALFORMED = (
    b"\x16\x03\x01\x02\x00", b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{\"model\"}",
)  # fmt: skip


class Run(NamedTuple):
    """Generation that was timed."""

    text: str
    first_seconds: float
    """Seconds from the call or request to the first piece of text."""
    later_seconds: float
    """Seconds from there to the end."""
    bytes_seconds: float | None = None
    """Seconds from the bytes of the request to those of the first event with text; ``None`` for the library."""


class Speed(NamedTuple):
    """Medians over the runs of a setting."""

    first_ms: float
    """Milliseconds from the call or request to the first piece of text."""
    tokens_per_second: float
    """Tokens per second behind it."""
    first_bytes_ms: float | None = None
    """Milliseconds from the bytes of the request to those of the first event with text; ``None`` for the library."""


def tokenizer_folder() -> Path:
    """Return the folder of the bundled model, whose tokenizer is used."""
    import onelaunch.decode

    return Path(onelaunch.decode.__file__).parent / "tiny"


def model_folder(name: str, folder: Path, device: torch.device) -> Path:
    """Write a model with random weights, or return the bundled one; see the module."""
    if name == BUNDLED:
        return tokenizer_folder()
    known = json.loads((tokenizer_folder() / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    shape = SHAPES[name]
    weights = random_weights(replace(shape, tie_word_embeddings=True, vocab_size=max(shape.vocab_size, known)), 0, device)
    weights.embed_tokens[known:] = 0
    write(folder, weights)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder() / each, folder)
    return folder


def of_library(model: Model, prompt: list[int], tokens: int) -> Run:
    """Generate a text by the library."""
    begin = time.perf_counter()
    first = None
    with model.stream(prompt, max_new_tokens=tokens, temperature=0, ignore_end=True) as stream:
        for _ in stream:
            first = first or time.perf_counter()
        text = stream.text or ""
    end = time.perf_counter()
    return Run(text, (first or end) - begin, end - (first or end))


def request_of(fields: dict[str, Any], *, close: bool) -> bytes:
    """Return a request for a completion; ``close`` says that the connection ends with the answer."""
    body = json.dumps({"model": "model", "temperature": 0, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Connection: close\r\n" * close + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Server:
    """``onelaunch serve`` as a process.

    Args:
        folder: Folder of the model.
        device: Name of the device.
    """

    def __init__(self, folder: Path, device: str) -> None:
        command = [sys.executable, "-m", "onelaunch", "serve", str(folder), "--port", "0", "--device", device]
        self.process = subprocess.Popen([*command, "--served-model-name", "model"], stderr=subprocess.PIPE, encoding="utf-8")
        assert self.process.stderr is not None  # noqa: S101 - it is a pipe
        said = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1 by (.+?);", said)
        if found is None:
            raise SystemExit(f"The server did not start: {said}{self.process.stderr.read()}")
        self.port, self.parser_and_loop = int(found[1]), found[2]
        threading.Thread(target=self.process.stderr.read, daemon=True).start()  # so that the pipe is never full
        while self.ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] != 200:
            time.sleep(0.1)

    def end(self) -> None:
        """End the process, and wait for that."""
        self.process.terminate()
        self.process.wait(60)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def send(self, fields: dict[str, Any]) -> socket.socket:
        """Send a request for a completion, and return the connection."""
        return self.send_bytes(request_of(fields, close=True))

    def send_bytes(self, request: bytes) -> socket.socket:
        """Send a request over a new connection, and return that."""
        connection = self.connect()
        connection.sendall(request)
        return connection

    def ask(self, request: bytes | dict[str, Any]) -> tuple[int, bytes]:
        """Return the status and the body of an answer; the status is 0 if none came."""
        connection = self.send(request) if isinstance(request, dict) else self.send_bytes(request)
        received = b""
        with connection, contextlib.suppress(ConnectionError, TimeoutError):
            while piece := connection.recv(65_536):
                received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        words = head.split()
        return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), body

    def busy(self) -> bool:
        """Return whether a request runs or waits."""
        _, body = self.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        found = re.findall(r"^vllm:num_requests_(?:running|waiting){.*} (\S+)$", body.decode(), re.MULTILINE)
        return any(float(each) for each in found)

    def resources(self) -> dict[str, int]:
        """Return the resident memory in MB, the open files and the threads of the process, on Linux."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        resident = re.search(r"VmRSS:\s+(\d+)", status)
        threads = re.search(r"Threads:\s+(\d+)", status)
        files = len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))
        return {
            "resident_mb": int(resident[1]) // 1024 if resident else 0,
            "files": files,
            "threads": int(threads[1]) if threads else 0,
        }


@contextlib.contextmanager
def running(folder: Path, device: str) -> Iterator[Server]:
    """Yield a server that is ready, and end it."""
    server = Server(folder, device)
    try:
        yield server
    finally:
        server.end()


def events_of(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer as they come, and close its connection."""
    with connection, connection.makefile("rb") as lines:
        yield from _events(lines)


def _events(lines: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer, whose lines are read up to the last chunk, which is empty.

    Each has the host time in seconds at which its bytes came, as ``came``.
    """
    for line in lines:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            came = time.perf_counter()
            yield {**json.loads(line[6:]), "came": came}
        elif line == b"0\r\n":
            lines.readline()
            return


class Connection:
    """Connection over which one request follows the other, as clients of OpenAI's API keep one.

    Args:
        server: The server.
    """

    def __init__(self, server: Server) -> None:
        self._socket = server.connect()
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def events(self, request: bytes) -> Iterator[dict[str, Any]]:
        """Send a request for a streamed completion, and return the events of its answer as they come."""
        self._socket.sendall(request)
        return _events(self._lines)


def of_server(prompt: list[int], tokens: int, send: Callable[[bytes], Iterator[dict[str, Any]]], *, close: bool = False) -> Run:
    """Return what :func:`of_library` does, as a client sees it.

    Args:
        prompt: Prompt.
        tokens: Number of new tokens.
        send: Function that sends a request and returns the events of its answer.
        close: Flag of a connection that ends with the answer.
    """
    fields = {
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    request = request_of(fields, close=close)
    sent = time.perf_counter()
    first, came, text, made = None, None, "", 0
    for event in send(request):
        for choice in event["choices"]:
            if choice["text"]:
                first, came = first or time.perf_counter(), came or event["came"]
                text += choice["text"]
        made = (event.get("usage") or {}).get("completion_tokens", made)
    end = time.perf_counter()
    if made != tokens:
        raise SystemExit(f"The server made {made} tokens of {tokens}.")
    return Run(text, (first or end) - begin, end - (first or end), (came or end) - sent)


def speed(runs: list[Run], tokens: int) -> Speed:
    """Return the medians of runs, of which the first is left out."""
    seconds = statistics.median(run.later_seconds for run in runs[1:])
    bare = [run.bytes_seconds for run in runs[1:] if run.bytes_seconds is not None]
    first = 1e3 * statistics.median(run.first_seconds for run in runs[1:])
    return Speed(first, (tokens - 1) / seconds, 1e3 * statistics.median(bare) if bare else None)


class Clients:
    """Clients that send requests of all kinds.

    Args:
        server: The server.
        texts: Text of the library for each prompt.

    Attributes:
        found: Number of answers of each kind.
    """

    def __init__(self, server: Server, texts: dict[str, str]) -> None:
        self.server, self.texts = server, texts
        self.found: collections.Counter[str] = collections.Counter()

    def send(self, count: int) -> None:
        """Send requests from several threads, and return when all are answered or abandoned."""
        threads = [threading.Thread(target=self._client, args=(number, count // THREADS)) for number in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def _client(self, seed: int, count: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - it chooses tests
        for _ in range(count):
            kind = chance.choices(("whole", "streamed", "left", "unread", "malformed", "flood"), (30, 25, 25, 8, 10, 2))[0]
            try:
                self.found[f"{kind}: {self._one(kind, chance)}"] += 1
            except OSError as error:
                self.found[f"{kind}: {type(error).__name__}"] += 1

    def _one(self, kind: str, chance: random.Random) -> str:
        """Send a request of a kind, and return what came of it."""
        prompt = chance.choice(PROMPTS)
        fields = {"prompt": prompt, "max_tokens": SHORT, "ignore_eos": True}
        if kind == "whole":
            status, body = self.server.ask(fields)
            return str(status) if status != 200 else self._judged(prompt, json.loads(body)["choices"][0]["text"])
        if kind == "streamed":
            events = list(events_of(self.server.send({**fields, "stream": True})))
            text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
            return self._judged(prompt, text) if events else "refused"
        if kind == "malformed":
            return str(self.server.ask(chance.choice(MALFORMED) + b"\r\n\r\n")[0])
        if kind == "flood":
            connections = [self.server.send(fields) for _ in range(24)]
            for each in connections:
                each.close()
            return "closed"
        with self.server.send({**fields, "max_tokens": 2000, "stream": chance.random() < 0.7}) as connection:
            if kind == "left" and chance.random() < 0.5:
                connection.settimeout(0.3)
                with contextlib.suppress(TimeoutError):
                    connection.recv(4096)
            else:
                time.sleep(chance.random() * 0.2)
        return "closed"

    def _judged(self, prompt: str, text: str) -> str:
        return "right" if text == self.texts[prompt] else "WRONG"


def measure(name: str, device: torch.device, given: argparse.Namespace) -> dict[str, Any]:
    """Return the record of a model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(name, Path(scratch) / "model", device)
        model = Model.from_pretrained(str(folder), device=str(device))
        assert model.codec is not None  # noqa: S101 - the folder has a tokenizer
        prompt = (list(model.codec.encode(PROMPTS[0])) * PROMPT_TOKENS)[: given.prompt_tokens]
        library = [of_library(model, prompt, given.tokens) for _ in range(given.runs + 1)]
        texts = {each: model.generate(each, max_new_tokens=SHORT, temperature=0, ignore_end=True).text or "" for each in PROMPTS}
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
        with running(folder, str(device)) as server:
            with Connection(server) as kept:
                served = [of_server(prompt, given.tokens, kept.events) for _ in range(given.runs + 1)]

            def send(request: bytes) -> Iterator[dict[str, Any]]:
                return events_of(server.send_bytes(request))

            alone = [of_server(prompt, given.tokens, send, close=True) for _ in range(given.runs + 1)]
            record: dict[str, Any] = {
                "model": name, "prompt_tokens": len(prompt), "tokens": given.tokens, "server": server.parser_and_loop,
                "library": speed(library, given.tokens)._asdict(), "served": speed(served, given.tokens)._asdict(),
                "served_by_new_connections": speed(alone, given.tokens)._asdict(),
                "texts_agree": len({run.text for run in (*library, *served, *alone)}) == 1,
            }  # fmt: skip
            if given.requests:
                clients = Clients(server, texts)
                clients.send(max(given.requests // 10, THREADS))
                before = server.resources()
                clients.send(given.requests)
                end = time.monotonic() + 60
                while (busy := server.busy()) and time.monotonic() < end:
                    time.sleep(0.1)
                answers = dict(sorted(clients.found.items()))
                record |= {"answers": answers, "before": before, "after": server.resources(), "idle": not busy}
    return {**record, **provenance(device)}


def main() -> None:
    """Measure the models that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", choices=(*SHAPES, BUNDLED), help="model to measure; by default Qwen3-0.6B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--requests", type=int, default=0, help="number of requests of all kinds to send afterwards")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each model")
    given = parser.parse_args()
    good = True
    for name in given.model or ["Qwen3-0.6B"]:
        record = measure(name, torch.device(given.device), given)
        library, served = Speed(**record["library"]), Speed(**record["served"])
        share = served.tokens_per_second / library.tokens_per_second
        alone = Speed(**record["served_by_new_connections"])
        early = library.first_ms / served.first_ms
        table = f"first text {library.first_ms:.1f} ms, served {served.first_ms:.1f} ({early:.0%}; its bytes "
        table += f"{served.first_bytes_ms:.1f}; {alone.first_ms:.1f} by a new connection) by {record['server']}; "
        table += f"tokens/s {library.tokens_per_second:.0f}, "
        table += f"served {served.tokens_per_second:.0f} ({share:.0%})"
        sys.stderr.write(f"{name}: {table}; {record.get('answers', '')} {record.get('before', '')} {record.get('after', '')}\n")
        if given.json:
            sys.stdout.write(json.dumps(record) + "\n")
        wrong = any("WRONG" in each for each in record.get("answers", ()))
        good &= record["texts_agree"] and not wrong and record.get("idle", True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
