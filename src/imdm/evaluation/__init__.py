"""What an evaluation reports, and the rows it writes."""

from imdm.evaluation import entropy, factorization, law, likelihood, validity  # noqa: F401  (they register their metrics)
from imdm.evaluation.base import ANY_DATA, Measurement, Subject, for_steps, measure, metrics
from imdm.evaluation.factorization import single_step_error
from imdm.evaluation.results import Row, append, family, read, to_row

__all__ = [
    "ANY_DATA",
    "Measurement",
    "Row",
    "Subject",
    "append",
    "family",
    "for_steps",
    "measure",
    "metrics",
    "read",
    "single_step_error",
    "to_row",
]
