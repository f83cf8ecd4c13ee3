"""The bench's rows in PyTorch: peers, this package, and the reasons of peers that cannot run."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import candidates, measure, peers, problem
from benchmarks.candidates import BOTH, FORWARD

pytestmark = [pytest.mark.site, pytest.mark.usefixtures("short_timings")]
HOPPER = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
TILES = (128, 64, 512)  # tokens, hidden size and vocabulary that Liger's loss for Hopper takes
NO_TILES = (128, 64, 520)
MISSING = ("Liger scaled cross entropy", "Liger Hopper linear CE", "Liger fused linear CE", "QuACK", "Apple CCE")


def rows(drawn, selected, rounds=1):
    return measure.rows({one.name: one.compile for one in selected}, candidates.judge(selected, drawn), rounds)


def rows_of(drawn, *keys):
    """Returns the rows of some peers, by key and direction."""
    selected = [one for one in peers.peer_candidates(drawn) if one.key in keys]
    measured = rows(drawn, selected)
    return {(one.key, one.direction): measured[one.name] for one in selected}


def bfloat16(shape):
    return problem.random_problem(shape, jnp.dtype("bfloat16"))


def test_objectives_of_peers_have_their_own_references(tiny):
    summed = problem.reference(tiny, *problem.cotangents(tiny, "sum of logprobs"))
    assert summed["loss"] == pytest.approx(float(jnp.sum(summed["logprobs"])), rel=1e-6)
    alone = problem.reference(tiny, *problem.cotangents(tiny, "logprob"))
    assert problem.error("dweight", alone["dweight"], summed["dweight"]) > 0.1


def test_peers_say_why_they_are_not_timed(tiny, monkeypatch):
    selected = peers.peer_candidates(tiny)
    assert {one.key for one in selected} == set(peers.PEERS)
    assert {row["left_out"] for row in rows(tiny, selected).values()} == {
        "UnsupportedError: peers are timed on CUDA GPUs, this is cpu"
    }
    monkeypatch.setattr(peers, "_torch", lambda: __import__("nobody_has_this"))
    assert {row["left_out"] for row in rows(tiny, selected).values()} == {
        "UnsupportedError: not installed: No module named 'nobody_has_this'"
    }


def test_a_peer_is_checked_and_timed_on_the_same_operands(tiny, torch_on_cpu, monkeypatch):
    def plain(hidden, weight, labels):
        logp = torch_on_cpu.log_softmax(hidden @ weight.t(), -1)
        return {"logprobs": logp.gather(1, labels[:, None])[:, 0], "entropy": -(logp.exp() * logp).sum(-1)}

    def summed(*operands):
        return {"loss": plain(*operands)["logprobs"].sum()}

    def wrong(*operands):
        return {"loss": 2 * plain(*operands)["logprobs"].sum()}

    made = {"plain": peers.Peer("plain", "logprob+entropy", plain)}
    made |= {each.__name__: peers.Peer(each.__name__, "sum of logprobs", each) for each in (summed, wrong)}
    monkeypatch.setattr(peers, "PEERS", made)
    measured = rows(tiny, peers.peer_candidates(tiny))
    assert set(measured["plain, forward+backward"]["errors"]) == {"logprobs", "entropy", *problem.GRADIENTS}
    assert set(measured["summed, forward+backward"]["errors"]) == {"loss", *problem.GRADIENTS}
    assert all("loss is off by" in measured[f"wrong, {way}"]["left_out"] for way in (FORWARD, BOTH))


@pytest.mark.usefixtures("torch_on_cpu")
def test_this_package_and_stored_logits_are_timed_in_torch():
    keys = [key for key in peers.PEERS if key.startswith("ours")]
    measured = rows_of(bfloat16((40, 64, 1003)), *keys, "torch")
    assert len(measured) == 2 * 5
    for (key, direction), row in measured.items():
        assert row.get("median_seconds"), (key, direction, row.get("left_out"))
        outputs = {"loss"} if "loss" in key else {"logprobs", "entropy"}
        assert set(row["errors"]) == outputs | (set(problem.GRADIENTS) if direction == BOTH else set())


def test_torchs_own_loss_has_the_values_and_gradients_of_ours(torch_on_cpu):
    torch = torch_on_cpu
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("needs PyTorch 2.14")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).requires_grad_()
    weight = torch.randn(1003, 64, generator=generator).div(3).requires_grad_()
    labels = torch.randint(0, 1003, (300,), generator=generator)
    results = []
    for function in (peers.torch_linear_cross_entropy, peers.our_loss):
        loss = function(hidden, weight, labels)["loss"]
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for theirs, ours in zip(*results, strict=True):
        assert torch.dist(theirs, ours) <= 1e-5 * ours.norm()
    row = rows_of(bfloat16((40, 64, 1003)), "torch linear CE")["torch linear CE", BOTH]
    assert set(row["errors"]) == {"loss", *problem.GRADIENTS}


def test_the_row_names_a_torch_that_is_too_old(tiny, torch_on_cpu, monkeypatch):
    monkeypatch.delattr(torch_on_cpu.nn, "LinearCrossEntropyOptions", raising=False)
    monkeypatch.setattr(torch_on_cpu, "__version__", "2.11.0")
    for row in rows_of(tiny, "torch linear CE").values():
        assert "PyTorch 2.11.0 has no chunked linear_cross_entropy" in row["left_out"]


@pytest.mark.usefixtures("torch_on_cpu")
def test_the_row_names_a_package_that_is_not_installed(tiny, monkeypatch, capsys):
    for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.transformers.functional", HOPPER):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("quack", "quack.linear_cross_entropy", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, name, None)
    measured = rows_of(tiny, *MISSING)
    assert len(measured) == 2 * len(MISSING)
    assert all(row["left_out"].startswith("UnsupportedError: not installed: ") for row in measured.values())
    measure.show({f"{key}, {way}": row for (key, way), row in measured.items()}, "")
    lines = capsys.readouterr().out.splitlines()
    for key in MISSING:
        assert any(line.startswith(f"{key}, {BOTH}") and "not timed: " in line for line in lines)


@pytest.fixture
def liger_for_hopper(torch_on_cpu, monkeypatch):
    """A stand-in for Liger 0.8.5 on a CPU, with the same signature, refusals and results."""
    torch = torch_on_cpu

    class LigerFusedLinearCrossEntropySM90Function(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx, _input, weight, target, ignore_index=-100, reduction="mean", bias=None, ce_weight=None,
            label_smoothing=0.0, softcap=None, lse_square_scale=0.0, use_token_scaling=False, return_z_loss=False,
            return_token_accuracy=False,
        ):  # fmt: skip
            options = bias, ce_weight, label_smoothing, softcap, lse_square_scale
            if any(options) or use_token_scaling or return_z_loss or return_token_accuracy:
                raise NotImplementedError("an option")
            if weight.dtype != torch.bfloat16 or _input.dtype != torch.bfloat16:
                raise TypeError("CuTe DSL FLCE supports BF16 input and weight only")
            if target.dtype != torch.int64:
                raise TypeError("target must be an int64 tensor")
            if _input.shape[0] % 128 != 0:
                raise NotImplementedError(f"requires M to be a multiple of 128; got M={_input.shape[0]}")
            if weight.shape[0] % 256 != 0:
                raise NotImplementedError(f"requires V to be a multiple of 256; got V={weight.shape[0]}")
            logits = (_input @ weight.t()).float()
            ctx.save_for_backward(_input, weight)
            one_hot = torch.nn.functional.one_hot(target, weight.shape[0])
            ctx.dlogits = (logits.softmax(-1) - one_hot).to(torch.bfloat16)
            return torch.nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)

        @staticmethod
        def backward(ctx, grad_output):
            _input, weight = ctx.saved_tensors
            dlogits = ctx.dlogits * grad_output.to(torch.bfloat16)
            return dlogits @ weight, dlogits.t() @ _input, *[None] * 11

    module = types.ModuleType(HOPPER)
    module.LigerFusedLinearCrossEntropySM90Function = LigerFusedLinearCrossEntropySM90Function
    monkeypatch.setitem(sys.modules, HOPPER, module)
    return LigerFusedLinearCrossEntropySM90Function


@pytest.mark.usefixtures("liger_for_hopper")
def test_ligers_loss_for_hopper_is_timed_where_its_tiles_divide_the_shape():
    measured = rows_of(bfloat16(TILES), "Liger Hopper linear CE")
    assert set(measured["Liger Hopper linear CE", BOTH]["errors"]) == {"loss", *problem.GRADIENTS}
    assert measured["Liger Hopper linear CE", FORWARD]["median_seconds"] > 0
    for row in rows_of(bfloat16(NO_TILES), "Liger Hopper linear CE").values():
        assert row == {"left_out": "UnsupportedError: refused: requires V to be a multiple of 256; got V=520"}


def test_the_stand_in_has_the_signature_of_liger(liger_for_hopper):
    """It reads Liger's file, because its import needs a GPU's packages."""
    spec = importlib.util.find_spec("liger_kernel")
    if spec is None or spec.origin is None:
        pytest.skip("needs liger-kernel 0.8.5")
    file = Path(spec.origin).parent.joinpath(*HOPPER.split(".")[1:]).with_suffix(".py")
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    (forward,) = (node for node in functions if node.name == "forward")
    parameters = inspect.signature(liger_for_hopper.forward).parameters
    assert [each.arg for each in forward.args.args] == [*parameters]
    defaults = [x.default for x in parameters.values() if x.default is not x.empty]
    assert [ast.literal_eval(each) for each in forward.args.defaults] == defaults


@pytest.mark.usefixtures("torch_on_cpu")
def test_ligers_fallback_is_not_timed_in_place_of_its_kernel(monkeypatch):
    module = types.ModuleType("liger_kernel.ops")
    module.LigerFusedLinearScaledCrossEntropyFunction = None
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", module)
    for row in rows_of(bfloat16(TILES), "Liger scaled cross entropy").values():
        assert "Liger's kernel is for Hopper" in row["left_out"]
