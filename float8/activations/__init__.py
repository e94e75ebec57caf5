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
pow            31.5   31.5   30.8      30.8
pow (x^3)      25.4   25.4   24.4      24.4
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
(``nn.MultiheadAttention``) or inside an autograd function (``RMSNormCast``, ``LayerNormCast`` and
``SwiGLUCast`` keep their inputs in high precision), a scripted module, a thread that forward
starts, or a forward that is a generator and runs after it returned; DTensor and nested tensors;
functorch; and activation checkpoints, which keep nothing of their ops and recompute them just
before their backward.

*Where nothing is saved.* Ops that are not in the table (batch_norm, divisions, losses, ``nn.LSTM``)
and those in place (``nn.SiLU(inplace=True)``) keep what torch keeps. And relu, sigmoid and tanh:
torch keeps their outputs, which a linear or convolution that nobody converted keeps too, in full.
Between such layers the codes, or bits, come on top: 1.17x the bytes with ``nn.Tanh``, 1.02x with
``nn.ReLU``. Convert the layers first, or skip these ops. And torch.compile computes norms and
SwiGLU again by itself: a LLaMA block whose layers nobody converted (hidden 256, 128 tokens) keeps
0.67x under inductor, and 0.51x with the scope.

*A norm that is spelt out*, as in many public LLaMA models, keeps 2 bytes per element in the place
of 6 (in bfloat16), codes of x32 and of what w multiplies::

    x32 = x.float()
    out = w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

rstd is kept as it is, and x's gradient has an SQNR of 48 dB. A block with two of these norms and
separate projections (hidden 512, 256 tokens) keeps 0.58x, converted and under the scope.

``groups``: encoding; ``derivatives``: gradients; ``keeper``: a tensor is kept once; ``keeping``:
autograd functions; ``calls``: spellings; ``ops``: the table; ``saved``: the scope; ``measure``.

May import: L3 and below.
"""

from float8.activations.saved import saved_activations

__all__ = ["saved_activations"]
