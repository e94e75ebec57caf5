"""The digits and the vision transformer of `bench_other_models`."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models import hex_digits
from benchmarks.models.vit import PATCH, TOKENS, ViT


def test_glyphs_are_sixteen_different_ones():
    glyphs = hex_digits.glyphs().flatten(1)
    assert glyphs.shape == (16, 35)
    assert len({tuple(glyph.tolist()) for glyph in glyphs}) == 16
    # Of the top row of 7 and the left column of E, by eye.
    assert glyphs[7].view(7, 5)[0].tolist() == [1, 1, 1, 1, 1]
    assert glyphs[14].view(7, 5)[:, 0].tolist() == [1] * 7
    assert glyphs[4].view(7, 5)[:, 0].tolist() == [0, 0, 0, 1, 1, 0, 0]


def test_images_follow_from_the_seed_and_are_never_the_same():
    (first, digits), (again, same), (other, _) = (hex_digits.draw(50, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert torch.equal(digits, same)
    assert not torch.equal(first[0], other[0])
    assert first.shape == (50, 1, hex_digits.SIDE, hex_digits.SIDE)
    assert len(digits.unique()) > 8
    assert not torch.equal(first[digits == digits[0]][0], first[digits == digits[0]][1])


def test_an_image_without_distortion_is_its_glyph(monkeypatch):
    """Nearest of the glyphs, drawn upright: the map does not mirror or turn them."""
    for name, value in (("ANGLE", 0), ("SHEAR", 0), ("SHIFT", 0), ("FAINT", 0), ("NOISE", 0)):
        monkeypatch.setattr(hex_digits, name, value)
    monkeypatch.setattr(hex_digits, "SIZES", (1.0, 1.0))
    images, digits = hex_digits.draw(200, 0)
    # The canvas is square and a glyph 5 x 7: five sevenths of the columns, all rows.
    height, width = hex_digits.SIDE, hex_digits.SIDE * 5 / 7
    rows = ((torch.arange(7) + 0.5) * height / 7).long()
    columns = ((torch.arange(5) + 0.5) * width / 5 + (hex_digits.SIDE - width) / 2).long()
    seen = images[:, 0][:, rows][:, :, columns].flatten(1)
    scores = seen @ nn.functional.normalize(hex_digits.glyphs().flatten(1)).T
    assert torch.equal(scores.argmax(1), digits)


def test_tokens_are_those_of_the_patches_and_one_more():
    model = ViT(1, 32, 1)
    seen = []
    model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    model.blocks.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    assert model(torch.randn(3, 1, 24, 24)).shape == (3, 16)
    assert TOKENS == 37 == (24 // PATCH) ** 2 + 1
    assert seen == [(3, 37, 32), (3, 32)]


def test_attention_is_torchs():
    torch.manual_seed(0)
    attention = ViT(1, 64, 2).blocks[0].attention
    x = torch.randn(3, 37, 64)
    theirs = nn.MultiheadAttention(64, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(attention.qkv.weight)
        theirs.in_proj_bias.copy_(attention.qkv.bias)
        theirs.out_proj.load_state_dict(attention.proj.state_dict())
        torch.testing.assert_close(attention(x), theirs(x, x, x)[0])


def test_every_patch_and_its_place_reach_the_class_token():
    torch.manual_seed(0)
    model, image = ViT(1, 32, 1), torch.randn(1, 1, 24, 24)
    base = model(image)
    for patch in range(0, 36, 7):
        changed = image.clone()
        changed[..., patch // 6 * 4, patch % 6 * 4] += 1
        assert not torch.equal(model(changed), base)
    assert not torch.allclose(model(image.flip(-1)), base, rtol=1e-3)
