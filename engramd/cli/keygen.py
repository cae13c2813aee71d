"""`engramd keygen PATH`: a key pair for the TCP endpoint."""

from __future__ import annotations

import argparse
import os

from engramd.errors import EngramdError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "keygen",
        help="make a key pair for the TCP endpoint",
        description="Writes PATH.key, a public key that others may have, and PATH.key_secret, which only its owner can "
        "read. The daemon names its secret key with `tcp_key` and keeps the public keys of its clients in the folder "
        "`tcp_clients`; a client has its own secret key and the daemon's public one. Nothing is replaced.",
    )
    parser.add_argument("path", metavar="PATH", help="where the files go, without their endings")


def run(args: argparse.Namespace) -> int:
    """Returns 0 once both files are there. Raises EngramdError."""
    import zmq.auth

    folder, name = os.path.split(os.path.abspath(args.path))
    for path in (os.path.join(folder, name + ending) for ending in (".key", ".key_secret")):
        if os.path.lexists(path):
            raise EngramdError(f"{path} exists; remove it, or choose another PATH")
    umask = os.umask(0o077)  # the secret must never be readable to others, not even while it is written
    try:
        public, secret = zmq.auth.create_certificates(folder, name)
        os.chmod(public, 0o644)
    except OSError as error:
        raise EngramdError(f"{args.path}: the keys cannot be written: {error.strerror}") from None
    finally:
        os.umask(umask)
    print(f"{public}: the public key, for the other side\n{secret}: the secret key, for this side alone")
    return 0
