"""Waits for a process to end, then ends whatever it had started and left behind: python recipes/reap.py PID

train.py starts it beside every private Ray. A run that is killed outright cannot clean up after itself, and some of
Ray's own agents then stay. It follows process ids together with their start times, so a reused id is never hit.
"""

import sys
import time

import psutil


def main(pid: int) -> None:
    family: set[psutil.Process] = set()
    try:
        watched = psutil.Process(pid)
        while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
            family |= set(watched.children(recursive=True))
            time.sleep(1)
    except psutil.NoSuchProcess:
        pass
    time.sleep(5)                      # what ends by itself may do so in order
    for process in family - {psutil.Process()}:
        try:
            if process.is_running():
                process.kill()
        except psutil.NoSuchProcess:
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
