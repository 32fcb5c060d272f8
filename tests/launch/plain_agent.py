"""An agent as it is, but that a job is any command: what is asked of processes does not need torchrun's seconds.

Of torchrun's arguments it keeps the number of the host, as the variable NODE, and runs the script by itself.
"""

import sys

from gnnsys.launch import agent


def plain_command(folder: str, grace: float, arguments: list[str]) -> list[str]:
    options = [word for word in arguments if word.startswith("--") and "=" in word]
    node = [word.replace("--node-rank", "NODE") for word in options if word.startswith("--node-rank=")]
    rest = [word for word in arguments if word not in options]
    return ["env", *node, sys.executable, "-I", "-S", *rest] if options else rest


agent.torchrun_command = plain_command

if __name__ == "__main__":
    agent.main()
