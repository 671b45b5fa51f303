# SPDX-License-Identifier: Apache-2.0
"""Run by Python at its start because this folder is on its path; see the package's docstring."""

import os
import sys

_OURS = frozenset(("vtoken", "worker", "scheduler", "cluster"))
_FILE = os.environ.get("VTOKEN_IMPORT_LEDGER")


def _note(word: str) -> None:
    # One short append: lines of several processes do not mix.
    with open(str(_FILE), "a") as file:
        file.write(f"{os.getpid()} {word}\n")


def _hook(event: str, args: tuple[object, ...]) -> None:
    if event == "import" and str(args[0]).partition(".")[0] in _OURS:
        _note(str(args[0]))


if _FILE:
    _note("-")
    sys.addaudithook(_hook)
