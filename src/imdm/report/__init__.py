"""Tables, pictures and the page."""

from imdm.report.build import build_report, table_1, table_2
from imdm.report.page import Picture, Report, Section
from imdm.report.tables import Table, all_results

__all__ = ["Picture", "Report", "Section", "Table", "all_results", "build_report", "table_1", "table_2"]
