"""The most memory that a child of the suite ever had: its ru_maxrss would begin with what the suite itself has."""

# Source for `python -c`: peak_kib(), the KiB of memory at most so far (Linux: VmHWM, which begins with the program).
PEAK = """
def peak_kib():
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
"""
