"""``generate`` of transformers on one thread: dynamic cache, temperature 1, the whole distribution.

The n samples of a prompt are its ``num_return_sequences``; where there are more samples than slots,
static batches run one after the other, each to its longest response.
"""

import torch
import transformers
from batches import static_batches, useful
from protocol import read_job, serve


def load(folder):
    """The model, single precision, with the attention that transformers chooses."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def sample(model, batches):
    """All requests once; the number of useful tokens."""
    made = 0
    for prompts, n, wanted in batches:
        prompts = torch.tensor(prompts).long()
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=transformers.GenerationConfig(
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=n,
                max_new_tokens=int(wanted.max()),
                eos_token_id=None,
                pad_token_id=0,
                use_cache=True,
            ),
        )
        made += useful(out[:, prompts.shape[1] :], wanted)
    return made


@torch.inference_mode()
def last_logits(model, prompts):
    """Logits after each prompt, without the last id, which our own sampler leaves out."""
    return model(torch.tensor(prompts).long(), logits_to_keep=1).logits[:, -1, :-1].numpy()


def main():
    """Serve the one case."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    world, _ = read_job()
    model, batches = load(world["config"]["model"]), static_batches(world)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    serve(lambda: sample(model, batches), versions, check=lambda: last_logits(model, world["checked"]))


if __name__ == "__main__":
    main()
