"""docs/adding-a-policy.md works as it stands: its files, its commands, from an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-policy.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the page, with the files that it shows."""
    made = tmp_path / "my-policy"
    made.mkdir()
    names = re.findall(r"^`my-policy/([^`]+)`", PAGE, re.MULTILINE)
    assert names == ["pyproject.toml", "my_policy.py"]
    for name, language in zip(names, ("toml", "python"), strict=True):
        (content,) = blocks(language)
        (made / name).write_text(content)
    return made


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command of the page; what it installs goes beside the folder, not into this environment."""
    site = str(folder.parent / "site")
    command = command.replace("./my-policy", str(folder))
    command = command.replace(".venv/bin/python", sys.executable)
    env = os.environ | {"PIP_TARGET": site, "PYTHONPATH": site}
    return subprocess.run(
        command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def test_the_commands_of_the_page_add_a_policy_that_passes_the_matrix(folder: Path) -> None:
    install, check = blocks("bash")
    done = run(check, folder)
    assert done.returncode == 5, "a control: before it is installed no test is about it"
    assert run(install, folder).returncode == 0
    done = run(check, folder)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 30


def test_a_policy_that_breaks_the_contract_does_not_pass(folder: Path) -> None:
    """A control: one whose scores depend on the order of the view."""
    source = folder / "my_policy.py"
    wrong = "np.arange(view.positions.size, dtype=np.float64)"
    text = re.sub(r"return .*", f"return {wrong}", source.read_text())
    source.write_text(text.replace("from dataclasses", "import numpy as np\nfrom dataclasses", 1))
    install, check = blocks("bash")
    assert run(install, folder).returncode == 0
    done = run(check, folder)
    assert done.returncode == 1 and "order_of_the_view" in done.stdout
