# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks' command lines have in common."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from benchmarks.results import Part, write_result


def parser(description: str | None, shape: str, rounds: int = 3) -> argparse.ArgumentParser:
    """One with --rounds and --shape."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=rounds, help="repeats, by turns")
    made.add_argument("--shape", default=shape, help="model shape (benchmarks/shapes.py)")
    return made


def publish(benchmark: str, part: Part) -> None:
    """Write the result file and show its summary."""
    path = write_result(benchmark, part)
    print(json.dumps(part.summary, indent=1))
    print(path.name)


def short(row: Mapping[str, Any]) -> str:
    """A row as a line of progress."""
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    return json.dumps({k: v for k, v in shown.items() if not isinstance(v, list | dict)})
