"""An agent as it is, but that a job is any command: what is asked of processes does not need torchrun's seconds."""

from gnnsys.launch import agent

agent.torchrun_command = lambda report, logs, arguments: arguments

if __name__ == "__main__":
    agent.main()
