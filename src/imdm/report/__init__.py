"""Reports of runs: tables, pictures and the page."""

from imdm.report import compatibility, languages, synthetic  # noqa: F401  (each registers its page)
from imdm.report.build import build_report, check_run, combine, pages
from imdm.report.equal import Frontier, Multiple, Point, equal_entropy
from imdm.report.page import Picture, Report, Section
from imdm.report.tables import Table, all_results

__all__ = [
    "Frontier",
    "Multiple",
    "Picture",
    "Point",
    "Report",
    "Section",
    "Table",
    "all_results",
    "build_report",
    "check_run",
    "combine",
    "equal_entropy",
    "pages",
]
