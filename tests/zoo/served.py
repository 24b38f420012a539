"""Images as requests to a server hold them."""

from __future__ import annotations

import base64
import io

from PIL import Image


def as_file(image: Image.Image) -> bytes:
    """Return an image as the content of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def as_base64(image: Image.Image) -> str:
    """Return an image as text in JSON."""
    return base64.b64encode(as_file(image)).decode()
