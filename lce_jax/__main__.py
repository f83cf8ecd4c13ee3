"""``lce-jax``, which ``python -m lce_jax`` also is: the commands of this package, each imported when it is run."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys

import lce_jax

COMMANDS = {"explain": "what a head holds per device, with stored logits and without; needs no GPU"}
IN_A_CHECKOUT = {  # of the repository: the wheel has none of them
    "bench": ("make bench", "python -m benchmarks"),
    "demo": ("make demo", "python -m examples.demo"),
    "doctor": ("python -m benchmarks doctor",),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command with the arguments after its name, and returns its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    lines = [f"  {name:8s} {what}" for name, what in COMMANDS.items()]
    lines += ["", "lce-jax COMMAND --help has the options of each.", "", "In a checkout of the repository:"]
    lines += [f"  {name:8s} {', or '.join(commands)}" for name, commands in IN_A_CHECKOUT.items()]
    parser = argparse.ArgumentParser(
        prog="lce-jax",
        description="Log-probability and entropy of a language-model head, without storing the logits.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lce-jax {lce_jax.__version__}")
    parser.add_argument("command", metavar="COMMAND", help=f"one of {', '.join(COMMANDS)}")
    command = parser.parse_args(given[:1]).command
    if command not in {**COMMANDS, **IN_A_CHECKOUT}:
        similar = difflib.get_close_matches(command, COMMANDS, 1)
        meant = f" (did you mean {similar[0]}?)" if similar else ""
        parser.error(f"unknown command {command}{meant}; known: {', '.join(COMMANDS)}")
    if command in IN_A_CHECKOUT:
        elsewhere = " or ".join(IN_A_CHECKOUT[command])
        parser.error(f"{command} is not installed with the package: in a checkout of the repository, run {elsewhere}")
    try:
        status: int = importlib.import_module(f"lce_jax.{command}.__main__").main(given[1:])
    except BrokenPipeError:  # the reader of a pipe has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left there at its end
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
