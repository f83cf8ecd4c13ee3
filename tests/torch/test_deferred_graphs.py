"""Deferred logits where others trace, transform, count, copy or save: compiled graphs, modes, torch.func, wrappers."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lce_torch_bridge import defer_logits
from lce_torch_bridge.deferred._tensor import DeferredLogits
from tests.torch.deferred_cases import B, H, S, V, make_head, make_hidden, make_labels, run_head
from tests.torch.test_deferred import Foreign, both, nll

F = torch.nn.functional
float64 = pytest.mark.usefixtures("in_float64")


def compiled(test: Any) -> Any:
    """Dynamo looks at ``.grad`` of what a broken graph gives on, and says that it cannot trace a tensor's making."""
    ignored = (
        "ignore:The .grad attribute of a Tensor:UserWarning",
        "ignore:Dynamo does not know how to trace:UserWarning",
    )
    return pytest.mark.usefixtures("fresh_compiler")(pytest.mark.filterwarnings(*ignored)(test))


class Model(torch.nn.Module):
    """Like a causal language model of Transformers: it returns its loss and its logits."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = torch.nn.Embedding(V, H), torch.nn.Linear(H, H)
        self.lm_head, self.loss = torch.nn.Linear(H, V, bias=False), loss

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[Any, torch.Tensor]:
        z = self.lm_head(torch.tanh(self.body(self.embed(ids))))
        return None if labels is None else self.loss(z, labels), z


def shifted(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nll((z.float() / 2.0)[:, :-1], labels[:, 1:])


def both_and_z_loss(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -both(z, labels).mean() + 0.1 * torch.logsumexp(z, -1).square().mean()


def written(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    z[..., 40:] = -1e4
    return nll(z, labels.clamp(max=39))


def stored(z: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.softmax(z, -1).square().sum(-1).mean()


def detached_too(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return shifted(z.detach(), labels) + shifted(z, labels)


def broken(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return shifted(z, labels)


def foreign(z: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return Foreign.apply(z).mean()


def step(model: Any, call: Any, outside: Any = None) -> list[torch.Tensor]:
    """The loss and the gradients."""
    model.zero_grad()
    ids = make_labels(B, S)
    loss = outside(call(ids)[1], ids) if outside else call(ids, labels=ids)[0]
    loss.backward()
    return [loss.detach(), *(x.grad.clone() for x in model.parameters())]


def near(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()


LOSSES = [shifted, both_and_z_loss, written, stored, detached_too]


@float64
@compiled
@pytest.mark.parametrize(("loss", "whole"), [
    *((loss, True) for loss in LOSSES),
    *(pytest.param(loss, False, marks=pytest.mark.slow) for loss in LOSSES),  # the next but one has a broken graph
])  # fmt: skip
def test_compiled(loss: Any, whole: bool) -> None:
    """With ``fullgraph`` and without."""
    model = Model(loss)
    want, deferred = step(model, model), copy.deepcopy(model)
    defer_logits(deferred)
    compiled = torch.compile(deferred, backend="aot_eager", fullgraph=whole)
    for _ in range(2):
        near(step(deferred, compiled), want)


@float64
@compiled
def test_compiled_labels_out_of_range_have_nan() -> None:
    """No graph may look at labels: a loss of such a label is NaN, and a mean of none too."""
    head, hidden, labels = make_head(), make_hidden(S), make_labels(S)
    defer_logits(head, strict=True)
    wrong, none = labels.index_fill(0, torch.tensor([1]), V), torch.full_like(labels, -100)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(ids: torch.Tensor, reduction: str) -> torch.Tensor:
        return F.cross_entropy(head(hidden), ids, reduction=reduction)

    for reduction in ("mean", "sum"):
        assert loss(wrong, reduction).isnan()
        assert not loss(labels, reduction).isnan()
    assert loss(wrong, "none").isnan().tolist() == [i == 1 for i in range(S)]
    assert loss(none, "mean").isnan()
    assert loss(none, "sum") == 0
    assert torch.equal(loss(none, "none"), torch.zeros(S))


@float64
@compiled
@pytest.mark.parametrize("is_head", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["head", "model"])
def test_compiled_with_the_loss_outside(is_head: bool) -> None:
    """Of a model that is compiled, and with a break before the loss; the gradients are recorded as before after it."""
    model = Model(broken)
    want, deferred = step(model, model, shifted), copy.deepcopy(model)
    defer_logits(deferred.lm_head if is_head else deferred)
    compiled = torch.compile(deferred, backend="aot_eager")
    near(step(deferred, compiled, shifted), want)
    near(step(deferred, compiled), want)


@float64
@compiled
def test_somebodys_function_in_a_compiled_graph_keeps_its_gradient_or_is_refused() -> None:
    model, refused = Model(foreign), "would lose their gradient: give it logits.compute"
    want = step(model, model)
    for what in (lambda m: m, lambda m: m.lm_head):
        deferred = copy.deepcopy(model)
        defer_logits(what(deferred))
        try:
            got = step(deferred, torch.compile(deferred, backend="aot_eager"))
        except RuntimeError as error:
            got = want if refused in str(error) else []
        near(got, want)
        torch._dynamo.reset()


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator has made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(found):
            if isinstance(x, torch.Tensor) and not isinstance(x, DeferredLogits) and x.device.type != "meta":
                self.numel = max(self.numel, x.numel())
        return found


def test_no_tensor_has_the_size_of_the_logits() -> None:
    """By the programs themselves; the same mode sees stock's logits."""
    head, tokens = make_head(), 64

    def run(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logp = F.log_softmax(z / 0.7, -1)
        entropy = -(logp.exp() * logp).sum(-1)
        return nll(z, labels) + logp.gather(-1, labels[:, None]).mean() + entropy.mean()

    want = run_head(head, run, (tokens,))
    with Largest() as seen:
        run_head(head, run, (tokens,))
    assert seen.numel == tokens * V
    handle = defer_logits(head, strict=True)
    with Largest() as seen:
        got = run_head(head, run, (tokens,))
    assert handle.served == 3
    assert seen.numel < tokens * V
    torch.testing.assert_close(got.value, want.value)
    for x, y in zip(got.gradients, want.gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


class Every(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return func(*args, **(kwargs or {}))


@float64
@pytest.mark.parametrize(
    "mode",
    [Every, lambda: torch.device("cpu"), torch.autograd.graph.save_on_cpu, lambda: FlopCounterMode(display=False)],
)
def test_modes(mode: Any) -> None:
    want = run_head(make_head(), nll)
    head = make_head()
    defer_logits(head)
    with mode():
        got = run_head(head, nll)
    torch.testing.assert_close([got.value, *got.gradients], [want.value, *want.gradients])


@float64
def test_flops_are_counted() -> None:
    """Those of the operators, whose backward computes one product of logits anew."""
    counts = []
    for is_deferred in (False, True):
        head = make_head()
        if is_deferred:
            defer_logits(head)
        with FlopCounterMode(display=False) as mode:
            run_head(head, nll)
        counts.append(mode.get_total_flops())
    assert 0 < counts[0] <= counts[1] <= 4 * counts[0] // 3


@float64
def test_torch_func() -> None:
    """Of other parameters, and transformed: the head computes its logits inside a transform."""
    head, labels = make_head(), make_labels(B, S)
    stock = copy.deepcopy(head)
    handle = defer_logits(head)
    grads = []
    for module in (stock, head):
        other = (stock.weight * 2).detach().requires_grad_()
        nll(torch.func.functional_call(module, {"weight": other}, (make_hidden(B, S),)), labels).backward()
        grads.append(other.grad)
    torch.testing.assert_close(*grads)
    assert handle.served == 1
    hidden, weight = make_hidden(B, S).detach(), stock.weight.detach()

    def of_weight(module: Any) -> torch.Tensor:
        return torch.func.grad(lambda w: nll(torch.func.functional_call(module, {"weight": w}, (hidden,)), labels))(
            weight
        )

    def of_each(module: Any) -> torch.Tensor:
        return torch.vmap(lambda x, y: F.cross_entropy(module(x), y))(hidden, labels)

    def jacobian(module: Any) -> torch.Tensor:
        return torch.func.jacrev(lambda x: module(x).logsumexp(-1))(hidden[0])

    for transformed in (of_weight, of_each, jacobian):
        torch.testing.assert_close(transformed(head), transformed(stock))


@float64
def test_traced_exported_fake_and_meta_heads_compute_their_logits() -> None:
    class LogSoftmax(torch.nn.Module):
        def __init__(self, head: torch.nn.Module) -> None:
            super().__init__()
            self.head = head

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return F.log_softmax(self.head(hidden), -1)

    head = make_head()
    want = LogSoftmax(head)(make_hidden(B, S))
    defer_logits(head)
    model = LogSoftmax(head)
    hidden = make_hidden(B, S)
    torch.testing.assert_close(torch.export.export(model, (hidden,)).module()(hidden), want)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.jit.trace(model, (hidden,))(hidden), want)
    with FakeTensorMode():
        fake = torch.nn.Linear(H, V)
        defer_logits(fake)
        assert nll(fake(torch.ones(B, S, H)), torch.zeros(B, S, dtype=torch.int64)).shape == ()
    meta = torch.nn.Linear(H, V, device="meta")
    defer_logits(meta)
    assert type(meta(torch.empty(2, H, device="meta"))) is torch.Tensor


@float64
def test_saved_copied_and_shown() -> None:
    head = make_head()
    want = head(make_hidden(B, S)).detach()
    defer_logits(head)
    z = head(make_hidden(B, S))
    assert repr(z) == f"DeferredLogits(shape=({B}, {S}, {V}), dtype=torch.float32, device='cpu', logits, not computed)"
    assert repr(z[0, 0]).startswith(f"DeferredLogits(shape=({V},)")
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):  # as stock
        copy.deepcopy(z)
    with pytest.raises(RuntimeError, match="requires grad"):
        z.numpy()
    detached, file = z.detach(), io.BytesIO()
    torch.save({"logits": detached}, file)
    file.seek(0)
    copies = [
        torch.load(file)["logits"], copy.copy(detached), copy.deepcopy(detached), pickle.loads(pickle.dumps(detached)),
        torch.from_numpy(detached.numpy()), torch.from_dlpack(detached), torch.as_tensor(detached),
        z.compute().detach(), torch.nn.Parameter(detached).detach(), detached.as_subclass(torch.Tensor) * 1,
    ]  # fmt: skip
    for x in copies:
        assert type(x) is torch.Tensor
        assert torch.equal(x, want)
    assert "not computed" not in repr(z)
    assert z.data_ptr() == z.compute().data_ptr()


@float64
def test_copies_of_a_head_have_their_own_weight() -> None:
    """A deep copy, a pickled head, and the shallow copy of DataParallel."""
    head = make_head()
    handle = defer_logits(head)
    hidden = make_hidden(B, S)
    replica = head._replicate_for_data_parallel()
    replica.weight, replica.bias = head.weight * 2, None  # as torch.nn.parallel.replicate sets them
    nll(replica(hidden), make_labels(B, S)).backward()
    grad, weight = head.weight.grad, head.weight.detach().clone().requires_grad_()
    nll(F.linear(make_hidden(B, S), weight * 2), make_labels(B, S)).backward()
    torch.testing.assert_close(grad, weight.grad)
    assert (handle.served, handle.stored) == (1, 0)
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.weight.data *= 3
    torch.testing.assert_close(loaded(hidden) * 1, F.linear(hidden, weight * 3))


@float64
def test_a_pickled_model_is_deferred_by_a_call_of_its_own() -> None:
    """It computes its logits until then."""
    model, ids = Model(nll), make_labels(B, S)
    handle = defer_logits(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded(ids)[1]) is torch.Tensor
    with defer_logits(loaded) as own:
        assert own is not handle
        near(step(loaded, loaded), step(model, model))
        assert own.served == handle.served == 1
    assert type(loaded(ids)[1]) is torch.Tensor
    assert isinstance(model(ids)[1], DeferredLogits)


@float64
@pytest.mark.parametrize("name", ["forward", "full backward", "full backward pre", "weight", "parametrized"])
def test_hooks_of_a_head(name: str) -> None:
    runs = []
    for is_deferred in (False, True):
        head: Any = make_head()
        if is_deferred:
            defer_logits(head)
        if name == "forward":
            head.register_forward_hook(lambda _module, _inputs, z: z * 3)
        elif name == "full backward":
            head.register_full_backward_hook(lambda _module, grads, _: (grads[0] * 2,))
        elif name == "full backward pre":
            head.register_full_backward_pre_hook(lambda _module, grads: (grads[0] * 2,))
        elif name == "weight":
            head.weight.register_hook(lambda grad: grad * 2)
        else:
            torch.nn.utils.parametrizations.weight_norm(head)
        found = run_head(head, nll)
        runs.append([found.value, *found.gradients])
    torch.testing.assert_close(*runs)


@float64
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_head_in_a_checkpoint(reentrant: bool) -> None:
    def run(head: Any) -> list[Any]:
        hidden, labels = make_hidden(B, S), make_labels(B, S)
        z = torch.utils.checkpoint.checkpoint(head, hidden, use_reentrant=reentrant)
        nll(z, labels).backward()
        return [hidden.grad, head.weight.grad]

    head = make_head()
    defer_logits(head)
    torch.testing.assert_close(run(head), run(make_head()))


@float64
def test_a_weight_whose_memory_is_gone_is_refused() -> None:
    head = make_head()
    defer_logits(head)
    z = head(make_hidden(B, S))
    head.weight.untyped_storage().resize_(0)
    for use in (lambda: nll(z, make_labels(B, S)), lambda: z.square()):
        with pytest.raises(RuntimeError, match=rf"weight \({V}, {H}\) has no memory"):
            use()


@float64
def test_a_model_defers_where_labels_are_given() -> None:
    """Without gradients too; and its new head."""
    model = Model(shifted)
    handle, ids = defer_logits(model), make_labels(B, S)
    with torch.no_grad():
        assert type(model(ids)[1]) is torch.Tensor
        for given in ({"labels": ids}, {}):
            loss, z = model(ids, **given) if given else model(ids, ids)
            assert isinstance(z, DeferredLogits)
            torch.testing.assert_close(loss, shifted(z.compute(), ids))
    assert handle.served == 2
    model.lm_head = torch.nn.Linear(H, V)
    got = step(model, model)
    near(got, step(model, lambda ids, labels: (shifted(stock_logits(model, ids), labels),)))
    assert handle.served == 3


def stock_logits(model: Model, ids: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(model.body(model.embed(ids)))
    return F.linear(hidden, model.lm_head.weight, model.lm_head.bias)
