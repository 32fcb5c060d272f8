"""Everything that is looked at on this machine, in the order of the report."""

from __future__ import annotations

from gnnsys.doctor.diagnosis import Diagnosis
from gnnsys.doctor.machine import judge_machine, read_machine
from gnnsys.doctor.parts_check import judge_parts, read_parts
from gnnsys.doctor.software import judge_software, read_software
from gnnsys.launch import host_facts


def look_here(parts: str | None = None) -> list[Diagnosis]:
    """Looks at software and machine, and at a directory of parts where one is named."""
    host = host_facts()
    software, machine = read_software(host), read_machine(host)
    found = judge_software(software) + judge_machine(machine)
    if parts is not None:
        found += judge_parts(read_parts(parts), machine.usable_memory)
    return found
