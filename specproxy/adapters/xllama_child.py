"""One llama-server out of the `xllamacpp` wheel, in a process of its own, by llama-server's own flags.

    python -m specproxy.adapters.xllama_child -m model.gguf --port 0 -c 4096 -np 1 --spec-type none

It is llama.cpp's server itself, compiled into the wheel, so whatever starts lanes treats it and the binary
alike. Only the flags in `FLAGS` are known; the binary has more. It is built for any x86-64 or ARM processor,
not for this one: plain decoding is on a par with a native build, verifying drafts is slower.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from specproxy.errors import ConfigError

__all__ = ["FLAGS", "known_flags", "parse"]


def _switch(text: str) -> bool:
    if text not in ("on", "off", "auto"):
        raise ValueError(text)
    return text != "off"


# flag spellings → (path of the field in xllamacpp.CommonParams, type)
FLAGS: dict[tuple[str, ...], tuple[str, Callable[[str], Any]]] = {
    ("-m", "--model"): ("model.path", str),
    ("-a", "--alias"): ("model_alias", lambda text: set(text.split(","))),
    ("--host",): ("hostnames", lambda text: [text]),
    ("--port",): ("port", int),
    ("-c", "--ctx-size"): ("n_ctx", int),
    ("-np", "--parallel"): ("n_parallel", int),
    ("-b", "--batch-size"): ("n_batch", int),
    ("-ub", "--ubatch-size"): ("n_ubatch", int),
    ("-t", "--threads"): ("cpuparams.n_threads", int),
    ("-tb", "--threads-batch"): ("cpuparams_batch.n_threads", int),
    ("--threads-http",): ("n_threads_http", int),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): ("n_gpu_layers", int),
    ("-fit", "--fit"): ("fit_params", _switch),
    ("-cram", "--cache-ram"): ("cache_ram_mib", int),
    ("--api-prefix",): ("api_prefix", str),
    ("--api-key",): ("api_keys", lambda text: text.split(",")),
    ("-n", "--predict", "--n-predict"): ("n_predict", int),
    ("-lv", "--verbosity", "--log-verbosity"): ("verbosity", int),
    ("--chat-template",): ("chat_template", str),
    ("--slot-save-path",): ("slot_save_path", str),
    ("--mmproj", "-mm"): ("mmproj.path", str),
    ("--spec-draft-model", "-md", "--model-draft"): ("speculative.draft.mparams.path", str),
    ("--spec-draft-n-max",): ("speculative.draft.n_max", int),
    ("--spec-draft-n-min",): ("speculative.draft.n_min", int),
    ("--spec-draft-p-min", "--draft-p-min"): ("speculative.draft.p_min", float),
    ("--spec-draft-p-split", "--draft-p-split"): ("speculative.draft.p_split", float),
    ("--spec-draft-threads", "-td", "--threads-draft"): ("speculative.draft.cpuparams.n_threads", int),
    ("--spec-draft-ngl", "-ngld", "--n-gpu-layers-draft"): ("speculative.draft.n_gpu_layers", int),
    ("--spec-ngram-simple-size-n",): ("speculative.ngram_simple.size_n", int),
    ("--spec-ngram-simple-size-m",): ("speculative.ngram_simple.size_m", int),
    ("--spec-ngram-simple-min-hits",): ("speculative.ngram_simple.min_hits", int),
    ("--spec-ngram-map-k-size-n",): ("speculative.ngram_map_k.size_n", int),
    ("--spec-ngram-map-k-size-m",): ("speculative.ngram_map_k.size_m", int),
    ("--spec-ngram-mod-n-match",): ("speculative.ngram_mod.n_match", int),
    ("--spec-ngram-mod-n-min",): ("speculative.ngram_mod.n_min", int),
    ("--spec-ngram-mod-n-max",): ("speculative.ngram_mod.n_max", int),
}
SWITCHES: dict[str, tuple[str, bool]] = {
    "--metrics": ("endpoint_metrics", True),
    "--slots": ("endpoint_slots", True),
    "--no-slots": ("endpoint_slots", False),
    "--props": ("endpoint_props", True),
    "--no-warmup": ("warmup", False),
    "--no-webui": ("ui", False),
    "--no-ui": ("ui", False),
    "--no-repack": ("no_extra_bufts", True),
    "--no-context-shift": ("ctx_shift", False),
    "--context-shift": ("ctx_shift", True),
    "--jinja": ("use_jinja", True),
    "--no-jinja": ("use_jinja", False),
    "--kv-unified": ("kv_unified", True),
}
SPEC_TYPE = "--spec-type"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"llama-server of the xllamacpp wheel: {message}",
            hint="install a llama-server binary to use all of its flags",
        )


def known_flags() -> frozenset[str]:
    """Every flag that is understood."""
    return frozenset([SPEC_TYPE, *SWITCHES, *(spelling for group in FLAGS for spelling in group)])


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Fields of CommonParams by dotted path, from llama-server arguments; `SPEC_TYPE` holds the list of types.

    Raises:
        ConfigError: an unknown flag or a bad value.
    """
    parser = _Parser(
        prog="xllama_child", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for spellings, (path, kind) in FLAGS.items():
        parser.add_argument(*spellings, dest=path, type=kind, required=path == "model.path")
    for flag, (path, value) in SWITCHES.items():
        parser.add_argument(flag, dest=path, action="store_const", const=value)
    parser.add_argument(SPEC_TYPE, dest=SPEC_TYPE, type=lambda text: text.split(","))
    return vars(parser.parse_args(list(arguments)))


def build(fields: dict[str, Any]) -> Any:
    """A CommonParams with these fields set.

    Raises:
        ConfigError: a spec type that this build of the wheel does not have.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    for path, value in fields.items():
        if path == SPEC_TYPE:
            params.speculative.types = [_spec_type(xllamacpp.common_speculative_type, name) for name in value]
            continue
        *parents, leaf = path.split(".")
        owner = params
        for name in parents:
            owner = getattr(owner, name)
        setattr(owner, leaf, value)
    return params


def _spec_type(types: Any, name: str) -> Any:
    try:
        return types["COMMON_SPECULATIVE_TYPE_" + name.upper().replace("-", "_")]
    except KeyError:
        raise ConfigError(f"this xllamacpp has no spec type {name!r}") from None


def main() -> int:
    """Serve until killed. The default action of SIGTERM is what we want: nothing needs tidying up."""
    try:
        fields = parse(sys.argv[1:])
        for path in ("model.path", "speculative.draft.mparams.path"):
            if path in fields and not Path(fields[path]).is_file():
                raise ConfigError(f"{fields[path]}: no such file")
        params = build(fields)
        import xllamacpp

        server = xllamacpp.Server(params)
    except (ConfigError, RuntimeError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    # One write, on a line of its own: the server's threads log to the same pipe.
    os.write(sys.stdout.fileno(), f"\nlistening on {server.listening_address}\n".encode())
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
