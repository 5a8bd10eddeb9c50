"""What a run does with a GPU's memory, told by a stand-in for MLX on Metal."""

import mlx.core as mx
import pytest

from mlx_transmuter import generation
from mlx_transmuter.runtime import wired_memory


@pytest.fixture
def metal(monkeypatch):
    """MLX says that it is on a Mac whose GPU is recommended to work in 1,000 bytes; the list has the limits that it is
    given and what it waits for."""
    calls, limit = [], [7]

    def set_wired_limit(value):
        before, limit[0] = limit[0], value
        calls.append(value)
        return before

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append("clear_cache"))
    return calls


def test_runs_at_the_same_time_share_one_limit(metal):
    with wired_memory.wired_memory():
        with wired_memory.wired_memory():
            assert metal == [1000]
        assert metal == [1000]
    assert metal == [1000, "synchronize", 7]


def test_a_run_wires_memory_and_releases_buffers_after_its_prompt_and_at_its_end(metal, loaded):
    model = loaded("llama")
    metal.clear()
    gen = generation.compile(generation.context(model, max_new_tokens=3, do_sample=False, eos_token_id=[]), 1)
    steps = generation.generate_steps(gen, [[5, 6, 7]], [0])
    next(steps)
    assert metal[0] == 1000
    assert metal.count("clear_cache") == 1
    steps.close()
    assert metal.count("clear_cache") == 2
    assert metal[-1] == 7


def test_nothing_is_set_on_the_cpu(metal, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    with wired_memory.wired_memory():
        wired_memory.release_buffers()
        wired_memory.notice_large_model(10**12)
    assert metal == []


@pytest.mark.parametrize(("size", "is_large"), [(900, False), (901, True)])
def test_a_model_of_nearly_the_recommended_memory_gets_a_notice(size, is_large, metal, capsys):
    wired_memory.notice_large_model(size)
    assert ("recommends for its GPU" in capsys.readouterr().err) == is_large


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"sequence_bias": [[[5, 6], 1.0]]},
    ],
    ids=str,
)
def test_every_write_into_pools_comes_after_a_wait_for_what_reads_them(settings, metal, loaded, monkeypatch):
    """Else MLX copies the pools: a GPU holds what a step read until its completion was handled."""
    model = loaded("llama")
    events = []
    for name in ("eval", "async_eval"):
        evaluate = getattr(mx, name)

        def record(*arrays, evaluate=evaluate):
            sizes = [array.shape for array in arrays if isinstance(array, mx.array)]
            if any(len(shape) == 2 and shape[0] > 64 for shape in sizes):  # a pool, of many rows of a head's width
                events.append(metal[-1] if metal else None)
            metal.append("evaluation")
            return evaluate(*arrays)

        monkeypatch.setattr(mx, name, record)
    ctx = generation.context(model, max_new_tokens=8, do_sample=False, eos_token_id=[], **settings)
    generation.generate(generation.compile(ctx, 1), [[5, 6, 7, 5, 6, 7]], [0])
    assert len(events) >= 4
    assert set(events) == {"synchronize"}
