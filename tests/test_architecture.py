"""THE RULE of the architecture, held by reading every file's syntax tree: who may import whom, who may name whom,
what nobody may do.  Each check is a function from source text to findings, and is proved on planted bad sources."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = sorted((ROOT / "flnoisebench").rglob("*.py"))
METHODS = sorted((ROOT / "methods").rglob("*.py"))
DATASETS = sorted((ROOT / "datasets").rglob("*.py"))
EVERYTHING = [*CORE, *METHODS, *DATASETS]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def every(paths):
    return pytest.mark.parametrize("path", paths, ids=named)


class Import(NamedTuple):
    """``import module`` or ``from module import name``; dots: of a relative import."""

    module: str
    name: str | None
    dots: int

    def __str__(self) -> str:
        return "." * self.dots + self.module + (f".{self.name}" if self.name else "")


def imports(source: str) -> Iterator[Import]:
    """All imports, those inside functions and under TYPE_CHECKING among them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(node.module or "", alias.name, node.level) for alias in node.names)


def root(module: str) -> str:
    return module.split(".")[0]


# -------------------------------------------------------------------------------- what plugins may import

# Of the standard library plugins may import all but what loads code by name and so leads around this check.
STANDARD = set(sys.stdlib_module_names) - {"importlib", "imp", "runpy", "pkgutil", "zipimport"}
MAY_IMPORT = {"methods": {"torch", "numpy", "sklearn"}, "datasets": {"torch", "torchvision", "numpy", "PIL", "sklearn"}}


def forbidden_imports(source: str, family: str) -> list[str]:
    """The imports of a plugin that are neither flnoisebench.api, nor its family's libraries, nor standard."""
    found = []
    for one in imports(source):
        api = (one.module, one.name) == ("flnoisebench", "api") or one.module == "flnoisebench.api"
        fine = one.dots == 0 and (api or root(one.module) in MAY_IMPORT[family] | STANDARD)
        if not fine:
            found.append(str(one))
    return found


@every(METHODS)
def test_a_method_imports_the_public_api_torch_numpy_and_scikit_learn_only(path):
    assert forbidden_imports(path.read_text(), "methods") == []


@every(DATASETS)
def test_a_data_set_imports_the_public_api_and_array_libraries_only(path):
    assert forbidden_imports(path.read_text(), "datasets") == []


@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("methods", "from flnoisebench.engine import Engine"),
        ("methods", "import flnoisebench.scenario"),
        ("methods", "import flnoisebench"),
        ("methods", "from flnoisebench import scenario"),
        ("methods", "from flnoisebench import api, evaluation"),
        ("methods", "from flnoisebench_methods.fedavg import FedAvg"),  # no method imports another
        ("methods", "from . import fedavg"),
        ("methods", "from .fedavg import FedAvg"),
        ("methods", "def f():\n    from flnoisebench.scenario import Truth"),
        ("methods", "if TYPE_CHECKING:\n    import flnoisebench.runtime"),
        ("methods", "import torchvision"),
        ("methods", "import pandas"),
        ("methods", "import importlib"),
        ("datasets", "import pandas"),
        ("datasets", "from flnoisebench import registry"),
        ("datasets", "from flnoisebench_datasets.cifar import CIFAR10"),
        ("datasets", "from flnoisebench_methods import fedavg"),
    ],
)
def test_the_import_check_finds_a_planted_import(family, line):
    assert forbidden_imports(f"import math\nfrom flnoisebench.api import Method\n{line}\n", family)


def test_the_import_check_lets_pass_what_the_rule_allows():
    source = "from __future__ import annotations\nimport torch.nn.functional as F\nfrom flnoisebench import api\n"
    assert forbidden_imports(source + "from sklearn.mixture import GaussianMixture\n", "methods") == []
    assert forbidden_imports(source + "from PIL import Image\nimport torchvision\nimport gzip\n", "datasets") == []


# ------------------------------------------------------------ flnoisebench/ names no method and no data set

ENTRIES = {
    name: value.split(":")[1]
    for group in ("flnoisebench.methods", "flnoisebench.datasets")
    for name, value in PROJECT["entry-points"][group].items()
}
MODULES = {path.stem.replace("_", "-") for path in [*METHODS, *DATASETS]}
NAMES = {name.lower() for name in [*ENTRIES, *ENTRIES.values(), *MODULES]}

# (file, literal): why it may stand there.  Every other literal without white space in it, one of whose words is a
# method's or a data set's name, is a finding; prose (a literal with white space, a docstring) may cite papers.
LITERALS = {
    ("settings.py", "fedcova"): "the default of --method; the registry still finds it by its entry point",
    ("settings.py", "fedavg"): "the default of --method under an oracle: the reference row",
    ("settings.py", "digits"): "the default of --dataset",
    ("cli/run.py", "digits"): "the default of --dataset, as the command line shows it",
    ("cli/scenario.py", "digits"): "the default of --dataset, as the command line shows it",
    ("settings.py", "fedcova-sym"): "the default noise preset: a law, named after the paper it is from",
    **{
        ("scenario/noise.py", name): "a noise preset, named after the paper that its law is from"
        for name in (
            "fedcova-sym",
            "fedcova-sym-bernoulli",
            "fedcova-asym",
            "fedcova-asym-semantic",
            "fedcova-sym-stratified",
            "fedcova-paper-27.5",
            "fedcova-paper-34.4",
            "fedcova-paper-40.3",
            "fedcorr",
            "fedcorr-legacy",
            "fednoro-random",
            "fedned-beta",
            "fedned-beta-legacy",
            "dividemix-sym",
            "dividemix-asym",
            "coteaching-pair",
            "mnist-asym",
            "cifar100-asym",
            "cifar100-superclass",
        )
    },
    **{
        (f"scenario/{file}.py", name): "a map of class numbers, defined for a data set's published order of classes"
        for file in ("noise", "class_maps")
        for name in (
            "cifar10-semantic",
            "mnist-semantic",
            "cifar100-superclass-next",
            "cifar100-superclass-uniform",
            "cifar100-block5-legacy",
        )
    },
    ("cli/run.py", "folder"): "the key of a run's folder in --json and in the lines of a pipe; no data set is meant",
    ("leaderboard/rows.py", "fedavg"): "the reference row that costs are given relative to",
    ("reproduce.py", "ratio_to_fedavg"): "a column of the published run times",
    ("cli/sweep.py", "folder"): "the key of a run's folder in --json; no data set is meant",
    ("cli/show.py", "folder"): "the key of a run's folder in --json; no data set is meant",
}


def words(literal: str) -> set[str]:
    """The words of a name and the joints of neighbouring ones: "fashion-mnist.toml" -> fashion-mnist, mnist, ..."""
    parts = re.findall(r"[a-z0-9]+", literal.lower())
    return {"-".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of all nodes that are docstrings, or strings that stand for themselves."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def named_plugins(source: str) -> list[str]:
    """The methods and data sets that a file names: in a literal, as an identifier, or in an import."""
    tree = ast.parse(source)
    prose = docstrings(tree)
    found = [
        str(one) for one in imports(source) if root(one.module) in ("flnoisebench_methods", "flnoisebench_datasets")
    ]
    found += [str(one) for one in imports(source) if root(one.module) in ("methods", "datasets")]
    classes = set(ENTRIES.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            identifier = node.id if isinstance(node, ast.Name) else node.attr
            if identifier in classes:
                found.append(identifier)
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in prose:
            continue
        literal = node.value.strip(" \t\n:")
        prosaic = re.search(r"\s", literal)
        if re.search(r"flnoisebench_(methods|datasets)", literal) or (not prosaic and words(literal) & NAMES):
            found.append(literal)
    return found


def core(path: Path) -> str:
    return str(path.relative_to(ROOT / "flnoisebench"))


@every(CORE)
def test_the_core_names_no_method_and_no_data_set(path):
    unexcused = [name for name in named_plugins(path.read_text()) if (core(path), name) not in LITERALS]
    assert unexcused == []


def test_every_exception_to_the_naming_rule_is_still_needed():
    used = {(core(path), name) for path in CORE for name in named_plugins(path.read_text())}
    assert set(LITERALS) - used == set()


@pytest.mark.parametrize(
    "line",
    [
        "from flnoisebench_methods.fedavg import FedAvg",
        "import flnoisebench_datasets.digits",
        "def f():\n    import methods.fedavg",
        "x = name == 'fedavg'",
        "x = {'cifar10': 3}[name]",
        "x = name.startswith('fedcova')",
        "x = 'fedcova.py'",
        "x = f'fedavg/{seed}'",
        "x = load('flnoisebench_methods.' + name)",
        "match name:\n    case 'fashion-mnist': ...",
        "x = isinstance(method, FedCova)",
        "x = module.FedAvg()",
        "x = type(method).__name__ == 'FedAvg'",
        "x = 'runs/digits'",
    ],
)
def test_the_naming_check_finds_a_planted_name(line):
    assert named_plugins(f'"""FedCova on cifar10, cited in prose."""\n{line}\n')


def test_the_naming_check_lets_papers_be_cited():
    source = '"""fedavg"""\nx = Field(1, why="FedCova\'s experiments on cifar10")\ny = "digit", "fed", "mean"\n'
    assert named_plugins(source) == []


# -------------------------------------------------------------------------------------------------- layers

# What each part of flnoisebench/ may import of the others, and of third parties.  Where this differs from the tree in
# architecture.md, the reason stands here.
FOUNDATION = {"api", "trees", "streams"}
ENGINE = {*FOUNDATION, "imagefiles", "models", "profiling"}  # imagefiles: a map on disk is read in a run's order
RUNTIME = {
    *ENGINE, "engine", "executors", "scenario", "evaluation", "records", "checkpoint", "settings", "registry",
    "provenance", "inputs",
}  # fmt: skip
ABOVE = {*RUNTIME, "protocols", "runtime"}
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "provenance": (set(), set()),  # setup.py runs it where nothing is installed
    "trees": (set(), {"torch", "safetensors"}),
    "streams": (set(), {"torch", "numpy"}),
    "profiling": (set(), {"torch"}),
    "imagefiles": (set(), {"torch", "numpy", "PIL"}),
    "api": ({"trees", "imagefiles"}, {"torch", "pydantic", "pydantic_core"}),  # data sets see it through the api
    "models": ({"api"}, {"torch", "torchvision"}),
    "registry": ({"api"}, set()),
    "protocols": ({"api", "registry"}, set()),  # a protocol is an api.Protocol; unknown names answer as the registry's
    "scenario": ({"api", "streams"}, {"numpy", "safetensors", "pydantic", "matplotlib"}),  # an extra, for pictures
    "settings": ({"api", "registry", "protocols", "scenario"}, {"pydantic"}),
    "inputs": ({"api", "registry", "scenario", "streams"}, {"torch", "numpy"}),  # what the runtime and sweeps load
    "engine": (ENGINE, {"torch", "numpy"}),  # profiling: seconds and images are counted where they are spent
    "executors": ({*ENGINE, "engine"}, {"torch"}),
    "evaluation": ({"scenario", "trees", "engine"}, {"torch", "numpy", "sklearn"}),  # engine: test images on the device
    "records": ({"api", "settings"}, {"pydantic"}),  # a result holds its settings
    "checkpoint": ({"trees", "records"}, set()),  # records: the one way to replace a file
    "runtime": (RUNTIME, {"torch", "numpy"}),
    "testing": (ABOVE, {"torch", "numpy", "pytest"}),
    "conformance": ({*ABOVE, "testing"}, {"torch", "numpy", "pydantic"}),
    "published": ({"registry"}, set()),  # numbers that papers print; unknown names answer as the registry's
    "grid": ({"registry", "settings"}, set()),
    "runs": ({"records", "settings"}, set()),  # records: what is wrong in a damaged one
    "trials": ({"grid", "records", "settings", "leaderboard"}, set()),  # leaderboard: the commits of a run
    "sweep": ({*ABOVE, "runs"}, {"torch", "distributed", "dask", "dask_jobqueue"}),  # runs: where a failure is written
    "leaderboard": (
        # checkpoint: a result is published if it is what the run's commits say; provenance: what a commit looks like
        {"api", "records", "checkpoint", "provenance", "settings", "registry", "protocols", "scenario", "published"},
        {"numpy", "scipy", "pydantic"},
    ),
    "report": (
        {"api", "records", "settings", "registry", "scenario", "leaderboard"},
        {"pandas", "numpy", "matplotlib", "rich", "torch", "jinja2"},
    ),
    "papers": ({"registry"}, set()),  # what a paper's tables were run with; unknown names answer as the registry's
    "tracking": ({"records", "registry", "settings"}, {"torch", "wandb", "mlflow"}),  # torch has TensorBoard's writer
    "reproduce": (
        {*ABOVE, "leaderboard", "papers", "published", "report", "sweep"},  # runtime: one run after the other
        {"scipy"},
    ),
    "claims": ({"leaderboard", "papers", "registry", "report", "reproduce"}, set()),
    "__main__": ({"cli"}, set()),
    "cli": (
        {
            *ABOVE,
            "testing",
            "conformance",
            "grid",
            "runs",
            "trials",
            "sweep",
            "leaderboard",
            "report",
            "reproduce",
            "claims",
            "tracking",
            "cli",
        },
        {"typer", "rich", "torch", "pandas"},
    ),
}


def part(path: Path) -> str:
    """engine/images.py -> engine; trees.py -> trees."""
    return path.relative_to(ROOT / "flnoisebench").parts[0].removesuffix(".py")


def climbing_imports(source: str, of: str) -> list[str]:
    """The imports that a part of the core may not have."""
    inner, outer = LAYERS[of]
    found = []
    for one in imports(source):
        if one.dots:
            found.append(str(one))
        elif root(one.module) == "flnoisebench":
            names = one.module.split(".")[1:] or [one.name]
            if names[0] not in {*inner, of}:
                found.append(str(one))
        elif root(one.module) not in {*outer, *sys.stdlib_module_names}:
            found.append(str(one))
    return found


@every([path for path in CORE if path.name != "__init__.py" or path.parent.name != "flnoisebench"])
def test_the_core_imports_downwards_only(path):
    assert part(path) in LAYERS, f"give {named(path)} its place in LAYERS, as architecture.md gives it one"
    assert climbing_imports(path.read_text(), part(path)) == []


def test_the_layers_have_no_circle():
    below = {name: inner - {name} for name, (inner, _) in LAYERS.items()}
    done: set[str] = set()
    while below:
        free = {name for name, needs in below.items() if needs <= done}
        assert free, f"a circle among {sorted(below)}"
        done |= free
        below = {name: needs for name, needs in below.items() if name not in free}


def test_the_package_itself_imports_nothing():
    assert list(imports((ROOT / "flnoisebench" / "__init__.py").read_text())) == []


@pytest.mark.parametrize(
    ("of", "line"),
    [
        ("records", "from flnoisebench import runtime"),
        ("records", "from flnoisebench.runtime import Run"),
        ("api", "from flnoisebench import streams"),
        ("trees", "import numpy"),
        ("trees", "def f():\n    from flnoisebench import api"),
        ("engine", "from flnoisebench.scenario import Truth"),  # training sees no true label
        ("executors", "from flnoisebench import scenario"),
        ("runtime", "from flnoisebench.cli import console"),
        ("settings", "from flnoisebench.records import RunResult"),
        ("runtime", "import rich"),
        ("engine", "import typer"),
        ("registry", "from . import api"),
        ("api", "import flnoisebench.engine.training"),
    ],
)
def test_the_layer_check_finds_a_planted_import(of, line):
    assert climbing_imports(f"import json\n{line}\n", of)


# --------------------------------------------------------------------------- what nobody may do, and where

UNPICKLING = ("pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
SEEDING = (
    "torch.manual_seed", "torch.seed", "torch.set_rng_state", "torch.random.manual_seed", "torch.random.seed",
    "torch.default_generator.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "torch.cuda.seed",
    "torch.initial_seed",
)  # fmt: skip
NUMPY_GENERATORS = ("default_rng", "Generator", "BitGenerator", "PCG64", "SeedSequence")
TORCH_DRAWS = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson")

# (file, function, what): why it may stand there
ALLOWED = {
    (
        "flnoisebench/engine/__init__.py", "initialised", "torch.default_generator.manual_seed",
    ): "torch's modules initialise themselves from this generator only; it is put back as it was, under a lock",
    **{
        ("flnoisebench/conformance.py", function, what): "moved, to see who looks at them; put back as they were"
        for function, what in (
            ("", "random"),
            ("_generators_at", "random.getstate"), ("_generators_at", "random.seed"),
            ("_generators_at", "random.setstate"), ("_generators", "random.getstate"),
            ("_generators_at", "numpy.random.get_state"), ("_generators_at", "numpy.random.seed"),
            ("_generators_at", "numpy.random.set_state"), ("_generators", "numpy.random.get_state"),
            ("_generators_at", "torch.default_generator.manual_seed"), ("_generators_at", "torch.set_rng_state"),
        )
    },
    ("datasets/cifar.py", "", "pickle"): "the published CIFAR files are pickles",
    ("datasets/cifar.py", "_batches", "pickle.loads"): "of bytes whose MD5 was compared with the published one",
    ("flnoisebench/models.py", "_weights", "torch.load"): "weights only, of bytes whose SHA-256 begins as published",
    ("datasets/cifar.py", "_published", "torch.load"): "weights only and numpy arrays, of bytes whose MD5 was compared",
    ("datasets/cifar.py", "_human", "numpy.load"): "allow_pickle=False: plain arrays or an error",
}  # fmt: skip


def forbidden_acts(source: str) -> list[tuple[str, str]]:
    """(function, what) of every unpickling, of every seeding of a global generator and every draw from one."""
    tree = ast.parse(source)
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or root(alias.name)] = alias.name if alias.asname else root(alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    found: list[tuple[str, str]] = []

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return aliases.get(node.id, f"?{node.id}")
        return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"

    def bad(name: str) -> bool:
        if root(name) in UNPICKLING or name in SEEDING or name.split(".")[:1] == ["random"]:
            return True
        if name.startswith("numpy.random."):
            return name.split(".")[2] not in NUMPY_GENERATORS
        return name in ("torch.load", "torch.serialization.load")

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                if bad(name):
                    found.append((function, name))
            return
        if isinstance(node, ast.Attribute) and bad(dotted(node)):
            found.append((function, dotted(node)))
            return
        if isinstance(node, ast.Call):
            name, given = dotted(node.func), {keyword.arg for keyword in node.keywords}
            if name.startswith("torch.") and name.split(".")[1] in TORCH_DRAWS and "generator" not in given:
                found.append((function, name))
            if name == "numpy.random.default_rng" and not node.args:
                found.append((function, name))
            if name == "numpy.load" and "allow_pickle" in given:
                found.append((function, name))
            if isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval") and node.func.id not in aliases:
                found.append((function, node.func.id))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


@every(EVERYTHING)
def test_nothing_is_unpickled_and_no_global_generator_is_seeded_or_drawn_from(path):
    acts = [act for act in forbidden_acts(path.read_text()) if (named(path), *act) not in ALLOWED]
    assert acts == []


def test_every_exception_to_that_is_still_needed():
    used = {(named(path), *act) for path in EVERYTHING for act in forbidden_acts(path.read_text())}
    assert set(ALLOWED) - used == set()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle.loads"),
        ("import joblib as j\nx = j.load(f)", "joblib.load"),
        ("import torch\ndef f():\n    return torch.load('x')", "torch.load"),
        ("from torch import load\n", "torch.load"),
        ("import torch\nx = map(torch.load, files)", "torch.load"),
        ("import torch\ntorch.manual_seed(0)", "torch.manual_seed"),
        ("from torch import manual_seed as m\n", "torch.manual_seed"),
        ("import torch\ntorch.cuda.manual_seed_all(0)", "torch.cuda.manual_seed_all"),
        ("import torch\ntorch.default_generator.manual_seed(0)", "torch.default_generator.manual_seed"),
        ("import numpy as np\nnp.random.seed(0)", "numpy.random.seed"),
        ("from numpy import random\nrandom.shuffle(x)", "numpy.random.shuffle"),
        ("import numpy as np\nnp.random.rand(3)", "numpy.random.rand"),
        ("import numpy as np\nnp.random.default_rng()", "numpy.random.default_rng"),
        ("import random\n", "random"),
        ("import random\nrandom.seed(0)", "random.seed"),
        ("import torch\ntorch.randperm(5)", "torch.randperm"),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", "numpy.load"),
        ("eval('1')", "eval"),
    ],
)
def test_the_check_of_forbidden_acts_finds_a_planted_one(source, what):
    assert what in {name for _, name in forbidden_acts(source)}


def test_the_check_of_forbidden_acts_names_the_function_and_lets_named_streams_pass():
    source = "import torch\ndef initialised():\n    torch.default_generator.manual_seed(1)\n"
    assert forbidden_acts(source) == [("initialised", "torch.default_generator.manual_seed")]
    assert forbidden_acts("import torch\ntorch.Generator().manual_seed(3)\ntorch.randperm(5, generator=g)\n") == []
    assert forbidden_acts("import numpy as np\ndef f(r: np.random.Generator): return np.random.default_rng(3)\n") == []


# ---------------------------------------------------------------------------------------------- vocabulary

REFUSED = {"arg", "args", "util", "utils", "misc", "manager", "managers", "helper", "helpers"}


def vague_names(source: str, stem: str = "") -> list[str]:
    """Files, classes and functions whose name says nothing."""
    defined = [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    def pieces(name: str) -> set[str]:
        return set(re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()))

    return [name for name in [stem, *defined] if pieces(name) & REFUSED]


@every([*EVERYTHING, *sorted((ROOT / "tests").glob("*.py"))])
def test_no_file_class_or_function_has_a_name_that_says_nothing(path):
    assert vague_names(path.read_text(), path.stem) == []


@pytest.mark.parametrize(
    ("source", "stem"),
    [
        ("", "utils"),
        ("", "engine_utils"),
        ("class RunManager: ...", "run"),
        ("def parse_args(): ...", "run"),
        ("class A:\n    async def _helper(self): ...", "run"),
        ("def misc(): ...", "run"),
    ],
)
def test_the_vocabulary_check_finds_a_planted_name(source, stem):
    assert vague_names(source, stem)


def test_the_vocabulary_check_knows_words_from_parts_of_words():
    assert vague_names("def largest(): ...\nclass Margin: ...\ndef target(*args): ...", "imagery") == []


# --------------------------------------------------------------------------------------- how files are cut


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# file: why it may hold several methods.  One more in it would be other code to the rows of those that it holds, since a
# row states its file's digest: so fedavg_la is a file of its own
FAMILIES = {"fedavg_variants": "FedAvg with one line of difference each; a file for each would say the rest four times"}


@every(METHODS)
def test_a_file_of_methods_holds_one_method_or_is_a_named_family(path):
    listed = PROJECT["entry-points"]["flnoisebench.methods"].values()
    here = [value.split(":")[1] for value in listed if value.split(":")[0] == f"flnoisebench_methods.{path.stem}"]
    classes = {node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
    assert here
    assert len(here) == 1 or path.stem in FAMILIES, "one file a method, one entry point a file"
    assert set(here) <= classes


def test_every_named_family_is_there():
    assert set(FAMILIES) <= {path.stem for path in METHODS}


@every(EVERYTHING)
def test_every_module_says_what_it_is(path):
    if path.read_text().strip():
        assert len(ast.get_docstring(tree_of(path)) or "") > 20 or path.name == "__init__.py"
