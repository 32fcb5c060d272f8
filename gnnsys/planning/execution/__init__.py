"""How one process loads and trains: where the graph lies, who samples and gathers, and by how many threads.

A batch has the same bits whichever way it is made. So trying a way costs nothing but its time: the batches of a trial
are those of training.
"""
