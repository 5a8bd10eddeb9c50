"""Values of the settings that tests draw from."""

from __future__ import annotations

from hypothesis import strategies as st

# The size of the fake decoder's vocabulary.
VOCAB = 16

TOKEN = st.integers(0, VOCAB - 1)
SMALL_TOKEN = st.integers(0, 3)
WORDS = st.lists(st.lists(SMALL_TOKEN, min_size=1, max_size=3), min_size=1, max_size=4, unique_by=tuple)
EOS = st.one_of(TOKEN, st.lists(TOKEN, min_size=1, max_size=3, unique=True))

# Of the processors, for runs of plain and of speculative decoding over the fake decoder.
PROCESSOR_SETTINGS = {
    "repetition_penalty": st.sampled_from([0.5, 1.3]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_no_repeat_ngram_size": st.integers(1, 3),
    "encoder_repetition_penalty": st.sampled_from([0.6, 2.0]),
    "bad_words_ids": st.just([[3], [4, 5], [6, 7, 8], [5, 5]]),
    "sequence_bias": st.just([[[9], 2.5], [[9, 9], -6.0], [[3, 4], 5.0]]),
    "min_length": st.integers(1, 9),
    "min_new_tokens": st.integers(1, 9),
    "forced_bos_token_id": st.just(7),
    "forced_eos_token_id": st.sampled_from([1, 9]),
    "begin_suppress_tokens": st.just([3, 5, 7, 9, 11]),
}

# Of each processor, values that reach its edges on prompts of a few tokens.
EDGE_PROCESSOR_SETTINGS = {
    "sequence_bias": st.lists(
        st.tuples(st.lists(SMALL_TOKEN, min_size=1, max_size=3), st.floats(-9, 9, width=32)).map(list),
        min_size=1,
        max_size=4,
        unique_by=lambda pair: tuple(pair[0]),
    ),
    "encoder_repetition_penalty": st.floats(0.5, 3, width=32),
    "repetition_penalty": st.floats(0.25, 3, width=32),
    "no_repeat_ngram_size": st.integers(1, 4),
    "encoder_no_repeat_ngram_size": st.integers(1, 4),
    "bad_words_ids": WORDS,
    "min_length": st.integers(0, 9),
    "min_new_tokens": st.integers(0, 6),
    "forced_bos_token_id": TOKEN,
    "forced_eos_token_id": EOS,
    "remove_invalid_values": st.just(True),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 4), st.floats(1.0, 1.75, width=32)),
    "suppress_tokens": st.lists(st.integers(-1, VOCAB + 3), max_size=4),
    "begin_suppress_tokens": st.lists(st.integers(-1, VOCAB + 3), max_size=4),
    "renormalize_logits": st.just(True),
}

# Of sampling, values at its edges.
EDGE_SAMPLING_SETTINGS = {
    "temperature": st.floats(0.25, 3, width=32),
    "top_k": st.integers(0, VOCAB + 2),
    "top_p": st.one_of(st.just(0.0), st.floats(0.125, 0.9375, width=32)),
    "min_p": st.floats(0, 1, width=32),
    "typical_p": st.floats(0.125, 0.9375, width=32),
    "epsilon_cutoff": st.floats(0, 0.25, width=32),
    "eta_cutoff": st.floats(0, 0.25, width=32),
}

# For the comparison of speculative and plain decoding on converted models.
MODEL_PROCESSOR_SETTINGS = {
    "repetition_penalty": st.sampled_from([0.8, 1.2]),
    "no_repeat_ngram_size": st.integers(2, 4),
    "min_new_tokens": st.integers(1, 9),
    "bad_words_ids": st.just([[70], [80, 81]]),
    "forced_eos_token_id": st.just(5),
    "suppress_tokens": st.just([71, 72]),
}
MODEL_SAMPLING_SETTINGS = {
    "temperature": st.sampled_from([0.05, 0.6]),
    "top_k": st.sampled_from([0, 4]),
    "top_p": st.just(0.9),
}

# For the comparison with transformers: lists to choose from.
TRANSFORMERS_PROCESSOR_SETTINGS = {
    "repetition_penalty": [1.3, 0.7, 5.0],
    "no_repeat_ngram_size": [1, 2, 3],
    "bad_words_ids": [[[3], [4]], [[5, 6], [7], [1], [1, 2, 3], [8, 8]]],
    "min_length": [6, 10],
    "min_new_tokens": [3, 9],
    "forced_bos_token_id": [5],
    "forced_eos_token_id": [1, 7],
    "suppress_tokens": [[4, 5, 6]],
    "begin_suppress_tokens": [[0, 3, 4, 1]],
    "renormalize_logits": [True],
    "encoder_repetition_penalty": [2.0, 0.5],
    "encoder_no_repeat_ngram_size": [1, 2],
    "sequence_bias": [[[[3], 5.0], [[4, 5], 9.0], [[9, 5], 4.0]], [[[7], -3.0]]],
    "exponential_decay_length_penalty": [(2, 1.5), (0, 1.1)],
    "remove_invalid_values": [True],
}
# With these, scores are infinite or all removed, and transformers takes a token of a NaN or of a tie.
REMOVING_SETTINGS = {
    "min_length",
    "min_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "remove_invalid_values",
}
TRANSFORMERS_SAMPLING_SETTINGS = {
    "temperature": [0.5, 1.7],
    "top_k": [1, 3, 8],
    "top_p": [0.0, 0.3, 0.9],
    "min_p": [0.05, 0.3],
    "typical_p": [0.2, 0.9],
    "epsilon_cutoff": [0.01, 0.1],
    "eta_cutoff": [0.01, 0.2],
    "repetition_penalty": [1.5],
    "renormalize_logits": [True],
}
