"""USPS, from the prepared 16 x 16 archive or from the two files of "The Elements of Statistical Learning".

The usual USPS (LIBSVM's and torchvision's) is the ESL version after a Gaussian blur, so the blur is applied
here. Both ways give the same pixels: a test compares them.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from noisegate.data.dataset import Dataset
from noisegate.data.readers import Payloads, Pixels, byte_arrays, labels, standardized_
from noisegate.errors import DataError

ARCHIVE = "usps16.npz"
ESL_TRAIN, ESL_TEST = "zip.train.gz", "zip.test.gz"
TRAIN, TEST = 7_291, 2_007

BLUR_RADIUS, BLUR_SIGMA = 3, 0.75


def usps(payloads: Payloads) -> Dataset:
    """7,291 digits to train on and 2,007 to test on, brought to 1 x 28 x 28."""
    if ARCHIVE in payloads:
        shapes = {
            "x_train": (TRAIN, 16, 16),
            "y_train": (TRAIN,),
            "x_test": (TEST, 16, 16),
            "y_test": (TEST,),
        }
        arrays = byte_arrays(payloads[ARCHIVE], shapes)
        x, y, x_test, y_test = (arrays[key] for key in shapes)
    else:
        x, y = esl(payloads[ESL_TRAIN], TRAIN)
        x_test, y_test = esl(payloads[ESL_TEST], TEST)
    return Dataset("usps", _upscaled(x), labels(y), _upscaled(x_test), labels(y_test), classes=10)


def esl(payload: bytes, examples: int) -> tuple[Pixels, Pixels]:
    """Blurred 16 x 16 images and digits of an ESL text file: a digit and 256 values in -1..1 per line."""
    from scipy import ndimage

    values = np.array(payload.split(), dtype=np.float64)
    if values.size != examples * 257:
        raise DataError(f"usps: expected {examples} lines of 257 numbers, found {values.size} numbers")
    rows = values.reshape(examples, 257)
    steps = np.arange(-BLUR_RADIUS, BLUR_RADIUS + 1)
    kernel = np.exp(-(steps**2) / (2 * BLUR_SIGMA**2))
    kernel /= kernel.sum()
    image = rows[:, 1:].reshape(examples, 16, 16)
    for axis in (1, 2):
        image = ndimage.correlate1d(image, kernel, axis=axis, mode="constant", cval=-1.0)
    # Six decimals, as the published file has; they also make the truncation the same on every machine.
    gray = (np.round(image, 6) + 1) / 2 * 255
    return gray.astype(np.uint8), rows[:, 0].astype(np.uint8)


def _upscaled(pixels: Pixels) -> Tensor:
    x = torch.from_numpy(pixels[:, None]).to(torch.float32).div_(255)
    large = functional.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    return standardized_(large, (0.2469,), (0.2853,))
