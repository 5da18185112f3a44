"""Scripts that other libraries' own Pythons run: nothing of ``jaxrl`` is imported here.

Each computes what its subject asks on the same weights and rows, written by ``jaxrl.bench.world`` or
``jaxrl.bench.workloads``, and is driven over a pipe as ``protocol`` says.
"""
