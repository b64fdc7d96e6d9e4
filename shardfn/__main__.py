"""The command line: `python -m shardfn demo | doctor`."""

import argparse
import sys
from collections.abc import Sequence

import shardfn_demo
from shardfn.inspect import doctor

COMMANDS = {"demo": shardfn_demo.main, "doctor": doctor.main}


def main(argv: Sequence[str]) -> int:
    """Run one command, which reads the arguments after its name."""
    parser = argparse.ArgumentParser(prog="python -m shardfn")
    parser.add_argument(
        "command", choices=COMMANDS, help="one GPT in three worlds; or what this machine can do"
    )
    name = parser.parse_args(argv[:1]).command
    return COMMANDS[name](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
