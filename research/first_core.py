"""Does the first core say all that the patches know? It beside the mean of the patches.

    python -m research.first_core --config research/configs/coco-stage1-longer.toml \
        --data COCO/train2017 --weights small=runs/small-1/final

The teacher's global feature is the mean of its dense ones, so a student has two ways to give it: by
its first core, which is trained for that, or by the mean of its patches, mapped back to the
teacher's scale. Both are measured on photos that the settings hold out, at the size at which the
teacher's two features come from one pass. Writes
research/results/first_core.csv; rows of weights that are not named again are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from benchmarks.common import print_table, write_csv
from research import RESULTS
from research.agreement import Jury, add_question, add_weights, options_of
from veca.distill.standardise import TargetStatistics
from veca.distill.student import Prediction, Student


def main() -> None:
    parser = options_of(__doc__, images=512, out=RESULTS)
    add_weights(parser)
    add_question(parser, size=112)
    options = parser.parse_args()

    jury = Jury(options)
    lesson = jury.teaching[0]
    if lesson.statistics is None:
        raise SystemExit("these settings do not standardise the targets; nothing to map back.")
    rows = jury.rows([options.size], options.cores, feature="first core")
    with _mean_of_patches(lesson.statistics):
        rows += jury.rows([options.size], options.cores, feature="mean of the patches")
    write_csv("first_core", rows, options.out, device=options.device, key="weights")
    print_table(rows)


@contextmanager
def _mean_of_patches(scale: TargetStatistics) -> Iterator[None]:
    """Inside, students give the mean of their patches as their global feature."""
    real = Student.forward

    def forward(self: Student, images: Tensor, cores: int | None = None) -> list[Prediction]:
        (said,) = real(self, images, cores)
        mean = scale.dense.unstandardise(said.patches.float()).mean(dim=1)
        return [said._replace(cls=scale.cls.standardise(mean))]

    with mock.patch.object(Student, "forward", forward):
        yield


if __name__ == "__main__":
    main()
