"""The embedded engine as an HTTP application: OpenAI, Ollama, Anthropic and llama.cpp routes for its model."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from aiohttp import web

from specproxy.adapters.embedded import (
    api_anthropic,
    api_chat,
    api_completions,
    api_llamacpp,
    api_ollama,
    api_ollama_models,
    api_responses,
)
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.replies import error_response, family_of, json_response
from specproxy.adapters.embedded.service import Service
from specproxy.adapters.embedded.side_channel import PULSE_PATH, REPORTS_PATH, encode_report
from specproxy.adapters.embedded.types import Engine
from specproxy.adapters.ollama_setup import ModelSetup
from specproxy.errors import RequestError, SpecproxyError

__all__ = ["build_app", "serve_site"]

MAX_BODY = 256 * 1024**2

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    engine: Engine,
    *,
    names: Sequence[str] = (),
    slots: int = 4,
    start_engine: bool = True,
    setup: ModelSetup | None = None,
) -> web.Application:
    """The application around an engine, which it owns: cleaning up the application closes the engine.

    `names` are those that clients may use for the model, the one to show first (the card's name if there are
    none). `slots` is how many sequences the engine decodes at once, to be shown. With `start_engine` the model
    is loaded when the application starts; otherwise every route answers "Loading model" until
    ``app[SERVICE].start()`` is called. Run it with handler cancellation (see `serve_site`), or a client that
    leaves is only noticed at the next write. `setup` is what a model of Ollama's sets besides its weights.
    """
    app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY)
    service = Service(engine, names, slots, setup)
    app[SERVICE] = service

    async def life(_: web.Application) -> AsyncIterator[None]:
        if start_engine:
            await service.start()
        yield
        await service.aclose()

    app.cleanup_ctx.append(life)
    for path, handler in POST.items():
        app.router.add_post(path, handler)
    for path, handler in GET.items():
        app.router.add_get(path, handler)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into a reply of the route's dialect."""
    family = family_of(request.path)
    try:
        return await handler(request)
    except SpecproxyError as error:
        return error_response(family, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = "File Not Found" if error.status == 404 else error.reason
        return error_response(family, RequestError(message, status=error.status))
    except ConnectionError:
        raise
    except Exception as error:
        log.exception("request failed: %s %s", request.method, request.path)
        return error_response(family, error)


async def _report(request: web.Request) -> web.StreamResponse:
    """The engine's report on a request that has ended; it can be fetched once."""
    report = request.app[SERVICE].take_report(request.match_info["request_id"])
    if report is None:
        raise RequestError("there is no report for this request", status=404)
    return web.Response(body=encode_report(report), content_type="application/json")


async def _pulse(request: web.Request) -> web.StreamResponse:
    """For the watchdog: how long the decode that runs now has taken, in seconds; 0 between decodes."""
    return json_response({"step_s": request.app[SERVICE].engine.step_s})


POST: Mapping[str, Handler] = {
    "/v1/chat/completions": api_chat.chat_completions,
    "/chat/completions": api_chat.chat_completions,
    "/v1/completions": api_completions.completions,
    "/v1/embeddings": api_completions.embeddings,
    "/embeddings": api_completions.embeddings,
    "/v1/responses": api_responses.responses,
    "/responses": api_responses.responses,
    "/v1/messages": api_anthropic.messages,
    "/v1/messages/count_tokens": api_anthropic.count_tokens,
    "/completion": api_llamacpp.completion,
    "/completions": api_llamacpp.completion,
    "/tokenize": api_llamacpp.tokenize,
    "/detokenize": api_llamacpp.detokenize,
    "/apply-template": api_llamacpp.apply_template,
    "/api/chat": api_ollama.chat,
    "/api/generate": api_ollama.generate,
    "/api/embed": api_ollama.embed_many,
    "/api/embeddings": api_ollama.embed_one,
    "/api/show": api_ollama_models.show,
}

GET: Mapping[str, Handler] = {  # HEAD too
    "/": api_ollama_models.greeting,
    "/api/version": api_ollama_models.version,
    "/api/tags": api_ollama_models.tags,
    "/api/ps": api_ollama_models.ps,
    "/v1/models": api_completions.models,
    "/models": api_completions.models,
    "/health": api_llamacpp.health,
    "/v1/health": api_llamacpp.health,
    "/props": api_llamacpp.props,
    "/slots": api_llamacpp.slots,
    "/metrics": api_llamacpp.metrics,
    REPORTS_PATH + "{request_id}": _report,
    PULSE_PATH: _pulse,
}


async def serve_site(app: web.Application, site: Callable[[web.AppRunner], web.BaseSite]) -> web.AppRunner:
    """Start serving; `site` makes the listener. The runner's `cleanup` stops everything."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=True)
    await runner.setup()
    try:
        await site(runner).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner
