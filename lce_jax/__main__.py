"""``lce-jax``, which ``python -m lce_jax`` also is: the commands of this package, each imported when it is run."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import lce_jax

COMMANDS = {
    "explain": "what a head holds per device, with stored logits and without; needs no GPU",
    "bench": "time this package against stored logits and its peers on this machine",
    "demo": "train a small transformer on this machine, compare with stored logits",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command with the arguments after its name, and returns its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="lce-jax",
        description="Log-probability and entropy of a language-model head, without storing the logits.",
        epilog="\n".join(f"  {name:8s} {what}" for name, what in COMMANDS.items())
        + "\n\nlce-jax COMMAND --help has the options of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lce-jax {lce_jax.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=f"one of {', '.join(COMMANDS)}")
    command = parser.parse_args(given[:1]).command
    try:
        status: int = importlib.import_module(f"lce_jax.{command}.__main__").main(given[1:])
    except BrokenPipeError:  # the reader of a pipe has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left there at its end
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
