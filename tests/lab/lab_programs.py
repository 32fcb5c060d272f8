"""Small programs that tests run on hosts of the lab; none of them needs torch."""

LISTEN = """
import socket, sys, time
server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
print("port", server.getsockname()[1], flush=True)
server.settimeout(120)
connection, _ = server.accept()
connection.settimeout(120)
buffer, total, start = bytearray(1 << 20), 0, None
while count := connection.recv_into(buffer):
    start, total = start or time.perf_counter(), total + count
print("received", total, time.perf_counter() - start, flush=True)
"""

SEND = """
import socket, sys
host, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.create_connection((host, port), timeout=120) as connection:
    chunk = bytes(1 << 20)
    for first in range(0, size, len(chunk)):
        connection.sendall(chunk[: size - first])
"""

REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
    print("reached")
except OSError as error:
    print("lost", type(error).__name__)
"""

SPIN = """
import time
while time.process_time() < 0.15:  # a second and more of three at four tenths of a core
    pass
print(time.process_time())
"""

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rows = torch.full((1_000_000,), float(dist.get_rank() + 1))
dist.all_reduce(rows)
print("sum", rows.min().item(), rows.max().item(), os.uname().nodename)
dist.destroy_process_group()
"""

RANK = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "with", os.environ["MASTER_ADDR"])
"""
