"""Random small jobs: those that `gnnsys bench plan` is judged on."""

from gnnsys.bench.plan.random_jobs import RandomJob, random_job

__all__ = ["RandomJob", "random_job"]
