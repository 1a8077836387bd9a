"""Masks against the drawings of the specification, typed by hand."""

import textwrap

import torch

from models.masks import block_mask, cwm_mask, picture

#: Section 7, first drawing: G_0, G_1, G_2 and the noisy target G_3.
ONE_TARGET = """
    x....|..
    xxx..|..
    xxx..|..
    xxxxx|..
    xxxxx|..
    -----+--
    xxxxx|xx
    xxxxx|xx
"""

#: Section 7, second drawing: clean 0..2, noisy 1..3; every cell of blocks 1 and up is two latent frames.
ALL_TARGETS = """
    x....|......
    xxx..|......
    xxx..|......
    xxxxx|......
    xxxxx|......
    -----+------
    x....|xx....
    x....|xx....
    xxx..|..xx..
    xxx..|..xx..
    xxxxx|....xx
    xxxxx|....xx
"""


def drawn(text: str) -> str:
    return textwrap.dedent(text).strip()


def test_one_target() -> None:
    block = torch.tensor([0, 1, 1, 2, 2, 3, 3])
    assert picture(cwm_mask(block, block == 3), lines=[5]) == drawn(ONE_TARGET)


def test_all_targets() -> None:
    block = torch.tensor([0, 1, 1, 2, 2, 1, 1, 2, 2, 3, 3])
    assert picture(cwm_mask(block, torch.arange(11) >= 5), lines=[5]) == drawn(ALL_TARGETS)


def test_a_target_without_its_twin_sees_the_same_as_one_with_it() -> None:
    """Clean frames of the target's block or later, as in a padded batch, are hidden from it."""
    block = torch.tensor([[0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 2, 2, 1, 1]])
    target = torch.arange(7) >= 5
    both = cwm_mask(block, target)
    assert picture(both[0], lines=[5]) == drawn(ONE_TARGET)
    assert picture(both[1, 5:]) == "x....xx\nx....xx"


def test_evidence_alone() -> None:
    block = torch.tensor([0, 1, 1, 2, 2])
    assert picture(block_mask(block)) == "\n".join(row[:5] for row in drawn(ONE_TARGET).splitlines()[:5])


def test_every_entry_becomes_a_square_of_tokens() -> None:
    block = torch.tensor([0, 1, 1])
    assert picture(block_mask(block, tokens_per_frame=2)) == "xx....\nxx....\n" + "\n".join(["xxxxxx"] * 4)


def test_no_row_is_empty() -> None:
    block = torch.tensor([0, 1, 1, 2, 2, 1, 1, 2, 2, 3, 3])
    assert cwm_mask(block, torch.arange(11) >= 5, tokens_per_frame=3).any(dim=-1).all()
