"""How links are shared among flows. A policy is a name; what each one does is written here once.

oes               the paper's (Eq. 19-20): the smallest of rate / flows over the links of a flow. A flow that is held
                  back elsewhere leaves its share of a link unused.
maxmin            progressive filling: no flow can be faster without making a slower one slower. Never slower than
                  `oes` for any flow. What TCP comes near.
fifo              flows in the order in which they were handed over (when their sender was done). Each takes what is
                  left of its links.
fifo-blocking     the same order; a flow takes its links whole, or waits for them.
mrtf              flows by the time they would still need alone. Each takes what is left of its links. The order is
                  set anew when a flow starts or ends.
mrtf-blocking     the same order; a flow takes its links whole, or waits for them.
omcoflow          flows to one task of one iteration are a coflow. A flow's weight is 1 / (its bytes / the rate it
                  would have by `oes` if its coflow was alone); links are shared by weight, and a flow's rate is the
                  smallest of rate x weight / weights over its links.
"""

from __future__ import annotations

POLICIES = ("oes", "maxmin", "fifo", "fifo-blocking", "mrtf", "mrtf-blocking", "omcoflow")
BOUNDED_POLICIES = ("oes", "maxmin")  # for which Theorems 1 and 3 hold


def policy_number(policy: str) -> int:
    """Its place in POLICIES, as the native engine counts them."""
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; it is one of {', '.join(POLICIES)}")
    return POLICIES.index(policy)
