"""k nearest neighbours by cosine, as in the DINO family: no training, hardly a setting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from veca.errors import ProbeError

_CHUNK_NUMBERS = 2**25  # of a block of similarities


def unit(features: Tensor, mean: Tensor | None = None) -> Tensor:
    """Rows of length 1, after subtracting `mean` if given."""
    return F.normalize(features if mean is None else features - mean, dim=1)


def predict(
    train: Tensor,
    labels: Tensor,
    test: Tensor,
    ks: Sequence[int],
    *,
    num_classes: int,
    temperature: float,
    center: bool = False,
) -> dict[int, Tensor]:
    """The predicted class of each row of `test`, for each k.

    The k most similar training rows vote, each with the weight softmax(similarity / temperature)
    over the k. Rows are L2-normalised first; with `center` the mean of the training rows is
    subtracted before that, for features that are all positive and so nearly parallel.

    Args:
        train, test: [n, D] and [m, D]; labels: int64 [n].
    """
    if len(train) < max(ks):
        raise ProbeError(f"k = {max(ks)} neighbours of {len(train)} training images do not exist.")
    mean = train.mean(dim=0) if center else None
    bank, queries = unit(train, mean), unit(test, mean)
    labels = labels.to(bank.device)
    chunk = max(1, _CHUNK_NUMBERS // len(bank))
    found: dict[int, list[Tensor]] = {k: [] for k in ks}
    for start in range(0, len(queries), chunk):
        similarity = queries[start : start + chunk] @ bank.T
        nearest, where = similarity.topk(max(ks), dim=1)
        # Votes are added on the CPU: on a GPU the order of the sums would change from run to run.
        nearest, classes = nearest.cpu().double(), labels[where].cpu()
        for k in ks:
            weights = (nearest[:, :k] / temperature).softmax(dim=1)
            votes = weights.new_zeros(len(weights), num_classes)
            votes.scatter_add_(1, classes[:, :k], weights)
            found[k].append(votes.argmax(dim=1))
    return {k: torch.cat(parts) for k, parts in found.items()}
