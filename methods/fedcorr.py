"""FedCorr: noisy clients found by the dimension of their predictions, their labels corrected, in three stages.

Paper: "FedCorr: Multi-Stage Federated Learning for Label Noise Correction", Xu et al., CVPR 2022.  Where text and the
authors' code disagree, the code is the default here and a setting gives the other reading.

A network that fits wrong labels spreads its predictions over more directions.  So each client, just after training,
measures the local intrinsic dimension (LID) of its softmax outputs; the server splits the clients in two by their
summed LID; inside a noisy client the losses split again, which says how much of it is wrong and which samples are.

Symbols, as in the paper:

    M, n_k, C     clients, samples of client k, classes       w, w_k  the global network, client k's after its training
    y             [n_k], a client's current labels; relabelling is for good
    p             [n_k, C] = softmax(f(x; w)), fp64
    l             [n_k], sample losses under w_k: log sum_c exp(p_c) - p_y, which is cross-entropy taken of p itself
    r_1 .. r_k    a sample's distances to the k nearest others of its client, between rows of p
    LID           -k / (sum_j ln(r_j / (r_k + 1e-6)) + 1e-6), a sample's; a client's is the mean
    LID_cum       [M], each client's LID summed over the iterations
    N             noisy clients: those that a mixture of two Gaussians on LID_cum puts in the component of larger mean
    mu            [M], noise levels: for k in N the share of l in the component of larger mean, otherwise 0
    beta, pi, theta, kappa    see the settings

Stage 1, T1 iterations, each a round of M + 1 exchanges.  In a random order every client trains once, the next one
starting from its result: the network passes through all of them.  Client k's loss is

    cross-entropy + beta mu_k ||w - w_received||,

with mu_k from the iteration before, over parameters only, and without the second term in the first batch of each epoch
(it is zero in the first of all, where the norm has no derivative).  It uploads w_k and its mean LID.  After the last
turn the server computes N.  In the last exchange it tells all clients which side they are on, and sends w to those in
N.  These compute mu_k from the losses of their turn, and relabel: y_i <- argmax p_i under w where l_i is among the
int(n_k mu_k pi) largest and max p_i > theta.  They upload mu_k.

Stage 2, T2 rounds: FedAvg among the clients with mu_k <= kappa, then an exchange in which every client of N relabels
all samples with max p_i > theta.  Stage 3, T3 rounds: FedAvg of all.  With T1 = T2 = 0 this is FedAvg, to the bit.

Departures, and why:

* An iteration of stage 1 is a round, so T1 + T2 + T3 is the protocol's number of rounds and images trained compare
  with other methods'.  T1 stays absolute, T2 is a share of what remains, and a short run shortens T1 first.
* The proximal term pulls with constant strength, so what it does hangs on lr / (1 - momentum): .06 of theirs, 1 in most
  protocols here.  beta stays theirs except on digits, where .3, theirs by that ratio, was better than 1 and 5: 94.3,
  94.0 and 91.0 % (draws 10 to 14, validation).
* Scores are taken of images as they are; the code scores them augmented (``score_view``).
* Scores are computed in fp32 and fp64 whatever the precision of training, and distances one by one: by matrix product
  in fp32, 1771 of 2500 samples get a distance of zero that is none, and the mean LID is 2.4 instead of 5.3.
* A client with k or fewer others uses all it has, in both places of the formula; the code keeps the numerator k, which
  makes the LID k / (n_k - 1) times too large.  Under three samples the formula holds nothing but its 1e-6: such a
  client has no LID, takes no part in the split and counts as clean.
* Values that do not differ are not split (``min_range``); scikit-learn then leaves an empty component at 0, and the
  code calls every client noisy.
* Where no client has mu_k <= kappa, the code divides by zero; here stage 2 takes the half with the smallest mu_k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)
from sklearn.mixture import GaussianMixture

from flnoisebench.api import (
    Batch,
    Card,
    Claims,
    Client,
    Config,
    Field,
    Fit,
    Method,
    Plan,
    Preset,
    Reply,
    Rounds,
    Server,
    Tree,
    Upload,
    average,
    cross_entropy,
    to,
    weights,
)

EPS = 1e-6  # in the LID
BLOCK = 2**23  # distances at a time, 64 MB: a client of 50,000 samples has 20 GB of them


# ---------------------------------------------------------------------------------------------- settings


class Settings(Config):
    """The defaults are the authors' for CIFAR-10, except ``mixup`` and ``score_view``."""

    # the stages
    T1: Rounds = Field(
        Rounds(5), unit="rounds", why="iterations of stage 1: 5 on CIFAR-10, 10 on CIFAR-100; 0: nobody is ever noisy"
    )
    T2: Rounds = Field(
        Rounds(0.5), unit="rounds", why="stage 2, a share of what T1 leaves: theirs are 500 and 450; 0: no such stage"
    )
    together: int = Field(1, ge=1, unit="clients", why="in one turn of stage 1: their fraction is 1 / M")

    # training
    beta: float = Field(5.0, ge=0, why="of the proximal term; all published commands, while their code's default is 0")
    prox_squared: bool = Field(
        False, why="True: the squared norm, a pull that grows with the distance; theirs does not grow"
    )
    mixup: float = Field(
        0.0, ge=0, why="alpha of the weight's Beta(alpha, alpha), one a batch; 0: none, as for all methods; theirs: 1"
    )

    # finding noise
    k: int = Field(20, ge=2, unit="samples", why="neighbours in the LID; theirs")
    loss_on_probs: bool = Field(
        True, why="l takes p for logits, as their code: bounded, so no tail of huge losses; False: cross-entropy"
    )
    score_view: Literal["plain", "train"] = Field("plain", why="images for p; train: augmented once, as their code")
    min_range: float = Field(
        1e-9, ge=0, why="LIDs or losses no further apart are not split; 0: always, as their code: then all are noisy"
    )

    # correcting it
    pi: float = Field(0.5, ge=0, le=1, unit="share", why="of the estimated wrong labels, relabelled in stage 1; theirs")
    theta: float = Field(0.5, ge=0, le=1, why="what the confidence of a new label must exceed; theirs. 1: none does")
    kappa: float = Field(0.1, ge=0, le=1, why="the most mu of a client that trains in stage 2; theirs")

    def model_post_init(self, context: Any) -> None:
        for name in ("T1", "T2"):
            value = getattr(self, name).value
            if isinstance(value, float) and value > 1:
                raise ValueError(f"{name} is a share of the run when written with a point, so at most 1.0, not {value}")


def stages(rounds: int, T1: Rounds, T2: Rounds) -> tuple[int, int, int]:
    """(T1, T2, T3) of a run; T2 is a share of what T1 leaves, T3 the rest.

    A stage that is asked for gets at least a round where there are enough, from the earlier ones: first of all T1,
    then T3, which is asked for unless T2 is all of the remaining rounds (1.0).
    """
    second, third = T2.value != 0, Rounds(1.0) != T2
    most = max(rounds - second - third, 1)
    first = min(T1.of(rounds), most) if T1.value == 0 else min(max(T1.of(rounds), 1), most)
    left = rounds - first
    middle = min(max(T2.of(left), int(second)), max(left - third, 0))
    return first, middle, left - middle


_AUTHORS = {"batch": 10, "optimiser": {"name": "sgd", "lr": 0.03, "momentum": 0.5, "weight_decay": 0.0}}


def _preset(about: str, **settings: Any) -> Preset:
    """Settings over those of each data set.  Under the track own: five local epochs in a fifth of the rounds."""

    def on(source: str, rounds: int, *, lr: float = 0.03, batch: int = 10, **special: Any) -> Preset:
        protocol = {
            "rounds": rounds, "local_epochs": 5, "batch": batch, "optimiser": {**_AUTHORS["optimiser"], "lr": lr},
        }  # fmt: skip
        return Preset(about=f"{about}; {source}", settings={**special, **settings}, protocol=protocol)

    return Preset(
        about=about,
        settings=settings,
        protocol=_AUTHORS,
        datasets={
            "cifar10": on("theirs", 100),
            "cifar100": on("theirs", 100, lr=0.01, T1=Rounds(10)),
            "clothing1m": on("theirs", 10, lr=0.001, batch=16, T1=Rounds(2), pi=0.8, theta=0.9),
            "fashion-mnist": on("as on CIFAR-10", 10),
            "digits": on("beta tuned on draws 10 to 14", 20, beta=0.3),
        },
    )


# ------------------------------------------------------------------------------------------------ the loss


def mixed(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy; of mixed images where draw has share, lambda, and keys [widest batch], whose order is the
    permutation."""
    if "share" not in batch.draw:
        return cross_entropy(network, batch)
    share, partner = batch.draw["share"], batch.draw["keys"][: len(batch.y)].argsort()
    scores = network(share * batch.x + (1 - share) * batch.x.index_select(0, partner)).float()
    other = F.cross_entropy(scores, batch.y.index_select(0, partner))
    return share * F.cross_entropy(scores, batch.y) + (1 - share) * other


def near(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """``mixed`` + pull ||w - anchor||, but not in an epoch's first batch.  given: pull = beta mu, anchor by name."""
    square = _squared_distance(network, batch.given["anchor"])
    # the root of 0 has derivative infinity, and infinity times a mask of 0 is NaN: so 1 is what is rooted then
    off = (batch.step == 0) | (square == 0)
    distance = torch.where(off, 1.0, square).sqrt()
    return mixed(network, batch) + batch.given["pull"] * torch.where(off, 0.0, distance)


def near_squared(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """``near`` with the squared norm, skipped in the same batches so that the two differ in one thing."""
    square = _squared_distance(network, batch.given["anchor"])
    return mixed(network, batch) + batch.given["pull"] * torch.where(batch.step == 0, 0.0, square)


def _squared_distance(network: torch.nn.Module, anchor: Mapping[str, torch.Tensor]) -> torch.Tensor:
    parts = [(parameter - anchor[name]).square().sum() for name, parameter in network.named_parameters()]
    return torch.stack(parts).sum()


# ----------------------------------------------------------------------------------- what predictions show


def logits(batch: Batch) -> torch.Tensor:
    """In fp32 under any precision: bf16's three digits would make predictions equal that are not."""
    with torch.autocast(device_type=batch.x.device.type, enabled=False):
        return batch.frozen["network"](batch.x).float()


def sample_losses(z: torch.Tensor, labels: torch.Tensor, on_probs: bool) -> torch.Tensor:
    """l [n] of logits z [n, C]; on_probs: of their softmax as if it were logits, between log(C - 1 + e) - 1 and
    log(C - 1 + e)."""
    return F.cross_entropy(z.softmax(1) if on_probs else z, labels, reduction="none")


def dimension(r: torch.Tensor) -> torch.Tensor:
    """LID [...] of distances [..., k] in rising order.  A distance of zero gives 0, by ln 0 = -infinity."""
    return -r.shape[-1] / ((r / (r[..., -1:] + EPS)).log().sum(-1) + EPS)


def dimensions(p: torch.Tensor, k: int) -> torch.Tensor | None:
    """The LID of every row of p, fp64 [n]; None for under three rows.

    With one neighbour r_1 is r_k, and what is left of the formula is its EPS: 1e5 at a distance of .1, negative beyond
    1.  From two on the sum of logarithms stays below -EPS, since no distance exceeds 2^.5.
    """
    n = len(p)
    if n < 3:
        return None
    p, k = p.double(), min(k, n - 1)
    parts = []
    for block in p.split(max(1, BLOCK // n)):
        # by matrix product, small distances cancel and a row is not at 0 from itself
        distance = torch.cdist(block, p, compute_mode="donot_use_mm_for_euclid_dist")
        parts.append(dimension(distance.topk(k + 1, largest=False).values[:, 1:]))  # the first is the row itself
    return torch.cat(parts)


class Split(NamedTuple):
    upper: np.ndarray  # bool [n], in the component of larger mean
    lower: np.ndarray  # float [n], probability of the other


def split(values: Sequence[float] | np.ndarray, seed: int, min_range: float) -> Split | None:
    """A mixture of two Gaussians on n numbers; None where they hold nothing to split."""
    column = np.asarray(values, dtype=np.float64).reshape(-1, 1)
    if len(column) < 2 or np.ptp(column) < min_range:
        return None
    mixture = GaussianMixture(n_components=2, random_state=seed).fit(column)
    low = int(mixture.means_[:, 0].argmin())
    return Split(mixture.predict(column) != low, mixture.predict_proba(column)[:, low])


def noisy_clients(lid: Sequence[float | None], seed: int, min_range: float) -> list[int] | None:
    """N by LID_cum, where None is a client without LID; None where there is nothing to split."""
    known = [client for client, value in enumerate(lid) if value is not None]
    found = split([value for value in lid if value is not None], seed, min_range)
    return None if found is None else [client for client, upper in zip(known, found.upper, strict=True) if upper]


def suspects(losses: torch.Tensor, level: float, pi: float) -> torch.Tensor:
    """bool [n]: the int(n level pi) largest losses, of equals the first."""
    count = int(len(losses) * level * pi)
    found = torch.zeros(len(losses), dtype=torch.bool, device=losses.device)
    found[losses.argsort(descending=True, stable=True)[:count]] = True
    return found


def relabel(labels: torch.Tensor, p: torch.Tensor, theta: float, among: torch.Tensor | None = None) -> torch.Tensor:
    """argmax p where max p > theta (and ``among``, bool [n], is true)."""
    confidence, best = p.max(1)
    sure = confidence > theta
    return torch.where(sure if among is None else sure & among, best, labels)


def eligible(mu: Sequence[float], kappa: float) -> tuple[list[int], bool]:
    """(clients that train in stage 2, whether any had mu <= kappa): if none had, the half with the smallest."""
    clean = [client for client, level in enumerate(mu) if level <= kappa]
    if clean:
        return clean, True
    return sorted(sorted(range(len(mu)), key=lambda client: mu[client])[: max(len(mu) // 2, 1)]), False


# ------------------------------------------------------------------------------------------------- the method


class FedCorr(Method):
    card = Card(
        title="FedCorr",
        paper="Xu et al., FedCorr: Multi-Stage Federated Learning for Label Noise Correction, CVPR 2022",
        year=2022,
        conditions=(
            "a first stage in which the network passes through every client in turn, whatever the participation",
            "some clients must be clean",
            "clients upload a dimension and a noise level, one number each",
        ),
        departures=(
            "an iteration of stage 1 counts as a round, so T1 + T2 + T3 is the protocol's rounds",
            "sample losses take probabilities for logits and the proximal norm is not squared, as in the authors' code",
            "images are scored unaugmented, where the code augments them",
            "no mixup, which the authors' published commands switch on",
            "scores and distances in fp32 and fp64 under any precision of training",
            "a client with fewer than k others uses all it has; with under three samples it is not judged",
            "equal dimensions or losses are not split, where the code calls every client noisy",
            "without a client of low noise level, stage 2 trains the half with the lowest, where the code fails",
        ),
    )
    Config = Settings
    presets = {  # noqa: RUF012 (a class attribute of the contract)
        "default": _preset("the authors' code without mixup, scoring unaugmented images"),
        "code-literal": _preset(
            "the authors' published commands: mixup, scores of augmented images, no guard against equal dimensions",
            beta=5.0, mixup=1.0, score_view="train", min_range=0.0,
        ),
        "formulas": _preset(
            "cross-entropy of logits as sample loss and a squared proximal norm, where the code has neither",
            loss_on_probs=False, prox_squared=True,
        ),
    }  # fmt: skip

    # -- server

    def init(self, server: Server) -> Tree:
        """weights: w.  lid: LID_cum, None for a client that cannot have one.  seen: who had its turn in this
        iteration.  noisy: N.  mu: as of the last iteration.  Plain numbers: 16 bytes a client."""
        M = server.clients
        return {"weights": weights(server.model()), "lid": [0.0] * M, "seen": [], "noisy": [], "mu": [0.0] * M}

    def plan(self, state: Tree, server: Server) -> Plan:
        task, w = self._task(state, server), state["weights"]
        if task == "turn":
            waiting = sorted(set(range(server.clients)) - set(state["seen"]))
            order = torch.randperm(len(waiting), generator=server.rng("turn")).tolist()
            turn = [waiting[i] for i in order[: self.config.together]]
            return Plan(task, turn, {"weights": w}, {k: {"mu": state["mu"][k]} for k in turn}, closes_round=False)
        if task == "judge":
            noisy = state["noisy"]
            private: dict[int, dict[str, Tree]] = {k: {"noisy": k in noisy} for k in range(server.clients)}
            for k in noisy:
                private[k]["weights"] = w
            return Plan(task, range(server.clients), {}, private)
        if task == "correct":
            return Plan(task, state["noisy"], {"weights": w})
        cohort = server.cohort()
        if self._stage(server) == 2:
            cohort = self._clean_cohort(state, cohort, server)
        return Plan(task, cohort, {"weights": w}, closes_round=not self._corrects(state, server))

    def aggregate(self, state: Tree, uploads: Sequence[Upload], server: Server) -> Tree:
        task = self._task(state, server)
        if task == "turn":
            return self._after_turn(state, uploads, server)
        if task == "judge":
            mu = [upload.content for upload in uploads]  # of all clients, sorted by client
            server.note(stage=1, lid=state["lid"], noisy=state["noisy"], mu=mu)
            return {**state, "mu": mu, "seen": []}
        if task == "correct":
            server.note(corrected=state["noisy"])
            return state
        server.note(stage=self._stage(server))
        return {**state, "weights": average([u.content for u in uploads], [u.size for u in uploads])}

    def _after_turn(self, state: Tree, uploads: Sequence[Upload], server: Server) -> Tree:
        lid, seen = list(state["lid"]), [*state["seen"], *(upload.client for upload in uploads)]
        for upload in uploads:
            new = upload.content["lid"]
            lid[upload.client] = None if new is None else lid[upload.client] + new
        w = average([upload.content["weights"] for upload in uploads], [upload.size for upload in uploads])
        state = {**state, "weights": w, "lid": lid, "seen": seen}
        if len(seen) < server.clients:
            return state
        noisy = noisy_clients(lid, server.seed("clients"), self.config.min_range)
        if noisy is None:
            server.note(undecided="the clients' dimensions do not differ, so nobody is called noisy")
        server.claim(noisy or [])
        return {**state, "noisy": noisy or []}

    def _clean_cohort(self, state: Tree, cohort: Sequence[int], server: Server) -> Sequence[int]:
        """As many of the clients with mu <= kappa as would train in any round, if there are so many."""
        clean, certain = eligible(state["mu"], self.config.kappa)
        if not certain:
            server.note(undecided="no client's noise level is at most kappa: the half with the lowest trains")
        if len(clean) == server.clients:
            return cohort
        order = torch.randperm(len(clean), generator=server.rng("clean cohort"))
        return sorted(clean[i] for i in order[: len(cohort)].tolist())

    def predictors(self, state: Tree, server: Server) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        return {"main": server.model(state["weights"], frozen=True)}

    def diagnostics(self, state: Tree) -> Mapping[str, float]:
        """noisy_clients: the size of N.  noise_level: the mean of mu over all clients, each counting the same."""
        return {"noisy_clients": float(len(state["noisy"])), "noise_level": math.fsum(state["mu"]) / len(state["mu"])}

    # -- which exchange this is

    def _stages(self, server: Server) -> tuple[int, int, int]:
        return stages(server.protocol.rounds, self.config.T1, self.config.T2)

    def _stage(self, server: Server) -> int:
        first, second, _ = self._stages(server)
        return 1 if server.round < first else 2 if server.round < first + second else 3

    def _corrects(self, state: Tree, server: Server) -> bool:
        """Whether a relabelling follows the training of this round: stage 2's last, if somebody is noisy."""
        first, second, _ = self._stages(server)
        return second > 0 and server.round == first + second - 1 and bool(state["noisy"])

    def _task(self, state: Tree, server: Server) -> str:
        """Stage 1: M times turn, then judge.  Later: train, and once correct."""
        if self._stage(server) == 1:
            return "turn" if len(state["seen"]) < server.clients else "judge"
        return "train" if server.exchange == 0 else "correct"

    # -- client

    def join(self, client: Client) -> Tree:
        """labels: y.  losses: l, from a turn of stage 1 until the iteration's end."""
        return {"labels": client.labels, "losses": None}

    def client(self, task: str, message: Tree, client: Client) -> Reply:
        if task == "turn":
            return self._turn(message, client)
        if task == "judge":
            return self._judge(message, client)
        if task == "correct":
            return self._correct(message, client)
        network = client.model(message["weights"])
        fit = self._fit(network, message, client)
        return Reply(weights(network), metrics={"loss": fit.loss})

    def _turn(self, message: Tree, client: Client) -> Reply:
        """Train, then look at the own predictions."""
        network = client.model(message["weights"])
        fit = self._fit(network, message, client)
        metrics = {"loss": fit.loss, "distance": _distance(network, message["weights"])}
        trained = weights(network)
        z = self._logits(trained, client)
        losses = sample_losses(z, client.state["labels"].to(z.device), self.config.loss_on_probs)
        lid = dimensions(z.softmax(1), self.config.k)
        mean = None
        if lid is not None:
            # what the formula's EPS makes of equal predictions, and of equal distances: either can rule a client's mean
            zero, huge = (lid == 0).double().mean(), (lid > 1e3).double().mean()
            mean, *shares = torch.stack([lid.mean(), zero, huge]).tolist()
            metrics |= dict(zip(("lid_zero", "lid_huge"), shares, strict=True))
        return Reply({"weights": trained, "lid": mean}, {**client.state, "losses": losses}, metrics)

    def _judge(self, message: Tree, client: Client) -> Reply:
        """The server's word on this client; of a noisy one, its noise level, and the surest corrections."""
        labels, losses = client.state["labels"], client.state["losses"]
        if not message["noisy"]:
            return Reply(0.0, {"labels": labels, "losses": None}, claims=_claims(client, labels, noisy=False))
        found = split(losses.cpu().numpy(), client.seed("losses"), self.config.min_range)
        level, clean = 0.0, None
        if found is not None:
            level, clean = float(found.upper.mean()), torch.from_numpy(found.lower)
        p = self._logits(message["weights"], client).softmax(1)
        before = labels.to(p.device)
        labels = relabel(before, p, self.config.theta, suspects(losses.to(p.device), level, self.config.pi))
        metrics = {"noise_level": level, "relabelled": (labels != before).double().mean().item()}
        claims = _claims(client, labels, clean, noisy=True)
        return Reply(level, {"labels": labels, "losses": None}, metrics, claims)

    def _correct(self, message: Tree, client: Client) -> Reply:
        p = self._logits(message["weights"], client).softmax(1)
        before = client.state["labels"].to(p.device)
        labels = relabel(before, p, self.config.theta)
        metrics = {"relabelled": (labels != before).double().mean().item()}
        return Reply(None, {**client.state, "labels": labels}, metrics, _claims(client, labels, noisy=True))

    def _fit(self, network: torch.nn.Module, message: Tree, client: Client) -> Fit:
        """Local training; the proximal term only where there is some noise level, since it is dear otherwise."""
        given, loss = None, mixed
        pull = self.config.beta * message.get("mu", 0.0)
        if pull > 0:
            anchor = {name: message["weights"][name] for name, _ in network.named_parameters()}
            given, loss = {"pull": pull, "anchor": anchor}, near_squared if self.config.prox_squared else near
        draw = self._mixup(client) if self.config.mixup > 0 else None
        return client.fit(network, loss, labels=client.state["labels"], given=given, draw=draw)

    def _mixup(self, client: Client) -> dict[str, torch.Tensor]:
        sizes = client.batch_sizes()
        steps = client.protocol.local_epochs * len(sizes)
        share = np.random.default_rng(client.seed("mixup share")).beta(self.config.mixup, self.config.mixup, steps)
        keys = torch.rand(steps, max(sizes, default=0), generator=client.rng("mixup keys"))
        return {"share": torch.from_numpy(share).float(), "keys": keys}

    def _logits(self, w: Tree, client: Client) -> torch.Tensor:
        """Of all own images, fp64 [n, C], in eval mode."""
        network = client.model(w, "scored", frozen=True)
        return client.apply(logits, view=self.config.score_view, frozen={"network": network}).double()


def _distance(network: torch.nn.Module, anchor: Mapping[str, torch.Tensor]) -> float:
    """||w - w_received||, which the proximal term holds down."""
    named = dict(network.named_parameters())
    device = next(iter(named.values())).device
    with torch.no_grad():
        return _squared_distance(network, to({name: anchor[name] for name in named}, device)).sqrt().item()


def _claims(client: Client, labels: torch.Tensor, clean: torch.Tensor | None = None, *, noisy: bool) -> Claims:
    """clean: fp64 [n] on the CPU, None: all right.  No belief is left in a given label that was replaced."""
    kept = (labels == client.labels.to(labels.device)).cpu().double()
    return Claims(labels, kept if clean is None else kept * clean, noisy)
