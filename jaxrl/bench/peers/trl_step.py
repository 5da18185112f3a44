"""One step of TRL's ``GRPOTrainer`` on given rows: its ``training_step``, clipping, AdamW.

Included: forward and backward pass, and what its loss computes and logs beside (entropy, clip ratios).
Left out, in its favour: the dataloader, generation and scoring, and transformers' loop around the step.
"""

import tempfile

import datasets
import tokenizers
import torch
import transformers
import trl
from given import checked, counted, parts, split
from protocol import read_job, serve


def make_trainer(world, folder, size):
    """A trainer of micro-batches of ``size`` rows on the CPU, single precision, no gradient checkpointing, as in the other cases."""
    config = world["config"]
    rows, width = world["tokens"].shape
    settings = trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=rows // size,
        num_generations=config["n"],
        max_completion_length=width - int(world["start"][0]),
        learning_rate=config["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=config["clip"],
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        beta=0.0,
        epsilon=config["epsilon"],
        loss_type="grpo",
        report_to=[],
        max_steps=10**6,
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<pad>": config["pad"]}, unk_token="a"))
    return trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * rows),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"
        ),
    )


def stepper(trainer, world, slices):
    """A call that takes one optimiser step, in the order of transformers' training loop, and returns its loss."""
    prompts, completions, mask, old = (torch.tensor(x) for x in split(world))
    inputs = {
        "prompt_ids": prompts.long(),
        "prompt_mask": torch.ones_like(prompts).long(),
        "completion_ids": completions.long(),
        "completion_mask": mask.long(),
        "advantages": torch.tensor(world["advantage"]),
        "old_per_token_logps": old,
    }
    batches = [{name: x[part] for name, x in inputs.items()} for part in slices]
    trainer.create_optimizer_and_scheduler(num_training_steps=10**6)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped, trainer.optimizer = model, optimizer
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer._prepare_inputs = lambda batch: batch  # nothing is generated: the rows are given

    def call():
        loss = 0
        for i, batch in enumerate(batches):
            trainer.accelerator.gradient_state._set_sync_gradients(i == len(batches) - 1)
            loss = loss + trainer.training_step(model, batch, None)
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
        return loss

    return call


def main():
    """Serve the one case."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    world, case = read_job()
    slices = parts(world, case)
    versions = {"trl": f"{trl.__version__} on transformers {transformers.__version__}", "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        call = stepper(make_trainer(world, folder, slices[0].stop), world, slices)
        serve(counted(call, world), versions, check=lambda: checked(call, world))


if __name__ == "__main__":
    main()
