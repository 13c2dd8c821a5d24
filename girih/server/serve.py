"""The server's life: bring the engine up, listen, and end in order, whatever ends it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn

from girih.checkpoint.chat_template import read_template
from girih.config import EngineConfig
from girih.engine.async_llm import AsyncLLM
from girih.errors import ConfigError
from girih.server.app import make_app
from girih.server.config import ServerConfig
from girih.server.connection import Connection
from girih.server.metrics import Metrics
from girih.server.serving import Serving
from girih.server.tracing import Tracer

logger = logging.getLogger(__name__)

EXIT_ENGINE_DIED = 1
EXIT_ABORTED = 3
BACKLOG = 2048
MAX_OPEN_FILES = 1 << 16


def serve(engine_config: EngineConfig, config: ServerConfig, model_name: str) -> int:
    """Serve until told to end, or until the engine dies.

    Args:
        engine_config: the engine's options.
        config: the server's.
        model_name: what requests call the model, unless the config names it.

    Returns:
        The exit code: 0 when it was told to end and all requests were answered.

    Raises:
        GirihError: the engine cannot be brought up, or the port is taken.
    """
    import uvloop

    _allow_open_files()
    return uvloop.run(_serve(engine_config, config, model_name))


async def _serve(engine_config: EngineConfig, config: ServerConfig, model_name: str) -> int:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(config))  # before a model is loaded: a port that is taken is told at once
        engine = AsyncLLM(with_kv_events(engine_config, config), restart=config.restart_engine)
        if config.chat_template is not None:
            engine.tokenizer.chat_template = read_template(config.chat_template)
        names = config.served_model_name or (model_name,)
        _publish_kv_events(engine, config, stack)
        metrics, tracer = Metrics(engine, names[0]), _make_tracer(config, names[0], stack)
        server = Server(make_app(Serving(engine, config, names, metrics, tracer)), config, engine)
        try:
            await _start_unless_told_to_end(engine, server)
            if server.should_exit:
                return EXIT_ABORTED
            host, port = listener.getsockname()[:2]
            _start_listening(listener, config)
            _announce(engine, names[0], host, port)
            return await server.run(listener, metrics)
        finally:
            await engine.shutdown()


def with_kv_events(engine_config: EngineConfig, config: ServerConfig) -> EngineConfig:
    """Return the engine's options for a server that publishes KV events, or does not."""
    return dataclasses.replace(engine_config, kv_events=engine_config.kv_events or bool(config.kv_events_endpoint))


def _publish_kv_events(engine: AsyncLLM, config: ServerConfig, stack: contextlib.ExitStack) -> None:
    """Let KV events go where they are wanted; one publisher outlives the engines, so that its numbers go on."""
    if config.kv_events_endpoint is None:
        return
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError("--kv-events-endpoint needs ZeroMQ: pip install 'girih[events]'")
    from girih.server.kv_events import KVEventPublisher

    publisher = KVEventPublisher(
        endpoint=config.kv_events_endpoint,
        replay_endpoint=config.kv_events_replay_endpoint,
        topic=config.kv_events_topic,
    )
    stack.callback(publisher.close)
    engine.on_kv_events = publisher.publish


def _make_tracer(config: ServerConfig, model_name: str, stack: contextlib.ExitStack) -> Tracer | None:
    if config.otlp_endpoint is None:
        return None
    tracer = Tracer(config.otlp_endpoint, model_name)
    stack.callback(tracer.close)
    return tracer


async def _start_unless_told_to_end(engine: AsyncLLM, server: Server) -> None:
    start = asyncio.create_task(engine.start())
    told = asyncio.create_task(server.told_to_end.wait())
    await asyncio.wait((start, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if start.done():
        start.result()
    else:
        start.cancel()


def _allow_open_files() -> None:
    """Take as many as the system gives: what most shells start with is less than the clients that may wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextlib.contextmanager
def listen(config: ServerConfig) -> Iterator[socket.socket]:
    """Take the port.

    Raises:
        ConfigError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except (OSError, OverflowError) as error:
            raise _cannot_listen(config, error) from error
        listener.setblocking(False)
        yield listener


def _start_listening(listener: socket.socket, config: ServerConfig) -> None:
    """Let clients connect, now that they can be answered.

    Raises:
        ConfigError: a server that was started at the same time was faster.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(config, error) from error


def _cannot_listen(config: ServerConfig, error: Exception) -> ConfigError:
    return ConfigError(f"cannot listen on {config.host} port {config.port}: {error}; choose another --host or --port")


class Server(uvicorn.Server):
    """uvicorn, ended by our rules: the first signal lets requests finish, the second one ends them.

    Args:
        app: the application.
        config: the server's options.
        engine: when it dies, the server ends.
    """

    def __init__(self, app: object, config: ServerConfig, engine: AsyncLLM):
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=Connection,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=BACKLOG,
                server_header=False,
                timeout_graceful_shutdown=None,
            )
        )
        self.told_to_end = asyncio.Event()
        self._limits = config
        self._engine = engine
        self._exit_code = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def run(self, listener: socket.socket, metrics: Metrics) -> int:  # type: ignore[override]
        """Serve until the end; returns the exit code."""
        others = [asyncio.create_task(self._end_with_engine()), asyncio.create_task(metrics.keep_up())]
        try:
            await self.serve(sockets=[listener])
        finally:
            for task in others:
                task.cancel()
        return self._exit_code

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_on_signal`."""
        yield

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        self.told_to_end.set()
        if not self.should_exit:
            waiting = self._engine.num_unfinished
            logger.warning("%s: no new requests; %d sequences may finish; a second signal ends them", name, waiting)
            self.should_exit = True
            asyncio.get_running_loop().call_later(self._limits.shutdown_timeout_s, self._end_now)
        else:
            self._end_now()

    def _end_now(self) -> None:
        """Answer what still runs with an error, and end."""
        if not self.force_exit and self._engine.num_unfinished:
            self._exit_code = self._exit_code or EXIT_ABORTED
            logger.warning("%d sequences are ended, as they did not finish in time", self._engine.num_unfinished)
        self._engine.fail_all("the server ends")
        self._cut_off_after(1.0)

    def _cut_off_after(self, seconds: float) -> None:
        """Give clients some time to read their answer; then close all connections, as some never read or write."""
        loop = asyncio.get_running_loop()

        def cut_off() -> None:
            for connection in self.server_state.connections:
                connection.transport.abort()
            loop.call_later(1.0, setattr, self, "force_exit", True)

        loop.call_later(seconds, cut_off)

    async def _end_with_engine(self) -> None:
        reason = await self._engine.wait_until_dead()
        logger.error("the engine has died, and so the server ends: %s", reason)
        self._exit_code = EXIT_ENGINE_DIED
        self.should_exit = True
        self._cut_off_after(4.0)


def _announce(engine: AsyncLLM, model: str, host: str, port: int) -> None:
    """Say that requests can come, and what there is for them."""
    from girih.units import format_bytes

    plan = engine.ready.kv_cache_configs
    pool = format_bytes(sum(config.pool_bytes for config in plan))
    place = f"[{host}]" if ":" in host else host
    logger.info(
        "%s is served at http://%s:%d/v1: requests of up to %d tokens, KV cache %s, ready after %.1f s",
        model, place, port, engine.max_model_len, pool, engine.ready.startup_report.total_s,
    )  # fmt: skip
