"""Benchmarks: each part timed beside what a user would otherwise run, in one process, as a ratio.

All suites share one frame: cases with sides that take turns (`case`, `measure`), rows (`report`), one runner (`suite`).
"""

from gnnsys.bench import peers
from gnnsys.bench.against import Change, compare
from gnnsys.bench.case import OURS, Benchmark, Case, Side, Unit, Versus, megabytes, milliseconds, rate, score, value
from gnnsys.bench.charts import plot_results
from gnnsys.bench.compare_results import CaseChange, compare_results
from gnnsys.bench.matrix import CellRow, Description, RunOptions, read_description, run_matrix, shipped_suites
from gnnsys.bench.report import Report, Row, environment
from gnnsys.bench.results import Results, read_results
from gnnsys.bench.suite import SUITES, SuiteOptions, check_machine, load_suite, run_suite, units_of
from gnnsys.bench.workload import Workload

__all__ = [
    "OURS",
    "SUITES",
    "Benchmark",
    "Case",
    "CaseChange",
    "CellRow",
    "Change",
    "Description",
    "Report",
    "Results",
    "Row",
    "RunOptions",
    "Side",
    "SuiteOptions",
    "Unit",
    "Versus",
    "Workload",
    "check_machine",
    "compare",
    "compare_results",
    "environment",
    "load_suite",
    "megabytes",
    "milliseconds",
    "peers",
    "plot_results",
    "rate",
    "read_description",
    "read_results",
    "run_matrix",
    "run_suite",
    "score",
    "shipped_suites",
    "units_of",
    "value",
]
