"""Products of 16-bit tensors, computed in float32, beside the same products in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from hiddentap.models.cpu.float32_products import FLOAT32_PRODUCTS, float32_is_faster
from support import tiny
from support.seen_products import SeenProducts

CPU = torch.device("cpu")
SIXTEEN_BITS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
Product = Callable[[Tensor, Tensor, Tensor], Tensor]

# a: (2, 5, 96), b: (2, 96, 7), c: (2, 5, 7)
PRODUCTS: dict[str, Product] = {
    "linear": lambda a, b, c: linear(a, b[0].mT, c[0, 0]),
    "linear, by name": lambda a, b, _: linear(input=a, weight=b[0].mT),
    "mm": lambda a, b, _: torch.mm(a[0], b[0]),
    "bmm": lambda a, b, _: torch.bmm(a, b),
    "matmul": lambda a, b, _: torch.matmul(a, b),
    "@": lambda a, b, _: a @ b,
    "method": lambda a, b, _: a.matmul(b),
    "addmm": lambda a, b, c: torch.addmm(c[0], a[0], b[0]),
    "baddbmm, scaled": lambda a, b, c: torch.baddbmm(c, a, b, alpha=0.5),
    "einsum": lambda a, b, _: torch.einsum("gik,gkj->gij", a, b),
}


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 5, 96), (2, 96, 7), (2, 5, 7)))


@SIXTEEN_BITS
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_is_rounded_once(product: Product, dtype: torch.dtype) -> None:
    wide = tuple(operand.double() for operand in operands(dtype))
    with SeenProducts() as seen, FLOAT32_PRODUCTS:
        found = product(*operands(dtype))
    assert found.dtype is dtype
    assert seen.dtypes == {torch.float32}
    expected = product(*wide)
    # Half a unit in the last place of the result, and what a sum of 97 products in float32 loses before that.
    half_a_unit = torch.finfo(dtype).eps / 2 * expected.abs()
    sums = 97 * torch.finfo(torch.float32).eps * product(*(operand.abs() for operand in wide))
    assert ((found.double() - expected).abs() <= half_a_unit + sums).all()


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b, _: torch.bmm(a.float(), b.float()),
        lambda a, b, _: torch.bmm(a, b, out=torch.empty(2, 5, 7, dtype=a.dtype)),
        lambda a, b, _: torch.bmm(a.long(), b.long()),
        lambda a, _, c: torch.cat([a, c], -1),
    ],
    ids=["float32", "into a tensor", "integers", "no product"],
)
def test_everything_else_is_as_it_was(product: Product) -> None:
    expected = product(*operands(torch.bfloat16))
    with FLOAT32_PRODUCTS:
        found = product(*operands(torch.bfloat16))
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


def test_operands_of_two_dtypes_are_refused_as_ever() -> None:
    a, b, _ = operands(torch.bfloat16)
    with FLOAT32_PRODUCTS, pytest.raises(RuntimeError, match="same dtype"):
        torch.bmm(a, b.half())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_a_model_computes_so_inside_the_block_alone(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.CONFIGS[name](), dtype=torch.bfloat16).eval()
    ids = tiny.token_ids(2, 40)
    with torch.no_grad():
        before = model(ids).logits
        with SeenProducts(("linear", "addmm")) as seen, FLOAT32_PRODUCTS:
            with FLOAT32_PRODUCTS:
                pass
            inside = model(ids).logits
        after = model(ids).logits
        in_float32 = model.float()(ids).logits
    assert torch.equal(before, after)
    assert seen.dtypes == {torch.float32}
    assert inside.dtype is torch.bfloat16

    def error(logits: Tensor) -> float:
        return ((logits.float() - in_float32).norm() / in_float32.norm()).item()

    # The rounding of the residual stream is in both, so the two are about as far from a forward in float32.
    assert error(inside) < 1.1 * error(before)


def test_operands_that_are_very_large_in_float32_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = operands(torch.bfloat16)
    monkeypatch.setattr("hiddentap.models.cpu.float32_products._LARGEST_BYTES", 4 * (a.numel() + b.numel()) - 1)
    with SeenProducts() as seen, FLOAT32_PRODUCTS:
        torch.bmm(a, b)
    assert seen.dtypes == {torch.bfloat16}


def test_compiled_layers_compute_so_too() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.CONFIGS["llama"](), dtype=torch.bfloat16).eval()
    ids = tiny.token_ids(2, 40)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = model.model.layers[0]
    with torch.no_grad(), FLOAT32_PRODUCTS:
        expected = model(ids).logits
        layer.forward = torch.compile(layer.forward, backend=keep)
        found = model(ids).logits
    assert torch.equal(found, expected)
    traced = [node for graph in graphs for node in graph.graph.nodes if node.target is linear]
    assert traced
    assert {node.args[0].meta["example_value"].dtype for node in traced} == {torch.float32}


def test_only_sixteen_bits_on_the_cpu_are_tried() -> None:
    assert not float32_is_faster(CPU, torch.float32)
    assert not float32_is_faster(torch.device("cuda"), torch.bfloat16)


@SIXTEEN_BITS
@pytest.mark.parametrize(("as_it_is", "faster"), [(3.0, True), (1.2, False), (0.5, False)])
def test_the_measured_times_decide(
    as_it_is: float, faster: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddentap.models.cpu import float32_products

    times = iter([as_it_is, 1.0])
    monkeypatch.setattr(float32_products, "_quickest", lambda _: next(times))
    float32_products._measured.cache_clear()
    try:
        assert float32_is_faster(CPU, dtype) is faster
        assert float32_is_faster(CPU, dtype) is faster  # and is not measured again
    finally:
        float32_products._measured.cache_clear()
