"""Requests that the server refuses, and what happens to the others."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import pytest
from PIL import Image

from benchmarks.load import image_bomb
from deq_zoo.cli import main
from deq_zoo.packages import install
from tests.waiting import wait_for
from tests.zoo.served import as_file

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from deq_zoo.serving.app import make_app
from deq_zoo.serving.limits import Limits, Refusal
from deq_zoo.serving.reading import decode_image, read_values
from deq_zoo.serving.service import Field
from tests.zoo.serving.slow_service import SlowService

LIMITS = Limits(queue=1, max_bytes=2_000_000, max_pixels=10_000, time_limit=20.0)
IMAGE = (Field("image", "image", "a picture"),)
FILE = as_file(Image.effect_noise((60, 60), 50))
JSON = {"content-type": "application/json"}


@pytest.fixture
def service() -> Iterator[SlowService]:
    service = SlowService()
    yield service
    service.go.set()  # no thread may be left waiting


@pytest.fixture
def client(service: SlowService) -> Iterator[TestClient]:
    service.go.set()
    with TestClient(make_app(service, "slow", LIMITS)) as client:
        yield client


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        ({"content": b"hello", "headers": {"content-type": "text/plain"}}, 415, "text/plain"),
        ({"content": b"hello"}, 415, "no Content-Type"),
        ({"content": b'{"text":', "headers": JSON}, 422, "not valid JSON"),
        ({"content": b"[" * 100_000, "headers": JSON}, 422, "not valid JSON"),
        ({"content": b"\xff\xfe", "headers": JSON}, 422, "not valid JSON"),
        ({"content": b'{"text": "a", "list": [NaN]}', "headers": JSON}, 422, "NaN"),
        ({"json": ["text"]}, 422, "expected a JSON object"),
        ({"json": {}}, 422, "missing field 'text'"),
        ({"json": {"txt": "a"}}, 422, "did you mean 'text'"),
        ({"json": {"text": 3}}, 422, "takes text, got int"),
        ({"content": b'{"text": "\\ud800"}', "headers": JSON}, 422, "not UTF-8"),
        ({"json": {"text": "a", "list": 3}}, 422, "takes a list"),
        ({"data": {"text": "a", "list": "[1,"}, "files": {"x": b""}}, 422, "unknown field 'x'"),
        ({"files": {"text": b"\xff"}}, 422, "not UTF-8"),
        ({"files": [("text", b"a"), ("text", b"b")]}, 422, "comes twice"),
        ({"content": b"--", "headers": {"content-type": "multipart/form-data"}}, 422, "boundary"),
        ({"content": b"x" * 2_000_001, "headers": JSON}, 413, "larger than 2000000 bytes"),
    ],
)
def test_a_bad_request_gets_a_clear_answer(
    client: TestClient, given: dict[str, Any], status: int, message: str
) -> None:
    response = client.post("/predict", **given)
    assert response.status_code == status
    assert message in response.json()["error"]
    good = client.post("/predict", json={"text": "good"})
    assert good.json()["prediction"] == "GOOD"


def test_a_body_of_unknown_length_is_refused_when_it_grows(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (b"x" * 100_000 for _ in range(50))

    assert client.post("/predict", content=chunks(), headers=JSON).status_code == 413


@pytest.mark.parametrize(
    ("value", "status", "message"),
    [
        (image_bomb(), 413, "too large"),
        (image_bomb(101), 413, "101 x 101 pixels"),
        (FILE[: len(FILE) // 2], 422, "cannot read the image"),
        (b"GIF89a" + bytes(100), 415, "PNG or JPEG"),
        (b"", 415, "PNG or JPEG"),
        ("no base64!", 422, "not valid base64"),
        ([1, 2], 422, "in base64"),
    ],
)
def test_a_bad_image_is_refused(value: Any, status: int, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        read_values({"image": value}, IMAGE, LIMITS)
    assert caught.value.status == status


def test_a_large_image_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any) -> None:
        raise AssertionError("the image was decoded")

    monkeypatch.setattr("deq_zoo.serving.reading.read_image", decode)
    with pytest.raises(Refusal, match="200 x 100"):
        decode_image(as_file(Image.new("L", (200, 100))), LIMITS)


def test_a_full_queue_refuses_and_accepts_again(service: SlowService) -> None:
    app = make_app(service, "slow", LIMITS)  # one is solved, one waits
    with TestClient(app) as client, ThreadPoolExecutor(2) as pool:
        send: Callable[[], Any] = lambda: client.post("/predict", json={"text": "a"})  # noqa: E731
        first = pool.submit(send)
        assert service.started.acquire(timeout=20)
        second = pool.submit(send)
        wait_for(lambda: client.get("/metrics").json()["waiting"] == 1)
        refused = send()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "2 requests are being served" in refused.json()["error"]
        service.go.set()
        assert [f.result(20).status_code for f in (first, second)] == [200, 200]
        assert send().status_code == 200


def test_the_time_limit_ends_a_request_and_its_place_is_free(service: SlowService) -> None:
    app = make_app(service, "slow", Limits(queue=0, time_limit=0.3))
    with TestClient(app) as client:
        late = client.post("/predict", json={"text": "a"})
        assert late.status_code == 504
        assert "within 0.3 s" in late.json()["error"]
        assert client.get("/metrics").json()["waiting"] == 0
        service.go.set()
        wait_for(lambda: client.get("/metrics").json()["busy"] == 0)
        assert client.post("/predict", json={"text": "a"}).status_code == 200


def test_an_upload_that_stops_ends_at_the_time_limit(service: SlowService) -> None:
    app = make_app(service, "slow", Limits(time_limit=0.2))
    status = asyncio.run(exchange(app, [part(b"{", more=True)]))
    assert status == 408


def test_a_client_that_leaves_frees_its_place(service: SlowService) -> None:
    app = make_app(service, "slow", Limits(queue=0, time_limit=20))
    handler = app.state.handler
    body = part(json.dumps({"text": "a"}).encode())

    async def leave_twice() -> list[int]:
        gone = {"type": "http.disconnect"}
        return [await exchange(app, [body, gone]), await exchange(app, [part(b"{", True), gone])]

    assert asyncio.run(leave_twice()) == [499, 499]
    assert handler._inside == 0
    service.go.set()


def test_a_failure_is_logged_without_the_input(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        response = client.post("/predict", json={"text": "break"})
    assert response.status_code == 500
    assert "break" not in response.text
    own = [record.getMessage() for record in caplog.records if record.name == "deq_zoo"]
    assert len(own) == 1
    assert own[0].startswith("a request failed: RuntimeError at ")
    assert "luck" not in caplog.text


def test_uploads_never_become_files(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def rollover(*_: Any) -> None:
        raise AssertionError("an upload became a file")

    monkeypatch.setattr(SpooledTemporaryFile, "rollover", rollover)
    response = client.post("/predict", files={"text": b"a" * 1_900_000})
    assert len(response.json()["prediction"]) == 1_900_000


def test_a_form_and_base64_hold_the_same_image() -> None:
    text = base64.b64encode(FILE).decode()
    a, b = (read_values({"image": x}, IMAGE, LIMITS)["image"] for x in (FILE, text))
    assert a.shape == (3, 60, 60)
    assert a.equal(b)


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "python_multipart"])
def test_a_missing_package_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["serve", "runs/none"]) == 2
    assert f"servers need {package}: {install('serve')}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", "0"], "from 1 on"),
        (["--time-limit", "-1"], "above 0"),
        (["--max-byte", "3"], "--max-bytes"),
        (["--port", "http"], "whole number"),
        ([], "no run folder or checkpoint"),
    ],
)
def test_a_wrong_argument_is_explained(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "none"), *words]) == 2
    assert message in capsys.readouterr().err


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def exchange(app: FastAPI, messages: list[dict[str, Any]]) -> int:
    """Send messages of a client to an application; return the status of the answer."""
    rest, statuses = iter(messages), list[int]()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        for message in rest:
            return message
        return await asyncio.sleep(60, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": "/predict", "raw_path": b"/predict", "query_string": b"",
        "root_path": "", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await app(scope, receive, send)
    return statuses[0]
