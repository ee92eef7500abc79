"""What an evaluation reports, and the rows it writes."""

from imdm.evaluation import (  # noqa: F401  (they register their metrics)
    conditional,
    entropy,
    factorization,
    judge,
    law,
    likelihood,
    mauve,
    text,
    validity,
)
from imdm.evaluation.base import ENUMERATED, JUDGED, Measurement, Subject, measure, metrics
from imdm.evaluation.conditional import Conditional
from imdm.evaluation.factorization import single_step_error
from imdm.evaluation.judge import Judge, load_judge
from imdm.evaluation.results import Row, append, family, measure_matched, measure_steps, read, to_row

__all__ = [
    "ENUMERATED",
    "JUDGED",
    "Conditional",
    "Judge",
    "Measurement",
    "Row",
    "Subject",
    "append",
    "family",
    "load_judge",
    "measure",
    "measure_matched",
    "measure_steps",
    "metrics",
    "read",
    "single_step_error",
    "to_row",
]
