"""What the package promises beside its code: what ships, what is pinned, and what no file may name."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ["constraints.txt", "constraints-floor.txt"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


PROJECT = tomllib.loads(text("pyproject.toml"))["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = [Requirement(line) for extra in PROJECT["optional-dependencies"].values() for line in extra]


def pins(name: str) -> dict[str, str]:
    """Package to version, of a constraints file and of those it includes."""
    found = {}
    for line in text(name).splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-c "):
            found |= pins(line.removeprefix("-c ").strip())
        elif line:
            package, _, version = line.partition("==")
            assert version, f"{name}: {line!r} is no exact pin"
            assert canonicalize_name(package) not in found, f"{name} pins {package} twice"
            found[canonicalize_name(package)] = version
    return found


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    package = [file for file in (ROOT / "src").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    ours = {file.relative_to(ROOT / "src").as_posix() for file in package}
    info = f"gemloupe-{PROJECT['version']}.dist-info"
    metadata = {
        f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert shipped == ours | metadata
    assert "gemloupe/py.typed" in shipped


def test_the_installed_version_is_the_written_one():
    assert importlib.metadata.version("gemloupe") == PROJECT["version"]


def test_every_console_command_resolves():
    installed = {entry.name: entry for entry in importlib.metadata.entry_points(group="console_scripts")}
    assert PROJECT["scripts"]
    for name, target in PROJECT["scripts"].items():
        assert installed[name].value == target
        assert callable(installed[name].load())


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_every_direct_dependency_is_pinned_inside_its_range(name):
    pinned = pins(name)
    for requirement in DEPENDENCIES + EXTRAS:
        pin = pinned.get(canonicalize_name(requirement.name))
        assert pin, f"{name} does not pin {requirement.name}"
        assert requirement.specifier.contains(pin), f"{name}: {pin} is not in {requirement}"


def test_the_floor_is_the_lower_bound_of_every_range():
    pinned = pins("constraints-floor.txt")
    for requirement in DEPENDENCIES:
        bounds = [Version(spec.version) for spec in requirement.specifier if spec.operator == ">="]
        assert bounds == [Version(pinned[canonicalize_name(requirement.name)])], requirement


@pytest.mark.skipif(
    "GEMLOUPE_CONSTRAINTS" not in os.environ,
    reason="only `make test` and `make test-floor` say which file their environment was made from",
)
def test_this_environment_is_the_pinned_one():
    name = os.environ["GEMLOUPE_CONSTRAINTS"]
    assert name in CONSTRAINTS
    installed: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        # The first is what an import finds: setuptools, once imported, adds packages of its own behind it.
        # torch 2.13.0+cpu meets torch==2.13.0.
        installed.setdefault(canonicalize_name(found.name), found.version.partition("+")[0])
    pinned = pins(name)
    assert {canonicalize_name(requirement.name) for requirement in DEPENDENCIES} <= installed.keys()
    assert {package: version for package, version in installed.items() if package in pinned} == {
        package: pin for package, pin in pinned.items() if package in installed
    }


@pytest.mark.parametrize("name", [*CONSTRAINTS, "constraints-shared.txt"])
def test_every_pin_has_its_reason(name):
    lines = [line for line in text(name).splitlines() if "==" in line]
    assert lines
    assert [line for line in lines if not re.search(r"==\S+  # \w", line)] == []


def test_every_dependency_has_its_reason():
    lines = re.findall(
        r'^    "(.+?)",(.*)$', text("pyproject.toml").partition("[project.scripts]")[0], re.MULTILINE
    )
    reasons = {Requirement(line).name: reason for line, reason in lines if "::" not in line}
    assert reasons.keys() == {requirement.name for requirement in DEPENDENCIES + EXTRAS}
    assert [name for name, reason in reasons.items() if not reason.startswith("  # ")] == []


def repository_files() -> list[Path]:
    """Every file that git tracks or would track; none where this is no checkout (an unpacked sdist)."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return []
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


# Written in pieces, so that this file does not match itself.
MACHINE_FOLDERS = "|".join(["work", "home", "root", "Users", "opt", "tmp", "mnt"])
REGISTRIES = "|".join(["python" + "hosted", r"\bpypi\." + "org", r"\bregistry\." + "npm"])
OPTIONS = "|".join(["index" + "-url", "find" + "-links"])
FORBIDDEN = re.compile(rf"(?<![\w.:/-])/(?:{MACHINE_FOLDERS})/[\w.]|{REGISTRIES}|{OPTIONS}")


@pytest.mark.parametrize(
    "pieces",
    [("cd /", "work/main"), ('"/', "home/me/x"), ("files.python", "hosted"), ("--extra-index", "-url x")],
)
def test_the_search_finds_what_it_looks_for(pieces):
    assert FORBIDDEN.search("".join(pieces))


@pytest.mark.parametrize("line", ["../work/x", "https://example.org/home/x", "work/home/x", "a / root / b"])
def test_the_search_passes_over_what_is_fine(line):
    assert not FORBIDDEN.search(line)


def test_no_file_names_a_machine_or_a_registry():
    files = repository_files()
    if not files:
        pytest.skip("no git checkout: nothing says which files belong to the repository")
    assert Path(__file__) in files
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert found == []


def makefile_targets() -> set[str]:
    phony = re.search(r"^\.PHONY: (.*)$", text("Makefile"), re.MULTILINE)
    assert phony
    return set(phony.group(1).split())


def named_targets(markdown: str) -> set[str]:
    """The targets of make in a page's inline code and at the start of its code lines."""
    inline = re.findall(r"`make ([a-z-]+)", markdown)
    lines = re.findall(r"^ *(?:\$ )?make ([a-z-]+)(?: +#.*| +[A-Z]+=.*)?$", markdown, re.MULTILINE)
    return {*inline, *lines}


def test_every_target_is_defined_and_explained():
    explained = re.findall(r"^([a-z-]+):.*  ## \S", text("Makefile"), re.MULTILINE)
    assert set(explained) == makefile_targets()


def test_the_documents_name_targets_that_exist():
    readme = named_targets(text("README.md"))
    assert {"tour", "test"} <= readme
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    assert readme.union(*map(named_targets, pages)) <= makefile_targets()


def test_ci_runs_every_check():
    steps = re.findall(r"^(?:step|exec make .*) ([a-z-]+)(?: </dev/null)?$", text(".ci/run"), re.MULTILINE)
    assert sorted(steps) == ["docs", "lint", "test", "test-floor", "tour"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_hooks_run_the_tools_that_lint_runs():
    config = text(".pre-commit-config.yaml")
    assert set(re.findall(r"repo: (\S+)", config)) == {"local"}
    hooks = {Path(entry).name for entry in re.findall(r"entry: \.venv/bin/(\S+)", config)}
    assert hooks == set(re.findall(r"\$\(VENV\)/bin/(ruff|pyright)", text("Makefile")))
