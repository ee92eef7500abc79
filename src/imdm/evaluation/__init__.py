"""What an evaluation reports, and the rows it writes."""

from imdm.evaluation import entropy, factorization, law, likelihood, validity  # noqa: F401  (they register their metrics)
from imdm.evaluation.base import ANY_DATA, Measurement, Subject, measure, metrics
from imdm.evaluation.factorization import single_step_error
from imdm.evaluation.results import Row, append, family, measure_steps, read, to_row

__all__ = [
    "ANY_DATA",
    "Measurement",
    "Row",
    "Subject",
    "append",
    "family",
    "measure",
    "measure_steps",
    "metrics",
    "read",
    "single_step_error",
    "to_row",
]
