# SPDX-License-Identifier: Apache-2.0
"""The kernels of CUDA devices, on a CPU. tests/gpu runs them on a device."""

import os
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).with_name("kernels_interpreted.py")
ROOT = Path(__file__).parents[2]


def test_kernels_compute_what_they_should_in_tritons_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout
