"""Who may import whom, and how long things may get."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("vtoken", "worker", "scheduler", "cluster")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

FORBIDDEN = {
    "vtoken": {"vllm", "ray", "worker", "scheduler", "cluster"},
    "scheduler": {"vllm", "ray", "torch", "worker", "cluster"},
    "worker": {"ray", "cluster"},
    "cluster": {"vllm"},
}

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 250, 40, 5

# Functions that may be longer or take more, each with the reason.
ARGUED = {
    "cluster/cli.py:serve": "each parameter is one option of the command line",
    "vtoken/copy_cuda.py:_copy_tokens": "a kernel takes scalars and constants one by one",
    "vtoken/probe_kernels.py:place_kernel": "the same",
    "vtoken/probe_kernels.py:_load_keys": "the same",
    "vtoken/probe_kernels.py:attention_kernel": "the same, and two passes that share its state",
    "vtoken/probe_kernels.py:key_kernel": "the same",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of everything a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def num_parameters(function: Function) -> int:
    """Named parameters, but self and cls."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_there_is_something_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_layers_import_downwards_only(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    found = set(imported(ast.parse(path.read_text())))
    assert not found & FORBIDDEN[package]


def test_an_import_inside_a_function_counts() -> None:
    tree = ast.parse("def f():\n    from vllm.config import VllmConfig\n    import ray.serve\n")
    assert set(imported(tree)) == {"vllm", "ray"}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_those_of_this_repository(package: str) -> None:
    """Their names are generic: another installed package must not stand in front of them."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin) == ROOT / package / "__init__.py"


def too_large(path: Path) -> set[str]:
    """Functions of a file that are too long or take too much."""
    return {
        f"{name_of(path)}:{function.name}"
        for function in functions(ast.parse(path.read_text()))
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES
        or num_parameters(function) > MAX_PARAMETERS
    }


@pytest.mark.parametrize("path", [*FILES, *BENCHMARKS], ids=name_of)
def test_files_functions_and_calls_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    assert not too_large(path) - set(ARGUED)


def test_every_exception_is_still_needed() -> None:
    assert set(ARGUED) <= set().union(*(too_large(path) for path in FILES))


def test_parameters_are_counted_without_self() -> None:
    (function,) = functions(ast.parse("def f(self, a, /, b, *args, c, d, e, **kwargs): ..."))
    assert num_parameters(function) == 5
