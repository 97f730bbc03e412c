"""`python -m gpulayer.agent`: run one agent until it is told to stop. `gpulayer up` and `connect()` start it so.

When ready it prints one line of JSON (`socket`, `port`, `pid`) to stdout. With --embedded it also stops when its stdin
closes, which is how it ends with the program that started it, however that ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys

from gpulayer.agent.agent import Agent, AgentOptions
from gpulayer.config import Settings
from gpulayer.errors import GPUlayerError
from gpulayer.runtime.prctl import PR_SET_CHILD_SUBREAPER, prctl
from gpulayer.wire.loop import new_loop


def parse(argv: list[str] | None = None) -> AgentOptions:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="gpulayer.agent", description=__doc__)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, help="TCP port; 0 for any, left out for none")
    parser.add_argument("--name", default="")
    parser.add_argument("--record", default="")
    parser.add_argument("--zone", default="")
    parser.add_argument("--cpus", type=float)
    parser.add_argument("--share", default="1/1", metavar="N/COUNT", help="offer the N-th of COUNT shares of this machine")
    parser.add_argument("--preload", default="", help="comma-separated modules that workers should have imported")
    parser.add_argument("--embedded", action="store_true")
    args = parser.parse_args(argv)
    number, count = (int(part) for part in args.share.split("/"))
    preload = tuple(name for name in args.preload.split(",") if name)
    return AgentOptions(
        args.bind, args.port, args.name, args.record, args.zone, args.cpus, (number, count), preload, args.embedded
    )


async def serve(options: AgentOptions) -> None:
    """start, serve, drain, stop."""
    loop = asyncio.get_running_loop()
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # should the zygote be killed, what it kept together becomes ours to end
    agent = Agent(Settings.from_environment(), options)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stopped.set)
    await agent.start()
    if options.embedded:
        loop.add_reader(sys.stdin.fileno(), _stop_at_end_of_stdin, agent)
    try:
        print(json.dumps(agent.ready_line()), flush=True)
    except BrokenPipeError:  # whoever started it has gone already
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        agent.stopped.set()
    await agent.stopped.wait()
    await agent.stop()


def _stop_at_end_of_stdin(agent: Agent) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        agent.stopped.set()


def main() -> int:
    """Run until stopped; 1 and one line on stderr if it could not start."""
    settings = Settings.from_environment()
    logging.basicConfig(level=(settings.log_level or "info").upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    loop = new_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve(parse()))
    except GPUlayerError as error:
        print(f"gpulayer: {error}", file=sys.stderr)
        return 1
    finally:
        loop.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
