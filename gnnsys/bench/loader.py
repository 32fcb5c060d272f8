"""`gnnsys bench loader`: sampling three hops into blocks, and whole epochs, beside DGL's."""

BENCHMARKS: list = []
