"""Options that several commands share, and how they reach a running proxy."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from specproxy.config import Settings, load
from specproxy.config_values import without_secret
from specproxy.errors import ConfigError, SpecproxyError

__all__ = [
    "NO_ANSWER",
    "ask",
    "base_of",
    "config_option",
    "json_option",
    "opener",
    "prompts_option",
    "token_headers",
    "url_of",
    "url_option",
]

TIMEOUT_S = 5.0
NO_ANSWER = (OSError, ValueError, HTTPException)
"""What asking for JSON raises where no whole answer comes, or one that is neither HTTP nor JSON."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

config_option: Decorator = click.option(
    "-c", "--config", "config_path", type=click.Path(path_type=Path), metavar="FILE", help="Configuration file."
)
url_option: Decorator = click.option(
    "--url", metavar="URL", help="Where the proxy listens. Default: as configured."
)
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
prompts_option: Decorator = click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE.jsonl",
    help="One prompt a line: a JSON string, or an object with prompt or messages. Default: built-in ones.",
)


def url_of(settings: Settings) -> str:
    """Where a proxy with these settings is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104 (compared, not bound)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{settings.port}"


def base_of(url: str | None, settings: Settings) -> str:
    """The base URL of the proxy that is meant: as given, else as configured.

    Raises:
        ConfigError: what was given is no URL.
    """
    base = (url or url_of(settings)).rstrip("/")
    base = base if "://" in base else f"http://{base}"
    try:
        parts = urlsplit(base)
        well = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in base
    except ValueError:
        well = False
    if not well:
        raise ConfigError(f"--url: {without_secret(base)} should be an address such as http://127.0.0.1:8484")
    return base


def token_headers(settings: Settings) -> dict[str, str]:
    """The header that carries the configured token; none without one."""
    return {} if settings.token is None else {"X-Specproxy-Token": settings.token.get_secret_value()}


def ask(
    url: str | None,
    config_path: Path | None,
    path: str,
    body: bytes | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """GET (or POST `body` to) one of the running proxy's own routes and return its JSON.

    Raises:
        SpecproxyError: nothing answers there, or something that is not specproxy; says how to start one.
    """
    settings = load(config_path)
    base = base_of(url, settings)
    headers = {"Content-Type": "application/json", **(extra or {}), **token_headers(settings)}
    request = urllib.request.Request(f"{base}{path}", data=body, headers=headers)  # noqa: S310 (the user's own URL)
    try:
        with opener().open(request, timeout=TIMEOUT_S) as reply:
            data = json.load(reply)
    except urllib.error.HTTPError as error:
        message, kind = _message(error)
        if error.code in (404, 409) and kind not in ("", "not_found"):  # it knows the route, not the lane
            raise SpecproxyError(message) from error
        raise SpecproxyError(f"{base} answered {error.code} {message}", hint=_advice(error.code)) from error
    except NO_ANSWER as error:
        what = (
            "no proxy is running at"
            if isinstance(error, OSError)
            else "something other than specproxy answers at"
        )
        start = "specproxy start" + (
            f" --port {settings.port}" if url is None and settings.port != 8484 else ""
        )
        raise SpecproxyError(
            f"{what} {base}", hint=f"start one with `{start}`, or name its address with --url"
        ) from error
    if not isinstance(data, dict):
        raise SpecproxyError(f"something other than specproxy answers at {base}")
    return data


class _StayHere(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: where it points, nobody may see our token."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def opener() -> urllib.request.OpenerDirector:
    """What opens URLs of this machine: never by way of an HTTP_PROXY, nor where they redirect to."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _StayHere())


def _message(error: urllib.error.HTTPError) -> tuple[str, str]:
    """What is said to be wrong, and the kind of error if it is told."""
    try:
        detail = json.load(error)["error"]
        if isinstance(detail, dict):
            return str(detail["message"]), str(detail.get("type") or "")
        return str(detail), ""
    except (*NO_ANSWER, KeyError, TypeError):
        return str(error.reason), ""


def _advice(status: int) -> str:
    if status in (401, 403):
        return "set SPECPROXY_TOKEN to the token that the proxy was started with"
    return "is it specproxy that listens there?" if status == 404 else ""
