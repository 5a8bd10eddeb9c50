"""Runs in several threads: a prompt cache that they share, and the end of a process whose threads generated."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from test_prompt_cache import assert_same_results, compile_model

from mlx_transmuter import generation
from mlx_transmuter.cache import CacheError, KVCache
from mlx_transmuter.cache.prefix_store import PrefixStore
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.generation import PromptCache, batch, loop
from mlx_transmuter.generation.exit_gate import ExitGate
from mlx_transmuter.generation.row_group import RowGroup
from mlx_transmuter.ops.compiled_function import CompiledFunction
from mlx_transmuter.runtime.cache_session import CacheSession

THREADS = 8
TOKENS = np.random.default_rng(7).integers(3, 60, 80).tolist()


@pytest.fixture
def switching_often():
    """Threads that take turns every few microseconds, so that they meet between any two operations."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def repeat(call):
    """Returns a function of six calls, which returns their results, or their errors for the user."""

    def calls() -> list:
        found = []
        for _ in range(6):
            try:
                found.append(call())
            except TransmuterError as error:
                found.append(error)
        return found

    return calls


def outcomes(calls) -> list:
    """Returns what the calls return, or the errors that they raise, each in a thread of its own, begun at once."""
    barrier = threading.Barrier(len(calls))

    def outcome(call):
        barrier.wait()
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(outcome, call) for call in calls]]


@pytest.mark.usefixtures("switching_often")
def test_one_of_the_threads_that_open_sequences_at_once_gets_them():
    cache = KVCache([], 0)
    for _ in range(30):
        found = outcomes([lambda: cache.open_sequences([TOKENS], [len(TOKENS)])] * THREADS)
        sessions = [result for result in found if not isinstance(result, Exception)]
        assert len(sessions) == 1
        assert all("one session at a time" in str(result) for result in found if isinstance(result, Exception))
        cache.close_sequences(sessions[0][0])
        assert cache.block_manager.free_slots == cache.block_manager.num_slots


@pytest.mark.usefixtures("switching_often")
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
def test_threads_that_share_a_prompt_cache_get_exact_results_or_an_error(options, loaded, tmp_path):
    """While others ask for its tokens, save it and clear it. The cache is exact afterwards."""
    model, cache = loaded("llama"), PromptCache(loaded("llama"), max_tokens=160)
    prompts = [TOKENS[: 8 + 5 * thread] for thread in range(THREADS)]
    expected = [generation.generate(compile_model(model, **options), [prompt], [0]) for prompt in prompts]

    def run(prompt):
        gen = compile_model(model, **options)
        return repeat(lambda: generation.generate(gen, [prompt], [0], prompt_cache=cache))

    others = [
        lambda: (cache.tokens, cache.nbytes, cache.find(TOKENS)),
        lambda: cache.save(tmp_path / "cache"),
        cache.clear,
    ]
    found = outcomes([*map(run, prompts), *map(repeat, others)])
    for results, text in zip(found, expected, strict=False):
        assert not isinstance(results, Exception), results
        for result in results:
            if isinstance(result, Exception):
                assert "one session at a time" in str(result)
            else:
                assert_same_results(result, text)
    for results in found[THREADS:]:
        assert not isinstance(results, Exception), results
        assert all(
            "a generation that is not over" in str(result) for result in results if isinstance(result, Exception)
        )
    assert not cache.kv_cache.in_use
    assert cache.kv_cache.block_manager.free_slots == cache.kv_cache.block_manager.num_slots
    for prompt, text in zip(prompts, expected, strict=True):
        gen = compile_model(model, **options)
        assert_same_results(generation.generate(gen, [prompt], [0], prompt_cache=cache), text)


def test_a_prefix_is_matched_while_its_blocks_are_evicted():
    store = PrefixStore(1)
    store.add_sequence([5, 6, 7], [0, 1, 2])
    matches = store.matching_blocks([5, 6, 7, 8])
    assert next(matches) == (0, (5,))
    store.evict(0)
    store.add_sequence([9, 6], [0, 1])  # the same blocks, of another text
    assert list(matches) == []


def test_a_cache_is_not_saved_or_cleared_during_a_run(loaded, tmp_path):
    cache = PromptCache(loaded("llama"))
    steps = generation.generate_steps(compile_model(loaded("llama")), [TOKENS[:9]], [0], prompt_cache=cache)
    next(steps)
    for use in (cache.clear, lambda: cache.save(tmp_path / "cache")):
        with pytest.raises(generation.GenerationError, match="a generation that is not over"):
            use()
    with ThreadPoolExecutor(1) as thread:  # a generator that is dropped half way ends its run, in any thread
        thread.submit(steps.close).result()
    cache.save(tmp_path / "cache")
    assert PromptCache.load(tmp_path / "cache", loaded("llama")).tokens == cache.tokens > 0


def test_a_closed_session_leaves_the_cache_to_the_next(loaded):
    gen, cache = compile_model(loaded("llama")), PromptCache(loaded("llama"))
    begin = {"kv_cache": cache.kv_cache, "prompts": [TOKENS[:5]]}
    first = gen.decoder.begin_session([9], **begin)
    first.close()
    second = gen.decoder.begin_session([9], **begin)
    first.close()
    with pytest.raises(CacheError, match="one session at a time"):
        gen.decoder.begin_session([9], **begin)
    second.close()
    assert not cache.kv_cache.in_use


@pytest.mark.usefixtures("compiling")
def test_a_thread_frees_what_it_traced_for_a_function_that_ended_in_another():
    """MLX keeps what a thread traced, weights with it, until that thread destroys the compiled function."""
    one, size = mx.array(1.0), 1 << 22
    add_one = CompiledFunction(lambda x: x + 1)
    with ThreadPoolExecutor(1) as thread:
        before = mx.get_active_memory()
        weights = mx.ones(size // 4)
        mx.eval(one, weights)
        add_weights = CompiledFunction(lambda x, weights=weights: x + weights)
        thread.submit(lambda function: mx.eval(function(one)), add_weights).result()
        thread.submit(int).result()  # so that the thread refers to the function before no more
        assert mx.get_active_memory() - before >= size
        del add_weights, weights  # in this thread
        gc.collect()
        thread.submit(lambda function: mx.eval(function(one)), add_one).result()
        assert mx.get_active_memory() - before < size


def test_a_closed_gate_waits_for_who_is_inside_and_ends_who_comes_later():
    gate, entered, leave = ExitGate(), threading.Event(), threading.Event()
    ends: list[str] = []

    def enter(name: str) -> None:
        try:
            with gate:
                entered.set()
                leave.wait()
            ends.append(f"{name} goes on")
        except SystemExit:
            ends.append(f"{name} ends")

    inside = threading.Thread(target=enter, args=["inside"])
    inside.start()
    entered.wait()
    gate.close(max_wait=0.01)
    assert not ends
    threading.Timer(0.02, leave.set).start()
    gate.close()
    inside.join()
    later = threading.Thread(target=enter, args=["later"])
    later.start()
    later.join()
    with gate:  # the thread that closed it may go in
        assert not gate.is_closed
    assert ends == ["inside ends", "later ends"]


def test_a_closed_gate_ends_a_run_at_its_next_token_or_chunk_and_stores_nothing_outside(loaded, monkeypatch):
    gate = ExitGate()
    for module in (loop, batch):
        monkeypatch.setattr(module, "exit_gate", gate)
    monkeypatch.setattr(RowGroup, "store_prefixes", lambda group: stored.append(gate._inside))
    for options in ({}, {"prefill_step_size": 1}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        stored: list[int] = []
        gen, calls = compile_model(loaded("llama"), max_new_tokens=50, **options), []
        step = CacheSession.step

        def closing_step(session, *args, step=step, calls=calls, **more):
            calls.append(1)
            if len(calls) == 2:
                gate._closed_by = 0  # of no thread
            return step(session, *args, **more)

        monkeypatch.setattr(CacheSession, "step", closing_step)
        with pytest.raises(SystemExit):
            generation.generate(gen, [TOKENS[:9]], [0])
        monkeypatch.setattr(CacheSession, "step", step)
        assert len(calls) == 2, options
        assert all(stored)
        gate._closed_by = None


GENERATE_AND_EXIT = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import mlx.core as mx
mx.set_default_device(mx.cpu)
import mlx_transmuter as mt
from mlx_transmuter import generation

model, kind = mt.load(sys.argv[1]), sys.argv[2]
options = {"eos_token_id": None, "do_sample": False, "max_new_tokens": 3}
gen = generation.compile(generation.context(model, **options), 1)
done = threading.Event()

def generate():
    generation.generate(gen, [[5, 6, 7]], [0])
    done.set()

def generate_and_sleep():
    generate()
    time.sleep(100)

if kind == "thread":
    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
elif kind == "pool":
    pool = ThreadPoolExecutor(1)
    pool.submit(generate).result()
elif kind == "daemon":
    threading.Thread(target=generate_and_sleep, daemon=True).start()
    done.wait()
else:
    def on_token(step):
        done.set()
        if kind == "daemon with a callback":
            time.sleep(0.0005)

    def generate_forever():
        while True:
            generation.generate(gen, [[5, 6, 7]], [0], on_token=on_token)

    for _ in range(2):
        threading.Thread(target=generate_forever, daemon=True).start()
    done.wait()
    time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        ("thread", 5),
        ("pool", 3),
        ("daemon", 2),
        ("daemon that generates", 3),
        ("daemon with a callback", 3),
    ],
)
def test_a_process_exits_right_after_a_thread_that_generated(kind, runs, folder):
    """With compiled steps, whose traces MLX frees at the thread's end."""
    for _ in range(runs):
        result = subprocess.run([sys.executable, "-c", GENERATE_AND_EXIT, str(folder), kind], capture_output=True)
        assert (result.returncode, result.stderr.decode()) == (0, "")
