"""Formulas as MathML, made when the site is built: every browser sets them, without a script from elsewhere."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

MARKED = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)


def _formula(match: re.Match[str]) -> str:
    display = "block" if match["kind"] == "[" else "inline"
    return convert(html.unescape(match["tex"]), display=display)


def on_page_content(content: str, **_: Any) -> str:
    """MkDocs calls this with every page; pymdownx.arithmatex has marked the formulas."""
    content = MARKED.sub(_formula, content)
    if 'class="arithmatex"' in content:
        raise ValueError("a formula that is not \\(…\\) or \\[…\\]")
    return content
