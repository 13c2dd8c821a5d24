"""What compiled kernels of the CPU are written in and how they run; attention and layers have theirs beside them.

kernel.py   a compiled function that several threads can run at once
lanes.py    arithmetic on 16 numbers at once
threads.py  runs a kernel on torch's own threads
"""
