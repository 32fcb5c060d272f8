"""Schedules of batches on cores, bus and GPU: pure functions of seconds, without torch and without a clock.

`operations` says what is scheduled, `shares` bounds it, `simulate` places it in time, `grouping` is DAHA's Algorithm 1,
`sampling_turns` divides sampling between host and device.
"""
