"""Counts of n-grams, on the host."""

import numpy as np

from mlx_transmuter.ops.registry import HostArray, OperatorError, op


@op("TfIdfVectorizer-9")
def tf_idf_vectorizer(
    x: HostArray,
    *,
    max_gram_length,
    max_skip_count,
    min_gram_length,
    mode,
    ngram_counts,
    ngram_indexes,
    pool_int64s=None,
    pool_strings=None,
    weights=None,
):
    """How often each n-gram of the pool occurs in each row of x [..., length], weighted: [..., classes] on the host.

    The pool holds the 1-grams, then the 2-grams, and so on from the places ngram_counts; elements of an n-gram may lie
    up to max_skip_count apart. ONNX TfIdfVectorizer-9.
    """
    if mode not in ("TF", "IDF", "TFIDF"):
        raise OperatorError(f"the mode {mode!r}", "TF, IDF or TFIDF")
    pool = pool_int64s or pool_strings or []
    classes: dict[tuple, int] = {}
    for i, start in enumerate(ngram_counts):
        size, end = i + 1, ngram_counts[i + 1] if i + 1 < len(ngram_counts) else len(pool)
        for place in range(start, end, size):
            gram = tuple(pool[place : place + size])
            # ngram_indexes numbers the n-grams of every size, in the order of the pool.
            classes[gram] = len(classes)
    counts = np.zeros((*x.shape[:-1], max(ngram_indexes) + 1), np.float32)
    for row in np.ndindex(x.shape[:-1]):
        items = x[row].tolist()
        for size in range(min_gram_length, max_gram_length + 1):
            # A single element has no gaps, so that it counts once.
            for step in range(1, 2 if size == 1 else max_skip_count + 2):
                for start in range(len(items) - (size - 1) * step):
                    pool_index = classes.get(tuple(items[start : start + (size - 1) * step + 1 : step]))
                    if pool_index is not None:
                        counts[(*row, ngram_indexes[pool_index])] += 1
    if mode == "TF":
        return counts
    # As ONNX has it, the weights go by the n-gram's class, and there are as many.
    scale = np.ones(counts.shape[-1], np.float32) if weights is None else np.array(weights, np.float32)
    return (counts if mode == "TFIDF" else (counts > 0).astype(np.float32)) * scale
