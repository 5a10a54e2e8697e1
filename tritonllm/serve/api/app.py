"""The HTTP API: which path leads where."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from tritonllm.serve.api.admin_api import add_admin
from tritonllm.serve.api.answering import Service, unless_disconnected
from tritonllm.serve.api.chat_api import chat, tokens_of_chat
from tritonllm.serve.api.completions_api import complete
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.api.errors import APIError, as_api_error, error_response, unreadable_body, validation_error
from tritonllm.serve.api.generate_api import generate
from tritonllm.serve.api.guard import Guard
from tritonllm.serve.api.large_bodies import route_for_large_bodies
from tritonllm.serve.api.messages_api import count_tokens, message
from tritonllm.serve.api.messages_protocol import CountRequest, MessagesRequest
from tritonllm.serve.api.metrics import ServerMetrics
from tritonllm.serve.api.pooling_api import add_pooling
from tritonllm.serve.api.profile_api import add_profile
from tritonllm.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from tritonllm.serve.api.replies import as_json, now
from tritonllm.serve.api.responses_api import respond_to
from tritonllm.serve.api.responses_protocol import ResponsesRequest
from tritonllm.serve.api.status_api import add_status
from tritonllm.serve.api.tracing import Observers, Traces, WithParent, make_provider
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.engines.shared_count import SharedCount
from tritonllm.serve.engines.tokenizing import TOKEN_CHARACTERS
from tritonllm.version import __version__

logger = logging.getLogger(__name__)


def make_app(
    llm: AsyncLLM, config: ServerConfig, metrics_folder: str | None = None, running: SharedCount | None = None
) -> FastAPI:
    """The application over a started engine.

    Args:
        metrics_folder: where several processes with this application count together.
        running: counts their requests; by default those of this process.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        llm.attach()
        yield
        if traces is not None:
            await asyncio.to_thread(traces.close)

    app = FastAPI(
        title="tritonllm",
        version=__version__,
        root_path=config.root_path,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.router.route_class = route_for_large_bodies()
    app.state.draining, running = False, running or SharedCount()
    metrics = ServerMetrics(llm, config.model_names[0], metrics_folder)
    service = Service(llm, config, metrics.ignored)
    traces = None
    if config.otlp_traces_endpoint is not None:
        traces = Traces(make_provider(config.otlp_traces_endpoint, "tritonllm"), config.model_names[0])
        llm.observer = Observers(metrics, traces)
        app.add_middleware(WithParent)
    _add_errors(app)
    _add_answers(app, service)  # first: paths are looked for in this order, 3 us each
    add_status(app, llm, metrics, running)
    _add_models(app, service)
    _add_tokenizer(app, service)
    if config.enable_tokenizer_info_endpoint:
        _add_tokenizer_info(app, service)
    add_pooling(app, service)
    if config.server_dev_mode:
        add_admin(app, llm, bool(config.api_keys))
    add_profile(app, llm, config)

    app.add_middleware(Guard, config=config, running=running)
    if config.allowed_origins:
        _allow_origins(app, config.allowed_origins)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await complete(service, request, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await chat(service, request, body)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await respond_to(service, request, body)

    @app.post("/v1/messages")
    async def messages(request: Request, body: MessagesRequest) -> Response:
        return await message(service, request, body)

    @app.post("/generate")
    async def generate_texts(request: Request, body: GenerateRequest) -> Response:
        return await generate(service, request, body)

    @app.post("/v1/messages/count_tokens")
    async def messages_count_tokens(request: Request, body: CountRequest) -> Response:
        return await count_tokens(service, request, body)


def _allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins ask, before all else: a browser's question whether it may ask brings no key, and the
    answer to a request that was refused must be readable, too."""
    readable = ["X-Request-Id", "Retry-After"]
    app.add_middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=readable
    )


def _add_errors(app: FastAPI) -> None:
    async def expected(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error, request), request.url.path)

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("request %s failed", getattr(request.state, "request_id", "?"), exc_info=error)
        return error_response(as_api_error(error), request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error, request), request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if unreadable := unreadable_body(error):
            return error_response(unreadable, path)
        response = error_response(APIError(error.status_code, f"{request.method} {path}: {error.detail}"), path)
        response.headers.update(error.headers or {})  # of 405: what is allowed
        return response

    for kind in (APIError, ValueError, RuntimeError):
        app.add_exception_handler(kind, expected if kind is not RuntimeError else _runtime(expected, unexpected))
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def _runtime(expected: Any, unexpected: Any) -> Any:
    """A full queue and a dead engine are RuntimeErrors that a handler expects; others are faults of ours."""

    async def handle(request: Request, error: Exception) -> Response:
        known = as_api_error(error).status < 500 or as_api_error(error).status == 503
        return await (expected if known else unexpected)(request, error)

    return handle


def _add_models(app: FastAPI, service: Service) -> None:
    created = now()

    def entry(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "tritonllm",
            "root": service.llm.config.model.model,
            "parent": None,
            "max_model_len": service.llm.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [entry(name) for name in service.config.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(entry(service.check_model(name)))


def _tokenizer_of(service: Service) -> Any:
    """The tokenizer that the server reads texts with.

    Raises:
        APIError: there is none.
    """
    if service.llm.inputs.tokenizer is None:
        raise APIError(400, "this server has no tokenizer: it works with token ids")
    return service.llm.inputs.tokenizer


def _add_tokenizer_info(app: FastAPI, service: Service) -> None:
    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        tokenizer = _tokenizer_of(service)
        told = {"tokenizer_class": type(tokenizer).__name__} | _plain(tokenizer.init_kwargs)
        template = service.config.chat_template or tokenizer.chat_template
        return JSONResponse(told | ({} if template is None else {"chat_template": template}))


def _plain(value: Any) -> Any:
    """What JSON can say of a tokenizer's arguments: of an added token its fields, of other objects their text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    state = getattr(value, "__getstate__", lambda: None)()
    return _plain(state) if isinstance(state, dict) else str(value)


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    llm = service.llm

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        service.accept(request, body)
        _tokenizer_of(service)
        if (text := body.prompt) is not None:
            encoded = llm.with_tokenizer(len(text), lambda inputs: inputs.encode(text, body.add_special_tokens))
            ids = await unless_disconnected(request, encoded)
        else:
            ids = await tokens_of_chat(service, request, body)
        texts = None
        if body.return_token_strs:
            size = TOKEN_CHARACTERS * len(ids)
            converted = llm.with_tokenizer(size, lambda inputs: inputs.tokenizer.convert_ids_to_tokens(ids))
            texts = await unless_disconnected(request, converted)
        answer = {"count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids, "token_strs": texts}
        return Response(as_json(answer), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        service.accept(request, body)
        _tokenizer_of(service)
        llm.inputs.check_ids(body.tokens, "tokens")
        size = TOKEN_CHARACTERS * len(body.tokens)
        decoded = llm.with_tokenizer(size, lambda inputs: inputs.tokenizer.decode(body.tokens))
        text = await unless_disconnected(request, decoded)
        return JSONResponse({"prompt": text})
