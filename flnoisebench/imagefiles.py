"""Image files -> uint8 pixels: in memory, or in a memory map on disk where they do not fit.

A map is a plain .npy file, uint8 [n, 3, S, S], that NumPy opens too.  It is written block by block, many blocks at a
time; a journal beside it says which are done, so that what was interrupted goes on from there, and the file gets its
name when it is whole.  The digest is over blocks, so that it is found while writing and again without reading twice.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

BLOCK = 256  # images a thread reads at a time; one task an image would cost a gigabyte of bookkeeping at 1M images
_SYNCED = 16  # blocks between two entries of the journal: 800 MB at 256 x 256
_SHOWN = 3

Progress = Callable[[int, int], None]  # (done, of how many)

READ_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
_OTHER = {".avif", ".gif", ".heic", ".jfif", ".jp2", ".tif", ".tiff"}  # refused, not passed over: no silent loss
IMAGE_SUFFIXES = READ_SUFFIXES | _OTHER


def _quiet(done: int, total: int) -> None:
    pass


def pixels_of(path: Path, size: int) -> np.ndarray:
    """One image, uint8 [size, size, 3]: its short side scaled to ``size`` (bilinear, antialiased), its centre kept.

    Grey becomes RGB, 16-bit grey keeps its upper 8 bits, transparency is dropped, a camera's orientation mark is
    applied, and of an animation the first frame is read.  ValueError, naming the file, where it cannot be decoded.
    """
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip to white instead of scaling
                image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
            if "transparency" in image.info:  # palette images lose theirs only by way of RGBA
                image = image.convert("RGBA")
            return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR))
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise ValueError(f"{path} cannot be decoded as an image: {error}") from error


def image_files(folder: Path) -> list[Path]:
    """The image files of a folder, sorted by name.  ValueError where it has none or something would be left out."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    read = ", ".join(sorted(READ_SUFFIXES))
    for entry in entries:
        if entry.is_dir():
            raise ValueError(f"{entry} is a folder within a folder of images, whose images would be left out")
        if entry.suffix.lower() in _OTHER:
            raise ValueError(f"{entry}: {entry.suffix} is not read; convert it to one of {read}")
    images = [entry for entry in entries if entry.suffix.lower() in READ_SUFFIXES]
    if not images:
        raise ValueError(f"{folder} has no image; remove it or fill it ({read})")
    return images


def decode_images(files: Sequence[Path], size: int) -> torch.Tensor:
    """uint8 [n, 3, size, size] in memory, in the order of the files.  Raises as ``pixels_of``, of the first file."""
    images = np.empty((len(files), 3, size, size), dtype=np.uint8)

    def fill(start: int) -> None:
        for index in range(start, min(start + BLOCK // 4, len(files))):
            images[index] = pixels_of(files[index], size).transpose(2, 0, 1)

    with ThreadPoolExecutor(_threads()) as pool:  # Pillow decodes and scales outside Python's lock
        for _ in pool.map(fill, range(0, len(files), BLOCK // 4)):
            pass  # the first failure in the order of the files is raised here, and what has not begun is cancelled
    return torch.from_numpy(images)


def undecodable(files: Iterable[Path]) -> Iterator[str]:
    """What is wrong with each file that cannot be decoded; ``decode_images`` stops at the first."""
    for file in files:
        try:
            pixels_of(file, 8)
        except ValueError as error:
            yield str(error)


def shared_images(train: torch.Tensor, test: torch.Tensor) -> list[tuple[int, int]]:
    """(position in train, position in test) of each test image whose pixels are a training image's too.

    Compared are pixels as training sees them: so a copy that was saved again without loss, or under another name, is
    found too.
    """
    known = {hashlib.sha256(image).digest(): position for position, image in enumerate(train.numpy())}
    tested = ((hashlib.sha256(image).digest(), position) for position, image in enumerate(test.numpy()))
    return [(known[digest], position) for digest, position in tested if digest in known]


def refuse_shared(
    train_files: Sequence[Path], train: torch.Tensor, test_files: Sequence[Path], test: torch.Tensor
) -> None:
    """Raises ValueError, naming files, where a test image is a training image too (see ``shared_images``)."""
    shared = [f"{train_files[a]} = {test_files[b]}" for a, b in shared_images(train, test)]
    if shared:
        raise ValueError(
            f"{len(shared)} test images are also training images, so accuracy would be that of memory: {some(shared)}"
        )


def digest_images(images: torch.Tensor, progress: Progress = _quiet) -> str:
    """SHA-256, in hex, over the SHA-256 of each block of 256 images: the same as ``map_images`` returns."""
    array = images.numpy()
    whole = hashlib.sha256(repr(array.shape).encode())
    for start in range(0, len(array), BLOCK):
        whole.update(hashlib.sha256(np.ascontiguousarray(array[start : start + BLOCK]).data).digest())
        progress(min(start + BLOCK, len(array)), len(array))
    return whole.hexdigest()


class MappedImages(torch.Tensor):
    """uint8 [n, C, H, W] that stays on disk; what is computed from it is a plain tensor.  Sent to another process it
    goes as a path, where an ordinary tensor would be copied whole."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    path: Path
    order: torch.Tensor | None = None  # int64 [n]: which image of the file stands at each place; None: the file's order

    def __reduce_ex__(self, protocol: Any) -> Any:
        return open_map, (self.path, self.order)


def reordered(images: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The images in another order, int64 [n] places.  A map, which may be larger than the memory, stays as it is on
    disk: what reads it asks ``stored`` for the places there."""
    if isinstance(images, MappedImages):
        return open_map(images.path, stored(images, order))
    return images.index_select(0, order)


def stored(images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Where the images at these places lie in the tensor: elsewhere in a map that was reordered."""
    order = images.order if isinstance(images, MappedImages) else None
    return rows if order is None else order.index_select(0, rows)


def copied_to(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The images on a device, themselves where they are there; a map's in the order that it was given."""
    if not isinstance(images, MappedImages) or images.order is None or images.device == device:
        return images.to(device)
    copy = torch.empty(images.shape, dtype=images.dtype, device=device)
    for part, places in zip(copy.split(BLOCK), images.order.split(BLOCK), strict=True):
        part.copy_(images.index_select(0, places))
    return copy


def open_map(path: Path, order: torch.Tensor | None = None) -> torch.Tensor:
    """The map as a tensor; order: see ``reordered``.  Writing into it changes this process's copy alone, never the
    file.  Raises ValueError, naming the file, where it is no such map."""
    try:
        array = np.lib.format.open_memmap(path, mode="c")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged or truncated: {error}.  Delete it and prepare the data again") from error
    if array.dtype != np.uint8 or array.ndim != 4:
        raise ValueError(f"{path} holds {array.dtype} {list(array.shape)}, not uint8 images [n, C, H, W]")
    images = torch.Tensor._make_subclass(MappedImages, torch.from_numpy(array))
    images.path, images.order = path, order
    return images


def map_bytes(images: int, size: int) -> int:
    """What a map takes on disk, in bytes."""
    return images * 3 * size * size + 128


def map_images(path: Path, files: Sequence[Path], size: int, progress: Progress = _quiet) -> str:
    """Decode the files into a map at ``path``; its digest (see ``digest_images``).

    Interrupted, it goes on from where it was when called again with the same files and size, and a whole map of them is
    left as it is; with others it begins anew.  Files that cannot be decoded do not stop it: all are listed in
    ``<path>.problems`` and ValueError names the first; put right, only their blocks are decoded.  Raises OSError,
    before it begins, where the disk has no room, or another process is making maps in the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(path.parent):
        return _mapped(path, files, size, progress)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two processes would truncate each other's pixels."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = "another process is preparing images there; wait for it, or take another folder"
            raise BlockingIOError(error.errno, text, str(folder)) from None
        except OSError:  # of network drives that give no lock
            pass
        yield
    finally:
        os.close(handle)


def _mapped(path: Path, files: Sequence[Path], size: int, progress: Progress) -> str:
    partial, journal, problems = (path.with_name(path.name + end) for end in (".partial", ".journal", ".problems"))
    task = hashlib.sha256("\n".join([f"{len(files)} {size}", *map(str, files)]).encode(errors="surrogateescape"))
    stamp = path.with_name(path.name + ".digest")
    done = _journalled(journal, task.hexdigest()) if partial.is_file() else {}
    # with blocks of this task still in ``partial`` the stamp may be ahead of the map: it is written before the rename
    if path.is_file() and not done and (known := _stamped(stamp, task.hexdigest())):
        progress(len(files), len(files))
        return known
    header = _header(len(files), size)
    wanted = len(header) + len(files) * 3 * size * size
    written = partial.stat().st_blocks * 512 if partial.is_file() else 0  # another task's is written over
    if shutil.disk_usage(path.parent).free < wanted - written:
        free = shutil.disk_usage(path.parent).free
        text = f"{wanted - written:,} bytes are needed for the memory map and {free:,} are free; choose fewer images"
        raise OSError(errno.ENOSPC, text + ", a smaller size or another folder", str(path.parent))
    failures: list[str] = []
    starts = [start for start in range(0, len(files), BLOCK) if start not in done]

    def fill(start: int) -> str | None:
        block = np.empty((min(BLOCK, len(files) - start), 3, size, size), dtype=np.uint8)
        before = len(failures)
        for index, file in enumerate(files[start : start + BLOCK]):
            try:
                block[index] = pixels_of(file, size).transpose(2, 0, 1)
            except ValueError as error:
                failures.append(str(error))
        if len(failures) > before:  # another thread's failure at most decodes this block once more
            return None
        _write_at(target.fileno(), block.data.cast("B"), len(header) + start * 3 * size * size)
        return hashlib.sha256(block.data).hexdigest()

    # the journal first: what it says of an earlier map must be gone before there is a new file to be taken for that one
    with journal.open("a" if done else "w") as diary, partial.open("r+b" if done else "w+b") as target:
        if done:
            diary.write("\n")  # what was torn stays a line of its own
        else:
            target.write(header)
            target.truncate(wanted)
            diary.write(json.dumps({"task": task.hexdigest()}) + "\n")
        pool = ThreadPoolExecutor(_threads())
        try:
            progress(min(len(done) * BLOCK, len(files)), len(files))
            started = {pool.submit(fill, start): start for start in starts}
            fresh: dict[int, str] = {}
            for count, future in enumerate(as_completed(started), 1):
                digest = future.result()
                if digest is not None:
                    fresh[started[future]] = digest
                if len(fresh) >= _SYNCED or count == len(started):
                    os.fdatasync(target.fileno())  # an entry of the journal must not outlive its pixels
                    diary.writelines(json.dumps([start, digest]) + "\n" for start, digest in fresh.items())
                    diary.flush()
                    done |= fresh
                    fresh = {}
                progress(min((len(done) + len(fresh)) * BLOCK, len(files)), len(files))
        finally:
            pool.shutdown(cancel_futures=True)
    if failures:
        problems.write_text("\n".join(sorted(failures)) + "\n", errors="surrogateescape")
        raise ValueError(
            f"{len(failures)} images cannot be decoded, all listed in {problems}: {some(sorted(failures))}"
        )
    whole = hashlib.sha256(repr((len(files), 3, size, size)).encode())
    for start in sorted(done):
        whole.update(bytes.fromhex(done[start]))
    stamp.write_text(json.dumps({"task": task.hexdigest(), "digest": whole.hexdigest()}) + "\n")
    os.replace(partial, path)
    for leftover in (journal, problems):
        leftover.unlink(missing_ok=True)
    return whole.hexdigest()


def some(items: Sequence[str]) -> str:
    """Up to three of the items, and how many more there are."""
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _threads() -> int:
    return min(32, os.cpu_count() or 1)


def _header(count: int, size: int) -> bytes:
    """The .npy header of a map, 128 bytes."""
    header = io.BytesIO()
    shape = (count, 3, size, size)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return header.getvalue()


def _stamped(stamp: Path, task: str) -> str | None:
    """The digest that a finished map of this task had."""
    try:
        found = json.loads(stamp.read_text())
        return found["digest"] if found["task"] == task else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _journalled(journal: Path, task: str) -> dict[int, str]:
    """{first image of a block: SHA-256} of the finished blocks of this task; torn lines do not count."""
    if not journal.is_file():
        return {}
    done: dict[int, str] = {}
    for number, line in enumerate(journal.read_text().splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if number == 0 and entry != {"task": task}:
            return {}
        if number and entry is not None:
            done[entry[0]] = entry[1]
    return done


def _write_at(file: int, content: memoryview, offset: int) -> None:
    """All of it: one pwrite takes 2 GB at most and may take less."""
    while content:
        count = os.pwrite(file, content, offset)
        content, offset = content[count:], offset + count
