"""What the registry promises: names from entry points, near misses, no double names, plugins from files."""

import errno
import hashlib
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from command_line import PLUGIN, done

from flnoisebench import registry
from flnoisebench.api import Dataset, Method
from flnoisebench.registry import DATASETS, METHODS, UnknownName


@pytest.fixture
def entries(monkeypatch):
    """Put entry points of our own in the place of the installed ones: entries(("name", "module:Class"), ...)."""

    def put(*pairs):
        monkeypatch.setattr(
            registry, "entry_points", lambda group: [EntryPoint(name, value, group) for name, value in pairs]
        )
        registry._entries.cache_clear()

    yield put
    registry._entries.cache_clear()


def test_installed_names_are_sorted_and_load_as_what_they_are():
    assert registry.names(METHODS) == sorted(registry.names(METHODS))
    assert "fedavg" in registry.names(METHODS)
    for name in registry.names(METHODS):
        assert issubclass(registry.load_method(name), Method)
    for name in registry.names(DATASETS):
        assert isinstance(registry.load_dataset(name), Dataset)
        assert registry.load_dataset(name).name == name


def test_names_import_nothing(entries):
    entries(("ghost", "no_such_package.anywhere:Ghost"))
    assert registry.names(METHODS) == ["ghost"]


def test_a_method_that_cannot_be_imported_hides_no_other_of_the_list(entries):
    entries(("broken", "no_such_package.anywhere:Ghost"), ("fedavg", "flnoisebench_methods.fedavg:FedAvg"))
    broken, *others = done("list", "methods", "--details").splitlines()
    assert broken.startswith("broken\tdamaged: method 'broken' (no_such_package.anywhere:Ghost) cannot be imported")
    assert others[0].startswith("fedavg\tFedAvg: ")


def test_two_packages_with_one_name_are_refused_and_both_are_named(entries):
    entries(("same", "one.package:A"), ("other", "x:Y"), ("same", "two.package:B"))
    for use in (lambda: registry.names(METHODS), lambda: registry.load_method("other")):
        with pytest.raises(
            ValueError, match=r"two packages bring a method called 'same': one\.package:A and two\.pack"
        ):
            use()


def test_one_entry_point_found_twice_is_no_double_name(entries):
    """An editable install beside a wheel of the same package lists each of its entry points twice."""
    entries(("fedavg", "flnoisebench_methods.fedavg:FedAvg"), ("fedavg", "flnoisebench_methods.fedavg:FedAvg"))
    assert registry.names(METHODS) == ["fedavg"]
    assert registry.load_method("fedavg").__name__ == "FedAvg"


@pytest.mark.parametrize(
    ("name", "near"),
    [("fedavgg", "Did you mean fedavg"), ("FEDAVG", "Known: "), ("zzz", "Known: "), ("", "Known: ")],
)
def test_an_unknown_method_is_answered_with_near_misses_what_there_is_and_how_to_install(name, near):
    with pytest.raises(UnknownName) as caught:
        registry.load_method(name)
    message = str(caught.value)
    assert message.startswith(f"unknown method {name!r}.")
    assert near in message
    assert "re-install: pip install -e ." in message
    assert "path/to/file.py:ClassName" in message
    assert ("Did you mean" in message) == (near != "Known: ")


def test_an_unknown_data_set_is_answered_with_near_misses():
    with pytest.raises(UnknownName, match=r"unknown data set 'cifar-10'\. Did you mean cifar10"):
        registry.load_dataset("cifar-10")


def test_unknown_lists_at_most_three_near_misses_and_everything_there_is():
    message = str(registry.unknown("thing", "aaa1", ["aaa2", "aaa3", "aaa4", "aaa5", "b"], " Advice."))
    assert message.split("Known:")[0].count(" or ") == 2
    assert message.endswith("Known: aaa2, aaa3, aaa4, aaa5, b. Advice.")
    assert isinstance(registry.unknown("x", "y", []), ValueError)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package.anywhere:Ghost", "cannot be imported: ModuleNotFoundError"),
        ("flnoisebench.api:NoSuchClass", "cannot be imported: AttributeError"),
        ("flnoisebench_broken:Broken", "cannot be imported: SyntaxError"),
        ("flnoisebench_script:Main", "cannot be imported: SystemExit: 0"),
        ("flnoisebench_datasets.digits:Digits", "is no flnoisebench.api.Method"),
        ("flnoisebench.api:average", "is no flnoisebench.api.Method"),
    ],
)
def test_an_entry_point_that_is_no_method_is_named_with_the_reason(value, message, entries, tmp_path, monkeypatch):
    (tmp_path / "flnoisebench_broken.py").write_text("class Broken(:\n")
    (tmp_path / "flnoisebench_script.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries(("ghost", value))
    with pytest.raises(ValueError, match=message) as caught:
        registry.load_method("ghost")
    assert "'ghost'" in str(caught.value)


def test_an_entry_point_that_is_no_data_set_is_refused(entries):
    entries(("ghost", "flnoisebench_methods.fedavg:FedAvg"))
    with pytest.raises(ValueError, match=r"'ghost' is no flnoisebench\.api\.Dataset"):
        registry.load_dataset("ghost")


def test_a_data_set_that_lacks_something_is_refused_and_spoils_no_list(entries, tmp_path, monkeypatch):
    (tmp_path / "flnoisebench_bare.py").write_text(
        "from flnoisebench.api import Dataset\n\nclass Bare(Dataset):\n    name = title = protocol = source = 'bare'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entries(
        ("bare", "flnoisebench_bare:Bare"),
        ("digits", "flnoisebench_datasets.digits:Digits"),
        ("ghost", "nowhere:Ghost"),
    )
    with pytest.raises(ValueError, match="'bare' lacks classes, load, mean, std, which Bare must define"):
        registry.load_dataset("bare")
    listed = done("list", "datasets", "--details")
    assert "bare\tdamaged: the data set 'bare' lacks" in listed
    assert "digits\tDigits (8 x 8), 10 classes" in listed
    said = {line.split("\t")[0]: line.split("\t")[1:] for line in done("data", "list").splitlines()}
    assert said["bare"] == ["damaged", "the data set 'bare' lacks classes, load, mean, std, which Bare must define"]
    assert said["digits"][0] == "there"
    assert said["ghost"][0] == "damaged"


def test_a_data_set_that_may_not_be_read_is_listed_as_such_beside_the_others(entries, monkeypatch):
    def unreadable(self, root, *, public=False):
        raise PermissionError(errno.EACCES, "Permission denied", "batch_1")

    entries(
        ("digits", "flnoisebench_datasets.digits:Digits"), ("synthetic", "flnoisebench_datasets.synthetic:Synthetic")
    )
    monkeypatch.setattr(registry.load_dataset("digits").__class__, "load", unreadable)
    assert done("data", "list").startswith("digits\tunreadable\tbatch_1: Permission denied\nsynthetic\tthere")


# -------------------------------------------------------------------------------------------------- files


def test_a_class_in_a_file_is_loaded_once_and_under_a_name_of_its_own(tmp_path, monkeypatch):
    path = tmp_path / "numpy.py"  # the name of a real module is not shadowed
    path.write_text(PLUGIN)
    first = registry.load_method(f"{path}:Mine")
    assert first is registry.load_method(f"{path}:Mine")
    monkeypatch.chdir(tmp_path)
    assert first is registry.load_method("numpy.py:Mine")
    assert first is registry.load_method("./numpy.py:Mine")
    assert first.__module__.startswith("flnoisebench_plugin_")
    assert sys.modules["numpy"].__file__ != str(path)


def test_a_file_that_was_edited_is_read_anew_and_a_method_keeps_the_digest_of_its_own_code(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    first = registry.load_method(f"{path}:Mine")
    digest = registry.source_digest(first)
    assert digest == hashlib.sha256(PLUGIN.encode()).hexdigest()
    path.write_text(PLUGIN.replace('title="Mine"', 'title="Them"'))  # of the same length, and within the same second
    assert registry.source_digest(first) == digest
    second = registry.load_method(f"{path}:Mine")
    assert (first.card.title, second.card.title) == ("Mine", "Them")
    assert registry.source_digest(second) == hashlib.sha256(path.read_bytes()).hexdigest() != digest
    good = path.read_text()
    path.write_text("x = (")
    with pytest.raises(ValueError, match="cannot be imported: SyntaxError"):
        registry.load_method(f"{path}:Mine")
    path.write_text(good)
    assert registry.load_method(f"{path}:Mine") is second


def test_a_file_edited_while_it_is_read_has_the_digest_of_the_code_that_runs(tmp_path, monkeypatch):
    path, real = tmp_path / "plugin.py", Path.read_bytes
    path.write_text(PLUGIN)

    def edited_at_once(self):
        content = real(self)
        self.write_text("raise RuntimeError\n")
        return content

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", edited_at_once)
        method = registry.load_method(f"{path}:Mine")
    assert registry.source_digest(method) == hashlib.sha256(PLUGIN.encode()).hexdigest()


def test_two_files_with_classes_of_one_name_do_not_mix(tmp_path):
    for folder, title in (("a", "Mine"), ("b", "Theirs")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plugin.py").write_text(PLUGIN.replace('title="Mine"', f'title="{title}"'))
    titles = [registry.load_method(f"{tmp_path}/{folder}/plugin.py:Mine").card.title for folder in ("a", "b")]
    assert titles == ["Mine", "Theirs"]


def test_classes_that_a_file_only_imports_are_not_offered(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN + "\n\nclass Second(Mine): ...\n\n\nclass Nothing: ...\n")
    assert registry.load_method(f"{path}:Second").__mro__[1].__name__ == "Mine"
    for name in ("Method", "Nothing", "Config", ""):
        with pytest.raises(ValueError, match=r"has no method class '.*'; it has \['Mine', 'Second'\]"):
            registry.load_method(f"{path}:{name}")


@pytest.mark.parametrize("body", ["...", "card = {'title': 'Mine'}"])
def test_a_method_without_a_card_is_refused(body, tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text(f"from flnoisebench.api import Method\n\n\nclass Mine(Method):\n    {body}\n")
    with pytest.raises(ValueError, match=r"Mine has no card: card = Card\("):
        registry.load_method(f"{path}:Mine")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("class S:\n        rate: float = 0.5\n    Config = S", "Mine.Config is no flnoisebench.api.Config: <class "),
        ("Config = api.Config()", "Mine.Config is no flnoisebench.api.Config: Config()"),
        ("class S(api.Config):\n        rate: float = 0.5\n    config = S()", "Mine sets config, which a run sets"),
    ],
)
def test_settings_that_a_run_would_not_take_are_refused(body, words, tmp_path):
    path = tmp_path / "plugin.py"
    card = 'card = api.Card(title="M", paper="p", year=2026)'
    path.write_text(f"from flnoisebench import api\n\n\nclass Mine(api.Method):\n    {card}\n    {body}\n")
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        registry.load_method(f"{path}:Mine")
    assert "then Config = Settings" in str(caught.value)


@pytest.mark.parametrize(
    ("presets", "words"),
    [
        ("{}", "Mine.presets must be one or more by name"),
        ("api.Preset()", "Mine.presets must be one or more by name"),
        ('{"default": {"rate": 0.5}}', "Mine.presets must be one or more by name"),
        ('{"default": api.Preset(settings=[1])}', "Preset(settings=[1]): a dict by name is wanted"),
        (
            '{"default": api.Preset(datasets={"digits": {"rate": 1}})}',
            "Preset(datasets={'digits': {'rate': 1}}): a Preset is wanted for each data set",
        ),
    ],
)
def test_presets_that_are_none_are_refused(presets, words, tmp_path):
    path = tmp_path / "plugin.py"
    card = 'card = api.Card(title="M", paper="p", year=2026)'
    text = f"from flnoisebench import api\n\n\nclass Mine(api.Method):\n    {card}\n    presets = {presets}\n"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        registry.load_method(f"{path}:Mine")


def test_a_file_that_failed_to_import_leaves_nothing_behind(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text("x = 1\nraise SystemError('at import')\n")
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"plugin\.py, line 2 cannot be imported: SystemError: at import"):
        registry.load_method(f"{path}:Mine")
    assert set(sys.modules) == before


def test_a_file_that_ends_the_program_is_a_broken_file(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text("import sys\n\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=r"plugin\.py, line 3 cannot be imported: SystemExit: 0"):
        registry.load_method(f"{path}:Mine")


def test_ctrl_c_while_a_file_is_imported_is_not_taken_for_a_broken_file(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        registry.load_method(f"{path}:Mine")


def test_the_source_digest_of_the_suites_own_methods_is_that_of_their_file():
    for name in registry.names(METHODS):
        method = registry.load_method(name)
        file = Path(sys.modules[method.__module__].__file__)
        assert registry.source_digest(method) == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package as pip leaves it, with a method; a module installed beside it; and another package that it imports."""
    name = f"theirs_{tmp_path.name}".replace("-", "_")  # imported once a process
    files = {
        f"{name}/__init__.py": "",
        f"{name}/method.py": f"import torch\nimport {name}_flat\nfrom . import losses\n" + PLUGIN,
        f"{name}/losses.py": "from .deep.inner import value\n\n\ndef f():\n    from .deep import late\n",
        f"{name}/deep/__init__.py": "DEEP = 1\n",
        f"{name}/deep/inner.py": "import json\n\nvalue = 1\n",
        f"{name}/deep/late.py": f"import {name}.method  # a circle\nraise SystemError('only its text is read')\n",
        f"{name}/unused.py": "x = 1\n",
        f"{name}_flat.py": f"import {name}_other\n",
        f"{name}_other.py": "x = 1\n",
        f"{name}-1.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{name}-1.dist-info/top_level.txt": f"{name}\n{name}_flat\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("theirs", f"{name}.method:Mine", group)])
    caches = (registry._entries, registry._beside)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path, name
    for cache in caches:
        cache.cache_clear()


def test_the_source_digest_of_anothers_installed_method_is_of_the_modules_that_it_brings_and_imports(installed):
    root, name = installed
    method = registry.load_method("theirs")
    before = registry.source_digest(method)
    counted = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        path.write_text(text + "# changed\n")
        counted[str(path.relative_to(root)).removeprefix(name)] = registry._digest_of_files(method) != before
        path.write_text(text)
    assert {path for path, counts in counted.items() if counts} == {
        "/__init__.py", "/method.py", "/losses.py", "/deep/__init__.py", "/deep/inner.py", "/deep/late.py", "_flat.py",
    }  # fmt: skip
    assert {path for path, counts in counted.items() if not counts} == {"/unused.py", "_other.py"}
    assert registry._digest_of_files(method) == before


def test_a_method_in_its_packages_own_file_counts_what_lies_beside_it_too(installed, monkeypatch):
    root, name = installed
    (root / name / "__init__.py").write_text("from . import losses, unused\n" + PLUGIN)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("theirs", f"{name}:Mine", group)])
    method = registry.load_method("theirs")
    before = registry._digest_of_files(method)
    for beside in ("losses.py", "unused.py", "deep/inner.py"):
        file = root / name / beside
        text = file.read_text()
        file.write_text(text + "# changed\n")
        assert registry._digest_of_files(method) != before
        file.write_text(text)
    (root / name / "unused.py").write_text("this is no Python")
    assert registry._digest_of_files(method) != before


def test_the_source_digest_is_of_the_code_that_was_loaded_and_not_of_what_the_files_became(installed):
    root, name = installed
    before = registry.source_digest(registry.load_method("theirs"))
    (root / name / "losses.py").write_text("value = 2\n")
    assert registry.source_digest(registry.load_method("theirs")) == before


def test_the_source_digest_of_anothers_method_in_one_file_stays_that_of_the_file(installed):
    root, name = installed
    file = root / name / "method.py"
    file.write_text(PLUGIN)
    assert registry.source_digest(registry.load_method("theirs")) == hashlib.sha256(file.read_bytes()).hexdigest()
