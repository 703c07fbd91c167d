"""What the documents say can be followed: their links lead somewhere, and their commands are ones that the command line
takes."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from command_line import call

from flnoisebench import registry, runtime
from flnoisebench.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path for folder in (".", "docs", "benchmarks", "leaderboards") for path in (ROOT / folder).glob("*.md")
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(document: Path) -> set[str]:
    """Those that a page shows a heading under: in small letters, punctuation left out, a dash for a space."""
    headings = re.findall(r"^#+ +(.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document):
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue  # no test touches the network
        path, _, anchor = target.partition("#")
        place = (document.parent / path).resolve() if path else document
        assert place.exists(), f"{target}: there is no {place}"
        if anchor:
            assert anchor in anchors(place), f"{target}: {place.name} has no such heading"


def commands(text: str) -> list[tuple[list[str], str]]:
    """(words after ``flnoisebench``, comment) of every command that stands on a line of its own or in backticks."""
    lines = re.findall(r"^    (?:.*&& )?flnoisebench (.*)$", text, re.MULTILINE)
    spoken = re.findall(r"`flnoisebench ([^`]*)`", text.replace("\n", " "))
    found = []
    for line in [*lines, *spoken]:
        said, _, comment = line.partition("  #")
        found.append((shlex.split(said), comment))
    return found


def of_all() -> list[tuple[list[str], str]]:
    grids = sorted((ROOT / "leaderboards" / "grids").glob("*.toml"))
    heads = ["    " + path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in grids]
    return [
        found for text in [path.read_text(encoding="utf-8") for path in DOCUMENTS] + heads for found in commands(text)
    ]


def parse(words: list[str]) -> None:
    """Read the options of the command that words name, but not their values, which may be placeholders.  Raises what
    the command line would: for an unknown command or option, and for an option without its value."""
    command, context = typer.main.get_command(app), None
    while True:
        context = command.context_class(command, info_name=command.name, parent=context)
        _, words, _ = command.make_parser(context).parse_args(words)
        if not isinstance(command, typer.core.TyperGroup) or not words:
            return
        _, command, words = command.resolve_command(context, words)


@pytest.mark.parametrize(
    "line", ["run --round 3 --sets x", "run --method", "leaderboard bild x", "table", "list runs -q"]
)
def test_a_command_that_there_is_not_is_seen(line):
    with pytest.raises(Exception, match=r"(?i)no such|requires an argument"):
        parse(line.split())


def test_there_are_commands_to_look_at():
    assert len(of_all()) > 80


@pytest.mark.parametrize("words", [words for words, _ in of_all() if words != ["COMMAND", "--help"]], ids=" ".join)
def test_every_command_has_the_options_that_it_is_given(words):
    parse(words)


def runs() -> list[list[str]]:
    """Every documented ``run``, a method or draw that is left open filled in: from its comment where it names some."""
    found = []
    for words, comment in of_all():
        if words[0] != "run" or "path/to/mymethod.py:MyMethod" in words:
            continue
        named = [name for name in comment.split() if name in registry.names("flnoisebench.methods")]
        for method in (named or ["fedavg"]) if "METHOD" in words else [""]:
            found.append([{"METHOD": method, "D": "0"}.get(word, word) for word in words])
    return found


@pytest.mark.parametrize("words", runs(), ids=" ".join)
def test_every_documented_run_has_settings_that_go_together(words, monkeypatch):
    """Up to where it would look for data."""
    seen = []

    def stop(settings, *args, **options):
        seen.append(settings)
        raise typer.Exit

    monkeypatch.setattr(runtime, "prepare", stop)
    result = call(*words)
    assert (result.exit_code, len(seen)) == (0, 1), result.stderr
