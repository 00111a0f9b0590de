"""``captured``, ``patched`` and ``nn.tap``: values as hooks in transformers see them, through every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import maxjax
from maxjax import nn
from maxjax.errors import UserInputError
from maxjax.graph import DeviceRef, Weight
from maxjax.models import BertConfig, BertModel, Gemma3, Gemma3Config, Llama, LlamaConfig
from maxjax.nn.layer.observe.places import match
from tests.models import decoders
from tests.oracles.recorded import recorded, torch

CALL = lambda model, ids: model(ids)
IDS = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)


def close(found, expected, atol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        100, 16, 16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    return maxjax.init(Llama(config), jax.random.key(0))


@pytest.fixture(scope="module")
def flat(model):
    return jax.tree.map(lambda a: a, model).unstack()


class Block(nn.Module):
    """``x + tanh(gain · x)``, with a tap."""

    def __init__(self):
        super().__init__()
        self.gain = Weight("gain", "float32", (), DeviceRef.CPU())

    def __call__(self, x, extra=None):
        y = nn.tap("inner", x * self.gain)
        return x + jnp.tanh(y)


class Blocks(nn.Module):
    def __init__(self, count=4, shared=False, remat=False):
        super().__init__()
        one = Block()
        self.layers = nn.LayerList([one] * count if shared else [Block() for _ in range(count)])
        self.remat = remat

    def __call__(self, x):
        if isinstance(self.layers, nn.LayerStack):
            return self.layers.scan(x, remat=self.remat)
        return self.layers(x)


def blocks(stacked=False, **options):
    made = Blocks(**options)
    count = len(made.raw_state_dict())
    made.load_state_dict(
        {
            n: np.float32(0.1 * (i + 1)) * np.ones((), np.float32)
            for i, n in enumerate(made.raw_state_dict())
        }
    )
    assert count in (1, 4)
    if stacked:
        made.layers = made.layers.stack()
    return made


def by_numpy(x):
    """For each of the four blocks: the input, the tap and the output."""
    found = []
    for i in range(4):
        inner = x * np.float32(0.1 * (i + 1))
        found.append((x, inner, x + np.tanh(inner)))
        x = found[-1][2]
    return found


# --- values --------------------------------------------------------------------------------------


def _inside(theirs):
    """What hooks in transformers' model see: residual streams, MLPs, heads and attention weights."""
    found = {}

    def keep(name, value):
        found[name] = (value[0] if isinstance(value, tuple) else value).detach().numpy().copy()

    live = theirs.live()
    for i, layer in enumerate(live.model.layers):
        layer.register_forward_hook(lambda m, a, out, i=i: keep(f"layers.{i}", out))
        layer.register_forward_pre_hook(lambda m, a, i=i: keep(f"layers.{i}:input", a))
        layer.mlp.register_forward_hook(lambda m, a, out, i=i: keep(f"layers.{i}.mlp", out))
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda m, a, i=i: keep(f"layers.{i}.self_attn:heads", a)
        )
    with torch.no_grad():
        ids = torch.tensor(np.asarray(decoders.ids_of(2, 12), np.int64))
        attentions = live(ids, output_attentions=True).attentions
    return found | {
        f"layers.{i}.self_attn:weights": a.numpy().copy() for i, a in enumerate(attentions)
    }


def test_values_are_those_of_hooks_in_transformers(tmp_path):
    theirs = decoders.oracle("Llama", tmp_path, num_key_value_heads=2)
    expected = recorded(lambda: _inside(theirs))
    mine = decoders.ours(tmp_path)
    names = ("layers.*", "layers.*:input", "layers.*.mlp")
    names += ("layers.*.self_attn:heads", "layers.*.self_attn:weights")
    _, found = jax.jit(maxjax.captured(CALL, *names))(mine, decoders.ids_of(2, 12))
    assert len(found) == len(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            np.asarray(found[name]).reshape(value.shape), value, atol=2e-4, err_msg=name
        )


@pytest.mark.parametrize("stacked", [False, True])
def test_taps_inputs_and_outputs_of_own_modules(stacked):
    x = np.linspace(-1, 1, 3, dtype=np.float32)
    run = maxjax.captured(CALL, "layers.*", "layers.*:input", "layers.*:inner", "layers.2:inputs")
    y, found = run(blocks(stacked), x)
    expected = by_numpy(x)
    close(y, expected[-1][2], 1e-6)
    for i, (given, inner, output) in enumerate(expected):
        close(found[f"layers.{i}:input"], given, 1e-6)
        close(found[f"layers.{i}:inner"], inner, 1e-6)
        close(found[f"layers.{i}"], output, 1e-6)
    close(found["layers.*:inner"], np.stack([inner for _, inner, _ in expected]), 1e-6)
    close(found["layers.2:inputs"][0], expected[2][0], 1e-6)
    assert len(found) == 13 and list(found)[:3] == ["layers.0", "layers.0:inner", "layers.0:input"]


def test_stack_and_list_and_jit_give_the_same(model, flat):
    names = ("layers.1.mlp", "layers.*.self_attn:heads", "layers.*.self_attn:weights", "norm")
    run = maxjax.captured(CALL, *names)
    y, found = run(model, IDS)
    close(y, model(IDS))
    for other, got in (run(flat, IDS), jax.jit(run)(model, IDS)):
        close(other, y)
        assert set(got) == set(found)
        close({key: got[key] for key in found}, {key: found[key] for key in found})
    assert found["layers.*.self_attn:weights"].shape == (3, 2, 4, 5, 5)
    close(found["layers.*.self_attn:weights"].sum(-1), np.ones((3, 2, 4, 5)))


def test_projections_that_run_as_one_operation(model):
    """Queries, keys and values are one kernel's results, unless one of them is asked for."""
    names = ("layers.*.self_attn.k_proj", "layers.2.mlp.gate_proj", "layers.2.mlp:input")
    y, found = maxjax.captured(CALL, *names)(model, IDS)
    close(y, model(IDS))
    weight = model.state_dict()["model.layers.2.mlp.gate_proj.weight"]
    close(found["layers.2.mlp.gate_proj"], found["layers.2.mlp:input"] @ weight.T)
    assert found["layers.*.self_attn.k_proj"].shape == (3, 2, 5, 8)


def test_grad(model):
    run = maxjax.captured(CALL, "layers.*")

    def loss(model):
        logits, found = run(model, IDS)
        return jnp.mean(logits**2), found

    grads, inside = jax.jit(jax.grad(loss, has_aux=True))(model)
    plain = jax.jit(jax.grad(lambda m: jnp.mean(m(IDS) ** 2)))(model)
    assert jax.tree.structure(grads) == jax.tree.structure(model)
    close(grads, plain)
    close(inside["layers.2"], maxjax.captured(CALL, "layers.*")(model, IDS)[1]["layers.2"])


def test_vmap_and_scan():
    run = maxjax.captured(CALL, "layers.*", "layers.1:inner")
    stack, xs = blocks(True), np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    mapped = jax.jit(jax.vmap(lambda m, x: run(m, x)[1], in_axes=(None, 0)))(stack, xs)
    scan = lambda m, xs: jax.lax.scan(lambda c, x: (c, run(m, x)[1]), 0, xs)[1]
    scanned = jax.jit(scan)(stack, xs)
    _, _, outputs = zip(*by_numpy(xs), strict=True)
    for each in (mapped, scanned):
        close(each["layers.1:inner"], by_numpy(xs)[1][1], 1e-6)
        close(each["layers.*"], np.stack(outputs, 1), 1e-6)
        close(each["layers.[02]"][:, 1], outputs[2], 1e-6)


def test_captures_and_patches_of_some_layers_in_shard_map():
    stack, xs = blocks(True), np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    run = maxjax.captured(CALL, "layers.[13]", "layers.2:inner")
    put = {"layers.0": jnp.ones((1, 3)), "layers.2": lambda x: jnp.ones_like(x)}

    def split(model, x):
        _, found = run(model, x)
        return found["layers.3"], found["layers.2:inner"], maxjax.patched(CALL, put)(model, x)

    mesh, rows = maxjax.make_mesh(data=2), jax.P("data")
    mapped = jax.shard_map(split, mesh=mesh, in_specs=(jax.P(), rows), out_specs=rows)
    output, inner, patched = jax.jit(mapped)(stack, xs)
    expected = by_numpy(xs)
    close(output, expected[3][2], 1e-6)
    close(inner, expected[2][1], 1e-6)
    close(patched, np.full((2, 3), 1 + np.tanh(0.4)), 1e-6)


def test_gradients_reach_and_leave_the_captured_values():
    """The derivative with respect to a patch is that with respect to the value in its place."""
    stack, x = blocks(True), np.linspace(-1, 1, 3, dtype=np.float32)
    value = by_numpy(x)[1][2]

    def slope(patch, at):
        loss = lambda v: jnp.mean(maxjax.patched(CALL, {"layers.1": patch(v)})(stack, x) ** 2)
        return jax.jit(jax.grad(loss))(at)

    by_patch = slope(lambda v: v, value)
    by_function = slope(lambda d: lambda y: y + d, np.zeros_like(value))
    close(by_patch, by_function, 1e-6)

    def rest(v):
        for gain in (np.float32(0.3), np.float32(0.4)):
            v = v + jnp.tanh(v * gain)
        return jnp.mean(v**2)

    close(by_patch, jax.jit(jax.grad(rest))(value), 1e-6)
    assert float(jnp.abs(by_patch).max()) > 1e-3


@pytest.mark.parametrize("remat", [True, "dots_saveable"])
def test_remat_in_a_stack(remat):
    model, x = blocks(True, remat=remat), jnp.linspace(-1, 1, 3)
    run = maxjax.captured(CALL, "layers.*:inner", "layers.2")

    def loss(model):
        y, found = run(model, x)
        return jnp.sum(y), found

    grads, found = jax.jit(jax.grad(loss, has_aux=True))(model)
    close(grads, jax.jit(jax.grad(lambda m: jnp.sum(m(x))))(model))
    close(found["layers.2:inner"], by_numpy(np.asarray(x))[2][1], 1e-6)


@pytest.mark.extra
def test_gemma_with_a_rotating_cache_and_layers_outside_of_the_pattern():
    """Weights of decode steps are by position, also where slots rotate; and those of a call without a cache."""
    config = Gemma3Config(
        100,
        16,
        16,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        sliding_window=3,
    )
    model = maxjax.init(Gemma3(config), jax.random.key(0))
    ids = jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    name = "layers.*.self_attn:weights"
    y, found = maxjax.captured(CALL, name)(model, ids)

    def steps(model, ids):
        logits, cache = model(ids[:, :5], model.cache(2, 16))
        last, cache = model(ids[:, 5:6], cache)
        return jnp.concatenate([logits, last, model(ids[:, 6:], cache)[0]], 1)

    z, each = jax.jit(maxjax.captured(steps, name))(model, ids)
    close(z, y)
    close(np.concatenate([a[..., :7] for a in each[name]], 3), found[name])
    same = maxjax.patched(CALL, {name: found[name]})
    close(same(model, ids), y)
    assert not np.any(np.tril(np.asarray(found["layers.0.self_attn:weights"]), -3))


@pytest.mark.extra
def test_bert():
    model = maxjax.init(
        BertModel(BertConfig(100, 16, 16, num_hidden_layers=2, num_attention_heads=2)),
        jax.random.key(0),
    )
    mask = jnp.ones((2, 5), jnp.int32).at[1, 3:].set(0)
    run = maxjax.captured(lambda m, *a: m(*a), "layer.*.attention.self:weights", "layer.1")
    out, found = run(model, IDS, mask)
    close(out.last_hidden_state, model(IDS, mask).last_hidden_state)
    close(found["layer.1"], out.last_hidden_state)
    weights = found["layer.*.attention.self:weights"]
    assert weights.shape == (2, 2, 2, 5, 5) and not np.any(weights[:, 1, :, :, 3:])


# --- patches -------------------------------------------------------------------------------------


def test_patches_equal_a_computation_by_hand(model, flat):
    """Each way of writing a patch gives the model with that layer's MLP switched off."""
    off = maxjax.replace(model, {"model.layers.1.mlp.down_proj.weight": jnp.zeros((16, 16))})
    expected = off(IDS)
    zeros = jnp.zeros((2, 5, 16))
    runs = [maxjax.patched(CALL, new) for new in (
        {"layers.1.mlp": 0.0},
        {"layers.1.mlp": zeros},
        {"layers.1.mlp": lambda y: 0 * y},
        {"layers.*.mlp": lambda y, layer: jnp.where(jnp.asarray(layer) == 1, 0 * y, y)},
        {"layers.1.mlp.down_proj:input": 0.0},
    )]  # fmt: skip
    for run in runs:
        close(run(model, IDS), expected)
    for found in jax.jit(lambda m: [run(m, IDS) for run in runs])(flat):
        close(found, expected)
    close(runs[0](flat, IDS), expected)
    close(jax.jit(runs[2])(model, IDS), expected)
    assert np.abs(expected - model(IDS)).max() > 1e-3


def test_a_value_for_each_layer(model, flat):
    _, found = maxjax.captured(CALL, "layers.*.mlp", "layers.1.self_attn:heads")(model, IDS[::-1])
    here = maxjax.captured(CALL, "layers.*.mlp")
    put = {"layers.*.mlp": found["layers.*.mlp"]}
    run = maxjax.captured(maxjax.patched(CALL, put), "layers.*.mlp")
    for one in (model, flat):
        _, seen = run(one, IDS)
        close(seen["layers.*.mlp"], found["layers.*.mlp"])
    assert float(jnp.abs(here(model, IDS)[1]["layers.*.mlp"] - found["layers.*.mlp"]).max()) > 1e-3


def test_nested_captures_and_patches(model):
    """Both see the whole model, each by the names of the model that it was given."""
    inner = maxjax.captured(lambda m, x: m(x), "norm")

    def outer(model, ids):
        (step_logits, found) = inner(model, ids)
        return step_logits, found["norm"]

    (y, norm), found = maxjax.captured(outer, "norm", "layers.1")(model, IDS)
    close(norm, found["norm"])
    again = maxjax.captured(maxjax.captured(CALL, "norm"), "norm")
    (_, first), second = again(model, IDS)
    close(first["norm"], second["norm"])
    close(y, model(IDS))


def test_a_capture_inside_a_layer_of_a_stack_leaves_the_outer_one_its_values():
    class Outer(Blocks):
        def __call__(self, x):
            inside = maxjax.captured(lambda layer, x: layer(x), ":inner")

            def call(layer, x):
                y, found = inside(layer, x)
                return y, found[":inner"]

            return self.layers.scan(x, call=call)

    model, x = Outer(), np.linspace(-1, 1, 3, dtype=np.float32)
    model.load_state_dict({f"layers.{i}.gain": np.float32(0.1 * (i + 1)) for i in range(4)})
    model.layers = model.layers.stack()
    (y, each), found = maxjax.captured(CALL, "layers.[13]", "layers.2:inner")(model, x)
    expected = by_numpy(x)
    close(y, expected[3][2], 1e-6)
    close(each, np.stack([inner for _, inner, _ in expected]), 1e-6)
    close(found["layers.[13]"], np.stack([expected[1][2], expected[3][2]]), 1e-6)
    close(found["layers.2:inner"], expected[2][1], 1e-6)


def test_the_first_layer_of_a_stack_outside_of_its_loop_has_its_own_name():
    stack, x = blocks(True), np.linspace(-1, 1, 3, dtype=np.float32)
    _, found = maxjax.captured(lambda m, x: m.layers[0](x), "layers.*:inner")(stack, x)
    assert repr(found).splitlines()[1:] == ["  layers.0:inner   float32[3]"]
    mapped = jax.vmap(lambda x: maxjax.captured(CALL, "layers.1")(stack, x)[1])(x[:, None])
    assert repr(mapped).splitlines()[1:] == ["  layers.1   float32[3,1]"]


def test_a_shared_layer_gives_a_value_for_each_run():
    x = jnp.linspace(-1, 1, 3)
    model = blocks(shared=True)
    _, found = maxjax.captured(CALL, "layers.0")(model, x)
    assert len(found["layers.0"]) == 4
    for value in found["layers.0"]:
        x = x + jnp.tanh(0.1 * x)
        close(value, x, 1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_on_a_mesh(model, axis_types):
    from jax.sharding import AxisType

    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[axis_types]
    mesh = maxjax.make_mesh(data=2, model=4, axis_types=kind)
    there = jax.tree.map(lambda a: a, model).to(mesh)
    names = ("layers.*", "layers.1.self_attn:weights", "layers.2.self_attn:heads", "layers.1.mlp")
    _, expected = jax.jit(maxjax.captured(CALL, *names))(model, IDS)
    ids = jax.device_put(IDS, jax.NamedSharding(mesh, jax.P("data")))
    with jax.set_mesh(mesh):
        y, found = jax.jit(maxjax.captured(CALL, *names))(there, ids)
    for key in expected:
        close(np.asarray(found[key]), np.asarray(expected[key]))
    assert len(found["layers.1.self_attn:weights"].sharding.device_set) == 8
    assert "model" in str(found["layers.1.self_attn:weights"].sharding.spec)
    new = {"layers.1.mlp": 0.0, "layers.2": lambda x: 2 * x, "layers.0.mlp": jnp.ones((2, 5, 16))}
    patched = maxjax.patched(CALL, new)
    with jax.set_mesh(mesh):
        found = np.asarray(jax.jit(patched)(there, IDS))
    close(found, np.asarray(jax.jit(patched)(model, IDS)), 1e-4)


# --- nothing is left -----------------------------------------------------------------------------


def test_nothing_costs_and_nothing_is_left(model):
    traces = []

    @jax.jit
    def run(model, ids):
        traces.append(1)
        return model(ids)

    structure, text = jax.tree.structure(model), run.lower(model, IDS).as_text()
    run(model, IDS)
    count = len(traces)
    returned, found = maxjax.captured(lambda m, ids: (m(ids), m), "layers.1")(model, IDS)
    assert jax.tree.structure(returned[1]) == structure  # what comes out is not observed
    with maxjax.capture(model, "layers.1"), maxjax.patch(model, {"layers.1": lambda y: y}):
        model(IDS)
        assert jax.tree.structure(model) == structure
        run(model, IDS)
    with pytest.raises(UserInputError):
        maxjax.captured(CALL, "layers.1:nosuch")(model, IDS)
    assert jax.tree.structure(model) == structure
    assert run(model, IDS) is not None and len(traces) == count
    assert run.lower(model, IDS).as_text() == text
    assert "layers.1" in found


def test_a_copy_made_in_the_function_is_observed_and_others_are_not(model):
    other = jax.tree.map(jnp.zeros_like, model)

    def function(model, ids):
        half = jax.tree.map(lambda a: a / 2, model)
        return half(ids), other(ids)

    (y, _), found = maxjax.captured(function, "layers.1")(model, IDS)
    assert not isinstance(found["layers.1"], tuple)
    close(
        found["layers.1"],
        maxjax.captured(CALL, "layers.1")(jax.tree.map(lambda a: a / 2, model), IDS)[1]["layers.1"],
    )


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (
            "layer.*.mlp",
            "no module of Llama is named 'layer.*.mlp' (did you mean 'model.layers.*.mlp'?)",
        ),
        ("layers.*.mpl", "did you mean 'model.layers.*.mlp'?"),
        ("layers.7", "no module of Llama is named 'layers.7'"),
        ("layers.1:", "has no site after the colon"),
        ("layers.1:outptu", "'model.layers.1' has no 'outptu' (did you mean 'output'?)"),
        ("layers.*.mlp:weights", "it has input, inputs, output; model.layers.*.self_attn:weights"),
        (3, "a pattern is a str"),
    ],
)
def test_patterns_that_match_nothing(model, pattern, says):
    with pytest.raises(UserInputError) as error:
        extra = ["layers.*.self_attn:weights"] if "mlp:" in str(pattern) else []
        maxjax.captured(CALL, pattern, *extra)(model, IDS)
    said = str(error.value).replace("layers.0.self", "layers.*.self")
    assert says in said, said


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (
            jnp.zeros((2, 5, 7)),
            "the value there is float32[2,5,16], and the patch is float32[2,5,7]",
        ),
        (jnp.zeros((2, 5, 16), jnp.bfloat16), "and the patch is bfloat16[2,5,16]"),
        (lambda y: y[0], "and the function gives float32[5,16]"),
        ("zeros", "is given a str"),
        ([jnp.zeros(2)], "and the patch is (float32[2])"),
    ],
)
def test_patches_that_do_not_fit_are_refused_before_anything_runs(flat, new, says):
    ran = []
    with maxjax.nn.layer.layer_hook(
        lambda layer, args, kwargs, out: ran.append(jax.tree.leaves(out)[0])
    ):
        with pytest.raises(UserInputError) as error:
            maxjax.patched(CALL, {"layers.1.mlp": new})(flat, IDS)
    assert says in str(error.value)
    assert all(isinstance(out, Tracer) for out in ran)


def test_transformations_inside_of_the_function_say_what_to_do(model):
    for function in (jax.jit(CALL), jax.checkpoint(CALL)):
        with pytest.raises(UserInputError, match="computed inside a jax.jit"):
            maxjax.captured(function, "layers.1")(model, IDS)
    with pytest.raises(UserInputError, match="takes a function of the model"):
        maxjax.captured(model, "layers.1")
    helped = blocks(True)
    helped.helper = Block()
    helped.load_state_dict({"helper.gain": np.float32(1)}, strict=False)
    scan = lambda m, x: m.layers.scan(
        x, helper=m.helper, call=lambda layer, x, helper: helper(layer(x))
    )
    with pytest.raises(UserInputError, match="'helper' is computed inside .* or loop"):
        maxjax.captured(scan, "helper")(helped, jnp.ones(3))
    with pytest.raises(UserInputError, match="did not run"):
        maxjax.captured(lambda m, ids: m.states(ids), "lm_head")(model, IDS)
    with pytest.raises(UserInputError, match="takes a maxjax Module"):
        maxjax.captured(CALL, "layers.1")(jnp.ones, IDS)


def test_names_with_stars():
    """One star is a part of a name, two are parts of any number, or of one and more at the end."""
    names = ["layers.1", "layers.1.mlp", "layers.1.mlp.up_proj", "layers.2.mlp"]
    assert match("layers.1.**", names) == names[1:3]
    assert match("**.mlp", names) == [names[1], names[3]]
    assert match("layers.*", names) == names[:1]


def test_looking_up(model):
    _, found = maxjax.captured(CALL, "layers.*.mlp", "layers.1")(model, IDS)
    assert "layers.1.mlp" in found and "layers.9" not in found and len(found) == 4
    with pytest.raises(KeyError, match=r"did you mean 'model.layers.1.mlp'\?"):
        found["layers.1.mpl"]
    with pytest.raises(UserInputError, match="is the end of several names"):
        found["mlp"]
    assert repr(found).splitlines() == [
        "Captures:",
        "  model.layers.{0..2}.mlp   float32[3,2,5,16]",
        "  model.layers.1            float32[2,5,16]",
    ]


def test_layers_after_other_axes_are_reduced():
    stack = nn.LayerStack([nn.Linear(4, 4, "float32", DeviceRef.CPU()) for _ in range(6)])
    net = maxjax.init(stack, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 4))
    _, found = maxjax.captured(lambda m, x: m.scan(x), "*")(net, x)
    layer = found["3"]
    last = jax.tree.map(lambda a: a[..., -1, :], found)
    np.testing.assert_array_equal(last["3"], layer[-1])
    np.testing.assert_array_equal(last["[12]"], jnp.stack([found["1"][-1], found["2"][-1]]))
    summed = jax.tree.map(lambda a: a.sum(0), found)
    with pytest.raises(UserInputError, match="no longer have their axis of layers"):
        summed["3"]


def test_a_class_of_characters_may_be_negated():
    assert match("layers.[!0]", ["layers.0", "layers.1", "layers.2"]) == ["layers.1", "layers.2"]
    assert match("layers.[!3].mlp", ["layers.3.mlp", "layers.4.mlp"]) == ["layers.4.mlp"]


def test_keys_with_a_range_that_cannot_be():
    _, found = maxjax.captured(CALL, "layers.*")(blocks(), jnp.float32(1))
    assert "layers.[0-1]" in found and "layers.[1-0]" not in found
    with pytest.raises(KeyError, match=r"nothing was captured under 'layers.\[1-0\]'"):
        found["layers.[1-0]"]
