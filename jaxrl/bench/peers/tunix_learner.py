"""One step of google-tunix's GRPO: its registered policy loss through its RL trainer's compiled train step.

Included: forward and backward pass, the metrics that its loss computes beside (entropy among them),
global norm, clipping, AdamW. Left out, in its favour: the loop around it, which logs and checkpoints.
"""

import jax
import numpy as np
import optax
import tunix_model
from given import checked, counted, parts, split
from jax import numpy as jnp
from protocol import read_job, serve
from tunix.rl import function_registry, trainer
from tunix.rl.grpo import grpo_learner
from tunix.sft import peft_trainer


def train_step(model, config, accumulated):
    """The compiled step, ``example -> (loss, metrics, gradient norm)``, as ``GRPOLearner`` sets its trainer up.

    The optimiser acts at every ``accumulated``-th call.
    """
    settings = grpo_learner.GRPOConfig(
        num_generations=2,
        num_iterations=2,
        beta=0.0,
        epsilon=config["epsilon"],
        loss_agg_mode="sequence-mean-token-mean",
    )
    settings.temperature = 1.0
    loss = function_registry.get_policy_loss_fn(settings.policy_loss_fn)
    adam = optax.adamw(config["lr"], b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0)
    made = trainer.Trainer(
        model,
        optax.chain(optax.clip_by_global_norm(config["clip"]), adam),
        peft_trainer.TrainingConfig(
            eval_every_n_steps=10**9, gradient_accumulation_steps=accumulated if accumulated > 1 else None
        ),
        custom_checkpoint_metadata_fn=dict,
    )
    made.with_loss_fn(
        lambda model, train_example, algo_config: loss(
            model, train_example, algo_config=settings, pad_id=config["pad"], eos_id=config["pad"]
        ),
        has_aux=True,
    )
    made.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": settings})
    return made.jit_train_and_eval_step(cache_nnx_graph=True)[0]


def main():
    """Serve the one case."""
    jax.config.update("jax_platforms", "cpu")
    world, case = read_job()
    prompts, completions, mask, old = split(world)
    examples = [
        grpo_learner.TrainExample(
            prompt_ids=jnp.asarray(prompts[part]),
            prompt_mask=jnp.ones(prompts[part].shape, bool),
            completion_ids=jnp.asarray(completions[part]),
            completion_mask=jnp.asarray(mask[part]),
            advantages=jnp.asarray(world["advantage"][part]),
            ref_per_token_logps=None,
            old_per_token_logps=jnp.asarray(old[part]),
        )
        for part in parts(world, case)
    ]
    step = train_step(tunix_model.load(world["config"]["model"]), world["config"], len(examples))

    def call():
        outcomes = [step(example) for example in examples]
        return np.mean([np.asarray(loss) for loss, *_ in jax.block_until_ready(outcomes)])

    serve(counted(call, world), tunix_model.versions(), check=lambda: checked(call, world))


if __name__ == "__main__":
    main()
