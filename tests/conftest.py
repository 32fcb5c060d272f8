"""A run in the background of a shell inherits an ignored Ctrl-C; the tests of interrupts need the usual one."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
