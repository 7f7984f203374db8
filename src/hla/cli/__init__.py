"""The command line: ``hla info``, ``hla verify``, ``hla bench``, ``hla demo``.

The exit code is 0 only if all went well, 1 if something is wrong with a result, 2 if the command could not be run as
asked. ``--json`` prints one object to stdout; progress and messages go to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from hla.cli.report import Failure, Report, print_failure, print_report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name, by default those of the process.

    Returns:
        The exit code.

    Example:
        >>> main(["info", "--json"])  # doctest: +ELLIPSIS
        {"ok": true, ...}
        0
    """
    arguments = _parser().parse_args(argv)
    try:
        report = _run(arguments)
        print_report(report, arguments.json)
    except Failure as failure:
        print_failure(failure, arguments.json)
        return failure.code
    except KeyboardInterrupt:
        print("hla: interrupted", file=sys.stderr)
        return 130
    return 0 if report.ok else 1


def _run(arguments: argparse.Namespace) -> Report:
    """The command's report; what libraries print on the way goes to stderr, so that stdout holds the report alone."""
    with contextlib.redirect_stdout(sys.stderr):
        result: Report = arguments.run(arguments)
    return result


def _parser() -> argparse.ArgumentParser:
    import hla
    from hla.cli import bench, demo, info, verify

    parser = argparse.ArgumentParser(
        prog="hla",
        description="Higher-order Linear Attention: what is installed, whether it is right, and how fast it is.",
    )
    parser.add_argument("--version", action="version", version=f"hla {hla.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON object to stdout, all else to stderr")
    for command in (info, verify, bench, demo):
        command.add_parser(commands, shared)
    return parser
