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

The error of a gradient by op is 24 to 41 dB, as SQNR (``test/activations/gradient_error.py``
measures it). Smaller groups would cost bytes and gain nothing: E4M3's 18 binades hold outliers.
Float32 scales would gain up to 1 dB in the gradients of a LLaMA block, for 2 % more bytes.

*What the scope does not reach* saves what torch saves: calls inside torch's own Python functions
(``nn.MultiheadAttention``) and autograd functions (``RMSNormCast`` and ``LayerNormCast`` save their
inputs in high precision), scripted modules, threads that forward starts, generators that run after
forward returned, DTensor, nested tensors, functorch, and activation checkpoints, which recompute
their ops just before backward.

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
