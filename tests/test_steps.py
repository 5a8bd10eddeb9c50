"""Steps: how many are compiled, evaluated and read, which operations they consist of, and their memory."""

from __future__ import annotations

import gc
import shutil
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from decoding import decoded, prefill, rows_of, tokens_of, unrewritten_module
from mlx.utils import tree_map

from mlx_transmuter import generation
from mlx_transmuter.cache import CacheIndex
from mlx_transmuter.ops.mlx import pooled_attention
from mlx_transmuter.runtime.buckets import StepColumns
from mlx_transmuter.runtime.buckets import context_bucket as decoders_bucket
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.prefill_schedule import prefill_chunks
from mlx_transmuter.runtime.steps.pooled import PooledStep, PooledStepInputs
from scripts.kernels.exported_graph import export_parts

pytestmark = pytest.mark.slow

# Compilations.


def bucket(length: int) -> int:
    size = 64
    while size < length:
        size *= 2
    return size


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("beams", [1, 3])
def test_prompts_of_all_lengths_share_a_few_compiled_steps(beams, loaded, monkeypatch):
    """A step is compiled per length (a power of two), context bucket and size of the rows' runs, or of all blocks; none
    is traced again."""
    model = loaded("llama")  # its conversion compiles steps too
    traced, real = [], mx.compile

    def counting(function, *args, **options):
        def tracing(*inputs):
            traced.append(function)
            return function(*inputs)

        return real(tracing, *args, **options)

    monkeypatch.setattr(mx, "compile", counting)
    new = 3
    ctx = generation.context(model, max_new_tokens=new, do_sample=False, eos_token_id=[], num_beams=beams)
    gen = generation.compile(ctx, 1)
    expected = set()
    for length in range(1, 101):
        end = 0 if beams == 1 else length  # prompts of beams run packed
        for part in [*prefill_chunks(length - end), *[1] * (new - 1)]:
            end += part
            # Beams share their prompt's slots.
            expected.add((part, bucket(end), bucket(length + beams * new)))
        (tokens,) = generation.generate(gen, [[3 + i % 40 for i in range(length)]], [0])
        assert len(tokens) == new
    # 7 lengths, over 64 columns of rows of 64 or of 128 slots, and over 128 columns; the blocks of 3 rows are 64 or 128.
    assert len(expected) <= 7 * 3
    assert beams > 1 or gen.decoder.compilations == len(expected)
    assert sum(function.__qualname__.startswith("PooledStep.") for function in traced) == len(expected)
    again = len(traced)
    generation.generate(gen, [[9] * 77], [0])
    assert len(traced) == again


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, [64, 128, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1152]),
        (4, [64, 128, 160, 192, 224, 256, 320, 384]),
        (16, [64, 96, 128, 160, 192, 224, 256, 288, 320]),
        (100, [64, 96, 128, 160, 192, 224, 256, 288, 320]),
    ],
)
def test_context_buckets_are_finer_where_attention_is_a_larger_share_of_a_step(rows, sizes):
    assert sorted({decoders_bucket(length, rows) for length in range(1, sizes[-1] + 1)}) == sizes
    assert all(length <= decoders_bucket(length, rows) <= bucket(length) for length in range(1, 4097))


@pytest.mark.usefixtures("compiling")
def test_steps_over_different_numbers_of_columns_share_kernels(tmp_path, monkeypatch):
    """A number that is a constant of a kernel makes one kernel for each number; building one takes a second on a CPU."""
    if shutil.which("g++") is None:
        pytest.skip("MLX fuses nothing on a CPU without a compiler")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where MLX keeps what it built

    def session(context: int) -> int:
        signature, leaves = CacheIndex.rows(640, [0, 0]).limit_context(context).with_positions([[3], [5]]).walk()

        def step(leaves, pool, values):
            index = CacheIndex.from_walk(signature, leaves).with_spare_pool_row(1280)
            return index.positions() + 1, index.extend(values, pool, zero_unseen=False)

        mx.eval(mx.compile(step)(leaves, mx.zeros((1281, 3)), mx.ones((2, 1, 3))))
        return len(list(tmp_path.rglob("*.so")))

    assert session(200) == session(232) > 0


@pytest.mark.parametrize(("name", "mode"), [("llama", None), ("llama_genai", "in_place")])
def test_compiled_and_eager_steps_agree(name, mode, loaded, compiling):
    module = loaded(name).decoder if mode is None else unrewritten_module(name)
    prompts = [row["prompt"] for row in rows_of(name)]
    compiled = prefill(Decoder(module, 3, cache_mode=mode).begin_session([40] * 3), prompts)
    mx.disable_compile()
    eager = prefill(Decoder(module, 3, cache_mode=mode).begin_session([40] * 3), prompts)
    assert np.abs(compiled - eager).max() <= 1e-5 * np.ptp(eager)


@pytest.mark.usefixtures("compiling")
def test_compiled_steps_give_the_tokens_of_the_reference(loaded):
    rows = rows_of("llama")
    assert decoded(Decoder(loaded("llama").decoder, 3), rows, paged=True, block_size=3) == tokens_of(rows)


# Evaluations.

CONVERSIONS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__", "__iter__")


@pytest.mark.usefixtures("compiling")
def test_a_step_is_one_evaluation_and_reads_one_array(loaded, monkeypatch):
    ctx = generation.context(loaded("llama"), max_new_tokens=9, do_sample=False, eos_token_id=[], token_logprobs=True)
    gen = generation.compile(ctx, 3)
    prompts = [[5, 6, 7], [9] * 11, [8] * 29]
    generation.generate(gen, prompts, [0] * 3)  # what is known while a step is traced is computed then, once
    evaluations, reads = [], []

    def counting(evaluate):
        def count(*arrays):
            evaluations.append(len(arrays))
            return evaluate(*arrays)

        return count

    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, counting(getattr(mx, name)))

    def reading(convert_):
        def read(value, *args, **options):
            if isinstance(value, mx.array):
                reads.append(value)
            return convert_(value, *args, **options)

        return read

    for name in ("array", "asarray"):
        monkeypatch.setattr(np, name, reading(getattr(np, name)))
    for name in CONVERSIONS:
        monkeypatch.setattr(mx.array, name, reading(getattr(mx.array, name)), raising=False)
    rows = generation.generate(gen, prompts, [0] * 3)
    monkeypatch.undo()
    assert [len(row) for row in rows] == [9, 9, 9]
    packed_rows = 1  # the prompts run in one, after one another
    assert len(evaluations) == packed_rows + 9
    # A packed row tells which of its prompts' scores are NaN; a step's array is what was selected.
    assert [(value.dtype, value.shape[0]) for value in reads] == [(mx.bool_, 3)] * packed_rows + [(mx.int32, 3)] * 9


# The operations of a step.

# Operations that only the CPU backend has, and why.
CPU_ONLY = {
    **dict.fromkeys(("Inverse", "Cholesky", "SVD", "Eigh", "Eig", "LUF", "QRF"), "linear algebra has no Metal kernel"),
    "Load": "reads a file",
}
WIDE = (mx.float64, mx.int64, mx.uint64, mx.complex64)
MOST_INDEX_ARRAYS = 20


def lacking(function, *args) -> list[str]:
    """Returns what Metal lacks among the operations of a function of arrays; empty for one that runs there."""
    problems, count = [], 0
    for part in export_parts(function, *args):
        if part["type"] == "constants":
            problems += [f"a constant of {array.dtype}" for _, array in part["constants"] if array.dtype in WIDE]
        if part["type"] != "primitive":
            continue
        count += 1
        name, input_dtypes, output_dtypes = (
            part["name"],
            [i[2] for i in part["inputs"]],
            [o[2] for o in part["outputs"]],
        )
        problems += [f"{name} of {dtype}" for dtype in (*input_dtypes, *output_dtypes) if dtype in WIDE]
        if name in CPU_ONLY:
            problems.append(f"{name}: {CPU_ONLY[name]}")
        if name in ("Gather", "Scatter") and len(input_dtypes) > MOST_INDEX_ARRAYS:
            problems.append(f"{name} with {len(input_dtypes)} arrays")
    assert count
    return problems


def test_lacking_finds_what_metal_lacks():
    x, ids = mx.ones((4, 4)), mx.zeros((4, 4), mx.int32)
    assert lacking(lambda x: mx.softmax(x @ x) + 1, x) == []
    assert lacking(lambda x: mx.linalg.inv(x, stream=mx.cpu) + x, x) != []
    assert lacking(lambda x: x.astype(mx.float64) * 2, x) != []
    assert lacking(lambda i: mx.zeros((9,), mx.int64).at[i].add(1), ids) != []
    assert lacking(lambda i: i + mx.array(3, mx.int64), ids) != []
    with pytest.raises(ValueError, match="floating"):  # MLX itself makes no integer product
        lacking(mx.matmul, ids, ids)


STEPS = [
    ("llama", True),
    ("gemma2", True),
    ("gpt2_ort", True),
    ("llama_q4", True),
    ("llama_genai", True),
    ("llama", False),
    ("bloom", False),
]


@pytest.mark.parametrize(("name", "pooled"), STEPS)
def test_a_step_has_no_operation_that_metal_lacks(name, pooled, loaded, monkeypatch):
    """Every function that a generation compiles: prompt chunks, steps, writes, the selection of tokens."""
    model = loaded(name)
    if not pooled:
        model = type(model)(unrewritten_module(name), model.config, model.generation_config)
    calls: dict[int, tuple] = {}

    def watching(function, *args, **options):
        def call(*inputs):
            # Zeros in their place: who holds a pool makes a step copy it.
            likes = tree_map(
                lambda leaf: mx.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, mx.array) else leaf, list(inputs)
            )
            calls.setdefault(id(function), (function, likes))
            return function(*inputs)

        return call

    monkeypatch.setattr(mx, "compile", watching)
    monkeypatch.setattr(pooled_attention, "_has_attention_kernel", lambda: True)  # as on Metal
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2}
    ctx = generation.context(model, max_new_tokens=3, eos_token_id=[], token_logprobs=True, **settings)
    gen = generation.compile(ctx, 2)  # which the compiled functions do not keep alive
    generation.generate(gen, [[5, 6, 7], [9] * 11], [0, 1])
    names = {function.__qualname__ for function, _ in calls.values()}
    assert len(names) >= 2, names
    for function, inputs in calls.values():
        assert lacking(function, *inputs) == [], function.__qualname__


def test_a_step_of_one_token_has_no_operations_to_spare(loaded):
    """Each operation costs a step time. Of a layer's six products and that of the logits none has its operands transposed
    or reshaped, and two include the sum with the residual stream; the one transpose is that of the keys."""
    decoder = Decoder(loaded("llama").decoder, 1)
    session = decoder.begin_session([40])
    assert isinstance(session, CacheSession)
    step = PooledStep(1, StepColumns(64), session.kv_cache.head_span, paged=False, has_positions=False).build(
        decoder.graph
    )
    arrays = (mx.array([[5]]), mx.array([3]), mx.array([1]), mx.array([[3]]))
    actual = export_parts(
        lambda *arrays: step(PooledStepInputs(list(arrays[:-4]), *arrays[-4:], None, None, {}, None)),
        *session.pools.arrays,
        *arrays,
    )
    count = Counter(part["name"] for part in actual if part["type"] == "primitive")
    layers = 2
    assert count["Matmul"] == 4 * layers + 1  # and the logits
    assert count["AddMM"] == 2 * layers
    assert count["Transpose"] <= layers + 1  # and one of the rotation's angles
    assert count["Unflatten"] == 0
    assert count["ScatterAxis"] == count["AsStrided"] == layers  # of keys and values at once
    assert count["Reshape"] <= 8 * layers + 1  # of a rotation two, which see the pairs in its input
    assert count["Concatenate"] <= 1  # the angles of a pair's two channels
    assert (count["Gather"], count["GatherAxis"]) == (1, 0)  # the token's embedding alone is looked up


# Memory.


@pytest.mark.parametrize(
    ("name", "mode", "layout"),
    [
        ("llama", None, {}),
        ("llama", None, {"paged": True}),
        ("llama", "append", {}),
        ("llama_genai", "in_place", {}),
        ("llama_genai", None, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_copies_no_pool(name, mode, layout, compiled, loaded, request):
    """The peak memory of a step is far below one pool, and the same from step to step."""
    if compiled:
        request.getfixturevalue("compiling")
    decoder = Decoder(loaded(name).decoder if mode is None else unrewritten_module(name), 1, cache_mode=mode)
    decoder.trained_length = 2**15  # for so many tokens there are slots at once
    session = decoder.begin_session([2**15], **layout)
    assert isinstance(session, CacheSession)
    sizes = [pool.nbytes for pool in session.pools.arrays]
    prefill(session, [[5, 6, 7, 8]])
    peaks = []
    for token in range(12):
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        logits = session.step(np.array([[token]], np.int32), [1])
        session.evaluate(logits)
        peaks.append(mx.get_peak_memory() - before)
    assert sum(sizes) > 2**22
    assert max(peaks) < min(sizes) / 2, (peaks, sizes)
    assert max(peaks[6:]) <= max(peaks[:6]) + 2**16  # which of a step's small arrays live at once varies


def test_memory_is_freed_when_a_session_closes(loaded):
    decoder = Decoder(loaded("llama").decoder, 1)
    decoder.trained_length = 2**15
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    session = decoder.begin_session([2**15])
    prefill(session, [[5, 6, 7]])
    session_bytes = mx.get_active_memory() - before
    session.close()
    gc.collect()
    assert session_bytes > 2**22
    assert mx.get_active_memory() - before < session_bytes / 20
