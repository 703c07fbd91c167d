"""What the command line promises: help with defaults, near misses, output that programs and people can read, and
runs that stop and go on."""

import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from fcntl import ioctl
from pathlib import Path
from typing import Annotated

import pytest
import typer
from command_line import PLUGIN, RUN, SCRIPT, call, done, only_run, refused, rows, snapshot
from rich.console import Console

from flnoisebench import checkpoint, models, protocols, records, registry
from flnoisebench.cli import console, listing
from flnoisebench.cli.main import app
from flnoisebench.cli.show import said
from flnoisebench.grid import expand, runs_of
from flnoisebench.scenario import NOISE_PRESETS, Noise, Partition
from flnoisebench.settings import assignments


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every command runs in an empty folder and sees no data set but those that need no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLNOISEBENCH_DATA", str(tmp_path / "data"))


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    return f"{path}:Mine"


def in_a_process(*words, **environment):
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


# ---------------------------------------------------------------------------------------------------- help


def commands(application):
    """(words, command) of every command, groups left out."""

    def walk(command, words):
        inner = getattr(command, "commands", None)
        if inner is None:
            yield words, command
        for name, child in (inner or {}).items():
            yield from walk(child, (*words, name))

    return list(walk(typer.main.get_command(application), ()))


def undocumented(application):
    """The options whose line in ``--help`` says nothing, or not what happens without them."""
    found = []
    runner = typer.testing.CliRunner()
    for words, command in commands(application):
        text = runner.invoke(application, [*words, "--help"], env={"COLUMNS": "400"}).stdout
        options = [line for line in text.splitlines() if line.startswith("│ ")]
        for parameter in command.params:
            if parameter.param_type_name != "option" or parameter.name == "help":
                continue
            flag = max(parameter.opts, key=len)
            line = next((line for line in options if re.search(rf"(?<![\w-]){flag}(?![\w-])", line)), "")
            said = (parameter.help or "").split(".")[0]
            default = re.search(r"\[default: \(?(.+?)\)?\]", line)
            wanted = parameter.default if parameter.show_default is True else parameter.show_default
            if isinstance(wanted, bool):
                wanted = flag.removeprefix("--")
            if parameter.required:
                if not said or said not in line or "required" not in line:
                    found.append(" ".join([*words, flag]))
                continue
            if not said or said not in line or default is None or str(wanted).rstrip(")") not in default[1]:
                found.append(" ".join([*words, flag]))
    return found


def test_every_option_has_a_help_line_with_its_default():
    assert undocumented(app) == []


@pytest.mark.parametrize(
    ("option", "default"),
    [
        (typer.Option("--bad", help="Said. [2]", show_default=False), None),  # rich takes [2] for markup
        (typer.Option("--bad", help="Said."), None),
        (typer.Option("--bad"), 3),
        (typer.Option("--bad", help="Said.", show_default=False), 3),
    ],
)
def test_the_check_of_the_help_lines_finds_an_option_without_one(option, default):
    bad = typer.Typer()

    @bad.command()
    def first(bad: Annotated[int | None, option] = default, good: Annotated[int, typer.Option(help="Fine.")] = 7): ...

    @bad.command()
    def second(): ...

    assert undocumented(bad) == ["first --bad"]


def test_every_command_and_argument_says_what_it_is():
    for words, command in commands(app):
        assert command.help, words
        for parameter in command.params:
            assert parameter.help, (words, parameter.name)


@pytest.mark.parametrize("words", [(), ("list",), ("scenario",), ("data",)])
def test_a_group_without_a_command_lists_its_commands(words):
    result = call(*words)
    root = typer.main.get_command(app)
    inner = root.commands if not words else root.commands[words[0]].commands
    assert inner
    for name in inner:
        assert name in result.output


def test_the_options_of_the_issue_are_there():
    wanted = {
        "method", "dataset", "protocol", "track", "noise", "rho", "tau", "partition", "p", "alpha", "draw", "seed",
        "clients", "rounds", "set", "device", "lanes", "data-root", "out", "config", "json",
    }  # fmt: skip
    (run,) = [command for words, command in commands(app) if words == ("run",)]
    flags = {flag for parameter in run.params for flag in parameter.opts}
    assert {f"--{name}" for name in wanted} <= flags
    assert {words[1] for words, _ in commands(app) if words[0] == "list"} >= {
        "methods", "datasets", "protocols", "noise", "partitions",
    }  # fmt: skip


def test_version_is_that_of_the_package():
    import tomllib

    stated = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
    assert done("--version") == stated + "\n"


# ----------------------------------------------------------------------------------------------- near misses


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("--method", "fedavgg"), "fedavg"),
        (("--dataset", "digit"), "digits"),
        (("--protocol", "cifar11"), "cifar10"),
        (("--track", "comon"), "common"),
        (("--noise", "fedcova-symm"), "fedcova-sym"),
        (("--noise-set", "include_tru=false"), "include_true"),
        (("--partition", "dirichlett"), "dirichlet"),
        (("--evaluate-on", "tset-a"), "test-a"),
        (("--executor", "seriall"), "serial"),
        (("--set", "protocol.batchh=3"), "batch"),
        (("--set", "protocol.optimiser.lrr=3"), "lr"),
        (("--set", "protocol.optimizer.lr=3"), "optimiser"),
        (("--set", "protocol.model=mpl"), "mlp"),
        (("--set", "protocol.precision=fp31"), "fp32"),
        (("--clientz", "3"), "--clients"),
    ],
)
def test_an_unknown_name_is_answered_with_near_misses_and_exit_code_2(words, near):
    message = refused(*RUN, *words)
    assert re.search(rf"([Dd]id you mean|Possible options:|[Dd]id you mean \[)[^?]*{near}\b", message), message
    assert not Path("runs").exists()


def test_an_unknown_setting_or_preset_of_a_method_is_answered_with_near_misses(plugin):
    assert "Did you mean alpha?" in refused("run", "--method", plugin, "--set", "alhpa=2")
    assert "Did you mean second?" in refused("run", "--method", plugin, "--preset", "secnd")


def test_an_unknown_method_is_told_of_re_installing_and_of_plugin_files():
    message = refused("run", "--method", "nothing-like-it")
    assert "pip install -e ." in message
    assert "file.py:ClassName" in message
    for name in registry.names(registry.METHODS):
        assert name in message


def test_an_unknown_command_is_answered_with_near_misses():
    assert "'methods'" in refused("list", "methodz")
    assert "'list'" in refused("lst")


# ------------------------------------------------------------------------------------------- output of a run


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """One run through the console script, not on a terminal, in an encoding that has no ±."""
    folder = tmp_path_factory.mktemp("spoken")
    finished = subprocess.run(
        [SCRIPT, *RUN], capture_output=True, cwd=folder, timeout=120, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    return finished, folder


def test_output_that_is_not_a_terminal_is_name_tab_value_lines_and_nothing_else(spoken):
    finished, folder = spoken
    assert finished.returncode == 0
    said = finished.stderr.decode("ascii").splitlines()
    assert [line.partition("; ")[2] or line.split(",")[0] for line in said] == ["2 rounds", "run: 2 rounds done"]
    assert said[0].startswith("run: fedavg (preset default, track common) on digits: 5 clients, fedcova-sym (")
    found = rows(finished.stdout.decode("ascii"))  # also: no escape code, no box, nothing that ASCII has not
    assert found["run"] == "FedAvg on digits"
    assert found["status"] == "complete"
    assert found["rounds"] == "2"
    assert (folder / found["folder"] / "result.json").is_file()
    result = records.load_result(folder / found["folder"])
    assert found["accuracy, last round"] == f"{result.accuracy.final:.2f} %"
    assert found["accuracy, mean of last 5 rounds"].startswith(f"{result.accuracy.last5_mean:.2f} %")
    assert found["accuracy, mean of last 5 rounds"].endswith("over these rounds (only 2 measured)")
    assert found["accuracy, mean of last 10 rounds"] == f"{result.accuracy.last10_mean:.2f} % (only 2 measured)"
    assert result.digest.startswith(found["digest"])


def test_a_mean_over_enough_rounds_needs_no_number_of_them(tmp_path):
    few = rows(done("show", rows(done(*RUN, "--out", tmp_path))["folder"]))
    assert few["last 5 rounds, macro F1"].endswith(" (only 2 measured)")
    found = rows(done(*RUN, "--rounds", "7", "--out", tmp_path))
    assert found["accuracy, mean of last 5 rounds"].endswith("over these rounds")
    assert found["accuracy, mean of last 10 rounds"].endswith("% (only 7 measured)")
    found = rows(done(*RUN, "--rounds", "10", "--out", tmp_path))
    assert found["accuracy, mean of last 10 rounds"].endswith(" %")
    assert "measured" not in done("show", found["folder"])
    assert "last 5 rounds, macro F1\t" in done("show", found["folder"])


def test_the_console_script_and_this_process_give_the_same_digest(spoken, tmp_path):
    result = json.loads(done(*RUN, "--out", tmp_path / "out", "--json").splitlines()[-1])
    assert result["digest"].startswith(rows(spoken[0].stdout.decode())["digest"])


def test_json_is_one_object_on_the_last_line_with_the_accuracies_in_percent(tmp_path):
    text = done(*RUN, "--rounds", "7", "--json")
    assert text.count("\n") == 1
    result = json.loads(text.splitlines()[-1])
    folder = Path(result["folder"])
    curve = [json.loads(line)["accuracy"] for line in (folder / "records.jsonl").read_text().splitlines()]
    assert len(curve) == 7
    assert max(curve) > 30  # percent, not shares
    last5 = sum(curve[-5:]) / 5
    spread = (sum((value - last5) ** 2 for value in curve[-5:]) / 5) ** 0.5
    assert result["accuracy"] == {
        "final": curve[-1],
        "last5_mean": pytest.approx(last5),
        "last5_std": pytest.approx(spread),
        "last10_mean": pytest.approx(sum(curve) / 7),
        "oracle": max(curve),
        "oracle_round": curve.index(max(curve)),
    }
    assert {**json.loads((folder / "result.json").read_text()), "folder": str(folder)} == result


def test_a_run_leaves_settings_records_and_result_the_result_last(monkeypatch):
    written = []
    replace = records.replace

    def noting(path, data):
        replace(path, data)
        written.append(path.name)

    monkeypatch.setattr(records, "replace", noting)
    monkeypatch.setattr(checkpoint, "replace", noting)
    done(*RUN)
    folder = only_run(Path("runs"))
    assert {path.name for path in folder.iterdir()} >= {"settings.json", "records.jsonl", "result.json"}
    assert written[-1] == "result.json"
    assert written.count("result.json") == written.count("settings.json") == 1
    assert written.index("settings.json") < written.index("head.json")  # the first commit
    lines = (folder / "records.jsonl").read_text()
    assert lines.endswith("\n")
    assert [json.loads(line)["round"] for line in lines.splitlines()] == [0, 1]


def test_the_same_command_again_says_that_it_is_complete_and_changes_nothing():
    first = done(*RUN)
    before = snapshot(Path("runs"))
    again = call(*RUN)
    assert again.exit_code == 0
    assert again.stdout == first
    assert again.stderr == "already complete: nothing to run\n"
    assert json.loads(call(*RUN, "--json").stdout.splitlines()[-1])["status"] == "complete"
    assert snapshot(Path("runs")) == before


def test_rounds_seed_and_draw_lead_to_folders_of_their_own():
    for words in ((), ("--seed", "1"), ("--draw", "1"), ("--rounds", "1"), ("--set", "protocol.batch=64")):
        done(*RUN, *words)
    assert len(list(Path("runs").rglob("result.json"))) == 5
    assert len({path.parent.parent for path in Path("runs").rglob("result.json")}) == 3  # seed and draw share one


def on_a_terminal(columns, *words):
    """The command under a pseudo-terminal: (exit code, its output without escape codes)."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [str(word) for word in words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:  # Linux says so that the other end is closed
        pass
    os.close(ours)
    return process.wait(timeout=60), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())


def test_a_terminal_of_80_columns_shows_live_progress_then_the_summary_and_the_folder():
    code, text = on_a_terminal(80, SCRIPT, *RUN, "--rounds", "20")
    assert code == 0
    result = records.load_result(only_run(Path("runs")))
    accuracies = {f"{record.accuracy:.2f}" for record in records.load_records(only_run(Path("runs")))}
    shown = re.findall(
        r"round (\d+)/20 accuracy (\S+) % noise ([\d.]+) % ([\d.]+) s/round ([\d.]+) [kM]?B \S+",
        text,
    )
    assert len(shown) > 2, text  # it moved
    counts = [int(row[0]) for row in shown]
    assert counts == sorted(counts)
    assert counts[-1] == 20
    assert {row[1] for row in shown} <= accuracies | {"-"}
    assert shown[-1][1] == f"{result.accuracy.final:.2f}"
    assert shown[-1][2] == f"{result.label_noise_after:.2f}"
    assert float(shown[-1][3]) > 0
    assert shown[-1][4] == f"{(result.bytes_up + result.bytes_down) / 1e6:.1f}"
    table = text[text.index("FedAvg on digits") :]
    assert "│ status" in table
    assert f"{result.accuracy.last5_mean:.2f} %" in table
    assert result.digest[:16] in table
    assert f"folder: {only_run(Path('runs'))}" in "".join(table.splitlines())


@pytest.mark.parametrize(("every", "rounds"), [(0.0, [4, 8, 12, 16, 20, 24, 28, 32, 36]), (60.0, [])])
def test_away_from_a_terminal_lines_are_a_tenth_of_the_rounds_or_a_minute_apart(monkeypatch, every, rounds):
    monkeypatch.setattr("flnoisebench.cli.run.EVERY", every)
    first, *between, last = call(*RUN, "--rounds", "40", "--set", "protocol.participation=0.2").stderr.splitlines()
    assert first.endswith("; 40 rounds")
    assert last.startswith("run: 40 rounds done, accuracy ")
    assert [
        int(re.match(r"run: round (\d+) of 40, accuracy [\d.]+ %, [\d.]+ s left$", line)[1]) for line in between
    ] == (rounds)


@pytest.mark.parametrize(("columns", "rounds"), [(80, 100), (140, 10)])
def test_the_progress_line_is_cut_off_nowhere(columns, rounds, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(force_terminal=True, width=columns, file=screen, highlight=False))
    done(*RUN, "--rounds", rounds, "--set", "protocol.participation=0.2")
    lines = [line for line in screen.getvalue().splitlines() if "s/round" in line]
    assert lines
    assert not any("…" in line for line in lines)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", lines[-1])
    assert f"round {rounds}/{rounds} " in last
    if columns == 140:
        assert re.search(r"label noise [\d.]+ % .* [\d.]+ \wB up, [\d.]+ \wB down", last)


# ------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(
    ("sent", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_ctrl_c_and_sigterm_stop_a_run_and_the_same_command_completes_with_the_digest_of_an_uninterrupted_run(
    plugin, sent, code, word
):
    command = ("run", "--method", plugin, "--rounds", "4", "--clients", "5", "--json")
    process = subprocess.Popen(
        [SCRIPT, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TROUBLE": "wait"},  # in the second round, client 2 is slow
        # a shell starts what it puts in the background with Ctrl-C ignored, and so would be whatever the tests start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    limit = time.monotonic() + 120
    while not Path("waiting").exists() and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.02)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == ""
    began, message = err.splitlines()
    assert began.endswith("; 4 rounds")
    assert message == f"error: {word}; the same command resumes from the last commit"
    folder = only_run(Path("runs"))
    assert not (folder / "result.json").exists()
    assert len(records.load_records(folder)) == 1  # round 0 was committed

    again = call(*command)
    assert again.stderr.splitlines()[0].endswith("; goes on at round 2 of 4")
    resumed = json.loads(again.stdout)
    whole = json.loads(done(*command, "--out", "uninterrupted"))
    assert resumed["status"] == "complete"
    assert resumed["rounds"] == 4
    assert resumed["digest"] == whole["digest"]
    assert resumed["accuracy"] == whole["accuracy"]


def test_a_failing_client_exits_1_and_json_still_ends_with_the_result(plugin):
    command = ("run", "--method", plugin, "--rounds", "3", "--clients", "5")
    plain = call(*command, TROUBLE="raise")
    assert plain.exit_code == 1
    assert plain.stdout == ""
    assert plain.stderr.splitlines()[1].startswith(
        "error: Mine, round 1, exchange 0, client 2, task 'train': RuntimeError: no luck"
    )
    assert "Traceback" not in plain.stderr

    failed = call(*command, "--json", "--out", "other", TROUBLE="raise")
    assert failed.exit_code == 1
    result = json.loads(failed.stdout.splitlines()[-1])
    assert result["status"] == "failed"
    assert "client 2" in result["failure"]
    assert result["rounds"] == 1
    assert "no luck" in failed.stderr


def test_a_failed_run_stays_failed_until_retry_goes_on_from_its_last_commit(plugin):
    command = ("run", "--method", plugin, "--rounds", "3", "--clients", "5")
    assert call(*command, TROUBLE="raise").exit_code == 1
    before = snapshot(Path("runs"))
    again = call(*command)
    assert again.exit_code == 1
    assert "already failed" in again.stderr
    assert "--retry" in again.stderr
    assert rows(again.stdout)["status"].startswith("failed: Mine, round 1")
    assert snapshot(Path("runs")) == before
    source = Path(plugin.split(":")[0])
    written = source.read_text()
    source.write_text(written + "\n")
    refused = call(*command, "--retry")
    assert (refused.exit_code, "has changed since the run" in refused.stderr) == (2, True)
    assert snapshot(Path("runs")) == before  # the failure is still there
    source.write_text(written)
    retried = json.loads(done(*command, "--retry", "--json"))
    assert retried["status"] == "complete"
    assert retried["digest"] == json.loads(done(*command, "--json", "--out", "whole"))["digest"]


# -------------------------------------------------------------------------------------- options that are new


def test_a_method_in_a_file_runs_without_being_installed(plugin):
    result = json.loads(
        done("run", "--method", plugin, "--rounds", "2", "--clients", "5", "--set", "alpha=2", "--json")
    )
    assert result["card"]["title"] == "Mine"
    assert result["settings"]["method_settings"] == {"alpha": 2.0, "kind": "plain"}
    assert "plugin-Mine" in result["folder"]


def test_the_track_own_takes_the_presets_budget_and_common_does_not(plugin):
    command = ("run", "--method", plugin, "--rounds", "1", "--clients", "5", "--preset", "second", "--json")
    own = json.loads(done(*command, "--track", "own"))["settings"]
    common = json.loads(done(*command))["settings"]
    assert (own["protocol"]["batch"], own["protocol"]["local_epochs"]) == (8, 2)  # digits has a value of its own
    assert own["protocol_overrides"].items() >= {"batch": 8, "local_epochs": 2}.items()
    assert (common["protocol"]["batch"], common["protocol"]["local_epochs"]) == (32, 1)
    assert own["method_settings"]["alpha"] == common["method_settings"]["alpha"] == 3.0


def test_lanes_are_auto_or_a_number_and_change_no_bit():
    digests = set()
    for lanes in ("auto", "1", "2"):
        result = json.loads(done(*RUN, "--lanes", lanes, "--out", f"lanes{lanes}", "--json"))
        digests.add(result["digest"])
        assert result["environment"]["lanes"] == (int(lanes) if lanes != "auto" else 1)
    assert len(digests) == 1
    for wrong in ("0", "-1", "two", "1.5", ""):
        assert "auto or a number from 1" in refused(*RUN, "--lanes", wrong, "--out", "wrong")
    assert not Path("wrong").exists()


def test_any_field_of_the_noise_spec_can_be_set():
    words = ("--noise", "fednoro-random", "--rho", "0.8", "--noise-set", "lo=0.1", "--noise-set", "hi=0.2")
    noise = json.loads(done(*RUN, *words, "--json"))["settings"]["scenario"]["noise"]
    assert (noise["rho"], noise["lo"], noise["hi"]) == (0.8, 0.1, 0.2)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--rho", "0.4", "--noise-set", "rho=0.5"), "--rho 0.4 and --noise-set rho=0.5 contradict each other"),
        (
            ("--noise-set", "rho=0.4", "--noise-set", "rho=0.5"),
            "--noise-set rho=0.4 and --noise-set rho=0.5 contradict",
        ),
        (("--partition", "iid", "--partition-set", "law=shards"), "--partition iid and --partition-set law=shards"),
        (("--alpha", "3", "--partition-set", "alpha=4"), "--partition-set alpha=4 and --alpha 3.0 contradict"),
        (("--set", "protocol.rounds=1"), "--rounds 2 and --set protocol.rounds=1 contradict"),
        (("--precision", "fp32", "--set", "protocol.precision=bf16"), "contradict each other: leave one of them out"),
        (
            ("--set", "protocol.optimiser={ lr = 0.1 }", "--set", "protocol.optimiser.lr=0.2"),
            "--set protocol.optimiser={ lr = 0.1 } and --set protocol.optimiser.lr=0.2 contradict",
        ),
    ],
)
def test_two_options_that_contradict_each_other_are_refused_and_equal_ones_are_not(words, found):
    assert found in refused(*RUN, *words)
    if words[0] not in ("--set", "--precision"):
        assert "contradict each other" in refused("scenario", "build", "--clients", "5", *words)
    assert not Path("runs").exists()


def test_what_is_said_twice_and_the_same_is_said_once():
    words = ("--rho", "0.4", "--noise-set", "rho=0.4", "--set", "protocol.rounds=2", "--set", "protocol.precision=bf16")
    settings = json.loads(done(*RUN, *words, "--json"))["settings"]
    assert settings["scenario"]["noise"]["rho"] == 0.4
    assert settings["protocol"]["precision"] == "bf16"  # a CPU's fp32 is a default


def test_the_environment_names_the_data_folder_and_the_option_wins_over_it(tmp_path):
    assert str(tmp_path / "data") in refused(*RUN, "--dataset", "cifar10")
    assert str(tmp_path / "there") in refused(*RUN, "--dataset", "cifar10", "--data-root", tmp_path / "there")


# ------------------------------------------------------------------------------------------------ --config


def configured(text, *words):
    Path("run.toml").write_text(text)
    return json.loads(done("run", "--config", "run.toml", "--json", *words))["settings"]


BASE = 'method = "fedavg"\nclients = 5\nrounds = 2\n'


def test_a_config_file_gives_the_options_and_the_command_line_wins():
    settings = configured(BASE + 'seed = 3\nlanes = 2\ndata_root = "x"\nnoise = "fedcorr"\ntau = 0.25\n', "--seed", "4")
    assert settings["protocol"]["rounds"] == 2
    assert settings["scenario"]["clients"] == 5
    assert settings["scenario"]["noise_name"] == "fedcorr"
    assert settings["scenario"]["noise"]["tau"] == 0.25
    assert settings["seed"] == 4


def test_the_command_line_wins_over_the_file_however_either_says_it():
    text = 'rho = 0.2\nrounds = 2\nset = ["protocol.batch=64"]\npartition_set = ["p=0.9", "alpha=3"]\n'
    words = ("--method", "fedavg", "--clients", "5", "--noise-set", "rho=0.4", "--p", "0.8")
    settings = configured(text, *words, "--set", "protocol.rounds=1")
    assert settings["scenario"]["noise"]["rho"] == 0.4
    assert settings["protocol"]["rounds"] == 1
    assert settings["protocol"]["batch"] == 64
    assert settings["scenario"]["partition"] == {"law": "bernoulli-dirichlet", "p": 0.8, "alpha": 3.0, "min_size": 2}
    other_words = (*words[:-2], "--partition-set", "p=0.8", "--set", "protocol.rounds=1")
    assert configured(text, *other_words)["scenario"] == settings["scenario"]
    assert configured(text, *other_words)["protocol"] == settings["protocol"]
    assert configured(text, *words, "--set", "protocol.batch=32", "--rounds", "1")["protocol"]["batch"] == 32


def test_the_home_folder_is_written_in_a_file_as_it_is_typed(tmp_path, monkeypatch):
    """No shell reads the file: the run would lie in a folder that is called "~"."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine.py").write_text(PLUGIN)
    text = 'method = "~/mine.py:Mine"\nclients = 5\nrounds = 1\nout = "~/runs"\ndata-root = "~/data"\n'
    assert configured(text)["method"] == f"{tmp_path}/home/mine.py:Mine"
    assert only_run(tmp_path / "home" / "runs").is_dir()
    assert not Path("~").exists()


@pytest.mark.parametrize(
    "table",
    [
        "[set]\n'protocol.batch' = 64\n'protocol.optimiser.lr' = 0.05",
        "[set]\nprotocol.batch = 64\nprotocol.optimiser.lr = 0.05",
        "[set.protocol]\nbatch = 64\noptimiser = { lr = 0.05 }",
        'set = ["protocol.batch=64", "protocol.optimiser.lr=0.05"]',
    ],
)
def test_a_set_table_is_the_same_as_set_on_the_command_line(table):
    protocol = configured(BASE + table)["protocol"]
    assert protocol["batch"] == 64
    assert protocol["optimiser"]["lr"] == 0.05
    assert protocol["optimiser"]["momentum"] == 0.9


def test_a_single_text_is_a_list_of_one_as_in_a_grid():
    assert configured(BASE + 'set = "protocol.batch=64"\n')["protocol"]["batch"] == 64


def test_a_table_keeps_strings_numbers_and_truth_values(plugin):
    text = f'method = "{plugin}"\nclients = 5\nrounds = 1\n[set]\nkind = "odd one"\nalpha = 2\n'
    settings = configured(text + "[noise_set]\ninclude_true = false\n")
    assert settings["method_settings"] == {"kind": "odd one", "alpha": 2.0}
    assert settings["scenario"]["noise"]["include_true"] is False
    for word in ("3", "true", "2026-01-01", " a ", "[1]", "'"):
        text = f'method = "{plugin}"\nclients = 5\nrounds = 1\n[set]\nkind = "{word}"\n'
        assert configured(text)["method_settings"]["kind"] == word
    (run,) = runs_of(expand({"method": plugin, "set": {"kind": ["3"]}}), device="cpu")
    assert run.method_settings["kind"] == "3"
    assert assignments(run.changed) == ['kind="3"']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metod = 'fedavg'", "unknown option 'metod'. Did you mean method"),
        ("config = 'other.toml'", "unknown option 'config'"),
        ("method = ", "run.toml is not TOML"),
        ("[noise]\nrho = 0.5", "noise is one value, not a table"),
        ("seed = [0, 1]", "seed is one value, not a list; `flnoisebench sweep` runs a grid"),
        ("rounds = true", "rounds = true, and it is no flag"),
        ("\ufeffrounds = 0", "'--rounds'"),  # a byte order mark, as Windows writes it
        ("rounds = 'many'", "'--rounds'"),
        ("rounds = 0", "'--rounds'"),
        ("[set]\nalhpa = 2", "unknown setting 'alhpa'"),
    ],
)
def test_a_wrong_config_file_is_named_with_what_is_wrong(text, message):
    Path("run.toml").write_text(text)
    assert message in refused("run", "--method", "fedavg", "--config", "run.toml")
    assert not Path("runs").exists()


def test_a_config_file_that_cannot_be_read_is_named():
    assert "cannot read nowhere.toml: No such file" in refused("run", "--config", "nowhere.toml")
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "binary.toml is not TOML" in refused("run", "--config", "binary.toml")


# -------------------------------------------------------------------------------------------- list and data

LISTS = ("methods", "datasets", "protocols", "noise", "partitions", "models")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("methods", registry.names(registry.METHODS)),
        ("datasets", registry.names(registry.DATASETS)),
        ("protocols", protocols.names()),
        ("noise", list(NOISE_PRESETS)),
        (
            "partitions",
            ["iid", "dirichlet", "bernoulli-dirichlet", "shards", "classes", "quantity", "manifest", "natural"],
        ),
        ("models", list(models.MODELS)),
    ],
)
def test_a_list_names_everything_and_details_say_more_of_each(kind, names):
    short, long = done("list", kind).splitlines(), done("list", kind, "--details").splitlines()
    assert [line.split("\t")[0] for line in short] == names
    if kind not in ("noise", "partitions"):
        heads = [line for line in long if not line.startswith(" ")]
        assert [line.split("\t")[0] for line in heads] == names
        assert all(len(line.split("\t")[1]) > 5 for line in heads)
    assert len("\n".join(long)) > len("\n".join(short)) + 100


def test_list_methods_details_gives_each_preset_and_each_setting_its_default_type_and_reason():
    parts = re.split(r"^(?=\S)", done("list", "methods", "--details"), flags=re.MULTILINE)[1:]
    for name, part in zip(registry.names(registry.METHODS), parts, strict=True):
        assert part.startswith(f"{name}\t")
        for preset_name, preset in registry.load_method(name).presets.items():
            assert f"  preset {preset_name}\t{preset.about}" in part.splitlines()
        for field, info in registry.load_method(name).Config.model_fields.items():
            (line,) = [line for line in part.splitlines() if line.startswith(f"    {field} = ")]
            default = getattr(info.default, "value", info.default)
            assert line.startswith(f"    {field} = {default}")
            assert line.endswith(info.description)


def test_list_methods_details_gives_what_a_preset_sets_in_general_on_a_data_set_and_in_track_own():
    parts = re.split(r"^(?=\S)", done("list", "methods", "--details"), flags=re.MULTILINE)[1:]
    text = dict(part.split("\t", 1) for part in parts)
    fedcorr = text["fedcorr"].split("  preset ")[1:]
    everywhere = "protocol.batch=10 protocol.optimiser.name=sgd protocol.optimiser.lr=0.03"
    decay = "protocol.optimiser.momentum=0.5 protocol.optimiser.weight_decay=0.0"
    assert f"\n    everywhere, track own\t{everywhere} {decay}\n" in fedcorr[0]
    cifar100 = "protocol.rounds=100 protocol.local_epochs=5 protocol.optimiser.lr=0.01"
    assert f"\n    on cifar100\tT1=10\n    on cifar100, track own\t{cifar100}\n" in fedcorr[0]
    assert "\n    everywhere\tbeta=5.0 mixup=1.0 " in fedcorr[1]
    assert "track own" not in fedcorr[1]  # as in the first
    fedcova = text["fedcova"].split("  preset ")[1]
    assert "\n    everywhere\thead=bn gate=0.55\n    everywhere, track own\tprotocol.batch=512\n" in fedcova
    assert " classifier_eps2=0.5 k1=None " in fedcova  # a None that is no default
    assert "everywhere" not in text["fedavg"]


def test_list_noise_and_partitions_details_name_every_field_with_its_reason():
    for kind, spec in (("noise", Noise), ("partitions", Partition)):
        text = done("list", kind, "--details")
        for field, info in spec.model_fields.items():
            assert re.search(rf"^    {field} = .*{re.escape(info.description)}$", text, re.MULTILINE), field


def test_a_type_is_said_as_people_read_it():
    text = done("list", "noise", "--details") + done("list", "methods", "--details")
    assert "    mass = drawn share of all labels\tdrawn|stratified|float\t" in text
    assert "    milestones = (Rounds(0.5), Rounds(0.75)) rounds\ttuple[Rounds, ...]\t" in text
    assert "    k1 = 10 clients\tint|None\t" in text


def test_list_partitions_says_what_each_law_does_and_reads():
    said = dict(line.split("\t") for line in done("list", "partitions").splitlines())
    assert said["natural"] == "the clients that the data set names itself"
    assert said["bernoulli-dirichlet"].endswith("; reads p, alpha")
    assert all(len(about) > 20 for about in said.values())


def test_list_protocols_details_states_the_budget():
    text = done("list", "protocols", "--details")
    for name in protocols.names():
        assert f"{protocols.load(name).rounds} rounds" in text
        assert protocols.read(name)["about"] in text


def test_lists_import_no_plugin_and_details_do():
    code = f"""
import sys
from typer.testing import CliRunner
from flnoisebench.cli.main import app
families = ("flnoisebench_methods.", "flnoisebench_datasets.")
plugins = lambda: sorted(name for name in sys.modules if name.startswith(families))
for kind in {LISTS}:
    assert CliRunner().invoke(app, ["list", kind]).exit_code == 0, kind
print(plugins())
CliRunner().invoke(app, ["list", "datasets", "--details"])
print(plugins())
"""
    finished = in_a_process(sys.executable, "-c", code)
    assert finished.returncode == 0, finished.stderr
    without, with_details = finished.stdout.splitlines()
    assert without == "[]"
    assert "flnoisebench_datasets.digits" in with_details


def test_a_list_on_a_terminal_is_in_columns(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(force_terminal=True, width=80, file=screen, highlight=False))
    done("list", "noise")
    assert "\t" not in screen.getvalue()
    assert "clean                     none: no label is changed" in screen.getvalue()


def test_data_list_says_of_each_data_set_what_is_there_and_how_to_get_the_rest(tmp_path):
    root = tmp_path / "data"
    cifar = root / "cifar-10-batches-py"
    cifar.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        (cifar / name).write_bytes(b"not the published bytes")
    lines = {line.split("\t")[0]: line.split("\t")[1:] for line in done("data", "list").splitlines()}
    assert list(lines) == registry.names(registry.DATASETS)
    assert lines["digits"] == ["there", "1438 + 359 images 1x8x8, 10 classes"]
    assert lines["cifar100"][0] == "missing"
    assert f"flnoisebench data fetch cifar100 --data-root {root}" in lines["cifar100"][1]
    assert lines["folder"][0] == "missing"
    assert "train/<class>/*" in lines["folder"][1]  # nothing to fetch: it says what to put there
    assert lines["cifar10"][0] == "damaged"
    assert "data_batch_1" in lines["cifar10"][1]


def test_missing_data_names_the_folder_and_the_command_that_fetches_it(tmp_path):
    message = refused(*RUN, "--dataset", "cifar10", "--data-root", tmp_path / "none")
    assert str(tmp_path / "none") in message
    assert f"flnoisebench data fetch cifar10 --data-root {tmp_path / 'none'}" in message
    assert not Path("runs").exists()


def test_data_fetch_of_what_needs_no_download_and_of_what_no_program_may_download(monkeypatch):
    assert done("data", "fetch", "digits") == f"digits\tthere\t1438 + 359 images in {os.environ['FLNOISEBENCH_DATA']}\n"
    message = refused("data", "fetch", "folder")
    assert "cannot be downloaded" in message
    assert "DIR/train/<class>" in message
    assert "Did you mean cifar10" in refused("data", "fetch", "cifar1")


def test_human_labels_may_be_fetched_before_the_images(monkeypatch):
    monkeypatch.setattr(registry.load_dataset("cifar10").__class__, "fetch_human_labels", lambda self, root: None)
    said = done("data", "fetch", "cifar10", "--human-labels")
    assert said.startswith(f"cifar10\tthere\thuman labels in {os.environ['FLNOISEBENCH_DATA']}, not checked yet: ")
    assert "flnoisebench data fetch cifar10" in said


# ----------------------------------------------------------------------------------------------------- show


def test_show_prints_a_finished_run_summary_and_curve():
    printed = done(*RUN)
    shown = done("show", "runs")
    assert shown.startswith(printed)
    folder = only_run(Path("runs"))
    curve = [f"{record.accuracy:.2f}" for record in records.load_records(folder)]
    assert rows(shown)["accuracy by round"] == " ".join(curve)
    assert "last round, loss" in rows(shown)
    parts = rows(shown)["time by part"].split(", ")
    assert {part.split()[0] for part in parts} == {
        "clients",
        "fit",
        "aggregate",
        "evaluate",
        "digest",
        "commit",
        "plan",
    }
    assert parts[0].startswith("clients ")  # the slowest first
    assert done("show", folder) == shown


def test_show_hides_no_number_of_a_round_behind_another_of_its_name():
    done(*RUN)
    update = {
        "judged": {"samples_recall": 40.0}, "diagnostics": {}, "metrics": {"samples_recall": 99.0, "loss": 1.5},
        "notes": {"why": "too few", "flagged": [1, 2]},
    }  # fmt: skip
    record = records.load_records(only_run(Path("runs")))[-1].model_copy(update=update)
    assert said(record) == [
        ("loss", 1.5), ("samples_recall (judged)", 40.0), ("samples_recall (metrics)", 99.0), ("why", "too few"),
    ]  # fmt: skip


def test_samples_that_no_batch_took_are_in_the_summary():
    assert rows(done(*RUN))["images trained"] == "2,876"
    # three clients of 288 samples and two of 287 have two batches of 128 each
    whole = ("--partition", "iid", "--set", "protocol.batch=128", "--set", "protocol.last_batch=drop", "--rounds", "1")
    assert rows(done("run", "--method", "fedavg", "--clients", "5", *whole))["images trained"] == "1,280; 158 left out"


def test_show_says_how_far_an_unfinished_run_is(plugin):
    call("run", "--method", plugin, "--rounds", "3", "--clients", "5", TROUBLE="stop")
    shown = rows(done("show", "runs"))
    assert shown["unfinished"].startswith(f"1 of 3 rounds of {plugin} on digits")
    assert "status" not in shown
    content = json.loads(done("show", "runs", "--json"))
    assert content["result"] is None
    assert [record["round"] for record in content["records"]] == [0]


def test_show_says_counts_and_flags_of_a_note_as_they_are():
    noting = "server.note(samples=1234567, undecided=True, share=0.123456)\n        return Plan("
    Path("noting.py").write_text(PLUGIN.replace("return Plan(", noting))
    done("run", "--method", "noting.py:Mine", "--rounds", "1", "--clients", "5")
    shown = rows(done("show", "runs"))
    notes = {name: shown[f"last round, {name}"] for name in ("samples", "undecided", "share")}
    assert notes == {"samples": "1234567", "undecided": "True", "share": "0.1235"}


def test_show_json_is_the_settings_the_result_and_all_rounds():
    done(*RUN)
    content = json.loads(done("show", "runs", "--json"))
    folder = only_run(Path("runs"))
    assert content["folder"] == str(folder)
    assert content["settings"] == json.loads((folder / "settings.json").read_text())
    assert content["result"] == json.loads((folder / "result.json").read_text())
    assert content["records"] == [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_show_shows_what_a_leaderboard_keeps_of_a_run():
    done(*RUN)
    done("leaderboard", "build", "runs", "--out", "boards")
    (path,) = Path("boards").rglob("draw0-seed0.json")
    shown, own = rows(done("show", path)), rows(done("show", "runs"))
    assert done("show", "boards") == done("show", path)
    assert shown.pop("entry") == str(path)
    assert own.pop("folder") == str(only_run(Path("runs")))
    own = {name: value for name, value in own.items() if not name.startswith("last round, ")}  # no leaderboard has it
    assert shown == own | {name: value for name, value in shown.items() if name.startswith("last 5 rounds, ")}
    content, whole = (json.loads(done("show", place, "--json")) for place in (path, "runs"))
    assert content["settings"] == whole["settings"]
    assert content["result"]["accuracy"] == whole["result"]["accuracy"]
    assert content["records"] == [
        {name: record[name] for name in ("round", "accuracy", "label_noise")} for record in whole["records"]
    ]
    done(*RUN, "--seed", "1")
    done("leaderboard", "build", "runs", "--out", "boards")
    assert "boards holds 2 runs; name one of them" in refused("show", "boards")


def test_show_asks_which_of_several_runs_and_says_when_there_is_none(tmp_path):
    assert "nowhere holds no run" in refused("show", "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty holds no run" in refused("show", "empty")
    done(*RUN)
    done(*RUN, "--seed", "1")
    message = refused("show", "runs")
    assert "runs holds 2 runs; name one of them" in message
    for path in Path("runs").rglob("settings.json"):
        assert str(path.parent) in message


def test_show_draws_the_curve_on_a_terminal(monkeypatch):
    done(*RUN)
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(force_terminal=True, width=100, file=screen, highlight=False))
    done("show", "runs")
    assert re.search(r"accuracy +▁█  33\.\d\d -> 6\d\.\d\d %, from 33", screen.getvalue()), screen.getvalue()


def test_brackets_in_a_path_are_text_on_a_terminal_and_no_markup(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(force_terminal=True, width=140, file=screen, highlight=False))
    Path("[dim]").mkdir()
    Path("[dim]/mine.py").write_text(PLUGIN)
    done("run", "--method", "[dim]/mine.py:Mine", *RUN[3:], "--out", "runs/[/dim]")
    assert screen.getvalue().count("[dim]/mine.py:Mine") > 1  # what begins, and its progress
    assert "folder: runs/[/dim]/digits/" in screen.getvalue()
    done("scenario", "build", "--clients", "5", "--out", "[/dim].safetensors")
    done("scenario", "check", "[/dim].safetensors")
    assert "[/dim].safetensors: complete" in screen.getvalue()
    call("check", "--method", "[dim]/mine.py:Mine", "--only", "reasons")
    assert "[dim]/mine.py:Mine, 12 rounds" in screen.getvalue()


def test_a_curve_goes_from_low_to_high_leaves_gaps_and_fits_its_width(monkeypatch):
    assert console.curve([0.0, 50.0, 100.0]) == "▁▅█"
    assert console.curve([1.0, None, 2.0]) == "▁ █"
    assert console.curve([5.0, 5.0]) == "▁▁"
    assert console.curve([]) == console.curve([None]) == ""
    assert len(console.curve([float(i) for i in range(1000)])) <= 60
    assert console.curve([float(i) for i in range(1000)])[-1] == "█"  # the last round is always among the shown
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert console.curve([0.0, 100.0]).isascii()


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (console.size, 999, "999 B"),
        (console.size, 192_200, "192.2 kB"),
        (console.size, 999_960, "1.0 MB"),
        (console.size, 1.5e6, "1.5 MB"),
        (console.size, 2e12, "2.0 TB"),
        (console.duration, 0.1234, "0.1 s"),
        (console.duration, 59.96, "60.0 s"),
        (console.duration, 61, "1 min 01 s"),
        (console.duration, 7260, "2 h 01 min"),
        (console.percent, 12.345, "12.35"),
        (console.percent, None, "-"),
    ],
)
def test_numbers_are_printed_for_people(function, value, text):
    assert function(value) == text


def test_a_message_prints_names_as_they_are(capsys):
    for text in ("file.py:X: nothing", "[red]alpha[/red] :smile:"):
        with pytest.raises(typer.Exit):
            console.fail(text)
    assert capsys.readouterr().err == "error: file.py:X: nothing\nerror: [red]alpha[/red] :smile:\n"


def test_a_reader_that_has_read_enough_gets_no_message(monkeypatch):
    def closed(*about):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(listing, "line", closed)
    result = call("list", "methods")
    assert result.exit_code == 1
    assert result.stderr == ""


def test_the_documented_lines_score_a_checkpoint_as_its_last_record_says(capsys):
    docs = (Path(__file__).parent.parent / "docs" / "running.md").read_text(encoding="utf-8")
    lines = docs[docs.index("    import torch\n") : docs.index("No file is pickled.")]
    found = rows(done(*RUN))
    capsys.readouterr()
    exec(textwrap.dedent(lines), {"folder": found["folder"], "root": None})
    share = float(re.fullmatch(r"tensor\((.*)\)\n", capsys.readouterr().out)[1])
    assert f"{100 * share:.2f} %" == found["accuracy, last round"]


# ------------------------------------------------------------------------------------------------- scenario


def test_a_scenario_is_built_shown_checked_and_compared():
    built = done("scenario", "build", "--clients", "5", "--rho", "0.4", "--out", "a.safetensors")
    assert built.splitlines()[-1] == "manifest\ta.safetensors"
    lines = [line.split("\t") for line in built.splitlines()]
    clients = lines[2:7]
    assert lines[1][0] == "client"
    assert sum(int(row[1]) for row in clients) == 1438
    assert [row[0].startswith("noisy ") for row in clients].count(True) == 2
    for row in clients:
        assert sum(map(int, row[4].split())) == int(row[1])
        assert (float(row[2]) > 0) == row[0].startswith("noisy ")

    assert built.startswith(done("scenario", "show", "a.safetensors"))
    assert done("scenario", "check", "a.safetensors").startswith("a.safetensors: complete, rebuildable")
    facts = json.loads(done("scenario", "show", "a.safetensors", "--json"))
    assert facts["noisy_clients"] == 2
    assert [row["size"] for row in facts["clients"]] == [int(row[1]) for row in clients]

    done("scenario", "build", "--clients", "5", "--rho", "0.4", "--draw", "1", "--out", "b.safetensors")
    assert done("scenario", "diff", "a.safetensors", "a.safetensors") == "the same scenario\n"
    assert done("scenario", "diff", "a.safetensors", "b.safetensors").startswith("draw: 0 and 1\n")


def test_a_manifest_has_a_name_of_its_own_when_none_is_given_and_shows_as_a_table_on_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(force_terminal=True, width=140, file=screen, highlight=False))
    done("scenario", "build", "--clients", "5", "--draw", "2")
    (path,) = Path().glob("digits-fedcova-sym-*-draw2.safetensors")
    assert str(path) in screen.getvalue()
    assert re.search(r"client +┃ +samples", re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()))
    assert "label noise over all samples: " in screen.getvalue()


def test_a_run_and_a_manifest_of_the_same_settings_have_the_same_labels():
    done("scenario", "build", "--clients", "5", "--draw", "3", "--out", "a.safetensors")
    result = json.loads(done(*RUN, "--draw", "3", "--json"))
    facts = json.loads(done("scenario", "show", "a.safetensors", "--json"))
    assert result["label_noise_before"] == pytest.approx(100 * facts["realised_rate"])
    assert [row["counts"] for row in result["federation"]["clients"]] == [row["counts"] for row in facts["clients"]]
    shown = done("scenario", "show", "a.safetensors").splitlines()
    assert set(shown) >= {f"SHA-256 of {part}\t{digest}" for part, digest in result["digests"].items()}
    assert facts["digests"] == result["digests"]
    assert facts["settings"] == result["settings"]["scenario"]


def test_a_manifest_of_other_data_is_found_by_check(tmp_path, monkeypatch):
    from flnoisebench import scenario

    done("scenario", "build", "--clients", "5", "--out", "a.safetensors")
    scene, truth = scenario.load("a.safetensors")
    scene.digests["data"] = "0" * 64
    scenario.save("b.safetensors", scene, truth)
    result = call("scenario", "check", "b.safetensors")
    assert result.exit_code == 1
    assert "problem: the data are not those that the manifest was built on" in result.stdout


def test_a_manifest_whose_labels_were_swapped_and_digests_made_anew_is_found_by_check():
    """The forger's way: everything fits together but the labels are not those that the settings draw."""
    from flnoisebench import scenario

    done("scenario", "build", "--clients", "5", "--out", "a.safetensors")
    scene, truth = scenario.load("a.safetensors")
    given = scene.given.copy()
    given[:50] = truth.true[:50]
    forged = scenario.Scenario(
        spec=scene.spec, classes=scene.classes, owner=scene.owner, given=given, held_out=scene.held_out,
        told=scene.told, digests={**scene.digests, "labels": scenario.digest(given)},
    )  # fmt: skip
    scenario.save("b.safetensors", forged, truth)
    assert done("scenario", "show", "b.safetensors")
    result = call("scenario", "check", "b.safetensors")
    assert result.exit_code == 1
    assert "problem: " in result.stdout
