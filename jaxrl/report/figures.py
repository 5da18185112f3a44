"""Pictures of the kernel check and of single prompts or probes, from plain arrays.

They read what ``jaxrl check`` leaves in its folder (SCIENCE.md C.3), so its output can be drawn
without the model. Natural logarithms, sums over response tokens (nats), SGD steps of size eta on
``A_n S_n`` from one fixed set of parameters. N training rows, M probe rows, E step sizes.

``pairs.npz`` (one training row moves one probe row):
    eta           [E]        step sizes
    delta         [E, N, M]  measured change of S_m after the step on row n alone, nats
    kernel        [N, M]     K_nm = <grad S_n, grad S_m>, nats^2 per squared parameter unit
    advantage     [N]        A_n
    bound_c       scalar     C = (G - 1) / sqrt(G), the largest |A| a group of G can have
    second_order  [E, N, M]  the term eta^2 A_n^2 / 2 g_n^T H_m g_n alone (not added to the first), nats

``batch.npz`` (all training rows in one step, with their loss weights):
    eta               [E]
    measured          [E, M]  change of S_m, nats
    predicted         [E, M]  eta sum_n w_n A_n K_nm, nats
    predicted_second  [E, M]  ``predicted`` plus the second-order term, nats
    kernel            [N, M]
    weight_advantage  [N]     w_n A_n
    advantage         [N]     A_n
    probe_norm        [M]     |grad S_m|, nats per parameter unit

``check.json``: the scalars of ``kernel_check`` in summary.json (slope_single, slope_batch,
slope_second_order, sign_agreement, violations_single, violations_batch, tightness_quantiles,
adam_residual), and ``tables``: {"T-C1": [{column: value, ...}, ...], "T-C2": ..., "T-C3": ...}. A
file ``T-C1.csv`` beside it is read where ``tables`` lacks one.

Figures of the decomposition A5 read ``eval/exact*.json`` of a run, written by an evaluation that
knows p exactly or from many samples: ``{"step": int, "uid": [...], "split": [...], "p_base": [...],
"p_now": [...], "delta_plus": [...]}``, one entry a prompt: the probability of a correct answer under
the base and now, and E over correct base answers of S_now - S_base (nats; null where the prompt
has no correct answer). The file with the largest step is used.
"""
