"""A pass over the graph: bins there and back, what travels between ranks, sums over them."""
