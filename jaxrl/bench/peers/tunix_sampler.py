"""The ``Sampler`` of google-tunix: temperature 1, the whole distribution. No log-probabilities, its default.

Prompts are repeated n times, as its learner does; where there are more samples than slots, static
batches run one after the other, each to its longest response.
"""

import jax
import numpy as np
import tunix_model
from batches import static_batches, useful
from jax import numpy as jnp
from protocol import read_job, serve
from tunix.generate import sampler as sampler_lib
from tunix.generate import utils


def sample(sampler, batches, seeds):
    """All requests once; the number of useful tokens."""
    made = 0
    for prompts, n, wanted in batches:
        texts = [" ".join(map(str, row)) for row in np.repeat(prompts, n, axis=0)]
        out = sampler(
            texts,
            max_generation_steps=int(wanted.max()),
            max_prompt_length=prompts.shape[1],
            temperature=1.0,
            top_p=1.0,
            seed=next(seeds),
            eos_tokens=[-1],
        )
        lengths = {len(row) for row in out.tokens}
        if len(lengths) != 1:
            raise ValueError(f"expected responses of one length, got {sorted(lengths)}")
        made += useful(np.stack(out.tokens), wanted)
    return made


def last_logits(model, prompts):
    """Logits after each prompt, without the last id, which our own sampler leaves out."""
    tokens = jnp.asarray(prompts)
    mask = jnp.ones(tokens.shape, bool)
    positions = utils.build_positions_from_mask(mask)
    logits, _ = model(tokens, positions, None, utils.make_causal_attn_mask(mask, tokens.shape[1]))
    return np.asarray(logits[:, -1, :-1])


def main():
    """Serve the one case."""
    jax.config.update("jax_platforms", "cpu")
    world, _ = read_job()
    model, batches = tunix_model.load(world["config"]["model"]), static_batches(world)
    config = model.config
    room = world["tokens"].shape[1] + int(world["lengths"].max())
    sampler = sampler_lib.Sampler(
        model,
        tunix_model.Tokenizer(pad=config.vocab_size),  # an id that does not exist: no token is taken for padding
        sampler_lib.CacheConfig(
            cache_size=room, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        ),
    )
    seeds = iter(range(2**31))
    call, check = lambda: sample(sampler, batches, seeds), lambda: last_logits(model, world["checked"])
    serve(call, tunix_model.versions(), check=check)


if __name__ == "__main__":
    main()
