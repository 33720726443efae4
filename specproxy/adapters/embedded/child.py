"""The engine as a process of its own: loads a model, then serves it on a Unix socket or a TCP port.

    python -m specproxy.adapters.embedded.child --model M.gguf --socket /run/engine.sock

Writes ``listening on URL`` and one line of JSON with facts about the model once it is ready; errors go to
standard error, with exit code 78 where the model cannot be served as asked, else 1. Ends in order on SIGTERM
and SIGINT. That it does not outlive its parent is the parent's business (see `adapters.tether`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
from aiohttp import web

from specproxy.adapters.embedded.app import build_app, serve_site
from specproxy.adapters.embedded.engine import LlamaEngine
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.llama import ModelParams
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.ollama_setup import ModelSetup
from specproxy.adapters.supervise import REFUSED
from specproxy.errors import SpecproxyError

__all__ = ["main", "parse"]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ends the process on a wrong one."""
    parser = argparse.ArgumentParser(prog="specproxy-engine", allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--draft", type=Path)
    add("--name", action="append", default=[], help="a name of the model; the first is shown")
    add("--setup", type=Path, help="file with what a model of Ollama's sets besides its weights")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path)
    where.add_argument("--port", type=int, help="on 127.0.0.1; 0 takes a free one")
    for flag, default in (("ctx", 0), ("parallel", 4), ("batch", 512), ("threads", 0), ("threads-batch", 0)):
        add(f"--{flag}", type=int, default=default)
    for flag, default in (("draft-max", 3), ("mtp-max", 3), ("ngram-max", 8), ("ngram-match", 3)):
        add(f"--{flag}", type=int, default=default)
    add("--idle-unload", type=float, help="seconds without a request after which the model is unloaded")
    add("--state", type=Path, help="directory for what was measured")
    add("--profile", type=float, default=3.0, help="seconds that measuring a new model may take")
    add("--n-gpu-layers", type=int, default=0)
    add("--main-gpu", type=int, default=0)
    add("--tensor-split", type=lambda text: tuple(map(float, text.split(","))), default=())
    add("--flash-attn", choices=("on", "off", "auto"), default="auto")
    add("--cache-type-k")
    add("--cache-type-v")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--mmap", action="store_true", default=None, help="map the weights (default: as pays)")
    where.add_argument("--no-mmap", action="store_false", dest="mmap", help="read the weights into memory")
    for flag in ("mlock", "no-repack", "no-kv-offload", "no-mtp"):
        add(f"--{flag}", action="store_true")
    return parser.parse_args(arguments)


def _options(args: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        model=args.model,
        draft=args.draft,
        name=args.name[0] if args.name else "",
        mtp=not args.no_mtp,
        context=args.ctx,
        parallel=args.parallel,
        batch=args.batch,
        threads=args.threads,
        threads_batch=args.threads_batch,
        draft_max=args.draft_max,
        mtp_max=args.mtp_max,
        ngram_max=args.ngram_max,
        ngram_match=args.ngram_match,
        idle_unload_s=args.idle_unload,
        state=args.state,
        profile_s=args.profile,
        weights=ModelParams(
            gpu_layers=args.n_gpu_layers,
            main_gpu=args.main_gpu,
            tensor_split=args.tensor_split,
            mmap=args.mmap,
            mlock=args.mlock,
            repack=not args.no_repack,
        ),
        flash_attention={"on": True, "off": False, "auto": None}[args.flash_attn],
        type_k=args.cache_type_k,
        type_v=args.cache_type_v,
        offload_kqv=not args.no_kv_offload,
    )


async def _serve(args: argparse.Namespace) -> None:
    """Load, serve until told to end, and tidy up."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    setup = ModelSetup.load(args.setup) if args.setup is not None else None
    app = build_app(LlamaEngine(_options(args)), names=args.name, slots=args.parallel, setup=setup)

    def site(runner: web.AppRunner) -> web.BaseSite:
        if args.socket is None:
            return web.TCPSite(runner, "127.0.0.1", args.port)
        args.socket.unlink(missing_ok=True)  # left over by a crash
        return web.UnixSite(runner, args.socket)

    runner = await serve_site(app, site)
    try:
        address = runner.addresses[0]
        url = f"unix://{address}" if args.socket else f"http://{address[0]}:{address[1]}"
        card = app[SERVICE].card
        # Each in one write: llama.cpp's threads may log to the same pipe.
        os.write(sys.stdout.fileno(), f"\nlistening on {url}\n".encode())
        ready = {"ready": True, "model": card.name, "strategies": [s.name for s in card.strategies]}
        gc.collect()
        gc.freeze()  # what was imported stays; walking through it now and then would hold up every stream
        os.write(sys.stdout.fileno(), orjson.dumps(ready) + b"\n")
        await ended.wait()
    finally:
        await runner.cleanup()


def main() -> int:
    """Run until told to end; returns the exit code."""
    args = parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    with contextlib.suppress(ImportError):  # there is none on some platforms; asyncio's own loop does too
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(_serve(args))
    except (SpecproxyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED if isinstance(error, SpecproxyError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
