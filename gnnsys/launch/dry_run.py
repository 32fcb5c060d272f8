"""What a launch would run, as text: for `--print`. No host is asked anything."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from gnnsys.launch.host_group import LaunchOptions, rank_env, script_words, torchrun_options
from gnnsys.launch.hosts import Host


def job_text(hosts: Sequence[Host], command: Sequence[str], options: LaunchOptions, port: int = 0) -> str:
    """Each host with its ranks and parts, and the command there. What a preflight would find out is in capitals."""
    lines, begin = [], 0
    num_with_ranks = sum(not host.assists for host in hosts)
    told = []
    if len(hosts) > num_with_ranks:
        told = ['GNNSYS_ASSISTANTS="$ASSISTANTS"']
        listening = [f"{host.name}=tcp://{host.address}:PORT" for host in hosts if host.assists]
        words = [hosts[0].python, "-m", "gnnsys.cli", "assist", "--make", *listening]
        lines += ["once, for a key and where hosts without ranks listen:", f"  ASSISTANTS=$({shlex.join(words)})"]
    for number, host in enumerate(hosts):
        count = host.num_ranks(0) if host.assists or host.slots or host.gpus is not None else 0
        ranks = "one rank per GPU"
        if count and begin >= 0:
            ranks = f"rank {begin}" if count == 1 else f"ranks {begin} to {begin + count - 1}"
        elif count:
            ranks = "1 rank" if count == 1 else f"{count} ranks"
        begin = begin + count if count and begin >= 0 else -1
        parts = "" if host.parts is None else f", serves parts {','.join(map(str, host.parts)) or 'none'}"
        where = "" if host.address == host.name else f" ({host.address})"
        lines.append(f"{host.name}{where}: {'no ranks' if host.assists else ranks}{parts}")
        variables = [shlex.quote(f"{name}={value}") for name, value in rank_env(host, options).items()] + told
        place = torchrun_options(num_with_ranks, number, count or "GPUS", hosts[0], port or "PORT")
        if host.assists:
            words = [host.python, "-m", "gnnsys.cli", "assist"]
            lines.append(f"  cd {shlex.quote(host.workdir)} && env {' '.join(variables)} {shlex.join(words)}")
            continue
        words = [host.python, "-m", "torch.distributed.run", *place, *script_words(options, command)]
        lines.append(f"  cd {shlex.quote(host.workdir)} && env {' '.join(variables)} {shlex.join(words)}")
    if options.restarts:
        lines.append(f"again on all hosts where it fails: {options.restarts} times at most")
    return "\n".join(lines) + "\n"
