"""The command line: `gpulayer VERB`. Each verb is a module with `add_parser` and a `run`, imported for its parser only."""

from __future__ import annotations

import argparse
import os
import sys

from gpulayer import __version__
from gpulayer.cli import agent, keys, top
from gpulayer.errors import GPUlayerError


def make_parser() -> argparse.ArgumentParser:
    """All verbs."""
    parser = argparse.ArgumentParser(prog="gpulayer", description="Train PyTorch, and run anything, on every GPU you can reach.")
    parser.add_argument("--version", action="version", version=f"gpulayer {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in (agent, top, keys):
        module.add_parser(verbs)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb; errors of ours are one message on stderr and exit code 1, never a traceback."""
    args = make_parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except GPUlayerError as error:
        print(f"gpulayer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `gpulayer status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush at exit would fail as well
        return 0
