"""Co-teaching, federated: two networks, each of which learns from the samples that the other finds easy.

Paper: Han et al., «Co-teaching: Robust Training of Deep Neural Networks with Extremely Noisy Labels», NeurIPS 2018.  It
is about one machine; as a federated baseline (FedCova's "CoteachingFL", FedNoisy, FNBench) every client co-teaches on
its own data and the server averages each network with its namesakes.

A network fits right labels before wrong ones, so early on a small loss speaks for a right label.  A network that picks
its own samples repeats its own mistakes; two that start differently make different ones, and each filters for the
other.

    w1, w2   the two networks' weights, initialised independently      D_m   client m's samples
    F        forget rate of this round, in [0, F_max]                  R     1 - F, the share of a batch that is kept
    B        size of a batch                                           k     max(1, int(R B)), samples kept of it
    l1, l2   [B] cross-entropy of each sample under each network       I1    the k smallest of l1; I2 of l2

One step, on one batch:  L1 = mean of l1 over I2,  L2 = mean of l2 over I1;  each network descends its own.  L1 + L2 is
trained in one step: the networks share no weight, so neither gradient sees the other's loss.

One round: broadcast w1, w2; one epoch of such steps; clients upload both; w1 <- sum_m D_m w1_m / sum_m D_m, w2 alike.

    F(r) = F_max for r >= T_k, before that the r-th of T_k evenly spaced numbers from 0 to F_max^c        (r from 0)

F_max is the mean noise rate over all clients, which the method is told, and the same for each of them.

**What "main" is.**  The authors log the accuracy of each network, and the number to compare with is their mean, which
no single predictor has.  "main" is network 1: the networks are exchangeable, so its expected accuracy is that mean, it
costs what other methods' predictors cost, and it does not borrow an ensemble's gain.  "net2" and "ensemble" (argmax of
the summed logits, FedNoisy's convention) are read beside it, so that the mean of "main" and "net2" is in the record.

Departures, and why:

* The authors' code averages twice: the mean cross-entropy of the kept samples is divided by their number once more.
  Adam, which they use, does not see that; plain SGD would take a step k (about 100) times too small.  Here it is
  averaged once, as in both federated ports.  ``averaged=twice`` is the code.
* The ramp is the code's, which is F_max already in round T_k - 1; the paper's min(r/T_k, 1) F_max is
  ``ramp_form=paper``.  The code's epochs begin at 1, so it never sees F(0) = 0: ``ramp_skip=1``.
* T_k is a share of the run (25 of 500 rounds; the authors' 10 of 200 epochs are the same 5 %), but at least one round,
  so that networks that have learned nothing yet never select.
* A round is the epoch of the schedule, whatever the local epochs: all clients are at the same forget rate, also those
  that were not sampled for a while.
* The authors' Adam with beta1 falling from .9 to .1 and a rate falling from epoch 80 belongs to no protocol here; their
  batch, Adam and rate are the preset's in the track ``own``, at constant rate and beta.
* ``own_views`` is ours.  Both networks of a pair see one augmentation of a batch; where they begin from one pretrained
  encoder and differ only in the head, an augmentation each keeps them from growing alike.

Known limits, which are the method's: a clean client also forgets F_max of its samples, the hard ones, and a client with
more wrong labels than F_max keeps some of them.  A class that is not learned by the end of the ramp looks hard
everywhere and can be forgotten for good: on digits (draws 10 to 14, validation) FedAvg has 92.8 %, forget rate 0 the
same, .2 has 87.2 and the told rate 80.1, where on draw 12 a class is never predicted right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
    OnceABatch,
    Plan,
    Preset,
    Reply,
    Rounds,
    Server,
    Side,
    Tree,
    Upload,
    average,
    weights,
)

# ---------------------------------------------------------------------------------------------- settings


class Settings(Config):
    forget_rate: float | None = Field(
        None, ge=0, lt=1, unit="share", why="F_max; None: the mean noise rate that is told, as the authors set it"
    )
    ramp: Rounds = Field(
        Rounds(0.05), unit="rounds", why="T_k, FedNoisy's 25 of 500 and the authors' 10 of 200; a share is at least 1"
    )
    ramp_form: Literal["code", "paper"] = Field(
        "code", why="code: T_k numbers from 0 to F_max^c, then F_max; paper: min(r/T_k, 1) F_max, one round later"
    )
    ramp_skip: int = Field(
        0,
        ge=0,
        le=1,
        unit="rounds",
        why="1: the ramp begins at F(1), as the code's loop over epochs",
    )
    exponent: float = Field(1.0, gt=0, why="c of the ramp's end F_max^c; the authors' default, and the paper's")
    averaged: Literal["once", "twice"] = Field(
        "once", why="the loss over the kept samples; twice: divided by k again, as the code, for Adam only"
    )
    own_views: bool = Field(
        False, why="True: each network sees an augmentation of its own, for pairs that share a pretrained encoder"
    )

    def model_post_init(self, context: Any) -> None:
        if isinstance(self.ramp.value, float) and self.ramp.value > 1:
            raise ValueError(f"ramp={self.ramp.value} is a share above 1: the forget rate would never be reached")
        if self.ramp_form == "paper" and self.exponent != 1:
            raise ValueError("exponent belongs to ramp_form=code; the paper's ramp is the straight line")


# --------------------------------------------------------------------------------------- what is kept, and the loss


def forget_rate(r: int, most: float, T_k: int, c: float = 1.0, form: str = "code") -> float:
    """F(r) in fp64, for most = F_max.  T_k = 0: no ramp.  At T_k = 1 the code's ramp is the one number 0."""
    if r >= T_k:
        return most
    return most * (r / T_k) if form == "paper" else float(np.linspace(0, most**c, T_k)[r])


def number_kept(forget: torch.Tensor, B: int) -> torch.Tensor:
    """k = max(1, int((1 - F) B)), the floor of an fp64 product as in the authors' Python; ``forget`` is an fp64 scalar.

    It stays a tensor: a Python number would be frozen into a recorded step.
    """
    return ((1 - forget) * B).floor().clamp_min(1)


def smallest(losses: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B], 1 at the k smallest and 0 elsewhere; of equal losses the one that comes first.  Fixed shapes whatever k."""
    order = losses.detach().argsort(stable=True)
    taken = torch.arange(len(losses), device=losses.device) < k
    return torch.zeros_like(losses).scatter(0, order, taken.to(losses.dtype))


def exchanged(l1: torch.Tensor, l2: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(L1, L2, chosen): chosen [B] is the share of the two networks that picked each sample: 0, 1/2 or 1."""
    I1, I2 = smallest(l1, k), smallest(l2, k)
    size = k.to(l1.dtype)
    return (l1 * I2).sum() / size, (l2 * I1).sum() / size, (I1 + I2) / 2


def _step(pair: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(L1 + L2, k, chosen) of a batch, from the one forward pass (in training mode) that also ranks."""
    first, second = pair
    l1 = F.cross_entropy(first(batch.views[0]).float(), batch.y, reduction="none")
    l2 = F.cross_entropy(second(batch.views[-1]).float(), batch.y, reduction="none")  # one view: the same
    k = number_kept(batch.given["forget"], len(batch.y))
    L1, L2, chosen = exchanged(l1, l2, k)
    return L1 + L2, k.to(l1.dtype), chosen


def loss(pair: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, None, dict[str, torch.Tensor]]:
    """L1 + L2.  given: forget, F.  sample: chosen, which it overwrites."""
    value, _, chosen = _step(pair, batch)
    return value, None, {"chosen": chosen}


def loss_averaged_twice(pair: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, None, dict[str, torch.Tensor]]:
    """(L1 + L2)/k, the authors' code."""
    value, k, chosen = _step(pair, batch)
    return value / k, None, {"chosen": chosen}


# ------------------------------------------------------------------------------------------------- the method

AUTHORS = {
    "batch": 128,
    "last_batch": "drop",
    "optimiser": {"name": "adam", "lr": 0.001, "momentum": 0.9, "weight_decay": 0.0},
}
PORTS = {"optimiser": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}}
SMALL_CLIENTS = {"batch": 32, "last_batch": "keep"}  # 72 samples each: batches of 128 would be one step a round


def _presets(about: str, protocol: Mapping[str, Any], digits: Preset | None = None, **settings: Any) -> Preset:
    """The same on every data set, but for what it cannot be: clients of digits, the unknown noise of Clothing1M."""
    digits = digits or Preset(about="a digits client holds 72 samples: small batches", protocol=SMALL_CLIENTS)
    return Preset(
        about=about,
        settings=settings,
        protocol=protocol,
        datasets={
            "cifar10": Preset(about="as in general: the authors tuned on CIFAR-10"),
            "cifar100": Preset(about="as in general: the authors' values for CIFAR-10 and CIFAR-100 are the same"),
            "digits": digits,
            "clothing1m": Preset(
                about="forget rate .39 as FedNoisy; the rate is not known there.  Pretrained pairs differ in the head",
                settings={"forget_rate": 0.39, "own_views": True},
                protocol={"batch": 64},
            ),
        },
    )


CHOSEN_ON_DIGITS = Preset(
    about="the best of six on draws 10 to 14, and FNBench's: 87.3 % on validation; the told rate and ramp .05: 80.1, "
    "ramp .2: 84.9, .5: 84.8, 1: 85.6; rate .2 and ramp .05: 87.2",
    settings={"forget_rate": 0.2, "ramp": Rounds(0.2)},
    protocol={  # the shared one: the authors never ran digits
        **SMALL_CLIENTS,
        "optimiser": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
    },
)


class CoTeaching(Method):
    card = Card(
        title="Co-teaching",
        paper="Han et al., NeurIPS 2018; both networks federated by FedAvg",
        year=2018,
        conditions=(
            "a second model: twice the traffic and the images trained",
            "an estimate of the noise rate (told, or the setting forget_rate)",
        ),
        told=("noise_rate",),
        departures=(
            "federated: the paper trains on one machine; a round is its epoch, and each network is averaged by itself",
            "one forget rate for all clients, the mean noise rate over all, since no client knows its own",
            "the loss is averaged over the kept samples once; the authors' code divides twice, which Adam forgives",
            "the ramp is a share of the run (25 of 500 rounds), the code's form: F_max is reached in round T_k - 1",
            "no falling learning rate nor falling beta1: a protocol's are constant or cosine",
            "main is network 1, whose expected accuracy is the mean of both that papers report; net2 and the ensemble "
            "of summed logits are read beside it",
            "on Clothing1M each network sees its own augmentation, for the sake of pairs with one pretrained encoder",
        ),
    )
    Config = Settings
    presets = {  # noqa: RUF012 (a class attribute of the contract)
        "default": _presets(
            "averaged once, ramp over a twentieth of the run; own: the authors' batch and Adam",
            AUTHORS,
            digits=CHOSEN_ON_DIGITS,
        ),
        "code-literal": _presets(
            "the authors' code: averaged twice, no round at F = 0; meant for its Adam (track own)",
            AUTHORS,
            averaged="twice",
            ramp_skip=1,
        ),
        "paper-literal": _presets("the paper's ramp, which reaches F_max in round T_k", AUTHORS, ramp_form="paper"),
        "fednoisy": _presets("FedNoisy's port: SGD at .01", PORTS),
        "fnbench": _presets(
            "FNBench's port: forget rate .2 whatever the noise, ramp over a fifth of the run",
            {**PORTS, "batch": 64},
            forget_rate=0.2,
            ramp=Rounds(0.2),
        ),
    }

    def network(self, encoder: torch.nn.Module) -> torch.nn.Module:
        """Both networks.  Here the second is a copy of the first; ``init`` draws it anew."""
        first = super().network(encoder)
        return torch.nn.ModuleList([first, copy.deepcopy(first)])

    def init(self, server: Server) -> Tree:
        """The weights of both networks, "0." and "1." before their names.

        Two whole initialisations, of which the second gives network 2: so both begin as the model's own code has it (a
        reset of a copy's layers would undo special initialisations and pretrained weights), and network 1 begins as
        FedAvg's with the same seed.
        """
        pair, other = server.model(), server.model(name="second")
        pair[1].load_state_dict(other[0].state_dict())  # type: ignore[index]
        first, second = (list(network.parameters()) for network in pair)  # type: ignore[attr-defined]
        if all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
            raise RuntimeError(
                "both networks start with the same weights: on the same batches they would select the same samples and "
                "stay the same for ever. The model's initialisation must draw something, its head at least"
            )
        return weights(pair)

    def plan(self, state: Tree, server: Server) -> Plan:
        return Plan("train", server.cohort(), state)

    def client(self, task: str, message: Tree, client: Client) -> Reply:
        pair = client.model(message)
        fit = client.fit(
            pair,
            loss if self.config.averaged == "once" else loss_averaged_twice,
            given={"forget": self.forget_rate(client)},
            sample={"chosen": torch.ones(client.size)},  # whoever is never in a batch was never refused
            views=2 if self.config.own_views else 1,
        )
        chosen = fit.sample["chosen"]
        # where the networks disagree is what they can teach one another; after many averages it may be little
        metrics = {"loss": fit.loss / 2, "disputed": (chosen == 0.5).double().mean().item()}
        return Reply(weights(pair), metrics=metrics, claims=Claims(clean=chosen))

    def aggregate(self, state: Tree, uploads: Sequence[Upload], server: Server) -> Tree:
        server.note(forget_rate=self.forget_rate(server))
        return average([upload.content for upload in uploads], [upload.size for upload in uploads])

    def predictors(self, state: Tree, server: Server) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        """main: network 1; net2; ensemble: the sum of both networks' logits."""
        first, second = map(OnceABatch, server.model(state, frozen=True))  # type: ignore[call-overload]
        return {
            "main": first,
            "net2": second,
            "ensemble": lambda images: first(images).float() + second(images).float(),
        }

    def forget_rate(self, side: Side) -> float:
        """F of this round.  Raises ValueError where the noise rate is neither told nor set."""
        config = self.config
        most = side.told.get("noise_rate") if config.forget_rate is None else config.forget_rate
        if most is None:
            raise ValueError(
                "Co-teaching forgets as much as there is noise, and nobody told it: the data set's noise is unknown. "
                "Set forget_rate (.39 for Clothing1M)"
            )
        T_k = config.ramp.of(side.protocol.rounds)
        if config.ramp.value:
            T_k = max(T_k, 1)  # 3 rounds' twentieth is none
        return forget_rate(side.round + config.ramp_skip, most, T_k, config.exponent, config.ramp_form)
