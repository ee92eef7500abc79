"""What strangers get: files of a form that others' programs read, wheel and source archive, and `imdm` installed from
them outside the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from imdm import __version__, shipped

ROOT = Path(__file__).parents[2]
FORMS = {
    "vendor.github-workflows": [".github/workflows/*.yml"],
    "custom.github-workflows-require-timeout": [".github/workflows/*.yml"],
    "vendor.github-issue-forms": [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/idea.yml"],
    "vendor.github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.citation-file-format": ["CITATION.cff"],
}
MEGABYTE = 1_000_000
REQUIREMENTS = """
from importlib.metadata import requires, version
from packaging.requirements import Requirement
for one in map(Requirement, requires("imdm")):
    if one.marker is None or one.marker.evaluate({"extra": ""}):
        assert version(one.name) in one.specifier, one
        print(one.name)
"""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def checked(form: str, files: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", form, "--default-filetype", "yaml"]
    return subprocess.run([*command, *map(str, files)], capture_output=True, text=True)


@pytest.mark.parametrize("form", FORMS)
def test_files_have_the_form_that_their_readers_expect(form: str, tmp_path: Path) -> None:
    files = [file for pattern in FORMS[form] for file in ROOT.glob(pattern)]
    assert files
    done = checked(form, files)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "broken.yml").write_text("{blank_issues_enabled: 3, jobs: {test: {runs-on: here, steps: []}}}")
    assert "validation errors were encountered" in checked(form, [tmp_path / "broken.yml"]).stdout


def test_workflows_try_the_versions_that_the_package_names() -> None:
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    tried = [
        f"Programming Language :: Python :: {version}"
        for version in tests["jobs"]["test"]["strategy"]["matrix"]["python"]
    ]
    assert tried == [line for line in project()["classifiers"] if "Python ::" in line]
    assert project()["requires-python"] == ">=" + tried[0].rpartition(" ")[2]


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == __version__
    assert project()["dynamic"] == ["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## ({re.escape(__version__)}|Unreleased)$", changes, re.MULTILINE)


def test_the_citation_is_the_one_in_the_readme() -> None:
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    authors = " and ".join(f"{one['family-names']}, {one['given-names']}" for one in paper["authors"])
    for part in (paper["title"], authors, str(paper["year"]), paper["identifiers"][0]["value"]):
        assert part in readme


def test_all_is_every_extra_of_a_user() -> None:
    extras = project()["optional-dependencies"]
    (every,) = extras["all"]
    assert set(every.removeprefix("imdm[").removesuffix("]").split(",")) == set(extras) - {"all", "dev", "docs"}


def test_extras_that_messages_name_are_there() -> None:
    named = {
        extra
        for file in [*(ROOT / "src").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for group in re.findall(r"imdm\[([a-z,-]+)\]", file.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert named <= set(project()["optional-dependencies"])
    assert {"serve", "lora", "text"} <= named


def test_what_is_pinned_is_asked_for() -> None:
    """Every requirement of the project and its extras has a version in constraints.txt, within what it asks for."""
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    asked = [
        *project()["dependencies"],
        *(one for group in project()["optional-dependencies"].values() for one in group),
    ]
    for text in asked:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        if name in pins:
            assert pins[name] in requirement.specifier, text


@dataclass(frozen=True)
class Built:
    """The archives, and a virtual environment in which the wheel is installed."""

    wheel: Path
    source: Path
    bin: Path

    def run(self, *words: str, cwd: Path) -> str:
        """What a command prints, where neither the checkout nor its settings are at hand."""
        plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        command = [str(self.bin / words[0]), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=plain, timeout=300)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy, as `python -m build` does it: the archive from the files, the wheel from the archive. The
    packages that `imdm` needs are those of the environment that runs the tests."""
    place = tmp_path_factory.mktemp("packaging")
    copy, dist, home = place / "copy", place / "dist", place / "venv"
    for name in ("src", "tests", "docs", "notebooks", "results", ".github"):
        if (ROOT / name).exists():
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "_build")
            )
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    venv.create(home, with_pip=False)
    folder = next((home / "lib").glob("python*/site-packages"))
    packages = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (folder / "others.pth").write_text("\n".join(packages or site.getsitepackages()))
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "--disable-pip-version-check"]
    # ignore: the `imdm` of the environment that runs the tests is found there too
    install = [*pip, "install", "--no-index", "--no-deps", "--ignore-installed", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Built(wheel, source, home / "bin")


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_is_small(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "src"
    there = {str(file.relative_to(package)) for file in (package / "imdm").rglob("*") if file.is_file()}
    assert held == {name for name in there if "__pycache__" not in name}
    assert built.wheel.name == f"imdm-{__version__}-py3-none-any.whl"
    assert built.wheel.stat().st_size < 60 * MEGABYTE


@pytest.mark.slow
def test_the_source_archive_has_each_model_once(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        names = archive.getnames()
    weights = sorted(Path(name).parent.name for name in names if name.endswith(".safetensors"))
    assert weights == sorted(shipped.names())
    inside = {name.partition("/")[2] for name in names}
    assert {
        "CITATION.cff",
        "SECURITY.md",
        "constraints.txt",
        "Makefile",
        "tests/conftest.py",
        "docs/concepts.md",
    } <= inside
    assert built.source.stat().st_size < 60 * MEGABYTE


@pytest.mark.slow
def test_installed_it_runs_what_the_readme_says(built: Built, tmp_path: Path) -> None:
    where = built.run("python", "-c", "import imdm; print(imdm.__file__, imdm.__version__)", cwd=tmp_path)
    assert str(built.bin.parent) in where
    assert where.split()[-1] == __version__
    assert built.run("imdm", "--version", cwd=tmp_path).split() == ["imdm", __version__]
    required = built.run("python", "-c", REQUIREMENTS, cwd=tmp_path).split()
    assert len(required) == len(project()["dependencies"])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("imdm generate", "imdm models", "imdm reproduce synthetic"):
        assert command in readme
    assert all(name in built.run("imdm", "models", cwd=tmp_path) for name in shipped.names())
    text = built.run("imdm", "generate", "--steps", "4", "--prompt", "Once", "--json", cwd=tmp_path)
    assert json.loads(text)["text"].startswith("Once")
    quick = [
        f"stages.{stage}.training.{one}" for stage in ("teacher", "mdm", "imdm") for one in ("steps=20", "warmup=2")
    ]
    quick += [
        "stages.pairs.pairs=50",
        "stages.pairs.steps=8",
        "stages.evaluate.samples=200",
        "stages.evaluate.draws=200",
    ]
    said = built.run("imdm", "reproduce", "synthetic", *quick, cwd=tmp_path)
    assert "report" in said
    assert (tmp_path / "runs/synthetic/report.html").exists()
    script = "import imdm; print(imdm.load(imdm.shipped.DEFAULT).write('Once', steps=2)[0].text)"
    assert built.run("python", "-c", f"import imdm.shipped; {script}", cwd=tmp_path).startswith("Once")
