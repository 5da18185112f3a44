"""Scripts that other libraries' own Pythons run: nothing of ``jaxrl`` is imported here.

Each computes the kernel of the same weights and rows, written by ``jaxrl.bench.world``, and is
driven over a pipe as ``protocol`` says.
"""
