"""The evaluator: the only place where the truth meets what a method did.

Predictions against test labels, claims against true labels.  Everything is in percent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from flnoisebench.engine.images import DeviceImages
from flnoisebench.scenario import Scenario, Truth
from flnoisebench.trees import Tree

CALIBRATION_BINS = 15  # Guo et al., ICML 2017
BATCH = 1000  # at most


def scores_of(
    predictors: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], images: DeviceImages, classes: int
) -> dict[str, np.ndarray]:
    """float32 [n, J] scores of every predictor on the plain view.

    Batch by batch and within it predictor by predictor, so that readouts of one network can share its features.
    Raises ValueError when no predictor is "main", which is the one that is judged, and when scores have another shape
    or are NaN.  No predictors at all are a round without an accuracy, such as one before there is a classifier.
    """
    if predictors and "main" not in predictors:
        raise ValueError(f"no predictor is named 'main', which is the one that is judged: {[*predictors]}")
    for name, predict in predictors.items():
        if isinstance(predict, torch.nn.Module) and predict.training:
            raise ValueError(
                f"predictor {name!r} is a network that trains, so that a BatchNorm in it would learn from test images: "
                "make it with server.model(state, frozen=True)"
            )
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in predictors}
    device, batch = images.pixels.device, images.at_once(BATCH)
    with torch.no_grad():
        for start in range(0, images.size, batch):
            index = torch.arange(start, min(start + batch, images.size), device=device)
            inputs = images.plain(index)
            for name, predict in predictors.items():
                scores = predict(inputs)
                if scores.shape != (index.numel(), classes):
                    raise ValueError(
                        f"predictor {name!r} returned scores {list(scores.shape)}, not {[index.numel(), classes]}"
                    )
                parts[name].append(scores.float())
    found = {name: torch.cat(rows).cpu().numpy() for name, rows in parts.items()}
    for name, array in found.items():
        if np.isnan(array).any():
            raise FloatingPointError(f"predictor {name!r} returned NaN scores")
    return found


def prediction_digest(scores: Mapping[str, np.ndarray]) -> str:
    """SHA-256, hex, over the predicted classes of every predictor.  scores: {name: float [n, J]}."""
    whole = hashlib.sha256()
    for name in sorted(scores):
        whole.update(name.encode())
        whole.update(scores[name].argmax(1).astype(np.int32).tobytes())
    return whole.hexdigest()


def _percent(share: Any) -> float:
    return round(float(share) * 100, 4)


def measure(scores: Mapping[str, np.ndarray], labels: np.ndarray) -> dict[str, Any]:
    """The accuracy fields of a RoundRecord, in percent: all of predictor "main", the accuracy of the others.

    scores: {name: float [n, J]}.  labels: int64 [n].  A class without a test image has no recall (None) and is in no
    mean; without a predictor "main" its fields are None.
    """
    nothing = dict.fromkeys(("accuracy", "balanced_accuracy", "macro_f1", "calibration_error", "recall"))
    accuracies = {name: _percent((array.argmax(1) == labels).mean()) for name, array in scores.items()}
    if "main" not in scores:
        return {**nothing, "predictors": accuracies}
    main = scores["main"]
    predicted = main.argmax(1)
    classes = main.shape[1]
    matrix = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(matrix, (labels, predicted), 1)
    hits, actual, claimed = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    present = actual > 0
    recall = np.divide(hits, actual, where=present, out=np.zeros(classes))
    f1 = 2 * hits / np.maximum(actual + claimed, 1)
    return {
        "accuracy": accuracies["main"],
        "predictors": accuracies,
        "balanced_accuracy": _percent(recall[present].mean()),
        "macro_f1": _percent(f1[present].mean()),
        "calibration_error": _percent(calibration_error(main, labels)),
        "recall": [_percent(value) if held else None for value, held in zip(recall, present, strict=True)],
    }


def calibration_error(scores: np.ndarray, labels: np.ndarray) -> float:
    """Expected calibration error of softmax(scores), a share, over 15 equal confidence bins (Guo et al., ICML 2017,
    eq. 3).  scores: float [n, J]; infinite ones are the limit.  labels: int64 [n]."""
    highest = scores.max(1, keepdims=True)
    with np.errstate(invalid="ignore"):  # inf - inf, which is not taken
        shifted = np.where(scores == highest, 0.0, scores.astype(np.float64) - highest)
    shares = np.exp(shifted)
    shares /= shares.sum(1, keepdims=True)
    confidence, right = shares.max(1), scores.argmax(1) == labels
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    error = 0.0
    for b in np.unique(bins):
        inside = bins == b
        error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def _detection(prefix: str, claimed: np.ndarray, actual: np.ndarray) -> dict[str, float]:
    """Precision and recall in percent; a share of nothing is left out, not called 0 or 100."""
    found = {}
    if claimed.sum():
        found[f"{prefix}_precision"] = _percent((claimed & actual).sum() / claimed.sum())
    if actual.sum():
        found[f"{prefix}_recall"] = _percent((claimed & actual).sum() / actual.sum())
    return found


class Judge:
    """Holds the truth; tells how right the claims are, and nothing to any method.

    claims are {client: the fields of its ``api.Claims``, tensors on the CPU}; a missing client or field says nothing.
    """

    def __init__(self, scenario: Scenario, truth: Truth) -> None:
        self._truth = truth
        self._given = scenario.given
        self._positions = [scenario.positions(client) for client in range(scenario.spec.clients)]

    def noise_before(self) -> float | None:
        """Wrong given labels among all training samples, in percent."""
        return self.noise({})

    def _labels(self, claims: Mapping[int, Tree], client: int) -> np.ndarray:
        labels = (claims.get(client) or {}).get("labels")
        return self._given[self._positions[client]] if labels is None else labels.numpy()

    def noise(self, claims: Mapping[int, Tree]) -> float | None:
        """Wrong labels among those that clients now train on, in percent; None without truth."""
        wrong = self.wrong(claims)
        return None if wrong is None else _percent(sum(wrong) / max(sum(map(len, self._positions)), 1))

    def wrong(self, claims: Mapping[int, Tree]) -> list[int] | None:
        """How many wrong labels each client now trains on, client by client; None without truth."""
        true = self._truth.true
        if true is None:
            return None
        return [int((self._labels(claims, client) != true[rows]).sum()) for client, rows in enumerate(self._positions)]

    def judge(self, claims: Mapping[int, Tree], noisy_clients: list[int] | None) -> dict[str, float]:
        """Detection of noisy clients and samples, and relabelling, against the truth, in percent; {} without truth.

        noisy_clients: the server's claim, None where it made none.  clients_*: that one, else the clients' own.
        samples_*: «clean < .5» against «the given label is wrong», with the area under the curve.  relabel_precision:
        changed labels that are now right; relabel_recall: wrong given labels that are now right; relabel_harm: right
        given labels that are now wrong.  samples_* and relabel_* count the samples of the clients that claim such a
        thing, so that a recall of 100 may leave the wrong labels of the others; ``noise`` counts all.
        """
        true = self._truth.true
        if true is None:
            return {}
        found: dict[str, float] = {}
        own = {client: claim["noisy"] for client, claim in claims.items() if claim.get("noisy") is not None}
        if noisy_clients is not None or own:
            flagged = noisy_clients if noisy_clients is not None else [client for client, noisy in own.items() if noisy]
            claimed = np.zeros(len(self._positions), dtype=bool)
            claimed[flagged] = True
            found |= _detection("clients", claimed, self._truth.noisy)
        judged: list[tuple[np.ndarray, np.ndarray]] = []  # (clean, whether the given label is wrong) of each client
        relabelled: list[tuple[np.ndarray, ...]] = []  # (changed, wrong before, right now)
        for client, rows in enumerate(self._positions):
            claim = claims.get(client) or {}
            given_wrong = self._given[rows] != true[rows]
            if claim.get("clean") is not None:
                judged.append((claim["clean"].double().numpy(), given_wrong))  # NumPy has no bfloat16
            if claim.get("labels") is not None:
                now = claim["labels"].numpy()
                relabelled.append((now != self._given[rows], given_wrong, now == true[rows]))
        if judged:
            clean, wrong = map(np.concatenate, zip(*judged, strict=True))
            found |= _detection("samples", clean < 0.5, wrong)
            if 0 < wrong.sum() < len(wrong):
                from sklearn.metrics import roc_auc_score  # here: 1 s of every command's start otherwise

                found["samples_auc"] = _percent(roc_auc_score(wrong, -clean))
        if relabelled:
            changed, wrong, right = map(np.concatenate, zip(*relabelled, strict=True))
            if changed.any():
                shares = {"precision": right[changed], "recall": right[wrong], "harm": ~right[~wrong]}
                found |= {f"relabel_{name}": _percent(share.mean()) for name, share in shares.items() if share.size}
        return found
