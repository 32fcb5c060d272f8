"""How good predictions are: accuracy, F1, areas under curves, and ranks of links among all nodes.

Every metric counts in whole numbers. What ranks have counted is added up once, in `compute`, so that the result is the
same bit by bit for any number of them, however the samples were shared out.
"""

from gnnsys.metrics.classes import F1, Accuracy
from gnnsys.metrics.curves import AUC, AveragePrecision
from gnnsys.metrics.ranking import KnownLinks, LinkRanks, Ranking, rank_links

__all__ = ["AUC", "F1", "Accuracy", "AveragePrecision", "KnownLinks", "LinkRanks", "Ranking", "rank_links"]
