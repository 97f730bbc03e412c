"""`gpulayer keys`: this user's own key, whom it lets in, and which hosts it believes.

    gpulayer keys make | show | list | add PUBLIC --role ROLE | trust HOST:PORT PUBLIC | revoke PUBLIC

Only public keys are ever printed or taken from the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import Any

from gpulayer.config import Settings
from gpulayer.wire import keys

_ROLES = "a driver runs code as you; an agent relays for its host's processes, so it is as trusted as a driver; a viewer looks"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `keys` and its own verbs to the command line."""
    parser = subparsers.add_parser(
        "keys",
        help="make keys, and say who may connect",
        description="Your own key, whom it lets in, and which hosts it believes.",
    )
    parser.set_defaults(run=run)
    verbs = parser.add_subparsers(dest="keys_verb", required=True, metavar="VERB")
    make = verbs.add_parser("make", help="make your key pair")
    make.add_argument("--force", action="store_true", help="replace the pair you have; hosts that know it must be told")
    verbs.add_parser("show", help="print your public key")
    listing = verbs.add_parser("list", help="print your public key, who may connect here, and the hosts you trust")
    listing.add_argument("--json", action="store_true", help="print JSON")
    add = verbs.add_parser("add", help="let the holder of a key connect here")
    add.add_argument("public", metavar="PUBLIC", help="what `gpulayer keys show` prints there, in single quotes")
    add.add_argument("--role", required=True, choices=keys.ROLES, help=_ROLES)
    add.add_argument("--comment", default="", help="whose key it is")
    trust = verbs.add_parser("trust", help="say which key a host must have when you connect to it")
    trust.add_argument("address", metavar="HOST:PORT")
    trust.add_argument("public", metavar="PUBLIC", help="what `gpulayer keys show` prints there, in single quotes")
    revoke = verbs.add_parser("revoke", help="trust a key no more, whoever vouches for it")
    revoke.add_argument("public", metavar="PUBLIC")


def run(args: argparse.Namespace) -> int:
    """Do what the parsed `gpulayer keys ...` says; returns the exit code, and raises `GPUlayerError` for a refusal."""
    home = Settings.from_environment().home
    verb: str = args.keys_verb
    if verb == "make":
        _make(home, force=args.force)
    elif verb == "show":
        print(keys.load_identity(home).public)
    elif verb == "list":
        _list(home, as_json=args.json)
    elif verb == "add":
        keys.authorize(home, args.public, args.role, args.comment)
        print(f"{args.public} may connect here as {args.role}")
    elif verb == "trust":
        keys.trust_host(home, args.address, args.public)
        print(f"{args.address} must hold {args.public}")
    else:
        known = keys.revoke(home, args.public)
        print(f"{args.public} is refused from now on" + ("" if known else "; it was on no list here"))
    return 0


def _make(home: Path, *, force: bool) -> None:
    if os.path.lexists(home / keys.IDENTITY) and not force:
        print("you have a key already (--force replaces it, and then every host that knows it must be told the new one)")
        public = keys.load_identity(home).public
    else:
        public = keys.make_identity(home, force=force).public
    print(f"your public key: {public}")
    print(f"the pair is in {home / keys.IDENTITY}; the secret half never leaves this file")
    print(f"on a host that is to run your code, type: gpulayer keys add {shlex.quote(public)} --role driver")


def _list(home: Path, *, as_json: bool) -> None:
    own = keys.load_identity(home).public if os.path.lexists(home / keys.IDENTITY) else None
    authorized, hosts = keys.list_keys(home), keys.list_hosts(home)
    if as_json:
        listing: dict[str, Any] = {
            "identity": own,
            "authorized": [{"role": key.role, "public": key.public, "comment": key.comment} for key in authorized],
            "hosts": [{"address": host.address, "public": host.public} for host in hosts],
        }
        print(json.dumps(listing, indent=2))
        return
    print(f"you              {own or '(no key yet; type: gpulayer keys make)'}")
    for key in authorized:
        print(f"let in: {key.role:<8} {key.public} {key.comment}".rstrip())
    for host in hosts:
        print(f"host             {host.public} {host.address}")
