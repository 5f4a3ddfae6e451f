"""`fullbore source` on a small synthetic package: every rename, and what must not be taken for the setting."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
from source_packages import FILES, marks, write_package
from typer.testing import CliRunner

from fullbore.cli import app
from fullbore.explain.source import Certainty, Place, SourceError, Study, open_package, study

MARKS = marks()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def found(folder: Path) -> Study:
    return study(open_package(str(folder)), "ring_depth")


def place_at(found: Study, mark: str) -> Place | None:
    every = [*found.places, *(use for derived in found.derived for use in derived.uses)]
    return next((place for place in every if (place.file, place.line) == MARKS[mark]), None)


def roles_of(found: Study, marked: str) -> dict[str, str]:
    places = {mark: place_at(found, mark) for mark in marked.split()}
    return {mark: place.role if place else "missing" for mark, place in places.items()}


@pytest.mark.parametrize(
    ("role", "marked"),
    [
        ("defines", "field option"),
        ("validates", "assert refuse message partial-assert"),
        (
            "guards",
            "getattr context alias-guard before after helper-guard early late mixin-attribute constructor-guard",
        ),
        ("guards", "unpacked-guard property-guard comprehension conditional match walrus"),
        ("sizes", "ring ring-target ring-use ring-loop allocation"),
        ("passes on", "attribute constructor keyword positional parameter alias constructor-parameter listed entry"),
        ("passes on", "property tuple unpacked partial partial-parameter"),
        ("derives", "override construct clamp"),
    ],
)
def test_every_rename_is_found_with_its_role(found: Study, role: str, marked: str) -> None:
    assert roles_of(found, marked) == dict.fromkeys(marked.split(), role)


def test_what_flow_or_type_proves_is_certain(found: Study) -> None:
    proven = (
        "field option assert getattr context alias-guard before after positional helper-guard early late "
        "ring mixin-attribute constructor-guard keyword construct clamp"
    )
    doubted = [mark for mark in proven.split() if place_at(found, mark).certainty is not Certainty.CERTAIN]
    assert doubted == []


def test_same_name_elsewhere_is_not_listed_as_certain(found: Study) -> None:
    assert place_at(found, "lamp") is None
    assert place_at(found, "lamp-guard") is None
    assert place_at(found, "unknown").certainty is Certainty.LIKELY
    assert place_at(found, "same-name-guard").certainty is Certainty.SAME_NAME
    reasons = {(mention.file, mention.line): mention.why for mention in found.mentions}
    assert "Lamp" in reasons[MARKS["lamp-guard"]]


def test_an_overwritten_variable_is_no_longer_the_setting(found: Study) -> None:
    file, line = MARKS["alias-guard"]
    second = next(number for number, text in enumerate(source_lines(file), 1) if "overwritten" in text)
    assert second > line
    assert (file, second) not in {(place.file, place.line) for place in found.places}


def source_lines(file: str) -> list[str]:
    return FILES[file].lstrip("\n").splitlines()


def test_guards_carry_condition_and_what_they_run(found: Study) -> None:
    before = place_at(found, "before")
    assert (before.condition, before.runs) == ("self.server_args.ring_depth > 0", 'self.exchange("slow")')
    assert (before.function, before.qualname) == ("loop", "LoopMixin.loop")
    assert place_at(found, "override").condition == "memory < 10"
    assert "exchange_first" in place_at(found, "early").via


def test_a_condition_with_others_and_a_running_value_are_computed_values(found: Study) -> None:
    names = {derived.name: derived.expression for derived in found.derived}
    assert names["self.loop_size"] == "self.server_args.pp_size + self.server_args.ring_depth"
    assert place_at(found, "running") is not None
    assert "starts as" in names["Ring.left"]


def test_defaults_and_changes_of_other_settings(folder: Path) -> None:
    cap = study(open_package(str(folder)), "--batch-cap")
    assert roles_of(cap, "dest cap-unset cap-default") == {
        "dest": "defines",
        "cap-unset": "guards",
        "cap-default": "defaults",
    }
    assert place_at(cap, "cap-default").condition == "self.batch_cap is None"
    fast = study(open_package(str(folder)), "fast_path")
    assert roles_of(fast, "fast-change fast-copy fast-guard") == {
        "fast-change": "derives",
        "fast-copy": "passes on",
        "fast-guard": "guards",
    }


def test_environment_variables(folder: Path) -> None:
    partition = study(open_package(str(folder)), "TOY_PARTITION")
    assert roles_of(partition, "env env-guard env-parts env-check") == {
        "env": "defines",
        "env-guard": "guards",
        "env-parts": "derives",
        "env-check": "validates",
    }
    overlap = study(open_package(str(folder)), "TOY_OVERLAP")
    assert roles_of(overlap, "envs-define envs") == {"envs-define": "defines", "envs": "guards"}


def test_every_line_with_the_name_is_listed_or_explained(found: Study) -> None:
    listed = {(place.file, place.line) for place in found.places}
    listed |= {(use.file, use.line) for derived in found.derived for use in derived.uses}
    listed |= {(mention.file, mention.line) for mention in found.mentions}
    occurring = {
        (file, number)
        for file, text in FILES.items()
        for number, line in enumerate(text.lstrip("\n").splitlines(), 1)
        if re.search(r"\bring_depth\b", line)
    }
    assert occurring - listed == set()


def test_summary_tells_forks_order_and_sizes(found: Study) -> None:
    text = "\n".join(found.summary)
    assert "LoopMixin.loop" in text
    assert "It decides the order" in text
    assert "runs before launch if `self.server_args.ring_depth > 0`, after if" in text
    assert "the answer of exchange_first, called with the setting at line" in text
    assert "sizes self.loop_size" in text
    assert "self.slots" in text


def test_files_that_are_not_python_are_named_not_fatal(found: Study) -> None:
    assert found.unreadable == ["toyengine/broken.py"]


@pytest.mark.parametrize("flag", ["--ring-depth", "ring-depth", "ring_depth", "--depth-of-ring", "--ring-depth=3"])
def test_spellings_of_a_flag(folder: Path, flag: str) -> None:
    assert study(open_package(str(folder)), flag).flag == "ring_depth"


def test_unknown_flag_offers_close_matches(folder: Path) -> None:
    with pytest.raises(SourceError, match=r"toyengine 9\.9 has no setting '--ring-dept'; close: ring_depth"):
        study(open_package(str(folder)), "--ring-dept")


# ---- where the package comes from


def test_folder_wheel_and_package_folder_give_the_same(folder: Path, found: Study, tmp_path: Path) -> None:
    wheel = tmp_path / "toyengine-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())
    for where in (wheel, folder / "toyengine"):
        package = open_package(str(where))
        assert (package.name, package.version) == ("toyengine", "9.9")
        assert study(package, "ring_depth").as_dict() == found.as_dict()


def test_installed_package_is_found_by_name_and_not_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trapped"
    trap.mkdir()
    (trap / "__init__.py").write_text('raise RuntimeError("imported")\n__version__ = "0.1"\nfrom .a import x\n')
    (trap / "a.py").write_text("def f(knob):\n    if knob:\n        return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = open_package("trapped")
    assert package.version == "0.1"
    assert [place.line for place in study(package, "knob").places] == [1, 2]


def test_missing_package_broken_wheel_and_empty_folder_are_explained(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not installed here"):
        open_package("no_such_package_anywhere")
    with pytest.raises(SourceError, match="no folder or wheel"):
        open_package("no/such/path.whl")
    broken = tmp_path / "x.whl"
    broken.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(SourceError, match="cannot be read"):
        open_package(str(broken))
    with pytest.raises(SourceError, match="no Python files"):
        open_package(str(tmp_path))


# ---- the command


def test_command_prints_text_within_80_columns_when_piped(folder: Path) -> None:
    result = CliRunner().invoke(app, ["source", "--ring-depth", "--package", str(folder)])
    assert result.exit_code == 0
    assert "ring_depth in toyengine 9.9" in result.output
    assert "LoopMixin.loop" in result.output
    assert "\x1b[" not in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80


def test_command_json_has_the_documented_keys(folder: Path) -> None:
    result = CliRunner().invoke(app, ["source", "ring_depth", "--package", str(folder), "--json"])
    answer = json.loads(result.output)
    assert {"package", "version", "flag", "places", "derived", "mentions", "summary"} <= answer.keys()
    assert {"file", "line", "function", "role", "condition"} <= answer["places"][0].keys()


def test_command_shows_everything_with_all(folder: Path) -> None:
    plain = CliRunner().invoke(app, ["source", "ring_depth", "--package", str(folder)]).output
    full = CliRunner().invoke(app, ["source", "ring_depth", "--package", str(folder), "--all"]).output
    assert "toyengine/test/helpers.py" in full
    assert "toyengine/test/helpers.py" not in plain


def test_unknown_flag_ends_with_code_2(folder: Path) -> None:
    result = CliRunner().invoke(app, ["source", "ring_dept", "--package", str(folder)])
    assert isinstance(result.exception, SourceError)
    assert result.exception.exit_code == 2
