"""A two-layer decoder written by hand, once for training, once for decoding."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jetrl_jax.fp8 import flow

D, F, V, S = 32, 48, 64, 8  # width, feed-forward, vocabulary, cache length
E4M3 = jnp.float8_e4m3fn
BF16 = jnp.bfloat16


def quantize(x, scale):
  x = x.astype(jnp.float32) * (1.0 / scale)
  return jnp.clip(x, -448.0, 448.0).astype(E4M3)


def per_tensor_dot(x, w):
  """[M, I] times [O, I], one scale for x."""
  x8 = quantize(x, w['x_scale'])
  y = lax.dot_general(
      x8, w['w8'], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )
  return (y * (w['x_scale'] * w['scale'])).astype(BF16)


def per_row_dot(x, w):
  """The same with a scale for each row of x."""
  amax = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True)
  scale = amax / 448.0
  y = lax.dot_general(
      quantize(x, scale),
      w['w8'],
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
  )
  return (y * scale * w['scale']).astype(BF16)


def bf16_dot(x, w):
  w16 = w['w8'].astype(BF16) * w['scale'].astype(BF16)
  return lax.dot_general(
      x, w16, (((1,), (1,)), ((), ())), preferred_element_type=BF16
  )


def bias_after_rounding(y, bias):
  return y + bias


def bias_before_rounding(y, bias):
  return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(BF16)


def norm(x, gain, dtype=jnp.float32):
  x = x.astype(dtype)
  mean = jnp.sum(x * x, axis=-1, keepdims=True, dtype=dtype) * (1.0 / D)
  return (x * lax.rsqrt(mean + 1e-6)).astype(BF16) * gain[None, :]


def init():
  def kernel(out, width):
    return {
        'w8': jnp.ones((out, width), E4M3),
        'scale': jnp.float32(0.5),
        'x_scale': jnp.float32(0.25),
    }

  def layer():
    return {
        'gain': jnp.ones((D,), BF16),
        'qkv': kernel(3 * D, D),
        'bias': jnp.ones((3 * D,), BF16),
        'up': kernel(F, D),
        'down': kernel(D, F),
    }

  return {
      'embedding': jnp.ones((V, D), BF16),
      'layers': [layer(), layer()],
      'head': jnp.ones((V, D), BF16),
  }


class Decoder:
  """The model's functions; a test replaces one of them on one side."""

  def __init__(
      self,
      dots=(per_tensor_dot, per_tensor_dot),
      bias=bias_after_rounding,
      norm=norm,
  ):
    self.dots = dots
    self.bias = bias
    self.norm = norm

  def qkv(self, i, p, x):
    with jax.named_scope('attn'), jax.named_scope('qkv'):
      y = self.dots[i](self.norm(x, p['gain']), p['qkv'])
      return jnp.split(self.bias(y, p['bias'][None, :]), 3, axis=-1)

  def attend(self, q, k, v, mask):
    """One sequence: q [T, D] over k, v [S, D]."""
    with jax.named_scope('attn'):
      logits = lax.dot_general(
          q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
      )
      logits = jnp.where(mask, logits * D**-0.5, -1e30)
      weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
      weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
      return weights.astype(BF16) @ v

  def mlp(self, i, p, x):
    with jax.named_scope('mlp'):
      with jax.named_scope('up'):
        h = self.dots[i](self.norm(x, p['gain']), p['up'])
      h = jax.nn.silu(h)
      with jax.named_scope('down'):
        return self.dots[i](h, p['down'])

  def logprobs(self, head, x):
    with jax.named_scope('lm_head'):
      logits = lax.dot_general(
          x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
      )
    with jax.named_scope('logprobs'):
      top = jnp.max(logits, axis=-1, keepdims=True)
      total = jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True)
      return logits - (top + jnp.log(total))

  def forward(self, params, tokens):
    """Teacher-forced, one sequence [T]; returns the mean log-prob."""
    x = params['embedding'][tokens]
    causal = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))

    for i, p in enumerate(params['layers']):

      @jax.checkpoint
      def block(x, p, i=i):
        with jax.named_scope(f'layers_{i}'):
          q, k, v = self.qkv(i, p, x)
          x = x + self.attend(q, k, v, causal)
          return x + self.mlp(i, p, x)

      x = jax.jit(block)(x, p)
    logp = self.logprobs(params['head'], x)
    chosen = jnp.take_along_axis(logp[:-1], tokens[1:, None], axis=-1)
    with jax.named_scope('loss'):
      return -jnp.mean(chosen)

  def decode(self, params, caches, tokens, key):
    """Four steps of a batch of sequences, with a cache written in place."""
    batch = len(tokens)

    def cond(state):
      return state[0] < 4

    def body(state):
      step, tokens, caches, key, logged = state
      x, out = params['embedding'][tokens], []
      for i, (p, (cache_k, cache_v)) in enumerate(
          zip(params['layers'], caches, strict=True)
      ):
        with jax.named_scope(f'layers_{i}'):
          q, k, v = self.qkv(i, p, x)
          cache_k = lax.dynamic_update_slice(cache_k, k[:, None], (0, step, 0))
          cache_v = lax.dynamic_update_slice(cache_v, v[:, None], (0, step, 0))
          mask = jnp.arange(S)[None] <= step
          y = [
              self.attend(q[b : b + 1], cache_k[b], cache_v[b], mask)
              for b in range(batch)
          ]
          x = x + jnp.concatenate(y)
          x = x + self.mlp(i, p, x)
          out.append((cache_k, cache_v))
      logp = self.logprobs(params['head'], x)
      with jax.named_scope('sampling'):
        key, noise = jax.random.split(key)
        noise = jax.random.gumbel(noise, logp.shape)
        tokens = jnp.argmax(logp / 0.7 + noise, axis=-1)
      chosen = jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]
      return step + 1, tokens, out, key, logged.at[step].set(chosen)

    logged = jnp.zeros((4, batch))
    return lax.while_loop(cond, body, (0, tokens, caches, key, logged))


TOKENS = jnp.arange(6, dtype=jnp.int32)


@functools.cache
def train_graph(**changes):
  return flow.extract(
      jax.make_jaxpr(Decoder(**changes).forward)(init(), TOKENS)
  )


@functools.cache
def infer_graph(**changes):
  caches = [(jnp.zeros((2, S, D), BF16), jnp.zeros((2, S, D), BF16))] * 2
  return flow.extract(
      jax.make_jaxpr(Decoder(**changes).decode)(
          init(), caches, jnp.zeros(2, jnp.int32), jax.random.key(0)
      )
  )


def graph_of(f, *args):
  return flow.extract(jax.make_jaxpr(f)(*args))


def only_node(f, *args, op):
  (node,) = [n for n in graph_of(f, *args).nodes if n.op == op]
  return node


def test_a_decode_loop_with_a_cache_is_part_of_the_training_forward():
  assert flow.check_subgraph(infer_graph(), train_graph()) == []
  flow.require_subgraph(infer_graph(), train_graph())


def test_the_rollout_is_found_in_the_forward_part_of_a_gradient_too():
  params = init()

  def loss(embedding):
    return Decoder().forward(params | {'embedding': embedding}, TOKENS)

  train = graph_of(jax.value_and_grad(loss), params['embedding'])
  assert flow.check_subgraph(infer_graph(), train) == []
  backward = {n.path for n in train.nodes if n.backward}
  assert {'layers_0/attn', 'layers_1/mlp/up'} <= backward
  # The rollout must not find its operations among the backward ones.
  only_backward = flow.FlowGraph(
      nodes=tuple(n for n in train.nodes if n.backward), edges=()
  )
  missing = flow.check_subgraph(infer_graph(), only_backward)
  assert len(missing) == len(infer_graph().nodes)


def test_training_may_do_more_than_the_rollout():
  # The loss: one mean and its sign.
  extra = flow.check_subgraph(train_graph(), infer_graph())
  assert {d.node.path for d in extra} == {'loss'}


PLANTED = {
    'granularity': (
        {'dots': (per_tensor_dot, per_row_dot)},
        'layers_1/attn/qkv',
        'per row',
    ),
    'bf16 layer': (
        {'dots': (per_tensor_dot, bf16_dot)},
        'layers_1/attn/qkv',
        '(bf16, bf16) -> bf16',
    ),
    'place of rounding': (
        {'bias': bias_before_rounding},
        'layers_0/attn/qkv',
        'add (f32, f32) -> f32, per channel',
    ),
    'reduction dtype': (
        {'norm': functools.partial(norm, dtype=BF16)},
        'layers_0/attn/qkv',
        'reduce_sum (bf16) -> bf16, per row',
    ),
}


@pytest.mark.parametrize('planted', PLANTED)
def test_a_difference_planted_in_the_rollout_is_caught_and_named(planted):
  changes, path, has = PLANTED[planted]
  found = flow.check_subgraph(infer_graph(**changes), train_graph())
  # Nothing before the layer where the difference is.
  assert found[0].node.path == path
  assert any(d.node.path == path and has in d.infer for d in found)
  with pytest.raises(ValueError, match=f'first at {path}: the rollout has'):
    flow.require_subgraph(infer_graph(**changes), train_graph())


@pytest.mark.parametrize('planted', PLANTED)
def test_a_difference_planted_in_training_is_caught_and_named(planted):
  changes, path, _ = PLANTED[planted]
  found = flow.check_subgraph(infer_graph(), train_graph(**changes))
  assert found[0].node.path == path


def test_a_difference_names_what_each_side_has():
  changes = {'dots': (bf16_dot, per_tensor_dot)}
  found = flow.check_subgraph(infer_graph(), train_graph(**changes))
  dot = next(d for d in found if d.node.op == 'dot_general')
  assert str(dot) == (
      'layers_0/attn/qkv: the rollout has dot_general (e4m3, e4m3) -> f32;'
      ' training has dot_general (bf16, bf16) -> bf16'
  )


def test_an_operation_that_training_lacks_is_said_to_be_missing():
  def infer(x):
    with jax.named_scope('layers_0'):
      return jnp.tanh(x)

  def train(x):
    return x + x

  x = jnp.ones((4, 4))
  (found,) = flow.check_subgraph(graph_of(infer, x), graph_of(train, x))
  assert str(found) == (
      'layers_0: the rollout has tanh (f32) -> f32; training has no tanh there'
  )


def test_the_same_operations_wired_otherwise_are_caught():
  def infer(x):
    with jax.named_scope('a'):
      return jnp.exp(jnp.sin(jnp.cos(x)))

  def train(x):
    with jax.named_scope('a'):
      return jnp.exp(jnp.cos(jnp.sin(x)))

  x = jnp.ones((4, 4))
  first = flow.check_subgraph(graph_of(infer, x), graph_of(train, x))[0]
  assert first.infer == 'sin (f32) -> f32, fed by a: cos (f32) -> f32 (f32)'
  with pytest.raises(ValueError, match='a: the rollout has sin'):
    flow.require_subgraph(graph_of(infer, x), graph_of(train, x))


def test_sampling_and_tokens_are_outside_the_graph():
  graph = infer_graph()
  assert not any('sampling' in n.path for n in graph.nodes)
  # The token of a step is an input of the next: nothing flows back from the
  # log-probs into the first layer.
  into = {e.producer.path for e in graph.edges if e.consumer.path == 'logprobs'}
  out = {e.consumer.path for e in graph.edges if e.producer.path == 'logprobs'}
  assert into == {'lm_head', 'logprobs'} and out == {'logprobs'}


def test_edges_run_through_the_cache():
  attention = {
      (e.producer.op, e.producer.path, e.dtype)
      for e in infer_graph().edges
      if e.consumer.op == 'dot_general' and e.consumer.path == 'layers_0/attn'
  }
  # Queries and keys straight from the bias; the weights from their cast.
  assert attention == {
      ('add', 'layers_0/attn/qkv', 'bf16'),
      ('convert_element_type', 'layers_0/attn', 'bf16'),
  }


@pytest.mark.parametrize(
    ('shape', 'expected'),
    [
        ((), 'per tensor'),
        ((1, 1), 'per tensor'),
        ((16, 1), 'per row'),
        ((1, 32), 'per channel'),
        ((16, 32), ''),
    ],
)
def test_granularity_is_that_of_the_scale_however_it_is_broadcast(
    shape, expected
):
  x, scale = jnp.ones((16, 32)), jnp.ones(shape)

  def plain(x, scale):
    return x * scale

  def by_hand(x, scale):
    return x * jnp.broadcast_to(scale.reshape(shape or (1, 1)), x.shape)

  for f in (plain, by_hand, jax.jit(plain)):
    assert only_node(f, x, scale, op='mul').granularity == expected


def test_a_scale_per_block_is_told_from_one_per_row():
  x = jnp.ones((16, 256))

  def per_block(x):
    groups = x.reshape(16, 2, 128)
    amax = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    return (groups / amax).reshape(16, 256)

  def per_square(w, scale):
    return w.reshape(2, 8, 2, 128) * scale[:, None, :, None]

  assert only_node(per_block, x, op='div').granularity == 'per block of 128'
  assert only_node(per_block, x, op='reduce_max').granularity == (
      'per block of 128'
  )
  node = only_node(per_square, x, jnp.ones((2, 2)), op='mul')
  assert node.granularity == 'per block x.x.'


def test_one_row_looks_like_many():
  def softmax(x):
    return x / jnp.sum(x, axis=-1, keepdims=True)

  one, many = graph_of(softmax, jnp.ones((1, 8))), graph_of(
      softmax, jnp.ones((5, 8))
  )
  assert one == many
  assert one != graph_of(lambda x: x / jnp.sum(x), jnp.ones((1, 8)))


def test_scopes_are_the_same_under_every_transform():
  def layer(x):
    with jax.named_scope('layers_0'), jax.named_scope('attn'):
      return jnp.sin(x)

  x = jnp.ones((4, 4))
  plain = graph_of(layer, x)
  assert [n.path for n in plain.nodes] == ['layers_0/attn']

  def looped(x):
    return lax.fori_loop(0, 3, lambda i, x: layer(x), x)

  def scanned(x):
    return lax.scan(lambda c, _: (layer(c), None), x, length=3)[0]

  def branched(x):
    return lax.cond(x[0, 0] > 0, layer, layer, x)

  def stacked(x):
    return lax.scan(lambda c, row: (c, layer(row)), jnp.zeros(()), x)[1]

  for f in (
      stacked,
      jax.jit(layer),
      jax.checkpoint(layer),
      jax.vmap(layer),
      lambda x: jax.jvp(layer, (x,), (x,))[0],
      looped,
      scanned,
      branched,
  ):
    graph = graph_of(f, x)
    sines = {n.path for n in graph.nodes if n.op == 'sin' and not n.backward}
    assert sines == {'layers_0/attn'}


def test_a_custom_derivative_shows_its_forward_only():
  @jax.custom_vjp
  def f(x):
    return jnp.sin(x)

  f.defvjp(lambda x: (f(x), x), lambda x, g: (g * jnp.cos(x),))
  x = jnp.ones(4)
  assert [n.op for n in graph_of(f, x).nodes] == ['sin']
  both = graph_of(jax.value_and_grad(lambda x: f(x).sum()), x).nodes
  assert {n.op for n in both if not n.backward} == {'sin', 'reduce_sum'}
  assert 'cos' in {n.op for n in both if n.backward}


def test_a_sharded_function_has_the_graph_of_one_device():
  mesh = jax.make_mesh(
      (2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows = jax.sharding.PartitionSpec('data')

  def f(x, w):
    with jax.named_scope('layers_0'):
      return jnp.sin(x @ w)

  sharded = jax.shard_map(
      f,
      mesh=mesh,
      in_specs=(rows, jax.sharding.PartitionSpec()),
      out_specs=rows,
  )
  x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
  assert graph_of(sharded, x, w) == graph_of(f, x, w)


def test_a_kernel_is_one_operation_with_its_name():
  from jax.experimental import pallas as pl

  def body(x_ref, y_ref):
    y_ref[...] = jnp.exp(x_ref[...]).astype(BF16)

  def f(x):
    with jax.named_scope('layers_0'):
      return pl.pallas_call(
          body,
          out_shape=jax.ShapeDtypeStruct(x.shape, BF16),
          name='rms_norm',
          interpret=True,
      )(x)

  (node,) = graph_of(f, jnp.ones((8, 8))).nodes
  assert str(node) == 'layers_0: rms_norm (f32) -> bf16'
  assert node.kind == 'kernel'


def test_a_dot_of_another_precision_is_another_operation():
  def f(precision):
    return lambda a: lax.dot(a, a, precision=precision)

  x = jnp.ones((8, 8))
  fast, exact = graph_of(f(None), x), graph_of(f(lax.Precision.HIGHEST), x)
  assert len(flow.check_subgraph(fast, exact)) == 1


def test_a_loop_knows_where_its_carry_comes_from():
  # The carry starts as a broadcast zero, and comes from the body later on.
  def f(x):
    def body(_, carry):
      return jnp.sin(carry * x) + jnp.zeros_like(carry)

    return lax.fori_loop(0, 3, body, jnp.zeros(x.shape))

  node = only_node(f, jnp.ones((4, 4)), op='mul')
  assert node.granularity == ''
  feeds = {
      e.producer.op
      for e in graph_of(f, jnp.ones((4, 4))).edges
      if e.consumer == node
  }
  assert feeds == {'add'}


def test_what_no_result_needs_does_not_count():
  def f(x):
    with jax.named_scope('a'):
      unused = jnp.log(jnp.abs(x))
      return jnp.sin(x), unused

  x = jnp.ones((4, 4))
  assert [n.op for n in graph_of(lambda x: f(x)[0], x).nodes] == ['sin']

  # In a loop too; what only decides when to stop is needed.
  def loop(x):
    return lax.while_loop(
        lambda c: jnp.sum(jnp.cos(c[0])) > 0, lambda c: f(c[0]), (x, x)
    )[0]

  needed = {n.op for n in graph_of(loop, x).nodes}
  assert needed == {'sin', 'cos', 'reduce_sum'}


def test_what_only_feeds_the_sampler_counts():
  def greedy(x):
    with jax.named_scope('head'):
      logits = jnp.sin(x)
    with jax.named_scope('sampling'):
      return jnp.argmax(logits * 2, axis=-1)

  assert [n.path for n in graph_of(greedy, jnp.ones((4, 4))).nodes] == ['head']


def test_every_edge_joins_nodes_of_the_graph():
  for graph in (infer_graph(), train_graph()):
    ends = {e.producer for e in graph.edges} | {e.consumer for e in graph.edges}
    assert ends <= set(graph.nodes)


def test_the_listing_goes_layer_by_layer():
  text = infer_graph().to_text().splitlines()
  paths = [line for line in text[1:] if not line.startswith(' ')]
  assert paths == [
      *(
          f'layers_{i}{part}'
          for i in range(2)
          for part in ('/attn/qkv', '/attn', '', '/mlp/up', '/mlp', '/mlp/down')
      ),
      'lm_head',
      'logprobs',
  ]
  assert '  dot             dot_general (e4m3, e4m3) -> f32' in text
