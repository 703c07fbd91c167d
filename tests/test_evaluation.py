"""The evaluator by hand and against scikit-learn: accuracies, calibration, detection, relabelling."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn import metrics

from flnoisebench.engine import DeviceImages, Look
from flnoisebench.evaluation import Judge, calibration_error, measure, prediction_digest, scores_of


def scores(n=300, classes=7, seed=0, absent=()):
    rng = np.random.default_rng(seed)
    labels = rng.choice([j for j in range(classes) if j not in absent], n)
    array = rng.normal(size=(n, classes)).astype(np.float32)
    array[np.arange(n), labels] += 1.0
    return array, labels


def percent(x):
    return pytest.approx(100 * x, abs=1e-3)


def test_accuracy_balanced_accuracy_f1_and_recall_are_scikit_learns():
    array, labels = scores()
    found, predicted = measure({"main": array}, labels), array.argmax(1)
    assert found["accuracy"] == percent(metrics.accuracy_score(labels, predicted))
    assert found["balanced_accuracy"] == percent(metrics.balanced_accuracy_score(labels, predicted))
    assert found["macro_f1"] == percent(metrics.f1_score(labels, predicted, average="macro"))
    assert found["recall"] == [percent(r) for r in metrics.recall_score(labels, predicted, average=None)]


def test_a_class_that_is_not_in_the_test_set_has_no_recall_and_is_in_no_mean():
    array, labels = scores(absent=(2, 6))
    found, predicted = measure({"main": array}, labels), array.argmax(1)
    assert {2, 6} <= set(predicted)  # though it is predicted at times
    present = [0, 1, 3, 4, 5]
    recalls = metrics.recall_score(labels, predicted, average=None, labels=present)
    assert found["recall"][2] is None
    assert found["recall"][6] is None
    assert [found["recall"][j] for j in present] == [percent(r) for r in recalls]
    assert found["balanced_accuracy"] == percent(recalls.mean())
    assert found["macro_f1"] == percent(metrics.f1_score(labels, predicted, average="macro", labels=present))


def test_measures_by_hand_on_four_samples():
    array = np.array([[3.0, 0], [0, 1], [2, 0], [0, 5]], dtype=np.float32)  # predicted 0, 1, 0, 1
    found = measure({"main": array}, np.array([0, 0, 0, 1]))
    assert found["accuracy"] == 75
    assert found["recall"] == [percent(2 / 3), 100]
    assert found["balanced_accuracy"] == percent((2 / 3 + 1) / 2)
    assert found["macro_f1"] == percent((0.8 + 2 / 3) / 2)  # precision 1 and 1/2


def test_calibration_error_by_hand():
    def with_confidence(p):  # two classes, class 0 predicted with probability p
        return [np.log(p), np.log(1 - p)]

    # bins of a fifteenth: .9 and .91 in the 14th; .61 and .66 in the 10th, [.6, .667); .67 in the 11th; .53 in the 8th
    array = np.array([with_confidence(p) for p in (0.9, 0.91, 0.61, 0.66, 0.67, 0.53)])
    labels = np.array([0, 1, 0, 0, 1, 1])  # right, wrong, right, right, wrong, wrong
    by_hand = (2 * abs(0.5 - 0.905) + 2 * abs(1 - 0.635) + 0.67 + 0.53) / 6
    assert calibration_error(array, labels) == pytest.approx(by_hand, abs=1e-9)


def test_calibration_error_of_certainty_is_the_error_rate_and_shifts_of_scores_do_not_matter():
    sure = np.array([[1000.0, 0], [1000, 0], [0, 1000], [0, 1000]])
    assert calibration_error(sure, np.array([0, 1, 1, 1])) == pytest.approx(0.25)
    # of two in the last bin, one certain and wrong, one right: certainty has no bin of its own
    nearly = np.array([[1000.0, 0], [np.log(0.95), np.log(0.05)]])
    assert calibration_error(nearly, np.array([1, 0])) == pytest.approx(0.975 - 0.5)
    array, labels = scores()
    assert calibration_error(array.astype(np.float64) + 1e5, labels) == pytest.approx(
        calibration_error(array.astype(np.float64), labels), abs=1e-6
    )


def test_infinite_scores_are_calibrated_as_their_limit():
    inf = np.inf
    # certain and right; certain and wrong; two of three equally sure, one of them right; nothing said at all
    array = np.array([[inf, 0, 0], [0, inf, 0], [inf, inf, 0], [-inf, -inf, -inf]], dtype=np.float32)
    by_hand = (2 * abs(0.5 - 1) + abs(1 - 1 / 2) + abs(0 - 1 / 3)) / 4
    assert calibration_error(array, np.array([0, 0, 0, 2])) == pytest.approx(by_hand)


def test_without_a_main_predictor_there_is_no_accuracy_but_the_others_have_theirs():
    array, labels = scores()
    found = measure({"second": array}, labels)
    assert found["accuracy"] is None
    assert found["recall"] is None
    assert found["predictors"] == {"second": percent((array.argmax(1) == labels).mean())}
    assert measure({}, labels)["predictors"] == {}


def test_infinite_scores_rank_and_nan_scores_are_refused():
    images = DeviceImages(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.arange(4), Look((0.0,), (1.0,)))
    found = scores_of({"main": lambda x: torch.tensor([[0.0, -torch.inf]]).expand(len(x), 2)}, images, 2)
    assert found["main"].argmax(1).tolist() == [0] * 4
    measured = measure(found, np.array([0, 0, 1, 1]))
    assert measured["accuracy"] == 50
    assert measured["calibration_error"] == 50
    with pytest.raises(FloatingPointError, match="predictor 'main' returned NaN scores"):
        scores_of({"main": lambda x: torch.full((len(x), 2), torch.nan)}, images, 2)


def test_scores_of_another_shape_are_refused_and_the_predictor_named():
    images = DeviceImages(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.arange(4), Look((0.0,), (1.0,)))
    with pytest.raises(ValueError, match=r"predictor 'odd' returned scores \[4, 3\], not \[4, 2\]"):
        scores_of({"main": lambda x: torch.zeros(len(x), 2), "odd": lambda x: torch.zeros(len(x), 3)}, images, 2)


@pytest.mark.parametrize(("side", "most"), [(8, 1000), (28, 128)])
def test_all_test_images_are_scored_once_in_their_order_without_gradient(side, most):
    pixels = (torch.arange(2500) % 251).to(torch.uint8).reshape(-1, 1, 1, 1).expand(2500, 1, side, side)
    images = DeviceImages(pixels, torch.arange(2500), Look((0.0,), (1.0,)))
    weight, sizes = torch.ones(1, requires_grad=True), []
    found = scores_of({"main": lambda x: sizes.append(len(x)) or weight * x.flatten(1)[:, :2]}, images, 2)["main"]
    assert found.shape == (2500, 2)
    assert (max(sizes), sum(sizes)) == (most, 2500)
    np.testing.assert_allclose(found[:, 0], (np.arange(2500) % 251) / 255, rtol=1e-6)


def test_a_prediction_digest_is_over_predicted_classes_of_all_predictors():
    array, _ = scores()
    base = prediction_digest({"main": array})
    assert prediction_digest({"main": array * 2}) == base
    other = array.copy()
    other[0] = -other[0]
    assert prediction_digest({"main": other}) != base
    assert prediction_digest({"main": array, "second": array}) != base
    assert prediction_digest({"main": array, "a": other}) == prediction_digest({"a": other, "main": array})
    assert prediction_digest({"main": array, "a": other}) != prediction_digest({"main": other, "a": array})
    assert prediction_digest({"second": array}) != base


# ----------------------------------------------------------------------------------------- claims and the truth


def judge(true, given, noisy=(True, False, False), owner=None):
    owner = np.arange(len(given)) // (len(given) // len(noisy)) if owner is None else owner
    scene = SimpleNamespace(
        given=np.array(given),
        spec=SimpleNamespace(clients=len(noisy)),
        positions=lambda client: np.flatnonzero(owner == client),
    )
    truth = SimpleNamespace(true=None if true is None else np.array(true), noisy=np.array(noisy))
    return Judge(scene, truth)


TRUE = [0, 1, 2, 0, 1, 2]
GIVEN = [1, 1, 2, 0, 2, 2]  # client 0 holds samples 0 and 1, ...; wrong: samples 0 and 4


def test_label_noise_counts_the_wrong_labels_that_are_now_trained_on():
    found = judge(TRUE, GIVEN)
    assert found.noise_before() == percent(2 / 6)
    assert found.noise({0: {"labels": torch.tensor([0, 1])}}) == percent(1 / 6)
    assert found.noise({0: {"labels": torch.tensor([0, 1])}, 2: {"labels": torch.tensor([1, 0])}}) == percent(1 / 6)
    assert found.noise({1: {"labels": torch.tensor([1, 1])}}) == percent(4 / 6)
    assert found.noise({0: {"clean": torch.ones(2)}}) == percent(2 / 6)  # a client that says nothing about labels


def test_detection_of_clients_by_hand_and_the_servers_word_goes_before_the_clients_own():
    found = judge(TRUE, GIVEN, noisy=(True, False, True))
    own = {0: {"noisy": True}, 1: {"noisy": True}, 2: {"noisy": False}}
    judged = found.judge(own, None)
    assert judged == {"clients_precision": 50, "clients_recall": 50}
    assert found.judge(own, [0, 2]) == {"clients_precision": 100, "clients_recall": 100}
    assert found.judge(own, []) == {"clients_recall": 0}  # precision of no claim is no number
    assert found.judge({}, None) == {}
    assert judge(TRUE, GIVEN, noisy=(False, False, False)).judge({}, [1]) == {"clients_precision": 0}


def test_detection_of_samples_by_hand_and_its_auc_is_scikit_learns():
    clean = {0: torch.tensor([0.1, 0.4]), 2: torch.tensor([0.7, 0.9])}  # wrong: the first of each
    judged = judge(TRUE, GIVEN).judge({i: {"clean": value} for i, value in clean.items()}, None)
    assert judged["samples_precision"] == 50  # suspects are both of client 0; one is wrong
    assert judged["samples_recall"] == 50
    assert judged["samples_auc"] == percent(metrics.roc_auc_score([1, 0, 1, 0], [-0.1, -0.4, -0.7, -0.9]))
    assert judged["samples_auc"] == 75


def test_samples_of_clients_without_a_claim_do_not_count():
    for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16):  # the last of a pass in that precision
        claimed = torch.tensor([0.2, 0.8], dtype=kind)
        judged = judge(TRUE, GIVEN).judge({1: {"clean": claimed}}, None)
        assert judged == {"samples_precision": 0}  # its labels are right: nothing to recall, no area


def test_even_odds_are_no_suspicion_and_wrong_labels_alone_have_no_area():
    judged = judge([0, 1], [1, 0], noisy=(True,)).judge({0: {"clean": torch.tensor([0.49, 0.5])}}, None)
    assert judged == {"samples_precision": 100, "samples_recall": 50}


def test_wrong_labels_that_stay_as_they_are_count_against_the_recall():
    claims = {
        0: {"labels": torch.tensor([1, 2])},  # leaves sample 0 wrong, spoils sample 1
        2: {"labels": torch.tensor([1, 2])},  # mends sample 4
    }
    judged = judge(TRUE, GIVEN).judge(claims, None)
    assert judged == {"relabel_precision": 50, "relabel_recall": 50, "relabel_harm": 50}


def test_relabelling_by_hand():
    claims = {
        0: {"labels": torch.tensor([0, 2])},  # mends sample 0, spoils sample 1
        1: {"labels": torch.tensor([2, 0])},  # given 2 and 0, as claimed: no change
        2: {"labels": torch.tensor([0, 2])},  # given 2, 2, true 1, 2: changes sample 4, and still wrong
    }
    judged = judge(TRUE, GIVEN).judge(claims, None)
    assert judged == {
        "relabel_precision": percent(1 / 3),  # samples 0, 1 and 4 moved; only 0 is right now
        "relabel_recall": 50,  # wrong were 0 and 4; mended is 0
        "relabel_harm": 25,  # right were 1, 2, 3, 5; spoilt is 1
    }


def test_who_claims_labels_but_changes_none_is_not_called_precise():
    assert judge(TRUE, GIVEN).judge({0: {"labels": torch.tensor([1, 1])}}, None) == {}


def test_without_truth_nothing_is_judged():
    found = judge(None, GIVEN)
    assert found.noise_before() is None
    assert found.judge({0: {"labels": torch.tensor([0, 1]), "noisy": True}}, [0]) == {}
