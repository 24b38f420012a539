"""The body of a request as values: JSON or a form, in memory only."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NoReturn

from PIL import Image, UnidentifiedImageError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.images.files import read_image
from deq_zoo.serving.limits import Limits, Refusal
from deq_zoo.serving.service import Field, Values
from deq_zoo.spelling import suggest

FORMATS = ("PNG", "JPEG")  # their sizes are known before anything of them is decoded
_FORM, _JSON = "multipart/form-data", "application/json"


class _InMemory(MultiPartParser):
    spool_max_size = 1 << 40  # uploads never become files: `max_bytes` limits them


async def open_body(
    headers: Headers, body: bytes, fields: Sequence[Field], limits: Limits
) -> Callable[[], Values]:
    """Return a function that reads the values of a request; a thread should call it.

    Args:
        headers: of the request.
        body: the whole of it.
        fields: that a request has.
        limits: of the server.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _FORM:
        form = await _read_form(headers, body, limits)
        return lambda: read_values(form, fields, limits)
    if kind == _JSON:
        return lambda: read_values(_read_json(body), fields, limits)
    raise Refusal(415, f"send {_JSON} or {_FORM}, got {kind[:100] or 'no Content-Type'}")


def read_values(given: Mapping[str, Any], fields: Sequence[Field], limits: Limits) -> Values:
    """Return the values of a request; refuse unknown, missing and malformed ones."""
    known = {field.name: field for field in fields}
    for name in given:
        if name not in known:
            raise Refusal(422, f"unknown field {name[:100]!r}{suggest(name[:100], known)}")
    absent = [field.name for field in fields if field.name not in given and not field.optional]
    if absent:
        raise Refusal(422, f"missing field {absent[0]!r}: expected {', '.join(known)}")
    return {name: _read_value(known[name], value, limits) for name, value in given.items()}


async def _read_form(headers: Headers, body: bytes, limits: Limits) -> dict[str, Any]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    parser = _InMemory(headers, stream(), max_files=8, max_fields=8, max_part_size=limits.max_bytes)
    try:
        form = await parser.parse()
    except (MultiPartException, ValueError) as error:
        raise Refusal(422, f"the form is malformed: {error}") from None
    try:
        fields: dict[str, Any] = {}
        for name, value in form.multi_items():
            if name in fields:
                raise Refusal(422, f"the field {name[:100]!r} comes twice")
            fields[name] = await value.read() if isinstance(value, UploadFile) else value
        return fields
    finally:
        await form.close()


def _read_json(body: bytes) -> dict[str, Any]:
    values = _parse_json(body, "the body")
    if not isinstance(values, dict):
        raise Refusal(422, f"expected a JSON object of fields, got {type(values).__name__}")
    return values


def _parse_json(text: str | bytes, what: str) -> Any:
    """Return the value of JSON text; refuse anything else."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(422, f"{what} is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _read_value(field: Field, value: Any, limits: Limits) -> Any:
    if field.kind == "image":
        return decode_image(_as_bytes(field, value), limits)
    if field.kind == "text":
        return _as_text(field, value)
    if isinstance(value, (str, bytes)):  # of a form
        value = _parse_json(value, repr(field.name))
    if not isinstance(value, list):
        raise Refusal(422, f"{field.name!r} takes a list of numbers, got {type(value).__name__}")
    return value


def _as_bytes(field: Field, value: Any) -> bytes:
    """Return the bytes of a file; those in JSON are in base64, alone or as a `data:` URL."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise Refusal(422, f"{field.name!r} takes an image in base64, got {type(value).__name__}")
    text = value.partition(",")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise Refusal(422, f"{field.name!r} is not valid base64: {error}") from None


def _as_text(field: Field, value: Any) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            raise Refusal(422, f"{field.name!r} takes text, got {type(text).__name__}")
        text.encode()  # JSON can hold halves of surrogate pairs, which are no text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise Refusal(422, f"{field.name!r} is not UTF-8: {error.reason}") from None
    return text


def decode_image(content: bytes, limits: Limits) -> Tensor:
    """Return an image file as bytes (3, H, W); refuse a large one before it is decoded."""
    _check_header(content, limits)
    try:
        return read_image(io.BytesIO(content))
    except DataError as error:
        raise Refusal(422, f"cannot read the image: {error.__cause__}") from None


def _check_header(content: bytes, limits: Limits) -> None:
    """Refuse an image of another format, or of too many pixels, by its header alone."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as header:
            width, height = header.size
    except UnidentifiedImageError:
        raise Refusal(415, f"images are {' or '.join(FORMATS)} files, got another format") from None
    except Image.DecompressionBombError as error:
        raise Refusal(413, f"the image is too large: {error}") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise Refusal(422, f"cannot read the image: {error}") from None
    if width * height > limits.max_pixels:
        size = f"{width} x {height} pixels, more than {limits.max_pixels}"
        raise Refusal(413, f"the image has {size}: make it smaller")
