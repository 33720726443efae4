"""What settings are read from: values such as sizes and URLs, names that are nearly right, and the file."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import yaml
from pydantic import BeforeValidator, Field

from specproxy.errors import ConfigError
from specproxy.records import Strategy

__all__ = [
    "DRAFTERS",
    "PROFILE_S",
    "File",
    "Size",
    "Url",
    "can_be_sent",
    "item_list",
    "nearest",
    "parse_strategy",
    "read_file",
    "seconds_or_switch",
    "store_url",
    "usable_token",
    "without_secret",
]

PROFILE_S = 120.0
"""Seconds that measuring lanes in idle time may take for a set-up, where nothing else is said."""
_SWITCHES = {"true": PROFILE_S, "yes": PROFILE_S, "on": PROFILE_S, "false": 0.0, "no": 0.0, "off": 0.0}

STORE_SCHEMES = ("redis://", "rediss://", "unix://")

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}


def _size(value: object) -> object:
    """Bytes from a number or a text such as ``6GiB``, ``800 MB``; anything else is left for pydantic."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value.lower())
    if not match or match[2] not in _UNITS:
        raise ValueError("should be a size such as 6GiB or 800MB")
    return int(float(match[1]) * _UNITS[match[2]])


def seconds_or_switch(value: object) -> object:
    """Seconds from a number, or from a word that switches on or off; anything else is left for pydantic."""
    return _SWITCHES.get(str(value).strip().lower(), value) if isinstance(value, bool | str) else value


def item_list(value: object) -> object:
    """A list from one item or from a text with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _url(value: object) -> object:
    """A base URL without its last slash; ``host:port`` alone means http."""
    if not isinstance(value, str):
        return value
    url = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(url)
        well = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        well = False
    if not well:
        raise ValueError("should be a URL such as http://127.0.0.1:11434")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("should be a base URL without user, query or fragment")
    return url.rstrip("/")


def without_secret(text: str) -> str:
    """The same with the user and password of any URL in it left out."""
    return re.sub(r"(://)[^\s]*@", r"\1…@", text)


def can_be_sent(secret: str) -> bool:
    """Whether a header can carry it as it is: a line end would begin another header."""
    return bool(secret) and secret == secret.strip() and secret.isprintable()


def usable_token(token: str) -> str:
    """A token as it is.

    Raises:
        ValueError: it is empty, as an unset variable is, or no header could carry it; the message lacks it.
    """
    if not can_be_sent(token):
        raise ValueError("should be visible characters, at least one (leave it out to have no token)")
    return token


def store_url(url: str) -> str:
    """The URL of a shared store, as it is.

    Raises:
        ValueError: it is none; the message has nothing of the URL, which may hold a password.
    """
    if not url.startswith(STORE_SCHEMES):
        raise ValueError(f"should begin with {', '.join(STORE_SCHEMES)}")
    try:
        parts = urlsplit(url)
        network = parts.hostname and parts.port != 0 and re.fullmatch(r"(/\d*)?", parts.path)
        well = (parts.scheme == "unix" or network) and not parts.fragment
    except ValueError:
        well = False
    if not well:
        raise ValueError(
            "should be a URL such as redis://:password@host:6379/0, with %2F, %3F, %23, %40 "
            "for / ? # @ in a password"
        )
    return url


class _Loader(yaml.SafeLoader):
    """Does not let the second of two equal keys win in silence."""

    def construct_mapping(self, node: Any, *args: Any, **given: Any) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) and key.value != "<<" else None
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} stands there twice", key.start_mark
                )
            if name is not None:
                seen.add(name)
        return super().construct_mapping(node, *args, **given)


def _home(value: object) -> object:
    """A path in which ``~`` means the home directory."""
    return os.path.expanduser(value) if isinstance(value, str) else value


DRAFTERS = (
    "ngram", "draft", "mtp", "eagle3", "dflash", "dspark", "auto", "draft-sampled", "mtp-sampled",
    "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache",
    "draft-simple", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark",
)  # fmt: skip
"""Drafters that a strategy may be made of: ours, and llama-server's own names, which are passed to it."""


def parse_strategy(name: str) -> str:
    """A strategy's name whose drafters are known."""
    for drafter in Strategy.parse(name).drafters:
        if drafter not in DRAFTERS:
            close = nearest(drafter, list(DRAFTERS))
            raise ValueError(f"{drafter} is no drafter" + (f"; did you mean {close}?" if close else ""))
    return name


Size = Annotated[int, BeforeValidator(_size), Field(ge=0)]
Url = Annotated[str, BeforeValidator(_url)]
File = Annotated[Path, BeforeValidator(_home)]


def nearest(name: str, names: list[str]) -> str | None:
    """The valid name that `name` most likely means, or None.

    Dashes, underscores and dots count as the same; a bare leaf (``level``) finds its full path (``log.level``).
    """

    def plain(text: str) -> str:
        return re.sub(r"[-._]+", "_", text.lower()).strip("_")

    spelled = {plain(full): full for full in names}
    for full in reversed(names):
        spelled.setdefault(plain(full.rpartition(".")[2]), full)
    found = difflib.get_close_matches(plain(name), spelled, n=1, cutoff=0.6)
    return spelled[found[0]] if found else None


def read_file(path: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 (it is a SafeLoader)
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: should hold keys and values, not a {type(data).__name__}")
    return {str(key): _filled(value, environ, f"{path}: {key}") for key, value in data.items()}


def _filled(value: Any, environ: Mapping[str, str], where: str) -> Any:
    """`value` with every ``${NAME}`` in its texts replaced from the environment; ``$${`` stands for ``${``.

    Raises:
        ConfigError: the environment has no such name.
    """
    if isinstance(value, dict):
        return {key: _filled(inner, environ, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, environ, where) for inner in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        name = match[1]
        if name not in environ:
            close = nearest(name, sorted(environ))
            meant = f"; did you mean {close}?" if close else ""
            raise ConfigError(f"{where}: ${{{name}}}: the environment has no {name}{meant}")
        return environ[name]

    return re.sub(r"\$\$\{|\$\{([A-Za-z_]\w*)\}", fill, value)
