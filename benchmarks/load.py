"""Load on a server: many clients at a time, good and bad requests, and what became of them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from PIL import Image

SIDES = (16, 28, 64, 200, 512, 1024)  # of the images, in pixels
_WAIT = 120.0  # seconds: no request may take longer, answered or not
_BOUNDARY = "a-boundary-of-forms"

Fate = Literal["answered", "left", "refused", "closed", "silent"]


class Call(NamedTuple):
    """A request to send.

    Args:
        kind: what is special about it.
        content: head and body.
        expected: the status of the answer.
        leaves: seconds after which the client leaves; 0 waits for the answer.
    """

    kind: str
    content: bytes
    expected: int
    leaves: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a request.

    Args:
        call: the request.
        fate: `refused` found no listener; `closed` got no byte of an answer; `silent` is none of
            the others within the time to wait.
        status: of the answer.
        seconds: until the answer was complete.
    """

    call: Call
    fate: Fate
    status: int = 0
    seconds: float = 0.0


def make_calls(count: int, seed: int = 0, bad: float = 0.05, leaving: float = 0.01) -> list[Call]:
    """Return requests in random order: images of mixed sizes as forms and JSON, and bad ones.

    Args:
        count: of all requests.
        seed: of the order.
        bad: fraction of malformed ones.
        leaving: fraction of clients that leave before the answer.
    """
    rng = random.Random(seed)
    good, wrong = _good_contents(), _bad_calls()
    n_bad, n_leaving = round(count * bad), round(count * leaving)
    calls = [wrong[k % len(wrong)] for k in range(n_bad)]
    calls += [
        Call("leaving", rng.choice(good), 200, rng.uniform(0.001, 0.05)) for _ in range(n_leaving)
    ]
    calls += [Call("good", good[k % len(good)], 200) for k in range(count - len(calls))]
    rng.shuffle(calls)
    return calls


async def send_all(port: int, calls: Sequence[Call], at_a_time: int = 50) -> list[Outcome]:
    """Send requests to a server on this machine, each in a connection of its own."""
    rest, outcomes = iter(calls), list[Outcome]()

    async def client() -> None:
        for call in rest:
            outcomes.append(await send(port, call))

    await asyncio.gather(*(client() for _ in range(at_a_time)))
    return outcomes


async def send(port: int, call: Call) -> Outcome:
    """Send one request; return what became of it."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(_WAIT):
            fate, status = await _exchange(port, call)
    except TimeoutError:
        fate, status = "silent", 0
    return Outcome(call, fate, status, time.monotonic() - began)


async def _exchange(port: int, call: Call) -> tuple[Fate, int]:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return "refused", 0
    try:
        writer.write(call.content)
        if call.leaves:
            await asyncio.sleep(call.leaves)
            return "left", 0
        await writer.drain()
        answer = await reader.read()  # until the server closes
    except OSError:
        return "closed", 0
    finally:
        writer.close()
    return _parse(answer)


def _parse(answer: bytes) -> tuple[Fate, int]:
    """Return the status of a complete answer in JSON."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not body:
        return "closed", 0
    try:
        json.loads(body)
    except ValueError:  # cut off
        return "closed", 0
    return "answered", int(head.split(b" ", 2)[1])


def count_outcomes(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return how many requests had which kind and ending."""
    keys = (f"{o.call.kind}: {o.status or o.fate}" for o in outcomes)
    return dict(sorted(Counter(keys).items()))


def unexpected(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return requests without the answer that they should have."""
    return [
        o
        for o in outcomes
        if o.fate != ("left" if o.call.leaves else "answered")
        or (o.fate == "answered" and o.status != o.call.expected)
    ]


def picture(side: int, form: str, seed: int = 0) -> bytes:
    """Return an image file of a square of random blocks."""
    small = Image.frombytes("RGB", (8, 8), random.Random(seed).randbytes(192))
    buffer = io.BytesIO()
    small.resize((side, side), Image.Resampling.NEAREST).save(buffer, form)
    return buffer.getvalue()


def image_bomb(side: int = 60_000) -> bytes:
    """Return a small PNG file whose header promises a huge image."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def post(content_type: str, body: bytes, length: int | None = None) -> bytes:
    """Return a request to predict with its head."""
    size = len(body) if length is None else length
    head = (
        f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + body


def form(content: bytes, name: str = "image") -> bytes:
    """Return a request with a file in a form."""
    head = (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="a"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    body = head.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()
    return post(f"multipart/form-data; boundary={_BOUNDARY}", body)


def _good_contents() -> list[bytes]:
    contents = []
    for k, side in enumerate(SIDES):
        for format in ("PNG", "JPEG"):
            file = picture(side, format, k)
            text = json.dumps({"image": base64.b64encode(file).decode()})
            contents += [form(file), post("application/json", text.encode())]
    return contents


def _bad_calls() -> list[Call]:
    file = picture(64, "PNG")
    return [
        Call("not JSON", post("application/json", b'{"image": '), 422),
        Call("another type", post("text/plain", b"hello"), 415),
        Call("not an image", form(b"hello"), 415),
        Call("a torn image", form(file[: len(file) // 2]), 422),
        Call("an unknown field", form(file, "picture"), 422),
        Call("an image bomb", form(image_bomb()), 413),
        Call("too large", post("application/json", b"x" * 100, 10**9), 413),
        Call("deep JSON", post("application/json", b"[" * 100_000), 422),
    ]
