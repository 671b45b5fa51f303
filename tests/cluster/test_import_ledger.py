# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path

from cluster.import_ledger import ledger_environment, read_ledger

SPAWNS_A_CHILD = """
import multiprocessing, sys
context = multiprocessing.get_context("spawn")
child = context.Process(target=__import__, args=("vtoken.errors",))
child.start()
child.join()
sys.exit(child.exitcode)
"""


def run(code: str, file: Path) -> list[set[str]]:
    environment = {**os.environ, **ledger_environment(file)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return list(read_ledger(file).values())


def test_process_without_our_modules_is_listed_as_such(tmp_path: Path) -> None:
    assert run("import json, socketserver", tmp_path / "ledger") == [set()]


def test_import_of_ours_is_seen_in_a_spawned_child(tmp_path: Path) -> None:
    parent, *children = run(SPAWNS_A_CHILD, tmp_path / "ledger")
    assert parent == set()
    assert {"vtoken", "vtoken.errors"} in children
