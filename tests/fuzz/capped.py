"""`circuitscope` with the caps of the walk on its work: `python tests/fuzz/capped.py train --steps 5`."""

import sys

from ground import Capped, cap

from circuitscope.cli.main import command

if __name__ == "__main__":
    cap()
    try:
        command()
    except Capped:
        print("fuzz: capped", file=sys.stderr)
        sys.exit(1)
