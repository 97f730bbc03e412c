"""`gpulayer top`: hosts, devices, workers and training runs, live in the terminal.

`collect(hosts)` gives a snapshot (plain dicts), `render(snapshot)` draws one, `run(args)` shows them one after the other.
A terminal shows the live view; anything else gets one frame without escape codes, or JSON with `--json`.

rich is imported inside functions: the start of every other verb would pay for it.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpulayer.cli.frame import Plain, plain_text, render, stack

if TYPE_CHECKING:
    from rich.console import Console

Collect = Callable[[list[str]], Plain]

LOOK_S = 0.5  # a Ctrl-C that comes just before the system call does not end it, so no call may last
PLAIN_COLUMNS = 130  # of a frame that goes to a file or a pipe


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb `top` to what `ArgumentParser.add_subparsers()` returned; its `run` is `args.run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "top",
        help="hosts, devices, workers and training runs, live",
        description="Show hosts, devices, workers and training runs, live; q quits.",
    )
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="host, host:port or a named list (default: as in `connect()`)")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and exit (NaN, which JSON lacks, as a string)"
    )
    parser.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="seconds between frames (default 1)")
    parser.set_defaults(run=run)
    return parser


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not an interval; give seconds from 0.1 to 3600")
    return seconds


def run(args: argparse.Namespace, collect: Collect | None = None) -> int:
    """Show snapshots as `args` says, and return the exit code. An error of the first `collect` is the caller's to report."""
    collect = collect or _cluster_collect()
    hosts: list[str] = list(args.hosts)
    if args.json:
        print(json.dumps(_for_json(collect(hosts)), indent=2))
        return 0
    from rich.console import Console

    console = Console()
    terminal = sys.stdout.isatty() and not console.is_dumb_terminal
    if terminal and not args.once:
        return _live(console, lambda: collect(hosts), args.interval)
    if not args.once:
        print("gpulayer top: the output is not a terminal; this is one frame, as with --once", file=sys.stderr)
    snapshot = collect(hosts)
    if terminal:
        console.print(render(snapshot, console.width))
    else:
        _print_plain(snapshot)
    return 0


def _cluster_collect() -> Collect:
    from gpulayer.runtime.snapshot import collect  # here, so that the parser can be built without the session's code

    return collect


def _print_plain(snapshot: Plain) -> None:
    from rich.console import Console

    width = shutil.get_terminal_size((PLAIN_COLUMNS, 24)).columns
    frame = io.StringIO()
    # told in full, so that no variable of the user's (FORCE_COLOR, say) brings escape codes back
    console = Console(file=frame, width=width, force_terminal=False, color_system=None, legacy_windows=False)
    console.print(render(snapshot, width))
    text = "\n".join(line.rstrip() for line in frame.getvalue().splitlines())
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def _for_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(item) for item in value]
    # as null, a loss that became NaN would look like one that is not there yet
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---- the live view


def _live(console: Console, collect: Callable[[], Plain], interval_s: float) -> int:
    from rich.live import Live

    try:
        snapshot, problem = collect(), ""
        with _keyboard() as wait_quit, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                frame = render(snapshot, console.width, height=console.height - bool(problem))
                live.update(stack([plain_text(problem, "bold red"), frame]) if problem else frame, refresh=True)
                if wait_quit(interval_s):
                    return 0
                try:
                    snapshot, problem = collect(), ""
                except Exception as error:  # noqa: BLE001 - the view outlives whatever breaks for a while, and says so
                    lines = str(error).splitlines()
                    problem = f"nothing new since the time below: {lines[0] if lines else type(error).__name__}"
    except KeyboardInterrupt:
        return 0


@contextmanager
def _keyboard() -> Generator[Callable[[float], bool], None, None]:
    """Gives `wait_quit(timeout_s)`: whether q was pressed in that time. The terminal is as before when the block ends."""
    if not sys.stdin.isatty():
        yield _wait_timeout
        return
    import select
    import termios
    import tty

    stdin = sys.stdin.fileno()

    def wait_quit(timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if not select.select([stdin], [], [], min(left, LOOK_S))[0]:
                continue
            keys = os.read(stdin, 64)
            if not keys or b"q" in keys.lower():  # nothing to read: the terminal hung up
                return True
        return False

    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield wait_quit
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _wait_timeout(timeout_s: float) -> bool:
    time.sleep(timeout_s)
    return False
