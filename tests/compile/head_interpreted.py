"""The head in Triton's interpreter, against the reference functions; test_head_kernel.py runs this file."""

import pytest
import torch
from torch.library import opcheck
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.decode_choice import choose_tokens_any
from fmoe.compile.decode_settings import HeadSettings, QuantizedHeadSettings, decode_settings_to_ints
from fmoe.compile.head_ops import choose_tokens_op, compute_logits_op
from fmoe.compile.kernels.head_quantized import choose_token_quantized
from fmoe.functional.quant import dequantize, quantize_blocks
from fmoe.functional.sampling import sample_greedy

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

V, D = 203, 72
GEMV = HeadSettings(8, 32, 4, 2, dot=False)
DOT = HeadSettings(16, 32, 4, 2, dot=True)
ROWS = [(1, GEMV), (1, DOT), (3, DOT), (16, DOT), (16, GEMV), (1, None), (5, None)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("batch", "settings"), ROWS, ids=str)
def test_the_logits_equal_the_product_and_the_token_is_their_largest(batch, settings, dtype, rng):
    x, head = (torch.randn(n, D, generator=rng).to(dtype) for n in (batch, V))

    tokens, best, logits = compute_logits_op(x, head, settings=settings)
    greedy = choose_tokens_op(x, head, settings=settings)

    exact = x.double() @ head.double().T
    torch.testing.assert_close(logits.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(logits, logits.to(dtype).float())
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert torch.equal(best, logits.amax(-1))
    assert torch.equal(greedy[0], tokens)
    assert torch.equal(greedy[1], best)


@pytest.mark.parametrize("settings", [GEMV, DOT], ids=["product", "dot"])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 203])
def test_equal_logits_go_to_the_lowest_id(size, settings, rng):
    """Whole numbers make many logits equal, within a program and across programs."""
    for seed in range(4):
        x = torch.randint(-1, 2, (1, D), generator=rng.manual_seed(seed)).half()
        head = torch.randint(-1, 2, (size, D), generator=rng).half()
        tokens, _ = choose_tokens_op(x, head, settings=settings)
        assert torch.equal(tokens, sample_greedy(x.float() @ head.float().T))
        assert choose_tokens_op(0 * x, head, settings=settings)[0].tolist() == [0]
        assert choose_tokens_op(-0.0 * x.abs(), head.abs() * head.sign(), settings=settings)[0].tolist() == [0]


@pytest.mark.parametrize("settings", [GEMV, DOT], ids=["product", "dot"])
def test_rounding_to_the_models_dtype_makes_ties(settings):
    """2049 is no float16: it rounds to 2048, which stands first."""
    x, head = torch.tensor([[1.0, 1.0]]).half(), torch.tensor([[0, 0], [1024, 1024], [1024, 1025]]).half()
    tokens, best = choose_tokens_op(x, head, settings=settings)
    assert (tokens.tolist(), best.tolist()) == ([1], [2048.0])


@pytest.mark.parametrize(("values", "token"), [
    ([-3.0, torch.nan, 9.0, torch.nan], 1), ([-3.0, torch.inf, 9.0, torch.inf], 1), ([-torch.inf] * 4, 0),
    ([-5.0, -2.0, -torch.inf, -3.0], 1),
])  # fmt: skip
def test_what_is_not_finite_shows(values, token):
    head = torch.zeros(4, 16)
    head[:, 0] = torch.tensor(values)
    x = torch.zeros(2, 16)
    x[:, 0] = 1
    head[:, 1:] = 0

    tokens, best = choose_tokens_op(x, head, settings=DOT)

    assert tokens.tolist() == [token] * 2 == torch.tensor([values] * 2).argmax(-1).tolist()
    torch.testing.assert_close(best, torch.tensor([values[token]] * 2), equal_nan=True, rtol=0, atol=0)


def test_a_head_by_columns_and_hidden_states_from_a_larger_tensor(rng):
    x, head = torch.randn(3, 2, D, generator=rng), torch.randn(D, V, generator=rng).T

    _, _, logits = compute_logits_op(x[:, -1], head, settings=DOT)

    torch.testing.assert_close(logits, x[:, -1] @ head.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_ops_keep_their_schemas(batch, rng):
    x, head = torch.randn(batch, D, generator=rng), torch.randn(V, D, generator=rng)
    opcheck(torch.ops.fmoe.head_greedy.default, (x, head, decode_settings_to_ints(DOT)))
    opcheck(torch.ops.fmoe.head_logits.default, (x, head, decode_settings_to_ints(GEMV)))


QUANTIZED = [QuantizedHeadSettings(8, 4, 3), QuantizedHeadSettings(16, 4, 99), QuantizedHeadSettings(1, 1, 1)]


@pytest.mark.parametrize("settings", QUANTIZED, ids=str)
@pytest.mark.parametrize("size", [1, 16, 17, 203])
@pytest.mark.parametrize("hidden", [128, 384])
def test_a_head_in_fp8_blocks_chooses_the_largest_of_its_own_logits(size, hidden, settings, rng):
    x, head = torch.randn(1, hidden, generator=rng), quantize_blocks(torch.randn(size, hidden, generator=rng))
    head.scale.mul_(torch.rand(head.scale.shape, generator=rng) + 0.5)

    token, best = choose_token_quantized(x, head, settings)

    logits = (x.double() @ dequantize(head, torch.float64).T)[0]
    assert (token.dtype, best.dtype) == (torch.int64, torch.float32)
    assert token.tolist() == [logits.argmax().item()]
    torch.testing.assert_close(best.double(), logits.amax()[None], rtol=1e-5, atol=1e-5)


def test_equal_logits_by_a_head_in_fp8_go_to_the_lowest_id(rng):
    head = quantize_blocks(torch.ones(203, 128))
    for settings in QUANTIZED:
        assert choose_token_quantized(torch.ones(1, 128), head, settings)[0].tolist() == [0]
    assert choose_token_quantized(torch.full((1, 128), torch.nan), head, QUANTIZED[0])[1].isnan().all()


def test_a_head_in_fp8_is_taken_for_a_single_row(rng):
    x, head = torch.randn(1, 256, generator=rng), quantize_blocks(torch.randn(203, 256, generator=rng))
    expected = choose_tokens_op(x, dequantize(head, torch.float32))
    assert torch.equal(choose_tokens_any(x, head)[0], expected[0])
    checks = ("test_autograd_registration", "test_faketensor")  # the others compute with FP8, which torch cannot
    opcheck(torch.ops.fmoe.head_quantized.default, (x, head.w, head.scale), test_utils=checks)
    with pytest.raises(ValueError, match=r"x \[2, 256\] must be one row of the head's 256 columns"):
        choose_tokens_any(x.repeat(2, 1), head)
