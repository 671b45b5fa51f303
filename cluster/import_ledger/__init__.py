# SPDX-License-Identifier: Apache-2.0
"""Shows which of our modules each process of a replica has imported.

A process that starts with `ledger_environment` runs the `sitecustomize` of this folder before
anything else. It writes one line when the process starts and one for each import of a module of
ours, so that "the stock engine loads nothing of vToken" is an observation, made inside the engine's
own processes, rather than a promise.
"""

import os
from collections import defaultdict
from pathlib import Path

FILE_VARIABLE = "VTOKEN_IMPORT_LEDGER"
START = "-"


def ledger_environment(file: Path) -> dict[str, str]:
    """Environment of a process whose imports, and whose children's, are written to `file`."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {FILE_VARIABLE: str(file), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read_ledger(file: Path) -> dict[int, set[str]]:
    """Process id -> modules of ours that it imported; processes that imported none are included."""
    imports: dict[int, set[str]] = defaultdict(set)
    for line in file.read_text().splitlines():
        pid, module = line.split()
        imports[int(pid)] |= set() if module == START else {module}
    return dict(imports)
