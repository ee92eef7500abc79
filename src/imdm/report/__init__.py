"""Reports of runs: tables, pictures and the page."""

from imdm.core.registry import import_all
from imdm.report.build import build_report, combine
from imdm.report.equal import Frontier, Multiple, Point, equal_entropy
from imdm.report.page import Picture, Report, Section
from imdm.report.sections import Results, check_sections, sections
from imdm.report.tables import Table, all_results

import_all(__name__, __path__)

__all__ = [
    "Frontier",
    "Multiple",
    "Picture",
    "Point",
    "Report",
    "Results",
    "Section",
    "Table",
    "all_results",
    "build_report",
    "check_sections",
    "combine",
    "equal_entropy",
    "sections",
]
