"""RoFL: small-loss selection, class centroids that travel with the weights, and pseudo-labels of the global model.

Paper: S. Yang, H. Park, J. Byun, C. Kim, «Robust Federated Learning With Noisy Labels», IEEE Intelligent Systems
37(2), 2022; arXiv:2012.01700.  The authors published no code; "the code" below is the public reproduction that other
benchmarks start from (github.com/jangsoohyuk/Robust-Federated-Learning-with-Noisy-Labels, 2021).

Symbols:

    M, C, d      clients, classes, features             r        the round, from 0
    F_i          [d], inputs of the last linear layer   p_i      softmax of the logits, from the same forward pass
    y_i          the given label                        pseudo_i argmax of the received network, recomputed every round
    f_G, f_k     [C, d], the server's centroids and client k's; f_kc is class c's
    phi_r        the forget rate: linspace(0, phi, T_k)[r] before round T_k, phi after
    T_pl         the round from which pseudo-labels count
    S            the int((1 - phi_r) B) samples of a batch of B whose cross-entropy with y is smallest
    m_i          1 if i is in S and the centroid nearest to F_i by cosine is y_i's («confident»)

One round: the server sends w and f_G.  A client labels its images by w (pseudo), starts with f_k = f_G (in round 0 with
its own class means), and in each batch

    t_i   = y_i if m_i or r < T_pl, else pseudo_i
    L     = mean_S CE(p_i, t_i) + lc sum_S m_i ||F_i - f_k,y_i||^2 + lambda_e mean_S H(p_i)
    f_kc <- (1 - a^2) f_kc + a^2 fhat_c,  a = cos(f_kc, fhat_c),  fhat_c = the mean of F_i over S with y_i = c

with lc = lambda_cen min(1, r / T_pl).  It uploads w_k and f_k.  The server takes the plain mean of w_k, and

    f_Gc <- sum_k a_kc f_kc / sum_k a_kc,  a_kc = cos(the previous f_Gc, f_kc).

The network's own logits predict.  A sample outside S contributes nothing in that step, and one that is never in S is
never trained on, pseudo-label or not.  What a client claims of its data is m_i and t_i of the last batch that held i.

Departures, and why:

* The code detaches F right after the forward pass, so that its centroid term moves no weight; so do the benchmarks
  that took it over, and that is the default.  ``centroid_grad`` lets F (not f_k) have the gradient that the method
  seems to intend, then with a mean over S for the sum: the sum pulls about |S| times harder than the cross-entropy.
* The code overwrites pseudo_i with y_i for i in S before round T_pl.  Since pseudo_i is read in S only, that is the
  same as t_i = y_i there, and the pass that would find pseudo_i is not made.
* The code starts f_G from N(0, 1), and its first mean is weighted by cosines to that noise: (309.7, -16.2) can come of
  two vectors shorter than 1.  Here the first is the plain mean over the clients that hold the class, and later weights
  are clipped at 0 (``guard``).
* A class that no client of a cohort holds keeps its centroid, where the code divides 0 by 0 (and argmax takes NaN for
  the largest).  One without any centroid yet has a zero one, is nobody's nearest, and starts from the clients' own
  means when it comes up, as all do in round 0.
* A batch with S empty (a single last sample) is left out of training, where the code's mean over nothing is NaN.
* The paper's forget rate is the known noise rate of all clients.  Here it is the mean nominal rate, which is told, or
  what ``forget_rate`` says.
* Pseudo-labels and first centroids are read from plain images in large batches; the code augments them, one by one
  (``score_view``).
* T_pl is a share of the run, T_k at most its length, so that a short run goes through all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)

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
    forget_rate: float | None = Field(
        None, ge=0, lt=1, unit="share of a batch", why="phi; None: the mean noise rate, as told. The code's default: .2"
    )
    gradual: Rounds = Field(Rounds(10), unit="rounds", why="T_k, the code's; at most the run's length")
    pseudo_start: Rounds = Field(
        Rounds(0.2), unit="rounds", why="T_pl, 100 of 500; at least 1, since an untrained network labels nothing"
    )
    lambda_cen: float = Field(1.0, ge=0, why="weight of the centroid term, reached at T_pl; the code's")
    lambda_e: float = Field(0.8, ge=0, why="weight of the entropy; the code's")
    centroid_grad: bool = Field(
        False, why="on: the centroid term moves the weights, as a mean over S; off, the code's: it is only printed"
    )
    unweighted: bool = Field(True, why="w is the plain mean, the code's for clients of one size; False: by n_k")
    guard: bool = Field(
        True, why="first f_G is the holders' mean, later weights clip at 0; False: the code's N(0, 1) start and cosines"
    )
    skip_absent: bool = Field(
        False, why="True: a client without a class has no say in f_Gc; the code lets it return f_Gc with weight 1"
    )
    score_view: Literal["plain", "train"] = Field(
        "plain", why="images for pseudo-labels and first centroids; train: augmented, the code's"
    )

    def model_post_init(self, context: Any) -> None:
        for name, value in (("gradual", self.gradual.value), ("pseudo_start", self.pseudo_start.value)):
            if isinstance(value, float) and value > 1:
                raise ValueError(f"{name} = {value} is {value:g} times the run; write {value:g} rounds without a point")


# ------------------------------------------------------------------------------------------------ one batch


class Step(NamedTuple):
    """What a batch of B samples comes to, before anything is summed."""

    kept: torch.Tensor  # bool [B], S
    confident: torch.Tensor  # bool [B], m
    target: torch.Tensor  # int64 [B], t
    classification: torch.Tensor  # [B], CE(p, t)
    distance: torch.Tensor  # [B], ||F - f_y||^2
    entropy: torch.Tensor  # [B], H(p)


def small_loss(losses: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """S, bool [B]: the int((1 - rate) B) smallest losses, of equals the earlier.  ``rate``: a fp64 scalar, so that the
    floor is Python's; a sample's rank is compared with a number, because a selection's size would be recorded."""
    rank = losses.argsort(stable=True).argsort()
    return rank < ((1 - rate) * len(losses)).floor()


def keeps(size: int, rate: float) -> int:
    """The size of S for a batch of ``size``."""
    return int((1 - rate) * size)


def nearest(features: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """argmax_c cos(f_c, F_i), int64 [B]; a class without a centroid is nobody's, and -1 means that there is none."""
    known = has_centroid(centroids)
    cosine = F.normalize(features, dim=1) @ F.normalize(centroids, dim=1).T
    return torch.where(known.any(), cosine.masked_fill(~known, -torch.inf).argmax(1), -1)


def has_centroid(centroids: torch.Tensor) -> torch.Tensor:
    """bool [..., C] of [..., C, d]: a class of which nobody had a sample yet has zeros."""
    return (centroids != 0).any(-1)


def take_step(
    features: torch.Tensor,
    logits: torch.Tensor,
    y: torch.Tensor,
    pseudo: torch.Tensor,
    centroids: torch.Tensor,
    rate: torch.Tensor,
) -> Step:
    """S, m, t and each sample's three losses."""
    log_p = logits.log_softmax(1)
    kept = small_loss(F.nll_loss(log_p.detach(), y, reduction="none"), rate)
    confident = kept & (nearest(features.detach(), centroids) == y)
    target = torch.where(confident, y, pseudo)
    return Step(
        kept,
        confident,
        target,
        F.nll_loss(log_p, target, reduction="none"),
        (features - centroids.index_select(0, y)).square().sum(1),
        -(log_p.exp() * log_p).sum(1),
    )


def class_means(features: torch.Tensor, y: torch.Tensor, C: int, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """[C, d] means of the (chosen) features labelled c; zeros where there are none."""
    member = F.one_hot(y, C).to(features.dtype)
    if chosen is not None:
        member = member * chosen[:, None].to(features.dtype)
    return member.T @ features / member.sum(0).clamp_min(1)[:, None]


def follow(centroids: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """f_c <- (1 - a^2) f_c + a^2 fhat_c with a = cos(f_c, fhat_c).  An absent class has fhat_c = 0, so a = 0: it stays.

    ReLU features have cosines near 1, so this is nearly the last batch's mean, of one sample where classes are many.
    """
    share = F.cosine_similarity(centroids, means, dim=1).square()[:, None]
    return (1 - share) * centroids + share * means


def forward(network: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(F, logits): what goes into the last linear layer, and what comes out."""
    encoder, head = network
    features = encoder(x)
    return features, head(features)


def objective(network: torch.nn.Module, batch: Batch, *, pull: bool) -> tuple[torch.Tensor, Tree, dict]:
    """L, the next f_k, and what became of each sample.

    carry: f_k, fp32 [C, d].  sample: pseudo, int64 (the given labels before T_pl); clean and label are written.
    given: forget_rate, lambda_cen (of this round), lambda_e.  pull: whether the centroid term has a gradient.
    """
    features, logits = forward(network, batch.x)
    with torch.autocast(features.device.type, enabled=False):
        features, logits, given, f_k = features.float(), logits.float(), batch.given, batch.carry
        step = take_step(features, logits, batch.y, batch.sample["pseudo"], f_k, given["forget_rate"])
        kept = step.kept.float()
        size = kept.sum().clamp_min(1)  # S may be empty: then everything is 0, and nothing 0 / 0
        distance = (step.distance * step.confident).sum()
        value = (
            (step.classification * kept).sum() / size
            + given["lambda_cen"].float() * (distance / size if pull else distance.detach())
            + given["lambda_e"].float() * (step.entropy * kept).sum() / size
        )
        f_k = follow(f_k, class_means(features.detach(), batch.y, len(f_k), step.kept))
    label = torch.where(step.kept, step.target, batch.y)
    return value, f_k, {"clean": step.confident.float(), "label": label}


def loss(network: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Tree, dict]:
    """L with the centroid term as a number: a sum, without gradient."""
    return objective(network, batch, pull=False)


def loss_with_pull(network: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Tree, dict]:
    """L with the centroid term as a mean over S, whose gradient reaches F."""
    return objective(network, batch, pull=True)


def features_of(batch: Batch) -> torch.Tensor:
    return forward(batch.frozen["network"], batch.x)[0].float()


def predictions(batch: Batch) -> torch.Tensor:
    return batch.frozen["network"](batch.x).argmax(1)


# ------------------------------------------------------------------------------------------------ the server


def combine(previous: torch.Tensor, uploaded: torch.Tensor, guard: bool) -> torch.Tensor:
    """f_G [C, d] of the clients' centroids [K, C, d], each weighted by its cosine to the previous f_G; in fp64.

    guard: no weight below 0, and where none is left (the previous is 0: nobody held the class so far) the plain mean
    over those who have a centroid.  Where the weights sum to 0 after all, the previous stays.
    """
    old, new = previous.double(), uploaded.double()
    weight = F.cosine_similarity(old[None], new, dim=2)
    if guard:
        weight = weight.clamp_min(0)
        holds = has_centroid(new).double()
        weight = torch.where(weight.sum(0) < 1e-6, holds, weight)
    total = weight.sum(0)[:, None]
    mean = (weight[:, :, None] * new).sum(0) / torch.where(total == 0, 1, total)
    return torch.where(total == 0, old, mean).to(previous.dtype)


def forget_rate(round: int, phi: float, gradual: int) -> float:
    """phi_r: from 0 in round 0 to phi in round T_k - 1, and phi from then on."""
    return float(np.linspace(0, phi, gradual)[round]) if round < gradual else phi


# ------------------------------------------------------------------------------------------------ the method

# clients, fraction and length are the benchmark's; the authors' 5 local epochs come with a fifth of the rounds
OWN = {"batch": 50, "optimiser": {"name": "sgd", "lr": 0.25, "momentum": 0.5, "weight_decay": 1e-4}}


def _preset(about: str, **settings: Any) -> Preset:
    """The defaults with some settings changed, and the reproduction's optimiser, batch and local epochs for ``own``."""
    lengths = {"cifar10": 500, "cifar100": 500, "clothing1m": 50, "digits": 100, "fashion-mnist": 50}
    special: dict[str, dict[str, Any]] = {
        "clothing1m": {"forget_rate": 0.385},  # its authors' estimate: 61.5 % of the labels are right; nothing is told
        # with the rate as told, .42, classes that are not learned at first are never in S and keep a recall of 0, on
        # equal shares of all classes too; hold-outs of draws 10 to 14: told 83.5 %, .2 88.9 (FedAvg 92.8); of 10 to
        # 12: .2 87.6, and with means by size 89.6
        "digits": {"forget_rate": 0.2, "unweighted": False},
    }
    return Preset(
        about=about,
        settings=settings,
        protocol=OWN,
        datasets={
            name: Preset(settings={**special.get(name, {}), **settings}, protocol={"rounds": T // 5, "local_epochs": 5})
            for name, T in lengths.items()
        },
    )


class RoFL(Method):
    card = Card(
        title="RoFL",
        paper="Robust Federated Learning With Noisy Labels, IEEE Intelligent Systems 37(2), 2022, arXiv:2012.01700",
        year=2022,
        conditions=("clients upload a feature centroid of each class", "a start-up period without pseudo-labels"),
        told=("noise_rate",),
        departures=(
            "no code of the authors exists: what is unstated in the paper follows the public reproduction",
            "the centroid term has no gradient, as in the reproduction; centroid_grad=true is the reading that it has",
            "the forget rate is the mean nominal noise rate of all clients, unless forget_rate is set",
            "the first global centroids are plain means, later weights clip at 0 (guard=false: cosines to N(0, 1))",
            "a class that nobody in the cohort holds keeps its centroid, and one without any starts from local means",
            "a batch of which nothing is kept is left out of training (the reproduction's loss is NaN)",
            "pseudo-labels are predicted on unaugmented images, and from round T_pl on only: before, none is read",
            "T_pl is a fifth of the run (100 of 500; the reproduction: 100 of 1000), T_k at most its length",
        ),
    )
    Config = Settings
    presets = {  # noqa: RUF012 (a class attribute of the contract)
        "default": _preset("the reproduction's values, with its averages of centroids made safe"),
        "centroid-gradient": _preset("the centroid term moves the weights", centroid_grad=True),
        "code-literal": _preset(
            "the reproduction to the letter: forget rate .2, T_pl = 100, random first centroids, augmented views",
            forget_rate=0.2,
            pseudo_start=Rounds(100),
            guard=False,
            score_view="train",
        ),
    }

    # -- server

    def init(self, server: Server) -> Tree:
        """weights: w.  centroids: f_G, fp32 [C, d], None before the first.  missing: the classes without one."""
        return {"weights": weights(server.model()), "centroids": None, "missing": []}

    def plan(self, state: Tree, server: Server) -> Plan:
        return Plan("train", server.cohort(), state)

    def aggregate(self, state: Tree, uploads: Sequence[Upload], server: Server) -> Tree:
        sizes = [1 if self.config.unweighted else upload.size for upload in uploads]
        w = average([upload.content["weights"] for upload in uploads], sizes)
        f = torch.stack([upload.content["centroids"] for upload in uploads])
        previous = state["centroids"]
        if previous is None:
            previous = torch.zeros_like(f[0])
            if not self.config.guard:
                previous = torch.randn(f[0].shape, generator=server.rng("centroids")).to(f)
        centroids = combine(previous.to(f), f, self.config.guard)
        missing = (~has_centroid(centroids)).nonzero().flatten().tolist()
        server.note(forget_rate=self._rate(server))
        if missing:
            server.note(classes_without_centroid=missing)
        return {"weights": w, "centroids": centroids, "missing": missing}

    def predictors(self, state: Tree, server: Server) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        return {"main": server.model(state["weights"], frozen=True)}

    def diagnostics(self, state: Tree) -> Mapping[str, float]:
        """centroid_cosine: the mean between different classes' centroids; near 1 they tell classes apart no more."""
        C = 0 if state["centroids"] is None else len(state["centroids"]) - len(state["missing"])
        if C < 2:
            return {}
        f = F.normalize(state["centroids"].double(), dim=1)  # zeros stay zeros
        return {"centroid_cosine": ((f.sum(0).square().sum() - C) / (C * (C - 1))).item()}

    # -- client

    def client(self, task: str, message: Tree, client: Client) -> Reply:
        labels, rate = client.labels, self._rate(client)
        f_k = self._start(message, client)
        network = client.model(message["weights"])
        sizes = client.batch_sizes()
        if not sizes or not keeps(sizes[0], rate):  # no batch of which anything would be kept
            return Reply({"weights": message["weights"], "centroids": self._said(f_k, labels)})
        start = self._pseudo_start(client)
        fit = client.fit(
            network,
            loss_with_pull if self.config.centroid_grad else loss,
            labels=labels,
            sample={
                "pseudo": labels if client.round < start else self._look(predictions, message, client),
                "clean": torch.full(labels.shape, 0.5),  # of a sample that no batch showed
                "label": labels,
            },
            given={
                "forget_rate": rate,
                "lambda_cen": self.config.lambda_cen * min(1.0, client.round / start),
                "lambda_e": self.config.lambda_e,
            },
            carry=f_k,
            # an optimiser step of zero gradient would still apply momentum and weight decay
            last_batch=None if keeps(sizes[-1], rate) else "drop",
        )
        clean, label = fit.sample["clean"], fit.sample["label"]
        shares = torch.stack([(clean == 1).double().mean(), (label != labels).double().mean()]).tolist()
        return Reply(
            {"weights": weights(network), "centroids": self._said(fit.carry, labels)},
            metrics={"loss": fit.loss, "confident": shares[0], "relabelled": shares[1]},
            claims=Claims(label, clean),
        )

    def _start(self, message: Tree, client: Client) -> torch.Tensor:
        """f_k before the first batch: f_G, and the own class means where there is none yet."""
        received, missing = message["centroids"], message["missing"]
        if received is not None and not missing:
            return received.to(client.labels.device)
        means = class_means(self._look(features_of, message, client), client.labels, client.classes)
        if received is None:
            return means
        rows = torch.tensor(missing, device=means.device)
        return received.to(means).index_copy(0, rows, means.index_select(0, rows))

    def _look(self, function: Callable[[Batch], torch.Tensor], message: Tree, client: Client) -> torch.Tensor:
        """``function`` of all own images under the received network."""
        name = function.__name__
        network = client.model(message["weights"], name, frozen=True)
        return client.apply(function, view=self.config.score_view, frozen={"network": network}, stream=name)

    def _said(self, f_k: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What is uploaded of f_k: a zero row has no weight at the server."""
        if not self.config.skip_absent:
            return f_k
        return f_k * F.one_hot(labels, len(f_k)).amax(0)[:, None]

    # -- both

    def _rate(self, side: Client | Server) -> float:
        """phi_r."""
        phi = self.config.forget_rate
        if phi is None:
            if "noise_rate" not in side.told:
                raise ValueError("RoFL is told no noise rate on this data set: set forget_rate")
            phi = side.told["noise_rate"]
        return forget_rate(side.round, phi, min(self.config.gradual.of(side.protocol.rounds), side.protocol.rounds))

    def _pseudo_start(self, side: Client) -> int:
        """T_pl."""
        return max(1, self.config.pseudo_start.of(side.protocol.rounds))
