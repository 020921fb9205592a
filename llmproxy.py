"""llmproxy: one process between your applications and your language models.

Applications change only their base URL. What converges here is joined, queued, sent, counted:

    client -> Gateway.handle   1 guard    origin, Host, our own headers
                               2 read     body, JSON, model, key               (Wire)
                               3 join     a kept answer, a running flight,     (Flow control)
                                          or lead a new one in its own task
              Sender._fly      4 reserve  of the budgets; a row in the ledger  (Money, Ledger)
                               5 queue    slot, weight, rpm, tpm, key          (Flow control)
                               6 admit    the circuit says go or not           (Flow control)
                               7 send     one attempt, classified; maybe again (Upstream)
              Relay.relay      8 relay    every caller reads the flight at its own pace
              Gateway.handle   9 record   counters, ledger, one log line, the live table

Sections, each using only what stands above it: Errors, Settings, Flow control, Wire, Money,
Ledger, Upstream, Counters, Gateway, Server, Live table, Mock, Bench, Demo, Replay, Command line.

Units are in the names: `_s` seconds, `_ms` milliseconds, `_bytes`, `_tokens`. Instants named `*_at`
are monotonic. All state lives on one event loop in one thread: changes between two awaits are
atomic, and there is no lock. Only text leaves it, for the threads that write stderr and the table.
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
import fnmatch
import functools
import gc
import gzip
import hashlib
import heapq
import hmac
import http.client
import ipaddress
import itertools
import json
import logging
import marshal
import math
import os
import queue
import random
import re
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
import threading
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
import zlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, cast

import aiohttp
import tomli_w
from aiohttp import web
from aiohttp.helpers import TimerNoop
from aiohttp.http import StreamWriter
from multidict import CIMultiDict
from yarl import URL

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__version__ = "0.1.0"

Clock = Callable[[], float]
V = TypeVar("V")
Headers = CIMultiDict[str]

QUEUED_BODIES_BYTES = 256 * 2**20  # all bodies that wait in the queue together
FLIGHT_BYTES = 16 * 2**20  # an answer beyond this is passed on but no longer joined or kept
FLIGHT_WINDOW_BYTES = 4 * 2**20  # of such an answer, what a slower caller may lag behind
SLICE_BYTES = 64 * 1024  # one write to a caller; also aiohttp's high-water mark
KEPT_OVERHEAD_BYTES = 2048  # headers, keys and aliases of one kept answer, counted with it
MAX_ALIASES = 4  # spellings of one body that skip the JSON parser
MAX_PASSED = 32  # times that lighter calls may pass a waiting head
MAX_TOKENS = 2**25  # a usage beyond it is none: no model has such a context
MAX_MODELS = 1000  # models and circuits remembered; the least recently used goes first
HEADER_LINE_BYTES = 64 * 1024  # aiohttp's 8,190 is less than real agents send
IDLE_S = 4.0  # upstream keep-alive: llama.cpp closes after 5.0 s idle
CALLER_S = 60.0  # an upload that stalls longer is ended
DRAIN_S = 30.0  # what calls in flight get after SIGTERM
HEALTH_EVERY_S, HEALTH_LIMIT_S = 2.0, 1.5
LOOK_S = 1.5  # between two looks at llama.cpp: asked for its slots more often, it misses hang-ups
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

log = logging.getLogger("llmproxy")


###############################################################################
# Errors
###############################################################################
# Rule: knows nothing of HTTP libraries. Each code is one row of the README's table; they become
# responses in Gateway, and in Server for what is no HTTP request.


class ConfigError(Exception):
    """A setting that cannot be used. The message names where it stands and says the mend."""


class RemoteError(Exception):
    """A daemon that cannot be asked, or that refused; the message says the mend."""


# code: status, OpenAI type, Anthropic type, x-should-retry
ERRORS = {
    "invalid_header": (400, "invalid_request_error", "invalid_request_error", False),
    "invalid_request": (400, "invalid_request_error", "invalid_request_error", False),
    "invalid_api_key": (401, "invalid_request_error", "authentication_error", False),
    "forbidden_origin": (403, "invalid_request_error", "permission_error", False),
    "caller_stalled": (408, "invalid_request_error", "invalid_request_error", False),
    "not_found": (404, "invalid_request_error", "not_found_error", False),
    "model_not_found": (404, "invalid_request_error", "not_found_error", False),
    "request_too_large": (413, "invalid_request_error", "request_too_large", False),
    "model_not_allowed": (403, "invalid_request_error", "permission_error", False),
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


# Of OpenAI and its kind, Anthropic, Google, GitHub, AWS, Slack, JSON web tokens, our own; and what
# stands where a key would.
_SECRETS = re.compile(
    r"(?<![A-Za-z0-9])(?:[spr]k[-_]|(?:gsk|hf|r8|gh[pos]|github_pat)_|AIza|AKIA|eyJ"
    r"|(?:xai|pplx|nvapi|glpat|xox[abp]|llmp)-)[-_A-Za-z0-9.]{12,}"
    r"|(?i:bearer|basic)\s+[^\s\"',;]{6,}"
    r"|(?i:(?:[?&;]|%3f|%26)(?:key|api[-_]?key|token|access_token)(?:=|%3d))[^&\s\"']+"
)


def struck(text: str) -> str:
    """A text without what looks like a key, and without what is no character."""
    if not text:
        return text
    text = text if text.isascii() else text.encode("utf-8", "replace").decode()
    return _SECRETS.sub("***", text)


def printable(text: str, limit: int = 80) -> str:
    """Text from outside, safe for a log line or a terminal: no key, no control character."""
    text = struck(text)
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


def _number(text: str, units: Mapping[str, float], what: str) -> float:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in units:
        raise ValueError(f"wants {what}")
    return float(match[1]) * units[match[2]]


def parse_seconds(text: str) -> float:
    return _number(text, _SECONDS, "seconds above 0, like 30 or 1.5s or 5m") or _refuse("above 0")


def parse_seconds_or_zero(text: str) -> float:
    return _number(text, _SECONDS, "seconds, like 30 or 1.5s or 5m")


def parse_size(text: str) -> int:
    return int(_number(text, _BYTES, "a size, like 64MiB"))


def parse_count(text: str) -> int:
    return parse_count_or_zero(text) or _refuse("a whole number above 0")


def parse_count_or_zero(text: str) -> int:
    if not re.fullmatch(r"\s*\d{1,15}\s*", text, re.ASCII):
        raise ValueError("wants a whole number")
    return int(text)


def parse_host(text: str) -> str:
    return (
        text if re.fullmatch(r"[\w.:%-]{1,253}", text, re.ASCII) else _refuse("a host or address")
    )


def parse_share(text: str) -> float:
    value = _number(text, {"": 1.0}, "a share between 0 and 1")
    return value if 0 < value <= 1 else _refuse("a share above 0 and at most 1")


def parse_port(text: str) -> int:
    value = parse_count_or_zero(text)
    return value if value < 65536 else _refuse("a port from 0 to 65535")


def parse_url(text: str) -> str:
    if text == "mock:":
        return text
    try:
        parsed = URL(text)
        odd = parsed.query_string or parsed.fragment or parsed.user or parsed.password
        if parsed.scheme not in {"http", "https"} or not parsed.host or odd or " " in text:
            raise ValueError
    except ValueError:
        raise ValueError(
            "wants a base URL with http:// or https:// (and no user@), or mock:"
        ) from None
    return text.rstrip("/")


def parse_span(text: str) -> float:
    return _number(text, {**_SECONDS, "d": 86400.0}, "a span, like 30m, 12h or 7d")


def parse_days(text: str) -> float:
    return _number(text, {"": 1.0, "d": 1.0, "days": 1.0}, "days, like 90")


def parse_usd(text: str) -> float:
    return _number(text, {"": 1.0, "usd": 1.0}, "an amount in USD, like 5 or 0.25")


def parse_price(text: str) -> str:
    """`IN/OUT` or `IN/OUT/CACHED_IN`, in USD per million tokens."""
    number = r"\d{1,9}(\.\d{1,9})?"
    if not re.fullmatch(rf"{number}/{number}(/{number})?", text, re.ASCII):
        _refuse("IN/OUT or IN/OUT/CACHED_IN in USD per million tokens, like 2.5/10/1.25")
    return text


def parse_model_price(text: str) -> str:
    model, _, price = text.rpartition("=")
    return (
        f"{model}={parse_price(price)}" if model else _refuse("MODEL=IN/OUT, like 'gpt-*=2.5/10'")
    )


def one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        return text if text in allowed else _refuse("one of " + ", ".join(allowed))

    parse.choices = allowed  # type: ignore[attr-defined]
    return parse


def parse_text(text: str) -> str:
    return text if text.strip() else _refuse("a text")


def parse_origin(text: str) -> str:
    return text if text.strip() not in ("", "null") else _refuse("an origin, and never null")


def parse_hash(text: str) -> str:
    found = re.fullmatch(r"[0-9a-f]{64}", text.strip().lower())
    return found[0] if found else _refuse("a SHA-256 as 64 hexadecimal digits")


def parse_header(text: str) -> str:
    return text if re.fullmatch(r"[\w-]{1,64}", text, re.ASCII) else _refuse("a header's name")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"wants {what}")


NONE = {"none": None}
LEVELS = {"auto": "auto", "adaptive": "adaptive"}


def matches(globs: list[str], model: str) -> bool:
    return not globs or any(fnmatch.fnmatchcase(model, glob) for glob in globs)


def setting(
    default: Any, parse: Callable[[str], Any], unit: str, text: str, *,
    also: Mapping[str, Any] | None = None, live: bool = True,
) -> Any:  # fmt: skip
    """Declare one setting.

    A list as default makes it repeatable; `also` are words that stand for a value of their own.
    """
    many = isinstance(default, list)
    unit = unit or "|".join(getattr(parse, "choices", ()))
    meta = {"parse": parse, "unit": unit, "help": text, "live": live, "many": many}
    meta["also"] = also or {}
    if many:
        return field(default_factory=list, metadata=meta)
    return field(default=default, metadata=meta)


def parse_setting(meta: Mapping[str, Any], texts: list[str], where: str, is_secret: bool) -> Any:
    """The value that a setting is given as text.

    Raises:
        ConfigError: names `where` it stood and what it wants.
    """
    also = meta["also"]
    try:
        values = [also[text] if text in also else meta["parse"](text) for text in texts]
        if len(values) != 1 and not meta["many"]:
            _refuse("one value")
    except ValueError as error:
        got = "" if is_secret else f", got {printable(', '.join(texts)) or 'nothing'}"
        raise ConfigError(f"{where}: {error}{''.join(f', or {w}' for w in also)}{got}") from None
    return values if meta["many"] else values[0]


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
        command = self.command and self.command.split()[0]  # what follows may hold a secret
        kinds = {"env": self.env, "file": self.file, "command": command}
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

    def serves(self, model: str) -> bool:
        return matches(self.models, model)


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

    def may_use(self, model: str) -> bool:
        return matches(self.models, model)


RETRY_KINDS = ("safe", "cautious", "never")


@dataclass
class ModelRule:
    """What holds for the models that a glob names."""

    name: str = ""
    retry: str | None = setting(None, one_of(*RETRY_KINDS), "", "kind of call, see Retries")
    fallback: list[str] = setting([], str, "name",
        "models or upstreams to ask instead while this one fails, in turn")
    price: str | None = setting(None, parse_price, "USD",
        "IN/OUT or IN/OUT/CACHED_IN per million tokens")


@dataclass
class Settings:
    """Every setting once. `given` holds those that were set by hand."""

    upstream: str = setting("http://127.0.0.1:8080", parse_url, "URL", live=False, text=
        "what to call; a path prefix is kept; 'mock:' starts an embedded stand-in provider")
    host: str = setting("127.0.0.1", parse_host, "address", "listen address", live=False)
    port: int = setting(4000, parse_port, "", "listen port; 0 picks one and prints it", live=False)
    timeout: float | str = setting(30.0, parse_seconds, "s", also={"auto": "auto"}, text=
        "silence of the upstream, before the first byte or between two, that ends an attempt; "
        "auto: twice the learned p99, between 1 and 30")
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
    slot_affinity: str = setting("off", one_of("on", "off"), "", text=
        "on: name the llama.cpp slot that last held the longest beginning of a conversation; "
        "the server finds it as well by itself")
    rpm: int | None = setting(None, parse_count, "requests", also=NONE, text=
        "requests a minute to an upstream")
    tpm: int | None = setting(None, parse_count, "tokens", also=NONE, text=
        "tokens a minute to an upstream, prompt and output")
    queue_size: int = setting(1000, parse_count_or_zero, "calls", "calls that may wait")
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
        "MODEL=IN/OUT or MODEL=IN/OUT/CACHED_IN, USD per million tokens; globs")
    prices: str | None = setting(None, str, "path", also=NONE, text=
        "LiteLLM's model_prices_and_context_window.json; price goes first")
    max_body: int = setting(64 * 2**20, parse_size, "bytes", "larger requests get 413")
    allow_host: list[str] = setting([], str, "name", text=
        "further Host names accepted on loopback (host.docker.internal)")
    allow_origin: list[str] = setting([], parse_origin, "origin", text=
        "browser origins that may call (https://app.example)")
    keepalive: float | None = setting(None, parse_seconds, "s", also={"off": None}, text=
        "SSE comments to a streaming caller that still waits; later errors then come in-band")
    state: str = setting("$XDG_STATE_HOME/llmproxy/llmproxy.db", parse_text, "path", live=False,
        text="the ledger, an SQLite file; none keeps nothing")
    log_bodies: str = setting("off", one_of("on", "off"), "", text=
        "on: the ledger keeps prompts and answers too, with what looks like a key struck out")
    retention: float = setting(90.0, parse_days, "days", "ledger rows are kept; 0: for ever")
    live: str = setting("auto", one_of("auto", "on", "off"), "", live=False, text=
        "the live table; auto: on a terminal")
    log: str = setting("text", one_of("text", "json", "off"), "", "one line a call on stderr")
    pid_file: str | None = setting(None, parse_text, "path", also=NONE, live=False, text=
        "holds the process's number while it runs")
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

    def assign(self, name: str, texts: list[str], where: str) -> None:
        """Parse and set one setting.

        Raises:
            ConfigError: names `where` it stood and what it wants; nothing was changed.
        """
        is_secret = name in ("admin_key", "upstream")  # a URL may hold a password
        setattr(self, name, parse_setting(SETTINGS[name].metadata, texts, where, is_secret))
        self.given[name] = where

    def shown(self) -> dict[str, Any]:
        """All settings by their flag name, secrets struck out, ready for JSON."""
        values = {flag_name(name): getattr(self, name) for name in SETTINGS}
        if self.admin_key:
            values["admin-key"] = "***"
        return values

    def changed(self, texts: Mapping[str, Any], where: str) -> Settings:
        """A copy in which live settings are as given, as one would type or write them.

        Raises:
            ConfigError: one is unknown, not live or cannot be used.
        """
        copy = dataclasses.replace(self, given=dict(self.given))
        for flag, value in texts.items():
            name = flag.replace("-", "_")
            if name not in SETTINGS:
                raise ConfigError(f"{where}: {unknown_name(flag, map(flag_name, SETTINGS))}")
            if not SETTINGS[name].metadata["live"]:
                why = "is not live: set it in the file or by flag and restart the daemon"
                raise ConfigError(f"{where}: {flag_name(name)} {why}")
            texts_ = [] if value is None and SETTINGS[name].metadata["many"] else typed(value)
            copy.assign(name, texts_, f"{where}: {flag_name(name)}")
            copy.given[name] = where
        return copy

    def rule_of(self, model: str) -> ModelRule:
        for rule in self.models:
            if fnmatch.fnmatchcase(model, rule.name):
                return rule
        return ModelRule()


def fields_of(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(kind) if f.metadata}


SETTINGS = fields_of(Settings)


def flag_name(name: str) -> str:
    return name.replace("_", "-")


def typed(value: Any) -> list[str]:
    """A value of JSON or TOML, as its setting is given as text."""
    values = value if isinstance(value, list) else [value]
    words = {None: "none", True: "on", False: "off"}
    return [words[v] if v is None or isinstance(v, bool) else str(v) for v in values]


def writable(name: str, value: Any) -> Any:
    """A setting's value as the file holds it; None where it is the default."""
    item = SETTINGS[name]
    default = [] if item.metadata["many"] else item.default
    if value == default:
        return None
    if value is None:
        return next(word for word, v in item.metadata["also"].items() if v is None)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def default_text(item: dataclasses.Field[Any]) -> str:
    """A setting's default as one would type it."""
    default = [] if item.metadata["many"] else item.default
    if not default:
        words = [word for word, value in item.metadata["also"].items() if value is None]
        return words[0] if words else "none"
    if isinstance(default, int) and default >= 2**20:
        return f"{default >> 20}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


def unknown_name(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), list(known), 1)
    return f"unknown name {name!r}" + (f"; did you mean {near[0]}?" if near else "")


def default_config_path(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME", "~")).expanduser() / ".config")
    return Path(base) / "llmproxy" / "config.toml"


def load_settings(
    flags: Mapping[str, list[str]], env: Mapping[str, str], path: Path | None
) -> Settings:
    """Merge defaults < TOML file < environment < flags.

    Args:
        path: the file that was asked for; without one the default file is read if it is there.

    Raises:
        ConfigError: one line that names the flag, or the file, line and key.
    """
    settings = Settings()
    settings.path = path or default_config_path(env)
    settings.again = lambda: load_settings(flags, env, path)
    file = _File(settings, settings.path)
    file.load(is_optional=path is None)
    for name, item in SETTINGS.items():
        variable = f"LLMPROXY_{name.upper()}"
        if variable in env:
            text = env[variable]
            texts = [t for t in text.split(",") if t] if item.metadata["many"] else [text]
            settings.assign(name, texts, variable)
    for name, texts in flags.items():
        last = texts if SETTINGS[name].metadata["many"] else texts[-1:]
        settings.assign(name, last, f"--{flag_name(name)}")
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
        try:
            if self._path.exists() and not self._path.is_file():
                raise ConfigError(f"{self._path}: is no file")  # a pipe would hold everybody up
            text = self._path.read_text("utf-8-sig")
            self._lines, data = text.splitlines() or [""], tomllib.loads(text)
        except OSError as error:
            if is_optional and isinstance(error, FileNotFoundError):
                return
            why = error.strerror or error
            raise ConfigError(f"{self._path}: cannot be read: {why}") from None
        except (ValueError, RecursionError) as error:
            why = printable(str(error)) or "nested too deeply"
            raise ConfigError(f"{self._path}: not valid TOML: {why}") from None
        self.names_upstream = "upstream" in data
        for key, value in data.items():
            name = key.replace("-", "_")
            if name in self.TABLES and (name != "upstream" or isinstance(value, dict)):
                self._load_tables(name, key, value)
            elif name in SETTINGS:
                self._settings.assign(name, self._texts(value, key), self.where(key))
            else:
                known = [*map(flag_name, SETTINGS), *map(flag_name, self.TABLES)]
                raise ConfigError(f"{self.where(key)}: {unknown_name(key, known)}")

    def _load_tables(self, name: str, key: str, value: Any) -> None:
        settings = self._settings
        if name == "upstream_key":
            settings.keys = self._keys(value, key)
            return
        if not isinstance(value, dict):
            raise ConfigError(f'{self.where(key)}: wants tables like [{name}."NAME"]')
        for n in value if name != "model" else ():
            if not re.fullmatch(r"[\w.-]{1,64}", n, re.ASCII):
                where = self.where(f"{key}.{n}")
                raise ConfigError(f"{where}: wants a name of letters, digits, - _ and .")
        rules = [self._rule(self.TABLES[name], f"{key}.{n}", n, t) for n, t in value.items()]
        setattr(settings, f"{name}s", rules)
        for rule in rules:
            needed = {"client": "key_sha256", "upstream": "url"}.get(name)
            if needed and not getattr(rule, needed):
                raise ConfigError(f"{self.where(f'{key}.{rule.name}')}: has no {needed}")

    def _rule(self, kind: type[Any], table: str, name: str, value: Any, nth: int = 0) -> Any:
        """One table as an object of `kind`."""
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where(table)}: wants a table like [{table}]")
        rule, fields = kind(), fields_of(kind)
        if hasattr(rule, "name"):
            rule.name = name
        for key, texts in value.items():
            where, field_name = self.where(key, table, nth), key.replace("-", "_")
            if kind is UpstreamRule and field_name == "upstream_key":
                rule.keys = self._keys(texts, f"{table}.{key}")
            elif field_name in fields:
                meta = fields[field_name].metadata
                found = self._texts(texts, key, table, nth)
                is_secret = kind is KeyRule or field_name in ("url", "key_sha256")
                setattr(rule, field_name, parse_setting(meta, found, where, is_secret))
            else:
                known = [*fields, *(["upstream_key"] if kind is UpstreamRule else [])]
                raise ConfigError(f"{where}: {unknown_name(key, known)}")
        return rule

    def _keys(self, value: Any, table: str) -> list[KeyRule]:
        if not isinstance(value, list):
            raise ConfigError(f"{self.where(table)}: wants tables like [[{table}]]")
        rules = [self._rule(KeyRule, table, "", item, nth) for nth, item in enumerate(value)]
        for nth, rule in enumerate(rules):
            if sum(source is not None for source in (rule.env, rule.file, rule.command)) != 1:
                where = self.where(table, nth=nth)
                raise ConfigError(f"{where}: wants exactly one of env, file, command")
        return rules

    def _texts(self, value: Any, key: str, table: str = "", nth: int = 0) -> list[str]:
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, (str, int, float)) for v in values):
            where = self.where(key, table, nth)
            raise ConfigError(f"{where}: wants a string, a number or a list of them")
        return [("on" if v else "off") if isinstance(v, bool) else str(v) for v in values]

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

    Raises:
        ConfigError: it is not there; never quotes what was found instead.
    """
    why = "is empty"
    try:
        if rule.env is not None:
            secret, why = env.get(rule.env, ""), "is not set"
        elif rule.file is not None:
            secret = Path(rule.file).expanduser().read_text("utf-8")
        else:
            words = shlex.split(rule.command or "")
            found = subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=30)
            secret = found.stdout.decode()
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        why = _why_unreadable(error)
        raise ConfigError(f"upstream_key: {printable(rule.source)}: {why}") from None
    secret = secret.strip()
    if not secret or not secret.isprintable() or not secret.isascii():
        why = why if not secret else "is no key"
        raise ConfigError(f"upstream_key: {printable(rule.source)} {why}")
    return secret


def _why_unreadable(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"ended with {error.returncode}"
    return str(getattr(error, "strerror", None) or type(error).__name__)


@contextlib.contextmanager
def only_one(path: Path, waits: bool = True) -> Iterator[None]:
    """Let one process at a time read and replace a file, where the system has such locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    try:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                raise ConfigError(f"{path}: another process is changing it") from None
        yield
    finally:
        os.close(handle)


def text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {_why_unreadable(error)}") from None


def _first_table(lines: list[str]) -> int:
    """Where the first table begins; a line of an array may look like one."""
    for end, line in enumerate(lines):
        if line.lstrip().startswith("["):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                tomllib.loads("".join(lines[:end]))
                return end
    return len(lines)


def _span(lines: list[str], start: int) -> tuple[int, int]:
    """The lines of a setting that begins at one of them: an array may have several."""
    for stop in range(start + 1, len(lines) + 1):
        with contextlib.suppress(tomllib.TOMLDecodeError):
            tomllib.loads("".join(lines[start:stop]))
            return start, stop
    return start, start + 1


def with_settings(text: str, values: Mapping[str, Any]) -> str:
    """The file with top-level settings as given; None takes one out.

    Lines of those that stand there are replaced, new ones stand before the first table; all else
    stays as it is. Where a setting is written in some other way, the file is written anew from
    its data: order stays, comments do not.
    """
    wanted = tomllib.loads(text)
    written = {key.replace("-", "_"): key for key in wanted}
    for name, value in values.items():
        key = written.get(name, name)
        wanted.pop(key, None)
        if value is not None:
            wanted[key] = value
    lines = text.splitlines(keepends=True)
    end = _first_table(lines)
    head, rest = lines[:end], lines[end:]
    while rest and head and not head[-1].strip():
        rest.insert(0, head.pop())
    for name, value in values.items():
        key = written.get(name, name)
        found = [n for n, line in enumerate(head) if re.match(rf"\s*{re.escape(key)}\s*=", line)]
        start, stop = _span(head, found[0]) if found else (len(head), len(head))
        if value is None:
            del head[start:stop]
            continue
        line = tomli_w.dumps({key: value})
        if found:
            comment = re.search(r"\s+#[^\"']*$", head[start]) if stop == start + 1 else None
            head[start:stop] = [line.rstrip("\n") + (comment[0] if comment else "\n")]
        else:
            head += ([] if not head or head[-1].endswith("\n") else ["\n"]) + [line]
    changed = "".join([*head, *rest])
    if "\r\n" in text:
        changed = changed.replace("\r\n", "\n").replace("\n", "\r\n")
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(changed) == wanted:
            return changed
    return tomli_w.dumps(wanted)


def with_client(text: str, name: str, key_sha256: str) -> str:
    """The file with one more client at its end; written anew where that does not fit in."""
    table = {"client": {name: {"key_sha256": key_sha256}}}
    wanted = tomllib.loads(text)
    wanted.setdefault("client", {})[name] = table["client"][name]
    longer = f"{text.rstrip()}\n\n{tomli_w.dumps(table)}".lstrip()
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(longer) == wanted:
            return longer
    return tomli_w.dumps(wanted)


def without_client(text: str, name: str) -> str:
    """The file without a client's tables.

    The lines from its header to the next header go, the rest stays as it is. Where the client
    stands in another form (inline, or with dotted keys), the file is written anew from its data:
    order stays, comments do not.
    """
    wanted = tomllib.loads(text)
    del wanted["client"][name]
    if not wanted["client"]:
        del wanted["client"]
    kept, is_inside = [], False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                is_inside = name in tomllib.loads(line).get("client", {})
        if not is_inside:
            kept.append(line)
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if tomllib.loads("".join(kept)) == wanted:
            return "".join(kept)
    return tomli_w.dumps(wanted)


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
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


###############################################################################
# Flow control
###############################################################################
# Rule: no HTTP, no logging, no sockets; an injected clock. Whatever is taken here is given back
# exactly once, whichever way a call ends, cancellation included.


@dataclass(slots=True)
class _Spent:
    amount: int
    back_at: float


class Bucket:
    """Requests or tokens a minute.

    Strategy: no span of 60 s may carry more than `limit`, whenever in a call's life the upstream
    counts it. So what a call takes is held while it runs, and once it is surely counted it comes
    back 60 s later. (A bucket that starts full and refills evenly lets twice as much through in
    the first minute.) An amount larger than the whole waits for an untouched bucket, then goes.
    """

    def __init__(self, limit: int, clock: Clock = time.monotonic) -> None:
        self.limit = limit
        self.held = 0
        self.bias = 1.0  # what calls used of late, for each token that they had reserved
        self._clock = clock
        self._spent: deque[_Spent] = deque()  # the oldest first
        self._spent_sum = 0
        self._others = _Spent(0, 0.0)  # used by other programs, as the upstream's headers tell

    def __repr__(self) -> str:
        return f"<Bucket {self.used}/{self.limit}, {self.held} held>"

    @classmethod
    def of(cls, limit: int | None, clock: Clock) -> Bucket | None:
        return cls(limit, clock) if limit else None

    @property
    def used(self) -> int:
        now = self._clock()
        while self._spent and self._spent[0].back_at <= now:
            self._spent_sum -= self._spent.popleft().amount
        others = self._others.amount if self._others.back_at > now else 0
        return math.ceil(self.held * max(1.0, self.bias)) + self._spent_sum + others

    def fits(self, amount: int) -> bool:
        used = self.used
        return used + amount * max(1.0, self.bias) <= self.limit or used <= 0

    def spend(self, held: int, amount: int) -> _Spent:
        """Of what was held, the upstream has counted `amount` by now."""
        self.held -= held
        spent = _Spent(amount, self._clock() + WINDOW_S)
        self._spent.append(spent)
        self._spent_sum += amount
        return spent

    def compare(self, reserved: int, used: int) -> None:
        """Learn from a settled call how far the estimates of those in flight may be off."""
        if reserved:
            ratio = min(max(used / reserved, 0.5), 2.0)  # one odd report shall not stop the rest
            self.bias = ratio if self.bias == 1.0 else self.bias + 0.3 * (ratio - self.bias)

    def correct(self, spent: _Spent, amount: int) -> None:
        if self.used >= 0 and spent.back_at > self._clock():
            self._spent_sum += amount - spent.amount
            spent.amount = amount

    def heard(self, remaining: int, after_s: float) -> None:
        """The upstream says what is left for `after_s`: what we did not use, others did."""
        self._others.amount = 0
        back_at = self._clock() + min(after_s, 2 * WINDOW_S)
        self._others = _Spent(max(0, self.limit - self.used - remaining), back_at)

    def returns(self) -> list[tuple[float, int]]:
        """When how much comes back, the soonest first; without what is held."""
        if self.used <= self.held:
            return []
        others = [self._others] if self._others.back_at > self._clock() else []
        return sorted((s.back_at, s.amount) for s in [*self._spent, *others])

    def ready_at(self, amount: int) -> float:
        """When `amount` fits if nothing further is taken; inf where running calls decide."""
        need = self.used + min(amount * max(1.0, self.bias), self.limit) - self.limit
        if need <= 0:
            return self._clock()
        for at, back in self.returns():
            need -= back
            if need <= 0:
                return at
        return math.inf


def rebucket(bucket: Bucket | None, limit: int | None, clock: Clock) -> Bucket | None:
    """A bucket of another limit; what the old one has counted stays."""
    if limit is None or bucket is None:
        return Bucket.of(limit, clock)
    bucket.limit = limit
    return bucket


def shown_bucket(bucket: Bucket | None) -> dict[str, int] | None:
    return None if bucket is None else {"used": bucket.used, "limit": bucket.limit}


class Reservation:
    """One call's part of some buckets: a request and its tokens. Settled exactly once."""

    def __init__(
        self, rpms: list[Bucket], tpms: list[Bucket], prompt_tokens: int, output_tokens: int
    ) -> None:
        self._rpms, self._tpms = rpms, tpms
        self._prompt, self._output = prompt_tokens, output_tokens
        self._counted: list[_Spent] | None = None
        self._is_over = False
        for bucket in rpms:
            bucket.held += 1
        for bucket in tpms:
            bucket.held += prompt_tokens + output_tokens

    def begin(self) -> None:
        """The answer begins: by now the upstream has counted the request and its prompt."""
        if self._counted is None and not self._is_over:
            for bucket in self._rpms:
                bucket.spend(1, 1)
            self._counted = [bucket.spend(self._prompt, self._prompt) for bucket in self._tpms]

    def settle(self, prompt_tokens: int = 0, output_tokens: int = 0, *, requests: int = 1) -> None:
        """What it really took; the rest is given back. `requests`: 0 where none arrived."""
        if self._is_over:
            return
        self._is_over = True
        for bucket in self._rpms if self._counted is None else ():
            bucket.spend(1, requests)
        for n, bucket in enumerate(self._tpms):
            if prompt_tokens or output_tokens:
                bucket.compare(self._prompt + self._output, prompt_tokens + output_tokens)
            if self._counted is None:
                bucket.spend(self._prompt + self._output, prompt_tokens + output_tokens)
            else:
                bucket.correct(self._counted[n], prompt_tokens)
                bucket.spend(self._output, output_tokens)


REFUSALS = ("401", "403")


@dataclass(slots=True)
class Pause:
    """Why and until when a key is not used for a model. Afterwards it is tried out gently."""

    reason: str
    since: float
    until: float = 0.0
    strikes: int = 0
    room: int = 1  # calls that may try it out at once; one more with each that goes well
    running: int = 0


class Key:
    """A provider key, or the callers' own where there is no pool of them."""

    def __init__(
        self, name: str, secret: str = "", header: str | None = None, *,
        rpm: Bucket | None = None, tpm: Bucket | None = None, clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self.name, self.secret, self.header, self.rpm, self.tpm = name, secret, header, rpm, tpm
        self.running = self.calls = 0
        self.doubts = 0  # 401 and 403 in a row
        self.pauses: dict[str | None, Pause] = {}  # by model; None: for all models
        self._clock = clock

    def __repr__(self) -> str:  # without the secret
        return f"<Key {self.name} running={self.running} pauses={len(self.pauses)}>"

    def shown(self) -> dict[str, Any]:
        now = self._clock()
        pauses = [(p.until - now, p.reason, m) for m, p in self.pauses.items() if p.until > now]
        state = "ok"
        if pauses:
            wait_s, reason, model = max(pauses)
            state = f"{reason}{f' for {printable(model)}' if model else ''}, {wait_s:.0f} s"
        return {
            "name": self.name, "state": state, "running": self.running, "calls": self.calls,
            "rpm": shown_bucket(self.rpm), "tpm": shown_bucket(self.tpm),
        }  # fmt: skip

    @property
    def is_free(self) -> bool:
        return all(pause.until <= self._clock() for pause in self.pauses.values())

    @property
    def load(self) -> tuple[int, float, int]:
        shares = [b.used / b.limit for b in (self.rpm, self.tpm) if b is not None]
        return self.running, max(shares, default=0.0), self.calls

    def active(self, model: str) -> list[Pause]:
        return [p for p in map(self.pauses.get, (None, model)) if p]

    def free_at(self, model: str) -> float:
        """0: now. inf: when a call that tries it out has been answered."""
        free_at = 0.0
        for pause in self.active(model):
            if pause.until > self._clock():
                free_at = max(free_at, pause.until)
            elif pause.running >= pause.room:
                free_at = math.inf
        return free_at

    def fits(self, tokens: int) -> bool:
        return (self.rpm is None or self.rpm.fits(1)) and (
            self.tpm is None or self.tpm.fits(tokens)
        )

    def refusal(self, model: str) -> str | None:
        """401 or 403, where that is why the key is not used."""
        now = self._clock()
        refusals = (p.reason for p in self.active(model) if p.until > now and p.reason in REFUSALS)
        return next(refusals, None)


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
    refused_by: Key | None = None  # the upstream's 403 may be for the call, not the key

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Permit:
    """What an attempt holds: a slot, its weight, a key, a reservation. `leave` gives it back."""

    __slots__ = (
        "_gate", "_is_settled", "_pauses", "demand", "granted_at", "key", "places", "reservation",
        "was_sent", "weight", "work",
    )  # fmt: skip

    def __init__(self, gate: Gate, demand: Demand, weight: int, key: Key, now: float) -> None:
        self._gate, self.demand, self.weight, self.key = gate, demand, weight, key
        self.granted_at = now
        self.places = max(1, min(demand.places, gate.slots))
        self.work = 0.0  # what it came to, for the gate that looks for its best level
        self._is_settled = self.was_sent = False
        self._pauses = key.active(demand.model) if key.pauses else ()
        for pause in self._pauses:
            pause.running += 1
        self.reservation: Reservation | None = None
        if gate.rpm or gate.tpm or key.rpm or key.tpm:
            rpms = [b for b in (gate.rpm, key.rpm) if b is not None]
            tpms = [b for b in (gate.tpm, key.tpm) if b is not None]
            self.reservation = Reservation(rpms, tpms, demand.prompt_tokens, demand.output_tokens)
        key.running += 1
        key.calls += 1

    def begin(self) -> None:
        """The answer begins, so the key is welcome."""
        self.key.doubts = 0
        if self.reservation is not None:
            self.reservation.begin()
        for pause in self._pauses:
            pause.room, pause.strikes = pause.room + 1, 0
        if self._pauses:
            self._gate.recover(self.key)

    def strike(self, reason: str, wait_s: float | None) -> None:
        gate = self._gate
        if gate.adaptive is not None and reason == "429":
            gate.slots = gate.adaptive.overloaded()
        gate.strike(self, reason, wait_s)

    def refuse(self, status: str) -> bool:
        """The upstream answered 401 or 403; returns whether it is the key that it refuses.

        A 403 may be for the call: where a second key gets one for the same call, or the only key
        gets its first few, the keys stay.
        """
        key, model = self.key, self.demand.model
        key.doubts += 1
        if status == "403" and self.demand.refused_by is not None:
            for other in (self.demand.refused_by, key):
                other.pauses.pop(model, None)
            return False
        if status == "403" and len(self._gate.pool) < 2 and key.doubts < 3:
            return False
        self.demand.refused_by = key
        self.strike(status, REFUSED_KEY_S)
        return True

    def heard(self, kind: str, remaining: int, after_s: float) -> None:
        """The upstream says what is left of this key's limit, for this model."""
        gate, key = self._gate, self.key
        bucket = key.rpm if kind == "rpm" else key.tpm
        if bucket is None and len(gate.pool) < 2:
            bucket = gate.rpm if kind == "rpm" else gate.tpm
        if bucket is not None and after_s > 0 and len(gate.accounts) < 2:
            bucket.heard(remaining, after_s)

    def again(self) -> None:
        """The same call has been sent once more under this permit."""
        for bucket in (self._gate.rpm, self.key.rpm):
            if bucket is not None:
                bucket.spend(0, 1)

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        self.work = Adaptive.work(prompt_tokens, output_tokens)
        self._gate.settle(self.demand, prompt_tokens + output_tokens)
        if self.reservation is not None:
            self.reservation.settle(prompt_tokens, output_tokens)

    def leave(self) -> None:
        """Give all back, once; where nothing was settled, the call has used no tokens."""
        if not self._is_settled:
            self._gate.refund(self.demand)
        if self.reservation is not None:
            self.reservation.settle(requests=int(self.was_sent))
        for pause in self._pauses:
            pause.running -= 1
        self.key.running -= 1
        self._gate.leave(self)


@dataclass(slots=True, eq=False)
class _Waiter:
    future: asyncio.Future[Permit]
    start_tag: float
    order: int
    demand: Demand
    entered_at: float
    limited_s: float  # the gate's total when it came
    chances: int
    passed: int = 0
    go_at: float = 0.0  # as forecast

    @property
    def place(self) -> tuple[float, int]:
        return self.start_tag, self.order


class Gate:
    """Weighted semaphore, token buckets and keys behind one bounded, fair queue.

    A call takes one of `slots` (or as many as its `places`) and `weight` of `capacity`; one heavier
    than the whole is clamped to it and runs alone. It takes its part of `rpm` and `tpm`, and the
    least loaded key of `pool`. Where there is no pool it goes with its caller's own key, which is
    known here by the client's name.

    Strategy: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). A flow is one client at
    one priority. A call's start tag is the later of the virtual time and its flow's finish tag;
    the flow's finish tag then grows by tokens / share, corrected when the real usage is known.
    The lowest start tag goes next, so a batch of 500 delays another client's single call by about
    one call, and a low share still gets its part. A head that needs more than is free may be
    passed by lighter calls MAX_PASSED times; one whose key and model the upstream holds back is
    passed freely.
    """

    SHARES: ClassVar = {"high": 8.0, "normal": 1.0, "low": 1 / 8}

    def __init__(
        self, slots: int, capacity: int, clock: Clock = time.monotonic, *,
        rpm: Bucket | None = None, tpm: Bucket | None = None, pool: Iterable[Key] = (),
    ) -> None:  # fmt: skip
        self.slots, self.capacity, self.rpm, self.tpm = slots, capacity, rpm, tpm
        self.pool = list(pool)
        self.running = self.taken = self.weight = self.queued_bytes = 0
        self.permits: set[Permit] = set()
        self.is_paused = False  # by the operator: nobody goes
        self.adaptive: Adaptive | None = None
        self.service_s = 1.0  # running mean of how long a permit is held
        self.used_share = 1.0  # and of what is used of the tokens that are reserved
        self.accounts: set[tuple[str, str]] = set()  # client and model; two are as good as many
        self._own = Key("caller's own", clock=clock)
        self._held_back: dict[str, Key] = {}  # clients whose own key is paused for some model
        self._queue: list[_Waiter] = []  # by place
        self._order = 0
        self._virtual = 0.0
        self._finish: dict[tuple[str, str], float] = {}
        self._clock = clock
        self._limited_at: float | None = None  # since when buckets or pauses hold the queue up
        self._limited_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._promised: deque[_Waiter] = deque(maxlen=1000)  # rejected, told when to come again
        self._forecast: Forecast | None = None

    def __repr__(self) -> str:
        return (
            f"<Gate {self.running}/{self.slots} calls, {self.weight}/{self.capacity} weight, "
            f"{len(self._queue)} queued>"
        )

    @property
    def queued(self) -> int:
        return len(self._queue)

    def resize(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.dispatch()

    def limit(self, rpm: int | None, tpm: int | None) -> None:
        """Change the buckets; what they have counted stays."""
        self.rpm = rebucket(self.rpm, rpm, self._clock)
        self.tpm = rebucket(self.tpm, tpm, self._clock)
        self.dispatch()

    def pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.dispatch()

    async def enter(
        self,
        demand: Demand,
        timing: Timing | None = None,
        *,
        queue_size: int = 1000,
        timeout_s: float = 60.0,
        chances: int = 0,
    ) -> Permit:
        """Wait for a turn; the wait is added to `timing`.

        `chances`: of a call that comes back from its backoff, how many further 429 for its key and
        model it may wait out. It goes before those that never ran.

        Raises:
            ProxyError: queue_full, queue_timeout, upstream_key_refused, or what `reject` passes;
                nothing is held.
            CancelledError: the place in the queue, or the permit just granted, is given back.
        """
        if (permit := self.enter_now(demand)) is not None:
            return permit
        timing = timing or Timing()
        waiter = self._enqueue(demand, timing, queue_size, timeout_s, chances)
        timeout_s += WINDOW_S * self._is_giant(demand)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, waiter, timeout_s)
        self.dispatch()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter in self._queue:
                self._remove(waiter)
                self._refund(waiter)
                self.dispatch()  # it may have been the head that held lighter ones back
            elif waiter.future.done() and not waiter.future.cancelled():
                if waiter.future.exception() is None:
                    waiter.future.result().leave()
            raise
        finally:
            timer.cancel()
            limited_s = self._limited_total() - waiter.limited_s
            timing.limit_s += limited_s
            timing.queue_s += self._clock() - waiter.entered_at - limited_s

    def enter_now(self, demand: Demand) -> Permit | None:
        """What `enter` returns, where nobody waits and there is room; else None."""
        if self._queue or self.is_paused or not self._fits(demand):
            return None
        if (key := self._pick(demand)[0]) is None:
            return None
        self._virtual = self._charge(demand)
        return self._grant(demand, key)

    def leave(self, permit: Permit) -> None:
        self.permits.discard(permit)
        if self.adaptive is not None:
            is_full = bool(self._queue) and not self._fits_slots(self._queue[0].demand)
            self.slots = self.adaptive.done(permit.work, is_full)
        self.running -= 1
        self.taken -= permit.places
        self.weight -= permit.weight
        self.service_s += 0.1 * (self._clock() - permit.granted_at - self.service_s)
        self.dispatch()

    def settle(self, demand: Demand, tokens: int) -> None:
        """Charge the flow what its call really used."""
        flow = (demand.client, demand.priority)
        tokens = min(tokens, 20 * max(500, demand.tokens))  # whatever an upstream reports
        if flow in self._finish:
            self._finish[flow] += (tokens - demand.tokens) / self.SHARES[demand.priority]
        self.used_share += 0.1 * (tokens / max(1, demand.tokens) - self.used_share)

    def reject(self, circuit: Circuit, error: Callable[[], ProxyError]) -> None:
        """Fail every waiting call of `circuit`."""
        for waiter in [w for w in self._queue if w.demand.circuit is circuit]:
            self._fail(waiter, error())
        self.dispatch()

    def strike(self, permit: Permit, reason: str, wait_s: float | None) -> None:
        """The upstream refused a key for a model: nobody uses the two until `wait_s` from now.

        Without `wait_s` the pause doubles with every strike. A strike also takes one chance of
        each call that waits for this key and model to be welcome again: the one that tried it out
        has asked for all of them.
        """
        key, demand, now = permit.key, permit.demand, self._clock()
        if not self.pool:
            if len(self._held_back) > MAX_MODELS:
                free = [c for c, k in self._held_back.items() if not k.running and k.is_free]
                for client in free:
                    del self._held_back[client]
            key = self._held_back.setdefault(demand.client, Key(demand.client, clock=self._clock))
        pause = key.pauses.setdefault(demand.model if reason != "401" else None, Pause(reason, now))
        if permit.granted_at >= pause.since or not pause.strikes:
            pause.strikes, pause.since = pause.strikes + 1, now
        if wait_s is None:
            wait_s = BACKOFF_S * 2 ** min(pause.strikes - 1, 2)
            wait_s += random.uniform(0, wait_s)
        pause.reason, pause.room = reason, 1
        pause.until = max(pause.until, now + wait_s + random.uniform(0, BACKOFF_S))
        for waiter in [w for w in self._queue if w.demand.model == demand.model or reason == "401"]:
            if (refusal := self.refusal(waiter.demand)) is not None:
                self._fail(waiter, refusal)
            elif reason == "429" and waiter.chances and waiter.entered_at <= permit.granted_at:
                waiter.chances -= self.free_at(waiter.demand) > now
                if not waiter.chances:
                    why = "the upstream is over its limit"
                    self._fail(waiter, ProxyError("queue_timeout", why))

    def recover(self, key: Key) -> None:
        """A call went well with a key that was held back; once enough have, it is as before."""
        for model in [m for m, p in key.pauses.items() if p.room > min(self.slots, 32)]:
            del key.pauses[model]
        if not key.pauses:
            self._held_back.pop(key.name, None)
        self.dispatch()

    def refusal(self, demand: Demand) -> ProxyError | None:
        """The error where every key of the pool has been refused by the upstream."""
        said = [key.refusal(demand.model) for key in self.pool]
        if not said or None in said:
            return None
        again_s = min(key.free_at(demand.model) for key in self.pool) - self._clock()
        why = f"no key is left: the upstream answered {said[0]} to [[upstream_key]] "
        why += self.pool[0].name + (f" and {len(said) - 1} more" if len(said) > 1 else "")
        return ProxyError("upstream_key_refused", why, retry_after_s=again_s)

    def least_loaded(self, model: str) -> Key:
        """A key for a call that needs no permit."""
        keys = [k for k in self.pool if not k.free_at(model)] or self.pool or [self._own]
        return min(keys, key=lambda key: key.load)

    def waiting(self) -> list[tuple[str, str, int, float]]:
        """Client, priority, number of calls and seconds until the last of them goes."""
        self._look_ahead()
        flows: dict[tuple[str, str], tuple[int, float]] = {}
        for waiter in self._queue:
            flow = (waiter.demand.client, waiter.demand.priority)
            flows[flow] = (flows.get(flow, (0, 0.0))[0] + 1, waiter.go_at - self._clock())
        return [(*flow, *found) for flow, found in flows.items()]

    def dispatch(self) -> None:
        """Let go who may: whenever anything has changed, or time has brought something back."""
        while (found := self._next()) is not None:
            waiter, key = found
            self._remove(waiter)
            if not waiter.future.done():  # else cancelled, its task has not run yet
                self._virtual = max(self._virtual, waiter.start_tag)
                waiter.future.set_result(self._grant(waiter.demand, key))
        if self._limited_at is not None:
            self._wake_later()

    def free_at(self, demand: Demand) -> float:
        """When the upstream takes calls like this again; 0: it does, or it has to be tried."""
        keys = self.pool or [self._held_back.get(demand.client, self._own)]
        free_at = min(key.free_at(demand.model) for key in keys)
        return 0.0 if free_at == math.inf else free_at

    def _fits(self, demand: Demand) -> bool:
        return (
            self._fits_slots(demand)
            and self._fits_weight(demand)
            and (self.rpm is None or self.rpm.fits(1))
            and (self.tpm is None or self.tpm.fits(demand.tokens))
        )

    def _is_giant(self, demand: Demand) -> bool:
        """Larger than a whole bucket: it waits for an untouched one, so nobody may pass it."""
        limits = [key.tpm.limit if key.tpm is not None else math.inf for key in self.pool]
        limit = self.tpm.limit if self.tpm is not None else math.inf
        return demand.tokens > min(limit, max(limits, default=math.inf))

    def _blocking(self) -> _Waiter | None:
        """A giant that has waited for long, wherever it stands: the others let it go first."""
        if self.tpm is None and not any(key.tpm is not None for key in self.pool):
            return None
        since = self._clock() - WINDOW_S / 2
        waiting = (w for w in self._queue if w.entered_at < since and self._is_giant(w.demand))
        return next(waiting, None)

    def _fits_slots(self, demand: Demand) -> bool:
        return self.taken + max(1, min(demand.places, self.slots)) <= self.slots

    def _fits_weight(self, demand: Demand) -> bool:
        return self.weight + min(demand.weight, self.capacity) <= self.capacity

    def _pick(self, demand: Demand) -> tuple[Key | None, bool]:
        """The key that a call would go with, and whether none may be used for its model."""
        if not self.pool:
            own = self._held_back.get(demand.client, self._own) if self._held_back else self._own
            return (None, True) if own.pauses and own.free_at(demand.model) else (own, False)
        free = [key for key in self.pool if not key.free_at(demand.model)]
        fitting = [key for key in free if key.fits(demand.tokens)]
        tokens = demand.tokens  # a key whose whole bucket is too small comes last

        def rank(key: Key) -> tuple[bool, tuple[int, float, int]]:
            return key.tpm is not None and tokens > key.tpm.limit, key.load

        return min(fitting, key=rank, default=None), not free

    def _grant(self, demand: Demand, key: Key) -> Permit:
        permit = Permit(self, demand, min(demand.weight, self.capacity), key, self._clock())
        self.running += 1
        self.taken += permit.places
        self.weight += permit.weight
        self.permits.add(permit)
        if len(self.accounts) < 2:
            self.accounts.add(("" if self.pool else demand.client, demand.model))
        return permit

    def _charge(self, demand: Demand) -> float:
        """Charge a call to its flow; returns its start tag."""
        if len(self._finish) > 1024:  # a flow behind the virtual time has no debt to remember
            self._finish = {f: tag for f, tag in self._finish.items() if tag > self._virtual}
        flow = (demand.client, demand.priority)
        start_tag = max(self._virtual, self._finish.get(flow, 0.0))
        self._finish[flow] = start_tag + max(1, demand.tokens) / self.SHARES[demand.priority]
        return start_tag

    def _enqueue(
        self, demand: Demand, timing: Timing, queue_size: int, timeout_s: float, chances: int
    ) -> _Waiter:
        now = self._clock()
        if (refusal := self.refusal(demand)) is not None:
            raise refusal
        self._order += 1
        future: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        limited_s = self._limited_total()
        waiter = _Waiter(future, math.inf, self._order, demand, now, limited_s, chances)
        if (wait_s := self.free_at(demand) - now) > timeout_s:
            why = f"the upstream asks to wait {wait_s:.0f} s, longer than --queue-timeout"
            raise ProxyError("queue_timeout", why, retry_after_s=wait_s)
        full = len(self._queue) >= queue_size + self.slots * bool(chances)
        if full and self._fits(demand) and self._pick(demand)[0] is not None:
            # Where only such wait as the upstream holds back, this one goes at once.
            full = not all(self._pick(w.demand)[1] for w in self._queue)
        if full or self.queued_bytes + demand.size_bytes > QUEUED_BODIES_BYTES:
            what = f"{len(self._queue)} calls" if full else "the bodies that may wait"
            why = f"the queue is full ({what}); raise --queue-size or send fewer calls at once"
            raise ProxyError("queue_full", why, retry_after_s=self._promise(waiter))
        waiter.start_tag = -math.inf if chances else self._charge(demand)
        bisect.insort(self._queue, waiter, key=lambda w: w.place)
        self.queued_bytes += demand.size_bytes
        self._look_ahead(waiter)
        timing.position = self._queue.index(waiter) + 1
        timing.expected_s = max(0.0, waiter.go_at - now)
        return waiter

    def _next(self) -> tuple[_Waiter, Key] | None:
        """The first waiting call that may go, and the key it goes with."""
        head: _Waiter | None = None
        is_limited = False
        fresh: set[tuple[str, str]] | None = None
        blocking = self._blocking()
        queue = self._queue if blocking is None else [blocking]
        for waiter in queue if self.taken < self.slots and not self.is_paused else ():
            key, is_held_back = self._pick(waiter.demand)
            if is_held_back:
                is_limited = True
                continue
            if waiter.chances and key is not None and self._is_trial(key, waiter.demand.model):
                fresh = self._fresh() if fresh is None else fresh
                if (waiter.demand.model, "" if self.pool else waiter.demand.client) in fresh:
                    continue
            head = head or waiter
            if key is not None and self._fits(waiter.demand):
                head.passed += waiter is not head
                return waiter, key
            has_room = self._fits_weight(waiter.demand) and self._fits_slots(waiter.demand)
            is_limited = is_limited or has_room
            if head.passed >= MAX_PASSED or self.weight >= self.capacity:
                break
            if self._is_giant(head.demand):
                break
            if self.rpm is not None and not self.rpm.fits(1):
                break
        self._limited_s = self._limited_total()
        self._limited_at = self._clock() if is_limited else None
        return None

    @staticmethod
    def _is_trial(key: Key, model: str) -> bool:
        return bool(key.pauses) and any(pause.room == 1 for pause in key.active(model))

    def _fresh(self) -> set[tuple[str, str]]:
        """Models, and clients, of calls that may go and have not asked yet.

        They try a key out before those that come back from a 429: the answer is for all of them.
        """
        waiting = [w.demand for w in self._queue if not w.chances]
        return {(d.model, "" if self.pool else d.client) for d in waiting if self._fits(d)}

    def _limited_total(self) -> float:
        since = self._limited_at
        return self._limited_s + (0.0 if since is None else self._clock() - since)

    def _wake_later(self) -> None:
        """When buckets or pauses hold the queue up, time alone lets it go on."""
        now = self._clock()
        keys = self.pool or list(self._held_back.values())
        buckets = [self.rpm, self.tpm, *(b for key in keys for b in (key.rpm, key.tpm))]
        times = [p.until for key in keys for p in key.pauses.values()]
        times += [at for b in buckets if b is not None for at, _ in b.returns()[:1]]
        wait_s = min((at - now for at in times if at > now), default=None)
        if self._timer is not None:
            self._timer.cancel()
        if wait_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_s + 0.001, self.dispatch)

    def _remove(self, waiter: _Waiter) -> None:
        self._queue.remove(waiter)
        self.queued_bytes -= waiter.demand.size_bytes

    def _refund(self, waiter: _Waiter) -> None:
        if not waiter.chances:
            self.refund(waiter.demand)

    def refund(self, demand: Demand) -> None:
        """Its flow has not been served what it was charged for."""
        flow = (demand.client, demand.priority)
        if flow in self._finish:
            self._finish[flow] -= max(1, demand.tokens) / self.SHARES[demand.priority]

    def _fail(self, waiter: _Waiter, error: ProxyError) -> None:
        self._remove(waiter)
        self._refund(waiter)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def _expire(self, waiter: _Waiter, timeout_s: float) -> None:
        if waiter not in self._queue:
            return
        ahead = self._queue.index(waiter)
        self._remove(waiter)
        self._refund(waiter)
        why = f"waited {timeout_s:.0f} s for a turn (--queue-timeout); {ahead} are ahead"
        if self.is_paused:
            why += "; the operator has paused it"
        elif self._limited_total() - waiter.limited_s > timeout_s / 2:
            why += "; rpm, tpm or a pause that the upstream asked for holds the queue up"
        error = ProxyError("queue_timeout", why, retry_after_s=self._promise(waiter))
        if not waiter.future.done():
            waiter.future.set_exception(error)
        self.dispatch()

    def _look_ahead(self, new: _Waiter | None = None) -> None:
        """Forecast everybody's turn, at most 4 times a second, and that of `new`.

        The rejected keep their place in it until the time they were told has come: else all who
        are rejected together would be told the same.
        """
        now = self._clock()
        if self._forecast is None or now - self._forecast.made_at > 0.25:
            self._forecast = Forecast(self, now)
            waiting = [*self._queue, *(w for w in self._promised if w.go_at > now or w is new)]
            for waiter in sorted(waiting, key=lambda w: w.place):
                waiter.go_at = self._forecast.go(waiter.demand)
        elif new is not None and not new.go_at:
            behind = bisect.bisect(self._queue, new.place, key=lambda w: w.place)
            if behind < len(self._queue):
                new.go_at = self._queue[behind].go_at
            else:
                new.go_at = self._forecast.go(new.demand)

    def _promise(self, waiter: _Waiter) -> float:
        """Seconds until a call that is rejected now would have gone."""
        self._promised.append(waiter)
        self._look_ahead(waiter)
        go_at = waiter.go_at
        if waiter.start_tag == math.inf:  # there was no place for it: until there is one
            go_at = max(go_at, min((w.go_at for w in self._queue), default=0.0))
        return max(0.0, go_at - self._clock())


class Forecast:
    """When the calls that wait will go: the gate's future, played forward.

    It supposes that a call holds its permit as long as calls did of late, and uses as large a
    part of the tokens that it reserves.
    """

    def __init__(self, gate: Gate, now: float) -> None:
        self.made_at = now
        self._gate, self._service_s = gate, gate.service_s
        begun = [max(p.granted_at, now - 0.9 * gate.service_s) for p in gate.permits]
        heavy = sum(w.demand.weight for w in gate._queue)
        fitting = gate.capacity * len(gate._queue) // heavy if heavy else gate.slots
        slots = max(1, min(gate.slots, fitting, 10_000))
        free = [now] * max(0, slots - len(begun))
        self._ends = [*free, *(at + gate.service_s for at in sorted(begun)[-slots:])]
        heapq.heapify(self._ends)
        rpms = [[gate.rpm], [key.rpm for key in gate.pool]]
        tpms = [[gate.tpm], [key.tpm for key in gate.pool]]
        self._rpms = [_Future(limits, self, 1.0) for found in rpms if (limits := _limits(found))]
        share = gate.used_share
        self._tpms = [_Future(limits, self, share) for found in tpms if (limits := _limits(found))]

    def go(self, demand: Demand) -> float:
        """When the next call in the queue goes."""
        at = heapq.heappop(self._ends)
        for future in self._rpms:
            at = future.take(1, at)
        for future in self._tpms:
            at = future.take(demand.tokens, at)
        heapq.heappush(self._ends, at + self._service_s)
        return max(at, self._gate.free_at(demand))


def _limits(buckets: list[Bucket | None]) -> list[Bucket]:
    """Nothing where one of them has no limit."""
    return [] if None in buckets else cast("list[Bucket]", buckets)


class _Future:
    """What some buckets of one kind will have free."""

    def __init__(self, buckets: list[Bucket], forecast: Forecast, used_share: float) -> None:
        self._limit = sum(bucket.limit for bucket in buckets)
        self._used_share, self._hold_s = used_share, forecast._service_s + WINDOW_S
        self._taken_at = 0.0
        held = sum(bucket.held for bucket in buckets)
        self._free = self._limit - sum(bucket.used for bucket in buckets) + held * (1 - used_share)
        back = sorted(back for bucket in buckets for back in bucket.returns())
        self._back: deque[tuple[float, float]] = deque(back)
        self._back.append((forecast.made_at + self._hold_s, held * used_share))

    def take(self, amount: int, at: float) -> float:
        """When `amount` fits, no sooner than `at` or what was taken before."""
        at = max(at, self._taken_at)
        need = min(amount, self._limit)
        while self._back and (self._free < need or self._back[0][0] <= at):
            back_at, back = self._back.popleft()
            at, self._free = max(at, back_at), self._free + back
        used = amount * self._used_share
        self._free -= used
        self._back.append((at + self._hold_s, used))
        self._taken_at = at
        return at


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
        self.level = level
        self._clock = clock
        self._rates: dict[int, float] = {}
        self._best = level
        self._is_climbing = True
        self._direction = 1
        self._rest = self._patience = 1  # windows until the next try, and after it
        self._skipped = level  # answers of calls that began at another level
        self._calm = 0  # answers until a 429 is another overload than the last
        self._answers = 0
        self._work = 0.0
        self._began_at = 0.0

    def __repr__(self) -> str:
        return f"<Adaptive {self.level}, best {self._best}>"

    @staticmethod
    def work(prompt_tokens: int, output_tokens: int) -> float:
        """What a call came to, in tokens written; one of a prompt costs a tenth of that."""
        return prompt_tokens / 10 + output_tokens

    def done(self, work: float, is_full: bool) -> int:
        """A call has ended. `is_full`: the level held others back. Returns the level from now."""
        self._calm -= 1
        if not work:  # it came to nothing: that says nothing of the level
            return self.level
        if not is_full:
            self._answers = 0
            return self.level
        if self._skipped > 0:
            self._skipped -= 1
            return self.level
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
            self._calm = self.level
            self._is_climbing = False
            self._rates.clear()
            self._best = max(1, self.level * 3 // 4)
            self._go(self._best)
        return self.level

    def _go(self, level: int) -> None:
        self._skipped = max(level, self.level)
        self.level = level
        self._answers = 0

    def _decide(self, rate: float) -> None:
        level, best = self.level, self._best
        known = self._rates.get(level)
        self._rates[level] = rate if known is None else known + 0.5 * (rate - known)
        self._answers = 0
        most = self._rates[best]
        if level == best:
            self._stay()
            return
        wanted = most * (1 + self.GAIN if level > best else 1 - self.GAIN)
        if self._rates[level] > wanted:
            self._best, self._patience = level, 1
            self._stay()
        else:
            self._rates.pop(level)  # tried afresh next time
            self._is_climbing, self._direction = False, -self._direction
            self._patience = min(2 * self._patience, 8)
            self._rest = self._patience
            self._go(best)

    def _stay(self) -> None:
        """At the best level: measure it once more, or try another."""
        self._rest -= 1
        if not self._is_climbing and self._rest > 0:
            return
        step = self.level // 2 if self._is_climbing else self._direction
        level = min(max(1, self.level + (step or 1)), self.MOST)
        if level == self.level:
            self._direction, self._is_climbing = -self._direction, False
            return
        self._go(level)


class Pulse:
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


class Slots:
    """Which slot of a llama.cpp server holds which conversation, for its prompt cache.

    A conversation is a chain of hashes, one for each message. Only free slots are named: the
    server lets a call wait for the one that it names.
    """

    def __init__(self, count: int) -> None:
        self._held: list[tuple[int, ...]] = [()] * count
        self._taken_at = [0] * count  # by turn; of slots that hold nothing the oldest goes first
        self._free, self._turn = set(range(count)), 0

    def take(self, chain: tuple[int, ...]) -> int | None:
        """The free slot that shares the longest beginning; None where all are busy."""

        def rank(slot: int) -> tuple[int, int]:
            pairs = zip(chain, self._held[slot], strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            return same, -self._taken_at[slot]

        slot = max(self._free, key=rank, default=None)
        if slot is not None:
            self._free.discard(slot)
            self._turn += 1
            self._held[slot], self._taken_at[slot] = chain, self._turn
        return slot

    def give(self, slot: int) -> None:
        self._free.add(slot)


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True, eq=False)
class Attempt:
    """One admitted attempt's entry in its circuit; ends in one of ok, failed, alive, neutral."""

    circuit: Circuit
    epoch: int
    is_trial: bool
    is_over: bool = False
    has_place: bool = True  # of a trial, while it holds others up

    def give_place(self) -> None:
        """Let the next trial through; this one's outcome still counts."""
        if self.is_trial and self.has_place:
            self.has_place = False
            self.circuit._free(self)

    def ok(self) -> None:
        self._end(True)

    def failed(self) -> None:
        self._end(False)

    def alive(self) -> None:
        """A 4xx: no failure; in half-open it proves the upstream alive."""
        self._end(True if self.is_trial else None)

    def neutral(self) -> None:
        """The caller left, or nothing was learned; a trial gives its place back."""
        self._end(None)

    def _end(self, ok: bool | None) -> None:
        if not self.is_over:
            self.is_over = True
            self.circuit._record(self, ok)


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
        self,
        key: tuple[str, str, str],
        settings: Settings,
        clock: Clock = time.monotonic,
        on_move: Callable[[Circuit], None] = lambda circuit: None,
    ) -> None:
        self.key = key
        self.state = State.CLOSED
        self.in_row = 0
        self.opened = asyncio.Event()  # wakes calls in their backoff
        self.is_sick = False  # a health check has failed since it opened
        self.attempt_s: deque[float] = deque(maxlen=100)  # for timeout = auto
        self._settings, self._clock, self._on_move = settings, clock, on_move
        self._recent: deque[bool] = deque(maxlen=self.WINDOW)
        self._trials: deque[bool] = deque(maxlen=self.TRIALS)
        self._trial_runs = False
        self._trial_at = 0.0
        self._epoch = 0

    def __repr__(self) -> str:
        return f"<Circuit {self.key} {self.state.value} in_row={self.in_row}>"

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

    def check(self) -> None:
        """Raise circuit_open if an attempt would be refused right now."""
        if self.state is State.CLOSED:
            return
        wait_s = self.retry_in_s
        if wait_s > 0 or self._trial_runs:
            raise self.error()

    def error(self) -> ProxyError:
        wait_s = math.ceil(self.retry_in_s) or 1
        return ProxyError(
            "circuit_open",
            f"{self.key[0]} keeps failing on {self.what}; next trial in {wait_s} s",
            retry_after_s=self.retry_in_s,
        )

    def admit(self) -> Attempt:
        """Register an attempt.

        Raises:
            ProxyError: circuit_open; no attempt was registered.
        """
        self.check()
        is_trial = self.state is not State.CLOSED
        if is_trial:
            self.state = State.HALF_OPEN
        self._trial_runs = is_trial
        return Attempt(self, self._epoch, is_trial)

    def health(self, is_alive: bool) -> None:
        """Take a free health check's result. One that never failed proves nothing."""
        if self.state is State.CLOSED:
            return
        if not is_alive:
            self.is_sick = True
        elif self.is_sick:
            self.is_sick = False
            self._trial_at = self._clock()

    async def opens_within(self, wait_s: float) -> bool:
        """Wait so long before a further attempt; True, and at once, where the circuit opens."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.opened.wait()
            return True
        return False

    def close(self) -> None:
        """The operator knows that it is well again."""
        if self.state is not State.CLOSED:
            self._recent.clear()
            self._trials.clear()
            self._change(State.CLOSED)

    def timeout_s(self) -> float:
        """Twice the learned p99, in 1..30 s; more only where one of the last 100 needed more."""
        if not self.attempt_s:
            return 30.0
        return max(min(max(2 * percentile(self.attempt_s, 0.99), 1.0), 30.0), *self.attempt_s)

    def _free(self, attempt: Attempt) -> None:
        if attempt.epoch == self._epoch:
            self._trial_runs = False

    def _record(self, attempt: Attempt, ok: bool | None) -> None:
        if attempt.epoch != self._epoch:
            return
        if attempt.is_trial:
            attempt.give_place()
            if ok is not None:
                self._record_trial(ok)
            return
        if ok is None:
            return
        self.in_row = 0 if ok else self.in_row + 1
        self._recent.append(ok)
        half = len(self._recent) == self.WINDOW and sum(self._recent) < self.WINDOW / 2
        if not ok and (self.in_row >= self._settings.breaker_failures or half):
            self._change(State.OPEN, self._settings.breaker_cooldown)

    def _record_trial(self, ok: bool) -> None:
        self._trials.append(ok)
        if not ok:
            self._change(State.OPEN, 2 * self._settings.breaker_cooldown)
        elif sum(self._trials) >= self._settings.breaker_success * len(self._trials):
            self._recent.clear()
            self._trials.clear()
            self._change(State.CLOSED)

    def _change(self, state: State, cooldown_s: float = 0.0) -> None:
        self.state = state
        self._epoch += 1
        self.in_row = 0
        self._trial_runs = self.is_sick = False
        self._trial_at = self._clock() + cooldown_s
        if state is State.OPEN:
            self.opened.set()
            self.opened = asyncio.Event()
        self._on_move(self)


@dataclass(slots=True)
class Head:
    """Status line and headers of an answer, hop-by-hop headers already gone."""

    status: int
    reason: str
    headers: Headers

    @property
    def is_stream(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("text/event-stream")


@dataclass(slots=True)
class Usage:
    """Tokens of one call; `prompt` includes `cached` and `written`."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    written: int = 0  # of the prompt, to a cache
    is_estimated: bool = False


@dataclass(slots=True)
class Timing:
    queue_s: float = 0.0  # for a slot
    limit_s: float = 0.0  # for rpm, tpm, or an upstream that held us back
    retry_s: float = 0.0
    upstream_s: float = 0.0  # to the first byte
    position: int = 0  # in the queue, when it came
    expected_s: float = 0.0  # its wait, as forecast then


NO_USAGE, NO_TIME = Usage(), Timing()


@dataclass(slots=True, eq=False)
class _Follower:
    sink: Callable[[bytes], bool]
    future: asyncio.Future[tuple[int, int]]


class Meter:
    """Counts a running stream's tokens against its task's budget, an event for a token."""

    def __init__(self, task: Budget, prompt_tokens: int) -> None:
        self.task, self.prompt_tokens = task, prompt_tokens
        self.tokens = self.output_tokens = 0
        self.is_cut = False

    def begin(self) -> None:
        """The answer begins: the prompt has been read."""
        self.tokens += self.prompt_tokens
        self.task.spent += self.prompt_tokens

    def is_over(self, chunk: bytes) -> bool:
        tokens = chunk.count(b"\ndata:") + chunk.startswith(b"data:")
        tokens = max(0, tokens - chunk.count(b'"type":"message_') - chunk.count(b"data: [DONE]"))
        self.output_tokens += tokens
        self.tokens += tokens
        self.task.spent += tokens
        self.is_cut = self.task.spent >= self.task.limit
        return self.is_cut


class Flight:
    """One upstream call and everybody who waits for it.

    The call runs in a task of its own, so a caller that hangs up, the first one included, takes
    nothing from the others (golang.org/x/sync/singleflight DoChan has the same rule). Its bytes
    are held once; every caller reads them from the beginning at its own pace.

    Memory: the upstream is read at most FLIGHT_WINDOW_BYTES ahead of the fastest caller. Beyond
    FLIGHT_BYTES an answer is `is_overgrown`: nobody joins it any more, it is not kept, and a
    caller that lags FLIGHT_WINDOW_BYTES behind the fastest one is cut off.
    """

    task: asyncio.Task[None] | None = None
    callers = attempts = 0
    is_sent = False  # an attempt is with the upstream now
    head: Head | None = None
    first = 0  # index of chunks[0]; grows once overgrown
    size_bytes = held_bytes = 0
    read_bytes = 0  # by the fastest caller
    is_done = is_overgrown = False
    has_failed = False  # its stream ended in an error event
    is_complete = False  # may be kept
    error: ProxyError | None = None  # with a head: broke off in mid-answer
    attempt: Attempt | None = None
    sent_at = 0.0
    is_void = False  # a failure that is passed on: costs nothing, is not kept
    choice: Choice | None = None  # who is asked
    first_at = 0.0  # when the first attempt was sent, less its wait until then
    met_open = False  # an open circuit
    outcome = ""  # of the attempt that ends
    has_backed_off = False  # waited for a further attempt, even if it came to none
    permit: Permit | None = None
    reserved: Reservation | None = None  # of its client's own limits
    stake: Stake | None = None  # of the budgets
    meter: Meter | None = None  # of its task
    upstream = fallback = ""  # who answers, and its name where it was not the first choice
    usage = NO_USAGE
    extra = b""  # the usage event that callers do not see
    is_merged = False  # a stream that holds all; each caller is given the form that it asked for
    has_shown = False  # some caller has seen its beginning
    assembly: Assembly | None = None  # of a merged one, for the callers of a plain answer
    on_begin: Callable[[], None] | None = None
    _room: asyncio.Future[None] | None = None

    def __init__(self, key: bytes, leader: Call, loop: asyncio.AbstractEventLoop) -> None:
        self.key, self.leader, self._loop = key, leader, loop
        self.chunks: list[bytes] = []
        self.timing = Timing()
        self._waiters: list[asyncio.Future[None]] = []
        self._followers: list[_Follower] = []

    def __repr__(self) -> str:
        return f"<Flight callers={self.callers} bytes={self.size_bytes} done={self.is_done}>"

    @property
    def end(self) -> int:
        return self.first + len(self.chunks)

    def begin(self, head: Head) -> None:
        """Commit: from here on there is no retry, callers see this answer."""
        self.head = head
        if self.on_begin is not None:
            self.on_begin()

    def push(self, chunk: bytes) -> None:
        """Append a chunk. Callers that keep up get it written here and now, without a wake-up."""
        if not chunk:  # a chunk of no bytes would end a chunked answer
            return
        before = self.size_bytes
        self.chunks.append(chunk)
        self.held_bytes += len(chunk)
        self.size_bytes = before + len(chunk)
        behind = False
        if self.assembly is not None:
            self.assembly.feed(chunk)
        for follower in self._followers:
            if follower.sink(chunk):
                self.read_bytes = self.size_bytes
            else:  # its socket is full: it goes on at its own pace
                behind = True
                self._release(follower, self.end - 1, before)
        if behind:
            self._followers = [f for f in self._followers if not f.future.done()]
        if self.size_bytes > FLIGHT_BYTES:
            self._trim()
        if self._waiters:
            self._wake()

    def rewind(self) -> bool:
        """Forget what came, for a further attempt. False where a caller may have seen some."""
        if self.has_shown or not self.is_merged:
            return False
        self.head = self.assembly = None
        self.chunks = []
        self.first = self.size_bytes = self.held_bytes = self.read_bytes = 0
        self.has_failed = self.is_complete = self.is_overgrown = False
        for follower in self._followers:
            self._release(follower, 0, 0)
        return True

    def finish(self, error: ProxyError | None = None) -> None:
        self.error = error
        self.is_done = True
        for follower in self._followers:
            self._release(follower, self.end, self.size_bytes)
        self._wake()

    def slice_from(self, index: int) -> tuple[bytes, int]:
        """Chunks from `index` on, about SLICE_BYTES of them, and the index behind them.

        Raises:
            CallerGone: they are no longer held; the caller lags too far behind.
        """
        if index < self.first:
            raise CallerGone
        start = stop = index - self.first
        size = 0
        while stop < len(self.chunks) and size < SLICE_BYTES:
            size += len(self.chunks[stop])
            stop += 1
        parts = self.chunks[start:stop]
        return (parts[0] if len(parts) == 1 else b"".join(parts)), self.first + stop

    def tail(self, size_bytes: int) -> bytes:
        """The last bytes that were pushed, at least `size_bytes` of them if there are."""
        if len(self.chunks) == 1:
            return self.chunks[0]
        parts: list[bytes] = []
        for chunk in reversed(self.chunks):
            parts.append(chunk)
            size_bytes -= len(chunk)
            if size_bytes <= 0:
                break
        return b"".join(reversed(parts))

    async def news(self) -> None:
        """Wait until the flight has moved on."""
        future = self._loop.create_future()
        self._waiters.append(future)
        await future

    async def follow(self, sink: Callable[[bytes], bool]) -> tuple[int, int]:
        """Have every further chunk given to `sink` until it refuses one or all is done.

        Returns the index of the first chunk that it has not taken, and the bytes before it.
        """
        follower = _Follower(sink, self._loop.create_future())
        self._followers.append(follower)
        try:
            return await follower.future
        finally:
            if follower in self._followers:
                self._followers.remove(follower)

    @staticmethod
    def _release(follower: _Follower, index: int, size_bytes: int) -> None:
        if not follower.future.done():
            follower.future.set_result((index, size_bytes))

    def has_read(self, read_bytes: int) -> None:
        self.read_bytes = max(self.read_bytes, read_bytes)
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    @property
    def is_ahead(self) -> bool:
        """Whether the upstream has to be held back: even the fastest caller is a window behind."""
        ahead = self.size_bytes - self.read_bytes > FLIGHT_WINDOW_BYTES
        return ahead and (self.callers > 0 or self.is_overgrown)

    async def room(self) -> None:
        """Wait until the upstream may be read on.

        Raises:
            CallerGone: nobody reads and what comes can no longer be kept, or no caller has taken
                a byte for CALLER_S.
        """
        while self.is_ahead:
            if not self.callers:
                raise CallerGone
            self._room = self._loop.create_future()
            try:
                async with asyncio.timeout(CALLER_S):
                    await self._room
            except TimeoutError:
                raise CallerGone from None

    def leave(self) -> None:
        self.callers -= 1
        self.has_read(0)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def _trim(self) -> None:
        """Hold what the fastest caller has yet to read, and a window before it for the others."""
        self.is_overgrown = True
        needless = self.held_bytes - (self.size_bytes - self.read_bytes) - FLIGHT_WINDOW_BYTES
        count = 0
        while count < len(self.chunks) - 1 and len(self.chunks[count]) <= needless:
            needless -= len(self.chunks[count])
            self.held_bytes -= len(self.chunks[count])
            count += 1
        if count:
            del self.chunks[:count]
            self.first += count


@dataclass(slots=True)
class Kept:
    """A finished answer, in as few objects as possible: there are tens of thousands.

    `fields`: header names and values in turn, without what belongs to one delivery.
    `tokens`: the values of its Usage. `plain`: of a merged stream, the plain answer once known.
    """

    reason: str
    fields: tuple[str, ...]
    body: bytes
    stored_at: float
    tokens: tuple[int, int, int, int, int]
    upstream: str
    model: str
    is_deterministic: bool
    is_merged: bool = False
    plain: bytes = b""

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.plain) + KEPT_OVERHEAD_BYTES

    def head(self) -> Head:
        fields = self.fields
        pairs = zip(fields[::2], fields[1::2], strict=True)
        return Head(200, self.reason, CIMultiDict(pairs))


class Flights:
    """Singleflight table and bounded LRU of finished answers, under one key.

    An alias is the hash of one spelling of a body; it leads to the key without parsing, and to
    the form that this spelling asks for: whether a stream, and whether with its usage. Nothing is
    remembered of a key that neither runs nor is kept.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.running: dict[bytes, Flight] = {}
        self.kept: OrderedDict[bytes, Kept] = OrderedDict()
        self.kept_bytes = 0
        self._clock = clock
        self._keys: dict[bytes, tuple[bytes, bool, bool]] = {}
        self._aliases: dict[bytes, tuple[bytes, ...]] = {}

    def __repr__(self) -> str:
        return f"<Flights running={len(self.running)} kept={len(self.kept)}>"

    def key_of(self, alias: bytes) -> tuple[bytes, bool, bool] | None:
        return self._keys.get(alias)

    def alias(self, alias: bytes, key: bytes, is_stream: bool, wants_usage: bool) -> None:
        known = self._aliases.get(key, ())
        if len(known) < MAX_ALIASES and alias not in self._keys:
            self._aliases[key] = (*known, alias)
            self._keys[alias] = key, is_stream, wants_usage

    def find(self, key: bytes, max_age_s: float) -> tuple[Kept, float] | None:
        """A kept answer no older than `max_age_s`, and its age."""
        kept = self.kept.get(key)
        if kept is None or (age_s := self._clock() - kept.stored_at) > max_age_s:
            return None
        self.kept.move_to_end(key)
        return kept, age_s

    def start(self, flight: Flight) -> None:
        """Later callers join this one; an older flight of the key goes on for its own callers."""
        self.running[flight.key] = flight

    def land(self, flight: Flight) -> None:
        if self.running.get(flight.key) is flight:
            del self.running[flight.key]
        self._forget(flight.key)

    def keep(self, key: bytes, kept: Kept, limit_bytes: int) -> None:
        self.drop(key)
        if kept.size_bytes <= limit_bytes:
            self.kept[key] = kept
            self.kept_bytes += kept.size_bytes
        self.shrink(limit_bytes)

    def shrink(self, limit_bytes: int) -> None:
        while self.kept_bytes > limit_bytes:
            self.drop(next(iter(self.kept)))

    def clear(self) -> None:
        for key in list(self.kept):
            self.drop(key)

    def drop_upstream(self, name: str) -> None:
        """It runs another model now."""
        for key in [key for key, kept in self.kept.items() if kept.upstream == name]:
            self.drop(key)

    def drop(self, key: bytes) -> None:
        kept = self.kept.pop(key, None)
        if kept is not None:
            self.kept_bytes -= kept.size_bytes
        self._forget(key)

    def _forget(self, key: bytes) -> None:
        if key not in self.running and key not in self.kept:
            for alias in self._aliases.pop(key, ()):
                del self._keys[alias]


@dataclass(slots=True)
class TextSize:
    """What a prompt's text measures, in the features that its tokens are estimated from."""

    ascii_units: float = 0.0  # letters, spaces, and all else by its usual share of a token
    wide: int = 0  # characters that are not ASCII
    strings: int = 0  # roles and messages cost tokens of their own
    chars: int = 0
    tokens: int = 0  # given as numbers
    blobs: int = 0  # images and the like, at a price of their own

    @classmethod
    def of(cls, texts: list[str], blobs: int = 0, tokens: int = 0) -> TextSize:
        text = "".join(texts)
        data = text.encode("ascii", "ignore")
        rest = data.translate(None, _LETTERS)
        spaces, digits = rest.count(b" "), len(rest) - len(rest.translate(None, b"0123456789"))
        marks = len(rest) - spaces + digits  # a digit is mostly a token of its own: counted twice
        units = 0.215 * (len(data) - len(rest)) + 0.08 * spaces + 0.62 * marks
        return cls(units, len(text) - len(data), len(texts), len(text), tokens, blobs)


NO_TEXT = TextSize()
_LETTERS = string.ascii_letters.encode()


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
        self._odd = 0  # reports in a row that were not believed
        self._is_taught = False  # until then: characters / 3
        self._outputs: deque[int] = deque(maxlen=100)
        self._output_p95 = OUTPUT_TOKENS_UNLEARNED
        self._calls = 0

    def prompt_tokens(self, size: TextSize) -> int:
        text = size.chars / 3
        if self._is_taught:
            a, b, c, d = self._weights
            text = a * size.ascii_units + b * size.wide + c * size.strings + d
        return round(text) + size.tokens + size.blobs * BLOB_TOKENS

    def worst_tokens(self, size: TextSize) -> int:
        """More than a prompt will take, for budgets: generous until the model is known."""
        if self._calls >= 20:
            return round(1.25 * self.prompt_tokens(size)) + 10
        text = size.chars / 2 + 1.5 * size.wide + 10 * size.strings + 20
        return round(text) + size.tokens + size.blobs * BLOB_TOKENS

    def output_tokens(self, at_most: int | None) -> int:
        """What a call is likely to write: no more than it asks for nor the 95th percentile."""
        return self._output_p95 if at_most is None else min(self._output_p95, at_most)

    def teach(self, size: TextSize, usage: Usage, elapsed_s: float) -> None:
        if usage.is_estimated:
            return
        self._calls += 1
        if not (size.blobs or size.tokens) and (self._calls <= 100 or self._calls % 8 == 0):
            self._teach_prompt(size, usage.prompt)
        if usage.completion > 0:
            self._outputs.append(usage.completion)
            if len(self._outputs) >= 20 and self._calls % 10 == 0:
                self._output_p95 = int(percentile(self._outputs, 0.95))
            if usage.completion >= 10:  # shorter ones measure the prompt, not the speed
                self.token_s += 0.2 * (elapsed_s / usage.completion - self.token_s)

    def _teach_prompt(self, size: TextSize, tokens: int) -> None:
        parts = (size.ascii_units, size.wide, size.strings, 1.0)
        expected = sum(w * part for w, part in zip(self._weights, parts, strict=True))
        if tokens <= 0 or expected <= 0:
            return
        ratio = tokens / expected
        self._odd = 0 if 0.25 < ratio < 4 else self._odd + 1
        if 0 < self._odd <= 5:
            return
        self._is_taught = True
        error = min(max(ratio - 1, -0.5), 1.0)
        shares = [part / expected for part in parts]
        gains = [v * x for v, x in zip(self._variance, shares, strict=True)]
        scale = 1 / (1 + sum(g * x for g, x in zip(gains, shares, strict=True)))
        for n, gain in enumerate(gains):
            weight = self._weights[n] + gain * scale * error
            self._weights[n] = min(max(weight, self.LOWEST[n]), self.HIGHEST[n])
            kept = self._variance[n] - gain * scale * gain + 0.003 * self.VARIANCE[n]
            self._variance[n] = min(kept, self.VARIANCE[n])


class Speeds:
    """What the `timings` of a llama.cpp server's last calls come to."""

    def __init__(self) -> None:
        self._calls: deque[Mapping[str, float]] = deque(maxlen=20)

    def add(self, timings: Mapping[str, float]) -> None:
        if timings:
            self._calls.append(timings)

    def shown(self) -> dict[str, float | None]:
        """Tokens a second of prompts and of output; the share of prompts that was cached."""

        def total(name: str) -> float:
            return sum(call.get(name, 0.0) for call in self._calls)

        def share(part: float, whole: float) -> float | None:
            return round(part / whole, 3) if whole > 0 else None

        cached, fresh = total("cache_n"), total("prompt_n")
        return {
            "prompt_tokens_per_s": share(1000 * fresh, total("prompt_ms")),
            "output_tokens_per_s": share(1000 * total("predicted_n"), total("predicted_ms")),
            "cache_hit_share": share(cached, cached + fresh),
        }


class Client:
    """Somebody with a client key, and the limits that the file sets."""

    def __init__(self, rule: ClientRule, clock: Clock = time.monotonic) -> None:
        self.rule = rule
        self._clock = clock
        self.rpm, self.tpm = Bucket.of(rule.rpm, clock), Bucket.of(rule.tpm, clock)

    def limit(self, rule: ClientRule) -> None:
        """Take another rule; what was counted stays."""
        old, self.rule = self.rule, rule
        if (old.rpm, old.tpm) != (rule.rpm, rule.tpm):
            self.rpm = rebucket(self.rpm, rule.rpm, self._clock)
            self.tpm = rebucket(self.tpm, rule.tpm, self._clock)

    def shown(self) -> dict[str, Any]:
        limits = {"rpm": shown_bucket(self.rpm), "tpm": shown_bucket(self.tpm)}
        return {"name": self.rule.name, **limits}

    def reserve(self, prompt_tokens: int, output_tokens: int) -> Reservation | None:
        """Take a call's part of the limits.

        Raises:
            ProxyError: rate_limited, with the time until it would fit; nothing was taken.
        """
        tokens = prompt_tokens + output_tokens
        wanted = [(self.rpm, 1, "rpm"), (self.tpm, tokens, "tpm")]
        for bucket, amount, name in wanted:
            if bucket is not None and not bucket.fits(amount):
                now = self._clock()
                wait_s = min(bucket.ready_at(amount) - now, WINDOW_S)
                why = f"client {self.rule.name} is over its {name} of {bucket.limit}"
                raise ProxyError("rate_limited", why, retry_after_s=wait_s)
        rpms, tpms = ([b] if b is not None else [] for b in (self.rpm, self.tpm))
        if not rpms and not tpms:
            return None
        return Reservation(rpms, tpms, prompt_tokens, output_tokens)


class Memo(Generic[V]):
    """Bounded map that makes what is missing and forgets the least recently used that `may_go`."""

    def __init__(
        self,
        make: Callable[[Any], V],
        may_go: Callable[[V], bool] = lambda value: True,
        limit: int = MAX_MODELS,
    ) -> None:
        self._make, self._may_go, self._limit = make, may_go, limit
        self._values: OrderedDict[Any, V] = OrderedDict()

    def __getitem__(self, key: Any) -> V:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = self._make(key)
            if len(self._values) > self._limit:
                old = next(
                    (k for k, v in self._values.items() if k != key and self._may_go(v)), None
                )
                if old is not None:
                    del self._values[old]
        elif len(self._values) > self._limit // 2:
            self._values.move_to_end(key)
        return value

    def values(self) -> list[V]:
        return list(self._values.values())


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


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
    "x-llmproxy-priority": tuple(Gate.SHARES),
    "x-llmproxy-retry": RETRY_KINDS,
    "x-llmproxy-task": (),
    "x-llmproxy-task-budget": (),
}
# Content-Length and Host are made anew; Origin ends here, because CORS is answered here.
NOT_SENT_UPSTREAM = HOP_BY_HOP | {"host", "content-length", "expect", "origin", "x-request-id"}
CREDENTIALS = ("authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie")
ANSWER_CHANGING = (
    "anthropic-version", "anthropic-beta", "openai-organization", "openai-project", "openai-beta"
)  # fmt: skip
# What belongs to one delivery of an answer, not to the answer.
NOT_KEPT = frozenset(("set-cookie", "age", "retry-after"))
CORS = re.compile(r"access-control-.*", re.IGNORECASE)
EVENT_END = re.compile(rb"\n\r?\n|\r\r")
LINE_END = re.compile(r"\r\n|\n|\r")
HAS_USAGE = re.compile(rb'"usage"\s*:\s*(?:[\r\n]+data: ?)?\{')
# A 400 that means "I do not know stream_options", as vLLM, Mistral, TGI and older gateways say it.
FIELD_REFUSED = re.compile(
    rb"stream_options|include_usage|(?:unknown|unrecogni[sz]ed|unexpected|unsupported|extra|"
    rb"additional|invalid)\W+\w*\W*(?:field|argument|parameter|propert|input|key)",
    re.IGNORECASE,
)


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


_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]")
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_STOP = re.compile(rb'"stop"\s*:\s*true')
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


# Routes whose streams hold all that llama.cpp's plain answer does.
STREAMED = frozenset(
    ("chat/completions", "completions", "completion", "infill", "messages", "responses")
)


def find_route(method: str, path: str) -> Route | None:
    """The route of a path, under any prefix that ends in /v1 (SDKs make /v1/v1/messages too)."""
    if method != "POST":
        return None
    _, v1, rest = path.rpartition("/v1/")
    return ROUTES.get(rest if v1 else path[1:])


def is_readable(low: Mapping[str, str]) -> bool:
    """Whether a body may be JSON that we can read; like llama.cpp we take it under any name."""
    is_coded = low.get("content-encoding", "identity") != "identity"
    return not is_coded and not low.get("content-type", "").startswith("multipart/")


_JSON = json.JSONDecoder()


class Canonical:
    """The meaning of a JSON body as bytes, and what its text measures, in one walk.

    Objects become tuples sorted by key, arrays lists, so the two cannot be confused; marshal
    tells 1, 1.0 and True apart. Version 2 of its format has no references, which would depend on
    object identity. A text without a space in 2,048 ASCII characters is a blob (an image).
    """

    def __init__(self, doc: Any) -> None:
        self._texts: list[str] = []
        self._blobs = self._tokens = 0
        self._pairs = self._walk(doc)
        self.size = TextSize.of(self._texts, self._blobs, self._tokens)

    @property
    def data(self) -> bytes:
        return marshal.dumps(self._pairs, 2)

    @property
    def formless(self) -> bytes:
        """What is asked, in whatever form the answer is to come."""
        pairs = zip(self._pairs[::2], self._pairs[1::2], strict=True)
        kept = tuple(pair for pair in pairs if pair[0] not in ("stream", "stream_options"))
        return marshal.dumps(kept, 2)

    def _walk(self, value: Any) -> Any:
        kind = type(value)
        if kind is str:
            if len(value) > 2048 and " " not in value[:2048] and value[:2048].isascii():
                self._blobs += 1
            else:
                self._texts.append(value)
        elif kind is dict:
            walk, pairs = self._walk, []
            if "url" in value and type(value["url"]) is str and value["url"].startswith("http"):
                self._blobs += 1  # an image, by its address
            for key in sorted(value):
                pairs.append(key)
                pairs.append(walk(value[key]))
            return tuple(pairs)
        elif kind is list:
            if value and type(value[0]) is int and set(map(type, value)) == {int}:
                self._tokens += len(value)
                return value
            return [self._walk(item) for item in value]
        return value


def parse_json(body: bytes) -> tuple[dict[str, Any], Canonical] | None:
    """A JSON object and its canonical form; None for all else, hostile nesting included."""
    if len(body) > 3 * MAX_JSON_ITEMS and sum(map(body.count, b"{[,")) > MAX_JSON_ITEMS:
        return None  # seconds of parsing, in which nobody else would be served
    try:
        doc = json.loads(body)
        return (doc, Canonical(doc)) if isinstance(doc, dict) else None
    except (ValueError, RecursionError):
        return None


def ask_for_usage(body: bytes, doc: Mapping[str, Any]) -> bytes | None:
    """The body with stream_options.include_usage, all else byte for byte; None if not possible."""
    end = len(body.rstrip()) - 1
    if b"\0" in body[:4] or body[end : end + 1] != b"}":
        return None  # not UTF-8
    if "stream_options" not in doc:
        return body[:end] + b',"stream_options":{"include_usage":true}' + body[end:]
    options = doc["stream_options"]
    found = list(re.finditer(rb'"stream_options"\s*:\s*', body))
    if len(found) != 1 or not (options is None or isinstance(options, dict)):
        return None
    start = found[0].end()
    text = body[start:].decode("utf-8", "surrogateescape")
    _, length = _JSON.raw_decode(text)
    rest = text[length:].encode("utf-8", "surrogateescape")
    return body[:start] + json.dumps({**(options or {}), "include_usage": True}).encode() + rest


def reports_usage(doc: Mapping[str, Any]) -> bool:
    options = doc.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def whole_number(value: Any) -> int | None:
    """A count as bodies and usages write it: 5, 5.0 or "5"; None for all else."""
    if type(value) is str and value.isdecimal() and len(value) < 10:
        value = int(value)
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def max_tokens(doc: Mapping[str, Any]) -> int | None:
    """The larger of all limits on the output that a body names."""
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
    found = [n for name in names if name in doc and (n := whole_number(doc[name])) is not None]
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
    """The first whole event, with the blank line that ends it."""
    match = EVENT_END.search(data)
    return data[: match.end()] if match else None


def is_event(data: bytes) -> bool:
    """Whether an event without its blank line is whole."""
    if _DONE.search(data):
        return True
    try:
        return bool(data) and json.loads(event_data(data)) is not None
    except (ValueError, RecursionError):
        return False


def last_event_end(data: bytes) -> int:
    """Where the last whole event ends; 0 where none does."""
    ends = ((data.rfind(mark), len(mark)) for mark in (b"\n\n", b"\n\r\n", b"\r\r"))
    return max((at + length for at, length in ends if at >= 0), default=0)


def stream_error(event: bytes) -> tuple[int, bytes] | None:
    """Status and JSON of an error that a stream's event carries, in either dialect."""
    if b"error" not in event:
        return None
    data = event_data(event)
    with contextlib.suppress(ValueError, RecursionError):
        doc = json.loads(data)
        error = doc.get("error") if isinstance(doc, dict) else None
        if error is None and isinstance(doc, dict) and doc.get("type") == "error":
            error = doc  # OpenAI's responses route
        if error:
            return _error_status(error if isinstance(error, dict) else {}), data.encode()
    return None


_ANTHROPIC_STATUS = {
    "invalid_request_error": 400, "authentication_error": 401, "billing_error": 402,
    "permission_error": 403, "not_found_error": 404, "request_too_large": 413,
    "rate_limit_error": 429, "api_error": 500, "timeout_error": 504, "overloaded_error": 529,
    "exceed_context_size_error": 400, "unavailable_error": 503,
}  # fmt: skip


def _error_status(error: dict[str, Any]) -> int:
    for name in ("code", "status"):
        code = error.get(name)
        if type(code) is int and 400 <= code < 600:
            return code
    return _ANTHROPIC_STATUS.get(str(error.get("type")), 500)


class Events:
    """Passes whole SSE events on as they came, and takes out the usage chunk that we asked for.

    The unfinished end of an event is held until it is whole: it might be the one to take out,
    and where the upstream breaks off, half an event would hide our error event from the SDKs.
    An event beyond SLICE_BYTES passes in pieces. `holds_finish`: what ends a choice goes on
    together with the chunk after it, see `without_usage`.
    """

    def __init__(self, takes_usage: bool, holds_finish: bool = False) -> None:
        self.takes_usage, self._holds_finish = takes_usage, holds_finish
        self.taken = b""
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._seam = b""  # the last bytes of what is held

    def feed(self, chunk: bytes) -> bytes:
        whole = chunk
        if self._held or not chunk.endswith(b"\n\n"):
            whole = self._whole(chunk)
        if self._holds_finish and _FINISH.search(whole, max(0, whole.rfind(b"\n\n", 0, -2))):
            data = b"".join([whole, *self._held])  # its last event may be joined with the next
            self._held, self._held_bytes, self._seam = [data], len(data), data[-3:]
            return b""
        return self._take(whole) if self.takes_usage else whole

    def _whole(self, chunk: bytes) -> bytes:
        """The whole events of what is held and a chunk; the rest is held."""
        seam = self._seam  # an end may lie across chunks
        end = last_event_end(seam + chunk)
        self._seam = (seam + chunk)[-3:]
        if not end and self._held_bytes + len(chunk) <= SLICE_BYTES:
            self._held.append(chunk)
            self._held_bytes += len(chunk)
            return b""
        data = b"".join([*self._held, chunk])
        cut = len(data) - len(chunk) - len(seam) + end if end else len(data)
        self._held, self._held_bytes = [], 0
        if cut < len(data):
            self._held, self._held_bytes = [data[cut:]], len(data) - cut
        self._seam = data[cut:][-3:]
        return data[:cut]

    def rest(self) -> bytes:
        """What a stream that ended without a blank line still had to say."""
        data, self._held, self._held_bytes = b"".join(self._held), [], 0
        return self._take(data) if self.takes_usage else data

    def _take(self, data: bytes) -> bytes:
        data, taken = without_usage(data)
        self.taken = taken or self.taken
        return data


def without_usage(data: bytes) -> tuple[bytes, bytes]:
    """Whole events without the chunk that only reports usage, and that chunk.

    llama.cpp moves its `timings` there from the chunk before it, and they go back to that.
    """
    if not HAS_USAGE.search(data):
        return data, b""
    out: list[bytes] = []
    taken, start = b"", 0
    for end in [*(match.end() for match in EVENT_END.finditer(data)), len(data)]:
        event, start = data[start:end], end
        if HAS_USAGE.search(event) and _is_extra(event):
            taken = event
            if b'"timings"' in event and out:
                out[-1] = _with_timings(out[-1], event)
        else:
            out.append(event)
    return b"".join(out), taken


def _with_timings(event: bytes, usage: bytes) -> bytes:
    with contextlib.suppress(*ODD_JSON):
        timings = json.loads(event_data(usage))["timings"]
        doc = json.loads(event_data(event))
        if doc["choices"]:
            return b"data: " + compact({**doc, "timings": timings}) + b"\n\n"
    return event


# What reading a document raises that is not as it should be.
ODD_JSON = (ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError)


def compact(doc: Any) -> bytes:
    """JSON as llama.cpp writes it."""
    return json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _is_extra(event: bytes) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        doc = json.loads(event_data(event))
        is_openai = isinstance(doc, dict) and "type" not in doc
        return bool(is_openai and doc.get("usage") and not doc.get("choices"))
    return False


class Part:
    """What the deltas of one choice, one native result or one content block add up to."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.fields = dict(known)
        self.texts: dict[str, list[str]] = {}
        self.tools: dict[int, dict[str, Any]] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        for name, value in delta.items():
            if name == "tool_calls":
                for call in value or ():
                    self._add_tool(call)
            elif name == "role":
                self.fields[name] = value
            elif isinstance(value, str) and name != "type":
                self.texts.setdefault(name, []).append(value)

    def text(self, name: str) -> str:
        return "".join(self.texts.get(name, ()))

    def _add_tool(self, call: Mapping[str, Any]) -> None:
        function = call.get("function") or {}
        known = self.tools.setdefault(call.get("index", 0), {"type": "function", "function": {}})
        for name, value in function.items():
            said = known["function"]
            said[name] = said.get(name, "") + value if name == "arguments" else value
        known.update({k: v for k, v in call.items() if k not in ("index", "function")})


class Assembly:
    """The plain answer that llama.cpp would have given, put together from its stream.

    Knows the forms by their events: chat and text completions, `/completion`, Anthropic's
    messages, and responses, whose last event holds the whole. Of several choices the usage is the
    first one's, as in the server's own plain answer.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._error: tuple[int, bytes] | None = None
        self._form = ""
        self._base: dict[str, Any] = {}
        self._parts: dict[int, Part] = {}
        self._counts: dict[int, dict[str, Any]] = {}  # usage and timings, by choice
        self._ended = 0  # the choice that ended last: a usage after it is its own
        self._is_over = False
        self._made = b""  # once for all callers

    def feed(self, data: bytes) -> None:
        self._made = b""
        *events, self._rest = EVENT_END.split(self._rest + data)
        for event in events:
            self._is_over = self._is_over or bool(_DONE.search(event))
            if b"{" in event and not self._is_over:
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
            self._form = "native"
            part = self._part(doc.get("index", 0))
            part.add({"content": doc["content"]})
            if doc.get("stop"):
                part.fields = doc

    def _part(self, index: int, known: Mapping[str, Any] | None = None) -> Part:
        return self._parts.setdefault(index, Part(known or {}))

    def _take_choices(self, doc: dict[str, Any]) -> None:
        choices = doc.pop("choices")
        for choice in choices:
            part = self._part(choice["index"])
            self._form = "chat" if "delta" in choice else "text"
            part.add(choice["delta"] if "delta" in choice else {"text": choice.get("text", "")})
            if choice.get("finish_reason"):
                self._ended = choice["index"]
                part.fields["finish_reason"] = choice["finish_reason"]
        counts = {name: doc.pop(name) for name in ("usage", "timings") if doc.get(name)}
        if not choices or choices[-1].get("finish_reason"):
            self._counts.setdefault(self._ended, {}).update(counts)
        doc.pop("prompt_progress", None)
        self._base.update(doc)

    def _take_typed(self, doc: dict[str, Any]) -> None:
        kind, index = doc["type"], doc.get("index", 0)
        if kind == "message_start":
            self._form, self._base = "message", doc["message"]
        elif kind == "content_block_start":
            self._part(index, doc["content_block"])
        elif kind == "content_block_delta":
            self._part(index).add(doc["delta"])
        elif kind == "message_delta":
            self._base.update(doc["delta"])
            self._base["usage"].update(doc.get("usage") or {})
        elif kind in ("response.completed", "response.incomplete"):
            response = doc["response"]
            for item in response["output"]:
                item.setdefault("status", "completed")
            self._base = {"completed_at": response.get("created_at"), **response}

    def plain(self) -> tuple[int, bytes]:
        """Status and JSON.

        Raises:
            ProxyError: upstream_incomplete; what came is no answer.
        """
        if self._error is not None:
            return self._error
        with contextlib.suppress(*ODD_JSON):
            if not self._made and (self._form or self._base):
                self._made = compact(self._whole())
        if self._made:
            return 200, self._made
        raise ProxyError("upstream_incomplete", "the upstream's stream holds no answer")

    def _whole(self) -> Any:
        ordered = [part for _, part in sorted(self._parts.items())]
        doc: Any = self._base
        if self._form in ("chat", "text"):
            doc = self._choices(doc)
        elif self._form == "message":
            doc = {**doc, "content": [*map(self._block, ordered)]}
        elif self._form == "native":
            natives = [self._native(part) for part in ordered]
            doc = natives[0] if len(natives) == 1 else natives
        return doc

    def _choices(self, base: dict[str, Any]) -> dict[str, Any]:
        is_chat = self._form == "chat"
        counts = self._counts[min(self._counts)] if self._counts else {}
        own = {name: value for name, value in base.items() if name not in ("id", "object")}
        return {
            "choices": [
                (self._chat_choice if is_chat else self._text_choice)(index, part)
                for index, part in sorted(self._parts.items())
            ],
            **own, "object": "chat.completion" if is_chat else "text_completion",
            **{name: counts[name] for name in ("usage",) if name in counts}, "id": base.get("id"),
            **{name: counts[name] for name in ("timings",) if name in counts},
        }  # fmt: skip

    @staticmethod
    def _chat_choice(index: int, part: Part) -> dict[str, Any]:
        fields = dict(part.fields)
        finish = fields.pop("finish_reason", None)
        message = {"role": fields.pop("role", "assistant"), "content": part.text("content")}
        message |= {name: part.text(name) for name in part.texts if name != "content"} | fields
        if part.tools:
            message["tool_calls"] = [call for _, call in sorted(part.tools.items())]
        return {"finish_reason": finish, "index": index, "message": message}

    @staticmethod
    def _text_choice(index: int, part: Part) -> dict[str, Any]:
        finish = part.fields.get("finish_reason")
        return {
            "text": part.text("text"), "index": index, "logprobs": None, "finish_reason": finish
        }  # fmt: skip

    @staticmethod
    def _native(part: Part) -> dict[str, Any]:
        doc = {**part.fields, "content": part.text("content")}
        if "generation_settings" in doc:
            doc["generation_settings"] = {**doc["generation_settings"], "stream": False}
        return doc

    @staticmethod
    def _block(part: Part) -> dict[str, Any]:
        """A content block; of a tool's input that was cut short llama.cpp gives an empty one."""
        block = dict(part.fields)
        if block.get("type") == "tool_use":
            block["input"] = {}
            with contextlib.suppress(ValueError, RecursionError):
                block["input"] = json.loads(part.text("partial_json") or "{}")
            return block
        return {**block, **{name: block.get(name, "") + part.text(name) for name in part.texts}}


def conversation(doc: Mapping[str, Any]) -> tuple[int, ...]:
    """A prompt as a chain of hashes that another turn of it begins with as well."""
    messages, prompt = doc.get("messages"), doc.get("prompt")
    if isinstance(messages, list):
        parts: list[Any] = [doc.get("tools"), doc.get("system"), *messages]
    else:
        text = prompt if isinstance(prompt, str) else repr(prompt or doc.get("input"))
        parts = [text[start : start + 256] for start in range(0, len(text), 256)]
    return tuple(hash(repr(part)) for part in parts)


# What these ask for is not, or not all, in a stream: it has no probabilities of the last token.
NOT_STREAMED = (
    "logprobs", "n_probs", "verbose", "response_fields", "return_tokens", "conversation",
    "background",
)  # fmt: skip


def can_stream(name: str, doc: Mapping[str, Any]) -> bool:
    """Whether a plain call can be asked of llama.cpp as a stream, its answer put together here."""
    is_route = name in STREAMED and not any(doc.get(field) for field in NOT_STREAMED)
    return is_route and isinstance(doc.get("stream"), (bool, type(None)))


def with_fields(body: bytes, doc: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes | None:
    """The body with `fields` set: added at its end, or written anew where one of them is there."""
    end = len(body.rstrip()) - 1
    if any(name in doc for name in fields) or not doc:
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps({**doc, **fields}, allow_nan=False).encode()
        return None
    if b"\0" in body[:4] or body[end : end + 1] != b"}":
        return None  # not UTF-8
    return body[:end] + b"," + json.dumps(fields).encode()[1:-1] + body[end:]


def read_usage(body: bytes, is_stream: bool) -> Usage | None:
    """The usage that an answer reports, wherever it stands; None where it reports none."""
    if not is_stream:
        return _plain_usage(body)
    usage = None
    for part in (body[-16384:], body):  # the last events nearly always hold it
        for event in reversed(EVENT_END.split(part)):
            if USAGE_MARK.search(event) and (usage := _usage_of(event_data(event))):
                break
        if usage or len(part) == len(body):
            break
    # Anthropic splits it: the prompt in message_start, the output in message_delta.
    if usage and b'"message_start"' in body[:8192]:
        for event in EVENT_END.split(body[:16384]):
            if b'"message_start"' in event and (start := _usage_of(event_data(event))):
                usage.prompt = max(usage.prompt, start.prompt)
                usage.cached = max(usage.cached, start.cached)
                usage.written = max(usage.written, start.written)
                usage.completion = max(usage.completion, start.completion)
                break
    return usage


def _plain_usage(body: bytes) -> Usage | None:
    """Usage nearly always stands last: read it alone, without the answer before it."""
    start = body.rfind(b'"usage"')
    if start >= 0 and body.find(b'"usage"') == start:  # else the answer's text has one as well
        with contextlib.suppress(ValueError, RecursionError):
            text = body[start + 7 :].decode("utf-8", "replace").lstrip(" \r\n\t:")
            usage, _ = _JSON.raw_decode(text)
            if isinstance(usage, dict):
                return _usage_from(usage)
    return _usage_of(body.decode("utf-8", "replace"))


USAGE_MARK = re.compile(rb'"usage"\s*:\s*[^n\s]|"timings"|"tokens_predicted"')


def _usage_of(text: str) -> Usage | None:
    try:
        doc = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(doc, dict):
        return None
    for holder in (doc, doc.get("message"), doc.get("response")):
        if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
            return _usage_from(holder["usage"])
    timings = doc.get("timings")
    if isinstance(timings, dict) and "predicted_n" in timings:
        cached = _whole(timings, "cache_n")
        prompt = _whole(timings, "prompt_n") + cached
        return Usage(prompt, cached, _whole(timings, "predicted_n"))
    if "tokens_predicted" in doc:
        return Usage(_whole(doc, "tokens_evaluated"), 0, _whole(doc, "tokens_predicted"))
    return None


def _usage_from(usage: dict[str, Any]) -> Usage:
    inner = _inner(usage, "prompt_tokens_details") or _inner(usage, "input_tokens_details")
    output = _inner(usage, "completion_tokens_details") or _inner(usage, "output_tokens_details")
    reasoning = _whole(output, "reasoning_tokens")
    if "prompt_tokens" in usage:
        prompt, cached = _whole(usage, "prompt_tokens"), _whole(inner, "cached_tokens")
        return Usage(prompt, cached, _whole(usage, "completion_tokens"), reasoning)
    # Anthropic counts what it read from or wrote to its cache apart from input_tokens.
    read = _whole(usage, "cache_read_input_tokens")
    written = _whole(usage, "cache_creation_input_tokens")
    prompt = _whole(usage, "input_tokens") + read + written
    cached = read or _whole(inner, "cached_tokens")
    return Usage(prompt, cached, _whole(usage, "output_tokens"), reasoning, written)


def _inner(doc: dict[str, Any], name: str) -> dict[str, Any]:
    value = doc.get(name)
    return value if isinstance(value, dict) else {}


def _whole(doc: dict[str, Any], name: str) -> int:
    value = whole_number(doc.get(name)) or 0
    return value if value < MAX_TOKENS else 0


def decoded(body: bytes, headers: Mapping[str, str]) -> bytes:
    """The body without its content coding, where the standard library knows it (for counting)."""
    coding = headers.get("Content-Encoding", "identity").lower()
    if coding in ("gzip", "x-gzip", "deflate"):
        with contextlib.suppress(zlib.error):
            return zlib.decompressobj(47).decompress(body, FLIGHT_BYTES)
    return body


def kept_fields(headers: Headers) -> tuple[str, ...]:
    """Names and values in turn, without what belongs to one delivery of an answer."""
    fields: list[str] = []
    for name, value in headers.items():
        lower = name.lower()
        if lower not in NOT_KEPT and "ratelimit" not in lower:
            fields += (name, value)
    return tuple(fields)


def plain_head(head: Head, status: int = 200) -> Head:
    """The head that llama.cpp gives a plain answer, from that of its stream."""
    headers = head.headers.copy()
    headers.popall("X-Accel-Buffering", None)
    headers.popall("Cache-Control", None)
    headers["Content-Type"] = "application/json; charset=utf-8"
    known = status in HTTPStatus._value2member_map_
    return Head(status, HTTPStatus(status).phrase if known else head.reason, headers)


def read_timings(body: bytes) -> dict[str, float]:
    """The last `timings` of a llama.cpp answer; empty where it has none."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        start = body.rindex(b'"timings"')
        text = body[start + 9 :].decode("utf-8", "replace").lstrip(" \r\n\t:")
        timings, _ = _JSON.raw_decode(text)
        return {k: v for k, v in timings.items() if type(v) in (int, float)}
    return {}


def end_to_end(
    headers: Iterable[tuple[str, str]], connection: str | None, dropped: frozenset[str]
) -> Headers:
    """Headers without `dropped` and what `Connection` names; order, case and repeats stay."""
    if connection and connection.lower() not in ("keep-alive", "close"):
        dropped = dropped | {name.strip().lower() for name in connection.split(",")}
    if not dropped:
        return CIMultiDict(headers)
    return CIMultiDict([(k, v) for k, v in headers if k.lower() not in dropped])


def asked_wait_s(headers: Mapping[str, str], now_unix: float) -> float | None:
    """Seconds that an upstream asks us to wait (RFC 9110 10.2.3; retry-after-ms is OpenAI's)."""
    text = headers.get("Retry-After", "")
    for number, unit_s in ((headers.get("retry-after-ms", ""), 0.001), (text, 1.0)):
        if re.fullmatch(r"\s*\d{1,12}(\.\d*)?\s*", number, re.ASCII):
            return float(number) * unit_s
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_unix)
    resets = [after_s for _, left, after_s in rate_limits(headers, now_unix) if left == 0]
    return max(resets, default=None)


def _limit_headers() -> list[tuple[str, str, str]]:
    """Which limit, and the names of what is left and when it is reset."""
    patterns = (  # OpenAI, OpenRouter, Anthropic; the last two only tell when nothing is left
        ("rpm", "x-ratelimit-{}-requests"), ("tpm", "x-ratelimit-{}-tokens"),
        ("rpm", "x-ratelimit-{}"),
        ("rpm", "anthropic-ratelimit-requests-{}"), ("tpm", "anthropic-ratelimit-tokens-{}"),
        ("", "anthropic-ratelimit-input-tokens-{}"), ("", "anthropic-ratelimit-output-tokens-{}"),
    )  # fmt: skip
    return [(limit, p.format("remaining"), p.format("reset")) for limit, p in patterns]


_LIMIT_HEADERS = _limit_headers()
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|[dhms])")
_SPAN_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def rate_limits(headers: Mapping[str, str], now_unix: float) -> list[tuple[str, int, float]]:
    """What an upstream says is left of its limits: kind, how much, seconds until it is reset."""
    found = []
    for kind, remaining, reset in _LIMIT_HEADERS:
        text = headers.get(remaining)
        if text is not None and text.isdecimal() and len(text) < 16:
            found.append((kind, int(text), parse_reset(headers.get(reset, ""), now_unix)))
    return found


def parse_reset(text: str, now_unix: float) -> float:
    """Seconds of a reset header: `1m2.5s`, plain seconds, a Unix time in s or ms, or RFC 3339."""
    text = text.strip()
    if "".join(number + unit for number, unit in _SPAN.findall(text)) == text and text:
        return sum(float(number) * _SPAN_S[unit] for number, unit in _SPAN.findall(text))
    with contextlib.suppress(ValueError, OverflowError):
        value = float(text)
        value = value / 1000 if value > 1e11 else value
        value = value - now_unix if value > 1e9 else value
        return value if 0 <= value < 1e9 else 0.0
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, datetime.fromisoformat(text).timestamp() - now_unix)
    return 0.0


def with_model(doc: Mapping[str, Any], model: str) -> bytes | None:
    """The body, asked of another model; None where it cannot be written as JSON again."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.dumps({**doc, "model": model}, allow_nan=False).encode()
    return None


KEY_PARAMETERS = ("key", "api_key", "apikey", "api-key", "access_token", "token")


def without_keys(
    raw_path: str, keys: Iterable[str] = (), names: Iterable[str] = KEY_PARAMETERS
) -> str:
    """A path whose query carries no parameter of those names, and none with one of those keys."""
    path, mark, query = raw_path.partition("?")
    if not mark:
        return path
    kept = []
    for part in re.split("[&;]", query):
        name = urllib.parse.unquote(part).partition("=")[0].strip().lower()
        if name not in names and not any(carries(part, key) for key in keys):
            kept.append(part)
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


def closing_events(name: str, sent: bytes, output_tokens: int) -> bytes:
    """The events that end a running stream cleanly, as if it had met its max_tokens.

    Args:
        name: the route, like chat/completions.
        sent: the stream's last events, or all of them.
    """
    events = [event_data(event) for event in EVENT_END.split(sent) if b"{" in event]
    docs = []
    for data in events:
        with contextlib.suppress(ValueError, RecursionError):
            docs.append(json.loads(data))
    docs = [doc for doc in docs if isinstance(doc, dict)]
    if name == "messages":
        ending: list[dict[str, Any]] = []
        for doc in docs:
            if doc.get("type") in ("content_block_start", "content_block_delta"):
                ending = [{"type": "content_block_stop", "index": doc.get("index", 0)}]
            elif doc.get("type") == "content_block_stop":
                ending = []
        stop = {"stop_reason": "max_tokens", "stop_sequence": None}
        usage = {"output_tokens": output_tokens}
        ending.append({"type": "message_delta", "delta": stop, "usage": usage})
        ending.append({"type": "message_stop"})
        parts = [f"event: {doc['type']}\ndata: {json.dumps(doc)}\n\n" for doc in ending]
        return "".join(parts).encode()
    if name == "responses":
        reason = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        found = [doc["response"] for doc in docs if isinstance(doc.get("response"), dict)]
        begun = found[0] if found else {}
        doc = {"type": "response.incomplete", "response": {"object": "response", **begun, **reason}}
        return f"event: {doc['type']}\ndata: {json.dumps(doc)}\n\n".encode()
    if name in ("completion", "infill"):
        doc = {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": output_tokens}
        return f"data: {json.dumps(doc)}\n\n".encode()
    base = {k: v for k, v in (docs[0] if docs else {}).items() if k not in ("choices", "usage")}
    empty: dict[str, Any] = {"delta": {}} if name == "chat/completions" else {"text": ""}
    seen = [c for doc in docs for c in doc.get("choices") or () if isinstance(c, dict)]
    is_over = {c.get("index") for c in seen if c.get("finish_reason")}
    indexes = {c.get("index", 0) for c in seen} - is_over or {0}
    ends = [{"index": n, **empty, "finish_reason": "length"} for n in sorted(indexes)]
    parts = [f"data: {json.dumps({**base, 'choices': [end]})}\n\n" for end in ends]
    return "".join([*parts, "data: [DONE]\n\n"]).encode()


def error_body(error: ProxyError, dialect: str, trace: str) -> bytes:
    if dialect == "anthropic":
        inner = {"type": error.anthropic_type, "message": error.message, "code": error.code}
        return json.dumps({"type": "error", "error": inner, "request_id": trace}).encode()
    inner = {"message": error.message, "type": error.openai_type, "param": None, "code": error.code}  # type: ignore[dict-item]
    return json.dumps({"error": inner}).encode()


def error_event(error: ProxyError, dialect: str, trace: str) -> bytes:
    """The last event of a stream that broke off, as the official SDKs want it to raise."""
    name = b"event: error\n" if dialect == "anthropic" else b""
    return name + b"data: " + error_body(error, dialect, trace) + b"\n\n"


def cache_control(text: str) -> dict[str, str]:
    """The directives of a Cache-Control request header, names in lower case."""
    parts = (part.partition("=") for part in text.lower().split(","))
    return {name.strip(): value.strip().strip('"') for name, _, value in parts}


_LOOPBACK_ORIGIN = re.compile(
    r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\]|[a-z0-9-]+\.localhost)(:\d{1,5})?",
    re.IGNORECASE,
)
_APP_SCHEMES = ("app://", "tauri://", "vscode-webview://")


def is_allowed_origin(origin: str, allowed: list[str]) -> bool:
    if origin in allowed or _LOOPBACK_ORIGIN.fullmatch(origin):
        return True
    return origin.startswith(_APP_SCHEMES)


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


def host_name(host: str) -> str:
    return re.sub(r":\d+$", "", host).lower()


def join_path(base: str, raw_path: str) -> str:
    """The upstream's target; /v1 at the base's end and the path's start make one."""
    if base.endswith("/v1") and re.match(r"/v1(?![^/?])", raw_path):
        base = base[:-3]
    return base + raw_path


###############################################################################
# Money
###############################################################################
# Rule: integer micro-dollars, since USD per million tokens is micro-dollars per token. An injected
# wall clock, because days and months are those of the wall. Whatever is reserved is settled once.


@dataclass(frozen=True, slots=True)
class Price:
    """Micro-dollars per token, by kind of token."""

    prompt: float
    completion: float
    cached: float  # prompt tokens that were read from a cache
    written: float  # and those that were written to one
    most_output_tokens: int = OUTPUT_TOKENS_ABSENT

    def cost(self, usage: Usage) -> int:
        fresh = max(0, usage.prompt - usage.cached - usage.written)
        cost = fresh * self.prompt + usage.cached * self.cached + usage.written * self.written
        return min(math.ceil(cost + usage.completion * self.completion - 1e-6), 2**50)

    def worst(self, prompt_tokens: int, output_tokens: int) -> int:
        """The most that a call can cost: all of its prompt may be written to a cache."""
        dearest = max(self.prompt, self.written)
        cost = prompt_tokens * dearest + output_tokens * self.completion
        return min(math.ceil(cost), 2**50)


class Prices:
    """Prices by model: the `price` settings, then the file's models, then LiteLLM's price file."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where the price file cannot be used."""
        self._globs = [tuple(text.rpartition("=")[::2]) for text in settings.price]
        self._globs += [(rule.name, rule.price) for rule in settings.models if rule.price]
        self._listed = _read_prices(settings.prices) if settings.prices else {}
        self._found: Memo[list[Price | None]] = Memo(lambda model: [self._find(model)])

    @property
    def is_empty(self) -> bool:
        return not self._globs and not self._listed

    def of(self, model: str) -> Price | None:
        return self._found[model][0]

    def _find(self, model: str) -> Price | None:
        for glob, text in self._globs:
            if fnmatch.fnmatchcase(model, glob):
                prompt, completion, *cached = (float(part) for part in text.split("/"))
                return Price(prompt, completion, cached[0] if cached else prompt, prompt)
        found = self._listed.get(model) or self._listed.get(model.rpartition("/")[2])
        return None if found is None else _listed_price(found)


def _read_prices(path: str) -> dict[str, dict[str, Any]]:
    try:
        file = Path(path).expanduser()
        if (file.exists() and not file.is_file()) or file.stat().st_size > FLIGHT_BYTES:
            raise ConfigError(f"prices: {path}: is no file of at most {FLIGHT_BYTES >> 20} MiB")
        doc = json.loads(file.read_bytes())
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"prices: {path}: {_why_unreadable(error)}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"prices: {path}: not valid JSON") from None
    if not isinstance(doc, dict):
        raise ConfigError(f"prices: {path}: wants an object of models, as LiteLLM publishes it")
    return {name: entry for name, entry in doc.items() if isinstance(entry, dict)}


def _listed_price(entry: Mapping[str, Any]) -> Price | None:
    """One model of LiteLLM's model_prices_and_context_window.json; None without token prices."""

    def micros(name: str, default: float | None = None) -> float | None:
        value = entry.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
            return default
        return value * 1e6

    prompt = micros("input_cost_per_token")
    completion = micros("output_cost_per_token", 0.0 if entry.get("mode") == "embedding" else None)
    if prompt is None or completion is None:
        return None
    cached = micros("cache_read_input_token_cost", prompt)
    written = micros("cache_creation_input_token_cost", prompt)
    most = entry.get("max_output_tokens")
    most = most if type(most) is int and most > 0 else OUTPUT_TOKENS_ABSENT
    return Price(prompt, completion, cast(float, cached), cast(float, written), most)


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
    its stream is cut where the budget ends.
    """

    def __init__(self, name: str, limit: int, window: str = "", soft: bool = False) -> None:
        self.name, self.limit, self.window, self.soft = name, limit, window, soft
        self.spent = self.reserved = 0
        self._period = ""

    def __repr__(self) -> str:
        return f"<Budget {self.name} {self.spent}+{self.reserved}/{self.limit}>"

    def roll(self, now_unix: float) -> None:
        """Begin anew where a day or month has ended; what is reserved stays."""
        period = time.strftime(PERIODS[self.window], time.localtime(now_unix))
        if period != self._period:
            self._period, self.spent = period, 0

    def is_spent(self, amount: int) -> bool:
        """Whether `amount` cannot fit, however the open reservations settle."""
        return self.spent >= self.limit if self.soft else self.spent + amount > self.limit

    def fits(self, amount: int) -> bool:
        if self.soft and not self.reserved:
            return self.spent < self.limit
        return self.spent + self.reserved + amount <= self.limit


PERIODS = {"day": "%Y-%m-%d", "month": "%Y-%m", "": ""}


class Stake:
    """What one call has reserved of its budgets; settled exactly once."""

    def __init__(self, budgets: Budgets, wanted: list[tuple[Budget, int]]) -> None:
        self._budgets, self._wanted = budgets, wanted
        for budget, amount in wanted:
            budget.reserved += amount

    @property
    def task(self) -> Budget | None:
        return next((budget for budget, _ in self._wanted if budget.soft), None)

    def settle(self, cost_micros: int = 0, tokens: int = 0) -> None:
        wanted, self._wanted = self._wanted, []
        for budget, amount in wanted:
            budget.roll(self._budgets.now())  # it counts on the day on which it ends
            budget.reserved -= amount
            budget.spent += tokens if budget.soft else cost_micros
        if wanted:
            self._budgets.changed()


@dataclass(slots=True, eq=False)
class _Saver:
    wanted: list[tuple[Budget, int]]
    future: asyncio.Future[Stake]


class Budgets:
    """Every budget, and the calls that wait for the reservations of others to settle."""

    def __init__(self, settings: Settings, now: Clock = time.time) -> None:
        self.now = now
        self._waiting: list[_Saver] = []
        self.tasks: dict[tuple[str, str], Budget] = {}  # by client and name
        self.of_all = _budgets("the budget", settings.budget, settings.budget_month)
        self.of_client = {
            rule.name: _budgets(f"client {rule.name}", rule.budget, rule.budget_month)
            for rule in settings.clients
        }

    @property
    def is_empty(self) -> bool:
        return not self.of_all and not any(self.of_client.values())

    def limit(self, settings: Settings) -> list[Budget]:
        """Take the limits of changed settings; what was spent stays. Returns what is new."""
        before = {(b.name, b.window): b for b in self.all()}
        after = Budgets(settings, self.now)
        new = []
        for budgets in (after.of_all, *after.of_client.values()):
            for n, budget in enumerate(budgets):
                if (known := before.get((budget.name, budget.window))) is None:
                    new.append(budget)
                else:
                    known.limit, budgets[n] = budget.limit, known
        self.of_all, self.of_client = after.of_all, after.of_client
        self.changed()
        return new

    def all(self) -> list[Budget]:
        return [*self.of_all, *itertools.chain.from_iterable(self.of_client.values())]

    def of(self, client: str) -> list[Budget]:
        found = [*self.of_all, *self.of_client.get(client, ())]
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

    async def reserve(self, wanted: list[tuple[Budget, int]], timeout_s: float) -> Stake:
        """Reserve all that is wanted, or nothing.

        Raises:
            ProxyError: budget_exceeded where one cannot fit, queue_timeout where the reservations
                of others did not settle in time.
        """
        saver = _Saver(wanted, asyncio.get_running_loop().create_future())
        self._waiting.append(saver)
        self.changed()
        if saver.future.done():
            return saver.future.result()
        try:
            async with asyncio.timeout(timeout_s):
                return await saver.future
        except (TimeoutError, asyncio.CancelledError) as error:
            future = saver.future
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().settle()  # granted in the same moment
            if isinstance(error, asyncio.CancelledError):
                raise
            why = "other calls hold what is left of the budget (--queue-timeout)"
            raise ProxyError("queue_timeout", why, retry_after_s=1) from None
        finally:
            if saver in self._waiting:
                self._waiting.remove(saver)
                self.changed()  # it may have held others back

    def changed(self) -> None:
        """Somebody has settled: let those go on who fit now, in order, or never will."""
        blocked: set[int] = set()  # budgets for which somebody waits who came before
        for saver in list(self._waiting):
            if saver.future.done():
                continue
            try:
                self._check(saver.wanted)
            except ProxyError as error:
                saver.future.set_exception(error)
                continue
            short = {id(budget) for budget, amount in saver.wanted if not budget.fits(amount)}
            if short or any(id(budget) in blocked for budget, _ in saver.wanted):
                blocked |= short  # and nobody passes it there; other budgets are not its own
            else:
                saver.future.set_result(Stake(self, saver.wanted))
        self._waiting = [saver for saver in self._waiting if not saver.future.done()]

    def _check(self, wanted: list[tuple[Budget, int]]) -> None:
        for budget, amount in wanted:
            budget.roll(self.now())
            if budget.is_spent(amount):
                left = max(0, budget.limit - budget.spent)
                text = f"{left} tokens are" if budget.soft else f"{left / 1e6:.6f} USD is"
                need = f"{amount} tokens" if budget.soft else f"{amount / 1e6:.6f} USD"
                why = f"{budget.name}: {text} left of the {budget.window or 'task'}'s budget"
                now, window = self.now(), budget.window
                wait_s = period_end(now, window) - now if window else None
                why += f", the call may need {need}"
                raise ProxyError("budget_exceeded", why, retry_after_s=wait_s)


def _budgets(name: str, day_usd: float | None, month_usd: float | None) -> list[Budget]:
    windows = (("day", day_usd), ("month", month_usd))
    return [Budget(name, round(usd * 1e6), window) for window, usd in windows if usd is not None]


###############################################################################
# Ledger
###############################################################################
# Rule: rows in, rows out; knows nothing of HTTP. One thread writes, in batches, so that the event
# loop never waits for a disk.

COLUMNS = (
    "id", "time_unix", "trace", "request_id", "shared", "client", "task", "method", "path", "model",
    "upstream", "fallback", "fate", "status", "code", "attempts", "stream", "queue_ms", "limit_ms",
    "retry_ms", "ttft_ms", "total_ms", "tokens_in", "tokens_cached", "tokens_written", "tokens_out",
    "tokens_reasoning", "tokens_estimated", "cost_micros", "reserved_micros", "saved_micros",
    "steps", "state",
)  # fmt: skip
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
)
_PUT = {
    "calls": f"INSERT OR REPLACE INTO calls ({', '.join(COLUMNS)}) "
    f"VALUES ({', '.join('?' * len(COLUMNS))})",
    "bodies": "INSERT OR REPLACE INTO bodies VALUES (?, ?, ?)",
    "tasks": "INSERT OR IGNORE INTO tasks VALUES (?, ?, ?, ?)",
}


# What SQLite's binding says of values that it cannot hold.
UNSTORABLE = (UnicodeError, OverflowError, sqlite3.InterfaceError, sqlite3.ProgrammingError)


class Ledger:
    """SQLite file of every call.

    A row stands, committed, before an upstream is asked or an answer is given, and is replaced by
    the whole one afterwards. Where the file cannot be written, `trouble` says why; rows are held
    back, up to MOST_HELD, and written when it can be again.
    """

    MOST_HELD, BATCH = 50_000, 500

    def __init__(self, path: Path, retention_days: Clock, now: Clock = time.time) -> None:
        self.path, self.trouble = path, ""
        self.lost_rows = 0
        self._retention_days, self._now = retention_days, now
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...], Any]] = queue.SimpleQueue()
        self._held: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=self.MOST_HELD)
        self._run = random.getrandbits(31)  # which process wrote a row: the upper half of its id
        self._next_id = self._run << 32
        self._seen_unix = 0.0
        self._db: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cleaned_unix = 0.0
        self._inode = 0

    def start(self) -> None:
        """Open the file, count what an earlier process left open as spent, start the writer."""
        self._loop = asyncio.get_running_loop()
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            self._in_trouble(error)
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left, five seconds at most."""
        self._queue.put(("", (), None))
        if self._thread is not None:
            self._thread.join(5.0)
            if self._thread.is_alive() or self._held:
                log.error("ledger: %s rows could not be written", len(self._held) or "the last")

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def put(self, table: str, row: tuple[Any, ...]) -> None:
        self._queue.put((table, row, None))

    def put_now(self, table: str, row: tuple[Any, ...]) -> asyncio.Future[None]:
        """Done when the row is committed, or cannot be."""
        assert self._loop is not None
        future: asyncio.Future[None] = self._loop.create_future()
        if self.trouble:  # known already: nobody waits for it
            future.set_result(None)
        self._queue.put((table, row, None if self.trouble else future))
        return future

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        umask = os.umask(0o077)  # also for the -wal and -shm beside it
        try:
            db = sqlite3.connect(
                self.path, timeout=1.0, isolation_level=None, check_same_thread=False
            )
            try:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                migrate(db)
                settle_lost(db, self._now())
                self._is_alive(db)
            except BaseException:
                db.close()
                raise
        finally:
            os.umask(umask)
        self._db, self._inode = db, self.path.stat().st_ino

    def _is_alive(self, db: sqlite3.Connection) -> None:
        """Tell other processes that this one's open rows are not lost."""
        self._seen_unix = self._now()
        row = (self._run, os.getpid(), self._seen_unix)
        db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", row)

    def _work(self) -> None:
        is_open = True
        while is_open:
            batch = [*self._take()]
            is_open = all(table for table, _, _ in batch)
            rows = [(table, row) for table, row, _ in batch if table]
            if rows or self._held:
                try:
                    self._write(rows)
                except Exception as error:  # the writer lives, whatever comes
                    self._in_trouble(error)
            futures = [future for _, _, future in batch if future is not None]
            if futures and self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(_resolve, futures)
            self._clean()
        if self._db is not None:
            self._db.close()

    def _take(self) -> Iterable[tuple[str, tuple[Any, ...], Any]]:
        with contextlib.suppress(queue.Empty):
            yield self._queue.get(timeout=1.0 if self._held else 60.0)
            for _ in range(self.BATCH):
                yield self._queue.get_nowait()

    def _write(self, rows: list[tuple[str, tuple[Any, ...]]]) -> None:
        """One transaction for all; what cannot be written is held back."""
        held = len(self._held) + len(rows)
        self._held.extend(rows)
        self.lost_rows += held - len(self._held)
        try:
            if self._db is not None and self._is_gone():
                self._db.close()
                self._db = None
            if self._db is None:
                self._open()
            db = cast(sqlite3.Connection, self._db)
            db.execute("BEGIN IMMEDIATE")
            try:
                self._put_all(db)
                db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
        except (OSError, sqlite3.Error) as error:
            self._in_trouble(error)
            for item in [item for item in self._held if item[0] == "bodies"]:
                self._held.remove(item)  # too large to be held back
            return
        self._held.clear()
        if self.trouble:
            lost = f"; {self.lost_rows} rows were lost" if self.lost_rows else ""
            log.warning("ledger: %s is written again%s", self.path, lost)
            self.trouble = ""

    def _put_all(self, db: sqlite3.Connection) -> None:
        if self._now() - self._seen_unix > 60:
            self._is_alive(db)
        try:
            for table, group in itertools.groupby(self._held, key=lambda item: item[0]):
                db.executemany(_PUT[table], [row for _, row in group])
        except UNSTORABLE:
            for table, row in self._held:
                try:
                    db.execute(_PUT[table], row)
                except UNSTORABLE as error:  # it shall not take the others with it
                    self.lost_rows += 1
                    log.error("ledger: a row cannot be stored: %s", fault_lines(error))

    def _is_gone(self) -> bool:
        """Whether the file was taken away: SQLite would go on writing where nobody reads."""
        try:
            return self.path.stat().st_ino != self._inode
        except OSError:
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
            if found.rowcount < 1000:
                self._cleaned_unix = now


    def read(self, sql: str, values: Iterable[Any] = ()) -> list[dict[str, Any]]:
        """Rows of a query, none where the file cannot be read. Blocks; not for the event loop."""
        try:
            with contextlib.closing(open_ledger(self.path)) as db:
                return [dict(row) for row in db.execute(sql, tuple(values))]
        except (OSError, sqlite3.Error) as error:
            log.warning("ledger: %s cannot be read: %s", self.path, error)
            return []


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def migrate(db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise sqlite3.DatabaseError(f"it was written by a newer llmproxy (version {version})")
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        db.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")


def settle_lost(db: sqlite3.Connection, now_unix: float) -> None:
    """Calls that were with an upstream when their process ended count as spent, as reserved.

    A process lives while its number does and it was seen of late: numbers are used again.
    """
    open_runs = db.execute(
        "SELECT DISTINCT calls.id >> 32, pid, seen_unix FROM calls "
        "LEFT JOIN runs ON runs.id = calls.id >> 32 WHERE state = 'open'"
    )
    for run_id, pid, seen_unix in open_runs.fetchall():
        if pid is None or not is_running(pid) or now_unix - seen_unix > 300:
            db.execute(
                "UPDATE calls SET state = 'lost', cost_micros = reserved_micros, "
                "tokens_estimated = 1 WHERE state = 'open' AND id >> 32 = ?", (run_id,)
            )  # fmt: skip


def is_running(pid: int) -> bool:
    """Whether another process of that number lives; our own number is a former life."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def open_ledger(path: Path) -> sqlite3.Connection:
    """The ledger to read from, whether its daemon runs or not. Raises sqlite3.Error."""
    db = sqlite3.connect(f"file:{urllib.parse.quote(str(path))}?mode=ro", uri=True, timeout=5.0)
    db.row_factory = sqlite3.Row
    return db


SPENT = "coalesce(sum(cost_micros), 0)"
FILTERS = ("client", "task", "model", "upstream", "fate", "status")


def calls_query(
    wanted: Mapping[str, Any], trace: str | None = None, now_unix: float | None = None
) -> tuple[str, list[Any]]:
    """SQL and values for the last calls, or those of a trace.

    Raises:
        ValueError: names the filter that cannot be used.
    """
    unknown = [name for name in wanted if name not in (*FILTERS, "since", "limit")]
    if unknown:
        raise ValueError(f"{unknown_name(unknown[0], FILTERS)}; also since and limit")
    where, values = ["1"], list[Any]()
    for name in FILTERS:
        if wanted.get(name) is not None:
            where.append(f"{name} GLOB ?")
            values.append(str(wanted[name]))
    if wanted.get("since") is not None:
        try:
            since_s = parse_span(str(wanted["since"]))
        except ValueError as error:
            raise ValueError(f"since: {error}") from None
        where.append("time_unix >= ?")
        values.append((time.time() if now_unix is None else now_unix) - since_s)
    limit = str(wanted.get("limit") or 50)
    if not limit.isdecimal():
        raise ValueError("limit: wants a whole number")
    if trace is not None:
        where.append("? IN (trace, request_id)")
        values.append(trace)
    order = "ORDER BY time_unix DESC, id DESC LIMIT ?"
    sql = f"SELECT * FROM calls WHERE {' AND '.join(where)} {order}"
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
    shown["steps"] = []
    with contextlib.suppress(ValueError, TypeError):
        shown["steps"] = json.loads(row["steps"] or "[]")
    return shown


SPEND_BY = {
    "model": "model", "client": "client", "task": "task",
    "day": "strftime('%Y-%m-%d', time_unix, 'unixepoch', 'localtime')",
}  # fmt: skip


def spend_query(by: str, since_unix: float) -> tuple[str, list[Any]]:
    return (
        f"SELECT {SPEND_BY[by]} AS name, count(*) AS calls, "
        "sum(fate IN ('miss', 'bypass')) AS upstream_calls, "
        "coalesce(sum(CASE WHEN fate IN ('miss', 'bypass') THEN tokens_in END), 0) AS tokens_in, "
        "coalesce(sum(CASE WHEN fate IN ('miss', 'bypass') THEN tokens_out END), 0) AS tokens_out, "
        "coalesce(sum(cost_micros), 0) / 1e6 AS cost_usd, "
        "coalesce(sum(CASE WHEN cost_micros IS NULL THEN tokens_in + tokens_out END), 0) "
        "AS unpriced_tokens, "
        "coalesce(sum(saved_micros), 0) / 1e6 AS saved_usd "
        "FROM calls WHERE time_unix >= ? GROUP BY name ORDER BY "
        + ("name" if by == "day" else "cost_usd DESC, tokens_in DESC"),
        [since_unix],
    )


###############################################################################
# Upstream
###############################################################################
# Rule: one server and its connections. Sends one attempt of a flight and says what came of it;
# knows nothing of queues, or whether there will be another attempt.

TRANSIENT = frozenset((408, 429, 500, 502, 503, 504, 529))
# llama.cpp's answers to a prompt that does not fit, of any age: the same again, every time.
TOO_LONG = re.compile(rb"exceed_context_size_error|[Cc]ontext size has been exceeded")


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
    status: int = 0  # that it means; a stream may say 200 first
    retry_after_s: float | None = None
    answer: tuple[Head, bytes] | None = None

    @property
    def is_held_back(self) -> bool:
        return self.status == 429

    @property
    def is_unsent(self) -> bool:
        return self.ran_nothing and not self.status

    @property
    def is_broken(self) -> bool:
        """No answer, and not for want of time: the connection was refused or lost."""
        return self.answer is None and self.error.code != "upstream_timeout"

    @property
    def is_outage(self) -> bool:
        """Whether somebody else may do better; a 4xx would be the same anywhere."""
        return self.is_transient or self.counts or self.is_key_refused


def judge(head: Head, body: bytes, now_unix: float) -> Failure | None:
    """What an error answer means; None for an answer that is simply passed on."""
    status = head.status
    if status < 400:
        return None
    is_loading = status == 503 and b"Loading model" in body
    is_final = bool(TOO_LONG.search(body)) or head.headers.get("x-should-retry") == "false"
    return Failure(
        ProxyError("upstream_unreachable", f"the upstream answered {status}"),
        is_transient=status in TRANSIENT and not is_final,
        # A 501 says that a feature is off; the server is well.
        counts=status >= 500 and status != 501 and not is_loading and not TOO_LONG.search(body),
        ran_nothing=status == 429 and not is_final,
        is_loading=is_loading,
        status=status,
        retry_after_s=asked_wait_s(head.headers, now_unix),
        answer=(head, body),
    )


@dataclass(slots=True)
class Plan:
    """How one attempt is made."""

    raw_path: str
    headers: Headers
    body: bytes
    first_s: float  # silence allowed before the first byte
    silence_s: float  # and between two
    plain_body: bytes  # without the usage that we ask for
    is_stream: bool = False  # is asked for
    asks_usage: bool = False


class Watchdogs:
    """All attempts of an upstream that are under a limit, looked over by one timer.

    So an attempt costs no timer of its own, and a chunk costs an assignment.
    """

    TICK_S = 0.05

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.running: set[Watchdog] = set()
        self.pulse: Pulse | None = None  # of an upstream that can be seen at work
        self._is_ticking = False

    def add(self, watchdog: Watchdog) -> None:
        self.running.add(watchdog)
        if not self._is_ticking:
            self._is_ticking = True
            self.loop.call_later(self.TICK_S, self._tick)

    def _tick(self) -> None:
        now = self.loop.time()
        for watchdog in [w for w in self.running if w.is_due(now)]:
            self.running.discard(watchdog)
            watchdog.expire()
        self._is_ticking = bool(self.running)
        if self._is_ticking:
            self.loop.call_later(self.TICK_S, self._tick)


class Watchdog:
    """Cancels the current task after `limit_s` of silence; then the `with` raises TimeoutError.

    `limit_s` may be changed at any time. While `is_paused` it is we who wait for a caller, and
    that is no silence of the upstream.
    """

    is_paused = has_expired = False

    def __init__(self, pack: Watchdogs, limit_s: float, total_s: float | None = None) -> None:
        self.limit_s = limit_s
        self._pack, self._loop = pack, pack.loop
        self.heard_at = self._loop.time()
        self._deadline = self.heard_at + total_s if total_s else math.inf

    def __enter__(self) -> Watchdog:
        self._task = cast("asyncio.Task[Any]", asyncio.current_task(self._loop))
        self._cancelling = self._task.cancelling()
        self._pack.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pack.running.discard(self)
        if self.has_expired and self._task.uncancel() <= self._cancelling:
            if kind is asyncio.CancelledError:
                raise TimeoutError

    def heard(self) -> None:
        self.heard_at = self._loop.time()

    def pause(self) -> None:
        self.is_paused = True
        self.heard()

    def resume(self) -> None:
        self.is_paused = False
        self._deadline += self._loop.time() - self.heard_at
        self.heard()

    def is_due(self, now: float) -> bool:
        if self._pack.pulse is not None:
            silent = self._pack.pulse.is_over(self.heard_at, self.limit_s, now)
        else:
            silent = now - self.heard_at >= self.limit_s
        return (silent or now >= self._deadline) and not self.is_paused

    def expire(self) -> None:
        self.has_expired = True
        self._task.cancel()


async def write_head(writer: Any, line: str, headers: Headers) -> None:
    """Write a message's head; bytes that are not UTF-8 go out as they came in."""
    if line.isascii() and all(map(str.isascii, headers.values())):
        await writer.write_headers(line, headers)
        return
    # aiohttp's serializer drops such bytes; as a body that has no framing yet, they pass.
    fields = [f"\r\n{name}: {value}" for name, value in headers.items()]
    head = "".join([line, *fields, "\r\n\r\n"])
    await writer.write(head.encode("utf-8", "surrogateescape"))


class _Request(aiohttp.ClientRequest):
    """Sends exactly the target and headers it is given, a body in memory in the same write.

    aiohttp would add headers of its own and write every body from a task of its own.
    """

    target = ""
    whole = b""

    def update_headers(self, headers: Any) -> None:
        self.headers = headers

    def update_auto_headers(self, skip_auto_headers: Any) -> None:
        pass

    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        if self.body:
            return await super().send(conn)
        writer = StreamWriter(conn.protocol, self.loop)
        await write_head(writer, f"{self.method} {self.target} HTTP/1.1", self.headers)
        await writer.write(self.whole, drain=False)
        writer.set_eof()
        return aiohttp.ClientResponse(
            self.method, self.url, writer=None, continue100=None, timer=TimerNoop(),
            request_info=self.request_info, traces=[], loop=self.loop, session=None,  # type: ignore[arg-type]
            stream_writer=writer,
        )  # fmt: skip


class _Resolver(aiohttp.ThreadedResolver):
    """`localhost` is both loopback addresses; the connector takes the one that answers."""

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        if host != "localhost":
            return await super().resolve(host, port, family)
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": kind,
                "proto": 0,
                "flags": 0,
            }
            for kind, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
        ]


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


class Upstream:
    """One base URL, the connections to it, its gate and its keys."""

    def __init__(self, rule: UpstreamRule, settings: Settings, clock: Clock) -> None:
        self.rule, self.name, self.base = rule, rule.name, rule.url
        base = rule.url
        self.model = ""  # what llama.cpp says it runs
        self.slots: int | None = None
        self.context_tokens = self.context_used = 0  # of all slots together
        self.busy_slots: int | None = None
        self.is_llama = False  # its /props said so
        self.speeds = Speeds()
        self.affinity = Slots(0)
        self.attempts = 0
        self._looked_at = 0  # how many attempts there were when it was last looked at
        self.on_model: Callable[[], None] = lambda: None  # it runs another one now
        self.is_reachable: bool | None = None
        self._left_at = -math.inf  # when it was gone
        self._needs_props = True
        self._looks = ["/slots", "/metrics", "/health"]  # the first that the server has
        self.is_loading = False
        self.is_healthy = True  # as the last health check said
        self.checked_at = self.checked_s = 0.0  # when the last health check ended, how long it took
        self.usage_known: dict[str, bool] = {}  # by route: takes stream_options.include_usage
        self._settings = settings
        pool = [
            Key(key.source, read_secret(key, os.environ), key.header,
                rpm=Bucket.of(key.rpm, clock), tpm=Bucket.of(key.tpm, clock), clock=clock)
            for key in rule.keys
        ]  # fmt: skip
        self.gate = Gate(1, 1, clock, pool=pool)
        self._clock = clock
        self.resize()
        self._health_path = "/health"
        self._check: asyncio.Task[bool] | None = None
        self._targets: Memo[tuple[URL, str]] = Memo(self._target)
        self._base_path = URL(base).raw_path.rstrip("/")
        self._host = URL(base).host_port_subcomponent or ""
        host = URL(base).host or ""
        self._is_local = is_loopback(host)
        self._proxy: URL | None = None
        if not self._is_local and not urllib.request.proxy_bypass(host):
            proxy = urllib.request.getproxies().get(base.partition(":")[0])
            self._proxy = URL(proxy) if proxy else None

    def __repr__(self) -> str:
        return f"<Upstream {self.name} reachable={self.is_reachable}>"

    def resize(self) -> None:
        """Give the gate the sizes that the settings, or llama.cpp, say."""
        rule, settings = self.rule, self._settings
        self.gate.limit(rule.rpm or settings.rpm, rule.tpm or settings.tpm)
        wanted = self.rule.concurrency or self._settings.concurrency
        calls = wanted if isinstance(wanted, int) else self.slots or 16
        tokens = self.rule.inflight_tokens or self._settings.inflight_tokens
        if wanted == "adaptive":
            self.gate.adaptive = self.gate.adaptive or Adaptive(self.slots or 4, self._clock)
            calls = self.gate.adaptive.level
            tokens = tokens or Adaptive.MOST * 4000
        else:
            self.gate.adaptive = None
        if tokens is None and wanted == "auto" and self.context_tokens:
            tokens = max(self.context_tokens, calls * 1000)
        self.gate.resize(calls, max(1, (tokens or calls * 4000) // 1000))

    def shown(self) -> dict[str, Any]:
        gate = self.gate
        state = {None: "unknown", True: "up", False: "unreachable"}[self.is_reachable]
        state = "unhealthy" if state == "up" and not self.is_healthy else state
        state = "restarting" if self.is_restarting else state
        return {
            "name": self.name, "url": self.base, "model": self.model,
            "state": "loading" if self.is_loading else state, "llama_cpp": self.is_llama,
            "slots": self.slots, "busy_slots": self.busy_slots,
            "context_tokens": self.context_tokens, "context_used": self.context_used,
            **self.speeds.shown(), "is_adaptive": gate.adaptive is not None,
            "concurrency": gate.slots, "inflight_tokens": gate.capacity * 1000,
            "running": gate.running, "queued": gate.queued,
            "service_s": round(gate.service_s, 3),
            "rpm": shown_bucket(gate.rpm), "tpm": shown_bucket(gate.tpm),
            "keys": [key.shown() for key in gate.pool],
        }  # fmt: skip

    def hide(self, data: bytes) -> bytes:
        """What an upstream says, without a key of ours that it quotes; as long as before."""
        for key in self.gate.pool:
            if key.secret.encode() in data:
                data = data.replace(key.secret.encode(), b"*" * len(key.secret))
        return data

    def begun_key(self, data: bytes) -> int:
        """How many of the last bytes may be the beginning of a key, to be held back."""
        longest = 0
        for key in self.gate.pool:
            secret = key.secret.encode()
            sizes = range(min(len(secret) - 1, len(data)), longest, -1)
            longest = next((n for n in sizes if data.endswith(secret[:n])), longest)
        return longest

    def head_of(self, response: aiohttp.ClientResponse) -> Head:
        head = head_of(response)
        for key in self.gate.pool:
            head.reason = head.reason.replace(key.secret, "***")
            for name in [n for n, value in head.headers.items() if key.secret in value]:
                values = [v.replace(key.secret, "***") for v in head.headers.popall(name)]
                head.headers.extend((name, value) for value in values)
        return head

    def dress(self, plan: Plan, key: Key | None, dialect: str) -> None:
        """Put a key of ours on a request, where there is a pool of them."""
        if not self.gate.pool:
            return
        for name in CREDENTIALS:
            plan.headers.popall(name, None)
        self._show_key(plan.headers, key or self.gate.least_loaded(""), dialect)

    @staticmethod
    def _show_key(headers: Headers, key: Key, dialect: str) -> None:
        name = key.header or ("x-api-key" if dialect == "anthropic" else "Authorization")
        is_bearer = name.lower() == "authorization"
        headers[name] = f"Bearer {key.secret}" if is_bearer else key.secret

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watchdogs = Watchdogs(self._loop)
        self._pulse = Pulse(self._loop.time)
        resolver = _Resolver()
        self._pool = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, resolver=resolver)
        # A body that streams through cannot be sent twice, so it never rides on a pooled
        # connection that the upstream may just be closing.
        self._single = aiohttp.TCPConnector(limit=0, force_close=True, resolver=resolver)
        self._attending = self._loop.create_task(self._attend())

    async def close(self) -> None:
        self._attending.cancel()
        if self._check is not None:
            self._check.cancel()
        await self._pool.close()
        await self._single.close()

    async def open(
        self,
        method: str,
        raw_path: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
    ) -> aiohttp.ClientResponse:
        """Send a request, wait for the answer's head.

        A pooled connection that turns out to have been closed by the upstream is replaced, once.
        This is what aiohttp's session does inside, without its redirects, cookies and silent
        second sending of GET, and it tells us whether the connection was a used one.

        Raises:
            aiohttp.ClientError, OSError: `explain` says what they mean.
        """
        headers["Host"] = self._host
        is_stream = body is not None and not isinstance(body, bytes)
        if isinstance(body, bytes) and (body or method not in ("GET", "HEAD", "OPTIONS")):
            headers["Content-Length"] = str(len(body))
        limit = _connect_limit(self._settings.connect_timeout)
        connector = self._single if is_stream else self._pool
        while True:
            request = self._request(method, raw_path, headers, body)
            try:
                connection = await connector.connect(request, traces=[], timeout=limit)
            except TimeoutError as error:
                raise aiohttp.ConnectionTimeoutError from error
            except aiohttp.ClientConnectorError as error:
                self._reached(False, self.explain(error).message)
                raise
            self._reached(True)
            protocol = cast(Any, connection.protocol)
            is_used, protocol.llmproxy_used = hasattr(protocol, "llmproxy_used"), True
            if is_used and protocol.should_close:  # something came that nobody had asked for
                connection.close()
                continue
            sent_at = time.monotonic()
            try:
                return await self._exchange(request, connection)
            except (aiohttp.ServerDisconnectedError, ConnectionError):
                if not is_used or time.monotonic() - sent_at > STALE_CONNECTION_S:
                    raise
                self._needs_props |= self.is_llama  # it may be another process by now
                connector = self._single  # once, and surely on a fresh one

    def _reached(self, is_reachable: bool, message: str = "") -> None:
        """Say it once when that changes; what is back may be another server."""
        if self.is_reachable is not is_reachable:
            if self.is_reachable is False or message:
                log.warning("%s", message or f"{self.base} is reachable")
            if self.is_reachable:
                self._left_at = time.monotonic()
            self._needs_props |= self.is_llama or self._is_local
            self.is_loading &= is_reachable
            self.is_reachable = self.is_healthy = is_reachable

    @property
    def is_mute(self) -> bool:
        """A llama.cpp that takes connections and does not answer any more."""
        silent_s = self._loop.time() - self._pulse.answered_at
        return self.is_llama and silent_s > 2 * LOOK_S + HEALTH_LIMIT_S

    @property
    def is_restarting(self) -> bool:
        """A llama.cpp that has just gone: the user is probably giving it another model."""
        is_gone = self.is_llama and self.is_reachable is False
        return is_gone and time.monotonic() - self._left_at < RESTART_S

    async def is_gone(self) -> bool:
        """Whether its connections broke because the whole server is gone, and may come back."""
        if self.is_llama and not self.is_restarting:
            await self.is_alive()
        return self.is_restarting

    def _request(self, method: str, raw_path: str, headers: Headers, body: Any) -> _Request:
        data = body
        if isinstance(body, bytes):
            data = _as_stream(body) if len(body) > FLIGHT_WINDOW_BYTES else None
        url, target = self._targets[raw_path]
        request = _Request(
            method, url, headers=headers, data=data, loop=self._loop, proxy=self._proxy
        )
        if isinstance(body, bytes) and data is None:
            request.whole = body
        request.target = target
        return request

    def _target(self, raw_path: str) -> tuple[URL, str]:
        """What connects, and what the request line says (all of it to a plain HTTP proxy)."""
        url = URL(join_path(self.base, raw_path), encoded=True)
        target = join_path(self._base_path, raw_path)
        if self._proxy is not None and url.scheme == "http":
            target = f"http://{self._host}{target}"
        return url, target

    async def _exchange(self, request: _Request, connection: Any) -> aiohttp.ClientResponse:
        try:
            connection.protocol.set_response_params(
                skip_payload=request.method == "HEAD", read_until_eof=True, auto_decompress=False,
                max_line_size=HEADER_LINE_BYTES, max_field_size=HEADER_LINE_BYTES,
            )  # fmt: skip
            response = await request.send(connection)
            return await response.start(connection)
        except BaseException:
            connection.close()
            raise

    def watch(self, limit_s: float) -> Watchdog:
        return Watchdog(self._watchdogs, limit_s, self._settings.total_timeout)

    def explain(self, error: BaseException) -> ProxyError:
        """Our error for what `open` or the body raised; never quotes header bytes."""
        code, text = next((c, t) for kind, c, t in _EXPLANATIONS if isinstance(error, kind))
        reason = ""
        if isinstance(error, aiohttp.ClientConnectorError):
            reason = printable(error.os_error.strerror or type(error.os_error).__name__)
        limit = f"{self._settings.connect_timeout:g}"
        return ProxyError(code, text.format(base=self.base, limit=limit, reason=reason))

    async def attempt(self, flight: Flight, plan: Plan) -> Failure | None:
        """One attempt for a flight.

        Returns None once the answer, or the last chunk of its stream, is with the flight; else
        what went wrong before anything was.

        Raises:
            ProxyError: a stream broke off after callers had seen its beginning.
        """
        call = flight.leader
        self.attempts += 1
        response: aiohttp.ClientResponse | None = None
        try:
            with self.watch(plan.first_s) as watchdog:
                response = await self.open(call.method, plan.raw_path, plan.headers, plan.body)
                head = self.head_of(response)
                self.is_loading = self.is_loading and head.status == 503
                receive = self._stream if head.is_stream and head.status == 200 else self._gather
                return await receive(flight, head, response, watchdog, plan)
        except CallerGone:
            raise
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            explained = self.explain(error)
            if response is not None and explained.code == "upstream_unreachable":
                explained = self.explain(aiohttp.ClientPayloadError())
            if type(error) is TimeoutError and self._has_ended(flight):
                return None  # only the end of the connection did not come
            if flight.head is not None and not flight.rewind():
                raise explained from None
            is_refused = isinstance(error, aiohttp.ClientConnectorError)
            is_refused |= isinstance(error, aiohttp.ConnectionTimeoutError)
            # A silent plain call has probably done its work: asking again would pay twice.
            is_silent = type(error) is TimeoutError
            # Nor is a server asked again that answers nobody.
            is_transient = not is_silent or (call.is_stream and not self.is_mute)
            is_paid = is_silent or response is not None
            return Failure(explained, is_transient, ran_nothing=is_refused, is_paid=is_paid)
        finally:
            if response is not None:
                response.close()

    async def _gather(
        self, flight: Flight, head: Head, response: aiohttp.ClientResponse,
        watchdog: Watchdog, plan: Plan,
    ) -> Failure | None:  # fmt: skip
        chunks: list[bytes] = []
        held = 0
        content = response.content
        while not content.at_eof():
            chunk = await content.readany()
            watchdog.heard()
            watchdog.limit_s = plan.silence_s
            if flight.head is None:
                chunks.append(chunk)
                held += len(chunk)
                if held <= FLIGHT_BYTES:
                    continue
                flight.has_failed = head.status >= 500
                flight.begin(head)  # too long to hold: commit, and pass it on as it comes
                chunk = b"".join(chunks)
            flight.push(chunk)
            if flight.is_ahead:
                await self._hold(flight, watchdog)
        if flight.head is not None:
            return None
        body = self.hide(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        if (failure := judge(head, body, time.time())) is not None:
            return failure
        if _ends_with_connection(response) and not _is_whole_json(head, body):
            raise aiohttp.ClientPayloadError
        flight.begin(head)
        if body:
            flight.push(body)
        flight.is_complete = True
        return None

    @staticmethod
    async def _hold(flight: Flight, watchdog: Watchdog) -> None:
        watchdog.pause()
        await flight.room()
        watchdog.resume()

    async def _stream(
        self, flight: Flight, head: Head, response: aiohttp.ClientResponse,
        watchdog: Watchdog, plan: Plan,
    ) -> Failure | None:  # fmt: skip
        content = response.content
        is_coded = "Content-Encoding" in head.headers
        begun = b"" if is_coded else await self._first_event(response, watchdog)
        if (found := stream_error(first_event(begun) or b"")) is not None:
            return await self._failed_stream(head, begun, found, content)
        watchdog.limit_s = plan.silence_s
        # It may change length on the way, by the usage chunk or by our error event.
        head.headers.popall("Content-Length", None)
        takes = plan.asks_usage and not flight.is_merged
        events = None if is_coded else Events(takes, holds_finish=flight.is_merged)
        flight.begin(head)
        try:
            if begun := events.feed(begun) if events else begun:
                flight.push(self.hide(begun))
                if flight.meter is not None and self._cut(flight, begun):
                    return None
            await self._rest(flight, response, events, watchdog)
        except (aiohttp.ClientError, OSError):
            if not self._is_whole(flight, head):  # else only the last chunk was missing
                raise
        finally:
            flight.extra = events.taken if events else b""
        # Without a length or a last chunk, only the stream itself can tell that it is whole.
        flight.is_complete = self._is_whole(flight, head)
        if flight.meter is not None and flight.meter.is_cut:
            flight.is_complete = False  # by its task's budget: whole for its caller, not to be kept
            return None
        if flight.has_failed and flight.is_merged:
            return self._rewound(flight, head)
        is_cut = not (flight.is_complete or flight.has_failed or is_coded)
        may_be_whole = flight.size_bytes == 0 or not _ends_with_connection(response)
        if is_cut and (flight.is_merged or not may_be_whole):
            raise aiohttp.ClientPayloadError
        return None

    @staticmethod
    def _rewound(flight: Flight, head: Head) -> Failure | None:
        """The error that ended a stream of which nobody has seen anything yet."""
        errors = filter(None, map(stream_error, EVENT_END.split(flight.tail(SLICE_BYTES))))
        if (found := next(errors, None)) is None or not flight.rewind():
            return None
        status, error = found
        return judge(plain_head(head, status), error, time.time())

    async def _rest(
        self, flight: Flight, response: aiohttp.ClientResponse, events: Events | None,
        watchdog: Watchdog,
    ) -> None:  # fmt: skip
        """The hot path of a stream: no task, no timer, no lock and no parsing per chunk."""
        content = response.content
        while not content.at_eof():
            chunk = await content.readany()
            watchdog.heard()
            if events is not None and not (chunk := events.feed(chunk)):
                continue
            flight.push(self.hide(chunk) if self.gate.pool else chunk)
            if flight.meter is not None and self._cut(flight, chunk):
                return
            if flight.is_ahead:
                await self._hold(flight, watchdog)
            if flight.is_merged and _DONE.search(chunk):
                await self._drain(content)
                break
        rest = events.rest() if events is not None else b""
        # Half an event at the end of a connection is what a cut leaves.
        if not _ends_with_connection(response) or is_event(rest):
            flight.push(rest)

    @staticmethod
    async def _drain(content: aiohttp.StreamReader) -> None:
        """All has been said: give the connection a moment to end, so that it can be used again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.25):
                while not content.at_eof():
                    await content.readany()

    def _cut(self, flight: Flight, chunk: bytes) -> bool:
        """End a stream cleanly where its task's budget ends, unless it has just ended by itself."""
        meter, head = flight.meter, flight.head
        if meter is None or head is None or not meter.is_over(chunk):
            return False
        if self._is_whole(flight, head):
            meter.is_cut = False
            return False
        tail = flight.tail(FLIGHT_BYTES)
        flight.push(closing_events(flight.leader.name, tail, meter.output_tokens))
        return True

    @staticmethod
    async def _first_event(response: aiohttp.ClientResponse, watchdog: Watchdog) -> bytes:
        """What comes until the first event is whole: it may be an error, which can be retried."""
        content, begun = response.content, b""
        while not (content.at_eof() or first_event(begun) or len(begun) > SLICE_BYTES):
            begun += await content.readany()
            watchdog.heard()
        is_half = content.at_eof() and first_event(begun) is None and not is_event(begun)
        if begun and is_half and _ends_with_connection(response):
            raise aiohttp.ClientPayloadError  # cut before anything was said
        return begun

    def _has_ended(self, flight: Flight) -> bool:
        """Whether a stream that fell silent had said all before."""
        head = flight.head
        if head is None or not head.is_stream or not self._is_whole(flight, head):
            return False
        flight.is_complete = True
        return True

    @staticmethod
    def _is_whole(flight: Flight, head: Head) -> bool:
        """Whether a stream has said that it is at its end, and not with an error."""
        call = flight.leader
        is_coded = "Content-Encoding" in head.headers  # which can be read from its start only
        tail = decoded(flight.tail(FLIGHT_BYTES if is_coded else SLICE_BYTES), head.headers)
        flight.has_failed = any(map(stream_error, EVENT_END.split(tail)))
        flight.has_failed |= b'"response.failed"' in tail
        if flight.has_failed or call.route is None:
            return False
        ends = call.route.ends
        count, prompts = call.doc.get("n"), call.doc.get("prompt")
        wanted = count if type(count) is int and ends is _FINISH else 1
        wanted *= len(prompts) if isinstance(prompts, list) and ends is _FINISH else 1
        found = len(ends.findall(tail)) if ends is not None else 0
        is_done = bool(_DONE.search(tail)) and (found > 0 or not flight.is_merged)
        return is_done or (ends is not None and found >= wanted)

    async def _failed_stream(
        self, head: Head, begun: bytes, found: tuple[int, bytes], content: aiohttp.StreamReader
    ) -> Failure:
        """A stream that begins with an error: that error, with all that came as its answer."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with asyncio.timeout(1.0):
                while not content.at_eof() and len(begun) <= SLICE_BYTES:
                    begun += await content.readany()
        head.headers.popall("Content-Length", None)
        status, error = found
        failure = judge(Head(status, "", head.headers), error, time.time())
        assert failure is not None
        failure.answer = (head, self.hide(begun))
        return failure

    async def is_alive(self, limit_s: float = HEALTH_LIMIT_S) -> bool:
        """Ask for health, free of charge; callers at the same time share one question."""
        check = self._check
        if check is None or check.done():
            check = self._check = self._loop.create_task(self._ask_health())
        done, _ = await asyncio.wait([check], timeout=limit_s)
        return bool(done) and not check.cancelled() and check.result()

    async def _ask_health(self) -> bool:
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(HEALTH_LIMIT_S):
                status, body = await self.get(self._health_path)
                if self._health_path == "/health" and status in (404, 405, 501):
                    self._health_path = "/v1/models"
                    status, body = await self.get(self._health_path)
        except (aiohttp.ClientError, OSError, ValueError):
            self.is_healthy = False
            return False
        finally:
            self.checked_at = time.monotonic()
            self.checked_s = self.checked_at - started_at
        was_loading = self.is_loading
        self.is_loading = status == 503 and (was_loading or b"Loading model" in body)
        self._needs_props = self._needs_props or was_loading is not self.is_loading
        self.is_healthy = status < 300 or status in (401, 403)
        return self.is_healthy

    async def get(
        self, path: str, headers: Headers | None = None, limit_bytes: int = SLICE_BYTES
    ) -> tuple[int, bytes]:
        """A small question of our own, beside the calls and on a connection of its own."""
        if headers is None:
            headers = CIMultiDict()
            if self.gate.pool:
                self._show_key(headers, self.gate.least_loaded(""), "openai")
        headers["Connection"] = "close"
        response = await self.open("GET", path, headers, None)
        body = b""
        try:
            while len(body) < limit_bytes and (part := await response.content.read(SLICE_BYTES)):
                body += part
            return response.status, body
        finally:
            response.close()

    async def wait_ready(self, limit_s: float) -> None:
        """Wait while llama.cpp loads its model, or is on its way back.

        Raises:
            ProxyError: queue_timeout; it was not ready within `limit_s`.
        """
        until = time.monotonic() + limit_s
        while self.is_loading or self.is_restarting:
            left_s = until - time.monotonic()
            if left_s <= 0:
                what = "still loading its model" if self.is_loading else "not back yet"
                self.is_loading = False  # until the next answer says so again
                why = f"{self.base} is {what} (--queue-timeout)"
                raise ProxyError("queue_timeout", why, retry_after_s=5)
            await asyncio.sleep(min(0.25, left_s))
            await self.is_alive()

    async def meet(self) -> None:
        """First look. Not being there yet is no error."""
        if await self.is_alive():
            self.is_reachable = True
        elif self.is_reachable is None:
            log.warning(
                "%s does not answer yet; calls get 502 until it does, or wait while it loads",
                self.base,
            )
            self.is_reachable = False
        await self.learn_props()

    async def _attend(self) -> None:
        """Keep an eye on a llama.cpp, and on a server of this machine that is not there yet."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                is_awaited = self.is_loading or (self._is_local and self.is_reachable is False)
                if self.is_llama or is_awaited:
                    await self._look()
                if self._needs_props and self.is_reachable and not self.is_loading:
                    await self.learn_props()
            except Exception as error:  # it goes on, whatever a server says
                log.error("internal error: %s", fault_lines(error))

    async def _look(self) -> None:
        """Is it there, and does it get on? An idle one is asked for its health only."""
        self._pulse.ask()
        is_idle = not self.gate.running and self.attempts == self._looked_at
        if not self.is_llama or is_idle:
            if await self.is_alive():
                self._pulse.saw(False, None)
                self.busy_slots = 0 if self.is_llama else None
            return
        path, self._looked_at = self._looks[0], self.attempts
        try:
            async with asyncio.timeout(HEALTH_LIMIT_S):
                status, body = await self.get(path, limit_bytes=FLIGHT_WINDOW_BYTES)
        except (aiohttp.ClientError, OSError, ValueError):
            self.is_healthy = False
            return
        self.is_healthy = True
        if status == 200 and path == "/slots" and self._read_slots(body):
            return
        if status == 200 and path == "/metrics":
            counts = dict(re.findall(rb"^llamacpp:(\w+) (\S+)", body, re.MULTILINE))
            moving = counts.get(b"prompt_tokens_total"), counts.get(b"tokens_predicted_total")
            self._pulse.saw(counts.get(b"requests_processing") != b"0", moving)
        else:
            self._pulse.saw(True, None)
            is_passing = status in TRANSIENT  # it loads, or has a bad moment
            if len(self._looks) > 1 and not is_passing:
                self._looks.pop(0)

    def _read_slots(self, body: bytes) -> bool:
        """The counts of each slot; a batch of a prompt is counted when it is through.

        False where this is not what llama.cpp says.
        """
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return False
        slots = [s for s in found if isinstance(s, dict)] if isinstance(found, list) else []
        busy = [slot for slot in slots if slot.get("is_processing")]
        seen = [
            (s.get("id_task"), s.get("n_prompt_tokens_processed"), s.get("next_token"))
            for s in busy
        ]  # fmt: skip
        self._pulse.saw(bool(busy), seen)
        self.busy_slots = len(busy)
        self.context_used = sum(_whole(slot, "n_prompt_tokens") for slot in slots)
        return True

    async def learn_props(self) -> None:
        """What a llama.cpp server says of itself: slots, context, and the model it runs."""
        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
            async with asyncio.timeout(HEALTH_LIMIT_S):
                status, body = await self.get("/props", limit_bytes=FLIGHT_WINDOW_BYTES)
            self._needs_props = status == 503
            props = json.loads(body) if status == 200 else None
            if isinstance(props, dict):
                self._take_props(props)
            elif status in (404, 405, 501):
                self.is_llama, self._watchdogs.pulse = False, None
        self.resize()

    def _take_props(self, props: dict[str, Any]) -> None:
        general = _inner(props, "default_generation_settings")
        slots, model = self.slots, Path(str(props.get("model_path", ""))).name
        self.slots = _whole(props, "total_slots") or None
        self.is_llama = bool(general) and self.slots is not None
        self._watchdogs.pulse = self._pulse if self.is_llama else None
        self._looks = ["/slots", "/metrics", "/health"]
        self.context_tokens = _whole(general, "n_ctx") * (self.slots or 0)
        if (self.slots, model) != (slots, self.model):
            self.affinity = Slots(self.slots or 0)
        if model != self.model and self.model:
            log.warning("%s runs %s now", self.base, printable(model))
            self.on_model()
        self.model = model


@functools.lru_cache(8)
def _connect_limit(limit_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=limit_s)


def head_of(response: aiohttp.ClientResponse) -> Head:
    headers = response.headers
    connection = ", ".join(headers.getall("Connection")) if "Connection" in headers else None
    kept = end_to_end(headers.items(), connection, HOP_BY_HOP)
    return Head(response.status, response.reason or "", kept)


def _ends_with_connection(response: aiohttp.ClientResponse) -> bool:
    coding = response.headers.get("Transfer-Encoding", "").lower()
    return "chunked" not in coding and "Content-Length" not in response.headers


def _is_whole_json(head: Head, body: bytes) -> bool:
    kind = head.headers.get("Content-Type", "").partition(";")[0].strip()
    if not body or kind != "application/json" or "Content-Encoding" in head.headers:
        return True
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def slices(body: bytes) -> Iterable[bytes]:
    if len(body) <= SLICE_BYTES:
        return (body,)
    return (body[start : start + SLICE_BYTES] for start in range(0, len(body), SLICE_BYTES))


async def _as_stream(body: bytes) -> AsyncIterator[bytes]:
    for part in slices(body):
        yield part


###############################################################################
# Counters
###############################################################################
# Rule: one caller's request as it is known so far, and what has happened, in numbers.

_TRACE = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
ADMIN = "/_llmproxy/"
FATES = ("miss", "joined", "hit", "stale", "bypass", "rejected")


class Call:
    """One caller's request, from its headers to its last byte.

    `low`: every header once, its name in lower case, repeats joined with a comma.
    `sent`: what goes upstream of them, as it came.
    """

    dialect = "openai"
    route: Route | None = None
    client = "anonymous"
    who: Client | None = None  # where client keys are on
    own_keys: tuple[str, ...] = ()  # the client keys that it presented; they go no further
    priority = "normal"
    retry: str | None = None
    directives: Mapping[str, str] = {}
    body = b""
    doc: Mapping[str, Any] = {}
    model = ""
    size = NO_TEXT
    max_tokens: int | None = None
    is_stream = wants_usage = is_merged = may_join = may_keep = False
    own: tuple[str, ...] = ()  # names of headers that are for us
    leads = False  # a flight that may outlive the call
    has_new_trace = False
    fate = code = upstream = fallback = ""
    status = 0
    elapsed_s = ended_unix = 0.0
    reply: Reply | None = None  # one that has begun
    id = 0  # of its row in the ledger
    task = request_id = shared = ""
    task_budget = 0
    attempts = cost_micros = reserved_micros = saved_micros = 0
    due_micros = due_tokens = metered_tokens = 0  # used, and not settled yet
    used_prompt = used_output = 0  # by all attempts
    expected = NO_USAGE  # what an open row says, in case that it is lost
    steps: tuple[dict[str, Any], ...] = ()
    is_recorded = is_unpriced = False
    timing = NO_TIME
    usage = NO_USAGE

    def __init__(self, request: web.BaseRequest, now: float) -> None:
        self.method = request.method
        self.started_at, self.began_unix = now, time.time()
        raw_path, authority = request.raw_path, ""
        if not raw_path.startswith("/"):  # absolute form, RFC 9112 3.2.2, or OPTIONS *
            authority, slash, rest = raw_path.partition("://")[2].partition("/")
            authority = authority.rpartition("@")[2]
            raw_path = "/" + rest if slash else "/"
        self.raw_path = raw_path
        self.path = raw_path.partition("?")[0]  # without the query, still encoded: safe to log
        path = request.path if "%" in self.path else self.path
        low: dict[str, str] = {}
        sent: list[tuple[str, str]] = []
        for name, value in request.headers.items():
            lower = name.lower()
            low[lower] = value if lower not in low else f"{low[lower]}, {value}"
            if lower[:11] == "x-llmproxy-":
                self.own = (*self.own, lower)
            elif lower not in NOT_SENT_UPSTREAM:
                sent.append((name, value))
        if authority:
            low["host"] = authority
        self.low, self.sent = low, sent
        self.is_admin = path.startswith(ADMIN)
        self.origin = low.get("origin")
        trace, parent = low.get("x-request-id"), low.get("traceparent")
        if trace is None or not _TRACE.fullmatch(trace):
            found = _TRACEPARENT.fullmatch(parent) if parent else None
            trace = found[1] if found else new_trace()
            self.has_new_trace = found is None
        self.trace = trace
        self.route = route = find_route(self.method, path)
        if route is not None:
            self.dialect = route.dialect
        elif "anthropic-version" in low:
            self.dialect = "anthropic"
        parts = [low.get(name, "") for name in CREDENTIALS]
        if "key=" in raw_path and (key := re.search(r"[?&]key=([^&]*)", raw_path)):
            parts.append(key[1])
        self.credential = "\0".join(parts)

    @property
    def name(self) -> str:
        """The route without any prefix: chat/completions."""
        return self.path.rpartition("/v1/")[2].lstrip("/")

    def api_keys(self) -> Iterable[str]:
        """The keys that it presents."""
        for name in ("authorization", "x-api-key", "api-key", "x-goog-api-key"):
            if value := self.low.get(name):
                is_bearer = name == "authorization" and value[:7].lower() == "bearer "
                yield value[7:].strip() if is_bearer else value
        for key in re.findall(r"[?&]key=([^&]*)", self.raw_path):
            yield urllib.parse.unquote(key)

    @property
    def may_cost(self) -> bool:
        return self.method not in ("GET", "HEAD", "OPTIONS", "DELETE")

    def may_use(self, model: str) -> bool:
        return self.who is None or self.who.rule.may_use(model)

    def check_model(self, model: str) -> None:
        """Raise model_not_allowed where the caller's client may not use it."""
        if self.who is not None and not self.who.rule.may_use(model):
            known = f"the model {printable(model)}" if model else "a route whose model is unknown"
            why = f"client {self.client} may not use {known}"
            raise ProxyError("model_not_allowed", why)

    def reserve(self, demand: Demand) -> Reservation | None:
        """The call's part of its client's own limits; raises rate_limited."""
        if self.who is None:
            return None
        return self.who.reserve(demand.prompt_tokens, demand.output_tokens)

    @property
    def max_age_s(self) -> float:
        """How old a kept answer this caller takes."""
        if not self.directives:
            return math.inf
        if "no-cache" in self.directives:
            return -1.0
        age = self.directives.get("max-age", "")
        return float(age) if age.isdecimal() else math.inf

    def let_go(self) -> None:
        """Nothing large outlives the call."""
        self.body, self.doc, self.low, self.sent = b"", {}, {}, []


def new_trace() -> str:
    return f"{random.getrandbits(128):032x}"


class Histogram:
    """Counts by upper bound, as Prometheus wants them."""

    BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        self.counts[bisect.bisect_left(self.BOUNDS_S, value_s)] += 1
        self.sum_s += value_s

    def lines(self, name: str, labels: str) -> Iterable[str]:
        comma = "," if labels else ""
        totals = itertools.accumulate(self.counts)
        for bound, total in zip([*self.BOUNDS_S, "+Inf"], totals, strict=True):
            yield f'{name}_bucket{{{labels}{comma}le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum_s:.6f}"
        yield f"{name}_count{{{labels}}} {sum(self.counts)}"


class Counters:
    """Totals since the start, and the last calls."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.started_at = clock()
        self.fates = Counter[str](dict.fromkeys(FATES, 0))
        self.requests = self.upstream_calls = self.upstream_429 = self.retries = 0
        self.tokens_in = self.tokens_out = self.tokens_saved = 0
        self.unpriced_tokens = self.saved_micros = 0
        self.times = {name: Histogram() for name in ("queue", "ttft", "total")}
        self.latency_s: deque[float] = deque(maxlen=1000)
        self.queue_s: deque[float] = deque(maxlen=1000)
        self.recent: deque[Call] = deque(maxlen=50)
        self._ended_at: deque[float] = deque(maxlen=10_000)

    def end(self, call: Call) -> None:
        now = self._clock()
        elapsed_s = call.elapsed_s = now - call.started_at
        call.ended_unix = time.time()
        if not call.leads:
            call.let_go()
        self.fates[call.fate] += 1
        self._ended_at.append(now)
        if call.fate != "rejected" and call.status != 499:
            self.latency_s.append(elapsed_s)
            self.times["total"].add(elapsed_s)
            if call.fate != "joined":
                self.queue_s.append(call.timing.queue_s)
                self.times["queue"].add(call.timing.queue_s)
            if call.fate == "miss":
                self.times["ttft"].add(min(call.timing.upstream_s, elapsed_s))
        if call.fate in ("joined", "hit", "stale"):
            self.tokens_saved += call.usage.prompt + call.usage.completion
        self.recent.append(call)

    @staticmethod
    def row(call: Call) -> dict[str, Any]:
        """One call for the log and the table; the keys are stable."""
        return {
            "time_unix": call.ended_unix, "trace": printable(call.trace, 200),
            "client": call.client,
            "method": call.method, "path": printable(call.path), "model": printable(call.model),
            "upstream": call.upstream, "fate": call.fate, "status": call.status, "code": call.code,
            "stream": call.is_stream,
            "queue_ms": round(call.timing.queue_s * 1000, 1),
            "limit_ms": round(call.timing.limit_s * 1000, 1),
            "retry_ms": round(call.timing.retry_s * 1000, 1),
            "ttft_ms": round(min(call.timing.upstream_s, call.elapsed_s) * 1000, 1),
            "total_ms": round(call.elapsed_s * 1000, 1),
            "tokens_in": call.usage.prompt, "tokens_cached": call.usage.cached,
            "tokens_out": call.usage.completion, "tokens_estimated": call.usage.is_estimated,
            "task": printable(call.task), "cost_usd": call.cost_micros / 1e6,
        }  # fmt: skip

    def last(self, count: int) -> list[dict[str, Any]]:
        return [self.row(call) for call in list(self.recent)[-count:]] if count else []

    def spent(self, usage: Usage) -> None:
        self.tokens_in += usage.prompt
        self.tokens_out += usage.completion

    def rate(self, span_s: float = 10.0) -> float:
        """Calls a second over the last `span_s`."""
        now = self._clock()
        recent = sum(1 for at in self._ended_at if now - at <= span_s)
        return recent / max(1.0, min(span_s, now - self.started_at))

    def status(self) -> dict[str, Any]:
        return {
            "requests": self.requests, **self.fates,
            "upstream_calls": self.upstream_calls, "upstream_429": self.upstream_429,
            "retries": self.retries,
            "tokens_in": self.tokens_in, "tokens_out": self.tokens_out,
            "tokens_saved": self.tokens_saved,
            "unpriced_tokens": self.unpriced_tokens,
            "latency_ms": _percentiles_ms(self.latency_s),
            "queue_ms": _percentiles_ms(self.queue_s),
            "waited": {"calls": sum(self.times["queue"].counts), "s": self.times["queue"].sum_s},
            "calls_per_s": round(self.rate(), 2),
            "uptime_s": round(self._clock() - self.started_at, 1),
        }  # fmt: skip


def _percentiles_ms(values_s: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values_s)
    return {f"p{n}": round(percentile(ordered, n / 100) * 1000, 1) for n in (50, 95, 99)}


class Books:
    """What calls cost, what may still be spent, and the ledger that remembers it."""

    def __init__(self, settings: Settings, counters: Counters, now: Clock = time.time) -> None:
        self.settings, self.counters, self._now = settings, counters, now
        self.prices = Prices(settings)
        self.budgets = Budgets(settings, now)
        self.today = Budget("today", 2**62, "day")
        self.ledger: Ledger | None = None
        if settings.state != "none":
            self.ledger = Ledger(state_path(settings.state), lambda: settings.retention, now)
        self.is_read = True  # what was spent before

    @property
    def is_plain(self) -> bool:
        """Nothing has a price, a budget or a row: a call does not pay for the asking either."""
        return self.ledger is None and self.budgets.is_empty and self.prices.is_empty

    def change(self, settings: Settings) -> None:
        """Take prices and budgets of changed settings. Raises ConfigError; nothing was changed."""
        self.prices = Prices(settings)
        new = self.budgets.limit(settings)
        found = self._read_spent() if new and self.ledger is not None else None
        if found is not None:  # what others have spent already counts as it is
            self._spend(new, found[0])
            unwritten = self.today.spent - sum(found[0]["day"].values())
            for budget in [b for b in new if b in self.budgets.of_all]:
                budget.spent += max(0, unwritten)

    def start(self) -> None:
        if self.ledger is not None:
            self.ledger.start()
            self._take_up(self._read_spent())

    def _read_spent(self) -> tuple[dict[str, dict[str, int]], list[Any]] | None:
        """What clients spent in this day and month, and tasks ever, in an earlier life."""
        assert self.ledger is not None
        try:
            with contextlib.closing(open_ledger(self.ledger.path)) as db:
                spent = {}
                for window in ("day", "month"):
                    began = (period_start(self._now(), window),)
                    sql = f"SELECT client, {SPENT} FROM calls WHERE time_unix >= ? GROUP BY client"
                    spent[window] = {row[0]: row[1] for row in db.execute(sql, began)}
                tasks = db.execute(
                    "SELECT client, task, tokens, (SELECT coalesce(sum(tokens_in + tokens_out), 0)"
                    " FROM calls WHERE calls.client = tasks.client AND calls.task = tasks.task"
                    " AND calls.task != '' AND attempts > 0) FROM tasks"
                )
                return spent, [tuple(row) for row in tasks]
        except (OSError, sqlite3.Error) as error:
            log.warning("ledger: what was spent cannot be read: %s", printable(str(error)))
            return None

    def _take_up(self, found: tuple[dict[str, dict[str, int]], list[Any]] | None) -> None:
        self.is_read = found is not None
        if found is None:
            return
        spent, tasks = found
        self.today.roll(self._now())
        self.today.spent = sum(spent["day"].values())
        self._spend(self.budgets.all(), spent)
        for client, name, limit, tokens in tasks:
            self.budgets.new_task(client, name, limit).spent = tokens

    def _spend(self, budgets: list[Budget], spent: dict[str, dict[str, int]]) -> None:
        """Set what budgets have spent, from the sums of the ledger by window and client."""
        of = {id(b): name for name, owned in self.budgets.of_client.items() for b in owned}
        for budget in budgets:
            budget.roll(self._now())
            by_client, name = spent[budget.window], of.get(id(budget))
            budget.spent = sum(by_client.values()) if name is None else by_client.get(name, 0)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    def worst_micros(self, call: Call, model: str, prompt_tokens: int) -> int | None:
        """What a call can cost at most; None where the model has no price."""
        price = self.prices.of(model)
        if price is None:
            return None
        output = 0
        if call.route is None or call.route.writes:
            output = (call.max_tokens or price.most_output_tokens) * copies(call.doc)
        return price.worst(prompt_tokens, output)

    async def reserve(
        self, call: Call, model: str, prompt_tokens: int, expected: int, timing: Timing
    ) -> Stake | None:
        """Reserve a call's worst case of every budget that it is under.

        Raises:
            ProxyError: budget_exceeded, ledger_unavailable, queue_timeout; nothing is reserved.
        """
        worst = self.worst_micros(call, model, prompt_tokens)
        call.expected = Usage(prompt_tokens, 0, call.max_tokens or 0, is_estimated=True)
        call.reserved_micros = worst or 0
        wanted: list[tuple[Budget, int]] = []
        if not self.budgets.is_empty:
            wanted = [(budget, worst or 0) for budget in self.budgets.of(call.client)]
        if wanted and worst is None:
            what = f"the model {printable(model)}" if model else "a call whose model is unknown"
            mend = f"set one: --price '{printable(model) or '*'}=IN/OUT'"
            why = f"there is a budget and {what} has no price; {mend}"
            raise ProxyError("budget_exceeded", why)
        if wanted:
            await self._check_ledger()
        if call.task and (task := self._task(call)) is not None:
            wanted.append((task, prompt_tokens if call.is_stream else expected))
        if not wanted:
            return None
        began_at = time.monotonic()
        left_s = self.settings.queue_timeout - timing.queue_s - timing.limit_s
        try:
            return await self.budgets.reserve(wanted, max(0.001, left_s))
        finally:
            timing.limit_s += time.monotonic() - began_at

    def may_cut(self, call: Call) -> bool:
        """Whether the call's task has a budget, or will have one by this call."""
        return bool(call.task_budget) or (call.client, call.task) in self.budgets.tasks

    async def _check_ledger(self) -> None:
        """No blind spending: under a budget the ledger has to be read and written."""
        if self.ledger is None:
            return
        if not self.is_read and not self.ledger.trouble:
            loop = asyncio.get_running_loop()
            self._take_up(await loop.run_in_executor(None, self._read_spent))
        if self.ledger.trouble or not self.is_read:
            trouble = self.ledger.trouble or "it cannot be read"
            why = f"there is a budget and the ledger cannot be written: {trouble}"
            raise ProxyError("ledger_unavailable", why, retry_after_s=10)

    def _task(self, call: Call) -> Budget | None:
        """The budget of the call's task, which its first call named; None where it has none."""
        task = self.budgets.tasks.get((call.client, call.task))
        if task is None and call.task_budget:
            task = self.budgets.new_task(call.client, call.task, call.task_budget)
            if self.ledger is not None:
                row = (call.client, call.task, call.task_budget, self._now())
                self.ledger.put("tasks", row)
        return task

    async def stand(self, call: Call, state: str = "open") -> None:
        """Have a row in the ledger before an upstream is asked, or an answer is given."""
        if self.ledger is not None:
            call.id = call.id or self.ledger.new_id()
            call.is_recorded = state == "done"
            await self.ledger.put_now("calls", self._row(call, state))
            if call.reserved_micros and not self.budgets.is_empty:
                await self._check_ledger()

    def ended(self, call: Call) -> None:
        """A call is over: its row is replaced by the whole one."""
        if self.ledger is not None and not call.is_recorded and not call.leads:
            call.is_recorded = True
            call.id = call.id or self.ledger.new_id()
            self.ledger.put("calls", self._row(call, "done"))

    def bodies(self, call: Call, request: bytes, answer: bytes) -> None:
        if self.ledger is not None:
            call.id = call.id or self.ledger.new_id()
            texts = (struck(body.decode("utf-8", "replace")) for body in (request, answer))
            self.ledger.put("bodies", (call.id, *texts))

    def settle(self, call: Call, usage: Usage, model: str) -> None:
        """Count what an upstream used for a call; its stake is settled when it lands."""
        self.counters.spent(usage)
        price = self.prices.of(model)
        tokens = usage.prompt + usage.completion
        call.due_tokens += tokens
        if price is None:
            self.counters.unpriced_tokens += tokens
            call.is_unpriced = True
        else:
            cost = price.cost(usage)
            call.cost_micros += cost
            call.due_micros += cost
            self.today.roll(self._now())
            self.today.spent += cost

    def unstake(self, call: Call, stake: Stake | None) -> None:
        """Settle what was reserved on what was used since; nothing used gives all back."""
        due_micros, due_tokens = call.due_micros, call.due_tokens - call.metered_tokens
        call.due_micros = call.due_tokens = call.metered_tokens = 0
        if stake is not None:
            stake.settle(due_micros, due_tokens)

    def save(self, call: Call, model: str) -> None:
        """Count what a call that cost nothing would have cost."""
        price = self.prices.of(model)
        if price is not None:
            call.saved_micros = price.cost(call.usage)
            self.counters.saved_micros += call.saved_micros

    def _row(self, call: Call, state: str) -> tuple[Any, ...]:
        timing, usage = call.timing, call.usage if state != "open" else call.expected
        total_s = call.elapsed_s or time.monotonic() - call.started_at
        return (
            call.id, call.began_unix, struck(call.trace), struck(call.request_id), call.shared,
            call.client, struck(call.task), call.method, struck(call.path), struck(call.model),
            call.upstream, call.fallback, call.fate or "miss", call.status, call.code,
            call.attempts, call.is_stream, timing.queue_s * 1000, timing.limit_s * 1000,
            timing.retry_s * 1000, min(timing.upstream_s, total_s) * 1000, total_s * 1000,
            usage.prompt, usage.cached, usage.written, usage.completion, usage.reasoning,
            usage.is_estimated, None if call.is_unpriced else call.cost_micros,
            call.reserved_micros, call.saved_micros,
            json.dumps(call.steps) if call.steps else "", state,
        )  # fmt: skip

    def shown(self) -> dict[str, Any]:
        self.today.roll(self._now())
        budgets = self.budgets.all()
        for budget in budgets:
            budget.roll(self._now())
        return {
            "spend_usd": self.today.spent / 1e6,
            "saved_usd": self.counters.saved_micros / 1e6,
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
# Gateway
###############################################################################
# Rule: the way of a request. The Sender asks upstreams, the Relay answers callers, a Passage does
# both for what is not joined; Gateway.handle is where it all begins.

_NO_LIMIT = contextlib.nullcontext()


class Reply(web.StreamResponse):
    """A response with exactly the head we were given: nothing invented, nothing normalised.

    aiohttp's own would add Server, Date and Content-Type where the upstream sent none.
    """

    def __init__(self, head: Head, body: bytes | None = None) -> None:
        # Without super().__init__(): it would only make headers and a state that nobody reads.
        self.head = head
        self.is_begun = False
        self._whole = body
        self._writer: Any = None
        self._is_closing = self._is_bodiless = self._is_chunked = self._is_over = False

    @property
    def keep_alive(self) -> bool:
        return not self._is_closing

    async def prepare(self, request: web.BaseRequest) -> Any:
        if self.is_begun:
            return self._writer
        self.is_begun = True
        self._transport, self._protocol = request.transport, request.protocol
        headers, status = self.head.headers, self.head.status
        version = request.version
        writer = self._writer = request.writer
        self._is_closing = not request.keep_alive
        self._is_bodiless = request.method == "HEAD" or status in (204, 304)
        if not self._is_bodiless and "Content-Length" not in headers:
            if self._whole is not None:
                headers["Content-Length"] = str(len(self._whole))
            elif version >= (1, 1):
                headers["Transfer-Encoding"] = "chunked"
                self._is_chunked = True
            else:
                self._is_closing = True
        if self._is_closing:
            headers["Connection"] = "close"
        elif version < (1, 1):
            headers["Connection"] = "keep-alive"
        line = f"HTTP/{version[0]}.{version[1]} {status} {self.head.reason}"
        await write_head(writer, line, headers)
        if self._is_chunked:
            writer.enable_chunking()
        if self._whole is None:
            try:
                writer.send_headers()
            except ConnectionError:
                raise CallerGone from None
        return writer

    async def write(  # type: ignore[override]
        self, data: bytes, limit_s: float | None = None
    ) -> None:
        """Write, waiting at most `limit_s` for a caller whose socket is full.

        Raises:
            CallerGone: it hung up, or took nothing for that long.
        """
        if self._is_bodiless or not data:
            return
        limit_s = limit_s or (None if self._takes(len(data)) else CALLER_S)
        try:
            async with asyncio.timeout(limit_s) if limit_s else _NO_LIMIT:
                for part in slices(data):  # a slow caller holds a slice, not the whole
                    await self._writer.write(part)
        except (ConnectionError, TimeoutError):  # the caller's end, no upstream is to blame
            raise CallerGone from None

    def write_now(self, data: bytes) -> bool:
        """Write if the caller's socket takes it; False where `write` would have to wait."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._protocol.writing_paused:
            return False
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if not self._is_bodiless:
            transport.write(data)
        return True

    async def write_eof(self, data: bytes = b"") -> None:
        if self._is_over:
            return
        self._is_over = True
        body = b"" if self._is_bodiless else self._whole or b""
        if len(body) > SLICE_BYTES:
            await self.write(body)
            body = b""
        try:
            if self._takes(len(body)):
                await self._writer.write_eof(body)
            else:
                async with asyncio.timeout(CALLER_S):
                    await self._writer.write_eof(body)
        except (ConnectionError, TimeoutError):
            raise CallerGone from None

    def _takes(self, size_bytes: int) -> bool:
        """Whether the socket surely takes so much; else a caller that never reads is cut off."""
        return size_bytes <= SLICE_BYTES // 4 and not self._protocol.writing_paused

    def abort(self, request: web.BaseRequest) -> None:
        """Break the connection, so that the caller cannot take what came for the whole."""
        self._is_over = self._is_closing = True
        if request.transport is not None:
            request.transport.abort()


class _Gone(web.StreamResponse):
    """Tells aiohttp quietly that nobody is there to be answered."""

    async def prepare(self, request: web.BaseRequest) -> NoReturn:
        raise ConnectionResetError


class Upload:
    """A caller's request body: whole, or on its way through. Bounded in bytes and in silence."""

    def __init__(self, request: web.BaseRequest, limit_bytes: int) -> None:
        self._request, self._limit_bytes = request, limit_bytes
        self.error: ProxyError | None = None
        self.sent_bytes = 0
        self.is_over = False

    def expect(self, call: Call) -> None:
        """Refuse what is announced as too large, else ask for the body (RFC 9110 10.1.1)."""
        length = call.low.get("content-length", "")
        if length.isdecimal() and int(length) > self._limit_bytes:
            raise too_large(self._limit_bytes)
        expects = call.low.get("expect", "").lower() == "100-continue"
        if expects and self._request.version >= (1, 1) and self._request.transport:
            self._request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def whole(self, call: Call) -> bytes:
        self.expect(call)
        chunks: list[bytes] = []
        left = self._limit_bytes
        content = self._request.content
        try:
            while not content.at_eof():
                if content.is_eof():  # nearly always: all is there already, and needs no timer
                    chunk = await content.readany()
                else:
                    async with asyncio.timeout(CALLER_S):
                        chunk = await content.readany()
                left -= len(chunk)
                if left < 0:
                    raise too_large(self._limit_bytes)
                chunks.append(chunk)
        except web.RequestPayloadError:
            if self._request.transport is None:
                raise CallerGone from None
            raise ProxyError("invalid_request", "the body's framing is broken") from None
        except TimeoutError:
            raise stalled() from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def chunks(self, watchdog: Watchdog) -> AsyncIterator[bytes]:
        """The body as it comes. The caller's silence is not the upstream's."""
        content = self._request.content
        while not content.at_eof():
            watchdog.pause()
            try:
                async with asyncio.timeout(CALLER_S):
                    chunk = await content.readany()
            except TimeoutError:
                self.error = stalled()
                raise ConnectionAbortedError from None
            finally:
                watchdog.resume()
            self.sent_bytes += len(chunk)
            if self.sent_bytes > self._limit_bytes:
                self.error = too_large(self._limit_bytes)
                raise ConnectionAbortedError
            yield chunk
        self.is_over = True


# -- the upstream's side of a call


@dataclass(slots=True, eq=False)
class Choice:
    """Whom a call is asked of: an upstream, as a model, under a circuit."""

    upstream: Upstream
    model: str
    circuit: Circuit
    learned: Learned
    demand: Demand
    name: str = ""  # of the fallback that it is
    is_foreign: bool = False  # not the upstream that the caller's own credential is for
    attempts: int = 0


class Sender:
    """Gets flights their answers: fallbacks, queue, circuit, attempts, accounting."""

    # Our own errors for which a fallback is asked, besides failures of the upstream.
    OUTAGES = frozenset(("circuit_open", "upstream_key_refused"))

    def __init__(self, settings: Settings, books: Books, flights: Flights, clock: Clock) -> None:
        self.settings, self.books, self.flights, self.clock = settings, books, flights, clock
        self.counters = books.counters
        rules = settings.upstreams or [
            UpstreamRule(upstream_name(settings.upstream), settings.upstream, keys=settings.keys)
        ]
        self.upstreams = [Upstream(rule, settings, clock) for rule in rules]
        self.circuits: Memo[Circuit] = Memo(
            lambda key: Circuit(key, settings, clock, self._circuit_moved),
            may_go=lambda circuit: circuit.state is State.CLOSED,
        )
        self.learned: Memo[Learned] = Memo(lambda key: Learned())
        self.in_flight = 0  # calls that are with an upstream now
        self._tasks: set[asyncio.Task[None]] = set()
        self._flying: set[asyncio.Task[None]] = set()  # kept apart: no callback per flight
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        # Kept, because asking for the running loop costs a system call before Python 3.12.
        self._loop = asyncio.get_running_loop()
        for upstream in self.upstreams:
            await upstream.start()
            upstream.on_model = functools.partial(self.flights.drop_upstream, upstream.name)
            self._spawn(upstream.meet())

    async def close(self) -> None:
        tasks = [*self._tasks, *self._flying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upstream in self.upstreams:
            await upstream.close()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def queued(self) -> int:
        return sum(upstream.gate.queued for upstream in self.upstreams)

    # -- whom to ask

    def choices(self, call: Call) -> list[Choice]:
        """The upstream for a call's model, and after it the fallbacks that the file names.

        Raises:
            ProxyError: model_not_found.
        """
        found = [self.choose(call)]
        for name in self.settings.rule_of(call.model).fallback if self.settings.models else ():
            named = next((u for u in self.upstreams if u.name == name), None)
            model = call.model if named else name
            if (upstream := named or self._serving(model)) is not None:
                choice = self.choose(call, upstream, model, name)
                choice.is_foreign = upstream is not found[0].upstream
                found.append(choice)
        return found

    def choose(
        self, call: Call, upstream: Upstream | None = None, model: str = "", name: str = ""
    ) -> Choice:
        if upstream is None:
            model = call.model
            upstream = self._serving(model) or (None if model else self.upstreams[0])
        if upstream is None:
            why = f"no upstream serves the model {printable(model)}; see [upstream.NAME] models"
            raise ProxyError("model_not_found", why)
        circuit = self.circuits[upstream.name, model, call.path]
        learned = self.learned[upstream.name, model]
        prompt_tokens = learned.prompt_tokens(call.size) if call.size.strings else 0
        output_tokens = 0
        if call.route is None or call.route.writes:
            output_tokens = learned.output_tokens(call.max_tokens)
        demand = Demand(
            max(1, prompt_tokens // 1000), prompt_tokens, output_tokens,
            call.client, call.priority, model, len(call.body), circuit,
            copies(call.doc) if upstream.is_llama else 1,
        )  # fmt: skip
        return Choice(upstream, model, circuit, learned, demand, name)

    def _serving(self, model: str) -> Upstream | None:
        return next((u for u in self.upstreams if u.rule.serves(model)), None)

    # -- the flight

    def launch(self, flight: Flight, choices: list[Choice]) -> None:
        flight.task = self._loop.create_task(self._fly(flight, choices))
        self._flying.add(flight.task)

    async def _fly(self, flight: Flight, choices: list[Choice]) -> None:
        """The upstream call of a flight, in its own task, from the queue to the last byte."""
        error = None
        try:
            await self._ask(flight, choices)
        except ProxyError as caught:
            error = caught
        except CallerGone:
            error = stalled()
        except asyncio.CancelledError:
            error = ProxyError("shutting_down", "the proxy was stopped", retry_after_s=5)
        except Exception as caught:
            log.error("internal error: %s", fault_lines(caught))
            error = internal()
        finally:
            self._land(flight, error)

    def _land(self, flight: Flight, error: ProxyError | None) -> None:
        call = flight.leader
        try:
            self._account(flight)
        except Exception as caught:  # whatever an upstream reports, its callers must land
            log.error("internal error: %s", fault_lines(caught))
        self._leave(flight)
        if flight.reserved is not None:
            requests = min(1, flight.attempts)
            flight.reserved.settle(call.used_prompt, call.used_output, requests=requests)
        self._unstake(flight)
        self.flights.land(flight)
        call.usage, call.upstream, call.attempts = flight.usage, flight.upstream, flight.attempts
        call.timing, call.fallback, call.leads = flight.timing, flight.fallback, False
        flight.finish(error)
        call.let_go()
        if call.ended_unix and self.books.ledger is not None:  # its caller has left before
            self.books.ended(call)
        self._flying.discard(cast("asyncio.Task[None]", flight.task))
        flight.task = None

    async def _ask(self, flight: Flight, choices: list[Choice]) -> None:
        """Ask the first choice, and while that fails before its first byte, the next."""
        for number, choice in enumerate(choices):
            is_last = number == len(choices) - 1
            flight.choice, flight.fallback = choice, choice.name
            flight.upstream = choice.upstream.name
            try:
                failure = await self._try(flight, choice)
            except ProxyError as error:
                flight.met_open |= error.code == "circuit_open"
                if is_last or flight.head is not None or error.code not in self.OUTAGES:
                    raise
                self._leave(flight)
                continue
            if failure is not None and (is_last or not failure.is_outage):
                self._give_up(flight, failure)
            if failure is None or flight.head is not None:
                return
            self._leave(flight)

    async def _try(self, flight: Flight, choice: Choice) -> Failure | None:
        """Queue, then attempts until one answers, or the policy says that it was the last."""
        call = flight.leader
        if choice.circuit.state is not State.CLOSED:
            await self.peek(choice)
        if call.route is not None and not call.route.is_free:
            if not self.books.is_plain or call.task:
                await self._stake(flight, choice)
            flight.permit = choice.upstream.gate.enter_now(choice.demand)
            if flight.permit is None:
                flight.permit = await self.enter(choice, flight.timing)
            if self.books.ledger is not None and (not call.id or choice.name):
                await self.books.stand(call)
        slots, slot = choice.upstream.affinity, self._slot(call, choice)
        try:
            return await self._attempts(flight, choice, slot)
        finally:
            if slot is not None:
                slots.give(slot)

    def _slot(self, call: Call, choice: Choice) -> int | None:
        """The slot of llama.cpp that a call shall go to, where it is for us to say."""
        if self.settings.slot_affinity == "off" or not choice.upstream.is_llama:
            return None
        is_ours = call.route is not None and call.route.writes and not call.route.is_free
        if not is_ours or "id_slot" in call.doc or choice.demand.places > 1:
            return None
        return choice.upstream.affinity.take(conversation(call.doc))

    async def _attempts(
        self, flight: Flight, choice: Choice, slot: int | None
    ) -> Failure | None:
        call = flight.leader
        plan = self.plan(call, choice, slot)
        began_at, was_refused, loads = self.clock(), False, 0
        while True:
            if flight.is_merged and not plan.is_stream:  # its other form cannot be made of this
                self.flights.land(flight)
                flight.is_merged = call.may_keep = False
            flight.is_merged |= plan.is_stream and not call.is_stream
            failure = await self._attempt(flight, choice, plan)
            if failure is None:
                if was_refused or plan.asks_usage:
                    choice.upstream.usage_known[call.name] = not was_refused
                return None
            if failure.is_loading or (failure.is_unsent and choice.upstream.is_restarting):
                self._uncount(flight, choice)
                choice.upstream.is_loading |= failure.is_loading
                waited_s = flight.timing.queue_s + flight.timing.limit_s + self.clock() - began_at
                await choice.upstream.wait_ready(self.settings.queue_timeout - waited_s)
                await asyncio.sleep(min(0.25 * loads, 2.0))  # a health check may lie
                loads += 1
                plan = self.plan(call, choice)  # it may be another server, with other slots
                continue
            if plan.asks_usage and self._refuses_usage(failure, choice, call.name):
                self._uncount(flight, choice)
                was_refused = True
                plan.asks_usage, plan.body = False, plan.plain_body
                continue
            if not self._may_retry(flight, choice, failure):
                return failure
            waited_s = flight.timing.queue_s + flight.timing.limit_s
            if not await self._back_off(flight, choice, failure):
                return failure
            began_at += flight.timing.queue_s + flight.timing.limit_s - waited_s
            self.counters.retries += 1

    async def _stake(self, flight: Flight, choice: Choice) -> None:
        """Reserve what the call can cost, before it waits for anything else."""
        call, demand, books = flight.leader, choice.demand, self.books
        self._unstake(flight)
        worst = choice.learned.worst_tokens(call.size)
        expected, timing = demand.tokens, flight.timing
        flight.stake = await books.reserve(call, choice.model, worst, expected, timing)
        task = flight.stake.task if flight.stake is not None else None
        if task is not None and call.is_stream:
            flight.meter = Meter(task, demand.prompt_tokens)

    def _unstake(self, flight: Flight) -> None:
        """Settle the budgets on what was used since they were asked."""
        call, meter, flight.meter = flight.leader, flight.meter, None
        if meter is not None:
            call.metered_tokens = meter.tokens
        stake, flight.stake = flight.stake, None
        self.books.unstake(call, stake)

    @staticmethod
    def _uncount(flight: Flight, choice: Choice) -> None:
        """The attempt was none, but for the upstream's count of requests."""
        flight.attempts -= 1
        choice.attempts -= 1
        if flight.permit is not None:
            flight.permit.again()

    def _may_retry(self, flight: Flight, choice: Choice, failure: Failure) -> bool:
        call = flight.leader
        if choice.circuit.state is State.OPEN or not flight.callers:
            return False
        if failure.is_key_refused and flight.permit is not None:  # another key may be welcome
            return choice.upstream.gate.refusal(choice.demand) is None
        kind = call.retry or self.settings.rule_of(call.model).retry
        kind = kind or ("cautious" if call.doc.get("tools") else "safe")
        may = failure.ran_nothing if kind == "cautious" else failure.is_transient
        return may and kind != "never" and choice.attempts <= self.settings.retries

    async def enter(self, choice: Choice, timing: Timing, chances: int = 0) -> Permit:
        """Wait for a permit of the choice's upstream."""
        gate, settings = choice.upstream.gate, self.settings
        if (permit := gate.enter_now(choice.demand)) is not None:
            return permit
        waited_s = timing.queue_s + timing.limit_s
        return await gate.enter(
            choice.demand, timing, queue_size=settings.queue_size,
            timeout_s=max(0.001, settings.queue_timeout - waited_s), chances=chances,
        )  # fmt: skip

    @staticmethod
    def _leave(flight: Flight) -> None:
        permit, flight.permit = flight.permit, None
        if permit is not None:
            permit.leave()

    async def peek(self, choice: Choice) -> None:
        """Fail fast, before the queue.

        A call that meets an open circuit asks for health first, if the last question was answered
        quickly and a while ago: so the first call after a recovery already goes through.
        """
        circuit, upstream = choice.circuit, choice.upstream
        since_s = time.monotonic() - upstream.checked_at
        if circuit.is_sick and upstream.checked_s < 0.02 and since_s > 0.1:
            circuit.health(await upstream.is_alive(0.04))
        circuit.check()

    async def _attempt(self, flight: Flight, choice: Choice, plan: Plan) -> Failure | None:
        """One attempt, with its entry in the circuit and the counters."""
        circuit, permit, timing = choice.circuit, flight.permit, flight.timing
        attempt = circuit.admit()
        sent_at = self._count(flight, choice)
        choice.upstream.dress(plan, permit.key if permit else None, flight.leader.dialect)

        flight.on_begin = functools.partial(self._begin, flight, choice, attempt, sent_at)
        flight.attempt = attempt
        try:
            failure = await choice.upstream.attempt(flight, plan)
            if failure is None and flight.has_failed:
                attempt.failed()
            if failure is not None and failure.is_broken and await choice.upstream.is_gone():
                failure.counts = False  # its callers wait for it to come back
            self.record(attempt, failure, permit)
            if failure is not None:
                flight.outcome = str(failure.status or failure.error.code)
                if permit is not None and failure.is_unsent:
                    permit.was_sent = False
                timing.upstream_s = self.clock() - sent_at
                if failure.is_paid:  # what it has read is used, whatever came of it
                    usage = Usage(choice.demand.prompt_tokens, is_estimated=True)
                    self.settle(flight.leader, usage, choice, permit)
            return failure
        except ProxyError as error:  # broke off in mid-stream
            flight.outcome = error.code
            if error.code == "upstream_timeout" or not await choice.upstream.is_gone():
                attempt.failed()
            raise
        except asyncio.CancelledError:  # the upstream has read the prompt, and bills it
            if flight.head is None:
                usage = Usage(choice.demand.prompt_tokens, is_estimated=True)
                self.settle(flight.leader, usage, choice, permit)
                flight.usage = usage
            raise
        finally:
            self.in_flight -= 1
            flight.is_sent = False
            self._step(flight, choice, sent_at)
            flight.on_begin = flight.attempt = None
            attempt.neutral()

    def _begin(self, flight: Flight, choice: Choice, attempt: Attempt, sent_at: float) -> None:
        """The answer begins: its head is known, and callers will see it."""
        upstream_s = flight.timing.upstream_s = self.clock() - sent_at
        choice.circuit.attempt_s.append(upstream_s)
        attempt.give_place()  # a long stream holds no other trial up
        if flight.meter is not None:
            flight.meter.begin()
        if flight.permit is not None:
            flight.permit.begin()
            if flight.head is not None:
                self.heed(flight.permit, flight.head.headers)

    def _count(self, flight: Flight, choice: Choice) -> float:
        """An attempt begins; returns when."""
        sent_at, timing = self.clock(), flight.timing
        if not flight.attempts:
            flight.first_at = sent_at - timing.queue_s - timing.limit_s
        flight.attempts += 1
        choice.attempts += 1
        flight.is_sent = True
        flight.sent_at = sent_at
        timing.retry_s = max(0.0, sent_at - flight.first_at - timing.queue_s - timing.limit_s)
        if flight.permit is not None:
            flight.permit.was_sent = True
        self.counters.upstream_calls += 1
        self.in_flight += 1
        return sent_at

    def _step(self, flight: Flight, choice: Choice, sent_at: float) -> None:
        """One line of the call's trace: who was asked when, and what came of it."""
        if self.books.ledger is None:
            return
        now, call = self.clock(), flight.leader
        status = flight.head.status if flight.head is not None else "left"
        key = flight.permit.key.name if flight.permit is not None else ""
        step = {
            "at_ms": round((sent_at - call.started_at) * 1000, 1), "upstream": choice.upstream.name,
            "model": struck(choice.model), "key": key, "outcome": flight.outcome or str(status),
            "ms": round((now - sent_at) * 1000, 1),
        }  # fmt: skip
        call.steps = (*call.steps, step)
        flight.outcome = ""

    def record(self, attempt: Attempt, failure: Failure | None, permit: Permit | None) -> None:
        """What an attempt's outcome means for its circuit and its key."""
        if failure is None:
            attempt.ok()
        elif failure.counts:
            attempt.failed()
        elif failure.answer is not None and not failure.is_loading:
            attempt.alive()
        if failure is None or failure.answer is None:
            return
        status = failure.status
        self.counters.upstream_429 += status == 429
        if permit is None:
            return
        if status in (401, 403) and permit.key.secret:
            failure.is_key_refused = permit.refuse(str(status))
            log.warning("upstream_key %s: the upstream answered %s", permit.key.name, status)
        elif status == 429 and failure.is_transient:
            asked_s = failure.retry_after_s
            permit.strike("429", None if asked_s is None else min(asked_s, LONGEST_PAUSE_S))
        else:
            self.heed(permit, failure.answer[0].headers)

    @staticmethod
    def heed(permit: Permit, headers: Headers) -> None:
        """Correct the buckets by what the upstream says is left of its limits."""
        for kind, remaining, after_s in rate_limits(headers, time.time()):
            if kind:
                permit.heard(kind, remaining, after_s)
            if not remaining and after_s:
                permit.strike("limit", min(after_s, LONGEST_PAUSE_S))

    def plan(self, call: Call, choice: Choice, slot: int | None = None) -> Plan:
        """How attempts for a call are made."""
        settings, upstream = self.settings, choice.upstream
        if isinstance(settings.timeout, float):
            silence_s = settings.timeout
        else:
            silence_s = choice.circuit.timeout_s()
        doc, body, is_stream = call.doc, call.body, call.is_stream
        if choice.name and choice.model != call.model:
            doc = {**doc, "model": choice.model}
            body = with_model(call.doc, choice.model) or body
        fields: dict[str, Any] = {} if slot is None else {"id_slot": slot}
        fields |= {"stream": True} if self._asks_stream(call, choice) else {}
        if fields and (changed := with_fields(body, doc, fields)) is not None:
            body, is_stream = changed, is_stream or "stream" in fields
        first_s = silence_s
        if not is_stream and (settings.timeout == "auto" or "timeout" not in settings.given):
            # A plain answer is silent until it is whole: allow for what it has to write.
            first_s += choice.demand.output_tokens * choice.learned.token_s
        headers = self._headers(call, choice)
        raw_path = call.raw_path
        if upstream.gate.pool or choice.is_foreign:
            raw_path = without_keys(raw_path, call.own_keys)
        elif call.own_keys:
            raw_path = without_keys(raw_path, call.own_keys, ())
        plan = Plan(raw_path, headers, body, first_s, silence_s, body, is_stream)
        # llama.cpp tells it in `timings` as well; only who wants a plain answer needs the field.
        may_ask = call.route is not None and call.route.takes_usage and is_stream
        may_ask = may_ask and (call.is_merged or not call.is_stream or not upstream.is_llama)
        if may_ask and not reports_usage(doc) and upstream.usage_known.get(call.name, True):
            asking = ask_for_usage(body, doc)
            if asking is not None:
                plan.body, plan.asks_usage = asking, True
        return plan

    def _asks_stream(self, call: Call, choice: Choice) -> bool:
        """Whether llama.cpp is asked for a stream though its caller wants a plain answer."""
        may = choice.upstream.is_llama and self.settings.upstream_stream == "auto"
        return may and not call.is_stream and can_stream(call.name, call.doc)

    def may_merge(self, call: Call) -> bool:
        """Whether one upstream call serves callers of its plain and of its streaming form.

        Not where a fallback may answer that knows the plain form only.
        """
        upstream = self._serving(call.model)
        if upstream is None or not upstream.is_llama or self.settings.upstream_stream != "auto":
            return False
        return can_stream(call.name, call.doc) and not self.settings.rule_of(call.model).fallback

    @staticmethod
    def _headers(call: Call, choice: Choice) -> Headers:
        """What goes upstream of the caller's headers: no credential that is not for this one."""
        headers = end_to_end(call.sent, call.low.get("connection"), frozenset())
        headers["x-request-id"] = call.trace
        if call.has_new_trace:
            headers["traceparent"] = f"00-{call.trace}-{call.trace[:16]}-01"
        if call.fate != "bypass":
            headers["Accept-Encoding"] = "identity"  # one answer has to fit every caller
        if choice.upstream.gate.pool or choice.is_foreign:
            for name in CREDENTIALS:
                headers.popall(name, None)
        for key in call.own_keys:
            for name in {n for n, value in headers.items() if carries(value, key)}:
                headers.popall(name, None)
        return headers

    @staticmethod
    def _refuses_usage(failure: Failure, choice: Choice, name: str) -> bool:
        """Whether the upstream refuses the field that we added, not the call.

        Where it has never taken the field before, any 400 may mean that; asked once.
        """
        if failure.answer is None or TOO_LONG.search(failure.answer[1]):
            return False
        head, body = failure.answer
        if FIELD_REFUSED.search(body):
            return head.status in (200, 400, 422)
        if head.status not in (400, 422):
            return False
        is_first = name not in choice.upstream.usage_known
        choice.upstream.usage_known.setdefault(name, True)
        return is_first

    async def _back_off(self, flight: Flight, choice: Choice, failure: Failure) -> bool:
        """Wait before a further attempt; False where there shall be none after all.

        After a 429 the gate knows how long, and for whom. After all else this call alone waits.
        """
        asked_s, circuit = failure.retry_after_s or 0.0, choice.circuit
        if asked_s > self.settings.queue_timeout:  # the upstream's answer goes to the caller
            return False
        is_queued, is_held_back = flight.permit is not None, failure.is_held_back
        flight.has_backed_off = True
        self._leave(flight)  # others may go while this one waits
        if not (is_queued and (is_held_back or failure.is_key_refused)):
            wait_s: float = BACKOFF_S * 2 ** (choice.attempts - 1)
            wait_s += random.uniform(0, wait_s)
            wait_s = max(wait_s, asked_s + random.uniform(0, BACKOFF_S) if asked_s else 0.0)
            if await circuit.opens_within(wait_s):
                raise circuit.error()
        if is_queued:
            chances = max(1, self.settings.retries - choice.attempts + 1)
            try:
                flight.permit = await self.enter(choice, flight.timing, chances)
            except ProxyError:  # the upstream's own words tell more than "the queue is full"
                return False
        return True

    @staticmethod
    def _give_up(flight: Flight, failure: Failure) -> None:
        """The last failure is the answer: the upstream's own words where there are any."""
        if failure.answer is None:
            raise failure.error
        if failure.is_key_refused:  # the keys are our matter, and the answer may quote them
            why = f"the upstream answered {failure.status} to every key of its pool"
            raise ProxyError("upstream_key_refused", why, retry_after_s=REFUSED_KEY_S)
        head, body = failure.answer
        if flight.attempts > 1 or flight.has_backed_off:
            head.headers["x-should-retry"] = "false"
        flight.is_void = True
        flight.begin(head)
        if body:
            flight.push(body)

    def _account(self, flight: Flight) -> None:
        """Count what the upstream used, and keep the answer where that is allowed."""
        call, head, choice = flight.leader, flight.head, flight.choice
        if head is None or head.status != 200 or flight.is_void or choice is None:
            return
        body = flight.tail(FLIGHT_BYTES)
        plain = decoded(body, head.headers)
        usage = self._used(flight, choice, plain, head.is_stream)
        self.settle(call, usage, choice, flight.permit)
        if choice.upstream.is_llama:
            choice.upstream.speeds.add(read_timings(plain[-SLICE_BYTES:]))
        if not usage.is_estimated:
            choice.learned.teach(call.size, usage, self.clock() - flight.sent_at)
        if self.settings.log_bodies == "on":
            self.books.bodies(call, call.body, plain)
        flight.usage = usage
        is_newest = self.flights.running.get(flight.key) is flight
        may_keep = call.may_keep and is_newest and not flight.fallback
        if may_keep and flight.is_complete and not flight.is_overgrown:
            kept = Kept(
                head.reason, kept_fields(head.headers), body, self.clock(),
                (usage.prompt, usage.cached, usage.completion, usage.reasoning, usage.written),
                flight.upstream, call.model, is_deterministic(call.doc),
                flight.is_merged and head.is_stream,
                self._assembled(flight),
            )  # fmt: skip
            self.flights.keep(flight.key, kept, self.settings.cache_bytes)

    @staticmethod
    def _assembled(flight: Flight) -> bytes:
        """The plain form of its answer, where somebody has asked for that."""
        with contextlib.suppress(ProxyError):
            if flight.assembly is not None:
                return flight.assembly.plain()[1]
        return b""

    @staticmethod
    def _used(flight: Flight, choice: Choice, plain: bytes, is_stream: bool) -> Usage:
        """What an answer reports, or else what can be counted of it."""
        usage = read_usage(plain + flight.extra, is_stream)
        if usage is None:
            written = plain.count(b"data:") if is_stream else len(plain) // 4
            usage = Usage(choice.demand.prompt_tokens, 0, written, is_estimated=True)
        elif is_stream and not flight.is_complete:  # cut: the last count is missing
            written = plain.count(b"\ndata:") - plain.count(b'"type":"message_')
            if written > usage.completion:
                usage.completion, usage.is_estimated = written, True
        if flight.meter is not None and flight.meter.is_cut:
            prompt, output = flight.meter.prompt_tokens, flight.meter.output_tokens
            usage = Usage(prompt, 0, output, is_estimated=True)
        return usage

    def settle(self, call: Call, usage: Usage, choice: Choice, permit: Permit | None) -> None:
        """What a call really used, to all who had reserved for it."""
        if call.route is None or not call.route.is_free:
            if self.books.is_plain and not call.task:
                self.counters.spent(usage)
                self.counters.unpriced_tokens += usage.prompt + usage.completion
            else:
                self.books.settle(call, usage, choice.model)
            call.used_prompt += usage.prompt
            call.used_output += usage.completion
        if permit is not None:
            permit.settle(usage.prompt, usage.completion)

    # -- circuits

    def _circuit_moved(self, circuit: Circuit) -> None:
        if circuit.state is State.CLOSED:
            log.warning("circuit closed: %s is answered again", circuit.what)
            return
        log.warning("circuit open: %s", circuit.error().message)
        for upstream in self.upstreams:
            upstream.gate.reject(circuit, circuit.error)
        if self._watch is None or self._watch.done():
            self._watch = self._spawn(self._watch_health())

    async def _watch_health(self) -> None:
        """Free health checks of every upstream that has an open circuit."""
        while waiting := [c for c in self.circuits.values() if c.state is not State.CLOSED]:
            names = {circuit.key[0] for circuit in waiting}
            sick = [upstream for upstream in self.upstreams if upstream.name in names]
            alive = await asyncio.gather(*(upstream.is_alive() for upstream in sick))
            found = {u.name: is_alive for u, is_alive in zip(sick, alive, strict=True)}
            for circuit in waiting:
                circuit.health(found[circuit.key[0]])
            await asyncio.sleep(HEALTH_EVERY_S)


# -- the callers' side of a call


class Relay:
    """Gives callers their answers, each at its own pace, and our errors in their dialect."""

    def __init__(self, settings: Settings, books: Books, flights: Flights, clock: Clock) -> None:
        self.settings, self.books, self.flights, self.clock = settings, books, flights, clock

    async def relay(
        self, call: Call, flight: Flight, request: web.BaseRequest
    ) -> web.StreamResponse:
        """Give one caller the flight's answer, from the beginning, at the caller's pace."""
        flight.callers += 1
        if not flight.is_merged:
            call.is_stream = flight.leader.is_stream
        try:
            if call.fate == "joined" and self.books.ledger is not None:
                call.shared = flight.leader.trace
                await self.books.stand(call)
            if self.settings.keepalive is None or not call.is_stream:
                await self._head(call, flight)
            else:
                await self._keep_alive(call, flight, request, self.settings.keepalive)
            return await self._deliver(call, flight, request)
        except ProxyError as error:
            call.usage = flight.usage
            if call.reply is None:
                return await self._stale(call, flight, error, request)
            return await self._break_off(call, flight, error, call.reply, request)
        finally:
            if call.fate == "joined":
                call.usage = flight.usage
                self.books.save(call, flight.choice.model if flight.choice else call.model)
            flight.leave()
            self._abandon(flight)

    async def _head(self, call: Call, flight: Flight) -> None:
        """Wait for the head of an answer; of one that is put together, for all of it."""
        while True:
            while flight.head is None and not flight.is_done:
                await flight.news()
            if not self._is_assembled(call, flight):
                return
            if flight.assembly is None:
                flight.assembly = Assembly()
                for chunk in flight.chunks:
                    flight.assembly.feed(chunk)
            if flight.is_done:
                return
            flight.has_read(flight.size_bytes)
            await flight.follow(lambda chunk: True)

    @staticmethod
    def _is_assembled(call: Call, flight: Flight) -> bool:
        """Whether this caller of a stream wants it as a plain answer."""
        head = flight.head
        is_stream = head is not None and head.is_stream and head.status == 200
        return flight.is_merged and is_stream and not call.is_stream

    async def _keep_alive(
        self, call: Call, flight: Flight, request: web.BaseRequest, every_s: float
    ) -> None:
        """Wait for the flight's head; where that takes long, begin a reply with comments."""
        while flight.head is None and not flight.is_done:
            try:
                async with asyncio.timeout(every_s):
                    await flight.news()
            except TimeoutError:
                if call.reply is None:
                    call.status = 200
                    head = Head(200, "OK", CIMultiDict({"Content-Type": "text/event-stream"}))
                    call.reply = self.reply(call, head)
                    await call.reply.prepare(request)
                await call.reply.write(b": waiting\n\n")

    async def _deliver(
        self, call: Call, flight: Flight, request: web.BaseRequest
    ) -> web.StreamResponse:
        """The flight's head is known, or it has failed."""
        call.model, call.timing = flight.leader.model, flight.timing
        call.upstream, call.fallback, call.usage = flight.upstream, flight.fallback, flight.usage
        if call.fate == "joined":  # its own wait, not the leader's
            call.timing = Timing(upstream_s=self.clock() - call.started_at)
        head, reply = flight.head, call.reply
        if head is None:
            raise flight.error or internal()
        if reply is not None and not (head.is_stream and head.status == 200):
            return await self._in_band(call, flight, reply)
        call.status = head.status
        if self._is_assembled(call, flight) and flight.assembly is not None:
            if flight.error is not None:
                raise flight.error
            call.status, body = flight.assembly.plain()
            reply = call.reply = self.reply(call, plain_head(head, call.status), body)
            await reply.prepare(request)
        elif flight.is_done and not (flight.error or flight.is_overgrown or head.is_stream):
            reply = call.reply = self.reply(call, head, flight.tail(FLIGHT_BYTES))
            await reply.prepare(request)
        else:
            if reply is None:
                reply = call.reply = self.reply(call, head)
                await reply.prepare(request)
            flight.has_shown = True
            await self._pump(call, flight, reply)
            if flight.error is not None:
                raise flight.error
        await reply.write_eof()
        call.usage = flight.usage
        return reply

    async def _pump(self, call: Call, flight: Flight, reply: Reply) -> None:
        index = read_bytes = 0
        hides_usage = flight.is_merged and not call.wants_usage

        def sink(chunk: bytes) -> bool:
            chunk = without_usage(chunk)[0]
            return not chunk or reply.write_now(chunk)

        while True:
            if index < flight.end:
                data, index = flight.slice_from(index)
                await reply.write(without_usage(data)[0] if hides_usage else data, CALLER_S)
                read_bytes += len(data)
                flight.has_read(read_bytes)
            elif flight.is_done:
                return
            else:
                index, read_bytes = await flight.follow(sink if hides_usage else reply.write_now)

    async def _stale(
        self, call: Call, flight: Flight, error: ProxyError, request: web.BaseRequest
    ) -> web.StreamResponse:
        """While a circuit is open an old answer is better than none."""
        found = self.flights.find(flight.key, math.inf) if flight.met_open else None
        if found is None or not call.may_join or call.max_age_s < 0:
            raise error
        return await self.serve(call, *found, "stale", request)

    async def _break_off(
        self, call: Call, flight: Flight, error: ProxyError, reply: Reply, request: web.BaseRequest
    ) -> web.StreamResponse:
        """An answer that broke off: an error event in a stream, else a broken connection."""
        call.code = error.code
        if reply.head.is_stream:
            tail = flight.tail(4)
            gap = b"" if not tail or tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) else b"\n\n"
            await reply.write(gap + error_event(error, call.dialect, call.trace))
            await reply.write_eof()
        else:
            reply.abort(request)
        return reply

    async def _in_band(self, call: Call, flight: Flight, reply: Reply) -> web.StreamResponse:
        """The upstream's plain error, to a caller who already has the head of a stream."""
        while not flight.is_done:
            await flight.news()
        status = flight.head.status if flight.head else 502
        why = f"the upstream answered {status}" + ("" if status >= 400 else " without a stream")
        error = ProxyError("upstream_incomplete", why)
        event, call.code = error_event(error, call.dialect, call.trace), error.code
        with contextlib.suppress(ValueError, RecursionError):
            said = b"data: " + json.dumps(json.loads(flight.tail(FLIGHT_BYTES))).encode() + b"\n\n"
            if status >= 400 and stream_error(said) is not None:  # words that the SDKs know
                event = (b"event: error\n" if call.dialect == "anthropic" else b"") + said
        await reply.write(event)
        await reply.write_eof()
        return reply

    def _abandon(self, flight: Flight) -> None:
        """When the last caller has left: finish and keep it, or give the slot free."""
        if flight.callers or flight.is_done or flight.task is None:
            return
        if flight.attempt is not None:
            flight.attempt.give_place()  # it is for somebody who waits
        wanted = self.settings.abandon == "finish" and flight.leader.may_join
        if not (flight.is_sent and wanted) or flight.is_overgrown:
            self.flights.land(flight)
            flight.task.cancel()

    async def serve(
        self, call: Call, kept: Kept, age_s: float, fate: str, request: web.BaseRequest
    ) -> web.StreamResponse:
        """Answer from what is kept."""
        call.fate, call.status, call.model = fate, 200, kept.model
        call.upstream, call.usage, call.fallback = kept.upstream, Usage(*kept.tokens), ""
        head, body = kept.head(), kept.body
        if kept.is_merged and call.is_stream:
            body = body if call.wants_usage else without_usage(body)[0]
        elif kept.is_merged:
            head, body = plain_head(head), self.plain(kept)
        if not self.books.is_plain:
            self.books.save(call, call.model)
            call.request_id = head.headers.get("x-request-id", call.trace)
            if not call.is_recorded:
                await self.books.stand(call, "done")
        is_stream = call.is_stream = head.is_stream
        reply = self.reply(call, head, None if is_stream else body, age_s)
        await reply.prepare(request)
        if is_stream:
            await reply.write(body)
        await reply.write_eof()
        return reply

    def plain(self, kept: Kept) -> bytes:
        """The plain form of a kept stream, kept from now on as well; nothing where it has none."""
        if not kept.plain:
            assembly = Assembly()
            assembly.feed(kept.body)
            with contextlib.suppress(ProxyError):
                status, body = assembly.plain()
                kept.plain = body if status == 200 else b""
            self.flights.kept_bytes += len(kept.plain)
        return kept.plain

    def reply(
        self, call: Call, head: Head, body: bytes | None = None, age_s: float | None = None
    ) -> Reply:
        headers = head.headers.copy()
        if age_s is not None:
            headers["Age"] = str(int(age_s))
        if call.route is not None:
            headers.add("Cache-Status", self._cache_status(call, age_s))
        self.stamp(call, headers)
        return Reply(Head(head.status, head.reason, headers), body)

    def _cache_status(self, call: Call, age_s: float | None) -> str:
        """RFC 9211."""
        if age_s is not None:
            return f"llmproxy; hit; ttl={int(self.settings.dedup_window - age_s)}"
        if call.fate == "joined":
            return "llmproxy; fwd=miss; collapsed"
        return "llmproxy; fwd=miss" if call.may_join else "llmproxy; fwd=bypass"

    @staticmethod
    def stamp(call: Call, headers: Headers) -> None:
        """The headers that every response carries."""
        headers["x-llmproxy-fate"] = call.fate or "rejected"
        headers["x-llmproxy-trace"] = call.trace
        if call.upstream:
            headers["x-llmproxy-upstream"] = call.upstream
        if call.fallback:
            headers["x-llmproxy-fallback"] = call.fallback
        if "x-request-id" not in headers:
            headers["x-request-id"] = headers.get("request-id", call.trace)
        call.request_id = headers["x-request-id"]
        if call.request_id in call.credential:
            call.request_id = "***"
        headers.add("Server-Timing", server_timing(call.timing))
        if call.origin is not None:
            for name in [n for n in headers if CORS.fullmatch(n)]:
                del headers[name]
            headers["Access-Control-Allow-Origin"] = call.origin
            headers["Access-Control-Expose-Headers"] = "*"
            headers.add("Vary", "Origin")

    def refuse(self, call: Call, error: ProxyError, request: web.BaseRequest) -> web.StreamResponse:
        """An error of our own, in the caller's dialect; too late for one once a reply has begun."""
        if call.reply is not None and call.reply.is_begun:
            call.code = error.code
            call.reply.abort(request)
            return call.reply
        if error.is_rejection and not call.attempts:
            call.fate = "rejected"
        call.status, call.code = error.status, error.code
        headers: Headers = CIMultiDict()
        headers["x-should-retry"] = "true" if error.should_retry else "false"
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        if call.route is not None:
            headers["Cache-Status"] = self._cache_status(call, None)
        body = error_body(error, call.dialect, call.trace)
        return self.document(call, body, error.status, headers)

    def document(
        self, call: Call, body: Any, status: int = 200, headers: Headers | None = None
    ) -> Reply:
        """JSON of our own."""
        reply = json_reply(body, status)
        reply.head.headers.extend(headers or {})
        self.stamp(call, reply.head.headers)
        return reply

    def preflight(self, call: Call) -> web.StreamResponse:
        """CORS is answered here, for every allowed origin; the upstream is not asked."""
        call.status, call.fate = 204, "bypass"
        asked = call.low
        headers: Headers = CIMultiDict()
        self.stamp(call, headers)
        headers["Access-Control-Allow-Methods"] = asked.get("access-control-request-method", "*")
        headers["Access-Control-Allow-Headers"] = asked.get("access-control-request-headers", "*")
        headers["Access-Control-Max-Age"] = "7200"
        if asked.get("access-control-request-private-network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return Reply(Head(204, "No Content", headers), b"")


# -- what is not joined


class Passage:
    """One request on its way straight through, unbuffered both ways.

    One that may cost goes through the gate, under its circuit and its client's limits.
    """

    TAIL_BYTES = 16_384  # of an answer that passes, where its usage is looked for

    def __init__(self, sender: Sender, relay: Relay, call: Call, request: web.BaseRequest) -> None:
        self._sender, self._relay, self._call, self._request = sender, relay, call, request
        self._upload = Upload(request, sender.settings.max_body)
        self._permit: Permit | None = None
        self._reserved: Reservation | None = None
        self._stake: Stake | None = None
        self._attempt: Attempt | None = None
        self._is_unsettled = False  # the upstream may have done the work

    async def run(self) -> web.StreamResponse:
        call, sender = self._call, self._sender
        call.fate, call.timing = "bypass", Timing()
        if call.method == "GET" and (named := re.search(r"/models(?:/([^/]+))?$", call.path)):
            if not named[1] and len(sender.upstreams) > 1:
                return await self._models()
            call.model = urllib.parse.unquote(named[1] or "")
        choice = sender.choose(call)
        call.upstream = choice.upstream.name
        length = call.low.get("content-length", "")
        length_tokens = min(int(length), 2**32) // 3 if length.isdecimal() else 0
        length_tokens = max(length_tokens, len(call.body) // 3)
        if is_readable(call.low) and "audio" not in call.low.get("content-type", ""):
            choice.demand.prompt_tokens = length_tokens
        if not call.may_cost:
            return await self._send(choice)
        self._reserved = call.reserve(choice.demand)
        try:
            await sender.peek(choice)
            books, expected = sender.books, choice.demand.tokens
            worst = length_tokens + 100
            model, timing = choice.model, call.timing
            self._stake = await books.reserve(call, model, worst, expected, timing)
            self._permit = await sender.enter(choice, timing)
            await books.stand(call)
            self._attempt = choice.circuit.admit()
            return await self._send(choice)
        finally:
            requests = call.attempts = int(self._attempt is not None)
            was_sent = call.status or self._upload.is_over or call.body
            if self._is_unsettled and was_sent:  # it broke off, or its caller left
                self._settle(choice, None)  # unknown is not free
            if self._attempt is not None:
                self._attempt.neutral()
            if self._permit is not None:
                self._permit.leave()
            if self._reserved is not None:
                self._reserved.settle(call.used_prompt, call.used_output, requests=requests)
            sender.books.unstake(call, self._stake)

    async def _send(self, choice: Choice) -> web.StreamResponse:
        call, sender, upload = self._call, self._sender, self._upload
        plan = sender.plan(call, choice)
        choice.upstream.dress(plan, self._permit.key if self._permit else None, call.dialect)
        sender.counters.upstream_calls += 1
        sender.in_flight += 1
        try:
            with choice.upstream.watch(plan.first_s) as watchdog:
                return await self._through(choice, plan, watchdog)
        except CallerGone:
            raise
        except (aiohttp.ClientError, OSError) as error:
            if self._request.transport is None:
                raise CallerGone from None
            if upload.error is not None:
                raise upload.error from None
            if self._attempt is not None:
                self._attempt.failed()
            raise choice.upstream.explain(error) from None
        finally:
            sender.in_flight -= 1

    async def _through(self, choice: Choice, plan: Plan, watchdog: Watchdog) -> web.StreamResponse:
        """One exchange. While we wait for the caller, the watchdog rests."""
        call, request, sender = self._call, self._request, self._sender
        sent_at = sender.clock()
        body: bytes | AsyncIterator[bytes] | None = call.body
        if not call.body and request.can_read_body:
            self._upload.expect(call)
            if "content-length" in call.low:
                plan.headers["Content-Length"] = call.low["content-length"]
            body = self._upload.chunks(watchdog)
        response = await self._open(choice, plan, body)
        try:
            call.timing.upstream_s = sender.clock() - sent_at
            call.status = response.status
            head = choice.upstream.head_of(response)
            self._is_unsettled = self._is_unsettled and call.status < 300
            if self._attempt is not None and self._permit is not None and call.status < 400:
                self._attempt.give_place()
                self._permit.begin()
                sender.heed(self._permit, head.headers)
            reply = call.reply = self._relay.reply(call, head)
            await reply.prepare(request)
            watchdog.limit_s = plan.silence_s
            first, tail = await self._pass_on(choice.upstream, response, reply, watchdog)
            await reply.write_eof()
            if self._attempt is not None:
                self._record(choice, head, first, tail)
            return reply
        finally:
            response.close()

    async def _open(
        self, choice: Choice, plan: Plan, body: bytes | AsyncIterator[bytes] | None
    ) -> aiohttp.ClientResponse:
        self._is_unsettled = self._permit is not None
        if self._permit is not None:
            self._permit.was_sent = True
        try:
            return await choice.upstream.open(self._call.method, plan.raw_path, plan.headers, body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            self._is_unsettled = False
            if self._permit is not None:
                self._permit.was_sent = False
            raise

    async def _pass_on(
        self, upstream: Upstream, response: aiohttp.ClientResponse, reply: Reply, watchdog: Watchdog
    ) -> tuple[bytes, bytes]:
        """The answer's body, chunk by chunk; returns its first and its last bytes."""
        content, first, held, tail = response.content, b"", b"", bytearray()
        keep_bytes = FLIGHT_BYTES if "Content-Encoding" in response.headers else self.TAIL_BYTES
        while not content.at_eof():
            chunk = await content.readany()
            first = first or chunk
            tail += chunk
            if len(tail) > 2 * keep_bytes:
                del tail[:-keep_bytes]
            chunk = held + chunk
            held = chunk[len(chunk) - upstream.begun_key(chunk) :]
            watchdog.pause()
            await reply.write(upstream.hide(chunk[: len(chunk) - len(held)]), CALLER_S)
            watchdog.resume()
        await reply.write(held, CALLER_S)
        return first, bytes(tail)

    def _record(self, choice: Choice, head: Head, first: bytes, tail: bytes) -> None:
        assert self._attempt is not None
        sender = self._sender
        sender.record(self._attempt, judge(head, first, time.time()), self._permit)
        if head.status >= 300:
            self._is_unsettled = False
            return
        self._settle(choice, read_usage(decoded(tail, head.headers), head.is_stream))

    def _settle(self, choice: Choice, usage: Usage | None) -> None:
        """What the call used; where nobody says it, what was reserved."""
        call, self._is_unsettled = self._call, False
        if usage is None:
            output = OUTPUT_TOKENS_ABSENT if self._stake is not None else 0
            usage = Usage(call.expected.prompt, 0, output, is_estimated=True)
        call.usage = usage
        self._sender.settle(call, usage, choice, self._permit)

    async def _models(self) -> web.StreamResponse:
        """The models of all upstreams that are alive, each once, in the file's order."""
        call, found = self._call, dict[str, Any]()
        upstreams = self._sender.upstreams
        lists = await asyncio.gather(*(self._models_of(upstream) for upstream in upstreams))
        for upstream, listed in zip(upstreams, lists, strict=True):
            rule = upstream.rule
            names = [] if listed is None else [n for n in rule.models if not re.search(r"[*?[]", n)]
            models = [*(listed or ()), *({"id": name, "object": "model"} for name in names)]
            for model in models:
                if rule.serves(model["id"]) and call.may_use(model["id"]):
                    found.setdefault(model["id"], model)
        call.status = 200
        return self._relay.document(call, {"object": "list", "data": list(found.values())})

    async def _models_of(self, upstream: Upstream) -> list[dict[str, Any]] | None:
        """What an upstream lists; None where it does not answer."""
        call, sender = self._call, self._sender
        choice = dataclasses.replace(sender.choose(call, upstream), is_foreign=True)
        plan = sender.plan(call, choice)
        for name in ("Accept-Encoding", "If-None-Match", "If-Modified-Since", "Range"):
            plan.headers.popall(name, None)
        upstream.dress(plan, None, call.dialect)
        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, RecursionError):
            async with asyncio.timeout(HEALTH_LIMIT_S):
                status, body = await upstream.get(plan.raw_path, plan.headers, FLIGHT_BYTES)
            odd = lambda constant: None  # noqa: E731  NaN is no JSON
            doc = json.loads(body, parse_constant=odd) if status == 200 else {}
            models = doc.get("data") if isinstance(doc, dict) else None
            models = models if isinstance(models, list) else []
            return [m for m in models if isinstance(m, dict) and isinstance(m.get("id"), str)]
        return None


# -- the operator's routes


def check_open(settings: Settings) -> None:
    """Raise ConfigError where anybody on the network could use the upstream unasked."""
    is_open = settings.allow_open == "on" or bool(settings.clients)
    if not is_loopback(settings.host) and not is_open:
        why = f"--host {settings.host}: whoever reaches it could use the upstream; add a client "
        raise ConfigError(why + "(llmproxy key new NAME) or say --allow-open")


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

        Raises:
            ConfigError: says which one and why; nothing was changed.
        """
        self._take(self._gateway.settings.changed(texts, where))
        shown = self._gateway.settings.shown()
        changed = {flag: shown[flag] for flag in (flag_name(name) for name in texts)}
        text = ", ".join(f"{flag} = {', '.join(typed(v))}" for flag, v in changed.items())
        log.warning("%s: %s", where, printable(text, 200))
        return changed

    def save(self, flags: Iterable[str] = ()) -> Path:
        """Write settings that the file has differently: those named, else all live ones.

        Raises:
            ConfigError: the file cannot be read or written, and is as it was.
        """
        settings = self._gateway.settings
        path = settings.path or default_config_path(os.environ)
        with only_one(path, waits=False):
            text = text_of(path)
            there = load_settings({}, {}, path) if text else Settings()
            names = [flag.replace("-", "_") for flag in flags]
            names = names or [name for name in SETTINGS if SETTINGS[name].metadata["live"]]
            values = {name: getattr(settings, name) for name in names}
            new = {n: writable(n, v) for n, v in values.items() if v != getattr(there, n)}
            if new:
                replace_file(path, with_settings(text, new))
                if settings.again is not None:  # what else was edited is for the next reload
                    fresh = settings.again()
                    saved = {name: getattr(fresh, name) for name in new}
                    self._loaded = dataclasses.replace(self._loaded, **saved)
        return path

    def reload(self) -> str:
        """Read the file, and all else, once more; returns what came of it.

        What has not changed there since it was last read stays as it was set in the meantime.

        Raises:
            ConfigError: nothing was changed.
        """
        settings = self._gateway.settings
        if settings.again is None:
            raise ConfigError("there is no file to read again")
        fresh, old = settings.again(), self._loaded
        names = [n for n in (*SETTINGS, *self.TABLES) if getattr(fresh, n) != getattr(old, n)]
        live = [n for n in names if n in ("models", "clients") or self._is_live(n)]
        new = {name: getattr(fresh, name) for name in live}
        given = {name: where for name, where in settings.given.items() if name not in live}
        given |= {name: fresh.given[name] for name in live if name in fresh.given}
        changed = dataclasses.replace(settings, **new, given=given)
        check_open(changed)
        self._take(changed)
        self._loaded = dataclasses.replace(old, **new)
        if old.clients and not fresh.clients:
            log.warning("no client is left in the file: whoever reaches the port may call")
        rest = [flag_name(name) for name in names if name not in live]
        text = f"changed {', '.join(map(flag_name, live)) or 'nothing'}"
        return text + (f"; wants a restart: {', '.join(rest)}" if rest else "")

    @staticmethod
    def _is_live(name: str) -> bool:
        return name in SETTINGS and bool(SETTINGS[name].metadata["live"])

    def _take(self, changed: Settings) -> None:
        gateway, settings = self._gateway, self._gateway.settings
        money = ("price", "prices", "budget", "budget_month", "models", "clients")
        if any(getattr(changed, name) != getattr(settings, name) for name in money):
            gateway.books.change(changed)
        gateway.clients = self._clients(changed)
        for name in (*SETTINGS, *self.TABLES, "given"):
            setattr(settings, name, getattr(changed, name))
        for upstream in gateway.sender.upstreams:
            upstream.resize()
        gateway.flights.shrink(settings.cache_bytes)

    def _clients(self, changed: Settings) -> list[Client]:
        """Those of the file; who was there before keeps what was counted."""
        known = {client.rule.name: client for client in self._gateway.clients}
        clients = []
        for rule in changed.clients:
            client = known.get(rule.name) or Client(rule, self._gateway.clock)
            client.limit(rule)
            clients.append(client)
        return clients

    def act(self, action: str, wanted: Mapping[str, Any]) -> str:
        """Pause, resume, clear what is kept, close circuits, reload; returns what was done.

        `wanted`: upstream, model and path of the circuit to close; none of them: all.

        Raises:
            ConfigError: it cannot be done.
        """
        gateway = self._gateway
        if action in ("pause", "resume"):
            self.is_paused = action == "pause"
            for upstream in gateway.sender.upstreams:
                upstream.gate.pause(self.is_paused)
            return "paused: new calls wait in the queue" if self.is_paused else "going on"
        if action == "clear":
            count = len(gateway.flights.kept)
            gateway.flights.clear()
            return f"forgot {count} kept answers"
        if action == "close":
            known = ("upstream", "model", "path")
            if not all(k in known and isinstance(v, str) for k, v in wanted.items()):
                raise ConfigError(f"close: wants texts of {', '.join(known)}, or nothing for all")
            circuits = [c for c in gateway.sender.circuits.values() if c.state is not State.CLOSED]
            fits = [c for c in circuits if all(c.shown()[k] == v for k, v in wanted.items())]
            for circuit in fits:
                circuit.close()
            return f"closed {len(fits)} circuits"
        if action == "reload":
            return self.reload()
        if action == "save":
            return f"saved in {self.save()}"
        raise ConfigError(f"unknown action {printable(action)}; known: {', '.join(ACTIONS)}")


ACTIONS = ("pause", "resume", "clear", "close", "reload", "save")


class Admin:
    """The operator's routes: for loopback callers or the admin key, never for a web page."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._routes: dict[str, Callable[[], Any]] = {
            "health": lambda: {"status": "ok"},
            "ready": self._ready,
            "status": gateway.status,
            "metrics": lambda: "\n".join(metrics(gateway)).encode() + b"\n",
        }

    async def answer(self, call: Call, request: web.BaseRequest) -> web.StreamResponse:
        call.dialect, call.fate, origin, call.origin = "openai", "bypass", call.origin, None
        relay, name = self._gateway.relay, call.path.removeprefix(ADMIN)
        try:
            self._check(call, request, origin)
            query = URL(call.raw_path, encoded=True).query
            if name in self._routes:
                doc = self._routes[name]()
                if name == "status" and query.get("recent", "").isdecimal():
                    doc["recent"] = self._gateway.counters.last(int(query["recent"][:4]))
            elif name == "settings" or name.startswith("do/"):
                doc = await self._operate(name, call, request)
            elif name == "calls" or name.startswith("trace/"):
                doc = await self._read(name, query)
            else:
                known = ", ".join([*self._routes, "calls", "trace/ID", "settings", "do/ACTION"])
                raise ProxyError("not_found", f"admin routes: {known}")
        except ProxyError as error:
            return relay.refuse(call, error, request)
        status = 503 if name == "ready" and doc["status"] != "ready" else 200
        reply = relay.document(call, doc, status, CIMultiDict({"Cache-Control": "no-store"}))
        if name == "metrics":
            reply.head.headers["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8"
        return reply

    async def _operate(
        self, name: str, call: Call, request: web.BaseRequest
    ) -> dict[str, Any]:
        """Read or change settings, or have something done."""
        control, settings = self._gateway.control, self._gateway.settings
        if name == "settings" and call.method == "GET":
            live = [flag_name(n) for n, item in SETTINGS.items() if item.metadata["live"]]
            given = {flag_name(n): where for n, where in settings.given.items()}
            return {
                "settings": settings.shown(), "given": given, "live": live,
                "file": str(settings.path or ""),
            }  # fmt: skip
        if call.method != ("PATCH" if name == "settings" else "POST"):
            raise ProxyError("not_found", "GET or PATCH settings, POST do/ACTION")
        body = await Upload(request, SLICE_BYTES).whole(call) or b"{}"
        try:
            doc = json.loads(body)
            if not isinstance(doc, dict):
                raise ConfigError("wants a JSON object")
            if name != "settings":
                return {"done": control.act(name.removeprefix("do/"), doc)}
            is_saved = doc.pop("save", False)
            changed = control.change(doc)
            try:
                saved = {"saved": str(control.save(doc))} if is_saved else {}
            except ConfigError as error:
                raise ConfigError(f"changed, but not saved: {error}") from None
            return {"settings": changed, **saved}
        except ConfigError as error:
            raise ProxyError("invalid_request", str(error)) from None
        except (ValueError, RecursionError):
            raise ProxyError("invalid_request", "the body is no JSON") from None

    async def _read(self, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Rows of the ledger, read beside the event loop."""
        ledger = self._gateway.books.ledger
        if ledger is None:
            raise ProxyError("not_found", "there is no ledger (--state none)")
        try:
            sql, values = calls_query(query, name.removeprefix("trace/") if "/" in name else None)
            values[-1] = min(values[-1], 1000)
        except ValueError as error:
            raise ProxyError("invalid_request", str(error)) from None
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(None, ledger.read, sql, values)
        if "/" in name and not rows:
            raise ProxyError("not_found", "no call of this trace is in the ledger")
        return {"calls": [shown_row(row) for row in rows]}

    def _check(self, call: Call, request: web.BaseRequest, origin: str | None) -> None:
        site = call.low.get("sec-fetch-site", "none")
        if origin is not None or site not in ("none", "same-origin"):
            raise ProxyError("forbidden_origin", "admin routes are not for web pages")
        self._gateway.check_host(call, is_admin=True)
        key = self._gateway.settings.admin_key
        if key is not None:
            given = call.low.get("authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                why = "admin routes want the admin key as a bearer token"
                raise ProxyError("invalid_api_key", why)
        elif request.remote is not None and not is_loopback(request.remote):
            why = "admin routes are for loopback callers; see --admin-key"
            raise ProxyError("forbidden_origin", why)

    def _ready(self) -> dict[str, Any]:
        circuits = self._gateway.sender.circuits.values()
        dead = bool(circuits) and all(c.state is State.OPEN and c.retry_in_s > 0 for c in circuits)
        reason = "every circuit is open" if dead else "ready"
        reason = "draining" if self._gateway.is_draining else reason
        return {"status": reason}


def metrics(gateway: Gateway) -> Iterable[str]:
    """Prometheus text, under the names of OpenTelemetry's GenAI conventions where there are any."""
    status, counters = gateway.status(), gateway.counters
    yield "# TYPE llmproxy_calls_total counter"
    for fate in FATES:
        yield f'llmproxy_calls_total{{fate="{fate}"}} {counters.fates[fate]}'
    yield "# TYPE gen_ai_client_token_usage_total counter"
    for kind, name in (("input", "tokens_in"), ("output", "tokens_out")):
        yield f'gen_ai_client_token_usage_total{{gen_ai_token_type="{kind}"}} {status[name]}'
    totals = ("upstream_calls", "upstream_429", "retries", "tokens_saved", "unpriced_tokens")
    for name in totals:
        yield f"# TYPE llmproxy_{name}_total counter"
        yield f"llmproxy_{name}_total {status[name]}"
    for name in ("in_flight", "queued", "kept_bytes", "spend_usd", "saved_usd", "uptime_s"):
        yield f"# TYPE llmproxy_{name} gauge"
        yield f"llmproxy_{name} {status[name]}"
    yield "# TYPE llmproxy_open_circuits gauge"
    yield f"llmproxy_open_circuits {len(status['open_circuits'])}"
    names = {
        "total": "gen_ai_client_operation_duration_seconds",
        "ttft": "gen_ai_server_time_to_first_token_seconds", "queue": "llmproxy_queue_seconds",
    }  # fmt: skip
    for kind, name in names.items():
        yield f"# TYPE {name} histogram"
        yield from counters.times[kind].lines(name, "")


# -- the way of a request


class Gateway:
    """Guards, reads and joins; hands flights to the Sender and callers to the Relay."""

    def __init__(self, settings: Settings, clock: Clock = time.monotonic) -> None:
        self.settings = settings
        self.clock = clock
        self.counters = Counters(clock)
        self.books = Books(settings, self.counters)
        self.flights = Flights(clock)
        self.sender = Sender(settings, self.books, self.flights, clock)
        self.relay = Relay(settings, self.books, self.flights, clock)
        self.control = Control(self)
        self.admin = Admin(self)
        self.clients = [Client(rule, clock) for rule in settings.clients]
        self.is_draining = False
        self.on_call: Callable[[Call], None] = lambda call: None
        self.open_calls = 0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.books.start()
        await self.sender.start()

    async def drain(self, limit_s: float = DRAIN_S) -> bool:
        """Refuse new calls, let those in flight finish. True if all did within `limit_s`."""
        self.is_draining = True
        self.control.act("resume", {})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.open_calls or self.sender.in_flight or self.sender.queued:
                    await asyncio.sleep(0.02)
                return True
        return False

    async def close(self) -> None:
        await self.sender.close()
        self.books.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = Call(request, self.clock())
        if call.is_admin:
            return await self.admin.answer(call, request)
        self.open_calls += 1
        self.counters.requests += 1
        try:
            return await self._answer(call, request)
        except ProxyError as error:
            return self.relay.refuse(call, error, request)
        except ConnectionError:
            call.status = call.status or 499  # nginx's number for a caller that hung up
            transport = request.transport
            if transport is not None and not transport.is_closing():
                call.code = "caller_too_slow"  # too far behind an overgrown answer: cut off
                transport.abort()
            return _Gone()
        except asyncio.CancelledError:
            call.status = call.status or 499
            raise
        except Exception as error:  # a fault of ours: say so, without what it might quote
            log.error("internal error: %s", fault_lines(error))
            return self.relay.refuse(call, internal(), request)
        finally:
            self.open_calls -= 1
            call.fate = call.fate or "bypass"
            self.counters.end(call)
            if self.books.ledger is not None:
                self.books.ended(call)
            self.on_call(call)

    async def _answer(self, call: Call, request: web.BaseRequest) -> web.StreamResponse:
        """Guard, read, join, relay. Each step answers, goes on, or raises one ProxyError."""
        self._guard(call)
        if call.origin is not None and call.method == "OPTIONS":
            return self.relay.preflight(call)
        if call.method in ("TRACE", "CONNECT"):  # it would echo whatever key is on it
            raise ProxyError("invalid_request", f"{call.method} is not passed on")
        if self.is_draining:
            why = "the proxy is shutting down; try again"
            raise ProxyError("shutting_down", why, retry_after_s=5)
        self._authenticate(call)
        found = None
        if call.route is not None and is_readable(call.low):
            call.body = await Upload(request, self.settings.max_body).whole(call)
            found = self._find(call)
        if found is None:
            if call.may_cost:
                call.check_model("")
            return await Passage(self.sender, self.relay, call, request).run()
        if isinstance(found, Flight):
            return await self.relay.relay(call, found, request)
        return await self.relay.serve(call, *found, "hit", request)

    def _guard(self, call: Call) -> None:
        """Who may call, and do we understand the headers that are ours?"""
        allowed = self.settings.allow_origin
        if call.origin is not None and not is_allowed_origin(call.origin, allowed):
            origin, call.origin = printable(call.origin), None
            why = f"browser origin {origin} may not call; see --allow-origin"
            raise ProxyError("forbidden_origin", why)
        self.check_host(call)
        for name in call.own:
            self._own_header(call, name, call.low[name])
        if call.task_budget and not call.task:
            raise ProxyError("invalid_header", "x-llmproxy-task-budget wants an x-llmproxy-task")
        if "cache-control" in call.low:
            call.directives = cache_control(call.low["cache-control"])

    def check_host(self, call: Call, is_admin: bool = False) -> None:
        host = call.low.get("host", "localhost")
        is_local = is_loopback(self.settings.host) or (is_admin and not self.settings.admin_key)
        if is_local and not is_loopback(host):
            if host_name(host) not in (name.lower() for name in self.settings.allow_host):
                why = f"Host {printable(host)} is not this machine (DNS rebinding)"
                raise ProxyError("forbidden_origin", f"{why}; see --allow-host")

    @staticmethod
    def _own_header(call: Call, name: str, value: str) -> None:
        if name not in OWN_HEADERS:
            known = ", ".join(sorted(OWN_HEADERS))
            why = f"{printable(name)} is not a header of this version; known: {known}"
            raise ProxyError("invalid_header", why)
        allowed = OWN_HEADERS[name]
        if allowed and value not in allowed:
            why = f"{name} wants one of {', '.join(allowed)}, got {printable(value)}"
            raise ProxyError("invalid_header", why)
        if name == "x-llmproxy-task":
            name = value[:200]  # one that looks like a key is known by its hash
            digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
            call.task = name if struck(name) == name else f"task-{digest[:12]}"
        elif name == "x-llmproxy-task-budget":
            try:
                call.task_budget = parse_count(value)
            except ValueError:
                why = f"{name} wants a whole number of tokens above 0, got {printable(value)}"
                raise ProxyError("invalid_header", why) from None

    def _authenticate(self, call: Call) -> None:
        """Whose call is it? With client keys in the file, nobody else's passes."""
        if not self.clients:
            call.client = client_id(call.credential)
        else:
            for key in call.api_keys():
                given = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
                for client in self.clients:  # all of them, each in constant time
                    if hmac.compare_digest(given, client.rule.key_sha256):
                        call.who = client
                        call.own_keys = (*call.own_keys, key)
            if call.who is None:
                why = "no valid client key; send it as a bearer token or as x-api-key"
                raise ProxyError("invalid_api_key", why)
            call.client, call.priority = call.who.rule.name, call.who.rule.priority
            if any(carries(call.path, key) for key in call.own_keys):
                call.path = "/***"
                raise ProxyError("invalid_request", "a key does not belong into the path")
            if any(key in call.trace for key in call.own_keys):
                call.trace = new_trace()
        if call.own:
            if call.task and call.who is not None:
                call.task_budget = call.task_budget or call.who.rule.task_budget or 0
            call.priority = call.low.get("x-llmproxy-priority", call.priority)
            call.retry = call.low.get("x-llmproxy-retry")

    # -- joining

    def _find(self, call: Call) -> Flight | tuple[Kept, float] | None:
        """What answers this call: a kept answer, a running flight, or a new one that it leads.

        None where the body is not a JSON object: the upstream shall say what is wrong with it.
        """
        settings, flights, scope = self.settings, self.flights, self._scope(call)
        alias = hashlib.sha256(scope + b"\0raw\0" + call.body).digest()
        call.may_join = settings.dedup != "off" and "no-store" not in call.directives
        if call.may_join and (known := flights.key_of(alias)) is not None:
            key, call.is_stream, call.wants_usage = known
            if (found := self._known(call, key)) is not None:
                return found
        parsed = parse_json(call.body)
        if parsed is None:
            return None
        call.doc, canonical = parsed
        model = call.doc.get("model")
        call.model = model[:200] if isinstance(model, str) else ""
        if any(key in call.model for key in call.own_keys):
            call.model = ""
            raise ProxyError("invalid_request", "a key is no model")
        call.size = canonical.size
        call.is_stream = call.doc.get("stream") is True
        call.wants_usage = reports_usage(call.doc)
        call.is_merged = self.sender.may_merge(call)
        asked = b"\0json\0" + canonical.data
        if call.is_merged:
            asked = b"\0any form\0" + canonical.formless
        key = hashlib.sha256(scope + asked).digest()
        # The same body on top of a conversation that the server holds is another turn.
        call.may_join = call.may_join and not call.doc.get("conversation")
        call.may_keep = call.may_join and (
            settings.dedup == "on"
            or (settings.dedup == "deterministic" and is_deterministic(call.doc))
        )
        if call.may_join:
            found = self._known(call, key)
            if found is None:
                found = self._lead(call, key)
            flights.alias(alias, key, call.is_stream, call.wants_usage)
            return found
        return self._lead(call, key)

    def _scope(self, call: Call) -> bytes:
        """What two calls must have in common besides their bodies."""
        settings = self.settings
        credential, raw_path, get = call.credential, call.raw_path, call.low.get
        if call.who is not None:  # however it sends its key
            rest = [get(name, "") for name in CREDENTIALS]
            rest = [v for v in rest if not any(carries(v, key) for key in call.own_keys)]
            credential = "\0".join([call.client, *rest])
            raw_path = without_keys(raw_path, call.own_keys, ())
        if settings.share == "all":
            credential, raw_path = "", without_keys(raw_path)
        changing = [get(name, "") for name in ANSWER_CHANGING]
        if call.task and self.books.may_cut(call):  # its stream, and nobody else's
            credential += f"\0task {call.task}"
        scope = "\0".join([credential, raw_path, *changing])
        return scope.encode("utf-8", "surrogateescape")

    def _known(self, call: Call, key: bytes) -> Flight | tuple[Kept, float] | None:
        """A kept answer or a running flight that this caller takes."""
        settings, max_age_s = self.settings, call.max_age_s
        flight = self.flights.running.get(key)  # newer than any kept answer
        if flight is not None and not flight.is_overgrown and max_age_s >= 0:
            call.check_model(flight.leader.model)
            self._log_body(call)
            call.fate, call.body = "joined", b""
            return flight
        if settings.dedup in ("on", "deterministic"):
            found = self.flights.find(key, min(settings.dedup_window, max_age_s))
            if found is not None and (settings.dedup == "on" or found[0].is_deterministic):
                call.check_model(found[0].model)
                if found[0].is_merged and not call.is_stream and not self.relay.plain(found[0]):
                    self.flights.drop(key)  # it holds no answer after all
                    return None
                self._log_body(call)
                return found
        return None

    def _log_body(self, call: Call) -> None:
        """What was asked by a call that costs nothing; its answer stands with another."""
        if self.settings.log_bodies == "on":
            self.books.bodies(call, call.body, b"")

    def _lead(self, call: Call, key: bytes) -> Flight:
        call.check_model(call.model)
        call.fate, call.max_tokens = "miss", max_tokens(call.doc)
        choices = self.sender.choices(call)
        flight = Flight(key, call, self._loop)
        flight.is_merged = call.is_merged
        flight.reserved = call.reserve(choices[0].demand)
        call.leads = True
        if call.may_join:
            self.flights.start(flight)
        self.sender.launch(flight, choices)
        return flight

    # -- what is shown

    def status(self) -> dict[str, Any]:
        """What the status route, the live table and scripts see."""
        sender = self.sender
        gates = [upstream.gate for upstream in sender.upstreams]
        circuits = sender.circuits.values()
        return {
            "version": __version__,
            "in_flight": sender.in_flight,
            "queued": sender.queued,
            **self.counters.status(),
            "open_circuits": [
                {**c.shown(), "retry_in_s": round(c.retry_in_s, 1)}
                for c in circuits if c.state is not State.CLOSED
            ],
            "circuits": [
                {
                    **c.shown(), "timeout_s": round(c.timeout_s(), 1), "measured": len(c.attempt_s),
                    "p99_s": round(percentile(c.attempt_s, 0.99), 3),
                }
                for c in circuits[-100:]
            ],
            "queue": [
                {"client": client, "priority": priority, "calls": calls, "wait_s": round(wait_s, 1)}
                for gate in gates for client, priority, calls, wait_s in gate.waiting()
            ],
            **self.books.shown(),
            "kept_bytes": self.flights.kept_bytes,
            "kept_answers": len(self.flights.kept),
            "permits": {
                "calls": sum(gate.running for gate in gates),
                "weight": sum(gate.weight for gate in gates),
            },
            "draining": self.is_draining, "paused": self.control.is_paused,
            "upstreams": [upstream.shown() for upstream in sender.upstreams],
            "clients": [client.shown() for client in self.clients],
            "settings": self.settings.shown(),
        }  # fmt: skip


def json_reply(doc: Any, status: int = 200) -> Reply:
    body = doc if isinstance(doc, bytes) else json.dumps(doc).encode()
    headers = CIMultiDict({"Content-Type": "application/json"})
    return Reply(Head(status, HTTPStatus(status).phrase, headers), body)


def server_timing(timing: Timing) -> str:
    queue = f"queue;dur={timing.queue_s * 1000:.1f}"
    if timing.position:
        queue += f';desc="place {timing.position}, {timing.expected_s:.1f} s expected"'
    return (
        f"{queue}, limit;dur={timing.limit_s * 1000:.1f}, "
        f"retry;dur={timing.retry_s * 1000:.1f}, upstream;dur={timing.upstream_s * 1000:.1f}"
    )


@functools.lru_cache(1024)
def client_id(credential: str) -> str:
    """A name for a caller's credential that does not tell it."""
    if not credential.strip("\0"):
        return Call.client
    return hashlib.sha256(credential.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def too_large(limit_bytes: int) -> ProxyError:
    why = f"the body is larger than {limit_bytes} bytes (--max-body)"
    return ProxyError("request_too_large", why)


def stalled() -> ProxyError:
    return ProxyError("caller_stalled", f"no byte of the body for {CALLER_S:g} s")


def internal() -> ProxyError:
    return ProxyError("internal_error", "internal error; the proxy's log says where")


def upstream_name(base: str) -> str:
    return URL(base).authority


###############################################################################
# Server
###############################################################################
# Rule: sockets, signals, the event loop. Knows nothing of flags.


class _OneLine(logging.Formatter):
    """No traceback: other libraries' might quote secrets."""

    def formatException(self, ei: Any) -> str:
        return ""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split("\n")).rstrip()


class StderrLog(logging.Handler):
    """Writes lines from a thread: a stderr that nobody reads holds up no call.

    What does not fit MAX_LINES is dropped, and the number of dropped lines is said.
    """

    MAX_LINES = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_OneLine("%(message)s"))
        self.is_json = False
        self.is_journal = _is_journal()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._dropped = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if self.is_json:
            doc = {"time_unix": record.created, "level": record.levelname.lower(), "message": text}
            self.put(json.dumps(doc))
        elif self.is_journal:  # sd-daemon(3): the journal takes the level from here
            self.put(f"<{4 if record.levelno < logging.ERROR else 3}>{text}")
        else:
            self.put(f"llmproxy: {text}")

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


def _is_journal() -> bool:
    """Whether stderr goes to systemd's journal, which has times and levels of its own."""
    with contextlib.suppress(OSError):
        found = os.fstat(2)
        return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
    return False


stderr_log = StderrLog()


def notify(*lines: str) -> None:
    """Tell a service manager (sd_notify(3)); nothing where there is none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # whoever does not listen holds up no call
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendall("\n".join(lines).encode())
    except (OSError, ValueError, AttributeError) as error:
        log.warning("NOTIFY_SOCKET cannot be told: %s", printable(str(error)))


async def keep_notifying() -> None:
    """Where systemd watches us (WatchdogSec), say twice in its time that we live."""
    text = os.environ.get("WATCHDOG_USEC", "")
    every_s = int(text) / 2e6 if re.fullmatch(r"\d{1,15}", text, re.ASCII) else 0.0
    while every_s > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(every_s)


@contextlib.contextmanager
def pid_file(path: str | None) -> Iterator[None]:
    """A file with our number while the body runs.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        yield
        return
    file = Path(path).expanduser()
    if file.exists() and not file.is_file():
        raise ConfigError(f"--pid-file {file}: is no file")
    with contextlib.suppress(OSError, ValueError):
        if is_running(other := int(file.read_text())):
            log.warning("%s was held by process %s, which still runs", file, other)
    replace_file(file, f"{os.getpid()}\n")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if file.read_text().strip() == str(os.getpid()):  # else another took it over
                file.unlink()


class _Connection(web.RequestHandler):
    """aiohttp's connection, with its own errors in our form.

    Its text would quote header bytes, and its log tracebacks; both may hold secrets.
    """

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:  # fmt: skip
        if request.writer.output_size > 0:
            raise ConnectionResetError
        if status == 500 and exc is not None:
            log.error("internal error: %s", fault_lines(exc))
        error = internal()
        if status == 400:
            error = ProxyError("invalid_request", "this is not a valid HTTP request")
        trace = new_trace()
        reply = json_reply(error_body(error, "openai", trace), error.status)
        headers = reply.head.headers
        headers["x-should-retry"], headers["x-llmproxy-fate"] = "false", "rejected"
        headers["x-llmproxy-trace"] = headers["x-request-id"] = trace
        headers["Server-Timing"] = server_timing(NO_TIME)
        return reply

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        exc = kwargs.get("exc_info")
        if isinstance(exc, BaseException) and not isinstance(exc, ConnectionError):
            log.error("aiohttp: %s", fault_lines(exc))


class ListenError(Exception):
    """The address cannot be listened on; the message says the mend."""


class Daemon:
    """A gateway that listens. `async with` starts and stops it.

    Raises on entry:
        ListenError: nothing was started.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.mock: Mock | None = None
        self.url = ""

    async def __aenter__(self) -> Daemon:
        async with contextlib.AsyncExitStack() as stack:
            settings = self.settings
            rules = settings.upstreams
            if "mock:" in (settings.upstream if not rules else "", *(rule.url for rule in rules)):
                self.mock = Mock(latency_s=1.5)
                address = await stack.enter_async_context(
                    listening(self.mock.handle, "127.0.0.1", 0)
                )
                settings.upstream = settings.upstream.replace("mock:", address)
                for rule in rules:
                    rule.url = rule.url.replace("mock:", address)
            check_open(settings)
            for base in [rule.url for rule in rules] or [settings.upstream]:
                if URL(base).port == settings.port and is_loopback(URL(base).host or ""):
                    if is_loopback(settings.host):
                        raise ConfigError(f"the upstream {base} is this proxy itself")
            self.gateway = Gateway(settings)
            self.url = await stack.enter_async_context(
                listening(self.gateway.handle, settings.host, settings.port)
            )
            await self.gateway.start()
            stack.push_async_callback(self.gateway.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def listening(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], host: str, port: int
) -> AsyncIterator[str]:
    """Serve HTTP/1.1 with aiohttp's low-level server; yields its base URL."""
    loop = asyncio.get_running_loop()

    def new_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> Any:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=0)

    # Cancellation: a caller that hangs up is noticed at once, not at the next write.
    server = web.Server(handle, request_factory=new_request, handler_cancellation=True)

    def connect() -> _Connection:
        return _Connection(
            server, loop=loop, auto_decompress=False, access_log=None, keepalive_timeout=75.0,  # type: ignore[arg-type]
            max_line_size=HEADER_LINE_BYTES, max_field_size=HEADER_LINE_BYTES,
        )  # fmt: skip

    try:
        listener = await loop.create_server(connect, host, port, backlog=1024)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not an address"
        raise ListenError(
            f"cannot listen on {host}:{port} ({reason}); choose another --host or --port"
        ) from None
    try:
        address = listener.sockets[0].getsockname()
        name = f"[{address[0]}]" if ":" in address[0] else address[0]
        yield f"http://{name}:{address[1]}"
    finally:
        listener.close()
        await server.shutdown(1.0)


async def run(settings: Settings, console: Console | None) -> int:
    """The daemon's life: start, serve, drain on the first signal, end at once on a second."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    stderr_log.is_json = settings.log == "json"
    async with Daemon(settings) as daemon:
        with pid_file(settings.pid_file):
            return await _run(daemon, console, signals)


async def _run(daemon: Daemon, console: Console | None, signals: asyncio.Queue[int]) -> int:
    loop, gateway, settings = asyncio.get_running_loop(), daemon.gateway, daemon.settings

    def hang_up() -> None:
        if console is not None and not sys.stdout.isatty():  # the terminal has gone
            signals.put_nowait(signal.SIGTERM)
        else:
            reload(gateway.control)

    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    if console is None:
        targets = ", ".join(rule.url for rule in settings.upstreams) or settings.upstream
        print(f"llmproxy {__version__} on {daemon.url} -> {targets}", flush=True)
    if not is_loopback(settings.host) and not settings.clients:
        log.warning("listening on %s: whoever reaches it can use the upstream", settings.host)
    quits = functools.partial(signals.put_nowait, signal.SIGINT)
    notify("READY=1", f"MAINPID={os.getpid()}", f"STATUS=on {daemon.url}")
    living = asyncio.create_task(keep_notifying())
    try:
        is_second = await _serve(daemon, console, signals, quits)
    finally:
        living.cancel()
    return 1 if is_second else 0


async def _serve(
    daemon: Daemon, console: Console | None, signals: asyncio.Queue[int],
    quits: Callable[[], None],
) -> bool:  # fmt: skip
    """Until a signal comes, then drain; True where a second one did not want to wait for that."""
    gateway = daemon.gateway
    async with showing(gateway, daemon.url, console, quits):
        await signals.get()
        notify("STOPPING=1")
        log.warning("draining: calls in flight finish, new ones get 503; again to end now")
        draining = asyncio.ensure_future(gateway.drain())
        second = asyncio.ensure_future(signals.get())
        await asyncio.wait([draining, second], return_when=asyncio.FIRST_COMPLETED)
        is_second = second.done()
        for task in (draining, second):
            task.cancel()
        if is_second or not draining.result():
            log.warning("ended with calls in flight")
    return is_second


def reload(control: Control) -> None:
    """On SIGHUP. A bad file changes nothing."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        log.warning("reload: %s", control.reload())
    except ConfigError as error:
        log.error("reload: nothing was changed: %s", error)
    notify("READY=1")


@contextlib.asynccontextmanager
async def showing(
    gateway: Gateway, url: str, console: Console | None,
    on_quit: Callable[[], None] = lambda: None,
) -> AsyncIterator[None]:  # fmt: skip
    """The live table while the body runs, or else one log line a call."""
    if console is None:
        gateway.on_call = functools.partial(log_call, gateway.settings)
        yield
        return
    task = asyncio.create_task(daemon_table(gateway, url, console, on_quit))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def log_call(settings: Settings, call: Call) -> None:
    stderr_log.is_json = settings.log == "json"
    if settings.log != "off":
        line = log_line(settings.log, call)
        is_text = stderr_log.is_journal and settings.log == "text"
        stderr_log.put(f"<6>{line[9:]}" if is_text else line)  # the journal has its own clock


def log_line(kind: str, call: Call) -> str:
    """One call in the log, as text or JSON."""
    row = Counters.row(call)
    if kind == "json":
        return json.dumps(row)
    clock = time.strftime("%H:%M:%S", time.localtime(row["time_unix"]))
    return (
        f"{clock} {row['fate']:8} {row['status']} {row['method']} {row['path']} "
        f"model={row['model'] or '-'} client={row['client']} "
        f"wait={row['queue_ms'] + row['limit_ms']:.0f}ms "
        f"time={row['total_ms']:.0f}ms tokens={row['tokens_in']}/{row['tokens_out']} "
        f"trace={row['trace']}" + (f" error={row['code']}" if row["code"] else "")
    )


###############################################################################
# Live table
###############################################################################
# Rule: draws what `Gateway.status` and the last calls say, nothing else. rich is imported here
# only, so that a daemon without a terminal never loads it.

_FATE_STYLE = {
    "miss": "", "joined": "green", "hit": "green", "stale": "yellow", "bypass": "dim",
    "rejected": "red",
}  # fmt: skip
_STATE_STYLE = {"up": "green", "unknown": "dim", "loading": "yellow", "restarting": "yellow"}
MAX_FLOWS = 5  # clients in the queue that are shown
_messages: deque[str] = deque(maxlen=3)  # what the log says while the table owns the terminal


def render(
    status: dict[str, Any], url: str, width: int, height: int, board: Board | None = None
) -> RenderableType:
    """The live table as a renderable that fits `width` x `height`."""
    from rich.console import Group
    from rich.text import Text

    up = time.strftime("%H:%M:%S", time.gmtime(status["uptime_s"]))
    title = Text(f"llmproxy {status['version']}  {url}  up {up}", style="bold")
    for word in ("draining", "paused"):
        if status[word]:
            title.append(f"  {word}", style="bold yellow")
    past = _past(board, width) if board is not None else []
    tuning = _tuning(board, status, width, height) if board is not None else []
    parts: list[Any] = [
        title, Text(), _numbers(status, width), *past, Text(), _upstreams(status), *tuning
    ]  # fmt: skip
    used = 7 + sum(len(status[name]) for name in ("upstreams", "open_circuits"))
    used += sum(len(upstream["keys"]) for upstream in status["upstreams"])
    used += sum(1 for client in status["clients"] if client["rpm"] or client["tpm"])
    used += min(len(status["queue"]), MAX_FLOWS) + len(status["budgets"])
    used += status["ledger"] not in ("ok", "none")
    used += math.ceil(20 / _number_columns(width))
    used += len(past) + len(tuning)
    used += sum(1 for upstream in status["upstreams"] if upstream["llama_cpp"])
    notes = [Text(note, style="yellow") for note in _messages]
    parts += [Text(), _calls(status["recent"], width, max(0, height - used - len(notes))), *notes]
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float]) -> str:
    """One bar a value, as high as its share of the highest; nothing is a blank."""
    numbers = list(values)
    most = max(numbers, default=0.0)
    return "".join(_BARS[math.ceil(n / most * 8) - 1] if n > 0 else " " for n in numbers)


def _past(board: Board, width: int) -> list[RenderableType]:
    """The last minutes, two lines in two halves, or four narrow ones."""
    from rich.text import Text

    if not board.past:
        return []
    shown: dict[str, Callable[[float], str]] = {
        "calls/s": "{:.1f}".format, "in flight": "{:.0f}".format,
        "wait": lambda s: _duration(s * 1000), "429/s": "{:.1f}".format,
    }  # fmt: skip
    half = width // 2 - 1
    room = max(5, half - 18)
    texts = []
    for name, form in shown.items():
        values = [sample[name] for sample in board.past][-room:]
        text = Text.assemble((f"{name:9} ", "dim"), (f"{form(values[-1]):>6} ", "bold"))
        text.append(sparkline(values).rjust(room), "red" if name == "429/s" else "cyan")
        texts.append(text)
    lines = [Text(), *(Text("  ").join(texts[n : n + 2]) for n in (0, 2))]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return list(lines)


def _tuning(
    board: Board, status: dict[str, Any], width: int, height: int
) -> list[RenderableType]:
    """The chosen setting between its neighbours, and what is known that helps to set it."""
    from rich.text import Text

    if not board.has_keys:
        return []
    count = 1 if height < 30 else 5
    places = range(board.chosen - count // 2, board.chosen + count // 2 + 1)
    lines = [Text()]
    for place in places:
        flag = board.flags[place % len(board.flags)]
        is_chosen = place == board.chosen
        value = board.typed + "_" if is_chosen and board.typed is not None else _setting(
            status, flag)
        line = Text.assemble(("> " if is_chosen else "  ", "bold"), (f"{flag:17} ", "dim"))
        line.append(value, "reverse" if is_chosen else "")
        line.append(f"  {_hint(flag, status)}", "dim")
        lines.append(line)
    if board.shows_help:
        lines += [Text(text, style="dim") for text in board.HELP]
    note = board.note or ("" if board.shows_help or width < 70 else "? shows the keys")
    lines.append(Text(note, style="yellow" if board.note else "dim"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return list(lines)


def _setting(status: Mapping[str, Any], flag: str) -> str:
    item, value = SETTINGS[flag.replace("-", "_")], status["settings"][flag]
    if isinstance(value, list):
        return ", ".join(value) or "none"
    words = [word for word, v in item.metadata["also"].items() if v == value]
    unit = item.metadata["unit"]
    if words or not isinstance(value, (int, float)):
        return words[0] if words else str(value)
    if unit == "bytes":
        return f"{value / 2**20:g} MiB"
    return f"{value:g} {unit}"


def _hint(flag: str, status: Mapping[str, Any]) -> str:
    """What was measured and helps to choose a value."""
    if flag == "timeout":
        measured = [c for c in status["circuits"] if c["measured"]]
        if not measured:
            return "nothing learned yet"
        p99_s = max(c["p99_s"] for c in measured)
        suggested = max(c["timeout_s"] for c in measured)
        return f"p99 of the first byte {_duration(p99_s * 1000)}, suggests {suggested:g} s"
    if flag == "concurrency":
        waited = status["queue_ms"]["p95"]
        held = ", ".join(
            f"{_duration(u['service_s'] * 1000)} a call of late, {u['concurrency']} at once"
            for u in status["upstreams"]
        )
        return f"p95 wait {_duration(waited)}; {held}"
    if flag in ("rpm", "tpm"):
        used = [u[flag] for u in status["upstreams"] if u[flag] is not None]
        return f"{_short(sum(b['used'] for b in used))} used in the last minute" if used else ""
    if flag == "cache-bytes":
        return f"{status['kept_answers']} answers, {status['kept_bytes'] / 2**20:.1f} MiB kept"
    return ""


def _number_columns(width: int) -> int:
    return 4 if width < 112 else 8


def _numbers(status: dict[str, Any], width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    latency = status["latency_ms"]
    open_circuits = len(status["open_circuits"])
    share_429 = status["upstream_429"] / max(1, status["upstream_calls"])
    cells = [
        ("in flight", status["in_flight"]), ("queued", status["queued"]),
        ("calls", status["requests"]), ("calls/s", f"{status['calls_per_s']:.1f}"),
        ("joined", status["joined"]), ("hits", status["hit"] + status["stale"]),
        ("upstream", status["upstream_calls"]), ("rejected", status["rejected"]),
        ("open circ.", open_circuits), ("429", f"{share_429:.1%}"),
        ("today", f"${status['spend_usd']:.2f}"), ("saved", f"${status['saved_usd']:.2f}"),
        ("unpriced", _short(status["unpriced_tokens"])),
        ("tok in", _short(status["tokens_in"])), ("tok out", _short(status["tokens_out"])),
        ("tok saved", _short(status["tokens_saved"])),
        ("p50", _duration(latency["p50"])), ("p95", _duration(latency["p95"])),
        ("p99", _duration(latency["p99"])), ("timeout", _timeouts(status)),
    ]  # fmt: skip
    columns = _number_columns(width)
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        grid.add_column(no_wrap=True, ratio=1)
    alarms = {"rejected": status["rejected"], "open circ.": open_circuits, "429": share_429}
    texts = []
    for name, value in cells:
        style = "bold red" if alarms.get(name) else "bold"
        texts.append(Text.assemble((f"{name} ", "dim"), (str(value), style)))
    for start in range(0, len(texts), columns):
        grid.add_row(*texts[start : start + columns])
    return grid


def _timeouts(status: dict[str, Any]) -> str:
    """The limit on silence; of `auto` the range of what the circuits have learned."""
    if status["settings"]["timeout"] != "auto":
        return f"{status['settings']['timeout']:g}s"
    learned = [c["timeout_s"] for c in status["circuits"]] or [30.0]
    low, high = min(learned), max(learned)
    return f"{low:g}s" if low == high else f"{low:g}-{high:g}s"


def _upstreams(status: dict[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim")
    table.add_column("upstream", no_wrap=True, ratio=3, overflow="ellipsis")
    table.add_column("limit", no_wrap=True, ratio=3, overflow="ellipsis")
    table.add_column("state", no_wrap=True, ratio=1, overflow="ellipsis", min_width=12)
    for upstream in status["upstreams"]:
        limit = f"{upstream['running']}/{upstream['concurrency']} calls{_limits_used(upstream)}"
        limit += f", {_short(upstream['inflight_tokens'])} tok"
        limit += ", adaptive" if upstream["is_adaptive"] else ""
        style = _STATE_STYLE.get(upstream["state"], "bold red")
        name = "" if upstream["name"] in upstream["url"] else f"{upstream['name']} "
        name += upstream["url"] + (f" {upstream['model']}" if upstream["model"] else "")
        table.add_row(Text(name), limit, Text(upstream["state"], style))
        if upstream["llama_cpp"]:
            table.add_row(Text(f"  {_slots(upstream)}"), _speeds(upstream), "")
        for key in upstream["keys"]:
            style = "green" if key["state"] == "ok" else "bold red"
            limit = f"{key['calls']} calls{_limits_used(key)}"
            table.add_row(Text(f"  key {key['name']}"), limit, Text(key["state"], style))
    for client in status["clients"]:
        if client["rpm"] or client["tpm"]:
            table.add_row(Text(f"  client {client['name']}"), _limits_used(client)[2:], "")
    for budget in status["budgets"]:
        left = budget["limit_usd"] - budget["spent_usd"]
        name = f"  {budget['name']}, {budget['window']}"
        style = "bold red" if left <= 0 else "green"
        table.add_row(Text(name), f"${budget['limit_usd']:.2f}", Text(f"${left:.2f} left", style))
    if status["ledger"] not in ("ok", "none"):
        table.add_row(Text("  ledger"), "", Text(status["ledger"], "bold red"))
    for flow in status["queue"][:MAX_FLOWS]:
        name = f"  queue {flow['client']} {flow['priority']}"
        wait_s = max(0.0, flow["wait_s"])
        table.add_row(Text(name), f"{flow['calls']} waiting", f"last in {wait_s:.0f} s")
    for circuit in status["open_circuits"]:
        name = f"  {circuit['model'] or '-'} {circuit['path']}"
        wait = f"trial in {circuit['retry_in_s']:.0f} s"
        table.add_row(Text(name), wait, Text(circuit["state"], "bold red"))
    return table


def _slots(upstream: Mapping[str, Any]) -> str:
    """Of a llama.cpp: slots that are busy, and how full its context is."""
    busy, total = upstream["busy_slots"], upstream["context_tokens"]
    fill = f", context {upstream['context_used'] / total:.0%} of {_short(total)}" if total else ""
    return f"{'?' if busy is None else busy}/{upstream['slots']} slots busy{fill}"


def _speeds(upstream: Mapping[str, Any]) -> str:
    if upstream["output_tokens_per_s"] is None:
        return ""
    prompt, cached = upstream["prompt_tokens_per_s"], upstream["cache_hit_share"]
    return (
        f"{_short(upstream['output_tokens_per_s'])} tok/s, prompt {_short(prompt or 0)}/s, "
        f"{cached or 0:.0%} cached"
    )


def _limits_used(limits: Mapping[str, Any]) -> str:
    used = [(name, limits[name]) for name in ("rpm", "tpm") if limits[name] is not None]
    return "".join(f", {_short(b['used'])}/{_short(b['limit'])} {name}" for name, b in used)


def _calls(rows: list[dict[str, Any]], width: int, limit: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim")
    wide = width >= 80
    names = ["at", "fate", "code", "model", *(["path"] if wide else []), "wait", "time", "tokens"]
    for name in names:
        right = name in ("wait", "time", "tokens")
        flexible = name in ("model", "path")
        table.add_column(
            name, no_wrap=True, overflow="ellipsis", justify="right" if right else "left",
            ratio=1 if flexible else None,
        )  # fmt: skip
    for row in rows[::-1][:limit]:
        clock = time.strftime("%H:%M:%S", time.localtime(row["time_unix"]))
        path = [row["path"]] if wide else []
        style = "red" if row["status"] >= 400 else _FATE_STYLE.get(row["fate"], "")
        table.add_row(
            clock, Text(row["fate"], style), Text(str(row["status"]), style),
            Text(row["model"] or "-"), *map(Text, path), _duration(row["queue_ms"]),
            _duration(row["total_ms"]), f"{_short(row['tokens_in'])}/{_short(row['tokens_out'])}",
        )  # fmt: skip
    return table


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.0f}{unit}" if number >= 100 or not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def _duration(ms: float) -> str:
    return (
        f"{ms:.0f}ms" if ms < 1000 else f"{ms / 1000:.1f}s" if ms < 100_000 else f"{ms / 1000:.0f}s"
    )


class Operator:
    """Whom the table asks and what it changes: the daemon in this process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def status(self) -> dict[str, Any]:
        return {**self._gateway.status(), "recent": self._gateway.counters.last(50)}

    def moved(self) -> Any:
        """What differs when there is something new to draw."""
        counters, sender = self._gateway.counters, self._gateway.sender
        ended = sum(counters.fates.values())
        return counters.requests, ended, sender.in_flight, sender.queued

    async def change(self, flag: str, text: str) -> str:
        done = self._gateway.control.change({flag: text}, "the table")
        return f"{flag} = {done[flag]}"

    async def act(self, action: str, **wanted: Any) -> str:
        return self._gateway.control.act(action, wanted)


class Remote(Operator):
    """A daemon in another process, by its admin routes."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        self.url, self._admin_key = url, admin_key

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One request; blocks, ten seconds at most.

        Raises:
            RemoteError: nobody answers there, or the answer is no.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{ADMIN}{path}", data, method=method)
        if self._admin_key:
            request.add_header("Authorization", f"Bearer {self._admin_key}")
        proxies = urllib.request.ProxyHandler({} if is_loopback(request.host) else None)
        try:
            with urllib.request.build_opener(proxies).open(request, timeout=10) as response:
                doc = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise RemoteError(f"{self.url}: {_why_refused(error)}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = printable(str(getattr(error, "reason", error)) or type(error).__name__)
            raise RemoteError(f"no daemon answers at {self.url} ({why})") from None
        if not isinstance(doc, dict):
            raise RemoteError(f"{self.url} is no llmproxy")
        return doc

    async def status(self) -> dict[str, Any]:
        doc = await asyncio.to_thread(self.ask, "GET", "status?recent=50")
        if "settings" not in doc or "recent" not in doc:
            raise RemoteError(f"{self.url} is no llmproxy of this version")
        return doc

    def moved(self) -> Any:
        return int(2 * time.monotonic())  # asked twice a second

    async def change(self, flag: str, text: str) -> str:
        doc = await asyncio.to_thread(self.ask, "PATCH", "settings", {flag: text})
        return f"{flag} = {doc['settings'][flag]}"

    async def act(self, action: str, **wanted: Any) -> str:
        return str((await asyncio.to_thread(self.ask, "POST", f"do/{action}", wanted))["done"])


def _why_refused(error: urllib.error.HTTPError) -> str:
    with contextlib.suppress(ValueError, OSError, TypeError, KeyError):
        doc = json.loads(error.read())["error"]
        if "x-llmproxy-fate" in error.headers:
            return printable(str(doc["message"]), 300)
    return f"no llmproxy is there, it answered {error.code}"


class Board:
    """The state of the interactive table: the chosen setting, what is being typed, the past.

    `press` takes one key and returns at once; what is to be done goes into `work`.
    """

    PAST_S = 300
    HELP = (
        "up/down choose a setting, left/right or -/+ change it",
        "Enter types a value, Esc leaves it; w writes the file",
        "r closes an open circuit, p pauses and goes on",
        "c clears kept answers, q drains and quits (top: quits)",
    )

    def __init__(self, has_keys: bool = False) -> None:
        self.has_keys, self.shows_help, self.note = has_keys, False, ""
        self.typed: str | None = None  # a value that is being typed
        self.chosen = 0
        self.circuit = 0  # which of the open ones `r` closes next
        self.is_over = False
        self.work: deque[Callable[[Operator], Awaitable[str]]] = deque()
        self.past: deque[dict[str, float]] = deque(maxlen=self.PAST_S)
        self.flags = [flag_name(n) for n, item in SETTINGS.items() if item.metadata["live"]]
        self.circuits: list[dict[str, Any]] = []
        self.is_paused = False
        self._before: tuple[float, dict[str, Any]] | None = None

    @property
    def flag(self) -> str:
        return self.flags[self.chosen]

    def see(self, status: dict[str, Any], now: float) -> None:
        """Take a new status, and once a second what has happened since the last."""
        self.is_paused, self.circuits = status["paused"], status["open_circuits"]
        if self._before is not None and now - self._before[0] < 1.0:
            return
        if self._before is not None:
            span_s, old = max(now - self._before[0], 1e-3), self._before[1]
            calls = status["waited"]["calls"] - old["waited"]["calls"]
            waited_s = status["waited"]["s"] - old["waited"]["s"]
            self.past.append({
                "calls/s": (status["requests"] - old["requests"]) / span_s,
                "in flight": status["in_flight"],
                "wait": waited_s / calls if calls > 0 else 0.0,
                "429/s": (status["upstream_429"] - old["upstream_429"]) / span_s,
            })  # fmt: skip
        self._before = now, status

    def press(self, key: str) -> None:
        pause = "resume" if self.is_paused else "pause"
        works: dict[str, Callable[[Operator], Awaitable[str]]] = {
            "w": lambda operator: operator.act("save"),
            "p": lambda operator: operator.act(pause),
            "c": lambda operator: operator.act("clear"),
        }
        if self.typed is not None:
            self._type(key)
            return
        if key in works:
            self.work.append(works[key])
        elif key in ("up", "down"):
            self.chosen = (self.chosen + (1 if key == "down" else -1)) % len(self.flags)
        elif key in ("left", "right", "-", "+", "="):
            self._step(-1 if key in ("left", "-") else 1)
        elif key == "enter":
            self.typed = ""
        elif key == "r":
            self._close()
        self.shows_help ^= key == "?"
        self.is_over |= key == "q"

    def _type(self, key: str) -> None:
        assert self.typed is not None
        if key == "enter":
            text, flag = self.typed, self.flag
            if text:
                self.work.append(lambda operator: operator.change(flag, text))
            self.typed = None
        elif key == "esc":
            self.typed = None
        elif key == "backspace":
            self.typed = self.typed[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typed += key

    def _step(self, direction: int) -> None:
        flag = self.flag

        async def change(operator: Operator) -> str:
            value = (await operator.status())["settings"][flag]  # of this moment
            text = stepped(flag.replace("-", "_"), value, direction)
            if text is None:
                return f"{flag}: Enter types a value"
            return await operator.change(flag, text)

        self.work.append(change)

    def _close(self) -> None:
        if not self.circuits:
            self.note = "no circuit is open"
            return
        circuit = self.circuits[self.circuit % len(self.circuits)]
        self.circuit += 1
        wanted = {name: circuit[name] for name in ("upstream", "model", "path")}
        self.work.append(lambda operator: operator.act("close", **wanted))


def stepped(name: str, value: Any, direction: int) -> str | None:
    """The next sensible value of a setting as text; None where only typing helps.

    Times and money go 1, 2, 5, 10; counts by one, large ones by a digit; sizes double. Words that
    stand for a value of their own, like `none` and `auto`, come before the first number.
    """
    meta = SETTINGS[name].metadata
    words, choices = list(meta["also"]), getattr(meta["parse"], "choices", None)
    if choices:
        return cast(str, choices[(choices.index(value) + direction) % len(choices)])
    if meta["many"] or meta["parse"] in (str, parse_text):
        return None
    shown = next((word for word, v in meta["also"].items() if v == value), None)
    if shown is not None:
        place = words.index(shown) + direction
        if place < 0:
            return str(shown)
        first = {"tokens": "10000", "requests": "10", "calls": "10"}.get(meta["unit"], "1")
        return str(words[place]) if place < len(words) else first
    number = float(value)
    if meta["parse"] in (parse_count, parse_count_or_zero):
        digit = max(1, 10 ** (len(str(int(number))) - 2))
        number += direction * digit
        if direction < 0 and len(str(int(number + digit))) > len(str(max(0, int(number)))):
            number = number + digit - max(1, digit // 10)
    elif meta["parse"] is parse_size:
        number = number * 2 if direction > 0 else number // 2
    elif meta["parse"] is parse_share:
        number = min(round(number + 0.05 * direction, 2), 1.0)
    else:
        number = next_125(number, direction)
    lowest = 1.0 if meta["parse"] is parse_count else 0.0
    if number < lowest or (number == 0 and meta["parse"] is not parse_count_or_zero):
        return str(words[-1]) if words else None
    return f"{number:.12g}"


def next_125(value: float, direction: int) -> float:
    """The neighbour of a value in 0.01, 0.02, 0.05, 0.1 and so on."""
    series = [round(m * 10.0**e, 10) for e in range(-3, 7) for m in (1, 2, 5)]
    if direction > 0:
        return next((n for n in series if n > value * 1.0001), value)
    return next((n for n in reversed(series) if n < value * 0.9999), 0.0)


_KEYS = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1bOA": "up",
    "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left", "\r": "enter", "\n": "enter",
    "\x7f": "backspace", "\x08": "backspace", "\x1b": "esc",
}  # fmt: skip


def split_keys(data: str) -> list[str]:
    """Key names and characters of what a terminal sends; unknown sequences are dropped."""
    data = re.sub(r"\x1b\[200~.*?(\x1b\[201~|$)", "", data, flags=re.DOTALL)  # pasted: no keys
    found = re.findall(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])|.", data, re.DOTALL)
    return [_KEYS.get(key, key) for key in found if key in _KEYS or key[0] != "\x1b"]


@contextlib.contextmanager
def keyboard(press: Callable[[str], None]) -> Iterator[bool]:
    """Give every key to `press` while the body runs; False where there is no keyboard to read."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield False
        return
    before: list[Any] | None = None
    with contextlib.suppress(OSError, ValueError, AttributeError, termios.error):
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        with contextlib.suppress(OSError):  # it does not control us
            if os.tcgetpgrp(fd) != os.getpgrp():  # in the background reading would stop us
                before = None
    if before is None:
        yield False
        return
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            data = os.read(fd, 1024)
        except OSError:
            data = b""
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
    operator: Operator, url: str, console: Console, on_quit: Callable[[], None] = lambda: None
) -> None:
    """Draw until cancelled: at most 4 times a second, once a second when nothing moves.

    Drawn in a thread, since a terminal that is held (Ctrl-S) blocks whoever writes to it.
    """
    from rich.live import Live

    board, pressed = Board(), asyncio.Event()

    def press(key: str) -> None:
        if board.is_over:  # once is enough: a second signal would end what drains
            return
        board.note = ""
        board.press(key)
        pressed.set()
        if board.is_over:
            on_quit()

    loop = asyncio.get_running_loop()
    drawn: tuple[Any, ...] = ()
    drawing: asyncio.Future[None] | None = None
    screen = Live(console=console, screen=True, auto_refresh=False)
    with keyboard(press) as board.has_keys, screen as live:
        try:
            while True:
                while board.work:
                    board.note = await _done(board.work.popleft()(operator))
                now = (int(time.monotonic()), operator.moved(), console.size, pressed.is_set())
                if now != drawn:
                    pressed.clear()
                    drawn = (*now[:3], False)
                    status = await operator.status()
                    board.see(status, time.monotonic())
                    view = render(status, url, *console.size, board)
                    draw = functools.partial(live.update, view, refresh=True)
                    drawing = loop.run_in_executor(None, draw)
                    await asyncio.shield(drawing)
                with contextlib.suppress(TimeoutError):  # wait_for may swallow a cancellation
                    async with asyncio.timeout(0.25):
                        await pressed.wait()
        finally:  # nothing may be drawn after the screen is given back
            if drawing is not None:
                await asyncio.wait([drawing], timeout=1.0)


async def _done(work: Awaitable[str]) -> str:
    """What came of an operator's wish."""
    try:
        return await work
    except (ConfigError, RemoteError) as error:
        return str(error)


@contextlib.contextmanager
def messages_below() -> Iterator[None]:
    """What the log says while a table owns the terminal is shown under it."""
    handler = _MessageHandler()
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


async def daemon_table(
    gateway: Gateway, url: str, console: Console, on_quit: Callable[[], None]
) -> None:
    """The live table; where it breaks, the log goes on."""
    try:
        with messages_below():
            await live_table(Operator(gateway), url, console, on_quit)
    except Exception as error:
        log.error("the live table broke: %s", fault_lines(error))
        gateway.on_call = functools.partial(log_call, gateway.settings)


class _MessageHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _messages.append(time.strftime("%H:%M:%S ") + printable(record.getMessage(), 200))


###############################################################################
# Mock
###############################################################################
# Rule: a provider to try things on. Speaks to whoever asks; shares only Wire and Server with us.

MODES = ("ok", "503", "500", "429", "hang", "reset", "truncate", "slow", "loading")
_MOCK_KEYS = "an object of mode, health, latency, rpm, tpm, reset"
_TEXT = "This is answer number {} of the mock provider ."


class Mock:
    """OpenAI, Anthropic and llama.cpp routes with fault modes and an exact call count.

    `latency_s` passes before the first byte; `rpm` and `tpm` answer 429 beyond them, counted
    over a sliding minute.
    """

    def __init__(self, latency_s: float = 0.0, clock: Clock = time.monotonic) -> None:
        self.latency_s = latency_s
        self.mode = "ok"
        self.health = ""  # a mode of its own for /health; empty follows `mode`
        self.calls = self.rpm = self.tpm = 0
        self._clock = clock
        self._spent: deque[tuple[float, int]] = deque()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body, path = await request.read(), request.path
        if path == "/_mock":
            return self._control(request.method, body)
        if path in ("/health", "/v1/health"):
            return await self._answer(request, self.health or self.mode, {"status": "ok"}, None)
        if request.method == "GET" and path in _MOCK_FACTS:
            return json_reply(_MOCK_FACTS[path])
        route = path.rpartition("/v1/")[2].lstrip("/")
        if route not in ROUTES or request.method != "POST":
            return _mock_error(404)
        if (parsed := parse_json(body)) is None:
            return _mock_error(400)
        doc, canonical = parsed
        prompt_tokens = Learned().prompt_tokens(canonical.size)
        if ROUTES[route].is_free:
            return json_reply({"tokens": list(range(prompt_tokens)), "input_tokens": prompt_tokens})
        self.calls += 1
        words = _TEXT.format(self.calls).split()[: max_tokens(doc) or None]
        if (wait_s := self._over_limit(prompt_tokens + len(words))) > 0:
            return _mock_error(429, wait_s)
        plain, events = _mock_answer(route, doc, words, prompt_tokens)
        return await self._answer(request, self.mode, plain, events if doc.get("stream") else None)

    def _control(self, method: str, body: bytes) -> web.StreamResponse:
        if method == "POST":
            try:
                self._set(**json.loads(body))
            except (TypeError, ValueError):
                return json_reply({"error": f"wants {_MOCK_KEYS}; modes: {', '.join(MODES)}"}, 400)
        return json_reply({"calls": self.calls, "mode": self.mode})

    def _set(
        self, *, mode: str = "", health: str | None = None, latency: float | None = None,
        rpm: int | None = None, tpm: int | None = None, reset: bool = False,
    ) -> None:  # fmt: skip
        numbers = [0.0 if n is None else float(n) for n in (latency, rpm, tpm)]
        if (mode or "ok") not in MODES or (health or "ok") not in MODES or min(numbers) < 0:
            raise ValueError
        self.mode = mode or self.mode
        self.health = self.health if health is None else health
        self.latency_s = self.latency_s if latency is None else numbers[0]
        self.rpm = self.rpm if rpm is None else int(rpm)
        self.tpm = self.tpm if tpm is None else int(tpm)
        if reset:
            self.calls = 0
            self._spent.clear()

    def _over_limit(self, tokens: int) -> float:
        """Seconds until the limits would let the call in; 0 where they do."""
        now = self._clock()
        while self._spent and self._spent[0][0] <= now - 60:
            self._spent.popleft()
        used = sum(spent for _, spent in self._spent)
        too_many = self.rpm and len(self._spent) >= self.rpm
        if self._spent and (too_many or (self.tpm and used + tokens > self.tpm)):
            return self._spent[0][0] + 60 - now
        self._spent.append((now, tokens))
        return 0.0

    async def _answer(
        self, request: web.BaseRequest, mode: str, plain: dict[str, Any], events: list[bytes] | None
    ) -> web.StreamResponse:
        """One answer in a mode. A health answer is never late, cut or slow."""
        if mode == "hang":
            is_health = plain == {"status": "ok"}
            while (self.health or self.mode if is_health else self.mode) == "hang":
                await asyncio.sleep(0.05)
            return _Gone()
        if is_call := plain != {"status": "ok"}:
            await asyncio.sleep(self.latency_s)
        if mode in ("500", "503", "429", "loading"):
            return _mock_error(503 if mode == "loading" else int(mode), 1, mode)
        transport = request.transport
        if mode == "reset" and transport is not None:
            linger = struct.pack("ii", 1, 0)  # close with RST
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            transport.abort()
            return _Gone()
        if events:
            return await self._send(request, "text/event-stream", mode, events)
        body = json.dumps(plain).encode()
        step = 40 if is_call and mode in ("truncate", "slow") else len(body)
        parts = [body[start : start + step] for start in range(0, len(body), step)]
        return await self._send(request, "application/json", mode, parts)

    @staticmethod
    async def _send(
        request: web.BaseRequest, kind: str, mode: str, parts: list[bytes]
    ) -> web.StreamResponse:
        headers = CIMultiDict({"Content-Type": kind})
        if kind == "application/json":
            headers["Content-Length"] = str(sum(map(len, parts)))
        reply = Reply(Head(200, "OK", headers))
        await reply.prepare(request)
        for number, part in enumerate(parts):
            if mode == "truncate" and number > len(parts) // 2:
                reply.abort(request)
                return reply
            await reply.write(part)
            if len(parts) > 1:
                await asyncio.sleep(1 if mode == "slow" else 0.02)
        await reply.write_eof()
        return reply


_MOCK_FACTS: dict[str, dict[str, Any]] = {
    "/v1/models": {"object": "list", "data": [{"id": "mock", "object": "model"}]},
    "/props": {"total_slots": 16, "model_path": "mock.gguf"},
}


def _mock_error(status: int, wait_s: float = 1.0, mode: str = "") -> Reply:
    error = {"message": f"mock {status}", "type": "server_error", "code": status}
    if mode == "loading":  # as llama.cpp says it
        error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
    reply = json_reply({"error": error}, status)
    if status == 429:
        reply.head.headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    return reply


def _event(doc: dict[str, Any]) -> bytes:
    name = f"event: {doc['type']}\n" if "type" in doc else ""
    return f"{name}data: {json.dumps(doc)}\n\n".encode()


def _mock_answer(
    route: str, doc: Mapping[str, Any], words: list[str], prompt_tokens: int
) -> tuple[dict[str, Any], list[bytes]]:
    """The same answer as a document and as the events of a stream."""
    text, model, count = " ".join(words), doc.get("model") or "mock", len(words)
    if route in ("chat/completions", "completions"):
        return _mock_openai(route, doc, words, prompt_tokens)
    if route == "messages":
        return _mock_anthropic(model, words, prompt_tokens)
    tokens: dict[str, Any] = {"input_tokens": prompt_tokens, "output_tokens": count}
    if route == "responses":
        part = {"type": "output_text", "text": text, "annotations": []}
        output = {"type": "message", "id": "msg_mock", "role": "assistant", "status": "completed",
                  "content": [part]}  # fmt: skip
        plain = {"id": "resp_mock", "object": "response", "created_at": 0, "model": model,
                 "status": "completed", "output": [output], "usage": tokens}  # fmt: skip
        delta = {"type": "response.output_text.delta", "item_id": "msg_mock", "output_index": 0,
                 "content_index": 0}  # fmt: skip
        deltas = [_event({**delta, "delta": f"{word} "}) for word in words]
        return plain, [*deltas, _event({"type": "response.completed", "response": plain})]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    if route in ("embeddings", "embedding"):
        data = [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2, 0.3]}]
        return {"object": "list", "data": data, "model": model, "usage": usage}, []
    if route in ("rerank", "reranking", "moderations"):
        return {"results": [{"index": 0, "relevance_score": 1.0}], "usage": usage}, []
    plain = {"content": text, "stop": True, "model": model, "tokens_evaluated": prompt_tokens,
             "tokens_predicted": count}  # fmt: skip
    return plain, [
        *(_event({"content": f"{word} ", "stop": False}) for word in words),
        _event({**plain, "content": ""}),
    ]


def _mock_openai(
    route: str, doc: Mapping[str, Any], words: list[str], prompt_tokens: int
) -> tuple[dict[str, Any], list[bytes]]:
    is_chat, text = route == "chat/completions", " ".join(words)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(words),
             "total_tokens": prompt_tokens + len(words)}  # fmt: skip
    kind = "chat.completion" if is_chat else "text_completion"
    base = {"id": "mock-1", "object": kind, "created": 0, "model": doc.get("model") or "mock"}
    said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": "stop"}
    chunk = {**base, "object": kind + ".chunk"} if is_chat else base

    def event(text: str, finish: str | None = None) -> bytes:
        said = {"delta": {"content": text} if text else {}} if is_chat else {"text": text}
        return _event({**chunk, "choices": [{"index": 0, **said, "finish_reason": finish}]})

    events = [*(event(f"{word} ") for word in words), event("", "stop")]
    if reports_usage(doc):
        events.append(_event({**chunk, "choices": [], "usage": usage}))
    return {**base, "choices": [choice], "usage": usage}, [*events, b"data: [DONE]\n\n"]


def _mock_anthropic(
    model: str, words: list[str], prompt_tokens: int
) -> tuple[dict[str, Any], list[bytes]]:
    usage = {"input_tokens": prompt_tokens, "output_tokens": len(words)}
    ending = {"stop_reason": "end_turn", "stop_sequence": None}
    plain = {"id": "msg_mock", "type": "message", "role": "assistant", "model": model,
             "content": [{"type": "text", "text": " ".join(words)}], **ending,
             "usage": usage}  # fmt: skip
    begun = {**plain, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    block = {"type": "text", "text": ""}
    delta = {"type": "content_block_delta", "index": 0}
    docs: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": block},
        *({**delta, "delta": {"type": "text_delta", "text": f"{word} "}} for word in words),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ending, "usage": {"output_tokens": len(words)}},
        {"type": "message_stop"},
    ]
    return plain, [_event(doc) for doc in docs]


###############################################################################
# Bench
###############################################################################
# Rule: a client like any other; measures a proxy and what stands behind it side by side. Bounded
# in calls and in time.


class Scene:
    """Calls made to one address, how many reached the provider, and what came of them."""

    limit_s = 40.0  # what a caller waits for one answer

    def __init__(
        self, session: aiohttp.ClientSession, url: str, name: str, model: str = "bench"
    ) -> None:
        self._session, self.url, self.name, self._model = session, url, name, model
        self.made = self.reached = 0
        self.outcomes = Counter[str]()  # by status, or kind of failure
        self.times_s: list[float] = []
        self.note = ""
        self.headers: dict[str, str] = {}

    @property
    def answered(self) -> int:
        return self.outcomes["200"]

    async def ask(self, prompt: str) -> int:
        """One call; its status, 0 where there was none."""
        self.made += 1
        began_at, status, kind = time.monotonic(), 0, ""
        message = {"role": "user", "content": prompt}
        body = {"model": self._model, "messages": [message], "max_tokens": 16}
        try:
            async with (
                asyncio.timeout(self.limit_s),
                self._session.post(
                    f"{self.url}/v1/chat/completions", json=body, headers=self.headers
                ) as response,
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
        self, mock: MockControl, mode: str, times_s: tuple[float, float, float], every_s: float
    ) -> None:
        """A call every `every_s`: well, in a fault mode, well again."""
        async with asyncio.TaskGroup() as calls:  # which ends them too where time is up
            await self._phases(calls, mock, mode, times_s, every_s)

    async def _phases(
        self, calls: asyncio.TaskGroup, mock: MockControl, mode: str,
        times_s: tuple[float, float, float], every_s: float,
    ) -> None:  # fmt: skip
        well_s, down_s, again_s = times_s
        await mock.set(mode="ok", latency=0.1)
        began_at, count = time.monotonic(), 0
        state, well_at = "ok", 0.0
        while (elapsed_s := time.monotonic() - began_at) < well_s + down_s + again_s:
            wanted = mode if well_s <= elapsed_s < well_s + down_s else "ok"
            if wanted != state:
                await mock.set(mode=wanted)
                state, well_at = wanted, time.monotonic()
            call = calls.create_task(self.ask(f"{self.name} {count} {began_at}"))
            if state == "ok" and well_at and not self.note:
                call.add_done_callback(functools.partial(self._recovered, well_at))
            count += 1
            await asyncio.sleep(every_s)

    def _recovered(self, well_at: float, call: asyncio.Task[int]) -> None:
        if not self.note and not call.cancelled() and call.result() == 200:
            self.note = f"well after {time.monotonic() - well_at:.1f} s"

    def shown(self) -> dict[str, Any]:
        errors = {kind: n for kind, n in self.outcomes.items() if kind != "200" and n}
        p50, p95, p99 = (round(percentile(self.times_s, n) * 1000, 1) for n in (0.5, 0.95, 0.99))
        return {
            "side": self.name, "calls": self.made, "reached": self.reached,
            "errors": sum(errors.values()), "kinds": errors, "p50_ms": p50, "p95_ms": p95,
            "p99_ms": p99, "note": self.note,
        }  # fmt: skip


class MockControl:
    """The mock provider behind a proxy: how many calls it got, and which way it is to fail."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def set(self, **wanted: Any) -> int:
        """Change it; returns its count of calls."""
        async with self._session.post(f"{self._url}/_mock", json=wanted) as response:
            return int((await response.json())["calls"])

    async def is_there(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, KeyError):
            async with self._session.get(f"{self._url}/_mock") as response:
                return response.status == 200 and "mode" in await response.json()
        return False


SCENARIOS = {
    "herd": "200 identical calls at once",
    "distinct": "20 different calls at once",
    "overhead": "200 calls in turn, then 16 at a time for 2 s",
    "gate": "100 different calls at once, 60 a minute allowed (--rpm 60, --queue-timeout 90)",
    "outage": "a call every 0.25 s: 15 s well, 60 s of 503, 15 s well",
    "hang": "the same, silent instead of 503",
}
FAULTS = ("outage", "hang", "gate")  # these need a provider that fails when it is told


class Bench:
    """Runs scenarios against a proxy and, side by side, against its upstream."""

    def __init__(self, session: aiohttp.ClientSession, proxy: str, upstream: str) -> None:
        self._session = session
        self.sides = {"proxied": proxy, "direct": upstream}
        self._mock = MockControl(session, upstream)
        self.has_mock = False
        self.speed = 1.0
        self.model, self.headers = "bench", dict[str, str]()
        self.tune: Callable[[str], Any] = lambda scenario: None  # a proxy of our own, to fit it
        self.counted: Callable[[], int] = lambda: 0  # upstream calls, as the proxy counts them
        self.scenes: list[Scene] = []  # of the scenario that runs
        self._nonce = secrets.token_hex(4)  # nothing is answered from an earlier run

    async def run(self, name: str, limit_s: float) -> dict[str, Any]:
        """One scenario on both sides."""
        self.scenes = []
        sides = []
        await self._ready()
        self.scenes.clear()
        if name == "overhead":
            sides = await self._overhead()
        for side, url in self.sides.items() if name != "overhead" else ():
            scene = self._scene(url, side)
            before = await self._mock.set(mode="ok", rpm=0, reset=True) if self.has_mock else 0
            counted = self.counted()
            began_at = time.monotonic()
            self.tune(name)
            try:
                async with asyncio.timeout(limit_s):
                    await self._play(name, scene, f"{self._nonce} {name} {side}")
            except TimeoutError:
                scene.note = f"stopped after {limit_s:g} s"
            finally:
                self.tune("")
            scene.note = scene.note or f"{time.monotonic() - began_at:.1f} s"
            if self.has_mock:
                scene.reached = await self._mock.set(mode="ok", rpm=0) - before
            else:
                scene.reached = self.counted() - counted if side == "proxied" else scene.made
            sides.append(scene.shown())
        return {"scenario": name, "what": SCENARIOS[name], "sides": sides}

    def _scene(self, url: str, side: str) -> Scene:
        scene = Scene(self._session, url, side, self.model)
        scene.headers = self.headers
        self.scenes.append(scene)
        return scene

    async def restore(self) -> None:
        """Leave the mock as one that works."""
        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
            if self.has_mock:
                await self._mock.set(mode="ok", latency=0.0, rpm=0)

    async def _ready(self, limit_s: float = 90.0) -> None:
        """Wait until the proxy has found out that the provider is well, after a fault."""
        await self.restore()
        probe, until = self._scene(self.sides["proxied"], "waiting"), time.monotonic() + limit_s
        while self.has_mock and time.monotonic() < until:
            if await probe.ask(f"{self._nonce} {time.monotonic()}") == 200:
                return
            await asyncio.sleep(0.5)

    async def _play(self, name: str, scene: Scene, tag: str) -> None:
        speed = self.speed
        if self.has_mock:
            await self._mock.set(latency=0.05 if name == "gate" else 1.5 / speed)
        if name == "herd":
            await scene.herd([f"{tag}: what is the capital of France?"] * 200)
        elif name == "distinct":
            await scene.herd(f"{tag}: question {n}?" for n in range(20))
        elif name == "gate":
            await self._mock.set(rpm=60)
            scene.limit_s = 100.0
            await scene.herd(f"{tag}: question {n}?" for n in range(100))
        else:
            mode = "503" if name == "outage" else "hang"
            times_s = (15 / speed, 60 / speed, max(15 / speed, 6.0))  # health is asked every 2 s
            await scene.phases(self._mock, mode, times_s, 0.25 / speed)

    async def _overhead(self) -> list[dict[str, Any]]:
        """Both sides in turn, call by call: so whatever else the machine does hits both alike."""
        if self.has_mock:
            await self._mock.set(mode="ok", latency=0.0, reset=True)
        scenes = [self._scene(url, side) for side, url in self.sides.items()]
        for n in range(200 if self.has_mock else 20):
            for scene in scenes:
                await scene.ask(f"{self._nonce} {scene.name} overhead {n}")
        medians_ms = [percentile(scene.times_s, 0.5) * 1000 for scene in scenes]
        shown = [scene.shown() for scene in scenes]
        for row, scene in zip(shown, scenes, strict=True):
            row["reached"] = row["calls"]
            row["calls_per_s"] = await self._rate(scene) if self.has_mock else None
            rate = f", {row['calls_per_s']:.0f} calls/s" if row["calls_per_s"] else ""
            row["note"] = f"median {percentile(scene.times_s[:200], 0.5) * 1000:.2f} ms{rate}"
        shown[0]["added_ms"] = round(medians_ms[0] - medians_ms[1], 3)
        shown[0]["note"] += f", {shown[0]['added_ms']:.2f} ms added"
        return shown

    async def _rate(self, scene: Scene, callers: int = 16, span_s: float = 2.0) -> float:
        """Calls a second of some callers who ask one call after another."""
        until, before = time.monotonic() + span_s, scene.made

        async def caller(number: int) -> None:
            while time.monotonic() < until:
                await scene.ask(f"{self._nonce} {scene.name} {number} {scene.made}")

        await asyncio.gather(*map(caller, range(callers)))
        return round((scene.made - before) / span_s, 1)

    def progress(self) -> str:
        done = ", ".join(f"{s.name} {len(s.times_s)} of {s.made} answered" for s in self.scenes)
        return done or "starting"


def bench_table(record: Mapping[str, Any]) -> Any:
    """A record's scenarios as a rich table."""
    from rich.table import Table

    names = ("scenario", "side", "calls", "reached", "errors", "p50", "p95", "p99", "")
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for name in names:
        is_text = name in ("scenario", "side", "")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=bool(name))
    for scenario in record["scenarios"]:
        for n, row in enumerate(scenario["sides"]):
            kinds = ", ".join(f"{count} x {kind}" for kind, count in row["kinds"].items())
            table.add_row(
                scenario["scenario"] if not n else "", row["side"], str(row["calls"]),
                str(row["reached"]), str(row["errors"]),
                *(_duration(row[f"p{p}_ms"]) for p in (50, 95, 99)),
                "; ".join(filter(None, (row["note"], kinds))),
            )  # fmt: skip
    return table


def compare_table(one: Mapping[str, Any], two: Mapping[str, Any]) -> Any:
    """Two records beside each other, the proxied side: A, B, and how B differs."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 1))
    for name in ("scenario", "", "A", "B", "B/A"):
        table.add_column(name, justify="left" if name in ("scenario", "") else "right")
    def shown(value: Any) -> str:
        return escape(printable(str(value)))

    rows = [{s["scenario"]: s["sides"][0] for s in record["scenarios"]} for record in (one, two)]
    for scenario in [name for name in rows[0] if name in rows[1]]:
        a, b = rows[0][scenario], rows[1][scenario]
        for n, key in enumerate(("calls", "reached", "errors", "p50_ms", "p95_ms", "p99_ms")):
            ratio = f"{b[key] / a[key]:.2f}" if a[key] else "-"
            table.add_row("" if n else shown(scenario), key, f"{a[key]:g}", f"{b[key]:g}", ratio)
    settings = [record["settings"] for record in (one, two)]
    for flag in [f for f in settings[0] if settings[0][f] != settings[1].get(f)]:
        values = (shown(record.get(flag)) for record in settings)
        table.add_row("settings", shown(flag), *values, "")
    return table


async def run_bench(
    bench: Bench, names: Iterable[str], limit_s: float, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """All scenarios, with live progress on a terminal; returns the record."""
    from rich.console import Console

    record: dict[str, Any] = {
        "version": __version__, "began": datetime.now().astimezone().isoformat("T", "seconds"),
        "python": sys.version.split()[0], "platform": sys.platform, "cpus": os.cpu_count(),
        "speed": bench.speed, "limit_s": limit_s, "model": bench.model,
        "proxied": bench.sides["proxied"], "direct": bench.sides["direct"],
        "has_mock": bench.has_mock, "settings": dict(settings), "scenarios": [],
    }  # fmt: skip
    console = Console(stderr=True)
    for name in names:
        with console.status(name) as status:

            async def tell(name: str = name, status: Any = status) -> None:
                while True:
                    status.update(f"{name}: {bench.progress()}")
                    await asyncio.sleep(0.25)

            teller = asyncio.create_task(tell())
            try:
                record["scenarios"].append(await bench.run(name, limit_s))
            except asyncio.CancelledError:  # Ctrl-C: what is done is worth showing
                break
            finally:
                teller.cancel()
                await bench.restore()
    return record


###############################################################################
# Demo
###############################################################################
# Rule: the newcomer's first minute; a daemon on an embedded mock and a scripted load.


async def outage(scene: Scene, mock: Mock, down_s: float = 8.0) -> None:
    """Down for a while, then well, until a call is answered again."""
    mock.latency_s, mock.mode = 0.1, "503"
    began_at = time.monotonic()
    calls: list[asyncio.Task[int]] = []
    while (elapsed_s := time.monotonic() - began_at) < down_s + 5:
        if elapsed_s >= down_s:
            mock.mode = "ok"
        calls.append(asyncio.create_task(scene.ask(f"Is it {len(calls)} yet?")))
        await asyncio.sleep(0.25)
        if mock.mode == "ok" and calls[-1].done() and calls[-1].result() == 200:
            scene.note = f"well after {time.monotonic() - began_at - down_s:.1f} s"
            break
    await asyncio.gather(*calls)


async def demo(settings: Settings, console: Console | None) -> int:
    """Herd, repeat, distinct prompts and an outage, then a table of what happened."""
    settings.upstream, settings.port, settings.log, settings.state = "mock:", 0, "off", "none"
    if console is None:  # the outage is on purpose: print the table only
        log.setLevel(logging.ERROR)
    scenes: list[Scene] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with Daemon(settings) as daemon, aiohttp.ClientSession(connector=connector) as session:
        mock = cast(Mock, daemon.mock)

        async def play(name: str, act: Callable[[Scene], Awaitable[None]]) -> None:
            scene = Scene(session, daemon.url, name, "demo")
            before, began_at = mock.calls, time.monotonic()
            await act(scene)
            scene.reached = mock.calls - before
            scene.note = scene.note or f"{time.monotonic() - began_at:.1f} s"
            scenes.append(scene)

        async with showing(daemon.gateway, daemon.url, console):
            same = ["What is the capital of France?"] * 200
            await play("200 identical calls at once", lambda scene: scene.herd(same))
            await play("the same 200 again", lambda scene: scene.herd(same))
            different = [f"Question {n}?" for n in range(20)]
            await play("20 different calls at once", lambda scene: scene.herd(different))
            await play("down for 8 s, 4 calls a second", lambda scene: outage(scene, mock))
    _print_scenes(scenes)
    return 0


def _print_scenes(scenes: list[Scene]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="What happened")
    for name in ("scene", "calls made", "reached provider", "answered", ""):
        table.add_column(name, justify="left" if name in ("scene", "") else "right")
    for s in scenes:
        table.add_row(s.name, str(s.made), str(s.reached), str(s.answered), s.note)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


###############################################################################
# Replay
###############################################################################
# Rule: reads logs of calls and says what a proxy would have done with them; calls nothing.

LINE_BYTES = 32 * 2**20  # of a log; a longer one is no call
WINDOWS_S = {"1 min": 60.0, "5 min": 300.0, "1 h": 3600.0, "24 h": 86400.0, "all": math.inf}


# What a log says about a call beside what was asked.
ABOUT_A_CALL = (
    "time_unix", "timestamp", "created_at", "client", "id", "custom_id", "trace", "url", "path",
    "answer", "response", "total_ms", "tokens_in", "tokens_out", "tokens_estimated",
)  # fmt: skip


@dataclass(slots=True)
class Logged:
    """One call of a log; `digest` of what was asked, `span_s` how long it took."""

    digest: bytes
    model: str
    usage: Usage
    client: str = ""
    at: float | None = None
    span_s: float | None = None
    words: str = ""


class CallLog:
    """Calls of a log in as few objects as possible: there may be a million.

    `keys` gives each different request a number; the columns hold one number a call.
    """

    def __init__(
        self, prices: Prices, keeps_words: bool = False, window_s: float = 300.0
    ) -> None:
        self._prices, self._keeps_words, self._window_s = prices, keeps_words, window_s
        self.keys: dict[bytes, int] = {}
        self.words: dict[int, str] = {}  # the first of a request
        self.at, self.span_s = array("d"), array("d")  # NaN: not known
        self.key, self.client = array("I"), array("I")
        self.tokens, self.micros = array("Q"), array("Q")
        self.lines = self.bad_lines = 0
        self.first_bad = ""
        self.estimated = self.unpriced = 0
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
        """One record: a conversation, a line of a batch, or a call that the proxy logged."""
        if isinstance(doc.get("conversation"), list):
            self._add_conversation(doc)
            return
        body, answer = doc.get("body") or doc.get("request"), doc.get("answer")
        if isinstance(body, str):
            body = json.loads(body)
        if not isinstance(body, dict) and ("messages" in doc or "prompt" in doc or "input" in doc):
            body = {name: value for name, value in doc.items() if name not in ABOUT_A_CALL}
        if not isinstance(body, dict):
            raise ValueError("no call: wants body, request, messages or conversation")
        response = doc.get("response")
        if isinstance(response, dict):
            answer = response.get("body")
        usage = _logged_usage(doc, answer)
        canonical = Canonical(body)
        url = str(doc.get("url") or doc.get("path") or "")
        key = hashlib.blake2b(url.encode("utf-8", "replace") + canonical.data, digest_size=16)
        model = body.get("model") if isinstance(body.get("model"), str) else ""
        if usage is None:
            output = len(answer) // 4 if isinstance(answer, str) else 0
            usage = Usage(round(canonical.size.chars / 3), 0, output, is_estimated=True)
        words = _first_words(body) if self._keeps_words else ""
        at = _instant(doc.get("time_unix", doc.get("timestamp", doc.get("created_at"))))
        total_ms: Any = doc.get("total_ms")
        is_number = type(total_ms) in (int, float) and 0 <= total_ms < 1e12  # NaN is not
        span_s = total_ms / 1000 if is_number else None
        client = str(doc.get("client") or body.get("user") or "")
        self._put(Logged(key.digest(), model or "", usage, client, at, span_s, words))

    def _add_conversation(self, doc: dict[str, Any]) -> None:
        """Each answer of a conversation was a call, with all that was said before it."""
        model, at = str(doc.get("model") or ""), _instant(doc.get("timestamp"))
        client = str(doc.get("hashed_ip") or doc.get("user_id") or doc.get("user") or "")
        digest, chars, words = hashlib.blake2b(model.encode(), digest_size=16), 0, ""
        for message in doc["conversation"]:
            role, text = message.get("role"), message.get("content") or ""
            if role == "assistant":
                usage = Usage(round(chars / 3), 0, round(len(text) / 3), is_estimated=True)
                said_at = _instant(message.get("timestamp"))
                at = at if said_at is None else said_at
                self._put(Logged(digest.digest(), model, usage, client, at, None, words))
            elif self._keeps_words and not words:
                words = text[:80]
            digest.update(f"\0{role}\0{text}".encode("utf-8", "replace"))
            chars += len(text)

    def _put(self, call: Logged) -> None:
        key = self.keys.setdefault(call.digest, len(self.keys))
        price, usage = self._prices.of(call.model), call.usage
        guessed_s = usage.completion * TOKEN_S_UNLEARNED
        self.at.append(math.nan if call.at is None else call.at)
        self.client.append(self._clients.setdefault(call.client, len(self._clients)))
        self.key.append(key)
        self.tokens.append(usage.prompt + usage.completion)
        self.micros.append(0 if price is None else price.cost(usage))
        self.span_s.append(guessed_s if call.span_s is None else call.span_s)
        self.estimated += usage.is_estimated
        self.unpriced += price is None
        if call.words and key not in self.words:
            self.words[key] = call.words

    @functools.cached_property
    def has_times(self) -> bool:  # asked when all is read
        return not any(map(math.isnan, self.at))

    def sort(self) -> list[int]:
        """Calls in the order in which they were made."""
        order = list(range(len(self.at)))
        return sorted(order, key=self.at.__getitem__) if self.has_times else order

    def repeats(self, order: list[int], window_s: float, shares: bool) -> list[int]:
        """Calls that an answer kept for so long would have served; `shares`: among all clients.

        The window runs from the call that went upstream, as the proxy counts it.
        """
        asked_at: dict[int, float] = {}
        repeats, has_times = [], self.has_times
        for n in order:
            key = self.key[n] if shares else self.client[n] << 32 | self.key[n]
            at = self.at[n] if has_times else 0.0
            before = asked_at.get(key)
            if before is not None and at - before <= window_s:
                repeats.append(n)
            else:
                asked_at[key] = at
        return repeats

    def peaks(self, order: list[int], without: Iterable[int] = ()) -> dict[str, int]:
        """The most tokens that began within 60 s, and the most calls that ran at once."""
        left_out, span = set(without), deque[int]()
        ends: list[float] = []
        tokens = most_tokens = most_calls = 0
        for n in order if self.has_times else ():
            if n in left_out:
                continue
            at = self.at[n]
            span.append(n)
            tokens += self.tokens[n]
            while self.at[span[0]] <= at - WINDOW_S:
                tokens -= self.tokens[span.popleft()]
            while ends and ends[0] <= at:
                heapq.heappop(ends)
            heapq.heappush(ends, at + self.span_s[n])
            most_tokens, most_calls = max(most_tokens, tokens), max(most_calls, len(ends))
        return {"tpm": most_tokens, "concurrency": most_calls}

    def report(self) -> dict[str, Any]:
        order, windows = self.sort(), []
        for name, window_s in WINDOWS_S.items():
            if not self.has_times and window_s < math.inf:
                continue
            own, shared = (self.repeats(order, window_s, shares) for shares in (False, True))
            windows.append({
                "window": name, "same_client": len(own), "other_client": len(shared) - len(own),
                "share": round(len(own) / max(1, len(order)), 4),
                "tokens_saved": sum(self.tokens[n] for n in own),
                "usd_saved": sum(self.micros[n] for n in own) / 1e6,
                "tokens_saved_shared": sum(self.tokens[n] for n in shared),
                "usd_saved_shared": sum(self.micros[n] for n in shared) / 1e6,
            })  # fmt: skip
        digests = list(self.keys)
        most = Counter(self.key).most_common(10)
        return {
            "calls": len(order), "different": len(self.keys), "clients": len(self._clients),
            "lines": self.lines, "bad_lines": self.bad_lines, "first_bad": self.first_bad,
            "has_times": self.has_times, "estimated_calls": self.estimated,
            "unpriced_calls": self.unpriced, "tokens": sum(self.tokens), "windows": windows,
            "most_repeated": [
                {"hash": digests[key].hex()[:12], "calls": count, "words": self.words.get(key, "")}
                for key, count in most if count > 1
            ],
            "needed": self.peaks(order),
            "needed_with_dedup": self.peaks(order, self.repeats(order, self._window_s, False)),
            "dedup_window_s": self._window_s,
        }  # fmt: skip


def _logged_usage(doc: Mapping[str, Any], answer: Any) -> Usage | None:
    if isinstance(answer, dict) and isinstance(answer.get("usage"), dict):
        return _usage_from(answer["usage"])
    if "tokens_in" in doc:
        return Usage(_whole(cast("dict[str, Any]", doc), "tokens_in"), 0,
                     _whole(cast("dict[str, Any]", doc), "tokens_out"),
                     is_estimated=bool(doc.get("tokens_estimated")))  # fmt: skip
    if isinstance(answer, str):
        return read_usage(answer.encode("utf-8", "replace"), answer.startswith(("data:", "event:")))
    return None


def _first_words(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    text = last.get("content") if isinstance(last, dict) else None
    text = text if isinstance(text, str) else body.get("prompt") or body.get("input") or text or ""
    return (text if isinstance(text, str) else json.dumps(text))[:80]


def _instant(value: Any) -> float | None:
    """Unix seconds of a time as logs write it: seconds, milliseconds or RFC 3339."""
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, str) and not re.fullmatch(r"\d+(\.\d+)?", value):
            return datetime.fromisoformat(value).timestamp()
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            number = float(value)
            if 0 < number < 1e15:
                return number / 1000 if number > 1e11 else number
    return None


def log_lines(path: str) -> Iterator[bytes]:
    """Lines of a file, plain or gzip, or of stdin; of a ledger, its logged bodies as JSON.

    Raises:
        OSError, sqlite3.Error, EOFError, zlib.error: it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        if path == "-" and sys.stdin is None:
            raise OSError("stdin is closed")
        file: Any = sys.stdin.buffer if path == "-" else None  # both kinds can peek
        if path != "-":
            file = stack.enter_context(Path(path).open("rb"))
        begun = file.peek(16)
        if begun.startswith(b"SQLite format 3"):
            sql = "SELECT calls.*, request, answer FROM bodies JOIN calls USING (id)"
            db = stack.enter_context(contextlib.closing(open_ledger(Path(path))))
            for row in db.execute(sql):
                yield json.dumps(dict(row)).encode()
            return
        plain: Any = gzip.GzipFile(fileobj=file) if begun[:2] == b"\x1f\x8b" else file
        while line := plain.readline(LINE_BYTES):
            if len(line) < LINE_BYTES:
                yield line
                continue
            while line and not line.endswith(b"\n"):  # what is so long is passed over
                line = plain.readline(LINE_BYTES)
            yield b"too long"


def print_replay(report: Mapping[str, Any], shows_words: bool) -> None:
    """The report as text, for people."""
    print(
        f"{report['calls']} calls, {report['different']} different, {report['clients']} clients, "
        f"{_short(report['tokens'])} tokens"
        + (f" ({report['estimated_calls']} calls estimated)" if report["estimated_calls"] else "")
    )
    if report["bad_lines"]:
        print(f"{report['bad_lines']} of {report['lines']} lines were no calls; "
              f"first {report['first_bad']}")  # fmt: skip
    if not report["has_times"]:
        print("not every call has a time: only repeats over the whole log can be told")
    print("\nrepeats that a kept answer would have served")
    print(f"  {'window':8}{'same client':>12}{'share':>8}{'tokens':>9}{'USD':>11}"
          f"{'other clients':>15}{'tokens':>9}{'USD':>11}  (share = all)")  # fmt: skip
    for w in report["windows"]:
        more = w["tokens_saved_shared"] - w["tokens_saved"]
        print(f"  {w['window']:8}{w['same_client']:12}{w['share']:8.1%}"
              f"{_short(w['tokens_saved']):>9}{w['usd_saved']:11.5f}{w['other_client']:15}"
              f"{_short(more):>9}{w['usd_saved_shared'] - w['usd_saved']:11.5f}")  # fmt: skip
    if report["unpriced_calls"]:
        print(f"  {report['unpriced_calls']} calls have no price; see --price and --prices")
    if report["has_times"]:
        for name, what in (("needed", "as logged"), ("needed_with_dedup", "with dedup")):
            need = report[name]
            print(f"would have needed {what}: tpm {need['tpm']}, concurrency {need['concurrency']}")
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
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def refuse(self, rest: list[str]) -> NoReturn:
        flag = rest[0].partition("=")[0]
        known = [name for action in self._actions for name in action.option_strings]
        if flag in COMMANDS:
            self.error(f"the command comes first: llmproxy {printable(flag)} ...")
        known += [] if flag.startswith("-") else COMMANDS
        near = difflib.get_close_matches(flag, known, 1)
        what = "flag" if flag.startswith("-") else "word"
        mend = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unknown {what} {printable(flag)}{mend}")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "settings", "those marked live are read anew at every decision"
    )
    group.add_argument(
        "--config",
        metavar="PATH",
        help="TOML file (default: $XDG_CONFIG_HOME/llmproxy/config.toml)",
    )
    for name, item in SETTINGS.items():
        meta = item.metadata
        default, unit = default_text(item), meta["unit"]
        if unit == "s" and default[0].isdigit():
            default += " s"
        notes = [f"default {default}"] + ["live"] * meta["live"] + ["repeatable"] * meta["many"]
        bare: dict[str, Any] = {"nargs": "?", "const": "on"} if name == "allow_open" else {}
        group.add_argument(
            f"--{flag_name(name)}", dest=f"setting_{name}", action="append", **bare,
            metavar=unit if "|" in unit else (unit or "value").upper(),
            help=f"{meta['help']} ({', '.join(notes)})",
        )  # fmt: skip


def _settings_of(args: argparse.Namespace) -> Settings:
    given = {name: getattr(args, f"setting_{name}", None) for name in SETTINGS}
    flags = {name: texts for name, texts in given.items() if texts is not None}
    return load_settings(flags, os.environ, Path(args.config) if args.config else None)


def _cmd_serve(args: argparse.Namespace) -> int:
    settings = _settings_of(args)
    return _run_loop(run(settings, _console(settings.live)))


def _add_mock(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="listen address (default 127.0.0.1)")
    add("--port", default="9001", help="listen port; 0 picks one (default 9001)")
    add("--latency", default="0", metavar="S", help="before the first byte (default 0 s)")


def _cmd_mock(args: argparse.Namespace) -> int:
    flag = "--latency"
    try:
        mock = Mock(parse_seconds_or_zero(args.latency))
        flag = "--port"
        number = parse_port(args.port)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None

    async def serve() -> int:
        stop = asyncio.Event()
        for signal_ in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signal_, stop.set)
        async with listening(mock.handle, args.host, number) as address:
            print(f"mock provider on {address}; GET or POST {address}/_mock", flush=True)
            await stop.wait()
        return 0

    return _run_loop(serve())


def _cmd_demo(args: argparse.Namespace) -> int:
    return _run_loop(demo(Settings(), _console("auto")))


def _add_bench(parser: argparse.ArgumentParser) -> None:
    what = "; ".join(f"{name}: {text}" for name, text in SCENARIOS.items())
    add = parser.add_argument
    add("url", nargs="?", metavar="URL", help=(
        "a running proxy; without one, a proxy with the settings given here runs on a mock"))
    add("--only", action="append", choices=list(SCENARIOS), metavar="SCENARIO", help=(
        f"run this one; repeatable (default: all that can be run). {what}"))
    add("--speed", default="1", metavar="N", help="shorten the timelines N times (default 1)")
    add("--limit", default="200", metavar="S", help="end a scenario after so long (default 200 s)")
    add("--model", default="bench", help="model to ask for (default bench)")
    add("--key-env", metavar="NAME", help="environment variable whose key is sent (default none)")
    add("--yes", action="store_true", help="do not ask before calls that may cost money")
    add("--json", action="store_true", help="print all that is needed to repeat it, as JSON")
    add("--save", action="store_true", help="keep a dated record under $XDG_STATE_HOME")
    add("--compare", nargs=2, metavar=("A", "B"), help=(
        "two records, by path or by the beginning of their names: set them side by side"))
    _add_settings(parser)


def _cmd_bench(args: argparse.Namespace) -> int:
    if args.compare:
        one, two = map(_record, args.compare)
        try:
            table = compare_table(one, two)
        except ODD_JSON:
            raise ConfigError("--compare: these are no records of llmproxy bench") from None
        _plain_console().print(table)
        return 0
    try:
        speed, limit_s = float(args.speed), parse_seconds(args.limit)
        if not 0.1 <= speed <= 100:
            raise ValueError("--speed wants a number from 0.1 to 100")
    except ValueError as error:
        raise ConfigError(f"bench: {error}") from None
    try:
        return _run_loop(_bench(args, speed, limit_s))
    except aiohttp.ClientError as error:
        raise RemoteError(f"bench: {printable(str(error)) or type(error).__name__}") from None


async def _bench(args: argparse.Namespace, speed: float, limit_s: float) -> int:
    async with contextlib.AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        settings = _settings_of(args)
        if args.url is None:
            if "upstream" not in settings.given:
                settings.upstream, settings.upstreams, settings.keys = "mock:", [], []
            settings.clients, settings.port, settings.state = [], 0, "none"
            log.setLevel(logging.ERROR)  # the faults are on purpose
            daemon = await stack.enter_async_context(Daemon(settings))
            proxy, shown = daemon.url, settings.shown()
            upstream = daemon.gateway.sender.upstreams[0].base
            counters = daemon.gateway.counters
            counted: Callable[[], int] = lambda: counters.upstream_calls  # noqa: E731
            control = daemon.gateway.control
        else:
            remote = _remote(args, args.url)
            status = await remote.status()
            proxy, shown = remote.url, status["settings"]
            upstream = status["upstreams"][0]["url"]
            counted = lambda: int(remote.ask("GET", "status")["upstream_calls"])  # noqa: E731
            is_here = is_loopback(URL(proxy).host or "")
            if is_loopback(URL(upstream).host or "") and not is_here:
                raise ConfigError(f"bench: {upstream} is on the other machine: run it there")
        bench = Bench(session, proxy, upstream)
        bench.speed, bench.model, bench.counted = speed, args.model, counted
        if args.url is None:
            bench.tune = functools.partial(_tune, control, dataclasses.replace(settings), speed)
        bench.has_mock = await MockControl(session, upstream).is_there()
        bench.headers = _key_headers(args.key_env)
        names = args.only or [n for n in SCENARIOS if bench.has_mock or n not in FAULTS]
        if not bench.has_mock and (faults := [n for n in names if n in FAULTS]):
            why = f"{', '.join(faults)} wants a proxy on `llmproxy mock`, which {upstream} is not"
            raise ConfigError(f"bench: {why}")
        _may_cost(args, upstream, names)
        record = await run_bench(bench, names, limit_s, shown)
    if len(record["scenarios"]) < len(names):
        print("interrupted; these were done", file=sys.stderr)
    if args.save:
        path = _records() / f"{record['began'].replace(':', '')}.json"
        replace_file(path, json.dumps(record, indent=1))
        print(f"saved in {path}", file=sys.stderr)
    if args.json:
        print(json.dumps(record, indent=1))
    else:
        _plain_console().print(bench_table(record))
    return 0


def _tune(control: Control, given: Settings, speed: float, scenario: str) -> None:
    """Fit a proxy of our own to a scenario, but for what was set by hand; then as it was."""
    timeout_s = given.timeout if isinstance(given.timeout, float) else 30.0
    fitting: dict[str, dict[str, Any]] = {
        "gate": {"rpm": 60, "queue-timeout": 90},
        "hang": {"timeout": round(max(1.0, timeout_s / speed), 3)},  # its silence is shorter too
    }
    before = {name: getattr(given, name) for name in ("rpm", "queue_timeout", "timeout")}
    wanted = {flag_name(name): value for name, value in before.items()}
    wanted |= {
        flag: value for flag, value in fitting.get(scenario, {}).items()
        if flag.replace("-", "_") not in given.given
    }  # fmt: skip
    control.change(wanted, "bench")


def _key_headers(name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    if not (key := os.environ.get(name)):
        raise ConfigError(f"--key-env: {printable(name)} is not set")
    return {"Authorization": f"Bearer {key}"}


def _may_cost(args: argparse.Namespace, upstream: str, names: Iterable[str]) -> None:
    """Ask before calls go anywhere but to this machine."""
    if is_loopback(URL(upstream).host or "") or args.yes:
        return
    most = {"herd": 201, "distinct": 40, "overhead": 41}
    calls = sum(most.get(name, 800) for name in names)
    text = f"This sends about {calls} calls of some 30 tokens each to {upstream}, as {args.model}; "
    text += "it may cost money and use up rate limits. Go on? [y/N] "
    if not sys.stdin.isatty():
        raise ConfigError(f"bench: {upstream} is not this machine, its calls may cost: say --yes")
    with contextlib.suppress(EOFError):
        if input(text).strip().lower() in ("y", "yes"):
            return
    raise ConfigError("bench: nothing was sent")


def _records() -> Path:
    return state_path(default_text(SETTINGS["state"])).parent / "bench"


def _record(name: str) -> dict[str, Any]:
    """A saved record, by its path or the beginning of its name."""
    found = [p for p in sorted(_records().glob("*.json")) if name and p.name.startswith(name)]
    path = Path(name) if Path(name).is_file() else found[0] if len(found) == 1 else None
    if path is None:
        what = "no record" if not found else f"{len(found)} records"
        raise ConfigError(f"--compare {printable(name)}: {what} of this name in {_records()}")
    try:
        record = json.loads(path.read_bytes())
        if isinstance(record, dict) and {"scenarios", "settings"} <= record.keys():
            return record
    except (OSError, ValueError, RecursionError):
        pass
    raise ConfigError(f"--compare {path}: is no record of llmproxy bench")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help=(
        "JSONL or JSONL.gz, - for stdin: OpenAI batch input, lists of conversations "
        "(WildChat), bodies with time_unix and client; or a ledger kept with log-bodies"))
    add("--show", action="store_true", help="show the first words of what is repeated most")
    add("--json", action="store_true", help="print JSON")
    _add_settings(parser)


def _cmd_replay(args: argparse.Namespace) -> int:
    settings = _settings_of(args)
    calls = CallLog(Prices(settings), args.show, settings.dedup_window)
    try:
        calls.read(log_lines(args.file))
    except (OSError, EOFError, zlib.error, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise LedgerError(f"{args.file}: cannot be read: {printable(str(why))}") from None
    if not calls.at:
        why = f"no call is in it; {calls.first_bad}" if calls.bad_lines else "no call is in it"
        raise LedgerError(f"{args.file}: {why}")
    if args.json:
        print(json.dumps(calls.report(), indent=1))
    else:
        print_replay(calls.report(), args.show)
    return 0


def _cmd_check(args: argparse.Namespace) -> int:
    settings = _settings_of(args)
    Prices(settings)
    file = Path(args.config) if args.config else default_config_path(os.environ)
    print(f"{file}: " + ("fine" if file.exists() else "not there, defaults hold"))
    targets = ", ".join(rule.url for rule in settings.upstreams) or settings.upstream
    print(f"would proxy {targets} on http://{settings.host}:{settings.port}")
    keys = [*settings.keys, *(key for rule in settings.upstreams for key in rule.keys)]
    for missing in [key.env for key in keys if key.env and key.env not in os.environ]:
        print(f"  upstream_key env {printable(missing)} is not set here; serve needs it")
    shown = settings.shown()
    for name, where in settings.given.items():
        print(f"  {flag_name(name)} = {shown[flag_name(name)]}   ({where})")
    tables = {"upstream": settings.upstreams, "client": settings.clients, "model": settings.models}
    for kind, rules in tables.items():
        for rule in cast("list[Any]", rules):
            print(f"  {kind} {rule.name}: {_differing(rule)}")
            for key in getattr(rule, "keys", ()):
                print(f"    upstream_key {key.source}: {_differing(key)}")
    for key in settings.keys:
        print(f"  upstream_key {key.source}: {_differing(key)}")
    return 0


def _differing(rule: Any) -> str:
    """What a table of the file sets, by hand."""
    found = {name: getattr(rule, name) for name in fields_of(type(rule))}
    shown = {n: v for n, v in found.items() if v and n not in ("command", "key_sha256")}
    texts = {n: ", ".join(v) if isinstance(v, list) else v for n, v in shown.items()}
    return ", ".join(f"{name} = {text}" for name, text in texts.items())


def _add_remote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="PATH", help="TOML file that may name host and port")
    parser.add_argument(
        "--admin-key", dest="setting_admin_key", action="append", metavar="SECRET",
        help="where the daemon wants one (LLMPROXY_ADMIN_KEY and the file do as well)",
    )  # fmt: skip


def _remote(args: argparse.Namespace, url: str | None) -> Remote:
    """The daemon at a URL, else where the configuration says that it listens."""
    settings = _settings_of(args)
    if url is None:
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    try:
        return Remote(parse_url(url if "://" in url else f"http://{url}"), settings.admin_key)
    except ValueError as error:
        raise ConfigError(f"URL: {error}") from None


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="(default http://127.0.0.1:4000)")
    _add_remote(parser)


def _cmd_top(args: argparse.Namespace) -> int:
    console = _console("auto")
    remote = _remote(args, args.url)
    if console is None:
        raise ConfigError("top: wants a terminal; see llmproxy get --json, or /_llmproxy/status")

    async def show() -> int:
        await remote.status()  # before the screen is taken
        over = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        table = asyncio.create_task(live_table(remote, remote.url, console, over.set))
        ended = asyncio.create_task(over.wait())
        await asyncio.wait([table, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in (table, ended):
            task.cancel()
        await asyncio.gather(table, ended, return_exceptions=True)
        if not table.cancelled() and (error := table.exception()) is not None:
            raise error
        return 0

    return _run_loop(show())


def _add_get(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="SETTING", help="none: all")
    parser.add_argument("--url", metavar="URL", help="of the daemon (default http://127.0.0.1:4000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_remote(parser)


def _cmd_get(args: argparse.Namespace) -> int:
    remote = _remote(args, args.url)
    doc = remote.ask("GET", "settings")
    if "given" not in doc:
        raise RemoteError(f"{remote.url} is no llmproxy of this version")
    shown, given = doc["settings"], doc["given"]
    names = [name.replace("_", "-") for name in args.names]
    for name in names:
        if name not in shown:
            raise ConfigError(unknown_name(name, shown))
    wanted = {name: shown[name] for name in names or shown}
    if args.json:
        print(json.dumps(wanted, indent=1))
        return 0
    for name, value in wanted.items():
        texts = ", ".join(typed(value)) if value != [] else "none"
        if len(names) == 1:
            print(texts)
        else:
            print(f"{name:20} {texts:24} {given.get(name, '')}".rstrip())
    return 0


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("changes", nargs="+", metavar="SETTING=VALUE", help=(
        "a live setting and its value; of a repeatable one name it several times, or say none"))
    parser.add_argument("--save", action="store_true", help="write them into the file as well")
    parser.add_argument("--url", metavar="URL", help="of the daemon (default http://127.0.0.1:4000)")
    _add_remote(parser)


def _cmd_set(args: argparse.Namespace) -> int:
    changes: dict[str, Any] = {}
    for change in args.changes:
        flag, equals, value = change.partition("=")
        name = flag.strip().replace("-", "_")
        if not equals or name not in SETTINGS:
            what = unknown_name(flag, map(flag_name, SETTINGS)) if equals else "wants SETTING=VALUE"
            raise ConfigError(f"set {printable(change)}: {what}")
        if SETTINGS[name].metadata["many"]:
            known = changes.setdefault(flag_name(name), [])
            known += [] if value in ("", "none") else [value]
        else:
            changes[flag_name(name)] = value
    Settings().changed(changes, "set")  # what is wrong is said before anybody is asked
    doc = _remote(args, args.url).ask("PATCH", "settings", {**changes, "save": args.save})
    for name, value in doc.get("settings", {}).items():
        print(f"{name} = {', '.join(typed(value)) if value != [] else 'none'}")
    if "saved" in doc:
        print(f"saved in {doc['saved']}")
    return 0


def _add_ledger(parser: argparse.ArgumentParser) -> None:
    """What all commands that read the ledger understand. They need no running daemon."""
    parser.add_argument("--config", metavar="PATH", help="TOML file that may name the ledger")
    parser.add_argument(
        "--state", dest="setting_state", action="append", metavar="PATH",
        help=f"the ledger (default {default_text(SETTINGS['state'])})",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")


def _add_calls(parser: argparse.ArgumentParser) -> None:
    for name in FILTERS:
        parser.add_argument(f"--{name}", metavar="GLOB", help=f"only calls of this {name}")
    parser.add_argument("--since", metavar="SPAN", help="only the last span, like 30m, 2h or 7d")
    parser.add_argument("--limit", metavar="N", default="50", help="at most so many (default 50)")
    _add_ledger(parser)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="x-llmproxy-trace or x-request-id of an answer")
    _add_ledger(parser)


def _add_spend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", default="model", choices=list(SPEND_BY), help="(default model)")
    parser.add_argument(
        "--since", metavar="SPAN", default="30d", help="over the last span, like 12h (default 30d)"
    )
    _add_ledger(parser)


class LedgerError(Exception):
    """The ledger cannot be read; the message says the mend."""


def _read_ledger(args: argparse.Namespace, sql: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    settings = _settings_of(args)
    if settings.state == "none":
        raise LedgerError("there is no ledger: state is none")
    path = state_path(settings.state)
    try:
        with contextlib.closing(open_ledger(path)) as db:
            return [dict(row) for row in db.execute(sql, tuple(values))]
    except sqlite3.Error as error:
        why = "no daemon has written it yet; see --state" if not path.exists() else error
        raise LedgerError(f"{path}: {why}") from None


def _print_rows(args: argparse.Namespace, rows: list[dict[str, Any]], shown: Iterable[str]) -> None:
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    if args.csv:
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else list(shown))
        writer.writeheader()
        for row in rows:
            lists = {name: json.dumps(v) for name, v in row.items() if isinstance(v, list)}
            writer.writerow({**row, **lists})
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 1))
    for name in shown:
        numbers = rows and isinstance(rows[0][name], (int, float))
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(row[name])) for name in shown))
    _plain_console().print(table)


def _plain_console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 250)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".") or "0"
    return printable(str("" if value is None else value), 60)


def _cmd_calls(args: argparse.Namespace) -> int:
    wanted = {name: getattr(args, name) for name in (*FILTERS, "since", "limit")}
    try:
        sql, values = calls_query(wanted)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    rows = [shown_row(row) for row in _read_ledger(args, sql, values)]
    for row in rows:
        row["at"] = time.strftime("%m-%d %H:%M:%S", time.localtime(row["time_unix"]))
    names = "at fate status model client queue_ms total_ms tokens_in tokens_out cost_usd trace"
    if _plain_console().width < 130:
        names = "at fate status cost_usd trace model"
    _print_rows(args, rows, names.split())
    return 0


def _cmd_trace(args: argparse.Namespace) -> int:
    rows = [shown_row(row) for row in _read_ledger(args, *calls_query({}, args.id))]
    if not rows:
        raise LedgerError(f"no call of trace {printable(args.id)} is in the ledger")
    if args.json or args.csv:
        _print_rows(args, rows, rows[0])
    else:
        for row in reversed(rows):
            print("\n".join(printable(line, 500) for line in timeline(row)))
    return 0


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
        yield (
            f"  {step['at_ms']:>9.0f} ms  attempt {number} at {step['upstream']}{key}: "
            f"{step['outcome']} after {step['ms']:.0f} ms"
        )
    if row["steps"] and row["status"] < 400:
        first_ms = row["steps"][-1]["at_ms"] + row["ttft_ms"]
        yield f"  {first_ms:>9.0f} ms  first byte, {row['ttft_ms']:.0f} ms after it was asked for"
    about = " (estimated)" if row["tokens_estimated"] else ""
    saved = f", saved {row['saved_usd']:.6f} USD" if row["saved_usd"] else ""
    what = {"open": "not ended", "lost": "lost with its process"}.get(row["state"], "ended")
    yield (
        f"  {row['total_ms']:>9.0f} ms  {what}: {row['status']} {row['code']}".rstrip()
        + f", {row['fate']}, tokens {row['tokens_in']} in, {row['tokens_out']} out{about}, "
        + ("no price" if row["cost_usd"] is None else f"{row['cost_usd']:.6f} USD") + saved
    )


def _cmd_spend(args: argparse.Namespace) -> int:
    try:
        since_s = parse_span(args.since)
    except ValueError as error:
        raise ConfigError(f"--since: {error}") from None
    rows = _read_ledger(args, *spend_query(args.by, time.time() - since_s))
    names = ["name", "calls", "tokens_in", "tokens_out", "cost_usd", "unpriced_tokens"]
    if _plain_console().width >= 110:
        names[2:2], names[6:6] = ["upstream_calls"], ["saved_usd"]
    if not (args.json or args.csv):
        measure = "cost_usd" if any(row["cost_usd"] for row in rows) else "tokens_in"
        most = max((row[measure] for row in rows), default=0) or 1
        for row in rows:
            row["name"] = row["name"] or "-"
            row[""] = "█" * math.ceil(10 * row[measure] / most)
        names.append("")
    _print_rows(args, rows, names)
    return 0


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("verb", choices=("new", "list", "revoke"))
    parser.add_argument("name", nargs="?", help="the client's name")
    parser.add_argument("--config", metavar="PATH", help="the TOML file (default as for serve)")


def _cmd_key(args: argparse.Namespace) -> int:
    path = Path(args.config) if args.config else default_config_path(os.environ)
    with only_one(path):
        return _change_keys(args, path)


def _change_keys(args: argparse.Namespace, path: Path) -> int:
    text = text_of(path)
    clients = load_settings({}, {}, path).clients if text else []
    if args.verb == "list":
        for rule in clients:
            print(f"{rule.name}  {_differing(rule)}")
        return 0
    if not args.name or not re.fullmatch(r"[\w.-]{1,64}", args.name, re.ASCII):
        raise ConfigError(f"key {args.verb}: wants a NAME of letters, digits, - _ and .")
    known = [rule.name for rule in clients]
    if (args.name in known) is (args.verb == "new"):
        why = "is there already" if args.verb == "new" else "is not there"
        raise ConfigError(f"{path}: client {args.name} {why}")
    if args.verb == "revoke":
        replace_file(path, without_client(text, args.name))
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


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(COMPLETIONS), help="whose script to print")


def _cmd_completion(args: argparse.Namespace) -> int:
    print(COMPLETIONS[args.shell], end="")
    return 0


def completions(words: list[str]) -> list[str]:
    """What may stand where the last of these words does."""
    begun = words[-1] if words else ""
    if words[:1] == ["set"] and "=" in "".join(words[-2:]):
        is_apart = "=" in words[-2:]  # as bash takes it: name, =, value
        name, _, begun = ("".join(words[-2:]) if is_apart else begun).rpartition("=")
        name = words[len(words) - 2 - words[::-1].index("=")] if is_apart else name
        item = SETTINGS.get(name.replace("-", "_"))
        values = [] if item is None else [*item.metadata["also"]]
        values += [] if item is None else getattr(item.metadata["parse"], "choices", ())
        prefix = "" if is_apart else f"{name}="
        return [prefix + value for value in values if value.startswith(begun)]
    known = [*COMMANDS, "--version", "--help"] if len(words) < 2 else []
    command = words[0] if words and words[0] in COMMANDS else "serve"
    parser, add = _Parser(prog=command), COMMANDS[command][1]
    if add is not None:
        add(parser)
    for action in parser._actions:
        values = [str(choice) for choice in action.choices or ()]
        if isinstance(action.metavar, str) and "|" in action.metavar:
            values = action.metavar.split("|")
        if len(words) > 1 and words[-2] in action.option_strings and values:
            return [value for value in values if value.startswith(begun)]
        known += [flag for flag in action.option_strings if flag.startswith("--")] or values
    if command in ("get", "set"):
        live = [n for n, item in SETTINGS.items() if item.metadata["live"] or command == "get"]
        known += [flag_name(name) + "=" * (command == "set") for name in live]
    return [word for word in known if word.startswith(begun)]


# What stands at the end of each --help.
NOTES = {
    "serve": """examples:
  llmproxy                                     in front of llama.cpp on port 8080
  llmproxy --concurrency auto --abandon cancel the same, as many calls inside as it has slots
  llmproxy --upstream https://api.openai.com --rpm 500 --tpm 90000
  llmproxy --upstream mock:                    to try things on; nothing is called

signals: INT and TERM drain (calls in flight finish, new ones get 503), a second one ends at once;
HUP reads the file again. Keys of the live table: ? shows them.

files: $XDG_CONFIG_HOME/llmproxy/config.toml, $XDG_STATE_HOME/llmproxy/llmproxy.db
environment: LLMPROXY_ and a setting's name in capitals; NO_COLOR; NOTIFY_SOCKET (systemd)
exit: 0 fine, 1 could not do it, 2 usage or config error""",
    "mock": """examples:
  llmproxy mock --port 9001 --latency 1.5
  curl localhost:9001/_mock                    calls so far
  curl localhost:9001/_mock -d '{"mode": "503"}'

modes: """
    + ", ".join(MODES)
    + "\nalso: latency, rpm, tpm, health (a mode of its own), reset",
    "top": "examples:\n  llmproxy top\n  llmproxy top http://server:4000 --admin-key SECRET",
    "get": "examples:\n  llmproxy get\n  llmproxy get timeout",
    "set": """examples:
  llmproxy set timeout=20 concurrency=8
  llmproxy set rpm=none --save
  llmproxy set 'price=gpt-*=2.5/10' 'price=llama*=0/0'""",
    "bench": """examples:
  llmproxy bench --speed 10                    a proxy of its own on a mock, all scenarios
  llmproxy bench --concurrency 32 --only distinct --save
  llmproxy bench localhost:4000 --only herd    a running proxy and its upstream
  llmproxy bench --compare 2026-11-29 2026-11-30

reached: calls that the provider got. herd, distinct and overhead run on any upstream; what is not
on this machine is asked about first.""",
    "replay": """examples:
  llmproxy replay batch.jsonl --prices model_prices_and_context_window.json
  zcat log.jsonl.gz | llmproxy replay - --show
  llmproxy replay ~/.local/state/llmproxy/llmproxy.db    kept with log-bodies = on""",
    "calls": "examples:\n  llmproxy calls --status '5*' --since 2h\n  llmproxy calls --csv",
    "spend": "examples:\n  llmproxy spend --by client --since 7d",
    "key": "examples:\n  llmproxy key new alice\n  llmproxy key list\n  llmproxy key revoke alice",
    "completion": """examples:
  llmproxy completion bash > ~/.local/share/bash-completion/completions/llmproxy
  llmproxy completion zsh > "${fpath[1]}/_llmproxy"
  llmproxy completion fish > ~/.config/fish/completions/llmproxy.fish""",
}


COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "serve": ("the daemon (what runs without a command)", _add_settings, _cmd_serve),
    "mock": ("a stand-in provider with fault modes", _add_mock, _cmd_mock),
    "demo": ("see it work: a scripted load on an embedded provider", None, _cmd_demo),
    "bench": ("measure a proxy and its upstream side by side", _add_bench, _cmd_bench),
    "replay": ("what dedup would have saved, from logs of calls", _add_replay, _cmd_replay),
    "check": ("validate the config file and say what it means", _add_settings, _cmd_check),
    "top": ("the live table of a daemon that runs elsewhere", _add_top, _cmd_top),
    "get": ("settings of a running daemon", _add_get, _cmd_get),
    "set": ("change settings of a running daemon", _add_set, _cmd_set),
    "calls": ("the last calls, from the ledger", _add_calls, _cmd_calls),
    "trace": ("one call's whole life, from the ledger", _add_trace, _cmd_trace),
    "spend": ("money and tokens, from the ledger", _add_spend, _cmd_spend),
    "key": ("client keys: new NAME prints one once, list, revoke NAME", _add_key, _cmd_key),
    "completion": ("a shell's completion of this command", _add_completion, _cmd_completion),
}


def _console(live: str) -> Console | None:
    """A console for the live table, or None where there shall be none."""
    if live == "off" or (live == "auto" and not sys.stdout.isatty()):
        return None
    with contextlib.suppress(OSError, AttributeError):
        if live == "auto" and os.tcgetpgrp(sys.stdout.fileno()) != os.getpgrp():
            return None  # in the background: the screen is somebody else's
    from rich.console import Console

    return Console(force_terminal=True if live == "on" else None)


def _run_loop(work: Any) -> int:
    """Run on uvloop where it is installed."""
    # A call leaves little that is cyclic: collect seldom, and never what was there at the start.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return int(runner.run(work))


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


def _parser() -> _Parser:
    parser = _Parser(
        prog="llmproxy", description="A local proxy for LLM calls. Without a command: serve.",
        epilog="llmproxy COMMAND --help tells more; without a command, llmproxy serve --help.",
    )
    parser.add_argument("--version", action="version", version=f"llmproxy {__version__}")
    commands = parser.add_subparsers(metavar="command", parser_class=_Parser)
    for name, (text, add, command) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=text, epilog=NOTES.get(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        sub.add_argument("--version", action="version", version=f"llmproxy {__version__}")
        sub.set_defaults(run=command, parser=sub)
        if add is not None:
            add(sub)
    return parser


def main(argv: list[str] | None = None) -> int:
    _open_standard_files()
    words_ = sys.argv[1:] if argv is None else argv
    if not words_ or (words_[0] not in COMMANDS and words_[0] not in ("-h", "--help", "--version")):
        words_ = ["serve", *words_]
    parser = _parser()
    logging.basicConfig(handlers=[stderr_log], level=logging.WARNING)
    try:
        if words_[:2] == ["completion", "words"]:  # what is being typed need not be right
            print("\n".join(completions(words_[3:])))
            return 0
        args, rest = parser.parse_known_args(words_)
        if rest and getattr(args, "name", "") is None and not rest[0].startswith("-"):
            args.name = rest.pop(0)  # key new --config F NAME
        if rest:
            args.parser.refuse(rest)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except (ConfigError, ListenError, LedgerError, RemoteError) as error:
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
