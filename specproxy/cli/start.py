"""`specproxy start`: settings, logs, a listening socket, and the service until a signal comes."""

from __future__ import annotations

import asyncio
import gc
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from specproxy import __version__
from specproxy.cli.groups import Choice
from specproxy.cli.options import config_option
from specproxy.config import EngineChoice, LogSettings, Settings, default_config_path, load

if TYPE_CHECKING:
    from specproxy.logs import LineWriter

__all__ = ["settings_of", "start"]

LOG_FORMATS = get_args(LogSettings.model_fields["format"].annotation)
LOG_LEVELS = get_args(LogSettings.model_fields["level"].annotation)
FILE = click.Path(path_type=Path)

FLAGS: tuple[Callable[..., Any], ...] = (
    click.option(
        "--upstream", multiple=True, metavar="URL", help="Running server to stand in front of; repeatable."
    ),
    click.option("--model", metavar="GGUF", help="Model file to run, or the name of a model that Ollama has."),
    click.option(
        "--draft", type=FILE, metavar="GGUF", help="Draft model for it, or for a running server's model."
    ),
    click.option("--engine", type=Choice(get_args(EngineChoice)), help="What runs the model."),
    click.option(
        "--manage/--no-manage", default=None, help="Start further lanes on a running server's weights."
    ),
    click.option(
        "--reload/--no-reload", default=None, help="Let a running Ollama reload its model to change drafting."
    ),
    click.option("--profile", metavar="S", help="Seconds for measuring lanes while idle, 0 for none."),
    click.option(
        "--strategies", metavar="LIST", help="Strategies that may get a lane, such as plain,ngram,mtp:4."
    ),
    click.option("--host", metavar="ADDRESS", help="Address to listen on  [default: 127.0.0.1]"),
    click.option("--port", metavar="N", help="Port to listen on, 0 for a free one  [default: 8484]"),
    click.option("--threads", metavar="N", help="Threads of a lane."),
    click.option("--ctx", metavar="N", help="Context in tokens for each slot."),
    click.option("--slots", metavar="N", help="Requests that a lane answers at the same time."),
    click.option("--n-gpu-layers", metavar="N", help="Layers on the GPU, -1 for all."),
    click.option("--memory", metavar="SIZE", help="Memory for all started lanes together, such as 6GiB."),
    click.option("--llama-server", type=FILE, metavar="FILE", help="llama-server binary."),
    click.option("--llama-args", metavar="TEXT", help="Further arguments for llama-server, in one text."),
    click.option(
        "--engine-args", metavar="TEXT", help="Further arguments for the embedded engine, in one text."
    ),
    click.option("--idle-unload", metavar="S", help="Free the embedded engine's model after S idle seconds."),
    click.option("--state-dir", type=FILE, metavar="DIR", help="Where statistics are kept."),
    click.option("--store", metavar="URL", help="Redis that several proxies share, as redis://host:port/db."),
    click.option("--grace", metavar="S", help="Seconds that requests may take to finish at shutdown."),
    click.option("--log-format", type=Choice(LOG_FORMATS), help="Form of log lines."),
    click.option(
        "--log-file/--no-log-file", default=None, help="Write the log to a file too  [default: log-file]"
    ),
    click.option("--log-level", type=Choice(LOG_LEVELS), help="Least severe level that is logged."),
)
NESTED = {"log_file": "log.file", "log_format": "log.format", "log_level": "log.level"}


def _flags(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(FLAGS):
        command = option(command)
    return command


@click.command()
@_flags
@config_option
def start(config_path: Path | None, **flags: Any) -> int:
    """Run the proxy, until Ctrl-C or SIGTERM.

    \b
    In front of a running server:  specproxy start --upstream http://127.0.0.1:11434
    With a model of your own:      specproxy start --model model.gguf --draft small.gguf

    With neither, the usual ports of Ollama, llama-server and LM Studio are probed.
    """
    parameters = flags | {"config_path": config_path}
    return run(lambda: settings_of(parameters), config_path or default_config_path())


def settings_of(parameters: Mapping[str, Any]) -> Settings:
    """Settings from the parameters of this command, the environment and the file.

    Raises:
        ConfigError: they cannot be used.
    """
    flags = {NESTED.get(name, name): value for name, value in parameters.items() if name != "config_path"}
    return load(parameters["config_path"], flags | {"upstream": flags["upstream"] or None})


def run(read: Callable[[], Settings], path: Path) -> int:
    """Run the service with what `read` gives, until a signal stops it; returns the exit code.

    SIGHUP, or a change of the file at `path`, reads again.

    Raises:
        ConfigError: it cannot run as configured; nothing is left running.
    """
    from specproxy import logs

    settings = read()
    as_json = logs.wants_json(settings.log.format, sys.stdout)
    file = _log_file(settings)
    writer = logs.configure(level=settings.log.level, as_json=as_json, record=file.write if file else None)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(settings, read, path, None if as_json else writer))
    finally:
        writer.close()
        if file is not None:
            file.close()
    return 0


def _log_file(settings: Settings) -> LineWriter | None:
    """Writes to the log file; None where there is to be none, or where it cannot be written, which is said."""
    from specproxy.logfile import LOG_FILE, RotatingFile
    from specproxy.logs import LineWriter

    if not settings.log.file:
        return None
    file = RotatingFile(settings.state_dir / LOG_FILE, most=settings.log.file_size)
    try:
        file.open()
    except OSError as error:
        click.echo(f"specproxy: no log file: {file.path}: {error.strerror}", err=True)
        return None
    return LineWriter(file)


async def _serve(
    settings: Settings, read: Callable[[], Settings], path: Path, terminal: LineWriter | None
) -> None:
    import structlog

    from specproxy.cli.banner import banner
    from specproxy.proxy.reload import Reloader
    from specproxy.proxy.service import Service

    force = _on_signals()
    service = Service(settings)
    reloader = Reloader(path, read, service.take)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.now)
    try:
        await service.start()
        _spare_the_collector()
        service.watch_settings(reloader)
        if terminal is not None:
            for line in banner(service.status(), shutil.get_terminal_size().columns):
                terminal.write(line)
        else:
            structlog.get_logger("specproxy").info("started", url=service.url, version=__version__)
        await asyncio.Event().wait()
    except asyncio.CancelledError:  # the first signal; nobody else cancels this task
        pass
    finally:
        await service.aclose(force)


def _spare_the_collector() -> None:
    """What is there by now stays for good: the garbage collector need not look at it at every pass.

    A full pass over all modules takes tens of milliseconds, in the middle of somebody's stream; requests leave
    few cycles behind, so that rarer passes are enough.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _on_signals() -> asyncio.Event:
    """The first SIGINT or SIGTERM cancels the running task, the second sets the event that is returned."""
    task, force = asyncio.current_task(), asyncio.Event()
    assert task is not None
    stopping = False

    def on_signal() -> None:
        nonlocal stopping
        if stopping:
            force.set()
        else:
            stopping = True
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return force


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
