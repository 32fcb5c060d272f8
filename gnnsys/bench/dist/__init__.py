"""Training across hosts of the lab, beside DistDGL on the same graph, model, fanouts and batch."""
