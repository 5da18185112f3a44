"""Shared settings: strict promotion, eight CPU devices, a persistent compilation cache, fixtures."""

import gc
import json
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = "--xla_force_host_platform_device_count=8"
# Eight devices on two cores: collectives of one program must not overtake one another, and starved ones may take long.
FLAGS += (
    " --xla_cpu_enable_concurrency_optimized_scheduler=false --xla_cpu_collective_call_terminate_timeout_seconds=300"
)
# Most of the suite's time is compilation of programs that run once on tiny arrays: without LLVM's
# expensive passes it halves. JAXRL_TEST_OPTIMISED=1 compiles as the product does (CI's slow tests).
if not os.environ.get("JAXRL_TEST_OPTIMISED"):
    FLAGS += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


# A compiled program maps dozens of pieces of memory, and Linux gives a process 65,530 of them: a worker that had run
# some fifty files crashed in the compiler with 57,000.
MAPS = 25_000


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Forgets compiled programs after a file when the process holds many."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64():
    """Runs the test in double precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of specification and benchmark files beside the checkout; absent in a fresh clone."""
    folder = pathlib.Path(os.environ.get("JAXRL_SHARED", ROOT.parent / "shared"))
    if not (folder / "spec" / "golden.json").exists():
        pytest.skip("the shared folder of specification and data files is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def golden(shared) -> dict:
    """The machine-readable golden numbers."""
    return json.loads((shared / "spec" / "golden.json").read_text())
