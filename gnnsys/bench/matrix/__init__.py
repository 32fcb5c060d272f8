"""`gnnsys bench suite FILE`: a matrix of training jobs from one description, each cell in processes of its own.

`description` reads and checks the file, `run` runs its cells and keeps a JSON of each, `train` is what every rank runs.
"""

from gnnsys.bench.matrix.description import Description, read_description, shipped_suites
from gnnsys.bench.matrix.run import CellRow, RunOptions, run_matrix

__all__ = ["CellRow", "Description", "RunOptions", "read_description", "run_matrix", "shipped_suites"]
