"""DivideMix, federated: two networks divide the data for each other by loss, then train as in semi-supervised learning.

Paper: Li, Socher & Hoi, «DivideMix: Learning with Noisy Labels as Semi-supervised Learning», ICLR 2020, and its code.
The federated form is the comparison row of FedCova (arXiv:2603.04062), which says no more than that every client runs
DivideMix locally and that both networks are averaged; what that leaves open is a setting here.

A network learns right labels before wrong ones, so the losses of a client's samples fall into two heaps.  A mixture of
two Gaussians finds them; the samples of the lower heap keep their labels, the others lose them and take the networks'
common guess instead.  Each network trains on the division that the *other* one made, so that it does not confirm its
own errors.

Symbols, as in the paper:

    k = 1, 2   the networks, weights w_1 and w_2         J     classes;  pi_c = 1/J
    l_i        cross-entropy of sample i under its label, scaled to [0, 1] over the client's samples
    omega_i    P(lower Gaussian | l_i), the probability that label i is right
    tau        .5: labelled X = {omega_i > tau}, unlabelled U = the rest
    T, M       .5, the temperature of sharpening; 2, views of an image
    p          softmax of a network;  sharpen(p)_c = p_c^(1/T) / sum_c' p_c'^(1/T)
    lambda     Beta(alpha, alpha), the mixing weight; lambda' = max(lambda, 1 - lambda)
    lambda_u   weight of the unlabelled half after its ramp;  W: warm-up rounds, r: the round, i of n: the step

Step for network k, with B labelled and B unlabelled images in two views each:

    co-refinement   labelled: t = sharpen(omega y + (1 - omega) mean of the 2 views' own p), omega of the other network
    co-guessing     unlabelled: t = sharpen(mean of the 2 views' p under both networks)
    mixing          x' = lambda' x + (1 - lambda') x_s, t' = lambda' t + (1 - lambda') t_s, s a permutation of all 4B
    L_X             cross-entropy with t' of the 2B rows whose larger part is labelled
    L_U             mean over rows and classes of (p - t')^2, of the 2B others
    L_reg           sum_c pi_c ln(pi_c / mean p_c), over all rows
    L = L_X + lambda_u clip((r + i/n - W)/16, 0, 1) L_U + L_reg

One round: the server sends w_1, w_2; if r < W, every client trains each network with the cross-entropy; otherwise it
divides its data under both received networks, trains network 1 with network 2 frozen, then network 2 with the trained
network 1 frozen; it sends both back, and the server averages each by itself.  The sum of their logits predicts.

Departures, and why:

* An epoch's last labelled batch, and a client's few unlabelled images, are filled up to whole batches with samples
  taken again at random (``fill``).  The code's ragged batches have another shape for every client and round, each of
  which a GPU would have to record anew.
* A half of fewer than two samples is no half, since one alone cannot pass a BatchNorm in training.  Without a labelled
  half the epoch is an ordinary one on the given labels; without an unlabelled half L_U is left out.  Where all losses
  are equal nothing can be told apart: all samples are held clean.
* lambda_u, which the paper chooses for each noise rate among four values, follows from the mean rate that the method is
  told: one value up to ``lambda_u_limit``, another above (``lambda_u`` sets it by hand).
* W is a share of the run and the ramp 16 rounds, since one round is one local epoch.  With more local epochs the
  division is still made once a round, under the received networks.
* Constant learning rate: the code's drop at half the run belongs to the protocol.
* Clothing1M: without the code's epochs of 1000 class-balanced batches and its choice of the best epoch on clean data.

What to expect of it here: a mixture always finds two heaps, so a client without wrong labels loses a good part of its
labels too (of losses drawn from one Gaussian half, from an exponential a fifth); L_reg pulls the predictions of every
client towards equal classes, which its data need not have (``prior``); and a noisy client's epoch is as short as its
labelled half.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from flnoisebench.api import (
    KEEP,
    Batch,
    Card,
    Claims,
    Client,
    Config,
    Field,
    Fit,
    Method,
    OnceABatch,
    Plan,
    Preset,
    Reply,
    Rounds,
    Server,
    Tree,
    Upload,
    average,
    cross_entropy,
    weights,
)

LEAST = 2  # samples of a half; a single one cannot pass a BatchNorm in training

# ---------------------------------------------------------------------------------------------- settings


class Settings(Config):
    """The defaults are the authors' code's, for CIFAR-10."""

    # warm-up
    warm_up: Rounds = Field(
        Rounds(1 / 30), unit="rounds", why="W, at least 1; the code's 10 of 300 epochs (30 of 300 on CIFAR-100)"
    )
    warm_up_factor: int = Field(
        1, ge=1, unit="batches", why="the warm-up's batch is this many usual ones; the code's 2"
    )
    penalty: float = Field(
        0.0, ge=0, why="of sum_c p_c ln p_c in the warm-up; the code's 1 for asymmetric noise and Clothing1M"
    )

    # the division
    threshold: float = Field(0.5, ge=0, lt=1, why="tau, exclusive; the paper's, who takes .6 at 90 % noise")
    loss_history: int = Field(
        1, ge=1, unit="rounds", why="mean of a client's last so many l_i; the code's 5 at 90 % noise, else this one's"
    )
    iterations: int = Field(10, ge=1, unit="EM steps", why="the code's max_iter of the mixture")
    tolerance: float = Field(1e-2, gt=0, unit="log-likelihood", why="the code's tol of the mixture")
    variance_floor: float = Field(5e-4, gt=0, why="the code's reg_covar: added to both variances")

    # the step
    temperature: float = Field(0.5, gt=0, why="T, the paper's")
    alpha: float = Field(4.0, gt=0, why="of the Beta law, the paper's; .5 on Clothing1M")
    lambda_u: float | None = Field(None, ge=0, why="None: by the told noise rate, see the next three")
    lambda_u_limit: float = Field(0.25, ge=0, le=1, unit="noise rate", why="between the paper's rows of 20 and 50 %")
    lambda_u_low: float = Field(0.0, ge=0, why="up to the limit: the paper's for CIFAR-10 at 20 %")
    lambda_u_high: float = Field(25.0, ge=0, why="above it: the paper's for CIFAR-10 at 50 and 80 %")
    ramp: Rounds = Field(Rounds(16), unit="rounds", why="of lambda_u after W; the code's 16 epochs, 0: none")
    balance: float = Field(1.0, ge=0, why="weight of L_reg, the paper's")
    prior: Literal["uniform", "local"] = Field(
        "uniform", why="pi, the paper's; local: the client's label shares, since its classes need not be equal"
    )
    mixed: Literal["both", "labelled"] = Field(
        "both", why="rows that are trained on; labelled: without L_U, as the code on Clothing1M"
    )
    fill: bool = Field(True, why="whole batches only, by samples taken again; False: the code's short last batches")


CIFAR100 = {"warm_up": Rounds(0.1), "lambda_u_low": 25.0, "lambda_u_high": 150.0}
CLOTHING1M = {"warm_up": Rounds(1), "penalty": 1.0, "lambda_u": 0.0, "alpha": 0.5, "mixed": "labelled"}
DIGITS = {"warm_up": Rounds(0.3), "lambda_u": 5.0, "prior": "local"}
BUDGET = {"batch": 64, "optimiser": {"lr": 0.02}}  # the code's; momentum and weight decay are the benchmark's
CLOTHING1M_BUDGET = {"batch": 32, "optimiser": {"lr": 0.002, "weight_decay": 1e-3}}


def _preset(about: str, *, digits: Mapping[str, Any] = DIGITS, **settings: Any) -> Preset:
    """The code's settings for each data set with some of them changed.  digits: beneath those, on digits."""
    return Preset(
        about=about,
        settings=settings,
        protocol=BUDGET,
        datasets={
            "cifar10": Preset(settings=settings, protocol=BUDGET),
            "cifar100": Preset(settings={**CIFAR100, **settings}, protocol=BUDGET),
            "clothing1m": Preset(
                about="no L_U and a penalty on early confidence; batches of the code, drawn as they come",
                settings={**CLOTHING1M, **settings},
                protocol=CLOTHING1M_BUDGET,
            ),
            "digits": Preset(
                about="chosen on draws 10 and 11: 94.2 % where FedAvg has 93.5; with the code's settings 76 on draw 10",
                settings={**digits, **settings},
                protocol={**BUDGET, "batch": 32},
            ),
            "fashion-mnist": Preset(settings=settings, protocol=BUDGET),
        },
    )


# -------------------------------------------------------------------------------------------- the division


class Division(NamedTuple):
    """One network's division of a client's samples."""

    clean: torch.Tensor  # omega, fp64 [n] on the CPU
    labelled: torch.Tensor  # int64 positions, ascending
    unlabelled: torch.Tensor
    decided: bool  # False: all losses were equal


def scaled(losses: torch.Tensor) -> torch.Tensor:
    """[n] -> [0, 1]; zeros where all are equal."""
    low, high = losses.min(), losses.max()
    return (losses - low) / torch.where(high > low, high - low, 1)


def mixture(losses: torch.Tensor, config: Settings, seed: int) -> GaussianMixture:
    """Two Gaussians over losses fp64 [n], n >= 2, not all equal."""
    model = GaussianMixture(
        2, max_iter=config.iterations, tol=config.tolerance, reg_covar=config.variance_floor, random_state=seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # ten steps are meant to be the end
        return model.fit(losses[:, None].numpy())


def divide(losses: torch.Tensor, config: Settings, seed: int) -> Division:
    """The division by losses fp64 [n] on the CPU."""
    decided = bool(losses.max() > losses.min())
    clean = torch.ones_like(losses)
    if decided:
        model = mixture(losses, config, seed)
        posterior = model.predict_proba(losses[:, None].numpy())[:, model.means_[:, 0].argmin()]
        clean = torch.from_numpy(np.ascontiguousarray(posterior))
    kept = clean > config.threshold
    return Division(clean, kept.nonzero()[:, 0], (~kept).nonzero()[:, 0], decided)


def sample_losses(batch: Batch) -> torch.Tensor:
    """Cross-entropy of each sample under both networks, fp32 [B, 2]."""
    losses = [F.cross_entropy(batch.frozen[k](batch.x).float(), batch.y, reduction="none") for k in ("first", "second")]
    return torch.stack(losses, 1)


def filled(positions: torch.Tensor, batch: int, rng: np.random.Generator) -> torch.Tensor:
    """``positions`` and some of them again, up to whole batches; each equally often, but for one."""
    times, rest = divmod(-len(positions) % batch, len(positions))
    again = torch.from_numpy(rng.permutation(len(positions))[:rest])
    return torch.cat([positions.repeat(1 + times), positions[again]])


def draw_mixing(rows: Sequence[int], alpha: float, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """For steps that mix so many rows: lambda', fp32 [steps], and permutations, int64 [steps, max(rows)], each in the
    first entries of its row."""
    weight = rng.beta(alpha, alpha, len(rows))
    order = np.zeros((len(rows), max(rows)), dtype=np.int64)
    for step, count in enumerate(rows):
        order[step, :count] = rng.permutation(count)
    return {
        "weight": torch.from_numpy(np.maximum(weight, 1 - weight)).float(),
        "order": torch.from_numpy(order),
    }


# ------------------------------------------------------------------------------------------------ the losses


def negative_entropy(logits: torch.Tensor) -> torch.Tensor:
    """sum_c p_c ln p_c of logits [B, J], the mean over the batch."""
    log_p = logits.float().log_softmax(1)
    return (log_p.exp() * log_p).sum(1).mean()


def penalised_loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The warm-up where noise is asymmetric: confidence costs.  given: penalty, a scalar."""
    logits = network(batch.x).float()
    return F.cross_entropy(logits, batch.y) + batch.given["penalty"] * negative_entropy(logits)


def sharpen(p: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """p_c^(1/T) / sum p^(1/T) of rows p [B, J]; by logarithms, since powers of many small p would underflow."""
    return (p.log() / temperature).softmax(1)


def refine(y: torch.Tensor, clean: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """omega onehot(y) + (1 - omega) p; y int64 [B], clean [B], p [B, J]."""
    return clean[:, None] * F.one_hot(y, p.shape[1]).to(p.dtype) + (1 - clean[:, None]) * p


def ramp(since: Any, step: Any, steps: Any, length: Any) -> torch.Tensor:
    """The share of lambda_u at step ``step`` of ``steps``, ``since`` rounds after the warm-up; fp64."""
    return ((since + torch.as_tensor(step, dtype=torch.float64) / steps) / length).clamp(0, 1)


def squared_error(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """L_U of probabilities and targets [B, J]: the mean over samples and classes."""
    return (p - t).square().mean()


def imbalance(log_p: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """L_reg of log-probabilities [B, J].  The mean's logarithm comes from logsumexp: a class that no row gives any
    probability would make log(mean) infinite."""
    log_mean = log_p.logsumexp(0) - math.log(len(log_p))
    return (torch.special.xlogy(prior, prior) - prior * log_mean).sum()


def _mean_probability(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([one.float().softmax(1) for one in logits]).mean(0)


def targets(network: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, sharpened targets) to mix, the labelled first; both views of an image share the target.

    The trained network is in training mode here too, as in the authors' code: its BatchNorms see each view by itself.
    """
    peer, temperature = batch.frozen["peer"], batch.given["temperature"]
    images, guesses = list(batch.views), []
    with torch.no_grad():
        if "unlabelled" in batch.other:  # a fact of the call, not of the batch
            views = batch.other["unlabelled"].views
            guess = _mean_probability([net(view) for net in (network, peer) for view in views])
            images += views
            guesses = [sharpen(guess, temperature)] * len(views)
        own = _mean_probability([network(view) for view in batch.views])
        refined = sharpen(refine(batch.y, batch.sample["clean"], own), temperature)
    return torch.cat(images), torch.cat([refined] * len(batch.views) + guesses)


def mix(values: torch.Tensor, rows: int, draw: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first ``rows`` of lambda' v + (1 - lambda') v_s, where s permutes all of ``values``."""
    partner = values.index_select(0, draw["order"][:rows])
    return draw["weight"] * values[:rows] + (1 - draw["weight"]) * partner


def _mixed(network: torch.nn.Module, batch: Batch, labelled_only: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(log-probabilities of the mixed rows, their targets, how many of them are labelled)."""
    images, target = targets(network, batch)
    labelled = len(batch.views) * len(batch.y)
    rows = labelled if labelled_only else len(images)
    log_p = network(mix(images, rows, batch.draw)).float().log_softmax(1)
    return log_p, mix(target, rows, batch.draw), labelled


def loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """L.  views: 2, and 2 of the stream ``unlabelled``.  sample: clean.  draw: as of ``draw_mixing``.  frozen: peer.
    given: prior [J], temperature, balance, lambda_u, and since and length of its ramp."""
    log_p, t, labelled = _mixed(network, batch, labelled_only=False)
    given = batch.given
    supervised = -(t[:labelled] * log_p[:labelled]).sum(1).mean()
    weight = given["lambda_u"] * ramp(given["since"], batch.step, batch.steps, given["length"])
    unsupervised = squared_error(log_p[labelled:].exp(), t[labelled:])
    return supervised + weight * unsupervised + given["balance"] * imbalance(log_p, given["prior"])


def labelled_loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """L without L_U, over the rows whose larger part is labelled: with no unlabelled image, and on Clothing1M."""
    log_p, t, _ = _mixed(network, batch, labelled_only=True)
    return -(t * log_p).sum(1).mean() + batch.given["balance"] * imbalance(log_p, batch.given["prior"])


# ------------------------------------------------------------------------------------------------- the method


class DivideMix(Method):
    card = Card(
        title="DivideMix (federated)",
        paper="Li, Socher & Hoi, DivideMix, ICLR 2020; run on clients as in arXiv:2603.04062",
        year=2020,
        conditions=(
            "a second model: twice the traffic, about five times the computation",
            "a warm-up stage",
            "the mean noise rate, from which lambda_u follows",
        ),
        told=("noise_rate",),
        departures=(
            "run locally with both networks averaged by FedAvg; one round stands for one epoch",
            "labelled and unlabelled batches are filled up with samples taken again; code-literal keeps short ones",
            "a half of fewer than two samples is no half: the epoch is an ordinary one, or has no unlabelled loss",
            "lambda_u is one of two values by the told mean noise rate, not tuned for each rate",
            "constant learning rate; no drop at half the run",
            "Clothing1M: no class-balanced epochs and no best epoch on clean data",
            "at more than one local epoch the division is made once a round",
            "the warm-up's batches are the usual ones, where the code's are twice as large (code-literal)",
        ),
    )
    Config = Settings
    presets = {  # noqa: RUF012 (a class attribute of the contract)
        "default": _preset("the authors' settings for symmetric noise, batches filled up"),
        "asymmetric": _preset(
            "the authors' settings for asymmetric noise: confidence costs in the warm-up, no L_U",
            penalty=1.0,
            lambda_u=0.0,
        ),
        "extreme-noise": _preset(
            "the authors' settings at 90 % noise: losses averaged over five rounds, threshold .6",
            loss_history=5,
            threshold=0.6,
        ),
        "local-prior": _preset(
            "L_reg towards each client's own label shares, as clients may lack classes; all else as default",
            prior="local",
        ),
        "code-literal": _preset(
            "short batches as they come, warm-up in batches twice as large, lambda_u 25 whatever the noise",
            digits={},
            fill=False,
            warm_up_factor=2,
            lambda_u=25.0,
        ),
    }

    # -- server

    def init(self, server: Server) -> Tree:
        """first, second: w_1, w_2, initialised apart."""
        warm_up, rounds = self._warm_up(server.protocol.rounds), server.protocol.rounds
        if warm_up >= rounds > 1:
            raise ValueError(f"warm_up is {warm_up} of {rounds} rounds, so the data would never be divided")
        self._lambda_u(server.told)
        return {"first": weights(server.model()), "second": weights(server.model(None, "second"))}

    def plan(self, state: Tree, server: Server) -> Plan:
        return Plan("train", server.cohort(), state)

    def aggregate(self, state: Tree, uploads: Sequence[Upload], server: Server) -> Tree:
        """Two FedAvgs."""
        undecided = [upload.client for upload in uploads if upload.content["undecided"]]
        if undecided:
            server.note(undecided=undecided)
        sizes = [upload.size for upload in uploads]
        return {k: average([upload.content[k] for upload in uploads], sizes) for k in ("first", "second")}

    def predictors(self, state: Tree, server: Server) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        """main: the sum of both networks' logits; and each by itself."""
        first = OnceABatch(server.model(state["first"], frozen=True))
        second = OnceABatch(server.model(state["second"], "second", frozen=True))
        return {
            "main": lambda images: first(images).float() + second(images).float(),
            "first": first,
            "second": second,
        }

    def diagnostics(self, state: Tree) -> Mapping[str, float]:
        """distance: ||w_1 - w_2|| / ||w_1||; two networks that come to agree no longer correct each other."""
        pairs = [(w, state["second"][name]) for name, w in state["first"].items() if w.is_floating_point()]
        apart = torch.stack([(a.double() - b.double()).square().sum() for a, b in pairs]).sum()
        length = torch.stack([a.double().square().sum() for a, _ in pairs]).sum()
        return {"distance": (apart / length).sqrt().item()}

    # -- client

    def join(self, client: Client) -> Tree:
        """losses: the scaled losses of the last rounds with a division, fp32 [rounds, 2, n]; None without a history."""
        return {"losses": None}

    def client(self, task: str, message: Tree, client: Client) -> Reply:
        """Both networks have streams of their own: after averaging, all clients' pairs are one, and the same batches
        would make them alike.  The first one's are FedAvg's, so that without division it is FedAvg, bit for bit."""
        first, second = client.model(message["first"]), client.model(message["second"], "second")
        if client.round < self._warm_up(client.protocol.rounds):
            fits = [self._warm(first, client, "fit"), self._warm(second, client, "fit second")]
            return self._reply(first, second, fits, undecided=False)
        # copies: the trained ones change below
        received = {k: client.model(message[k], f"{k}, as received", frozen=True) for k in ("first", "second")}
        by_first, by_second, state = self._divisions(received, client)
        fits = [self._train(first, received["second"], by_second, client, "fit")]
        trained = client.model(weights(first), "first, trained", frozen=True)
        fits.append(self._train(second, trained, by_first, client, "fit second"))
        kept = [one.clean > self.config.threshold for one in (by_first, by_second)]
        metrics = {
            "labelled": torch.cat(kept).double().mean().item(),
            "agreement": (kept[0] == kept[1]).double().mean().item(),
            "ordinary": sum(len(one.labelled) < LEAST for one in (by_first, by_second)) / 2,
        }
        undecided = not (by_first.decided and by_second.decided)
        claims = Claims(clean=None if undecided else (by_first.clean + by_second.clean) / 2)
        return self._reply(first, second, fits, undecided, state, metrics, claims)

    def _reply(
        self,
        first: torch.nn.Module,
        second: torch.nn.Module,
        fits: Sequence[Fit],
        undecided: bool,
        state: Tree = KEEP,
        metrics: Mapping[str, float] | None = None,
        claims: Claims = Claims(),  # noqa: B008 (frozen)
    ) -> Reply:
        upload = {"first": weights(first), "second": weights(second), "undecided": undecided}
        return Reply(upload, state, {"loss": sum(fit.loss for fit in fits) / 2, **(metrics or {})}, claims)

    def _warm(self, network: torch.nn.Module, client: Client, stream: str) -> Fit:
        penalty, batch = self.config.penalty, self.config.warm_up_factor * client.protocol.batch
        if not penalty:
            return client.fit(network, cross_entropy, batch=batch, stream=stream)
        return client.fit(network, penalised_loss, batch=batch, given={"penalty": penalty}, stream=stream)

    def _divisions(self, networks: Mapping[str, Any], client: Client) -> tuple[Division, Division, Tree]:
        """(by the first network, by the second, the client's next state); one pass and one transfer for both."""
        config, state = self.config, KEEP
        losses = client.apply(sample_losses, frozen=networks).T.double().cpu()
        losses = torch.stack([scaled(one) for one in losses])
        if config.loss_history > 1:
            before = client.state["losses"]
            history = losses.float()[None] if before is None else torch.cat([before.cpu(), losses.float()[None]])
            state = {"losses": history[-config.loss_history :].clone()}
            losses = state["losses"].double().mean(0)
        first, second = (
            divide(one, config, client.seed(f"mixture of {k}"))
            for k, one in zip(("first", "second"), losses, strict=True)
        )
        return first, second, state

    def _train(
        self, network: torch.nn.Module, peer: torch.nn.Module, division: Division, client: Client, stream: str
    ) -> Fit:
        """One network's epoch on the division that the other one made."""
        config, batch = self.config, client.protocol.batch
        labelled, unlabelled = division.labelled, division.unlabelled
        if len(labelled) < LEAST:
            return client.fit(network, cross_entropy, stream=stream)
        rng = np.random.default_rng(client.seed(f"mixing of {stream}"))
        streams = {}
        if config.fill:
            labelled = filled(labelled, batch, rng)
        sizes = client.batch_sizes(size=len(labelled))
        rows = np.tile(sizes, client.protocol.local_epochs) * 2
        if len(unlabelled) >= LEAST:
            if config.fill and len(unlabelled) < batch:
                unlabelled = filled(unlabelled, batch, rng)
            streams["unlabelled"] = {"subset": unlabelled, "views": 2, "batch": batch}
            rows = rows + 2 * min(len(unlabelled), batch)
        use_unlabelled = bool(streams) and config.mixed == "both"
        return client.fit(
            network,
            loss if use_unlabelled else labelled_loss,
            subset=labelled,
            views=2,
            streams=streams,
            sample={"clean": division.clean.float()},
            draw=draw_mixing(rows.tolist(), config.alpha, rng),
            given=self._given(client),
            frozen={"peer": peer},
            stream=stream,
        )

    def _given(self, client: Client) -> Tree:
        config, rounds = self.config, client.protocol.rounds
        since, length = float(client.round - self._warm_up(rounds)), float(config.ramp.of(rounds))
        if not length:
            since = length = 1.0
        if config.prior == "uniform":
            prior = torch.full((client.classes,), 1 / client.classes)
        else:
            prior = F.one_hot(client.labels, client.classes).float().mean(0)
        return {
            "prior": prior,
            "temperature": config.temperature,
            "balance": config.balance,
            "lambda_u": self._lambda_u(client.told),
            "since": since,
            "length": length,
        }

    # -- both

    def _warm_up(self, rounds: int) -> int:
        """At least one: untrained networks tell nothing apart."""
        return max(1, self.config.warm_up.of(rounds))

    def _lambda_u(self, told: Mapping[str, float]) -> float:
        config = self.config
        if config.lambda_u is not None:
            return config.lambda_u
        if "noise_rate" not in told:
            raise ValueError("the noise rate of this data set is unknown: set lambda_u (0 on Clothing1M)")
        return config.lambda_u_low if told["noise_rate"] <= config.lambda_u_limit else config.lambda_u_high
