"""Wheel and source distribution are built, checked, installed into an empty environment, and used there."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import dovetail
from tests.guides import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")


def run(*command: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    # Nothing of the repository may be seen: neither by PYTHONPATH nor by the folder it runs in.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, the wheel made from the source distribution as `python -m build` does."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    tree.mkdir()
    # A copy: a build leaves files beside the sources, and takes in those that an earlier one left.
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(ROOT / name, tree / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", tree, cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def python(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, which sees the packages of this one but not its dovetail."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    (wheel,) = distributions.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=folder)
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).stdout.strip()
    # A path in a .pth file is appended, after the environment's own packages, and .pth files in it are not read:
    # those are what an editable install of dovetail consists of.
    (Path(site) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_is_what_is_imported(python: Path, tmp_path: Path) -> None:
    script = "import dovetail, importlib.metadata as m; print(dovetail.__file__, dovetail.__version__, m.version('dovetail'))"
    path, *versions = run(python, "-c", script, cwd=tmp_path).stdout.split()
    assert python.parent.parent in Path(path).parents
    assert versions == [dovetail.__version__] * 2


def test_the_readme_runs_with_the_wheel(python: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "guides.py", tmp_path / "run_examples.py")
    shutil.copy(ROOT / "README.md", tmp_path)
    run(python, "-W", "error", "run_examples.py", "README.md", cwd=tmp_path)
    assert "dovetail" in (tmp_path / "report.html").read_text()
    (tmp_path / "README.md").write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert run(python, "run_examples.py", "README.md", cwd=tmp_path, check=False).returncode != 0


def test_torch_compile_knows_the_backend_of_the_wheel(python: Path, tmp_path: Path) -> None:
    script = "import torch._dynamo as d; print('dovetail' in d.list_backends(()))"
    assert run(python, "-c", script, cwd=tmp_path).stdout.split() == ["True"]


def test_twine_accepts_both(distributions: Path) -> None:
    pytest.importorskip("twine")
    files = sorted(distributions.iterdir())
    assert [path.name.rpartition(".")[2] for path in files] == ["whl", "gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=distributions)


def test_both_have_every_file_of_the_package(distributions: Path) -> None:
    package = ROOT / "src" / "dovetail"
    files = {
        f"dovetail/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    (wheel,) = distributions.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == files
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        members = {re.sub(r"^[^/]+/", "", name) for name in tar.getnames()}
    assert {f"src/{name}" for name in files} | {"README.md", "LICENSE", "pyproject.toml"} <= members
