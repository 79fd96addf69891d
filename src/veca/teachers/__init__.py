"""Frozen teachers behind one small protocol: global and dense features on a student's grid.

`base` says what a teacher is; `load` finds one by what a user writes; `registry` has the short
names; the rest are the adapters.
"""

from veca.teachers.base import Teacher, TeacherError, TeacherFeatures
from veca.teachers.custom import CallableTeacher
from veca.teachers.load import load_teacher
from veca.teachers.ours import OurTeacher, read_dense_vit, save_dense_vit
from veca.teachers.registry import KNOWN, PAPER_BASELINES, KnownTeacher, list_teachers

__all__ = [
    "KNOWN",
    "PAPER_BASELINES",
    "CallableTeacher",
    "KnownTeacher",
    "OurTeacher",
    "Teacher",
    "TeacherError",
    "TeacherFeatures",
    "list_teachers",
    "load_teacher",
    "read_dense_vit",
    "save_dense_vit",
]
