"""The paper's theorems, computed: information on enumerated joints, exact denoisers, the finite-M process."""

from imdm.theory.information import (
    entropy,
    mutual_information,
    pair_bound,
    step_total_correlation,
    total_correlation,
)
from imdm.theory.oracle import ExactMarginals, PartitionOracle, Tabulated

__all__ = [
    "ExactMarginals",
    "PartitionOracle",
    "Tabulated",
    "entropy",
    "mutual_information",
    "pair_bound",
    "step_total_correlation",
    "total_correlation",
]
