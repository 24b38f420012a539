"""`deq-zoo serve`: a process that serves one model until a signal ends it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from importlib import import_module
from types import FrameType
from typing import Any

from deq_zoo.errors import ZooError
from deq_zoo.family import find_family
from deq_zoo.model import Model
from deq_zoo.packages import optional
from deq_zoo.serving.limits import Limits
from deq_zoo.serving.service import Service
from deq_zoo.signals import handling

_PACKAGES = ("fastapi", "uvicorn", "python_multipart")
_GRACE = 5.0  # seconds beyond the time limit of requests until the server ends regardless


def check_packages() -> None:
    """Raise `MissingPackage` unless all packages of the server are installed."""
    for package in _PACKAGES:
        optional(package, "serve", "servers")


def make_service(model: Model, name: str) -> Service[Any]:
    """Return the service of a model.

    Args:
        model: in evaluation mode, on its device.
        name: of its preset.
    """
    module = find_family(name).service
    if not module:
        raise ZooError(f"{name} cannot be served: its family has no service")
    service: Service[Any] = import_module(module).make_service(model)
    return service


def serve(model: Model, name: str, limits: Limits, host: str, port: int) -> int:
    """Serve a model until SIGTERM or Ctrl-C; return the exit code.

    A signal ends the listening. Requests that were accepted get their answers, within the time
    limit of requests.

    Args:
        model: in evaluation mode, on its device.
        name: of its preset.
        limits: of the server.
        host: the address to listen at.
        port: 0 chooses a free one.
    """
    check_packages()
    import uvicorn

    from deq_zoo.serving.app import make_app

    app = make_app(make_service(model, name), name, limits)
    config = uvicorn.Config(
        app, http="h11", loop="asyncio", ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=int(limits.time_limit + _GRACE),
    )  # fmt: skip
    server = uvicorn.Server(config)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True  # a signal before uvicorn handles them, or that it passes on

    with handling(stop, signal.SIGTERM, signal.SIGINT), _listen(host, port) as listener:
        address, bound = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        print(f"serving {name} at http://{shown}:{bound} until Ctrl-C", flush=True)
        server.run(sockets=[listener])
    print(f"deq-zoo: {app.state.handler.metrics.summary()}", file=sys.stderr, flush=True)
    if not app.state.idle:  # a solve beyond its time limit, which nobody waits for
        os._exit(0)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ZooError(f"cannot listen at {host}, port {port}: {error}") from error
