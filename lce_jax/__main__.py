"""The command ``lce-jax``, or ``python -m lce_jax``. A subcommand's module is imported only when it runs."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys

import lce_jax

COMMANDS = {"explain": "the memory of a head per device, with stored logits and without; needs no GPU"}
CHECKOUT_COMMANDS = {  # commands that need a checkout of the repository
    "bench": ("make bench", "python -m benchmarks"),
    "demo": ("make demo", "python -m examples.demo"),
    "doctor": ("python -m benchmarks doctor",),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the subcommand that ``arguments`` names, with the arguments after the name. Returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    lines = [f"  {name:8s} {purpose}" for name, purpose in COMMANDS.items()]
    lines += ["", "lce-jax COMMAND --help has the options of each.", "", "In a checkout of the repository:"]
    lines += [f"  {name:8s} {', or '.join(commands)}" for name, commands in CHECKOUT_COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="lce-jax",
        description="Log-probability and entropy of a language-model head, without storing the logits.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lce-jax {lce_jax.__version__}")
    parser.add_argument("command", metavar="COMMAND", help=f"one of {', '.join(COMMANDS)}")
    command = parser.parse_args(arguments[:1]).command
    if command not in {**COMMANDS, **CHECKOUT_COMMANDS}:
        similar = difflib.get_close_matches(command, COMMANDS, 1)
        meant = f" (did you mean {similar[0]}?)" if similar else ""
        parser.error(f"unknown command {command}{meant}; known: {', '.join(COMMANDS)}")
    if command in CHECKOUT_COMMANDS:
        advice = " or ".join(CHECKOUT_COMMANDS[command])
        parser.error(f"{command} is not installed with the package: in a checkout of the repository, run {advice}")
    try:
        status: int = importlib.import_module(f"lce_jax.{command}.__main__").main(arguments[1:])
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes buffered output here at exit
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
