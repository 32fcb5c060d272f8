"""What `make test-quick` (`pytest --quick`) runs: the files below, some of every room, in about a minute.

It is for the minutes between two changes and finds most mistakes; `make test` is what counts. Files that are not listed
are not imported. No test starts a process: one that tries is skipped at that moment.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES: dict[str, tuple[str, ...]] = {  # by room; seconds each on one core at most, together less than ninety
    "bench": ("test_frame.py",),
    "checkpoint": ("test_names.py", "test_states.py"),
    "cli": ("test_inspect.py", "test_progress.py"),
    "comm": ("test_address.py", "test_fair_queue.py", "test_reply_pacing.py", "test_wire.py"),
    "cuda": ("test_capture.py",),  # skipped without a device
    "dgl": ("test_dgl.py",),
    "doctor": ("test_machine.py", "test_software.py"),
    "explain": ("test_masks.py",),
    "fullgraph": ("test_plan.py", "test_use.py"),
    "graph": ("test_convert.py", "test_graph.py", "test_manifest.py", "test_npy.py"),
    "house": ("test_architecture.py", "test_names.py", "test_rooms.py"),
    "jobs/policies": (
        "test_continuous.py",
        "test_groups.py",
        "test_policies.py",
        "test_sharing.py",
        "test_sharing_watch.py",
    ),
    "jobs": ("test_queue.py", "test_shared_graphs.py"),
    "lab": ("test_control_groups.py",),
    "launch": ("test_hosts.py", "test_kubernetes.py"),
    "loader": ("test_hetero.py", "test_inputs.py", "test_link_loader.py", "test_stages.py"),
    "metrics": ("test_metrics.py",),
    "nn": ("test_gat.py", "test_gcn.py", "test_rgcn.py", "test_sage.py"),
    "observe": ("test_cores.py",),
    "ops": (
        "test_attention.py",
        "test_bucket.py",
        "test_relabel.py",
        "test_rows.py",
        "test_spmm.py",
        "test_structure.py",
    ),
    "partition": ("test_partition_book.py", "test_placement.py", "test_verify.py"),
    "pipeline": ("test_pipeline.py",),
    "planning": (
        "test_choose_rules.py",
        "test_plan.py",
        "test_propose.py",
        "test_rules.py",
        "test_shares.py",
        "test_trial.py",
    ),
    "pyg": ("test_pyg_inputs.py", "test_pyg_stores.py"),
    "sampling": ("test_neighbor.py", "test_service.py"),
    "seeds": ("test_shares.py", "test_split.py"),
    "session": ("test_busy.py", "test_open.py"),
    "store": ("test_memory_budget.py", "test_optim.py", "test_step.py"),
    "support": ("test_quick.py", "test_workers.py"),
    "planning/cluster": ("test_cluster.py",),
    "planning/profile": ("test_job_profile.py",),
    "profiling": ("test_counting.py",),
    "planning/costs": ("test_model.py", "test_nonnegative.py", "test_polynomials.py", "test_profile.py"),
}
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system")  # Python's audit events


def is_quick(path: Path) -> bool:
    """Whether a file is imported in a quick run: conftests, helpers and the tests that are listed."""
    folder = path.parent.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return not path.name.startswith("test_") or path.name in FILES.get(folder, ())


def forbid_processes() -> None:
    """From now on whatever starts a process in this one is skipped instead. Python has no way back."""

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event in STARTS:
            pytest.skip("starts a process, which a quick run does not")

    sys.addaudithook(look)
