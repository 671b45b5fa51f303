# SPDX-License-Identifier: Apache-2.0
"""The torch step of scripts/setup.sh, against package indexes that are folders on this disk."""

import os
import shutil
import subprocess
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TORCH = "torch==2.13.0+cpu"


@dataclass(frozen=True)
class Machine:
    """An empty environment with two indexes: the user's own and the one for torch."""

    venv: Path
    own_index: Path
    torch_index: Path

    def run(self, *steps: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        # The real pip configuration may name an index, or a folder, that does hold torch.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "VTOKEN_"))}
        isolated = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_INDEX_URL": self.own_index.as_uri(),
            "PIP_RETRIES": "0",
            "VTOKEN_TORCH_INDEX": self.torch_index.as_uri(),
            "VTOKEN_VENV": str(self.venv),
        }
        return subprocess.run(
            ["bash", str(PROJECT / "scripts" / "setup.sh"), *steps],
            env=inherited | isolated | environ,
            capture_output=True,
            text=True,
            check=False,
        )

    def torch_is_installed(self) -> bool:
        return any(self.venv.glob("lib/python3*/site-packages/torch-2.13.0+cpu.dist-info"))


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but pip, made by the script's own first step."""
    folder = tmp_path_factory.mktemp("setup")
    machine = Machine(folder / "venv", folder, folder)
    done = machine.run("create_venv")
    assert done.returncode == 0, done.stderr
    return machine.venv


@pytest.fixture
def machine(tmp_path: Path, empty_venv: Path) -> Machine:
    shutil.copytree(empty_venv, tmp_path / "venv", symlinks=True)
    own, torch = tmp_path / "own", tmp_path / "torch"
    own.mkdir()
    torch.mkdir()
    return Machine(tmp_path / "venv", own, torch)


def add_fake_torch(index: Path) -> None:
    name, info = "torch-2.13.0+cpu-py3-none-any.whl", "torch-2.13.0+cpu.dist-info"
    folder = index / "torch"
    folder.mkdir()
    files = {
        "torch.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"torch.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    link = name.replace("+", "%2B")
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{link}">{name}</a>')


def test_the_configured_index_is_asked_first(machine: Machine) -> None:
    add_fake_torch(machine.own_index)
    done = machine.run("install_torch")
    assert done.returncode == 0, done.stderr
    assert f"setup: {TORCH} comes from the configured index" in done.stdout
    assert machine.torch_index.as_uri() not in done.stdout
    assert machine.torch_is_installed()


def test_the_torch_index_is_asked_when_the_configured_one_has_no_torch(machine: Machine) -> None:
    add_fake_torch(machine.torch_index)
    done = machine.run("install_torch")
    assert done.returncode == 0, done.stderr
    assert f"setup: {TORCH} comes from {machine.torch_index.as_uri()}" in done.stdout
    assert machine.torch_is_installed()


def test_without_torch_on_either_index_the_step_fails_and_names_both(machine: Machine) -> None:
    done = machine.run("install_torch", "install_project")
    assert done.returncode == 1
    assert (
        f"setup: FAILED: neither the configured index nor {machine.torch_index.as_uri()} "
        f"gives {TORCH}" in done.stderr
    )
    assert "setup: install_project" not in done.stdout
    assert not machine.torch_is_installed()


def test_a_failing_import_check_stops_with_what_to_do(machine: Machine) -> None:
    done = machine.run("check_imports")
    assert done.returncode == 1
    assert "setup: FAILED: vllm and transformers do not import" in done.stderr
    assert "delete that folder" in done.stderr


@pytest.mark.parametrize(
    ("step", "extra", "message"),
    [
        ("install_touch", "cpu", "no step 'install_touch'; the steps are: create_venv"),
        ("install_torch", "tpu", "VTOKEN_EXTRA is 'tpu'; it must be cpu or gpu"),
    ],
)
def test_a_wrong_call_stops_with_its_reason(
    machine: Machine, step: str, extra: str, message: str
) -> None:
    done = machine.run(step, VTOKEN_EXTRA=extra)
    assert done.returncode == 1
    assert f"setup: FAILED: {message}" in done.stderr


def test_without_python_3_11_the_first_step_says_so(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("bash", "dirname", "sed"):
        found = shutil.which(program)
        assert found is not None
        (tmp_path / "bin" / program).symlink_to(found)
    done = machine.run("create_venv", PATH=str(tmp_path / "bin"))
    assert done.returncode == 1
    assert "setup: FAILED: python3.11 is not on the PATH" in done.stderr


def test_torch_is_pinned_in_the_cpu_extra_only_once() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["cpu"]
    assert [line for line in extra if line.startswith("torch")] == [TORCH]


def test_an_environment_of_one_build_is_never_turned_into_the_other(machine: Machine) -> None:
    (machine.venv / ".stamp-gpu").touch()
    done = machine.run("create_venv")
    assert done.returncode == 1
    assert f"{machine.venv} was set up for gpu; delete it to set up cpu" in done.stderr


def test_torch_of_the_gpu_extra_is_left_to_vllm(machine: Machine) -> None:
    add_fake_torch(machine.own_index)
    done = machine.run("install_torch", VTOKEN_EXTRA="gpu")
    assert done.returncode == 0, done.stderr
    assert not machine.torch_is_installed()
