"""For mkdocstrings: examples in docstrings are set as code. Markdown by itself takes ``>>>`` for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)
"""From a first ``>>>`` to the next blank line."""


class Doctests(griffe.Extension):
    """Puts a fence around every doctest."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object that was loaded."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
