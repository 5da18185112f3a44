"""Shared settings: strict promotion, eight CPU devices, a persistent compilation cache, fixtures."""

import json
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = "--xla_force_host_platform_device_count=8"
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
# The slow tests' large programs are compiled once: nothing is won by storing them, and jaxlib 0.10.2 has been seen
# to crash while it serialised one for the cache.
jax.config.update("jax_enable_compilation_cache", not os.environ.get("JAXRL_TEST_OPTIMISED"))


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
