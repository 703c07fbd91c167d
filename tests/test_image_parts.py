"""Images that do not fit on the device: read part by part, cropped by index arithmetic, with the bits of the others."""

import time

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF  # noqa: N812
from fixture_methods import Averaging

from flnoisebench.api import cross_entropy, weights
from flnoisebench.engine import DeviceImages, Engine, Lane, Look
from flnoisebench.engine.batches import draw_looks
from flnoisebench.testing import tiny_protocol

PIXELS = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (40, 3, 16, 16), dtype=np.uint8))
ROWS = torch.tensor([3, 39, 7, 7, 0, 21, 5])
LOOK = Look((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), flip=True, crop=12)


def normalised(images: torch.Tensor) -> torch.Tensor:
    return (images.float() / 255 - torch.tensor(LOOK.mean).view(3, 1, 1)) / torch.tensor(LOOK.std).view(3, 1, 1)


def test_the_plain_view_is_the_middle_as_torchvision_cuts_it():
    found = DeviceImages(PIXELS, ROWS, LOOK).plain(torch.tensor([1, 0]))
    torch.testing.assert_close(found, normalised(TF.center_crop(PIXELS[[39, 3]], [12, 12])))


def test_a_training_crop_is_the_square_at_its_offset_and_its_mirror():
    images = DeviceImages(PIXELS, ROWS, LOOK)
    offset, flip = torch.tensor([[0, 4], [2, 3]]), torch.tensor([False, True])
    found = images.augmented(torch.tensor([0, 1]), offset, flip)
    torch.testing.assert_close(found[0], normalised(PIXELS[3, :, 0:12, 4:16]))
    torch.testing.assert_close(found[1], normalised(PIXELS[39, :, 2:14, 3:15].flip(2)))


def test_every_place_of_a_crop_is_drawn_and_none_beyond_the_edge():
    images = DeviceImages(PIXELS, ROWS, LOOK)
    (looks,) = draw_looks(images, 2000, 1, torch.Generator().manual_seed(0))
    assert images.margin == 4  # 16 - 12
    for axis in (0, 1):
        assert looks.offset[:, axis].unique().tolist() == [0, 1, 2, 3, 4]
    assert tuple(images.shape) == (3, 12, 12)


@pytest.mark.parametrize(
    ("shape", "crop", "passed"),
    [((1, 8, 8), 0, 512), ((1, 28, 28), 0, 128), ((3, 32, 32), 0, 32), ((3, 224, 224), 0, 32), ((3, 64, 64), 16, 128)],
)
def test_large_images_pass_through_a_cpu_in_smaller_batches(shape, crop, passed):
    """Through convolutions 128 of Fashion-MNIST's images are twice as fast as 512, and of photographs 512 would take
    gigabytes; of digits' 512 are faster, and keep the bits that they had."""
    channels = shape[0]
    look = Look((0.5,) * channels, (0.5,) * channels, crop=crop)
    images = DeviceImages(torch.zeros((1, *shape), dtype=torch.uint8), torch.tensor([0]), look)
    assert images.at_once(512) == passed
    assert images.at_once(16) == 16
    on_gpu = DeviceImages(
        torch.zeros((1, *shape), dtype=torch.uint8, device="meta"), torch.zeros(1, device="meta"), look
    )
    assert on_gpu.at_once(512) == 512


def test_a_crop_larger_than_the_images_is_refused():
    with pytest.raises(ValueError, match="a crop of 20 x 20 needs square images of that side, not 16x16"):
        DeviceImages(PIXELS, ROWS, Look((0.5,) * 3, (0.5,) * 3, crop=20))


@pytest.mark.parametrize("resident", [True, False])
def test_parts_come_in_order_each_whole(resident):
    images = DeviceImages(PIXELS, ROWS, LOOK, resident)
    order = torch.tensor([6, 0, 1, 5, 4])
    cuts = [slice(0, 2), slice(2, 3), slice(3, 5)]
    found = list(images.parts(order, cuts))
    assert [index.tolist() for index, _ in found] == [[6, 0], [1], [5, 4]]
    assert torch.equal(torch.cat([pixels for _, pixels in found]), PIXELS[[5, 3, 39, 21, 0]])


def test_reading_is_one_part_ahead_and_no_more(monkeypatch):
    images = DeviceImages(PIXELS, ROWS, LOOK, resident=False)
    asked, real = [], images._read
    monkeypatch.setattr(images, "_read", lambda rows: asked.append(rows.tolist()) or real(rows))
    parts = images.parts(torch.arange(6), [slice(0, 2), slice(2, 4), slice(4, 6)])
    next(parts)
    deadline = time.monotonic() + 60
    while len(asked) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # long enough for a third, were it asked for
    assert asked == [[3, 39], [7, 7]]
    assert len(list(parts)) == 2
    assert asked == [[3, 39], [7, 7], [0, 21]]


def test_training_and_a_pass_have_the_same_bits_resident_or_not():
    def trained(resident):
        engine = Engine(
            Averaging(), tiny_protocol(), pixels=PIXELS, given=torch.arange(40) % 3,
            positions=[np.arange(0, 25), np.arange(25, 40)], classes=3, look=LOOK, resident=resident,
        )  # fmt: skip
        assert engine.shape == (3, 12, 12)
        side = Lane(engine).client(0, None, 0, 0)
        network = side.model()
        side.fit(network, cross_entropy, epochs=3, views=1)
        seen = side.apply(first_view, view="train", subset=torch.arange(3, 20))
        return weights(network), seen

    (one, seen), (other, also) = trained(True), trained(False)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(seen, also)
    assert seen.shape == (17, 3, 12, 12)


def first_view(batch):
    return batch.x.clone()
