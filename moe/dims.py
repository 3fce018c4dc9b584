"""The dimension key: one letter for each logical dimension, the same in every file.

An array's name ends in its letters and every einsum repeats them, so that
`jnp.einsum("EGCM,EMH->EGCH", x_EGCM, wi_EMH)` can be checked by eye. The words are the names that
`moe.sharding` maps to mesh axes; a letter says nothing about layout.
"""

from __future__ import annotations

DIMS = {
    "B": "batch",  # rows of a batch
    "L": "length",  # tokens in a row
    "T": "memory",  # tokens attended to, where they are not those of L
    "G": "groups",  # independent routing groups
    "S": "group_tokens",  # tokens in a group
    "E": "experts",
    "A": "expert_groups",  # equal parts of the experts, for example those of one node
    "C": "slots",  # places an expert has for one group: the expert capacity
    "K": "choices",  # experts a token is sent to
    "M": "model",
    "H": "hidden",
    "N": "heads",
    "D": "head",
    "V": "vocabulary",
    "Y": "layers",  # layers of one kind, stacked for a scan
}
