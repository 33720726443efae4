"""Other proxies in front of the same upstream, each set up for streaming: no buffering, kept connections.

nginx and HAProxy are Debian packages, used where they are installed. LiteLLM's proxy comes from PyPI, in an
environment of its own, which is named or made on demand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = ["cpu_s", "haproxy", "litellm", "nginx"]

NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u;
  scgi_temp_path {folder}/s;
  keepalive_requests 1000000;
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} reuseport;
    tcp_nodelay on;
    location / {{
      proxy_pass http://up;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""

HAPROXY = """
global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  http-reuse always
frontend f
  bind 127.0.0.1:{port}
  option http-no-delay
  default_backend b
backend b
  option http-no-delay
  server up 127.0.0.1:{upstream}
"""

LITELLM = """
model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{upstream}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
"""


@contextmanager
def _child(command: list[str], **environment: str) -> Iterator[psutil.Process]:
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        try:
            yield psutil.Process(child.pid)
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()


@contextmanager
def nginx(folder: Path, port: int, upstream: int) -> Iterator[psutil.Process | None]:
    """nginx with one worker; None where it is not installed."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        yield None
        return
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=port, upstream=upstream))
    with _child([program, "-c", str(config), "-p", str(folder)]) as process:
        yield process


@contextmanager
def haproxy(folder: Path, port: int, upstream: int) -> Iterator[psutil.Process | None]:
    """HAProxy with one thread; None where it is not installed."""
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        yield None
        return
    config = folder / "haproxy.cfg"
    config.write_text(HAPROXY.format(port=port, upstream=upstream))
    with _child([program, "-f", str(config), "-db"]) as process:
        yield process


@contextmanager
def litellm(folder: Path, port: int, upstream: int, program: str) -> Iterator[psutil.Process | None]:
    """LiteLLM's proxy; `program` is its executable, ``install`` to get one, or empty for none."""
    if not program:
        yield None
        return
    if program == "install":
        program = _installed_litellm()
    config = folder / "litellm.yaml"
    config.write_text(LITELLM.format(upstream=upstream))
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environment = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # no key, as the others; loopback only
    }
    with _child(command, **environment) as process:
        yield process


def _installed_litellm() -> str:
    """Its executable in an environment below the repository's cache, made once (some minutes)."""
    place = Path(__file__).resolve().parent.parent / ".cache" / "litellm"
    program = place / "bin" / "litellm"
    if not program.is_file():
        print("installing LiteLLM into an environment of its own (some minutes, once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(place / "bin" / "pip"), "install", "--quiet", "litellm[proxy]"], check=True)
    return str(program)


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children so far; to the nanosecond where Linux tells."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            total += int(Path(f"/proc/{one.pid}/schedstat").read_text().split()[0]) / 1e9
        except (OSError, ValueError):
            times = one.cpu_times()
            total += times.user + times.system
    return total
