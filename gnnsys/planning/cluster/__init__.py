"""The machines that a job may run on, as a file describes them: names, cores, memory, GPUs, rates, disks."""
