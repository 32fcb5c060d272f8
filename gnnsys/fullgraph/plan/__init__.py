"""What is decided before a pass: a rank's share, the halo, stages, bins, their costs and what they wait for."""
