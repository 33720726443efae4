"""Settings: layers, their order, and what an error says."""

from __future__ import annotations

import contextlib
import json
import os
import string
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specproxy.config import ENV_PREFIX, Settings, default_config_path, is_loopback, key_paths, load, nearest
from specproxy.errors import ConfigError
from specproxy.store.redis import RedisStore

EXAMPLE = Path(__file__).parent.parent / "examples" / "config.yaml"
NAMES = list(key_paths())


@pytest.fixture(autouse=True)
def _no_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [n for n in os.environ if n.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def failure(tmp_path: Path, text: str = "", **kwargs: object) -> list[str]:
    """The lines of the error that a config file (and flags, environment) gives."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, **kwargs)  # type: ignore[arg-type]  # tests pass odd values on purpose
    return caught.value.message.splitlines()


def test_defaults_without_a_file() -> None:
    """Nothing configured gives the documented defaults."""
    settings = load(environ={})
    assert (settings.host, settings.port, settings.engine, settings.manage) == (
        "127.0.0.1",
        8484,
        "auto",
        False,
    )
    assert settings.upstream == ()
    assert settings.learner.allowance_requests == 1.0
    assert settings.learner.allowance_share == 0.02


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    """Each layer overrides only the keys that it names."""
    path = write(
        tmp_path, "port: 1000\nthreads: 3\nslots: 2\nlearner: {allowance_share: 0.5, allowance_requests: 4}\n"
    )
    environ = {"SPECPROXY_PORT": "2000", "SPECPROXY_THREADS": "5", "SPECPROXY_LEARNER__ALLOWANCE_SHARE": "0.1"}
    settings = load(path, {"port": 3000, "learner.allowance_requests": None}, environ)
    assert (settings.port, settings.threads, settings.slots) == (3000, 5, 2)
    assert (settings.learner.allowance_share, settings.learner.allowance_requests) == (0.1, 4)


def test_default_file_is_read_where_it_exists() -> None:
    """The XDG config file counts without being named."""
    path = default_config_path()
    path.parent.mkdir(parents=True)
    path.write_text("port: 1234\n")
    assert load(environ={}).port == 1234


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    """A missing --config file is an error that names it."""
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1\n", "prot: no such key; did you mean port?"),
        (
            "learner: {alowance_share: 1}\n",
            "learner.alowance_share: no such key; did you mean learner.allowance_share?",
        ),
        ("log_level: debug\n", "log_level: no such key; did you mean log.level?"),
        ("level: debug\n", "level: no such key; did you mean log.level?"),
        ("n-gpu-layers: 3\n", "n-gpu-layers: no such key; did you mean n_gpu_layers?"),
        ("xyzzy: 1\n", "xyzzy: no such key"),
        ("port: abc\n", "port: 'abc': should be a valid integer, unable to parse string as an integer"),
        ("port: 70000\n", "port: 70000: should be less than or equal to 65535"),
        (
            "engine: embeded\n",
            "engine: 'embeded': should be 'auto', 'embedded' or 'managed'; did you mean embedded?",
        ),
        ("memory: lots\n", "memory: 'lots': should be a size such as 6GiB or 800MB"),
        ("upstream: ftp://x\n", "upstream: 'ftp://x': should be a URL such as http://127.0.0.1:11434"),
        ("learner: 3\n", "learner: 3: "),
        (
            "strategies: plain,ngran+mtp\n",
            "strategies: 'plain,ngran+mtp': ngran is no drafter; did you mean ngram?",
        ),
        (
            "strategies: [plain, 'mtp:0']\n",
            "strategies: ['plain', 'mtp:0']: draft length must be at least 1, not 0",
        ),
    ],
)
def test_an_error_is_one_line_with_path_value_and_nearest_name(tmp_path: Path, text: str, says: str) -> None:
    """The line starts with the file, and names key path, value, and the nearest valid name."""
    lines = failure(tmp_path, text, environ={})
    assert len(lines) == 1
    assert lines[0].startswith(f"{tmp_path / 'config.yaml'}: {says}")


def test_secrets_come_from_the_environment(tmp_path: Path) -> None:
    """``${NAME}`` anywhere in a text, also inside lists and sections; ``$${`` is a literal one."""
    text = "token: ${PROXY_TOKEN}\nport: ${P}\nllama_args: ['a${P}', '$${P}']\n"
    text += "learner: {allowance_share: '${S}'}\n"
    settings = load(write(tmp_path, text), environ={"PROXY_TOKEN": "s3cret", "P": "81", "S": "0.5"})
    assert settings.token is not None
    assert settings.token.get_secret_value() == "s3cret"
    assert (settings.port, settings.llama_args, settings.learner.allowance_share) == (81, ("a81", "${P}"), 0.5)


def test_a_missing_variable_is_named(tmp_path: Path) -> None:
    """With its key path, and the nearest one that there is; no value is told."""
    lines = failure(tmp_path, "log: {level: '${LEVLE}'}\n", environ={"LEVEL": "hidden"})
    assert lines == [
        f"{tmp_path / 'config.yaml'}: log.level: ${{LEVLE}}: the environment has no LEVLE; did you mean LEVEL?"
    ]


def test_every_problem_gets_a_line(tmp_path: Path) -> None:
    """Two mistakes are told at once."""
    assert len(failure(tmp_path, "prot: 1\nslots: 0\n", environ={})) == 2


def test_an_error_names_the_layer_it_came_from(tmp_path: Path) -> None:
    """The same key is blamed on the flag or the variable that set it."""
    assert failure(tmp_path, "slots: 1", environ={"SPECPROXY_SLOTS": "0"})[0].startswith(
        "SPECPROXY_SLOTS: slots: '0'"
    )
    assert failure(tmp_path, "slots: 1", flags={"slots": 0}, environ={})[0].startswith("--slots: slots: 0: ")
    assert failure(tmp_path, flags={"log.level": "x"}, environ={})[0].startswith("--level: log.level: 'x'")


def test_an_unknown_variable_is_an_error_with_the_nearest_name() -> None:
    """A typo in the environment does not pass unseen; other programs' variables do."""
    with pytest.raises(ConfigError, match=r"^SPECPROXY_PROT: no such setting; did you mean SPECPROXY_PORT\?$"):
        load(environ={"SPECPROXY_PROT": "1", "OTHER": "x"})


@pytest.mark.parametrize(("text", "says"), [("a: [", "line 1: not valid YAML"), ("- 1\n", "should hold keys")])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, says: str) -> None:
    """Broken YAML names the line; a list is refused."""
    assert says in failure(tmp_path, text, environ={})[0]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::", "example.org"])
def test_off_loopback_needs_a_token(host: str) -> None:
    """Listening for other machines without a token is refused, with the way out."""
    with pytest.raises(ConfigError, match="SPECPROXY_TOKEN"):
        load(flags={"host": host}, environ={})
    assert load(flags={"host": host}, environ={"SPECPROXY_TOKEN": "s3cret"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_needs_none(host: str) -> None:
    """Every name of loopback does without a token."""
    assert is_loopback(host)
    assert load(flags={"host": host}, environ={}).token is None


def test_a_draft_needs_a_model() -> None:
    """A draft without its target is refused."""
    with pytest.raises(ConfigError, match=r"^draft: "):
        load(flags={"draft": "d.gguf"}, environ={})


def test_the_token_is_never_shown(tmp_path: Path) -> None:
    """Neither repr, dump nor an error message holds the secret."""
    settings = load(environ={"SPECPROXY_TOKEN": "s3cret"})
    assert "s3cret" not in repr(settings) + str(settings.model_dump(mode="json"))
    assert "1234567" not in failure(tmp_path, "token: 1234567\n", environ={})[0]


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://a:1/", ("http://a:1",)),
        ("localhost:8080", ("http://localhost:8080",)),
        ("http://a:1, https://b/x/", ("http://a:1", "https://b/x")),
        (["http://a:1", "http://b:2"], ("http://a:1", "http://b:2")),
        (None, ()),
    ],
)
def test_upstream_is_one_url_or_several(given: object, urls: tuple[str, ...]) -> None:
    """Text, text with commas, and lists all work; a bare host and port means http."""
    assert Settings.model_validate({"upstream": given}).upstream == urls


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GiB", 6 * 1024**3), ("800 MB", 800_000_000), ("1.5g", 1_500_000_000), ("123", 123), (5, 5)],
)
def test_sizes(text: object, size: int) -> None:
    """Sizes are bytes, or numbers with a decimal or binary unit."""
    assert Settings.model_validate({"memory": text}).memory == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("false", 0.0), ("true", 120.0), ("off", 0.0), ("'no'", 0.0), ("0", 0.0), ("45", 45.0), ("'7.5'", 7.5)],
)
def test_a_profile_is_switched_or_given_seconds(tmp_path: Path, text: str, seconds: float) -> None:
    """In the file and in the environment; by default it is on."""
    assert load(write(tmp_path, f"profile: {text}"), environ={}).profile == seconds
    assert load(None, environ={"SPECPROXY_PROFILE": text.strip("'")}).profile == seconds
    assert load(None, environ={}).profile == 120.0


@pytest.mark.parametrize("text", ["-1", "sometimes", "[1]"])
def test_other_profiles_are_refused(tmp_path: Path, text: str) -> None:
    """Neither seconds nor a switch."""
    with pytest.raises(ConfigError, match="profile"):
        load(write(tmp_path, f"profile: {text}"), environ={})


def test_example_lists_every_key_at_its_default() -> None:
    """The example can be used, says what the code does, and leaves nothing out."""
    assert load(EXAMPLE, environ={}) == Settings()
    written = yaml.safe_load(EXAMPLE.read_text())
    flat = {
        f"{k}.{n}" if isinstance(v, dict) else k
        for k, v in written.items()
        for n in (v if isinstance(v, dict) else "_")
    }
    assert flat | {"state_dir"} == set(NAMES)
    assert "# state_dir:" in EXAMPLE.read_text()


def test_schema_describes_every_key() -> None:
    """Every property of the generated schema carries a description, and other keys are forbidden."""
    schema = Settings.model_json_schema()
    assert schema["additionalProperties"] is False
    for section in (schema, *schema["$defs"].values()):
        assert section["description"]
        for name, entry in section["properties"].items():
            assert entry.get("description") or "$ref" in entry, name
    json.dumps(schema)


@given(st.sampled_from(NAMES), st.integers(0, 30), st.sampled_from(string.ascii_lowercase), st.booleans())
def test_a_slip_of_one_letter_finds_its_key(name: str, at: int, letter: str, dashes: bool) -> None:
    """One wrong letter in a long enough key is always recognised."""
    if len(name) < 5:
        return
    at %= len(name)
    slip = name[:at] + letter + name[at + 1 :]
    assert nearest(slip.replace("_", "-") if dashes else slip, NAMES) == name


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3)
)


@given(
    st.dictionaries(
        st.sampled_from([*NAMES, "learner", "limits", "log"]) | st.text(max_size=8), values, max_size=4
    )
)
def test_any_yaml_is_used_or_refused_with_a_line(data: dict[str, object]) -> None:
    """Whatever the file holds, loading gives settings or a ConfigError, never another exception."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(data))
        with contextlib.suppress(ConfigError):
            load(path, environ={})


@pytest.mark.parametrize(
    "url",
    [
        "http://:hush@host",
        "redis://:hush/er@host:6379/0",
        "redis://:1234/hush@host:6379/0",
        "redis://:hush?er@host:6379/0",
        "redis://:1234#hush@host:6379/0",
        "redis://:hush@host:port/0",
        "redis://:hush@host:99999/0",
        "redis://:hush@host:6379/first",
        "redis://:hush@[::1/0",
        "redis://:hush@/0",
        "redis://",
    ],
)
def test_a_stores_url_that_is_none_is_refused_untold(url: str, tmp_path: Path) -> None:
    """A password with a / in it would be cut into host and port, which errors name."""
    (line,) = failure(tmp_path, environ={"SPECPROXY_STORE": url})
    assert line.startswith("SPECPROXY_STORE: store: should ")
    assert "hush" not in line.partition("should")[2]
    assert "1234" not in line


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1",
        "redis://host:6379/",
        "rediss://user:p%2Fw@host:6380/3",
        "redis://[::1]:6379/0?health_check_interval=5",
        "unix:///run/redis.sock?db=1",
    ],
)
def test_urls_of_stores(url: str) -> None:
    """As the redis package takes them."""
    store = load(environ={"SPECPROXY_STORE": url}).store
    assert store is not None
    assert store.get_secret_value() == url
    RedisStore(url).close()


@pytest.mark.parametrize("token", ["", " ", "a\nb", "hush ", "\x7f"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_token_that_nobody_could_send_is_refused(token: str, host: str, tmp_path: Path) -> None:
    """An empty one above all, as an unset variable gives it: it must not open the proxy to other machines."""
    for text, environ in (("", {"SPECPROXY_TOKEN": token}), ("token: ${GIVEN}", {"GIVEN": token})):
        (line,) = failure(tmp_path, text, flags={"host": host}, environ=environ)
        assert "token: should be visible characters" in line
        assert "hush" not in line


@pytest.mark.parametrize("user", ["me:hush@", ":hush@", "me@", "me:hu/sh@", "me:hu:sh@"])
def test_an_upstream_with_a_password_is_refused_without_telling_it(user: str, tmp_path: Path) -> None:
    """Keys for upstreams come from the environment, and addresses are shown everywhere."""
    (line,) = failure(tmp_path, flags={"upstream": f"http://{user}host:1"})
    assert "hu" not in line
    assert "://…@host:1" in line


@pytest.mark.parametrize(
    ("text", "line"),
    [("port: 1\ngrace: 2\nport: 3\n", 3), ("log:\n  level: info\n  level: debug\n", 3), ("? a\n: 1\na: 2", 3)],
)
def test_a_key_that_stands_there_twice_is_an_error(text: str, line: int, tmp_path: Path) -> None:
    """Whichever of the two was meant."""
    (said,) = failure(tmp_path, text)
    assert f", line {line}: not valid YAML: " in said
    assert "stands there twice" in said


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    """That is what YAML's merging is for."""
    limits = load(write(tmp_path, "limits: {<<: {body: 1MB, inspect: 1MB}, body: 2MB}")).limits
    assert (limits.body, limits.inspect) == (2_000_000, 1_000_000)


@pytest.mark.parametrize("given", ["http://host:1/v1", "host:1/v1/", "http://host:1"])
def test_a_v1_at_the_end_of_an_upstream_is_not_doubled(given: str) -> None:
    """As OpenAI's clients want their base URL; the paths of requests begin with it."""
    assert load(flags={"upstream": given}, environ={}).upstream == ("http://host:1",)


@pytest.mark.parametrize(("given", "host"), [("[::1]", "::1"), ("::1", "::1"), ("127.0.0.1", "127.0.0.1")])
def test_a_host_may_stand_in_brackets(given: str, host: str) -> None:
    """As it does in a URL; nothing can listen on it so."""
    assert load(flags={"host": given}, environ={}).host == host
