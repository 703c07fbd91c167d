"""Names -> methods and data sets, through entry points: the runtime itself knows none by name."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import sys
import traceback
import types
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points, packages_distributions
from pathlib import Path

from flnoisebench.api import Card, Config, Dataset, Method, Preset, near

METHODS = "flnoisebench.methods"
DATASETS = "flnoisebench.datasets"
_KIND = {METHODS: "method", DATASETS: "data set"}
DIGEST = "__flnoisebench_sha256__"  # in a method's module: of the source that it was made from
OWN = (__package__, METHODS.replace(".", "_"))  # the packages whose code the suite's commit states


class UnknownName(ValueError):
    """No method, data set or other named thing of this name; the message holds near misses."""


def unknown(kind: str, name: str, known: Collection[str], advice: str = "") -> UnknownName:
    return UnknownName(f"unknown {kind} {name!r}.{near(name, known)} Known: {', '.join(sorted(known))}.{advice}")


@functools.cache  # reading all packages' metadata takes 10 ms, and a sweep looks up three names a run
def _entries(group: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise ValueError(
                f"two packages bring a {_KIND[group]} called {entry.name!r}: {other.value} and {entry.value}; "
                "uninstall one of them"
            )
        found[entry.name] = entry
    return found


def names(group: str) -> list[str]:
    """The names of a group, without importing anything."""
    return sorted(_entries(group))


def _load(group: str, name: str) -> type:
    entries = _entries(group)
    if name not in entries:
        advice = " (A newly declared entry point needs a re-install: pip install -e .)"
        if group == METHODS:
            advice += " An uninstalled plugin runs as path/to/file.py:ClassName."
        raise unknown(_KIND[group], name, entries, advice)
    try:
        return entries[name].load()
    except (Exception, SystemExit) as error:  # whatever a plugin's file does when it is imported
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{_KIND[group]} {name!r} ({entries[name].value}) cannot be imported: {cause}") from error


def load_method(name: str) -> type[Method]:
    """The class of an entry point's name, or of ``path/to/file.py:ClassName``.

    Raises UnknownName with near misses, ValueError when the file or class is not there or is no method, and when it
    lacks a card, or its Config or presets are none.
    """
    if ".py" in name:
        found = _from_file(name)
    else:
        found = _load(METHODS, name)
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise ValueError(f"the entry point {name!r} is no flnoisebench.api.Method: {found!r}")
        module = sys.modules.get(found.__module__)
        if module is not None and not hasattr(module, DIGEST):  # later the files may be others than what runs
            setattr(module, DIGEST, _digest_of_files(found))
    _require_definition(found)
    return found


def _require_definition(method: type[Method]) -> None:
    """Raises ValueError where a class attribute that a run reads is none of its kind, with what it must be."""
    if not isinstance(getattr(method, "card", None), Card):
        raise ValueError(f"{method.__name__} has no card: card = Card(title=..., paper=..., year=...) in its class")
    advice = "its settings are a class of their own: class Settings(flnoisebench.api.Config), then Config = Settings"
    if not (isinstance(method.Config, type) and issubclass(method.Config, Config)):
        raise ValueError(f"{method.__name__}.Config is no flnoisebench.api.Config: {method.Config!r}; {advice}")
    if any("config" in vars(one) for one in method.__mro__ if one is not Method):  # a run would hide it by its own
        raise ValueError(f"{method.__name__} sets config, which a run sets; {advice}")
    if (
        not (isinstance(method.presets, Mapping) and method.presets)
        or not all(isinstance(one, Preset) for one in method.presets.values())
    ):  # fmt: skip
        wanted = 'one or more by name, {"default": Preset(...)}, the default first'
        raise ValueError(f"{method.__name__}.presets must be {wanted}, not {method.presets!r}")


def load_dataset(name: str) -> Dataset:
    """The data set of this name.  Raises UnknownName with near misses, and ValueError when it cannot be imported, is
    none, or lacks something that a run reads."""
    found = _load(DATASETS, name)
    if not (isinstance(found, type) and issubclass(found, Dataset)):
        raise ValueError(f"the entry point {name!r} is no flnoisebench.api.Dataset: {found!r}")
    missing = sorted(
        {*found.__abstractmethods__, *(fact for fact in Dataset.__annotations__ if not hasattr(found, fact))}
    )
    if missing:
        raise ValueError(f"the data set {name!r} lacks {', '.join(missing)}, which {found.__name__} must define")
    return found()


class _Uncached(importlib.machinery.SourceFileLoader):
    """Compiles a file's content as it was read: Python's cache would not notice an edit of the same length within one
    second, and of a file read twice the digest may be another's."""

    def __init__(self, fullname: str, path: str, content: bytes) -> None:
        super().__init__(fullname, path)
        self.content = content

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.content, self.path)


def file_and_class(name: str) -> tuple[str, str]:
    """(path, class) of ``path/to/file.py:ClassName``; without a class where none is named.  A folder's name may have a
    colon."""
    path, _, class_name = name.rpartition(":")
    return (path, class_name) if ".py" in path else (name, "")


def spelt(name: str) -> str:
    """A method's name as runs are known by: of a file's path without "./" and double slashes, which say nothing."""
    if ".py" not in name:
        return name
    path, class_name = file_and_class(name)
    return f"{Path(path)}:{class_name}"


def _from_file(name: str) -> type[Method]:
    path_text, class_name = file_and_class(name)
    path = Path(path_text).resolve()
    if not path.is_file():
        raise ValueError(f"--method {name}: there is no file {path}")
    module_name = f"flnoisebench_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    # a process that outlives an edit, such as a cluster's worker, takes the file as it is now
    if getattr(sys.modules.get(module_name), DIGEST, None) != digest:
        loader = _Uncached(module_name, str(path), content)
        spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        setattr(module, DIGEST, digest)
        before, sys.modules[module_name] = sys.modules.get(module_name), module
        linecache.checkcache(str(path))
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[module_name]
            if before is not None:
                sys.modules[module_name] = before
            if not isinstance(error, Exception | SystemExit):  # a script's sys.exit() would end the command in silence
                raise
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            where = f", line {lines[-1]}" if lines else ""  # a SyntaxError says its line itself
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(f"--method {name}: {path}{where} cannot be imported: {cause}") from error
    module = sys.modules[module_name]
    here = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module_name
    ]
    if class_name not in here:
        raise ValueError(
            f"{path} has no method class {class_name!r}; it has {here or 'none'}. Write --method {path_text}:ClassName"
        )
    return getattr(module, class_name)


def source_digest(method: type[Method]) -> str:
    """SHA-256 of the file that defines the method: a run must not be resumed under other code.  Of the file as it was
    when the method was loaded.

    Of an installed method the modules count too that it imports from what was installed with it, and those that they
    import; where there are none the digest is the file's.  For the suite's own methods they do not: what these import
    of it is the suite, whose commit every result states.
    """
    return getattr(sys.modules.get(method.__module__), DIGEST, None) or _digest_of_files(method)


def _digest_of_files(method: type[Method]) -> str:
    """``source_digest`` of the files as they are now."""
    file = inspect.getsourcefile(method)
    if not file:
        return ""
    module, path = method.__module__, Path(file)
    others = {} if module.split(".")[0] in OWN else _imported(module, path)
    parts = [path.read_bytes()]
    parts += [f"\n{name} {hashlib.sha256(others[name]).hexdigest()}".encode() for name in sorted(others)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@functools.cache  # it reads every package's list of files, which takes .4 s
def _beside(top: str) -> set[str]:
    """The top-level names that were installed together with this one, itself among them."""
    installed = packages_distributions()
    return {top} | {name for name, packages in installed.items() if set(packages) & set(installed.get(top, ()))}


def _imported(module: str, file: Path) -> dict[str, bytes]:
    """{module: source} of what a module imports, in a function or at its end too, from its own package or what was
    installed with it, and of what that imports.  Files are only read: nothing is imported for it."""
    own, content = _beside(module.split(".")[0]), file.read_bytes()
    found, waiting = {module: content}, [(module, content, file.name == "__init__.py")]
    while waiting:
        name, text, is_package = waiting.pop()
        for wanted in {*_names(name, text, is_package), name}:
            for part, path in _files(wanted) if wanted.split(".")[0] in own else ():
                if part not in found:
                    found[part] = path.read_bytes()
                    waiting.append((part, found[part], path.name == "__init__.py"))
    return {name: source for name, source in found.items() if name != module and source.strip()}


def _names(module: str, content: bytes, is_package: bool) -> Iterator[str]:
    """What a module's import statements name, in full; with ``from a import b`` also a.b, which may be a module."""
    try:
        tree = ast.parse(content)
    except SyntaxError:  # whoever really imports it will hear of it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) + is_package - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def _files(module: str) -> Iterator[tuple[str, Path]]:
    """(module, its source file) of the packages above a module and of itself, as far as there are such files."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return
    if spec.origin and spec.origin.endswith(".py"):
        yield top, Path(spec.origin)
    places, name = [Path(place) for place in spec.submodule_search_locations or ()], top
    for part in rest:
        name = f"{name}.{part}"
        files = [file for at in places for file in (at / part / "__init__.py", at / f"{part}.py") if file.is_file()]
        if files:
            yield name, files[0]
        places = [at / part for at in places]
