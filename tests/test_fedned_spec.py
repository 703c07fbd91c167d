"""FedNed against numbers worked out by hand.  Names with spec_ are its specification's facts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from flnoisebench_methods import fedned
from flnoisebench_methods.fedavg import FedAvg
from flnoisebench_methods.fedned import FedNed, Settings, bad_target, entropy, pseudo, shares
from stopping import in_sessions, server_state

from flnoisebench.api import Batch, Rounds, Upload, average, map_tensors
from flnoisebench.engine import Lane, Look
from flnoisebench.executors import Job, perform
from flnoisebench.testing import Tiny, tiny_arrays, tiny_engine, tiny_run, watch_losses

f64 = torch.float64
# everybody over the mean is flagged, and what a real run takes 100 steps for takes 4
BUSY = {"threshold": 1.0, "confidence": 0.4, "distill_steps": 4, "distill_batch": 8, "agreement": 0.0}


pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------------ uncertainty


def test_spec_entropy_in_nats():
    h = entropy(torch.tensor([[0.9, 0.05, 0.05], [0.4, 0.35, 0.25]], dtype=f64))
    assert h.tolist() == pytest.approx([0.394398, 1.080528], abs=5e-7)
    assert h.sum().item() == pytest.approx(1.474925, abs=1e-6)
    assert entropy(torch.tensor([1.0, 0.0])).item() == 0.0


def flagged_of(u: list[float], threshold: float = 1.2) -> list[int]:
    v = shares(u)
    assert v is not None
    return [m for m, share in enumerate(v) if share > threshold / len(u)]


def test_spec_shares_of_ten_uncertainties_and_who_is_flagged():
    u = [50, 55, 60, 52, 58, 100, 54, 51, 120, 56]
    v = shares(u)
    assert sorted(v)[-2:] == pytest.approx([0.1524, 0.1829], abs=5e-5)
    assert flagged_of(u) == [5, 8]
    assert all(share < 0.092 for m, share in enumerate(v) if m not in (5, 8))


def test_spec_ten_uniform_shares_flag_nobody():
    assert shares([3.0] * 10) == pytest.approx([0.1] * 10)
    assert flagged_of([3.0] * 10) == []


def test_spec_threshold_is_relative_and_does_at_twenty_what_12_percent_does_at_ten():
    assert flagged_of([1.0] * 9 + [1.5]) == [9]
    assert flagged_of([1.0] * 19 + [1.5]) == [19]  # an absolute .12 would ask for 2.4 times the mean
    assert shares([1.0] * 19 + [1.5])[-1] < 0.12


@pytest.mark.parametrize("u", [[0.0, 0.0], [1.0, math.nan], [1.0, math.inf]])
def test_uncertainties_that_say_nothing_have_no_shares(u):
    assert shares(u) is None


def linear(width: int, J: int, seed: int = 0) -> torch.nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(width, J)).double()


def a_batch(x, y=None, **fields) -> Batch:
    zero = torch.tensor(0)
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return Batch((x,), y, fields.pop("index", torch.arange(len(x))), zero, zero, **fields)


def test_uncertainty_is_the_entropy_of_the_mean_over_passes_each_image_with_its_own_masks():
    network, x = linear(6, 3).float(), torch.randn(4, 6)
    positions = torch.tensor([2, 3, 7, 9])
    masks = fedned.dropout_masks((5, 4, 6), 0.3, torch.Generator().manual_seed(1))
    assert masks.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    batch = a_batch(x, index=positions, given={"positions": positions, "masks": masks}, frozen={"network": network})
    wanted = [
        entropy(torch.stack([network(x[i] * mask[i][None]) for mask in masks]).softmax(-1).mean(0)) for i in range(4)
    ]
    torch.testing.assert_close(fedned.uncertainty(batch), torch.cat(wanted))
    turned = torch.tensor([3, 0, 2, 1])  # as a pass may present them: masks go with the image, not with its row
    batch = a_batch(x[turned], index=positions[turned], given=batch.given, frozen=batch.frozen)
    torch.testing.assert_close(fedned.uncertainty(batch), torch.cat(wanted)[turned])


# ----------------------------------------------------------------------------------------------- pseudo-labels


def test_spec_confidence_at_temperature_2():
    z = torch.tensor([[12.0, 0, 0], [3.0, 0, 0]], dtype=f64)
    assert (z / 2).softmax(1)[:, 0].tolist() == pytest.approx([0.9951, 0.6914], abs=5e-5)
    assert z[1].softmax(0)[0].item() == pytest.approx(0.9094, abs=5e-5)


@pytest.mark.parametrize(("J", "T", "margin"), [(10, 2, 10.3), (100, 2, 15.1), (10, 1, 5.1), (100, 1, 7.5)])
def test_spec_margin_that_95_percent_asks_for(J, T, margin):
    z = torch.zeros(2, J, dtype=f64)
    z[:, 0] = torch.tensor([margin + 0.06, margin - 0.06])
    value, carry = pseudo(Given(z), pseudo_batch(2, temperature=float(T)))
    assert carry["kept"].item() == 1
    assert value.item() > 0


class Given(torch.nn.Module):
    """Scores that are parameters, whatever the image."""

    def __init__(self, z: torch.Tensor) -> None:
        super().__init__()
        self.z = torch.nn.Parameter(z.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.z


def pseudo_batch(
    n: int, *, temperature: float = 2.0, confidence: float = 0.95, masked: bool = True, frozen=None
) -> Batch:
    given = {
        "temperature": torch.tensor(temperature, dtype=f64),
        "confidence": torch.tensor(confidence, dtype=f64),
        "masked": torch.tensor(masked),
    }
    carry = {"kept": torch.zeros(()), "seen": torch.zeros(())}
    return a_batch(torch.zeros(n, 1), given=given, carry=carry, frozen=frozen or {})


def test_spec_pseudo_loss_masks_each_sample_and_literally_scales_the_mean():
    z = torch.tensor([[12.0, 0, 0], [3.0, 0, 0]], dtype=f64)
    masked, literal = Given(z), Given(z)
    value, carry = pseudo(masked, pseudo_batch(2))
    assert value.item() == pytest.approx(6.14e-6, rel=2e-2)  # fp32: 1.2e-5 is near its resolution at 1
    assert (carry["kept"].item(), carry["seen"].item()) == (1.0, 2.0)
    value.backward()
    assert masked.z.grad[1].abs().max().item() == 0
    value, _ = pseudo(literal, pseudo_batch(2, masked=False))
    assert value.item() == pytest.approx(0.02373, abs=5e-6)
    value.backward()
    assert literal.z.grad[1].abs().max().item() > 0.01


def test_a_confidence_of_exactly_the_least_is_enough():
    for confidence, kept in ((0.5, 1.0), (0.5000001, 0.0)):
        _, carry = pseudo(Given(torch.zeros(1, 2)), pseudo_batch(1, confidence=confidence))
        assert carry["kept"].item() == kept


def test_labels_come_from_the_labeller_where_there_is_one_and_it_has_no_gradient():
    own, other = Given(torch.tensor([[12.0, 0, 0]])), Given(torch.tensor([[0.0, 0, 14.0]]))
    value, _ = pseudo(own, pseudo_batch(1, frozen={"labeller": other.requires_grad_(False)}))
    assert value.item() == pytest.approx(12.0, abs=1e-3)  # class 2 by the labeller, where the network says 0
    value.backward()
    assert own.z.grad[0, 2].item() == pytest.approx(-1.0, abs=1e-3)


# ------------------------------------------------------------------------------------------ negative distillation

TEACHER, STUDENT = torch.tensor([4.0, 2, -1], dtype=f64), torch.tensor([[1.0, 0, 0]], dtype=f64)


def kl(student: torch.nn.Module, target: torch.Tensor, T: float = 2.0) -> torch.Tensor:
    given = {"temperature": torch.tensor(T, dtype=f64)}
    return fedned.divergence(student, a_batch(torch.zeros(len(target), 1), y=target, given=given))


def test_spec_reciprocal_scores_keep_the_lowest_class_lowest_and_negated_ones_invert():
    assert bad_target(TEACHER, "reciprocal", 2.0, 0.1).tolist() == pytest.approx([0.3890, 0.4995, 0.1115], abs=5e-5)
    assert bad_target(TEACHER, "negated", 1.0, 0.1).tolist() == pytest.approx([0.0064, 0.0471, 0.9465], abs=5e-5)


def test_spec_a_score_near_zero_takes_the_whole_target_unless_it_is_clamped():
    z = torch.tensor([5.0, 0.01, -3.0])
    assert bad_target(z, "reciprocal", 2.0, 1e-9).tolist() == pytest.approx([4.5e-44, 1, 2.7e-44], rel=0.02)
    assert bad_target(z, "reciprocal", 2.0, 0.1).tolist() == pytest.approx(
        torch.tensor([1 / 5, 10, -1 / 3]).softmax(0).tolist()
    )
    for zero in (0.0, -0.0):
        assert bad_target(torch.tensor([zero, 1.0]), "reciprocal", 2.0, 0.1).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "T", "value"),
    [("reciprocal_over_t", 2.0, -0.27592), ("reciprocal", 2.0, 0.14131), ("negated", 1.0, 1.06295)],
)
def test_spec_divergence_of_the_three_targets(kind, T, value):
    target = bad_target(TEACHER, kind, T, 0.1)[None]
    assert kl(Given(STUDENT), target).item() == pytest.approx(value, abs=5e-6)


def test_spec_a_target_over_t_has_the_proper_gradient_over_t():
    gradients = {}
    for kind in ("reciprocal", "reciprocal_over_t"):
        student = Given(STUDENT)
        kl(student, bad_target(TEACHER, kind, 2.0, 0.1)[None]).backward()
        gradients[kind] = student.z.grad
    assert gradients["reciprocal"].abs().max().item() > 0.05
    torch.testing.assert_close(gradients["reciprocal_over_t"], gradients["reciprocal"] / 2)


def test_mean_over_teachers_has_the_gradient_of_the_mean_target():
    targets = torch.randn(3, 5, 4, dtype=f64).softmax(-1)
    one, all_of_them = (Given(torch.arange(20, dtype=f64).reshape(5, 4).sin()) for _ in range(2))
    kl(one, targets.mean(0)).backward()
    (sum(kl(all_of_them, target) for target in targets) / 3).backward()
    torch.testing.assert_close(one.z.grad, all_of_them.z.grad)


def test_public_images_leave_no_statistics_in_batchnorm():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    batch = a_batch(5 + torch.randn(8, 4), y=torch.full((8, 3), 1 / 3), given={"temperature": torch.tensor(2.0)})
    fedned.divergence(network, batch).backward()
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert network[2].weight.grad.abs().max().item() > 0


# ------------------------------------------------------------------------------------------------- the server


def engine(look: Look | None = None, **settings):
    method = FedNed(Settings(**{"distill_steps": 3, "distill_batch": 8, "agreement": 0.0, **settings}))
    return tiny_engine(method, clients=4, arrays=tiny_arrays(public=20), look=look, rounds=10)


@pytest.fixture(scope="module")
def models():
    """w; two certain models a and b; and u, which knows nothing."""
    eng = engine()
    w = eng.method.init(Lane(eng).server(0, 0, "init"))["weights"]
    a = map_tensors(lambda t: 20 * t, w)
    b = map_tensors(lambda t: -20 * t, w)
    return {"w": w, "a": a, "b": b, "u": map_tensors(torch.zeros_like, w), "c": map_tensors(lambda t: 15 * t, w)}


def listen(eng, state, *uploads, round=5):
    """(next state, server) of an aggregation; uploads are (client, size, content)."""
    server = Lane(eng).server(round, 0, "aggregate")
    return eng.method.aggregate(state, [Upload(*upload) for upload in uploads], server), server


def three(models, sizes=(10, 30, 40)):
    return [(m, size, {"weights": models[name]}) for m, (size, name) in enumerate(zip(sizes, "abu", strict=True))]


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_spec_average_of_the_good_by_size_and_the_bad_with_weight_0(models):
    eng, state = engine(mode="code_literal"), {"weights": models["w"], "flagged": []}
    new, server = listen(eng, state, *three(models))
    assert new["flagged"] == server.notes["over"] == server.noisy_clients == [2]
    for name, value in new["weights"].items():
        torch.testing.assert_close(value, (10 * models["a"][name] + 30 * models["b"][name]) / 40)


def test_spec_distillation_is_live_with_a_teacher_and_nothing_without(models):
    state = {"weights": models["w"], "flagged": []}
    eng = engine(distill_steps=1)
    good = average([models["a"], models["b"]], [10, 30])
    new, server = listen(eng, state, *three(models))
    assert server.notes["teachers"] == [2]
    assert not same(new["weights"], good)
    new, server = listen(eng, state, *three(models)[:2])
    assert server.notes["teachers"] == new["flagged"] == []
    assert same(new["weights"], good)
    new, _ = listen(engine(mode="code_literal"), state, *three(models))
    assert same(new["weights"], good)


def test_teachers_are_given_label_models_of_all_flagged_in_the_cohort_and_a_good_second_model_is_averaged(models):
    # client 1 was flagged before, and its second model is certain; client 3 was flagged, and is not in the cohort
    state = {"weights": models["w"], "flagged": [3, 1]}
    uploads = three(models)
    uploads[1] = (1, 30, {"weights": models["b"], "noisy": models["c"]})
    new, server = listen(engine(distill_steps=0), state, *uploads)
    assert new["flagged"] == [3, 1, 2]
    assert sorted(server.noisy_clients) == [1, 2, 3]
    assert server.notes["over"] == [2]
    assert same(new["weights"], average([models["a"], models["b"]], [10, 30]))
    _, server = listen(engine(), state, *uploads)
    assert server.notes["teachers"] == [1, 2]


def test_student_moves_towards_the_mean_bad_target(models):
    """Against a plain loop over the definition, teachers one by one."""
    eng = engine(distill_steps=40, distill_batch=20, distill_lr=1e-3)
    state, uploads = {"weights": models["w"], "flagged": [0, 2]}, three(models)
    uploads[0] = (0, 10, {"weights": models["c"], "noisy": models["a"]})
    uploads[1] = (1, 30, {"weights": models["c"]})
    new, server = listen(eng, state, *uploads)
    assert server.notes["teachers"] == [0, 2]
    assert server.notes["over"] == [2]  # so the average, where the student starts, is c
    network, reader = Lane(eng).server(0, 0, "x").model(models["c"]), Lane(eng).server(0, 0, "x").model(frozen=True)
    x = eng.public.plain(torch.arange(20))
    targets = []
    for name in "au":
        reader.load_state_dict(models[name])
        targets.append(bad_target(reader(x), "reciprocal", 2.0, 0.1))
    adam = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(40):
        log_p = (network(x) / 2).log_softmax(1)
        loss = sum(F.kl_div(log_p, target, reduction="batchmean") for target in targets) / 2
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert not same(new["weights"], models["c"])
    for name, value in network.state_dict().items():
        torch.testing.assert_close(new["weights"][name], value, rtol=1e-3, atol=1e-5)


def test_a_push_that_changes_too_many_predictions_is_dropped(models):
    state, good = {"weights": models["w"], "flagged": []}, average([models["a"], models["b"]], [10, 30])
    for agreement, dropped in ((0.9, True), (0.0, False)):
        new, server = listen(engine(distill_lr=1.0, distill_steps=20, agreement=agreement), state, *three(models))
        assert server.notes["agreement"] < 0.9
        assert server.notes["dropped"] == same(new["weights"], good) == dropped


def test_a_push_that_leaves_exactly_the_least_agreement_is_kept(models):
    state, good = {"weights": models["w"], "flagged": []}, average([models["a"], models["b"]], [10, 30])
    new, server = listen(engine(distill_lr=1e-6, agreement=1.0), state, *three(models))
    assert (server.notes["agreement"], server.notes["dropped"]) == (1.0, False)
    assert not same(new["weights"], good)


def test_with_no_good_client_the_global_model_stays(models):
    state, uploads = {"weights": models["w"], "flagged": []}, [(m, 5, {"weights": models["u"]}) for m in (0, 1)]
    new, server = listen(engine(threshold=0.5, mode="code_literal"), state, *uploads)
    assert server.notes["no_good_client"]
    assert new["flagged"] == [0, 1]
    assert same(new["weights"], models["w"])


def test_undecidable_uncertainties_are_noted_and_flag_nobody_new(models, monkeypatch):
    for u, threshold in (([0.0, 0.0, 0.0], 1.2), ([1.0, math.nan, 1.0], 1.2), ([0.0, 0.0, 0.0], 0.5)):
        monkeypatch.setattr(FedNed, "_uncertainties", lambda *_, u=u: u)
        eng = engine(mode="code_literal", threshold=threshold)
        new, server = listen(eng, {"weights": models["w"], "flagged": [3]}, *three(models))
        assert "uncertainties" in server.notes["undecided"]
        assert new["flagged"] == [3]
        assert same(new["weights"], average([models["a"], models["b"], models["u"]], [10, 30, 40]))


def test_a_share_of_exactly_the_threshold_is_good(models, monkeypatch):
    monkeypatch.setattr(FedNed, "_uncertainties", lambda *_: [1.0] * 4)
    uploads = [(m, 5 + m, {"weights": models["c"]}) for m in range(4)]
    new, server = listen(engine(mode="code_literal", threshold=1.0), {"weights": models["w"], "flagged": []}, *uploads)
    assert (new["flagged"], server.notes["over"]) == ([], [])
    assert "no_good_client" not in server.notes


def watched(eng, name, state, uploads, round, monkeypatch):
    """(what the server's ``name`` was called with, its notes)."""
    server, calls = Lane(eng).server(round, 0, "aggregate"), []
    real = getattr(server, name)
    monkeypatch.setattr(server, name, lambda *given, **named: calls.append(named) or real(*given, **named))
    eng.method.aggregate(state, [Upload(*upload) for upload in uploads], server)
    return calls, server.notes


def test_scoring_takes_random_images_and_drops_features_at_the_set_rate_the_same_for_all(models, monkeypatch):
    eng, state, drawn = engine(mode="code_literal", score_images=7), {"weights": models["w"], "flagged": []}, []
    for round in (5, 6):
        calls, _ = watched(eng, "apply", state, three(models), round, monkeypatch)
        assert len(calls) == 3
        assert all(call["subset"].equal(calls[0]["subset"]) for call in calls)
        masks = calls[0]["given"]["masks"]
        assert all(call["given"]["masks"] is masks for call in calls)
        assert masks.shape[:2] == (10, 7)
        assert (masks == 0).double().mean().item() == pytest.approx(0.3, abs=0.02)  # of 8,960
        drawn.append(calls[0]["subset"].tolist())
    assert all(len(set(positions)) == 7 for positions in drawn)
    assert drawn[0] != drawn[1]


def test_distillation_sees_as_many_images_as_its_steps_take(models, monkeypatch):
    eng = engine(distill_steps=2, distill_batch=4)
    (call,), _ = watched(eng, "fit", {"weights": models["w"], "flagged": []}, three(models), 5, monkeypatch)
    assert len(set(call["subset"].tolist())) == 8
    assert (call["steps"], call["batch"]) == (2, 4)


@pytest.mark.parametrize(("view", "views"), [("plain", 0), ("train", 1)])
def test_public_view_is_that_of_teachers_and_student_and_not_of_the_agreement(view, views, models, monkeypatch):
    eng, state = engine(public_view=view), {"weights": models["w"], "flagged": []}
    (call,), _ = watched(eng, "fit", state, three(models), 5, monkeypatch)
    assert call["views"] == views
    calls, _ = watched(eng, "apply", state, three(models), 5, monkeypatch)
    assert [call.get("view", "plain") for call in calls] == ["plain"] * 3 + [view, "plain", "plain"]


def test_the_noted_loss_of_distillation_is_the_divergence_from_the_mean_target(models, monkeypatch):
    eng, state = engine(distill_steps=1, distill_batch=20), {"weights": models["w"], "flagged": [0, 2]}
    uploads = three(models)
    uploads[0] = (0, 10, {"weights": models["c"], "noisy": models["a"]})
    uploads[1] = (1, 30, {"weights": models["c"]})
    _, notes = watched(eng, "fit", state, uploads, 5, monkeypatch)
    assert notes["teachers"] == [0, 2]
    reader, x = Lane(eng).server(0, 0, "x").model(frozen=True), eng.public.plain(torch.arange(20))
    scores = {}
    for name in "acu":
        reader.load_state_dict(models[name])
        scores[name] = reader(x).clone()
    target = sum(bad_target(scores[name], "reciprocal", 2.0, 0.1) for name in "au") / 2
    wanted = F.kl_div((scores["c"] / 2).log_softmax(1), target, reduction="batchmean").item()
    assert notes["distillation_loss"] == pytest.approx(wanted, rel=1e-4)


def test_a_cohort_of_one_is_never_flagged(models):
    new, server = listen(engine(), {"weights": models["w"], "flagged": []}, (2, 5, {"weights": models["u"]}))
    assert (new["flagged"], server.notes["shares"]) == ([], [1.0])
    assert same(new["weights"], models["u"])


def test_equal_models_have_equal_shares_since_masks_and_images_are_the_same(models):
    _, server = listen(
        engine(), {"weights": models["w"], "flagged": []}, *[(m, 5, {"weights": models["c"]}) for m in (0, 1, 3)]
    )
    assert server.notes["shares"] == [server.notes["shares"][0]] * 3


@pytest.mark.parametrize(("rounds", "warm"), [(1, 0), (3, 1), (20, 4), (50, 10), (100, 10), (500, 10)])
def test_warm_up_is_ten_rounds_and_at_most_a_fifth(rounds, warm, models):
    assert FedNed()._warm(rounds) == warm


def test_in_warm_up_nobody_is_scored(models):
    for round, scored in ((1, False), (2, True)):  # 2 of 10 rounds
        new, server = listen(engine(), {"weights": models["w"], "flagged": []}, *three(models), round=round)
        assert ("shares" in server.notes) == scored
        assert same(new["weights"], average([models[name] for name in "abu"], [10, 30, 40])) == (not scored)


def test_a_warm_up_that_fills_the_run_and_a_data_set_without_public_images_are_refused():
    eng = engine(warm=Rounds(10), warm_most=Rounds(1.0))
    with pytest.raises(ValueError, match="warm-up of 10 rounds fills the run of 10"):
        eng.method.init(Lane(eng).server(0, 0, "init"))
    bare = tiny_engine(FedNed(), clients=4)
    with pytest.raises(ValueError, match="brings none"):
        bare.method.init(Lane(bare).server(0, 0, "init"))


def test_tensors_that_stay_in_place_as_on_a_gpu_give_the_same_bits(models):
    found = []
    for static in (False, True):
        eng = engine()
        eng.static = static
        found.append(listen(eng, {"weights": models["w"], "flagged": []}, *three(models)))
    (first, one), (second, two) = found
    assert one.notes["teachers"] == two.notes["teachers"] == [2]
    assert one.notes["shares"] == pytest.approx(two.notes["shares"], rel=1e-6)
    assert same(first["weights"], second["weights"])


def test_public_view_train_augments(models):
    state, found = {"weights": models["w"], "flagged": []}, []
    for view in ("plain", "train"):
        eng = engine(Look(Tiny.mean, Tiny.std, crop_padding=2, flip=True), public_view=view)
        found.append(listen(eng, state, *three(models))[0]["weights"])
    assert not same(*found)


# ------------------------------------------------------------------------------------------------- the client


def train(eng, models, flagged, client=0, round=5, w="w"):
    job = Job(client, "train", {"weights": models[w], "flagged": flagged}, None, False, round, 0)
    return perform(Lane(eng), job).reply


def test_a_flagged_client_trains_its_given_labels_as_before_and_a_second_model(models):
    plain, both = train(engine(), models, False), train(engine(confidence=0.4), models, True, w="c")
    assert set(plain.upload) == {"weights"}
    assert set(both.upload) == {"weights", "noisy"}
    assert same(train(engine(), models, False, w="c").upload["weights"], both.upload["noisy"])
    assert not same(both.upload["weights"], both.upload["noisy"])
    assert not same(both.upload["weights"], models["c"])
    assert 0 < both.metrics["pseudo_kept"] <= 1
    assert "pseudo_kept" not in plain.metrics


def test_no_confident_sample_leaves_the_second_model_where_it_was(models):
    reply = train(engine(confidence=1.0, temperature=50.0), models, True)
    assert (reply.metrics["pseudo_kept"], reply.metrics["pseudo_loss"]) == (0.0, 0.0)
    assert same(reply.upload["weights"], models["w"])  # the tiny protocol has no weight decay


def test_the_model_in_training_gives_other_pseudo_labels_than_the_received_one(models):
    received, own = (
        train(engine(confidence=0.6, labeller=labeller), models, True, w="c") for labeller in ("received", "own")
    )
    assert not same(received.upload["weights"], own.upload["weights"])
    assert same(received.upload["noisy"], own.upload["noisy"])


def test_code_literal_uploads_one_model_that_saw_pseudo_labels_and_then_the_given_ones(models):
    eng = engine(mode="code_literal", confidence=0.4)
    both = train(eng, models, True, w="c")
    assert set(both.upload) == {"weights"}
    side = Lane(eng).client(0, None, 5, 0)
    network = side.model(models["c"])
    eng.method._pseudo(network, models["c"], side)
    between = map_tensors(torch.clone, network.state_dict())
    side.fit(network, fedned.cross_entropy, labels=side.labels)
    assert same(dict(network.state_dict()), both.upload["weights"])
    assert not same(dict(between), both.upload["weights"])
    assert not same(train(eng, models, False, w="c").upload["weights"], both.upload["weights"])


@pytest.mark.parametrize("positions", [[[0], [1], [2], [3]], [[0, 3, 6], [1], [2], [4, 5]]])
@pytest.mark.parametrize("mode", ["intended", "code_literal"])
def test_a_client_with_one_sample_or_one_class_replies(mode, positions, models):
    method = FedNed(Settings(mode=mode, confidence=0.0))
    eng = tiny_engine(method, clients=4, arrays=tiny_arrays(public=20), positions=positions, local_epochs=2)
    reply = train(eng, models, True)
    assert reply.metrics["pseudo_kept"] == 1.0  # a share of the samples of all epochs
    assert all(value.isfinite().all() for part in reply.upload.values() for value in part.values())


# -------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """run(changes..., protocol...) -> (result, records, run), remembered."""
    from flnoisebench.records import load_records

    known = {}

    def go(settings=None, **options):
        key = repr((settings, options))
        if key not in known:
            run = tiny_run(
                FedNed,
                tmp_path_factory.mktemp("run"),
                settings={**BUSY, **(settings or {})},
                clients=6,
                rounds=4,
                participation=0.5,
                **options,
            )
            result = run.execute()
            known[key] = result, load_records(run.folder), run
        return known[key]

    return go


def test_whom_the_protocol_asks_is_scored_and_flags_only_grow(busy):
    result, rounds, _ = busy()
    assert result.status == "complete"
    assert "shares" not in rounds[0].notes
    before: list[int] = []
    for record in rounds[1:]:
        assert len(record.notes["shares"]) == 3
        assert record.notes["flagged"][: len(before)] == before
        before = record.notes["flagged"]
    assert len(before) >= 2
    assert rounds[-1].diagnostics["flagged"] == len(before)


def test_losses_can_be_recorded_and_replayed(tmp_path, busy):
    for settings in ({}, {"mode": "code_literal", "labeller": "own"}):
        with watch_losses() as seen:
            digest = (
                tiny_run(
                    FedNed,
                    tmp_path / repr(settings),
                    settings={**BUSY, **settings},
                    clients=6,
                    rounds=4,
                    participation=0.5,
                )
                .execute()
                .digest
            )
        assert digest == busy(settings or None)[0].digest
        assert seen["pseudo"] > 0
        assert (seen["divergence"] > 0) == (settings.get("mode") != "code_literal")


def test_stopped_after_any_commit_it_resumes_to_the_same_digest(busy, tmp_path):
    result, stops = in_sessions(
        lambda: tiny_run(FedNed, tmp_path, settings=BUSY, clients=6, rounds=4, participation=0.5).execute()
    )
    assert stops == 5
    assert result.digest == busy()[0].digest


def test_threads_give_the_serial_digest(busy):
    assert busy(None, executor="threads", lanes=3)[0].digest == busy()[0].digest


def test_with_nobody_flagged_it_is_fedavg_under_the_same_budget(busy, tmp_path):
    _, rounds, run = busy({"threshold": 100.0})
    plain = tiny_run(FedAvg, tmp_path, clients=6, rounds=4, participation=0.5)
    plain.execute()
    assert rounds[-1].notes["flagged"] == []
    assert same(server_state(run)["weights"], server_state(plain))
    assert not same(server_state(busy()[2])["weights"], server_state(plain))


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "code_literal"}, {"temperature": 1.0}, {"confidence": 0.8}, {"clamp": 1.0},
        {"neg_target": "negated"}, {"neg_target": "reciprocal_over_t"}, {"distill_steps": 0}, {"distill_batch": 5},
        {"distill_lr": 1e-3}, {"distill_weight_decay": 0.1}, {"agreement": 1.0, "distill_lr": 1.0}, {"threshold": 1.5},
        {"warm": 0}, {"warm_most": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_each_setting_changes_the_run(change, busy):
    assert busy(change)[0].digest != busy()[0].digest


@pytest.mark.parametrize("change", [{"dropout": 0.6}, {"passes": 3}, {"score_images": 7}], ids=str)
def test_each_setting_of_scoring_changes_the_shares(change, busy):
    assert busy(change)[1][1].notes["shares"] != busy()[1][1].notes["shares"]


def test_defaults_are_the_specification_s():
    wanted = Settings(
        mode="intended", warm=10, warm_most=0.2, threshold=1.2, dropout=0.3, passes=10, score_images=128,
        labeller="received", temperature=2.0, confidence=0.95, neg_target="reciprocal", clamp=0.1, distill_steps=100,
        distill_batch=128, distill_lr=1e-4, distill_weight_decay=0.0, agreement=0.9, public_view="plain",
    )  # fmt: skip
    assert Settings().model_dump() == wanted.model_dump()
    assert wanted.model_fields_set == set(Settings.model_fields)  # none is left to its own default


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "literal"}, {"threshold": 0}, {"clamp": 0}, {"dropout": 1}, {"passes": 0}, {"participation": 0.5},
        {"temperature": 0}, {"confidence": 2}, {"lambda": 0.12},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Settings(**bad)


def test_own_budget_trains_as_many_images_as_the_standard_one():
    # (data set, rounds of one epoch of everybody): 10 epochs of half of the clients are five of those
    for dataset, rounds in (
        ("cifar10", 500),
        ("cifar100", 500),
        ("clothing1m", 50),
        ("fashion-mnist", 50),
        ("digits", 100),
    ):
        for preset in FedNed.presets.values():
            _, protocol = preset.on(dataset)
            assert protocol["rounds"] * protocol["local_epochs"] * protocol["participation"] == rounds
    assert next(iter(FedNed.presets)) == "intended"
    assert Settings(**FedNed.presets["code-literal"].settings).mode == "code_literal"
