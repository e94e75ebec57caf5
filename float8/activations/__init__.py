"""L4: what ops keep for their backward, in float8: `saved_activations`.

Beside its layers, which save their inputs in float8 themselves, a model keeps for backward what its
norms, activations and products of two tensors read: half of a LLaMA block's bytes and more. Under

    with float8.saved_activations(model):
        loss = model(batch)
    loss.backward()

those ops keep float8 codes instead, one scale per group of 128 elements (COAT, arXiv 2410.19313,
section 5, keeps them so). Forward values do not change by a bit: each op runs as torch runs it, on
the tensors as they are, and only its backward sees the copy. A gradient is torch's own derivative
at the decoded copy; what is cheap to compute again from it (rstd, ``silu(gate)`` for the product
with ``up``) is not kept at all. Of relu and dropout one bit per element is kept, and nothing lost.

The gradient's error, op by op (``python -m float8.activations.measure``; what each column means is
said there), SQNR in dB:

============== ====== ====== ========= =========
op             normal        with outliers
-------------- ------------- -------------------
group          1x128  1x16   1x128     1x16
============== ====== ====== ========= =========
rms_norm       31.5   31.5   35.3      35.3
layer_norm     31.4   31.4   35.3      35.3
silu           40.6   40.6   40.7      40.7
gelu           41.1   41.1   41.1      41.2
gelu (tanh)    41.1   41.1   41.1      41.2
sigmoid        39.8   39.8   39.8      39.8
tanh           35.7   35.7   35.7      35.7
mul            31.5   31.5   30.8      30.8
silu(a) * b    29.8   29.8   30.9      30.9
relu           inf    inf    inf       inf
dropout        inf    inf    inf       inf
softmax        31.2   31.2   15.3      15.3
linear         31.5   31.5   31.2      31.2
============== ====== ====== ========= =========

Smaller groups cost bytes and buy nothing: E4M3's 18 binades hold these outliers. Float32 scales buy
up to 1 dB in the gradients of a LLaMA block, for 2 % more bytes (`groups`).

*Why ops and not* `torch.autograd.graph.saved_tensors_hooks`? Measured on one converted LLaMA block
(hidden 512, 256 tokens, bfloat16, CPU), saved bytes beside those of the same block in bfloat16,
parameters left out (at the sizes of LLaMA-3-8B the last is 0.38x too; beside a GPU's RMSNorm, which
keeps less, 0.50x):

================================================== =====
converted layers alone                             0.88x
and hooks that encode what else is saved           0.43x
the same, attention's tensors spared               0.47x
and a function mode, with a backward for each op   0.38x
================================================== =====

Hooks see tensors, not ops: they keep ``silu(gate)`` beside gate, cannot leave one op out, and
encode attention, whose gradient then has an SQNR of 25 dB at logits of standard deviation 1, but
7 dB at 9 and -17 dB at 36 (`ops` says why). Both take the same time, within the noise of the block.

What the mode cannot reach, it leaves to torch: what runs inside one of torch's own Python functions
(``nn.MultiheadAttention``) or inside an autograd function (``RMSNormCast`` and ``SwiGLUCast`` keep
their inputs in high precision), tensor subclasses such as DTensor, functorch, and activation
checkpoints, which keep nothing of their ops and recompute them just before their backward.

``groups``: encoding; ``derivatives``: gradients; ``keeper``: a tensor is kept once; ``keeping``:
autograd functions; ``calls``: spellings; ``ops``: the table; ``saved``: the scope; ``measure``.

May import: L3 and below.
"""

from float8.activations.saved import saved_activations

__all__ = ["saved_activations"]
