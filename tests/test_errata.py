"""Every example in docs/errata.md runs and prints what the page says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "errata.md"


class Block(NamedTuple):
    """A fenced block of Python with the heading it stands under."""

    heading: str
    line: int
    code: str


def read_blocks() -> list[Block]:
    blocks, heading, fence = [], "", None
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if fence is not None:
            if line.startswith("```"):
                blocks.append(Block(heading, fence + 1, "\n".join(lines[fence + 1 : number]) + "\n"))
                fence = None
        elif line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("```"):
            assert line == "```python", f"line {number + 1}: a block that is not run"
            fence = number
    assert fence is None
    return blocks


BLOCKS = read_blocks()


@pytest.mark.parametrize("block", BLOCKS, ids=[f"{b.heading.partition(':')[0]} line {b.line}" for b in BLOCKS])
def test_example(block: Block) -> None:
    """Each block on its own, so that a reader may copy any one of them."""
    test = doctest.DocTestParser().get_doctest(block.code, {}, block.heading, str(PAGE), block.line)
    assert test.examples
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("number", range(1, 9))
def test_every_erratum_shows_numbers(number: int) -> None:
    examples = [
        example
        for block in BLOCKS
        if block.heading.startswith(f"{number}. ")
        for example in doctest.DocTestParser().get_examples(block.code)
    ]
    shown = [example for example in examples if re.search(r"\d", example.want)]
    assert len(shown) >= 2, "what is printed and what holds"


def test_the_headings_are_numbered_in_order() -> None:
    headings = re.findall(r"^## (\d+)\. ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == [str(n) for n in range(1, 9)]
