"""SIGKILLs training runs many times and resumes them: `python tests/faults/soak.py --kills 200`.

Prints progress and at the end one line with the result; exits with 1 if anything was lost or differed.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from kills import Tally, kill_and_resume


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder to run in, and to leave behind (default: a temporary one)")
    options = parser.parse_args()
    began = time.monotonic()

    def tell(tally: Tally) -> None:
        if tally.kills % 10 == 0:
            print(f"{time.monotonic() - began:5.0f} s  {tally}", flush=True)

    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.keep or Path(temporary)
        tally = kill_and_resume(folder, options.kills, options.seed, tell)
    for line in (*tally.unreadable, *tally.other_bits, *tally.other_rows, *tally.leftovers):
        print(f"bad: {line}", file=sys.stderr)
    print(f"soak {'passed' if tally.clean else 'FAILED'}: {tally} in {time.monotonic() - began:.0f} s")
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
