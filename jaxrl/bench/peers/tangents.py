"""The empirical kernel of neural-tangents 0.6.5, on the jax it was last made for.

The model is a tied Llama with query, key and value biases, in the shapes of ``jaxrl.models``.
The package's own ``__init__`` imports TensorFlow, which the empirical kernel does not use: an empty
package of its name stands in. Its structured derivatives are left out: on a model of 125 thousand
parameters they took 17 GB.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from protocol import read_job, serve


def empirical():
    """``neural_tangents._src.empirical``, without running the package's ``__init__``."""
    spec = importlib.util.find_spec("neural_tangents")
    if spec is None:
        raise ImportError("neural_tangents is not installed here")
    stub = types.ModuleType("neural_tangents")
    stub.__path__ = list(spec.submodule_search_locations or ())
    stub.__spec__ = importlib.machinery.ModuleSpec("neural_tangents", None, is_package=True)
    sys.modules["neural_tangents"] = stub
    return importlib.import_module("neural_tangents._src.empirical")


def scores(params, packed, config):
    """``sum_t weights * log-prob``, ``[B, 1]``, of rows packed as ``[B, T, 2]``: ids (exact below 2**24) and weights."""
    tokens, weights = packed[..., 0].astype(jnp.int32), packed[..., 1]
    cos, sin = rope(tokens.shape[1], config)
    layers = {name[len("layers.") :]: leaf for name, leaf in params.items() if name.startswith("layers.")}
    x, _ = jax.lax.scan(lambda x, p: (layer(p, x, cos, sin, config), None), params["embed"][tokens], layers)
    states = norm(x, params["norm"], config["norm_eps"])[:, :-1]
    logits = states @ params["embed"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(picked * weights[:, 1:], axis=-1, keepdims=True)


def norm(x, gain, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def rope(width, config):
    half = jnp.arange(0, config["head_dim"], 2) / config["head_dim"]
    angle = jnp.arange(width)[:, None] / (config["rope_theta"] ** half)[None]
    return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def rotate(x, cos, sin):
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def layer(p, x, cos, sin, config):
    """One decoder layer on ``x [B, T, d]``."""
    y = norm(x, p["attn_norm"], config["norm_eps"])
    q, k, v = (project(p, name, y) for name in "qkv")
    x = x + jnp.einsum("bthe,hed->btd", attention(rotate(q, cos, sin), rotate(k, cos, sin), v), p["o"])
    y = norm(x, p["mlp_norm"], config["norm_eps"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def project(p, name, y):
    return jnp.einsum("btd,dhe->bthe", y, p[name]) + p[f"{name}_bias"]


def attention(q, k, v):
    """Causal grouped-query attention, ``[B, T, heads, head_dim]``."""
    batch, width, heads, size = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, width, groups, heads // groups, size)
    scores = jnp.einsum("btgre,bcge->bgrtc", q, k) / size**0.5
    seen = jnp.tril(jnp.ones((width, width), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bgrtc,bcge->btgre", weights, v).reshape(batch, width, heads, size)


def main():
    """Serve the case that the command line names: the library, a space, and the implementation."""
    world, case = read_job()
    nt = empirical()
    ntk = nt.empirical_ntk_fn(
        lambda params, x: scores(params, x, world["config"]),
        trace_axes=(-1,),
        vmap_axes=0,
        implementation=nt.NtkImplementation[case.split()[1]],
    )
    params = {name[len("model.") :]: jnp.asarray(x) for name, x in world.items() if name.startswith("model.")}
    a, b = (jnp.asarray(np.stack([world[f"tokens_{s}"], world[f"weights_{s}"]], -1), jnp.float32) for s in "ab")
    kernel = jax.jit(ntk)
    # no temporary memory: this jax reports 0 on the CPU
    version = f"{importlib.metadata.version('neural-tangents')} on jax {jax.__version__}"
    serve(lambda: np.asarray(kernel(a, b, params)), {"neural-tangents": version})


if __name__ == "__main__":
    main()
