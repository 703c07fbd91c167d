"""What an install promises: every module and file, in the editable install and in a built wheel, and no bare names."""

import configparser
import email
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from command_line import RUN, SCRIPT, call, done

from flnoisebench import provenance, registry, runtime
from flnoisebench.settings import resolve

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
PLUGINS = {"flnoisebench_methods": "methods", "flnoisebench_datasets": "datasets"}
GROUPS = ("flnoisebench.methods", "flnoisebench.datasets")


def python(code, *flags, cwd=None, **environment):
    """Run code in a process of its own; what it printed."""
    finished = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True, text=True, timeout=180, cwd=cwd, env={**os.environ, **environment},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


# --------------------------------------------------------------------------------- pyproject and the tree


def packages_in(root):
    """The packages that the tree holds: folders of flnoisebench/ with Python or protocol files, and the plugins'."""
    folders = {path.parent for pattern in ("*.py", "*.toml") for path in (root / "flnoisebench").rglob(pattern)}
    return {".".join(folder.relative_to(root).parts) for folder in folders} | set(PLUGINS)


def test_the_listed_packages_are_those_of_the_tree():
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_in(ROOT))
    assert len(set(SETUPTOOLS["packages"])) == len(SETUPTOOLS["packages"])
    assert SETUPTOOLS["package-dir"] == PLUGINS


def test_the_check_of_the_packages_finds_a_folder_that_is_not_listed(tmp_path):
    for place in ("flnoisebench/__init__.py", "flnoisebench/report/__init__.py", "flnoisebench/report/deep/x.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    assert packages_in(tmp_path) - set(PLUGINS) == {"flnoisebench", "flnoisebench.report", "flnoisebench.report.deep"}


def test_every_package_of_the_core_has_an_init_file():
    for package in set(SETUPTOOLS["packages"]) - set(PLUGINS):
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), package


@pytest.mark.parametrize("folder", PLUGINS.values())
def test_the_plugins_folders_hold_python_files_and_nothing_else(folder):
    """With an __init__.py, `import datasets` from the root would find it before Hugging Face's package; a sub-folder
    would import in the editable install and be missing from the wheel."""
    found = {path.name for path in (ROOT / folder).iterdir() if path.name != "__pycache__"}
    assert found
    assert "__init__.py" not in found
    assert all(name.endswith(".py") for name in found), found


@pytest.mark.parametrize("group", GROUPS)
def test_every_plugin_file_has_an_entry_point_and_every_entry_point_a_file(group):
    package = group.replace(".", "_")
    modules = {value.split(":")[0] for value in PROJECT["entry-points"][group].values()}
    assert modules == {f"{package}.{path.stem}" for path in (ROOT / PLUGINS[package]).glob("*.py")}


@pytest.mark.parametrize("group", GROUPS)
def test_the_installed_entry_points_are_those_of_pyproject_and_load(group):
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=group)}
    stated = PROJECT["entry-points"][group]
    assert {name: entries[name].value for name in stated if name in entries} == stated, "pip install -e . again"
    for name in stated:
        load = registry.load_method if group.endswith("methods") else registry.load_dataset
        assert load(name)


def test_floors_python_and_extras_are_those_of_the_architecture():
    floors = dict(re.fullmatch(r"([a-z0-9-]+)>=([\d.]+)", line).groups() for line in PROJECT["dependencies"])
    assert (floors["torch"], floors["torchvision"]) == ("2.6", "0.21")
    assert set(floors) >= {"torch", "torchvision", "numpy", "pydantic", "rich", "safetensors", "scikit-learn", "typer"}
    assert PROJECT["requires-python"] == ">=3.11"
    assert set(PROJECT["optional-dependencies"]) >= {"test", "plots", "sweep", "tensorboard"}
    assert PROJECT["scripts"] == {"flnoisebench": "flnoisebench.cli.main:main"}
    assert PYPROJECT["build-system"]["build-backend"] == "setuptools.build_meta"
    assert "--import-mode=importlib" in PYPROJECT["tool"]["pytest"]["ini_options"]["addopts"]


def test_every_third_party_import_of_the_core_and_the_plugins_is_a_stated_dependency():
    import ast

    known = {"PIL": "pillow", "sklearn": "scikit-learn", "pydantic_core": "pydantic", "dask_jobqueue": "dask-jobqueue"}
    stated = {re.match(r"[a-z0-9-]+", line)[0] for line in PROJECT["dependencies"]}
    optional = {
        re.match(r"[a-z0-9-]+", line)[0] for extra in PROJECT["optional-dependencies"].values() for line in extra
    } | {"dask", "dask-jobqueue"}  # distributed brings dask
    for path in [*(ROOT / "flnoisebench").rglob("*.py"), *(ROOT / "methods").glob("*"), *(ROOT / "datasets").glob("*")]:
        if path.suffix != ".py":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for module in {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"flnoisebench"}:
                # what an extra brings may be imported where it is used, not when the file is; the whole of sweep.py is
                # imported by who has asked for a sweep
                of_extra = path == ROOT / "flnoisebench" / "sweep.py"
                allowed = stated if node in tree.body and not of_extra else stated | optional
                assert known.get(module, module) in allowed, f"{path.relative_to(ROOT)} imports {module}"


def test_the_command_line_imports_nothing_that_an_extra_brings_or_that_few_commands_need():
    code = "import sys, flnoisebench.cli.main; print(sorted(set(sys.modules) & set(sys.argv[1:])))"
    extras = ("dask", "distributed", "dask_jobqueue", "matplotlib", "tensorboard", "wandb", "mlflow", "bokeh")
    slow = ("torchvision", "torch._dynamo", "sklearn", "scipy.stats", "pandas")  # together longer than torch
    done = subprocess.run([sys.executable, "-c", code, *extras, *slow], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_dash_m_is_the_console_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flnoisebench", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("flnoisebench", run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out == f"{PROJECT['version']}\n"


def test_the_console_script_is_there():
    assert SCRIPT.is_file()
    assert os.access(SCRIPT, os.X_OK)


# ---------------------------------------------------------------------------------------------- bare names


def test_importing_everything_imports_no_bare_methods_or_datasets(tmp_path):
    code = f"""
import importlib, importlib.metadata, sys
from pathlib import Path
root = Path({str(ROOT)!r})
for path in sorted((root / "flnoisebench").rglob("*.py")):
    if path.stem != "__main__":
        importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"))
for group in {GROUPS}:
    for entry in importlib.metadata.entry_points(group=group):
        entry.load()
bare = [n for n in sys.modules if n.split(".")[0] in ("methods", "datasets")]
print(len([n for n in sys.modules if n.startswith(("flnoisebench", "flnoisebench_"))]), bare)
"""
    count, bare = python(code, cwd=ROOT).split(" ", 1)
    assert int(count) > 30
    assert bare == "[]\n"


def test_import_datasets_from_the_root_finds_another_package_of_that_name_wherever_it_lies(tmp_path):
    """What holds, precisely: from the repository's root a bare `datasets` is at most a namespace (a folder without
    __init__.py, which has no loader of ours and runs no code), and so gives way to every real package of that name,
    also to one that comes later on the path."""
    alone = "import importlib.util as u; s = u.find_spec('datasets'); print(s is None or s.origin is None)"
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("whose = 'Hugging Face'")
    late = f"import sys; sys.path.append({str(tmp_path)!r}); import datasets; print(datasets.whose)"
    code = f"import sys; assert sys.path[0] == ''\n{alone}\n{late}"
    assert python(code, "-S", cwd=ROOT, PYTHONSAFEPATH="").splitlines() == ["True", "Hugging Face"]


def test_the_editable_install_maps_the_plugins_to_names_of_their_own_only():
    assert importlib.util.find_spec("flnoisebench_methods.fedavg").origin == str(ROOT / "methods" / "fedavg.py")
    for name in PLUGINS.values():
        spec = importlib.util.find_spec(name)
        assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


# --------------------------------------------------------------------------------------------------- wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """(the wheel, by way of an sdist; the checkout that it was built from, whose only commit it is of): building
    leaves its traces in a copy."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", ".gitattributes", ".gitignore"):
        shutil.copy(ROOT / name, source)
    for name in ("flnoisebench", "methods", "datasets", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    git(source, "init", "--quiet")
    git(source, "add", ".")
    git(source, "commit", "--quiet", "-m", "one")
    build(source, place)
    (path,) = place.glob("*.whl")
    return path, source


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True).stdout


def build(source, place, *what):
    """An sdist, and a wheel from what it holds; or what is said."""
    built = subprocess.run(
        [sys.executable, "-m", "build", *what, "--no-isolation", "--outdir", place, source],
        capture_output=True, text=True, timeout=180,
        env={name: value for name, value in os.environ.items() if name != "FLNOISEBENCH_COMMIT"},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr


def test_the_wheel_holds_every_module_and_protocol_and_nothing_else(wheel):
    path, source = wheel
    wanted = {str(file.relative_to(source)) for file in (source / "flnoisebench").rglob("*") if file.is_file()}
    for package, folder in PLUGINS.items():
        wanted |= {f"{package}/{file.name}" for file in (source / folder).iterdir()}
    assert {"flnoisebench/protocols/digits.toml", "flnoisebench_methods/fedavg.py"} <= wanted
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    info = f"flnoisebench-{PROJECT['version']}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == wanted  # no tests, no bare methods/ or datasets/
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt"} <= {name.removeprefix(info) for name in names}
    assert f"{info}licenses/LICENSE" in names


def test_the_wheels_metadata_are_those_of_pyproject(wheel):
    info = f"flnoisebench-{PROJECT['version']}.dist-info"
    with zipfile.ZipFile(wheel[0]) as archive:
        entries = configparser.ConfigParser(delimiters=("=",))
        entries.optionxform = str
        entries.read_string(archive.read(f"{info}/entry_points.txt").decode())
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    for group in GROUPS:
        assert dict(entries[group]) == PROJECT["entry-points"][group]
    assert dict(entries["console_scripts"]) == PROJECT["scripts"]
    required = metadata.get_all("Requires-Dist")
    assert [line for line in required if "extra ==" not in line] == PROJECT["dependencies"]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == PROJECT["license"]


def test_the_installed_wheel_runs_without_the_checkout_and_gives_the_same_digest(wheel, tmp_path):
    place, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    installed = subprocess.run([*pip, "--target", place, wheel[0]], capture_output=True, text=True, timeout=120)
    assert installed.returncode == 0, installed.stderr
    assert (place / "bin" / "flnoisebench").is_file()
    # -I -S: no site-packages of itself, so no .pth file and no finder of the editable install; the dependencies'
    # folder is then put behind the wheel's by hand
    code = f"""
import sys
sys.path[:0] = [{str(place)!r}]
sys.path.append({sysconfig.get_paths()["purelib"]!r})
import flnoisebench.cli.main
sys.argv = ["flnoisebench", *{RUN!r}, "--json"]
try:
    flnoisebench.cli.main.main()
finally:
    files = [getattr(m, "__file__", None) for n, m in list(sys.modules.items()) if n.startswith("flnoisebench")]
    files = [f for f in files if f]  # the plugins' packages are namespaces and have none
    assert len(files) > 20 and all(f.startswith({str(place)!r}) for f in files), files
"""
    result = json.loads(python(code, "-I", "-S", cwd=empty).splitlines()[-1])
    assert result["status"] == "complete"
    assert result["environment"]["commit"] == git(wheel[1], "rev-parse", "HEAD").strip()
    assert result["environment"]["packages"]["flnoisebench"] == PROJECT["version"]
    here = json.loads(done(*RUN, "--json", "--out", tmp_path / "runs"))
    assert result["digest"] == here["digest"]
    assert (empty / result["folder"] / "result.json").is_file()


# --------------------------------------------------------------------------------------- which commit it is of


def commit_in(folder, **variables):
    """What a copy of the package in the folder says of itself, in a process that sees no other."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import provenance as p; print(p.commit()); print(*p.remarks())"
    run = [sys.executable, "-I", "-c", code, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "FLNOISEBENCH_COMMIT"}
    done = subprocess.run(run, check=True, capture_output=True, text=True, env={**environment, **variables})
    commit, remarks = done.stdout.split("\n", 1)
    return commit, remarks.strip()


def test_building_leaves_the_checkout_as_it_was(wheel):
    """A stamp is written into what is built, whose files may be links to the checkout's."""
    assert git(wheel[1], "status", "--porcelain") == ""
    assert commit_in(wheel[1] / "flnoisebench")[0] == git(wheel[1], "rev-parse", "HEAD").strip()


def test_a_wheel_of_a_changed_checkout_says_so(wheel, tmp_path):
    source = tmp_path / "source"
    git(tmp_path, "clone", "--quiet", wheel[1], source)
    with (source / "flnoisebench" / "streams.py").open("a") as file:
        file.write("# changed\n")
    build(source, tmp_path, "--wheel")
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        said = archive.read("flnoisebench/commit.txt").decode()
    assert said == git(source, "rev-parse", "HEAD").strip() + "+changes\n"


def test_an_archive_without_its_checkout_knows_its_commit(wheel, tmp_path):
    git(wheel[1], "archive", "--output", tmp_path / "it.zip", "HEAD")
    with zipfile.ZipFile(tmp_path / "it.zip") as archive:
        archive.extractall(tmp_path)
    assert commit_in(tmp_path / "flnoisebench") == (git(wheel[1], "rev-parse", "HEAD").strip(), "")


def test_a_copy_whose_commit_nobody_knows_says_so_before_its_hours_are_spent(tmp_path):
    shutil.copy(ROOT / "flnoisebench" / "provenance.py", tmp_path)
    shutil.copy(ROOT / "flnoisebench" / "commit.txt", tmp_path)  # not filled in
    assert commit_in(tmp_path)[0] == "None"
    assert "FLNOISEBENCH_COMMIT" in commit_in(tmp_path)[1]
    (tmp_path / "commit.txt").write_text("\n")  # of a wheel that was built where nobody knew it
    assert commit_in(tmp_path)[0] == "None"
    (tmp_path / "commit.txt").unlink()
    assert commit_in(tmp_path)[0] == "None"


def test_a_commit_that_is_said_and_is_none_or_not_the_checkouts_is_told_before_hours_are_spent(wheel):
    folder, head = wheel[1] / "flnoisebench", git(wheel[1], "rev-parse", "HEAD").strip()
    assert commit_in(folder, FLNOISEBENCH_COMMIT=head) == (head, "")
    for none in ("v1.0", f"{head}-dirty"):
        assert f"'{none}', which is no commit of git" in commit_in(folder, FLNOISEBENCH_COMMIT=none)[1]
    said, remark = commit_in(folder, FLNOISEBENCH_COMMIT="c" * 40)  # as an old shell profile may go on saying
    assert said == "c" * 40
    assert f"says {said}, and this copy is of {head}" in remark


def test_the_commit_is_that_of_the_folder_whichever_repository_git_runs_it_in(wheel, tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("another")
    git(tmp_path, "add", "file")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "another")
    head = git(wheel[1], "rev-parse", "HEAD").strip()
    assert commit_in(wheel[1] / "flnoisebench", GIT_DIR=str(tmp_path / ".git")) == (head, "")


def test_a_process_that_outlives_its_commit_names_the_one_that_it_began_with(tmp_path, monkeypatch):
    monkeypatch.delenv("FLNOISEBENCH_COMMIT", raising=False)
    file = tmp_path / "provenance.py"
    shutil.copy(ROOT / "flnoisebench" / "provenance.py", file)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "provenance.py")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    began = git(tmp_path, "rev-parse", "HEAD").strip()
    commit = runpy.run_path(str(file))["commit"]
    assert commit() == commit() == began
    file.write_text("# changed\n")
    assert commit() == f"{began}+changes"
    git(tmp_path, "commit", "--quiet", "--all", "--message", "second")
    assert commit() == f"{began}+changes"  # and not the second, whose code does not run
    git(tmp_path, "checkout", "--quiet", began)
    assert commit() == began


def test_a_run_and_a_sweep_of_such_a_copy_say_so_at_the_start(tmp_path, monkeypatch):
    command = (*RUN, "--out", tmp_path)
    assert provenance.remarks() == []
    assert "FLNOISEBENCH_COMMIT" not in call(*command).stderr
    monkeypatch.setattr(provenance, "commit", lambda: None)
    (remark,) = provenance.remarks()
    assert call(*command).stderr.splitlines()[0] == remark
    said, sweep = [], pytest.importorskip("flnoisebench.sweep", exc_type=ImportError)
    sweep.identities([resolve(method="fedavg", rounds=2, clients=5)], tmp_path, said.append)
    assert said == [remark]


def test_each_run_asks_for_its_commit_once_and_anew(tmp_path, monkeypatch):
    """Preparing asks nobody: a sweep's workers show no remark.  The tree may have changed between two runs of a
    process, and the second says so."""
    told = iter(["c" * 40, "c" * 40 + "+changes"])
    monkeypatch.setattr(provenance, "commit", lambda: next(told))
    commits = [
        runtime.prepare(
            resolve(method="fedavg", rounds=1, clients=5, seed=seed), data_root=tmp_path, out=tmp_path, device="cpu"
        )
        .execute()
        .environment["commit"]
        for seed in (0, 1)
    ]
    assert commits == ["c" * 40, "c" * 40 + "+changes"]
