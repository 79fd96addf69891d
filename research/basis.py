"""Which directions of the teacher's global feature does a student learn? By principal components.

    python -m research.basis --config research/configs/coco-192-sizes.toml \
        --data COCO/train2017 --weights small=runs/at192-sizes/final

The components are those of the teacher's standardised features on half of the photos that the
settings hold out; the other half is judged. Bands of them, largest variance first: their share of
the variance, how much of it the student explains, and the cosine if all else were left out of both
features. A target of the first k components alone would be easier to learn; "ceiling" is the cosine
to the whole feature of a student that gave those without a fault, and nothing else. Writes
research/results/basis.csv; rows of weights that are not named again are kept.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import print_table, write_csv
from research import RESULTS
from research.agreement import Jury, add_question, add_weights, options_of
from veca.model import evaluating

BANDS = (0, 16, 64, 256)
"""Where bands of components begin; the last goes on to the end."""


def main() -> None:
    parser = options_of(__doc__, images=1000, out=RESULTS)
    add_weights(parser)
    add_question(parser, size=192)
    options = parser.parse_args()

    jury = Jury(options)
    teacher, students = _features(jury, options.size, options.cores)
    half = len(teacher) // 2
    mean = teacher[:half].mean(dim=0)
    _, _, directions = torch.linalg.svd(teacher[:half] - mean, full_matrices=True)
    wanted = (teacher[half:] - mean) @ directions.T
    width = wanted.shape[1]
    rows: list[dict[str, object]] = []
    for (name, cores), said in students.items():
        got = (said[half:] - mean) @ directions.T
        for first, last in itertools.pairwise((*BANDS, width)):
            band, up_to = slice(first, last), slice(0, last)
            missed = (got[:, band] - wanted[:, band]).square().sum()
            rows.append(
                {
                    "weights": name,
                    "cores": cores,
                    "size": options.size,
                    "images": len(wanted),
                    "components": f"{first + 1} to {last}",
                    "share of variance": float(_variance(wanted[:, band]) / _variance(wanted)),
                    "explained": float(1 - missed / wanted[:, band].square().sum()),
                    "cosine up to here": _cosine(got[:, up_to], wanted[:, up_to]),
                    "ceiling": _cosine(F.pad(wanted[:, up_to], (0, width - last)), wanted),
                }
            )
    write_csv("basis", rows, options.out, device=options.device, key="weights")
    print_table(rows)


@torch.no_grad()
def _features(
    jury: Jury, size: int, budgets: list[int]
) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
    """The teacher's global features of all photos, and each student's at each budget."""
    patch = next(iter(jury.students.values())).backbone.config.patch_size
    grid = (size // patch, size // patch)
    shown = jury.teaching.image_size(grid)
    # The dense features are not wanted: on the grid of the global one both come from one pass.
    grid = jury.teaching[0].global_grid(grid)
    teacher: list[Tensor] = []
    said: dict[tuple[str, int], list[Tensor]] = {}
    for batch in jury.loader.sweep(size=size, teacher_size=shown, batch_size=50):
        teacher.append(jury.teaching.targets(batch.shown, grid)[0].cls.cpu())
        for name, student in jury.students.items():
            one = jury.examined(student, budgets)
            images = one.normalise(batch.pixels)
            with evaluating(student), one.autocast():
                for cores in one.budgets:
                    found = student(images, cores=cores)[0].cls.float().cpu()
                    said.setdefault((name, cores), []).append(found)
    return torch.cat(teacher), {key: torch.cat(parts) for key, parts in said.items()}


def _variance(features: Tensor) -> Tensor:
    return (features - features.mean(dim=0)).square().sum()


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(F.cosine_similarity(one, other, dim=-1).mean())


if __name__ == "__main__":
    main()
