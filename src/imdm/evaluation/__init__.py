"""Metrics, judges and result rows."""

from imdm.core.registry import import_all
from imdm.data.statistics import Measurement
from imdm.evaluation.base import Evaluation, Metric, Subject, about, metric, metrics
from imdm.evaluation.conditional import Conditional
from imdm.evaluation.factorization import single_step_error
from imdm.evaluation.judge import Judge, load_judge
from imdm.evaluation.mauve import Embedder, load_embedder
from imdm.evaluation.measuring import evaluate, load_readers, matched, measure, occasions, to_row
from imdm.evaluation.parts import Parts
from imdm.evaluation.results import Row, append, read

import_all(__name__, __path__)

__all__ = [
    "Conditional",
    "Embedder",
    "Evaluation",
    "Judge",
    "Measurement",
    "Metric",
    "Parts",
    "Row",
    "Subject",
    "about",
    "append",
    "evaluate",
    "load_embedder",
    "load_judge",
    "load_readers",
    "matched",
    "measure",
    "metric",
    "metrics",
    "occasions",
    "read",
    "single_step_error",
    "to_row",
]
