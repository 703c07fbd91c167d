"""FedNoRo: find the noisy clients once, then let them learn from the global model as well as from their labels.

Paper: Wu, Yu, Jiang, Cheng and Yan, "FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and
Label Noise Heterogeneity", IJCAI 2023.  Code: github.com/wnn2000/FedNoRo, commit 6719ad7, of which this keeps the
formulas and no line.

Two stages.  For s1 rounds everybody trains on a cross-entropy that is adjusted to the own label counts, so that a rare
class is not unlearned.  Then each client tells, class by class, how well the global model fits its labels; a mixture of
two Gaussians over these vectors separates noisy clients from clean ones, for good.  From there on noisy clients mix
their labels with the predictions of the model that they received, and count for less the farther they end up from the
nearest clean client.  No label is changed and no sample is left out.

Symbols:

    M, C      clients, classes                     c_kc, n_k   client k's samples of given class c, and in all
    z, u      logits of the network in training and of the frozen received one (the teacher, in eval mode), of the same
              augmented images
    lp        log_softmax(z + ln(c_k / n_k)), the adjusted log-probabilities
    s         softmax(u / t), the teacher's prediction, not adjusted; t = .8
    m_kc      client k's mean cross-entropy (unadjusted) over its samples of class c
    lambda    the teacher's weight, a exp(-5 (1 - (r - b) / (e - b))^2) in round r, held at its ends outside [b, e]
    d_i       how far client i's weights are from the nearest clean client's, over the farthest's; 0 if i is clean

    warm-up and clean clients   L = -1/B sum_i lp_i,y
    noisy clients               L = lambda/B sum_i sum_c s_ic (ln s_ic - lp_ic) + (1 - lambda) (-1/B sum_i lp_i,y)
    aggregation                 w = sum_i alpha_i w_i,  alpha_i = n_i exp(-d_i) / sum_j n_j exp(-d_j)

A class that a client does not hold has ln 0 = -inf in its lp: probability 0, and no gradient, so it is not pushed down
either.  In the sum over c it counts as lp = 0: a constant, by which the sum may be negative.  A client that holds one
class only has a loss of 0 everywhere: it learns nothing in either stage.

One round: broadcast w (with one bit to each client and lambda, once clients are told apart); one epoch; clients upload
w_k.  Round s1 begins with an exchange more: all M clients, whether or not they ever trained, upload sums and counts.

Departures, and why:

* Which distance the paper means is open.  The code sums the L2 norms of the single tensors; descriptions of the paper
  have one norm over all of them (``distance``).  The code's is the default.  Both skip integer buffers.
* The authors' schedule is for 100 rounds.  Its ten rounds of warm-up stay ten, but at most a fifth of the run
  (``warm_up_most``), and the end of the ramp is a share of the run, that of their 49 of 100.
* Losses for the split are of plain images.  The code scores augmented ones (``score_view``).
* Where the code divides 0 by 0: a class on which all clients are equal is 0 for all of them, one that nobody holds is
  left out; if all noisy clients lie where a clean one does, d is 0; a cohort without clean or without noisy clients is
  averaged by sizes.  A split that leaves everybody on one side tells nothing: nobody is held noisy, and a note says so.
* The code asks for full participation.  Here the split asks everybody, and distances are within a round's cohort.
* The weights travel twice in round s1: a client keeps none between exchanges.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from flnoisebench.api import (
    Batch,
    Card,
    Claims,
    Client,
    Config,
    Field,
    Method,
    Plan,
    Preset,
    Reply,
    Rounds,
    Server,
    Tree,
    Upload,
    average,
    weights,
)

# ---------------------------------------------------------------------------------------------- settings


class Settings(Config):
    """The defaults are the authors' values; the docstring above says where they are readings."""

    # the stages
    warm_up: Rounds = Field(Rounds(10), unit="rounds", why="s1, the authors'; theirs are of five epochs each")
    warm_up_most: Rounds = Field(
        Rounds(0.2), unit="rounds", why="s1 is never longer, so that short runs have a second stage; at least 1"
    )
    votes: int = Field(9, ge=1, unit="mixtures", why="the authors': seeds 0 to 8, and the set found most often")
    score_view: Literal["plain", "train"] = Field(
        "plain", why="images for m: unaugmented, as the formulas say; train: augmented, as the code has it"
    )

    # the losses
    adjustment: float = Field(1.0, ge=0, why="what ln(c_k/n_k) is multiplied by; the authors'. 0: plain cross-entropy")
    kd_weight: float = Field(0.8, ge=0, le=1, why="a, where lambda ends; the authors', so labels always keep .2")
    kd_temperature: float = Field(0.8, gt=0, why="t, of the teacher alone; the authors'")
    ramp_end: Rounds = Field(
        Rounds(0.498), unit="rounds", why="e: round 249 of 500, as the authors' 49 of 100 half the run less one"
    )

    # the server
    distance: Literal["per_tensor_sum", "global_norm", "sizes"] = Field(
        "per_tensor_sum", why="the code's; global_norm: one L2 norm of all weights; sizes (ablation): plain FedAvg"
    )

    def model_post_init(self, context: Any) -> None:
        for name, duration in (("warm_up", self.warm_up), ("warm_up_most", self.warm_up_most)):
            if duration.value == 0:
                raise ValueError(f"{name}=0: nobody can be told apart by the losses of an untrained model")
        for name in ("warm_up", "warm_up_most", "ramp_end"):
            value = getattr(self, name).value
            if isinstance(value, float) and value > 1:
                raise ValueError(f"{name}={value} is more than the whole run; whole numbers are rounds")
        begin, end = self.warm_up.value, self.ramp_end.value
        if type(begin) is type(end) and end <= begin:
            raise ValueError(f"ramp_end={end} is not after warm_up={begin}, where the ramp begins")

    def schedule(self, rounds: int) -> tuple[int, int]:
        """(s1 = b, e) of a run of so many rounds: the ramp begins with the second stage and takes a round at least."""
        begin = max(1, min(self.warm_up.of(rounds), self.warm_up_most.of(rounds)))
        return begin, max(begin + 1, self.ramp_end.of(rounds))


# ------------------------------------------------------------------------------------------------ losses


def log_prior(counts: torch.Tensor, adjustment: float) -> torch.Tensor:
    """What is added to the logits, fp32 [C] of counts [C]: -inf for an absent class."""
    if adjustment == 0:
        return torch.zeros(len(counts), device=counts.device)  # and not 0 * -inf
    return (adjustment * (counts.double() / counts.sum().clamp_min(1)).log()).float()


def adjusted(logits: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """lp [B, C] of z [B, C]."""
    return (logits + prior).log_softmax(1)


def divergence(lp: torch.Tensor, teacher: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """The mean over the batch of sum_c s_c (ln s_c - lp_c), with 0 for an lp of -inf, of lp and u [B, C]."""
    log_s = (teacher / temperature).log_softmax(1)
    return (log_s.exp() * (log_s - lp.masked_fill(lp.isneginf(), 0.0))).sum(1).mean()


def mixed(
    lp: torch.Tensor,
    y: torch.Tensor,
    teacher: torch.Tensor,
    ramp: torch.Tensor | float,
    temperature: torch.Tensor | float,
) -> torch.Tensor:
    """L of a noisy client."""
    return ramp * divergence(lp, teacher, temperature) + (1 - ramp) * F.nll_loss(lp, y)


def adjusted_loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """In fp32, also under autocast: -inf and large negative numbers do not mix in half precision."""
    return F.nll_loss(adjusted(network(batch.x).float(), batch.given["log_prior"]), batch.y)


def distilled_loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    lp = adjusted(network(batch.x).float(), batch.given["log_prior"])
    teacher = batch.frozen["teacher"](batch.x).float()
    ramp, temperature = batch.given["ramp"].float(), batch.given["temperature"].float()
    return mixed(lp, batch.y, teacher, ramp, temperature)


def sample_losses(batch: Batch) -> torch.Tensor:
    """The plain cross-entropy of each sample, fp32 [B]."""
    return F.cross_entropy(batch.frozen["network"](batch.x).float(), batch.y, reduction="none")


def ramp(round: int, begin: int, end: int, most: float) -> float:
    """lambda: from most * e^-5 at ``begin`` to ``most`` at ``end``."""
    progress = (min(max(round, begin), end) - begin) / (end - begin)
    return most * math.exp(-5 * (1 - progress) ** 2)


# ------------------------------------------------------------------------------------- who is noisy


class Split(NamedTuple):
    """Positions of the noisy clients; how many mixtures agreed on them, and how many sets were found in all (0 without
    any mixture); and why there is no answer, if there is none."""

    noisy: tuple[int, ...]
    votes: int
    sets: int
    undecided: str | None


def scaled(means: np.ndarray) -> np.ndarray:
    """m [M, C], NaN where a client does not hold a class, filled with the least of the others' and brought to [0, 1]
    class by class.  A class that nobody holds is left out; one on which all are equal tells nothing and is 0."""
    held = means[:, ~np.isnan(means).all(0)]
    least = np.nanmin(held, axis=0) if held.size else np.empty(held.shape[1])
    filled = np.where(np.isnan(held), least, held) - least
    spread = filled.max(0, initial=0.0)
    return filled / np.where(spread > 0, spread, 1.0)


def noisy_by_mixture(metric: np.ndarray, seed: int) -> tuple[int, ...]:
    """The rows of the component whose means sum to more, under two Gaussians with full covariances."""
    mixture = GaussianMixture(n_components=2, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # twenty points: what it has after 100 steps will do
        side = mixture.fit_predict(metric)
    return tuple(np.flatnonzero(side == mixture.means_.sum(1).argmax()).tolist())


def majority(found: Sequence[tuple[int, ...]], clients: int) -> Split:
    """The set found most often, of equals the one found first."""
    (noisy, votes), *_ = (ranking := Counter(found)).most_common()
    if len(noisy) in (0, clients):
        return Split((), votes, len(ranking), "most mixtures leave all clients on one side")
    return Split(noisy, votes, len(ranking), None)


def split(metric: np.ndarray, votes: int) -> Split:
    """Of a scaled metric.  The mixtures' seeds are fixed, as the authors' are: the vote is there so that the outcome
    does not depend on chance, and the run's own seed shall not bring it back in."""
    if len(metric) < 2:
        return Split((), 0, 0, "one client has nobody to be compared with")
    if not np.ptp(metric, axis=0).any():
        return Split((), 0, 0, "all clients have the same losses")
    return majority([noisy_by_mixture(metric, seed) for seed in range(votes)], len(metric))


# --------------------------------------------------------------------------- distance-aware aggregation


def nearest(noisy: Sequence[Tree], clean: Sequence[Tree], form: str) -> list[float]:
    """How far each of the noisy weights is from the nearest of the clean ones.  Integer buffers are skipped."""
    total: Any = 0.0
    for name, first in clean[0].items():
        if not first.is_floating_point():
            continue
        held = torch.stack([w[name] for w in clean])
        # one noisy client at a time, all clean ones at once: few kernels, and memory for one tensor of each
        norms = torch.stack(
            [
                torch.linalg.vector_norm((held - w[name]).reshape(len(clean), -1), dim=1, dtype=torch.float64)
                for w in noisy
            ]
        )
        total = total + (norms if form == "per_tensor_sum" else norms.square())
    pairs = total if form == "per_tensor_sum" else total.sqrt()
    return pairs.amin(1).tolist()


def discounts(distance: Sequence[float]) -> list[float]:
    """exp(-d_i) of the distances before they are divided by the largest; all 1 if that is 0."""
    largest = max(distance)
    return [math.exp(-one / largest) if largest > 0 else 1.0 for one in distance]


# ------------------------------------------------------------------------------------------------- the method


ADAM = {"name": "adam", "lr": 3e-4, "momentum": 0.9, "weight_decay": 5e-4}


OWN_ROUNDS = {"cifar10": 100, "cifar100": 100, "clothing1m": 10, "digits": 20, "fashion-mnist": 10}


def _preset(about: str, *, tuned: bool = True, **settings: Any) -> Preset:
    """In the track ``own``: the authors' five epochs a round in batches of 16 with Adam, at the images trained of the
    shipped protocols, whose rounds have one epoch.

    tuned: with the adjustment chosen on digits' draws 10 to 14, where .5 validated better than 1.  There the clients
    hold half of the classes each and the label counts of most are noisy, so the counts are poor priors.
    """
    datasets = {name: Preset(protocol={"rounds": rounds}) for name, rounds in OWN_ROUNDS.items()}
    if tuned:
        on_digits = {"adjustment": 0.5, **settings}
        datasets["digits"] = Preset("half the adjustment", on_digits, datasets["digits"].protocol)
    return Preset(about, settings, {"local_epochs": 5, "batch": 16, "optimiser": ADAM}, datasets)


class FedNoRo(Method):
    card = Card(
        title="FedNoRo",
        paper="FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and Label Noise "
        "Heterogeneity (Wu et al., IJCAI 2023)",
        year=2023,
        conditions=(
            "a warm-up stage",
            "noisy clients run the received model beside their own (one more forward pass)",
            "all clients upload per-class loss sums and label counts once, whatever the participation",
            "at least one clean client",
        ),
        departures=(
            "weights are compared as in the code, by a sum over tensors of L2 norms; distance=global_norm is one norm",
            "the warm-up is the authors' ten rounds (of one epoch here, five there), but at most a fifth of the run",
            "the ramp ends at .498 of the run, in their proportion",
            "clients are told apart on plain images; the code scores augmented ones",
            "classes on which all clients are equal, and equal weights, count as 0 where the code divides 0 by 0",
            "a cohort without clean or without noisy clients is averaged by sizes; there the code fails",
            "if the mixtures leave all clients on one side nobody is held noisy",
            "under partial participation all clients are asked for their losses; the code needs full participation",
            "round s1 sends w twice, since a client does not keep it between exchanges",
        ),
    )
    Config = Settings
    presets = {  # noqa: RUF012 (a class attribute of the contract)
        "default": _preset("the authors' values but on digits, the end of the ramp in proportion to the run"),
        "code-literal": _preset(
            "the code's rounds as they are, for runs of about 100, and its augmented scores",
            tuned=False, ramp_end=Rounds(49), score_view="train",
        ),
        "code-shares": _preset(
            "the warm-up too in proportion: 50 of 500 epochs, as in the code", tuned=False, warm_up=Rounds(0.1)
        ),
        "global-norm": _preset("one L2 norm of all weights, as the paper is described", distance="global_norm"),
        "no-adjustment": _preset("ablation: plain cross-entropy instead of the adjusted one", adjustment=0.0),
        "no-distillation": _preset("ablation: noisy clients have no teacher", kd_weight=0.0),
        "no-distance": _preset("ablation: FedAvg's aggregation", distance="sizes"),
    }  # fmt: skip

    # -- server

    def init(self, server: Server) -> Tree:
        """weights: w.  noisy: ids of the clients held noisy, None before that is known."""
        return {"weights": weights(server.model()), "noisy": None}

    def plan(self, state: Tree, server: Server) -> Plan:
        noisy, message = state["noisy"], {"weights": state["weights"]}
        if self._identifies(state, server):
            return Plan("score", range(server.clients), message, closes_round=False)
        cohort = server.cohort()
        if noisy is None:
            return Plan("train", cohort, message)
        message["ramp"] = self._ramp(server)
        return Plan("train", cohort, message, {m: {"noisy": m in noisy} for m in cohort})

    def aggregate(self, state: Tree, uploads: Sequence[Upload], server: Server) -> Tree:
        if self._identifies(state, server):
            return {**state, "noisy": self._identify(uploads, server)}
        shares = [float(upload.size) for upload in uploads]
        if state["noisy"] is not None:
            factors = self._discounts(state["noisy"], uploads)
            server.note(ramp=self._ramp(server), plain_average=factors is None)
            if factors is not None:
                server.note(discount=factors)
                shares = [share * factor for share, factor in zip(shares, factors, strict=True)]
        return {**state, "weights": average([upload.content for upload in uploads], shares)}

    def predictors(self, state: Tree, server: Server) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        """Logits as they are: the adjustment belongs to training."""
        return {"main": server.model(state["weights"], frozen=True)}

    def diagnostics(self, state: Tree) -> Mapping[str, float]:
        return {} if state["noisy"] is None else {"noisy_clients": float(len(state["noisy"]))}

    def _identifies(self, state: Tree, server: Server) -> bool:
        begin, _ = self.config.schedule(server.protocol.rounds)
        return state["noisy"] is None and server.round >= begin

    def _identify(self, uploads: Sequence[Upload], server: Server) -> list[int]:
        """Who is noisy, by what all clients uploaded."""
        sums = np.stack([upload.content["loss_sums"].cpu().numpy() for upload in uploads])
        counts = np.stack([upload.content["counts"].cpu().numpy() for upload in uploads])
        metric = scaled(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))
        found = split(metric, self.config.votes)
        noisy = [uploads[position].client for position in found.noisy]
        server.claim(noisy)
        server.note(
            noisy=noisy, votes=found.votes, of=self.config.votes, sets=found.sets, metric=metric.round(4).tolist()
        )
        if found.undecided:
            server.note(undecided=found.undecided)
        return noisy

    def _discounts(self, noisy: Sequence[int], uploads: Sequence[Upload]) -> list[float] | None:
        """exp(-d_i) for each upload; None for plain FedAvg."""
        mine = [upload.client in noisy for upload in uploads]
        if self.config.distance == "sizes" or all(mine) or not any(mine):
            return None
        sides: dict[bool, list[Tree]] = {True: [], False: []}
        for upload, flag in zip(uploads, mine, strict=True):
            sides[flag].append(upload.content)
        distance = iter(nearest(sides[True], sides[False], self.config.distance))
        return discounts([next(distance) if flag else 0.0 for flag in mine])

    def _ramp(self, server: Server) -> float:
        begin, end = self.config.schedule(server.protocol.rounds)
        return ramp(server.round, begin, end, self.config.kd_weight)

    # -- client

    def join(self, client: Client) -> Tree:
        """counts: c_k, int64 [C], of the given labels, which never change."""
        return {"counts": F.one_hot(client.labels, client.classes).sum(0)}

    def client(self, task: str, message: Tree, client: Client) -> Reply:
        if task == "score":
            return self._score(message, client)
        network = client.model(message["weights"])
        given: dict[str, Any] = {"log_prior": log_prior(client.state["counts"], self.config.adjustment)}
        noisy = message.get("noisy")
        if noisy:
            teacher = client.model(message["weights"], "teacher", frozen=True)
            given |= {"ramp": message["ramp"], "temperature": self.config.kd_temperature}
            fit = client.fit(network, distilled_loss, labels=client.labels, given=given, frozen={"teacher": teacher})
        else:
            fit = client.fit(network, adjusted_loss, labels=client.labels, given=given)
        return Reply(weights(network), metrics={"loss": fit.loss}, claims=Claims(noisy=noisy))

    def _score(self, message: Tree, client: Client) -> Reply:
        """Sums and counts of the plain losses by class, summed in fp64 by a product, whose order is fixed."""
        network = client.model(message["weights"], "scorer", frozen=True)
        losses = client.apply(sample_losses, view=self.config.score_view, frozen={"network": network}).double()
        member = F.one_hot(client.labels.to(losses.device), client.classes).double()
        return Reply({"loss_sums": member.T @ losses, "counts": client.state["counts"]})
