"""The page about Transformers and the examples in docstrings run where Transformers is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

from libraries import only

only("torch")
pytest.importorskip("transformers")

import test_docs  # noqa: E402


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = test_docs.ROOT / "docs" / "transformers.md"
    assert {block.library for block in test_docs.read_blocks(page)} == {"transformers"}
    test_docs.test_page(page, "transformers", tmp_path, monkeypatch)


@pytest.mark.parametrize("name", [x for x in test_docs.module_names() if x.startswith("hla.integrations.")])
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_docs.test_docstring_examples(name, tmp_path, monkeypatch)
