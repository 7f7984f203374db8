"""Files that are complete or absent."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file under another name beside it, then rename that: nobody ever sees a part."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(data)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
