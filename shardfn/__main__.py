"""The command line: `python -m shardfn demo | doctor | audit | report`."""

import argparse
import sys
from collections.abc import Sequence

import shardfn_demo
from shardfn.inspect import doctor
from shardfn.proof.audits import command as audit
from shardfn.reports import command as report

COMMANDS = {
    "demo": shardfn_demo.main,
    "doctor": doctor.main,
    "audit": audit.main,
    "report": report.main,
}


def main(argv: Sequence[str]) -> int:
    """Run one command, which reads the arguments after its name."""
    parser = argparse.ArgumentParser(prog="python -m shardfn")
    parser.add_argument(
        "command",
        choices=COMMANDS,
        help="demo: a GPT on one device, simulated ranks and real ranks; doctor: what this machine "
        "supports; audit: compare a distributed script with one device; report: write an HTML "
        "page about a step",
    )
    name = parser.parse_args(argv[:1]).command
    return COMMANDS[name](argv[1:])


def run() -> int:
    """Run the command of this process's arguments: the script `shardfn`."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
