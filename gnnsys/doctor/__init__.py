"""What a machine has and lacks for training: each thing that is looked at becomes one line, with a remedy.

`read_*` look at the machine and return facts; `judge_*` are pure functions from facts to diagnoses, so that a test can
give them another machine's. `gnnsys doctor` is its command line. Importing this room does not import torch.
"""

from gnnsys.doctor.diagnosis import ADVICE, FAILS, OK, Diagnosis, exit_code, report_text
from gnnsys.doctor.hosts_check import look_at_hosts
from gnnsys.doctor.local_check import look_here
from gnnsys.doctor.network import judge_links, listen_once, measure_to
from gnnsys.doctor.parts_check import PartsFacts, judge_parts, read_parts

__all__ = [
    "ADVICE",
    "FAILS",
    "OK",
    "Diagnosis",
    "PartsFacts",
    "exit_code",
    "judge_links",
    "judge_parts",
    "listen_once",
    "look_at_hosts",
    "look_here",
    "measure_to",
    "read_parts",
    "report_text",
]
