"""`saved_activations`: ops save what their backward reads as float8 copies.

Float8 layers save their inputs in float8 already. More than half of the bytes that a LLaMA block
saves are those of norms, activations and products of two tensors. Inside ::

    with float8.saved_activations(model):
        loss = model(batch)
    loss.backward()

these ops save float8 copies instead, with one scale per group of 128 elements (COAT, arXiv
2410.19313, section 5). Forward values do not change by a bit: torch computes each op from the
original tensors, and only backward reads the copy. Gradients are torch's own derivatives at the
values of the copy. Values that are cheap to recompute from a copy (rstd, ``silu(gate)`` for the
product with ``up``) are not saved. relu and dropout save one bit per element and lose nothing.

The error of the gradients by op, as SQNR in dB of each op's worst gradient
(``test/activations/gradient_error.py`` measures it). Inputs are normal, or one element of each 64
is 1000 times larger, like single features of a residual stream:

============== ====== ====== ========= =========
op             normal normal outliers  outliers
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

Smaller groups cost bytes and gain nothing: E4M3's 18 binades hold these outliers. Float32 scales
gain up to 1 dB in the gradients of a LLaMA block, for 2 % more bytes.

*Why ops, and not* `torch.autograd.graph.saved_tensors_hooks`? Saved bytes of one converted LLaMA
block (hidden 512, 256 tokens, bfloat16, CPU, without parameters), relative to the block in
bfloat16. At the sizes of LLaMA-3-8B the last line is 0.38x too; relative to a GPU's RMSNorm, which
saves less, it is 0.50x:

================================================== =====
converted layers alone                             0.88x
and hooks that cast all other saved tensors        0.43x
the same, but not attention's tensors              0.47x
and a function mode, with a backward for each op   0.38x
================================================== =====

Hooks see tensors, not ops. They save ``silu(gate)`` beside gate, cannot leave one op out, and cast
attention's tensors: its gradient then has an SQNR of 25 dB at logits of standard deviation 1, but
7 dB at 9 and -17 dB at 36 (``float8/activations/ops.py`` explains why). Both ways take the same
time within the noise.

*What the scope does not reach* saves what torch saves: calls inside torch's own Python functions
(``nn.MultiheadAttention``) and autograd functions (``RMSNormCast``, ``LayerNormCast``,
``SwiGLUCast`` save their inputs in high precision), scripted modules, threads that forward starts,
generators that run after forward returned, DTensor, nested tensors, functorch, and activation
checkpoints, which recompute their ops just before backward.

*Where no memory is saved.* Ops that are not in the table (batch_norm, divisions, losses,
``nn.LSTM``) and in-place ops (``nn.SiLU(inplace=True)``) save what torch saves. torch saves the
outputs of relu, sigmoid and tanh; a following unconverted linear or convolution saves the same
tensor in full, so the copy comes on top: 1.17x the bytes with ``nn.Tanh``, 1.02x with ``nn.ReLU``.
Convert the layers first, or skip these ops. torch.compile recomputes norms and SwiGLU by itself: an
unconverted LLaMA block (hidden 256, 128 tokens) saves 0.67x under inductor, 0.51x with the scope.

*A norm that is written out*, as in many public LLaMA models, saves 2 bytes per element instead of 6
(in bfloat16): copies of x32 and of the factor of w::

    x32 = x.float()
    out = w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

rstd is saved as it is, and x's gradient has an SQNR of 48 dB. A converted block with two such norms
and separate projections (hidden 512, 256 tokens) saves 0.58x under the scope.
"""

from float8.activations.scope import saved_activations

__all__ = ["saved_activations"]
