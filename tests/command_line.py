"""What the tests of the command line share: calling it in this process, or in one of its own, and hashing a folder."""

import hashlib
import sys
from pathlib import Path

from typer.testing import CliRunner

from flnoisebench.cli.main import app

SCRIPT = Path(sys.executable).with_name("flnoisebench")
RUN = ("run", "--method", "fedavg", "--rounds", "2", "--clients", "5")

# A method in a file of its own: nothing of it is installed.  What goes wrong is said by the environment, so that the
# file, whose digest a run's folder remembers, stays the same.
PLUGIN = """
import os
import time

from flnoisebench.api import Card, Config, Field, Method, Plan, Preset, Reply, average, cross_entropy, weights


class Mine(Method):
    card = Card(title="Mine", paper="tests/command_line.py", year=2025)

    class Config(Config):
        alpha: float = Field(1.0, gt=0, unit="shares", why="a setting to set")
        kind: str = Field("plain", why="another")

    presets = {
        "first": Preset("the default one"),
        "second": Preset(
            "brings a budget",
            {"alpha": 3.0},
            {"batch": 16, "local_epochs": 2},
            {"digits": Preset(protocol={"batch": 8})},
        ),
    }

    def init(self, server):
        return weights(server.model())

    def plan(self, state, server):
        return Plan("train", server.cohort(), state)

    def client(self, task, message, client):
        trouble = os.environ.get("TROUBLE") if (client.round, client.id) == (1, 2) else None
        if trouble == "raise":
            raise RuntimeError("no luck")
        if trouble == "stop":
            raise KeyboardInterrupt
        if trouble == "wait":
            open("waiting", "w").close()
            time.sleep(60)
        network = client.model(message)
        fit = client.fit(network, cross_entropy)
        return Reply(weights(network), metrics={"loss": fit.loss})

    def aggregate(self, state, uploads, server):
        return average([upload.content for upload in uploads], [upload.size for upload in uploads])

    def predictors(self, state, server):
        return {"main": server.model(state, frozen=True)}
"""


def call(*words, **environment):
    """The command in this process: a result with exit_code, stdout, stderr and exception."""
    # 300 columns: rich breaks no line of an error's box, whatever the terminal
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300", **environment})


def done(*words, **environment):
    """The command, which must succeed and have nothing to complain of: what it printed."""
    result = call(*words, **environment)
    assert (result.exit_code, result.exception) in ((0, None),), (result.exit_code, result.stderr, result.exception)
    return result.stdout


def refused(*words, code=2, **environment):
    """The command, which must fail with one clear message and nothing else: that message on one line."""
    result = call(*words, **environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, (result.exit_code, result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    said = "".join(line for line in result.stderr.splitlines(True) if not line.startswith("run: "))  # what began
    assert said.startswith("error: ") or "─ Error ─" in said, result.stderr
    assert result.stderr.count("error: ") + result.stderr.count("─ Error ─") == 1, result.stderr
    return " ".join(said.replace("│", " ").split())


def snapshot(folder: Path) -> dict[str, str]:
    """{path: SHA-256 of its content} of everything below a folder, folders included."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def only_run(out: Path) -> Path:
    """The folder of the one run below ``out``."""
    (settings,) = out.rglob("settings.json")
    return settings.parent


def rows(text: str) -> dict[str, str]:
    """``name<TAB>value`` lines as a dictionary; a line of another form is a failure."""
    lines = text.splitlines()
    assert all(line.count("\t") == 1 for line in lines), lines
    return dict(line.split("\t") for line in lines)
