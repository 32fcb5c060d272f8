"""Pictures of a suite's results: `gnnsys bench plot RESULTS`. SVG is written here, without any library."""

from gnnsys.bench.charts.draw import KINDS, draw_chart, plot_results

__all__ = ["KINDS", "draw_chart", "plot_results"]
