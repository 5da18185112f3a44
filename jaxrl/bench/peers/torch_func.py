"""Per-row gradients by ``torch.func`` ``vmap(grad)`` and their dot products, on one thread.

The model is a tied Llama with query, key and value biases, in the shapes of ``jaxrl.models``.
One thread because torch's second one costs far more CPU-seconds than it saves on virtual machines.
"""

import torch
import torch.nn.functional as F
from protocol import read_job, serve
from torch.func import grad, vmap

CHUNK = 4  # rows
BLOCK = 4096  # numbers of a dot product that are added up before the rest


def score(params, tokens, weights, config):
    """``sum_t weights * log-prob`` of one row, ``tokens i64[T]``."""
    steps = tokens.shape[0] - 1
    cos, sin = rope(tokens.shape[0], config)
    x = params["embed"][tokens]
    for d in range(config["num_layers"]):
        p = {name[len("layers.") :]: leaf[d] for name, leaf in params.items() if name.startswith("layers.")}
        x = layer(p, x, cos, sin, config)
    states = norm(x, params["norm"], config["norm_eps"])[:steps]
    logits = states @ params["embed"].T
    picked = torch.gather(F.log_softmax(logits, dim=-1), 1, tokens[1:, None])[:, 0]
    return torch.sum(picked * weights[1:])


def norm(x, gain, eps):
    return x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + eps) * gain


def rope(width, config):
    half = torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"]
    angle = torch.arange(width, dtype=torch.float32)[:, None] / (config["rope_theta"] ** half)[None]
    return torch.cos(angle)[:, None], torch.sin(angle)[:, None]


def rotate(x, cos, sin):
    a, b = torch.chunk(x, 2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def layer(p, x, cos, sin, config):
    """One decoder layer on ``x [T, d]``."""
    y = norm(x, p["attn_norm"], config["norm_eps"])
    q, k, v = (project(p, name, y) for name in "qkv")
    x = x + attention(rotate(q, cos, sin), rotate(k, cos, sin), v) @ p["o"].flatten(0, 1)
    y = norm(x, p["mlp_norm"], config["norm_eps"])
    return x + (F.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def project(p, name, y):
    """``[T, heads, head_dim]``."""
    weight = p[name]
    return (y @ weight.flatten(1, 2)).unflatten(-1, weight.shape[1:]) + p[f"{name}_bias"]


def attention(q, k, v):
    """Causal grouped-query attention, ``[T, heads * head_dim]``."""
    width, heads, size = q.shape
    groups = k.shape[1]
    q = q.reshape(width, groups, heads // groups, size).permute(1, 2, 0, 3)
    scores = q @ k.permute(1, 2, 0)[:, None] / size**0.5
    hidden = torch.ones(width, width, dtype=torch.bool).triu(1)
    mixed = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v.permute(1, 0, 2)[:, None]
    return mixed.permute(2, 0, 1, 3).reshape(width, heads * size)


def kernel(params, sides, config, chunk=None):
    """``[N, M]``; all gradients at once, or those of all rows b and of ``chunk`` rows a at a time."""

    def gradients(tokens, weights):
        one = grad(lambda p, t, w: score(p, t, w, config))
        return vmap(one, (None, 0, 0), chunk_size=chunk)(params, tokens, weights)

    (tokens_a, weights_a), b = sides
    right = gradients(*b)
    size = chunk or len(tokens_a)
    parts = []
    for tokens, weights in zip(tokens_a.split(size), weights_a.split(size), strict=True):
        left = gradients(tokens, weights)
        parts.append(sum(dots(left[name].flatten(1), right[name].flatten(1)) for name in params))
    return torch.cat(parts)


def dots(x, y):
    """``x y^T`` of ``[N, P]`` and ``[M, P]``, ``BLOCK`` numbers at a time: one product over millions loses digits."""
    whole = x.shape[1] // BLOCK * BLOCK
    a, b = (side[:, :whole].unflatten(1, (-1, BLOCK)).transpose(0, 1) for side in (x, y))
    return (a @ b.transpose(1, 2)).sum(0) + x[:, whole:] @ y[:, whole:].T


def main():
    """Serve the case that the command line names."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    world, case = read_job()
    params = {name[len("model.") :]: torch.tensor(x) for name, x in world.items() if name.startswith("model.")}
    sides = [(torch.tensor(world[f"tokens_{s}"]).long(), torch.tensor(world[f"weights_{s}"])) for s in "ab"]
    chunk = {"torch.func whole": None, "torch.func chunks of 4": CHUNK}[case]
    serve(lambda: kernel(params, sides, world["config"], chunk).numpy(), {"torch": torch.__version__})


if __name__ == "__main__":
    main()
