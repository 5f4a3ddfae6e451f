"""Find a Python package (installed, unpacked, or still a wheel) and read its .py files, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fullbore.errors import FullboreError

# Folders of a checkout that hold other people's packages or no source at all.
SKIPPED_FOLDERS = {"node_modules", "site-packages", "__pycache__", "venv", "build", "dist"}
ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz")
VERSION_FILES = ("_version.py", "version.py", "__version__.py", "__init__.py")


TEST_FOLDERS = {"test", "tests", "testing", "benchmark", "benchmarks", "examples"}


class SourceError(FullboreError):
    """The package or the setting in it cannot be found or read."""

    exit_code = 2


@dataclass(frozen=True)
class Package:
    """Source text of one package: `files` maps a path such as `sglang/srt/server_args.py` to its bytes."""

    name: str
    version: str
    files: dict[str, bytes]


def is_test(path: str) -> bool:
    """The file stands in a folder of tests, benchmarks or examples."""
    return bool(TEST_FOLDERS & set(path.split("/")[:-1]))


def open_package(what: str) -> Package:
    """Reads the package `what`: a folder, a wheel or source archive, or the name of an installed package.

    Raises:
        SourceError: nothing is there, or it holds no Python files.
    """
    path = Path(what).expanduser()
    if path.is_dir():
        package = _from_folder(path.resolve())
    elif path.is_file():
        package = _from_archive(path)
    else:
        package = _installed(what)
    if not package.files:
        raise SourceError(f"{what} holds no Python files; give the folder of a package, or a wheel.")
    return package


def _from_folder(folder: Path) -> Package:
    """A package folder (with `__init__.py`), or a folder that contains packages (unpacked wheel, checkout)."""
    root = folder.parent if (folder / "__init__.py").exists() else folder
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in _python_files(folder)}
    version = _metadata_version(root, folder.name) or _version_in(files)
    if version is None and (folder / "pyproject.toml").exists():
        version = _search(rb'^version\s*=\s*"([^"]+)"', (folder / "pyproject.toml").read_bytes())
    return Package(_common_name(files, folder.name), version or "unknown", files)


def _python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and not path.name.startswith(".") and not path.is_symlink():
                yield from _python_files(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def _from_archive(path: Path) -> Package:
    if not path.name.endswith(ARCHIVES):
        raise SourceError(f"{path} is neither a folder nor a wheel ({', '.join(ARCHIVES)}).")
    try:
        members = dict(_zip_members(path) if zipfile.is_zipfile(path) else _tar_members(path))
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        raise SourceError(f"{path} cannot be read as an archive ({error}); download it again.") from error
    files = {name: data for name, data in members.items() if name.endswith(".py")}
    metadata = [data for name, data in members.items() if name.endswith(("METADATA", "PKG-INFO"))]
    version = next((found for data in metadata if (found := _search(rb"^Version: *(\S+)", data))), None)
    name = next((found for data in metadata if (found := _search(rb"^Name: *(\S+)", data))), None)
    return Package(name or _common_name(files, path.name), version or _version_in(files) or "unknown", files)


def _zip_members(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith((".py", "METADATA")):
                yield name, archive.read(name)


def _tar_members(path: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.name.endswith((".py", "PKG-INFO")) else None
            if stream is not None:
                yield member.name, stream.read()


def _installed(name: str) -> Package:
    """Looks `name` up on the import path; finding the spec of a top-level name runs none of its code."""
    if not name.isidentifier():
        raise SourceError(f"There is no folder or wheel {name!r}; give an existing path or the name of a package.")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if not folders:
        raise SourceError(
            f"Package {name!r} is not installed here; install it, or run `pip download --no-deps {name}` "
            "and give the wheel: --package PATH."
        )
    files = {
        f"{name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for folder in folders
        for path in _python_files(folder)
    }
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = _version_in(files) or "unknown"
    return Package(name, version, files)


def _metadata_version(folder: Path, name: str) -> str | None:
    """Version in the `NAME-1.2.dist-info` next to the package."""
    found = [path for path in folder.glob("*.dist-info/METADATA") if path.exists()]
    named = [path for path in found if path.parent.name.split("-")[0].lower() == name.lower().replace("-", "_")]
    chosen = named or (found if len(found) == 1 else [])
    return _search(rb"^Version: *(\S+)", chosen[0].read_bytes()) if chosen else None


def _version_in(files: dict[str, bytes]) -> str | None:
    """`__version__ = "..."` in the usual files nearest to the package's top."""
    candidates = [path for path in files if path.rpartition("/")[2] in VERSION_FILES]
    for path in sorted(candidates, key=lambda path: (path.count("/"), path)):
        version = _search(
            rb"^(?:__version__|version)\s*(?::[^=\n]+)?=\s*(?:\w+\s*=\s*)?[\"']([^\"']+)[\"']", files[path]
        )
        if version is not None:
            return version
    return None


def _common_name(files: dict[str, bytes], fallback: str) -> str:
    """The top folder with the most files."""
    tops = [path.partition("/")[0] for path in files if "/" in path]
    return max(sorted(set(tops)), key=tops.count) if tops else fallback


def _search(pattern: bytes, data: bytes) -> str | None:
    match = re.search(pattern, data, re.MULTILINE)
    return match.group(1).decode(errors="replace") if match else None
