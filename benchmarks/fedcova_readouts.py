"""FedCova without corrector: what its encoder is worth under other readouts, and where accuracy is lost.

    python benchmarks/fedcova_readouts.py --data-root DATA --out RUNS --rounds 500 --draw 0

The covariances never enter the loss, so one training run answers experiments 1 to 4 of the method's specification
(section 1.13) without further training: whose features the covariances are measured under, from which view and with
what momentum; what true labels, clean clients, neighbours or a linear probe would reach on the same features; which
classifier; and whether the averaged BatchNorm statistics are at fault.  The run is an ordinary one in its folder; the
server's state is kept beside it after every --every rounds and after each of the --last rounds, and a second call
with the same arguments goes on from where the first was stopped.  Accuracies are of both halves of the test set: choose
on A, report B.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from flnoisebench_methods import fedcova as fc

from flnoisebench import inputs, runtime, trees
from flnoisebench.engine.losses import autocast
from flnoisebench.settings import resolve

MOMENTA = (0.5, 0.9)


def kept(folder: Path) -> dict[int, Path]:
    return {int(path.stem): path for path in sorted(folder.glob("[0-9]*.safetensors"))}


def train(run: runtime.Run, folder: Path, every: int, last: int) -> None:
    """Carry the run on, and keep the server's state after the rounds asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    rounds = run.settings.protocol.rounds
    one_exchange = run._exchange

    def exchange(position: Any, *rest: Any) -> Any:
        record = one_exchange(position, *rest)
        if record is not None and ((record.round + 1) % every == 0 or record.round >= rounds - last):
            path = folder / f"{record.round:05d}.safetensors"
            path.with_suffix(".tmp").write_bytes(trees.to_bytes(position.server))
            os.replace(path.with_suffix(".tmp"), path)
        return record

    run._exchange = exchange  # type: ignore[method-assign]

    def say(record: Any) -> None:
        if (record.round + 1) % 10 == 0:
            print(f"round {record.round + 1}: {record.accuracy} % {record.predictors}", flush=True)

    with contextlib.suppress(runtime.AlreadyDone):
        run.execute(say)


class Features:
    """z of training and test images under one network, and what is asked of them."""

    def __init__(self, run: runtime.Run, weights: Any, *, recalibrate: bool = False) -> None:
        self.run, self.device = run, run.device
        self.network = run._lane.server(0, 0, "predict").model(weights, frozen=True)
        engine = run.engine
        self.rows = list(engine.positions)
        self.images = engine.images(torch.cat(self.rows))
        self.given = engine.given[self.images.rows]
        self.client = torch.cat([torch.full_like(rows, m) for m, rows in enumerate(self.rows)])
        if recalibrate:
            self.network = copy.deepcopy(self.network)
            self._recalibrate()
        self.z = self._pass(self.images)
        self.test = self._pass(run.tested)
        self.test_labels = torch.as_tensor(run.tested_labels, device=self.device)

    def _recalibrate(self) -> None:
        """Running statistics of the averaged network itself, from 40 batches of 256 training images."""
        norms = [m for m in self.network.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over batches
            norm.train()
        draw = torch.Generator().manual_seed(0)
        order = torch.randperm(self.images.size, generator=draw).to(self.device)
        with torch.no_grad(), autocast(self.device, self.run.settings.protocol.precision):
            for index in order[: 256 * 40].split(256):
                self.network(self.images.plain(index))
        for norm in norms:
            norm.eval()

    def _pass(self, images: Any, augment: torch.Generator | None = None) -> torch.Tensor:
        found = []
        with torch.no_grad(), autocast(self.device, self.run.settings.protocol.precision):
            for index in torch.arange(images.size, device=self.device).split(1000):
                if augment is None:
                    inputs = images.plain(index)
                else:
                    offset = torch.randint(0, 2 * images.look.crop_padding + 1, (len(index), 2), generator=augment)
                    flip = torch.rand(len(index), generator=augment) < 0.5
                    inputs = images.augmented(index, offset.to(self.device), flip.to(self.device))
                found.append(self.network(inputs).float())
        return torch.cat(found)

    def train_view(self) -> torch.Tensor:
        return self._pass(self.images, torch.Generator().manual_seed(1))

    def statistics(
        self, labels: torch.Tensor, s: float, *, z: torch.Tensor | None = None, keep: torch.Tensor | None = None,
        by_client: bool = False, mean: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Pooled statistics of the training images; keep: which of them; by_client: each holder counts the same."""
        z = self.z if z is None else z
        J = self.run.engine.classes
        rows = torch.arange(len(z), device=z.device) if keep is None else keep.nonzero()[:, 0]
        groups = [rows[self.client[rows] == m] for m in range(len(self.rows))] if by_client else [rows]
        parts = []
        for group in groups:
            if len(group):
                sigma, counts = fc.second_moments(z[group], labels[group], J, s)
                means = fc.first_moments(z[group], labels[group], J) if mean else None
                n = (counts > 0 if by_client else counts).double().to(z.device)
                parts.append({"sigma": sigma.double(), "n": n, "mean": None if means is None else means.double()})
        return fc.pool(parts)

    def halves(self, scores: torch.Tensor) -> tuple[float, float]:
        right = (scores.argmax(1) == self.test_labels).double()
        return 100 * right[0::2].mean().item(), 100 * right[1::2].mean().item()

    def accuracy(self, statistics: Any, alpha: float = 2.0, **options: Any) -> tuple[float, float]:
        return self.halves(fc.scores(self.test, fc.readout(statistics, alpha, **options)))

    def neighbours(self, labels: torch.Tensor, k: int = 20) -> tuple[float, float]:
        votes = []
        for block in self.test.split(500):
            near = (block @ self.z.T).topk(k, dim=1).indices
            votes.append(F.one_hot(labels[near], self.run.engine.classes).sum(1).double())
        return self.halves(torch.cat(votes))

    def probe(self, labels: torch.Tensor) -> tuple[float, float]:
        """Multinomial logistic regression on z, L2 1e-4, to convergence of L-BFGS."""
        head = torch.nn.Linear(self.z.shape[1], self.run.engine.classes).to(self.device)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        optimiser = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimiser.zero_grad()
            value = F.cross_entropy(head(self.z), labels) + 1e-4 * head.weight.square().sum()
            value.backward()
            return value

        optimiser.step(closure)
        with torch.no_grad():
            return self.halves(head(self.test))


def corrections(features: Features, statistics: Any, true: torch.Tensor) -> dict[str, Any]:
    """What one correction with this readout would do: who is chosen, and the label noise afterwards, in percent."""
    score = fc.scores(features.z, fc.readout(statistics, 2.0))
    best = score.argmax(1)
    wrong = features.given != true
    found = {"noise before": wrong, "if all took the readout": best != true}
    disagreement = torch.stack(
        [(best != features.given)[features.client == m].double().mean() for m in range(len(features.rows))]
    )
    noise = torch.stack([wrong[features.client == m].double().mean() for m in range(len(features.rows))])
    correlation = torch.corrcoef(torch.stack([disagreement, noise]))[0, 1].item()
    certainty = fc.confidence(score, "softmax")
    for name, chosen in (
        ("gate .55", (disagreement >= 0.55).nonzero()[:, 0]),
        ("gate .4", (disagreement >= 0.4).nonzero()[:, 0]),
        ("top 10", disagreement.argsort(descending=True, stable=True)[:10]),
    ):
        inside = torch.isin(features.client, chosen)
        for eta in (0.0, 0.3, 0.5, 0.9):
            take = inside & (certainty >= eta)
            found[f"{name}, eta {eta}"] = torch.where(take, best, features.given) != true
    result = {name: round(100 * value.double().mean().item(), 3) for name, value in found.items()}
    order = disagreement.argsort(descending=True, stable=True)
    return {
        **result,
        "correlation of r_m with the noise": round(correlation, 3),
        "r_m, falling": [round(r, 3) for r in disagreement[order].tolist()],
        "noise of those clients": [round(r, 3) for r in noise[order].tolist()],
    }


def analyse(run: runtime.Run, truth: Any, path: Path, earlier: list[Path], full: bool) -> dict[str, Any]:
    """All readouts of one kept state; earlier: the states of the rounds just before, oldest first."""
    state = trees.to(trees.from_bytes(path.read_bytes()), run.device)
    config = run.settings.method_settings
    s = config["eps2"] / config["d"]
    features = Features(run, state["weights"])
    true = torch.as_tensor(truth.true, device=run.device)[features.images.rows]
    clean = torch.as_tensor(~truth.noisy, device=run.device)[features.client]
    given = features.given
    current = features.statistics(given, s)
    table: dict[str, Any] = {
        "local_after, momentum (main)": features.accuracy(state["classifier"]),
        "local_after, this round": features.accuracy(state["raw"]),
        "global_current, plain": features.accuracy(current),
        "global_current, augmented": features.accuracy(features.statistics(given, s, z=features.train_view())),
        "ceiling: true labels": features.accuracy(features.statistics(true, s)),
        "ceiling: clean clients": features.accuracy(features.statistics(given, s, keep=clean)),
        "ceiling: wrong labels dropped": features.accuracy(features.statistics(given, s, keep=given == true)),
        "ceiling: 20 neighbours, true labels": features.neighbours(true),
        "20 neighbours, given labels": features.neighbours(given),
    }
    if full:
        table |= {
            "ceiling: linear probe, true labels": features.probe(true),
            "linear probe, given labels": features.probe(given),
            "classifier: MAP": features.accuracy(current, 1.0, posterior=True),
            **{f"classifier: alpha {alpha}": features.accuracy(current, alpha) for alpha in (1.0, 4.0, 7.0)},
            **{
                f"classifier: eps2 {eps2}": features.accuracy(current, shift=eps2 / config["d"] - s)
                for eps2 in (0.5, 2.0, 20.0)
            },
            "classifier: clients count the same": features.accuracy(features.statistics(given, s, by_client=True)),
            "classifier: mean-aware": features.accuracy(features.statistics(given, s, mean=True)),
        }
        momenta = dict.fromkeys(MOMENTA)
        for before in [*earlier, path]:
            old = trees.to(trees.from_bytes(before.read_bytes())["weights"], run.device)
            measured = Features(run, old).statistics(given, s)
            momenta = {b: fc.with_momentum(known, measured, b) for b, known in momenta.items()}
        features = Features(run, state["weights"])  # the lane's network holds the last weights asked for
        for b, pooled in momenta.items():
            name = f"global_current, momentum {b} over {len(earlier) + 1} rounds"
            table[name] = features.accuracy(pooled)
        again = Features(run, state["weights"], recalibrate=True)
        table["BatchNorm recalibrated, global_current"] = again.accuracy(again.statistics(given, s))
        table["BatchNorm recalibrated, true labels"] = again.accuracy(again.statistics(true, s))
        features = Features(run, state["weights"])
    return {
        "accuracy": {name: [round(value, 2) for value in pair] for name, pair in table.items()},
        "correction": {
            name: corrections(features, statistics, true)
            for name, statistics in (("local_after", state["classifier"]), ("global_current", current))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="runs' folders")
    parser.add_argument("--dataset", default="cifar10", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=500, help="(default: %(default)s)")
    parser.add_argument("--draw", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], help="as of `flnoisebench run`")
    parser.add_argument("--every", type=int, default=50, help="rounds between kept states (default: %(default)s)")
    parser.add_argument("--last", type=int, default=20, help="rounds at the end, all kept (default: %(default)s)")
    parser.add_argument("--analyse-only", action="store_true", help="of what is kept so far")
    arguments = parser.parse_args()
    settings = resolve(
        dataset=arguments.dataset, method="fedcova", preset="no-corrector", track="own", rounds=arguments.rounds,
        draw=arguments.draw, changes=arguments.set,
    )  # fmt: skip
    dataset = runtime.registry.load_dataset(arguments.dataset)
    arrays = dataset.load(arguments.data_root)
    scene, truth = inputs.build_scenario(settings.scenario, dataset, arrays)
    run = runtime.prepare(
        settings, data_root=arguments.data_root, out=arguments.out, device=arguments.device, arrays=arrays,
        scene=(scene, truth),
    )  # fmt: skip
    folder = run.folder / "kept"
    if not arguments.analyse_only:
        train(run, folder, arguments.every, arguments.last)
    states = kept(folder)
    final = max(states)
    report: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "noise": run.judge.noise_before()}
    report["environment"] = runtime.environment(run.devices, "", 0, "")
    for round in sorted(states):
        earlier = [states[r] for r in range(round - arguments.last + 1, round) if r in states]
        if round == final or (round + 1) % arguments.every == 0:
            report[f"round {round + 1}"] = analyse(run, truth, states[round], earlier, full=round == final)
            print(f"round {round + 1}: {json.dumps(report[f'round {round + 1}'])}", flush=True)
            (run.folder / "readouts.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
