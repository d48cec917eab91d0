"""Router scores of ``transformer_engine.pytorch.router``: top-k of the logits, softmax over the chosen.

Legend: T tokens, E experts. Source: transformer_engine/pytorch/router.py.
"""

import torch

from te_reference.modules import _require


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights of every token.

    Args:
        logits: [T, E].
        topk: experts per token.
        use_pre_softmax: only False: softmax over the chosen logits, so that the weights of a token add up to 1.
        num_groups, group_topk, scaling_factor, expert_bias: only None (a bias goes with other score functions).
        score_function: only ``softmax``.

    Returns:
        weights [T, E] in the dtype of the logits, 0 where not chosen; routing map [T, E] bool.
    """
    _require(score_function == "softmax", f"score_function={score_function!r}: te_reference has softmax only.")
    _require(not use_pre_softmax, "use_pre_softmax=True: te_reference has the softmax over the chosen logits only.")
    unused = {"num_groups": num_groups, "group_topk": group_topk, "scaling_factor": scaling_factor}
    unused["expert_bias"] = expert_bias
    given = [name for name, value in unused.items() if value is not None]
    _require(not given, f"{', '.join(given)}: te_reference has None only.")
    chosen_TA, expert_TA = logits.topk(topk, dim=-1)
    weights_TA = chosen_TA.float().softmax(dim=-1).to(logits.dtype)
    weights_TE = torch.zeros_like(logits).scatter(-1, expert_TA, weights_TA)
    return weights_TE, torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, expert_TA, True)
