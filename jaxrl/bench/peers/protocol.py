"""How a benchmark's worker is driven: one JSON object a line on its output, one number a line on its input.

    worker   -> {"values": [[...]] | null, "temp_bytes": int | null, "versions": {...}, "seconds": s, "made": int | null}
    command  -> how many calls to time
    worker   -> {"seconds": of one call, "peak_rss_bytes": since the process began, "made": int | null}

The first line follows one call, compilation included, and gives what everybody should compute alike:
the result of that call, or of a check beside it where calls make something else (``made`` says how
much of it). Seconds are CPU-seconds of all threads of the worker, or by the wall where the job's
``clock`` says so. It ends when its input does. Only the standard library and numpy
are used, so that any Python from 3.9 on runs this.
"""

import json
import os
import resource
import sys
import time
import traceback

import numpy as np

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def read_job():
    """The world to compute on, as a dict of arrays and ``config``, and the case: the script's one argument.

    ``{"world": file, "case": name, "memory": bytes or null, "clock": "cpu" or "wall"}``: beyond so much memory of its own an
    allocation fails, where this system has such a limit, instead of taking down its neighbours.
    """
    job = json.loads(sys.argv[1])
    if job["memory"]:
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (job["memory"], job["memory"]))
        except (OSError, ValueError):  # the system knows no such limit, or a lower one holds already
            pass
    with np.load(job["world"]) as file:
        world = {name: file[name] for name in file.files}
    return {**world, "config": json.loads(str(world["config"]))}, job["case"]


def serve(call, versions, temp_bytes=None, check=None):
    """Answer until the input ends. ``call()`` computes once, to the end.

    It returns ``[N, M]`` to be compared, or None. With ``check`` it returns how much it made instead, and
    ``check()``, called once and first, returns what is compared.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints belongs to the messages
    checked = None if check is None else _tried(check)
    clock = CLOCKS[json.loads(sys.argv[1]).get("clock", "cpu")]
    seconds, result = _timed(call, 1, clock)
    made, values = (None, result) if check is None else (result, checked)
    values = None if values is None else np.asarray(values, np.float64).tolist()
    first = {"values": values, "temp_bytes": temp_bytes, "versions": versions, "seconds": seconds, "made": made}
    _say(answers, first)
    for line in sys.stdin:
        seconds, result = _timed(call, int(line), clock)
        made = None if check is None else result
        _say(answers, {"seconds": seconds, "peak_rss_bytes": peak_rss_bytes(), "made": made})


def peak_rss_bytes():
    """The most memory that this process has had resident.

    Linux's ``ru_maxrss`` would not do: it begins with what the process had that started this one.
    """
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _timed(call, calls, clock):
    values = None
    began = clock()
    for _ in range(calls):
        values = None  # the last call's result is not held through the next
        values = _tried(call)
    return max(clock() - began, 1e-9) / calls, values


def _tried(call):
    try:
        return call()
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"{type(error).__name__}: {error}")  # the last thing said is what went wrong


def _say(answers, message):
    answers.write(json.dumps(message) + "\n")
    answers.flush()
