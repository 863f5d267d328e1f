"""`jpaged serve`: starts the engine process and the HTTP server, and ends both in order."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import uvicorn

from jpaged.checkpoint import open_checkpoint
from jpaged.sampling_params import read_generation_config
from server.app import Server, create_app
from server.engine_client import EngineClient, EngineState, Observer
from server.logs import set_up_logging
from server.messages import ModelSpec
from server.metrics import Metrics
from server.models import RESERVED_VARIABLES, Models, ServedModel
from server.options import Options, as_flags, jax_environment, read_options
from server.stats_log import log_stats
from server.tracing import Tracer

logger = logging.getLogger(__name__)

MISTAKE, FAILURE = 2, 1  # exit statuses
_LAST_WORDS_S = 5.0  # that /health tells why the engine has ended, before the server does too


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is told to stop; returns the exit status."""
    try:
        options = read_options(sys.argv[1:] if arguments is None else arguments, os.environ)
        set_up_logging(logging.getLevelNamesMapping()[options.args.log_level.upper()])
        _set_hub(options)
        served, specs = load_models(options)
        observers: list[Observer] = []
        if options.args.otlp_traces_endpoint:
            names = [spec.name for spec in specs]
            observers.append(Tracer(options.args.otlp_traces_endpoint, names))
        check_tls(options.args)
        listening = listen(options.host, options.port)
    except (ValueError, OSError) as error:
        print(f"jpaged: error: {error}", file=sys.stderr)
        return MISTAKE
    with listening, asyncio.Runner(loop_factory=_new_event_loop) as runner:
        status = runner.run(serve(options, served, specs, listening, observers))
    for observer in observers:
        observer.close()
    return status


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Uvloop's where it is, which is not on Windows; half the time for each event."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _set_hub(options: Options) -> None:
    """Where models are fetched to and with what token, for what reads the environment."""
    if options.args.hf_token:
        os.environ["HF_TOKEN"] = options.args.hf_token
    if options.args.download_dir:
        os.environ["HF_HUB_CACHE"] = options.args.download_dir


def load_models(options: Options) -> tuple[list[ServedModel], list[ModelSpec]]:
    """Opens every checkpoint, fetching what is not there, and reads tokenizers and defaults.

    Raises:
        ValueError: Naming what is wrong.
        OSError: If a model is not there.
    """
    args = options.args
    template = args.chat_template
    if template is not None and "{" not in template:
        template = Path(template).read_text(encoding="utf-8")
    kwargs = _read_json("--default-chat-template-kwargs", args.default_chat_template_kwargs)
    for name in kwargs.keys() & RESERVED_VARIABLES:
        raise ValueError(
            f"--default-chat-template-kwargs holds {name!r}, which is no variable of the "
            "template's own; leave it out"
        )
    overrides = _read_json("--override-generation-config", args.override_generation_config)
    if args.generation_config not in ("auto", "vllm"):
        raise ValueError(
            f"--generation-config is {args.generation_config!r}; it must be auto or vllm"
        )
    served: list[ServedModel] = []
    specs: list[ModelSpec] = []
    for index, model in enumerate(options.models):
        is_shown = sys.stderr.isatty()
        try:
            with open_checkpoint(
                model.path, revision=args.revision, show_progress=is_shown
            ) as checkpoint:
                tokenizer = checkpoint.tokenizer()
                own = checkpoint.generation_config if args.generation_config == "auto" else {}
        except (ValueError, OSError) as error:
            if len(options.models) == 1:
                raise
            raise ValueError(f"{model.names[0]} ({model.path}): {error}") from None
        served.append(
            ServedModel(
                index=index,
                names=model.names,
                path=model.path,
                tokenizer=tokenizer,
                defaults=read_generation_config(own | overrides),
                created=int(time.time()),
                chat_template=template,
                content_format=args.chat_template_content_format,
                trusts_templates=args.trust_request_chat_template,
                template_kwargs=kwargs,
                takes_priorities=args.scheduling_policy == "priority",
                max_logprobs=args.max_logprobs,
                stream_interval=args.stream_interval,
                always_includes_usage=args.enable_force_include_usage,
            )
        )
        specs.append(
            ModelSpec(
                name=model.names[0],
                path=model.path,
                revision=args.revision,
                config=options.engine,
                num_tokens_known=tokenizer.vocab_size,
                memory_share=model.memory_share,
                max_num_queued=args.max_num_queued_reqs,
            )
        )
    return served, specs


def _read_json(flag: str, text: str | None) -> dict[str, Any]:
    """A JSON object."""
    try:
        value: Any = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} is {text!r}; it must be a JSON object")
    return cast(dict[str, Any], value)


def check_tls(args: argparse.Namespace) -> None:
    """Tries what uvicorn is going to do with certificates, before minutes go into loading.

    Raises:
        ValueError: Naming the flag at fault.
    """
    if not args.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("--ssl-certfile and --ssl-keyfile",
         lambda: context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)),
        ("--ssl-ciphers", lambda: context.set_ciphers(args.ssl_ciphers)),
        ("--ssl-ca-certs",
         lambda: context.load_verify_locations(args.ssl_ca_certs) if args.ssl_ca_certs else None),
    )  # fmt: skip
    for flags, step in steps:
        try:
            step()
        except (OSError, ValueError) as error:
            raise ValueError(f"{flags} cannot be used: {error}") from None


def listen(host: str, port: int) -> socket.socket:
    """The socket, before minutes go into loading.

    Raises:
        OSError: If the address is taken, or is none of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen at {host}:{port}: {error.strerror or error}. Give another --port or "
            "--host, or end what listens there"
        ) from None
    return sock


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none."""
        yield


async def serve(
    options: Options,
    served: Sequence[ServedModel],
    specs: Sequence[ModelSpec],
    listening: socket.socket,
    observers: Sequence[Observer] = (),
) -> int:
    """Serves models; returns the exit status."""
    args = options.args
    metrics = Metrics([spec.name for spec in specs])
    client = EngineClient(
        specs,
        observers=[metrics, *observers],
        factory=args.engine_factory,
        environment=jax_environment(args),
    )
    metrics.states = client.states
    server = Server(Models(served, client), metrics, options.http)
    http = HttpServer(
        uvicorn.Config(
            create_app(server),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=args.timeout_keep_alive,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
            server_header=False,
        )
    )
    stop = asyncio.Event()
    _catch_signals(stop)
    await client.start()
    tasks = [
        asyncio.create_task(http.serve(sockets=[listening])),
        asyncio.create_task(metrics.watch_loop()),
    ]
    http_has_ended = asyncio.Event()
    tasks[0].add_done_callback(lambda _: http_has_ended.set())
    if args.log_stats_interval > 0:
        tasks.append(asyncio.create_task(log_stats(client, metrics, args.log_stats_interval)))
    address = listening.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    scheme = "https" if args.ssl_certfile else "http"
    logger.info("listening at %s://%s:%d; loading models", scheme, shown, address[1])
    status, problem = 0, None
    try:
        await _first_of(stop, client.is_up, http_has_ended)
        problem = _problem_at_start(client)
        if problem is None and not stop.is_set() and not http_has_ended.is_set():
            _report_start(client)
            await _first_of(stop, client.has_ended, client.is_down, http_has_ended)
            if not stop.is_set() and not http_has_ended.is_set():
                logger.error("an engine has ended; the server ends in %.0f s", _LAST_WORDS_S)
                status = FAILURE
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _LAST_WORDS_S)
        if http_has_ended.is_set() and not stop.is_set():
            logger.error("the HTTP server has ended by itself")
            status = FAILURE
        for task in tasks[2:]:
            task.cancel()
        await _drain(server, http, args.shutdown_timeout if status == 0 else 0.0)
    finally:
        await client.stop()
        http.should_exit = True
        with contextlib.suppress(SystemExit):  # uvicorn has said why
            await tasks[0]
        for task in tasks[1:]:
            task.cancel()
    if problem is not None:  # the last line, where people look
        reason = as_flags(problem.failure or "")
        print(f"jpaged: error: {problem.spec.name}: {reason}", file=sys.stderr)
        return MISTAKE if problem.is_mistake else FAILURE
    return status


def _catch_signals(stop: asyncio.Event) -> None:
    """The first signal stops in order, a second one at once."""

    def handle(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        logger.info("%s: stopping; once more ends at once", signal.Signals(number).name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _problem_at_start(client: EngineClient) -> EngineState | None:
    """The engine that could not be made, if there is one."""
    return next((state for state in client.states if state.failure is not None), None)


def _report_start(client: EngineClient) -> None:
    """Says what the engines have room for."""
    for state in client.states:
        limits = state.limits
        assert limits is not None
        concurrency = limits.num_blocks / limits.most_blocks
        logger.info(
            "%s: GPU KV cache size: %s tokens, Maximum concurrency for %s tokens per request: "
            "%.2fx",
            state.spec.name,
            f"{int(concurrency * limits.max_model_len):,}",
            f"{limits.max_model_len:,}",
            concurrency,
        )
    logger.info("ready: %s", ", ".join(state.spec.name for state in client.states))


async def _drain(server: Server, http: uvicorn.Server, timeout_s: float) -> None:
    """Takes nothing new, and gives what is being answered some time to end."""
    server.is_draining = True
    for listener in http.servers:
        listener.close()
    deadline = time.monotonic() + timeout_s
    while server.load and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if server.load:
        logger.warning("%d requests are ended before their time", server.load)
        server.models.client.abort_all()
    deadline = time.monotonic() + 2.0  # for those ends to be written
    while server.load and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    http.should_exit = True
    http.force_exit = True


if __name__ == "__main__":
    sys.exit(main())
