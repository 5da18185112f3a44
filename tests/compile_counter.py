"""How many programs XLA compiles."""

import contextlib

import jax


@contextlib.contextmanager
def count_compiles():
    """Yields a list that receives an entry a compilation, of whatever program."""
    compiled = []

    def listen(event, _seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
