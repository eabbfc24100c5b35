"""Images that a user names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives.bench.paper.cells import load_images

IMAGES = np.arange(2 * 9 * 8, dtype=np.uint8).reshape(2, 9, 8)
LABELS = np.array([9, 0], dtype=np.uint8)


def test_images_and_labels(tmp_path):
    file = tmp_path / "mnist.npz"
    np.savez(file, x_train=IMAGES, y_train=LABELS, x_test=IMAGES)
    images, labels = load_images(str(file)).tensors
    assert torch.equal(images, torch.from_numpy(IMAGES).float()[:, None] / 255)
    assert labels.tolist() == [9, 0]
    assert labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": IMAGES}, "has no y_train"),
        ({"x_train": IMAGES.astype(float), "y_train": LABELS}, "must be uint8"),
        (
            {"x_train": IMAGES[:, :4], "y_train": LABELS},
            r"sides of 8 to 64, but is uint8 of shape \[2, 4, 8\]",
        ),
        ({"x_train": IMAGES, "y_train": LABELS[:1]}, "must be 2 labels"),
        ({"x_train": IMAGES, "y_train": LABELS + 1}, "labels of 0 to 9"),
        ({"x_train": IMAGES[:0], "y_train": LABELS[:0]}, "labels of 0 to 9"),
        ({"x_train": np.array([None]), "y_train": LABELS}, "allow_pickle"),
    ],
)
def test_other_files_are_refused(arrays, message, tmp_path):
    file = tmp_path / "images.npz"
    np.savez(file, **arrays)
    with pytest.raises(ValueError, match=message):
        load_images(str(file))
