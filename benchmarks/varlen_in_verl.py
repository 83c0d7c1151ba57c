"""FlashAttention on packed rows for verl, without the package flash_attn.

verl packs the answers of a micro-batch into one row (`use_remove_padding`), and
expects transformers to keep them apart with flash_attn. torch carries the same
kernels (`torch.nn.attention.varlen`). `register` gives them to transformers by
a name; it compares them with plain attention, forward and backward, at its
first use, and takes plain attention for each answer where they differ.

`grpo_in_verl.py` names it; it imports torch, so nothing else does.
"""

from typing import Any

NAME = 'torch_varlen'
# Relative difference of BF16 kernels that sum in another order, at most.
_TOLERANCE = 0.03


def register() -> None:
  """Makes `attn_implementation='torch_varlen'` known to transformers."""
  import torch
  import torch.nn.functional as F
  from transformers import AttentionInterface

  cached: dict[str, Any] = {}

  def bounds(position_ids):
    """Returns where answers begin in the row, and the longest's tokens."""
    last = cached.get('positions')
    if (
        last is None
        or last.data_ptr() != position_ids.data_ptr()
        or last.shape != position_ids.shape
    ):
      flat = position_ids.reshape(-1)
      starts = (flat == 0).nonzero().flatten()
      ends = starts.new_tensor([flat.numel()])
      cumulative = torch.cat([starts, ends]).to(torch.int32)
      # The tensor is held, so that no other one gets its address.
      cached['positions'] = position_ids
      cached['bounds'] = cumulative, int(cumulative.diff().max())
    return cached['bounds']

  def kernel(q, k, v, cumulative, longest, scale):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        *(q, k, v, cumulative, cumulative, longest, longest),
        scale=scale,
        window_size=(-1, 0),
    )

  def plain(q, k, v, cumulative, longest, scale):
    del longest
    parts = []
    edges = cumulative.tolist()
    for first, end in zip(edges[:-1], edges[1:], strict=True):
      one = [x[first:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
      out = F.scaled_dot_product_attention(*one, is_causal=True, scale=scale)
      parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)

  def difference(q) -> float:
    """Returns the largest relative difference, of output and gradients."""
    edges = torch.tensor([0, 7, 135, 300], device=q.device, dtype=torch.int32)
    with torch.enable_grad(), torch.autocast('cuda', enabled=False):
      inputs = [
          torch.randn(
              *(300, *q.shape[1:]),
              device=q.device,
              dtype=q.dtype,
              requires_grad=True,
          )
          for _ in range(3)
      ]
      results = []
      for attention in (kernel, plain):
        out = attention(*inputs, edges, 165, q.shape[2] ** -0.5)
        loss = out.float().square().sum()
        results.append([out, *torch.autograd.grad(loss, inputs)])
    return max(
        float((a - b).float().norm() / b.float().norm())
        for a, b in zip(*results, strict=True)
    )

  def chosen(q):
    if 'attention' not in cached:
      cached['attention'] = plain
      if q.is_cuda:
        try:
          found = difference(q)
          if found < _TOLERANCE:
            cached['attention'] = kernel
          words = f'differs from plain attention by {found:.1e}'
        except Exception as e:  # An older torch: slow, but right.
          words = f'{type(e).__name__}: {e}'
        name = cached['attention'].__name__
        print(f'torch_varlen: {words}; taken: {name}', flush=True)
    return cached['attention']

  def attend(
      module,
      query,
      key,
      value,
      attention_mask=None,
      dropout=0.0,
      scaling=None,
      position_ids=None,
      **_,
  ):
    del module, dropout
    if query.shape[0] != 1 or attention_mask is not None:
      raise ValueError(
          f'{query.shape[0]} rows, attention_mask'
          f' {attention_mask is not None}: torch_varlen reads one packed row'
          ' without a mask; set actor_rollout_ref.model.use_remove_padding=True'
      )
    cumulative, longest = bounds(position_ids)
    # (1, heads, tokens, size) to (tokens, heads, size).
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if q.dtype == torch.float32 and q.is_cuda:
      q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = chosen(q)(q, k, v, cumulative, longest, scaling)
    return out.unsqueeze(0), None

  AttentionInterface.register(NAME, attend)
