"""`ragen_pl.serve` from its config: model, engine, endpoint and the loop that answers. Imported late."""

from __future__ import annotations

import logging
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from types import FrameType

from omegaconf import DictConfig

from ragen_pl.agent_programs.serving.server import AgentServer
from ragen_pl.agent_programs.serving.session import Event, EventKind, Session, SessionLimits
from ragen_pl.assembly.build import build_context, build_engine, device_named, episode_settings
from ragen_pl.assembly.weights import load_bundle
from ragen_pl.config.settings import read_settings
from ragen_pl.deployment.answering import PolicyAnswers
from ragen_pl.deployment.checks import client_keys, open_socket
from ragen_pl.deployment.histories import Histories
from ragen_pl.deployment.settings import ServeSettings

log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BUSY = 429
# of a continuous engine, between two looks at what has finished
_SHORT_S = 0.002


def serve(cfg: DictConfig) -> None:
    """Load the policy and answer requests until SIGINT or SIGTERM.

    Raises:
        ConfigError: The weights can't be loaded, or the address is taken.
    """
    log.info("loading the model")
    bundle = load_bundle(cfg).to(device_named(cfg.device))
    context = build_context(bundle, cfg.context)
    settings = read_settings(ServeSettings, cfg)
    histories = Histories(
        max_calls=settings.history_calls, max_bytes=settings.history_mb * 1024 * 1024
    )
    with closing(build_engine(cfg.rollout.engine, bundle)) as engine:
        engine.load_weights(0)
        answers = PolicyAnswers(
            engine,
            context,
            settings=episode_settings(cfg.rollout),
            histories=histories,
        )
        server = AgentServer(listening=open_socket(settings), host=settings.host)
        with closing(server):
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            sessions = open_sessions(
                server, settings, limits=limits_of(settings, cfg.env), events=events
            )
            for line in usage(server.url, settings):
                print(line, flush=True)
            with ended_by_signals(events):
                answer_events(events, answers, continuous=engine.continuous)
            log.info("ending")
            for session in sessions:
                server.end(session)


def limits_of(settings: ServeSettings, env: DictConfig) -> SessionLimits:
    """Return the limits of a session; a format of responses that is null is that of the environment."""
    kwargs = env.get("kwargs") or {}
    response_format = settings.response_format or kwargs.get("response_format")
    return SessionLimits(
        open_requests=settings.open_requests,
        busy_status=_BUSY,
        unconstrained=response_format == "unconstrained",
        sampling=True,
    )


def open_sessions(
    server: AgentServer,
    settings: ServeSettings,
    *,
    limits: SessionLimits,
    events: queue.SimpleQueue[Event],
) -> list[Session]:
    """Open a session for each key, or one for all clients where there are no keys."""
    keys, name = client_keys(settings), settings.served_name
    if not keys:
        session = Session(server.loop, limits=limits, model=name, events=events)
        server.open_to_all(session)
        return [session]
    sessions = [
        Session(server.loop, limits=limits, model=name, events=events, key=key) for key in keys
    ]
    for session in sessions:
        server.open(session)
    return sessions


def usage(url: str, settings: ServeSettings) -> Iterator[str]:
    """Yield lines that say where the policy is, and two commands that ask it."""
    variable = settings.keys[0] if settings.keys else None
    header = f'-H "Authorization: Bearer ${variable}" ' if variable else ""
    key = f"os.environ['{variable}']" if variable else "'none'"
    body = '{"messages": [{"role": "user", "content": "hello"}]}'
    yield f"serving    {settings.served_name} at {url}"
    yield (
        f"curl       curl {url}/chat/completions {header}-H 'Content-Type: application/json' -d '{body}'"
    )
    yield (
        f"openai     python -c \"import openai, os; print(openai.OpenAI(base_url='{url}', api_key={key})"
        f".chat.completions.create(model='{settings.served_name}', messages=[dict(role='user', content='hello')])"
        '.choices[0].message.content)"'
    )


@contextmanager
def ended_by_signals(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Put an `EXIT` event into a queue at the first SIGINT or SIGTERM. A second one ends the process at once."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        events.put(Event(EventKind.EXIT))

    for number in _SIGNALS:
        signal.signal(number, end)
    try:
        yield
    finally:
        restore()


def answer_events(
    events: queue.SimpleQueue[Event], answers: PolicyAnswers, *, continuous: bool
) -> None:
    """Answer requests until an `EXIT` event."""
    while True:
        for event in _taken(events, wait=not answers.busy, short=continuous):
            if event.kind is EventKind.EXIT:
                return
            assert event.call is not None
            if event.kind is EventKind.REQUEST:
                answers.ask(event.call)
            elif event.kind is EventKind.DELIVERED:
                answers.delivered(event.call)
        if answers.busy:
            answers.work()


def _taken(events: queue.SimpleQueue[Event], *, wait: bool, short: bool) -> Sequence[Event]:
    """Return all events that are there.

    Args:
        events: The events.
        wait: Whether to wait for one.
        short: Whether else to wait for a moment.
    """
    taken = []
    try:
        if wait:
            taken.append(events.get())
        elif short:
            taken.append(events.get(timeout=_SHORT_S))
        while True:
            taken.append(events.get_nowait())
    except queue.Empty:
        return taken
