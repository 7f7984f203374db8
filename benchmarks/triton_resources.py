"""What the Triton kernels take of a GPU, without one: registers, spills, shared memory, tensor cores, time to compile.

Each kernel is compiled in the first configuration that fits the GPU's shared memory; on the GPU itself the fastest is
chosen. Spills are bytes of a thread's own memory, for what does not fit into its registers.

    python benchmarks/triton_resources.py [--targets sm_80,sm_90,sm_100,gfx942] [--sizes bf16:64,bf16:128,fp32:64]
        [--calls "hla2:state,hla2:forget,ahla:state,hla2:recurrent"] [--markdown [docs/triton.md]] [--json]

--markdown writes the table between the lines <!-- resources --> and <!-- end of resources --> of a page.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import triton  # noqa: E402

from triton_targets import CALLS, OPERATORS, TARGETS, Usage, compile, described, first, launches  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BEGIN, END = "<!-- resources -->", "<!-- end of resources -->"


class Row(NamedTuple):
    """A kernel at a size, and what it takes by target."""

    kernel: str
    size: str
    chunk: int | None
    usage: dict[str, Usage]
    blocks: dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="sm_80,sm_90,sm_100,gfx942", help=f"some of {', '.join(TARGETS)}")
    parser.add_argument("--sizes", default="bf16:64,bf16:128,fp32:64", help="dtype:d or dtype:d:dv")
    parser.add_argument("--calls", default="hla2:state,hla2:forget,ahla:state,hla2:recurrent")
    parser.add_argument("--markdown", nargs="?", const=ROOT / "docs" / "triton.md", type=Path, metavar="PAGE")
    parser.add_argument("--json", action="store_true", help="one object on stdout, the table on stderr")
    arguments = parser.parse_args()
    targets = chosen(parser, "--targets", arguments.targets, TARGETS)
    calls = [tuple(x.split(":")) for x in arguments.calls.split(",")]
    if any(len(x) != 2 or x[0] not in OPERATORS or x[1] not in CALLS for x in calls):
        parser.error(f"--calls: expected operator:call of {', '.join(OPERATORS)} and {', '.join(CALLS)}")
    sizes = [x.split(":") for x in arguments.sizes.split(",")]
    if any(len(x) not in (2, 3) or x[0] not in DTYPES or not all(n.isdigit() for n in x[1:]) for x in sizes):
        parser.error(f"--sizes: expected dtype:d or dtype:d:dv with dtype of {', '.join(DTYPES)}")
    out = sys.stderr if arguments.json else sys.stdout
    with triton.knobs.cache.scope(), tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder  # compiled now, or the seconds would be those of an earlier day
        rows = list(measured(targets, sizes, calls, out))
    if arguments.markdown:
        write(arguments.markdown, page(rows, targets))
        print(f"{arguments.markdown}: written", file=out)
    if arguments.json:
        found = [
            {**row._asdict(), "usage": {target: usage._asdict() for target, usage in row.usage.items()}} for row in rows
        ]
        print(json.dumps({"triton": triton.__version__, "rows": found}))


def chosen(parser: argparse.ArgumentParser, option: str, value: str, known: dict[str, Any]) -> list[str]:
    names = value.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{option}: expected some of {', '.join(known)}, got {unknown[0]!r}")
    return names


def measured(targets: list[str], sizes: list[list[str]], calls: list[Any], out: Any) -> Iterator[Row]:
    """Compile, and print a line for each kernel, size and target."""
    print(f"triton {triton.__version__}", file=out)
    heading = f"{'kernel':44s} {'size':12s} {'target':7s} {'blocks':22s}"
    print(f"{heading} registers  spills  shared  seconds  tensor cores", file=out)
    for dtype, *widths in sizes:
        d, dv = int(widths[0]), int(widths[-1])
        seen: set[str] = set()
        for operator, call in calls:
            for one in launches(operator, DTYPES[dtype], d, dv, call):
                kernel = described(one)
                if kernel in seen:
                    continue
                seen.add(kernel)
                row = Row(kernel, f"{dtype} {d}x{dv}", one.arguments.get("C"), {}, {})
                for name in targets:
                    config = first(one, TARGETS[name])
                    usage = row.usage[name] = compile(one, TARGETS[name], config)
                    blocks = ", ".join(f"{key} {n}" for key, n in config.blocks.items())
                    row.blocks[name] = f"{blocks} {config.warps}w {config.stages}s".strip()
                    numbers = f"{usage.registers:9d} {usage.spills:7d} {usage.shared:7d} {usage.seconds:8.2f}"
                    start = f"{kernel:44s} {row.size:12s} {name:7s} {row.blocks[name]:22s}"
                    print(f"{start} {numbers}  {' '.join(usage.products)}", file=out, flush=True)
                yield row


def page(rows: list[Row], targets: list[str]) -> str:
    """The table in Markdown, without seconds: they differ from run to run."""
    lines = [
        f"Triton {triton.__version__}. Registers of a thread, bytes that it spills (none where nothing stands), and "
        "shared memory of a program.",
        "",
        f"| kernel | inputs | {' | '.join(targets)} |",
        f"|---|---|{'---|' * len(targets)}",
    ]
    for row in rows:
        cells = " | ".join(cell(row.usage[target]) for target in targets)
        kernel = re.sub(r" (\d+)(x\1)*$", "", row.kernel)  # all of one width, which the next column has
        lines.append(f"| {kernel} | {row.size} | {cells} |")
    lines += ["", "Tensor cores are used through " + "; ".join(instructions(rows, targets)) + "."]
    return "\n".join(lines)


def cell(usage: Usage) -> str:
    spills = f", **{usage.spills} B**" if usage.spills else ""
    return f"{usage.registers}{spills}, {usage.shared / 1024:.3g} KB"


def instructions(rows: list[Row], targets: list[str]) -> Iterator[str]:
    """For each target the tensor-core instructions of all rows."""
    for target in targets:
        found = sorted({name for row in rows for name in row.usage[target].products})
        if found:
            yield f"{', '.join(f'`{name}`' for name in found)} on {target}"


def write(path: Path, table: str) -> None:
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"{path}: expected one line {BEGIN} and then one line {END}")
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
