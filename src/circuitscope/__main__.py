"""`python -m circuitscope` is the command `circuitscope`, and `torchrun -m circuitscope train …` starts it as ranks."""

import sys

from circuitscope.cli.main import command

if __name__ == "__main__":
    sys.argv[0] = "circuitscope"  # as in the record of a run
    command()
