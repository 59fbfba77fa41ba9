"""AMX, the matrix unit of newer CPUs, where a virtual machine announces it and does not let programs use it.

torch's library oneDNN multiplies bfloat16 matrices with it. On such a machine the first product ends the process with
SIGILL, which nobody can catch. So a process of its own makes such a product, and if it dies, oneDNN is told to do
without the unit. oneDNN listens only before its first product in a process.
"""

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

_LIMIT = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # the most that oneDNN may use: everything short of AMX
_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
_CPU = Path("/proc/cpuinfo")


def announced() -> bool:
    """Whether this CPU says that it has AMX for bfloat16."""
    try:
        return "amx_bf16" in _CPU.read_text()
    except OSError:
        return False


@cache
def traps() -> bool:
    """Whether a product of bfloat16 matrices ends a process here; it takes the seconds that importing torch takes."""
    if not announced() or _LIMIT[0] in os.environ:
        return False
    done = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, check=False)
    return done.returncode in (-signal.SIGILL, 128 + signal.SIGILL)


def avoid_trap() -> None:
    """Lets oneDNN do without the matrix unit where it traps."""
    if traps():
        os.environ[_LIMIT[0]] = _LIMIT[1]


def in_words() -> str:
    """What to know about the matrix unit of this machine, in one line; "" where there is nothing to know."""
    name, value = _LIMIT
    if traps():
        return (
            "this CPU announces AMX and traps on it: bfloat16 ends a process with SIGILL; training does without the"
            f" unit by itself, and for other programs set {name}={value}"
        )
    return f"{name}={os.environ[name]} limits what oneDNN uses" if name in os.environ else ""
