"""What an evaluation reports, and the rows it writes."""

from imdm.evaluation import (  # noqa: F401  (they register their metrics)
    conditional,
    entropy,
    factorization,
    judge,
    law,
    likelihood,
    mauve,
    steps,
    text,
    validity,
)
from imdm.evaluation.base import EMBEDDED, ENUMERATED, JUDGED, Measurement, Subject, measure, metrics
from imdm.evaluation.conditional import Conditional
from imdm.evaluation.factorization import single_step_error
from imdm.evaluation.judge import Judge, load_judge
from imdm.evaluation.mauve import Embedder, load_embedder
from imdm.evaluation.parts import Parts
from imdm.evaluation.results import (
    Row,
    append,
    family,
    measure_matched,
    measure_steps,
    measure_temperatures,
    read,
    to_row,
)

__all__ = [
    "EMBEDDED",
    "ENUMERATED",
    "JUDGED",
    "Conditional",
    "Embedder",
    "Judge",
    "Measurement",
    "Parts",
    "Row",
    "Subject",
    "append",
    "family",
    "load_embedder",
    "load_judge",
    "measure",
    "measure_matched",
    "measure_steps",
    "measure_temperatures",
    "metrics",
    "read",
    "single_step_error",
    "to_row",
]
