"""The documentation runs: every Python block of README.md and docs/, and every example in a docstring.

A block headed "python" runs always; one headed "python {.torch}", {.jax}, … runs where that library is. Blocks of one
page share a namespace and run in order; those that start with ``>>>`` are doctests. docs/errata.md has its own
test, docs/mathematics.md no code.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import hla
from hla import checks, cli, options, states
from hla.family import DEFINITIONS, MASKS

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("errata.md", "mathematics.md")
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name not in ELSEWHERE)]
LIBRARIES = ("torch", "jax", "cupy", "flax", "transformers")
BESIDE = {"flax": "torch"}
"""What blocks of a library need beside it: the page on Flax loads weights of PyTorch."""
OF_FRAMEWORKS = ("hla.distributed.", "hla.integrations.", "hla.models.", "hla.nn.")
"""What stands in the reference and may need a framework that is missing."""
SUBMODULES = ("backends", "errors", "inspect", "paper", "scan", "segments", "testing")


class Block(NamedTuple):
    """A fenced block of Python and the library it is marked with, "" for none."""

    line: int
    library: str
    code: str


def read_blocks(page: Path) -> list[Block]:
    blocks, opened = [], None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if opened is not None:
            if line.startswith("```"):
                start, library = opened
                blocks.append(Block(start + 1, library, "\n".join(lines[start + 1 : number]) + "\n"))
                opened = None
        elif line.startswith("```python"):
            mark = re.fullmatch(r"```python(?: \{\.(\w+)\})?", line)
            where = f"{page.name}:{number + 1}: {line}"
            assert mark, where
            assert mark[1] in (None, *LIBRARIES), where
            opened = number, mark[1] or ""
    assert opened is None, f"{page.name}: a block is not closed"
    return blocks


def runs() -> list[Any]:
    """(page, library): the page without marked blocks, and once more with those of each library that it names."""
    return [
        pytest.param(page, library, id=f"{page.stem}-{library or 'plain'}")
        for page in PAGES
        for library in sorted({"", *(b.library for b in read_blocks(page))})
    ]


@pytest.mark.parametrize(("page", "library"), runs())
def test_page(page: Path, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in filter(None, (library, BESIDE.get(library))):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed; its own session runs this")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HLA_BACKEND", raising=False)
    space: dict[str, Any] = {"__name__": "page"}
    names = set(hla.backends.registered())
    try:
        for block in read_blocks(page):
            if block.library in ("", library):
                run_block(block, space, page)
    finally:
        hla.set_backend(None)
        for name in set(hla.backends.registered()) - names:
            hla.backends.unregister_backend(name)


def run_block(block: Block, space: dict[str, Any], page: Path) -> None:
    if not block.code.startswith(">>>"):
        exec(compile("\n" * block.line + block.code, str(page), "exec"), space)
        return
    test = doctest.DocTestParser().get_doctest(block.code, {}, page.name, str(page), block.line)
    test.globs = space
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append, clear_globs=False)
    assert result.failed == 0, "".join(said)


def module_names() -> list[str]:
    base = Path(hla.__file__).parent
    paths = (p.relative_to(base.parent).with_suffix("") for p in sorted(base.rglob("*.py")))
    return [".".join(p.parts).removesuffix(".__init__") for p in paths if p.name != "__main__"]


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] != "hla":
            pytest.skip(f"{name} needs {error.name}")
        raise


@pytest.mark.parametrize("name", module_names())
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HLA_BACKEND", raising=False)
    said: list[str] = []
    failed = 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(load(name), name):
        failed += doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append).failed
    assert failed == 0, "".join(said)


def public_members(module: ModuleType) -> dict[str, Any]:
    own = [n for n, x in vars(module).items() if callable(x) and n[0] != "_" and x.__module__ == module.__name__]
    return {name: getattr(module, name) for name in getattr(module, "__all__", own)}


def public_objects() -> dict[str, Any]:
    """Everything a user may import, by its public name."""
    found = public_members(hla)
    for name in SUBMODULES:
        members = public_members(importlib.import_module(f"hla.{name}"))
        found |= {f"{name}.{member}": x for member, x in members.items()}
    return {name: x for name, x in found.items() if not isinstance(x, ModuleType)}


def test_every_public_name_is_in_the_reference() -> None:
    shown = []
    pages = (ROOT / "docs" / "operators.md", ROOT / "docs" / "inspect.md", *(ROOT / "docs" / "api").glob("*.md"))
    for page in pages:
        for name in re.findall(r"^::: (hla\.[\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            if name.startswith(OF_FRAMEWORKS):
                continue
            x = pkgutil.resolve_name(name)
            shown += public_members(x).values() if isinstance(x, ModuleType) else [x]
    assert not [name for name, x in public_objects().items() if not any(x is y for y in shown)]


PACKAGES = sorted(
    path.parent.relative_to(ROOT / "src")
    for folder in ("distributed", "integrations", "models", "nn")
    for path in (ROOT / "src" / "hla" / folder).rglob("__init__.py")
)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda x: ".".join(x.parts))
def test_every_public_name_of_a_framework_is_in_the_reference(package: Path) -> None:
    """Read, not imported: the framework may be missing."""
    tree = ast.parse((ROOT / "src" / package / "__init__.py").read_text(encoding="utf-8"))
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == "__all__" for x in node.targets):
            names = ast.literal_eval(node.value)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    shown |= {x.replace("hla.nn.torch.convert", "hla.nn.convert") for x in shown}  # it is the same
    assert not {".".join((*package.parts, name)) for name in names} - shown
    assert names or package.parts[1:] in (("distributed",), ("integrations",)), "no __all__"


@pytest.mark.parametrize("name", sorted(n for n, x in public_objects().items() if inspect.isfunction(x)))
def test_documented_arguments_exist(name: str) -> None:
    """Each argument of a signature has a line under Args, and each line an argument."""
    function = public_objects()[name]
    doc = inspect.getdoc(function) or ""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", doc + "\n", re.MULTILINE)
    if section is None:
        return
    documented = {
        part.strip().lstrip("*")
        for line in section[1].splitlines()
        if (entry := re.match(r"    (\S[^:]*):", line))
        for part in entry[1].split(",")
    }
    parameters = list(inspect.signature(inspect.unwrap(function), follow_wrapped=False).parameters.values())
    known = {p.name for p in parameters}
    shared = options.NAMES if "options" in documented else set()
    assert documented - {"options"} <= known
    assert known - shared - {"options"} <= documented


def headings(page: str) -> set[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^#+ .*$", text, re.MULTILINE))))


def test_every_option_is_explained() -> None:
    assert headings("options.md") == options.NAMES | {"order", "inplace"}
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for value in (*MASKS, *DEFINITIONS, *options.FORMS):
        assert f'`"{value}"`' in text


def test_every_state_field_is_explained() -> None:
    text = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    fields = set()
    for operator, order in (("linear_attention", 1), ("hla2", 2), ("ahla", 2), ("hla3", 3), ("higher_order", 4)):
        for mask in MASKS[:2]:
            for definition in DEFINITIONS:
                for ridge in (0.0, 1.0):
                    given = options.Options(mask=mask, definition=definition, normalize=True, ridge=ridge)
                    try:
                        spec = checks.spec_of(operator, given, order)
                    except hla.OptionError:
                        continue
                    fields |= set(states.state_type(spec)._fields)
    assert fields
    assert not [f for f in fields if f"`{f}`" not in text]


@pytest.mark.parametrize("command", ["info", "verify", "bench", "demo"])
def test_every_command_line_option_is_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| `hla {command}.*$", text, re.MULTILINE)
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    taken = set(re.findall(r"--\w+", capsys.readouterr().out)) - {"--help", "--json"}
    assert taken == set(re.findall(r"--\w+", line))


def test_ci_runs_the_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    command = script.rstrip().splitlines()[-1]
    assert command.endswith("/nox")
    assert command in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
