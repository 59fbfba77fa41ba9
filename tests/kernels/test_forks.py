"""Forked processes compute too: the tests of forks_of_a_fresh_process.py, in a process of their own.

Tests of a second device make that device known to torch. From then on torch computes gradients in threads of its own,
which a forked process does not have, so a fork of this process would be refused.
"""

import re
import subprocess
import sys
from pathlib import Path


def test_the_tests_of_forks_pass_in_a_fresh_process():
    tests = Path(__file__).with_name("forks_of_a_fresh_process.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=tests.parents[2], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^7 passed", done.stdout, re.MULTILINE), done.stdout
