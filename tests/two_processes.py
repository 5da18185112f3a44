"""The same script in two processes that share four devices."""

import pathlib
import socket
import subprocess
import sys

START = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("localhost:{port}", 2, int(sys.argv[1]))
assert jax.device_count() == 4 and jax.local_device_count() == 2
"""


def run_in_two_processes(script: str, out: pathlib.Path) -> list[str]:
    """Run ``script`` twice; each finds its own file name in ``sys.argv[2]``, without an ending. Returns the two names."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    here = pathlib.Path(__file__).parent
    env = {"PYTHONPATH": str(here), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": str(out)}
    command = [sys.executable, "-c", START.replace("{port}", str(port)) + script]
    names = [str(out / f"of{i}") for i in range(2)]
    children = [
        subprocess.Popen([*command, str(i), name], env=env, stderr=subprocess.PIPE, text=True)
        for i, name in enumerate(names)
    ]
    for child in children:
        _, said = child.communicate(timeout=300)
        assert child.returncode == 0, said[-3000:]
    return names
