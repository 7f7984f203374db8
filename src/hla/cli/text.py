"""Real text as inputs: bytes, read and checked, and turned into q, k and v the same way every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hla.cli.report import Failure
from hla.errors import message


class Text(NamedTuple):
    """Where a text came from, and its bytes."""

    source: str
    data: bytes


def read_text(file: str | None) -> Text:
    """The bytes of a UTF-8 file, or, without one, of English text that every Python carries with it.

    Args:
        file: a path; None for the help topics of `pydoc` (`pydoc_data.topics`), some 700 kB.

    Raises:
        Failure: there is no such file, it cannot be read, is empty, or is not UTF-8.

    Example:
        >>> text = read_text(None)
        >>> text.source, len(text.data) > 65536
        ('pydoc_data.topics', True)
    """
    if file is None:
        from pydoc_data.topics import topics

        return Text("pydoc_data.topics", "\n".join(topics.values()).encode())
    expected = "a readable UTF-8 text file"
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise Failure(message("FILE", expected, f"{file} ({reason})", "Check the path.")) from None
    except ValueError as error:  # a path with a null character
        raise Failure(message("FILE", expected, f"{file!r} ({error})", "Check the path.")) from None
    if not data:
        raise Failure(message("FILE", expected, f"{file} (empty)", "Choose a file with text in it."))
    try:
        data.decode()
    except UnicodeDecodeError as error:
        got = f"{file} (byte {error.start} is not UTF-8: {error.reason})"
        raise Failure(message("FILE", expected, got, "Convert it, e.g. with iconv -t UTF-8.")) from None
    return Text(file, data)


class Streams(NamedTuple):
    """q, k (H, T, d) and v (H, T, dv) in NumPy float32."""

    q: Any
    k: Any
    v: Any


def embed(data: bytes, heads: int, d: int, dv: int) -> Streams:
    r"""Bytes as queries, keys and values, with fixed random tables E over the 256 bytes.

    $$q_t = \mathrm{unit}(E^q_{b_t} + \tfrac12 E^{q\prime}_{b_{t-1}}), \quad
    k_t = \mathrm{unit}(E^k_{b_t} + \tfrac12 E^{k\prime}_{b_{t-1}}), \quad v_t = E^v_{b_t}$$

    Position-free: a token depends on its byte and the one before it, as after a short convolution in a layer.

    Args:
        data: the text.
        heads: H.
        d: features of q and k.
        dv: features of v.

    Example:
        >>> q, k, v = embed(b"higher order", heads=2, d=5, dv=3)
        >>> q.shape, v.shape, round(float((q[0, 0] ** 2).sum()), 5)
        ((2, 12, 5), (2, 12, 3), 1.0)
    """
    import numpy as np

    rng = np.random.default_rng(2510_27258)
    now = np.frombuffer(data, dtype=np.uint8)
    before = np.concatenate([now[:1], now[:-1]])

    def table(features: int) -> Any:
        return rng.standard_normal((heads, 256, features))

    def unit(x: Any) -> Any:
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

    def mixed() -> Any:
        own, previous = table(d), table(d)
        return unit(own[:, now] + 0.5 * previous[:, before])

    return Streams(mixed(), mixed(), table(dv)[:, now].astype(np.float32))
