"""llmproxy: one process between your applications and your language models.

Applications change only their base URL. What converges here is joined, queued, sent, counted:

    client -> Gateway.handle   1 guard    origin, Host, our own headers, whose call    (Guard)
                               2 read     body, JSON, model                            (Request)
                               3 join     what is kept, a flight of others, a new one  (Joiner)
              Leader.fly       4 reserve  of its client's limits and of the budgets    (Lease)
                               5 queue    slot, weight, rpm, tpm, key                  (Gate)
                               6 admit    the circuit says go or not                   (Circuit)
                               7 send     one attempt over a pooled connection         (Exchange)
                               8 relay    each chunk to every caller, at its own pace  (Flight)
                               9 settle   count, learn, keep                           (Settling)
              Gateway.handle  10 record   counters, ledger, log line, live table       (Record)

The caller who leads carries the upstream call in the task of its own connection; the others read
the same flight. That a caller hangs up, the leader included, takes nothing from the others.

Sections, each using only what stands above it: Errors, Settings, Flow control, Wire, Money,
Ledger, Llama, Upstream, Record, Callers, Guard, Rewriting, Flights, Calls, Control, Gateway, Opened
calls, Live table, Mock, Server, Bench, Demo, Replay, Command line.

Units are in the names: `_s` seconds, `_ms` milliseconds, `_bytes`, `_tokens`. Instants named `*_at`
are monotonic. All state lives on one event loop in one thread: changes between two awaits are
atomic, and there is no lock. Only rows and text leave it, for the threads that write them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import bisect
import contextlib
import csv
import dataclasses
import difflib
import enum
import fcntl
import fnmatch
import functools
import gc
import glob
import gzip
import hashlib
import hmac
import http.client
import importlib
import ipaddress
import itertools
import json
import logging
import marshal
import math
import mmap
import os
import queue
import random
import re
import resource
import secrets
import shlex
import signal
import socket
import sqlite3
import string
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import tomllib
import tty
import urllib.parse
import urllib.request
import weakref
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, cast

import aiohttp
import tomli_w
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

__version__ = "0.1.0"

Clock = Callable[[], float]
V = TypeVar("V")

QUEUED_BODIES_BYTES = 256 * 2**20  # all bodies that wait in the queue together
FLIGHT_BYTES = 16 * 2**20  # an answer beyond this is passed on but no longer joined or kept
FLIGHT_WINDOW_BYTES = 4 * 2**20  # of such an answer, what a slower caller may lag behind
CAPTURES_BYTES = 64 * 2**20  # of all calls that can be opened, with their answers
CAPTURE_BYTES = 4 * 2**20  # a body beyond this is not held for it
SLICE_BYTES = 64 * 1024  # one write to a caller; also aiohttp's high-water mark
KEPT_OVERHEAD_BYTES = 2048  # headers, keys and aliases of one kept answer, counted with it
MAX_ALIASES = 4  # spellings of one body that skip the JSON parser
MAX_PASSED = 32  # times that lighter calls may pass a waiting head
MAX_TOKENS = 2**25  # a usage beyond it is none: no model has such a context
MAX_MODELS = 1000  # models and circuits remembered; the least recently used goes first
HEADER_LINE_BYTES = 64 * 1024  # aiohttp's 8,190 is less than real agents send
MAX_HEADERS = 1024  # of an answer; aiohttp's 128 is less than some gateways add
TAIL_BYTES = 16_384  # of an answer that only passes, where its usage is looked for
FOLD_S = 0.01  # after which calls that have ended are counted and logged, together
IDLE_S = 4.0  # upstream keep-alive: llama.cpp closes after 5.0 s idle
CALLER_S = 60.0  # a caller that sends or takes nothing for longer is cut off
DRAIN_S = 30.0  # what calls in flight get after SIGTERM
HEALTH_EVERY_S, HEALTH_LIMIT_S = 2.0, 1.5
LOOK_S = 1.5  # between two looks at llama.cpp: asked for its slots more often, it misses hang-ups
SILENT_LOOK_S = 10.0  # between two looks at another server that is silent for long
FIRST_BYTE_S = 600.0  # what the official SDKs wait for an answer
RESTART_S = 30.0  # a llama.cpp that is gone is expected back for so long
BACKOFF_S = 0.3  # first retry; doubles, with as much again of random jitter on top
LONGEST_PAUSE_S = 900.0  # a key that is to rest for longer is tried again after this
REFUSED_KEY_S = 60.0  # and one that was answered 401 or 403 after this
WINDOW_S = 60.0  # of rpm and tpm
STALE_CONNECTION_S = 0.1  # a pooled connection that fails within this had been closed before
OUTPUT_TOKENS_UNLEARNED, TOKEN_S_UNLEARNED = 1024, 0.05
OUTPUT_TOKENS_ABSENT = 4096  # reserved of a budget where a call names no max_tokens
MAX_JSON_ITEMS = 300_000  # a body of more passes, but is not joined; about 0.1 s to parse
BLOB_TOKENS = 1500  # an image or other base64 block in a prompt; providers charge 85 to 1,600

TRANSIENT = frozenset((408, 429, 500, 502, 503, 504, 529))
NO_ANSWER = (aiohttp.ClientError, OSError, HttpProcessingError)  # what an exchange may end in
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

log = logging.getLogger("llmproxy")


###############################################################################
# Errors
###############################################################################
# Rule: knows nothing of HTTP libraries. Each code is one row of the README's table; they become
# responses in Gateway, and in Server for what is no HTTP request.


class ConfigError(Exception):
    """A setting that cannot be used. The message names where it stands and says the mend."""


class CannotError(Exception):
    """No fault of the settings: an address, a ledger or a daemon that is not to be had."""


# code: status, OpenAI type, Anthropic type, x-should-retry
ERRORS = {
    "invalid_header": (400, "invalid_request_error", "invalid_request_error", False),
    "invalid_request": (400, "invalid_request_error", "invalid_request_error", False),
    "invalid_api_key": (401, "invalid_request_error", "authentication_error", False),
    "forbidden_origin": (403, "invalid_request_error", "permission_error", False),
    "superseded": (409, "invalid_request_error", "invalid_request_error", False),
    "caller_stalled": (408, "invalid_request_error", "invalid_request_error", False),
    "not_found": (404, "invalid_request_error", "not_found_error", False),
    "model_not_found": (404, "invalid_request_error", "not_found_error", False),
    "request_too_large": (413, "invalid_request_error", "request_too_large", False),
    "unsupported_encoding": (415, "invalid_request_error", "invalid_request_error", False),
    "model_not_allowed": (403, "invalid_request_error", "permission_error", False),
    "upgrade_refused": (426, "invalid_request_error", "invalid_request_error", False),
    "queue_full": (429, "rate_limit_error", "rate_limit_error", True),
    "queue_timeout": (429, "rate_limit_error", "rate_limit_error", True),
    "budget_exceeded": (429, "insufficient_quota", "rate_limit_error", False),
    "rate_limited": (429, "rate_limit_error", "rate_limit_error", True),
    "internal_error": (500, "server_error", "api_error", False),
    "upstream_unreachable": (502, "server_error", "api_error", False),
    "upstream_incomplete": (502, "server_error", "api_error", False),
    "upstream_key_refused": (502, "server_error", "api_error", False),
    "circuit_open": (503, "server_error", "overloaded_error", False),
    "ledger_unavailable": (503, "server_error", "api_error", False),
    "shutting_down": (503, "server_error", "overloaded_error", True),
    "upstream_timeout": (504, "server_error", "timeout_error", False),
}


class ProxyError(Exception):
    """An answer of our own instead of the upstream's.

    `should_retry` becomes `x-should-retry`, which the official SDKs obey; `retry_after_s` becomes
    `Retry-After` in whole seconds. A rejection never reached an upstream.
    """

    def __init__(self, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.retry_after_s = code, message, retry_after_s
        self.status, self.openai_type, self.anthropic_type, self.should_retry = ERRORS[code]

    @property
    def is_rejection(self) -> bool:
        return not self.code.startswith("upstream_")


def too_large(limit_bytes: int) -> ProxyError:
    why = f"the body is larger than {limit_bytes} bytes (--max-body)"
    return ProxyError("request_too_large", why)


# Of OpenAI and its kind, Anthropic, Google, GitHub, AWS, Slack, JSON web tokens, our own; and what
# stands where a key would.
_SECRETS = re.compile(
    r"(?<![A-Za-z0-9])(?:[spr]k[-_]|(?:gsk|hf|r8|gh[pos]|github_pat)_|AIza|AKIA|eyJ"
    r"|(?:xai|pplx|nvapi|glpat|xox[abp]|llmp)-)[-_A-Za-z0-9.]{12,}"
    r"|(?i:bearer|basic)\s+[^\s\"',;]{6,}"
    r"|(?i:(?:[?&;]|%3f|%26)(?:key|api[-_]?key|token|access_token)(?:=|%3d))[^&\s\"']+"
)


def struck_text(text: str) -> str:
    """A text without what looks like a key, and without what is no character."""
    text = text if text.isascii() else text.encode("utf-8", "replace").decode()
    return _SECRETS.sub("***", text)


# Models, paths and clients are the same in nearly every call.
struck = functools.lru_cache(4096)(struck_text)


@functools.lru_cache(4096)
def printable(text: str, limit: int = 80) -> str:
    """Text from outside, safe for a log line or a terminal: no key, no control character."""
    text = struck_text(text)
    text = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def fault_lines(error: BaseException) -> str:
    """Type and lines of a fault, without the values that its message might quote."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__} at {' > '.join(frames[-4:])}"


class CallerGone(ConnectionError):
    """The caller hung up, or was cut off; nobody reads what we would answer."""


###############################################################################
# Settings
###############################################################################
# Rule: one declaration per setting; flag, TOML key, environment variable, help, README table and
# `status` all read it. Knows nothing of anything that runs. Live settings act at the next decision
# because everyone reads them from the one Settings object (the Gate's sizes: from `resize`).

_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30
}  # fmt: skip
Parser = Callable[[str], Any]


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"wants {what}")


def _number(
    units: Mapping[str, float], what: str, is_allowed: Callable[[float], bool] = lambda value: True,
    make: Callable[[float], Any] = float,
) -> Parser:  # fmt: skip
    """A parser of numbers with a unit."""

    def parse(text: str) -> Any:
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)", text.strip().lower())
        if not match or match[2] not in units:
            _refuse(what)
        value = float(match[1]) * units[match[2]]
        return make(value) if is_allowed(value) else _refuse(what)

    return parse


def _matching(pattern: str, what: str, make: Callable[[str], Any] = str) -> Parser:
    """A parser of texts of a form."""

    def parse(text: str) -> Any:
        return make(text) if re.fullmatch(pattern, text, re.ASCII) else _refuse(what)

    return parse


parse_seconds = _number(_SECONDS, "seconds above 0, like 30 or 1.5s or 5m", bool)
parse_seconds_or_zero = _number(_SECONDS, "seconds, like 30 or 1.5s or 5m")
parse_span = _number({**_SECONDS, "d": 86400.0}, "a span, like 30m, 12h or 7d")
parse_days = _number({"": 1.0, "d": 1.0, "days": 1.0}, "days, like 90")
parse_usd = _number({"": 1.0, "usd": 1.0}, "an amount in USD, like 5 or 0.25")
parse_share = _number({"": 1.0}, "a share above 0 and at most 1", lambda value: 0 < value <= 1)
parse_size = _number(_BYTES, "a size, like 64MiB", make=int)
parse_count = _matching(r"\s*0*[1-9]\d{0,14}\s*", "a whole number above 0", int)
parse_count_or_zero = _matching(r"\s*\d{1,15}\s*", "a whole number", int)
parse_port = _number({"": 1.0}, "a whole number up to 65535", range(65536).__contains__, int)
parse_host = _matching(r"[\w.:%-]{1,253}", "a host or address")
parse_header = _matching(r"[\w-]{1,64}", "a header's name")
parse_name = _matching(r"[\w.-]{1,64}", "a name of letters, digits, - _ and .")
parse_origin = _matching(r"(?!\s*(null)?\s*$).*", "an origin, and never null")
parse_text = _matching(r"(?s:.*\S.*)", "a text")
parse_hash = _matching(
    r"\s*[0-9a-fA-F]{64}\s*", "a SHA-256 as 64 hexadecimal digits", lambda t: t.strip().lower()
)
_USD = r"\d{1,9}(\.\d{1,9})?"
parse_price = _matching(
    rf"{_USD}/{_USD}(/{_USD}(/{_USD})?)?",
    "IN/OUT[/CACHED_IN[/CACHED_WRITE]] in USD per million tokens, like 2.5/10/1.25",
)


def parse_model_price(text: str) -> str:
    model, _, price = text.rpartition("=")
    return (
        f"{model}={parse_price(price)}" if model else _refuse("MODEL=IN/OUT, like 'gpt-*=2.5/10'")
    )


def parse_url(text: str) -> str:
    with contextlib.suppress(ValueError):
        url = URL(text)
        odd = url.query_string or url.fragment or url.user or url.password or " " in text
        if text == "mock:" or (url.scheme in {"http", "https"} and url.host and not odd):
            return text.rstrip("/")
    return _refuse("a base URL with http:// or https:// (and no user@), or mock:")


def one_of(*allowed: str) -> Parser:
    def parse(text: str) -> str:
        return text if text in allowed else _refuse("one of " + ", ".join(allowed))

    parse.choices = allowed  # type: ignore[attr-defined]
    return parse


NONE = {"none": None}
LEVELS = {"auto": "auto", "adaptive": "adaptive"}


def matches(globs: list[str], model: str) -> bool:
    return not globs or any(fnmatch.fnmatchcase(model, glob) for glob in globs)


def setting(
    default: Any, parse: Parser, unit: str, text: str, *,
    also: Mapping[str, Any] | None = None, live: bool = True,
) -> Any:  # fmt: skip
    """Declare one setting.

    A list as default makes it repeatable; `also` are words that stand for a value of their own.
    """
    many = isinstance(default, list)
    meta = {
        "parse": parse, "unit": unit or "|".join(getattr(parse, "choices", ())), "help": text,
        "live": live, "many": many, "also": also or {},
    }  # fmt: skip
    if isinstance(default, (list, dict)):
        return field(default_factory=type(default), metadata=meta)
    return field(default=default, metadata=meta)


def typed(value: Any) -> list[str]:
    """A value of JSON or TOML, as its setting is given as text."""
    values = value if isinstance(value, list) else [value]
    if not all(v is value is None or isinstance(v, (str, int, float)) for v in values):
        _refuse("a string, a number or a list of them")
    words = {None: "none", True: "on", False: "off"}

    def text_of_one(v: Any) -> str:
        if v is None or isinstance(v, bool):
            return words[v]
        return f"{v:.15f}" if isinstance(v, float) and "e-" in str(v) else str(v)  # as 1e-06

    return [text_of_one(v) for v in values]


def parse_setting(meta: Mapping[str, Any], value: Any, where: str, is_secret: bool) -> Any:
    """A setting's value of what is typed, or stands in a file.

    Raises ConfigError: names `where` it stood and what it wants.
    """
    also, texts = meta["also"], list[str]()
    try:
        if meta["unit"] == "table":
            return parse_fields(value)
        texts = typed(value)
        values = [also[text] if text in also else meta["parse"](text) for text in texts]
        if len(values) != 1 and not meta["many"]:
            _refuse("one value")
    except ValueError as error:
        got = "" if is_secret or not texts else f", got {printable(', '.join(texts)) or 'nothing'}"
        raise ConfigError(f"{where}: {error}{''.join(f', or {w}' for w in also)}{got}") from None
    return values if meta["many"] else values[0]


def parse_fields(value: Any) -> dict[str, Any]:
    """Fields of a body, as TOML holds them."""
    with contextlib.suppress(TypeError, ValueError):  # a date is no JSON, nor is inf
        if isinstance(value, dict) and json.dumps(value, allow_nan=False):
            return value
    return _refuse("a table of fields, like { temperature = 0.2 }")


# fmt: off
@dataclass
class KeyRule:
    """A provider key: where it comes from, never the key itself."""

    env: str | None = setting(None, parse_text, "name", "environment variable that holds the key")
    file: str | None = setting(None, parse_text, "path", "file that holds it")
    command: str | None = setting(None, parse_text, "command", "command that prints it")
    header: str | None = setting(None, parse_header, "name", also=NONE, text=
        "header that carries it; none: Authorization, or x-api-key on Anthropic's routes")
    rpm: int | None = setting(None, parse_count, "requests", "requests a minute", also=NONE)
    tpm: int | None = setting(None, parse_count, "tokens", "tokens a minute", also=NONE)

    @property
    def source(self) -> str:
        """What it is called in status, log and errors."""
        word = self.command and self.command.split()[0]  # what follows may hold a secret
        kinds = {"env": self.env, "file": self.file, "command": word}
        return next(f"{kind} {value}" for kind, value in kinds.items() if value is not None)


@dataclass
class UpstreamRule:
    """One of several upstreams; the first whose `models` match gets the call."""

    name: str = ""
    url: str = setting("", parse_url, "URL", "base URL")
    models: list[str] = setting([], str, "glob", "models that it serves; none: all")
    concurrency: int | str | None = setting(None, parse_count, "calls", also=LEVELS,
        text="as the setting of this name, which is the default")
    inflight_tokens: int | None = setting(None, parse_count, "tokens", "likewise")
    rpm: int | None = setting(None, parse_count, "requests", "likewise")
    tpm: int | None = setting(None, parse_count, "tokens", "likewise")
    keys: list[KeyRule] = field(default_factory=list)


@dataclass
class ClientRule:
    """One client and the key that it presents."""

    name: str = ""
    key_sha256: str = setting("", parse_hash, "hash", "SHA-256 of its key")
    models: list[str] = setting([], str, "glob", "models that it may use; none: all")
    priority: str = setting("normal", one_of("high", "normal", "low"), "",
        "where x-llmproxy-priority says nothing")
    rpm: int | None = setting(None, parse_count, "requests", "calls a minute that go upstream",
        also=NONE)
    tpm: int | None = setting(None, parse_count, "tokens", "their tokens a minute", also=NONE)
    budget: float | None = setting(None, parse_usd, "USD", "what it may spend a day", also=NONE)
    budget_month: float | None = setting(None, parse_usd, "USD", "and a month", also=NONE)
    task_budget: int | None = setting(None, parse_count, "tokens", also=NONE, text=
        "of a task whose first call names no x-llmproxy-task-budget")


RETRY_KINDS = ("safe", "cautious", "never")


@dataclass
class ModelRule:
    """What holds for the models that a glob names."""

    name: str = ""
    retry: str | None = setting(None, one_of(*RETRY_KINDS), "", "kind of call, see Retries")
    fallback: list[str] = setting([], str, "name",
        "models or upstreams to ask instead while this one fails, in turn")
    price: str | None = setting(None, parse_price, "USD",
        "IN/OUT[/CACHED_IN[/CACHED_WRITE]] per million tokens")
    timeout: float | None = setting(None, parse_seconds, "s", "silence that ends an attempt")
    as_: str | None = setting(None, parse_text, "model", "ask for this model instead")
    set_: dict[str, Any] = setting({}, parse_text, "table", "fields where the caller names none")
    force: dict[str, Any] = setting({}, parse_text, "table", "fields whatever the caller says")
    strip: list[str] = setting([], parse_name, "field", "fields that are taken out")
    max_tokens: int | None = setting(None, parse_count, "tokens", "limit of the output")
    newest: str = setting("off", one_of("on", "off"), "",
        "a later call of the same client cuts earlier ones; always so for /infill")

    @property
    def rewrites(self) -> bool:
        return bool(self.as_ or self.set_ or self.force or self.strip or self.max_tokens)


NO_RULE = ModelRule()


@dataclass
class Settings:
    """Every setting once. `given` holds those that were set by hand."""

    upstream: str = setting("http://127.0.0.1:8080", parse_url, "URL", live=False, text=
        "what to call; a path prefix is kept; 'mock:' starts an embedded stand-in provider")
    host: str = setting("127.0.0.1", parse_host, "address", "listen address", live=False)
    port: int = setting(4000, parse_port, "", "listen port; 0 picks one and prints it", live=False)
    timeout: float | str = setting(30.0, parse_seconds, "s", also={"auto": "auto"}, text=
        "silence of the upstream, before the first byte or between two, that ends an attempt; "
        "where it is not set by hand, the first byte of a server that answers health checks may "
        "take 600 s; auto: twice the learned p99, between 1 and 30")
    total_timeout: float | None = setting(None, parse_seconds, "s", also=NONE, text=
        "limit for one whole upstream attempt")
    connect_timeout: float = setting(5.0, parse_seconds, "s", "limit for connecting")
    concurrency: int | str = setting(16, parse_count, "calls", also=LEVELS, text=
        "upstream calls at once; auto: the slots that llama.cpp reports; adaptive: found while "
        "it runs")
    inflight_tokens: int | None = setting(None, parse_count, "tokens", also=NONE, text=
        "prompt tokens in flight at once; none: concurrency x 4000, with auto the context "
        "that llama.cpp reports, with adaptive 512,000")
    upstream_stream: str = setting("auto", one_of("auto", "off"), "", text=
        "auto: ask llama.cpp with stream: true for plain calls too, so that a caller who leaves "
        "frees the slot at once")
    rpm: int | None = setting(None, parse_count, "requests", also=NONE, text=
        "requests a minute to an upstream")
    tpm: int | None = setting(None, parse_count, "tokens", also=NONE, text=
        "tokens a minute to an upstream, prompt and output")
    queue_size: int = setting(1000, parse_count_or_zero, "calls", "calls that may wait")
    stable_prefix: str = setting("auto", one_of("auto", "on", "off"), "", text=
        "take out or move back what clients write anew into the beginning of a prompt, so that a "
        "prompt cache holds; auto: not for Anthropic and OpenAI themselves")
    preempt: str = setting("low", one_of("off", "low"), "", text=
        "low: in front of llama.cpp a call of low priority that nobody has seen a byte of yields "
        "its slot to a normal or high one, and is asked again later")
    queue_timeout: float = setting(60.0, parse_seconds, "s", "a call waits at most this long")
    dedup: str = setting("on", one_of("on", "deterministic", "inflight", "off"), "", text=
        "on: join calls in flight, reuse finished answers; deterministic: reuse only where "
        "temperature is 0 or seed is set; inflight: join only; off")
    dedup_window: float = setting(300.0, parse_seconds_or_zero, "s", text=
        "a finished answer is reused so long")
    cache_bytes: int = setting(64 * 2**20, parse_size, "bytes", text=
        "bound of all kept answers together")
    share: str = setting("client", one_of("client", "all"), "", text=
        "client: only calls with the same credential are joined; all: everybody's")
    abandon: str = setting("finish", one_of("finish", "cancel"), "", text=
        "when every caller of a call has hung up: finish it and keep the answer, or cancel it")
    retries: int = setting(2, parse_count_or_zero, "attempts", text=
        "further attempts after a failed one")
    breaker_failures: int = setting(5, parse_count, "failures", text=
        "failures in a row that open a circuit")
    breaker_cooldown: float = setting(60.0, parse_seconds, "s", text=
        "wait before an open circuit is tried")
    breaker_success: float = setting(0.8, parse_share, "share", text=
        "recent trials that must succeed to close a circuit")
    budget: float | None = setting(None, parse_usd, "USD", also=NONE, text=
        "what all together may spend a day, local time")
    budget_month: float | None = setting(None, parse_usd, "USD", "and a month", also=NONE)
    price: list[str] = setting([], parse_model_price, "price", text=
        "MODEL=IN/OUT[/CACHED_IN[/CACHED_WRITE]], USD per million tokens; globs")
    prices: str | None = setting(None, str, "path", also=NONE, text=
        "LiteLLM's model_prices_and_context_window.json; price goes first")
    max_body: int = setting(64 * 2**20, parse_size, "bytes", "larger requests get 413")
    allow_host: list[str] = setting([], str, "name", text=
        "further Host names accepted on loopback (host.docker.internal)")
    allow_origin: list[str] = setting([], parse_origin, "origin", text=
        "browser origins that may call (https://app.example)")
    keepalive: float | None = setting(15.0, parse_seconds, "s", also={"off": None}, text=
        "SSE comments to a streaming caller that still waits; later errors then come in-band")
    state: str = setting("$XDG_STATE_HOME/llmproxy/llmproxy.db", parse_text, "path", live=False,
        text="the ledger, an SQLite file; none keeps nothing")
    log_bodies: str = setting("off", one_of("on", "off"), "", text=
        "on: the ledger keeps prompts and answers too, with what looks like a key struck out")
    captures: int = setting(200, parse_count_or_zero, "calls", text=
        "the last so many calls are held in memory with what was asked and answered, at most 64 "
        "MiB of it, for the table and `llmproxy calls`; 0: none")
    retention: float = setting(90.0, parse_days, "days", "ledger rows are kept; 0: for ever")
    live: str = setting("auto", one_of("auto", "on", "off"), "", live=False, text=
        "the live table; auto: on a terminal")
    log: str = setting("text", one_of("text", "json", "off"), "", "one line a call on stderr")
    allow_open: str = setting("off", one_of("on", "off"), "", live=False, text=
        "on: listen on other hosts than loopback though the file has no clients")
    admin_key: str | None = setting(None, str, "secret", also=NONE, live=False, text=
        "bearer token for /_llmproxy/; none: loopback callers only")
    given: dict[str, str] = field(default_factory=dict)  # name -> where it was set
    models: list[ModelRule] = field(default_factory=list)
    clients: list[ClientRule] = field(default_factory=list)
    upstreams: list[UpstreamRule] = field(default_factory=list)  # instead of `upstream`
    keys: list[KeyRule] = field(default_factory=list)  # of `upstream`
    path: Path | None = None  # the file; it need not be there
    again: Callable[[], Settings] | None = None  # reads them all once more
    # fmt: on

    def assign(self, name: str, value: Any, where: str) -> None:
        """Parse and set one setting, as one would type it or as JSON and TOML hold it.

        Raises ConfigError: names `where` it stood and what it wants; nothing was changed.
        """
        is_secret = name in ("admin_key", "upstream")  # a URL may hold a password
        setattr(self, name, parse_setting(SETTINGS[name].metadata, value, where, is_secret))
        self.given[name] = where

    def shown(self) -> dict[str, Any]:
        """All settings by their flag name, secrets struck out, ready for JSON."""
        values = {flag_name(name): getattr(self, name) for name in SETTINGS}
        if self.admin_key:
            values["admin-key"] = "***"
        return values

    def changed(self, texts: Mapping[str, Any], where: str) -> Settings:
        """A copy in which live settings are as given, as one would type or write them.

        Raises ConfigError: one is unknown, not live or cannot be used.
        """
        copy = dataclasses.replace(self, given=dict(self.given))
        for flag, value in texts.items():
            name = flag.replace("-", "_")
            if name not in SETTINGS:
                raise ConfigError(f"{where}: {unknown_name(flag, map(flag_name, SETTINGS))}")
            meta = SETTINGS[name].metadata
            if not meta["live"]:
                why = "is not live: set it in the file or by flag and restart the daemon"
                raise ConfigError(f"{where}: {flag_name(name)} {why}")
            wanted = [] if meta["many"] and value in (None, ["none"], [""]) else value
            copy.assign(name, wanted, f"{where}: {flag_name(name)}")
            copy.given[name] = where
        return copy

    def rule_of(self, model: str) -> ModelRule:
        found = (rule for rule in self.models if fnmatch.fnmatchcase(model, rule.name))
        return next(found, NO_RULE) if self.models else NO_RULE


def fields_of(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """By their names in a file: `as` is a word of Python's, so its field is `as_`."""
    return {f.name.rstrip("_"): f for f in dataclasses.fields(kind) if f.metadata}


SETTINGS = fields_of(Settings)
GONE = {  # a file that still names them works
    "slot_affinity": "llama.cpp finds the slot as well by itself",
    "pid_file": "a service manager knows the number",
}


def flag_name(name: str) -> str:
    return name.replace("_", "-")


def writable(name: str, value: Any) -> Any:
    """A setting's value as the file holds it; None where it is the default."""
    item = SETTINGS[name]
    if value == ([] if item.metadata["many"] else item.default):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def shown_value(item: dataclasses.Field[Any], value: Any) -> str:
    """A setting's value as one would type it."""
    words = [word for word, v in item.metadata["also"].items() if v == value]
    if words or not value:
        return words[0] if words else "none" if value in (None, []) else str(value)
    if item.metadata["unit"] == "bytes" and value % 2**20 == 0:
        return f"{value >> 20}MiB"
    return f"{value:.12g}" if isinstance(value, float) else ", ".join(typed(value))


def default_text(item: dataclasses.Field[Any]) -> str:
    return shown_value(item, [] if item.metadata["many"] else item.default)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def unknown_name(name: str, known: Iterable[str]) -> str:
    return f"unknown name {name!r}{did_you_mean(name.replace('_', '-'), known)}"


def default_config_path(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME", "~")).expanduser() / ".config")
    return Path(base) / "llmproxy" / "config.toml"


def load_settings(
    flags: Mapping[str, list[str]], env: Mapping[str, str], path: Path | None
) -> Settings:
    """Merge defaults < TOML file < environment < flags.

    Args:
        path: the file that was asked for; without one the default file is read if it is there.
    Raises ConfigError: one line that names the flag, or the file, line and key.
    """
    settings = Settings(path=path or default_config_path(env))
    settings.again = lambda: load_settings(flags, env, path)
    file = _File(settings, cast(Path, settings.path))
    file.load(is_optional=path is None)
    for name, item in SETTINGS.items():
        many, variable = item.metadata["many"], f"LLMPROXY_{name.upper()}"
        if name in flags:
            texts = flags[name] if many else flags[name][-1:]
            settings.assign(name, texts, f"--{flag_name(name)}")
        elif variable in env:
            text = env[variable]
            settings.assign(name, [t for t in text.split(",") if t] if many else text, variable)
    known = [f"LLMPROXY_{name.upper()}" for name in SETTINGS]
    for variable in sorted(name for name in env if name.startswith("LLMPROXY_")):
        # Kubernetes describes a service of our name so.
        if variable not in known and not re.search(r"_(SERVICE|PORT)_", variable):
            mend = did_you_mean(variable, known)
            log.warning("%s is the variable of no setting%s", printable(variable), mend)
    where = settings.given.get("upstream", "")
    if where.startswith(("--", "LLMPROXY_")):  # goes before the file's
        settings.upstreams = []
        if settings.keys and file.names_upstream:
            why = "the file's upstream_key tables are for the upstream that it names"
            raise ConfigError(f"{where}: {why}; use another file")
    if settings.upstreams and settings.keys:
        why = "wants to stand under its upstream, as [[upstream.NAME.upstream_key]]"
        raise ConfigError(f"upstream_key: {why}")
    return settings


class _File:
    """A TOML file on its way into Settings. Errors name the line."""

    TABLES: ClassVar[dict[str, type[Any]]] = {
        "model": ModelRule, "client": ClientRule, "upstream": UpstreamRule, "upstream_key": KeyRule
    }  # fmt: skip

    def __init__(self, settings: Settings, path: Path) -> None:
        self._settings, self._path, self._lines = settings, path, [""]
        self.names_upstream = False

    def load(self, is_optional: bool) -> None:
        text = text_of(self._path, is_optional)
        try:
            self._lines, data = text.splitlines() or [""], tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            why = printable(str(error)) or "nested too deeply"
            raise ConfigError(f"{self._path}: not valid TOML: {why}") from None
        self.names_upstream = "upstream" in data
        for key, value in data.items():
            name = key.replace("-", "_")
            if name in self.TABLES and (name != "upstream" or isinstance(value, dict)):
                kept = "keys" if name == "upstream_key" else f"{name}s"
                setattr(self._settings, kept, self._tables(name, key, value))
            elif name in SETTINGS:
                self._settings.assign(name, value, self.where(key))
            elif name in GONE:
                log.warning("%s: no such setting any more; %s", self.where(key), GONE[name])
            else:
                known = [*map(flag_name, SETTINGS), *map(flag_name, self.TABLES)]
                raise ConfigError(f"{self.where(key)}: {unknown_name(key, known)}")

    def _tables(self, name: str, key: str, value: Any) -> list[Any]:
        """Tables of a kind, by their names, or one after the other where they have none."""
        kind, is_named = self.TABLES[name], name != "upstream_key"
        if not isinstance(value, dict if is_named else list):
            form = f'[{name}."NAME"]' if is_named else f"[[{key}]]"
            raise ConfigError(f"{self.where(key)}: wants tables like {form}")
        items = value.items() if isinstance(value, dict) else zip(itertools.repeat(""), value)
        return [self._rule(kind, key, nth, *item) for nth, item in enumerate(items)]

    def _rule(self, kind: type[Any], key: str, nth: int, name: str, value: Any) -> Any:
        """One table as an object of `kind`."""
        table, fields = f"{key}.{name}" if name else key, fields_of(kind)
        here = self.where(table) if name else self.where(table, nth=nth)
        if not isinstance(value, dict):
            raise ConfigError(f"{here}: wants a table like [{table}]")
        rule = kind(name=name) if name else kind()
        for key_, found in value.items():
            where, field_name = self.where(key_, table, 0 if name else nth), key_.replace("-", "_")
            if kind is UpstreamRule and field_name == "upstream_key":
                rule.keys = self._tables("upstream_key", f"{table}.{key_}", found)
            elif field_name in fields:
                is_secret = kind is KeyRule or field_name in ("url", "key_sha256")
                parsed = parse_setting(fields[field_name].metadata, found, where, is_secret)
                setattr(rule, fields[field_name].name, parsed)
            else:
                known = [*fields, *(["upstream_key"] if kind is UpstreamRule else [])]
                raise ConfigError(f"{where}: {unknown_name(key_, known)}")
        needed = {ClientRule: "key_sha256", UpstreamRule: "url"}.get(kind)
        try:
            if needed:
                parse_name(name)
        except ValueError as error:
            raise ConfigError(f"{here}: {error}") from None
        if needed and not getattr(rule, needed):
            raise ConfigError(f"{here}: has no {needed}")
        if kind is ModelRule and {"model", "stream"} & {*rule.set_, *rule.force, *rule.strip}:
            raise ConfigError(f"{here}: model is changed by as, and stream is the caller's choice")
        if kind is KeyRule and (rule.env, rule.file, rule.command).count(None) != 2:
            raise ConfigError(f"{here}: wants exactly one of env, file, command")
        return rule

    def where(self, key: str, table: str = "", nth: int = 0) -> str:
        """File, line and name of a key, or of a table's nth header."""
        plain = [line.replace('"', "").replace("'", "").replace(" ", "") for line in self._lines]
        headers = [n for n, line in enumerate(plain) if re.match(rf"\[+{re.escape(table)}\]", line)]
        start = headers[min(nth, len(headers) - 1)] if table and headers else 0
        bare = re.escape(key.replace('"', "").replace(" ", ""))
        found = [n for n, line in enumerate(plain) if re.match(rf"(\[+{bare}\]|{bare}[=.])", line)]
        found = [n for n in found if n >= start][0 if table else nth :] or [start]
        return f"{self._path}:{found[0] + 1}: {printable(key)}"


def read_secret(rule: KeyRule, env: Mapping[str, str]) -> str:
    """The key that a rule names, from where it says.

    Raises ConfigError: it is not there; never quotes what was found instead.
    """
    where, why = f"upstream_key: {printable(rule.source)}", "is empty"
    try:
        if rule.env is not None:
            secret, why = env.get(rule.env, ""), "is not set"
        elif rule.file is not None:
            secret = Path(rule.file).expanduser().read_text("utf-8")
        else:
            words = shlex.split(rule.command or "")
            found = subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=30)
            secret = found.stdout.decode()
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{where}: ended with {error.returncode}") from None
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{where}: {_why_unreadable(error)}") from None
    secret = secret.strip()
    if not secret or not secret.isprintable() or not secret.isascii():
        raise ConfigError(f"{where} {'is no key' if secret else why}")
    return secret


def _why_unreadable(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or type(error).__name__)


def unreadable(path: Path, error: Exception, what: str = "read") -> ConfigError:
    return ConfigError(f"{path}: cannot be {what}: {_why_unreadable(error)}")


@contextlib.contextmanager
def only_one(path: Path, waits: bool = True) -> Iterator[None]:
    """Let one process at a time read and replace a file, where the system has such locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path}: {_why_unreadable(error)}") from None
    try:
        if is_locked(handle, waits):
            raise ConfigError(f"{path}: another process is changing it")
        yield
    finally:
        os.close(handle)


def is_locked(handle: int, waits: bool = False) -> bool:
    """Take the lock of an open file; True where another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    except OSError:  # a file system without such locks
        pass
    return False


def text_of(path: Path, is_optional: bool = True) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is no file")  # a pipe would hold everybody up
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        if is_optional and isinstance(error, FileNotFoundError):
            return ""
        raise unreadable(path, error) from None


def _data_of(text: str) -> dict[str, Any] | None:
    with contextlib.suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(text)
    return None


def _exact(changed: str, wanted: dict[str, Any]) -> str:
    """A changed file, or where its data is not as `wanted`, one written anew: without comments."""
    return changed if _data_of(changed) == wanted else tomli_w.dumps(wanted)


def with_settings(text: str, values: Mapping[str, Any]) -> str:
    """The file with top-level settings as given; None takes one out.

    Lines of those that stand there are replaced, new ones stand before the first table; all else
    stays as it is. Where a setting is written in some other way, the file is written anew from
    its data: order stays, comments do not.
    """
    wanted, lines = tomllib.loads(text), text.splitlines(keepends=True)
    written = {key.replace("-", "_"): key for key in wanted}
    tables = (n for n, line in enumerate(lines) if line.lstrip().startswith("["))
    # A line of an array may look like a table: what stands before it is whole then, or it is none.
    end = next((n for n in tables if _data_of("".join(lines[:n])) is not None), len(lines))
    head, rest = lines[:end], lines[end:]
    while rest and head and not head[-1].strip():
        rest.insert(0, head.pop())
    for name, value in values.items():
        key = written.get(name, name)
        wanted.pop(key, None)
        found = [n for n, line in enumerate(head) if re.match(rf"\s*{re.escape(key)}\s*=", line)]
        start = stop = found[0] if found else len(head)
        if found:  # a value may have several lines
            ends = range(start + 1, len(head) + 1)
            whole = (n for n in ends if _data_of("".join(head[start:n])) is not None)
            stop = next(whole, start + 1)
        if value is None:
            del head[start:stop]
            continue
        wanted[key], line = value, tomli_w.dumps({key: value})
        if found and stop == start + 1 and (comment := re.search(r"\s+#[^\"']*$", head[start])):
            line = line.rstrip("\n") + comment[0]
        if not found and head and not head[-1].endswith("\n"):
            head.append("\n")
            start = stop = len(head)
        head[start:stop] = [line]
    changed = "".join([*head, *rest])
    if "\r\n" in text:
        changed = changed.replace("\r\n", "\n").replace("\n", "\r\n")
    return _exact(changed, wanted)


def with_client(text: str, name: str, key_sha256: str) -> str:
    """The file with one more client at its end; written anew where that does not fit in."""
    wanted, table = tomllib.loads(text), {"client": {name: {"key_sha256": key_sha256}}}
    wanted.setdefault("client", {})[name] = table["client"][name]
    return _exact(f"{text.rstrip()}\n\n{tomli_w.dumps(table)}".lstrip(), wanted)


def without_client(text: str, name: str) -> str:
    """The file without a client's tables: the lines from its header to the next one go.

    Where it stands in another form (inline, or with dotted keys), the file is written anew.
    """
    wanted = tomllib.loads(text)
    del wanted["client"][name]
    if not wanted["client"]:
        del wanted["client"]
    kept, is_inside = [], False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("[") and (table := _data_of(line)) is not None:
            is_inside = name in table.get("client", {})
        kept += [] if is_inside else [line]
    return _exact("".join(kept), wanted)


def replace_file(path: Path, text: str) -> None:
    """Write a file as a whole or not at all; what was there keeps its mode."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()  # a link stays a link
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(mode)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unreadable(path, error, "written") from None


###############################################################################
# Flow control
###############################################################################
# Rule: no HTTP, no logging, no sockets; an injected clock. Whatever is taken here is given back
# exactly once, whichever way a call ends, cancellation included.


class LruMap(Generic[V]):
    """Bounded map that makes what is missing and forgets the least recently used that `may_go`."""

    def __init__(
        self, make: Callable[[Any], V], may_go: Callable[[V], bool] = lambda value: True
    ) -> None:
        self._make, self._may_go = make, may_go
        self._values: OrderedDict[Any, V] = OrderedDict()

    def __getitem__(self, key: Any) -> V:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = self._make(key)
            if len(self._values) > MAX_MODELS:
                others = (k for k, v in self._values.items() if k != key and self._may_go(v))
                self._values.pop(next(others, None), None)
        elif len(self._values) > MAX_MODELS // 2:
            self._values.move_to_end(key)
        return value

    def values(self) -> list[V]:
        return list(self._values.values())


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


class Bucket:
    """Requests or tokens a minute.

    Strategy: no span of 60 s may carry more than `limit`, whenever in a call's life the upstream
    counts it. So what a call takes is held while it runs, and once it is surely counted it comes
    back 60 s later. (A bucket that starts full and refills evenly lets twice as much through in
    the first minute.) An amount larger than the whole waits for an untouched bucket, then goes.
    """

    def __init__(self, limit: int, clock: Clock = time.monotonic) -> None:
        self.limit, self.held, self._clock = limit, 0, clock
        self.bias = 1.0  # what calls used of late, for each token that they had reserved
        self.spent: deque[list[Any]] = deque()  # amount, and when it is back; the oldest first
        self._spent_sum = 0

    @property
    def used(self) -> int:
        now = self._clock()
        while self.spent and self.spent[0][1] <= now:
            self._spent_sum -= self.spent.popleft()[0]
        return math.ceil(self.held * max(1.0, self.bias)) + self._spent_sum

    def fits(self, amount: int) -> bool:
        used = self.used
        return used + amount * max(1.0, self.bias) <= self.limit or used <= 0

    def spend(self, held: int, amount: int) -> list[Any]:
        """Of what was held, the upstream has counted `amount` by now."""
        self.held -= held
        self.spent.append(spent := [amount, self._clock() + WINDOW_S])
        self._spent_sum += amount
        return spent

    def correct(self, spent: list[Any], amount: int) -> None:
        if spent[1] > self._clock():
            self._spent_sum += amount - spent[0]
            spent[0] = amount

    def compare(self, reserved: int, used: int) -> None:
        """Learn from a settled call how far the estimates of those in flight may be off."""
        if reserved:
            ratio = min(max(used / reserved, 0.5), 2.0)  # one odd report shall not stop the rest
            self.bias = ratio if self.bias == 1.0 else self.bias + 0.3 * (ratio - self.bias)

    def ready_at(self, amount: float) -> float:
        """When `amount` fits if nothing further is taken; inf where running calls decide."""
        need = self.used + min(amount * max(1.0, self.bias), self.limit) - self.limit
        if need <= 0:
            return self._clock()
        sums = itertools.accumulate(amount for amount, _ in self.spent)
        return next((s[1] for s, n in zip(self.spent, sums, strict=True) if n >= need), math.inf)

    def forecast_at(self, amount: float, service_s: float) -> float:
        """When so much will have been let through, by calls that take `service_s` each."""
        span_s = service_s + WINDOW_S
        spans = max(0, math.ceil(amount / self.limit - 1e-6) - 1)
        ready_at = self.ready_at(amount - spans * self.limit)
        return min(ready_at, self._clock() + span_s) + spans * span_s


def rebucket(bucket: Bucket | None, limit: int | None, clock: Clock) -> Bucket | None:
    """A bucket of another limit; what the old one has counted stays."""
    if limit is None or bucket is None:
        return Bucket(limit, clock) if limit else None
    bucket.limit = limit
    return bucket


def shown_bucket(bucket: Bucket | None) -> dict[str, int] | None:
    return None if bucket is None else {"used": bucket.used, "limit": bucket.limit}


class Reservation:
    """One call's part of some buckets: a request and its tokens. Settled exactly once."""

    def __init__(
        self, rpms: Iterable[Bucket | None], tpms: Iterable[Bucket | None], prompt: int, output: int
    ) -> None:
        self._rpms = [bucket for bucket in rpms if bucket is not None]
        self._tpms = [bucket for bucket in tpms if bucket is not None]
        self._prompt, self._output = prompt, output  # in tokens
        self._counted: list[list[Any]] | None = None
        self._is_over = False
        for bucket in self._rpms:
            bucket.held += 1
        for bucket in self._tpms:
            bucket.held += prompt + output

    def begin(self) -> None:
        """The answer begins: by now the upstream has counted the request and its prompt."""
        if self._counted is None and not self._is_over:
            for bucket in self._rpms:
                bucket.spend(1, 1)
            self._counted = [bucket.spend(self._prompt, self._prompt) for bucket in self._tpms]

    def again(self) -> None:
        """The same call has been sent once more."""
        for bucket in self._rpms:
            bucket.spend(0, 1)

    def settle(self, prompt: int = 0, output: int = 0, *, requests: int = 1) -> None:
        """What it really took; the rest is given back. `requests`: 0 where none arrived."""
        if self._is_over:
            return
        self._is_over = True
        for bucket in self._rpms if self._counted is None else ():
            bucket.spend(1, requests)
        for n, bucket in enumerate(self._tpms):
            if prompt or output:
                bucket.compare(self._prompt + self._output, prompt + output)
            if self._counted is None:
                bucket.spend(self._prompt + self._output, prompt + output)
            else:
                bucket.correct(self._counted[n], prompt)
                bucket.spend(self._output, output)


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True, eq=False)
class Attempt:
    """One admitted attempt's entry in its circuit; ends once, in one of these ways."""

    circuit: Circuit
    epoch: int
    is_trial: bool
    is_over: bool = False

    def give_place(self) -> None:
        """Let the next trial through; this one's outcome still counts."""
        if self.circuit.trial is self:
            self.circuit.trial = None

    def alive(self) -> None:
        """A 4xx: no failure; in half-open it proves the upstream alive."""
        self._end(True if self.is_trial else None)

    def _end(self, ok: bool | None) -> None:
        if not self.is_over:
            self.is_over = True
            self.circuit.record(self, ok)

    def ok(self) -> None:
        self._end(True)

    def failed(self) -> None:
        self._end(False)

    def neutral(self) -> None:
        """The caller left, or nothing was learned."""
        self._end(None)


class Circuit:
    """Circuit breaker (Nygard, Release It!) of one (upstream, model, path).

    Closed: opens after `breaker_failures` in a row, or under 50 % success over the last 20.
    Open: rejects; after the cooldown, or when a health check answers that had failed since the
    circuit opened, one trial at a time goes through (half-open). Half-open: closes when
    `breaker_success` of the last 5 trials since it opened succeeded; a failed trial doubles the
    cooldown, once. An outcome of an attempt that began before the last change of state is void.
    """

    WINDOW, TRIALS = 20, 5

    def __init__(
        self, key: tuple[str, str, str], settings: Settings, clock: Clock = time.monotonic,
        on_move: Callable[[Circuit], None] = lambda circuit: None,
    ) -> None:  # fmt: skip
        self.key, self.state = key, State.CLOSED
        self.in_row = self.epoch = 0
        self.opened = asyncio.Event()  # wakes calls in their backoff
        self.is_sick = False  # a health check has failed since it opened
        self.attempt_s: deque[float] = deque(maxlen=100)  # for timeout = auto
        self._settings, self._clock, self._on_move = settings, clock, on_move
        self._recent: deque[bool] = deque(maxlen=self.WINDOW)
        self._trials: deque[bool] = deque(maxlen=self.TRIALS)
        self.trial: Attempt | None = None  # holds others up
        self._trial_at = 0.0

    def shown(self) -> dict[str, Any]:
        upstream, model, path = map(printable, self.key)
        return {"upstream": upstream, "model": model, "path": path, "state": self.state.value}

    @property
    def what(self) -> str:
        _, model, path = self.key
        return printable(path) + (f" for {printable(model)}" if model else "")

    @property
    def retry_in_s(self) -> float:
        return 0.0 if self.state is State.CLOSED else max(0.0, self._trial_at - self._clock())

    def error(self) -> ProxyError:
        wait_s = self.retry_in_s
        why = f"{self.key[0]} keeps failing on {self.what}"
        why += f"; next trial in {math.ceil(wait_s) or 1} s"
        return ProxyError("circuit_open", why, retry_after_s=wait_s)

    def check(self) -> None:
        """Raise circuit_open if an attempt would be refused right now."""
        if self.state is not State.CLOSED and (self.retry_in_s > 0 or self.trial is not None):
            raise self.error()

    def admit(self) -> Attempt:
        """Register an attempt. Raises circuit_open; none was registered."""
        self.check()
        attempt = Attempt(self, self.epoch, self.state is not State.CLOSED)
        if attempt.is_trial:
            self.state, self.trial = State.HALF_OPEN, attempt
        return attempt

    def health(self, is_alive: bool) -> None:
        """Take a free health check's result. One that never failed proves nothing."""
        if self.state is not State.CLOSED and is_alive and self.is_sick:
            self._trial_at = self._clock()
        self.is_sick = self.state is not State.CLOSED and not is_alive

    def close(self) -> None:
        """The operator knows that it is well again."""
        self._change(State.CLOSED)

    def timeout_s(self) -> float:
        """Twice the learned p99, in 1..30 s; more only where one of the last 100 needed more."""
        if not self.attempt_s:
            return 30.0
        return max(min(max(2 * percentile(self.attempt_s, 0.99), 1.0), 30.0), *self.attempt_s)

    def record(self, attempt: Attempt, ok: bool | None) -> None:
        attempt.give_place()
        if attempt.epoch != self.epoch or ok is None:
            return
        cooldown_s = self._settings.breaker_cooldown
        if attempt.is_trial:
            self._trials.append(ok)
            if not ok:
                self._change(State.OPEN, 2 * cooldown_s)
            elif sum(self._trials) >= self._settings.breaker_success * len(self._trials):
                self._change(State.CLOSED)
            return
        self.in_row = 0 if ok else self.in_row + 1
        self._recent.append(ok)
        half = len(self._recent) == self.WINDOW and sum(self._recent) < self.WINDOW / 2
        if not ok and (half or self.in_row >= self._settings.breaker_failures):
            self._change(State.OPEN, cooldown_s)

    def _change(self, state: State, cooldown_s: float = 0.0) -> None:
        self.state, self.in_row, self.is_sick, self.trial = state, 0, False, None
        self.epoch += 1
        self._trial_at = self._clock() + cooldown_s
        if state is State.OPEN:
            self.opened.set()
            self.opened = asyncio.Event()
        else:
            self._recent.clear()
            self._trials.clear()
        self._on_move(self)


class Adaptive:
    """The number of calls at once with which an upstream gets most done, found while it runs.

    Strategy: incremental steps (Heiss, Wagner, Adaptive load control in transaction processing
    systems, VLDB 1991), with a memory of the levels that were tried. Only while calls wait does
    the level decide anything; then the work done in a second is measured from one answer to
    another. Upwards a step has to gain GAIN, or it is taken back; downwards it has to lose that
    much. So of levels that are as good the lowest wins, whose answers come soonest. The level
    grows by a half until that gains nothing, then is tried one up and one down in turn, ever more
    seldom while neither helps. A 429 takes a quarter off (AIMD).
    """

    GAIN, MOST = 0.04, 128

    def __init__(self, level: int = 4, clock: Clock = time.monotonic) -> None:
        self.level = self._best = level
        self._clock = clock
        self._rates: dict[int, float] = {}
        self._is_climbing, self._direction = True, 1
        self._rest = self._patience = 1  # windows until the next try, and after it
        self._skipped = level  # answers of calls that began at another level
        self._calm = 0  # answers until a 429 is another overload than the last
        self._answers, self._work, self._began_at = 0, 0.0, 0.0

    def done(self, work: float, is_full: bool) -> int:
        """A call has ended. `is_full`: the level held others back. Returns the level from now."""
        self._calm -= 1
        if not work:  # it came to nothing: that says nothing of the level
            return self.level
        if not is_full:
            self._answers = 0
        elif self._skipped > 0:
            self._skipped -= 1
        else:
            now = self._clock()
            if not self._answers:
                self._began_at, self._work = now, 0.0
            else:
                self._work += max(work, 1.0)
            self._answers += 1
            if self._answers > max(12, 4 * self.level) and now > self._began_at:
                self._decide(self._work / (now - self._began_at))
        return self.level

    def overloaded(self) -> int:
        """The upstream says that it is too much, once for all calls that were with it."""
        if self._calm <= 0:
            self._calm, self._is_climbing = self.level, False
            self._rates.clear()
            self._best = max(1, self.level * 3 // 4)
            self._go(self._best)
        return self.level

    def _go(self, level: int) -> None:
        self._skipped = max(level, self.level)
        self.level, self._answers = level, 0

    def _decide(self, rate: float) -> None:
        level, best = self.level, self._best
        self._rates[level] = (self._rates.get(level, rate) + rate) / 2
        self._answers = 0
        if level != best:
            gain = self.GAIN if level > best else -self.GAIN
            if self._rates[level] <= self._rates[best] * (1 + gain):
                del self._rates[level]  # tried afresh next time
                self._is_climbing, self._direction = False, -self._direction
                self._rest = self._patience = min(2 * self._patience, 8)
                self._go(best)
                return
            self._best, self._patience = level, 1
        # At the best level: measure it once more, or try another.
        self._rest -= 1
        if self._is_climbing or self._rest <= 0:
            step = level // 2 if self._is_climbing else self._direction
            wanted = min(max(1, level + (step or 1)), self.MOST)
            if wanted != level:
                self._go(wanted)
            else:
                self._is_climbing, self._direction = False, -self._direction


@dataclass(slots=True)
class Pause:
    """Why a key rests for a model: a circuit of its own.

    When its time is over, one call tries the key out; its answer ends the pause or begins the next.
    """

    reason: str
    since: float
    until: float = 0.0
    strikes: int = 0
    trial: Permit | None = None


class Key:
    """A provider key, or the callers' own where there is no pool of them."""

    def __init__(
        self, name: str, secret: str = "", header: str | None = None, *,
        rpm: Bucket | None = None, tpm: Bucket | None = None, clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self.name, self.secret, self.header, self.rpm, self.tpm = name, secret, header, rpm, tpm
        self.running = self.calls = 0
        self.pauses: dict[str | None, Pause] = {}  # by model; None: for all models
        self._clock = clock

    def shown(self) -> dict[str, Any]:
        now, state = self._clock(), "ok"
        pauses = [(p.until - now, p.reason, m) for m, p in self.pauses.items() if p.until > now]
        if pauses:
            wait_s, reason, model = max(pauses, key=lambda pause: pause[0])
            state = f"{reason}{f' for {printable(model)}' if model else ''}, {wait_s:.0f} s"
        return {
            "name": self.name, "state": state, "running": self.running, "calls": self.calls,
            "rpm": shown_bucket(self.rpm), "tpm": shown_bucket(self.tpm),
        }  # fmt: skip

    @property
    def load(self) -> tuple[int, float, int]:
        shares = [b.used / b.limit for b in (self.rpm, self.tpm) if b is not None]
        return self.running, max(shares, default=0.0), self.calls

    def active(self, model: str) -> list[Pause]:
        return [p for p in map(self.pauses.get, (None, model)) if p] if self.pauses else []

    def free_at(self, model: str) -> float:
        """0: now. inf: when the call that tries it out has been answered."""
        now, pauses = self._clock(), self.active(model)
        if any(pause.until <= now and pause.trial is not None for pause in pauses):
            return math.inf
        return max((pause.until for pause in pauses if pause.until > now), default=0.0)

    def fits(self, tokens: int) -> bool:
        return (self.rpm is None or self.rpm.fits(1)) and (
            self.tpm is None or self.tpm.fits(tokens)
        )


@dataclass(slots=True)
class Timing:
    """Where a call's time went."""

    queue_s: float = 0.0  # for a slot
    limit_s: float = 0.0  # for rpm, tpm, a budget, or an upstream that held us back
    retry_s: float = 0.0
    upstream_s: float = 0.0  # to the first byte
    position: int = 0  # in the queue, when it came
    expected_s: float = 0.0  # its wait, as forecast then

    @property
    def waited_s(self) -> float:
        return self.queue_s + self.limit_s


SHARES = {"high": 8.0, "normal": 1.0, "low": 1 / 8}


@dataclass(slots=True, eq=False)
class Demand:
    """What a call wants of a gate; `weight` in thousands of prompt tokens, the rest in tokens."""

    weight: int = 1
    prompt_tokens: int = 0
    output_tokens: int = 0
    client: str = ""
    priority: str = "normal"
    model: str = ""
    size_bytes: int = 0
    circuit: Circuit | None = None
    places: int = 1  # of the gate's slots: llama.cpp gives each of several answers one
    usual_s: float = math.inf  # what a call of its model usually takes
    lane: str = ""  # see Lanes
    refused_by: Key | None = None  # a 403 of a second key shows that it was for the call
    cuts: int = 0  # how often it had to yield its slot
    place: tuple[float, int] = (math.inf, 0)  # in the queue, as when it first came
    tokens: int = field(init=False)
    flow: tuple[str, str] = field(init=False)
    charge: float = field(init=False)  # what it costs its flow

    def __post_init__(self) -> None:
        self.tokens = self.prompt_tokens + self.output_tokens
        self.flow = self.client, self.priority
        self.charge = max(1, self.tokens) / SHARES[self.priority]


class Keys:
    """What an upstream's calls go with: a pool of keys, or each caller's own.

    The latter is known here by the client's name.
    """

    def __init__(self, pool: Iterable[Key], clock: Clock) -> None:
        self.pool, self._clock = list(pool), clock
        self.own: LruMap[Key] = LruMap(
            lambda client: Key("caller's own", clock=clock),
            lambda key: not key.running and all(p.until < clock() for p in key.pauses.values()),
        )

    def pick(self, demand: Demand) -> tuple[Key | None, bool]:
        """The key that a call would go with, and whether none may be used for its model."""
        keys = self.pool or [own := self.own[demand.client]]
        if not self.pool and not own.pauses:
            return own, False
        free = [key for key in keys if not key.free_at(demand.model)]
        fitting = [key for key in free if key.fits(demand.tokens)]
        small = {k for k in fitting if k.tpm is not None and demand.tokens > k.tpm.limit}  # last
        return min(fitting, key=lambda key: (key in small, key.load), default=None), not free

    def free_at(self, demand: Demand) -> float:
        """When the upstream takes calls like this again; 0: it does, or it has to be tried."""
        keys = self.pool or [self.own[demand.client]]
        free_at = min(key.free_at(demand.model) for key in keys)
        return 0.0 if free_at == math.inf else free_at

    def next_at(self, now: float, buckets: Iterable[Bucket | None]) -> float | None:
        """When time next brings something back, to a bucket or a key."""
        keys = self.pool or self.own.values()
        buckets = [*buckets, *(bucket for key in keys for bucket in (key.rpm, key.tpm))]
        times = [p.until for key in keys for p in key.pauses.values()]
        times += [b.spent[0][1] for b in buckets if b is not None and b.used and b.spent]
        return min((at for at in times if now < at < math.inf), default=None)

    def most_tokens(self) -> float:
        """The largest call that fits into a key's tpm."""
        limits = [key.tpm.limit if key.tpm is not None else math.inf for key in self.pool]
        return max(limits, default=math.inf)

    def least_loaded(self) -> Key:
        """One of the pool, for a call that needs no permit."""
        keys = [k for k in self.pool if not k.free_at("")] or self.pool
        return min(keys, key=lambda key: key.load)

    def refusal(self, model: str) -> ProxyError | None:
        """The error where every key of the pool has been refused by the upstream."""
        now = self._clock()
        pauses = ([p for p in key.active(model) if p.until > now] for key in self.pool)
        said = [[p.reason for p in found if p.reason in ("401", "403")] for found in pauses]
        if not said or [] in said:
            return None
        again_s = min(key.free_at(model) for key in self.pool) - now
        why = f"no key is left: the upstream answered {said[0][0]} to [[upstream_key]] "
        why += self.pool[0].name + (f" and {len(said) - 1} more" if len(said) > 1 else "")
        return ProxyError("upstream_key_refused", why, retry_after_s=again_s)


class Permit:
    """What the gate gives an attempt: slots, weight, a key, a part of rpm and tpm."""

    def __init__(self, gate: Gate, demand: Demand, key: Key) -> None:
        self._gate, self.demand, self.key, self.granted_at = gate, demand, key, gate.clock()
        self.places = gate.lanes.places(demand, gate.slots)
        self.weight = min(demand.weight, gate.capacity)
        self.work = 0.0  # what it came to, for the gate that looks for its best level
        self._is_settled = self.was_sent = False
        self.cut: Callable[[], bool] | None = None  # ends an attempt of which nobody has a byte
        tokens = demand.prompt_tokens, demand.output_tokens
        self.reservation = Reservation((gate.rpm, key.rpm), (gate.tpm, key.tpm), *tokens)
        for pause in key.active(demand.model):
            pause.trial = self
        key.running += 1
        key.calls += 1
        gate.taken += self.places
        gate.lanes.taken[demand.lane] += self.places
        gate.weight += self.weight
        gate.permits.add(self)

    def begin(self) -> None:
        """The answer begins, so the key is welcome: if it was tried out, it is as before."""
        self.cut = None
        self.reservation.begin()
        if (key := self.key).pauses:
            key.pauses = {m: pause for m, pause in key.pauses.items() if pause.trial is not self}
            self._gate.dispatch()

    def strike(self, reason: str, wait_s: float | None) -> None:
        """The upstream refused a key for a model: nobody uses the two until `wait_s` from now.

        Without `wait_s` the pause doubles with every strike. A strike also takes one chance of
        each call that waits for this key and model to be welcome again: the one that tried it out
        has asked for all of them.
        """
        gate, key, demand, now = self._gate, self.key, self.demand, self._gate.clock()
        if gate.adaptive is not None and reason == "429":
            gate.slots = gate.adaptive.overloaded()
        pause = key.pauses.setdefault(demand.model if reason != "401" else None, Pause(reason, now))
        if self.granted_at >= pause.since or not pause.strikes:
            pause.strikes, pause.since = pause.strikes + 1, now
        if wait_s is None:
            wait_s = BACKOFF_S * 2 ** min(pause.strikes - 1, 2) * random.uniform(1, 2)
        pause.reason, pause.trial = reason, None
        pause.until = max(pause.until, now + wait_s + random.uniform(0, BACKOFF_S))
        gate.struck(self, reason)

    def refuse(self, status: str) -> bool:
        """The upstream answered 401 or 403; returns whether it is the key that it refuses.

        A 403 may be for the call: the only key stays, and so do two that get one for the same call.
        """
        first = self.demand.refused_by
        if status == "403" and (first is not None or len(self._gate.keys.pool) < 2):
            for key in (first, self.key) if first is not None else ():
                key.pauses.pop(self.demand.model, None)
            return False
        self.demand.refused_by = self.key
        self.strike(status, REFUSED_KEY_S)
        return True

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """Charge the flow what its call really used."""
        if not self._is_settled:
            self._is_settled, demand, gate = True, self.demand, self._gate
            self.work = prompt_tokens / 10 + output_tokens  # reading costs a tenth of writing
            tokens = prompt_tokens + output_tokens
            tokens = min(tokens, 20 * max(500, demand.tokens))  # whatever an upstream reports
            gate.queue.refund(demand, (demand.tokens - tokens) / SHARES[demand.priority])
            ratio = tokens / max(1, demand.tokens)
            gate.forecast.used_share += 0.1 * (ratio - gate.forecast.used_share)
            self.reservation.settle(prompt_tokens, output_tokens)

    def leave(self) -> None:
        """Give all back, once; where nothing was settled, the call has used no tokens."""
        gate = self._gate
        if not self._is_settled:
            gate.queue.refund(self.demand, self.demand.charge)
        self.reservation.settle(requests=int(self.was_sent))
        for pause in self.key.active(self.demand.model):
            pause.trial = None if pause.trial is self else pause.trial
        self.key.running -= 1
        gate.left(self)


@dataclass(slots=True, eq=False)
class _Waiter:
    future: asyncio.Future[Permit]
    demand: Demand
    entered_at: float
    limited_s: float  # the gate's total when it came
    chances: int
    place: tuple[float, int] = (0.0, 0)  # start tag, and the order in which they came
    timer: asyncio.TimerHandle | None = None
    passed: int = 0
    has_claim: bool = False  # a running call yields its slot to it


class FairQueue:
    """Calls that wait, in their order.

    Strategy: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). A flow is one client at
    one priority. A call's start tag is the later of the virtual time and its flow's finish tag;
    the flow's finish tag then grows by tokens / share, corrected when the real usage is known.
    The lowest start tag goes next, so a batch of 500 delays another client's single call by about
    one call, and a low share still gets its part.
    """

    def __init__(self) -> None:
        self.waiters: list[_Waiter] = []  # by place
        self.size_bytes = self.tokens = 0
        self._order, self._virtual = 0, 0.0
        self._finish: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self.waiters)

    def charge(self, demand: Demand) -> tuple[float, int]:
        """Charge a call to its flow; returns its place: start tag, and the order of coming."""
        if len(self._finish) > 1024:  # a flow behind the virtual time has no debt to remember
            self._finish = {f: tag for f, tag in self._finish.items() if tag > self._virtual}
        start_tag = max(self._virtual, self._finish.get(demand.flow, 0.0))
        self._finish[demand.flow] = start_tag + demand.charge
        self._order += 1
        demand.place = min(demand.place, (start_tag, self._order))  # who had to yield keeps it
        return demand.place

    def refund(self, demand: Demand, charge: float) -> None:
        """Its flow has not been served so much of what it was charged for."""
        if demand.flow in self._finish:
            self._finish[demand.flow] -= charge

    def goes(self, start_tag: float) -> None:
        """A call with this tag is served now."""
        self._virtual = max(self._virtual, start_tag)

    def find_place(self, waiter: _Waiter) -> int:
        """How many are before it. One that comes back from its backoff is before all new ones."""
        is_back = waiter.chances > 0
        waiter.place = (-math.inf, self._order) if is_back else self.charge(waiter.demand)
        return bisect.bisect(self.waiters, waiter.place, key=lambda w: w.place)

    def to_front(self, waiter: _Waiter) -> None:
        self.waiters.remove(waiter)
        waiter.place = -math.inf, waiter.place[1]
        bisect.insort(self.waiters, waiter, key=lambda w: w.place)

    def lowest(self, priority: str) -> _Waiter | None:
        """The last call of the lowest priority under this one that has never run."""
        found = [w for w in self.waiters if SHARES[w.demand.priority] < SHARES[priority]
                 and not w.chances and not w.demand.cuts]  # fmt: skip
        return min(reversed(found), key=lambda w: SHARES[w.demand.priority], default=None)

    def insert(self, place: int, waiter: _Waiter) -> None:
        self.waiters.insert(place, waiter)
        self.size_bytes += waiter.demand.size_bytes
        self.tokens += waiter.demand.tokens

    def remove(self, waiter: _Waiter, is_refunded: bool = False) -> None:
        self.waiters.remove(waiter)
        self.size_bytes -= waiter.demand.size_bytes
        self.tokens -= waiter.demand.tokens
        if is_refunded and not waiter.chances:
            self.refund(waiter.demand, waiter.demand.charge)


class Forecast:
    """When the calls that wait at a gate will go.

    It supposes that a call holds its permit as long as calls did of late, and uses as large a part
    of the tokens that it reserves.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.service_s = 1.0  # running mean of how long a permit is held
        self.used_share = 1.0  # and of what is used of the tokens that are reserved
        self._promised: deque[tuple[float, int]] = deque(maxlen=1000)  # see `promise`

    def at(
        self, demand: Demand, calls: int, promised: Iterable[tuple[float, int]] = ()
    ) -> float:
        """When a call goes with so many calls before it, and those that were promised a time."""
        gate, service_s = self._gate, self.service_s
        now, pool, queue = gate.clock(), gate.keys.pool, gate.queue
        tokens = queue.tokens * calls / max(1, len(queue)) + demand.tokens
        for _, more in promised:
            calls, tokens = calls + 1, tokens + more
        permits: Collection[Permit] = gate.permits
        slots, ahead, lane = gate.slots, calls, demand.lane
        if lane in gate.lanes.slots:
            permits = [permit for permit in permits if permit.demand.lane == lane]
            slots = gate.lanes.slots[lane]
            ahead -= sum(w.demand.lane != lane for w in queue.waiters[:calls])
        slots = max(1, min(slots, gate.capacity // max(1, demand.weight)))
        begun = sorted(max(p.granted_at, now - 0.9 * service_s) for p in permits)
        ends = [now] * (slots - len(begun)) + [at + service_s for at in begun[-slots:]]
        at = max(ends[ahead % slots] + ahead // slots * service_s, gate.keys.free_at(demand))
        groups = [gate.rpm], [key.rpm for key in pool], [gate.tpm], [key.tpm for key in pool]
        amounts = calls + 1, calls + 1, tokens * self.used_share, tokens * self.used_share
        for buckets, amount in zip(groups, amounts, strict=True):
            limits = [bucket for bucket in buckets if bucket is not None]
            for bucket in limits if len(limits) == len(buckets) else ():
                at = max(at, bucket.forecast_at(amount / len(limits), service_s))
        return at

    def promise(self, demand: Demand, calls: int) -> float:
        """Seconds until a call that is rejected now would have gone.

        The rejected keep their place until the time that they were told has come: else all who are
        rejected together would be told the same.
        """
        now = self._gate.clock()
        while self._promised and self._promised[0][0] <= now:
            self._promised.popleft()
        go_at = self.at(demand, calls, self._promised)
        self._promised.append((go_at, demand.tokens))
        return max(0.0, go_at - now)

    def flows(self) -> list[tuple[str, str, int, float]]:
        """Client, priority, number of calls and seconds until the last of them goes."""
        waiters, now = self._gate.queue.waiters, self._gate.clock()
        last = {waiter.demand.flow: n for n, waiter in enumerate(waiters)}
        counts = Counter(waiter.demand.flow for waiter in waiters)
        return [
            (*flow, counts[flow], self.at(waiters[place].demand, place) - now)
            for flow, place in last.items()
        ]


def make_room(gate: Gate) -> None:
    """Have calls of low priority yield to others that wait only for a slot or for weight.

    The youngest goes first, so that little is done twice; none that has yielded twice, or has run
    for 80 % of what calls of its model usually take.
    """
    now = gate.clock()
    running = [
        permit for permit in gate.permits if permit.cut is not None and permit.demand.cuts < 2
        and now - permit.granted_at < 0.8 * permit.demand.usual_s
    ]  # fmt: skip
    running.sort(key=lambda permit: permit.granted_at)
    for waiter in list(gate.queue.waiters) if running else ():
        demand = waiter.demand
        is_batch = demand.priority == "low" or waiter.has_claim
        if is_batch or gate.has_room(demand) or gate.keys.pick(demand)[1]:
            continue
        lane = demand.lane if gate.lanes.slots else None  # in another one a slot is of no use
        for permit in [p for p in reversed(running) if lane in (None, p.demand.lane)]:
            running.remove(permit)
            waiter.has_claim = permit.cut is not None and permit.cut()
            if waiter.has_claim:
                permit.cut = None
                gate.queue.to_front(waiter)
                break


class Lanes:
    """The slots of each model, where every model has its own: of a llama.cpp in router mode."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}  # no model: there are no lanes
        self.taken = Counter[str]()

    def places(self, demand: Demand, most: int) -> int:
        """How many slots it takes: never more than there are."""
        return max(1, min(demand.places, most, self.slots.get(demand.lane, most)))

    def fits(self, demand: Demand) -> bool:
        limit = self.slots.get(demand.lane)
        return limit is None or self.taken[demand.lane] + self.places(demand, limit) <= limit

    def open(self, waiters: list[_Waiter]) -> Iterable[_Waiter]:
        """Those whose lane has room; in one that has none for its first, nobody passes."""
        return self._open(waiters) if self.slots else waiters

    def _open(self, waiters: list[_Waiter]) -> Iterator[_Waiter]:
        full = set[str]()
        for waiter in waiters:
            if (lane := waiter.demand.lane) not in full and self.fits(waiter.demand):
                yield waiter
            else:
                full.add(lane)


class Gate:
    """Weighted semaphore, token buckets and keys behind one bounded, fair queue.

    A call takes one of `slots` (or as many as its `places`) and `weight` of `capacity`; one heavier
    than the whole is clamped to it and runs alone. It takes its part of `rpm` and `tpm`, and the
    least loaded key. A head that needs more than is free may be passed by lighter calls MAX_PASSED
    times; one whose key and model the upstream holds back is passed freely, and so is one whose
    lane is full.
    """

    def __init__(
        self, slots: int, capacity: int, clock: Clock = time.monotonic, *,
        rpm: Bucket | None = None, tpm: Bucket | None = None, pool: Iterable[Key] = (),
    ) -> None:  # fmt: skip
        self.slots, self.capacity, self.rpm, self.tpm = slots, capacity, rpm, tpm
        self.keys, self.queue, self.forecast = Keys(pool, clock), FairQueue(), Forecast(self)
        self.lanes = Lanes()
        self.taken = self.weight = 0
        self.permits: set[Permit] = set()
        self.is_paused = False  # by the operator: nobody goes
        self.adaptive: Adaptive | None = None
        self.clock = clock
        self._limited_at: float | None = None  # since when buckets or pauses hold the queue up
        self._limited_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        return len(self.permits)

    @property
    def queued(self) -> int:
        return len(self.queue)

    def resize(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.dispatch()

    def limit(self, rpm: int | None, tpm: int | None) -> None:
        """Change the buckets; what they have counted stays."""
        self.rpm = rebucket(self.rpm, rpm, self.clock)
        self.tpm = rebucket(self.tpm, tpm, self.clock)
        self.dispatch()

    def pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.dispatch()

    async def enter(
        self, demand: Demand, timing: Timing | None = None, *, queue_size: int = 1000,
        timeout_s: float = 60.0, chances: int = 0,
    ) -> Permit:  # fmt: skip
        """Wait for a turn; the wait is added to `timing`.

        `chances`: of a call that comes back from its backoff, how many further 429 for its key and
        model it may wait out. It goes before those that never ran.

        Raises:
            ProxyError: queue_full, queue_timeout, upstream_key_refused, or what `reject` passes;
                nothing is held.
            CancelledError: the place in the queue, or the permit just granted, is given back.
        """
        queue = self.queue
        if not queue.waiters and not self.is_paused and self._fits(demand):
            if (key := self.keys.pick(demand)[0]) is not None:
                queue.goes(queue.charge(demand)[0])
                return Permit(self, demand, key)
        timing = timing or Timing()
        waiter = self._enqueue(demand, timing, queue_size, timeout_s, chances)
        self._time(waiter, timeout_s)
        self.dispatch()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter in queue.waiters:
                queue.remove(waiter, is_refunded=True)
                self.dispatch()  # it may have been the head that held lighter ones back
            elif waiter.future.done() and not waiter.future.cancelled():
                if waiter.future.exception() is None:
                    waiter.future.result().leave()
            raise
        finally:
            if waiter.timer is not None:
                waiter.timer.cancel()
            limited_s = self._limited_total() - waiter.limited_s
            timing.limit_s += limited_s
            timing.queue_s += self.clock() - waiter.entered_at - limited_s

    def _time(self, waiter: _Waiter, timeout_s: float) -> None:
        """Let a call wait so long, from when it came."""
        timeout_s += WINDOW_S * self._is_giant(waiter.demand)
        left_s = timeout_s - (self.clock() - waiter.entered_at)
        loop = asyncio.get_running_loop()
        waiter.timer = loop.call_later(left_s, self._expire, waiter, timeout_s)

    def retime(self, timeout_s: float) -> None:
        """queue-timeout has changed, also for those who wait."""
        for waiter in self.queue.waiters:
            if waiter.timer is not None:
                waiter.timer.cancel()
            self._time(waiter, timeout_s)

    def left(self, permit: Permit) -> None:
        """A permit is given back."""
        self.permits.discard(permit)
        if self.adaptive is not None:  # before its place is free: did the level hold others back?
            waiters = self.queue.waiters
            is_full = bool(waiters) and not self._fits_slots(waiters[0].demand)
            self.slots = self.adaptive.done(permit.work, is_full)
        self.taken -= permit.places
        self.lanes.taken[permit.demand.lane] -= permit.places
        self.weight -= permit.weight
        forecast = self.forecast
        forecast.service_s += 0.1 * (self.clock() - permit.granted_at - forecast.service_s)
        if self.queue.waiters:
            self.dispatch()

    def struck(self, permit: Permit, reason: str) -> None:
        """Fail those who wait for what has just been refused, and can do so no longer."""
        now, model = self.clock(), permit.demand.model
        waiters = self.queue.waiters
        for waiter in [w for w in waiters if w.demand.model == model or reason == "401"]:
            if (refusal := self.keys.refusal(waiter.demand.model)) is not None:
                self._fail(waiter, refusal)
            elif reason == "429" and waiter.chances and waiter.entered_at <= permit.granted_at:
                waiter.chances -= self.keys.free_at(waiter.demand) > now
                if not waiter.chances:
                    why = "the upstream is over its limit"
                    self._fail(waiter, ProxyError("queue_timeout", why))

    def reject(self, circuit: Circuit, error: Callable[[], ProxyError]) -> None:
        """Fail every waiting call of `circuit`."""
        for waiter in [w for w in self.queue.waiters if w.demand.circuit is circuit]:
            self._fail(waiter, error())
        self.dispatch()

    def dispatch(self) -> None:
        """Let go who may: whenever anything has changed, or time has brought something back."""
        now = self.clock()  # before the looks: what is held back by then shall not be forgotten
        while (found := self._next()) is not None:
            waiter, key = found
            self.queue.remove(waiter)
            if not waiter.future.done():  # else cancelled, its task has not run yet
                self.queue.goes(waiter.place[0])
                waiter.future.set_result(Permit(self, waiter.demand, key))
        if self.queue.waiters and not self.is_paused:
            make_room(self)
        if self._limited_at is None:
            return
        # Buckets or pauses hold the queue up: time alone lets it go on.
        if self._timer is not None:
            self._timer.cancel()
        if (at := self.keys.next_at(now, [self.rpm, self.tpm])) is not None:
            self._timer = asyncio.get_running_loop().call_later(at - now + 0.001, self.dispatch)

    def _fits_slots(self, demand: Demand) -> bool:
        places = self.lanes.places(demand, self.slots)
        return self.taken + places <= self.slots and self.lanes.fits(demand)

    def has_room(self, demand: Demand) -> bool:
        weight = min(demand.weight, self.capacity)
        return self._fits_slots(demand) and self.weight + weight <= self.capacity

    def _fits(self, demand: Demand) -> bool:
        return (
            self.has_room(demand)
            and (self.rpm is None or self.rpm.fits(1))
            and (self.tpm is None or self.tpm.fits(demand.tokens))
        )

    def _is_giant(self, demand: Demand) -> bool:
        """Larger than a whole bucket: it waits for an untouched one, so nobody may pass it."""
        limit = self.tpm.limit if self.tpm is not None else math.inf
        return demand.tokens > min(limit, self.keys.most_tokens())

    def _enqueue(
        self, demand: Demand, timing: Timing, queue_size: int, timeout_s: float, chances: int
    ) -> _Waiter:
        now, queue = self.clock(), self.queue
        if (refusal := self.keys.refusal(demand.model)) is not None:
            raise refusal
        if (wait_s := self.keys.free_at(demand) - now) > timeout_s:
            why = f"the upstream asks to wait {wait_s:.0f} s, longer than --queue-timeout"
            raise ProxyError("queue_timeout", why, retry_after_s=wait_s)
        full = len(queue) >= queue_size + self.slots * bool(chances) and not demand.cuts
        if full and self._fits(demand) and self.keys.pick(demand)[0] is not None:
            # Where only such wait as the upstream holds back, this one goes at once.
            full = not all(self.keys.pick(w.demand)[1] for w in queue.waiters)
        if full and (lowest := queue.lowest(demand.priority)) is not None:
            why = "the queue is full, and a call of higher priority has come"
            wait_s = self.forecast.promise(lowest.demand, len(queue))
            self._fail(lowest, ProxyError("queue_full", why, retry_after_s=wait_s))
            full = False
        if full or queue.size_bytes + demand.size_bytes > QUEUED_BODIES_BYTES:
            what = f"{len(queue)} calls" if full else "the bodies that may wait"
            why = f"the queue is full ({what}); raise --queue-size or send fewer calls at once"
            wait_s = self.forecast.promise(demand, len(queue))
            raise ProxyError("queue_full", why, retry_after_s=wait_s)
        future: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(future, demand, now, self._limited_total(), chances)
        place = queue.find_place(waiter)
        timing.position = place + 1
        timing.expected_s = max(0.0, self.forecast.at(demand, place) - now)
        queue.insert(place, waiter)
        return waiter

    def _next(self) -> tuple[_Waiter, Key] | None:
        """The first waiting call that may go, and the key it goes with."""
        head, is_limited, queue = None, False, self.queue.waiters
        if self.tpm is not None or any(key.tpm is not None for key in self.keys.pool):
            # A giant that has waited for long, wherever it stands: the others let it go first.
            since = self.clock() - WINDOW_S / 2
            giants = (w for w in queue if w.entered_at < since and self._is_giant(w.demand))
            queue = [*itertools.islice(giants, 1)] or queue
        is_open = self.taken < self.slots and not self.is_paused
        for waiter in self.lanes.open(queue) if is_open else ():
            key, is_held_back = self.keys.pick(waiter.demand)
            if is_held_back:
                is_limited = True
                continue
            head = head or waiter
            if key is not None and self._fits(waiter.demand):
                head.passed += waiter is not head
                return waiter, key
            is_limited = is_limited or self.has_room(waiter.demand)
            if head.passed >= MAX_PASSED or self.weight >= self.capacity:
                break
            if self._is_giant(head.demand) or (self.rpm is not None and not self.rpm.fits(1)):
                break
        self._limited_s = self._limited_total()
        self._limited_at = self.clock() if is_limited else None
        return None

    def _limited_total(self) -> float:
        since = self._limited_at
        return self._limited_s + (0.0 if since is None else self.clock() - since)

    def _fail(self, waiter: _Waiter, error: ProxyError) -> None:
        self.queue.remove(waiter, is_refunded=True)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def _expire(self, waiter: _Waiter, timeout_s: float) -> None:
        if waiter not in self.queue.waiters:
            return
        place = self.queue.waiters.index(waiter)
        why = f"waited {timeout_s:.0f} s for a turn (--queue-timeout); {place} are ahead"
        wait_s = self.forecast.promise(waiter.demand, place)
        self._fail(waiter, ProxyError("queue_timeout", why, retry_after_s=wait_s))
        self.dispatch()

@dataclass(slots=True)
class TextSize:
    """What a prompt's text measures, in the features that its tokens are estimated from."""

    ascii_units: float = 0.0  # letters, spaces, and all else by its usual share of a token
    wide: int = 0  # characters that are not ASCII
    strings: int = 0  # roles and messages cost tokens of their own
    chars: int = 0
    tokens: int = 0  # given as numbers
    blobs: int = 0  # images and the like, at a price of their own
    SAMPLE_CHARS: ClassVar = 16_384
    LETTERS: ClassVar = string.ascii_letters.encode()

    @classmethod
    def of(cls, texts: list[str], blobs: int = 0, tokens: int = 0) -> TextSize:
        """Measure texts; of a long one every so many pieces, since a sample tells as well."""
        text = "".join(texts)
        if (chars := len(text)) > 2 * cls.SAMPLE_CHARS:
            step = chars * 1024 // cls.SAMPLE_CHARS
            sample = cls.of(["".join(text[at : at + 1024] for at in range(0, chars, step))])
            scale = chars / sample.chars
            units, wide = sample.ascii_units * scale, round(sample.wide * scale)
            return cls(units, wide, len(texts), chars, tokens, blobs)
        data = text.encode("ascii", "ignore")
        rest = data.translate(None, cls.LETTERS)
        spaces, digits = rest.count(b" "), len(rest) - len(rest.translate(None, b"0123456789"))
        marks = len(rest) - spaces + digits  # a digit is mostly a token of its own: counted twice
        units = 0.215 * (len(data) - len(rest)) + 0.08 * spaces + 0.62 * marks
        return cls(units, len(text) - len(data), len(texts), len(text), tokens, blobs)


class Learned:
    """What one model's past calls teach: tokens of a text, output length, speed.

    Strategy of the first: four weights (per ASCII unit, other character, string, call), kept by
    a Kalman filter with a diagonal covariance on the relative error. One ratio of characters to
    tokens cannot serve Chinese, English and code at once; this is 5 to 8 % off after 20 calls,
    characters / 3 about 40 %. A report that is off by more than 4 times is not believed, unless
    five before it were off as well.
    """

    PRIOR = (1.0, 1.0, 2.0, 4.0)
    VARIANCE = (2.0, 14.0, 75.0, 1e5)  # (deviation believed possible / noise of 0.14) squared
    LOWEST, HIGHEST = (0.2, 0.2, 0.2, 0.0), (4.0, 4.0, 1e3, 1e4)

    def __init__(self) -> None:
        self.token_s = TOKEN_S_UNLEARNED
        self._weights, self._variance = list(self.PRIOR), list(self.VARIANCE)
        self.calls = self._odd = 0  # reports, and in a row those that were not believed
        self._is_taught = False  # until then: characters / 3
        self._error = 0.5  # running mean of how far an estimate is off, as a share
        self._outputs: deque[int] = deque(maxlen=100)
        self._output_p95 = OUTPUT_TOKENS_UNLEARNED
        self.usual_s = math.inf  # what half of its calls take at least

    def prompt_tokens(self, size: TextSize) -> int:
        text = size.chars / 3
        if self._is_taught:
            a, b, c, d = self._weights
            text = a * size.ascii_units + b * size.wide + c * size.strings + d
        return round(text) + size.tokens + size.blobs * BLOB_TOKENS

    def least_tokens(self, size: TextSize) -> int:
        """Fewer than a prompt will surely take; 0 until the model is known."""
        return round(self.prompt_tokens(size) / (1 + 3 * self._error)) if self.calls >= 20 else 0

    def worst_tokens(self, size: TextSize) -> int:
        """More than a prompt will take, for budgets: generous until the model is known."""
        if self.calls >= 20:
            return round(1.25 * self.prompt_tokens(size)) + 10
        text = size.chars / 2 + 1.5 * size.wide + 10 * size.strings + 20
        return round(text) + size.tokens + size.blobs * BLOB_TOKENS

    def output_tokens(self, at_most: int | None) -> int:
        """What a call is likely to write: no more than it asks for nor the 95th percentile."""
        return self._output_p95 if at_most is None else min(self._output_p95, at_most)

    def teach(self, output_tokens: int, elapsed_s: float) -> None:
        """A call has reported what it wrote."""
        self.calls += 1
        if output_tokens > 0:
            self._outputs.append(output_tokens)
            if len(self._outputs) >= 20 and self.calls % 10 == 0:
                self._output_p95 = int(percentile(self._outputs, 0.95))
                self.usual_s = percentile(self._outputs, 0.5) * self.token_s
            if output_tokens >= 10:  # shorter ones measure the prompt, not the speed
                self.token_s += 0.2 * (elapsed_s / output_tokens - self.token_s)

    def teach_prompt(self, size: TextSize, tokens: int) -> None:
        """How many tokens a measured text came to."""
        if size.blobs or size.tokens:
            return
        parts = (size.ascii_units, size.wide, size.strings, 1.0)
        expected = sum(w * part for w, part in zip(self._weights, parts, strict=True))
        if tokens <= 0 or expected <= 0:
            return
        ratio = tokens / expected
        self._odd = 0 if 0.25 < ratio < 4 else self._odd + 1
        if 0 < self._odd <= 5:
            return
        self._is_taught = True
        self._error += 0.1 * (min(abs(ratio - 1), 1.0) - self._error)
        error = min(max(ratio - 1, -0.5), 1.0)
        shares = [part / expected for part in parts]
        gains = [v * x for v, x in zip(self._variance, shares, strict=True)]
        scale = 1 / (1 + sum(g * x for g, x in zip(gains, shares, strict=True)))
        for n, gain in enumerate(gains):
            weight = self._weights[n] + gain * scale * error
            self._weights[n] = min(max(weight, self.LOWEST[n]), self.HIGHEST[n])
            kept = self._variance[n] - gain * scale * gain + 0.003 * self.VARIANCE[n]
            self._variance[n] = min(kept, self.VARIANCE[n])


class Client:
    """Somebody with a client key, and the limits that the file sets."""

    def __init__(self, rule: ClientRule, clock: Clock = time.monotonic) -> None:
        self.rule = rule
        self._clock = clock
        self.rpm, self.tpm = rebucket(None, rule.rpm, clock), rebucket(None, rule.tpm, clock)

    def limit(self, rule: ClientRule) -> None:
        """Take another rule; what was counted stays."""
        self.rule = rule
        self.rpm = rebucket(self.rpm, rule.rpm, self._clock)
        self.tpm = rebucket(self.tpm, rule.tpm, self._clock)

    def shown(self) -> dict[str, Any]:
        limits = {"rpm": shown_bucket(self.rpm), "tpm": shown_bucket(self.tpm)}
        return {"name": self.rule.name, **limits}

    def reserve(self, demand: Demand) -> Reservation | None:
        """Take a call's part of the limits.

        Raises ProxyError: rate_limited, with the time until it would fit; nothing was taken.
        """
        if self.rpm is None and self.tpm is None:
            return None
        for bucket, amount, name in ((self.rpm, 1, "rpm"), (self.tpm, demand.tokens, "tpm")):
            if bucket is not None and not bucket.fits(amount):
                wait_s = min(bucket.ready_at(amount) - self._clock(), WINDOW_S)
                why = f"client {self.rule.name} is over its {name} of {bucket.limit}"
                raise ProxyError("rate_limited", why, retry_after_s=wait_s)
        return Reservation([self.rpm], [self.tpm], demand.prompt_tokens, demand.output_tokens)


###############################################################################
# Wire
###############################################################################
# Rule: bytes, dicts and headers in, the same out. No sockets, no clock, no event loop.

# RFC 9110 7.6.1, and what describes one hop's framing. Connection may name more.
HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
     "te", "trailer", "transfer-encoding", "upgrade")
)  # fmt: skip
OWN_HEADERS: dict[str, tuple[str, ...]] = {  # and what they may say; nothing: anything
    "x-llmproxy-priority": tuple(SHARES),
    "x-llmproxy-retry": RETRY_KINDS,
    "x-llmproxy-task": (),
    "x-llmproxy-task-budget": (),
    "x-llmproxy-newest": (),
}
# Made anew for each hop, or ours; Origin ends here, because CORS is answered here.
NOT_SENT_UPSTREAM = HOP_BY_HOP | {
    "host", "content-length", "expect", "origin", "x-request-id", "accept-encoding"
}  # fmt: skip
CREDENTIALS: tuple[str, ...] = ("authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie")
# All that another upstream than the caller meant is told of a request.
SENT_ELSEWHERE = frozenset(
    ("content-type", "content-encoding", "accept", "accept-language", "user-agent", "traceparent",
     "tracestate", "anthropic-version", "anthropic-beta", "openai-beta")
)  # fmt: skip
# Headers that are known to change no answer; every other one is part of what is asked, because a
# key or a choice of model may stand in it. Tracing, browsers, proxies, what the SDKs say of
# themselves (x-stainless-*) and of the session (Claude Code).
HARMLESS = NOT_SENT_UPSTREAM | frozenset(
    ("user-agent", "traceparent", "tracestate", "baggage", "x-correlation-id", "b3", "date",
     "cache-control", "pragma", "referer", "dnt", "priority", "via", "forwarded",
     "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-port", "x-real-ip",
     "accept-language", "accept-charset", "x-client-request-id", "x-claude-code-session-id",
     "content-encoding",
     "session_id")
)  # fmt: skip
_HARMLESS_KINDS = ("x-stainless-", "x-llmproxy-", "sec-", "x-b3-", "access-control-")
# What belongs to one delivery of an answer, not to the answer.
NOT_KEPT = re.compile(
    rb"^(?:set-cookie|age|retry-after|[^\r\n:]*ratelimit[^\r\n:]*):.*\r\n", re.I | re.M
)
CORS = re.compile(rb"^access-control-[^\r\n]*\r\n", re.I | re.M)
EVENT_END = re.compile(rb"\n\r?\n|\r\r")
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
LINE_END = re.compile(r"\r\n|\n|\r")
HAS_USAGE = re.compile(rb'"usage"\s*:\s*(?:[\r\n]+data: ?)?\{')
# A 400 that means "I do not know stream_options", as vLLM, Mistral, TGI and older gateways say it.
FIELD_REFUSED = re.compile(
    rb"stream_options|include_usage|(?:unknown|unrecogni[sz]ed|unexpected|unsupported|extra|"
    rb"additional|invalid)\W+\w*\W*(?:field|argument|parameter|propert|input|key)",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Usage:
    """Tokens of one call; `prompt` includes `cached` and `written`."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    written: int = 0  # of the prompt, to a cache
    is_estimated: bool = False
    written_1h: int = 0  # of those, to be kept for an hour
    seconds: int = 0  # of sound

    @property
    def total(self) -> int:
        return self.prompt + self.completion


NO_USAGE = Usage()


@dataclass(frozen=True, slots=True)
class Route:
    """A route whose calls can be joined.

    `ends`: what the last events of a whole stream hold, where it is not `[DONE]`.
    """

    dialect: str = "openai"
    is_free: bool = False  # costs neither tokens nor a slot, so it does not queue
    takes_usage: bool = False  # knows stream_options.include_usage
    writes: bool = True  # tokens, so that there is an output to reserve
    ends: re.Pattern[bytes] | None = None


_NAMES_MODEL = re.compile(rb'(?im)^content-disposition:[^\r\n]*;\s*name="?model"?\s*(?:;|\r|$)')
_VERSIONED = re.compile(r".*/v\d+(?:(?:alpha|beta)\d*)?(?:/openai)?/")
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]")
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_STOP = re.compile(rb'"stop"\s*:\s*true')
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp[^"]{1,200})"')
_RESPONSE_END = re.compile(rb'"response\.(?:completed|incomplete)"')
_MESSAGE_END = re.compile(rb'"message_stop"')
ROUTES = {
    "chat/completions": Route(takes_usage=True, ends=_FINISH),
    "completions": Route(takes_usage=True, ends=_FINISH),
    "responses": Route(ends=_RESPONSE_END),
    "messages": Route("anthropic", ends=_MESSAGE_END),
    "messages/count_tokens": Route("anthropic", is_free=True),
    "completion": Route(ends=_STOP),
    "infill": Route(ends=_STOP),
    "embeddings": Route(writes=False),
    "embedding": Route(writes=False),
    "rerank": Route(writes=False),
    "reranking": Route(writes=False),
    "moderations": Route(writes=False),
    "tokenize": Route(is_free=True),
    "detokenize": Route(is_free=True),
    "apply-template": Route(is_free=True),
}


def find_route(method: str, path: str) -> tuple[Route | None, str]:
    """The route of a path, under any prefix that ends in a version (/v1, /v1beta/openai, /v4)."""
    found = _VERSIONED.match(path)  # SDKs make /v1/v1/messages too
    name = (path[found.end() :] if found else path[1:]).rstrip("/")
    return ROUTES.get(name) if method == "POST" else None, name


def may_name_model(path: str, kind: str) -> bool:
    """Whether a body may be JSON, under whatever name, or a form that names a model."""
    is_file = kind.startswith(("audio/", "image/", "video/", "application/octet-stream"))
    return not is_file and not re.search(r"/(?:files|uploads)(?:/|$)", path)


def form_model(body: bytes, kind: str) -> str:
    """The field `model` of a multipart form (RFC 7578); nothing where two say different things."""
    marks = re.findall(r'(?i);\s*boundary="?([^";,]+)', kind)
    parts = body.split(b"--" + bytes_of_text(marks[0].strip())) if len(marks) == 1 else []
    cut = [part.partition(b"\r\n\r\n") for part in parts]
    names = {value.strip() for head, _, value in cut if _NAMES_MODEL.search(head)}
    is_clear = len(names) == 1 and not any(b"name*" in head.lower() for head, _, _ in cut)
    return names.pop().decode("utf-8", "replace") if is_clear else ""


def uncoded(body: bytes, codings: str, limit_bytes: int) -> bytes:
    """A request's body without its content codings.

    Raises ProxyError: request_too_large, unsupported_encoding, invalid_request.
    """
    for name in reversed([coding.strip() for coding in codings.lower().split(",")]):
        if name in ("", "identity"):
            continue
        try:
            if name in ("gzip", "x-gzip", "deflate"):
                inflate = zlib.decompressobj(-15 if body[:1] not in (b"\x1f", b"\x78") else 47)
                body = inflate.decompress(body, limit_bytes + 1)
                is_whole = inflate.eof and not inflate.unused_data
            elif name == "zstd":
                unzstd = _zstd().ZstdDecompressor()
                body = unzstd.decompress(body, limit_bytes + 1)
                is_whole = unzstd.eof and not unzstd.unused_data
            elif name == "br":
                unbrotli = importlib.import_module("brotli").Decompressor()
                body = unbrotli.process(body, output_buffer_limit=limit_bytes + 1)
                is_whole = unbrotli.is_finished()
            else:
                raise ImportError(name)
        except ImportError:
            why = f"bodies coded as {printable(name)} are not understood here; send it plainly"
            why += ", or: pipx inject llmproxyd brotli backports.zstd" * (name in ("br", "zstd"))
            raise ProxyError("unsupported_encoding", why) from None
        except Exception as error:  # of whatever kind its library has
            why = f"the body is not the {name} that it is said to be ({type(error).__name__})"
            raise ProxyError("invalid_request", why) from None
        if len(body) > limit_bytes:
            raise too_large(limit_bytes)
        if not is_whole:
            raise ProxyError("invalid_request", f"the body's {name} does not end where it ends")
    return body


def _zstd() -> Any:
    """The standard library's (3.14), or its backport."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("compression.zstd")
    return importlib.import_module("backports.zstd")


def bytes_of_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class Headers:
    """A message's headers, walked once.

    `low`: each once, its name in lower case, repeats joined with a comma. `lines`: those that go
    on, as they came, by name.
    """

    def __init__(self, raw: tuple[tuple[bytes, bytes], ...], dropped: frozenset[str]) -> None:
        low: dict[str, str] = {}
        lines: list[tuple[str, bytes]] = []
        own: list[str] = []
        for name, value in raw:
            lower, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
            low[lower] = text if lower not in low else f"{low[lower]}, {text}"
            if lower[:11] == "x-llmproxy-":
                own.append(lower)
            elif lower not in dropped:
                lines.append((lower, b"%b: %b\r\n" % (name, value)))
        named = low.get("connection", "").lower()
        if named not in ("", "keep-alive", "close"):
            hop = {name.strip() for name in named.split(",")}
            lines = [line for line in lines if line[0] not in hop]
        self.low, self.lines, self.own = low, lines, own
        self._blocks: dict[Any, bytes] = {}

    @functools.cached_property
    def api_keys(self) -> list[str]:
        """Those that a request presents in its headers."""
        found = {name: self.low[name] for name in CREDENTIALS[:-1] if self.low.get(name)}
        if found.get("authorization", "")[:7].lower() == "bearer ":
            found["authorization"] = found["authorization"][7:].strip()
        return list(found.values())

    def block(
        self, without: tuple[str, ...] = (), only: frozenset[str] | None = None,
        keys: tuple[str, ...] = (),
    ) -> bytes:  # fmt: skip
        """What goes on, ready to be sent; no line that carries one of `keys`."""
        block = self._blocks.get((without, only, keys))
        if block is None:
            block = b"".join(
                line for name, line in self.lines
                if name not in without and (only is None or name in only)
            )  # fmt: skip
            block = self._blocks[without, only, keys] = without_lines(block, keys)
        return block

    def keyed(self, keys: tuple[str, ...] = ()) -> bytes:
        """All that may change an answer or say whose call it is, whatever its order."""
        block = self._blocks.get(keys)
        if block is None:
            known = (name for name, _ in self.lines if name not in HARMLESS)
            names = sorted({name for name in known if not name.startswith(_HARMLESS_KINDS)})
            block = b"".join(bytes_of_text(f"{name}:{self.low[name]}\n") for name in names)
            block = self._blocks[keys] = without_lines(block, keys)
        return block


request_headers = functools.lru_cache(256)(Headers)  # a client sends the same with each call
_FRAMING = HOP_BY_HOP | {"content-length"}


class Head:
    """Status line and headers of an answer; framing and hop-by-hop headers already gone."""

    def __init__(self, status: int, reason: str, block: bytes, low: Mapping[str, str]) -> None:
        self.status, self.reason, self.block, self.low = status, reason, block, low
        self.kind = low.get("content-type", "").partition(";")[0].strip().lower()
        self.is_stream = self.kind == "text/event-stream"

    @property
    def is_coded(self) -> bool:
        return self.low.get("content-encoding", "identity").lower() != "identity"

    @property
    def length(self) -> int | None:
        text = self.low.get("content-length", "")
        return int(text) if text.isdecimal() and len(text) < 16 else None

    @property
    def ends_with_connection(self) -> bool:
        is_chunked = "chunked" in self.low.get("transfer-encoding", "").lower()
        return not is_chunked and "content-length" not in self.low

    def changed(
        self, status: int, kind: str = "", more: bytes = b"", without: tuple[bytes, ...] = ()
    ) -> Head:
        """This head with another status or type, more lines, or fewer."""
        block, low = self.block, dict(self.low)
        for name in (*without, *((b"content-type",) if kind else ())):
            block = re.sub(rb"^%b:.*\r\n" % name, b"", block, flags=re.IGNORECASE | re.MULTILINE)
        if kind:
            more, low["content-type"] = more + b"Content-Type: %b\r\n" % kind.encode(), kind
        known = {} if status == self.status else http.client.responses
        reason = known.get(status, self.reason)
        return Head(status, reason, block + more, low)


NO_HEAD = Head(200, "OK", b"", {})
SSE_HEAD = NO_HEAD.changed(200, "text/event-stream")


_JSON = json.JSONDecoder()


def parse_json(body: bytes) -> dict[str, Any] | None:
    """A JSON object; None for all else, hostile nesting included."""
    if len(body) > 3 * MAX_JSON_ITEMS and sum(map(body.count, b"{[,")) > MAX_JSON_ITEMS:
        return None  # seconds of parsing, in which nobody else would be served
    try:
        doc = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return doc if isinstance(doc, dict) else None


def canonical(doc: Any) -> bytes | None:
    """The meaning of a document, whatever the order of its keys and its white space.

    Objects become tuples sorted by key, arrays lists, so the two cannot be confused; marshal
    tells 1, 1.0 and True apart, and is fast with long texts. Version 2 of its format has no
    references, which would depend on object identity. None: nested too deeply.
    """

    def ordered(value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            return tuple([(key, ordered(value[key])) for key in sorted(value)])
        return [ordered(item) for item in value] if kind is list else value

    try:
        return marshal.dumps(ordered(doc), 2)
    except (RecursionError, ValueError):
        return None


# Where a body holds a picture, a sound or a file instead of text: its name, or what it is in.
_BLOBS = frozenset(("image_url", "file_data", "images", "file_url"))
_BLOB_HOLDERS = frozenset(
    ("image_url", "input_audio", "source", "inline_data", "inlineData", "image", "audio",
     "video_url")
)


def measure(doc: Any) -> TextSize:
    """What a body's texts measure. A string is a blob only where its place says so."""
    texts: list[str] = []
    blobs = tokens = 0

    def walk(value: Any, name: str, holder: str) -> None:
        nonlocal blobs, tokens
        kind = type(value)
        if kind is str:
            if name in _BLOBS or (holder in _BLOB_HOLDERS and name in ("url", "data")):
                blobs += 1
            else:
                texts.append(value)
        elif kind is dict:
            inside = "" if value.get("type") == "text" else name
            for key, item in value.items():
                walk(item, key, inside)
        elif kind is list:
            if not value or not set(map(type, value)) <= {int, float}:
                for item in value:
                    walk(item, name, holder)
            elif name in ("prompt", "input"):
                tokens += len(value)
            else:
                texts.append(repr(value))

    with contextlib.suppress(RecursionError):
        walk(doc, "", "")
    return TextSize.of(texts, blobs, tokens)


def prompt_pieces(doc: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A prompt's parts in about the order in which a chat template has them: place and text."""
    found: list[tuple[str, str]] = []

    def add(place: str, value: Any) -> None:
        if isinstance(value, list):
            for n, item in enumerate(value):
                add(f"{place}[{n}]", item)
        elif isinstance(value, dict) and value.get("type") == "text":
            add(place, value.get("text"))
        elif isinstance(value, dict):
            if place == "messages[0]" and value.get("role") in ("system", "developer"):
                place = "system"
            rest = {k: v for k, v in value.items() if k not in ("content", "cache_control")}
            if "content" not in value or rest.keys() - {"role"}:
                found.append((place, json.dumps(rest)))
            add(place, value.get("content"))
        elif value is not None:
            found.append((place, value if isinstance(value, str) else json.dumps(value)))

    with contextlib.suppress(RecursionError):
        for place in ("system", "instructions", "tools", "messages", "input", "prompt"):
            if place in doc:
                add(place, doc[place])
    return found


def with_fields(body: bytes, doc: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes | None:
    """The body with top-level `fields` set; None where that is not possible.

    What is new is added at the end and all else stays byte for byte. A field that is there once
    is replaced in its place; else the body is written anew.
    """
    changed, end = body, len(body.rstrip()) - 1
    new = {name: value for name, value in fields.items() if name not in doc}
    is_plain = bool(doc) and b"\0" not in body[:4] and body[end : end + 1] == b"}"
    if new:
        changed = body[:end] + b"," + json.dumps(new).encode()[1:-1] + body[end:]
    with contextlib.suppress(ValueError):
        for name in fields.keys() - new.keys():
            (found,) = re.finditer(rb'"%b"\s*:\s*' % re.escape(name.encode()), changed)
            text = changed[found.end() :].decode("utf-8", "surrogateescape")
            _, length = _JSON.raw_decode(text)
            value = json.dumps(fields[name]).encode()
            changed = changed[: found.end()] + value + bytes_of_text(text[length:])
        if is_plain and (len(new) == len(fields) or parse_json(changed) == {**doc, **fields}):
            return changed
    with contextlib.suppress(ValueError, RecursionError):
        return json.dumps({**doc, **fields}, allow_nan=False).encode()
    return None


def usage_options(doc: Mapping[str, Any]) -> dict[str, Any] | None:
    """The stream_options that ask for usage; None where those there are no object."""
    options = doc.get("stream_options") or {}
    is_known = isinstance(options, dict)
    return {"stream_options": {**options, "include_usage": True}} if is_known else None


def reports_usage(doc: Mapping[str, Any]) -> bool:
    return _dict(doc, "stream_options").get("include_usage") is True


def whole_number(value: Any) -> int | None:
    """A count as bodies and usages write it: 5, 5.0 or "5"; None for all else."""
    is_text = type(value) is str and value.isdecimal() and len(value) < 10
    if is_text or (type(value) is float and value.is_integer()):
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def _dict(doc: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _mapping(doc.get(name))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(doc: Mapping[str, Any], name: str) -> int:
    value = doc.get(name)
    value = value if type(value) is int else whole_number(value) or 0
    return value if 0 <= value < MAX_TOKENS else 0


def json_at(text: str | bytes) -> Any:
    """The JSON at the beginning of a text; None where there is none."""
    text = text if isinstance(text, str) else text.decode("utf-8", "replace")
    try:
        return _JSON.raw_decode(text.lstrip(" \r\n\t:"))[0]
    except (ValueError, RecursionError):
        return None


_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


def max_tokens(doc: Mapping[str, Any]) -> int | None:
    """The larger of all limits on the output that a body names, in any API's words."""
    values = [value for name in _OUTPUT_LIMITS if (value := doc.get(name)) is not None]
    if "generationConfig" in doc or "options" in doc:
        values.append(_dict(doc, "generationConfig").get("maxOutputTokens"))
        values.append(_dict(doc, "options").get("num_predict"))
    found = [number for value in values if (number := whole_number(value)) is not None]
    return min(max(found), 2**31) if found else None


def copies(doc: Mapping[str, Any]) -> int:
    """How many answers a body asks for."""
    prompts: Any = doc.get("prompt")
    is_many = isinstance(prompts, list) and any(type(prompt) is not int for prompt in prompts)
    wanted = [min(whole_number(doc[n]) or 1, 10_000) for n in ("n", "best_of") if n in doc]
    return (len(prompts) if is_many else 1) * max([1, *wanted])


def is_deterministic(doc: Mapping[str, Any]) -> bool:
    return doc.get("temperature") == 0 or doc.get("seed") is not None


def event_data(event: bytes) -> str:
    """The data of one SSE event (WHATWG HTML 9.2.6): its data lines, joined."""
    lines = LINE_END.split(event.decode("utf-8", "replace"))
    return "\n".join(line[5:].removeprefix(" ") for line in lines if line.startswith("data:"))


def first_event(data: bytes) -> bytes | None:
    """The first whole event that is more than a comment, with the blank line that ends it."""
    start = 0
    for match in EVENT_END.finditer(data):
        event, start = data[start : match.end()], match.end()
        if event.startswith(b"data") or re.search(rb"[\r\n]data", event):
            return event
    return None


def is_event(data: bytes) -> bool:
    """Whether an event without its blank line is whole."""
    return bool(_DONE.search(data)) or json_at(event_data(data)) is not None


def _choices(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = doc.get("choices")
    return [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []


def fault_status(doc: Any) -> int:
    """The status that a document means which is an error, whatever its answer's was; 0: none."""
    if not isinstance(doc, dict):
        return 0
    holder = _dict(doc, "response") or doc  # OpenAI's responses route wraps it in a stream
    error = holder.get("error") or (doc if doc.get("type") == "error" else None)
    ends = [choice.get("finish_reason") for choice in _choices(doc)]
    if not error and "error" not in ends and holder.get("status") != "failed":
        return 0
    error = error if isinstance(error, dict) else {}
    for said in (error.get("code"), error.get("status"), error.get("type")):
        if (number := whole_number(said) or STATUS_OF.get(str(said), 0)) and 400 <= number < 600:
            return number
    return 500


def stream_error(event: bytes) -> tuple[int, bytes] | None:
    """Status and JSON of an error that a stream's event carries, in any dialect."""
    if not HAS_FAULT.search(event):
        return None
    status = fault_status(json_at(data := event_data(event)))
    return (status, data.encode()) if status else None


def stream_fault(data: bytes) -> int:
    """What the first error among a stream's events means; 0 where there is none."""
    if (b'"error"' not in data and b'failed"' not in data) or not HAS_FAULT.search(data):
        return 0
    return next((found[0] for found in map(stream_error, EVENT_END.split(data)) if found), 0)


def is_worth_keeping(body: bytes, request: Any, usage: Usage) -> bool:
    """Whether a whole answer also says something, and ends because it was at its end."""
    ends = set(_ENDS.findall(body))
    is_cut = bool(ends & _CUT) and usage.completion < (request.max_tokens or math.inf)
    is_bad = bool(ends & _BAD) or (not request.is_stream and bool(ends & _PENDING))
    says = bool(_SAYS.search(body) if _SHAPED.search(body) else body.strip())
    return says and not is_cut and not is_bad and not request.doc.get("background")


def is_whole(data: bytes, route: Route | None, doc: Mapping[str, Any]) -> bool:
    """Whether a stream, all of it that is held, has said that it is at its end."""
    if _DONE.search(data, max(0, len(data) - 1024)):
        return True
    wanted = copies(doc) if route is not None and route.ends is _FINISH else 1
    ends = route.ends if route is not None else None
    return ends is not None and len(ends.findall(data)) >= wanted


# What codes and types of errors mean, where a number says nothing: the prompt's fault, the key's,
# the limit's, the upstream's (which is all else).
STATUS_OF = {
    "invalid_request_error": 400, "authentication_error": 401, "billing_error": 402,
    "permission_error": 403, "not_found_error": 404, "request_too_large": 413,
    "rate_limit_error": 429, "api_error": 500, "timeout_error": 504, "overloaded_error": 529,
    "exceed_context_size_error": 400, "unavailable_error": 503, "context_length_exceeded": 400,
    "invalid_prompt": 400, "content_filter": 400, "content_policy_violation": 400,
    "bad_request_error": 400, "invalid_api_key": 401, "model_not_found": 404,
    "rate_limit_exceeded": 429, "insufficient_quota": 429, "server_is_overloaded": 503,
}  # fmt: skip
HAS_FAULT = re.compile(rb'"error"\s*:\s*[^n\s]|"(?:status|type)"\s*:\s*"[\w.]*failed"'
                       rb'|"(?:finish_reason|type)"\s*:\s*"error"')  # fmt: skip
# How an answer may end, and what says that there is something in it.
_ENDS = re.compile(rb'"(?:finish_reason|stop_reason|stop_type|status|reason)"\s*:\s*"(\w+)"')
_CUT = frozenset((b"length", b"max_tokens", b"limit", b"max_output_tokens", b"incomplete"))
_PENDING = frozenset((b"queued", b"in_progress"))  # a stream's events say so as well
_BAD = frozenset((b"content_filter", b"error", b"pause_turn", b"refusal", b"failed", b"cancelled"))
_SHAPED = re.compile(rb'"(?:choices|content|output)"')
_SAYS = re.compile(rb'"(?:content|text|arguments|partial_json|delta)"\s*:\s*"[^"]'
                   rb'|"type"\s*:\s*"tool_use"')  # fmt: skip


class Events:
    """Passes whole SSE events on as they came, and takes out the usage chunk that we asked for.

    The unfinished end of an event is held until it is whole: it might be the one to take out,
    and where the upstream breaks off, half an event would hide our error event from the SDKs.
    An event beyond SLICE_BYTES passes in pieces.
    """

    def __init__(self, takes_usage: bool) -> None:
        self._takes_usage = takes_usage
        self.taken = b""
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        if not self._held and chunk[-2:] == b"\n\n":
            return self._take(chunk)
        seam, held = max(0, len(self._held) - 3), self._held  # an end may lie across chunks
        held += chunk
        end = max(held.rfind(m, seam) + len(m) if m in held[seam:] else 0 for m in _EVENT_ENDS)
        return self.rest(end or None) if end or len(held) > SLICE_BYTES else b""

    def rest(self, end: int | None = None) -> bytes:
        """What is held up to there; at the end of a stream, all that it still had to say."""
        data = bytes(self._held[:end])
        del self._held[:end]
        return self._take(data)

    def _take(self, data: bytes) -> bytes:
        """Whole events without the chunk that only reports usage."""
        if not self._takes_usage or not HAS_USAGE.search(data):
            return data
        out, start = list[bytes](), 0
        for end in [*(match.end() for match in EVENT_END.finditer(data)), len(data)]:
            event, start = data[start:end], end
            doc = json_at(event_data(event)) if HAS_USAGE.search(event) else None
            doc = doc if isinstance(doc, dict) and "type" not in doc else {}  # OpenAI's
            if doc.get("usage") and not doc.get("choices"):
                self.taken = event
            else:
                out.append(event)
        return b"".join(out)


# What reading a document raises that is not as it should be.
ODD_JSON = (ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError)


def read_usage(body: bytes, is_stream: bool) -> Usage | None:
    """The usage that an answer reports, wherever it stands; None where it reports none."""
    if not is_stream:
        # It nearly always stands last: read it alone, without the answer before it.
        start = body.rfind(b'"usage"')
        if start >= 0 and body.find(b'"usage"') == start:  # else the text has one as well
            if isinstance(usage := json_at(body[start + 7 :]), dict):
                return _usage_from(usage)
        return _usage_of(body.decode("utf-8", "replace"))
    found = None
    for part in (body[-16384:], body):  # the last events nearly always hold it
        events = (event for event in reversed(EVENT_END.split(part)) if USAGE_MARK.search(event))
        found = next(filter(None, (_usage_of(event_data(event)) for event in events)), None)
        if found or len(part) == len(body):
            break
    # Anthropic splits it: the prompt in message_start, the output in message_delta.
    if found and b'"message_start"' in body[:8192]:
        for event in EVENT_END.split(body[:16384]):
            if b'"message_start"' in event and (start_ := _usage_of(event_data(event))):
                for name in ("prompt", "cached", "written", "completion"):
                    setattr(found, name, max(getattr(found, name), getattr(start_, name)))
                break
    return found


USAGE_MARK = re.compile(rb'"usage"\s*:\s*[^n\s]|"timings"|"tokens_predicted"')


def _usage_of(text: str) -> Usage | None:
    doc = json_at(text)
    if not isinstance(doc, dict):
        return None
    for holder in (doc, _dict(doc, "message"), _dict(doc, "response")):
        if isinstance(holder.get("usage"), dict):
            return _usage_from(holder["usage"])
    timings = _dict(doc, "timings")
    if "predicted_n" in timings:
        cached = _whole(timings, "cache_n")
        prompt = _whole(timings, "prompt_n") + cached
        return Usage(prompt, cached, _whole(timings, "predicted_n"))
    for asked, said in (("tokens_evaluated", "tokens_predicted"),
                               ("prompt_eval_count", "eval_count")):  # fmt: skip
        if asked in doc or said in doc:  # llama.cpp's own route; Ollama
            return Usage(_whole(doc, asked), 0, _whole(doc, said))
    return None


def _usage_from(usage: dict[str, Any]) -> Usage:
    inner = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    output = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    cached = _whole(inner, "cached_tokens") if isinstance(inner, dict) else 0
    reasoning = _whole(output, "reasoning_tokens") if isinstance(output, dict) else 0
    if "prompt_tokens" in usage:
        prompt, completion = _whole(usage, "prompt_tokens"), _whole(usage, "completion_tokens")
        return Usage(prompt, cached, completion, reasoning)
    # Anthropic counts what it read from or wrote to its cache apart from input_tokens.
    read = _whole(usage, "cache_read_input_tokens")
    written = _whole(usage, "cache_creation_input_tokens")
    prompt = _whole(usage, "input_tokens") + read + written
    found = Usage(prompt, read or cached, _whole(usage, "output_tokens"), reasoning, written)
    found.written_1h = _whole(_dict(usage, "cache_creation"), "ephemeral_1h_input_tokens")
    seconds = usage.get("seconds")
    if isinstance(seconds, (int, float)) and 0 <= seconds < MAX_TOKENS:
        found.seconds = math.ceil(seconds)
    return found


def decoded(body: bytes, head: Head) -> bytes:
    """The body without its content coding, where the standard library knows it (for counting)."""
    coding = head.low.get("content-encoding", "identity").lower()
    if coding in ("gzip", "x-gzip", "deflate"):
        with contextlib.suppress(zlib.error):
            return zlib.decompressobj(47).decompress(body, FLIGHT_BYTES)
    return body


def asked_wait_s(low: Mapping[str, str], now_unix: float) -> float | None:
    """Seconds that an upstream asks us to wait (RFC 9110 10.2.3; retry-after-ms is OpenAI's)."""
    text = low.get("retry-after", "")
    for number, unit_s in ((low.get("retry-after-ms", ""), 0.001), (text, 1.0)):
        if re.fullmatch(r"\s*\d{1,12}(\.\d*)?\s*", number, re.ASCII):
            return float(number) * unit_s
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_unix)
    return reset_wait_s(low, now_unix)


# OpenAI, OpenRouter, Anthropic: what is left of a limit, and when it is reset.
_LIMIT_HEADERS = [
    (pattern.format("remaining"), pattern.format("reset"))
    for pattern in (
        "x-ratelimit-{}-requests", "x-ratelimit-{}-tokens", "x-ratelimit-{}",
        "anthropic-ratelimit-requests-{}", "anthropic-ratelimit-tokens-{}",
        "anthropic-ratelimit-input-tokens-{}", "anthropic-ratelimit-output-tokens-{}",
    )
]  # fmt: skip


def reset_wait_s(low: Mapping[str, str], now_unix: float) -> float | None:
    """Seconds until limits are reset of which the upstream says that nothing is left."""
    if "ratelimit" not in " ".join(low):
        return None
    resets = [
        parse_reset(low.get(reset, ""), now_unix)
        for remaining, reset in _LIMIT_HEADERS
        if low.get(remaining, "").strip("0") == "" and remaining in low
    ]
    return max(resets, default=None)


def parse_reset(text: str, now_unix: float) -> float:
    """Seconds of a reset header: `1m2.5s`, plain seconds, a Unix time in s or ms, or RFC 3339."""
    text = text.strip()
    spans = re.findall(r"(\d+(?:\.\d+)?)(ms|[dhms])", text)
    if spans and "".join(number + unit for number, unit in spans) == text:
        return sum(float(number) * {**_SECONDS, "d": 86400.0}[unit] for number, unit in spans)
    with contextlib.suppress(ValueError, OverflowError):
        value = float(text)
        value = value / 1000 if value > 1e11 else value
        value = value - now_unix if value > 1e9 else value
        return value if 0 <= value < 1e9 else 0.0
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, datetime.fromisoformat(text).timestamp() - now_unix)
    return 0.0


KEY_PARAMETERS = ("key", "api_key", "apikey", "api-key", "access_token", "token")


def without_keys(
    raw_path: str, keys: Iterable[str] = (), names: Iterable[str] = KEY_PARAMETERS
) -> str:
    """A path whose query carries no parameter of those names, and none with one of those keys."""
    path, mark, query = raw_path.partition("?")
    parts = re.split("[&;]", query) if mark else []
    kept = [
        part for part in parts
        if urllib.parse.unquote(part).partition("=")[0].strip().lower() not in names
        and not any(carries(part, key) for key in keys)
    ]  # fmt: skip
    return path + mark * bool(kept) + "&".join(kept)


def carries(text: str, key: str) -> bool:
    """Whether a header's value or a part of a path holds a key, encoded or not."""
    if key in text or key in urllib.parse.unquote(urllib.parse.unquote(text)):
        return True
    for word in text.split():  # Basic credentials
        with contextlib.suppress(ValueError):
            if key.encode() in base64.b64decode(word + "==", validate=False):
                return True
    return False


def without_lines(block: bytes, keys: tuple[str, ...]) -> bytes:
    """Header lines, but for those that carry one of these keys."""
    if not keys:
        return block
    lines = block.splitlines(keepends=True)
    texts = (line.decode("utf-8", "surrogateescape") for line in lines)
    odd = [any(carries(text, key) for key in keys) for text in texts]
    return b"".join(line for line, is_odd in zip(lines, odd, strict=True) if not is_odd)


def event_of(doc: Mapping[str, Any]) -> bytes:
    """A document as an event of a stream."""
    name = f"event: {doc['type']}\n" if "type" in doc else ""
    return f"{name}data: {json.dumps(doc)}\n\n".encode()


def closing_events(name: str, sent: bytes, output_tokens: int) -> bytes:
    """The events that end a running stream cleanly, as if it had met its max_tokens.

    Args:
        name: the route, like chat/completions.
        sent: the stream's last events, or all of them.
    """
    found = [json_at(event_data(event)) for event in EVENT_END.split(sent) if b"{" in event]
    docs = [doc for doc in found if isinstance(doc, dict)]
    ending: list[dict[str, Any]] = []
    tail = b""
    if name == "messages":
        for doc in docs:
            if doc.get("type") in ("content_block_start", "content_block_delta"):
                ending = [{"type": "content_block_stop", "index": doc.get("index", 0)}]
            elif doc.get("type") == "content_block_stop":
                ending = []
        stop = {"stop_reason": "max_tokens", "stop_sequence": None}
        usage = {"output_tokens": output_tokens}
        ending.append({"type": "message_delta", "delta": stop, "usage": usage})
        ending.append({"type": "message_stop"})
    elif name == "responses":
        reason = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        begun = next(filter(None, (_dict(doc, "response") for doc in docs)), {})
        response = {"object": "response", **begun, **reason}
        ending = [{"type": "response.incomplete", "response": response}]
    elif name in ("completion", "infill"):
        over = {"stop": True, "stop_type": "limit", "tokens_predicted": output_tokens}
        ending = [{"content": "", **over}]
    else:
        base = {k: v for k, v in (docs[0] if docs else {}).items() if k not in ("choices", "usage")}
        empty: dict[str, Any] = {"delta": {}} if name == "chat/completions" else {"text": ""}
        seen = [(_whole(c, "index"), c) for doc in docs for c in _choices(doc)]
        is_over = {n for n, c in seen if c.get("finish_reason")}
        for n in sorted({n for n, _ in seen} - is_over or {0}):
            end = {"index": n, **empty, "finish_reason": "length"}
            ending.append({**base, "choices": [end]})
        tail = b"data: [DONE]\n\n"
    return b"".join([*map(event_of, ending), tail])


def error_body(error: ProxyError, dialect: str, trace: str) -> bytes:
    if dialect == "anthropic":
        inner = {"type": error.anthropic_type, "message": error.message, "code": error.code}
        return json.dumps({"type": "error", "error": inner, "request_id": trace}).encode()
    inner = {"message": error.message, "type": error.openai_type, "param": None, "code": error.code}  # type: ignore[dict-item]
    return json.dumps({"error": inner}).encode()


_LOOPBACK_ORIGIN = re.compile(
    r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\]|[a-z0-9-]+\.localhost)(:\d{1,5})?",
    re.IGNORECASE,
)


def is_allowed_origin(origin: str, allowed: list[str]) -> bool:
    is_app = origin.startswith(("app://", "tauri://", "vscode-webview://"))
    return origin in allowed or is_app or bool(_LOOPBACK_ORIGIN.fullmatch(origin))


@functools.lru_cache(1024)
def is_loopback(host: str) -> bool:
    """A host name or address, with or without port and brackets, that is this machine."""
    name = host.rpartition(":")[0] if re.search(r"[^:]:\d+$|\]:\d+$", host) else host
    name = name.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False


_VERSION_END = re.compile(r"/v\d+[a-z]*\d*(?:/openai)?$")


def join_path(base: str, raw_path: str) -> str:
    """The upstream's target; a version at the base's end stands for the path's /v1."""
    is_v1 = raw_path[:3] == "/v1" and raw_path[3:4] in ("", "/", "?")
    return base + (raw_path[3:] if base and is_v1 and _VERSION_END.search(base) else raw_path)


###############################################################################
# Money
###############################################################################
# Rule: integer micro-dollars, since USD per million tokens is micro-dollars per token. An injected
# wall clock, because days and months are those of the wall. Whatever is reserved is settled once.


@dataclass(frozen=True, slots=True)
class Price:
    """Micro-dollars per token, by kind of token; `tiers` for prompts above so many."""

    prompt: float
    completion: float
    cached: float  # prompt tokens that were read from a cache
    written: float  # and those that were written to one
    written_1h: float | None = None  # for an hour; None: as `written`
    most_output_tokens: int = OUTPUT_TOKENS_ABSENT
    tiers: tuple[tuple[int, Price], ...] = ()  # the lowest first
    image: float = 0.0  # and what is paid by the piece
    character: float = 0.0
    second: float = 0.0

    def of(self, prompt_tokens: int) -> Price:
        fitting = [price for above, price in self.tiers if prompt_tokens > above]
        return fitting[-1] if fitting else self

    def cost(self, usage: Usage, doc: Mapping[str, Any] | None = None) -> int:
        """What a call cost that used so much, and asked for `doc`."""
        price = self.of(usage.prompt) if self.tiers else self
        long = min(usage.written_1h, usage.written) if price.written_1h is not None else 0
        fresh = max(0, usage.prompt - usage.cached - usage.written)
        cost = fresh * price.prompt + usage.cached * price.cached
        cost += (usage.written - long) * price.written + long * (price.written_1h or 0.0)
        cost += usage.completion * price.completion + usage.seconds * self.second
        return min(max(0, math.ceil(cost + self.pieces(doc) - 1e-6)), 2**50)

    def worst(self, prompt_tokens: int, output_tokens: int, doc: Mapping[str, Any]) -> int:
        """The most that a call can cost: all of its prompt may be written to a cache."""
        price = self.of(prompt_tokens) if self.tiers else self
        dearest = max(price.prompt, price.written, price.written_1h or 0.0)
        cost = prompt_tokens * dearest + output_tokens * price.completion
        return min(math.ceil(cost + self.pieces(doc)), 2**50)

    def pieces(self, doc: Mapping[str, Any] | None) -> float:
        if not doc or not (self.image or self.character):
            return 0.0
        said = doc.get("input")
        chars = len(said) if isinstance(said, str) else 0
        return copies(doc) * self.image + chars * self.character


class Prices:
    """Prices by model: the `price` settings, then the file's models, then LiteLLM's price file."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where the price file cannot be used."""
        self._globs = [tuple(text.rpartition("=")[::2]) for text in settings.price]
        self._globs += [(rule.name, rule.price) for rule in settings.models if rule.price]
        self._listed = _read_prices(settings.prices) if settings.prices else {}
        self.of = functools.lru_cache(MAX_MODELS)(self._find)

    def set_by_hand(self, model: str) -> Price | None:
        for pattern, text in self._globs:
            if fnmatch.fnmatchcase(model, pattern):
                prices = [float(part) for part in text.split("/")]
                prompt, completion, cached, written = (*prices, prices[0], prices[0])[:4]
                return Price(prompt, completion, cached, written)
        return None

    def _find(self, model: str) -> Price | None:
        if (price := self.set_by_hand(model)) is not None:
            return price
        found = self._listed.get(model) or self._listed.get(model.rpartition("/")[2])
        return None if found is None else _listed_price(found)


def _read_prices(path: str) -> dict[str, dict[str, Any]]:
    try:
        file = Path(path).expanduser()
        if (file.exists() and not file.is_file()) or file.stat().st_size > FLIGHT_BYTES:
            raise ConfigError(f"prices: {path}: is no file of at most {FLIGHT_BYTES >> 20} MiB")
        doc = json.loads(file.read_bytes())
        if not isinstance(doc, dict):
            raise ValueError
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"prices: {path}: {_why_unreadable(error)}") from None
    except (ValueError, RecursionError):
        why = "wants a JSON object, as LiteLLM publishes it"
        raise ConfigError(f"prices: {path}: {why}") from None
    return {name: entry for name, entry in doc.items() if isinstance(entry, dict)}


def _listed_price(entry: Mapping[str, Any]) -> Price | None:
    """One model of LiteLLM's model_prices_and_context_window.json; None without any price."""

    def micros(name: str, default: float | None = None) -> float | None:
        value = entry.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e3:
            return default
        return value * 1e6

    def tier(base: Price | None, above: str) -> Price | None:
        prompt = micros(f"input_cost_per_token{above}", base.prompt if base else None)
        completion = micros(f"output_cost_per_token{above}", base.completion if base else None)
        if prompt is None:
            return None
        cached = micros(f"cache_read_input_token_cost{above}", base.cached if base else prompt)
        made = "cache_creation_input_token_cost"
        written = micros(f"{made}{above}", base.written if base else prompt)
        hour = micros(f"{made}_above_1hr{above}", base.written_1h if base else None)
        no_output = 0.0 if completion is None and entry.get("mode") == "embedding" else completion
        if no_output is None or cached is None or written is None:
            return None
        return Price(prompt, no_output, cached, written, hour)

    pieces = {
        "image": micros("output_cost_per_image") or micros("input_cost_per_image") or 0.0,
        "character": micros("input_cost_per_character") or 0.0,
        "second": micros("input_cost_per_second") or micros("output_cost_per_second") or 0.0,
    }
    if (price := tier(None, "")) is None:
        if not any(pieces.values()):
            return None
        price = Price(0.0, 0.0, 0.0, 0.0)
    marks = {m[1] for name in entry if (m := re.search(r"cost\w*?_above_(\d+)k_tokens$", name))}
    tiers = [(1000 * int(mark), tier(price, f"_above_{mark}k_tokens")) for mark in marks]
    most = entry.get("max_output_tokens")
    return dataclasses.replace(
        price, **pieces, tiers=tuple(sorted(((n, t) for n, t in tiers if t), key=lambda t: t[0])),
        most_output_tokens=most if type(most) is int and most > 0 else OUTPUT_TOKENS_ABSENT,
    )  # fmt: skip


def period_start(now_unix: float, window: str) -> float:
    """When the local day or month of an instant began."""
    local = time.localtime(now_unix)
    day = 1 if window == "month" else local.tm_mday
    return time.mktime((local.tm_year, local.tm_mon, day, 0, 0, 0, 0, 0, -1))


def period_end(now_unix: float, window: str) -> float:
    began = period_start(now_unix, window)
    return period_start(began + (26 * 3600 if window == "day" else 32 * 86400), window)


class Budget:
    """What may be spent in a window of local time, or of tokens by a task.

    A `soft` one refuses only when it is spent: a call that may go beyond it goes alone, because
    its stream is cut where the budget ends. A clock that steps back finds the spending of the day
    that it shows again.
    """

    def __init__(
        self, name: str, limit: int, window: str = "", soft: bool = False, client: str | None = None
    ) -> None:
        self.name, self.limit, self.window, self.soft = name, limit, window, soft
        self.client = client  # None: all together
        self.reserved = self.spent = 0
        self._period = self._ends = 0.0
        self._past: dict[float, int] = {}  # what was spent in periods that began then

    def roll(self, now_unix: float) -> None:
        """Begin anew where a day or month has ended; what is reserved stays."""
        if not self.window or self._period <= now_unix < self._ends:
            return
        self._past[self._period] = self.spent
        self._period = period_start(now_unix, self.window)
        self._ends = period_end(now_unix, self.window)
        self.spent = self._past.get(self._period, 0)

    def is_spent(self, amount: int) -> bool:
        """Whether `amount` cannot fit, however the open reservations settle."""
        return self.spent >= self.limit if self.soft else self.spent + amount > self.limit

    def fits(self, amount: int) -> bool:
        if self.soft and not self.reserved:
            return self.spent < self.limit
        return self.spent + self.reserved + amount <= self.limit


Wanted = list[tuple[Budget, int]]  # what a call reserves of which budget


class Budgets:
    """Every budget, and the calls that wait for the reservations of others to settle."""

    def __init__(self, settings: Settings, now: Clock = time.time) -> None:
        self.now = now
        self._waiting: dict[asyncio.Future[None], Wanted] = {}  # in the order in which they came
        self.tasks: dict[tuple[str, str], Budget] = {}  # by client and name
        self.all: list[Budget] = []
        self.limit(settings)

    def limit(self, settings: Settings) -> list[Budget]:
        """Take the limits of changed settings; what was spent stays. Returns what is new."""
        known = {(b.client, b.window): b for b in self.all}
        self.all, new = [], []
        rules: list[tuple[str | None, Any]] = [(rule.name, rule) for rule in settings.clients]
        for name, rule in [(None, settings), *rules]:
            for window, usd in (("day", rule.budget), ("month", rule.budget_month)):
                if usd is not None:
                    if (budget := known.get((name, window))) is None:
                        title = f"client {name}" if name is not None else "the budget"
                        new.append(budget := Budget(title, 0, window, client=name))
                    budget.limit = round(usd * 1e6)
                    self.all.append(budget)
        self.changed()
        return new

    def of(self, client: str) -> list[Budget]:
        found = [budget for budget in self.all if budget.client in (None, client)]
        for budget in found:
            budget.roll(self.now())
        return found

    def new_task(self, client: str, name: str, limit: int) -> Budget:
        """A task's budget in tokens. Of very many the oldest that rest are forgotten."""
        if len(self.tasks) > 100 * MAX_MODELS:
            idle = (key for key, task in self.tasks.items() if not task.reserved)
            for key in list(itertools.islice(idle, MAX_MODELS)):
                del self.tasks[key]
        task = self.tasks[client, name] = Budget(f"task {name}", limit, soft=True)
        return task

    async def reserve(self, wanted: Wanted, timeout_s: float) -> None:
        """Reserve all that is wanted, or nothing.

        Raises:
            ProxyError: budget_exceeded where one cannot fit, queue_timeout where the reservations
                of others did not settle in time.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = wanted
        self.changed()
        try:
            if not future.done() and not (await asyncio.wait([future], timeout=timeout_s))[0]:
                why = "other calls hold what is left of the budget (--queue-timeout)"
                raise ProxyError("queue_timeout", why, retry_after_s=1)
            future.result()
        except asyncio.CancelledError:
            if future.done() and future.exception() is None:
                self.settle(wanted)  # granted in the same moment
            raise
        finally:
            if self._waiting.pop(future, None) is not None:
                self.changed()  # it may have held others back

    def settle(self, wanted: Wanted, cost_micros: int = 0, tokens: int = 0) -> None:
        """Give back what was reserved, and count what was used."""
        for budget, amount in wanted:
            budget.roll(self.now())  # it counts on the day on which it ends
            budget.reserved -= amount
            budget.spent += tokens if budget.soft else cost_micros
        if wanted and self._waiting:
            self.changed()

    def changed(self) -> None:
        """Somebody has settled: let those go on who fit now, in order, or never will."""
        blocked: set[int] = set()  # budgets for which somebody waits who came before
        for future, wanted in list(self._waiting.items()):
            try:
                self._check(wanted)
            except ProxyError as error:
                if not future.done():
                    future.set_exception(error)
            full = {id(budget) for budget, amount in wanted if not budget.fits(amount)}
            if future.done():
                del self._waiting[future]
            elif full or any(id(budget) in blocked for budget, _ in wanted):
                blocked |= full  # and nobody passes it there; other budgets are not its own
            else:
                for budget, amount in wanted:
                    budget.reserved += amount
                del self._waiting[future]
                future.set_result(None)

    def _check(self, wanted: Wanted) -> None:
        now = self.now()
        for budget, amount in wanted:
            budget.roll(now)
            if budget.is_spent(amount):
                left, window = max(0, budget.limit - budget.spent), budget.window
                said = "{} tokens".format if budget.soft else lambda n: f"{n / 1e6:.6f} USD"
                why = f"{budget.name}: {said(left)} left of the {window or 'task'}'s budget"
                why += f", the call may need {said(amount)}"
                wait_s = period_end(now, window) - now if window else None
                raise ProxyError("budget_exceeded", why, retry_after_s=wait_s)


###############################################################################
# Ledger
###############################################################################
# Rule: rows in, rows out; knows nothing of HTTP. One thread writes, in batches, so that the event
# loop never waits for a commit.

# What each version adds to the file; PRAGMA user_version counts them.
MIGRATIONS = (
    """
    CREATE TABLE runs (id INTEGER PRIMARY KEY, pid INTEGER, seen_unix REAL);
    CREATE TABLE calls (
        id INTEGER PRIMARY KEY, time_unix REAL, trace TEXT, request_id TEXT, shared TEXT,
        client TEXT, task TEXT, method TEXT, path TEXT, model TEXT, upstream TEXT, fallback TEXT,
        fate TEXT, status INTEGER, code TEXT, attempts INTEGER, stream INTEGER, queue_ms REAL,
        limit_ms REAL, retry_ms REAL, ttft_ms REAL, total_ms REAL, tokens_in INTEGER,
        tokens_cached INTEGER, tokens_written INTEGER, tokens_out INTEGER,
        tokens_reasoning INTEGER, tokens_estimated INTEGER, cost_micros INTEGER,
        reserved_micros INTEGER, saved_micros INTEGER, steps TEXT,
        state TEXT  -- open: asked of an upstream; done; lost: open when its process ended
    );
    CREATE INDEX calls_time ON calls (time_unix);
    CREATE INDEX calls_trace ON calls (trace);
    CREATE INDEX calls_task ON calls (client, task) WHERE task != '';
    CREATE INDEX calls_open ON calls (state) WHERE state = 'open';
    CREATE TABLE bodies (id INTEGER PRIMARY KEY, request TEXT, answer TEXT);
    CREATE TABLE tasks (
        client TEXT, task TEXT, tokens INTEGER, began_unix REAL, PRIMARY KEY (client, task)
    );
    """,
    # A look-up that reads the file is rarer by far than a row, which this made twice as dear.
    "DROP INDEX calls_trace; DROP TABLE runs;",
)
_CALLS = MIGRATIONS[0].partition("calls (")[2].partition(";")[0]
COLUMNS = tuple(re.findall(r"(\w+) (?:INTEGER|REAL|TEXT)", _CALLS))
_PUT = {
    "calls": f"INSERT OR REPLACE INTO calls VALUES ({', '.join('?' * len(COLUMNS))})",
    "bodies": "INSERT OR REPLACE INTO bodies VALUES (?, ?, ?)",
    "tasks": "INSERT OR IGNORE INTO tasks VALUES (?, ?, ?, ?)",
}


Row = tuple[Any, ...]  # of a table; of calls: the values of COLUMNS


class Journal:
    """A mapped file of rows: length, CRC-32 and marshal's bytes of each, then a length of 0."""

    SIZE_BYTES = 2**20

    def __init__(self, path: Path) -> None:
        """Raises OSError where there is no room for it."""
        self.path, self.end = path, 0
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._handle, 0, self.SIZE_BYTES)  # a full disk says so here
        else:
            os.ftruncate(self._handle, self.SIZE_BYTES)
        is_locked(self._handle)
        self._map = mmap.mmap(self._handle, self.SIZE_BYTES)

    def write(self, row: Row) -> bool:
        """False where it is full."""
        data = marshal.dumps(row, 2)
        frame = struct.pack("<II", len(data), zlib.crc32(data)) + data + bytes(4)
        if self.end + len(frame) > self.SIZE_BYTES:
            return False
        self._map[self.end : self.end + len(frame)] = frame
        self.end += len(frame) - 4
        return True

    def clear(self) -> None:
        """All that it holds has been committed."""
        self._map[:4] = bytes(4)
        self.end = 0  # from now on it is written again

    def close(self) -> None:
        os.close(self._handle)
        self.path.unlink(missing_ok=True)

    @staticmethod
    def read(path: Path) -> list[Row]:
        """The whole rows; a process may have died in the middle of its last one."""
        data, rows, at = path.read_bytes(), list[Row](), 0
        while at + 8 <= len(data):
            size, crc = struct.unpack_from("<II", data, at)
            body = data[at + 8 : at + 8 + size]
            if not size or zlib.crc32(body) != crc:
                break
            rows.append(marshal.loads(body))
            at += 8 + size
        return rows


Batch = tuple[list[tuple[str, Row]], Callable[[], object] | None]  # rows; what follows then


class Ledger:
    """SQLite file of every call, and before it a journal that survives the death of the process.

    Strategy: what a process has written to a mapped file outlives it (kill -9), so a row in a
    journal, a microsecond, is all that a call waits for: before an upstream is asked (open), or an
    answer from here is given (done). A thread puts the rows into SQLite in batches, those that
    ended once, those that take longer also as open. Two journals take turns: one is emptied when
    all that it holds has been committed. A start takes up what dead processes left in theirs; a
    living one holds a lock on its first.

    Where the file cannot be written, `trouble` says why; rows are held back, up to MOST_HELD, and
    written when it can be again.
    """

    MOST_HELD, TICK_S, TURN_S = 50_000, 0.1, 1.0

    def __init__(self, path: Path, retention_days: Clock, now: Clock = time.time) -> None:
        self.path, self.trouble, self.lost_rows = path, "", 0
        self._retention_days, self._now = retention_days, now
        self._run = random.getrandbits(31)  # which process wrote a row: the upper half of its id
        self.new_id = itertools.count((self._run << 32) + 1).__next__
        self._open: dict[int, Row] = {}  # journaled, and not in the file yet
        self._rows: list[tuple[str, Row]] = []  # of the next batch
        self._journals: list[Journal] = []  # two
        self._turn, self._turned_at = 0, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._held: deque[tuple[str, Row]] = deque(maxlen=self.MOST_HELD)
        self._db: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._cleaned_unix, self._inode = 0.0, 0

    def start(self) -> None:
        """Open the file, count what an earlier process left open as spent, start the writer."""
        self._loop = asyncio.get_running_loop()
        self._write([])
        self._thread.start()

    def close(self) -> None:
        """Write what is left, five seconds at most."""
        self._turned_at = 0.0
        self.flush()
        if self._timer is not None:
            self._timer.cancel()
        self._queue.put(None)
        self._thread.join(5.0)
        if self._thread.is_alive() or self._held:
            log.error("ledger: %s rows could not be written", len(self._held) or "the last")
            return
        for journal in self._journals:
            journal.close()

    def opened(self, row: Row) -> None:
        """A call is about to be asked of an upstream: its row survives us from now on."""
        self._write_journal(row)
        self._open[row[0]] = row
        self._wait()

    def ended(self, row: Row, is_new: bool = False) -> None:
        """A call's whole row. `is_new`: nothing of it stands in the journal yet."""
        if is_new:
            self._write_journal(row)
        self._open.pop(row[0], None)
        self.put("calls", row)

    def put(self, table: str, row: Row) -> None:
        """For the next batch."""
        self._rows.append((table, row))
        self._wait()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self.TICK_S, self.flush)

    def written(self) -> threading.Event:
        """Hand over what there is now. Returns what is set once that is in the file."""
        event = threading.Event()
        self.flush()
        self._queue.put(([], event.set))
        return event

    def _write_journal(self, row: Row) -> None:
        if self._journals and not self._journals[self._turn].write(row):
            self.flush(is_turn=True)  # it is full
            if not self._journals[self._turn].write(row):  # and the writer far behind
                self._in_trouble(OSError("the journals are full"))

    def flush(self, is_turn: bool = False) -> None:
        """Hand the writer what there is; about every second the journals take turns."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        journal = self._journals[self._turn] if self._journals else None
        is_used = journal is not None and journal.end > 0
        is_turn |= is_used and self._loop.time() - self._turned_at > self.TURN_S
        old_unix = math.inf if is_turn else self._now() - self.TICK_S
        for row in [row for row in self._open.values() if row[1] <= old_unix]:
            self._rows.append(("calls", self._open.pop(row[0])))
        is_turn = is_turn and self._journals[1 - self._turn].end == 0  # else the writer is behind
        if is_turn:
            self._turn, self._turned_at = 1 - self._turn, self._loop.time()
        if self._rows or is_turn:
            self._queue.put((self._rows, journal.clear if journal and is_turn else None))
            self._rows = []
        if self._open or is_used:
            self._wait()

    def _open_file(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # What is beside it takes its mode. To close one that is there would end all of our locks.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with contextlib.ExitStack() as stack:
            db = sqlite3.connect(
                self.path, timeout=1.0, isolation_level=None, check_same_thread=False
            )
            stack.callback(db.close)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            migrate(db)
            if not self._journals:
                name = f"{self.path.name}-{self._run:08x}"
                names = (f"{name}-{n}.journal" for n in (0, 1))
                self._journals = [Journal(self.path.with_name(name)) for name in names]
            take_up(db, self.path, self._run)
            stack.pop_all()
        self._db, self._inode = db, self.path.stat().st_ino

    def _work(self) -> None:
        is_over, after = False, list[Callable[[], object]]()
        while not is_over:
            rows = list[tuple[str, Row]]()
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=1.0 if self._held else 60.0)
                is_over = item is None
                rows, then = item or ([], None)
                after += [then] if then else []  # it waits for a commit that holds these rows
            try:
                if not (rows or self._held) or self._write(rows):
                    for call in after:
                        call()
                    after.clear()
                self._clean()
            except Exception as error:  # the writer lives, whatever comes
                self._in_trouble(error)
        if self._db is not None:
            self._db.close()

    def _write(self, rows: list[tuple[str, Row]]) -> bool:
        """One transaction for all; what cannot be written is held back."""
        held = len(self._held) + len(rows)
        self._held.extend(rows)
        self.lost_rows += held - len(self._held)
        try:
            # Where the file was taken away, SQLite would go on writing where nobody reads.
            if self._db is not None and not (
                self.path.exists() and self.path.stat().st_ino == self._inode
            ):
                self._db.close()
                self._db = None
            if self._db is None:
                self._open_file()
            with cast(sqlite3.Connection, self._db) as db:
                db.execute("BEGIN IMMEDIATE")
                self.lost_rows += put_rows(db, ((_PUT[table], row) for table, row in self._held))
        except (OSError, sqlite3.Error) as error:
            self._in_trouble(error)
            return False
        self._held.clear()
        if self.trouble:
            lost = f"; {self.lost_rows} rows were lost" if self.lost_rows else ""
            log.warning("ledger: %s is written again%s", self.path, lost)
            self.trouble = ""
        return True

    def _in_trouble(self, error: Exception) -> None:
        trouble = printable(getattr(error, "strerror", None) or str(error))
        if trouble != self.trouble:
            log.error("ledger: %s cannot be written: %s", self.path, trouble)
        self.trouble = trouble

    def _clean(self) -> None:
        """Once an hour, forget what is older than `retention`."""
        now, days = self._now(), self._retention_days()
        if not days or now - self._cleaned_unix < 3600 or self._db is None or self.trouble:
            return
        with contextlib.suppress(sqlite3.Error):
            old = "SELECT id FROM calls WHERE time_unix < ? LIMIT 1000"  # nobody waits long for it
            values = (min(now - days * 86400, period_start(now, "month")),)  # budgets need these
            self._db.execute("DELETE FROM tasks WHERE began_unix < ?", values)
            self._db.execute(f"DELETE FROM bodies WHERE id IN ({old})", values)
            found = self._db.execute(f"DELETE FROM calls WHERE id IN ({old})", values)
            self._cleaned_unix = now if found.rowcount < 1000 else 0.0


def migrate(db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise sqlite3.DatabaseError(f"it was written by a newer llmproxy (version {version})")
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        db.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")


def put_rows(db: sqlite3.Connection, rows: Iterable[tuple[str, Row]]) -> int:
    """Write rows; one that cannot be stored takes no others with it. Returns how many those are."""
    lost = 0
    for sql, row in rows:
        try:
            db.execute(sql, row)
        except (UnicodeError, OverflowError, sqlite3.InterfaceError, sqlite3.ProgrammingError) as e:
            log.error("ledger: a row cannot be stored: %s", fault_lines(e))
            lost += 1
    return lost


def take_up(db: sqlite3.Connection, path: Path, own_run: int) -> None:
    """Rows that dead processes left in their journals; their open calls count as reserved."""
    alive, dead = {own_run}, list[Path]()
    for file in sorted(path.parent.glob(f"{glob.escape(path.name)}-*-?.journal")):
        if not re.fullmatch(rf"{re.escape(path.name)}-[0-9a-f]{{8}}-[01]\.journal", file.name):
            continue
        run_id = int(file.name[-18:-10], 16)
        first = file.with_name(file.name[:-9] + "0.journal")
        handle = os.open(first, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if run_id in alive or is_locked(handle):
                alive.add(run_id)
                continue
            dead.append(file)
            rows = Journal.read(file)
            for kind in ("IGNORE", "REPLACE"):  # what has ended replaces what was open
                found = [row for row in rows if (row[-1] == "open") is (kind == "IGNORE")]
                put_rows(db, ((_PUT["calls"].replace("REPLACE", kind), row) for row in found))
        finally:
            os.close(handle)
    marks = ", ".join("?" * len(alive))
    db.execute(
        "UPDATE calls SET state = 'lost', cost_micros = reserved_micros, tokens_estimated = 1 "
        f"WHERE state = 'open' AND id >> 32 NOT IN ({marks})", tuple(alive),
    )  # fmt: skip
    for file in dead:
        file.unlink(missing_ok=True)
        file.with_name(file.name[:-9] + "0.journal").unlink(missing_ok=True)


def open_ledger(path: Path) -> sqlite3.Connection:
    """The ledger to read from, whether its daemon runs or not. Raises sqlite3.Error."""
    db = sqlite3.connect(f"file:{urllib.parse.quote(str(path))}?mode=ro", uri=True, timeout=5.0)
    db.row_factory = sqlite3.Row
    return db


def read_rows(path: Path, sql: str, values: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Rows of a query. Raises sqlite3.Error."""
    with contextlib.closing(open_ledger(path)) as db:
        return [dict(row) for row in db.execute(sql, tuple(values))]


SPENT = "coalesce(sum(cost_micros), 0)"
FILTERS = ("client", "task", "model", "upstream", "fate", "status")


def calls_query(wanted: Mapping[str, Any], trace: str | None = None) -> tuple[str, list[Any]]:
    """SQL and values for the last calls, or those of a trace.

    Raises ValueError: names the filter that cannot be used.
    """
    if unknown := [name for name in wanted if name not in (*FILTERS, "since", "limit")]:
        raise ValueError(f"{unknown_name(unknown[0], FILTERS)}; also since and limit")
    named = [name for name in FILTERS if wanted.get(name) is not None]
    clauses, values = ["1", *(f"{name} GLOB ?" for name in named)], list[Any]()
    values += [str(wanted[name]) for name in named]
    if wanted.get("since") is not None:
        try:
            values.append(time.time() - parse_span(str(wanted["since"])))
        except ValueError as error:
            raise ValueError(f"since: {error}") from None
        clauses.append("time_unix >= ?")
    limit = str(wanted.get("limit") or 50)
    if not limit.isdecimal():
        raise ValueError("limit: wants a whole number")
    if trace is not None:
        clauses.append("? IN (trace, request_id)")
        values.append(trace)
    order = "ORDER BY time_unix DESC, id DESC LIMIT ?"
    sql = f"SELECT * FROM calls WHERE {' AND '.join(clauses)} {order}"
    return sql, [*values, min(int(limit), 100_000)]


def shown_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row for people and programs: USD, booleans, the steps as a list."""
    shown = {key: value for key, value in row.items() if not key.endswith("_micros")}
    for name in ("cost", "reserved", "saved"):
        micros = row[f"{name}_micros"]  # a cost of NULL: the model had no price
        shown[f"{name}_usd"] = None if micros is None else micros / 1e6
    for name in [name for name in shown if name.endswith("_ms")]:
        shown[name] = round(shown[name] or 0.0, 1)
    for name in ("stream", "tokens_estimated"):
        shown[name] = bool(row[name])
    shown["steps"] = json_at(row["steps"] or "[]") or []
    return shown


SPEND_BY = {
    "model": "model", "client": "client", "task": "task",
    "day": "strftime('%Y-%m-%d', time_unix, 'unixepoch', 'localtime')",
}  # fmt: skip


def spend_query(by: str, since_unix: float) -> tuple[str, list[Any]]:
    upstream = "coalesce(sum(CASE WHEN fate IN ('miss', 'bypass') THEN {} END), 0) AS {}"
    order = "name" if by == "day" else "cost_usd DESC, tokens_in DESC"
    return f"""
        SELECT {SPEND_BY[by]} AS name, count(*) AS calls, {upstream.format(1, "upstream_calls")},
        {upstream.format("tokens_in", "tokens_in")}, {upstream.format("tokens_out", "tokens_out")},
        {SPENT} / 1e6 AS cost_usd,
        coalesce(sum(CASE WHEN cost_micros IS NULL THEN tokens_in + tokens_out END), 0)
        AS unpriced_tokens, coalesce(sum(saved_micros), 0) / 1e6 AS saved_usd
        FROM calls WHERE time_unix >= ? GROUP BY name ORDER BY {order}""", [since_unix]


###############################################################################
# Llama
###############################################################################
# Rule: all that is known of llama.cpp's server, behind a few questions. Says nothing to callers.

def add_delta(part: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add to what one choice, one native result or one content block comes to."""
    for name, value in delta.items():
        if name == "tool_calls":
            tools = part.setdefault(name, {})
            for call in value or ():
                made = {"type": "function", "function": {}}
                known = tools.setdefault(call.get("index", 0), made)
                add_delta(known["function"], call.get("function") or {})
                known.update({k: v for k, v in call.items() if k not in ("index", "function")})
        elif name in ("role", "name"):
            part[name] = value
        elif isinstance(value, str) and name != "type":
            part[name] = part.get(name, "") + value


class Assembly:
    """The plain answer that llama.cpp would have given, put together from its stream.

    Knows the forms by their events: chat and text completions, `/completion`, Anthropic's
    messages, and responses, whose last event holds the whole. Of several choices the usage is the
    first one's, as in the server's own plain answer.
    """

    # What asks for more than a stream holds: it has no probabilities of the last token.
    NOT_STREAMED = (
        "logprobs", "n_probs", "verbose", "response_fields", "return_tokens", "conversation",
        "background",
    )  # fmt: skip

    def __init__(self) -> None:
        self._rest = b""
        self._error: tuple[int, bytes] | None = None
        self._form = ""
        self._base: dict[str, Any] = {}
        self._parts: dict[int, dict[str, Any]] = defaultdict(dict)
        self._counts: dict[int, dict[str, Any]] = {}  # usage and timings, by choice
        self._ended = 0  # the choice that ended last: a usage after it is its own
        self.is_over = False

    @classmethod
    def can_be(cls, name: str, doc: Mapping[str, Any]) -> bool:
        """Whether a plain call of a route can be asked as a stream."""
        route, is_more = ROUTES.get(name), any(doc.get(field) for field in cls.NOT_STREAMED)
        is_route = route is not None and route.ends is not None and not is_more
        return is_route and isinstance(doc.get("stream"), (bool, type(None)))

    def feed(self, data: bytes) -> None:
        *events, self._rest = EVENT_END.split(self._rest + data)
        for event in events:
            self.is_over = self.is_over or bool(_DONE.search(event))
            if b"{" in event and not self.is_over:
                with contextlib.suppress(*ODD_JSON):
                    self._take(event)

    def _take(self, event: bytes) -> None:
        if b"error" in event and (found := stream_error(event)) is not None:
            self._error = found
            return
        doc = json.loads(event[6:] if event.startswith(b"data: {") else event_data(event))
        if "choices" in doc:
            self._take_choices(doc)
        elif "type" in doc:
            self._take_typed(doc)
        elif "content" in doc:
            self._form, part = "native", self._parts[doc.get("index", 0)]
            add_delta(part, {"content": doc.pop("content")})
            part.update(doc if doc.get("stop") else {})

    def _take_choices(self, doc: dict[str, Any]) -> None:
        choices = doc.pop("choices")
        for choice in choices:
            part = self._parts[choice["index"]]
            self._form = "chat" if "delta" in choice else "text"
            said = choice["delta"] if "delta" in choice else {"text": choice.get("text", "")}
            add_delta(part, said)
            if choice.get("finish_reason"):
                self._ended = choice["index"]
                part["finish_reason"] = choice["finish_reason"]
        counts = {name: doc.pop(name) for name in ("usage", "timings") if doc.get(name)}
        if not choices or choices[-1].get("finish_reason"):
            self._counts.setdefault(self._ended, {}).update(counts)
        doc.pop("prompt_progress", None)
        self._base.update(doc)

    def _take_typed(self, doc: dict[str, Any]) -> None:
        kind, part = doc["type"], self._parts[doc.get("index", 0)]
        if kind == "message_start":
            self._form, self._base = "message", doc["message"]
        elif kind == "content_block_start":
            part.update(doc["content_block"])
        elif kind == "content_block_delta":
            add_delta(part, doc["delta"])
        elif kind == "message_delta":
            self._base.update(doc["delta"])
            self._base["usage"].update(doc.get("usage") or {})
        elif kind in ("response.completed", "response.incomplete"):
            response = doc["response"]
            for item in response["output"]:
                item.setdefault("status", "completed")
            self._base = {"completed_at": response.get("created_at"), **response}

    def plain(self) -> tuple[int, bytes]:
        """Status and JSON. Raises ProxyError: upstream_incomplete; what came is no answer."""
        if self._error is not None:
            return self._error
        with contextlib.suppress(*ODD_JSON):
            is_begun = self._form or "object" in self._base  # it happens that it leaves that out
            if is_begun and (made := self._whole()):
                text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))  # as it writes
                return 200, text.encode("utf-8", "replace")
        raise ProxyError("upstream_incomplete", "the upstream's stream holds no answer")

    def _whole(self) -> Any:
        doc, made = self._base, list[Any]()
        for index, part in sorted(self._parts.items()):
            fields = dict(part)
            if self._form == "chat":
                finish, tools = fields.pop("finish_reason", None), fields.pop("tool_calls", {})
                message = {"role": "assistant", "content": "", **fields}
                if tools:
                    message["tool_calls"] = [call for _, call in sorted(tools.items())]
                made.append({"finish_reason": finish, "index": index, "message": message})
            elif self._form == "text":
                text = {"text": part["text"], "index": index, "logprobs": None}
                made.append({**text, "finish_reason": part.get("finish_reason")})
            elif self._form == "native":
                if "generation_settings" in fields:
                    sampling = {**fields["generation_settings"], "stream": False}
                    fields["generation_settings"] = sampling
                made.append(fields)
            elif fields.get("type") == "tool_use":  # one that was cut short is empty
                said = fields.pop("partial_json", "")
                made.append({**fields, "input": json_at(said) or {}})
            elif fields:
                made.append(fields)
        if self._form == "native":
            return made[0] if len(made) == 1 else made
        if self._form == "message":
            return {**doc, "content": made}
        if not self._form:
            return doc
        counts = self._counts[min(self._counts)] if self._counts else {}
        own = {name: value for name, value in doc.items() if name not in ("id", "object")}
        usage, timings = ({n: counts[n]} if n in counts else {} for n in ("usage", "timings"))
        kind = "chat.completion" if self._form == "chat" else "text_completion"
        return {"choices": made, **own, "object": kind, **usage, "id": doc.get("id"), **timings}


class Liveness:
    """What a llama.cpp server shows of itself while its answers are silent.

    A batch of 2,048 prompt tokens shows nothing until it is through, which takes minutes on a
    slow machine. So a server that answers and is busy is believed for STUCK_S without a count
    that moves; one that is idle has lost the call; one that does not answer is hung after DEAD_S.
    """

    DEAD_S, STUCK_S = 5.0, 600.0

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.answered_at = self.moved_at = self.asked_at = -math.inf
        self._open_at = -math.inf  # the first question since it answered last
        self.is_busy = False
        self._seen: Any = None

    def ask(self) -> None:
        """It is asked."""
        now = self._clock()
        if self.asked_at <= self.answered_at:
            self._open_at = now
        self.asked_at = now

    def saw(self, is_busy: bool, seen: Any) -> None:
        """It has answered; `seen` is whatever moves on while it works."""
        self.answered_at = self._clock()
        self.is_busy = is_busy
        if seen != self._seen:
            self._seen, self.moved_at = seen, self.answered_at

    def is_over(self, heard_at: float, limit_s: float, now: float) -> bool:
        """Whether a call that was last heard at `heard_at` is to be given up."""
        life_at = max(heard_at, self.answered_at)
        if self.asked_at > life_at:  # it is being asked, and has half a second to answer
            dead_s = min(limit_s, self.DEAD_S)
            open_s = now - max(self._open_at, heard_at)
            return now - life_at >= dead_s and open_s >= min(0.5, dead_s)
        if self.answered_at < heard_at:  # it has not been looked at since
            return now - heard_at >= max(limit_s, 2 * LOOK_S)
        is_working = self.is_busy and now - max(heard_at, self.moved_at) < self.STUCK_S
        return now - heard_at >= limit_s and not is_working


class Speeds:
    """What the `timings` of a llama.cpp server's last calls come to."""

    def __init__(self) -> None:
        self._calls: deque[Counter[str]] = deque(maxlen=20)

    def add(self, body: bytes) -> None:
        """Take the last `timings` of an answer, where it has any."""
        timings = json_at(body[body.rfind(b'"timings"') + 9 :]) if b'"timings"' in body else None
        counts = timings.items() if isinstance(timings, dict) else ()
        if numbers := {name: n for name, n in counts if type(n) in (int, float)}:
            self._calls.append(Counter(numbers))

    def shown(self) -> dict[str, float | None]:
        """Tokens a second of prompts and of output; the share of prompts that was cached."""
        n = sum(self._calls, Counter[str]())
        parts = {
            "prompt_tokens_per_s": (1000 * n["prompt_n"], n["prompt_ms"]),
            "output_tokens_per_s": (1000 * n["predicted_n"], n["predicted_ms"]),
            "cache_hit_share": (n["cache_n"], n["cache_n"] + n["prompt_n"]),
        }
        return {name: round(a / b, 3) if b > 0 else None for name, (a, b) in parts.items()}


class Prompts:
    """Which beginnings of prompts a llama.cpp server has read of late, and so need not read again.

    Held are hashes, never texts: of each beginning (all pieces up to one), and of the piece that
    came after it last one every BLOCK_CHARS, to say where another one parts from it. That the
    server still has a beginning is a guess: `trust` is the share of what was guessed of late that
    it really had.
    """

    BLOCK_CHARS, MOST_BLOCKS, MOST = 64, 1024, 4000

    def __init__(self) -> None:
        self.trust = 1.0
        self._next: OrderedDict[int, tuple[str, array[int]]] = OrderedDict()  # by beginning

    def unread_share(self, pieces: list[tuple[str, str]]) -> float:
        """The part of a prompt that the server will probably have to read."""
        chars = sum(len(text) for _, text in pieces)
        _, held_chars, _ = self._compare(pieces, self._beginnings(pieces))
        return 1.0 - self.trust * held_chars / chars if chars else 1.0

    def took(self, pieces: list[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        """A prompt was read: what came from the cache, and where it parts from what was held."""
        chars, beginnings = sum(len(text) for _, text in pieces), self._beginnings(pieces)
        known, held_chars, differs = self._compare(pieces, beginnings)
        if usage.prompt and held_chars > max(1000, chars // 10):
            found = usage.cached / usage.prompt * chars / held_chars
            self.trust += 0.3 * (min(1.0, found) - self.trust)
        for n, beginning in enumerate(beginnings):
            if n >= known and n < len(pieces):
                self._next[beginning] = pieces[n][0], self._blocks(pieces[n][1])
            self._next.setdefault(beginning, ("", array("q")))
            self._next.move_to_end(beginning)
        while len(self._next) > self.MOST:
            self._next.popitem(last=False)
        return {"cached": usage.cached, "read": usage.prompt - usage.cached, "differs": differs}

    @staticmethod
    def _beginnings(pieces: list[tuple[str, str]]) -> list[int]:
        made = itertools.accumulate(pieces, lambda at, piece: hash((at, piece[1])), initial=0)
        return list(made)

    def _compare(
        self, pieces: list[tuple[str, str]], beginnings: list[int]
    ) -> tuple[int, int, str]:
        """Pieces and characters that are known, and the place of the first that is not."""
        known = next((n for n in range(len(pieces), 0, -1) if beginnings[n] in self._next), 0)
        chars = sum(len(text) for _, text in pieces[:known])
        if known == len(pieces):
            return known, chars, ""
        (place, text), (before, held) = pieces[known], self._next.get(beginnings[known], ("", ()))
        if not held:  # nothing came after it: the conversation goes on
            return known, chars, ""
        pairs = enumerate(zip(held, self._blocks(text), strict=False))
        same = next((n for n, (one, other) in pairs if one != other), len(held))
        start = min(same * self.BLOCK_CHARS, len(text))
        return known, chars + start, f"{place}, character {start}" + (
            f" (was {before})" if before != place else "")  # fmt: skip

    def _blocks(self, text: str) -> array[int]:
        step = self.BLOCK_CHARS
        starts = range(0, min(len(text), step * self.MOST_BLOCKS), step)
        return array("q", [hash(text[start : start + step]) for start in starts])


class Instance:
    """One model that a llama.cpp runs: its slots and context, and how it gets on while silent.

    `ask` asks its server a small question: path and bytes at most in, status and body out.
    """

    USUAL_SLOTS = 4  # of a llama.cpp that was not told how many

    def __init__(
        self, ask: Callable[[str, int], Awaitable[tuple[int, bytes]]], name: str = ""
    ) -> None:
        self._ask = ask
        self.name = name  # with a router; else it is the only one, whatever callers call it
        self.state = "loaded"  # as a router says: or loading, sleeping, unloaded
        self.slots: int | None = None
        self.busy_slots: int | None = None
        self.slot_tokens = 0  # the context of each
        self.context_used = 0  # of all together
        self.prompts, self.liveness = Prompts(), Liveness()
        self.needs_props = True
        self._looks = ["/slots", "/metrics", "/health"]  # the first that the server has

    @property
    def context_tokens(self) -> int:
        return self.slot_tokens * (self.slots or 0)

    async def get(self, path: str) -> tuple[int, bytes]:
        """A question about this model, which never makes a router load it."""
        if self.name:
            path += f"?model={urllib.parse.quote(self.name, safe='')}&autoload=false"
        async with asyncio.timeout(HEALTH_LIMIT_S):
            return await self._ask(path, FLIGHT_WINDOW_BYTES)

    async def learn(self) -> tuple[int, dict[str, Any]]:
        """What it says of itself: status and properties."""
        status, body = await self.get("/props")
        props = _mapping(json_at(body)) if status == 200 else {}
        self.needs_props = status == 503
        self.slots = _whole(props, "total_slots") or None
        self.slot_tokens = _whole(_dict(props, "default_generation_settings"), "n_ctx")
        self._looks = ["/slots", "/metrics", "/health"]
        return status, props

    async def look(self) -> bool:
        """Whether it answers; and is it busy, and does it get on?"""
        self.liveness.ask()
        path = self._looks[0]
        try:
            status, body = await self.get(path)
        except (*NO_ANSWER, ValueError):
            return False
        found = json_at(body) if status == 200 and path == "/slots" else None
        if isinstance(found, list):
            slots = [slot for slot in found if isinstance(slot, dict)]
            busy = [slot for slot in slots if slot.get("is_processing")]
            moves = ("id_task", "n_prompt_tokens_processed", "next_token")
            self.liveness.saw(bool(busy), [[slot.get(name) for name in moves] for slot in busy])
            self.busy_slots = len(busy)
            self.context_used = sum(_whole(slot, "n_prompt_tokens") for slot in slots)
        elif status == 200 and path == "/metrics":
            counts = dict(re.findall(rb"^llamacpp:(\w+) (\S+)", body, re.MULTILINE))
            moving = counts.get(b"prompt_tokens_total"), counts.get(b"tokens_predicted_total")
            self.liveness.saw(counts.get(b"requests_processing") != b"0", moving)
        else:
            self.liveness.saw(True, None)
            if len(self._looks) > 1 and status not in TRANSIENT:  # else it has a bad moment
                self._looks.pop(0)
        return True

    def rest(self, is_known: bool = True) -> None:
        """It has nothing to do, or is not in memory."""
        self.busy_slots = 0 if is_known else None

    def shown(self) -> dict[str, Any]:
        return {
            "name": self.name, "state": self.state, "slots": self.slots,
            "busy_slots": self.busy_slots, "context_tokens": self.context_tokens,
            "context_used": self.context_used,
        }  # fmt: skip


class Llama:
    """A server that may be a llama.cpp: what it shows of itself, looked at while calls run.

    One in router mode (`--models-dir`) has an instance for each model, loads the models when they
    are called, and answers only where its question names one that is loaded.
    """

    def __init__(
        self, base: str, is_local: bool, get: Callable[[str, int], Awaitable[tuple[int, bytes]]]
    ) -> None:
        self.base, self._is_local, self._get = base, is_local, get
        self.is_known = False  # to be one: its /props said so
        self.is_router = False
        self.model = ""  # of a plain one
        self.is_loading = False
        self.is_gone = False
        self.speeds = Speeds()
        self.on_change: Callable[[bool], None] = lambda is_other_model: None
        self._only = Instance(get)  # of a plain server; of a router, what is known of no model
        self.models: dict[str, Instance] = {}  # of a router, by name
        self._aliases: dict[str, str] = {}
        self._left_at = -math.inf  # when it was gone
        self._needs_props = True
        self._looked_at = -1  # how many attempts there were when it was last looked at

    # -- what calls ask

    def lane(self, model: str) -> str:
        """The name of the instance that runs a model; "" where there is but one."""
        return self._aliases.get(model, model if model in self.models else "")

    def of(self, model: str) -> Instance:
        return self.models.get(self.lane(model), self._only)

    def is_over(self, model: str, heard_at: float, limit_s: float, now: float) -> bool:
        """Whether a call that was last heard at `heard_at` is to be given up."""
        if self.is_known:
            return self.of(model).liveness.is_over(heard_at, limit_s, now)
        return now - heard_at >= limit_s

    @property
    def is_mute(self) -> bool:
        """It takes connections and does not answer any more."""
        silent_s = time.monotonic() - self._only.liveness.answered_at
        return self.is_known and silent_s > 2 * LOOK_S + HEALTH_LIMIT_S

    @property
    def is_restarting(self) -> bool:
        """It has just gone: the user is probably giving it another model."""
        return self.is_known and self.is_gone and time.monotonic() - self._left_at < RESTART_S

    def context_of(self, model: str) -> int:
        """Tokens that a slot holds; 0: not known."""
        return self.of(model).slot_tokens if self.is_known else 0

    @property
    def context_tokens(self) -> int:
        """Of all slots together, of a router's models too that are not in memory; 0: not known."""
        usual = 4000 * Instance.USUAL_SLOTS
        ones = self.models.values()
        return sum(one.context_tokens or usual for one in ones) or self._only.context_tokens

    def lanes(self) -> dict[str, int]:
        """The slots of each model of a router, or what is usual."""
        return {name: one.slots or Instance.USUAL_SLOTS for name, one in self.models.items()}

    def shown(self) -> dict[str, Any]:
        ones = [one for one in self.models.values() if one.state == "loaded"] or [self._only]
        found = {
            name: sum(getattr(one, name) or 0 for one in ones)
            for name in ("slots", "busy_slots", "context_tokens", "context_used")
        }
        if not self.models:
            found |= {"slots": self._only.slots, "busy_slots": self._only.busy_slots}
        models = [one.shown() for one in self.models.values()]
        return {"model": self.model, "llama_cpp": self.is_known, **found, "models": models}

    # -- what is heard of it

    def reached(self, is_reachable: bool) -> None:
        """Whether it can be connected to has changed: it may be another server by now."""
        if not is_reachable and not self.is_gone:
            self._left_at = time.monotonic()
            self._only.prompts = Prompts()
            for one in self.models.values():
                one.state = "unloaded"
        self.is_gone = not is_reachable
        self.is_loading &= is_reachable
        self.doubt()

    def doubt(self) -> None:
        """It may be another process by now."""
        self._needs_props |= self.is_known or self._is_local

    def said_health(self, status: int, body: bytes) -> None:
        was_loading = self.is_loading
        self.is_loading = status == 503 and (was_loading or b"Loading model" in body)
        self._needs_props |= was_loading is not self.is_loading

    # -- looking

    async def attend(
        self, attempts: int, running: Collection[str], is_alive: Callable[[], Any]
    ) -> bool | None:
        """One look: is it there, and does it get on? Whether it answered; None: was not asked.

        `running`: the lanes that have calls.
        """
        is_healthy: bool | None = None
        if self.is_known or self.is_loading or (self._is_local and self.is_gone):
            is_healthy = await self._look(attempts, running, is_alive)
        if self._needs_props and not self.is_gone and not self.is_loading:
            await self.learn_props()
        return is_healthy

    async def _look(
        self, attempts: int, running: Collection[str], is_alive: Callable[[], Any]
    ) -> bool:
        """An idle one is asked for its health only."""
        only = self._only
        if self.is_router and not self.is_gone:
            return await self._look_at_models(running)
        if self.is_known and (running or attempts != self._looked_at):
            self._looked_at = attempts
            return await only.look()
        only.liveness.ask()
        if is_healthy := await is_alive():
            only.liveness.saw(False, None)
            only.rest(self.is_known)
        return bool(is_healthy)

    async def _look_at_models(self, running: Collection[str]) -> bool:
        """A router's: which are in memory, and how do those get on that have calls?

        The others are left alone: a question about one counts as a use of it, and keeps it there.
        """
        for one in (self._only, *map(self.of, running)):
            one.liveness.ask()
        try:
            status, body = await self._only.get("/models")
        except (*NO_ANSWER, ValueError):
            return False
        listed = _mapping(json_at(body)).get("data") if status == 200 else None
        self._only.liveness.saw(True, None)  # of a model that it does not list, it may be at work
        before = self.lanes(), self.context_tokens
        if isinstance(listed, list):
            self._take_models([_mapping(entry) for entry in listed])
        asked = []
        for name, one in self.models.items():
            if one.state == "loaded" and one.needs_props:
                with contextlib.suppress(*NO_ANSWER, ValueError):
                    await one.learn()
            if one.state == "loaded" and name in running:
                asked.append(one.look())
                continue
            one.rest()
            one.liveness.saw(name in running, None)  # it waits for its model, and that is alive
        await asyncio.gather(*asked)
        if before != (self.lanes(), self.context_tokens):
            self.on_change(False)
        return True

    def _take_models(self, listed: list[dict[str, Any]]) -> None:
        """What /models says: names, states, and the context of what is loaded."""
        found, self._aliases = dict[str, Instance](), {}
        for entry in listed:
            if not (name := str(entry.get("id") or "")):
                continue
            one = found[name] = self.models.get(name) or Instance(self._get, name)
            state = str(_dict(entry, "status").get("value", "loaded"))
            if one.state != state:
                one.needs_props, one.prompts = True, Prompts()  # another process than before
            one.state = state
            one.slot_tokens = _whole(_dict(entry, "meta"), "n_ctx") or one.slot_tokens
            aliases = entry.get("aliases")
            for alias in aliases if isinstance(aliases, list) else ():
                self._aliases[str(alias)] = name
        self.models = found

    async def learn_props(self) -> None:
        """What it says of itself: slots, context, and the model it runs; or that it is a router."""
        before, only = self.model, self._only
        with contextlib.suppress(*NO_ANSWER, ValueError):
            status, props = await only.learn()
            self._needs_props = only.needs_props
            self.is_router = props.get("role") == "router" or (not props and self.is_router)
            if self.is_router:
                self.is_known, self.model = True, ""
                await self._look_at_models(())
            elif props:
                self.models, self._aliases = {}, {}
                self.model = Path(str(props.get("model_path", ""))).name
                is_told = bool(_dict(props, "default_generation_settings"))
                self.is_known = is_told and only.slots is not None
            elif status in (404, 405, 501):
                self.is_known = False
        if is_other := bool(before) and self.model != before:
            log.warning("%s runs %s now", self.base, printable(self.model) or "a router")
            only.prompts = Prompts()
        self.on_change(is_other)


###############################################################################
# Upstream
###############################################################################
# Rule: one server, the connections to it, and one attempt over one of them. Says what came of it;
# knows nothing of queues, or whether there will be another attempt.

# llama.cpp's answers to a prompt that does not fit, of any age: the same again, every time.
TOO_LONG = re.compile(rb"exceed_context_size_error|[Cc]ontext size has been exceeded")
# A 403 that is for the key or its account; any other is for what one call asks.
KEY_REFUSED = re.compile(
    rb"\bkey\b|account|organi[sz]ation|project|billing|suspended|revoked|unsupported_country|^\s*$",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Failure:
    """An attempt that failed before its first byte went to a caller.

    `answer` is what the upstream said, to be passed on where there is no further attempt;
    without one, `error` speaks for it.
    """

    error: ProxyError
    is_transient: bool
    counts: bool = True  # as a failure of the circuit
    ran_nothing: bool = False  # the upstream surely did no work
    is_paid: bool = False  # it has probably read the prompt, and counts it
    is_loading: bool = False
    is_key_refused: bool = False  # one of our pool
    has_backed_off: bool = False  # there was a wait for a further attempt, even if it came to none
    status: int = 0  # that it means; a stream may say 200 first
    retry_after_s: float | None = None
    answer: tuple[Head, bytes] | None = None

    @property
    def is_unsent(self) -> bool:
        return self.ran_nothing and not self.status


def judge(head: Head, body: bytes) -> Failure | None:
    """What an answer means that is an error; None for one that is simply passed on.

    Judged alike, whether the status says so, a 200's body or a stream: the prompt's fault, the
    key's, the limit's, or the upstream's, which alone counts for its circuit.
    """
    status = head.status
    if status < 400:
        ends = body if len(body) <= TAIL_BYTES else body[:4096] + body[-4096:]  # they stand there
        is_odd = status == 200 and "json" in head.kind and HAS_FAULT.search(ends)
        if not is_odd or not (status := fault_status(json_at(body))):
            return None
    is_loading, is_too_long = status == 503 and b"Loading model" in body, TOO_LONG.search(body)
    is_final = bool(is_too_long) or head.low.get("x-should-retry") == "false"
    return Failure(
        ProxyError("upstream_unreachable", f"the upstream answered {status}"),
        is_transient=status in TRANSIENT and not is_final,
        counts=is_outage(status) and not is_loading and not is_too_long,
        ran_nothing=status == 429 and not is_final, is_loading=is_loading, status=status,
        retry_after_s=asked_wait_s(head.low, time.time()), answer=(head, body),
    )  # fmt: skip


def too_long(prompt_tokens: int, context_tokens: int) -> Failure:
    """What a llama.cpp says to a prompt that is longer than its context, without asking it."""
    why = f"request ({prompt_tokens} tokens) exceeds the available context size "
    why += f"({context_tokens} tokens), try increasing it"
    kind, counts = "exceed_context_size_error", {"n_prompt_tokens": prompt_tokens}
    error = {"code": 400, "message": why, "type": kind, **counts, "n_ctx": context_tokens}
    head = NO_HEAD.changed(400, "application/json; charset=utf-8")
    return cast(Failure, judge(head, json.dumps({"error": error}).encode()))


def is_outage(status: int) -> bool:
    """Whether a status is the upstream's own fault; a 501 says that a feature is off."""
    return status >= 500 and status != 501


class Preempted(Exception):
    """An attempt yielded its slot to another call."""


class WaitedLong(TimeoutError):
    """A server that was alive was waited for, and all patience is over."""


class Link(ResponseHandler):
    """A connection to an upstream: aiohttp's transport and C parser, without an object a call.

    What comes is in `message` and `payload`. Whoever waits is woken with each segment; while there
    is a `sink` it is called instead, so that a stream's chunk costs no turn of a task.
    """

    is_busy = False  # with an exchange of ours; until then aiohttp may speak to a proxy
    is_paused = False  # it is we who wait, and that is no silence of the upstream
    patience_s = 0.0  # for the first byte, beyond `limit_s`, of a server that answers meanwhile
    is_waited_for = False  # beyond that
    is_bodiless = False
    model = ""  # that is asked
    message: Any = None
    payload: Any = None
    error: BaseException | None = None
    sink: Callable[[], None] | None = None
    uses = 0
    heard_at = idle_at = limit_s = 0.0
    deadline = math.inf
    connection: Any = None  # aiohttp's, which counts it
    _news: asyncio.Future[None] | None = None

    def begin(self, limit_s: float, total_s: float | None, is_bodiless: bool) -> None:
        """Get ready for an exchange, under a limit of silence and one for the whole."""
        self.message = self.payload = self.error = self.sink = None
        self.is_busy, self.limit_s, self.is_waited_for = True, limit_s, False
        self.heard_at = now = self._loop.time()
        self.deadline = now + total_s if total_s else math.inf
        if self.uses == 0 or self.is_bodiless or is_bodiless:
            self.set_response_params(
                skip_payload=is_bodiless, read_until_eof=True, auto_decompress=False,
                max_line_size=HEADER_LINE_BYTES, max_field_size=HEADER_LINE_BYTES,
                max_headers=MAX_HEADERS,
            )  # fmt: skip
        self.is_bodiless = is_bodiless
        self.uses += 1

    async def head(self) -> Any:
        """The parsed head of the answer."""
        while self.message is None:
            await self.news()
        return self.message

    async def news(self) -> None:
        """Wait until something has come; raises what has ended the connection instead."""
        if self.error is None:
            self._news = self._loop.create_future()
            try:
                await self._news
            finally:
                self._news = None
        if self.error is not None:
            raise self.error

    def take(self) -> bytes:
        """What has come of the body; while it is taken, a parser that had stopped goes on."""
        data: bytes = self.payload.read_nowait(-1)
        while data and (more := self.payload.read_nowait(-1)):
            data += more
        return data

    async def more(self) -> bytes:
        """What has come since of the body; b"" once all of it has been taken."""
        while not self.is_over:
            if data := self.take():
                return data
            await self.news()
        return b""

    @property
    def is_over(self) -> bool:
        """The whole answer has been taken."""
        return bool(self.payload.at_eof())

    @property
    def is_reusable(self) -> bool:
        transport = self.transport
        return bool(
            transport is not None and not transport.is_closing() and not self._should_close
            and self.error is None and self.payload is not None and self.is_over
        )  # fmt: skip

    def wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.wake()

    def rest(self, is_paused: bool) -> None:
        """While we wait for a caller, the upstream need not hurry."""
        now = self._loop.time()
        if self.is_paused:
            self.deadline += now - self.heard_at
        self.is_paused, self.heard_at = is_paused, now

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:  # aiohttp would go to the transport after every answer
            super().resume_reading(resume_parser)

    def data_received(self, data: bytes) -> None:
        if not self.is_busy:
            if self.uses == 0:
                super().data_received(data)
            elif self.transport is not None:  # an answer that nobody asked for reaches nobody
                self.transport.abort()
            return
        try:
            messages, _, _ = self._parser.feed_data(data)  # type: ignore[union-attr]
        except Exception as error:
            self.fail(error)
            return
        for message, payload in messages:
            if self.message is not None:
                self._should_close = True
            elif message.code >= 200:
                self.message, self.payload = message, payload
                self._should_close |= message.should_close
        self.heard_at = self._loop.time()
        if self.payload is not None and (broken := self.payload.exception()) is not None:
            self.fail(broken)
        else:
            self._pour()

    def _pour(self) -> None:
        """Tell who waits, or the sink."""
        sink, self.sink = self.sink, None  # taking bytes may make the parser go on, and call us
        if sink is None:
            self.wake()
            return
        try:
            sink()
        except Exception as error:  # a fault of ours: it is the exchange's to say so
            self.fail(error)
        self.sink = sink

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)  # an answer without a length ends here
        if self.payload is not None and self.payload.is_eof():
            self._pour()
        elif self.payload is not None:
            self.fail(aiohttp.ClientPayloadError())
        elif isinstance(exc, OSError):  # where it was reset, it may have done the work
            self.fail(aiohttp.ClientOSError(*exc.args))
        else:
            self.fail(aiohttp.ServerDisconnectedError())


class _Resolver(aiohttp.ThreadedResolver):
    """`localhost` is both loopback addresses; the connector takes the one that answers."""

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        if host != "localhost":
            return await super().resolve(host, port, family)
        found = {"hostname": host, "port": port, "proto": 0, "flags": 0}
        kinds = (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6))
        return [{**found, "host": address, "family": kind} for address, kind in kinds]


class Pool:
    """Connections to one upstream. aiohttp's connector makes them: TLS, proxies, names.

    One timer looks over all that are under a limit or idle, so that an attempt costs no timer and
    a chunk an assignment.
    """

    TICK_S, STALL_S = 0.05, 0.5

    def __init__(
        self, url: URL, proxy: URL | None, is_over: Callable[[Link, float], bool]
    ) -> None:
        self._url, self._proxy, self._is_over = url, proxy, is_over
        self._loop = asyncio.get_running_loop()
        self._idle: deque[Link] = deque()
        self._busy: set[Link] = set()
        self._is_ticking = False
        self._ticked_at = 0.0
        self._connector = aiohttp.TCPConnector(limit=0, resolver=_Resolver(), ttl_dns_cache=1)
        self._connector._factory = functools.partial(Link, loop=self._loop)  # type: ignore[assignment]

    async def take(self, connect_s: float, is_fresh: bool) -> Link:
        """An idle connection, or a new one.

        Raises:
            aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError: there is none to be had.
        """
        now = self._loop.time()
        while self._idle and not is_fresh:
            link = self._idle.pop()
            if now - link.idle_at < IDLE_S and link.is_reusable:
                break
            link.connection.close()
        else:
            request = aiohttp.ClientRequest("GET", self._url, loop=self._loop, proxy=self._proxy)
            limit = aiohttp.ClientTimeout(total=None, connect=connect_s)
            try:
                connection = await self._connector.connect(request, traces=[], timeout=limit)
            except TimeoutError as error:
                raise aiohttp.ConnectionTimeoutError from error
            link = cast(Link, connection.protocol)
            link.connection = connection
        self._busy.add(link)
        if not self._is_ticking:
            self._is_ticking, self._ticked_at = True, self._loop.time()
            self._loop.call_later(self.TICK_S, self._tick)
        return link

    def give(self, link: Link) -> None:
        """Back from an exchange; one that is not at the end of its answer is closed."""
        self._busy.discard(link)
        link.sink = None
        if link.is_reusable:
            link.is_busy, link.idle_at = False, self._loop.time()
            self._idle.append(link)
        else:
            link.connection.close()

    def _tick(self) -> None:
        now = self._loop.time()
        late_s, self._ticked_at = now - self._ticked_at - self.TICK_S, now
        for link in self._busy:
            if late_s > self.STALL_S:  # it is we who stood still: what has come is read first
                link.heard_at, link.deadline = now, link.deadline + late_s
            if link.is_paused or not link.is_busy or link.error is not None:
                continue
            if now >= link.deadline or self._is_over(link, now):
                link.fail(WaitedLong() if link.is_waited_for else TimeoutError())
        while self._idle and now - self._idle[0].idle_at >= IDLE_S:
            self._idle.popleft().connection.close()
        self._is_ticking = bool(self._busy or self._idle)
        if self._is_ticking:
            self._loop.call_later(self.TICK_S, self._tick)

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):  # one that takes nothing is not waited for
            async with asyncio.timeout(1.0):
                await self._connector.close()
        for link in (*self._idle, *self._busy):
            link.connection.close()


_EXPLANATIONS = (  # the first that fits
    (aiohttp.ConnectionTimeoutError, "upstream_timeout",
     "cannot connect to {base} within {limit} s (--connect-timeout)"),
    (aiohttp.ClientConnectorError, "upstream_unreachable",
     "cannot reach {base}: start the server there, or set --upstream ({reason})"),
    (TimeoutError, "upstream_timeout", "{base} was silent for too long (--timeout)"),
    (aiohttp.ClientPayloadError, "upstream_incomplete",
     "{base} broke off in the middle of its answer"),
    ((OSError, aiohttp.ServerDisconnectedError), "upstream_unreachable",
     "{base} closed the connection without an answer"),
    (Exception, "upstream_unreachable", "{base} answered something that is not HTTP"),
)  # fmt: skip


def proxy_for(url: URL) -> str | None:
    """The proxy that the environment names for what is not on this machine."""
    is_direct = is_loopback(url.host or "") or urllib.request.proxy_bypass(url.host or "")
    return None if is_direct else urllib.request.getproxies().get(url.scheme)


class Health:
    """Whether a server is there, well, and getting on; asked free of charge."""

    def __init__(
        self, base: str, llama: Llama, get: Callable[[str], Awaitable[tuple[int, bytes]]]
    ) -> None:
        self.base, self.llama, self._get = base, llama, get
        self.is_reachable: bool | None = None
        self.is_healthy = True  # as the last question said
        self.checked_at = self.checked_s = 0.0  # when the last one ended, how long it took
        self._is_silent, self._answered_at = False, -math.inf
        self._path = "/health"
        self._check: asyncio.Task[bool] | None = None

    @property
    def state(self) -> str:
        if self.llama.is_loading:
            return "loading"
        if self.llama.is_restarting:
            return "restarting"
        state = {None: "unknown", True: "up", False: "unreachable"}[self.is_reachable]
        return "unhealthy" if state == "up" and not self.is_healthy else state

    def close(self) -> None:
        if self._check is not None:
            self._check.cancel()

    async def attend(self, load: Callable[[], tuple[int, Collection[str]]]) -> None:
        """Keep an eye on a llama.cpp, a server of ours that is not there yet, a silent one.

        `load`: how many attempts there have been, and which lanes have calls.
        """
        if not await self.is_alive() and self.is_reachable is None:
            why = "does not answer yet; calls get 502 until it does, or wait while it loads"
            self.reached(False, f"{self.base} {why}")
        await self.llama.learn_props()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                attempts, running = load()
                found = await self.llama.attend(attempts, running, self.is_alive)
                self.is_healthy = self.is_healthy if found is None else found
                if self._is_silent and time.monotonic() - self.checked_at > SILENT_LOOK_S:
                    self._is_silent = False
                    await self.is_alive()
            except Exception as error:  # it goes on, whatever a server says
                log.error("internal error: %s", fault_lines(error))

    def is_over(self, link: Link, now: float) -> bool:
        """Whether a silent exchange is to be given up.

        A server that answers a free question is not hung: it may be at work on a picture or a long
        thought, or be loading a model. So its first byte may take as long as SDKs wait.
        """
        silent_s = now - link.heard_at
        if self.llama.is_known or not link.patience_s or link.message is not None:
            return self.llama.is_over(link.model, link.heard_at, link.limit_s, now)
        self._is_silent |= silent_s > link.limit_s / 2
        is_alive = now - self._answered_at < SILENT_LOOK_S + link.limit_s / 2
        link.is_waited_for |= is_alive and silent_s >= link.limit_s
        return silent_s >= (link.patience_s if is_alive else link.limit_s)

    def reached(self, is_reachable: bool, message: str = "") -> None:
        """Say it once when that changes."""
        if self.is_reachable is not is_reachable:
            if self.is_reachable is False or message:
                log.warning("%s", message or f"{self.base} is reachable")
            self.is_reachable = self.is_healthy = is_reachable
            self.llama.reached(is_reachable)

    async def is_alive(self, limit_s: float = HEALTH_LIMIT_S) -> bool:
        """Ask for health, free of charge; callers at the same time share one question."""
        check = self._check
        if check is None or check.done():
            check = self._check = asyncio.create_task(self._ask_health())
        done, _ = await asyncio.wait([check], timeout=limit_s)
        return bool(done) and not check.cancelled() and check.result()

    async def _ask_health(self) -> bool:
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(HEALTH_LIMIT_S):
                status, body = await self._get(self._path)
                if self._path == "/health" and status in (404, 405, 501):
                    self._path = "/v1/models"
                    status, body = await self._get(self._path)
            self.llama.said_health(status, body)
            self.is_healthy = status < 300 or status in (401, 403)
            self._answered_at = time.monotonic() if status < 500 else -math.inf
        except (*NO_ANSWER, ValueError):
            self.is_healthy, self._answered_at = False, -math.inf
        self.checked_at = time.monotonic()
        self.checked_s = self.checked_at - started_at
        return self.is_healthy

    async def is_gone(self) -> bool:
        """Whether its connections broke because a llama.cpp is gone, and may come back."""
        if self.llama.is_known and not self.llama.is_restarting:
            await self.is_alive()
        return self.llama.is_restarting

    async def wait_ready(self, limit_s: float) -> None:
        """Wait while llama.cpp loads its model, or is on its way back.

        Raises ProxyError: queue_timeout; it was not ready within `limit_s`.
        """
        until, llama = time.monotonic() + limit_s, self.llama
        while llama.is_loading or llama.is_restarting:
            left_s = until - time.monotonic()
            if left_s <= 0:
                what = "still loading its model" if llama.is_loading else "not back yet"
                llama.is_loading = False  # until the next answer says so again
                why = f"{self.base} is {what} (--queue-timeout)"
                raise ProxyError("queue_timeout", why, retry_after_s=5)
            await asyncio.sleep(min(0.25, left_s))
            await self.is_alive()


class Upstream:
    """One base URL: the connections to it, its gate and its keys."""

    def __init__(self, rule: UpstreamRule, settings: Settings, clock: Clock) -> None:
        self.rule, self.name, self.base = rule, rule.name, rule.url
        self._settings, self._clock = settings, clock
        url = URL(rule.url)
        host = url.host or ""
        self.llama = Llama(rule.url, is_loopback(host), self.get)
        self.attempts = 0
        self.health = Health(rule.url, self.llama, self.get)
        self.usage_known: dict[str, bool] = {}  # by route: takes stream_options.include_usage
        pool = [
            Key(key.source, secret, key.header, rpm=rebucket(None, key.rpm, clock),
                tpm=rebucket(None, key.tpm, clock), clock=clock)
            for key, secret in zip(rule.keys, self.read_keys(), strict=True)
        ]  # fmt: skip
        self.gate = Gate(1, 1, clock, pool=pool)
        self.resize()
        owners = ("anthropic.com", "openai.com")  # their clients know how their caches work
        self.keeps_prefix = not f".{host}".endswith(tuple(f".{owner}" for owner in owners))
        self.mark = f"llmproxy-{secrets.token_hex(8)}"  # on our questions: they may lead back to us
        self.watch: asyncio.Task[None] | None = None  # while a circuit of it is open
        self._base_path = url.raw_path.rstrip("/")
        self._host = url.host_port_subcomponent or ""
        proxy = proxy_for(url)
        is_absolute = bool(proxy) and url.scheme == "http"
        self._origin = f"http://{self._host}" if is_absolute else ""  # what a plain proxy wants
        self.pool = Pool(url, URL(proxy) if proxy else None, self.health.is_over)

    def resize(self) -> None:
        """Give the gate the sizes that the settings, or llama.cpp, say."""
        rule, settings, lanes = self.rule, self._settings, self.llama.lanes()
        slots = sum(lanes.values()) or self.llama.of("").slots
        self.gate.limit(rule.rpm or settings.rpm, rule.tpm or settings.tpm)
        wanted = rule.concurrency or settings.concurrency
        calls = wanted if isinstance(wanted, int) else slots or 16
        tokens = rule.inflight_tokens or settings.inflight_tokens
        if wanted == "adaptive":
            self.gate.adaptive = self.gate.adaptive or Adaptive(slots or 4, self._clock)
            calls = self.gate.adaptive.level
            tokens = tokens or Adaptive.MOST * 4000
        else:
            self.gate.adaptive = None
        if tokens is None and wanted == "auto" and (context := self.llama.context_tokens):
            tokens = max(context, calls * 1000)
        self.gate.lanes.slots = lanes if wanted == "auto" else {}
        self.gate.resize(calls, max(1, (tokens or calls * 4000) // 1000))

    def shown(self) -> dict[str, Any]:
        gate, llama = self.gate, self.llama
        return {
            "name": self.name, "url": self.base, "state": self.health.state,
            **llama.shown(), **llama.speeds.shown(),
            "is_adaptive": gate.adaptive is not None,
            "concurrency": gate.slots, "inflight_tokens": gate.capacity * 1000,
            "running": gate.running, "queued": gate.queued,
            "service_s": round(gate.forecast.service_s, 3),
            "rpm": shown_bucket(gate.rpm), "tpm": shown_bucket(gate.tpm),
            "keys": [key.shown() for key in gate.keys.pool],
        }  # fmt: skip

    # -- keys of ours

    def read_keys(self) -> list[str]:
        """The secrets of its keys, as their sources say now. Blocks; raises ConfigError."""
        return [read_secret(key, os.environ) for key in self.rule.keys]

    def set_keys(self, secrets_: list[str]) -> bool:
        """Use these from now on; returns whether one is new."""
        found = [k for k, new in zip(self.gate.keys.pool, secrets_, strict=True) if k.secret != new]
        for key, secret in zip(self.gate.keys.pool, secrets_, strict=True):
            key.secret = secret
        for key in found:
            key.pauses.clear()
        self.gate.dispatch()
        return bool(found)

    def led_back(self, head: Head, host: str) -> Head:
        """A redirect to the upstream's own address leads to ours instead."""
        to = head.low.get("location", "")
        if not to.startswith((self.base + "/", self.base + "?")) and to != self.base:
            return head
        line = f"Location: http://{host}{to[len(self.base) :] or '/'}\r\n".encode()
        return head.changed(head.status, "", line, (b"location",))

    def hide(self, data: bytes) -> bytes:
        """What an upstream says, without a key of ours that it quotes; as long as before."""
        for key in self.gate.keys.pool:
            data = data.replace(key.secret.encode(), b"*" * len(key.secret))
        return data

    def head_of(self, message: Any) -> Head:
        """That of what aiohttp has parsed."""
        headers, reason = Headers(message.raw_headers, _FRAMING), message.reason or ""
        for key in self.gate.keys.pool:
            reason = reason.replace(key.secret, "***")
        return Head(message.code, reason, self.hide(headers.block()), headers.low)

    def key_line(self, key: Key | None, dialect: str) -> bytes:
        """The header that carries a key of ours; nothing where there is no pool of them."""
        if not self.gate.keys.pool:
            return b""
        key = key if key is not None and key.secret else self.gate.keys.least_loaded()
        name = key.header or ("x-api-key" if dialect == "anthropic" else "Authorization")
        bearer = "Bearer " if name.lower() == "authorization" else ""
        return f"{name}: {bearer}{key.secret}\r\n".encode()

    # -- its life

    async def close(self) -> None:
        self.health.close()
        await self.pool.close()

    def attend(self) -> Coroutine[Any, Any, None]:
        """Keep an eye on it, until cancelled."""
        return self.health.attend(
            lambda: (self.attempts, {permit.demand.lane for permit in self.gate.permits})
        )

    # -- requests

    async def open(
        self, method: str, raw_path: str, block: bytes, body: bytes = b"", *,
        first_s: float = HEALTH_LIMIT_S, total_s: float | None = None, patience_s: float = 0.0,
        is_fresh: bool = False, model: str = "",
    ) -> Link:  # fmt: skip
        """Send a request; returns its connection, on which the answer has not begun yet.

        `block` says how long the body is. `first_s`: silence allowed before the first byte;
        `patience_s`: of a server that is seen to be alive. `is_fresh`: not on a pooled
        connection, which the upstream may just be closing.
        """
        try:
            link = await self.pool.take(self._settings.connect_timeout, is_fresh)
        except aiohttp.ClientConnectorError as error:
            self.health.reached(False, self.explain(error).message)
            raise
        self.health.reached(True)
        link.begin(first_s, total_s, method == "HEAD")
        link.patience_s, link.model = patience_s, model
        target = self._origin + join_path(self._base_path, raw_path)
        line = bytes_of_text(f"{method} {target} HTTP/1.1\r\nHost: {self._host}\r\n")
        if link.transport is None:
            link.fail(aiohttp.ServerDisconnectedError())
        else:
            is_large = len(body) > SLICE_BYTES  # then it is not copied
            link.transport.write(b"".join((line, block, b"\r\n", b"" if is_large else body)))
            if is_large:
                link.transport.write(body)
        return link

    async def exchange(
        self, method: str, raw_path: str, block: bytes, body: bytes, **limits: Any
    ) -> Link:
        """Send a request whose body is in memory, and wait for the answer's head.

        A pooled connection that turns out to have been closed by the upstream is replaced, once.
        Raises NO_ANSWER: `explain` says what they mean.
        """
        is_fresh = False
        if body or method not in ("GET", "HEAD", "OPTIONS"):
            block += b"Content-Length: %d\r\n" % len(body)
        while True:
            link = await self.open(method, raw_path, block, body, is_fresh=is_fresh, **limits)
            sent_at = time.monotonic()
            try:
                await link.head()
                return link
            except BaseException as error:
                self.pool.give(link)
                is_closed = isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionError))
                is_stale = link.uses > 1 and time.monotonic() - sent_at <= STALE_CONNECTION_S
                if not (is_closed and is_stale):
                    raise
                self.llama.doubt()
                is_fresh = True  # once, and surely on a fresh one

    async def get(
        self, path: str, limit_bytes: int = SLICE_BYTES, block: bytes | None = None
    ) -> tuple[int, bytes]:
        """A small question of our own, beside the calls and on a connection of its own."""
        block = self.key_line(None, "openai") if block is None else block
        block += f"Via: 1.1 {self.mark}\r\nConnection: close\r\n".encode()
        link, body = await self.open("GET", path, block, is_fresh=True), b""
        try:
            status = (await link.head()).code
            while len(body) <= limit_bytes and (part := await link.more()):
                body += part
            return status, body
        finally:
            link.force_close()
            self.pool.give(link)

    def refuses_usage(self, name: str, failure: Failure) -> bool:
        """Whether it refuses the field that we added to a call of this route, not the call.

        Where it has never taken the field before, any 400 may mean that; asked once.
        """
        if failure.answer is None or TOO_LONG.search(failure.answer[1]):
            return False
        head, body = failure.answer
        if head.status not in (200, 400, 422):
            return False
        if FIELD_REFUSED.search(body):
            return True
        is_known = name in self.usage_known or self.llama.is_known
        is_first = head.status != 200 and not is_known
        self.usage_known.setdefault(name, True)
        return is_first

    def explain(self, error: BaseException) -> ProxyError:
        """Our error for what an exchange raised; never quotes header bytes."""
        code, text = next((c, t) for kind, c, t in _EXPLANATIONS if isinstance(error, kind))
        reason = ""
        if isinstance(error, aiohttp.ClientConnectorError):
            reason = printable(error.os_error.strerror or type(error.os_error).__name__)
        limit = f"{self._settings.connect_timeout:g}"
        return ProxyError(code, text.format(base=self.base, limit=limit, reason=reason))


class Circuits:
    """The circuit of every upstream, model and path; while one is open, its health is asked."""

    def __init__(
        self, settings: Settings, upstreams: Mapping[str, Upstream], clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:  # fmt: skip
        self._upstreams, self._spawn = upstreams, spawn
        self.by_key: LruMap[Circuit] = LruMap(
            lambda key: Circuit(key, settings, clock, self._moved),
            may_go=lambda circuit: circuit.state is State.CLOSED,
        )
        self.free = Circuit(("", "", ""), settings, clock)  # of what costs nothing

    def values(self) -> list[Circuit]:
        return self.by_key.values()

    def not_closed(self) -> list[Circuit]:
        return [c for c in self.by_key.values() if c.state is not State.CLOSED]

    async def peek(self, circuit: Circuit) -> None:
        """Fail fast, before the queue.

        A call that meets an open circuit asks for health first, if the last question was answered
        quickly and a while ago: so the first call after a recovery already goes through.
        """
        health = self._upstreams[circuit.key[0]].health
        since_s = time.monotonic() - health.checked_at
        if circuit.is_sick and health.checked_s < 0.02 and since_s > 0.1:
            circuit.health(await health.is_alive(0.04))
        circuit.check()

    def _moved(self, circuit: Circuit) -> None:
        if circuit.state is State.CLOSED:
            log.warning("circuit closed: %s is answered again", circuit.what)
            return
        log.warning("circuit open: %s", circuit.error().message)
        upstream = self._upstreams[circuit.key[0]]
        upstream.gate.reject(circuit, circuit.error)
        if upstream.watch is None or upstream.watch.done():
            upstream.watch = self._spawn(self._watch(upstream))

    async def _watch(self, upstream: Upstream) -> None:
        """Free health checks while a circuit of this upstream is open."""
        while waiting := [c for c in self.not_closed() if c.key[0] == upstream.name]:
            is_alive = await upstream.health.is_alive()
            for circuit in waiting:
                circuit.health(is_alive)
            await asyncio.sleep(HEALTH_EVERY_S)


###############################################################################
# Record
###############################################################################
# Rule: what one caller asked, and what happened. Log line, ledger row, counters, table, metrics and
# Server-Timing are made from a Record and from nothing else.

_TRACE = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
ADMIN = "/_llmproxy/"
FATES = ("miss", "joined", "hit", "stale", "bypass", "rejected")


def new_trace() -> str:
    return f"{random.getrandbits(128):032x}"


class Request:
    """What one caller asks: its head as it came, and from `read` on its body."""

    client: Client | None = None  # where client keys are on
    own_keys: tuple[str, ...] = ()  # the client keys that it presented; they go no further
    priority = "normal"
    retry: str | None = None
    task_budget = 0
    body = sent = b""  # what it says, and its bytes as they came: they may be coded
    doc: Mapping[str, Any] = {}
    model = asked = ""  # as it goes up, and as the caller named it
    rule = NO_RULE  # of the latter
    changed = ""  # what was changed of the body, for x-llmproxy-changed
    is_stream = is_read = may_join = False
    job: Any = None  # the kept response that it is about
    max_tokens: int | None = None

    def __init__(self, message: Any) -> None:
        self.method, raw_path, authority = message.method, message.path, ""
        if not raw_path.startswith("/"):  # absolute form, RFC 9112 3.2.2, or OPTIONS *
            authority, slash, rest = raw_path.partition("://")[2].partition("/")
            authority, raw_path = authority.rpartition("@")[2], "/" + rest if slash else "/"
        self.raw_path = raw_path
        self.path = raw_path.partition("?")[0]  # without the query, still encoded: safe to log
        path = urllib.parse.unquote(self.path) if "%" in self.path else self.path
        self.headers = request_headers(message.raw_headers, NOT_SENT_UPSTREAM)
        low = self.low = self.headers.low
        self.host, self.origin = authority or low.get("host", "localhost"), low.get("origin")
        self.is_admin = path.startswith(ADMIN)
        self.is_preflight = self.method == "OPTIONS" and self.origin is not None
        self.route, self.name = find_route(self.method, path)
        self.dialect = self.route.dialect if self.route is not None else (
            "anthropic" if "anthropic-version" in low else "openai")  # fmt: skip
        said = low["cache-control"].lower().split(",") if "cache-control" in low else ()
        parts = [part.partition("=") for part in said]
        self.directives = {name.strip(): value.strip().strip('"') for name, _, value in parts}
        self.has_new_trace, trace = False, low.get("x-request-id", "")
        if not (trace and _TRACE.fullmatch(trace)):
            found = _TRACEPARENT.fullmatch(low.get("traceparent", ""))
            trace, self.has_new_trace = found[1] if found else new_trace(), found is None
        self.trace = trace
        self.is_model_list = self.method == "GET" and self.path.endswith("/models")
        self.may_cost = self.method not in ("GET", "HEAD", "OPTIONS", "DELETE")
        self.writes = self.route is None or self.route.writes

    @property
    def api_keys(self) -> list[str]:
        """The keys that it presents."""
        found = re.findall(r"[?&]key=([^&]*)", self.raw_path) if "?" in self.raw_path else ()
        return [*self.headers.api_keys, *map(urllib.parse.unquote, found)]

    @functools.cached_property
    def size(self) -> TextSize:
        return measure(self.doc)

    @functools.cached_property
    def pieces(self) -> list[tuple[str, str]]:
        return prompt_pieces(self.doc)

    @property
    def max_age_s(self) -> float:
        """How old a kept answer this caller takes."""
        age = self.directives.get("max-age", "")
        if "no-cache" in self.directives:
            return -1.0
        return float(age) if age.isdecimal() else math.inf

    def check_model(self, model: str) -> None:
        """Raise model_not_allowed where the caller's client may not use it."""
        if self.client is not None and not matches(self.client.rule.models, model):
            known = f"the model {printable(model)}" if model else "a route whose model is unknown"
            why = f"client {self.client.rule.name} may not use {known}"
            raise ProxyError("model_not_allowed", why)

    def parse(self) -> bool:
        """Take what a JSON body says; False where it is none."""
        if (doc := parse_json(self.body)) is None:
            return False
        model = doc.get("model")
        self.doc, self.max_tokens = doc, max_tokens(doc)
        self.is_stream = doc.get("stream") is True
        self.name_model(model if isinstance(model, str) else "")
        return True

    def name_model(self, model: str) -> None:
        if self.own_keys and any(key in model for key in self.own_keys):
            raise ProxyError("invalid_request", "a key is no model")
        self.model = self.asked = model[:200]

    def change(self, fields: Mapping[str, Any], without: Iterable[str], said: list[str]) -> None:
        """Set top-level fields of its JSON body, or take them out; `said` names what was done.

        Raises ProxyError: invalid_request, where the body cannot be written anew.
        """
        if not said:
            return
        doc, changed = {n: v for n, v in self.doc.items() if n not in without}, None
        with contextlib.suppress(ValueError, RecursionError):  # a number that is none in JSON
            body = self.body
            body = json.dumps(doc, allow_nan=False).encode() if len(doc) < len(self.doc) else body
            changed = with_fields(body, doc, fields) if fields else body
        if changed is None:
            why = "the body holds what is no JSON, and cannot be changed as it has to be"
            raise ProxyError("invalid_request", f"{why} ({', '.join(said)})")
        self.doc, self.body, self.sent = {**doc, **fields}, changed, changed
        self.max_tokens = max_tokens(self.doc)
        self.changed = printable(", ".join(filter(None, (self.changed, *said))), 500)

    def let_go(self) -> None:
        """Nothing large outlives the call."""
        self.body, self.sent, self.doc = b"", b"", {}
        for name in ("size", "pieces"):
            self.__dict__.pop(name, None)


class Record:
    """What has become of one caller's call so far."""

    client = "anonymous"
    task = fate = code = why = upstream = fallback = ""
    capture: Any = None  # while it is not over
    shared = request_id = ""
    status = attempts = id = 0
    state = ""  # of its row in the ledger
    elapsed_s = 0.0
    usage = NO_USAGE
    expected = NO_USAGE  # what an open row says, in case that it is lost
    cost_micros: int | None = 0  # None: the model has no price
    reserved_micros = saved_micros = answer_micros = 0
    open_micros = -1  # what its open row in the ledger says to be reserved
    steps: tuple[dict[str, Any], ...] = ()

    def __init__(self, request: Request, now: float) -> None:
        self.request, self.started_at, self.began_unix = request, now, time.time()
        self.timing = Timing()

    def row(self, state: str) -> Row:
        """Its values for COLUMNS."""
        request, timing = self.request, self.timing
        usage = self.usage if state != "open" else self.expected
        total_s = self.elapsed_s or time.monotonic() - self.started_at
        trace = request.trace if request.has_new_trace else struck(request.trace)
        request_id = trace if self.request_id == request.trace else struck(self.request_id)
        return (
            self.id, self.began_unix, trace, request_id, struck(self.shared),
            self.client, struck(self.task), request.method, struck(request.path),
            struck(request.model), self.upstream, self.fallback, self.fate or "miss", self.status,
            self.code, self.attempts or int(state == "open" and not self.shared),
            request.is_stream, timing.queue_s * 1000,
            timing.limit_s * 1000, timing.retry_s * 1000, min(timing.upstream_s, total_s) * 1000,
            total_s * 1000, usage.prompt, usage.cached, usage.written, usage.completion,
            usage.reasoning, usage.is_estimated, self.cost_micros, self.reserved_micros,
            self.saved_micros, json.dumps(self.steps) if self.steps else "", state,
        )  # fmt: skip

    def shown(self) -> dict[str, Any]:
        """One call for the JSON log and the table, as it stands in the ledger."""
        row = shown_row(dict(zip(COLUMNS, self.row("done"), strict=True)))
        texts = {name: printable(v, 200) for name, v in row.items() if isinstance(v, str)}
        return {**row, **texts, "time_unix": self.began_unix + self.elapsed_s}

    def line(self, kind: str) -> str:
        """One line of the log, as text or JSON."""
        if kind == "json":
            return json.dumps(self.shown())
        request, timing, usage = self.request, self.timing, self.usage
        trace = request.trace if request.has_new_trace else printable(request.trace, 200)
        return (
            f"{clock_text(int(self.began_unix + self.elapsed_s))} {self.fate:8} {self.status} "
            f"{request.method} {printable(request.path)} model={printable(request.model) or '-'} "
            f"client={self.client} wait={timing.waited_s * 1000:.0f}ms "
            f"time={self.elapsed_s * 1000:.0f}ms tokens={usage.prompt}/{usage.completion} "
            f"trace={trace}" + (f" error={self.code}" if self.code else "")
        )

    def server_timing(self) -> str:
        timing = self.timing
        queue = f"queue;dur={timing.queue_s * 1000:.1f}"
        if timing.position:
            queue += f';desc="place {timing.position}, {timing.expected_s:.1f} s expected"'
        return (
            f"{queue}, limit;dur={timing.limit_s * 1000:.1f}, "
            f"retry;dur={timing.retry_s * 1000:.1f}, upstream;dur={timing.upstream_s * 1000:.1f}"
        )


@functools.lru_cache(8)
def clock_text(unix: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix))


class Histogram:
    """Counts by upper bound, as Prometheus wants them."""

    BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.last_s: deque[float] = deque(maxlen=1000)

    def percentiles_ms(self) -> dict[str, float]:
        return {f"p{n}": round(percentile(self.last_s, n / 100) * 1000, 1) for n in (50, 95, 99)}

    def add(self, value_s: float) -> None:
        self.last_s.append(value_s)
        self.counts[bisect.bisect_left(self.BOUNDS_S, value_s)] += 1
        self.sum_s += value_s

    def lines(self, name: str) -> Iterable[str]:
        totals = itertools.accumulate(self.counts)
        for bound, total in zip([*self.BOUNDS_S, "+Inf"], totals, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum_s:.6f}\n{name}_count {sum(self.counts)}"


class Counters:
    """Totals since the start, and the last calls."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self.started_at = clock, clock()
        self.fates = Counter[str](dict.fromkeys(FATES, 0))
        self.in_flight = 0  # calls that are with an upstream now
        self.requests = self.upstream_calls = self.upstream_429 = self.retries = 0
        self.preempted = 0
        self.tokens_in = self.tokens_cached = self.tokens_out = self.tokens_saved = 0
        self.unpriced_tokens = self.saved_micros = 0
        self.times = {name: Histogram() for name in ("queue", "ttft", "total")}
        self.recent: deque[Record] = deque(maxlen=50)
        self._per_second: deque[list[int]] = deque(maxlen=11)  # second, and calls that ended in it

    def end(self, record: Record) -> None:
        elapsed_s, fate = record.elapsed_s, record.fate
        second = int(record.started_at + elapsed_s)
        self.fates[fate] += 1
        if not self._per_second or self._per_second[-1][0] < second:
            self._per_second.append([second, 0])
        self._per_second[-1][1] += 1
        if fate != "rejected" and record.status != 499:
            self.times["total"].add(elapsed_s)
            if fate != "joined":
                self.times["queue"].add(record.timing.queue_s)
            if fate == "miss":
                self.times["ttft"].add(min(record.timing.upstream_s, elapsed_s))
        if fate in ("joined", "hit", "stale"):
            self.tokens_saved += record.usage.total
            self.saved_micros += record.saved_micros
        self.recent.append(record)

    def last(self, count: int) -> list[dict[str, Any]]:
        return [record.shown() for record in list(self.recent)[-count:]] if count else []

    def rate(self) -> float:
        """Calls a second over the last ten."""
        now = self._clock()
        recent = sum(count for second, count in self._per_second if now - second <= 10)
        return recent / max(1.0, min(10, now - self.started_at))

    def status(self) -> dict[str, Any]:
        names = ("upstream_calls", "upstream_429", "retries", "preempted", "tokens_in",
                 "tokens_cached", "tokens_out", "tokens_saved", "unpriced_tokens")  # fmt: skip
        return {
            "requests": self.requests, **self.fates,
            **{name: getattr(self, name) for name in names},
            "latency_ms": self.times["total"].percentiles_ms(),
            "queue_ms": self.times["queue"].percentiles_ms(),
            "waited": {"calls": sum(self.times["queue"].counts), "s": self.times["queue"].sum_s},
            "calls_per_s": round(self.rate(), 2),
            "uptime_s": round(self._clock() - self.started_at, 1),
        }  # fmt: skip


class Accounts:
    """What calls cost, what may still be spent, and the ledger that remembers it."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self.settings, self.counters, self._now = settings, counters, time.time
        self.prices = Prices(settings)
        self.budgets = Budgets(settings)
        self.today = Budget("today", 2**62, "day")
        self.today.roll(self._now())
        self.ledger: Ledger | None = None
        if settings.state != "none":
            self.ledger = Ledger(state_path(settings.state), lambda: settings.retention)
        self.is_read = True  # what was spent before
        ids = itertools.count(1).__next__
        self.new_id: Callable[[], int] = ids if self.ledger is None else self.ledger.new_id

    def change(self, settings: Settings) -> None:
        """Take prices and budgets of changed settings. Raises ConfigError; nothing was changed."""
        self.prices = Prices(settings)
        new = self.budgets.limit(settings)
        if new and (found := self._read_spent()) is not None:
            self._spend(new, found[0])
            unwritten = self.today.spent - sum(found[0]["day"].values())
            for budget in [b for b in new if b.client is None]:
                budget.spent += max(0, unwritten)  # what others have spent counts as it is

    def start(self) -> None:
        if self.ledger is not None:
            self.ledger.start()
            self._take_up(self._read_spent())

    def _take_up(
        self, found: tuple[dict[str, dict[str, int]], list[dict[str, Any]]] | None
    ) -> None:
        self.is_read = found is not None
        if found is not None:
            spent, tasks = found
            self.today.roll(self._now())
            self.today.spent = sum(spent["day"].values())
            self._spend(self.budgets.all, spent)
            for row in tasks:
                task = self.budgets.new_task(row["client"], row["task"], row["tokens"])
                task.spent = row["spent"]

    def _read_spent(self) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]] | None:
        """What clients spent in this day and month, and tasks ever, in an earlier life."""
        if self.ledger is None:
            return None
        try:
            spent = {}
            for window in ("day", "month"):
                sql = f"SELECT client, {SPENT} AS micros FROM calls WHERE time_unix >= ?"
                began = (period_start(self._now(), window),)
                rows = read_rows(self.ledger.path, sql + " GROUP BY client", began)
                spent[window] = {row["client"]: row["micros"] for row in rows}
            return spent, read_rows(
                self.ledger.path,
                "SELECT client, task, tokens, (SELECT coalesce(sum(tokens_in + tokens_out), 0)"
                " FROM calls WHERE calls.client = tasks.client AND calls.task = tasks.task"
                " AND calls.task != '' AND attempts > 0) AS spent FROM tasks",
            )
        except (OSError, sqlite3.Error) as error:
            log.warning("ledger: what was spent cannot be read: %s", printable(str(error)))
            return None

    def _spend(self, budgets: list[Budget], spent: dict[str, dict[str, int]]) -> None:
        """Set what budgets have spent, from the sums of the ledger by window and client."""
        for budget in budgets:
            budget.roll(self._now())
            by_client, name = spent[budget.window], budget.client
            budget.spent = sum(by_client.values()) if name is None else by_client.get(name, 0)

    async def check_ledger(self) -> None:
        """No blind spending: under a budget the ledger has to be read and written."""
        if self.ledger is None:
            return
        if not self.is_read and not self.ledger.trouble:
            self._take_up(await asyncio.to_thread(self._read_spent))
        if self.ledger.trouble or not self.is_read:
            trouble = self.ledger.trouble or "it cannot be read"
            why = f"there is a budget and the ledger cannot be written: {trouble}"
            raise ProxyError("ledger_unavailable", why, retry_after_s=10)

    def task_of(self, record: Record) -> Budget | None:
        """The budget of the call's task, which its first call named; None where it has none."""
        task = self.budgets.tasks.get((record.client, record.task))
        limit = record.request.task_budget
        if task is None and limit:
            task = self.budgets.new_task(record.client, record.task, limit)
            if self.ledger is not None:
                self.ledger.put("tasks", (record.client, record.task, limit, self._now()))
        return task

    def opened(self, record: Record) -> None:
        """A call is about to be asked of an upstream, or waits for another's answer."""
        if self.ledger is not None and record.open_micros < record.reserved_micros:
            record.state, record.open_micros = "open", record.reserved_micros
            self.ledger.opened(record.row("open"))

    def ended(self, record: Record) -> None:
        """A call is over, or answered from here at once: its row is replaced by the whole one."""
        if self.ledger is not None and record.state != "done":
            is_new, record.state = not record.state, "done"
            self.ledger.ended(record.row("done"), is_new)

    def bodies(self, record: Record, body: bytes, answer: bytes) -> None:
        ledger = self.ledger  # in trouble it holds rows back, and these are too large for that
        if ledger is not None and self.settings.log_bodies == "on" and not ledger.trouble:
            texts = (struck_text(text.decode("utf-8", "replace")) for text in (body, answer))
            ledger.put("bodies", (record.id, *texts))

    def price_of(self, record: Record, model: str) -> Price | None:
        """Of a model, or of the name that the caller knows it by."""
        price, asked = self.prices.of(model), record.request.asked
        if price is None and asked != model and not record.fallback:
            return self.prices.set_by_hand(asked)
        return price

    def used(self, record: Record, usage: Usage, model: str) -> int:
        """Count what an upstream used for a call; returns its cost."""
        self.counters.tokens_in += usage.prompt
        self.counters.tokens_cached += usage.cached
        self.counters.tokens_out += usage.completion
        price = self.price_of(record, model)
        if price is None:
            self.counters.unpriced_tokens += usage.total
            record.cost_micros = None
            return 0
        cost = price.cost(usage, record.request.doc)
        record.cost_micros, record.answer_micros = (record.cost_micros or 0) + cost, cost
        self.today.roll(self._now())
        self.today.spent += cost
        return cost

    def shown(self) -> dict[str, Any]:
        budgets = self.budgets.all
        for budget in (self.today, *budgets):
            budget.roll(self._now())
        return {
            "spend_usd": self.today.spent / 1e6, "saved_usd": self.counters.saved_micros / 1e6,
            "budgets": [
                {
                    "name": b.name, "window": b.window, "limit_usd": b.limit / 1e6,
                    "spent_usd": b.spent / 1e6, "reserved_usd": b.reserved / 1e6,
                }
                for b in budgets
            ],
            "ledger": "none" if self.ledger is None else self.ledger.trouble or "ok",
        }  # fmt: skip


def state_path(text: str) -> Path:
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(text.replace("$XDG_STATE_HOME", home)).expanduser()


###############################################################################
# Callers
###############################################################################
# Rule: the connections of callers, and what is written to them. Knows nothing of upstreams.


# What stands for bytes that are no HTTP request; `guard` refuses it.
NO_REQUEST = RawRequestMessage(
    "?", "/", HttpVersion11, CIMultiDictProxy(CIMultiDict()), (), True, None, False, False, URL("/")
)


class Connection(web.RequestHandler):
    """A caller's connection: aiohttp's low-level server, without its request and response objects.

    Its one task answers one request after the other, by `handle(message, payload, reply)`. That
    the caller hangs up does not end the task: `on_gone` is told, and decides.
    """

    on_gone: Callable[[], None] | None = None
    payload: Any = None  # of the request that is being answered

    async def start(self) -> None:
        try:
            while not (self._force_close or self._close):
                if not self._messages:
                    self._waiter = self._loop.create_future()
                    try:
                        await self._waiter
                    finally:
                        self._waiter = None
                message, self.payload = self._messages.popleft()
                if self._parser is not None:
                    self._parser.message_consumed()
                if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
                    self._resume_reading_if_drained()
                is_request = isinstance(message, RawRequestMessage)
                await self._answer(message if is_request else NO_REQUEST, self.payload)
        except ConnectionError:  # the caller has gone
            pass
        except Exception as error:
            log.error("internal error: %s", fault_lines(error))
        finally:
            if self.transport is not None:
                self.transport.close()

    async def _answer(self, message: Any, payload: Any) -> None:
        """Answer one request, and be ready for the next, or be about to close."""
        reply = Reply(self, message)
        try:
            await self._request_handler(message, payload, reply)  # type: ignore[misc, call-arg]
        finally:
            self.on_gone = None
        if self._upgraded and not self._messages and self._parser is not None:  # we do not
            self._parser.set_upgraded(False)
            self._upgraded, tail, self._message_tail = False, self._message_tail, b""
            self.data_received(tail)
        # Read what is left of a body: closing before would reset the answer on its way.
        with contextlib.suppress(TimeoutError, web.RequestPayloadError, ConnectionError):
            if not payload.is_eof():
                async with asyncio.timeout(self._lingering_time):
                    while not payload.is_eof() and self.transport is not None:
                        await payload.readany()
        self._close |= reply.is_closing or not payload.is_eof()
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._process_keepalive()

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:  # aiohttp would go to the transport after every request
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self.payload is not None and not self.payload.is_eof():
            self.payload.set_exception(CallerGone())
        if self.on_gone is not None:
            self.on_gone()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        if self._task_handler is not None:  # what is to finish has been waited for
            self._task_handler.cancel()
        await super().shutdown(timeout)


class Reply:
    """One answer to a caller: exactly the head that it is given, nothing invented."""

    def __init__(self, conn: Connection, message: Any) -> None:
        self.conn = conn
        self.is_begun = self.is_bodiless = self.is_chunked = self.is_over = self.is_stream = False
        # Behind an Upgrade that is not taken the parser loses what follows it.
        self.is_closing = message.should_close or "Upgrade" in message.headers
        self.is_head = message.method == "HEAD"
        self.version = message.version

    def begin(
        self, head: Head, own: bytes, length: int | None = None, body: bytes = b""
    ) -> None:
        """Send the head, and with it what is there of the body.

        Raises CallerGone: it has hung up.
        """
        status, version = head.status, self.version
        self.is_begun, self.is_stream = True, head.is_stream
        self.is_bodiless = self.is_head or status in (204, 304)
        if self.is_bodiless:
            length, body = head.length, b""
        framing = b"" if length is None else b"Content-Length: %d\r\n" % length
        if length is None and not self.is_bodiless:
            self.is_chunked = version >= (1, 1)
            self.is_closing |= not self.is_chunked
            framing = b"Transfer-Encoding: chunked\r\n" if self.is_chunked else b""
            body = self.frame(body) if body else b""
        if self.is_closing:
            framing += b"Connection: close\r\n"
        elif version < (1, 1):
            framing += b"Connection: keep-alive\r\n"
        line = bytes_of_text(f"HTTP/{version[0]}.{version[1]} {status} {head.reason}\r\n")
        self._send(b"".join((line, head.block, own, framing, b"\r\n", body)))

    def document(
        self, status: int, body: bytes, own: bytes, kind: str = "application/json"
    ) -> None:
        """Send an answer of our own."""
        head = NO_HEAD.changed(status, kind)
        self.begin(head, own, len(body), body)
        self.is_over = True

    def _send(self, data: bytes) -> None:
        transport = self.conn.transport
        if transport is None or transport.is_closing():
            raise CallerGone
        transport.write(data)

    @property
    def takes_now(self) -> bool:
        """Whether the caller's socket takes what is written, without a wait."""
        transport = self.conn.transport
        return transport is not None and not transport.is_closing() and not self.conn._paused

    @property
    def peer(self) -> str:
        """The caller's address."""
        name = self.conn.peername
        return str(name[0]) if name else ""

    def frame(self, data: bytes) -> bytes:
        """A part of the body as this answer frames it."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self.is_chunked else data

    async def write(self, data: bytes) -> None:
        """Write at the caller's pace.

        Raises CallerGone: it hung up, or took nothing for CALLER_S.
        """
        for start in range(0, 0 if self.is_bodiless else len(data), SLICE_BYTES):
            if self.is_over:  # it was told meanwhile that there is no more
                return
            self._send(self.frame(data[start : start + SLICE_BYTES]))
            if self.conn._paused:  # a slow caller holds a slice, not the whole
                try:
                    async with asyncio.timeout(CALLER_S):
                        await self.conn._drain_helper()
                except (ConnectionError, TimeoutError):  # the caller's end, no upstream is to blame
                    raise CallerGone from None

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            if self.is_chunked and self.conn.transport is not None:
                self.conn.transport.write(b"0\r\n\r\n")

    def abort(self) -> None:
        """Break the connection, so that the caller cannot take what came for the whole."""
        self.is_over = self.is_closing = True
        if self.conn.transport is not None:
            self.conn.transport.abort()


class Upload:
    """A caller's request body: whole, or on its way through. Bounded in bytes and in silence."""

    def __init__(self, request: Request, payload: Any, reply: Reply, limit_bytes: int) -> None:
        self._request, self._payload, self._reply = request, payload, reply
        self._limit_bytes, self._size_bytes = limit_bytes, 0
        self.is_empty = payload is EMPTY_PAYLOAD
        self._is_sent = False

    def expect(self) -> None:
        """Refuse what is announced as too large, else ask for the body (RFC 9110 10.1.1)."""
        length = self._request.low.get("content-length", "")
        if length.isdecimal() and int(length) > self._limit_bytes:
            raise too_large(self._limit_bytes)
        expects = self._request.low.get("expect", "").lower() == "100-continue"
        if expects and self._reply.version >= (1, 1):
            self._reply._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def whole(self) -> bytes:
        """All of the body.

        Raises ProxyError: request_too_large, invalid_request, caller_stalled.
        """
        self.expect()
        parts = list[bytes]()
        while not self._payload.at_eof():
            parts.append(await self.part())
        return b"".join(parts)

    async def part(self) -> bytes:
        """What has come since; b"" at the end."""
        payload = self._payload
        try:
            if payload.is_eof() and payload.exception() is None:  # nearly always: all is there
                part: bytes = payload.read_nowait(-1)
            else:
                async with asyncio.timeout(CALLER_S):
                    part = await payload.readany()
            self._size_bytes += len(part)
            if self._size_bytes > self._limit_bytes:
                raise too_large(self._limit_bytes)
            return part
        except web.RequestPayloadError:
            if self._reply.conn.transport is None:
                raise CallerGone from None
            raise ProxyError("invalid_request", "the body's framing is broken") from None
        except TimeoutError:
            raise stalled() from None

    async def send(self, link: Link) -> None:
        """Pass the body on as it comes, until the answer's head is there."""
        sending = asyncio.create_task(self._pass(link))
        try:
            await link.head()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if not self._is_sent:  # to the upstream, the next request would be the rest of it
                link.force_close()

    async def _pass(self, link: Link) -> None:
        """The caller's silence is not the upstream's."""
        is_chunked = "content-length" not in self._request.low
        try:
            while link.message is None and not self._payload.at_eof():
                link.rest(True)
                part = await self.part()
                link.rest(False)
                if part and link.transport is not None:
                    framed = b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part
                    link.transport.write(framed)
                    await link._drain_helper()
            if self._payload.at_eof() and link.transport is not None:
                link.transport.write(b"0\r\n\r\n" if is_chunked else b"")
                self._is_sent = True
        except (ProxyError, ConnectionError) as error:
            link.fail(error)


def stalled() -> ProxyError:
    return ProxyError("caller_stalled", f"no byte of the body for {CALLER_S:g} s")


def internal() -> ProxyError:
    return ProxyError("internal_error", "internal error; the proxy's log says where")


@contextlib.asynccontextmanager
async def listening(
    handle: Callable[[Any, Any, Reply], Awaitable[None]], host: str, port: int
) -> AsyncIterator[str]:
    """Serve HTTP/1.1 with aiohttp's low-level server; yields its base URL."""
    loop = asyncio.get_running_loop()
    server = web.Server(cast(Any, handle))

    def connect() -> Connection:
        return Connection(
            server, loop=loop, auto_decompress=False, access_log=None, keepalive_timeout=75.0,  # type: ignore[arg-type]
            max_line_size=HEADER_LINE_BYTES, max_field_size=HEADER_LINE_BYTES,
        )  # fmt: skip

    try:
        listener = await loop.create_server(connect, host, port, backlog=1024)
    except (OSError, UnicodeError) as error:
        why = f"{getattr(error, 'strerror', None) or 'not an address'}"
        mend = "choose another --host or --port"
        raise CannotError(f"cannot listen on {host}:{port} ({why}); {mend}") from None
    try:
        host, port = listener.sockets[0].getsockname()[:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        listener.close()
        await server.shutdown(1.0)


###############################################################################
# Guard
###############################################################################
# Rule: who may call, and whether the headers that are ours are understood. Looks at no body.


class Guard:
    """The first step of every request. Raises ProxyError where it is the last one too."""

    def __init__(self, settings: Settings, marks: list[str], clock: Clock) -> None:
        self._settings, self._marks = settings, marks  # of our own questions, see Upstream
        self.clients = {rule.key_sha256: Client(rule, clock) for rule in settings.clients}
        self.is_draining = False

    def check(self, record: Record) -> None:
        """Who may call, and do we understand the headers that are ours?"""
        request = record.request
        self._check_protocol(request)
        if request.origin is not None:
            if not is_allowed_origin(request.origin, self._settings.allow_origin):
                origin, request.origin = printable(request.origin), None
                why = f"browser origin {origin} may not call; see --allow-origin"
                raise ProxyError("forbidden_origin", why)
        self.check_host(request.host, is_loopback(self._settings.host))
        if request.headers.own:
            self._own_headers(record)
        if request.is_preflight:
            return
        if self.is_draining:
            why = "the proxy is shutting down; try again"
            raise ProxyError("shutting_down", why, retry_after_s=5)
        self._authenticate(record)

    def _check_protocol(self, request: Request) -> None:
        low, why = request.low, ""
        if request.method == "?":
            why = "this is not a valid HTTP request"
        elif low.get("transfer-encoding", "chunked").lower() != "chunked":
            why = "of transfer codings only chunked is understood"
        elif request.method in ("TRACE", "CONNECT"):  # it would echo whatever key is on it
            why = f"{request.method} is not passed on"
        elif "via" in low and any(mark in low["via"] for mark in self._marks):
            why = "an upstream leads back to this proxy"
        elif low.get("upgrade", "").lower() == "websocket":  # Codex then asks by HTTP at once
            raise ProxyError("upgrade_refused", "no WebSockets here; ask by HTTP")
        if why:
            raise ProxyError("invalid_request", why)

    def check_host(self, host: str, is_local: bool) -> None:
        if is_local and not is_loopback(host):
            name = re.sub(r":\d+$", "", host).lower()
            if name not in (allowed.lower() for allowed in self._settings.allow_host):
                why = f"Host {printable(host)} is not this machine (DNS rebinding)"
                raise ProxyError("forbidden_origin", f"{why}; see --allow-host")

    @staticmethod
    def _own_headers(record: Record) -> None:
        request = record.request
        for name in request.headers.own:
            value, allowed = request.low[name], OWN_HEADERS.get(name)
            if allowed is None:
                known = ", ".join(sorted(OWN_HEADERS))
                why = f"{printable(name)} is not a header of this version; known: {known}"
                raise ProxyError("invalid_header", why)
            if allowed and value not in allowed:
                why = f"{name} wants one of {', '.join(allowed)}, got {printable(value)}"
                raise ProxyError("invalid_header", why)
        task = record.task = request.low.get("x-llmproxy-task", "")[:200]
        if struck(task) != task:  # it looks like a key
            record.task = f"task-{hashlib.sha256(bytes_of_text(task)).hexdigest()[:12]}"
        name = "x-llmproxy-task-budget"
        if (budget := request.low.get(name)) is not None:
            try:
                request.task_budget = parse_count(budget)
            except ValueError:
                why = f"wants a whole number of tokens above 0, got {printable(budget)}"
                raise ProxyError("invalid_header", f"{name} {why}") from None
            if not task:
                raise ProxyError("invalid_header", f"{name} wants an x-llmproxy-task")
        request.retry = request.low.get("x-llmproxy-retry")

    def _authenticate(self, record: Record) -> None:
        """Whose call is it? With client keys in the file, nobody else's passes."""
        request = record.request
        if not self.clients:
            cookie = request.low.get("cookie", "")
            if keys := "\0".join(filter(None, (*request.api_keys, cookie))):
                record.client = client_id(keys)
        else:
            for key in request.api_keys:
                client = self.clients.get(hashlib.sha256(bytes_of_text(key)).hexdigest())
                if client is not None:
                    request.client, request.own_keys = client, (*request.own_keys, key)
            if request.client is None:
                why = "no valid client key; send it as a bearer token or as x-api-key"
                raise ProxyError("invalid_api_key", why)
            rule = request.client.rule
            record.client, request.priority = rule.name, rule.priority
            if record.task:
                request.task_budget = request.task_budget or rule.task_budget or 0
            if any(carries(request.path, key) for key in request.own_keys):
                request.path = "/***"
                raise ProxyError("invalid_request", "a key does not belong into the path")
            if any(key in request.trace for key in request.own_keys):
                request.trace = new_trace()
        request.priority = request.low.get("x-llmproxy-priority", request.priority)


@functools.lru_cache(1024)
def client_id(credential: str) -> str:
    """A name for a caller's credential that does not tell it."""
    return hashlib.sha256(bytes_of_text(credential)).hexdigest()[:8]


###############################################################################
# Rewriting
###############################################################################
# Rule: what is changed of a request before it is compared with others. All that no rule of the file
# and no rule below matches goes up byte for byte.

# Where an output limit stands that a body of this route does not name.
_LIMIT_NAMES = {"responses": "max_output_tokens", "completion": "n_predict", "infill": "n_predict"}


# What clients put before or between what stays the same, so that a server with a prompt cache
# reads all that follows again. Claude Code: a line of its version and a number that is new with
# each call or session (llama.cpp#20623), what is left of a budget, a session's id, and a context
# behind the first question. Others: the time of day in the system prompt.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:(?:[ \t]*[A-Za-z_]+=[^;\n]*;)*[ \t]*\n?")
_TOTAL_TOKENS = re.compile(r"\s*<total_tokens>[^<]*</total_tokens>")
_SESSION = re.compile(r"session_(?:id\"\s*:\s*\")?[0-9a-f]{8}-[0-9a-f-]{27}")
_TIME = re.compile(rb":\d\d\b")  # found quickly, where it is not
_CLOCK = re.compile(
    r"^(?=.{0,200}$)(?=.*\b(?:time|date|now|today|clock)\b).*\b\d{1,2}:\d{2}\b.*\n?",
    re.IGNORECASE | re.MULTILINE,
)


def _cut(content: Any, pattern: re.Pattern[str]) -> Any:
    """A message's content without what matches; blocks that are left empty go."""
    if isinstance(content, str):
        return pattern.sub("", content)
    made = list[Any]()
    for block in content if isinstance(content, list) else ():
        new = block
        for name in ("text", "content") if isinstance(block, dict) else ():
            if name in block and (cut := _cut(block[name], pattern)) != block[name]:
                new = {**block, name: cut} if cut or name != "text" else None
        made += [] if new is None else [new]
    return made if isinstance(content, list) else content


def _with_text(content: Any, text: str) -> Any:
    """A message's content with something behind it."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}" if content else text


class Conversation:
    """System prompt and messages of a body, being given a beginning that stays the same.

    `said` names the rules that matched. The system prompt is the first of `entries`, wherever the
    body has it; without one, or where the body is no conversation, no rule matches.
    """

    def __init__(self, doc: Mapping[str, Any]) -> None:
        messages, self.has_system = doc.get("messages"), "system" in doc
        self.said, self.entries = list[str](), list[dict[str, Any]]()
        if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
            system = [{"role": "system", "content": doc["system"]}] if self.has_system else []
            self.entries = [*system, *messages]
        if self.entries and self.entries[0].get("role") not in ("system", "developer"):
            self.entries = []

    def cut(self, rule: str, pattern: re.Pattern[str], count: int | None = None) -> None:
        """Take out what matches of the first entries, and messages that are left empty."""
        made = list[dict[str, Any]]()
        for n, entry in enumerate(self.entries):
            content, new = entry.get("content"), None
            if count is None or n < count:
                new = _cut(content, pattern)
            if new is None or new == content:
                made.append(entry)
            elif new or not n:
                made.append({**entry, "content": new})
        self._become(rule, made)

    def move_context(self) -> None:
        """System messages behind the first question (Claude Code's) go before it."""
        roles = [entry.get("role") for entry in self.entries]
        stop = roles.index("assistant") if "assistant" in roles else len(roles)
        moved = [entry for entry in self.entries[1:stop] if entry.get("role") == "system"]
        if moved and self.has_system:
            first, *rest = self.entries
            texts = [text for entry in moved for text in _texts(entry)]
            content = functools.reduce(_with_text, texts, first["content"])
            rest = [entry for entry in rest if not any(entry is other for other in moved)]
            self._become("context", [{**first, "content": content}, *rest])

    def move_clock(self) -> None:
        """Lines of the system prompt that tell the time go behind the last message."""
        lines = [line for text in _texts(self.entries[0]) for line in _CLOCK.findall(text)]
        last = self.entries[-1]
        if lines and last.get("role") in ("user", "tool"):
            content = _with_text(last.get("content"), "".join(lines).strip())
            first = {**self.entries[0], "content": _cut(self.entries[0]["content"], _CLOCK)}
            self._become("clock", [first, *self.entries[1:-1], {**last, "content": content}])

    def _become(self, rule: str, entries: list[dict[str, Any]]) -> None:
        if entries != self.entries:
            self.said.append(rule)
            self.entries = entries

    def fields(self) -> dict[str, Any]:
        """What has to be set of the body; None: to be taken out."""
        found: dict[str, Any] = {"messages": self.entries[self.has_system :]} if self.said else {}
        if self.said and self.has_system:
            found["system"] = self.entries[0]["content"] or None
        return found


def _texts(entry: Mapping[str, Any]) -> list[str]:
    """The texts of a message."""
    return [text for _, text in prompt_pieces({"messages": [{"content": entry.get("content")}]})]


def stable_prefix(doc: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], list[str]]:
    """Fields that make a body's beginning the same as that of the next, and the rules for it."""
    said, fields = list[str](), dict[str, Any]()
    is_billed, is_counted = b"x-anthropic-billing-header" in body, b"<total_tokens>" in body
    has_context, has_time = body.count(b'"system"') > 1, _TIME.search(body) is not None
    if (is_billed or is_counted or has_context or has_time) and (talk := Conversation(doc)).entries:
        if is_billed:
            talk.cut("billing-header", _BILLING, 1)
        if is_counted:
            talk.cut("total-tokens", _TOTAL_TOKENS)
        if has_context:
            talk.move_context()
        if has_time:
            talk.move_clock()
        fields, said = talk.fields(), talk.said
    if b"session_" in body and _SESSION.search(str(_dict(doc, "metadata").get("user_id"))):
        fields["metadata"] = None
        said.append("session")
    return fields, [f"stable-prefix {rule}" for rule in said]


class Rewriter:
    """Names and parameters by model, as the file's `model` tables say, and stable prefixes."""

    def __init__(self, settings: Settings, keeps_prefix: Callable[[str], bool]) -> None:
        """`keeps_prefix`: whether a model's upstream gains by a beginning that stays the same."""
        self._settings, self._keeps_prefix = settings, keeps_prefix

    def names(self) -> list[str]:
        """Names of models that only the file knows."""
        rules = (rule for rule in self._settings.models if rule.as_)
        return [rule.name for rule in rules if not re.search(r"[*?[]", rule.name)]

    def apply(self, request: Request) -> None:
        """Change the request's body where a rule says so, and say what was changed."""
        rule = request.rule = self._settings.rule_of(request.asked)
        if rule.rewrites:
            self._by_rule(request, rule)
        if request.route is not None and request.route.writes and self._is_stable(request.model):
            fields, said = stable_prefix(request.doc, request.body)
            gone = [name for name, value in fields.items() if value is None]
            with contextlib.suppress(ProxyError):  # a body that cannot be written goes as it is
                request.change({n: v for n, v in fields.items() if v is not None}, gone, said)

    def _is_stable(self, model: str) -> bool:
        wanted = self._settings.stable_prefix
        return wanted == "on" or (wanted == "auto" and self._keeps_prefix(model))

    def _by_rule(self, request: Request, rule: ModelRule) -> None:
        fields: dict[str, Any] = {}
        said = list[str]()
        stripped = [name for name in rule.strip if name in request.doc]
        if rule.as_ and rule.as_ != request.asked:
            fields["model"] = rule.as_
            said.append("as")
        route = request.route
        if route is None or (route.writes and not route.is_free):  # others know no such fields
            new = {n: v for n, v in rule.set_.items() if n not in request.doc or n in stripped}
            forced = {n: v for n, v in rule.force.items() if request.doc.get(n, rule) != v}
            fields |= new | forced
            said += [*(f"set {name}" for name in new), *(f"force {name}" for name in forced)]
            capped = self._capped({**request.doc, **fields}, request, rule.max_tokens)
            fields |= capped
            said += ["max_tokens"] * bool(capped)
        said += [f"strip {name}" for name in stripped if name not in fields]
        request.change(fields, [name for name in stripped if name not in fields], said)
        request.model = fields.get("model", request.model)

    @staticmethod
    def _capped(doc: Mapping[str, Any], request: Request, limit: int | None) -> dict[str, Any]:
        """The limits on the output that have to be lowered; one where there is none."""
        if limit is None:
            return {}
        named = {name: doc[name] for name in _OUTPUT_LIMITS if doc.get(name) is not None}
        if not named and request.route is None:
            return {}
        if not named:
            return {_LIMIT_NAMES.get(request.name, "max_tokens"): limit}
        numbers = {name: whole_number(value) for name, value in named.items()}
        over = [name for name, number in numbers.items() if number is None or number > limit]
        return dict.fromkeys(over, limit)


###############################################################################
# Flights
###############################################################################
# Rule: answers that are under way or kept, and who reads them. Knows nothing of how one is got.


@dataclass(slots=True)
class Kept:
    """A finished answer, in as few objects as possible: there are tens of thousands.

    `block`: its headers without what belongs to one delivery. `cost_micros`: what it had cost, and
    who gets it saves.
    """

    reason: str
    block: bytes
    request_id: str
    body: bytes
    stored_at: float
    usage: Usage
    upstream: str
    model: str
    is_deterministic: bool
    is_stream: bool
    cost_micros: int

    @property
    def size_bytes(self) -> int:
        return len(self.body) + KEPT_OVERHEAD_BYTES


class Reader:
    """One caller of a flight: gets the answer from its beginning, at its own pace.

    A caller that keeps up is written to here and now, from within the upstream's callback; one
    whose socket is full goes on in a task of its own, until it has caught up.
    """

    def __init__(self, flight: Flight, reply: Reply, record: Record, answers: Answers) -> None:
        self.flight, self.reply, self.record, self.answers = flight, reply, record, answers
        self.is_live = True  # has all that came, and takes what comes
        self.read_bytes = 0
        self._index = flight.first  # of the first chunk that it has not
        self._over: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Until all is written.

        Raises:
            CallerGone: it hung up, or was too slow.
            ProxyError: there is no answer, and nothing has been said to the caller yet.
        """
        if (error := await self._over) is not None:
            raise error

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def leave(self, error: ProxyError | None = None) -> None:
        """The caller has gone, or is told at once why it gets no answer any more."""
        if error is not None:
            # Where it leads for others, its next request would wait for the flight to land.
            self.reply.is_closing |= self.flight.record is self.record
            with contextlib.suppress(CallerGone):
                self.answers.refuse(self.reply, self.record, error)
        self._end(error or CallerGone())

    def _end(self, error: Exception | None = None) -> None:
        if not self.is_over:
            self._over.set_result(error)
            if self._timer is not None:
                self._timer.cancel()
            self.flight.left(self)

    def begin(self, head: Head, body: bytes | None = None) -> None:
        """The answer's head is known; with `body`, so is all of it."""
        if self.reply.is_begun:  # with comments
            self.record.status = 200
            if body is not None:  # it is no stream: say what came instead
                self.finish()
            return
        try:
            self.answers.begin(self.reply, self.record, self.flight, head, body)
        except CallerGone:
            self.leave()
            return
        if body is not None and len(body) <= SLICE_BYTES:
            self.reply.is_over = True
            self._end()
        elif body is not None:
            self.lag(self._index)

    def lag(self, index: int) -> None:
        """That chunk is the first that it has not: its socket is full, or it has come late."""
        self.is_live, self._index = False, index
        self.answers.spawn(self._pump())

    async def _pump(self) -> None:
        flight = self.flight
        try:
            while self._index < flight.end and not self.is_over:
                data, self._index = flight.slice_from(self._index)
                await self.reply.write(data)
                self.read_bytes += len(data)
                flight.has_read(self.read_bytes)
        except CallerGone:
            self.answers.cut(self.reply, self.record)
            self.leave()
        except Exception as error:  # a fault of ours, which `wait` tells
            self._end(error)
        if not self.is_over:
            self.is_live = True
            if flight.is_done:
                self.finish()

    def finish(self) -> None:
        """All has been written that came; say how it ends."""
        self.answers.take(self.record, self.flight)
        try:
            if not self.reply.is_begun:
                raise self.flight.error or internal()
            self.answers.end(self.reply, self.record, self.flight)
        except (CallerGone, ProxyError) as error:
            self._end(error)
        self._end()

    def keep_alive(self, every_s: float) -> None:
        """Say with comments that the stream it waits for will come."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(every_s, self._comment, every_s)

    def _comment(self, every_s: float) -> None:
        if self.is_over or self.flight.head is not None:
            return
        with contextlib.suppress(CallerGone):
            if not self.reply.is_begun:
                self.answers.begin(self.reply, self.record, self.flight, SSE_HEAD, None)
            if self.reply.takes_now:
                self.reply._send(self.reply.frame(b": waiting\n\n"))
        self.keep_alive(every_s)


class Flight:
    """One upstream call and everybody who waits for it.

    It runs in the task of the caller who leads; that a caller hangs up, the leader included, takes
    nothing from the others (golang.org/x/sync/singleflight DoChan has the same rule). Its bytes
    are held once.

    Memory: the upstream is read at most FLIGHT_WINDOW_BYTES ahead of the fastest caller. Beyond
    FLIGHT_BYTES an answer is `is_overgrown`: nobody joins it any more, it is not kept, and a
    caller that lags FLIGHT_WINDOW_BYTES behind the fastest one is cut off. So is one that
    `passes`, from its beginning.
    """

    head: Head | None = None
    error: ProxyError | None = None  # with a head: broke off in mid-answer
    first = 0  # index of chunks[0]; grows once overgrown
    size_bytes = dropped_bytes = 0  # of all that came; of those, what is not held any more
    read_bytes = 0  # by the fastest caller
    is_done = is_overgrown = False
    met_open = False  # an open circuit
    lease: Lease | None = None  # while it is asked for
    task: asyncio.Task[None] | None = None
    upload: Upload | None = None  # a body that passes
    _room: asyncio.Future[None] | None = None

    def __init__(
        self, key: bytes, record: Record, passes: bool, on_empty: Callable[[Flight], None]
    ) -> None:
        self.key, self.record, self.passes, self._on_empty = key, record, passes, on_empty
        self.chunks: list[bytes] = []
        self.readers: dict[Reader, None] = {}  # in the order in which they came

    @property
    def end(self) -> int:
        return self.first + len(self.chunks)

    def join(self, reader: Reader) -> None:
        """It has the answer from its beginning: what is there already, and what comes."""
        self.readers[reader] = None
        if self.head is not None:
            reader.begin(self.head)
        if self.chunks and not reader.is_over:
            reader.lag(self.first)

    def left(self, reader: Reader) -> None:
        self.readers.pop(reader, None)
        self.has_read(0)
        if not self.readers and not self.is_done:
            self._on_empty(self)

    def begin(self, head: Head, body: bytes | None = None) -> None:
        """Commit: from here on there is no retry, callers see this answer; `body`: all of it."""
        self.head = head
        if body is not None:
            self.chunks, self.size_bytes, self.is_done = [body], len(body), True
        for reader in list(self.readers):
            reader.begin(head, body)

    def push(self, chunk: bytes) -> None:
        """Append a chunk. Callers that keep up get it written here and now, without a wake-up."""
        if not chunk:  # a chunk of no bytes would end a chunked answer
            return
        self.chunks.append(chunk)
        self.size_bytes += len(chunk)
        framed = b""
        for reader in list(self.readers):
            if not reader.is_live or (reply := reader.reply).is_bodiless:
                continue
            if reply.takes_now:
                if reply.is_chunked:
                    framed = framed or b"%x\r\n%b\r\n" % (len(chunk), chunk)
                reply.conn.transport.write(framed if reply.is_chunked else chunk)  # type: ignore[union-attr]
                self.read_bytes = reader.read_bytes = self.size_bytes
            else:
                reader.read_bytes = self.size_bytes - len(chunk)
                reader.lag(self.end - 1)
        if self.passes or self.size_bytes > FLIGHT_BYTES:
            self._trim()

    def finish(self, error: ProxyError | None = None) -> None:
        if self.is_done:
            return
        self.error, self.is_done = error, True
        for reader in list(self.readers):
            if reader.is_live:
                reader.finish()

    def slice_from(self, index: int) -> tuple[bytes, int]:
        """Chunks from `index` on, about SLICE_BYTES of them, and the index behind them.

        Raises CallerGone: they are no longer held; the caller lags too far behind.
        """
        if index < self.first:
            raise CallerGone
        stop, size = index - self.first, 0
        while stop < len(self.chunks) and size < SLICE_BYTES:
            size += len(self.chunks[stop])
            stop += 1
        return b"".join(self.chunks[index - self.first : stop]), self.first + stop

    def held(self) -> bytes:
        """All of the answer that is held."""
        return b"".join(self.chunks)  # of one chunk it is that one, not a copy

    def has_read(self, read_bytes: int) -> None:
        self.read_bytes = max(self.read_bytes, read_bytes)
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    @property
    def is_ahead(self) -> bool:
        """Whether the upstream has to be held back: even the fastest caller is a window behind."""
        ahead = self.size_bytes - self.read_bytes > FLIGHT_WINDOW_BYTES
        return ahead and (bool(self.readers) or self.is_overgrown)

    async def room(self) -> None:
        """Wait until the upstream may be read on.

        Raises CallerGone: nobody reads and what comes can no longer be kept, or no caller has taken
        a byte for CALLER_S.
        """
        while self.is_ahead:
            if not self.readers:
                raise CallerGone
            self._room = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(CALLER_S):
                    await self._room
            except TimeoutError:
                raise CallerGone from None

    def _trim(self) -> None:
        """Hold what the fastest caller has yet to read, and a window before it for the others."""
        self.is_overgrown = True
        needless, count = self.read_bytes - (0 if self.passes else FLIGHT_WINDOW_BYTES), 0
        for chunk in itertools.islice(self.chunks, len(self.chunks) - 1):
            if self.dropped_bytes + len(chunk) > needless:
                break
            self.dropped_bytes += len(chunk)
            count += 1
        del self.chunks[:count]
        self.first += count


@dataclass(slots=True)
class Job:
    """A response that its upstream keeps: who that is, and whether its cost is still to come."""

    client: str
    upstream: str
    model: str
    is_open: bool


class Flights:
    """Singleflight table and bounded LRU of finished answers, under one key.

    An alias is the hash of one spelling of a body; it leads to the key, and to whether a stream is
    asked for, without parsing. Nothing is remembered of a key that neither runs nor is kept.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.running: dict[bytes, Flight] = {}  # which later callers join; older ones go on
        self.kept: OrderedDict[bytes, Kept] = OrderedDict()
        self.kept_bytes = 0
        self._clock = clock
        self._keys: dict[bytes, tuple[bytes, str, str]] = {}
        self._aliases: dict[bytes, tuple[bytes, ...]] = {}
        self.jobs: OrderedDict[str, Job] = OrderedDict()  # by the id of a response
        self.key_of = self._keys.get

    def land(self, flight: Flight) -> None:
        if self.running.get(flight.key) is flight:
            del self.running[flight.key]
        self._forget(flight.key)

    def alias(self, alias: bytes, found: tuple[bytes, str, str]) -> None:
        """Remember where a spelling leads: the key, the model that it names, what is changed."""
        known = self._aliases.get(found[0], ())
        if alias and len(known) < MAX_ALIASES and alias not in self._keys:
            self._aliases[found[0]], self._keys[alias] = (*known, alias), found

    def forget_spellings(self) -> None:
        """They may mean something else from now on."""
        self._keys.clear()
        self._aliases.clear()

    def find(self, key: bytes, max_age_s: float) -> tuple[Kept, float] | None:
        """A kept answer no older than `max_age_s`, and its age."""
        kept = self.kept.get(key)
        if kept is None or (age_s := self._clock() - kept.stored_at) > max_age_s:
            return None
        self.kept.move_to_end(key)
        return kept, age_s

    def keep(self, key: bytes, kept: Kept, limit_bytes: int) -> None:
        self.drop(key)
        if kept.size_bytes <= limit_bytes:
            self.kept[key] = kept
            self.kept_bytes += kept.size_bytes
        self.shrink(limit_bytes)

    def shrink(self, limit_bytes: int) -> None:
        while self.kept_bytes > limit_bytes:
            self.drop(next(iter(self.kept)))

    def clear(self, upstream: str | None = None) -> None:
        """Drop what is kept, or what came from an upstream that runs another model now."""
        for key in [k for k, kept in self.kept.items() if upstream in (None, kept.upstream)]:
            self.drop(key)

    def drop(self, key: bytes) -> None:
        kept = self.kept.pop(key, None)
        if kept is not None:
            self.kept_bytes -= kept.size_bytes
        self._forget(key)

    def _forget(self, key: bytes) -> None:
        if key not in self.running and key not in self.kept:
            for alias in self._aliases.pop(key, ()):
                self._keys.pop(alias, None)


class Newest:
    """Calls of which only the newest is worth an answer: completion, keystroke by keystroke."""

    def __init__(self, settings: Settings, drop: Callable[[Flight], None]) -> None:
        self._settings, self._drop = settings, drop
        self._readers: LruMap[weakref.WeakSet[Reader]] = LruMap(lambda key: weakref.WeakSet())

    def comes(self, record: Record, peer: str, reader: Reader | None) -> None:
        """A call is here, with a reader unless it is answered already: cut those before it."""
        request = record.request
        name = request.low.get("x-llmproxy-newest")
        if name is None and request.name != "infill":
            if self._settings.rule_of(request.asked).newest == "off":
                return
        key = record.client, peer, name, name is None and (request.path, request.asked)
        for older in [r for r in self._readers[key] if not r.is_over]:
            if reader is None or older.flight is not reader.flight:
                older.leave(ProxyError("superseded", "a newer call of the same client has come"))
                if not older.flight.readers:
                    self._drop(older.flight)
        if reader is not None:
            self._readers[key].add(reader)


@dataclass(slots=True, eq=False)
class Capture:
    """One call as it can be opened: what was asked, and what has come of it so far."""

    record: Record
    body: bytes  # as it came, uncoded
    lost_bytes: int = 0  # of a body that is too large
    size_bytes: int = 0  # that it counts for
    answer: Flight | Kept | None = None
    is_over: bool = False

    def shown(self) -> dict[str, Any]:
        """All of it for people, without secrets; `body` is null where it is no text."""
        record, answer = self.record, self.answer
        request = record.request
        pairs = [(name, line.partition(b": ")[2]) for name, line in request.headers.lines]
        pairs += [(name, bytes_of_text(request.low[name])) for name in request.headers.own]
        headers = {
            name: "***" if name in CREDENTIALS else self._text(value.strip())
            for name, value in pairs if name != "content-encoding"
        }  # fmt: skip
        path = self._text(bytes_of_text(without_keys(request.raw_path, request.own_keys)))
        said: dict[str, Any] | None = None
        if isinstance(answer, Kept):
            kind = "text/event-stream" if answer.is_stream else "application/json"
            said = {"status": 200, "type": kind, **self._body(answer.body)}
        elif answer is not None and answer.head is not None:
            head, lost = answer.head, answer.dropped_bytes
            held = b"" if head.is_coded else answer.held()
            lost += (answer.size_bytes - lost) * head.is_coded
            said = {"status": head.status, "type": head.kind, **self._body(held, lost)}
        return {
            **self.row(), "url": path, "changed": request.changed, "why": self._struck(record.why),
            "request": {"headers": headers, **self._body(self.body, self.lost_bytes)},
            "answer": said,
        }  # fmt: skip

    def row(self) -> dict[str, Any]:
        return {**self.record.shown(), "is_running": not self.is_over}

    def _struck(self, text: str) -> str:
        text = struck_text(text)
        for key in self.record.request.own_keys:
            text = text.replace(key, "***")
        return text

    def _text(self, data: bytes) -> str:
        return self._struck(data.decode("utf-8", "replace"))

    def _body(self, data: bytes, lost_bytes: int = 0) -> dict[str, Any]:
        text = None if b"\0" in data[:SLICE_BYTES] else self._text(data)
        return {"body": text, "bytes": len(data) + lost_bytes, "lost_bytes": lost_bytes}


class Captures:
    """The last calls that can be opened, in memory only; the oldest go first.

    Bounded in number by `captures`, and in bytes of bodies and answers together by CAPTURES_BYTES;
    an answer that several calls wait for counts for each of them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.held: OrderedDict[int, Capture] = OrderedDict()  # by the number of the call
        self.size_bytes = 0

    def open(self, record: Record) -> None:
        """A call has been read; it is followed until it is over."""
        body = record.request.body
        if not self._settings.captures or not body:
            return
        held = body if len(body) <= CAPTURE_BYTES else b""
        capture = Capture(record, held, len(body) - len(held))
        record.capture = self.held[record.id] = capture
        self._add(capture, len(held))

    def close(self, record: Record) -> None:
        capture: Capture = record.capture
        record.capture, capture.is_over, answer = None, True, capture.answer
        if self.held.get(record.id) is not capture or answer is None:
            return
        if isinstance(answer, Kept):
            self._add(capture, len(answer.body))
        elif answer.is_done:  # else it goes on for others, and counts for those
            self._add(capture, answer.size_bytes - answer.dropped_bytes)

    def _add(self, capture: Capture, size_bytes: int) -> None:
        capture.size_bytes += size_bytes
        self.size_bytes += size_bytes
        self.shrink()

    def shrink(self) -> None:
        while len(self.held) > self._settings.captures or self.size_bytes > CAPTURES_BYTES:
            self.size_bytes -= self.held.popitem(last=False)[1].size_bytes


class Answers:
    """How a caller's answer begins and ends: headers of ours, errors in the caller's dialect."""

    def __init__(self, settings: Settings, accounts: Accounts) -> None:
        self.settings, self.accounts = settings, accounts
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside the calls; it is cancelled at the end."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def begin(
        self, reply: Reply, record: Record, flight: Flight, head: Head, body: bytes | None
    ) -> None:
        """The head of a flight's answer, and its body where that is there as a whole."""
        record.status = head.status
        self.take(record, flight)
        if record.fate == "joined":  # its own wait, not the leader's
            record.timing.upstream_s = time.monotonic() - record.started_at
        whole = body if body is not None and len(body) <= SLICE_BYTES else b""
        length = len(body) if body is not None else head.length if flight.passes else None
        self._send(reply, record, head, length, whole)

    @staticmethod
    def take(record: Record, flight: Flight) -> None:
        """What a caller knows of the call that it has joined."""
        leader = flight.record
        if record is not leader:
            record.upstream, record.fallback = leader.upstream, leader.fallback
            record.usage = leader.usage

    def _send(
        self, reply: Reply, record: Record, head: Head, length: int | None, body: bytes, *,
        age_s: float | None = None,
    ) -> None:  # fmt: skip
        own = self.own_head(record, head, age_s)
        if record.request.origin is not None:
            head = Head(head.status, head.reason, CORS.sub(b"", head.block), head.low)
        reply.begin(head, own, length, body)

    def own_head(self, record: Record, head: Head = NO_HEAD, age_s: float | None = None) -> bytes:
        """The headers that every response carries."""
        request = record.request
        text = f"x-llmproxy-fate: {record.fate or 'rejected'}\r\n"
        text += f"x-llmproxy-trace: {request.trace}\r\n"
        if record.upstream:
            text += f"x-llmproxy-upstream: {record.upstream}\r\n"
        if record.fallback:
            text += f"x-llmproxy-fallback: {record.fallback}\r\n"
        if request.changed:
            text += f"x-llmproxy-changed: {request.changed}\r\n"
        theirs = head.low.get("x-request-id")
        if theirs is None:
            theirs = head.low.get("request-id", request.trace)
            text += f"x-request-id: {theirs}\r\n"
        record.request_id = theirs
        if theirs is not request.trace and any(
            len(key) > 7 and key in theirs for key in request.api_keys
        ):
            record.request_id = "***"
        if request.route is not None:  # RFC 9211
            status = "fwd=miss" if request.may_join else "fwd=bypass"
            if age_s is not None:
                status = f"hit; ttl={int(self.settings.dedup_window - age_s)}"
                text += f"Age: {int(age_s)}\r\n"
            elif record.fate == "joined":
                status = "fwd=miss; collapsed"
            text += f"Cache-Status: llmproxy; {status}\r\n"
        text += f"Server-Timing: {record.server_timing()}\r\n"
        if request.origin is not None:
            text += f"Access-Control-Allow-Origin: {request.origin}\r\nVary: Origin\r\n"
            text += "Access-Control-Expose-Headers: *\r\n"
        return bytes_of_text(text)

    def end(self, reply: Reply, record: Record, flight: Flight) -> None:
        """A flight has landed: the end of an answer that has begun, or how it broke off."""
        head, error = flight.head, flight.error
        is_stream = head is None or (head.is_stream and head.status == 200)
        if error is None and (is_stream or not reply.is_stream):
            reply.end()
            return
        if not reply.is_stream:
            record.code = error.code if error is not None else ""
            reply.abort()
            return
        gap, said = b"", b""
        if head is not None and not is_stream:  # who has comments already wanted a stream
            why = f"the upstream answered {head.status}"
            why += "" if head.status >= 400 else " without a stream"
            error = ProxyError("upstream_incomplete", why)
            with contextlib.suppress(ValueError, RecursionError):
                said = b"data: " + json.dumps(json.loads(flight.held())).encode() + b"\n\n"
                said = said if head.status >= 400 and stream_error(said) is not None else b""
        else:
            tail = flight.chunks[-1][-4:] if flight.chunks else b""
            gap = b"" if not tail or tail.endswith(_EVENT_ENDS) else b"\n\n"
        self._say_error(reply, record, error or internal(), gap, said)

    def _say_error(
        self, reply: Reply, record: Record, error: ProxyError, gap: bytes, said: bytes = b""
    ) -> None:
        """The last event of a stream that has begun."""
        request, record.code, record.why = record.request, error.code, error.message
        said = said or b"data: " + error_body(error, request.dialect, request.trace) + b"\n\n"
        name = b"event: error\n" if request.dialect == "anthropic" else b""
        reply._send(reply.frame(gap + name + said))
        reply.end()

    async def serve(
        self, reply: Reply, record: Record, kept: Kept, age_s: float, fate: str
    ) -> None:
        """Answer from what is kept."""
        request, record.fate, record.status = record.request, fate, 200
        record.upstream, record.usage, record.fallback = kept.upstream, kept.usage, ""
        request.model, request.is_stream = kept.model, kept.is_stream
        record.saved_micros = kept.cost_micros
        record.request_id = kept.request_id or request.trace
        if record.capture is not None:
            record.capture.answer = kept
        self.accounts.ended(record)  # before anybody has the answer
        low = {"content-type": "text/event-stream"} if kept.is_stream else {}
        if kept.request_id:
            low["x-request-id"] = kept.request_id
        head, body = Head(200, kept.reason, kept.block, low), kept.body
        begun = body if len(body) <= SLICE_BYTES else b""
        length = None if kept.is_stream else len(body)
        self._send(reply, record, head, length, begun, age_s=age_s)
        await reply.write(b"" if begun else body)
        reply.end()

    @staticmethod
    def cut(reply: Reply, record: Record) -> None:
        """A caller hung up, or is cut off: too slow, or too far behind an overgrown answer."""
        record.status = record.status or 499  # nginx's number for a caller that hung up
        transport = reply.conn.transport
        if transport is not None and not transport.is_closing():
            record.code = "caller_too_slow"
            transport.abort()

    def refuse(self, reply: Reply, record: Record, error: ProxyError) -> None:
        """An error of our own, in the caller's dialect; too late where a plain answer has begun."""
        if reply.is_over:
            return
        record.code, record.why = error.code, error.message
        if reply.is_begun and reply.is_stream and reply.takes_now:
            self._say_error(reply, record, error, b"\n\n")
            return
        if reply.is_begun:
            reply.abort()
            return
        if error.is_rejection and not record.attempts:
            record.fate = "rejected"
        more = b"x-should-retry: %b\r\n" % (b"true" if error.should_retry else b"false")
        if error.retry_after_s is not None:
            more += b"Retry-After: %d\r\n" % max(1, math.ceil(error.retry_after_s))
        body = error_body(error, record.request.dialect, record.request.trace)
        self.document(reply, record, body, status=error.status, more=more)

    def document(
        self, reply: Reply, record: Record, doc: Any, *, status: int = 200,
        kind: str = "application/json", more: bytes = b"",
    ) -> None:  # fmt: skip
        """An answer of our own."""
        body = doc if isinstance(doc, bytes) else json.dumps(doc).encode()
        record.status = status
        reply.document(status, body, self.own_head(record) + more, kind)

    def preflight(self, reply: Reply, record: Record) -> None:
        """CORS is answered here, for every allowed origin; the upstream is not asked."""
        record.status, record.fate, low = 204, "bypass", record.request.low
        asked, allow = "access-control-request-", "Access-Control-Allow-"
        text = f"{allow}Methods: {low.get(f'{asked}method', '*')}\r\n"
        text += f"{allow}Headers: {low.get(f'{asked}headers', '*')}\r\n"
        text += "Access-Control-Max-Age: 7200\r\n"
        if low.get(f"{asked}private-network") == "true":
            text += f"{allow}Private-Network: true\r\n"
        reply.begin(NO_HEAD.changed(204), self.own_head(record) + bytes_of_text(text))
        reply.end()


class Joiner:
    """What answers a call: a kept answer, a flight that others lead, or a new one."""

    def __init__(
        self, accounts: Accounts, flights: Flights, rewriter: Rewriter,
        abandon: Callable[[Flight], None],
    ) -> None:  # fmt: skip
        self._settings, self._accounts = accounts.settings, accounts
        self._flights, self._rewriter, self._abandon = flights, rewriter, abandon

    def join(self, record: Record, upload: Upload) -> Flight | tuple[Kept, float]:
        """What answers this call: a kept answer, a running flight, or a new one that it leads.

        A body that is no JSON object passes: the upstream shall say what is wrong with it.
        """
        request, settings, flights = record.request, self._settings, self._flights
        if request.route is None or not request.is_read:
            return self._pass(record, upload)
        scope, alias, found = self._scope(record), b"", None
        request.may_join = settings.dedup != "off" and "no-store" not in request.directives
        if request.may_join and len(request.body) <= SLICE_BYTES:
            scoped = scope.copy()
            scoped.update(b"raw\0" + request.body)
            alias = scoped.digest()
            if (known := flights.key_of(alias)) is not None:
                key, request.asked, request.changed = known
                if (found := self._known(record, key)) is not None:
                    return found
                request.changed = ""
        if not request.parse():
            return self._pass(record, upload)
        self._rewriter.apply(request)
        if (meaning := canonical(request.doc)) is None:
            return self._pass(record, upload)
        scope.update(b"json\0" + meaning)
        key = scope.digest()
        # The same body on top of a conversation that the server holds is another turn.
        request.may_join = request.may_join and not request.doc.get("conversation")
        if request.may_join:
            found = self._known(record, key)
        if found is None:
            record.fate = "miss"
            request.check_model(request.asked)
            found = Flight(key, record, False, self._abandon)
            if request.may_join:
                flights.running[key] = found
        if request.may_join:
            flights.alias(alias, (key, request.asked, request.changed))
        return found

    def _pass(self, record: Record, upload: Upload) -> Flight:
        """What is not joined goes the same way, straight through."""
        request, record.fate = record.request, "bypass"
        if request.method == "GET" and (named := re.search(r"/models(?:/([^/]+))?$", request.path)):
            request.model = urllib.parse.unquote(named[1] or "")
        if request.is_read and request.route is None and request.parse():
            self._rewriter.apply(request)
        if request.name.startswith("responses/"):
            request.may_cost &= not request.name.endswith("/cancel")
            job = self._flights.jobs.get(request.name.split("/")[1])
            request.job = job if job is not None and job.client == record.client else None
        if request.may_cost:
            request.check_model(request.asked)
        flight = Flight(b"", record, True, self._abandon)
        flight.upload = None if request.sent or upload.is_empty else upload
        return flight

    def _scope(self, record: Record) -> Any:
        """What two calls must have in common besides their bodies, as the beginning of a hash."""
        request = record.request
        raw_path, keyed, name = request.raw_path, request.headers.keyed(request.own_keys), ""
        if request.client is not None:  # however it sends its key
            name, raw_path = record.client, without_keys(raw_path, request.own_keys, ())
        if self._settings.share == "all":
            name, raw_path = "", without_keys(raw_path)
            lines = keyed.splitlines(keepends=True)
            kept = (ln for ln in lines if ln.partition(b":")[0].decode() not in CREDENTIALS)
            keyed = b"".join(kept)
        tasks = self._accounts.budgets.tasks
        if record.task and (request.task_budget or (record.client, record.task) in tasks):
            name += f"\0{record.client}\0task {record.task}"  # its stream, and nobody else's
        parts = bytes_of_text(name), bytes_of_text(raw_path), keyed, b""
        return hashlib.sha256(b"\0".join(parts))

    def _known(self, record: Record, key: bytes) -> Flight | tuple[Kept, float] | None:
        """A kept answer or a running flight that this caller takes."""
        request, settings = record.request, self._settings
        max_age_s = request.max_age_s
        flight = self._flights.running.get(key)  # newer than any kept answer
        if flight is not None and not flight.is_overgrown and max_age_s >= 0:
            leader = flight.record.request
            request.check_model(request.asked)
            request.model, request.is_stream = leader.model, leader.is_stream
            self._accounts.bodies(record, request.body, b"")  # its answer stands with the leader's
            record.fate, record.shared = "joined", leader.trace
            request.body = request.sent = b""
            self._accounts.opened(record)
            return flight
        if settings.dedup in ("on", "deterministic"):
            found = self._flights.find(key, min(settings.dedup_window, max_age_s))
            if found is not None and (settings.dedup == "on" or found[0].is_deterministic):
                request.check_model(request.asked)
                self._accounts.bodies(record, request.body, b"")
                return found
        return None


###############################################################################
# Calls
###############################################################################
# Rule: one call on its way to an answer: whom it is asked of, what it holds meanwhile, attempts,
# what comes after a failed one, and what an answer comes to. Knows no connection of a caller.


@dataclass(slots=True, eq=False)
class Target:
    """Whom a call is asked of: an upstream, as a model, under a circuit."""

    upstream: Upstream
    model: str
    circuit: Circuit
    learned: Learned
    name: str = ""  # of the fallback that it is
    is_foreign: bool = False  # not the upstream that the caller's own credential is for


class Lease:
    """All that one call holds: parts of its client's limits, of budgets and of a gate.

    Taken in order, settled with what was used, given back once, whichever way the call ends.
    """

    target: Target
    attempt = Attempt(cast(Circuit, None), -1, False, is_over=True)  # the last one

    def __init__(self, accounts: Accounts, record: Record, clock: Clock) -> None:
        self.record, self._accounts, self._clock = record, accounts, clock
        self.demand = Demand()
        self.permit: Permit | None = None
        self.task: Budget | None = None  # that cuts the stream where it ends
        self.attempts = 0  # at this target
        self.sent_at = 0.0
        self.reading: dict[str, Any] = {}  # of the prompt by a llama.cpp, see Prompts
        self._first_at = 0.0  # when the first attempt was sent, less its wait until then
        self._part: Reservation | None = None  # of its client's limits
        self._wanted: Wanted = []
        self._due_micros = self._due_tokens = self._metered_tokens = 0
        self._used_prompt = self._used_output = 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._settle_budgets()
        if self._part is not None:
            requests = min(1, self.record.attempts)
            self._part.settle(self._used_prompt, self._used_output, requests=requests)

    def turn(self, target: Target, demand: Demand) -> None:
        """Ask this target from now on. Raises rate_limited where the client is over its own."""
        self.leave()
        self._settle_budgets()
        client = self.record.request.client
        if self._part is None and client is not None and self.record.request.may_cost:
            self._part = client.reserve(demand)
        self.target, self.demand, self.attempts = target, demand, 0

    async def reserve(self) -> None:
        """What the call can cost at most, of every budget, before it waits for anything else.

        Raises ProxyError: budget_exceeded, ledger_unavailable, queue_timeout; nothing is reserved.
        """
        record, demand, accounts = self.record, self.demand, self._accounts
        model = self.target.model
        request, prompt, worst = record.request, demand.prompt_tokens, 0
        if not request.doc:
            prompt += 100  # what a body says that is not read is not known
        elif record.task or accounts.budgets.all:
            prompt = self.target.learned.worst_tokens(request.size)
        output = (request.max_tokens or 0) * copies(request.doc)
        if (price := accounts.price_of(record, model)) is not None:
            most = (output or price.most_output_tokens) * request.writes
            worst = price.worst(prompt, most, request.doc)
        record.expected = Usage(prompt, 0, output, is_estimated=True)
        record.reserved_micros = worst
        wanted = [(budget, worst) for budget in accounts.budgets.of(record.client)]
        if wanted and price is None:
            what = f"the model {printable(model)}" if model else "a call whose model is unknown"
            mend = f"set one: --price '{printable(model) or '*'}=IN/OUT'"
            why = f"there is a budget and {what} has no price; {mend}"
            raise ProxyError("budget_exceeded", why)
        if wanted:
            await accounts.check_ledger()
        if record.task and (task := accounts.task_of(record)) is not None:
            wanted.append((task, prompt if request.is_stream else demand.tokens))
            self.task = task if request.is_stream else None
        if wanted:
            began_at = self._clock()
            left_s = accounts.settings.queue_timeout - record.timing.waited_s
            try:
                await accounts.budgets.reserve(wanted, max(0.001, left_s))
            finally:
                record.timing.limit_s += self._clock() - began_at
        self._wanted = wanted

    async def enter(self, chances: int = 0) -> None:
        """A turn at the gate."""
        timing, settings = self.record.timing, self._accounts.settings
        self.permit = await self.target.upstream.gate.enter(
            self.demand, timing, queue_size=settings.queue_size,
            timeout_s=max(0.001, settings.queue_timeout - timing.waited_s * (not self.demand.cuts)),
            chances=chances,
        )  # fmt: skip

    def admit(self) -> None:
        """An attempt begins. Raises circuit_open; what costs nothing is under no circuit."""
        record, timing, now = self.record, self.record.timing, self._clock()
        circuit = self.target.circuit
        self.attempt = circuit.admit() if record.request.may_cost else Attempt(circuit, -1, False)
        if not record.attempts:
            self._first_at = now - timing.waited_s
        record.attempts += 1
        self.attempts += 1
        self.sent_at = now
        timing.retry_s = max(0.0, now - self._first_at - timing.waited_s)
        if self.permit is not None:
            self.permit.was_sent = True

    def uncount(self) -> None:
        """The attempt was none, but for the upstream's count of requests."""
        self.record.attempts -= 1
        self.attempts -= 1
        if self.permit is not None:
            self.permit.reservation.again()

    async def wait_again(self) -> None:
        """It has yielded its slot, and waits at its old place; that was no failed attempt."""
        self.attempts -= 1
        self.demand.cuts += 1
        self._accounts.counters.preempted += 1
        self.settle(self.unknown())  # what it has read has been read
        self.leave()
        await self.enter()

    def begin(self, head: Head) -> None:
        """The answer begins: callers will see it, and the upstream has counted its prompt."""
        upstream_s = self.record.timing.upstream_s = self._clock() - self.sent_at
        if self.record.request.may_cost:
            self.target.circuit.attempt_s.append(upstream_s)
        self.attempt.give_place()  # a long stream holds no other trial up
        if self.task is not None:
            self.meter(self.prompt_tokens)
        if self.permit is not None:
            self.permit.begin()
            self.heed(head)

    def heed(self, head: Head) -> None:
        """Rest where the upstream says that nothing is left of a limit."""
        if self.permit is not None and (wait_s := reset_wait_s(head.low, time.time())):
            self.permit.strike("limit", min(wait_s, LONGEST_PAUSE_S))

    def meter(self, tokens: int) -> bool:
        """Count a running stream's tokens against its task; True where its budget ends."""
        assert self.task is not None
        self._metered_tokens += tokens
        self.task.spent += tokens
        return self.task.spent >= self.task.limit

    def settle(self, usage: Usage) -> Usage:
        """What an attempt has really used, to all who had reserved for it."""
        record, accounts = self.record, self._accounts
        if record.request.route is None or not record.request.route.is_free:
            if not self._wanted:  # work that was asked for earlier, and is not reserved any more
                self._wanted = [(budget, 0) for budget in accounts.budgets.of(record.client)]
            self._due_micros += accounts.used(record, usage, self.target.model)
            self._due_tokens += usage.total
            self._used_prompt += usage.prompt
            self._used_output += usage.completion
        if self.permit is not None:
            self.permit.settle(usage.prompt, usage.completion)
        return usage

    @property
    def prompt_tokens(self) -> int:
        """As estimated from the text, also where nothing had hung on it so far."""
        request = self.record.request
        learned = self.target.learned
        return learned.prompt_tokens(request.size) if request.doc else self.demand.prompt_tokens

    def unknown(self) -> Usage:
        """What a call counts as of which nobody says it: unknown is not free.

        The upstream has read the prompt, whatever came of it.
        """
        is_blind = bool(self._wanted) and self.record.fate == "bypass"
        output = OUTPUT_TOKENS_ABSENT if is_blind else 0
        prompt = self.record.expected.prompt if is_blind else self.prompt_tokens
        return Usage(prompt, 0, output, is_estimated=True)

    def leave(self) -> None:
        """Give the turn back; what is reserved stays."""
        permit, self.permit = self.permit, None
        if permit is not None:
            permit.leave()

    def _settle_budgets(self) -> None:
        wanted, self._wanted = self._wanted, []
        if wanted:
            tokens = self._due_tokens - self._metered_tokens
            self._accounts.budgets.settle(wanted, self._due_micros, tokens)
        self._due_micros = self._due_tokens = self._metered_tokens = 0
        self.task = None

    def step(self, outcome: str) -> None:
        """One line of the call's trace: who was asked when, and what came of it."""
        if self._accounts.ledger is not None:
            record, now = self.record, self._clock()
            step = {
                "at_ms": round((self.sent_at - record.started_at) * 1000, 1),
                "upstream": self.target.upstream.name, "model": struck(self.target.model),
                "key": self.permit.key.name if self.permit is not None else "",
                "outcome": outcome, "ms": round((now - self.sent_at) * 1000, 1), **self.reading,
            }  # fmt: skip
            if record.request.changed:
                step["changed"] = record.request.changed
            record.steps = (*record.steps, step)


@dataclass(slots=True)
class Plan:
    """How attempts at a target are made."""

    raw_path: str
    block: bytes  # the headers that go up, without the key of a pool
    body: bytes
    usage_body: bytes | None  # the same, asking for usage too
    silence_s: float  # allowed between two bytes
    limits: dict[str, Any]  # before the first, and of the whole, as Upstream.open takes them
    is_stream: bool  # is asked for


class Router:
    """Whom a call is asked of, what it wants of the gate there, and how it is sent."""

    def __init__(
        self, accounts: Accounts, upstreams: list[Upstream], circuits: Circuits
    ) -> None:
        self._settings, self._accounts = accounts.settings, accounts
        self.upstreams, self._circuits = upstreams, circuits
        self.learned: LruMap[Learned] = LruMap(lambda key: Learned())

    def targets(self, flight: Flight) -> list[Target]:
        """The upstream for a call's model, and after it the fallbacks that the file names.

        Raises ProxyError: model_not_found.
        """
        request = flight.record.request
        model = request.model
        first = self._serving(model) or (None if model else self.upstreams[0])
        if request.job is not None:  # it is where it was made
            model = request.model = request.job.model
            first = self._named(request.job.upstream) or first
        if first is None:
            why = f"no upstream serves the model {printable(model)}; see [upstream.NAME] models"
            raise ProxyError("model_not_found", why)
        found = [self._target(request, first, model)]
        names = request.rule.fallback or self._settings.rule_of(model).fallback
        for name in names if not flight.passes else ():
            named = self._named(name)
            model = request.model if named else self._settings.rule_of(name).as_ or name
            if (other := named or self._serving(model)) is not None:
                found.append(self._target(request, other, model, name, other is not first))
        return found

    def keeps_prefix(self, model: str) -> bool:
        upstream = self._serving(model)
        return upstream is not None and upstream.keeps_prefix

    def _named(self, name: str) -> Upstream | None:
        return next((upstream for upstream in self.upstreams if upstream.name == name), None)

    def _serving(self, model: str) -> Upstream | None:
        return next((u for u in self.upstreams if matches(u.rule.models, model)), None)

    def _target(
        self, request: Request, upstream: Upstream, model: str, name: str = "",
        is_foreign: bool = False,
    ) -> Target:  # fmt: skip
        key, circuits = (upstream.name, model), self._circuits
        circuit = circuits.by_key[*key, request.path] if request.may_cost else circuits.free
        return Target(upstream, model, circuit, self.learned[key], name, is_foreign)

    def demand(self, flight: Flight, target: Target) -> Demand:
        """What a call wants of its target's gate.

        A small prompt is not measured where nothing hangs on its tokens: its weight is 1 anyway.
        """
        record, request, gate = flight.record, flight.record.request, target.upstream.gate
        size, weight, llama = len(request.body), 0, target.upstream.llama
        if flight.passes and not request.doc:  # what a file comes to nobody knows
            prompt, weight = size // 3 if request.is_read else 0, 1
        elif request.doc and (
            size > 3000 or gate.tpm is not None or gate.keys.pool or gate.queued or request.client
            or record.task or self._accounts.budgets.all
        ):  # fmt: skip
            prompt = target.learned.prompt_tokens(request.size)
        else:
            prompt = size // 3
        output = target.learned.output_tokens(request.max_tokens) if request.writes else 0
        # Each of several answers takes a slot of its own.
        places = copies(request.doc) if llama.is_known else 1
        read = prompt  # what is cached is no work
        if llama.is_known and prompt >= 2000 and request.doc:
            prompts = llama.of(target.model).prompts
            read = round(prompt * prompts.unread_share(request.pieces))
        return Demand(
            weight or max(1, read // 1000), prompt, output, record.client, request.priority,
            target.model, len(request.sent), target.circuit, places, target.learned.usual_s,
            lane=llama.lane(target.model),
        )  # fmt: skip

    @staticmethod
    def refuse(flight: Flight, target: Target) -> Failure | None:
        """Refuse a prompt that is surely longer than the context; not one that may fit."""
        request, llama = flight.record.request, target.upstream.llama
        context_tokens = llama.context_of(target.model)
        if not context_tokens or not request.doc or len(request.body) < 2 * context_tokens:
            return None
        if copies(request.doc) > 1 or target.learned.least_tokens(request.size) <= context_tokens:
            return None
        return too_long(target.learned.prompt_tokens(request.size), context_tokens)

    def plan(self, flight: Flight, lease: Lease, may_stream: bool = True) -> Plan:
        """How attempts for a call are made."""
        settings, request, target = self._settings, flight.record.request, lease.target
        upstream, doc, body = target.upstream, request.doc, request.body
        is_stream = request.is_stream
        rule = settings.rule_of(target.model)
        by_hand = rule.timeout or (request.rule.timeout if not target.name else None)
        is_learned = settings.timeout == "auto" and by_hand is None
        silence_s = by_hand or (
            target.circuit.timeout_s() if is_learned else cast(float, settings.timeout)
        )
        is_literal = by_hand is not None or (not is_learned and "timeout" in settings.given)
        fields: dict[str, Any] = {}
        if target.name and target.model != request.model:
            fields["model"] = target.model
        asks_stream = may_stream and upstream.llama.is_known and settings.upstream_stream == "auto"
        if asks_stream and not is_stream and Assembly.can_be(request.name, doc):
            fields["stream"] = True
        if fields and (changed := with_fields(body, doc, fields)) is not None:
            body, doc, is_stream = changed, {**doc, **fields}, is_stream or "stream" in fields
        first_s = silence_s
        if not is_stream and not is_literal:
            # A plain answer is silent until it is whole: allow for what it has to write.
            first_s += lease.demand.output_tokens * target.learned.token_s
        patience_s = 0.0 if is_literal or is_learned else max(FIRST_BYTE_S, first_s)
        limits = {
            "first_s": first_s, "total_s": settings.total_timeout, "patience_s": patience_s,
            "model": target.model,
        }  # fmt: skip
        usage_body = None
        # llama.cpp tells it in `timings` as well; only who wants a plain answer needs the field.
        may_ask = is_stream and request.route is not None and request.route.takes_usage
        may_ask = may_ask and (not request.is_stream or not upstream.llama.is_known)
        if may_ask and not reports_usage(doc) and upstream.usage_known.get(request.name, True):
            if (options := usage_options(doc)) is not None:
                usage_body = with_fields(body, doc, options)
        is_as_it_came = body is request.body and usage_body is None and not request.changed
        body = request.sent if is_as_it_came else body  # coded, where it came so
        block, raw_path = self._headers(request, target, flight.passes, is_as_it_came)
        return Plan(raw_path, block, body, usage_body, silence_s, limits, is_stream)

    @staticmethod
    def _headers(
        request: Request, target: Target, passes: bool, is_as_it_came: bool
    ) -> tuple[bytes, str]:
        """What goes up of the caller's headers and path: no credential that is not for this one."""
        keys, is_foreign, raw_path = request.own_keys, target.is_foreign, request.raw_path
        is_ours = is_foreign or bool(target.upstream.gate.keys.pool)
        without = CREDENTIALS if is_ours else ()
        without = without if is_as_it_came else (*without, "content-encoding")
        block = request.headers.block(without, SENT_ELSEWHERE if is_foreign else None, keys)
        if is_ours or keys:
            raw_path = without_keys(raw_path, keys, KEY_PARAMETERS if is_ours else ())
        more = f"x-request-id: {request.trace}\r\n"
        if request.has_new_trace:
            more += f"traceparent: 00-{request.trace}-{request.trace[:16]}-01\r\n"
        if not passes:
            more += "Accept-Encoding: identity\r\n"  # one answer has to fit every caller
        elif coding := request.low.get("accept-encoding"):
            more += f"Accept-Encoding: {coding}\r\n"
        return block + bytes_of_text(more), raw_path

    async def list_models(self, request: Request, named: Iterable[str]) -> dict[str, Any]:
        """Those of all upstreams that are alive, each once, in the file's order; `named` too."""
        found = dict[str, Any]()
        allowed = [] if request.client is None else request.client.rule.models
        lists = await asyncio.gather(*(self._models_of(u, request) for u in self.upstreams))
        for upstream, listed in zip(self.upstreams, lists, strict=True):
            rule = upstream.rule
            names = [] if listed is None else [n for n in rule.models if not re.search(r"[*?[]", n)]
            models = [*(listed or ()), *({"id": name, "object": "model"} for name in names)]
            for model in models:
                if matches(rule.models, model["id"]) and matches(allowed, model["id"]):
                    found.setdefault(model["id"], model)
        for name in named:
            if matches(allowed, name):
                found.setdefault(name, {"id": name, "object": "model"})
        return {"object": "list", "data": list(found.values())}

    async def _models_of(self, upstream: Upstream, request: Request) -> list[dict[str, Any]] | None:
        """What an upstream lists; None where it does not answer."""
        block = request.headers.block(CREDENTIALS, SENT_ELSEWHERE)
        block += upstream.key_line(None, request.dialect)
        raw_path = without_keys(request.raw_path, request.own_keys)
        with contextlib.suppress(*NO_ANSWER, ValueError, RecursionError):
            async with asyncio.timeout(HEALTH_LIMIT_S):
                status, body = await upstream.get(raw_path, FLIGHT_BYTES, block)
            odd = lambda constant: None  # noqa: E731  NaN is no JSON
            doc = json.loads(body, parse_constant=odd) if status == 200 else {}
            models = doc.get("data") if isinstance(doc, dict) else None
            models = models if isinstance(models, list) else []
            return [m for m in models if isinstance(m, dict) and isinstance(m.get("id"), str)]
        return None


class Exchange:
    """One attempt: a request over a connection, and its answer on the way to the flight."""

    def __init__(self, flight: Flight, lease: Lease, plan: Plan) -> None:
        self._flight, self._lease, self._plan = flight, lease, plan
        self._request: Request = lease.record.request
        self._upstream = lease.target.upstream
        self._link = cast(Link, None)  # until there is one
        self._head = NO_HEAD
        self.events: Events | None = None
        self.is_complete = False  # whole and good: may be kept
        self.fault = 0  # the status that an error event means in which it ended
        self.is_odd = False  # a stream that holds no plain answer, though it is whole
        self.is_cut = False  # where its task's budget ended
        self.metered = 0  # tokens of a cut stream
        self.tail = bytearray()  # the last bytes of what only passes

    async def run(self) -> Failure | None:
        """Send, and receive until the last byte is with the flight.

        Returns what went wrong before anything was.
        Raises ProxyError: the answer broke off after callers had seen its beginning. CallerGone:
        nobody takes it any more.
        """
        self._upstream.attempts += 1
        try:
            self._link = link = await self._send()
            self._head = head = self._upstream.head_of(link.message)
            if 300 <= head.status < 400:
                self._head = head = self._upstream.led_back(head, self._request.host)
            if head.status != 503:
                self._upstream.llama.is_loading = False
            link.limit_s = self._plan.silence_s
            if head.is_stream and head.status == 200 and not self._flight.passes:
                if self._plan.is_stream and not self._request.is_stream:
                    return await self._assemble()
                return await self._stream()
            if self._flight.passes and head.status < 400:
                self._begin(head)
                await self._flow()
                self.is_complete = True
                return None
            return await self._gather()
        except CallerGone:
            raise
        except NO_ANSWER as error:
            return self._failed(error)
        finally:
            if self._link is not None:
                self._upstream.pool.give(self._link)

    async def _send(self) -> Link:
        plan, lease, method = self._plan, self._lease, self._request.method
        upload, upstream = self._flight.upload, self._upstream
        key = lease.permit.key if lease.permit is not None else None
        block = plan.block + upstream.key_line(key, self._request.dialect)
        if upload is None:
            body, limits = plan.usage_body or plan.body, plan.limits
            return await upstream.exchange(method, plan.raw_path, block, body, **limits)
        upload.expect()
        length = self._request.low.get("content-length")
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        block += framing.encode() + b"\r\n"
        # It cannot be sent twice, so it never rides on a connection that may just be closing.
        link = self._link = await upstream.open(
            method, plan.raw_path, block, is_fresh=True, **plan.limits
        )
        await upload.send(link)
        return link

    def _failed(self, error: BaseException) -> Failure:
        explained = self._upstream.explain(error)
        if self._head is not NO_HEAD and explained.code == "upstream_unreachable":
            explained = self._upstream.explain(aiohttp.ClientPayloadError())
        if self._flight.head is not None:
            raise explained from None
        is_refused = isinstance(error, NOT_CONNECTED)
        # A silent plain call has probably done its work: asking again would pay twice. Nor is a
        # server asked again that answers nobody.
        is_silent = type(error) in (TimeoutError, WaitedLong)
        is_hopeless = isinstance(error, WaitedLong) or self._upstream.llama.is_mute
        is_transient = not is_silent or (self._request.is_stream and not is_hopeless)
        is_paid = is_silent or self._head is not NO_HEAD
        return Failure(explained, is_transient, ran_nothing=is_refused, is_paid=is_paid)

    async def _gather(self) -> Failure | None:
        """A plain answer: nothing goes out before all of it is there and found good."""
        head, parts, size = self._head, list[bytes](), 0
        while part := await self._link.more():
            parts.append(part)
            size += len(part)
            if size > FLIGHT_BYTES:  # too long to be held
                self.fault = head.status if head.status >= 400 else 0
                self._begin(head)
                self._give(b"".join(parts))
                await self._flow()
                return None
        body = b"".join(parts)
        is_json = bool(body) and head.kind == "application/json" and not head.is_coded
        is_cut = head.ends_with_connection and is_json and json_at(body) is None
        return self._found(head, body, is_cut)

    def _found(self, head: Head, body: bytes, is_cut: bool) -> Failure | None:
        """All of a plain answer: what is wrong with it, or else it is the flight's."""
        body = self._upstream.hide(body)
        if (failure := judge(head, body)) is not None:
            return failure
        if is_cut:
            raise aiohttp.ClientPayloadError
        self._begin(head, body)
        self.is_complete = True
        return None

    async def _stream(self) -> Failure | None:
        head, is_coded = self._head, self._head.is_coded
        begun = b"" if is_coded else await self._first_event()
        if (found := stream_error(first_event(begun) or b"")) is not None:
            return await self._failed_stream(begun, found)
        self.events = None if is_coded else Events(self._plan.usage_body is not None)
        self._begin(head)
        try:
            if begun:
                self._give(begun)
            await self._flow()
            rest = self.events.rest() if self.events is not None else b""
            # Half an event at the end of a connection is what a cut leaves.
            if not self.is_cut and (not head.ends_with_connection or is_event(rest)):
                self._flight.push(self._upstream.hide(rest))
        except NO_ANSWER:
            if not self._judge_end():  # else only the last chunk was missing
                raise
        has_ended = self._judge_end()
        # Without a length or a last chunk, only the stream itself can tell that it is whole.
        is_open = not (has_ended or self.fault or is_coded or self.is_cut)
        may_be_cut = head.ends_with_connection or self._upstream.llama.is_known
        if is_open and self._flight.size_bytes and may_be_cut:
            raise aiohttp.ClientPayloadError
        return None

    def _judge_end(self) -> bool:
        """Whether a stream has said that it is at its end, and not with an error."""
        flight, request = self._flight, self._request
        tail = decoded(flight.held(), self._head)
        self.fault = stream_fault(tail)
        found = not self.fault and is_whole(tail, request.route, request.doc)
        self.is_complete = found and not self.is_cut and not flight.is_overgrown
        return found

    async def _assemble(self) -> Failure | None:
        """A plain answer, of llama.cpp's stream."""
        assembly, parts = Assembly(), list[bytes]()
        try:
            while part := await self._link.more():
                assembly.feed(part)
                parts.append(part)
                if assembly.is_over:  # the connection has a moment to end, to be used again
                    self._link.limit_s = 0.25
        except NO_ANSWER:
            if not assembly.is_over:
                raise
        route, doc, data = self._request.route, self._request.doc, b"".join(parts)
        # A `[DONE]` alone is no end that a plain answer could be made of.
        is_finished = route is not None and route.ends is not None and route.ends.search(data)
        head, has_end = self._head, bool(is_finished) and is_whole(data, route, doc)
        try:
            status, body = assembly.plain()
        except ProxyError as error:
            if not has_end:
                raise aiohttp.ClientPayloadError from None
            self.is_odd = True
            return Failure(error, is_transient=True, counts=False)
        plain = head.changed(status, "application/json; charset=utf-8", b"",
                                   (b"x-accel-buffering", b"cache-control"))  # fmt: skip
        return self._found(plain, body, is_cut=not has_end)

    def _begin(self, head: Head, body: bytes | None = None) -> None:
        self._lease.begin(head)
        self._flight.begin(head, body)

    async def _flow(self) -> None:
        """The rest of the answer: each chunk goes on from within the callback that brings it."""
        link, flight = self._link, self._flight
        self._chunk()
        while not (link.is_over or self.is_cut):
            # What comes while we take would go out before what we took.
            link.sink = None if flight.is_ahead else self._chunk
            if link.sink is not None:
                await link.news()
                continue
            link.rest(True)
            link._pause_transport_reading()
            await flight.room()
            link.rest(False)
            link._resume_transport_reading()
            self._chunk()

    def _chunk(self) -> None:
        """The hot path of a stream: no task, no timer, no lock and no parsing per chunk."""
        link, flight = self._link, self._flight
        if part := link.take():
            self._give(part)
        if link.is_over or self.is_cut or flight.is_ahead:
            link.wake()

    def _give(self, data: bytes) -> None:
        """Pass a part of the body on."""
        if self.events is not None and not (data := self.events.feed(data)):
            return
        if self._upstream.gate.keys.pool:
            data = self._upstream.hide(data)
        if self._flight.passes:
            self.tail += data
            if len(self.tail) > 2 * (keep := FLIGHT_BYTES if self._head.is_coded else TAIL_BYTES):
                del self.tail[:-keep]
        self._flight.push(data)
        if self._lease.task is not None:
            self._meter(data)

    def _meter(self, data: bytes) -> None:
        """End a stream cleanly where its task's budget ends, unless it has just ended by itself."""
        tokens = data.count(b"\ndata:") + data.startswith(b"data:")
        tokens = max(0, tokens - data.count(b'"type":"message_') - data.count(b"data: [DONE]"))
        self.metered += tokens
        if self.is_cut or not self._lease.meter(tokens) or self._judge_end():
            return
        self.is_cut = True
        held = self._flight.held()
        self._flight.push(closing_events(self._request.name, held, self.metered))

    async def _first_event(self) -> bytes:
        """What comes until an event says something: it may be an error, which can be retried."""
        link, begun = self._link, b""
        while not first_event(begun) and len(begun) <= SLICE_BYTES and (part := await link.more()):
            begun += part
        is_half = link.is_over and first_event(begun) is None and not is_event(begun)
        if begun and is_half and self._head.ends_with_connection:
            raise aiohttp.ClientPayloadError  # cut before anything was said
        return begun

    async def _failed_stream(self, begun: bytes, found: tuple[int, bytes]) -> Failure:
        """A stream that begins with an error: that error, with all that came as its answer."""
        with contextlib.suppress(*NO_ANSWER):
            async with asyncio.timeout(1.0):
                while len(begun) <= SLICE_BYTES and (part := await self._link.more()):
                    begun += part
        status, error = found
        failure = cast(Failure, judge(Head(status, "", b"", self._head.low), error))
        failure.answer = (self._head, self._upstream.hide(begun))
        return failure


class Settling:
    """What an answer comes to: it is counted, learned from, and kept where it may be."""

    def __init__(self, accounts: Accounts, flights: Flights, clock: Clock) -> None:
        self._settings, self._accounts = accounts.settings, accounts
        self._flights, self._clock = flights, clock

    def settle(self, flight: Flight, lease: Lease, exchange: Exchange) -> None:
        """After the answer. Whatever an upstream reports, its callers must land."""
        head, record, request = flight.head, flight.record, flight.record.request
        if head is None or head.status >= 300 or request.method == "HEAD":
            return
        body = bytes(exchange.tail) if flight.passes else flight.held()
        plain = decoded(body, head)
        try:
            usage = self._used(lease, exchange, head, plain)
            self._count(lease, usage, body)
            if (llama := lease.target.upstream.llama).is_known:
                llama.speeds.add(plain[-SLICE_BYTES:])
                if request.doc and not usage.is_estimated and copies(request.doc) == 1:
                    prompts = llama.of(lease.target.model).prompts
                    lease.reading = prompts.took(request.pieces, usage)
            if not flight.passes:
                self._accounts.bodies(record, request.body, plain)
                # Keep a whole and good answer, where nothing newer is on its way.
                is_good = exchange.is_complete and head.status == 200 and not flight.is_overgrown
                if is_good and self._flights.running.get(flight.key) is flight:
                    self._keep(flight, head, usage, body, plain)
        except Exception as error:
            log.error("internal error: %s", fault_lines(error))

    def _count(self, lease: Lease, usage: Usage, body: bytes) -> None:
        """What the upstream used; a ticket's work is paid when it is done."""
        record, learned = lease.record, lease.target.learned
        request, jobs = record.request, self._flights.jobs
        if request.job is not None and request.job.is_open and not usage.is_estimated:
            request.job.is_open = False
            record.usage = lease.settle(usage)
        if request.name == "responses" and (found := _RESPONSE_ID.search(body[:8192])):
            is_open = bool(request.doc.get("background")) and not usage.total
            job = Job(record.client, record.upstream, lease.target.model, is_open)
            jobs[found[1].decode("utf-8", "replace")] = job
            if len(jobs) > 10 * MAX_MODELS:
                jobs.popitem(last=False)
        if request.may_cost:
            record.usage = lease.settle(usage)
            if not usage.is_estimated and request.doc:
                learned.teach(usage.completion, self._clock() - lease.sent_at)
                if learned.calls <= 100 or learned.calls % 8 == 0:  # it takes time
                    learned.teach_prompt(request.size, usage.prompt)

    def _keep(self, flight: Flight, head: Head, usage: Usage, body: bytes, plain: bytes) -> None:
        record, request, dedup = flight.record, flight.record.request, self._settings.dedup
        is_same = is_deterministic(request.doc)
        may_keep = dedup == "on" or (dedup == "deterministic" and is_same)
        if not may_keep or "html" in head.kind or record.fallback:
            return
        if is_worth_keeping(plain, request, usage):
            kept = Kept(
                head.reason, NOT_KEPT.sub(b"", head.block), head.low.get("x-request-id", ""),
                body, self._clock(), usage, record.upstream, request.model, is_same,
                head.is_stream, record.answer_micros,
            )  # fmt: skip
            self._flights.keep(flight.key, kept, self._settings.cache_bytes)

    @staticmethod
    def _used(lease: Lease, exchange: Exchange, head: Head, plain: bytes) -> Usage:
        """What an answer reports, or else what can be counted of it."""
        if exchange.is_cut:
            return Usage(lease.prompt_tokens, 0, exchange.metered, is_estimated=True)
        if "ndjson" in head.kind:  # Ollama's last line says it
            plain = plain.rstrip().rpartition(b"\n")[2]
        unseen = exchange.events.taken if exchange.events is not None else b""
        usage = read_usage(plain + unseen, head.is_stream)
        if usage is None and lease.record.request.doc.get("background"):
            return Usage(is_estimated=True)  # of a ticket; its work is paid when it is done
        if usage is None and lease.record.fate == "bypass":
            return lease.unknown()
        if usage is None:
            written = plain.count(b"data:") if head.is_stream else len(plain) // 4
            return Usage(lease.prompt_tokens, 0, written, is_estimated=True)
        if head.is_stream and not exchange.is_complete:  # cut: the last count is missing
            written = plain.count(b"\ndata:") - plain.count(b'"type":"message_')
            if written > usage.completion:
                usage.completion, usage.is_estimated = written, True
        return usage


async def run_or_yield(
    flight: Flight, lease: Lease, exchange: Exchange, may_yield: bool
) -> Failure | None:
    """Run an attempt, ready to yield its slot if its priority is low. Raises Preempted."""
    permit, task, llama = lease.permit, flight.task, lease.target.upstream.llama
    may_yield = may_yield and llama.is_known and not flight.passes  # elsewhere it is paid for
    if not may_yield or permit is None or task is None or lease.demand.priority != "low":
        return await exchange.run()
    is_cut = False

    def cut() -> bool:
        nonlocal is_cut
        is_cut = all(reader.record.request.priority == "low" for reader in flight.readers)
        return is_cut and task.cancel()

    permit.cut = cut
    try:
        return await exchange.run()
    except asyncio.CancelledError:
        if is_cut and not task.uncancel():  # else it is to end for another reason as well
            raise Preempted from None
        raise
    finally:
        permit.cut = None


class Leader:
    """Gets a flight its answer, in the task of the caller who leads it."""

    def __init__(
        self, accounts: Accounts, flights: Flights, router: Router, circuits: Circuits, clock: Clock
    ) -> None:
        self._settings, self._accounts = accounts.settings, accounts
        self._counters, self._flights, self._clock = accounts.counters, flights, clock
        self._router, self._circuits = router, circuits
        self._settling = Settling(accounts, flights, clock)
        self.tasks: set[asyncio.Task[None]] = set()

    async def fly(self, flight: Flight) -> None:
        """Get a flight its answer, in its leader's task; however that ends, it lands once."""
        error: ProxyError | None = None
        record = flight.record
        flight.task = task = cast("asyncio.Task[None]", asyncio.current_task())
        self.tasks.add(task)
        try:
            with Lease(self._accounts, record, self._clock) as lease:
                flight.lease = lease
                await self.ask(flight, lease)
        except ProxyError as caught:
            error = caught
        except CallerGone:
            error = stalled()
        except asyncio.CancelledError:
            while task.uncancel():  # its connection may live on
                pass
            error = ProxyError("shutting_down", "the proxy was stopped", retry_after_s=5)
        except Exception as caught:
            log.error("internal error: %s", fault_lines(caught))
            error = internal()
        finally:
            self.tasks.discard(task)
            self._flights.land(flight)
            flight.lease = flight.task = flight.upload = None
            flight.finish(error)
            record.request.let_go()

    async def ask(self, flight: Flight, lease: Lease) -> None:
        """Ask the first target, and while that fails before its first byte, the next."""
        targets = self._router.targets(flight)
        for target in targets:
            is_last = target is targets[-1]
            try:
                lease.turn(target, self._router.demand(flight, target))
                failure = self._router.refuse(flight, target)
                failure = failure or await self._ask(flight, lease, target)
            except ProxyError as error:
                flight.met_open |= error.code == "circuit_open"
                may_do_better = error.code in ("circuit_open", "upstream_key_refused")
                if is_last or flight.head is not None or not may_do_better:
                    raise
                continue
            if failure is None:
                return
            # Somebody else may do better; a 4xx would be the same anywhere.
            may_do_better = failure.is_transient or failure.counts or failure.is_key_refused
            if is_last or not may_do_better:
                self._give_up(flight, failure)
                return

    async def _ask(self, flight: Flight, lease: Lease, target: Target) -> Failure | None:
        """Reserve, queue, then attempts until one answers or the policy says it was the last."""
        record, request, upstream = flight.record, flight.record.request, target.upstream
        record.upstream, record.fallback = upstream.name, target.name
        if request.may_cost and target.circuit.state is not State.CLOSED:
            await self._circuits.peek(target.circuit)
        if request.may_cost and (request.route is None or not request.route.is_free):
            await lease.reserve()
            await lease.enter()
            self._accounts.opened(record)  # its row is journaled from here on
            if record.reserved_micros and self._accounts.budgets.all:
                await self._accounts.check_ledger()
        plan, loads, was_refused = self._router.plan(flight, lease), 0, False
        began_at = self._clock() - record.timing.waited_s
        while True:
            exchange = Exchange(flight, lease, plan)
            try:
                failure = await self._attempt(flight, lease, exchange)
            except Preempted:
                await lease.wait_again()
                continue
            if failure is None:
                if was_refused or plan.usage_body is not None:
                    upstream.usage_known[request.name] = not was_refused
                return None
            upstream.llama.is_loading |= failure.is_loading
            is_away = failure.is_loading or (failure.is_unsent and upstream.llama.is_restarting)
            if exchange.is_odd:  # asked plainly it will be one
                plan = self._router.plan(flight, lease, may_stream=False)
            elif is_away and not flight.passes:  # its body would be gone; the attempt was none
                lease.uncount()
                left_s = self._settings.queue_timeout - self._clock() + began_at
                await upstream.health.wait_ready(left_s)
                await asyncio.sleep(min(0.25 * loads, 2.0))  # a health check may lie
                loads += 1
                plan = self._router.plan(flight, lease)  # it may be another server
            elif plan.usage_body and upstream.refuses_usage(request.name, failure):
                lease.uncount()
                plan.usage_body, was_refused = None, True
            else:
                may_retry = self._may_retry(flight, lease, failure)
                if not (may_retry and await self._back_off(lease, failure)):
                    return failure
                self._counters.retries += 1

    async def _attempt(self, flight: Flight, lease: Lease, exchange: Exchange) -> Failure | None:
        """One attempt: what comes of it is told to its circuit, its key and the accounts."""
        record, upstream = flight.record, lease.target.upstream
        lease.admit()
        attempt, outcome = lease.attempt, "left"
        self._counters.upstream_calls += 1
        self._counters.in_flight += 1
        try:
            failure = await run_or_yield(flight, lease, exchange, self._settings.preempt == "low")
            if failure is None:
                outcome = str(flight.head.status if flight.head is not None else 0)
                said = attempt.failed if is_outage(exchange.fault) else attempt.alive
                (said if exchange.fault else attempt.ok)()
                upstream.health.is_healthy |= not exchange.fault
                flight.finish()
                self._settling.settle(flight, lease, exchange)
                return None
            outcome = str(failure.status or failure.error.code)
            is_broken = failure.answer is None and failure.error.code != "upstream_timeout"
            if is_broken and await upstream.health.is_gone():
                failure.counts = False  # its callers wait for it to come back
            self._judge(lease, failure)
            if lease.permit is not None and failure.is_unsent:
                lease.permit.was_sent = False
            record.timing.upstream_s = self._clock() - lease.sent_at
            if failure.is_paid:
                lease.settle(lease.unknown())
            return failure
        except ProxyError as error:  # broke off in mid-answer
            outcome, is_timeout = error.code, error.code == "upstream_timeout"
            if not error.is_rejection and (is_timeout or not await upstream.health.is_gone()):
                attempt.failed()
            self._settling.settle(flight, lease, exchange)
            raise
        except Preempted:
            outcome = "yielded its slot"
            raise
        except (CallerGone, asyncio.CancelledError) as error:
            is_asked = not isinstance(error, CallerGone)  # all of it was sent
            if flight.head is None and is_asked:  # the upstream has read the prompt, and bills it
                record.usage = lease.settle(lease.unknown())
            else:
                self._settling.settle(flight, lease, exchange)
            raise
        finally:
            self._counters.in_flight -= 1
            lease.step(outcome)
            attempt.neutral()

    def _judge(self, lease: Lease, failure: Failure) -> None:
        """What a failed attempt means for its circuit and its key."""
        permit, wait_s = lease.permit, failure.retry_after_s
        if failure.counts:
            lease.attempt.failed()
        elif failure.answer is not None and not failure.is_loading:
            lease.attempt.alive()
        self._counters.upstream_429 += failure.status == 429
        if permit is None or failure.answer is None:
            return
        is_for_key = failure.status == 401 or (
            failure.status == 403 and KEY_REFUSED.search(failure.answer[1]))  # fmt: skip
        if is_for_key and permit.key.secret:
            failure.is_key_refused = permit.refuse(str(failure.status))
            why = f"the upstream answered {failure.status}"
            log.warning("upstream_key %s: %s", permit.key.name, why)
        elif failure.status == 429 and failure.is_transient:
            permit.strike("429", None if wait_s is None else min(wait_s, LONGEST_PAUSE_S))
        else:
            lease.heed(failure.answer[0])

    def _give_up(self, flight: Flight, failure: Failure) -> None:
        """The last failure is the answer: the upstream's own words where there are any."""
        if failure.answer is None:
            raise failure.error
        if failure.is_key_refused:  # the keys are our matter, and the answer may quote them
            why = f"the upstream answered {failure.status} to every key of its pool"
            raise ProxyError("upstream_key_refused", why, retry_after_s=REFUSED_KEY_S)
        head, body = failure.answer
        if flight.record.attempts > 1 or failure.has_backed_off:
            head = head.changed(head.status, "", b"x-should-retry: false\r\n", (b"x-should-retry",))
        if head.is_stream and head.status == 200:
            flight.begin(head)
            flight.push(body)
        else:
            flight.begin(head, body)

    # -- the policy of further attempts

    def _may_retry(self, flight: Flight, lease: Lease, failure: Failure) -> bool:
        request, target = flight.record.request, lease.target
        if flight.passes or target.circuit.state is State.OPEN or not flight.readers:
            return False
        if failure.is_key_refused and lease.permit is not None:  # another key may be welcome
            return target.upstream.gate.keys.refusal(target.model) is None
        rule = self._settings.rule_of(target.model)
        kind = request.retry or request.rule.retry or rule.retry
        kind = kind or ("cautious" if request.doc.get("tools") else "safe")
        may = failure.ran_nothing if kind == "cautious" else failure.is_transient
        return may and kind != "never" and lease.attempts <= self._settings.retries

    async def _back_off(self, lease: Lease, failure: Failure) -> bool:
        """Wait before a further attempt; False where there shall be none after all."""
        asked_s, circuit = failure.retry_after_s or 0.0, lease.target.circuit
        if asked_s > self._settings.queue_timeout:  # the upstream's answer goes to the caller
            return False
        is_queued, is_held_back = lease.permit is not None, failure.status == 429
        failure.has_backed_off = True
        lease.leave()  # others may go while this one waits
        if not (is_queued and (is_held_back or failure.is_key_refused)):  # else the gate knows
            wait_s = BACKOFF_S * 2 ** (lease.attempts - 1) * random.uniform(1, 2)
            wait_s = max(wait_s, asked_s + random.uniform(0, BACKOFF_S) if asked_s else 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await circuit.opened.wait()
                    raise circuit.error()
        if is_queued:
            chances = max(1, self._settings.retries - lease.attempts + 1)
            try:
                await lease.enter(chances)
            except ProxyError:  # the upstream's own words tell more than "the queue is full"
                return False
        return True

    def abandon(self, flight: Flight) -> None:
        """When the last caller has left: finish and keep it, or give the slot free."""
        lease = flight.lease
        if flight.task is None or lease is None:
            return
        is_asking = not lease.attempt.is_over  # an attempt is with the upstream now
        if is_asking:
            lease.attempt.give_place()  # it is for somebody who waits
        is_joined = self._flights.running.get(flight.key) is flight
        wanted = self._settings.abandon == "finish" and is_joined
        if not is_asking or not wanted or flight.is_overgrown:
            self.drop(flight)

    def drop(self, flight: Flight) -> None:
        """Nobody wants its answer any more: nobody joins it, and its slot is free."""
        self._flights.land(flight)
        if flight.task is not None:
            flight.task.cancel()


###############################################################################
# Control
###############################################################################
# Rule: what an operator sees and changes while it runs, and the routes for that.


def check_open(settings: Settings) -> None:
    """Raise ConfigError where anybody on the network could use the upstream unasked."""
    is_open = settings.allow_open == "on" or bool(settings.clients)
    if not is_loopback(settings.host) and not is_open:
        why = f"--host {settings.host}: whoever reaches it could use the upstream; add a client "
        raise ConfigError(why + "(llmproxy key new NAME) or say --allow-open")


ACTIONS = ("pause", "resume", "clear", "close", "reload", "save", "resend")
LIVE = [name for name, item in SETTINGS.items() if item.metadata["live"]]


class Control:
    """What an operator changes while it runs. A change acts at the next decision, on no call."""

    TABLES = ("models", "clients", "upstreams", "keys")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._loaded = dataclasses.replace(gateway.settings)
        with contextlib.suppress(ConfigError):  # as it was written: mock: has an address by now
            if gateway.settings.again is not None:
                self._loaded = gateway.settings.again()
        self.is_paused = False

    def change(self, texts: Mapping[str, Any], where: str = "set") -> dict[str, Any]:
        """Change live settings, all of them or none; returns their values by flag name.

        Raises ConfigError: says which one and why; nothing was changed.
        """
        self._take(self._gateway.settings.changed(texts, where))
        shown = self._gateway.settings.shown()
        changed = {flag: shown[flag] for flag in (flag_name(name) for name in texts)}
        text = ", ".join(f"{flag} = {', '.join(typed(v))}" for flag, v in changed.items())
        log.warning("%s: %s", where, printable(text, 200))
        return changed

    def save(self, flags: Iterable[str] = ()) -> Path:
        """Write settings that the file has differently: those named, else all live ones.

        Raises ConfigError: the file cannot be read or written, and is as it was.
        """
        settings = self._gateway.settings
        path = settings.path or default_config_path(os.environ)
        with only_one(path, waits=False):
            text = text_of(path)
            there = load_settings({}, {}, path) if text else Settings()
            names = [flag.replace("-", "_") for flag in flags] or LIVE
            values = {name: getattr(settings, name) for name in names}
            new = {n: writable(n, v) for n, v in values.items() if v != getattr(there, n)}
            if new:
                replace_file(path, with_settings(text, new))
                if settings.again is not None:  # what else was edited is for the next reload
                    fresh = settings.again()
                    saved = {name: getattr(fresh, name) for name in new}
                    self._loaded = dataclasses.replace(self._loaded, **saved)
        return path

    async def reload(self) -> str:
        """Read the file, and all else, once more; returns what came of it.

        What has not changed there since it was last read stays as it was set in the meantime.
        Raises ConfigError: nothing was changed.
        """
        gateway = self._gateway  # commands and files may take their time: calls go on
        secrets_ = await asyncio.to_thread(lambda: [u.read_keys() for u in gateway.upstreams])
        settings, old = gateway.settings, self._loaded
        if settings.again is None or settings.path is None:
            raise ConfigError("there is no file to read again")
        fresh = settings.again()
        held = ("clients", "budget", "budget_month")
        if any(getattr(old, name) for name in held) and not text_of(settings.path).strip():
            why = "is empty, and it had clients or budgets; a save that was cut off?"
            raise ConfigError(f"{settings.path}: {why}")
        names = [n for n in (*SETTINGS, *self.TABLES) if getattr(fresh, n) != getattr(old, n)]
        live = [n for n in names if n in (*LIVE, "models", "clients")]
        new = {name: getattr(fresh, name) for name in live}
        given = {name: where for name, where in settings.given.items() if name not in live}
        given |= {name: fresh.given[name] for name in live if name in fresh.given}
        changed = dataclasses.replace(settings, **new, given=given)
        check_open(changed)
        self._take(changed)
        self._loaded = dataclasses.replace(old, **new)
        for upstream, found in zip(gateway.upstreams, secrets_, strict=True):
            live += ["upstream_key"] * upstream.set_keys(found)
        if old.clients and not fresh.clients:
            log.warning("no client is left in the file: whoever reaches the port may call")
        rest = [flag_name(name) for name in names if name not in live]
        text = f"changed {', '.join(map(flag_name, live)) or 'nothing'}"
        return text + (f"; wants a restart: {', '.join(rest)}" if rest else "")

    def _take(self, changed: Settings) -> None:
        gateway, settings = self._gateway, self._gateway.settings
        money = ("price", "prices", "budget", "budget_month", "models", "clients")
        if any(getattr(changed, name) != getattr(settings, name) for name in money):
            gateway.accounts.change(changed)
        known = {client.rule.name: client for client in gateway.guard.clients.values()}
        gateway.guard.clients = {}
        for rule in changed.clients:  # who was there before keeps what was counted
            client = known.get(rule.name) or Client(rule, gateway.clock)
            client.limit(rule)
            gateway.guard.clients[rule.key_sha256] = client
        if (changed.models, changed.stable_prefix) != (settings.models, settings.stable_prefix):
            gateway.flights.forget_spellings()
        is_retimed = changed.queue_timeout != settings.queue_timeout
        for name in (*SETTINGS, *self.TABLES, "given"):
            setattr(settings, name, getattr(changed, name))
        for upstream in gateway.upstreams:
            if is_retimed:
                upstream.gate.retime(settings.queue_timeout)
            upstream.resize()
        gateway.flights.shrink(settings.cache_bytes)
        gateway.captures.shrink()

    def pause(self, is_paused: bool) -> str:
        self.is_paused = is_paused
        for upstream in self._gateway.upstreams:
            upstream.gate.pause(is_paused)
        return "paused: new calls wait in the queue" if is_paused else "going on"

    async def resend(self, number: Any) -> int:
        """Ask a held call once more, as its caller did; returns the number of the new one.

        It goes the way of every call, but nothing that is kept or running answers it.
        Raises ConfigError: it is not held, or was refused at once.
        """
        gateway = self._gateway
        held = gateway.captures.held
        capture = held.get(number) if isinstance(number, int) else None
        if capture is None or capture.lost_bytes:
            raise ConfigError(f"call {printable(str(number))} is not held")
        request, trace, url = capture.record.request, new_trace(), URL(gateway.url)
        own = [name for name in request.headers.own if name != "x-llmproxy-newest"]
        lines = [f"{name}: {request.low[name]}" for name in own]
        lines += [f"x-request-id: {trace}", "cache-control: no-cache", "connection: close"]
        head = f"{request.method} {request.raw_path} HTTP/1.1\r\nhost: {request.host}\r\n"
        head += f"content-length: {len(capture.body)}\r\n" + "\r\n".join(lines) + "\r\n"
        left = "content-encoding", "cache-control", "connection"
        block = bytes_of_text(head) + request.headers.block(left) + b"\r\n"

        async def send() -> None:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            try:
                writer.write(block + capture.body)
                while await reader.read(SLICE_BYTES):
                    pass
            finally:
                writer.close()

        task = gateway.answers.spawn(send())
        while True:
            for new, other in reversed(held.items()):
                if other.record.request.trace == trace:
                    return new
            if task.done():
                raise ConfigError("it was refused at once; see the last calls")
            await asyncio.sleep(0.01)

    async def act(self, action: str, wanted: Mapping[str, Any]) -> str:
        """Pause, resume, clear what is kept, close circuits, reload, send a call again; returns
        what was done.

        `wanted`: upstream, model and path of the circuit to close, none of them: all; the `id` of
        the call.
        Raises ConfigError: it cannot be done.
        """
        gateway, known = self._gateway, ("upstream", "model", "path")
        if action in ("pause", "resume"):
            return self.pause(action == "pause")
        if action == "clear":
            count = len(gateway.flights.kept)
            gateway.flights.clear()
            return f"forgot {count} kept answers"
        if action == "close":
            if not all(k in known and isinstance(v, str) for k, v in wanted.items()):
                raise ConfigError(f"close: wants texts of {', '.join(known)}, or nothing for all")
            fits = [c for c in gateway.circuits.not_closed() if wanted.items() <= c.shown().items()]
            for circuit in fits:
                circuit.close()
            return f"closed {len(fits)} circuits"
        if action in ("reload", "save"):
            return await self.reload() if action == "reload" else f"saved in {self.save()}"
        if action == "resend":
            return f"sent again as call {await self.resend(wanted.get('id'))}"
        raise ConfigError(f"unknown action {printable(action)}; known: {', '.join(ACTIONS)}")


class Admin:
    """The operator's routes: for loopback callers or the admin key, never for a web page."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._routes: dict[str, Callable[[], Any]] = {
            "health": lambda: {"status": "ok"}, "ready": self._ready, "status": gateway.status,
            "metrics": lambda: "\n".join(metrics(gateway)).encode() + b"\n",
        }  # fmt: skip

    async def answer(self, record: Record, upload: Upload, reply: Reply) -> None:
        request, answers = record.request, self._gateway.answers
        request.dialect, record.fate = "openai", "bypass"
        origin, request.origin = request.origin, None
        name = request.path.removeprefix(ADMIN)
        try:
            self._check(request, reply, origin)
            query = URL(request.raw_path, encoded=True).query
            if name in self._routes:
                doc = self._routes[name]()
                if name == "status" and query.get("recent", "").isdecimal():
                    doc["recent"] = self._gateway.counters.last(int(query["recent"][:4]))
            elif name == "settings" or name.startswith("do/"):
                doc = await self._operate(name, request, upload)
            elif name == "calls" or name.startswith("trace/"):
                doc = await self._read(name, query)
            elif name.startswith("captures"):
                doc = await self._gateway.captured(name.removeprefix("captures").lstrip("/"))
            else:
                known = ", ".join([
                    *self._routes, "calls", "trace/ID", "captures", "captures/ID", "settings",
                    "do/ACTION",
                ])
                raise ProxyError("not_found", f"admin routes: {known}")
        except ProxyError as error:
            answers.refuse(reply, record, error)
            return
        is_text = name == "metrics"
        kind = "text/plain; version=0.0.4; charset=utf-8" if is_text else "application/json"
        status = 503 if name == "ready" and doc["status"] != "ready" else 200
        more = b"Cache-Control: no-store\r\n"
        answers.document(reply, record, doc, status=status, kind=kind, more=more)

    async def _operate(self, name: str, request: Request, upload: Upload) -> dict[str, Any]:
        """Read or change settings, or have something done."""
        control, settings = self._gateway.control, self._gateway.settings
        if name == "settings" and request.method == "GET":
            given = {flag_name(n): where for n, where in settings.given.items()}
            shown, live, file = settings.shown(), [*map(flag_name, LIVE)], str(settings.path or "")
            return {"settings": shown, "given": given, "live": live, "file": file}
        if request.method != ("PATCH" if name == "settings" else "POST"):
            raise ProxyError("not_found", "GET or PATCH settings, POST do/ACTION")
        doc = parse_json(await upload.whole() or b"{}")
        try:
            if doc is None:
                raise ConfigError("the body is no JSON that fits; it wants a JSON object")
            if name != "settings":
                return {"done": await control.act(name.removeprefix("do/"), doc)}
            is_saved = doc.pop("save", False)
            changed = control.change(doc)
            try:
                saved = {"saved": str(control.save(doc))} if is_saved else {}
            except ConfigError as error:
                raise ConfigError(f"changed, but not saved: {error}") from None
            return {"settings": changed, **saved}
        except ConfigError as error:
            raise ProxyError("invalid_request", str(error)) from None

    async def _read(self, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Rows of the ledger, read beside the event loop."""
        if (ledger := self._gateway.accounts.ledger) is None:
            raise ProxyError("not_found", "there is no ledger (--state none)")
        trace = name.removeprefix("trace/") if "/" in name else None
        try:
            sql, values = calls_query(query, trace)
            values[-1] = min(values[-1], 1000)
        except ValueError as error:
            raise ProxyError("invalid_request", str(error)) from None
        self._gateway.fold()
        await asyncio.to_thread(ledger.written().wait, 1.0)
        rows = list[dict[str, Any]]()
        try:
            rows = await asyncio.to_thread(read_rows, ledger.path, sql, values)
        except (OSError, sqlite3.Error) as error:
            log.warning("ledger: %s cannot be read: %s", ledger.path, error)
        if trace is not None and not rows:
            raise ProxyError("not_found", "no call of this trace is in the ledger")
        return {"calls": [shown_row(row) for row in rows]}

    def _check(self, request: Request, reply: Reply, origin: str | None) -> None:
        site = request.low.get("sec-fetch-site", "none")
        if origin is not None or site not in ("none", "same-origin"):
            raise ProxyError("forbidden_origin", "admin routes are not for web pages")
        key, settings = self._gateway.settings.admin_key, self._gateway.settings
        self._gateway.guard.check_host(request.host, is_loopback(settings.host) or not key)
        given = bytes_of_text(request.low.get("authorization", ""))
        if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            why = "admin routes want the admin key as a bearer token"
            raise ProxyError("invalid_api_key", why)
        if key is None and not is_loopback(reply.peer or "localhost"):
            why = "admin routes are for loopback callers; see --admin-key"
            raise ProxyError("forbidden_origin", why)

    def _ready(self) -> dict[str, Any]:
        circuits = self._gateway.circuits.values()
        dead = bool(circuits) and all(c.state is State.OPEN and c.retry_in_s > 0 for c in circuits)
        reason = "every circuit is open" if dead else "ready"
        return {"status": "draining" if self._gateway.guard.is_draining else reason}


def status_of(gateway: Gateway) -> dict[str, Any]:
    """What the status route, the live table and scripts see."""
    gateway.fold()
    gates = [upstream.gate for upstream in gateway.upstreams]
    return {
        "version": __version__,
        "in_flight": gateway.counters.in_flight,
        "queued": sum(gate.queued for gate in gates),
        "callers": len(gateway.callers),
        **gateway.counters.status(),
        "open_circuits": [
            {**c.shown(), "retry_in_s": round(c.retry_in_s, 1)}
            for c in gateway.circuits.not_closed()
        ],
        "circuits": [
            {
                **c.shown(), "timeout_s": round(c.timeout_s(), 1), "measured": len(c.attempt_s),
                "p99_s": round(percentile(c.attempt_s, 0.99), 3),
            }
            for c in gateway.circuits.values()[-100:]
        ],
        "queue": [
            {"client": client, "priority": priority, "calls": calls, "wait_s": round(wait_s, 1)}
            for gate in gates for client, priority, calls, wait_s in gate.forecast.flows()
        ],
        **gateway.accounts.shown(),
        "kept_bytes": gateway.flights.kept_bytes,
        "kept_answers": len(gateway.flights.kept),
        "permits": {
            "calls": sum(gate.running for gate in gates),
            "weight": sum(gate.weight for gate in gates),
        },
        "draining": gateway.guard.is_draining, "paused": gateway.control.is_paused,
        "upstreams": [upstream.shown() for upstream in gateway.upstreams],
        "clients": [client.shown() for client in gateway.guard.clients.values()],
        "settings": gateway.settings.shown(),
    }  # fmt: skip


def metrics(gateway: Gateway) -> Iterable[str]:
    """Prometheus text, under the names of OpenTelemetry's GenAI conventions where there are any."""
    status, counters = gateway.status(), gateway.counters
    yield "# TYPE llmproxy_calls_total counter"
    for fate in FATES:
        yield f'llmproxy_calls_total{{fate="{fate}"}} {counters.fates[fate]}'
    yield "# TYPE gen_ai_client_token_usage_total counter"
    for kind, name in (("input", "tokens_in"), ("output", "tokens_out")):
        yield f'gen_ai_client_token_usage_total{{gen_ai_token_type="{kind}"}} {status[name]}'
    for name in ("upstream_calls", "upstream_429", "retries", "preempted", "tokens_cached",
                 "tokens_saved", "unpriced_tokens"):  # fmt: skip
        yield f"# TYPE llmproxy_{name}_total counter\nllmproxy_{name}_total {status[name]}"
    status["open_circuits"] = len(status["open_circuits"])
    for name in ("in_flight", "queued", "kept_bytes", "spend_usd", "saved_usd", "uptime_s",
                 "open_circuits"):  # fmt: skip
        yield f"# TYPE llmproxy_{name} gauge\nllmproxy_{name} {status[name]}"
    names = {
        "total": "gen_ai_client_operation_duration_seconds",
        "ttft": "gen_ai_server_time_to_first_token_seconds", "queue": "llmproxy_queue_seconds",
    }  # fmt: skip
    for kind, name in names.items():
        yield f"# TYPE {name} histogram"
        yield from counters.times[kind].lines(name)


###############################################################################
# Gateway
###############################################################################
# Rule: the way of a request, in `handle`, and nothing of how a step is done.


class Gateway:
    """A request's way, from guard to record."""

    def __init__(self, settings: Settings, clock: Clock = time.monotonic) -> None:
        self.settings, self.clock = settings, clock
        self.counters = Counters(clock)
        self.accounts = Accounts(settings, self.counters)
        self.flights = Flights(clock)
        self.captures = Captures(settings)
        self.answers = Answers(settings, self.accounts)
        base = settings.upstream
        rules = settings.upstreams or [UpstreamRule(URL(base).authority, base, keys=settings.keys)]
        self.upstreams = [Upstream(rule, settings, clock) for rule in rules]
        self.guard = Guard(settings, [upstream.mark for upstream in self.upstreams], clock)
        named = {upstream.name: upstream for upstream in self.upstreams}
        self.circuits = Circuits(settings, named, clock, self.answers.spawn)
        self.router = Router(self.accounts, self.upstreams, self.circuits)
        self.leader = Leader(self.accounts, self.flights, self.router, self.circuits, clock)
        self.rewriter = Rewriter(settings, self.router.keeps_prefix)
        self.joiner = Joiner(self.accounts, self.flights, self.rewriter, self.leader.abandon)
        self.newest = Newest(settings, self.leader.drop)
        self.control, self.admin = Control(self), Admin(self)
        self.url, self.mock = "", cast(Any, None)  # where it listens; behind `mock:`
        self.on_call: Callable[[Record], None] = lambda record: None
        self.callers: set[Record] = set()  # who wait for an answer
        self._ended: list[Record] = []  # and not counted yet

    # -- its life

    async def start(self) -> None:
        self.accounts.start()
        for upstream in self.upstreams:
            upstream.llama.on_change = functools.partial(self._server_changed, upstream)
            self.answers.spawn(upstream.attend())

    async def drain(self, limit_s: float = DRAIN_S) -> bool:
        """Refuse new calls, let those in flight finish. True if all did within `limit_s`."""
        self.guard.is_draining = True
        self.control.pause(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.callers or self.counters.in_flight:  # who waits in a queue has a caller
                    await asyncio.sleep(0.02)
                return True
        return False

    async def close(self) -> None:
        tasks = self.answers.tasks | self.leader.tasks
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1.0) if tasks else None
        for upstream in self.upstreams:
            await upstream.close()
        self.fold()
        if self.accounts.ledger is not None:
            self.accounts.ledger.close()

    def _server_changed(self, upstream: Upstream, is_other_model: bool) -> None:
        upstream.resize()
        if is_other_model:
            self.flights.clear(upstream.name)

    # -- the way of a request

    async def handle(self, message: Any, payload: Any, reply: Reply) -> None:
        """One request: guard, read, join; then it is answered from what is kept, reads a flight
        that others lead, or leads one itself: reserve, queue, admit, send, relay, settle.
        """
        request = Request(message)
        record = Record(request, self.clock())
        upload = Upload(request, payload, reply, self.settings.max_body)
        if request.is_admin:
            return await self.admin.answer(record, upload, reply)
        self.callers.add(record)
        self.counters.requests += 1
        record.id = self.accounts.new_id()
        flight: Flight | None = None
        try:
            self.guard.check(record)
            if request.is_preflight:
                return self.answers.preflight(reply, record)
            if request.is_model_list and (len(self.upstreams) > 1 or self.rewriter.names()):
                return await self.list_models(reply, record)
            await self.read(record, upload)
            self.captures.open(record)
            found = self.joiner.join(record, upload)
            if isinstance(found, tuple):
                self.newest.comes(record, reply.peer, None)
                return await self.answers.serve(reply, record, *found, "hit")
            flight = found
            reader = self.follow(flight, reply, record)
            if flight.record is record:
                await self.leader.fly(flight)
            await reader.wait()
        except ProxyError as error:
            await self.refuse(reply, record, flight, error)
        except ConnectionError:
            self.answers.cut(reply, record)
            raise
        except asyncio.CancelledError:
            record.status = record.status or 499
            raise
        except Exception as error:  # a fault of ours: say so, without what it might quote
            log.error("internal error: %s", fault_lines(error))
            self.answers.refuse(reply, record, internal())
        finally:
            self.record(record, flight)

    async def list_models(self, reply: Reply, record: Record) -> None:
        record.fate = "bypass"
        named = self.rewriter.names()
        self.answers.document(reply, record, await self.router.list_models(record.request, named))

    async def read(self, record: Record, upload: Upload) -> None:
        """The body, where it may name a model; all else is read on its way."""
        request, kind = record.request, record.request.low.get("content-type", "")
        is_empty = upload.is_empty or not request.may_cost
        if is_empty or not (request.route or may_name_model(request.path, kind)):
            return
        request.sent = request.body = await upload.whole()
        if codings := request.low.get("content-encoding"):
            request.body = uncoded(request.sent, codings, self.settings.max_body)
        request.is_read = not kind.startswith("multipart/")
        if not request.is_read:
            request.name_model(form_model(request.body, kind))

    def follow(self, flight: Flight, reply: Reply, record: Record) -> Reader:
        """Have the flight's answer given to a caller from its beginning, at the caller's pace."""
        reader = Reader(flight, reply, record, self.answers)
        if record.capture is not None:
            record.capture.answer = flight

        def gone() -> None:
            self.callers.discard(record)
            reader.leave()

        reply.conn.on_gone = gone
        flight.join(reader)
        self.newest.comes(record, reply.peer, reader)
        if self.settings.keepalive is not None and record.request.is_stream:
            reader.keep_alive(self.settings.keepalive)
        return reader

    async def refuse(
        self, reply: Reply, record: Record, flight: Flight | None, error: ProxyError
    ) -> None:
        """An error of our own; while a circuit is open an old answer is better than none."""
        if flight is not None and flight.met_open and not flight.passes and not reply.is_begun:
            found = self.flights.find(flight.key, math.inf)
            if found is not None and record.request.max_age_s >= 0:
                await self.answers.serve(reply, record, *found, "stale")
                return
        with contextlib.suppress(CallerGone):
            self.answers.refuse(reply, record, error)

    def record(self, record: Record, flight: Flight | None) -> None:
        """A call is over: it is counted, logged and written with others, a moment later."""
        self.callers.discard(record)
        record.fate = record.fate or "bypass"
        record.elapsed_s = self.clock() - record.started_at
        if record.fate == "joined" and flight is not None:
            self.answers.take(record, flight)
            record.saved_micros = flight.record.answer_micros
        record.request.let_go()
        if record.capture is not None:
            self.captures.close(record)
        if not self._ended:
            asyncio.get_running_loop().call_later(FOLD_S, self.fold)
        self._ended.append(record)

    def fold(self) -> None:
        """Count what has ended."""
        ended, self._ended = self._ended, []
        for record in ended:
            self.counters.end(record)
            self.accounts.ended(record)
            self.on_call(record)
        if ended and self.accounts.ledger is not None:
            self.accounts.ledger.flush()

    def status(self) -> dict[str, Any]:
        return status_of(self)

    async def captured(self, number: str = "") -> dict[str, Any]:
        """A call that is held, or the rows of all, the newest first.

        Raises ProxyError: not_found.
        """
        held = self.captures.held
        if not number:
            return {"calls": [capture.row() for capture in reversed(held.values())]}
        capture = held.get(int(number)) if number.isdecimal() and len(number) < 20 else None
        if capture is None:
            why = f"call {printable(number)} is not held; captures is {self.settings.captures}"
            raise ProxyError("not_found", why)
        return await asyncio.to_thread(capture.shown)  # megabytes are searched for secrets


###############################################################################
# Opened calls
###############################################################################
# Rule: a call that is held, as people and tools read it: lines, curl, HAR, JSONL. Takes what the
# route `captures/ID` says; knows no daemon and no screen.

Line = tuple[str, str]  # style and text
_TEXTS = ("text", "refusal", "transcript")
_KEY_VARIABLE = "$LLMPROXY_API_KEY"


def spoken(value: Any, who: str) -> Iterator[tuple[str, str]]:
    """Heading and text of all that a message, or a part of one, holds, in any dialect."""
    if isinstance(value, list):
        for item in value:
            yield from spoken(item, who)
        return
    if not isinstance(value, dict):
        if value is not None:
            yield who, value if isinstance(value, str) else json.dumps(value)
        return
    kind, who = str(value.get("type", "")), str(value.get("role") or who)
    function = value if kind in ("tool_use", "function_call") else _dict(value, "function")
    thought = next((t for n in THOUGHTS if isinstance(t := value.get(n), str) and t), None)
    text = next((value[name] for name in _TEXTS if isinstance(value.get(name), str)), None)
    if thought is not None:
        yield f"{who}, thinking", thought
    if kind == "reasoning":
        yield from spoken([value.get("summary"), value.get("content")], f"{who}, thinking")
    elif kind in ("tool_result", "function_call_output") or who == "tool":
        known = (value.get(n) for n in ("tool_use_id", "tool_call_id", "call_id", "tool_name"))
        which = next((name for name in known if name), "")
        content = value.get("content", value.get("output"))
        yield from spoken("" if content is None else content, f"result {which}".rstrip())
    elif function.get("name"):
        asked = function.get("arguments", function.get("input"))
        asked = (json_at(asked) or asked) if isinstance(asked, str) else asked
        text = asked if isinstance(asked, str) else json.dumps(asked, indent=1, ensure_ascii=False)
        yield f"{who} calls {function['name']}", text
    elif "content" in value or "tool_calls" in value:
        yield from spoken(value.get("content"), who)
        yield from spoken(value.get("tool_calls") or [], who)
    elif text is not None:
        yield who, text
    elif thought is None:
        whole = json.dumps(value, indent=1, ensure_ascii=False)
        is_large = len(whole) > 2000  # a picture, a sound
        yield who, f"[{kind or 'object'}, {len(whole)} characters]" if is_large else whole


THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_text")
_PROMPTS = ("system", "instructions", "messages", "input", "prompt", "input_prefix", "input_suffix")


def asked_of(body: str) -> Iterator[tuple[str, str]]:
    """What a request says: messages, tools, parameters."""
    doc = json_at(body)
    if not isinstance(doc, dict):
        yield "body", body
        return
    for name in _PROMPTS:
        yield from spoken(doc.get(name), name if name in ("system", "instructions") else "user")
    tools = doc.get("tools")
    if isinstance(tools, list) and tools:
        lines = []
        for tool in map(_mapping, tools):
            about = tool if "name" in tool else _dict(tool, "function")
            first = (str(about.get("description") or "").strip().splitlines() or [""])[0]
            lines.append(f"{about.get('name') or tool.get('type')}: {first}")
        yield f"{len(tools)} tools", "\n".join(lines)
    rest = {name: v for name, v in doc.items() if name not in (*_PROMPTS, "tools")}
    yield "parameters", "\n".join(f"{n} = {json.dumps(v)[:300]}" for n, v in rest.items())


def answered(kind: str, body: str) -> Iterator[tuple[str, str]]:
    """What an answer says, plain or as a stream, from its beginning as far as it has come."""
    data = body.encode("utf-8", "replace")
    if kind == "text/event-stream" or body.startswith(("data:", "event:", ":")):
        whole = Assembly()
        whole.feed(data)
        try:
            doc = json_at(whole.plain()[1])
        except ProxyError:
            doc = _deltas(data)
    elif "ndjson" in kind:
        doc = _from_lines(data)
    else:
        doc = json_at(body)
    if not isinstance(doc, dict) or not doc:
        yield "answer", body
        return
    choices, data_list = (found if isinstance(found := doc.get(name), list) else []
                          for name in ("choices", "data"))  # fmt: skip
    for choice in map(_mapping, choices):
        yield from spoken(choice.get("message", choice.get("text")), "assistant")
    for name in ("message", "response", "content", "output"):
        yield from spoken(doc.get(name), "assistant")
    if data_list:
        vector = _mapping(data_list[0]).get("embedding") or ()
        yield "answer", f"{len(data_list)} of {len(vector)} numbers"
    if "error" in doc:
        yield "error", json.dumps(doc["error"], indent=1, ensure_ascii=False)
    ends = [_mapping(choice).get("finish_reason") for choice in choices]
    ends += [doc.get(name) for name in ("stop_reason", "stop_type", "done_reason", "status")]
    if ends := [str(end) for end in ends if end]:
        yield "end", ", ".join(ends)
    for name in ("usage", "timings"):
        if isinstance(found := doc.get(name), dict):
            yield name, json.dumps(found)


def _deltas(data: bytes) -> dict[str, Any]:
    """A response of which the last event, that holds the whole, has not come yet."""
    output = list[dict[str, Any]]()
    for event in EVENT_END.split(data):
        doc = _mapping(json_at(event_data(event)))
        kind, is_delta, _ = str(doc.get("type")).partition(".delta")
        if is_delta:
            name = kind.rpartition(".")[2]
            if not output or output[-1]["role"] != name:
                output.append({"role": name, "text": ""})
            output[-1]["text"] += str(doc.get("delta", ""))
    return {"output": output} if output else {}


def _from_lines(data: bytes) -> dict[str, Any]:
    """The answer that JSON lines come to, as Ollama writes them."""
    whole: dict[str, Any] = {}
    for line in data.splitlines():
        doc = _mapping(json_at(line))
        for name, value in doc.items():
            if isinstance(value, dict):
                add_delta(whole.setdefault(name, {}), value)
            elif isinstance(value, str) and name in ("response", "thinking"):
                whole[name] = whole.get(name, "") + value
            else:
                whole[name] = value
    return whole


def lines_of(sections: Iterable[tuple[str, str]]) -> Iterator[Line]:
    for heading, text in sections:
        yield "bold cyan", heading
        for line in text.splitlines() or [""]:
            yield "", line
        yield "", ""


def told(call: Mapping[str, Any]) -> list[Line]:
    """A call that is held as lines: how it went, what was asked, what was answered."""
    asked, answer = call["request"], call["answer"]
    state = "open" if call["is_running"] else "done"
    lines = [("", line) for line in timeline({**call, "state": state})]
    lines += [("yellow", call["why"])] * bool(call["why"])
    lines += [("yellow", f"changed: {call['changed']}")] * bool(call["changed"])
    lines.append(("", ""))
    lines += lines_of(_or_size(asked, asked_of))
    headers = "\n".join(f"{name}: {value}" for name, value in asked["headers"].items())
    lines += lines_of([("headers", headers)])
    if answer is not None:
        about = functools.partial(answered, answer["type"])
        lines += lines_of([("answer", f"{answer['status']} {answer['type']}")])
        lines += lines_of(_or_size(answer, about))
    return lines


def _or_size(
    part: Mapping[str, Any], read: Callable[[str], Iterable[tuple[str, str]]]
) -> Iterable[tuple[str, str]]:
    if part["lost_bytes"]:
        yield "not held", f"{part['lost_bytes']} of {part['bytes']} bytes, from the beginning"
    if part["body"] is None:
        yield "body", f"{part['bytes']} bytes that are no text"
    elif part["body"]:
        yield from read(part["body"])


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Line]:
    """How the answer of a call that was sent again differs from the one it had before."""
    texts = list[list[str]]()
    for call in (before, after):
        answer = call["answer"] or {"body": "", "type": ""}
        parts = answered(answer["type"], answer["body"] or "")
        found = [f"{call['status']} {call['code']}".rstrip()]
        for heading, text in parts:
            if heading not in ("usage", "timings"):
                found += [heading, *re.split(r"(?<=[.!?]) +|\n", text)]
        texts.append(found[:2000])  # difflib takes the square of it
    lines: list[Line] = [("bold cyan", "sent again: what differs")]
    names = ("total_ms", "ttft_ms", "tokens_in", "tokens_cached", "tokens_out")
    lines += [("", f"{name}: {before[name]:g} -> {after[name]:g}") for name in names]
    styles = {"-": "red", "+": "green"}
    changed = [line for line in difflib.ndiff(texts[0], texts[1], None, None) if line[0] in styles]
    lines += [(styles[line[0]], line) for line in changed]
    return lines if changed else [*lines, ("green", "the answers are the same")]


def curl_of(call: Mapping[str, Any], base: str) -> str:
    """A call as a shell command. The key stands in a variable, $LLMPROXY_API_KEY."""
    asked = call["request"]
    words = [f"curl -X {call['method']} {shlex.quote(base + call['url'])}"]
    for name, value in asked["headers"].items():
        if name in ("authorization", *CREDENTIALS[1:-1]):
            scheme = "Bearer " if name == "authorization" else ""
            words.append(f'-H "{name}: {scheme}{_KEY_VARIABLE}"')
        elif name not in ("cookie", "connection", "accept"):
            words.append("-H " + shlex.quote(f"{name}: {value}"))
    if asked["body"] is None or asked["lost_bytes"]:
        words.append(f"--data-binary @BODY  # not held: {asked['bytes']} bytes")
    else:
        words.append("--data-binary " + shlex.quote(asked["body"]))
    return " \\\n  ".join(words)


def har_of(calls: Iterable[Mapping[str, Any]], base: str) -> dict[str, Any]:
    """Calls as an HTTP archive (HAR 1.2), which browsers' developer tools read."""

    def pairs(headers: Mapping[str, str]) -> list[dict[str, str]]:
        return [{"name": name, "value": value} for name, value in headers.items()]

    entries = []
    for call in calls:
        asked, answer = call["request"], call["answer"] or {"bytes": 0, "body": None, "type": ""}
        began = datetime.fromtimestamp(call["time_unix"] - call["total_ms"] / 1000).astimezone()
        query = urllib.parse.parse_qsl(call["url"].partition("?")[2], keep_blank_values=True)
        common: dict[str, Any] = {
            "httpVersion": "HTTP/1.1", "cookies": [], "headersSize": -1
        }  # fmt: skip
        waited_ms = call["queue_ms"] + call["limit_ms"] + call["retry_ms"]
        wait_ms = min(call["ttft_ms"], max(0.0, call["total_ms"] - waited_ms))
        kind, text = asked["headers"].get("content-type", ""), answer["body"] or ""
        content = {"size": answer["bytes"], "mimeType": answer["type"], "text": text}
        entries.append({
            "startedDateTime": began.isoformat(), "time": call["total_ms"], "cache": {},
            "request": {
                **common, "method": call["method"], "url": base + call["url"],
                "headers": pairs(asked["headers"]), "queryString": pairs(dict(query)),
                "postData": {"mimeType": kind, "text": asked["body"] or ""},
                "bodySize": asked["bytes"],
            },
            "response": {
                **common, "status": call["status"], "redirectURL": "",
                "statusText": call["code"] or http.client.responses.get(call["status"], ""),
                "headers": pairs({"content-type": answer["type"]} if answer["type"] else {}),
                "content": content, "bodySize": answer["bytes"],
            },
            "timings": {
                "blocked": waited_ms, "send": 0, "wait": wait_ms,
                "receive": max(0.0, call["total_ms"] - waited_ms - wait_ms),
            },
            "comment": f"{call['fate']}, trace {call['trace']}",
        })  # fmt: skip
    creator = {"name": "llmproxy", "version": __version__}
    return {"log": {"version": "1.2", "creator": creator, "entries": entries}}


def jsonl_of(call: Mapping[str, Any]) -> str:
    """A call as one line, in the form of the ledger's bodies, which `replay` reads."""
    answer = call["answer"] or {"body": None}
    return json.dumps({**call, "request": call["request"]["body"], "answer": answer["body"]})


def _cached(row: Mapping[str, Any]) -> str:
    """The share of its prompt that was cached."""
    cached = row["tokens_cached"]
    return f"{cached / row['tokens_in']:.0%}" if cached and row["tokens_in"] else ""


def timeline(row: dict[str, Any]) -> Iterable[str]:
    """One call's life as lines of text: why did it take so long?"""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time_unix"]))
    who = f"client={row['client']}" + (f" task={row['task']}" if row["task"] else "")
    yield f"{row['trace']}  {at}  {row['method']} {row['path']}  model={row['model'] or '-'} {who}"
    if row["shared"]:
        yield f"  {0:>9.0f} ms  joined the call of trace {row['shared']}, at no cost"
    elif row["fate"] in ("hit", "stale"):
        yield f"  {0:>9.0f} ms  answered from what is kept ({row['fate']}), at no cost"
    waits = (("queue_ms", "waited for a slot"), ("limit_ms", "waited for rpm, tpm or a pause"))
    for name, what in waits:
        if row[name] >= 1:
            yield f"  {'':>9}     {what}: {row[name]:.0f} ms in all"
    for number, step in enumerate(row["steps"], 1):
        key = f" with key {step['key']}" if step["key"] not in ("", "caller's own") else ""
        what = f"attempt {number} at {step['upstream']}{key}: {step['outcome']}"
        yield f"  {step['at_ms']:>9.0f} ms  {what} after {step['ms']:.0f} ms"
        if "changed" in step:
            yield f"  {'':>9}     changed: {step['changed']}"
        if "read" in step:
            prompt = step["read"] + step["cached"]
            what = f"read {step['read']} of {prompt} prompt tokens, the rest was cached"
            what += f"; not as before from {step['differs']}" if step["differs"] else ""
            yield f"  {'':>9}     {what}"
    if row["steps"] and row["status"] < 400:
        first_ms = row["steps"][-1]["at_ms"] + row["ttft_ms"]
        yield f"  {first_ms:>9.0f} ms  first byte, {row['ttft_ms']:.0f} ms after it was asked for"
    about = " (estimated)" if row["tokens_estimated"] else ""
    saved = f", saved {row['saved_usd']:.6f} USD" if row["saved_usd"] else ""
    cost = "no price" if row["cost_usd"] is None else f"{row['cost_usd']:.6f} USD"
    what = {"open": "not ended", "lost": "lost with its process"}.get(row["state"], "ended")
    what += f": {row['status']} {row['code']}".rstrip() * bool(row["status"])
    used = f"tokens {row['tokens_in']} in"
    used += f" ({cached} cached)" if (cached := _cached(row)) else ""
    used += f", {row['tokens_out']} out{about}, {cost}{saved}"
    yield f"  {row['total_ms']:>9.0f} ms  {what}, {row['fate']}, {used}"


###############################################################################
# Live table
###############################################################################
# Rule: draws what `Gateway.status` and the last calls say, nothing else. rich is imported here
# only, so that a daemon without a terminal never loads it.

_STYLE = {
    "joined": "green", "hit": "green", "stale": "yellow", "bypass": "dim", "rejected": "red",
    "up": "green", "ok": "green", "unknown": "dim", "loading": "yellow", "restarting": "yellow",
    "running": "yellow",
}  # fmt: skip
_messages: deque[str] = deque(maxlen=3)  # what the log says while the table owns the terminal


def short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.0f}{unit}" if number >= 100 or not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def duration(ms: float) -> str:
    if ms < 1000:
        return f"{ms:.0f}ms"
    return f"{ms / 1000:.1f}s" if ms < 100_000 else f"{ms / 1000:.0f}s"


def sparkline(values: list[float], most: float = 0.0) -> str:
    """One bar a value, as high as its share of the highest; nothing is a blank."""
    most, bars = most or max(values, default=0.0), "▁▂▃▄▅▆▇█"
    try:
        bars.encode(sys.stdout.encoding or "utf-8")
    except UnicodeError:
        bars = ".:-=+*#@"  # a terminal that knows no others
    return "".join(bars[math.ceil(n / most * 8) - 1] if n > 0 else " " for n in values)


def line_of(*parts: Any, style: str = "") -> Text:
    """One line of a terminal, of texts and (text, style), that does not wrap."""
    from rich.text import Text

    return Text.assemble(*parts, style=style, no_wrap=True, overflow="ellipsis")


def table_of(
    columns: Iterable[str], rows: Iterable[Iterable[Any]], right: Iterable[str] = (),
    ratios: Iterable[int | None] = (), **more: Any,
) -> Table:  # fmt: skip
    """A plain table; `right` names the columns of numbers, `ratios` shares out its width."""
    from rich.table import Table

    table = Table(**{"box": None, "header_style": "dim", "padding": (0, 1), **more})
    for name, ratio in itertools.zip_longest(columns, ratios):
        justify = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=True, ratio=ratio)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(line_of(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def plain_console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 250)


def render(
    status: dict[str, Any], url: str, width: int, height: int, board: Board | None = None
) -> RenderableType:
    """The live table as a renderable that fits `width` x `height`."""
    from rich.console import Group

    up = time.strftime("%H:%M:%S", time.gmtime(status["uptime_s"]))
    words = [(f"  {word}", "yellow") for word in ("draining", "paused") if status[word]]
    title = line_of(f"llmproxy {status['version']}  {url}  up {up}", *words, style="bold")
    parts: list[Any] = [title, line_of(), _numbers(status, width)]
    notes = [line_of(note, style="yellow") for note in _messages]
    if board is not None and board.calls.has_focus:
        parts = parts[:1] if board.calls.number else parts
        notes += [line_of(text, style="dim") for text in Opened.HELP if board.shows_help]
        hint = "" if board.shows_help or width < 70 else _HINT
        notes.append(line_of(board.note or hint, style="yellow" if board.note else "dim"))
        used = sum(map(_height, parts)) + 1 + len(notes)
        return Group(*parts, line_of(), *_opened(board.calls, width, height - used - 1), *notes)
    parts += _past(board, width) if board is not None and board.past else []
    parts += [line_of(), _upstreams(status)]
    parts += _tuning(board, status, width, height) if board is not None and board.has_keys else []
    if (room := height - sum(map(_height, parts)) - len(notes) - 2) >= 0:
        parts += [line_of(), _calls(status["recent"][::-1][:room], width)]
    return Group(*parts, *notes)


_HINT = "? shows the keys"


def _height(part: Any) -> int:
    return int(getattr(part, "row_count", 0) + getattr(part, "show_header", 1))


def _past(board: Board, width: int) -> list[Any]:
    """The last minutes, two lines in two halves."""
    shown: dict[str, Callable[[float], str]] = {
        "calls/s": "{:.1f}".format, "in flight": "{:.0f}".format,
        "wait": lambda s: duration(s * 1000), "429/s": "{:.1f}".format,
    }  # fmt: skip
    room, texts = max(5, width // 2 - 19), []
    for name, form in shown.items():
        values = [sample[name] for sample in board.past][-room:]
        bars = (sparkline(values).rjust(room), "red" if name == "429/s" else "cyan")
        texts.append(line_of((f"{name:9} ", "dim"), (f"{form(values[-1]):>6} ", "bold"), bars))
    return [line_of(), *(line_of(texts[n], "  ", texts[n + 1]) for n in (0, 2))]


def _tuning(board: Board, status: dict[str, Any], width: int, height: int) -> list[Any]:
    """The chosen setting between its neighbours."""
    around, lines = 0 if height < 30 else 2, [line_of()]
    for place in range(board.chosen - around, board.chosen + around + 1):
        flag, is_chosen = board.flags[place % len(board.flags)], place == board.chosen
        item, value = SETTINGS[flag.replace("-", "_")], status["settings"][flag]
        unit = item.metadata["unit"] if isinstance(value, (int, float)) else ""
        text = shown_value(item, value) + f" {unit}" * (unit not in ("", "bytes"))
        text = f"{board.typed}_" if is_chosen and board.typed is not None else text
        mark = ("> " if is_chosen else "  ", "bold")
        value_text = (text, "reverse" if is_chosen else "")
        lines.append(line_of(mark, (f"{flag:17} ", "dim"), value_text))
    lines += [line_of(text, style="dim") for text in board.HELP if board.shows_help]
    hint = "" if board.shows_help or width < 70 else f"{_HINT}, Tab goes to the calls"
    note = board.note or hint
    return [*lines, line_of(note, style="yellow" if board.note else "dim")]


def _numbers(status: dict[str, Any], width: int) -> Table:
    latency, open_circuits = status["latency_ms"], len(status["open_circuits"])
    share_429 = status["upstream_429"] / max(1, status["upstream_calls"])
    limits = [b["limit_usd"] for b in status["budgets"] if b["name"] == "the budget"]
    spend = f"${status['spend_usd']:.2f}" + (f"/{limits[0]:g}" if limits else "")
    cells = [
        ("in flight", status["in_flight"]), ("queued", status["queued"]),
        ("calls", status["requests"]), ("calls/s", f"{status['calls_per_s']:.1f}"),
        ("joined", status["joined"]), ("hits", status["hit"] + status["stale"]),
        ("upstream", status["upstream_calls"]), ("rejected", status["rejected"]),
        ("open circ.", open_circuits), ("429", f"{share_429:.1%}"),
        ("spend today", spend), ("saved", f"${status['saved_usd']:.2f}"),
        ("unpriced", short(status["unpriced_tokens"])),
        ("tok in", short(status["tokens_in"])), ("tok out", short(status["tokens_out"])),
        ("tok saved", short(status["tokens_saved"])),
        *((name, duration(latency[name])) for name in ("p50", "p95", "p99")),
    ]  # fmt: skip
    alarms = {"rejected": status["rejected"], "open circ.": open_circuits, "429": share_429}
    texts = [
        line_of((f"{name} ", "dim"), (str(value), "bold red" if alarms.get(name) else "bold"))
        for name, value in cells
    ]
    columns = min(max(2, width // 20), 8)  # "spend today $0.10/5" has 19 characters
    rows = [texts[start : start + columns] for start in range(0, len(texts), columns)]
    more: dict[str, Any] = {"show_header": False, "expand": True, "padding": (0, 1, 0, 0)}
    return table_of([""] * columns, rows, (), [1] * columns, **more)


def _upstreams(status: dict[str, Any]) -> Table:
    rows: list[tuple[str, str, Any]] = []

    def add(name: str, limit: str, state: str = "", style: str = "bold red") -> None:
        rows.append((name, limit, line_of((state, _STYLE.get(state, style)))))

    for upstream in status["upstreams"]:
        limit = f"{upstream['running']}/{upstream['concurrency']} calls{_used(upstream)}"
        limit += f", {short(upstream['inflight_tokens'])} tok"
        limit += ", adaptive" if upstream["is_adaptive"] else ""
        name = "" if upstream["name"] in upstream["url"] else f"{upstream['name']} "
        name += upstream["url"] + (f" {upstream['model']}" if upstream["model"] else "")
        add(name, limit, upstream["state"])
        if upstream["llama_cpp"]:
            add(*_llama(upstream))
        for model in upstream["models"]:
            if model["state"] != "unloaded":
                add(f"  {model['name']}", _slots(model), model["state"].replace("loaded", ""))
        for key in upstream["keys"]:
            add(f"  key {key['name']}", f"{key['calls']} calls{_used(key)}", key["state"])
    for client in status["clients"]:
        if client["rpm"] or client["tpm"]:
            add(f"  client {client['name']}", _used(client)[2:])
    for budget in status["budgets"]:
        left = budget["limit_usd"] - budget["spent_usd"]
        limit, style = f"${budget['limit_usd']:.2f}", "bold red" if left <= 0 else "green"
        add(f"  {budget['name']}, {budget['window']}", limit, f"${left:.2f} left", style)
    if status["ledger"] not in ("ok", "none"):
        add("  ledger", "", status["ledger"])
    for circuit in status["open_circuits"]:
        name, wait_s = f"  {circuit['model'] or '-'} {circuit['path']}", circuit["retry_in_s"]
        add(name, f"trial in {wait_s:.0f} s", circuit["state"])
    table = table_of(("upstream", "limit", "state"), rows, (), (3, 3, 1), expand=True)
    table.columns[2].min_width = 12
    return table


def _llama(upstream: Mapping[str, Any]) -> tuple[str, str]:
    """Of a llama.cpp: slots that are busy, how full its context is, and its speeds."""
    slots = f"  {_slots(upstream)}"
    if (output := upstream["output_tokens_per_s"]) is None:
        return slots, ""
    prompt, cached = upstream["prompt_tokens_per_s"] or 0, upstream["cache_hit_share"] or 0
    return slots, f"{short(output)} tok/s, prompt {short(prompt)}/s, {cached:.0%} cached"


def _slots(found: Mapping[str, Any]) -> str:
    busy, total = found["busy_slots"], found["context_tokens"]
    text = f"{'?' if busy is None else busy}/{found['slots'] or '?'} slots busy"
    if not total:
        return text
    return text + f", context {found['context_used'] / total:.0%} of {short(total)}"


def _used(limits: Mapping[str, Any]) -> str:
    used = [(name, limits[name]) for name in ("rpm", "tpm") if limits[name] is not None]
    return "".join(f", {short(b['used'])}/{short(b['limit'])} {name}" for name, b in used)


def _calls(calls: list[dict[str, Any]], width: int, chosen: int | None = None) -> Table:
    names = ["at", "fate", "code", "model", "path", "wait", "time", "tokens"]
    rows = []
    for row in calls:
        fate = "running" if row.get("is_running") else row["fate"]
        style = "red" if row["status"] >= 400 else _STYLE.get(fate, "")
        rows.append([
            time.strftime("%H:%M:%S", time.localtime(row["time_unix"])),
            line_of((fate, style)), line_of((str(row["status"] or "-"), style)),
            row["model"] or "-", row["path"], duration(row["queue_ms"]), duration(row["total_ms"]),
            f"{short(row['tokens_in'])}/{short(row['tokens_out'])} {_cached(row)}".rstrip(),
        ])  # fmt: skip
    if width < 80:
        for cells in (names, *rows):
            del cells[4]
    ratios = [1 if name in ("model", "path") else None for name in names]
    table = table_of(names, rows, names[-3:], ratios, expand=True)
    if chosen is not None and table.rows:
        table.rows[chosen].style = "reverse"
    return table


class Operator:
    """Whom the table asks and what it changes: the daemon in this process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def status(self) -> dict[str, Any]:
        return {**self._gateway.status(), "recent": self._gateway.counters.last(50)}

    async def change(self, flag: str, text: str) -> str:
        done = self._gateway.control.change({flag: text}, "the table")
        return f"{flag} = {done[flag]}"

    async def act(self, action: str, **wanted: Any) -> str:
        return await self._gateway.control.act(action, wanted)

    async def captured(self, number: int | None = None) -> dict[str, Any]:
        """Rows of the calls that are held, or one of them. Raises CannotError: it is not."""
        try:
            return await self._gateway.captured("" if number is None else str(number))
        except ProxyError as error:
            raise CannotError(error.message) from None


class Remote(Operator):
    """A daemon in another process, by its admin routes."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        self.url, self._admin_key = url, admin_key

    async def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One request. Raises CannotError: nobody answers there, or the answer is no."""
        headers = {"Authorization": f"Bearer {self._admin_key}"} if self._admin_key else None
        more: dict[str, Any] = {"json": body, "headers": headers, "proxy": proxy_for(URL(self.url))}
        try:
            async with (
                asyncio.timeout(10),
                aiohttp.ClientSession() as session,
                session.request(method, f"{self.url}{ADMIN}{path}", **more) as response,
            ):
                doc = parse_json(await response.read()) or {}
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = printable(str(error)) or type(error).__name__
            raise CannotError(f"no daemon answers at {self.url} ({why})") from None
        if "x-llmproxy-fate" not in response.headers:
            raise CannotError(f"{self.url}: no llmproxy is there, it answered {response.status}")
        if response.status >= 400:
            why = printable(str(_dict(doc, "error").get("message")), 300)
            raise CannotError(f"{self.url}: {why}")
        return doc

    async def status(self) -> dict[str, Any]:
        return await self.ask("GET", "status?recent=50")

    async def change(self, flag: str, text: str) -> str:
        doc = await self.ask("PATCH", "settings", {flag: text})
        return f"{flag} = {doc['settings'][flag]}"

    async def act(self, action: str, **wanted: Any) -> str:
        return str((await self.ask("POST", f"do/{action}", wanted))["done"])

    async def captured(self, number: int | None = None) -> dict[str, Any]:
        return await self.ask("GET", "captures" if number is None else f"captures/{number}")


def wrapped(text: str, width: int) -> Iterator[tuple[int, str]]:
    """A line in pieces that fit a terminal's width, cut at blanks, with where each begins."""
    from rich.cells import cell_len, chop_cells

    start = 0
    while start < len(text) or not start:
        piece = text[start : start + width]
        if cell_len(piece) > width:  # some characters are two cells wide
            piece = chop_cells(piece, width)[0] or piece[:1]
        if start + len(piece) < len(text) and (blank := piece.rfind(" ")) > width // 2:
            piece = piece[: blank + 1]
        yield start, piece
        start += len(piece) or 1


class Opened:
    """The calls of the table that can be opened: a list to choose from, and the one that is open.

    `press` takes one key, and says whether it was meant for this.
    """

    HELP = (
        "Tab chooses among calls or settings; up/down, Enter opens a call, Esc leaves it",
        "/ searches, n and N go to the next and the one before, f follows the end",
        "y copies as curl, r sends again and shows what differs, q quits",
    )

    def __init__(self, work: deque[Callable[[Operator], Awaitable[str]]], url: str = "") -> None:
        self._work, self.url = work, url
        self.has_focus = self.follows = False
        self.rows: list[dict[str, Any]] = []
        self.chosen = self.number = 0  # of the list; of the call that is open, 0: none
        self.call: dict[str, Any] | None = None
        self.before: dict[str, Any] | None = None  # that call, as it was before it was sent again
        self.lines: list[Line] = []
        self.cut: list[tuple[int, int, str]] = []  # of which line, from where, what fits the screen
        self.width = self.top = 0
        self.room = 10  # lines of the screen
        self.typed: str | None = None  # what is to be searched
        self.needle, self.found = "", 0
        self.clip = ""  # for the terminal's clipboard

    async def refresh(self, operator: Operator) -> None:
        """Take the list, or what has come of the open call. Raises CannotError."""
        if not self.has_focus:
            return
        if not self.number:
            chosen = self.rows[self.chosen]["id"] if self.rows else 0
            self.rows = (await operator.captured())["calls"]
            numbers = [row["id"] for row in self.rows]
            known = numbers.index(chosen) if chosen in numbers else self.chosen
            self.chosen = max(0, min(known, len(numbers) - 1))
        elif self.call is None or self.call["is_running"]:
            try:
                self.call = await operator.captured(self.number)
            except CannotError:  # it has gone: what is known of it stays
                if self.call is None:
                    self.number = 0
                else:
                    self.call["is_running"] = False
                raise
            self._tell(self.call)

    def _tell(self, call: dict[str, Any]) -> None:
        self.lines = told(call)
        if self.before is not None and not call["is_running"]:
            self.lines = [*differences(self.before, call), ("", ""), *self.lines]
        self.width = 0  # cut it anew

    def fit(self, width: int, room: int) -> None:
        """Cut the open call to a screen."""
        self.room = max(1, room)
        if self.width != width:
            self.width = width
            self.cut = [
                (number, start, piece)
                for number, (_, text) in enumerate(self.lines)
                for start, piece in wrapped(on_screen(text), width)
            ]
        last = max(0, len(self.cut) - self.room)
        self.top = last if self.follows else max(0, min(self.top, last))

    def press(self, key: str) -> bool:
        if self.typed is not None:
            self._type(key)
        elif key == "\t" or (key == "esc" and self.has_focus and not self.number):
            self.has_focus, self.number, self.call = not self.has_focus, 0, None
        elif not self.has_focus or key in ("q", "?"):
            return False
        elif not self.number:
            self._choose(key)
        elif key in ("esc", "left", "backspace"):
            self.number, self.call, self.before, self.follows = 0, None, None, False
        elif key == "/":
            self.typed = ""
        elif key in ("n", "N"):
            self._find(1 if key == "n" else -1)
        elif key == "f":
            self.follows = not self.follows
        elif key == "y" and self.call is not None:
            self._work.append(self._copy)
        elif key == "r":
            self._work.append(self._resend)
        elif moved := self._moved(key, self.top, len(self.cut)):
            self.top, self.follows = moved[0], False
        return True

    def _moved(self, key: str, place: int, count: int) -> tuple[int] | None:
        page = max(1, self.room - 1)
        steps = {"up": -1, "down": 1, "pgup": -page, "pgdn": page, " ": page,
                 "home": -count, "end": count}  # fmt: skip
        return (max(0, min(place + steps[key], count - 1)),) if key in steps else None

    def _choose(self, key: str) -> None:
        if key in ("enter", "right"):
            self._work.append(self._enter)
        elif moved := self._moved(key, self.chosen, len(self.rows)):
            self.chosen = moved[0]

    async def _enter(self, operator: Operator) -> str:
        if not self.rows:  # it was quicker than the list
            await self.refresh(operator)
        if not self.rows:
            return "no call is held; see the setting captures"
        self.open(self.rows[self.chosen]["id"])
        return ""

    def open(self, number: int) -> None:
        self.number, self.call, self.before, self.lines, self.cut = number, None, None, [], []
        self.top, self.needle, self.follows = 0, "", False

    def _type(self, key: str) -> None:
        if key in ("enter", "esc"):
            self.needle, self.typed = (self.typed or "") if key == "enter" else "", None
            self.found = self.top - 1
            self._find(1)
        elif key == "backspace":
            self.typed = (self.typed or "")[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typed = (self.typed or "") + key

    def matches(self) -> list[int]:
        """Which lines of the screen's hold what is searched, or its beginning."""
        if not self.needle:
            return []
        needle, places = self.needle.casefold(), [(n, start) for n, start, _ in self.cut]
        found = []
        for number, (_, text) in enumerate(self.lines):
            at = -1
            folded = on_screen(text).casefold()
            while (at := folded.find(needle, at + 1)) >= 0:
                found.append(bisect.bisect_right(places, (number, at)) - 1)
        return found

    def _find(self, step: int) -> None:
        found = self.matches()
        beyond = [n for n in found if (n - self.found) * step > 0]
        if found:  # around the end it begins anew
            self.found = (beyond or found)[0 if step > 0 else -1]
            self.top, self.follows = max(0, self.found - self.room // 3), False

    async def _copy(self, operator: Operator) -> str:
        """Into the terminal's clipboard (OSC 52, xterm's control sequences)."""
        text = curl_of(self.call or {}, self.url).encode("utf-8", "replace")
        if len(text) > 74_000:  # what terminals take
            return f"too long for a terminal: llmproxy calls --curl --id {self.number} prints it"
        self.clip = f"\x1b]52;c;{base64.b64encode(text).decode()}\a"
        return f"copied; llmproxy calls --curl --id {self.number} prints it as well"

    async def _resend(self, operator: Operator) -> str:
        before, done = self.call, await operator.act("resend", id=self.number)
        self.open(int(done.rpartition(" ")[2]))
        self.before = before
        return f"{done}; what differs is shown when it has ended"


def on_screen(text: str) -> str:
    """A line without what would move the cursor."""
    text = text.expandtabs(4)
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _opened(opened: Opened, width: int, room: int) -> list[Any]:
    """The list of calls, or the open one, in `room` lines."""
    if not opened.number:
        opened.room = max(1, room - 1)
        first = max(0, min(opened.chosen - opened.room // 2, len(opened.rows) - opened.room))
        rows = opened.rows[first : first + opened.room]
        return [_calls(rows, width, opened.chosen - first)] if room > 1 else []
    opened.fit(width, room - 1)
    parts, found = [], set(opened.matches())
    for place in range(opened.top, min(opened.top + opened.room, len(opened.cut))):
        number, _, piece = opened.cut[place]
        line = line_of((piece, opened.lines[number][0]))
        if place in found:
            line.highlight_words([opened.needle], "reverse", case_sensitive=False)
        parts.append(line)
    parts += [line_of()] * (opened.room - len(parts))
    state = f"{min(len(opened.cut), opened.top + opened.room)} of {len(opened.cut)} lines"
    state += ", running" * bool(opened.call and opened.call["is_running"])
    state += ", following" * opened.follows
    state += f", {len(opened.matches())} x {opened.needle}" if opened.needle else ""
    state = f"/{opened.typed}_" if opened.typed is not None else state
    return [*parts, line_of(state, style="dim")]


class Board:
    """The state of the interactive table: the chosen setting, what is being typed, the past.

    `press` takes one key and returns at once; what is to be done goes into `work`.
    """

    PAST_S = 300
    HELP = (
        "up/down choose a setting, left/right or -/+ change it",
        "Enter types a value, Esc leaves it; w writes the file",
        "r closes an open circuit, p pauses and goes on",
        "c clears kept answers, q drains and quits (top: quits), Tab goes to the calls",
    )

    def __init__(self, has_keys: bool) -> None:
        self.has_keys, self.shows_help, self.note = has_keys, False, ""
        self.typed: str | None = None  # a value that is being typed
        self.chosen = 0
        self.is_over = False
        self.work: deque[Callable[[Operator], Awaitable[str]]] = deque()
        self.calls = Opened(self.work)
        self.past: deque[dict[str, float]] = deque(maxlen=self.PAST_S)
        self.flags = [flag_name(n) for n, item in SETTINGS.items() if item.metadata["live"]]
        self._seen: dict[str, Any] = {}
        self._sampled: tuple[float, dict[str, Any]] | None = None

    def see(self, status: dict[str, Any], now: float) -> None:
        """Take a new status, and once a second what has happened since the last."""
        self._seen, before = status, self._sampled
        if before is not None and now - before[0] < 1.0:
            return
        self._sampled = now, status
        if before is not None:
            span_s, old = now - before[0], before[1]
            waited, before_ = status["waited"], old["waited"]
            calls, waited_s = waited["calls"] - before_["calls"], waited["s"] - before_["s"]
            self.past.append({
                "calls/s": (status["requests"] - old["requests"]) / span_s,
                "in flight": status["in_flight"], "wait": waited_s / calls if calls > 0 else 0.0,
                "429/s": (status["upstream_429"] - old["upstream_429"]) / span_s,
            })  # fmt: skip

    def press(self, key: str) -> None:
        acts = {"w": "save", "p": "resume" if self._seen.get("paused") else "pause", "c": "clear"}
        if self.typed is not None:
            self._type(key)
        elif self.calls.press(key):
            pass
        elif key in acts:
            self.work.append(lambda operator: operator.act(acts[key]))
        elif key in ("up", "down"):
            self.chosen = (self.chosen + (1 if key == "down" else -1)) % len(self.flags)
        elif key in ("left", "right", "-", "+", "="):
            self.work.append(
                functools.partial(self._step, self.flags[self.chosen], key in ("left", "-"))
            )
        elif key == "enter":
            self.typed = ""
        elif key == "r" and (circuits := self._seen["open_circuits"]):
            wanted = {name: circuits[0][name] for name in ("upstream", "model", "path")}
            self.work.append(lambda operator: operator.act("close", **wanted))
        elif key == "r":
            self.note = "no circuit is open"
        else:
            self.shows_help ^= key == "?"
            self.is_over |= key == "q"

    def _type(self, key: str) -> None:
        text, flag = self.typed or "", self.flags[self.chosen]
        if key == "enter" and text:
            self.work.append(lambda operator: operator.change(flag, text))
        if key in ("enter", "esc"):
            self.typed = None
        elif key == "backspace":
            self.typed = text[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typed = text + key

    @staticmethod
    async def _step(flag: str, is_down: bool, operator: Operator) -> str:
        value = (await operator.status())["settings"][flag]  # of this moment
        text = stepped(flag.replace("-", "_"), value, -1 if is_down else 1)
        return f"{flag}: Enter types a value" if text is None else await operator.change(flag, text)


def stepped(name: str, value: Any, direction: int) -> str | None:
    """The next sensible value of a setting as text; None where only typing helps.

    Times and money go 1, 2, 5, 10; counts by one, large ones by a digit; sizes double. Words that
    stand for a value of their own, like `none` and `auto`, come before the first number.
    """
    meta = SETTINGS[name].metadata
    words, parse = list(meta["also"]), meta["parse"]
    if choices := getattr(parse, "choices", ()):
        return str(choices[(choices.index(value) + direction) % len(choices)])
    if meta["many"] or parse in (str, parse_text):
        return None
    for place, word in enumerate(words):
        if meta["also"][word] == value:
            first = {"tokens": "10000", "requests": "10", "calls": "10"}.get(meta["unit"], "1")
            return str([*words, first][max(0, place + direction)])
    number = float(value)
    if parse in (parse_count, parse_count_or_zero):
        digits = len(str(int(number) - (direction < 0)))
        number += direction * max(1, 10 ** (digits - 2))
    elif parse is parse_size:
        number = number * 2 if direction > 0 else number // 2
    elif parse is parse_share:
        number = min(round(number + 0.05 * direction, 2), 1.0)
    else:
        series = [round(m * 10.0**e, 10) for e in range(-3, 7) for m in (1, 2, 5)]
        above = (n for n in series if n > number * 1.0001)
        below = (n for n in reversed(series) if n < number * 0.9999)
        number = next(above, number) if direction > 0 else next(below, 0.0)
    if number < 0 or (number == 0 and parse is not parse_count_or_zero):
        return words[-1] if words else None
    return f"{number:.12g}"


_KEYS = {
    **{f"\x1b{mark}{letter}": name for mark in "[O" for letter, name in
       zip("ABCD", ("up", "down", "right", "left"), strict=True)},
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "esc",
    "\x1b[5~": "pgup", "\x1b[6~": "pgdn", "\x1b[H": "home", "\x1b[F": "end",
    "\x1b[1~": "home", "\x1b[4~": "end",
}  # fmt: skip


def split_keys(data: str) -> list[str]:
    """Key names and characters of what a terminal sends; unknown sequences are dropped."""
    data = re.sub(r"\x1b\[200~.*?(\x1b\[201~|$)", "", data, flags=re.DOTALL)  # pasted: no keys
    found = re.findall(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])|.", data, re.DOTALL)
    return [_KEYS.get(key, key) for key in found if key in _KEYS or key[0] != "\x1b"]


@contextlib.contextmanager
def keyboard(press: Callable[[str], None]) -> Iterator[bool]:
    """Give every key to `press` while the body runs; False where there is no keyboard to read."""
    fd, before = -1, list[Any]()
    with contextlib.suppress(OSError, ValueError, termios.error):
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        if os.tcgetpgrp(fd) != os.getpgrp():  # in the background reading would stop us
            before = []
    if not before:
        yield False
        return
    loop = asyncio.get_running_loop()

    def read() -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(fd, 1024)
        if not data:  # the terminal is gone
            loop.remove_reader(fd)
        for key in split_keys(data.decode("utf-8", "ignore")):
            press(key)

    try:
        tty.setcbreak(fd)
        quiet = termios.tcgetattr(fd)  # Ctrl-Z would leave the shell with our screen
        quiet[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
        print("\x1b[?2004h", end="", flush=True)  # what is pasted comes marked as such
        loop.add_reader(fd, read)
        yield True
    finally:
        with contextlib.suppress(OSError, ValueError, termios.error):
            loop.remove_reader(fd)
            print("\x1b[?2004l", end="", flush=True)
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def live_table(
    operator: Operator, url: str, console: Console, on_quit: Callable[[], object]
) -> None:
    """Draw until cancelled: 4 times a second, once where nothing goes on, and after every key.

    Drawn in a thread, since a terminal that is held (Ctrl-S) blocks whoever writes to it.
    """
    from rich.live import Live

    board, pressed = Board(has_keys=False), asyncio.Event()
    board.calls.url = url

    def press(key: str) -> None:
        if board.is_over:  # once is enough: a second signal would end what drains
            return
        board.note = ""
        board.press(key)
        pressed.set()
        if board.is_over:
            on_quit()

    drawing: asyncio.Future[None] | None = None
    screen = Live(console=console, screen=True, auto_refresh=False)
    with keyboard(press) as board.has_keys, screen as live:
        try:
            while True:
                while board.work:
                    try:
                        board.note = await board.work.popleft()(operator)
                    except (ConfigError, CannotError) as error:
                        board.note = str(error)
                pressed.clear()
                status = await operator.status()
                board.see(status, time.monotonic())
                try:
                    await board.calls.refresh(operator)
                except CannotError as error:
                    board.note = str(error)
                view = render(status, url, *console.size, board)
                clip, board.calls.clip = board.calls.clip, ""

                def draw(view: RenderableType = view, clip: str = clip) -> None:
                    live.update(view, refresh=True)
                    console.file.write(clip)
                    console.file.flush()

                drawing = asyncio.get_running_loop().run_in_executor(None, draw)
                await asyncio.shield(drawing)
                with contextlib.suppress(TimeoutError):  # wait_for may swallow a cancellation
                    is_busy = status["callers"] or status["in_flight"]
                    async with asyncio.timeout(0.25 if is_busy else 1.0):
                        await pressed.wait()
        finally:  # nothing may be drawn after the screen is given back
            if drawing is not None:
                await asyncio.wait([drawing], timeout=1.0)


###############################################################################
# Mock
###############################################################################
# Rule: a provider to try things on. Speaks to whoever asks; shares only Wire and Callers with us.

MODES = ("ok", "503", "500", "429", "hang", "reset", "truncate", "slow")
_MOCK_NUMBERS = ("latency", "rpm", "tpm")
_TEXT = "This is answer number {} of the mock provider ."
_MOCK_FACTS: dict[str, dict[str, Any]] = {
    "/v1/models": {"object": "list", "data": [{"id": "mock", "object": "model"}]},
    "/props": {"total_slots": 16, "model_path": "mock.gguf"},
}


class Mock:
    """OpenAI, Anthropic and llama.cpp routes with fault modes and an exact call count.

    `latency_s` passes before the first byte; `rpm` and `tpm` answer 429 beyond them, counted
    over a sliding minute.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s
        self.mode = "ok"
        self.calls = 0
        self.limits: dict[str, Bucket | None] = {"rpm": None, "tpm": None}

    async def handle(self, message: Any, payload: Any, reply: Reply) -> None:
        request = Request(message)
        body, path = await Upload(request, payload, reply, FLIGHT_BYTES).whole(), request.path
        doc = parse_json(body)
        if path == "/_mock":
            if request.method == "POST" and not self._set(doc or {"not": "an object"}):
                wants = f"wants an object of mode, {', '.join(_MOCK_NUMBERS)}, reset"
                _say(reply, {"error": f"{wants}; modes: {', '.join(MODES)}"}, 400)
            else:
                _say(reply, {"calls": self.calls, "mode": self.mode})
        elif path in ("/health", "/v1/health"):
            await self._answer(reply, {"status": "ok"}, None)
        elif request.method == "GET" and path in _MOCK_FACTS:
            _say(reply, _MOCK_FACTS[path])
        elif request.route is None or doc is None:
            _mock_error(reply, 404 if request.route is None else 400)
        else:
            await self._call(request.name, doc, reply)

    async def _call(self, route: str, doc: Mapping[str, Any], reply: Reply) -> None:
        prompt_tokens = Learned().prompt_tokens(measure(doc))
        if ROUTES[route].is_free:
            _say(reply, {"tokens": list(range(prompt_tokens)), "input_tokens": prompt_tokens})
            return
        self.calls += 1
        words = _TEXT.format(self.calls).split()[: max_tokens(doc) or None]
        if (wait_s := self._over_limit(prompt_tokens + len(words))) > 0:
            _mock_error(reply, 429, wait_s)
            return
        plain, events = _mock_answer(route, doc, words, prompt_tokens)
        await self._answer(reply, plain, events if doc.get("stream") else None)

    def _set(self, wanted: Mapping[str, Any]) -> bool:
        """Change what is named; False, and nothing, where one of it cannot be."""
        numbers = {name: wanted[name] for name in _MOCK_NUMBERS if name in wanted}
        mode = wanted.get("mode", self.mode)
        are_numbers = all(type(n) in (int, float) and 0 <= n < 1e9 for n in numbers.values())
        if mode not in MODES or not are_numbers or wanted.keys() - {*numbers, "mode", "reset"}:
            return False
        self.mode = mode
        self.latency_s = float(numbers.get("latency", self.latency_s))
        if wanted.get("reset"):
            self.calls, self.limits = 0, {"rpm": None, "tpm": None}
        for name in self.limits.keys() & numbers.keys():
            limit = int(numbers[name]) or None
            self.limits[name] = rebucket(self.limits[name], limit, time.monotonic)
        return True

    def _over_limit(self, tokens: int) -> float:
        """Seconds until the limits would let the call in; 0 where they do."""
        amounts = {"rpm": 1, "tpm": tokens}
        taken = [(b, amounts[name]) for name, b in self.limits.items() if b is not None]
        now = time.monotonic()
        wait_s = [b.ready_at(amount) - now for b, amount in taken if not b.fits(amount)]
        for bucket, amount in taken if not wait_s else ():
            bucket.spend(0, amount)
        return max(wait_s, default=0.0)

    async def _answer(
        self, reply: Reply, plain: dict[str, Any], events: list[bytes] | None
    ) -> None:
        """One answer in the mode of now. A health answer is never late, cut or slow."""
        is_call, transport, mode = plain != {"status": "ok"}, reply.conn.transport, self.mode
        while mode == self.mode == "hang":
            await asyncio.sleep(0.05)
        await asyncio.sleep(self.latency_s if is_call and mode != "hang" else 0)
        if mode.isdecimal():
            _mock_error(reply, int(mode))
            return
        if mode in ("hang", "reset") or transport is None:
            if mode == "reset" and transport is not None:  # close with RST
                linger = struct.pack("ii", 1, 0)
                sock = transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            reply.abort()
            return
        kind, length, parts = "text/event-stream", None, events or []
        if not events:
            body = json.dumps(plain).encode()
            step = 40 if is_call and mode in ("truncate", "slow") else len(body)
            parts = [body[start : start + step] for start in range(0, len(body), step)]
            kind, length = "application/json", len(body)
        reply.begin(NO_HEAD.changed(200, kind), b"", length)
        for number, part in enumerate(parts):
            if mode == "truncate" and number > len(parts) // 2:
                reply.abort()
                return
            await reply.write(part)
            if len(parts) > 1:
                await asyncio.sleep(1 if mode == "slow" else 0.02)
        reply.end()


def _say(reply: Reply, doc: Any, status: int = 200, more: bytes = b"") -> None:
    reply.document(status, json.dumps(doc).encode(), more)


def _mock_error(reply: Reply, status: int, wait_s: float = 1.0) -> None:
    error = {"message": f"mock {status}", "type": "server_error", "code": status}
    more = b"Retry-After: %d\r\n" % max(1, math.ceil(wait_s)) if status == 429 else b""
    _say(reply, {"error": error}, status, more)


def _mock_answer(
    route: str, doc: Mapping[str, Any], words: list[str], prompt_tokens: int
) -> tuple[dict[str, Any], list[bytes]]:
    """The same answer as a document and as the events of a stream."""
    text, model, count = " ".join(words), doc.get("model") or "mock", len(words)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count,
             "total_tokens": prompt_tokens + count}  # fmt: skip
    tokens: dict[str, Any] = {"input_tokens": prompt_tokens, "output_tokens": count}
    if route in ("chat/completions", "completions"):
        is_chat = route == "chat/completions"
        kind = "chat.completion" if is_chat else "text_completion"
        base = {"id": "mock-1", "object": kind, "created": 0, "model": model}
        said: Any = {"message": {"role": "assistant", "content": text}} if is_chat else {
            "text": text}  # fmt: skip
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": "stop"}
        chunk = {**base, "object": kind + ".chunk"} if is_chat else base
        events = []
        for word in [*words, ""]:
            piece = f"{word} " if word else ""
            said = {"delta": {"content": piece} if word else {}} if is_chat else {"text": piece}
            ends = {"index": 0, **said, "finish_reason": None if word else "stop"}
            events.append(event_of({**chunk, "choices": [ends]}))
        events += [event_of({**chunk, "choices": [], "usage": usage})] * reports_usage(doc)
        return {**base, "choices": [choice], "usage": usage}, [*events, b"data: [DONE]\n\n"]
    if route == "messages":
        ending = {"stop_reason": "end_turn", "stop_sequence": None}
        said = [{"type": "text", "text": text}]
        plain = {"id": "msg_mock", "type": "message", "role": "assistant", "model": model,
                 "content": said, **ending, "usage": tokens}  # fmt: skip
        begun: dict[str, Any] = {"content": [], "stop_reason": None}
        begun["usage"] = {**tokens, "output_tokens": 1}
        delta = {"type": "content_block_delta", "index": 0}
        block = {"type": "text", "text": ""}
        docs: list[dict[str, Any]] = [
            {"type": "message_start", "message": {**plain, **begun}},
            {"type": "content_block_start", "index": 0, "content_block": block},
            *({**delta, "delta": {"type": "text_delta", "text": f"{word} "}} for word in words),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": ending, "usage": {"output_tokens": count}},
            {"type": "message_stop"},
        ]
        return plain, [event_of(doc) for doc in docs]
    if route == "responses":
        part = {"type": "output_text", "text": text, "annotations": []}
        output = {"type": "message", "id": "msg_mock", "role": "assistant", "status": "completed",
                  "content": [part]}  # fmt: skip
        plain = {"id": "resp_mock", "object": "response", "created_at": 0, "model": model,
                 "status": "completed", "output": [output],
                 "usage": {**tokens, "total_tokens": prompt_tokens + count}}  # fmt: skip
        delta = {"type": "response.output_text.delta", "item_id": "msg_mock", "output_index": 0,
                 "content_index": 0}  # fmt: skip
        item = {"output_index": 0, "item": {**output, "status": "in_progress", "content": []}}
        docs = [{"type": "response.output_item.added", **item}]
        docs += [{**delta, "delta": f"{word} "} for word in words]
        docs.append({"type": "response.output_item.done", "output_index": 0, "item": output})
        docs.append({"type": "response.completed", "response": plain})
        return plain, [event_of(doc) for doc in docs]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    if route in ("embeddings", "embedding"):
        data = [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2, 0.3]}]
        return {"object": "list", "data": data, "model": model, "usage": usage}, []
    if route in ("rerank", "reranking", "moderations"):
        return {"results": [{"index": 0, "relevance_score": 1.0}], "usage": usage}, []
    plain = {"content": text, "stop": True, "model": model, "tokens_evaluated": prompt_tokens,
             "tokens_predicted": count}  # fmt: skip
    deltas = [event_of({"content": f"{word} ", "stop": False}) for word in words]
    return plain, [*deltas, event_of({**plain, "content": ""})]


###############################################################################
# Server
###############################################################################
# Rule: sockets, signals, the event loop. Knows nothing of flags.


class StderrLog(logging.Handler):
    """Writes lines from a thread: a stderr that nobody reads holds up no call.

    What does not fit MAX_LINES is dropped, and the number of dropped lines is said.
    """

    MAX_LINES = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.is_json = self.is_journal = False
        self.is_below = False  # a table owns the terminal: what the log says is shown under it
        with contextlib.suppress(OSError):  # systemd's journal has times and levels of its own
            found = os.fstat(2)
            self.is_journal = os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
        self._last: tuple[str, float] = "", 0.0
        self._repeats = self._dropped = 0
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_writing = False
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """One line, and no traceback: other libraries' might quote secrets."""
        text, (last, last_unix) = " ".join(record.getMessage().split("\n")), self._last
        if self.is_below:
            _messages.append(time.strftime("%H:%M:%S ") + printable(text, 200))
            return
        if text == last and record.created - last_unix < 1.0:
            self._repeats += 1  # asyncio says a thousand times a second that no descriptor is free
            return
        repeated = [f"{last} ({self._repeats} times more)"] if self._repeats else []
        self._last, self._repeats = (text, record.created), 0
        for line in [*repeated, text]:
            if self.is_json:
                level = record.levelname.lower()
                doc = {"time_unix": record.created, "level": level, "message": line}
                self.put(json.dumps(doc))
            else:  # sd-daemon(3): the journal takes the level from here
                mark = f"<{4 if record.levelno < logging.ERROR else 3}>"
                self.put((mark if self.is_journal else "llmproxy: ") + line)

    def put(self, line: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="log", daemon=True)
            self._thread.start()
        if self._lines.qsize() >= self.MAX_LINES:
            self._dropped += 1
        else:
            self._lines.put(line)

    def flush(self) -> None:
        """Wait until all is written, a second at most."""
        end_at = time.monotonic() + 1.0
        while (self._lines.qsize() or self._is_writing) and time.monotonic() < end_at:
            time.sleep(0.01)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            self._is_writing = True
            if self._dropped:
                line += f"\nllmproxy: {self._dropped} lines were dropped, stderr was too slow"
                self._dropped = 0
            with contextlib.suppress(OSError, ValueError):  # closed: there is nobody to tell
                print(line, file=sys.stderr, flush=True)
            self._is_writing = False


stderr_log = StderrLog()


def notify(*lines: str) -> None:
    """Tell a service manager (sd_notify(3)); nothing where there is none."""
    if not (address := os.environ.get("NOTIFY_SOCKET", "")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # whoever does not listen holds up no call
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendall("\n".join(lines).encode())
    except (OSError, ValueError) as error:
        log.warning("NOTIFY_SOCKET cannot be told: %s", printable(str(error)))


async def keep_notifying() -> None:
    """Where systemd watches us (WatchdogSec), say twice in its time that we live."""
    text = os.environ.get("WATCHDOG_USEC", "")
    while text.isdecimal() and (every_s := int(text) / 2e6) > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(every_s)


@contextlib.asynccontextmanager
async def gateway_for(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway that listens. Raises CannotError on entry."""
    rules, mock = settings.upstreams, Mock(latency_s=1.5)
    async with contextlib.AsyncExitStack() as stack:
        if "mock:" in ([rule.url for rule in rules] or [settings.upstream]):
            served = listening(mock.handle, "127.0.0.1", 0)
            address = await stack.enter_async_context(served)
            settings.upstream = settings.upstream.replace("mock:", address)
            for rule in rules:
                rule.url = rule.url.replace("mock:", address)
        check_open(settings)
        for url in map(URL, [rule.url for rule in rules] or [settings.upstream]):
            is_ours = url.port == settings.port and is_loopback(url.host or "")
            if is_ours and is_loopback(settings.host):
                raise ConfigError(f"the upstream {url} is this proxy itself")
        gateway = Gateway(settings)
        served = listening(gateway.handle, settings.host, settings.port)
        gateway.url, gateway.mock = await stack.enter_async_context(served), mock
        await gateway.start()
        stack.push_async_callback(gateway.close)
        yield gateway


def on_signal(act: Callable[[], object]) -> None:
    """What SIGINT and SIGTERM do from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, act)


async def run(settings: Settings, console: Console | None) -> int:
    """The daemon's life: start, serve, drain on the first signal, end at once on a second."""
    signals: asyncio.Queue[None] = asyncio.Queue()  # each counts, however early it comes
    stop = functools.partial(signals.put_nowait, None)
    raise_file_limit()
    on_signal(stop)
    stderr_log.is_json = settings.log == "json"
    async with gateway_for(settings) as gateway:

        def hang_up() -> None:
            if console is not None and not sys.stdout.isatty():  # the terminal has gone
                stop()
            else:
                gateway.answers.spawn(reload(gateway.control))

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
        if console is None:
            targets = ", ".join(rule.url for rule in settings.upstreams) or settings.upstream
            print(f"llmproxy {__version__} on {gateway.url} -> {targets}", flush=True)
        if not is_loopback(settings.host) and not settings.clients:
            log.warning("listening on %s: whoever reaches it can use the upstream", settings.host)
        notify("READY=1", f"MAINPID={os.getpid()}", f"STATUS=on {gateway.url}")
        living = asyncio.create_task(keep_notifying())
        async with showing(gateway, gateway.url, console, stop):
            await signals.get()
            gateway.fold()
            notify("STOPPING=1")
            log.warning("draining: calls in flight finish, new ones get 503; again to end now")
            draining = asyncio.ensure_future(gateway.drain())
            second = asyncio.ensure_future(signals.get())
            await asyncio.wait([draining, second], return_when=asyncio.FIRST_COMPLETED)
            is_second = second.done()
            for task in (draining, second, living):
                task.cancel()
            if is_second or not draining.result():
                log.warning("ended with calls in flight")
        return int(is_second)


def raise_file_limit() -> None:
    """As many descriptors as the system lets us have: a call takes two."""
    with contextlib.suppress(OSError, ValueError):  # no such right
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def reload(control: Control) -> None:
    """On SIGHUP. A bad file changes nothing."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        log.warning("reload: %s", await control.reload())
    except ConfigError as error:
        log.error("reload: nothing was changed: %s", error)
    notify("READY=1")


@contextlib.asynccontextmanager
async def showing(
    gateway: Gateway, url: str, console: Console | None, on_quit: Callable[[], object]
) -> AsyncIterator[None]:
    """The live table while the body runs, or else one log line a call."""
    gateway.on_call = functools.partial(log_call, gateway.settings)

    async def show(console: Console) -> None:
        try:
            await live_table(Operator(gateway), url, console, on_quit)
        except Exception as error:  # the log goes on
            stderr_log.is_below = False
            log.error("the live table broke: %s", fault_lines(error))

    stderr_log.is_below = console is not None
    task = asyncio.create_task(show(console)) if console is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        stderr_log.is_below = False


def log_call(settings: Settings, record: Record) -> None:
    stderr_log.is_json = settings.log == "json"
    if settings.log != "off" and not stderr_log.is_below:
        line = record.line(settings.log)
        is_text = stderr_log.is_journal and settings.log == "text"
        stderr_log.put(f"<6>{line[9:]}" if is_text else line)  # the journal has its own clock


###############################################################################
# Bench
###############################################################################
# Rule: a client like any other; measures a proxy and what stands behind it side by side. Bounded
# in calls and in time.

SCENARIOS = {
    "herd": "200 identical calls at once",
    "distinct": "20 different calls at once",
    "overhead": "200 calls in turn, then 16 at a time for 2 s",
    "gate": "100 different calls at once, 60 a minute allowed (--rpm 60, --queue-timeout 90)",
    "outage": "a call every 0.25 s: 15 s well, 60 s of 503, 15 s well",
    "hang": "the same, silent instead of 503",
}
FAULTS = ("outage", "hang", "gate")  # these need a provider that fails when it is told
QUIET = (aiohttp.ClientError, OSError, ValueError, KeyError)  # a provider that is no mock


class Scene:
    """Calls made to one address, how many reached the provider, and what came of them."""

    limit_s = 40.0  # what a caller waits for one answer

    def __init__(
        self, session: aiohttp.ClientSession, url: str, name: str, model: str = "bench",
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._session, self.url, self.name, self._model = session, url, name, model
        self._headers = headers or {}
        self.made = self.reached = 0
        self.outcomes = Counter[str]()  # by status, or kind of failure
        self.times_s: list[float] = []
        self.note = ""

    async def ask(self, prompt: str) -> int:
        """One call; its status, 0 where there was none."""
        self.made += 1
        began_at, status, kind = time.monotonic(), 0, ""
        message = {"role": "user", "content": prompt}
        body = {"model": self._model, "messages": [message], "max_tokens": 16}
        url = f"{self.url}/v1/chat/completions"
        try:
            async with (
                asyncio.timeout(self.limit_s),
                self._session.post(url, json=body, headers=self._headers) as response,
            ):
                await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError) as error:
            kind = "timeout" if isinstance(error, TimeoutError) else "connection"
        self.times_s.append(time.monotonic() - began_at)
        self.outcomes[kind or str(status)] += 1
        return status

    async def herd(self, prompts: Iterable[str]) -> None:
        await asyncio.gather(*map(self.ask, prompts))

    async def phases(
        self, change: Callable[[str], Awaitable[Any]], mode: str,
        times_s: tuple[float, float, float], every_s: float,
    ) -> None:  # fmt: skip
        """A call every `every_s`: well, in a fault mode, well again."""
        well_s, down_s, again_s = times_s
        began_at, state, well_at = time.monotonic(), "ok", 0.0

        def ended(call: asyncio.Task[int]) -> None:
            if well_at and not self.note and not call.cancelled() and call.result() == 200:
                self.note = f"well after {time.monotonic() - well_at:.1f} s"

        async with asyncio.TaskGroup() as calls:  # which ends them too where time is up
            while (elapsed_s := time.monotonic() - began_at) < well_s + down_s + again_s:
                wanted = mode if well_s <= elapsed_s < well_s + down_s else "ok"
                if wanted != state:
                    await change(wanted)
                    state, well_at = wanted, time.monotonic() if wanted == "ok" else 0.0
                call = calls.create_task(self.ask(f"{self.name} {self.made} {began_at}"))
                if well_at:
                    call.add_done_callback(ended)
                await asyncio.sleep(every_s)

    def shown(self) -> dict[str, Any]:
        errors = {kind: n for kind, n in self.outcomes.items() if kind != "200" and n}
        times = {
            f"p{n}_ms": round(percentile(self.times_s, n / 100) * 1000, 1) for n in (50, 95, 99)
        }
        return {
            "side": self.name, "calls": self.made, "reached": self.reached,
            "errors": sum(errors.values()), "kinds": errors, **times, "note": self.note,
        }  # fmt: skip


@dataclass
class Bench:
    """Runs scenarios against a proxy and, side by side, against its upstream."""

    _session: aiohttp.ClientSession
    _remote: Remote
    sides: dict[str, str]  # URLs of the proxied and the direct one
    _speed: float
    _model: str
    _headers: Mapping[str, str]
    has_mock = False
    _nonce = secrets.token_hex(4)  # nothing is answered from an earlier run

    async def mock(self, **wanted: Any) -> None:
        """Tell the mock which way it is to behave."""
        if self.has_mock:
            async with self._session.post(f"{self.sides['direct']}/_mock", json=wanted):
                pass

    async def meet(self) -> None:
        """Find out whether the upstream is a mock."""
        with contextlib.suppress(*QUIET):
            async with self._session.get(f"{self.sides['direct']}/_mock") as response:
                self.has_mock = response.status == 200 and "mode" in await response.json()

    def _scene(self, side: str) -> Scene:
        return Scene(self._session, self.sides[side], side, self._model, self._headers)

    async def run(self, name: str, limit_s: float) -> dict[str, Any]:
        """One scenario on both sides: one after the other, or call by call where it is about ms."""
        scenes = [self._scene(side) for side in self.sides]
        for turn in [scenes] if name == "overhead" else [[scene] for scene in scenes]:
            await self.mock(mode="ok", rpm=60 if name == "gate" else 0, reset=True)
            began_at, before = time.monotonic(), (await self._remote.status())["upstream_calls"]
            try:
                async with asyncio.timeout(limit_s):
                    await self._play(name, turn)
                note = f"{time.monotonic() - began_at:.1f} s"
            except TimeoutError:
                note = f"stopped after {limit_s:g} s"
            for scene in turn:
                after = (await self._remote.status())["upstream_calls"]
                scene.note = scene.note or note
                scene.reached = after - before if scene is scenes[0] else scene.made
        if name == "overhead":
            medians_ms = [percentile(scene.times_s, 0.5) * 1000 for scene in scenes]
            for scene, median_ms in zip(scenes, medians_ms, strict=True):
                scene.note = f"median {median_ms:.2f} ms"
                scene.note += f", {await self._rate(scene.name):.0f} calls/s" * self.has_mock
            scenes[0].note += f", {medians_ms[0] - medians_ms[1]:.2f} ms added"
        await self.mock(mode="ok", latency=0.0, rpm=0)
        sides = [scene.shown() for scene in scenes]
        return {"scenario": name, "what": SCENARIOS[name], "sides": sides}

    async def _play(self, name: str, scenes: list[Scene]) -> None:
        speed, scene, tag = self._speed, scenes[0], f"{self._nonce} {scenes[0].name} {name}"
        latency_s = {"overhead": 0.0, "gate": 0.05, "herd": 1.5 / speed, "distinct": 1.5 / speed}
        await self.mock(latency=latency_s.get(name, 0.1))
        if name == "overhead":
            for n in range(200 if self.has_mock else 20):
                for scene in scenes:
                    await scene.ask(f"{self._nonce} {scene.name} {n}")
        elif name == "herd":
            await scene.herd([f"{tag}: what is the capital of France?"] * 200)
        elif name in ("distinct", "gate"):
            scene.limit_s = 100.0
            await scene.herd(f"{tag}: question {n}?" for n in range(100 if name == "gate" else 20))
        else:
            times_s = (15 / speed, 60 / speed, max(15 / speed, 6.0))  # health is asked every 2 s
            mode = "503" if name == "outage" else "hang"
            await scene.phases(lambda mode: self.mock(mode=mode), mode, times_s, 0.25 / speed)

    async def _rate(self, side: str) -> float:
        """Calls a second of 16 callers who ask one call after another, over 2 s."""
        scene, until = self._scene(side), time.monotonic() + 2.0

        async def caller(number: int) -> None:
            while self.has_mock and time.monotonic() < until:
                await scene.ask(f"{self._nonce} {side} {number} {scene.made}")

        await asyncio.gather(*map(caller, range(16)))
        return scene.made / 2.0


def bench_record(home: Path, name: str) -> dict[str, Any]:
    """A saved record, by its path or the beginning of its name."""
    found = [p for p in sorted(home.glob("*.json")) if name and p.name.startswith(name)]
    path = Path(name) if Path(name).is_file() else found[0] if len(found) == 1 else None
    if path is None:
        what = f"{len(found) or 'no'} records"
        raise ConfigError(f"--compare {printable(name)}: {what} of this name in {home}")
    with contextlib.suppress(OSError, *ODD_JSON):
        record: dict[str, Any] = json.loads(path.read_bytes())
        if record["settings"] and [s["sides"][0]["p99_ms"] for s in record["scenarios"]]:
            return record
    raise ConfigError(f"--compare {path}: is no record of llmproxy bench")


def bench_table(record: Mapping[str, Any]) -> Table:
    """A record's scenarios as a rich table."""
    names, rows = ("scenario", "side", "calls", "reached", "errors", "p50", "p95", "p99", ""), []
    for scenario in record["scenarios"]:
        for n, row in enumerate(scenario["sides"]):
            kinds = [f"{count} x {kind}" for kind, count in row["kinds"].items()]
            counts = (str(row[name]) for name in names[2:5])
            times = (duration(row[f"{name}_ms"]) for name in names[5:8])
            note = "; ".join(filter(None, (row["note"], *kinds)))
            rows.append((scenario["scenario"] if not n else "", row["side"], *counts, *times, note))
    table = table_of(names, rows, names[2:8])
    table.columns[-1].no_wrap = False
    return table


def compare_table(one: Mapping[str, Any], two: Mapping[str, Any]) -> Table:
    """Two records beside each other, the proxied side: A, B, and how B differs."""
    sides = [{s["scenario"]: s["sides"][0] for s in record["scenarios"]} for record in (one, two)]
    rows = list[tuple[str, ...]]()
    for scenario in [name for name in sides[0] if name in sides[1]]:
        a, b = sides[0][scenario], sides[1][scenario]
        for n, key in enumerate(("calls", "reached", "errors", "p50_ms", "p95_ms", "p99_ms")):
            ratio = f"{b[key] / a[key]:.2f}" if a[key] else "-"
            name = "" if n else printable(scenario)
            rows.append((name, key, f"{a[key]:g}", f"{b[key]:g}", ratio))
    return table_of(("scenario", "", "A", "B", "B/A"), rows, ("A", "B", "B/A"))


###############################################################################
# Demo
###############################################################################
# Rule: the newcomer's first minute; a daemon on an embedded mock and a scripted load.


async def demo(settings: Settings, console: Console | None) -> int:
    """Herd, repeat, distinct prompts and an outage, then a table of what happened."""
    settings.upstream, settings.port, settings.log, settings.state = "mock:", 0, "off", "none"
    if console is None:  # the outage is on purpose: print the table only
        log.setLevel(logging.ERROR)
    rows = list[tuple[str, ...]]()
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        gateway_for(settings) as gateway,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        mock = gateway.mock

        async def change(mode: str) -> None:
            mock.mode = mode

        async def play(name: str, act: Callable[[Scene], Awaitable[None]]) -> None:
            scene = Scene(session, gateway.url, name, "demo")
            before, began_at = mock.calls, time.monotonic()
            await act(scene)
            note = scene.note or f"{time.monotonic() - began_at:.1f} s"
            counts = (scene.made, mock.calls - before, scene.outcomes["200"])
            rows.append((name, *map(str, counts), note))

        async with showing(gateway, gateway.url, console, lambda: None):
            same, different = ["What is the capital of France?"] * 200, range(20)
            await play("200 identical calls at once", lambda scene: scene.herd(same))
            await play("the same 200 again", lambda scene: scene.herd(same))
            await play("20 different calls at once", lambda scene: scene.herd(map(str, different)))
            mock.latency_s, outage_s = 0.1, (0.0, 8.0, 3.0)
            await play("down for 8 s, 4 calls a second",
                       lambda scene: scene.phases(change, "503", outage_s, 0.25))  # fmt: skip
    columns = ("scene", "calls made", "reached provider", "answered", "")
    plain_console().print(table_of(columns, rows, columns[1:4]))
    return 0


###############################################################################
# Replay
###############################################################################
# Rule: reads logs of calls and says what a proxy would have done with them; calls nothing.

LINE_BYTES = 32 * 2**20  # of a log; a longer one is no call
WINDOWS_S = {"1 min": 60.0, "5 min": 300.0, "1 h": 3600.0, "24 h": 86400.0, "all": math.inf}


class CallLog:
    """Calls of a log in as few objects as possible: there may be a million.

    `keys` gives each different request a number; the columns hold one number a call.
    """

    def __init__(self, prices: Prices, keeps_words: bool) -> None:
        self._prices, self._keeps_words = prices, keeps_words
        self.keys: dict[bytes, int] = {}
        self.words: dict[int, str] = {}  # the first of a request
        self.at = array("d")  # NaN: not known
        self.key, self.client = array("I"), array("I")
        self.tokens, self.micros = array("Q"), array("Q")
        self.lines = self.bad_lines = self.estimated = self.unpriced = 0
        self.first_bad = ""
        self._clients: dict[str, int] = {}

    def read(self, lines: Iterable[bytes]) -> None:
        """JSONL; a line that is no call is counted and passed over."""
        for number, line in enumerate(lines, 1):
            if line.strip():
                self.lines += 1
                try:
                    self.add(json.loads(line))
                except ODD_JSON as error:
                    self.bad_lines += 1
                    why = printable(str(error)) or "nested too deeply"
                    self.first_bad = self.first_bad or f"line {number}: {why}"

    def add(self, doc: dict[str, Any]) -> None:
        """One record: a line of a batch, or a call that the proxy logged."""
        body, answer = doc.get("body") or doc.get("request"), doc.get("answer")
        body = json.loads(body) if isinstance(body, str) else body
        if not isinstance(body, dict):
            raise ValueError("no call: wants body or request")
        answer = _dict(doc, "response").get("body", answer)
        usage, url = None, str(doc.get("url") or doc.get("path") or "")
        if isinstance(answer, dict) and isinstance(answer.get("usage"), dict):
            usage = _usage_from(answer["usage"])
        elif "tokens_in" in doc:
            counts = _whole(doc, "tokens_in"), 0, _whole(doc, "tokens_out")
            usage = Usage(*counts, is_estimated=bool(doc.get("tokens_estimated")))
        if usage is None:
            usage = Usage(round(measure(body).chars / 3), 0, 0, is_estimated=True)
        digest = hashlib.blake2b(url.encode("utf-8", "replace") + (canonical(body) or b"")).digest()
        key = self.keys.setdefault(digest, len(self.keys))
        price = self._prices.of(str(body.get("model", "")))
        if self._keeps_words and key not in self.words:
            said = body.get("messages") or body.get("prompt") or body.get("input") or ""
            said = said[-1].get("content") if isinstance(said, list) and said else said
            self.words[key] = (said if isinstance(said, str) else json.dumps(said))[:80]
        client = str(doc.get("client") or body.get("user") or "")
        at = _instant(doc.get("time_unix", doc.get("timestamp", doc.get("created_at"))))
        self.at.append(math.nan if at is None else at)
        self.client.append(self._clients.setdefault(client, len(self._clients)))
        self.key.append(key)
        self.tokens.append(usage.total)
        self.micros.append(0 if price is None else price.cost(usage))
        self.estimated += usage.is_estimated
        self.unpriced += price is None

    def _repeats(self, order: list[int], window_s: float, shares: bool) -> list[int]:
        """Calls that an answer kept for so long would have served; `shares`: among all clients.

        The window runs from the call that went upstream, as the proxy counts it.
        """
        asked_at: dict[int, float] = {}
        repeats = []
        for n in order:
            key = self.key[n] if shares else self.client[n] << 32 | self.key[n]
            at = 0.0 if window_s == math.inf else self.at[n]
            if at - asked_at.get(key, -math.inf) <= window_s and key in asked_at:
                repeats.append(n)
            else:
                asked_at[key] = at
        return repeats

    def report(self) -> dict[str, Any]:
        has_times, windows = not any(map(math.isnan, self.at)), []
        order = sorted(range(len(self.at)), key=self.at.__getitem__) if has_times else (
            list(range(len(self.at))))  # fmt: skip
        for name, window_s in WINDOWS_S.items() if has_times else [("all", math.inf)]:
            own, shared = (self._repeats(order, window_s, shares) for shares in (False, True))
            row = {"window": name, "same_client": len(own), "other_client": len(shared) - len(own)}
            row["share"] = round(len(own) / max(1, len(order)), 4)
            for calls, whose in ((own, ""), (shared, "_shared")):
                row[f"tokens_saved{whose}"] = sum(self.tokens[n] for n in calls)
                row[f"usd_saved{whose}"] = sum(self.micros[n] for n in calls) / 1e6
            windows.append(row)
        digests, most = list(self.keys), Counter(self.key).most_common(10)
        return {
            "calls": len(order), "different": len(self.keys), "clients": len(self._clients),
            "lines": self.lines, "bad_lines": self.bad_lines, "first_bad": self.first_bad,
            "has_times": has_times, "estimated_calls": self.estimated,
            "unpriced_calls": self.unpriced, "tokens": sum(self.tokens), "windows": windows,
            "most_repeated": [
                {"hash": digests[key].hex()[:12], "calls": count, "words": self.words.get(key, "")}
                for key, count in most if count > 1
            ],
        }  # fmt: skip


def _instant(value: Any) -> float | None:
    """Unix seconds of a time as logs write it: seconds, milliseconds or RFC 3339."""
    with contextlib.suppress(ValueError, OverflowError, TypeError):
        if isinstance(value, str) and not re.fullmatch(r"\d+(\.\d+)?", value):
            return datetime.fromisoformat(value).timestamp()
        if 0 < (number := float(value)) < 1e15 and not isinstance(value, bool):
            return number / 1000 if number > 1e11 else number
    return None


def log_lines(path: str) -> Iterator[bytes]:
    """Lines of a file, plain or gzip, or of stdin; of a ledger, its logged bodies as JSON.

    Raises OSError, sqlite3.Error, EOFError, zlib.error: it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        file: Any = sys.stdin.buffer if path == "-" else stack.enter_context(Path(path).open("rb"))
        begun = file.peek(16)
        if begun.startswith(b"SQLite format 3"):
            sql = "SELECT calls.*, request, answer FROM bodies JOIN calls USING (id)"
            db = stack.enter_context(contextlib.closing(open_ledger(Path(path))))
            for row in db.execute(sql):
                yield json.dumps(dict(row)).encode()
            return
        plain: Any = gzip.GzipFile(fileobj=file) if begun[:2] == b"\x1f\x8b" else file
        while line := plain.readline(LINE_BYTES):
            is_whole = len(line) < LINE_BYTES
            yield line if is_whole else b"too long"
            while not is_whole and line and not line.endswith(b"\n"):  # it is passed over
                line = plain.readline(LINE_BYTES)


def print_replay(report: Mapping[str, Any], shows_words: bool) -> None:
    """The report as text, for people."""
    about = f" ({report['estimated_calls']} calls estimated)" * bool(report["estimated_calls"])
    print(f"{report['calls']} calls, {report['different']} different, {report['clients']} clients, "
          f"{short(report['tokens'])} tokens{about}")  # fmt: skip
    if report["bad_lines"]:
        print(f"{report['bad_lines']} of {report['lines']} lines were no calls; "
              f"first {report['first_bad']}")  # fmt: skip
    if not report["has_times"]:
        print("not every call has a time: only repeats over the whole log can be told")
    print("\nrepeats that a kept answer would have served")
    names = ("window", "same client", "share", "tokens", "USD", "other clients", " tokens", " USD")
    rows = [
        (w["window"], str(w["same_client"]), f"{w['share']:.1%}", short(w["tokens_saved"]),
         f"{w['usd_saved']:.5f}", str(w["other_client"]),
         short(w["tokens_saved_shared"] - w["tokens_saved"]),
         f"{w['usd_saved_shared'] - w['usd_saved']:.5f}") for w in report["windows"]
    ]  # fmt: skip
    plain_console().print(table_of(names, rows, names[1:]))
    if report["unpriced_calls"]:
        print(f"  {report['unpriced_calls']} calls have no price; see --price and --prices")
    if report["most_repeated"]:
        print("\nmost repeated" + ("" if shows_words else "; --show tells their first words"))
    for row in report["most_repeated"]:
        print(f"  {row['calls']:8} x {row['hash']}  {printable(row['words'], 60)}".rstrip())


###############################################################################
# Command line
###############################################################################
# Rule: words in, exit code out: 0 fine, 1 could not do it, 2 usage or config error. An error is
# one line on stderr that says the mend.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def refuse(self, word: str) -> NoReturn:
        flag = word.partition("=")[0]
        if flag in COMMANDS:
            self.error(f"the command comes first: llmproxy {printable(flag)} ...")
        known = [name for action in self._actions for name in action.option_strings]
        mend = did_you_mean(flag, known if flag[:1] == "-" else [*known, *COMMANDS])
        self.error(f"unknown {'flag' if flag[:1] == '-' else 'word'} {printable(flag)}{mend}")


Args = Iterable[tuple[str, dict[str, Any]]]  # as argparse takes them
Run = Callable[[argparse.Namespace], int]


@dataclass
class Command:
    """What a command is called, what it takes, and what it does."""

    name: str
    text: str
    args: Args = ()
    notes: str = ""
    takes_settings: bool = False
    run: Run = field(init=False)

    def __call__(self, run: Run) -> Run:
        self.run, COMMANDS[self.name] = run, self
        return run

    def parser(self) -> _Parser:
        parser = _Parser(
            prog=f"llmproxy {self.name}", description=self.text, epilog=self.notes,
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        parser.add_argument("--version", action="version", version=f"llmproxy {__version__}")
        for word, options in self.args:
            parser.add_argument(word, **options)
        if self.takes_settings:
            text = "those marked live are read anew at every decision"
            group = parser.add_argument_group("settings", text)
            group.add_argument("--config", **_CONFIG)
            for flag in SETTINGS:
                _add_setting(group, flag)
        return parser


def _add_setting(group: Any, name: str) -> None:
    meta, default = SETTINGS[name].metadata, default_text(SETTINGS[name])
    unit = meta["unit"]
    default += " s" if unit == "s" and default[0].isdigit() else ""
    notes = [f"default {default}"] + ["live"] * meta["live"] + ["repeatable"] * meta["many"]
    bare: dict[str, Any] = {"nargs": "?", "const": "on"} if name == "allow_open" else {}
    group.add_argument(
        f"--{flag_name(name)}", dest=f"setting_{name}", action="append", **bare,
        metavar=unit if "|" in unit else (unit or "value").upper(),
        help=f"{meta['help']} ({', '.join(notes)})",
    )  # fmt: skip


_CONFIG: dict[str, Any] = {
    "metavar": "PATH", "help": "TOML file (default: $XDG_CONFIG_HOME/llmproxy/config.toml)"
}  # fmt: skip
_SECRET = {
    "dest": "setting_admin_key", "action": "append", "metavar": "SECRET",
    "help": "where the daemon wants one (LLMPROXY_ADMIN_KEY and the file do as well)",
}  # fmt: skip
_REMOTE = (("--config", _CONFIG), ("--admin-key", _SECRET))
_URL = {"metavar": "URL", "help": "of the daemon (default http://127.0.0.1:4000)"}
_AS_JSON = ("--json", {"action": "store_true", "help": "print JSON"})
_LEDGER = (
    ("--config", _CONFIG), _AS_JSON, ("--csv", {"action": "store_true", "help": "print CSV"}),
    ("--state", {"dest": "setting_state", "action": "append", "metavar": "PATH", "help":
        f"the ledger (default {default_text(SETTINGS['state'])})"}),
)  # fmt: skip
COMMANDS: dict[str, Command] = {}


def _settings_of(args: argparse.Namespace) -> Settings:
    given = {name: getattr(args, f"setting_{name}", None) for name in SETTINGS}
    flags = {name: texts for name, texts in given.items() if texts is not None}
    return load_settings(flags, os.environ, Path(args.config) if args.config else None)


def _parsed(flag: str, parse: Parser, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


@Command("serve", "the daemon (what runs without a command)", (), """examples:
  llmproxy                                     in front of llama.cpp on port 8080
  llmproxy --concurrency auto --abandon cancel the same, as many calls inside as it has slots
  llmproxy --upstream https://api.openai.com --rpm 500 --tpm 90000
  llmproxy --upstream mock:                    to try things on; nothing is called

exit: 0 fine, 1 could not do it, 2 usage or config error""", takes_settings=True)  # fmt: skip
def _serve_command(args: argparse.Namespace) -> int:
    settings = _settings_of(args)
    return _run_loop(run(settings, _console(settings.live)))


@Command("mock", "a stand-in provider with fault modes", (
    ("--host", {"default": "127.0.0.1", "help": "listen address (default 127.0.0.1)"}),
    ("--port", {"default": "9001", "help": "listen port; 0 picks one (default 9001)"}),
    ("--latency", {"default": "0", "metavar": "S", "help": "before the first byte (default 0 s)"}),
), "\n".join(("examples:",
    "  llmproxy mock --port 9001 --latency 1.5",
    "  curl localhost:9001/_mock                    calls so far",
    "  curl localhost:9001/_mock -d '{\"mode\": \"503\"}'\n",
    "modes: " + ", ".join(MODES),
    "also: latency, rpm, tpm, reset")))  # fmt: skip
def _mock(args: argparse.Namespace) -> int:
    mock = Mock(_parsed("--latency", parse_seconds_or_zero, args.latency))
    port = _parsed("--port", parse_port, args.port)

    async def serve() -> int:
        async with listening(mock.handle, args.host, port) as address:
            print(f"mock provider on {address}; GET or POST {address}/_mock", flush=True)
            stop = asyncio.Event()
            on_signal(stop.set)
            await stop.wait()
        return 0

    return _run_loop(serve())


@Command("demo", "see it work: a scripted load on an embedded provider")
def _demo(args: argparse.Namespace) -> int:
    return _run_loop(demo(Settings(), _console("auto")))


@Command("bench", "measure a proxy and its upstream side by side", (
    ("url", {"nargs": "?", "metavar": "URL", "help":
        "a running proxy; without one, a proxy with the settings given here runs on a mock"}),
    ("--only", {"action": "append", "choices": list(SCENARIOS), "metavar": "SCENARIO", "help":
        "run this one; repeatable (default: all that can be run). "
        + "; ".join(f"{name}: {text}" for name, text in SCENARIOS.items())}),
    ("--speed", {"default": "1", "metavar": "N", "help":
        "shorten the timelines N times (default 1)"}),
    ("--limit", {"default": "200", "metavar": "S", "help":
        "end a scenario after so long (default 200 s)"}),
    ("--model", {"default": "bench", "help": "model to ask for (default bench)"}),
    ("--key-env", {"metavar": "NAME", "help":
        "environment variable whose key is sent (default none)"}),
    ("--yes", {"action": "store_true", "help": "make calls that may cost money"}),
    ("--json", {"action": "store_true", "help": "print all that is needed to repeat it, as JSON"}),
    ("--save", {"action": "store_true", "help": "keep a dated record under $XDG_STATE_HOME"}),
    ("--compare", {"nargs": 2, "metavar": ("A", "B"), "help":
        "two records, by path or by the beginning of their names: set them side by side"}),
), """examples:
  llmproxy bench --speed 10                    a proxy of its own on a mock, all scenarios
  llmproxy bench --concurrency 32 --only distinct --save
  llmproxy bench localhost:4000 --only herd    a running proxy and its upstream
  llmproxy bench --compare 2026-11-29 2026-11-30

reached: calls that the provider got. herd, distinct and overhead run on any upstream; what is not
on this machine wants --yes.""", takes_settings=True)  # fmt: skip
def _bench_command(args: argparse.Namespace) -> int:
    home = state_path(default_text(SETTINGS["state"])).parent / "bench"
    if args.compare:
        plain_console().print(compare_table(*(bench_record(home, name) for name in args.compare)))
        return 0
    speed, limit_s = float("0" + args.speed if args.speed[:1].isdigit() else "0"), 0.0
    if not 0.1 <= speed <= 100:
        raise ConfigError("--speed wants a number from 0.1 to 100")
    limit_s = _parsed("--limit", parse_seconds, args.limit)
    record = _run_loop(_bench(args, speed, limit_s))
    if args.save:
        path = home / f"{record['began'].replace(':', '')}.json"
        replace_file(path, json.dumps(record, indent=1))
        print(f"saved in {path}", file=sys.stderr)
    if args.json:
        print(json.dumps(record, indent=1))
    else:
        plain_console().print(bench_table(record))
    return 0


async def _bench(args: argparse.Namespace, speed: float, limit_s: float) -> dict[str, Any]:
    """Run scenarios on proxies of our own, or on one that runs; returns the record."""
    from rich.console import Console

    settings, headers = _settings_of(args), dict[str, str]()
    if args.key_env is not None:
        if not (key := os.environ.get(args.key_env)):
            raise ConfigError(f"--key-env: {printable(args.key_env)} is not set")
        headers["Authorization"] = f"Bearer {key}"
    if args.url is None:
        if "upstream" not in settings.given:
            settings.upstream, settings.upstreams, settings.keys = "mock:", [], []
        settings.clients, settings.port, settings.state = [], 0, "none"
        log.setLevel(logging.ERROR)  # the faults are on purpose
    fitting: dict[str, dict[str, Any]] = {  # but for what was set by hand
        "gate": {"rpm": 60, "queue_timeout": 90.0},
        "hang": {"timeout": round(max(1.0, 30.0 / speed), 3)},  # its silence is shorter too
    }

    @contextlib.asynccontextmanager
    async def on(name: str) -> AsyncIterator[tuple[Bench, dict[str, Any]]]:
        """A proxy for a scenario, and what its status says."""
        async with contextlib.AsyncExitStack() as stack:
            connector = aiohttp.TCPConnector(limit=0)
            session = aiohttp.ClientSession(connector=connector)
            await stack.enter_async_context(session)
            if args.url is None:
                more = {n: v for n, v in fitting.get(name, {}).items() if n not in settings.given}
                given = {**settings.given, **dict.fromkeys(more, "bench")}
                made = dataclasses.replace(settings, **more, given=given)
                gateway = await stack.enter_async_context(gateway_for(made))
                remote = Remote(gateway.url, settings.admin_key)
            else:
                remote = _remote(args, args.url)
            status = await remote.status()
            sides = {"proxied": remote.url, "direct": status["upstreams"][0]["url"]}
            bench = Bench(session, remote, sides, speed, args.model, headers)
            await bench.meet()
            yield bench, status

    async with on("") as (bench, status):
        upstream = bench.sides["direct"]
        is_local = is_loopback(URL(upstream).host or "")
        if is_local and not is_loopback(URL(bench.sides["proxied"]).host or ""):
            raise ConfigError(f"bench: {upstream} is on the other machine: run it there")
        names = args.only or [n for n in SCENARIOS if bench.has_mock or n not in FAULTS]
        if not bench.has_mock and (faults := [n for n in names if n in FAULTS]):
            why = f"{', '.join(faults)} wants a proxy on `llmproxy mock`, which {upstream} is not"
            raise ConfigError(f"bench: {why}")
        if not is_local and not args.yes:
            why = "is not this machine, its calls may cost: say --yes"
            raise ConfigError(f"bench: {upstream} {why}")
        record: dict[str, Any] = {
            "version": __version__, "began": datetime.now().astimezone().isoformat("T", "seconds"),
            "python": sys.version.split()[0], "platform": sys.platform, "cpus": os.cpu_count(),
            "speed": speed, "limit_s": limit_s, "model": args.model, **bench.sides,
            "has_mock": bench.has_mock, "settings": status["settings"], "scenarios": [],
        }  # fmt: skip
    for name in names:
        with Console(stderr=True).status(name):
            async with on(name) as (bench, _):
                record["scenarios"].append(await bench.run(name, limit_s))
    return record


@Command("replay", "what dedup would have saved, from logs of calls", (
    ("file", {"metavar": "FILE", "help":
        "JSONL or JSONL.gz, - for stdin: OpenAI batch input, or request with time_unix and "
        "client; or a ledger kept with log-bodies"}),
    ("--show", {"action": "store_true", "help": "show the first words of what is repeated most"}),
    _AS_JSON,
), """examples:
  llmproxy replay batch.jsonl --prices model_prices_and_context_window.json
  zcat log.jsonl.gz | llmproxy replay - --show
  llmproxy replay ~/.local/state/llmproxy/llmproxy.db    kept with log-bodies = on""",
    takes_settings=True)  # fmt: skip
def _replay(args: argparse.Namespace) -> int:
    calls = CallLog(Prices(_settings_of(args)), args.show)
    try:
        calls.read(log_lines(args.file))
    except (OSError, EOFError, zlib.error, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CannotError(f"{args.file}: cannot be read: {printable(str(why))}") from None
    if not calls.at:
        raise CannotError(f"{args.file}: no call is in it; {calls.first_bad}".removesuffix("; "))
    if args.json:
        print(json.dumps(calls.report(), indent=1))
    else:
        print_replay(calls.report(), args.show)
    return 0


@Command("check", "validate the config file and say what it means", takes_settings=True)
def _check(args: argparse.Namespace) -> int:
    settings = _settings_of(args)
    check_open(settings)
    Prices(settings)
    file = Path(args.config) if args.config else default_config_path(os.environ)
    print(f"{file}: " + ("fine" if file.exists() else "not there, defaults hold"))
    targets = ", ".join(rule.url for rule in settings.upstreams) or settings.upstream
    print(f"would proxy {targets} on http://{settings.host}:{settings.port}")
    shown = settings.shown()
    for name, where in settings.given.items():
        print(f"  {flag_name(name)} = {shown[flag_name(name)]}   ({where})")
    for kind in ("upstream", "client", "model"):
        for rule in getattr(settings, f"{kind}s"):
            print(f"  {kind} {rule.name}: {_differing(rule)}")
    for key in [*settings.keys, *(key for rule in settings.upstreams for key in rule.keys)]:
        missing = " (not set here; serve needs it)" * bool(key.env and key.env not in os.environ)
        print(f"  upstream_key {key.source}: {_differing(key)}{missing}")
    return 0


def _differing(rule: Any) -> str:
    """What a table of the file sets, by hand."""
    found = {name: getattr(rule, item.name) for name, item in fields_of(type(rule)).items()}
    shown = {n: v for n, v in found.items() if v and n not in ("command", "key_sha256")}
    texts = {n: [json.dumps(v)] if isinstance(v, dict) else typed(v) for n, v in shown.items()}
    return ", ".join(f"{name} = {', '.join(text)}" for name, text in texts.items())


def _remote(args: argparse.Namespace, url: str | None) -> Remote:
    """The daemon at a URL, else where the configuration says that it listens."""
    settings = _settings_of(args)
    if url is None:
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
        url = f"{f'[{host}]' if ':' in host else host}:{settings.port}"
    return Remote(
        _parsed("URL", parse_url, url if "://" in url else f"http://{url}"), settings.admin_key
    )


# What makes a client speak to us: variables and words before its own. `%s` is the base URL.
CLIENTS: dict[str, tuple[dict[str, str], list[str]]] = {
    "claude": ({
        "ANTHROPIC_BASE_URL": "%s", "ANTHROPIC_AUTH_TOKEN": "any", "API_TIMEOUT_MS": "3600000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }, []),
    "codex": ({"LLMPROXY_CLIENT_KEY": "any"}, [
        "-c", "model_provider=llmproxy", "-c",
        'model_providers.llmproxy={name="llmproxy",base_url="%s/v1",'
        'env_key="LLMPROXY_CLIENT_KEY",wire_api="responses"}',
    ]),
    "aider": ({"OPENAI_API_BASE": "%s/v1", "OPENAI_API_KEY": "any"}, []),
    "": ({  # any other
        "OPENAI_BASE_URL": "%s/v1", "OPENAI_API_BASE": "%s/v1", "OPENAI_API_KEY": "any",
        "ANTHROPIC_BASE_URL": "%s", "ANTHROPIC_AUTH_TOKEN": "any",
    }, []),
}  # fmt: skip


@Command("run", "a client whose calls go through the proxy", (
    ("words", {"nargs": argparse.REMAINDER, "metavar": "CLIENT ...", "help":
        "claude, codex, aider or any other command, and its own words"}),
    ("--print", {"action": "store_true", "help": "say what would be set, and run nothing"}),
), """examples:
  llmproxy run claude
  llmproxy run claude -p "what does this program do?"
  llmproxy run --upstream http://127.0.0.1:8081 aider --model openai/m
  llmproxy run --print codex

Uses the daemon that listens, or runs one as long as the client does. A key that is set already
(ANTHROPIC_AUTH_TOKEN, OPENAI_API_KEY) stays. Ends with what the session cost, on stderr, and with
the client's exit code.""", takes_settings=True)  # fmt: skip
def _run_command(args: argparse.Namespace) -> int:
    args.words = args.words[args.words[:1] == ["--"] :]
    if not args.words:
        raise ConfigError("run: wants a client, like llmproxy run claude")
    return _run_loop(_run_client(args))


async def _run_client(args: argparse.Namespace) -> int:
    settings, remote = _settings_of(args), _remote(args, None)
    async with contextlib.AsyncExitStack() as stack:
        try:
            await remote.status()
        except CannotError:
            if not args.print:
                settings.log, stderr_log.is_below = "off", True  # the terminal is the client's
                gateway = await stack.enter_async_context(gateway_for(settings))
                remote = Remote(gateway.url, settings.admin_key)
        name = Path(args.words[0]).name
        variables, words = CLIENTS.get(name, CLIENTS[""])
        env = {k: v.replace("%s", remote.url) for k, v in variables.items()}
        env = {k: v for k, v in env.items() if v != "any" or not os.environ.get(k)}
        command = [args.words[0], *(w.replace("%s", remote.url) for w in words), *args.words[1:]]
        if args.print:
            settings_of_it = (f"{key}={shlex.quote(value)}" for key, value in env.items())
            print(" \\\n  ".join([*settings_of_it, shlex.join(command)]))
            return 0
        before = await remote.status()
        on_signal(lambda: None)  # Ctrl-C is the client's, which shares our terminal
        try:
            client = await asyncio.create_subprocess_exec(*command, env={**os.environ, **env})
        except OSError as error:
            raise CannotError(f"{printable(command[0])}: {error.strerror}") from None
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, client.terminate)
        code = await client.wait()
        for line in (*_messages, _session_text(before, await remote.status())):
            print(f"llmproxy: {line}", file=sys.stderr)
        return code if code >= 0 else 128 - code


def _session_text(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What a session came to, from two statuses."""
    names = ("requests", "joined", "hit", "tokens_in", "tokens_cached", "tokens_out", "spend_usd")
    n = {name: after.get(name, 0) - before.get(name, 0) for name in names}  # it may be an older one
    waited_s = after["waited"]["s"] - before["waited"]["s"]
    cached = f", {n['tokens_cached'] / n['tokens_in']:.0%} cached" if n["tokens_in"] > 0 else ""
    money = f", {n['spend_usd']:.4f} USD" if n["spend_usd"] > 0 else ""
    return (
        f"{n['requests']} calls, {n['joined'] + n['hit']} of them answered from here; "
        f"{short(n['tokens_in'])} tokens in{cached}, {short(n['tokens_out'])} out; "
        f"waited {duration(waited_s * 1000)}{money}"
    )


@Command("top", "the live table of a daemon that runs elsewhere", (
    ("url", {"nargs": "?", **_URL}), *_REMOTE,
), "examples:\n  llmproxy top\n  llmproxy top http://server:4000 --admin-key SECRET")  # fmt: skip
def _top(args: argparse.Namespace) -> int:
    console, remote = _console("auto"), _remote(args, args.url)
    if console is None:
        raise ConfigError("top: wants a terminal; see llmproxy get --json, or /_llmproxy/status")

    async def show() -> int:
        await remote.status()  # before the screen is taken
        task, stopping = cast(asyncio.Task[int], asyncio.current_task()), asyncio.Event()

        def stop() -> None:
            if not stopping.is_set():  # once: the screen has to be given back
                stopping.set()
                task.cancel()

        on_signal(stop)
        with contextlib.suppress(asyncio.CancelledError):
            await live_table(remote, remote.url, console, stop)
        return 0

    return _run_loop(show())


@Command("get", "settings of a running daemon", (
    ("names", {"nargs": "*", "metavar": "SETTING", "help": "none: all"}), ("--url", _URL),
    _AS_JSON, *_REMOTE), "examples:\n  llmproxy get\n  llmproxy get timeout")  # fmt: skip
def _get(args: argparse.Namespace) -> int:
    doc = _run_loop(_remote(args, args.url).ask("GET", "settings"))
    shown, given = doc["settings"], doc["given"]
    names = [name.replace("_", "-") for name in args.names]
    if unknown := [name for name in names if name not in shown]:
        raise ConfigError(unknown_name(unknown[0], shown))
    wanted = {name: shown[name] for name in names or shown}
    if args.json:
        print(json.dumps(wanted, indent=1))
        return 0
    for name, value in wanted.items():
        texts = ", ".join(typed(value)) or "none"
        print(texts if len(names) == 1 else f"{name:20} {texts:24} {given.get(name, '')}".rstrip())
    return 0


@Command("set", "change settings of a running daemon", (
    ("changes", {"nargs": "+", "metavar": "SETTING=VALUE", "help":
        "a live setting and its value; of a repeatable one name it several times, or say none"}),
    ("--save", {"action": "store_true", "help": "write them into the file as well"}),
    ("--url", _URL), *_REMOTE,
), """examples:
  llmproxy set timeout=20 concurrency=8
  llmproxy set rpm=none --save
  llmproxy set 'price=gpt-*=2.5/10' 'price=llama*=0/0'""")  # fmt: skip
def _set(args: argparse.Namespace) -> int:
    changes: dict[str, Any] = {}
    for change in args.changes:
        flag, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"set {printable(change)}: wants SETTING=VALUE")
        changes.setdefault(flag.strip(), []).append(value)
    Settings().changed(changes, "set")  # what is wrong is said before anybody is asked
    work = _remote(args, args.url).ask("PATCH", "settings", {**changes, "save": args.save})
    doc = _run_loop(work)
    for name, value in doc.get("settings", {}).items():
        print(f"{name} = {', '.join(typed(value)) or 'none'}")
    if "saved" in doc:
        print(f"saved in {doc['saved']}")
    return 0


def _read_ledger(args: argparse.Namespace, sql: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    settings = _settings_of(args)
    if settings.state == "none":
        raise CannotError("there is no ledger: state is none")
    path = state_path(settings.state)
    try:
        return read_rows(path, sql, values)
    except sqlite3.Error as error:
        why = "no daemon has written it yet; see --state" if not path.exists() else error
        raise CannotError(f"{path}: {why}") from None


def _print_rows(args: argparse.Namespace, rows: list[dict[str, Any]], shown: list[str]) -> None:
    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.6f}".rstrip("0").rstrip(".") or "0"
        return printable(str("" if value is None else value), 60)

    if args.json:
        print(json.dumps(rows, indent=1))
    elif args.csv:
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else shown)
        writer.writeheader()
        for row in rows:
            lists = {name: json.dumps(v) for name, v in row.items() if isinstance(v, list)}
            writer.writerow({**row, **lists})
    else:
        right = [name for name in shown if rows and isinstance(rows[0][name], (int, float))]
        cells = [[cell(row[name]) for name in shown] for row in rows]
        plain_console().print(table_of(shown, cells, right))


_EXPORTS = {"curl": "shell commands", "har": "an HTTP archive", "jsonl": "JSON lines"}


@Command("calls", "the last calls, from the ledger", (
    *((f"--{n}", {"metavar": "GLOB", "help": f"only calls of this {n}"}) for n in FILTERS),
    ("--since", {"metavar": "SPAN", "help": "only the last span, like 30m, 2h or 7d"}),
    ("--limit", {"metavar": "N", "default": "50", "help": "at most so many (default 50)"}),
    *_LEDGER,
    *((f"--{form}", {"dest": "form", "action": "store_const", "const": form, "help":
        f"what was asked and answered, as {text}: of the calls that the daemon holds"})
      for form, text in _EXPORTS.items()),
    ("--id", {"metavar": "N", "type": int, "help": "of those, only this one"}),
    ("--url", _URL), ("--admin-key", _SECRET),
), """examples:
  llmproxy calls --status '5*' --since 2h
  llmproxy calls --csv
  llmproxy calls --curl --limit 1
  llmproxy calls --har --model 'qwen*' > calls.har""")  # fmt: skip
def _calls_command(args: argparse.Namespace) -> int:
    wanted = {name: getattr(args, name) for name in (*FILTERS, "since", "limit")}
    try:
        sql, values = calls_query(wanted)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    if args.form:
        return _export(args, wanted)
    rows = [shown_row(row) for row in _read_ledger(args, sql, values)]
    for row in rows:
        row["at"] = time.strftime("%m-%d %H:%M:%S", time.localtime(row["time_unix"]))
    names = "at fate status model client queue_ms total_ms tokens_in tokens_out cost_usd trace"
    if plain_console().width < 130:
        names = "at fate status cost_usd trace model"
    _print_rows(args, rows, names.split())
    return 0


def _export(args: argparse.Namespace, wanted: Mapping[str, Any]) -> int:
    """Print calls that the daemon holds, the oldest first."""
    remote = _remote(args, args.url)
    since = 0.0 if wanted["since"] is None else time.time() - parse_span(wanted["since"])

    def is_wanted(row: Mapping[str, Any]) -> bool:
        globs = ((str(row[name]), wanted[name]) for name in FILTERS if wanted[name] is not None)
        is_it = args.id in (None, row["id"]) and row["time_unix"] >= since
        return is_it and all(fnmatch.fnmatchcase(*pair) for pair in globs)

    async def fetch() -> list[dict[str, Any]]:
        rows = (await remote.captured())["calls"]
        wanted_rows = [row for row in rows if is_wanted(row)][: int(wanted["limit"])]
        calls = []
        for row in reversed(wanted_rows):
            with contextlib.suppress(CannotError):  # it may have gone meanwhile
                calls.append(await remote.captured(row["id"]))
        if lost := len(wanted_rows) - len(calls):
            log.warning("%d calls went while they were read", lost)
        return calls

    calls = _run_loop(fetch())
    if not calls:
        raise CannotError(f"{remote.url} holds no such call; see the setting captures")
    if args.form == "har":
        texts = [json.dumps(har_of(calls, remote.url), indent=1)]
    elif args.form == "jsonl":
        texts = [jsonl_of(call) for call in calls]
    else:
        texts = [curl_of(call, remote.url) for call in calls]
    for text in texts:
        is_safe = not sys.stdout.isatty() or text.isprintable()
        print(text if is_safe else "\n".join(map(on_screen, text.split("\n"))))
    return 0


@Command("trace", "one call's whole life, from the ledger", (
    ("id", {"help": "x-llmproxy-trace or x-request-id of an answer"}), *_LEDGER))  # fmt: skip
def _trace(args: argparse.Namespace) -> int:
    rows = [shown_row(row) for row in _read_ledger(args, *calls_query({}, args.id))]
    if not rows:
        raise CannotError(f"no call of trace {printable(args.id)} is in the ledger")
    if args.json or args.csv:
        _print_rows(args, rows, list(rows[0]))
        return 0
    for row in reversed(rows):
        print("\n".join(printable(line, 500) for line in timeline(row)))
    return 0


@Command("spend", "money and tokens, from the ledger", (
    ("--by", {"default": "model", "choices": list(SPEND_BY), "help": "(default model)"}),
    ("--since", {"metavar": "SPAN", "default": "30d", "help":
        "over the last span, like 12h (default 30d)"}), *_LEDGER,
), "examples:\n  llmproxy spend --by client --since 7d")  # fmt: skip
def _spend(args: argparse.Namespace) -> int:
    since_s = _parsed("--since", parse_span, args.since)
    rows = _read_ledger(args, *spend_query(args.by, time.time() - since_s))
    names = ["name", "calls", "tokens_in", "tokens_out", "cost_usd", "unpriced_tokens"]
    if plain_console().width >= 110:
        names[2:2], names[6:6] = ["upstream_calls"], ["saved_usd"]
    if not (args.json or args.csv):
        measured = "cost_usd" if any(row["cost_usd"] for row in rows) else "tokens_in"
        most = max((row[measured] for row in rows), default=0) or 1
        for row in rows:
            row["name"] = row["name"] or "-"
            row[""] = sparkline([most] * math.ceil(10 * row[measured] / most))
        names.append("")
    _print_rows(args, rows, names)
    return 0


@Command("key", "client keys: new NAME prints one once, list, revoke NAME", (
    ("verb", {"choices": ("new", "list", "revoke")}),
    ("name", {"nargs": "?", "help": "the client's name"}), ("--config", _CONFIG),
), """examples:
  llmproxy key new alice""")  # fmt: skip
def _key(args: argparse.Namespace) -> int:
    path = Path(args.config) if args.config else default_config_path(os.environ)
    with only_one(path):
        text = text_of(path)
        clients = load_settings({}, {}, path).clients if text else []
        if args.verb == "list":
            for rule in clients:
                print(f"{rule.name}  {_differing(rule)}")
            return 0
        _parsed(f"key {args.verb}: NAME", parse_name, args.name or "")
        if (args.name in [rule.name for rule in clients]) is (args.verb == "new"):
            why = "is there already" if args.verb == "new" else "is not there"
            raise ConfigError(f"{path}: client {args.name} {why}")
        if args.verb == "revoke":
            replace_file(path, without_client(text, args.name) or "# the last client was revoked\n")
            print(f"revoked {args.name} in {path}; SIGHUP or restart the daemon")
            return 0
        key = f"llmp-{secrets.token_urlsafe(32)}"
        replace_file(path, with_client(text, args.name, hashlib.sha256(key.encode()).hexdigest()))
    print(key)
    said = f"this key is shown once; its hash is in {path}; SIGHUP or restart the daemon"
    print(said, file=sys.stderr)
    return 0


# Each asks the command itself, so that they know the flags of the version that is installed.
COMPLETIONS = {
    "bash": """_llmproxy() {
  local words; words=$(llmproxy completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]#=}"))
  [[ ${COMPREPLY-} == *= ]] && compopt -o nospace
}
complete -o default -F _llmproxy llmproxy
""",
    "zsh": """#compdef llmproxy
_llmproxy() {
  local -a found
  found=(${(f)"$(llmproxy completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  if (( ${#found} )); then compadd -a found; else _files; fi
}
if [[ $funcstack[1] == _llmproxy ]]; then _llmproxy "$@"; else compdef _llmproxy llmproxy; fi
""",
    "fish": "complete -c llmproxy -a '(llmproxy completion words -- "
    "(commandline -opc)[2..] (commandline -ct))'\n",
}


@Command("completion", "a shell's completion of this command", (
    ("shell", {"choices": tuple(COMPLETIONS), "help": "whose script to print"}),
), """examples:
  llmproxy completion bash > ~/.local/share/bash-completion/completions/llmproxy""")  # fmt: skip
def _completion(args: argparse.Namespace) -> int:
    print(COMPLETIONS[args.shell], end="")
    return 0


def completions(words: list[str]) -> list[str]:
    """What may stand where the last of these words does."""
    begun = words[-1] if words else ""
    if words[:1] == ["set"] and (value := re.fullmatch(r"(\S+?)( ?= ?)(\S*)", " ".join(words[1:]))):
        item = SETTINGS.get(value[1].replace("-", "_"))  # bash takes name, = and value apart
        values = [] if item is None else [
            *item.metadata["also"], *getattr(item.metadata["parse"], "choices", ())]  # fmt: skip
        prefix = "" if " " in value[2] else f"{value[1]}="
        return [prefix + word for word in values if word.startswith(value[3])]
    known = [*COMMANDS, "--version", "--help"] if len(words) < 2 else []
    name = words[0] if words and words[0] in COMMANDS else "serve"
    for action in COMMANDS[name].parser()._actions:
        values = [str(choice) for choice in action.choices or ()]
        if isinstance(action.metavar, str) and "|" in action.metavar:
            values = action.metavar.split("|")
        if len(words) > 1 and words[-2] in action.option_strings and values:
            return [value for value in values if value.startswith(begun)]
        known += [flag for flag in action.option_strings if flag.startswith("--")] or values
    if name in ("get", "set"):
        live = [n for n, item in SETTINGS.items() if item.metadata["live"] or name == "get"]
        known += [flag_name(n) + "=" * (name == "set") for n in live]
    return [word for word in known if word.startswith(begun)]


def _console(live: str) -> Console | None:
    """A console for the live table, or None where there shall be none."""
    if live == "off" or (live == "auto" and not sys.stdout.isatty()):
        return None
    with contextlib.suppress(OSError, AttributeError):
        if live == "auto" and os.tcgetpgrp(sys.stdout.fileno()) != os.getpgrp():
            return None  # in the background: the screen is somebody else's
    from rich.console import Console

    return Console(force_terminal=True if live == "on" else None)


def _run_loop(work: Coroutine[Any, Any, V]) -> V:
    """Run on uvloop where it is installed."""
    # A call leaves little that is cyclic: collect seldom, and never what was there at the start.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def _open_standard_files() -> None:
    """A closed stdin, stdout or stderr would be taken by the first socket."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
        with contextlib.suppress(AttributeError, ValueError):  # not of the usual kind
            getattr(sys, name).reconfigure(errors="replace")  # whatever its encoding lacks


def main(argv: list[str] | None = None) -> int:
    _open_standard_files()
    words = sys.argv[1:] if argv is None else argv
    logging.basicConfig(handlers=[stderr_log], level=logging.WARNING)
    try:
        if words[:1] in (["-h"], ["--help"]):
            print("usage: llmproxy [COMMAND] [ARGS]\n\nA local proxy for LLM calls. Commands:\n")
            print("\n".join(f"  {name:12} {found.text}" for name, found in COMMANDS.items()))
            print("\nllmproxy COMMAND --help tells more; without a command, llmproxy serve --help.")
            return 0
        if words[:2] == ["completion", "words"]:  # what is being typed need not be right
            print("\n".join(completions(words[3:])))
            return 0
        name, *rest = words if words and words[0] in COMMANDS else ["serve", *words]
        parser = COMMANDS[name].parser()
        args, rest = parser.parse_known_args(rest)
        if rest and getattr(args, "name", "") is None and not rest[0].startswith("-"):
            args.name = rest.pop(0)  # key new --config F NAME
        if rest:
            parser.refuse(rest[0])
        code = COMMANDS[name].run(args)
        sys.stdout.flush()
        return code
    except (ConfigError, CannotError) as error:
        print(f"llmproxy: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:  # nothing can be written any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever read our output has seen enough
            return 0
        print(f"llmproxy: {error.strerror or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
