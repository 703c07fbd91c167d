"""Oracles: what a method reaches when somebody who knows the truth removes the noise before it starts.

No method can do this, so an oracle is none: it changes the federation that a run trains on, whatever the method, and
gives the methods a scale.  The scenario is drawn first, as always, and stays what the run is named after; its digests
stay recorded.  The test images stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from flnoisebench.scenario.manifest import Ints, Scenario, Truth, sealed

Oracle = Literal["clean-clients", "clean-samples", "centralised-clean"]
ORACLES: tuple[Oracle, ...] = get_args(Oracle)


class Cleaned(NamedTuple):
    """What an oracle leaves.  kept: int64 [k], ascending positions in the data set; scenario and truth are about these
    samples alone, so position i of theirs is kept[i] of the data set's.  clients: int64 [m], which of the clients each
    of those that are left was; empty where one client has everybody's samples."""

    kept: Ints
    clients: Ints
    scenario: Scenario
    truth: Truth


def apply(oracle: Oracle, scenario: Scenario, truth: Truth) -> Cleaned:
    """The federation that the oracle leaves; in all of them every training label is right, and that is told.

    clean-clients: the clients without noise, each as it was.  clean-samples: every client without its wrongly labelled
    samples, and a client that has no other not at all.  centralised-clean: one client with everybody's samples under
    their true labels.  Clients are numbered anew, in their order.  Held-out samples keep their given labels (they are
    not trained on) and go with their client.

    Raises ValueError where the truth is unknown, or where nothing is left to train on.
    """
    if truth.true is None:
        raise ValueError(
            f"--oracle {oracle} needs true labels, and those of {scenario.spec.dataset} may be wrong, nobody knows "
            "which: take a data set with known labels, or one that brings the true ones too (a list's true_label)"
        )
    given, clients = scenario.given, np.arange(scenario.spec.clients)
    training = ~scenario.held_out
    if oracle == "clean-clients":
        stay = clients[truth.nominal == 0]
        kept = np.flatnonzero(np.isin(scenario.owner, stay))
    elif oracle == "clean-samples":
        right = given == truth.true
        stay = np.intersect1d(clients, scenario.owner[training & right])
        kept = np.flatnonzero(np.isin(scenario.owner, stay) & (right | scenario.held_out))
    else:
        stay = clients[:1]
        kept = np.flatnonzero(scenario.held_out | (truth.true >= 0))  # another data set's images have no true label
        given = np.where(training, truth.true, given)
    if not training[kept].any():
        missing = {
            "clean-clients": "client is clean",
            "clean-samples": "label is right",
            "centralised-clean": "image has a true label",
        }[oracle]
        spec = scenario.spec
        raise ValueError(
            f"--oracle {oracle}: no {missing} under noise {spec.noise_name!r}, draw {spec.draw}; "
            "take another oracle, another draw, or less noise"
        )
    owner = np.zeros(len(kept), dtype=np.int64)
    if oracle != "centralised-clean":
        owner = np.searchsorted(stay, scenario.owner[kept])
    # A name of its own keeps the summary from passing for that of a scenario that was drawn with so many clients.
    spec = scenario.spec.model_copy(update={"clients": len(stay), "noise_name": f"{scenario.spec.noise_name}-{oracle}"})
    cleaned = replace(
        scenario,
        spec=spec,
        owner=sealed(owner),
        given=sealed(given[kept]),
        held_out=sealed(scenario.held_out[kept]),
        told={"noise_rate": 0.0, "noisy_clients": 0.0},
    )
    nothing = sealed(np.zeros(len(stay), dtype=bool)), sealed(np.zeros(len(stay)))
    left = stay[:0] if oracle == "centralised-clean" else stay
    return Cleaned(sealed(kept), sealed(left), cleaned, Truth(sealed(truth.true[kept]), *nothing))
