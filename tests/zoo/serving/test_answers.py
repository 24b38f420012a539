"""Answers of the server, beside those of `model.predict`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import deq_zoo
from tests.zoo.served import as_base64, as_file

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from fastapi.testclient import TestClient

from deq_zoo.mdeq.service import ImageClasses, make_service
from deq_zoo.serving.app import make_app
from deq_zoo.serving.engine import QueueEngine, StreamEngine, make_engine
from deq_zoo.serving.limits import Limits
from deq_zoo.serving.service import describe_stats
from deq_zoo.streaming import open_stream
from torchdeq import DEQConfig
from torchdeq.core import get_deq

LIMITS = Limits(slots=4, queue=60)


def image(seed: int, size: tuple[int, int] = (21, 30)) -> Image.Image:
    rng = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=rng, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def with_solver(model: Any, **options: Any) -> Any:
    """Return a model that solves in another way."""
    model.deq = get_deq(DEQConfig(on_failure="ignore", **options)).eval()
    return model


def expected(model: Any, x: Image.Image) -> dict[str, Any]:
    out = model.predict(x)
    found = out.prediction
    return {
        "prediction": found.label,
        "probability": found.probability,
        "probabilities": dict(found.probabilities),
        "inverted": found.inverted,
        "drawn": found.drawn,
        **describe_stats(out.stats),
    }


def assert_same(answer: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare answers: numbers up to the rounding of batches of different size."""
    assert answer.keys() - {"seconds"} == wanted.keys()
    for name in ("prediction", "inverted", "status", "evaluations", "settled"):
        assert answer[name] == wanted[name], name
    assert answer["residual"] == pytest.approx(wanted["residual"], rel=1e-3)
    assert answer["probability"] == pytest.approx(wanted["probability"], abs=1e-5)
    assert answer["probabilities"] == pytest.approx(wanted["probabilities"], abs=1e-5)


@pytest.fixture(
    params=[
        {},
        {"f_solver": "anderson", "f_max_iter": 30, "f_tol": 1e-3, "f_stop_mode": "rel"},
        {"f_solver": "broyden", "f_max_iter": 12, "f_tol": 1e-4, "f_stop_mode": "rel"},
        {"f_solver": "newton_krylov", "f_max_iter": 3, "f_tol": 1e-3, "f_stop_mode": "rel"},
    ],
    ids=lambda options: options.get("f_solver", "preset"),
)
def model(run: Path, request: pytest.FixtureRequest) -> Any:
    model = deq_zoo.load(run)
    return with_solver(model, **request.param) if request.param else model


@pytest.fixture
def client(model: Any) -> Iterator[TestClient]:
    with TestClient(make_app(make_service(model), "mdeq-smoke", LIMITS)) as client:
        yield client


def test_forms_and_json_get_the_answer_of_predict(client: TestClient, model: Any) -> None:
    x = image(0)
    wanted = expected(model, x)
    for given in (
        {"files": {"image": ("a.png", as_file(x))}},
        {"json": {"image": as_base64(x)}},
        {"json": {"image": f"data:image/png;base64,{as_base64(x)}"}},
    ):
        response = client.post("/predict", **given)
        assert response.status_code == 200, response.text
        assert_same(response.json(), wanted)


def test_neighbours_do_not_change_an_answer(client: TestClient, model: Any) -> None:
    images = [image(seed, (8 + seed, 30 - seed)) for seed in range(12)]
    wanted = [expected(model, x) for x in images]
    with ThreadPoolExecutor(12) as pool:
        send = lambda x: client.post("/predict", json={"image": as_base64(x)})  # noqa: E731
        responses = list(pool.map(send, images))
    for response, each in zip(responses, wanted, strict=True):
        assert_same(response.json(), each)


def test_a_photograph_is_turned_as_its_camera_says(run: Path, tmp_path: Path) -> None:
    model, exif = deq_zoo.load(run), Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / "turned.png"
    image(3).save(file, exif=exif)
    with TestClient(make_app(make_service(model), "mdeq-smoke", LIMITS)) as client:
        answer = client.post("/predict", files={"image": file.read_bytes()}).json()
    assert answer["probability"] == pytest.approx(model.predict(file).prediction.probability, 1e-4)


def test_only_a_solver_whose_rows_come_and_go_gets_a_stream(run: Path) -> None:
    model: Any = deq_zoo.load(run)
    assert isinstance(make_engine(ImageClasses(model), LIMITS), StreamEngine)
    for options in ({"f_solver": "newton_krylov"}, {"eval_factor": 0.0, "f_max_iter": 3}):
        engine = make_engine(ImageClasses(with_solver(model, **options)), LIMITS)
        assert isinstance(engine, QueueEngine)


def test_counts_are_those_of_the_requests(run: Path) -> None:
    model: Any = deq_zoo.load(run)
    with TestClient(make_app(make_service(model), "mdeq-smoke", LIMITS)) as client:
        spent = [
            client.post("/predict", json={"image": as_base64(image(k))}).json()["evaluations"]
            for k in range(3)
        ]
        assert client.post("/predict", json={}).status_code == 422
        data = client.get("/metrics").json()
        text = client.get("/metrics", headers={"Accept": "text/plain"}).text
        health = client.get("/health").json()
    assert data["responses"] == {"200": 3, "422": 1}
    assert (data["slots"], data["busy"], data["waiting"]) == (4, 0, 0)
    assert data["evaluations"] == sum(spent) > 0
    assert sum(data["statuses"].values()) == 3
    assert 0 < data["latency_seconds"]["p50"] <= data["latency_seconds"]["p99"]
    assert 'deq_zoo_responses_total{code="200"} 3' in text.splitlines()
    assert all(
        re.fullmatch(r"# TYPE \S+ (gauge|counter)|\S+ [-\d.e]+", x) for x in text.split("\n")[:-1]
    )
    assert health["status"] == "ok"
    assert health["model"] == "mdeq-smoke"
    assert [field["name"] for field in health["fields"]] == ["image"]


def test_the_page_needs_nothing_from_elsewhere(run: Path) -> None:
    with TestClient(make_app(make_service(deq_zoo.load(run)), "mdeq-smoke", LIMITS)) as client:
        page = client.get("/")
        assert client.get("/docs").status_code == 404  # its scripts would come from elsewhere
    assert page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"""(?:https?:)?//[a-z]""", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_an_error_of_f_harms_its_request_alone(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = deq_zoo.load(run)
    service = ImageClasses(model)
    f = model.full_stage

    def picky(*z: Any) -> Any:
        if bool((z[-1].amax((1, 2, 3)) > limit).any()):
            raise RuntimeError("a secret of the input")
        return f(*z)

    images = [Image.new("L", (16, 16), 0), image(1), Image.new("L", (16, 16), 30)]
    with torch.no_grad():
        values = [service.prepare({"image": as_tensor(x)}).request.args[0].max() for x in images]
    limit = float(sorted(values)[1])
    engine = StreamEngine(service, open_stream(model.deq, picky, LIMITS.slots), LIMITS.slots)

    async def answers() -> list[Any]:
        calls = [engine.answer(lambda x=x: {"image": as_tensor(x)}) for x in images]  # type: ignore[misc]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(answers())
    engine.close()
    assert [isinstance(each, RuntimeError) for each in found] == [v > limit for v in values]
    assert "secret" not in caplog.text


def as_tensor(x: Image.Image) -> torch.Tensor:
    from deq_zoo.images.inputs import as_image

    return as_image(x)
