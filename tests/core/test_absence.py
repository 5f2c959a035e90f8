"""Rule 8: on every checkpoint every name answers before anything runs, with a reason and the alternative."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import gemloupe
from gemloupe.errors import NoSuchBlock, Unavailable, UnknownName
from gemloupe.served import Served
from gemloupe.testing import SHAPES
from tests.core.models import Case, ids, of_the_text_load, stack
from tests.core.places import AFTER, BEFORE, BLOCK, Place, block_places

# What each checkpoint has of what not all have, as the design's first table says.
PER_LAYER = {"e2b", "e4b"}
MIXTURE = {"26b-a4b"}
BORROWERS = {"e2b": range(5, 10), "e4b": range(6, 12)}
PER_LAYER_VALUES = {
    "per_layer_token_inputs",
    "per_layer_context_inputs",
    "per_layer_inputs",
    "per_layer_input",
    "per_layer_output",
}
MIXTURE_VALUES = {
    "router_logits",
    "router_probabilities",
    "expert_weights",
    "expert_indices",
    "expert_outputs",
    "routed_output",
    "shared_expert_output",
}
TOWERS = {
    "e2b": {"vision", "projector", "audio", "audio_projector"},
    "e4b": {"vision", "projector", "audio", "audio_projector"},
    "26b-a4b": {"vision", "projector"},
    "31b": {"vision", "projector"},
    "12b": {"projector", "audio_projector"},
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
both_loads = pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])


def there(shape: str, place: Place) -> bool:
    if place.name in PER_LAYER_VALUES:
        return shape in PER_LAYER
    if place.name in MIXTURE_VALUES:
        return shape in MIXTURE
    if place.name in ("own_keys", "own_values"):
        return place.block not in BORROWERS.get(shape, ())
    return True


def known_places(model: Any) -> list[Place]:
    """Every place of the vocabulary, there or not, that this release serves."""
    served = {row.path.rpartition(".")[2] for row in model.support()}
    places = [Place(name) for name in (*BEFORE, *AFTER)]
    for block in range(model.num_layers):
        places += block_places(block)
    return [place for place in places if place.name in served]


@every_shape
@both_loads
def test_every_answer_agrees_with_the_checkpoint(shape, load):
    model = Case(shape, wrapper=load).model()
    for place in known_places(model):
        wanted, path, host = there(shape, place), str(place), place.host(model)
        assert model.has(path) == wanted, path
        assert model.has(f"model.{path}") == wanted, path
        assert (model.why_not(path) is None) == wanted, path
        assert hasattr(host, place.name) == wanted, path
        if wanted:
            reference = place.read(model)
            assert isinstance(reference, gemloupe.Reference)
            assert (str(reference), model.has(reference), model.why_not(reference)) == (path, True, None)
        else:
            reason = model.why_not(path)
            with pytest.raises(Unavailable) as read:
                place.read(model)
            assert str(read.value) == f"{path}: {reason}"
            with pytest.raises(Unavailable) as written:
                place.write(model, torch.zeros(1))
            assert str(written.value) == f"{path}: {reason}"


@every_shape
def test_support_has_a_row_for_every_name_and_says_where(shape):
    model = Case(shape).model()
    support = model.support()
    rows = {row.path: row for row in support}
    assert len(rows) == len(support) == len(list(support))
    for name in (*BEFORE, *AFTER):
        row = support[name]
        assert row.blocks is None
        assert row.available == there(shape, Place(name)), name
    for path in BLOCK:
        pattern = f"layers[i].{path}".replace("..", ".")
        if pattern not in rows:
            continue
        part, _, name = path.rpartition(".")
        wanted = [i for i in range(model.num_layers) if there(shape, Place(name, i, part))]
        assert list(rows[pattern].blocks or ()) == wanted, pattern
        assert rows[pattern].available == bool(wanted)
        assert (rows[pattern].reason is None) == (len(wanted) == model.num_layers)
    with pytest.raises(KeyError):
        support["layers[i].mlp.nothing"]


@every_shape
def test_support_prints_every_path_and_reason(shape):
    support = Case(shape).model().support()
    text = str(support)
    assert repr(support) == text
    for row in support:
        assert row.path in text
        assert str(row.layout) in text
    for word in ("every block", "yes"):
        assert word in text


@every_shape
@both_loads
def test_a_reason_names_something_that_is_there(shape, load):
    """The second line says what to use instead, in names that this very model has."""
    model = Case(shape, wrapper=load).model()
    for place in known_places(model):
        reason = model.why_not(str(place))
        if reason is None:
            continue
        first, _, advice = reason.partition("\n")
        assert first.endswith("."), place
        named = re.findall(r"[a-z]\w*(?:\[\d+\])?(?:\.\w+)*", advice)
        block = f"layers[{place.block}]."
        prefixes = ["", block, f"{block}mlp.", f"{block}self_attn."]
        usable = {f"{prefix}{name}" for name in named for prefix in prefixes if "_" in name}
        there_too = {path for path in usable if answers(model, path)}
        assert there_too, (str(place), advice)


def answers(model: Any, path: str) -> bool:
    try:
        return model.has(path)
    except UnknownName:
        return False


@of_the_text_load
@every_shape
@both_loads
def test_towers_are_there_with_the_load_that_has_them(shape, load):
    model = Case(shape, wrapper=load).model()
    for name in ("vision", "projector", "audio", "audio_projector"):
        if shape == "12b" and load and name in ("vision", "audio"):
            continue  # has the test below
        wanted = load and name in TOWERS[shape]
        assert hasattr(model, name) == wanted, name
        assert model.has(name) == wanted, name
        if not wanted:
            with pytest.raises(Unavailable, match=rf"(?s){name}: .+\n.+"):
                getattr(model, name)


@pytest.mark.parametrize("name", ["vision", "audio"])
def test_the_unified_wrapper_answers_for_a_tower(name):
    """It has none, an embedder projects raw patches and frames; whatever it says, it says it everywhere."""
    model = Case("12b", wrapper=True).model()
    assert model.has(name) == hasattr(model, name) == (model.why_not(name) is None)


@every_shape
def test_router_and_experts_are_reached_through_the_mlp(shape):
    model = Case(shape).model()
    mlp = model.layers[0].mlp
    for name in ("router", "experts"):
        assert hasattr(mlp, name) == (shape in MIXTURE)
        assert model.has(f"layers[0].mlp.{name}") == (shape in MIXTURE)
        if shape in MIXTURE:
            assert getattr(mlp, name) is getattr(model.layers[0], name)
        else:
            with pytest.raises(Unavailable, match=rf"layers\[0\]\.mlp\.{name}: block 0 has no mixture"):
                getattr(mlp, name)


@of_the_text_load
@every_shape
def test_facts_are_the_config_s(shape):
    model = Case(shape).model()
    module = Case(shape).bare()
    config = module.config
    for i, block in enumerate(stack(module).layers):
        attention = block.self_attn
        width = attention.q_norm.weight.shape[0]
        borrows = i in BORROWERS.get(shape, ())
        own = (
            i
            if not borrows
            else max(
                j
                for j in range(min(BORROWERS[shape]))
                if stack(module).layers[j].self_attn.is_sliding == attention.is_sliding
            )
        )
        source = stack(module).layers[own].self_attn
        facts = {
            "kind": "sliding" if config.layer_types[i] == "sliding_attention" else "full",
            "window": config.sliding_window if config.layer_types[i] == "sliding_attention" else None,
            "head_dim": width,
            "num_heads": attention.q_proj.out_features // width,
            "num_kv_heads": source.k_proj.out_features // width,
            "intermediate_size": block.mlp.gate_proj.out_features,
            "kv_source": own,
            "has_experts": hasattr(block, "router"),
            "has_per_layer_input": hasattr(block, "per_layer_input_gate"),
            "num_experts": block.router.proj.out_features if hasattr(block, "router") else None,
            "top_k": config.top_k_experts if hasattr(block, "router") else None,
        }
        for host in (model.layers[i], model.layers[i].self_attn, model.layers[i].mlp):
            assert {name: getattr(host, name) for name in facts} == facts, i
        for j in model.layers[i].kv_borrowers:
            assert model.layers[j].kv_source == i
    lent = {j for i in range(model.num_layers) for j in model.layers[i].kv_borrowers}
    assert lent == {*BORROWERS.get(shape, ())}
    assert model.kv_sharing() == {
        i: model.layers[i].kv_borrowers for i in range(model.num_layers) if model.layers[i].kv_borrowers
    }
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.vocab_size,
    )
    stored = config.to_dict()
    assert (model.head_dim, model.num_kv_heads) == (stored["head_dim"], stored["num_key_value_heads"])
    assert model.num_heads == config.num_attention_heads


# -- before anything runs ----------------------------------------------------------------------------


class Counted:
    """How many modules of the model a block of code ran."""

    def __init__(self, model: Any) -> None:
        self.module = model._module
        self.runs = 0

    def __enter__(self) -> Counted:
        self.handles = [part.register_forward_pre_hook(self.count) for part in self.module.modules()]
        return self

    def count(self, *_: Any) -> None:
        self.runs += 1

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("shape", ["e2b", "31b"])
@pytest.mark.parametrize("touch", ["read", "written", "edited"])
def test_what_is_not_there_is_refused_before_anything_runs(shape, touch):
    model = Case(shape).model()
    missing = [place for place in known_places(model) if not there(shape, place)]
    for place in {place.name: place for place in missing}.values():
        with Counted(model) as counted:
            with pytest.raises(Unavailable, match=re.escape(f"{place}: ")):
                with model.trace(ids(5)):
                    if touch == "read":
                        place.read(model).save()
                    elif touch == "written":
                        place.write(model, torch.zeros(1))
                    else:
                        place.read(model)[:] = 0
        assert counted.runs == 0, place


def test_the_count_itself_counts():
    model = Case("31b").model()
    with Counted(model) as counted:
        with model.trace(ids(5)):
            model.logits.save()
    assert counted.runs > model.num_layers


def test_portable_code_can_ask_inside_a_trace():
    """`has` and `hasattr` of what is not there use nothing up, in the middle of a forward."""
    for shape in SHAPES:
        model = Case(shape).model()
        said = []
        with model.trace(ids(5)):
            early = model.layers[1].layer_output.save()
            said.append(model.has("layers[2].mlp.router_logits"))
            said.append(model.has("layers[0].layer_output"))
            said.append(model.why_not("layers[0].per_layer_input") is None)
            said.append(isinstance(model.why_not("layers[2].mlp.expert_outputs"), str))
            late = model.layers[2].layer_input.save()
        assert torch.equal(early, late)
        assert said == [shape in MIXTURE, True, shape in PER_LAYER, shape not in MIXTURE]


# -- names that nothing has --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name", "nearest"),
    [
        ("", "logit", "logits"),
        ("", "layer", "layers"),
        ("", "input_id", "input_ids"),
        ("layers[2]", "layer_ouput", "layer_output"),
        ("layers[2]", "midstream", "mid_stream"),
        ("layers[2]", "self_atn", "self_attn"),
        ("layers[2].mlp", "mlp_ouput", "mlp_output"),
        ("layers[2].mlp", "router_logit", "router_logits"),
        ("layers[2].self_attn", "attention_ouput", "attention_output"),
        # Where it is somewhere else, or is known elsewhere by another name.
        ("layers[2]", "mlp_output", "layers[2].mlp.mlp_output"),
        ("layers[2]", "attention_output", "layers[2].self_attn.attention_output"),
        ("layers[2].mlp", "mid_stream", "layers[2].mid_stream"),
        ("layers[2]", "resid_mid", "mid_stream"),
        ("layers[2].mlp", "mlp_out", "mlp_output"),
        ("", "blocks", "layers"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(where, name, nearest):
    model = Case("e2b").model()
    host = model if not where else model.get(where.replace("[", ".").replace("]", ""))
    wanted = re.escape(f"{where or 'the model'} has no `{name}`. Did you mean `{nearest}`?")
    with pytest.raises(UnknownName, match=f"^{wanted}$"):
        getattr(host, name)
    assert not hasattr(host, name)
    with pytest.raises(UnknownName, match=wanted):
        model.has(f"{where}.{name}".removeprefix("."))
    with pytest.raises(UnknownName, match=wanted):
        setattr(host, name, torch.zeros(1))
    with Counted(model) as counted:
        with pytest.raises(UnknownName, match=wanted):
            with model.trace(ids(5)):
                getattr(host, name)
    assert counted.runs == 0


def test_a_name_like_no_other_gets_no_suggestion():
    model = Case("e2b").model()
    with pytest.raises(UnknownName, match=r"^layers\[2\] has no `zzzzqqq`\.$"):
        model.layers[2].zzzzqqq


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("layers[10].layer_output", r"layers\[10\] does not exist: the stack has 10 blocks, 0 to 9"),
        ("layers[-11].layer_output", r"layers\[-11\] does not exist"),
        ("logits.shape", "logits is a value, nothing lies under it"),
        ("layers[0]..mlp", "is no path"),
        ("layers[zero].mlp", "is no path"),
        ("layers[0] .mlp", "is no path"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_unknown_name(path, message):
    model = Case("e2b").model()
    for ask in (model.has, model.why_not):
        with pytest.raises(UnknownName, match=message):
            ask(path)


def test_blocks_are_counted_like_a_list():
    model = Case("e2b").model()
    assert len(model.layers) == 10
    assert model.layers[-1] is model.layers[9]
    assert [block.index for block in model.layers] == list(range(10))
    assert [block.index for block in model.layers[2:7:2]] == [2, 4, 6]
    for index in (10, -11):
        with pytest.raises(
            NoSuchBlock, match=rf"layers\[{index}\] does not exist: the stack has 10 blocks, 0 to 9"
        ):
            model.layers[index]
    assert str(model.layers[-1].mlp.mlp_output) == "layers[9].mlp.mlp_output"


@pytest.mark.xfail(
    strict=True,
    raises=ValueError,
    reason="2026-11-29: nnsight's own `input` and `output` raise outside a trace",
)
@pytest.mark.parametrize("path", ["", "layers.0", "layers.0.mlp", "layers.5.self_attn"])
def test_members_can_be_listed_outside_a_trace(path):
    model = Case("e2b").model()
    host = model.get(path) if path else model
    members = dict(inspect.getmembers(host))
    for name, value in vars(type(host)).items():
        if isinstance(value, Served):
            wanted = there("e2b", Place(name, 5 if "5" in path else 0))
            assert isinstance(members.get(name), gemloupe.Reference) == wanted, name
